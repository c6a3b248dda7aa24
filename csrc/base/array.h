/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays that grow by one item at a time. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Have room for one item of `item_nbytes` more than `count` in the array that
 * `array_pointer` points to: NULL, malloc's, or `inside` something else, which is left
 * as it is (NULL: never). The room there is then, or 0: no memory. */
static inline uint32_t
cm_array_reserve(void *array_pointer, size_t item_nbytes, const void *inside,
                 uint32_t count, uint32_t room)
{
    enum { LEAST = 4 };
    if (count < room) {
        return room;
    }
    void *array; /* by bytes, for it is a pointer to something else */
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
