/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays that grow by one item at a time. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* See to it that an array has room for one more item than `count`, of `item_nbytes`
 * each. `array_pointer` points to the pointer to the array. The array is NULL, or from
 * malloc, or else `inside`: a first array that is part of another struct, which is
 * copied and never freed (`inside` NULL: there is none). Returns the room that there is
 * then; 0: there is no memory, and nothing was changed. */
static inline uint32_t
cm_array_reserve(void *array_pointer, size_t item_nbytes, const void *inside,
                 uint32_t count, uint32_t room)
{
    enum { LEAST = 4 };
    if (count < room) {
        return room;
    }
    void *array; /* copied as bytes, since its true type is another pointer type */
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
