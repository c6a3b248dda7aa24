/* SPDX-License-Identifier: Apache-2.0 */
/* Short elements that lie a few bytes apart, brought together sixteen bytes at a time.
 * Knows the processor, nothing else. */
#ifndef CM_BASE_PICK_COPY_H
#define CM_BASE_PICK_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { CM_PICK_MAX_LOADS = 8, CM_PICK_VECTOR_NBYTES = 16 };

/* What one vector of the target is made of. */
typedef struct cm_pick {
    _Alignas(CM_PICK_VECTOR_NBYTES)
        uint8_t masks[CM_PICK_MAX_LOADS][CM_PICK_VECTOR_NBYTES]; /* where its bytes lie
                                                                    in each vector of
                                                                    the source; 0x80:
                                                                    not there */
    int task_count;
    int64_t itemsize;
    int64_t step;       /* from one element of the source to the next, in bytes */
    int64_t item_count; /* in one vector of the target */
    int64_t lead;       /* from the first of them to the first vector of the source */
} cm_pick;

/* For elements of `itemsize` bytes, `step` apart, either way. False where the elements
 * are too long or too far apart for it, or the processor cannot do it. */
bool cm_pick_init(cm_pick *pick, size_t itemsize, int64_t step);

/* Copy elements from `src` on to the packed `dst`; the number of those that were
 * copied, which leaves less than a few vectors of `count`. Reads nothing below the
 * first byte of the elements or above their last one, but all that lies between. */
int64_t cm_pick_copy(const cm_pick *pick, void *dst, const void *src, int64_t count);

#endif
