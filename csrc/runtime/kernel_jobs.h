/* SPDX-License-Identifier: Apache-2.0 */
/* The one list of kernels, and the struct that is the single parameter of each. A
 * kernel exists as a PTX text and as an emulation in C. Both read the struct that the
 * launching code fills in, so it is plain data whose layout is the same for all three,
 * as tests/c/test_emulated_kernel.c asserts. */
#pragma once

#include <stdint.h>

#include "base/convert.h"
#include "runtime/runtime.h"

/* X(name, the kernel's name in its PTX text, that text) */
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
    /* If this is CM_NUMBER_NONE, the elements are copied as they are. Otherwise each
     * element of the source is a number of this type, of `itemsize` bytes, and becomes
     * a float32. If `scales` is not 0, that is then multiplied by `scale`, and `offset`
     * is added. cm_convert_has_kernel() is true for the conversion. */
    uint32_t from;
    uint32_t scales;
    uint64_t shape[CM_STRIDED_MAX_NDIM];
    int64_t dst_strides[CM_STRIDED_MAX_NDIM]; /* in bytes; may be negative or 0 */
    int64_t src_strides[CM_STRIDED_MAX_NDIM];
    float scale;
    float offset;
} cm_strided_job;

/* The table kernel copies pieces of memory, each of which is one run of bytes. The
 * table travels as the kernel's parameter, so no memory has to outlive the launch. It
 * is as large as every device allows a parameter to be. */
enum {
    CM_TABLE_MAX_COUNT = 204,
    CM_TABLE_MAX_NBYTES = 1 << 20, /* bytes of a piece, at most */
    CM_TABLE_MIN_SHIFT = 5,        /* a warp for each piece */
    CM_TABLE_MAX_SHIFT = 8,        /* a block for each piece */
};

/* The parameter of the table kernel. Piece i, 0 <= i < count, is nbytes[i] bytes from
 * src[i] to dst[i], at any alignment. It is copied by a team, which consists of the
 * threads of the grid whose number, shifted right by team_shift, is i. Pieces must not
 * overlap. */
typedef struct cm_table_job {
    uint32_t count;
    uint32_t team_shift; /* 1 << team_shift threads share a piece */
    uint32_t spare[2];   /* always 0 */
    cm_address dst[CM_TABLE_MAX_COUNT];
    cm_address src[CM_TABLE_MAX_COUNT];
    uint32_t nbytes[CM_TABLE_MAX_COUNT];
} cm_table_job;
