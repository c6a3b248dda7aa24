/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the mappings of the host that emulated memory consists of. They lie between
 * guard pages, can be made untouchable, and their bytes can be mapped at several
 * places. This file knows nothing of ranges and holds no state. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cm_emulated_pages {
    unsigned char *base; /* where the mapping begins, or NULL if there is none */
    size_t nbytes;       /* length of the mapping */
    /* Where the usable part begins, aligned to 256 bytes. It ends at a guard page. */
    unsigned char *start;
} cm_emulated_pages;

/* Map room for `nbytes` between two guard pages. With `sharing` 0 nobody can touch it.
 * Otherwise it can be read and written, is not zero, and a forked child has its own
 * bytes (MAP_PRIVATE) or the same ones (MAP_SHARED). Returns false if there is no
 * memory; even then *out may hold addresses that have to be unmapped. */
bool cm_emulated_pages_map(uint64_t nbytes, int sharing, cm_emulated_pages *out);
/* Give back the bytes, if there are any. The addresses stay taken, and touching them
 * crashes. */
void cm_emulated_pages_kill(void *start, uint64_t nbytes);
/* True if every page of [start, end) is mapped and can be read and, with `writable`,
 * written. */
bool cm_emulated_pages_are_mapped(uint64_t start, uint64_t end, bool writable);

/* Make whole pages of bytes that are not zero, which can be mapped at other places.
 * Returns NULL if there is no memory. */
unsigned char *cm_emulated_bytes_new(uint64_t nbytes);
/* Map bytes that cm_emulated_bytes_new() made once more, at `at`, in place of a part of
 * a mapping that cm_emulated_pages_map() made. There they can be neither read nor
 * written, until the caller allows it. Returns false if the system refuses. */
bool cm_emulated_bytes_map(unsigned char *bytes, uint64_t nbytes, unsigned char *at);
