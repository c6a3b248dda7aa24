/* SPDX-License-Identifier: Apache-2.0 */
/* Copies by vector instructions: long runs that should not go through the caches, short
 * elements that lie a few bytes apart, and rows that become columns. This file knows
 * the processor and nothing else. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As memcpy, for a target that nobody reads soon; it is worth it from some KiB on. The
 * stores are ordered before everything that follows. */
void cm_wide_copy(void *dst, const void *src, size_t nbytes);

enum { CM_PICK_MAX_LOADS = 8, CM_PICK_VECTOR_NBYTES = 16 };

/* How short elements that lie apart are packed, sixteen bytes at a time. Each vector of
 * the target is put together from a few vectors of the source, by one shuffle each.
 *
 * Example: elements of 4 bytes, 12 bytes apart. A vector of the target holds 4 of them,
 * which lie within 40 bytes, so 3 vectors of the source are loaded. The first has
 * elements 0 and 1, the second element 2, the third element 3, and each mask puts these
 * at their places. */
typedef struct cm_pick {
    _Alignas(CM_PICK_VECTOR_NBYTES)
        /* For each vector of the source: which of its bytes goes to each byte of the
         * target; 0x80: none. */
        uint8_t masks[CM_PICK_MAX_LOADS][CM_PICK_VECTOR_NBYTES];
    int load_count;
    int64_t itemsize;
    int64_t step;       /* from one element of the source to the next, in bytes */
    int64_t item_count; /* elements in one vector of the target */
    /* From the first element to the first vector of the source, in bytes. */
    int64_t lead;
} cm_pick;

/* Prepare for elements of `itemsize` bytes that lie `step` bytes apart, in either
 * direction. False where the elements are too long or too far apart, or the processor
 * cannot do it. */
bool cm_pick_init(cm_pick *pick, size_t itemsize, int64_t step);

/* Copy elements from `src` on to the packed `dst`. Returns the number of those that
 * were copied, which leaves less than a few vectors of `count`. Nothing below the first
 * byte of the elements or above their last one is read, but everything between may
 * be. */
int64_t cm_pick_copy(const cm_pick *pick, void *dst, const void *src, int64_t count);

enum { CM_TRANSPOSE_ROWS = 16, CM_TRANSPOSE_ROW_NBYTES = 64 };

/* Turn columns into rows: each column of the 16 packed rows at `src`, of 64 bytes each,
 * becomes 16 packed elements. Those of the first column are at `dst`, those of each
 * next one `stride` bytes further. False, and nothing is done, if there is no code for
 * elements of `itemsize` bytes. The two may not overlap. */
bool cm_transpose(void *dst, int64_t stride, const void *src, size_t itemsize);

/* Flush memory out of the processor's caches, so that what is measured next is the
 * memory. Does nothing where there is no such instruction. */
static inline void
cm_cache_flush(const void *start, size_t nbytes)
{
    const char *p = start;
    for (size_t at = 0; at < nbytes; at += 64) {
#if defined(__x86_64__)
        __builtin_ia32_clflush(p + at);
#elif defined(__aarch64__)
        __asm__ volatile("dc civac, %0" ::"r"(p + at) : "memory");
#else
        (void)p;
#endif
    }
}
