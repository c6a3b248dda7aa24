/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/emulated/handles.h"

#include <stdlib.h>
#include <string.h>

/* Index of the first entry that is not below `handle`. */
static size_t
lower_bound(const cm_emulated_handles *handles, uint64_t handle)
{
    size_t low = 0;
    size_t high = handles->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (handles->items[middle].handle < handle) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

bool
cm_emulated_handles_add(cm_emulated_handles *handles, uint64_t handle, void *object)
{
    if (handles->count == handles->capacity) {
        size_t capacity = 2 * handles->capacity + 16;
        cm_emulated_handle *items = realloc(handles->items, capacity * sizeof(*items));
        if (items == NULL) {
            return false;
        }
        handles->items = items;
        handles->capacity = capacity;
    }
    size_t index = lower_bound(handles, handle);
    memmove(&handles->items[index + 1], &handles->items[index],
            (handles->count - index) * sizeof(handles->items[0]));
    handles->items[index] = (cm_emulated_handle){handle, object};
    handles->count++;
    return true;
}

void *
cm_emulated_handles_find(const cm_emulated_handles *handles, uint64_t handle)
{
    size_t index = lower_bound(handles, handle);
    if (index == handles->count || handles->items[index].handle != handle) {
        return NULL;
    }
    return handles->items[index].object;
}

void *
cm_emulated_handles_remove(cm_emulated_handles *handles, uint64_t handle)
{
    size_t index = lower_bound(handles, handle);
    if (index == handles->count || handles->items[index].handle != handle) {
        return NULL;
    }
    void *object = handles->items[index].object;
    handles->count--;
    memmove(&handles->items[index], &handles->items[index + 1],
            (handles->count - index) * sizeof(handles->items[0]));
    return object;
}

void
cm_emulated_handles_fini(cm_emulated_handles *handles)
{
    free(handles->items);
    *handles = (cm_emulated_handles){NULL, 0, 0};
}
