/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the table as a sorted array with binary search. */
#include "runtime/emulated/table.h"

#include <stdlib.h>
#include <string.h>

#include "base/array.h"

size_t
cm_emulated_table_above(const cm_emulated_table *table, uint64_t key)
{
    size_t low = 0;
    size_t high = table->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table->entries[middle].key <= key) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

bool
cm_emulated_table_add(cm_emulated_table *table, uint64_t key, void *object)
{
    uint32_t room = cm_array_reserve(&table->entries, sizeof(*table->entries), NULL,
                                     table->count, table->room);
    if (room == 0) {
        return false;
    }
    table->room = room;
    cm_emulated_entry *at = table->entries + cm_emulated_table_above(table, key);
    memmove(at + 1, at, (size_t)(table->entries + table->count - at) * sizeof(*at));
    *at = (cm_emulated_entry){key, object};
    table->count++;
    return true;
}

void *
cm_emulated_table_new(cm_emulated_table *table, uint64_t key, size_t nbytes)
{
    void *object = calloc(1, nbytes);
    if (object != NULL && !cm_emulated_table_add(table, key, object)) {
        free(object);
        return NULL;
    }
    return object;
}

void *
cm_emulated_table_find(const cm_emulated_table *table, uint64_t key)
{
    size_t above = cm_emulated_table_above(table, key);
    return above != 0 && table->entries[above - 1].key == key
               ? table->entries[above - 1].object
               : NULL;
}

void *
cm_emulated_table_remove(cm_emulated_table *table, uint64_t key)
{
    void *object = cm_emulated_table_find(table, key);
    if (object != NULL) {
        cm_emulated_entry *next = table->entries + cm_emulated_table_above(table, key);
        memmove(next - 1, next,
                (size_t)(table->entries + table->count - next) * sizeof(*next));
        table->count--;
    }
    return object;
}

const cm_emulated_entry *
cm_emulated_table_of_device(const cm_emulated_table *table, int device)
{
    for (size_t i = 0; i < table->count; i++) {
        if (*(const int *)table->entries[i].object == device) {
            return &table->entries[i];
        }
    }
    return NULL;
}
