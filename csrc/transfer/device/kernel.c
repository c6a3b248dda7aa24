/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/device/kernel.h"

#include "ptx.h"
#include "runtime/scope.h"

enum {
    THREADS_PER_BLOCK = 256,
    MAX_BLOCK_COUNT = 1 << 14, /* where more would be needed, threads take several
                                  elements each */
};

cm_status
cm_kernels_fini(cm_kernels *kernels)
{
    cm_status first = cm_ok();
    for (int kernel = 0; kernel < CM_KERNEL_COUNT; kernel++) {
        for (int device = 0; device < CM_MAX_DEVICES; device++) {
            uint64_t *module = &kernels->modules[kernel][device];
            if (*module != 0) {
                cm_status status = CM_IN_SCOPE(
                    kernels->rt, device, cm_rt_module_unload(kernels->rt, *module));
                first = cm_first_failure(first, status);
                *module = 0;
            }
        }
    }
    return first;
}

static const struct {
    const char *name;
    const char *text;
} texts[CM_KERNEL_COUNT] = {
#define KERNEL_TEXT(name, text_name, text)                                             \
    [CM_KERNEL_##name] = {text_name, CM_PTX_##text},
    CM_KERNELS(KERNEL_TEXT)
#undef KERNEL_TEXT
};

static cm_status
load_module(cm_runtime *rt, cm_kernel kernel, int device, uint64_t *module,
            uint64_t *function)
{
    cm_scope scope; /* loading is forbidden while anybody captures */
    CM_TRY(cm_scope_enter(rt, device, CM_CAPTURE_RELAXED, &scope));
    cm_status status = cm_rt_module_load(rt, texts[kernel].text, module);
    if (cm_is_ok(status)) {
        status = cm_rt_module_function(rt, *module, texts[kernel].name, function);
        if (!cm_is_ok(status)) {
            cm_ignore(cm_rt_module_unload(rt, *module));
        }
    }
    cm_scope_leave(&scope);
    return status;
}

cm_status
cm_kernels_find(cm_kernels *kernels, cm_kernel kernel, int device, uint64_t *function)
{
    _Atomic uint64_t *known = &kernels->functions[kernel][device];
    uint64_t module, loaded;
    *function = atomic_load_explicit(known, memory_order_acquire);
    if (*function != 0) {
        return cm_ok();
    }
    CM_TRY(load_module(kernels->rt, kernel, device, &module, &loaded));
    if (!atomic_compare_exchange_strong(known, function, loaded)) {
        /* Another thread was first, so ours is unloaded. */
        return CM_IN_SCOPE(kernels->rt, device,
                           cm_rt_module_unload(kernels->rt, module));
    }
    *function = loaded;
    kernels->modules[kernel][device] = module;
    return cm_ok();
}

bool
cm_kernels_lack_compiler(cm_status status)
{
    enum { NO_BINARY = 209, INVALID_PTX = 218, NO_JIT = 221, OLD_PTX = 222 };
    return status.op == CM_OP_module_load
           && (status.code == NO_BINARY || status.code == INVALID_PTX
               || status.code == NO_JIT || status.code == OLD_PTX);
}

/* Find the largest unit, a power of two up to 16, that divides all addresses, strides
 * and runs. It is the lowest bit that is set in any of these. */
static uint32_t
unit_of(const cm_layout *layout, cm_address dst, cm_address src)
{
    uint64_t bits = 16 | layout->run_nbytes | dst | src;
    for (int axis = 0; axis < layout->ndim; axis++) {
        bits |= (uint64_t)layout->axes[axis].stride[CM_DST];
        bits |= (uint64_t)layout->axes[axis].stride[CM_SRC];
    }
    return (uint32_t)(bits & (~bits + 1));
}

static void
add_axis(cm_strided_job *job, cm_axis axis)
{
    job->shape[job->ndim] = (uint64_t)axis.length;
    job->dst_strides[job->ndim] = axis.stride[CM_DST];
    job->src_strides[job->ndim] = axis.stride[CM_SRC];
    job->ndim++;
}

int
cm_strided_job_init(cm_strided_job *job, const cm_layout *layout, cm_address dst,
                    cm_address src)
{
    dst += (uint64_t)layout->offset[CM_DST];
    src += (uint64_t)layout->offset[CM_SRC];
    uint32_t unit = unit_of(layout, dst, src);
    uint64_t units = layout->run_nbytes / unit;
    int room = units > 1 ? CM_STRIDED_MAX_NDIM - 1 : CM_STRIDED_MAX_NDIM;
    int outer = layout->ndim > room ? layout->ndim - room : 0;
    *job = (cm_strided_job){.dst = dst, .src = src, .count = units, .itemsize = unit};
    for (int i = outer; i < layout->ndim; i++) {
        add_axis(job, layout->axes[i]);
        job->count *= (uint64_t)layout->axes[i].length;
    }
    if (units > 1) {
        add_axis(job, (cm_axis){(int64_t)units, {unit, unit}});
    }
    return outer;
}

cm_status
cm_kernels_launch(cm_kernels *kernels, int device, const cm_convert *convert,
                  const cm_layout *layout, cm_address dst, cm_address src,
                  uint64_t stream)
{
    uint64_t function;
    cm_strided_job job;
    int64_t index[CM_MAX_NDIM] = {0};
    if (layout->run_nbytes == 0) {
        return cm_ok();
    }
    CM_TRY(cm_kernels_find(kernels, CM_KERNEL_STRIDED, device, &function));
    int outer = cm_strided_job_init(&job, layout, dst, src);
    if (convert != NULL) {
        job.from = convert->from;
        job.scales = convert->scales;
        job.scale = (float)convert->scale;
        job.offset = (float)convert->offset;
    }
    uint64_t blocks = (job.count + THREADS_PER_BLOCK - 1) / THREADS_PER_BLOCK;
    uint32_t block_count =
        blocks > MAX_BLOCK_COUNT ? MAX_BLOCK_COUNT : (uint32_t)blocks;
    int64_t offset[2] = {(int64_t)job.dst, (int64_t)job.src};
    do {
        job.dst = (cm_address)offset[CM_DST];
        job.src = (cm_address)offset[CM_SRC];
        CM_TRY(cm_rt_kernel_launch(kernels->rt, function, block_count,
                                   THREADS_PER_BLOCK, &job, sizeof(job), stream));
    } while (cm_layout_step(layout, outer, -1, index, offset));
    return cm_ok();
}
