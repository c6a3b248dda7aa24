/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out where the process has a file mapped into memory.
 *
 * A map is found by the file that it shows, not by the object that made it. Many sorts
 * of objects map a file: numpy.memmap, mmap.mmap, a tensor of torch.from_file(), shared
 * memory and registered memory. Such an object may have opened the file by any of the
 * file's names. The kernel's list of mappings, /proc/self/maps, names the device and
 * inode behind each. On overlay file systems these are not the numbers that stat()
 * gives. So the file is mapped once more. The list then has the file's own numbers in
 * the line of this mapping, and is searched for other lines with the same numbers.
 *
 * Example: before a file is written from memory, cm_file_maps_read() lists its mappings
 * that lie in the memory, and cm_file_maps_show() tells whether the memory shows bytes
 * that the call is about to overwrite.
 *
 * If there is no /proc, or the file cannot be opened for reading, no map is found. No
 * locks. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* The bytes from `begin` up to, but not including, `end`. Both are addresses, or both
 * are offsets in a file. */
typedef struct cm_file_span {
    uint64_t begin;
    uint64_t end;
} cm_file_span;

/* One mapping of the file. */
typedef struct cm_file_map {
    cm_file_span memory;
    uint64_t offset; /* where its first byte lies in the file */
} cm_file_map;

typedef struct cm_file_maps {
    cm_file_map *items; /* owned */
    size_t count;
} cm_file_maps;

/* List the mappings of the file that `fd` is open for, at least those that lie in one
 * of the `count` spans of `memory`. If `fd` is not a regular file, or the file is
 * empty, the list is empty.
 * Blocks: for about a microsecond for each mapping of the process, since the list is
 *         read as text. From Linux 6.11 on, with few spans, the kernel is asked about
 *         these alone (PROCMAP_QUERY), which takes some microseconds in all.
 * Fails:  CM_ENOMEM. */
CM_NODISCARD cm_status cm_file_maps_read(int fd, const cm_file_span *memory,
                                         size_t count, cm_file_maps *out);
/* List all mappings of the file by reading the text. cm_file_maps_read() does this if
 * the kernel answers no questions. */
CM_NODISCARD cm_status cm_file_maps_read_text(int fd, cm_file_maps *out);
void cm_file_maps_fini(cm_file_maps *maps);

/* Set *out to whether two spans of memory show the same byte of a file, each by its own
 * mapping. Writing to one then changes the other, which a comparison of addresses
 * cannot tell.
 * Blocks: as cm_file_maps_read().
 * Fails:  CM_ENOMEM. */
CM_NODISCARD cm_status cm_file_maps_meet(cm_file_span a, cm_file_span b, bool *out);

/* True if the span `memory` shows any byte of `file`, a span of the file. */
bool cm_file_maps_show(const cm_file_maps *maps, cm_file_span memory,
                       cm_file_span file);
