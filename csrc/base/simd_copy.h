/* SPDX-License-Identifier: Apache-2.0 */
/* Copies by vector instructions: of long runs past the caches, of short elements that
 * lie a few bytes apart, of rows into columns. Knows the processor, nothing else. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As memcpy, for targets that nobody reads soon; worth it from some KiB on. The stores
 * are ordered before what follows. */
void cm_wide_copy(void *dst, const void *src, size_t nbytes);

enum { CM_PICK_MAX_LOADS = 8, CM_PICK_VECTOR_NBYTES = 16 };

/* Short elements brought together sixteen bytes at a time: what one vector of the
 * target is made of. */
typedef struct cm_pick {
    _Alignas(CM_PICK_VECTOR_NBYTES)
        uint8_t masks[CM_PICK_MAX_LOADS][CM_PICK_VECTOR_NBYTES]; /* where its bytes lie
                                                                    in each vector of
                                                                    the source; 0x80:
                                                                    not there */
    int load_count;
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

enum { CM_TRANSPOSE_ROWS = 16, CM_TRANSPOSE_ROW_NBYTES = 64 };

/* Each column of the 16 packed rows at `src`, 64 bytes each, becomes 16 packed
 * elements; the first at `dst`, the next ones `stride` bytes apart. False, with nothing
 * done, if elements of `itemsize` bytes are not known here. The two may not overlap. */
bool cm_transpose(void *dst, int64_t stride, const void *src, size_t itemsize);

/* Have the processor forget memory that it has in its caches, so that what is measured
 * next is the memory. Does nothing where there is no such instruction. */
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
