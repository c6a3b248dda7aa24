/* SPDX-License-Identifier: Apache-2.0 */
/* This is the one list of kernels, with the struct that is the single parameter of each
 * kernel. A kernel exists as a PTX text and as an emulation in C. Both read the struct
 * that the launching code fills in. So the struct is plain data, whose layout is the
 * same for the PTX text, the emulation and the launching code, as
 * tests/c/test_emulated_kernel.c asserts. */
#pragma once

#include <stdint.h>

#include "base/convert.h"
#include "runtime/runtime.h"

/* X(name, the kernel's name in its PTX text, that text) */
#define CM_KERNELS(X)                                                                  \
    X(STRIDED, "cm_strided_copy", strided)                                             \
    X(TABLE, "cm_table_copy", table)                                                   \
    X(ROWS, "cm_rows_copy", rows)

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
     * a float32. If `scales` is not 0, the float32 is then multiplied by `scale`, and
     * `offset` is added. cm_convert_has_kernel() is true for the conversion. */
    uint32_t from;
    uint32_t scales;
    uint64_t shape[CM_STRIDED_MAX_NDIM];
    int64_t dst_strides[CM_STRIDED_MAX_NDIM]; /* in bytes; may be negative or 0 */
    int64_t src_strides[CM_STRIDED_MAX_NDIM];
    float scale;
    float offset;
} cm_strided_job;

/* The table kernel copies pieces of memory, each of which is one run of bytes. The
 * table travels as the kernel's parameter, so no memory has to outlive the launch. Its
 * size is the largest that a parameter may have on every device. */
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

/* The rows kernel copies rows that are named by their numbers. For each layer and for
 * each i, 0 <= i < count, it copies one row of row_units * unit bytes:
 *
 *     dst[layer] + d * dst_stride  <-  src[layer] + s * src_stride
 *
 * where d is element i of the array at dst_rows and s is element i of the array at
 * src_rows, or i itself if there is no such array. A negative number counts from the
 * end. If d or s is not the number of a row, nothing of row i moves, and the kernel
 * stores into the word at `flag` which of the two was wrong. Rows of the target must
 * not overlap rows of the source, nor the numbers.
 *
 * Threads share the work as follows. A team of 1 << team_shift threads works on one
 * row. Each of its threads copies one unit. Together these units, which lie side by
 * side, are one part of the row, and a row takes part_count parts. A group is as many
 * rows as a warp has teams, which is 32 >> team_shift. A slot is one part of one group
 * of one layer, and slots are counted through the parts of a group, then through the
 * groups of a layer, then through the layers. Warp w begins at slot CM_ROWS_SLOTS * w
 * and copies CM_ROWS_SLOTS slots at once. Its next slots are further on by a step of
 * CM_ROWS_SLOTS times the number of warps. The kernel keeps the part, the group and the
 * layer of a slot in separate counters. The step is given as so many layers, groups and
 * parts, and the kernel adds each of these to its own counter. So its loop needs no
 * division. */
enum {
    CM_ROWS_MAX_LAYERS = 246,
    CM_ROWS_SLOTS = 4,
    CM_ROWS_WARP_SHIFT = 5, /* a warp has 1 << 5 threads */
    /* What the kernel stores: one of the two, or their sum. If several rows are wrong,
     * the word holds the value of any one of them. */
    CM_ROWS_WRONG_DST = 1,
    CM_ROWS_WRONG_SRC = 2,
};

/* The parameter of the rows kernel. Like that of the table kernel, it carries all that
 * a launch needs, and has the largest size that every device allows. Invariants: unit
 * divides every address and stride of rows; team_shift <= CM_ROWS_WARP_SHIFT; the parts
 * of a row hold its units (part_count << team_shift >= row_units); the groups hold
 * `count` rows. */
typedef struct cm_rows_job {
    cm_address dst_rows;     /* the array of the target's numbers; 0 if there is none */
    cm_address src_rows;     /* the array of the source's numbers; 0 if there is none */
    int64_t dst_rows_stride; /* bytes from one number to the next */
    int64_t src_rows_stride;
    uint64_t count;     /* rows to copy in each layer */
    uint64_t dst_count; /* rows that the target has; at most INT64_MAX */
    uint64_t src_count;
    int64_t dst_stride; /* bytes from one row to the next */
    int64_t src_stride;
    uint64_t row_units;   /* the length of a row */
    cm_address flag;      /* of a 32-bit word; 0 if wrong numbers are not reported */
    uint64_t group_count; /* of a layer */
    /* The step of a warp is the sum of these parts, groups and layers. */
    uint64_t step_groups; /* less than group_count */
    uint32_t step_parts;  /* less than part_count */
    uint32_t step_layers;
    uint32_t part_count;     /* of a row; at least 1 */
    uint32_t layer_count;    /* at most CM_ROWS_MAX_LAYERS */
    uint32_t unit;           /* 1, 2, 4, 8 or 16 bytes */
    uint32_t team_shift;     /* 1 << team_shift threads share a row */
    uint32_t dst_row_nbytes; /* of one number: 1, 2, 4 or 8; 0 if there is no array */
    uint32_t src_row_nbytes;
    uint32_t dst_row_is_signed;
    uint32_t src_row_is_signed;
    /* If this is 1, row i of the source lies at place i whatever its number is, and the
     * number is only checked. This is so if the rows have been gathered into a buffer
     * first, from which the kernel takes them. */
    uint32_t src_is_packed;
    uint32_t spare[3];                  /* always 0 */
    cm_address dst[CM_ROWS_MAX_LAYERS]; /* row 0 of each layer */
    cm_address src[CM_ROWS_MAX_LAYERS];
} cm_rows_job;
