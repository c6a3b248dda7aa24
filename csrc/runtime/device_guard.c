/* SPDX-License-Identifier: Apache-2.0 */
/* Entering a device without changing it for the caller: what was current is put back
 * even when it was "no context", so that nothing is ever created on device 0 by
 * accident. */
#include <stdatomic.h>

#include "runtime/runtime.h"

/* With a second try: whoever comes next on this thread counts on it. Beyond that there
 * is nothing to undo and nobody to tell. */
static void
put_back(cm_runtime *rt, uint64_t context)
{
    if (!cm_is_ok(cm_rt_context_set(rt, context))) {
        cm_status ignored = cm_rt_context_set(rt, context);
        (void)ignored;
    }
}

/* The first time, or after a device reset, only cudaSetDevice can say which context is
 * the device's primary one. */
static cm_status
enter_by_device(cm_runtime *rt, int device, cm_device_guard *guard)
{
    CM_TRY(cm_rt_device_set(rt, device));
    uint64_t context = 0;
    cm_status status = cm_rt_context_get(rt, &context);
    if (!cm_is_ok(status)) {
        put_back(rt, guard->previous);
        return status;
    }
    uint64_t before =
        atomic_exchange_explicit(&rt->primary[device], context, memory_order_relaxed);
    if (before != context) {
        (void)atomic_fetch_add_explicit(&rt->context_count, 1, memory_order_release);
    }
    guard->switched = context != guard->previous;
    return cm_ok();
}

cm_status
cm_device_enter(cm_runtime *rt, int device, cm_device_guard *guard)
{
    *guard = (cm_device_guard){0, false};
    if (device < 0 || device >= rt->device_count || device >= CM_MAX_DEVICES) {
        return (cm_status){CM_CUDA_INVALID_DEVICE, CM_OP_device_set, 0,
                           (uint64_t)(int64_t)device};
    }
    CM_TRY(cm_rt_context_get(rt, &guard->previous));
    uint64_t primary = atomic_load_explicit(&rt->primary[device], memory_order_relaxed);
    if (primary == 0) {
        return enter_by_device(rt, device, guard);
    }
    if (primary == guard->previous) {
        return cm_ok();
    }
    cm_status status = cm_rt_context_set(rt, primary);
    if (cm_is_ok(status)) {
        guard->switched = true;
        return status;
    }
    if (status.code == CM_CUDA_DEVICE_UNINITIALIZED
        || status.code == CM_CUDA_CONTEXT_DESTROYED) {
        return enter_by_device(rt, device, guard);
    }
    return status;
}

bool
cm_device_was_entered(const cm_runtime *rt, int device)
{
    return device >= 0 && device < CM_MAX_DEVICES
           && atomic_load_explicit(&rt->primary[device], memory_order_relaxed) != 0;
}

void
cm_device_leave(cm_runtime *rt, const cm_device_guard *guard)
{
    if (guard->switched) {
        put_back(rt, guard->previous);
    }
}
