/* SPDX-License-Identifier: Apache-2.0 */
/* The process's devices, opened at first use and handed out to the rest of python/. */
#include "python/state.h"

#include <string.h>
#include <unistd.h>

#include "python/configure.h"
#include "python/device_wait.h"
#include "python/errors.h"
#include "python/limits.h"
#include "python/out_of_memory.h"
#include "python/pool_object.h"
#include "python/state_config.h"
#include "runtime/faults.h"

/* Without the GIL a list needs a lock, which costs more than it saves. */
#ifdef Py_GIL_DISABLED
enum { FREE_ROOT_COUNT = 0 };
#else
enum { FREE_ROOT_COUNT = 64 };
#endif

int
cm_state_init(cm_state *state)
{
    cm_limits_init(state);
    cm_list_init(&state->storages);
    cm_list_init(&state->device_waits);
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        state->free_roots[kind].room = FREE_ROOT_COUNT;
    }
    cm_list_init(&state->graveyard);
    cm_status status = cm_mutex_init(&state->graveyard_lock);
    if (cm_is_ok(status)) {
        status = cm_mutex_init(&state->open_lock);
    }
    if (cm_is_ok(status)) {
        status = cm_cond_init(&state->opened);
    }
    if (!cm_is_ok(status)) {
        PyErr_SetString(PyExc_SystemError, "cumem: a lock could not be made");
        return -1;
    }
    return 0;
}

/* The code says that there is no GPU here, not that something is broken. */
static bool
is_no_gpu(cm_status status)
{
    return status.code == CM_CUDA_INSUFFICIENT_DRIVER
           || status.code == CM_CUDA_NO_DEVICE;
}

static const char *
no_gpu_reason(cm_status status)
{
    return status.code == CM_CUDA_NO_DEVICE
               ? "the CUDA driver sees no device (cudaErrorNoDevice)"
               : "no CUDA driver was found, or it is too old "
                 "(cudaErrorInsufficientDriver)";
}

/* What to open, decided with the GIL before it is released. */
typedef struct opening {
    cm_choice choice;
    cm_emulated_config emulated;
    bool faults;
    int (*has_gil)(void);
    const char *fallback_reason; /* set when emulation was fallen back to */
} opening;

static int
opening_init(cm_state *state, opening *plan)
{
    const cm_state_override *override = &state->override;
    plan->fallback_reason = NULL;
    plan->faults = override->faults;
    plan->has_gil = override->has_gil;
    if (cm_configure_open(state) < 0) {
        return -1;
    }
    if (override->has_backend) {
        plan->choice =
            override->backend == CM_BACKEND_CUDA ? CM_CHOICE_CUDA : CM_CHOICE_EMULATED;
    }
    else if (cm_config_read_backend(&plan->choice) < 0) {
        return -1;
    }
    if (override->has_emulated) {
        plan->emulated = override->emulated;
        return 0;
    }
    return cm_config_read_emulated(&plan->emulated);
}

static cm_status
opening_run(opening *plan, cm_runtime **out)
{
    cm_runtime *runtime = NULL;
    cm_status status = cm_ok();
    if (plan->choice != CM_CHOICE_EMULATED) {
        status = cm_cuda_open(&runtime);
        if (plan->choice == CM_CHOICE_ANY && is_no_gpu(status)) {
            plan->fallback_reason = no_gpu_reason(status);
            plan->emulated.reason = plan->fallback_reason;
        }
    }
    if (plan->choice == CM_CHOICE_EMULATED || plan->fallback_reason != NULL) {
        status = cm_emulated_open(&plan->emulated, &runtime);
    }
    CM_TRY(status);
    if (plan->faults) {
        cm_runtime *wrapper = NULL;
        status = cm_faults_open(runtime, &wrapper);
        if (!cm_is_ok(status)) {
            runtime->close(runtime);
            return status;
        }
        runtime = wrapper;
        cm_faults_watch_lock(runtime, plan->has_gil);
    }
    *out = runtime;
    return cm_ok();
}

/* Wait a while without the GIL for the thread that is opening. 0, or -1 with the
 * exception of a signal's handler, or RuntimeError in a child that was forked
 * meanwhile: no thread goes on with it there. */
static int
wait_while_opening(cm_state *state)
{
    if (state->opening_process != getpid()) {
        return cm_py_raise_int(state, cm_fail(CM_EFORKED, 0), NULL);
    }
    Py_BEGIN_ALLOW_THREADS
    uint64_t end = cm_now_ns() + CM_SIGNAL_SLICE_NS;
    cm_mutex_lock(&state->open_lock);
    while (state->opening
           && cm_cond_wait_until(&state->opened, &state->open_lock, end)) {
    }
    cm_mutex_unlock(&state->open_lock);
    Py_END_ALLOW_THREADS
    return PyErr_CheckSignals();
}

static void
set_opening(cm_state *state, bool opening_now)
{
    cm_mutex_lock(&state->open_lock);
    state->opening = opening_now;
    state->opening_process = getpid();
    cm_cond_signal_all(&state->opened);
    cm_mutex_unlock(&state->open_lock);
}

/* Warn once in the life of the process; a warning made an error undoes the opening. */
static int
warn_of_emulation(cm_state *state, const char *reason)
{
    state->warned = true;
    int failed = PyErr_WarnFormat(
        state->emulation_warning, 1,
        "cumem works on an emulated device: %s. Results are right but timings mean "
        "nothing. Set CUMEM_BACKEND=emulated to choose this without the warning, or "
        "CUMEM_BACKEND=cuda to make it an error",
        reason);
    state->warned = failed == 0;
    return failed;
}

/* Install a runtime that was just opened, with its registry and engine. */
static int
adopt(cm_state *state, cm_runtime *runtime)
{
    cm_registry *registry = NULL;
    cm_engine *engine = NULL;
    cm_status status = cm_registry_create(runtime, &registry);
    if (cm_is_ok(status)) {
        status = cm_engine_create(runtime, registry, &engine);
        if (!cm_is_ok(status)) {
            cm_status ignored = cm_registry_close(registry);
            (void)ignored;
        }
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "while opening the runtime");
    }
    cm_engine_set_relief(engine, cm_shortage_relieve, state);
    state->runtime = runtime;
    state->context_count = 0;
    state->registry = registry;
    state->engine = engine;
    state->engine_has_pinned_pool = false;
    memset(state->engine_has_device_pool, 0, sizeof(state->engine_has_device_pool));
    state->current_device = 0;
    (void)cm_configure_apply(state); /* nobody has forked since it was opened */
    return 0;
}

static int
raise_not_open(cm_state *state, const opening *plan, cm_status status)
{
    const char *doing =
        plan->choice == CM_CHOICE_CUDA
            ? "while opening the CUDA runtime, which CUMEM_BACKEND=cuda asks for"
            : "while opening the runtime; CUMEM_BACKEND=emulated works without a GPU";
    return cm_py_raise_int(state, status, doing);
}

/* 0 and the runtime is open, or is being opened by another; or -1. */
static int
open_runtime(cm_state *state)
{
    opening plan;
    if (opening_init(state, &plan) < 0) {
        return -1;
    }
    cm_runtime *runtime = NULL;
    cm_status status;
    set_opening(state, true);
    Py_BEGIN_ALLOW_THREADS
    status = opening_run(&plan, &runtime);
    Py_END_ALLOW_THREADS
    set_opening(state, false);
    if (!cm_is_ok(status)) {
        return raise_not_open(state, &plan, status);
    }
    int result = 0;
    if (plan.fallback_reason != NULL && !state->warned) {
        /* May be Python code that uses cumem, here or in a thread that it waits for:
         * they open a runtime of their own, which then serves us too. */
        result = warn_of_emulation(state, plan.fallback_reason);
    }
    if (result < 0 || state->runtime != NULL || state->opening) {
        runtime->close(runtime);
        return result;
    }
    set_opening(state, true);
    result = cm_limits_open(state, runtime);
    if (result == 0) {
        result = adopt(state, runtime);
    }
    set_opening(state, false);
    if (result < 0) {
        runtime->close(runtime);
    }
    return result;
}

/* Failures of transfers whose handles nobody asked go to the unraisable hook. */
static void
report_unread(cm_state *state)
{
    while (state->engine != NULL) {
        cm_status status = cm_engine_take_unread(state->engine);
        if (cm_is_ok(status)) {
            return;
        }
        cm_py_report(state, status, (PyObject *)state->transfer_type);
    }
}

cm_runtime *
cm_state_runtime(cm_state *state)
{
    while (CM_UNLIKELY(state->runtime == NULL)) {
        if (state->exiting) {
            PyErr_SetString(
                PyExc_RuntimeError,
                "cumem cannot be used any more: the interpreter is exiting");
            return NULL;
        }
        int result = state->opening ? wait_while_opening(state) : open_runtime(state);
        if (result < 0) {
            return NULL;
        }
    }
    if (CM_UNLIKELY(cm_runtime_is_forked(state->runtime))) {
        cm_py_raise(state, cm_fail(CM_EFORKED, 0), NULL);
        return NULL;
    }
    if (CM_UNLIKELY(!cm_state_is_quiet(state))) {
        cm_state_enter(state); /* what is buried or told may be Python code */
        cm_state_bury_dead(state);
        report_unread(state);
        cm_state_leave(state);
    }
    uint64_t contexts =
        atomic_load_explicit(&state->runtime->context_count, memory_order_relaxed);
    if (CM_UNLIKELY(contexts != state->context_count)) {
        cm_state_enter(state);
        cm_pools_admit_peers(state);
        cm_state_leave(state);
    }
    return state->runtime;
}

cm_pool *
cm_state_pool(cm_state *state, cm_kind kind, unsigned flags, int device)
{
    cm_runtime *runtime = cm_state_runtime(state);
    if (runtime == NULL) {
        return NULL;
    }
    if (kind <= CM_KIND_PAGEABLE || kind >= CM_KIND_COUNT || flags >= CM_POOL_FLAG_SLOTS
        || device < 0 || device >= CM_MAX_DEVICES) {
        PyErr_SetString(PyExc_SystemError, "cumem: there is no such pool");
        return NULL;
    }
    cm_pool **slot = &state->pools[kind][flags][device];
    if (CM_UNLIKELY(*slot == NULL)) {
        cm_pool_config config = {.kind = kind,
                                 .device = device,
                                 .flags = flags,
                                 .fence_limit_nbytes = CM_FENCE_LIMIT_NBYTES,
                                 .numa_node = -1,
                                 .budget = cm_limits_budget(state, kind, device)};
        cm_pool *pool = NULL;
        cm_status status = cm_pool_create(runtime, &config, &pool);
        if (!cm_is_ok(status)) {
            cm_py_raise(state, status, "while making a pool");
            return NULL;
        }
        *slot = pool;
    }
    return *slot;
}

cm_engine *
cm_state_engine(cm_state *state, int device)
{
    if (cm_state_runtime(state) == NULL) {
        return NULL;
    }
    if (state->engine == NULL) {
        PyErr_SetString(PyExc_RuntimeError,
                        "cumem cannot copy any more: the interpreter is exiting");
        return NULL;
    }
    if (!state->engine_has_pinned_pool) {
        /* portable memory is pinned for every device, so one pool stages for all */
        int home = device < 0 ? state->current_device : device;
        cm_pool *pool =
            cm_state_pool(state, CM_KIND_PINNED, CM_HOST_ALLOC_PORTABLE, home);
        if (pool == NULL) {
            return NULL;
        }
        cm_engine_set_pinned_pool(state->engine, pool);
        state->engine_has_pinned_pool = true;
    }
    if (device >= 0 && device < CM_MAX_DEVICES
        && !state->engine_has_device_pool[device]) {
        cm_pool *pool = cm_state_pool(state, CM_KIND_DEVICE, 0, device);
        if (pool == NULL) {
            return NULL;
        }
        cm_engine_set_device_pool(state->engine, device, pool);
        state->engine_has_device_pool[device] = true;
    }
    return state->engine;
}
