/* SPDX-License-Identifier: Apache-2.0 */
/* Maps addresses to values. Allocators that other libraries call need it, since their
 * free() gets an address and nothing else. Any thread may use a map, with or without
 * the GIL. A map whose bytes are all zero is empty. Most addresses that callers look
 * for are not in the map. So the map keeps the least and the greatest address that was
 * ever put, and for an address outside these two a search takes two loads and no lock.
 * Locks: its own, which is held for a few probes or, when the map grows, for one pass
 *        over it. Memory is allocated without the lock. A caller that may fork while
 *        another thread uses the map takes `lock` before the fork, and gives it back
 *        afterwards in both parent and child. */
#pragma once

#include "base/thread.h"

typedef struct cm_address_entry {
    uint64_t address; /* 0 if the entry is free */
    void *value;
} cm_address_entry;

/* The map uses open addressing: an entry lies at the place that its hash names, or at
 * the next free place after it. Invariants: count <= room / 2, and room is 0 or a power
 * of two. */
typedef struct cm_address_map {
    cm_spin_lock lock;
    _Atomic uint64_t low; /* the least address that was ever put into the map, and in
                             `high` the greatest */
    _Atomic uint64_t high;
    cm_address_entry *entries; /* owned */
    uint64_t room;             /* entries that `entries` has room for */
    uint64_t count;            /* entries that are not free */
} cm_address_map;

/* Put `address` into the map with `value`. The address is neither 0 nor in the map, and
 * the value is not NULL. Returns false if there is no memory. */
CM_NODISCARD bool cm_address_map_put(cm_address_map *map, uint64_t address,
                                     void *value);
/* Return the value of `address`, or NULL if the address is not in the map. With `takes`
 * the address is removed from the map. */
void *cm_address_map_find(cm_address_map *map, uint64_t address, bool takes);
/* Free the memory of the map, which is empty afterwards. The values are left alone. */
void cm_address_map_fini(cm_address_map *map);
