/* SPDX-License-Identifier: Apache-2.0 */
/* The mappings of the host under the emulated memory: guarded, killable, and bytes that
 * can be mapped at more than one place. Knows nothing of ranges; holds no state. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cm_emulated_pages {
    unsigned char *base;  /* of the mapping; NULL: none */
    size_t nbytes;        /* of the mapping */
    unsigned char *start; /* of what is inside, aligned to 256 bytes, up to a guard */
} cm_emulated_pages;

/* Map room for `nbytes` between two guard pages: untouchable where `sharing` is 0, else
 * readable, writable and not zero, a forked child's own (MAP_PRIVATE) or the very same
 * bytes (MAP_SHARED). False: no memory, but maybe addresses, in *out. */
bool cm_emulated_pages_map(uint64_t nbytes, int sharing, cm_emulated_pages *out);
/* Drop the bytes, if any; the addresses stay taken and touching them crashes. */
void cm_emulated_pages_kill(void *start, uint64_t nbytes);
/* True when every page of [start, end) is mapped, readable and, with `writable`, so. */
bool cm_emulated_pages_are_mapped(uint64_t start, uint64_t end, bool writable);

/* Bytes that can be mapped at other places: whole pages, not 0. NULL: no memory. */
unsigned char *cm_emulated_bytes_new(uint64_t nbytes);
/* Put them at `at`, a part of a mapping of ours, where nobody may touch them. */
bool cm_emulated_bytes_map(unsigned char *bytes, uint64_t nbytes, unsigned char *at);
