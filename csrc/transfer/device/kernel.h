/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels: their texts, loading one on each device at first need, and queueing the
 * launches that a copy takes. Needs the device current (cm_device_enter).
 * Locks: none; two threads may both load one, and the first keeps it. */
#pragma once

#include <stdatomic.h>

#include "runtime/kernel_jobs.h"
#include "transfer/plan/layout.h"

/* All kernels on all devices. Zero but for the runtime until they are used. */
typedef struct cm_kernels {
    cm_runtime *rt;                                              /* borrowed */
    _Atomic uint64_t functions[CM_KERNEL_COUNT][CM_MAX_DEVICES]; /* 0: not loaded */
    uint64_t modules[CM_KERNEL_COUNT][CM_MAX_DEVICES];           /* owned */
} cm_kernels;

/* Unloads, once nobody uses them any more. Fails: the first failure; everything is still tried. */
CM_NODISCARD cm_status cm_kernels_fini(cm_kernels *kernels);

/* The function on `device`, loaded if need be. Fails: module_load, module_function,
 * capture_mode_exchange. */
CM_NODISCARD cm_status cm_kernels_find(cm_kernels *kernels, cm_kernel kernel,
                                       int device, uint64_t *function);

/* -- the strided-copy kernel -- */

/* Queue the copy on `stream`; dst and src are the device addresses of element 0.
 * `convert`: what cm_convert_widens() and is done on the way, each element being a run
 * of its source; NULL: nothing. Fails: as find, kernel_launch. */
CM_NODISCARD cm_status cm_kernels_launch(cm_kernels *kernels, int device,
                                         const cm_convert *convert,
                                         const cm_layout *layout, cm_address dst,
                                         cm_address src, uint64_t stream);

/* The innermost part of `layout` that one launch can take, as the kernel's parameter;
 * returns how many outer axes are left over for the caller to walk. Pure. */
int cm_strided_job_init(cm_strided_job *job, const cm_layout *layout, cm_address dst,
                        cm_address src);

/* -- the table-copy kernel (table_kernel.c) -- */

/* Pieces that wait for a launch. */
typedef struct cm_table {
    cm_kernels *kernels;
    int device;
    uint64_t stream;
    uint64_t nbytes; /* of all pieces in `job` */
    cm_table_job job;
} cm_table;

void cm_table_init(cm_table *table, cm_kernels *kernels, int device, uint64_t stream);
/* Add a run of bytes, which neither overlaps nor follows on others of the same table;
 * launches whatever is full. Fails: as find, kernel_launch. */
CM_NODISCARD cm_status cm_table_add(cm_table *table, cm_address dst, cm_address src,
                                    uint64_t nbytes);
/* Launch what is left. */
CM_NODISCARD cm_status cm_table_flush(cm_table *table);
