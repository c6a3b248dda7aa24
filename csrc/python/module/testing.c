/* SPDX-License-Identifier: Apache-2.0 */
/* cumem._core._testing: hooks for the test-suite. Not part of the public interface. */
#include "python/module/testing.h"

#include <dlfcn.h>
#include <string.h>

#include "python/core/arguments.h"
#include "python/module/module.h"
#include "python/module/state_config.h"

/* An int from `least` to `most`; an absent one (NULL or None) leaves *out alone. */
int
cm_testing_int(PyObject *object, const char *name, int64_t least, int64_t most,
               int64_t *out)
{
    if (object == NULL || object == Py_None) {
        return 0;
    }
    int64_t value;
    if (cm_arg_int64(object, name, &value) < 0) {
        return -1;
    }
    if (value < least || value > most) {
        PyErr_Format(PyExc_ValueError, "%s must be from %lld to %lld, not %lld", name,
                     (long long)least, (long long)most, (long long)value);
        return -1;
    }
    *out = value;
    return 0;
}

/* -- what is opened ---------------------------------------------------------------- */

static int
override_backend(PyObject *object, cm_state_override *out)
{
    if (object == NULL || object == Py_None) {
        return 0;
    }
    out->has_backend = true;
    if (PyUnicode_Check(object)
        && PyUnicode_CompareWithASCIIString(object, "cuda") == 0) {
        out->backend = CM_BACKEND_CUDA;
        return 0;
    }
    if (PyUnicode_Check(object)
        && PyUnicode_CompareWithASCIIString(object, "emulated") == 0) {
        out->backend = CM_BACKEND_EMULATED;
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "backend must be \"cuda\" or \"emulated\", not %R",
                 object);
    return -1;
}

/* `values` are device_count … peers; what is not given comes from the environment. */
static int
override_emulated(PyObject *const *values, cm_state_override *out)
{
    enum { DEVICES, MEMORY, DRIVER, DELAY, SEED, PEERS, COUNT };
    cm_emulated_config *config = &out->emulated;
    if (cm_config_read_emulated(config) < 0) {
        return -1;
    }
    int64_t devices = config->device_count;
    int64_t memory = (int64_t)config->memory_nbytes;
    int64_t driver = config->driver_version;
    int64_t delay = config->max_delay_us;
    int64_t seed = 0;
    int64_t peers = !config->apart;
    if (cm_testing_int(values[DEVICES], "device_count", 0, CM_MAX_DEVICES, &devices) < 0
        || cm_testing_int(values[MEMORY], "memory_nbytes", 1, INT64_MAX, &memory) < 0
        || cm_testing_int(values[DRIVER], "driver_version", 1000, 1000000, &driver) < 0
        || cm_testing_int(values[DELAY], "max_delay_us", 0, 10000000, &delay) < 0
        || cm_testing_int(values[SEED], "seed", 0, INT64_MAX, &seed) < 0
        || cm_testing_int(values[PEERS], "peers", 0, 1, &peers) < 0) {
        return -1;
    }
    for (int i = 0; i < COUNT; i++) {
        out->has_emulated |= values[i] != NULL && values[i] != Py_None;
    }
    config->device_count = (int)devices;
    config->memory_nbytes = (uint64_t)memory;
    config->driver_version = (int)driver;
    config->max_delay_us = (uint32_t)delay;
    if (values[SEED] != NULL && values[SEED] != Py_None) {
        config->seed = (uint64_t)seed;
    }
    config->apart = peers == 0;
    config->reason = "";
    return 0;
}

/* PyGILState_Check, which the limited API leaves out; NULL if there is none. */
static void
find_gil_check(int (**out)(void))
{
    void *symbol = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    memcpy(out, &symbol, sizeof(*out));
}

PyDoc_STRVAR(configure_doc,
"configure($module, /, *, backend=None, faults=False, device_count=None,\n"
"          memory_nbytes=None, driver_version=None, max_delay_us=None, seed=None,\n"
"          peers=None)\n--\n\n"
"What is opened at the next first use; without arguments as the environment says.\n\n"
"Raises\n------\nRuntimeError\n    If the runtime is open: shut it down first.");

static PyObject *
configure(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {
        "backend",       "faults",         "device_count",
        "memory_nbytes", "driver_version", "max_delay_us",
        "seed",          "peers",          NULL};
    PyObject *values[8];
    cm_state *state = cm_state_of_module(module);
    cm_state_override override;
    memset(&override, 0, sizeof override);
    if (cm_args_parse("configure", args, nargs, kwnames, names, 0, 0, values) < 0) {
        return NULL;
    }
    if (state->runtime != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the runtime is open: shut it down first");
        return NULL;
    }
    if (override_backend(values[0], &override) < 0
        || (values[1] != NULL && cm_arg_bool(values[1], "faults", &override.faults) < 0)
        || override_emulated(values + 2, &override) < 0) {
        return NULL;
    }
    find_gil_check(&override.has_gil);
    state->override = override;
    Py_RETURN_NONE;
}

static PyObject *
opened(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(cm_state_of_module(module)->runtime != NULL);
}

/* -- what is alive ----------------------------------------------------------------- */

static PyObject *
check_pools(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    for (int kind = 0; kind < CM_KIND_COUNT; kind++) {
        for (int flags = 0; flags < CM_POOL_FLAG_SLOTS; flags++) {
            for (int device = 0; device < CM_MAX_DEVICES; device++) {
                cm_pool *pool = state->pools[kind][flags][device];
                if (pool != NULL && !cm_pool_check(pool)) {
                    Py_RETURN_FALSE;
                }
            }
        }
    }
    Py_RETURN_TRUE;
}

static PyObject *
live_storages(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    long count = 0;
    for (cm_list *node = state->storages.next; node != &state->storages;
         node = node->next) {
        count++;
    }
    return PyLong_FromLong(count);
}

static PyObject *
registrations(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    uint64_t count = state->registry == NULL ? 0 : cm_registry_count(state->registry);
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *
pending_transfers(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    uint64_t count = state->engine == NULL ? 0 : cm_engine_count_pending(state->engine);
    return PyLong_FromUnsignedLongLong(count);
}

static PyObject *
poll(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    if (state->runtime == NULL) {
        cm_state_drop_deferred(state);
        Py_RETURN_NONE;
    }
    if (state->engine != NULL) {
        Py_BEGIN_ALLOW_THREADS
        cm_engine_poll(state->engine);
        Py_END_ALLOW_THREADS
    }
    if (cm_state_runtime(state) == NULL) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
defer(PyObject *module, PyObject *object)
{
    cm_deferred *deferred = cm_deferred_new(cm_state_of_module(module), object);
    if (deferred == NULL) {
        return NULL;
    }
    cm_deferred_add(deferred);
    Py_RETURN_NONE;
}

static PyObject *
deny_peers(PyObject *module, PyObject *object)
{
    bool denied;
    cm_engine *engine = cm_state_engine(cm_state_of_module(module), -1);
    if (engine == NULL || cm_arg_bool(object, "denied", &denied) < 0) {
        return NULL;
    }
    cm_engine_deny_peers(engine, denied);
    Py_RETURN_NONE;
}

/* -- table ------------------------------------------------------------------------- */

static PyObject *
calibrate_emulated(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state_of_module(module)->tuning.as_real = true;
    Py_RETURN_NONE;
}

static PyMethodDef testing_methods[] = {
    {"configure", CM_TESTING_FAST(configure), CM_TESTING_KEYWORDS, configure_doc},
    {"opened", opened, METH_NOARGS, "True while a runtime is open."},
    {"check_pools", check_pools, METH_NOARGS, "True when the pools' equations hold."},
    {"live_storages", live_storages, METH_NOARGS, "Storages that are not given back."},
    {"registrations", registrations, METH_NOARGS, "Pieces that we page-locked."},
    {"pending_transfers", pending_transfers, METH_NOARGS, "Unfinished transfers."},
    {"deny_peers", deny_peers, METH_O, "Copy as if no device reached another, or not."},
    {"poll", poll, METH_NOARGS, "Let go of what is done."},
    {"defer", defer, METH_O,
     "Drop a reference at the next use, as a finished copy does."},
    {"calibrate_emulated", calibrate_emulated, METH_NOARGS,
     "Copies ask for figures as on a real device, until shutdown()."},
    {NULL, NULL, 0, NULL},
};

/* Put the functions of one table into the submodule. */
static int
add_functions(PyObject *module, PyObject *testing, PyMethodDef *methods)
{
    for (PyMethodDef *def = methods; def->ml_name != NULL; def++) {
        PyObject *function = PyCFunction_NewEx(def, module, NULL);
        int result = function == NULL
                         ? -1
                         : PyObject_SetAttrString(testing, def->ml_name, function);
        Py_XDECREF(function);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

int
cm_register_testing(PyObject *module, cm_state *Py_UNUSED(state))
{
    PyObject *testing = PyModule_New("cumem._core._testing");
    if (testing == NULL) {
        return -1;
    }
    int result = PyModule_SetDocString(testing, "Hooks for the test-suite.");
    if (result == 0) {
        result = add_functions(module, testing, testing_methods);
    }
    if (result == 0) {
        result = add_functions(module, testing, cm_testing_fault_methods);
    }
    if (result == 0) {
        result = add_functions(module, testing, cm_testing_emulated_methods);
    }
    if (result == 0) {
        result = add_functions(module, testing, cm_testing_file_methods);
    }
    if (result == 0) {
        result = PyModule_AddObjectRef(module, "_testing", testing);
    }
    Py_DECREF(testing);
    return result;
}
