/* SPDX-License-Identifier: Apache-2.0 */
/* Loads and launches the kernels that cumem runs on a device. There are three: one
 * copies strided elements, and converts a few types (cm_kernels_launch()), another
 * copies a table of runs in one launch (cm_table_add()), and the third copies rows by
 * their numbers (rows_kernel.h). This file loads the text of each on a device when it
 * is first needed there, and queues the launches that a copy takes. The device has to
 * be current (cm_device_enter).
 * Locks: none. Two threads may both load a kernel, and the first one's is kept. */
#pragma once

#include <stdatomic.h>

#include "runtime/kernel_jobs.h"
#include "transfer/plan/layout.h"

/* All kernels on all devices. Everything but the runtime is zero until a kernel is
 * used. */
typedef struct cm_kernels {
    cm_runtime *rt;                                              /* borrowed */
    _Atomic uint64_t functions[CM_KERNEL_COUNT][CM_MAX_DEVICES]; /* 0 if not loaded */
    uint64_t modules[CM_KERNEL_COUNT][CM_MAX_DEVICES];           /* owned */
} cm_kernels;

/* Unload all kernels, once nobody uses them any more.
 * Fails: with the first failure; the rest is still unloaded. */
CM_NODISCARD cm_status cm_kernels_fini(cm_kernels *kernels);

/* Get a kernel's function on `device`, which is loaded if need be.
 * Fails: module_load, module_function, capture_mode_exchange. */
CM_NODISCARD cm_status cm_kernels_find(cm_kernels *kernels, cm_kernel kernel,
                                       int device, uint64_t *function);

/* True if a kernel has been loaded on `device`. */
static inline bool
cm_kernels_have(const cm_kernels *kernels, cm_kernel kernel, int device)
{
    return atomic_load_explicit(&kernels->functions[kernel][device],
                                memory_order_acquire)
           != 0;
}

/* True if cm_kernels_find() has failed because the driver comes without the compiler
 * that makes code from a kernel's text, as some do. */
bool cm_kernels_lack_compiler(cm_status status);

/* -- the strided-copy kernel -- */

/* Queue the copy on `stream`; dst and src are the device addresses of element 0.
 * `convert` is NULL, or a conversion for which cm_convert_has_kernel() is true. The
 * kernel then converts the elements on the way, and each element of the source is a run
 * of the layout.
 * Fails: as cm_kernels_find(); kernel_launch. */
CM_NODISCARD cm_status cm_kernels_launch(cm_kernels *kernels, int device,
                                         const cm_convert *convert,
                                         const cm_layout *layout, cm_address dst,
                                         cm_address src, uint64_t stream);

/* Describe to the kernel the innermost part of `layout` that one launch can take.
 * Returns how many outer axes are left for the caller to walk. This is pure. */
int cm_strided_job_init(cm_strided_job *job, const cm_layout *layout, cm_address dst,
                        cm_address src);

/* -- the table-copy kernel (table_kernel.c) -- */

/* Runs of bytes that are collected for one launch. */
typedef struct cm_table {
    cm_kernels *kernels;
    int device;
    uint64_t stream;
    uint64_t nbytes; /* of all runs in `job` */
    cm_table_job job;
} cm_table;

void cm_table_init(cm_table *table, cm_kernels *kernels, int device, uint64_t stream);
/* Add a run of bytes, which must neither overlap others of the same table nor have to
 * come after them. A table that is full is launched.
 * Fails: as cm_kernels_find(); kernel_launch. */
CM_NODISCARD cm_status cm_table_add(cm_table *table, cm_address dst, cm_address src,
                                    uint64_t nbytes);
/* Launch what has not been launched yet.
 * Fails: as cm_table_add(). */
CM_NODISCARD cm_status cm_table_flush(cm_table *table);
