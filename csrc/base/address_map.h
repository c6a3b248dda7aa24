/* SPDX-License-Identifier: Apache-2.0 */
/* A map from addresses to values, for allocators that others call: their free() gets an
 * address and nothing else. It is called from any thread, with or without the GIL. A
 * map of zeros is empty. Most addresses that are asked for are not in the map, so an
 * address outside all that were ever put is answered by two loads, without the lock.
 * Locks: its own, for a few probes; while the map grows, for one pass over it. Memory
 * is allocated without it. Whoever may fork while another thread is in here takes
 * `lock` before the fork and gives it back afterwards, in parent and child. */
#pragma once

#include "base/thread.h"

typedef struct cm_address_entry {
    uint64_t address; /* 0: the place is free */
    void *value;
} cm_address_entry;

/* Open addressing: an entry lies at the place that its hash names, or after it with no
 * free place between. count <= room / 2; room is 0 or a power of two. */
typedef struct cm_address_map {
    cm_spin_lock lock;
    _Atomic uint64_t low; /* the least and the greatest address that were ever put */
    _Atomic uint64_t high;
    cm_address_entry *entries; /* owned */
    uint64_t room;
    uint64_t count;
} cm_address_map;

/* Give `address`, which is not 0 and not in the map, the value `value`, which is not
 * NULL. False: there is no memory. */
CM_NODISCARD bool cm_address_map_put(cm_address_map *map, uint64_t address,
                                     void *value);
/* The value of `address`; NULL: it has none. With `takes` the address is removed from
 * the map. */
void *cm_address_map_find(cm_address_map *map, uint64_t address, bool takes);
/* Free the memory of the map, which is empty again. The values are left alone. */
void cm_address_map_fini(cm_address_map *map);
