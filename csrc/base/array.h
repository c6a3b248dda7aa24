/* SPDX-License-Identifier: Apache-2.0 */
/* Grows arrays by one item at a time. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Make room in an array for one more item than `count`. Each item has `item_nbytes`.
 * `array_pointer` points to the pointer to the array, which is NULL, or memory from
 * malloc, or `inside`. `inside` is a first array that is part of another struct, or
 * NULL; when `inside` gets too small its items are copied to new memory, and `inside`
 * itself is never freed. Returns the number of items for which there is room
 * afterwards, or 0 if there is no memory, in which case nothing has changed. */
static inline uint32_t
cm_array_reserve(void *array_pointer, size_t item_nbytes, const void *inside,
                 uint32_t count, uint32_t room)
{
    enum { LEAST = 4 };
    if (count < room) {
        return room;
    }
    void *array; /* copied as bytes, since the array's own pointer type is not void * */
    memcpy(&array, array_pointer, sizeof(array));
    uint32_t wanted = room < LEAST ? LEAST : room * 2;
    bool leaves = array != NULL && array == inside;
    void *larger = wanted <= room
                       ? NULL
                       : realloc(leaves ? NULL : array, (size_t)wanted * item_nbytes);
    if (larger == NULL) {
        return 0;
    }
    if (leaves) {
        memcpy(larger, array, count * item_nbytes);
    }
    memcpy(array_pointer, &larger, sizeof(larger));
    return wanted;
}
