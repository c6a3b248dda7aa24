/* SPDX-License-Identifier: Apache-2.0 */
/* The registry's insides, shared by its two files: registry.c (who shares which pieces)
 * and registry_piece.c (the runtime calls that lock one piece). Nobody else includes
 * this. */
#ifndef CM_POOL_REGISTRY_PRIVATE_H
#define CM_POOL_REGISTRY_PRIVATE_H

#include <stdatomic.h>

#include "base/thread.h"
#include "pool/registry.h"

/* Invariants, under the lock: pieces are sorted, do not overlap, and begin and end at
 * pages; share_count is the number of cm_page_shares that hold it. A busy piece is
 * being (un)registered by one thread, which alone may change it. A piece with
 * share_count 0 that is not busy is one whose unregistering failed: still locked, and
 * tried again by whoever meets it. */
typedef struct cm_page_piece {
    uintptr_t base;
    uintptr_t end;
    uint64_t share_count;
    int device; /* whose context registered it */
    bool busy;
    bool foreign;   /* locked by somebody else: never unregistered by us */
    bool read_only; /* while busy: may be; else: devices may not write there */
} cm_page_piece;

struct cm_registry {
    atomic_uint refs; /* the opener, each registration, each set of shares */
    cm_runtime *rt;   /* borrowed */
    uintptr_t page_nbytes;
    cm_mutex lock;
    cm_cond settled;        /* a piece is no longer busy, or gone */
    cm_page_piece **pieces; /* owned, as what they point to */
    size_t room;
    _Atomic uint64_t arrivals; /* pieces that ever came; first of all that is done */
    _Atomic size_t count; /* of pieces; read without the lock to see that there are none
                           */
    atomic_bool closed;
};

/* Page-lock a busy piece, without the lock. It may end up shorter or foreign: where
 * part of it is locked by somebody else already, it covers the first run of pages that
 * are alike.
 * Fails: host_register, pointer_attributes. */
CM_NODISCARD cm_status cm_piece_lock(cm_registry *registry, cm_page_piece *p);

/* Undo that, without the lock. Fails: host_unregister. */
CM_NODISCARD cm_status cm_piece_unlock(const cm_registry *registry,
                                       const cm_page_piece *p);

#endif
