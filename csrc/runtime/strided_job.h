/* SPDX-License-Identifier: Apache-2.0 */
/* The one parameter of the kernel "cm_strided_copy", read alike by the PTX text, by its
 * emulation in C and by whoever launches it. Plain data, the same layout everywhere. */
#ifndef CM_RUNTIME_STRIDED_JOB_H
#define CM_RUNTIME_STRIDED_JOB_H

#include <assert.h>
#include <stdint.h>

#include "runtime/runtime.h"

enum { CM_STRIDED_MAX_NDIM = 8 };

#define CM_STRIDED_KERNEL_NAME "cm_strided_copy"

/* Element i (C order over `shape`, 0 <= i < count) is `itemsize` bytes at
 * dst + sum(index[k] * dst_strides[k]), and likewise for src. Invariant:
 * count = shape[0] * … * shape[ndim - 1] (1 when ndim is 0). */
typedef struct cm_strided_job {
    cm_address dst;
    cm_address src;
    uint64_t count;    /* elements */
    uint32_t ndim;     /* 0 … CM_STRIDED_MAX_NDIM */
    uint32_t itemsize; /* bytes: 1, 2, 4, 8 or 16; both ends aligned to it */
    uint32_t spare[2]; /* always 0 */
    uint64_t shape[CM_STRIDED_MAX_NDIM];
    int64_t dst_strides[CM_STRIDED_MAX_NDIM]; /* bytes, may be negative or 0 */
    int64_t src_strides[CM_STRIDED_MAX_NDIM];
} cm_strided_job;

static_assert(sizeof(cm_strided_job) == 40 + 3 * 8 * CM_STRIDED_MAX_NDIM, "no padding");

#endif
