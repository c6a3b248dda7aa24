/* SPDX-License-Identifier: Apache-2.0 */
/* A table from numbers to objects: a sorted array, without locks of its own. The
 * numbers are handles, as callers know them, or the ends of stretches of memory. */
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
    uint32_t room;
} cm_emulated_table;

/* Make a new object of `nbytes`, all 0, in the table under a new key. NULL: no
 * memory. */
void *cm_emulated_table_new(cm_emulated_table *table, uint64_t key, size_t nbytes);
/* Add an object under a key that is new. False: no memory. */
bool cm_emulated_table_add(cm_emulated_table *table, uint64_t key, void *object);
/* The object under a key; NULL: there is none, since the handle is stale or made up. */
void *cm_emulated_table_find(const cm_emulated_table *table, uint64_t key);
void *cm_emulated_table_remove(cm_emulated_table *table, uint64_t key);
/* The first entry whose object belongs to `device`, or NULL. Each object is a struct
 * that begins with the index of its device, an int. */
const cm_emulated_entry *cm_emulated_table_of_device(const cm_emulated_table *table,
                                                     int device);
/* The index of the first entry above `key`. */
size_t cm_emulated_table_above(const cm_emulated_table *table, uint64_t key);
