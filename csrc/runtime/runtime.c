/* SPDX-License-Identifier: Apache-2.0 */
/* What all runtimes share: what is known of kinds and operations, the page that
 * tells a forked child, and entering a device. */
#include "runtime/runtime.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "base/machine.h"

const cm_kind_fact cm_kinds[CM_KIND_COUNT] = {
#define KIND_FACT(name, text, traits, flags) {#text, (traits), (flags)},
    CM_KINDS(KIND_FACT)
#undef KIND_FACT
};

const cm_op_fact cm_op_facts[CM_OP_COUNT] = {
#define OP_FACT(name, cuda, driver, arg, params, args)                                 \
    [CM_OP_##name] = {#name, #cuda, CM_ARGUMENT_KIND arg, (driver)},
    CM_OPS(OP_FACT)
#undef OP_FACT
};

/* ---- the page that the kernel wipes on fork --------------------------------------- */

cm_status
cm_alive_page_create(const volatile uint32_t **out)
{
    void *page = mmap(NULL, cm_page_nbytes(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) {
        return cm_fail(CM_ESYSTEM, (uint64_t)errno);
    }
    if (madvise(page, cm_page_nbytes(), MADV_WIPEONFORK) != 0) {
        uint64_t error = (uint64_t)errno;
        (void)munmap(page, cm_page_nbytes());
        return cm_fail(CM_ESYSTEM, error);
    }
    *(volatile uint32_t *)page = 1;
    /* From here on nobody writes it, which makes reading it without a lock safe. */
    (void)mprotect(page, cm_page_nbytes(), PROT_READ);
    *out = (const volatile uint32_t *)page;
    return cm_ok();
}

void
cm_alive_page_destroy(const volatile uint32_t *page)
{
    if (page != NULL) {
        (void)munmap((void *)(uintptr_t)page, cm_page_nbytes());
    }
}

/* ---- entering a device without changing it for the caller ------------------------- */

/* What was current is put back even when it was "no context", so that nothing is ever
 * created on device 0 by accident. */

/* The next call on this thread counts on it. */
static void
put_back(cm_runtime *rt, uint64_t context)
{
    (void)CM_TRY_TWICE(cm_rt_context_set(rt, context));
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
    guard->switched = cm_is_ok(status);
    bool is_gone = status.code == CM_CUDA_DEVICE_UNINITIALIZED
                   || status.code == CM_CUDA_CONTEXT_DESTROYED;
    return is_gone ? enter_by_device(rt, device, guard) : status;
}

/* One that was entered comes first: its context is known. */
int
cm_device_with_context(cm_runtime *rt, int preferred)
{
    uint64_t entered = cm_devices_in_use(rt, false);
    uint64_t devices = entered != 0 ? entered : cm_devices_in_use(rt, true);
    if (preferred >= 0 && preferred < CM_MAX_DEVICES && (devices >> preferred & 1) != 0) {
        return preferred;
    }
    return devices == 0 ? -1 : __builtin_ctzll(devices);
}

cm_status
cm_device_enter_any(cm_runtime *rt, int device, cm_device_guard *guard)
{
    uint64_t context = 0;
    *guard = (cm_device_guard){0, false};
    CM_TRY(cm_rt_context_get(rt, &context));
    if (context != 0) {
        return cm_ok();
    }
    int other = cm_device_with_context(rt, device);
    return cm_device_enter(rt, other < 0 ? device : other, guard);
}

cm_status
cm_host_may_be_locked(cm_runtime *rt, bool *out)
{
    uint64_t context = 0;
    *out = true;
    CM_TRY(cm_rt_context_get(rt, &context));
    *out = context != 0 || cm_device_with_context(rt, -1) >= 0;
    return cm_ok();
}

bool
cm_device_was_entered(const cm_runtime *rt, int device)
{
    return device >= 0 && device < CM_MAX_DEVICES
           && atomic_load_explicit(&rt->primary[device], memory_order_relaxed) != 0;
}

uint64_t
cm_devices_in_use(cm_runtime *rt, bool by_anyone)
{
    uint64_t devices = 0;
    for (int d = 0; d < rt->device_count; d++) {
        bool active = cm_device_was_entered(rt, d);
        if (!active && by_anyone) {
            active = true;
            cm_ignore(cm_rt_context_is_active(rt, d, &active));
        }
        devices |= active ? UINT64_C(1) << d : 0;
    }
    return devices;
}

void
cm_device_leave(cm_runtime *rt, const cm_device_guard *guard)
{
    if (guard->switched) {
        put_back(rt, guard->previous);
    }
}
