/* SPDX-License-Identifier: Apache-2.0 */
/* Copies memory by vector instructions. The functions copy long runs past the caches,
 * pack short elements that lie a few bytes apart, and turn columns into rows. This file
 * knows the processor and nothing else. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Copy as memcpy does, but with stores that bypass the caches, for a target that nobody
 * reads soon. This is worth while from a few KiB on. The stores are ordered before
 * everything that follows. */
void cm_wide_copy(void *dst, const void *src, size_t nbytes);

/* Copies whole cache lines from `src` to `dst`, which is aligned to a cache line, with
 * stores that bypass the caches. Whoever makes many such copies calls cm_wide_fence()
 * once, after the last. */
typedef void (*cm_copy_lines)(char *dst, const char *src, size_t line_count);
/* Return the function for this processor. */
cm_copy_lines cm_wide_choose_lines(void);
/* Make all stores that have bypassed the caches so far visible before any store that
 * follows. */
void cm_wide_fence(void);

enum { CM_PICK_MAX_LOADS = 8, CM_PICK_VECTOR_NBYTES = 16 };

/* Says how to pack short elements that lie apart, sixteen bytes at a time. Each vector
 * of the target is put together from a few vectors of the source, each of which takes
 * one shuffle.
 *
 * Example: elements of 4 bytes, 12 bytes apart. A vector of the target holds 4 of them,
 * which lie within 40 bytes, so 3 vectors of the source are loaded. The first has
 * elements 0 and 1, the second element 2, the third element 3, and each mask puts these
 * at their places. */
typedef struct cm_pick {
    _Alignas(CM_PICK_VECTOR_NBYTES)
        /* For each vector of the source, and each byte of the target, the index of the
         * source byte that goes there, or 0x80 if none does. */
        uint8_t masks[CM_PICK_MAX_LOADS][CM_PICK_VECTOR_NBYTES];
    int load_count; /* source vectors for each vector of the target */
    int64_t itemsize;
    int64_t step;       /* from one element of the source to the next, in bytes */
    int64_t item_count; /* elements in one vector of the target */
    /* The distance from the first element to the first vector of the source, in bytes.
     * It is negative if `step` is. */
    int64_t lead;
} cm_pick;

/* Prepare for elements of `itemsize` bytes that lie `step` bytes apart, in either
 * direction. Returns false if the elements are too long or too far apart, or if the
 * processor has no such instructions. */
bool cm_pick_init(cm_pick *pick, size_t itemsize, int64_t step);

/* Pack elements, the first of which is at `src`, into `dst`. Returns how many of the
 * `count` elements were copied; a few vectors at the end are left to the caller. The
 * function may read all bytes between the elements, but none before the lowest element
 * or after the highest. */
int64_t cm_pick_copy(const cm_pick *pick, void *dst, const void *src, int64_t count);

enum { CM_TRANSPOSE_ROWS = 16, CM_TRANSPOSE_ROW_NBYTES = 64 };

/* Turn columns into rows. At `src` are 16 packed rows of 64 bytes each. Each of their
 * columns becomes a row of 16 packed elements: the first one at `dst`, and each next
 * one `stride` bytes further. Returns false, and does nothing, if there is no code for
 * elements of `itemsize` bytes. Source and target must not overlap. */
bool cm_transpose(void *dst, int64_t stride, const void *src, size_t itemsize);

/* Flush a range out of the processor's caches, so that a benchmark can then measure the
 * memory rather than the caches. Does nothing if the processor has no such
 * instruction. */
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
