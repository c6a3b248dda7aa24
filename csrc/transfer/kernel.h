/* SPDX-License-Identifier: Apache-2.0 */
/* The strided-copy kernel: its text, loading it on each device at first need, and
 * queueing the launches that a layout takes. Needs the device current
 * (cm_device_enter).
 * Locks: one mutex over the table of loaded kernels, not held while one is being loaded. */
#ifndef CM_TRANSFER_KERNEL_H
#define CM_TRANSFER_KERNEL_H

#include "base/thread.h"
#include "runtime/strided_job.h"
#include "transfer/layout.h"

extern const char cm_strided_ptx[];

typedef struct cm_kernels {
    cm_runtime *rt; /* borrowed */
    cm_mutex lock;
    uint64_t modules[CM_MAX_DEVICES]; /* owned; 0: not loaded */
    uint64_t functions[CM_MAX_DEVICES];
} cm_kernels;

/* Fails: CM_ESYSTEM. Makes no runtime call. */
CM_NODISCARD cm_status cm_kernels_init(cm_kernels *kernels, cm_runtime *rt);
/* Unloads. Fails: the first failure; everything is still tried. */
CM_NODISCARD cm_status cm_kernels_fini(cm_kernels *kernels);

/* Load it now, so that nothing can fail half-way later. Fails: module_load,
 * module_function, capture_mode_exchange. */
CM_NODISCARD cm_status cm_kernels_load(cm_kernels *kernels, int device);

/* Queue the copy on `stream`; dst and src are the device addresses of element 0.
 * Fails: as load, kernel_launch. */
CM_NODISCARD cm_status cm_kernels_launch(cm_kernels *kernels, int device,
                                         const cm_layout *layout, cm_address dst,
                                         cm_address src, uint64_t stream);

/* The innermost part of `layout` that one launch can take, as the kernel's parameter;
 * returns how many outer axes are left over for the caller to walk. Pure. */
int cm_strided_job_init(cm_strided_job *job, const cm_layout *layout, cm_address dst,
                        cm_address src);

#endif
