/* SPDX-License-Identifier: Apache-2.0 */
/* Copies rows of memory that are chosen by their numbers. This file knows the processor
 * and nothing else.
 *
 * A processor that reads rows in random order waits for memory at each of them, since
 * its own prefetcher cannot guess the next number. So the code here prefetches rows
 * that it needs soon while it copies earlier ones. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One end of the copy. Row i lies `numbers[i] * stride` bytes behind `base`. */
typedef struct cm_numbered_end {
    char *base;
    int64_t stride;
    const int64_t *numbers; /* NULL if they are 0, 1, … */
} cm_numbered_end;

/* Return the same end from row `first` on. */
static inline cm_numbered_end
cm_numbered_from(cm_numbered_end end, uint64_t first)
{
    if (end.numbers != NULL) {
        end.numbers += first;
    }
    else {
        end.base += (int64_t)first * end.stride;
    }
    return end;
}

/* Return the address of row `i`. */
static inline char *
cm_numbered_at(const cm_numbered_end *end, uint64_t i)
{
    int64_t number = end->numbers == NULL ? (int64_t)i : end->numbers[i];
    return end->base + number * end->stride;
}

/* Copy the first `count` rows of `nbytes` each. No row of the target may share bytes
 * with another row of either end. With `wide`, stores to whole cache lines of the
 * target bypass the caches, which is faster if nobody reads the target soon. */
void cm_numbered_copy(const cm_numbered_end *dst, const cm_numbered_end *src,
                      uint64_t count, size_t nbytes, bool wide);
