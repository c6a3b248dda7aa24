/* SPDX-License-Identifier: Apache-2.0 */
/* How the process's devices are opened, at first use and again after a shutdown. */
#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include "python/copy/configure.h"
#include "python/core/errors.h"
#include "python/device/wait.h"
#include "python/module/module.h"
#include "python/pool/allocate.h"
#include "python/pool/limits.h"
#include "runtime/emulated/emulated.h"
#include "runtime/faults.h"

enum { OPENING_NAP_NS = 1000 * 1000 }; /* a driver takes a hundred times that */

/* Why there is no GPU here; NULL where the code says that something is broken. */
static const char *
no_gpu_reason(cm_status status)
{
    switch (status.code) {
    case CM_CUDA_NO_DEVICE:
        return "the CUDA driver sees no device (cudaErrorNoDevice)";
    case CM_CUDA_INSUFFICIENT_DRIVER:
        return "no CUDA driver was found, or it is too old "
               "(cudaErrorInsufficientDriver)";
    default:
        return NULL;
    }
}

/* What to open, decided with the GIL before it is released. */
typedef struct opening {
    bool tries_cuda;
    bool may_emulate; /* where CUDA is not tried, or there is no GPU */
    cm_emulated_config emulated;
    bool faults;                 /* wrapped in cm_faults_open() */
    const char *fallback_reason; /* set when emulation was fallen back to */
} opening;

/* cumem/devices.py reads the environment, and what a test has set in its place. */
static int
opening_init(opening *plan)
{
    cm_emulated_config *config = &plan->emulated;
    unsigned long long memory_nbytes;
    unsigned long long seed;
    unsigned delay_us;
    int tries_cuda, may_emulate, peers, concurrent, faults;
    PyObject *read = cm_package_call("devices", "read_settings", PyTuple_New(0));
    bool known = read != NULL
                 && PyArg_ParseTuple(read, "ppiKiIKppp", &tries_cuda, &may_emulate,
                                     &config->device_count, &memory_nbytes,
                                     &config->driver_version, &delay_us, &seed, &peers,
                                     &concurrent, &faults);
    Py_XDECREF(read);
    if (!known) {
        return -1;
    }
    config->memory_nbytes = memory_nbytes;
    config->max_delay_us = delay_us;
    config->seed = seed;
    config->apart = peers == 0;
    config->in_turn = concurrent == 0;
    config->reason = "";
    plan->tries_cuda = tries_cuda != 0;
    plan->may_emulate = may_emulate != 0;
    plan->faults = faults != 0;
    plan->fallback_reason = NULL;
    return 0;
}

static cm_status
opening_run(opening *plan, cm_runtime **out)
{
    cm_runtime *runtime = NULL;
    cm_status status = cm_ok();
    if (plan->tries_cuda) {
        status = cm_cuda_open(&runtime);
        const char *reason = plan->may_emulate ? no_gpu_reason(status) : NULL;
        if (reason != NULL) {
            plan->fallback_reason = plan->emulated.reason = reason;
        }
    }
    if (!plan->tries_cuda || plan->fallback_reason != NULL) {
        status = cm_emulated_open(&plan->emulated, &runtime);
    }
    CM_TRY(status);
    if (plan->faults) {
        cm_runtime *wrapper = NULL;
        /* which the limited API leaves out; NULL if there is none */
        void *symbol = dlsym(RTLD_DEFAULT, "PyGILState_Check");
        int (*has_gil)(void);
        memcpy(&has_gil, &symbol, sizeof(has_gil));
        status = cm_faults_open(runtime, has_gil, &wrapper);
        if (!cm_is_ok(status)) {
            runtime->close(runtime);
            return status;
        }
        runtime = wrapper;
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
    cm_sleep_ns(OPENING_NAP_NS);
    Py_END_ALLOW_THREADS
    return PyErr_CheckSignals();
}

/* Warn once in the life of the process; a warning made an error undoes the opening. */
static int
warn_of_emulation(cm_state *state, const char *reason)
{
    state->warned = true;
    int result =
        cm_package_do("devices", "warn_of_emulation", Py_BuildValue("(s)", reason));
    state->warned = result == 0;
    return result;
}

/* Install a runtime that was just opened, with its registry and engine. */
static int
adopt(cm_state *state, cm_runtime *runtime)
{
    cm_registry *registry = NULL;
    cm_engine *engine = NULL;
    cm_status status = cm_registry_create(runtime, &registry);
    if (cm_is_ok(status)) {
        status =
            cm_engine_create(runtime, registry, cm_shortage_relieve, state, &engine);
        if (!cm_is_ok(status)) {
            cm_ignore(cm_registry_close(registry));
        }
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "while opening the runtime");
    }
    state->runtime = runtime;
    state->context_count = 0;
    state->registry = registry;
    state->engine = engine;
    memset(state->engine_has_pool, 0, sizeof(state->engine_has_pool));
    state->current_device = 0;
    (void)cm_configure_apply(state); /* nobody has forked since it was opened */
    return 0;
}

/* 0 and the runtime is open, or is being opened by another; or -1. */
static int
open_runtime(cm_state *state)
{
    opening plan;
    if (cm_errors_load(state) < 0 || cm_limits_find_groups() < 0
        || cm_configure_open(state) < 0 || opening_init(&plan) < 0) {
        return -1;
    }
    cm_runtime *runtime = NULL;
    state->opening_process = getpid();
    state->opening = true;
    cm_status status = CM_WITHOUT_GIL(opening_run(&plan, &runtime));
    state->opening = false;
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status,
                               plan.may_emulate
                                   ? "while opening the runtime; "
                                     "CUMEM_BACKEND=emulated works without a GPU"
                                   : "while opening the CUDA runtime, which "
                                     "CUMEM_BACKEND=cuda asks for");
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
    state->opening_process = getpid();
    state->opening = true;
    result = cm_limits_open(state, runtime);
    if (result == 0) {
        result = adopt(state, runtime);
    }
    state->opening = false;
    if (result < 0) {
        runtime->close(runtime);
    }
    return result;
}

int
cm_state_open(cm_state *state)
{
    return state->opening ? wait_while_opening(state) : open_runtime(state);
}
