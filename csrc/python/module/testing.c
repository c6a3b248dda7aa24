/* SPDX-License-Identifier: Apache-2.0 */
/* cumem._core._testing: hooks for the test-suite. Not part of the public interface. The
 * functions get the extension itself as their module, where the state is. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/module/module.h"
#include "python/protocols/protocols.h"
#include "runtime/emulated/emulated.h"
#include "runtime/faults.h"

#define FAST(function) ((PyCFunction)(void (*)(void))(function))
enum { KEYWORDS = METH_FASTCALL | METH_KEYWORDS };

/* An int from `least` to `most`; an absent one (NULL or None) leaves *out alone. */
static int
read_int(PyObject *object, const char *name, int64_t least, int64_t most, int64_t *out)
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
    if (read_int(values[DEVICES], "device_count", 0, CM_MAX_DEVICES, &devices) < 0
        || read_int(values[MEMORY], "memory_nbytes", 1, INT64_MAX, &memory) < 0
        || read_int(values[DRIVER], "driver_version", 1000, 1000000, &driver) < 0
        || read_int(values[DELAY], "max_delay_us", 0, 10000000, &delay) < 0
        || read_int(values[SEED], "seed", 0, INT64_MAX, &seed) < 0
        || read_int(values[PEERS], "peers", 0, 1, &peers) < 0) {
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

/* -- calls of the runtime: counted, failed, delayed -- */

/* An operation by either of its names; None is any. */
static int
parse_op(PyObject *object, cm_op *out)
{
    *out = CM_OP_none;
    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (!PyUnicode_Check(object)) {
        return cm_arg_refuse(object, "op", "a str or None");
    }
    for (int op = CM_OP_none + 1; op < CM_OP_COUNT; op++) {
        if (PyUnicode_CompareWithASCIIString(object, cm_op_name((cm_op)op)) == 0
            || PyUnicode_CompareWithASCIIString(object, cm_op_cuda_name((cm_op)op))
                   == 0) {
            *out = (cm_op)op;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "op: there is no operation %R", object);
    return -1;
}

static PyObject *
op_names(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *list = PyList_New(0);
    for (int op = CM_OP_none + 1; list != NULL && op < CM_OP_COUNT; op++) {
        PyObject *row =
            Py_BuildValue("ssi", cm_op_name((cm_op)op), cm_op_cuda_name((cm_op)op),
                          cm_op_min_driver((cm_op)op));
        if (row == NULL || PyList_Append(list, row) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(row);
    }
    return list;
}

static cm_runtime *
faults_runtime(PyObject *module)
{
    cm_runtime *rt = cm_state_runtime(cm_state_of_module(module));
    if (rt != NULL && !cm_is_faults(rt)) {
        PyErr_SetString(PyExc_RuntimeError, "opened without configure(faults=True)");
        return NULL;
    }
    return rt;
}

PyDoc_STRVAR(plan_fault_doc,
"plan_fault($module, /, op, nth, code=2, repeat=False)\n--\n\n"
"Let the `nth` call (1 is the next) of an operation fail; 0 ends it. Resets the counts.");

static PyObject *
plan_fault(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"op", "nth", "code", "repeat", NULL};
    PyObject *values[4];
    int64_t nth = 0;
    int64_t code = CM_CUDA_OUT_OF_MEMORY;
    bool repeat = false;
    cm_op op;
    if (cm_args_parse("plan_fault", args, nargs, kwnames, names, 4, 2, values) < 0
        || parse_op(values[0], &op) < 0
        || read_int(values[1], "nth", 0, INT64_MAX, &nth) < 0
        || read_int(values[2], "code", INT32_MIN, INT32_MAX, &code) < 0
        || (values[3] != NULL && cm_arg_bool(values[3], "repeat", &repeat) < 0)) {
        return NULL;
    }
    cm_runtime *rt = faults_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_faults_plan(rt, op, (uint64_t)nth, (int32_t)code, repeat);
    Py_RETURN_NONE;
}

static PyObject *
fault_count(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
            PyObject *kwnames)
{
    static const char *const names[] = {"op", NULL};
    PyObject *value;
    cm_op op;
    if (cm_args_parse("fault_count", args, nargs, kwnames, names, 1, 0, &value) < 0
        || parse_op(value, &op) < 0) {
        return NULL;
    }
    const cm_runtime *rt = faults_runtime(module);
    return rt == NULL ? NULL : PyLong_FromUnsignedLongLong(cm_faults_count(rt, op));
}

static PyObject *
fault_struck(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_runtime *rt = faults_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_op op = cm_faults_struck(rt);
    if (op == CM_OP_none) {
        Py_RETURN_NONE;
    }
    return PyUnicode_FromString(cm_op_name(op));
}

static PyObject *
delay_op(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"op", "us", NULL};
    PyObject *values[2];
    int64_t delay = 0;
    cm_op op;
    if (cm_args_parse("delay_op", args, nargs, kwnames, names, 2, 2, values) < 0
        || parse_op(values[0], &op) < 0
        || read_int(values[1], "us", 0, UINT32_MAX, &delay) < 0) {
        return NULL;
    }
    cm_runtime *rt = faults_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_faults_delay(rt, op, (uint32_t)delay);
    Py_RETURN_NONE;
}

static PyObject *
calls_with_gil(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = faults_runtime(module);
    PyObject *counts = rt == NULL ? NULL : PyDict_New();
    for (int op = 1; counts != NULL && op < CM_OP_COUNT; op++) {
        uint64_t count = cm_faults_count_held(rt, (cm_op)op);
        PyObject *number = count == 0 ? NULL : PyLong_FromUnsignedLongLong(count);
        if (count != 0
            && (number == NULL
                || PyDict_SetItemString(counts, cm_op_name((cm_op)op), number) < 0)) {
            Py_CLEAR(counts);
        }
        Py_XDECREF(number);
    }
    return counts;
}

/* -- the emulated device: gates, capture, counts, the host's side of memory -- */

static cm_runtime *
emulated_runtime(PyObject *module)
{
    cm_runtime *rt = cm_state_runtime(cm_state_of_module(module));
    if (rt != NULL && rt->backend != CM_BACKEND_EMULATED) {
        PyErr_SetString(PyExc_RuntimeError, "only on the emulated device");
        return NULL;
    }
    return rt;
}

static PyObject *
finish(PyObject *module, cm_status status)
{
    if (!cm_is_ok(status)) {
        return cm_py_raise(cm_state_of_module(module), status, NULL);
    }
    Py_RETURN_NONE;
}

typedef cm_status (*stream_action)(cm_runtime *rt, uint64_t stream, bool on);

/* Act on a stream argument with its device current. */
static PyObject *
act_on_stream(PyObject *module, PyObject *object, stream_action action, bool on)
{
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(cm_state_of_module(module), object, -1);
    if (stream == NULL) {
        return NULL;
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    cm_device_guard guard;
    status = cm_device_enter(rt, stream->device, &guard);
    if (cm_is_ok(status)) {
        status = action(rt, cm_stream_tell_handle(stream), on);
        cm_device_leave(rt, &guard);
    }
    Py_END_ALLOW_THREADS
    cm_stream_give(cm_state_of_module(module), stream);
    return finish(module, status);
}

static cm_status
move_gate(cm_runtime *rt, uint64_t stream, bool open)
{
    return open ? cm_emulated_gate_open(rt, stream)
                : cm_emulated_gate_close(rt, stream);
}

static PyObject *
gate_close(PyObject *module, PyObject *stream)
{
    return act_on_stream(module, stream, move_gate, false);
}

static PyObject *
gate_open(PyObject *module, PyObject *stream)
{
    return act_on_stream(module, stream, move_gate, true);
}

static PyObject *
set_capturing(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    static const char *const names[] = {"stream", "on", NULL};
    PyObject *values[2];
    bool on;
    if (cm_args_parse("set_capturing", args, nargs, kwnames, names, 2, 2, values) < 0
        || cm_arg_bool(values[1], "on", &on) < 0) {
        return NULL;
    }
    return act_on_stream(module, values[0], cm_emulated_set_capturing, on);
}

static const struct {
    const char *name;
    size_t offset;
} count_list[] = {
#define COUNT_ROW(name) {#name, offsetof(cm_emulated_counts, name)},
    CM_EMULATED_COUNTS(COUNT_ROW)
#undef COUNT_ROW
};

static PyObject *
counts(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    cm_emulated_counts read;
    cm_emulated_read_counts(rt, &read);
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict != NULL && i < sizeof count_list / sizeof *count_list;
         i++) {
        uint64_t count;
        memcpy(&count, (const char *)&read + count_list[i].offset, sizeof count);
        PyObject *value = PyLong_FromUnsignedLongLong(count);
        if (value == NULL
            || PyDict_SetItemString(dict, count_list[i].name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *
host_pages(PyObject *module, PyObject *object)
{
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL) {
        return NULL;
    }
    if (Py_TYPE(object) != state->managed_type) {
        cm_arg_refuse(object, "buffer", "a ManagedBuffer");
        return NULL;
    }
    const cm_buffer *buffer = (const cm_buffer *)(const void *)object;
    uint64_t pages = 0;
    cm_status status = cm_emulated_host_pages(rt, cm_buffer_address(buffer),
                                              cm_buffer_nbytes(buffer), &pages);
    return cm_is_ok(status) ? PyLong_FromUnsignedLongLong(pages)
                            : cm_py_raise(state, status, NULL);
}

static PyObject *
alias(PyObject *module, PyObject *args)
{
    unsigned long long address;
    unsigned long long nbytes;
    const cm_runtime *rt = emulated_runtime(module);
    if (rt == NULL || !PyArg_ParseTuple(args, "KK:alias", &address, &nbytes)) {
        return NULL;
    }
    void *host = cm_runtime_host_alias(rt, address, nbytes);
    if (host == NULL) {
        PyErr_Format(PyExc_ValueError, "[%llu, +%llu) is inside no live allocation",
                     address, nbytes);
        return NULL;
    }
    return PyLong_FromVoidPtr(host);
}

static PyObject *
array_interface(PyObject *module, PyObject *object)
{
    if (!cm_buffer_check(cm_state_of_module(module), object)) {
        cm_arg_refuse(object, "buffer", "a Buffer");
        return NULL;
    }
    return cm_array_interface_dict(object);
}

static PyObject *
order_consumer(PyObject *module, PyObject *args)
{
    PyObject *object;
    PyObject *stream_object;
    cm_state *state = cm_state_of_module(module);
    if (!PyArg_ParseTuple(args, "OO:order_consumer", &object, &stream_object)) {
        return NULL;
    }
    if (!cm_buffer_check(state, object)) {
        cm_arg_refuse(object, "buffer", "a Buffer");
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(state, stream_object, -1);
    if (stream == NULL) {
        return NULL;
    }
    int result = cm_storage_order_handle(((cm_buffer *)(void *)object)->storage,
                                         stream->device, stream->handle);
    cm_stream_give(state, stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
max_delay_us(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_runtime *rt = emulated_runtime(module);
    return rt == NULL ? NULL : PyLong_FromUnsignedLong(cm_emulated_max_delay_us(rt));
}

/* -- calls on files: the nth fails, counted, held -- */

static cm_file_faults *
get_faults(cm_state *state)
{
    if (state->file_faults != NULL) {
        return state->file_faults;
    }
    cm_file_faults *faults = malloc(sizeof(*faults));
    if (faults == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    cm_status status = cm_file_faults_init(faults);
    if (!cm_is_ok(status)) {
        free(faults);
        cm_py_raise(state, status, NULL);
        return NULL;
    }
    state->file_faults = faults;
    return faults;
}

PyDoc_STRVAR(plan_doc,
             "file_plan($module, /, nth=0, error=0, repeat=False, most=0, held=0, "
             "is_cold=False, no_direct=False)\n--\n\n"
             "The nth read or write from now on fails with errno `error` (0: it moves\n"
             "nothing); each moves at most `most` bytes; from number `held` on\n"
             "they wait.");

static PyObject *
file_plan(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"nth",  "error",   "repeat",    "most",
                                        "held", "is_cold", "no_direct", NULL};
    PyObject *values[7];
    int64_t nth = 0;
    int64_t error = 0;
    int64_t most = 0;
    int64_t held = 0;
    cm_file_plan plan = {.nth = 0};
    if (cm_args_parse("file_plan", args, nargs, kwnames, names, 7, 0, values) < 0
        || read_int(values[0], "nth", 0, INT64_MAX, &nth) < 0
        || read_int(values[1], "error", 0, 4095, &error) < 0
        || read_int(values[3], "most", 0, INT64_MAX, &most) < 0
        || read_int(values[4], "held", 0, INT64_MAX, &held) < 0
        || (values[2] != NULL && cm_arg_bool(values[2], "repeat", &plan.repeat) < 0)
        || (values[5] != NULL && cm_arg_bool(values[5], "is_cold", &plan.is_cold) < 0)
        || (values[6] != NULL
            && cm_arg_bool(values[6], "no_direct", &plan.no_direct) < 0)) {
        return NULL;
    }
    plan.nth = (uint64_t)nth;
    plan.error = (int)error;
    plan.most = (uint64_t)most;
    plan.held = (uint64_t)held;
    cm_file_faults *faults = get_faults(cm_state_of_module(module));
    if (faults == NULL) {
        return NULL;
    }
    cm_file_faults_set(faults, &plan);
    Py_RETURN_NONE;
}

static PyObject *
file_counts(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_file_faults *faults = get_faults(cm_state_of_module(module));
    if (faults == NULL) {
        return NULL;
    }
    cm_mutex_lock(&faults->lock);
    unsigned long long count = faults->count;
    unsigned long long direct = faults->direct_count;
    unsigned long long advised = faults->advised_count;
    int opened = faults->open_count;
    cm_mutex_unlock(&faults->lock);
    return Py_BuildValue("(KKKi)", count, direct, advised, opened);
}

static PyObject *
file_await(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_file_faults *faults = get_faults(cm_state_of_module(module));
    if (faults == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    cm_file_faults_await(faults);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *
file_open(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_file_faults *faults = get_faults(cm_state_of_module(module));
    if (faults == NULL) {
        return NULL;
    }
    cm_file_faults_open(faults);
    Py_RETURN_NONE;
}

/* -- the module -- */

static PyMethodDef testing_methods[] = {
    {"configure", FAST(configure), KEYWORDS, configure_doc},
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
    {"op_names", op_names, METH_NOARGS, "(name, CUDA's name, oldest driver) of each."},
    {"plan_fault", FAST(plan_fault), KEYWORDS, plan_fault_doc},
    {"fault_count", FAST(fault_count), KEYWORDS, "Calls since the last plan_fault()."},
    {"fault_struck", fault_struck, METH_NOARGS, "The operation made to fail, or None."},
    {"delay_op", FAST(delay_op), KEYWORDS, "Delay each call by so many microseconds."},
    {"calls_with_gil", calls_with_gil, METH_NOARGS,
     "Runtime calls made with the GIL held, by operation."},
    {"gate_close", gate_close, METH_O, "Hold a stream shut."},
    {"gate_open", gate_open, METH_O, "Let it go on."},
    {"set_capturing", FAST(set_capturing), KEYWORDS, "Put a stream into capture."},
    {"counts", counts, METH_NOARGS, "Live objects of the emulated device."},
    {"host_pages", host_pages, METH_O,
     "Pages of a ManagedBuffer that are on the host."},
    {"alias", alias, METH_VARARGS, "The same bytes where the host may touch them."},
    {"array_interface", array_interface, METH_O,
     "The __cuda_array_interface__ that the buffer would have on a GPU."},
    {"order_consumer", order_consumer, METH_VARARGS,
     "Order a stream after the buffer's work, as DLPack does for a consumer's."},
    {"max_delay_us", max_delay_us, METH_NOARGS, "Longest delay of emulated work."},
    {"file_plan", FAST(file_plan), KEYWORDS, plan_doc},
    {"file_counts", file_counts, METH_NOARGS,
     "Reads and writes since the plan; those past the page cache; announcements; "
     "descriptors past the page cache that are open now."},
    {"file_await", file_await, METH_NOARGS, "Wait until the held call waits."},
    {"file_open", file_open, METH_NOARGS, "Let it go on."},
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
        result = PyModule_AddObjectRef(module, "_testing", testing);
    }
    Py_DECREF(testing);
    return result;
}
