/* SPDX-License-Identifier: Apache-2.0 */
/* The host's mappings under the emulated memory: mappings between guard pages, memory
 * that can be made untouchable, and bytes that can be mapped at more than one place.
 * This file knows nothing of ranges and holds no state. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cm_emulated_pages {
    unsigned char *base; /* where the mapping begins; NULL: there is none */
    size_t nbytes;       /* length of the mapping */
    /* Where the inside begins: aligned to 256 bytes, and up to a guard page. */
    unsigned char *start;
} cm_emulated_pages;

/* Map room for `nbytes` between two guard pages. With `sharing` 0 it is untouchable;
 * else it is readable, writable and not zero, and a forked child has its own bytes
 * (MAP_PRIVATE) or the very same (MAP_SHARED). False: there is no memory, but *out may
 * hold addresses that have to be unmapped. */
bool cm_emulated_pages_map(uint64_t nbytes, int sharing, cm_emulated_pages *out);
/* Drop the bytes, if there are any. The addresses stay taken, and touching them
 * crashes. */
void cm_emulated_pages_kill(void *start, uint64_t nbytes);
/* True when every page of [start, end) is mapped and readable and, with `writable`,
 * writable too. */
bool cm_emulated_pages_are_mapped(uint64_t start, uint64_t end, bool writable);

/* Make bytes that can be mapped at other places: whole pages, not zero. NULL: there is
 * no memory. */
unsigned char *cm_emulated_bytes_new(uint64_t nbytes);
/* Map such bytes at `at`, a part of a mapping of ours, where nobody may touch them
 * yet. */
bool cm_emulated_bytes_map(unsigned char *bytes, uint64_t nbytes, unsigned char *at);
