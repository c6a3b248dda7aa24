/* SPDX-License-Identifier: Apache-2.0 */
/* A table finds objects by numbers. It is a sorted array, and has no locks of its own.
 * The numbers are handles, as callers know them, or the ends of stretches of memory. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct cm_emulated_entry {
    uint64_t key;
    void *object; /* borrowed */
} cm_emulated_entry;

typedef struct cm_emulated_table {
    cm_emulated_entry *entries; /* owned; sorted by key */
    uint32_t count;
    uint32_t room; /* entries that `entries` has room for */
} cm_emulated_table;

/* Make an object of `nbytes` zeros and put it into the table under a new key. Returns
 * NULL if there is no memory. */
void *cm_emulated_table_new(cm_emulated_table *table, uint64_t key, size_t nbytes);
/* Add an object under a new key. Returns false if there is no memory. */
bool cm_emulated_table_add(cm_emulated_table *table, uint64_t key, void *object);
/* Return the object under a key, or NULL if there is none, as for a handle that is
 * stale or was never given. */
void *cm_emulated_table_find(const cm_emulated_table *table, uint64_t key);
/* Take the entry of a key out of the table. Returns its object, or NULL. */
void *cm_emulated_table_remove(cm_emulated_table *table, uint64_t key);
/* Return the first entry whose object belongs to `device`, or NULL. Each object is a
 * struct that begins with the index of its device, an int. */
const cm_emulated_entry *cm_emulated_table_of_device(const cm_emulated_table *table,
                                                     int device);
/* Return the index of the first entry whose key is greater than `key`. */
size_t cm_emulated_table_above(const cm_emulated_table *table, uint64_t key);
