/* SPDX-License-Identifier: Apache-2.0 */
/* Opens the devices of the process: at first use, again after a shutdown, and in a
 * forked child.
 *
 * The package reads the settings and decides; the driver is loaded and asked here. CUDA
 * is tried unless emulation was asked for. If CUDA does not open, the package decides
 * what to do (fall_back()): either the emulated device is opened, with a warning, or an
 * error gives the reason why the GPU cannot be used.
 *
 * The GIL is released while the driver starts, which takes long. Other threads that
 * need the runtime meanwhile wait for the one that opens it. So after each such gap
 * this file looks whether another thread was faster. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "python/buffer/storage.h"
#include "python/copy/configure.h"
#include "python/core/errors.h"
#include "python/core/recording.h"
#include "python/device/wait.h"
#include "python/module/module.h"
#include "python/pool/allocate.h"
#include "python/pool/limits.h"
#include "runtime/emulated/emulated.h"
#include "runtime/faults.h"

enum { OPENING_NAP_NS = 1000 * 1000 }; /* a driver takes a hundred times as long */

/* The plan of what to open. It is made with the GIL, before the GIL is released. */
typedef struct opening {
    bool tries_cuda;
    bool may_emulate;   /* if CUDA is not tried, or does not open */
    bool fell_back;     /* CUDA did not open, and emulation was not asked for */
    bool shows_ranges;  /* a profiler's tool is attached, if there is one */
    bool faults;        /* the runtime is wrapped by cm_faults_open() */
    int driver_version; /* 0 if there is no driver */
    int device_count;   /* see count_devices() */
    cm_status counted;  /* why there are no devices, as count_devices() found out */
    cm_emulated_config emulated;
} opening;

/* Read the number that each emulated device has in its machine. It is stored plus 1,
 * since 0 means that the number is the device's index. Returns 0, or -1 with an
 * exception. */
static int
read_numbers(PyObject *settings, cm_emulated_config *config)
{
    char *number;
    Py_ssize_t count;
    PyObject *numbers = PyObject_GetAttrString(settings, "numbers");
    if (numbers == NULL || PyBytes_AsStringAndSize(numbers, &number, &count) < 0) {
        Py_XDECREF(numbers);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count && i < CM_MAX_DEVICES; i++) {
        config->numbers[i] = (uint8_t)(number[i] + 1);
    }
    Py_DECREF(numbers);
    return 0;
}

static int
read_settings(PyObject *settings, opening *plan)
{
    cm_emulated_config *config = &plan->emulated;
    uint64_t delay_us;
    bool has_peers, is_concurrent;
    if (cm_member_flag(settings, "tries_cuda", &plan->tries_cuda) < 0
        || cm_member_flag(settings, "may_emulate", &plan->may_emulate) < 0
        || cm_member_flag(settings, "shows_ranges", &plan->shows_ranges) < 0
        || cm_member_int(settings, "device_count", &config->device_count) < 0
        || cm_member_uint64(settings, "memory_nbytes", &config->memory_nbytes) < 0
        || cm_member_int(settings, "driver_version", &config->driver_version) < 0
        || cm_member_uint64(settings, "max_delay_us", &delay_us) < 0
        || cm_member_uint64(settings, "seed", &config->seed) < 0
        || cm_member_flag(settings, "has_peers", &has_peers) < 0
        || cm_member_flag(settings, "is_concurrent", &is_concurrent) < 0
        || cm_member_flag(settings, "has_faults", &plan->faults) < 0) {
        return -1;
    }
    config->max_delay_us = (uint32_t)delay_us;
    config->apart = !has_peers;
    config->in_turn = !is_concurrent;
    return read_numbers(settings, config);
}

/* Read the plan. cumem/devices/device.py reads the environment, or what a test has set
 * in its place. Returns 0, or -1 with an exception. */
static int
opening_init(opening *plan)
{
    *plan = (opening){.emulated = {.reason = ""}};
    PyObject *settings =
        cm_package_call("devices.device", "read_settings", PyTuple_New(0));
    if (settings == NULL) {
        return -1;
    }
    int result = read_settings(settings, plan);
    Py_DECREF(settings);
    if (result == 0 && plan->shows_ranges) {
        result = cm_attach_profiler();
    }
    return result;
}

/* Set plan->device_count to the number of devices that the driver has, which
 * cumem/devices/counting.py finds out without starting the driver in this process. Set
 * it to -1 if the driver is to be started, because it is about to be used or because
 * there is no other way to find out. */
static int
count_devices(const cm_state *state, opening *plan)
{
    plan->device_count = -1;
    plan->counted = cm_ok();
    if (!plan->tries_cuda || state->wakes || plan->driver_version == 0) {
        return 0;
    }
    int code, count;
    PyObject *found =
        cm_package_call("devices.counting", "count_devices", PyTuple_New(0));
    if (found == NULL) {
        return -1;
    }
    int result = cm_member_int(found, "code", &code);
    if (result == 0) {
        result = cm_member_int(found, "device_count", &count);
    }
    Py_DECREF(found);
    if (result < 0) {
        return -1;
    }
    if (code != CM_OK || count == 0) {
        plan->counted = (cm_status){.code = code != CM_OK ? code : CM_CUDA_NO_DEVICE,
                                    .op = CM_OP_device_count};
    }
    plan->device_count = count;
    return 0;
}

static cm_status
opening_run(opening *plan, cm_runtime **out)
{
    cm_runtime *runtime = NULL;
    cm_status status = plan->counted;
    if (plan->tries_cuda && !plan->fell_back) {
        status = cm_is_ok(status) ? cm_cuda_open(plan->device_count, &runtime) : status;
    }
    else {
        status = cm_emulated_open(&plan->emulated, &runtime);
    }
    CM_TRY(status);
    if (plan->faults) {
        cm_runtime *wrapper = NULL;
        /* The limited API leaves this function out. dlsym() returns NULL if it is not
         * there. */
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

/* Run the plan without the GIL, while other threads that need a runtime wait. */
static cm_status
opening_run_alone(cm_state *state, opening *plan, cm_runtime **out)
{
    state->opening_process = getpid();
    state->opening = true;
    cm_status status = CM_WITHOUT_GIL(opening_run(plan, out));
    state->opening = false;
    return status;
}

/* Called when CUDA did not open. The package decides whether the emulated device may
 * stand in, since that depends on whether this machine has a GPU that the process was
 * meant to use. Returns 0 after changing the plan, or -1 with the error that says what
 * keeps the GPU from being used. */
static int
fall_back(cm_state *state, opening *plan, cm_status failure)
{
    int result = -1;
    PyObject *why = NULL;
    PyObject *judgement = cm_package_call("devices.gpus", "judge_failure",
                                          Py_BuildValue("(i)", (int)failure.code));
    bool may_emulate;
    if (judgement == NULL
        || cm_member_flag(judgement, "may_emulate", &may_emulate) < 0) {
        goto fail;
    }
    why = PyObject_GetAttrString(judgement, "why");
    const char *text = why == NULL ? NULL : PyUnicode_AsUTF8AndSize(why, NULL);
    if (text == NULL) {
        goto fail;
    }
    if (!may_emulate) {
        (void)cm_py_raise(state, failure, text);
        goto fail;
    }
    (void)snprintf(state->emulation_reason, sizeof(state->emulation_reason), "%s",
                   text);
    plan->emulated.reason = state->emulation_reason;
    plan->fell_back = true;
    result = 0;
fail:
    Py_XDECREF(why);
    Py_XDECREF(judgement);
    return result;
}

/* Wait a while, without the GIL, for the thread that is opening. Returns 0, or -1 with
 * an exception: what a signal handler raised, or RuntimeError in a child that was
 * forked meanwhile, where no thread will finish the opening. */
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

/* Warn once in the life of the process. If the user has made warnings errors, the error
 * undoes the opening. */
static int
warn_of_emulation(cm_state *state, const char *reason)
{
    state->warned = true;
    int result = cm_package_do("devices.device", "warn_of_emulation",
                               Py_BuildValue("(s)", reason));
    state->warned = result == 0;
    return result;
}

/* Install a runtime that was just opened, with its registry and engine. */
static int
adopt(cm_state *state, cm_runtime *runtime)
{
    cm_registry *registry = NULL;
    cm_engine *engine = NULL;
    cm_budget *budget = cm_limits_budget(state, CM_KIND_PINNED, 0);
    cm_status status = cm_registry_create(runtime, budget, &registry);
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
    state->has_several = runtime->device_count > 1;
    /* This fails only after a fork, and nobody has forked since. */
    (void)cm_configure_apply(state);
    return 0;
}

/* Load the driver's library without the GIL, because that may take a while, and count
 * its devices. */
static int
find_driver(cm_state *state, opening *plan)
{
    plan->driver_version = 0;
    if (plan->tries_cuda) {
        state->opening_process = getpid();
        state->opening = true;
        plan->driver_version = CM_WITHOUT_GIL(cm_cuda_find_driver());
        state->opening = false;
    }
    return count_devices(state, plan);
}

/* Open the runtime. Returns 0 if it is open or another thread is opening it, or -1 with
 * an exception. */
static int
open_now(cm_state *state)
{
    opening plan;
    if (cm_errors_load(state) < 0 || cm_limits_find_groups() < 0
        || cm_configure_open(state) < 0 || opening_init(&plan) < 0) {
        return -1;
    }
    if (find_driver(state, &plan) < 0) {
        return -1;
    }
    if (state->runtime != NULL || state->opening) {
        return 0; /* another thread has opened it while the devices were counted */
    }
    cm_runtime *runtime = NULL;
    cm_status status = opening_run_alone(state, &plan, &runtime);
    bool does_not_open = plan.tries_cuda && status.code > 0;
    if (does_not_open && plan.may_emulate) {
        if (fall_back(state, &plan, status) < 0) {
            return -1;
        }
        if (state->runtime != NULL || state->opening) {
            return 0; /* another thread has opened it while the package decided */
        }
        status = opening_run_alone(state, &plan, &runtime);
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status,
                               plan.may_emulate
                                   ? "while opening the runtime; "
                                     "CUMEM_BACKEND=emulated works without a GPU"
                                   : "while opening the CUDA runtime, which "
                                     "CUMEM_BACKEND=cuda asks for");
    }
    int result = 0;
    if (plan.fell_back && !state->warned) {
        /* The warning may run Python code that uses cumem, here or in a thread that it
         * waits for. That code opens a runtime itself, which then serves us too. */
        result = warn_of_emulation(state, state->emulation_reason);
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

/* -- in a forked child -------------------------------------------------------------------- */

/* Forget everything of the parent's. Nothing is given back or waited for, so all of it
 * leaks: the parent's threads are not in the child, and any of its locks may be held by
 * one of these threads. */
static void
forget_parent(cm_state *state)
{
    state->deferred_lock = (cm_mutex)PTHREAD_MUTEX_INITIALIZER;
    cm_list_init(&state->deferred);
    atomic_store(&state->has_deferred, false);
    state->call_pending = false;
    state->call_count = 0;
    state->runtime = NULL;
    state->registry = NULL;
    state->engine = NULL;
    cm_configure_close(state);
}

/* Forget what the parent's driver made, since it does not exist in a child. Host memory
 * is ordinary memory from now on, and everything else is lost. */
static void
forget_driver(cm_state *state)
{
    for (cm_list *n = state->storages.next; n != &state->storages; n = n->next) {
        cm_storage_inherit(CM_LIST_ENTRY(n, cm_storage, node));
    }
    memset(state->pools, 0, sizeof(state->pools));
    memset(state->default_streams, 0, sizeof(state->default_streams));
    memset(state->joining_streams, 0, sizeof(state->joining_streams));
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        Py_CLEAR(state->legacy_streams[device]);
    }
}

/* If the parent never started the driver, the child goes on with the same runtime and
 * the same pools, which hold nothing yet. Otherwise it gets a runtime for the host
 * alone. */
int
cm_state_leave_parent(cm_state *state)
{
    cm_runtime *parent = state->runtime;
    cm_runtime *runtime = parent;
    bool was_awake = cm_runtime_is_awake(parent) || parent->is_host_only;
    cm_status status =
        was_awake ? cm_host_only_open(parent, &runtime) : cm_runtime_revive(parent);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "in a forked child");
    }
    forget_parent(state);
    if (was_awake) {
        forget_driver(state);
    }
    return adopt(state, runtime);
}

int
cm_state_open(cm_state *state)
{
    return state->opening ? wait_while_opening(state) : open_now(state);
}
