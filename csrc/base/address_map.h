/* SPDX-License-Identifier: Apache-2.0 */
/* What is known of an address: for allocators that others call, whose free() gets an
 * address and no more. From any thread, with or without the GIL. A map of zeros is
 * empty. Most addresses asked for are nobody's: one outside all that were ever put is
 * told by two loads, without the lock.
 * Locks: its own, for a few probes; while the map grows, for one pass over it. Memory is
 * asked for without it. Who may fork while another thread is in here takes `lock`
 * before a fork and gives it after, in parent and child. */
#pragma once

#include "base/thread.h"

typedef struct cm_address_entry {
    uint64_t address; /* 0: a free place */
    void *value;
} cm_address_entry;

/* Open addressing: an entry lies at the place of its hash or, with no free place
 * between, after it. count <= room / 2; room is 0 or a power of two. */
typedef struct cm_address_map {
    cm_spin_lock lock;
    _Atomic uint64_t low; /* of all that were ever put: the least and the greatest */
    _Atomic uint64_t high;
    cm_address_entry *entries; /* owned */
    uint64_t room;
    uint64_t count;
} cm_address_map;

/* `address`, not 0 and not in it, gets `value`, not NULL. False: there is no memory. */
CM_NODISCARD bool cm_address_map_put(cm_address_map *map, uint64_t address,
                                     void *value);
/* Its value, NULL: it has none; `takes`: it has none from now on. */
void *cm_address_map_find(cm_address_map *map, uint64_t address, bool takes);
/* Its memory; the values are left alone, and it is empty again. */
void cm_address_map_fini(cm_address_map *map);
