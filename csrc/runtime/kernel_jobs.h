/* SPDX-License-Identifier: Apache-2.0 */
/* The one list of kernels, and the one parameter of each, read alike by the PTX text,
 * by its emulation in C and by the code that launches it. Plain data, the same layout
 * everywhere, which tests/c/test_emulated_kernel.c asserts. */
#pragma once

#include <stdint.h>

#include "base/convert.h"
#include "runtime/runtime.h"

/* X(name, the kernel's name in its text, the text) */
#define CM_KERNELS(X)                                                                  \
    X(STRIDED, "cm_strided_copy", strided)                                             \
    X(TABLE, "cm_table_copy", table)

typedef enum cm_kernel {
#define CM_KERNEL_ID(name, ...) CM_KERNEL_##name,
    CM_KERNELS(CM_KERNEL_ID)
#undef CM_KERNEL_ID
        CM_KERNEL_COUNT
} cm_kernel;

enum { CM_STRIDED_MAX_NDIM = 8 };

/* Element i (C order over `shape`, 0 <= i < count) is `itemsize` bytes at
 * dst + sum(index[k] * dst_strides[k]), and likewise for src. Invariant:
 * count = shape[0] * … * shape[ndim - 1] (1 when ndim is 0). */
typedef struct cm_strided_job {
    cm_address dst;
    cm_address src;
    uint64_t count;    /* elements */
    uint32_t ndim;     /* 0 … CM_STRIDED_MAX_NDIM */
    uint32_t itemsize; /* bytes: 1, 2, 4, 8 or 16; both ends aligned to it */
    /* Not NONE: each element is a number of this type, of `itemsize` bytes, and becomes
     * a float32, with `scales` times `scale` plus `offset`; it suits
     * cm_convert_widens(). */
    uint32_t from;
    uint32_t scales;
    uint64_t shape[CM_STRIDED_MAX_NDIM];
    int64_t dst_strides[CM_STRIDED_MAX_NDIM]; /* bytes, may be negative or 0 */
    int64_t src_strides[CM_STRIDED_MAX_NDIM];
    float scale;
    float offset;
} cm_strided_job;

/* Pieces of memory, each one run of bytes. As large as a kernel's parameter may be on
 * every device, so that no memory has to outlive the launch. */
enum {
    CM_TABLE_MAX_COUNT = 204,
    CM_TABLE_MAX_NBYTES = 1 << 20, /* of a piece */
    CM_TABLE_MIN_SHIFT = 5,        /* a warp */
    CM_TABLE_MAX_SHIFT = 8,        /* a block */
};

/* Piece i, 0 <= i < count, is nbytes[i] bytes from src[i] to dst[i], at any alignment,
 * copied by threads i << team_shift … of the grid. Pieces must not overlap. */
typedef struct cm_table_job {
    uint32_t count;
    uint32_t team_shift; /* so many threads share a piece: 1 << team_shift */
    uint32_t spare[2];   /* always 0 */
    cm_address dst[CM_TABLE_MAX_COUNT];
    cm_address src[CM_TABLE_MAX_COUNT];
    uint32_t nbytes[CM_TABLE_MAX_COUNT];
} cm_table_job;
