/* SPDX-License-Identifier: Apache-2.0 */
/* The mappings under the emulated memory: guarded, killable, and a store of bytes that
 * can be mapped at more than one place. Private to the emulated memory; knows nothing
 * of
 * ranges. Locks: none; what changes a store is called with memory->lock held. */
#ifndef CM_RUNTIME_EMULATED_PAGES_H
#define CM_RUNTIME_EMULATED_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cm_emulated_pages {
    unsigned char *base;  /* of the mapping; NULL: none */
    size_t nbytes;        /* of the mapping */
    unsigned char *start; /* of what is inside, aligned to 256 bytes, ending at a guard
                           */
} cm_emulated_pages;

size_t cm_emulated_page_nbytes(void);
/* Map room for `nbytes` between two guard pages, readable and writable if `usable`. */
bool cm_emulated_pages_map(uint64_t nbytes, bool usable, cm_emulated_pages *out);
/* Let a forked child have the very same bytes; they are fresh afterwards. False: no
 * memory. */
bool cm_emulated_pages_share(const cm_emulated_pages *pages);
/* Leave a part of a mapping out of forked children. */
void cm_emulated_pages_leave_out(void *start, uint64_t nbytes);
/* Drop the bytes; the addresses stay taken and crash whoever touches them. */
void cm_emulated_pages_kill(const cm_emulated_pages *pages);
void cm_emulated_pages_unmap(const cm_emulated_pages *pages);
/* True when every page of [start, end) is mapped, readable and, with `writable`, so. */
bool cm_emulated_pages_are_mapped(uint64_t start, uint64_t end, bool writable);

/* Bytes that live apart from any address: a file in memory. What was dropped is kept
 * for the next of its size up to a bound, since making and freeing pages costs far more
 * than writing over them. */
enum { CM_EMULATED_SPARES = 64 };

typedef struct cm_emulated_spare {
    uint64_t offset;
    uint64_t nbytes;
} cm_emulated_spare;

typedef struct cm_emulated_store {
    int fd;       /* owned; -1: none yet */
    uint64_t end; /* everything below was handed out once */
    cm_emulated_spare spares[CM_EMULATED_SPARES];
    uint32_t spare_count;
    uint64_t spare_nbytes;
} cm_emulated_store;

/* Room for `nbytes` (whole pages) at *offset. False when out of memory. */
bool cm_emulated_store_grow(cm_emulated_store *store, uint64_t nbytes,
                            uint64_t *offset);
bool cm_emulated_store_poison(const cm_emulated_store *store, uint64_t offset,
                              uint64_t nbytes);
/* Forget the bytes, which nothing maps any more. */
void cm_emulated_store_drop(cm_emulated_store *store, uint64_t offset, uint64_t nbytes);
void cm_emulated_store_close(cm_emulated_store *store);
/* Put the bytes at `at`, a part of a mapping of ours; untouchable until shown. */
bool cm_emulated_store_map(const cm_emulated_store *store, uint64_t offset,
                           uint64_t nbytes, unsigned char *at);
bool cm_emulated_store_show(unsigned char *at, uint64_t nbytes);
void cm_emulated_store_unmap(unsigned char *at, uint64_t nbytes);

#endif
