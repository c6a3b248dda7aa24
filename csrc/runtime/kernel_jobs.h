/* SPDX-License-Identifier: Apache-2.0 */
/* The one list of kernels, and the single parameter of each, which the PTX text, its
 * emulation in C and the code that launches it all read. It is plain data of the same
 * layout everywhere, which tests/c/test_emulated_kernel.c asserts. */
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

/* The parameter of the strided kernel. Element i (in C order over `shape`, 0 <= i <
 * count) is the `itemsize` bytes at dst + sum(index[k] * dst_strides[k]), and likewise
 * for src. Invariant: count = shape[0] * … * shape[ndim - 1] (1 when ndim is 0). */
typedef struct cm_strided_job {
    cm_address dst;
    cm_address src;
    uint64_t count;    /* elements */
    uint32_t ndim;     /* 0 … CM_STRIDED_MAX_NDIM */
    uint32_t itemsize; /* 1, 2, 4, 8 or 16 bytes; both ends are aligned to it */
    /* If not NONE, each element is a number of this type, of `itemsize` bytes, and
     * becomes a float32, which with `scales` is multiplied by `scale` and added to
     * `offset`. The conversion is one for which cm_convert_widens() is true. */
    uint32_t from;
    uint32_t scales;
    uint64_t shape[CM_STRIDED_MAX_NDIM];
    int64_t dst_strides[CM_STRIDED_MAX_NDIM]; /* in bytes; may be negative or 0 */
    int64_t src_strides[CM_STRIDED_MAX_NDIM];
    float scale;
    float offset;
} cm_strided_job;

/* The table kernel copies pieces of memory, each of which is one run of bytes. The
 * table is as large as the parameter of a kernel may be on every device, so that no
 * memory has to outlive the launch. */
enum {
    CM_TABLE_MAX_COUNT = 204,
    CM_TABLE_MAX_NBYTES = 1 << 20, /* bytes of a piece, at most */
    CM_TABLE_MIN_SHIFT = 5,        /* a warp for each piece */
    CM_TABLE_MAX_SHIFT = 8,        /* a block for each piece */
};

/* The parameter of the table kernel. Piece i, 0 <= i < count, is nbytes[i] bytes from
 * src[i] to dst[i], at any alignment, and is copied by the threads of the grid from i
 * << team_shift on. Pieces must not overlap. */
typedef struct cm_table_job {
    uint32_t count;
    uint32_t team_shift; /* 1 << team_shift threads share a piece */
    uint32_t spare[2];   /* always 0 */
    cm_address dst[CM_TABLE_MAX_COUNT];
    cm_address src[CM_TABLE_MAX_COUNT];
    uint32_t nbytes[CM_TABLE_MAX_COUNT];
} cm_table_job;
