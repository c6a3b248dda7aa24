/* SPDX-License-Identifier: Apache-2.0 */
/* The one parameter of the kernel "cm_table_copy": pieces of memory, each one run of
 * bytes, read alike by the PTX text, by its emulation in C and by whoever launches it.
 * Plain data, as large as a kernel's parameter may be on every device, so that no
 * memory has to outlive the launch. */
#ifndef CM_RUNTIME_TABLE_JOB_H
#define CM_RUNTIME_TABLE_JOB_H

#include <assert.h>
#include <stdint.h>

#include "runtime/runtime.h"

#define CM_TABLE_KERNEL_NAME "cm_table_copy"

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

static_assert(sizeof(cm_table_job) == 4096, "what a kernel's parameters may take");

#endif
