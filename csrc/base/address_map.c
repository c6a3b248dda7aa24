/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the hash table of address_map.h. It probes linearly, and removes entries
 * without leaving tombstones. */
#include "base/address_map.h"

#include <stdlib.h>

/* Return the place that the hash of an address names. The hash is the upper bits of the
 * product of the address with 2^64 divided by the golden ratio. The lower bits of the
 * product would not do. Addresses are multiples of powers of two, so their lower bits
 * are 0, and those of the product are then 0 as well. */
static uint64_t
home_of(const cm_address_map *map, uint64_t address)
{
    return ((address * UINT64_C(0x9E3779B97F4A7C15)) >> 32) & (map->room - 1);
}

/* Return the place where an address is, or where it would be put. There is always a
 * free place. */
static cm_address_entry *
search_locked(const cm_address_map *map, uint64_t address)
{
    uint64_t i = home_of(map, address);
    while (map->entries[i].address != 0 && map->entries[i].address != address) {
        i = (i + 1) & (map->room - 1);
    }
    return &map->entries[i];
}

/* Double the room. Memory is allocated without the lock, so another thread may have
 * grown the map meanwhile. Returns false if there is no memory. */
static bool
grow_locked(cm_address_map *map)
{
    enum { LEAST = 64 };
    cm_address_map larger = {.room = map->room == 0 ? LEAST : map->room * 2};
    cm_spin_lock_give(&map->lock);
    cm_address_entry *unused = calloc(larger.room, sizeof(*unused));
    cm_spin_lock_take(&map->lock);
    bool done = unused != NULL;
    if (done && map->room < larger.room) {
        larger.entries = unused;
        for (uint64_t i = 0; i < map->room; i++) {
            if (map->entries[i].address != 0) {
                *search_locked(&larger, map->entries[i].address) = map->entries[i];
            }
        }
        unused = map->entries;
        map->entries = larger.entries;
        map->room = larger.room;
    }
    cm_spin_lock_give(&map->lock);
    free(unused);
    cm_spin_lock_take(&map->lock);
    return done;
}

bool
cm_address_map_put(cm_address_map *map, uint64_t address, void *value)
{
    bool has_room = true;
    cm_spin_lock_take(&map->lock);
    while (has_room && map->count >= map->room / 2) {
        has_room = grow_locked(map);
    }
    if (has_room) {
        *search_locked(map, address) = (cm_address_entry){address, value};
        map->count++;
        /* The lower bound is set first. Other threads read the bounds without the lock,
         * and while the upper bound is still 0 they take every address to be
         * outside. */
        if (map->high == 0 || address < map->low) {
            map->low = address;
        }
        if (address > map->high) {
            map->high = address;
        }
    }
    cm_spin_lock_give(&map->lock);
    return has_room;
}

/* Remove an entry. A search ends at the first free place, so the hole that this leaves
 * would hide entries behind it. Each entry behind the hole whose hash names the place
 * of the hole, or a place before it, therefore moves into the hole. The place that the
 * entry had is then the hole. */
static void
remove_locked(cm_address_map *map, cm_address_entry *entry)
{
    uint64_t mask = map->room - 1;
    uint64_t hole = (uint64_t)(entry - map->entries);
    for (uint64_t i = (hole + 1) & mask; map->entries[i].address != 0;
         i = (i + 1) & mask) {
        uint64_t home = home_of(map, map->entries[i].address);
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            map->entries[hole] = map->entries[i];
            hole = i;
        }
    }
    map->entries[hole] = (cm_address_entry){0, NULL};
    map->count--;
}

void *
cm_address_map_find(cm_address_map *map, uint64_t address, bool takes)
{
    /* Relaxed loads are enough. A thread that asks for an address in the map got the
     * address from the thread that put it there, and that thread had already set both
     * bounds when it passed the address on. */
    if (address < atomic_load_explicit(&map->low, memory_order_relaxed)
        || address > atomic_load_explicit(&map->high, memory_order_relaxed)
        || address == 0) {
        return NULL;
    }
    cm_spin_lock_take(&map->lock);
    cm_address_entry *entry = map->room == 0 ? NULL : search_locked(map, address);
    void *value = entry == NULL ? NULL : entry->value;
    if (takes && value != NULL) {
        remove_locked(map, entry);
    }
    cm_spin_lock_give(&map->lock);
    return value;
}

void
cm_address_map_fini(cm_address_map *map)
{
    free(map->entries);
    *map = (cm_address_map){.entries = NULL};
}
