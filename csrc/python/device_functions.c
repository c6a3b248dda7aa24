/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of the module about devices, the current stream, versions and the pools. */
#include "python/device_functions.h"

#include <stddef.h>

#include "python/arguments.h"
#include "python/errors.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(current_stream_doc,
"current_stream($module, /, device=None)\n--\n\n"
"Stream that functions use when none is given.\n\n"
"Parameters\n----------\n"
"device : int or Device, optional\n    cumem's current device by default.\n\n"
"Returns\n-------\nStream\n"
"    The innermost ``with stream:`` block of this thread or task whose stream belongs to\n"
"    the device, else the device's legacy default stream, with which the default streams of\n"
"    PyTorch and CuPy are ordered.\n\n"
"Raises\n------\n"
"ValueError\n    If the device does not exist.\n"
"CudaError\n    If the driver cannot be opened.");

PyDoc_STRVAR(current_device_doc,
"current_device($module, /)\n--\n\n"
"Device that functions use when none is given: 0 until `set_current_device`.\n\n"
"Returns\n-------\nDevice\n\n"
"Raises\n------\nCudaError\n    If the driver cannot be opened.\n\n"
"Notes\n-----\n"
"It is cumem's own and the same in all threads; CUDA's current device is neither read nor\n"
"changed.");

PyDoc_STRVAR(set_current_device_doc,
"set_current_device($module, device, /)\n--\n\n"
"Choose the device that functions use when none is given.\n\n"
"Parameters\n----------\ndevice : int or Device\n\n"
"Raises\n------\n"
"TypeError\n    If `device` is neither.\n"
"ValueError\n    If the device does not exist.\n"
"CudaError\n    If the driver cannot be opened.\n\n"
"Notes\n-----\n"
"Holds for all threads until `shutdown`. Creates no context.");

PyDoc_STRVAR(device_count_doc,
"device_count($module, /)\n--\n\n"
"Number of devices, real or emulated.\n\n"
"Returns\n-------\nint\n\n"
"Raises\n------\nCudaError\n    If the driver cannot answer.");

PyDoc_STRVAR(memory_info_doc,
"memory_info($module, /, device=None)\n--\n\n"
"Memory of a device as its driver sees it, all processes together.\n\n"
"Parameters\n----------\n"
"device : int or Device, optional\n    cumem's current device by default.\n\n"
"Returns\n-------\ntuple of int\n    Free and total bytes.\n\n"
"Raises\n------\n"
"ValueError\n    If the device does not exist.\n"
"CudaError\n    If the driver cannot answer.\n\n"
"Notes\n-----\n"
"Creates a context on the device if there is none.");

PyDoc_STRVAR(trim_doc,
"trim($module, /)\n--\n\n"
"Give memory that the pools keep for reuse back to the driver.\n\n"
"Returns\n-------\nint\n    Bytes given back.\n\n"
"Raises\n------\nCudaError\n    If the driver refuses; the rest is still given back.\n\n"
"Notes\n-----\n"
"Does not wait for work: memory that a stream may still use stays. **Blocks** while the\n"
"driver frees, GIL released.");

PyDoc_STRVAR(backend_doc,
"backend($module, /)\n--\n\n"
"What cumem works on: \"cuda\", or \"emulated\" where there is no GPU.\n\n"
"Returns\n-------\nstr\n\n"
"Raises\n------\nCudaError\n    If there is a driver that cannot be opened.");

PyDoc_STRVAR(emulation_reason_doc,
"emulation_reason($module, /)\n--\n\n"
"Why devices are emulated.\n\n"
"Returns\n-------\nstr or None\n    None on a real GPU.\n\n"
"Raises\n------\nCudaError\n    If there is a driver that cannot be opened.");

PyDoc_STRVAR(driver_version_doc,
"driver_version($module, /)\n--\n\n"
"Newest CUDA version that the driver serves.\n\n"
"Returns\n-------\ntuple of int\n    Major and minor number, e.g. (13, 0).\n\n"
"Raises\n------\nCudaError\n    If the driver cannot answer.");

PyDoc_STRVAR(runtime_version_doc,
"runtime_version($module, /)\n--\n\n"
"CUDA version of the runtime library that is built in.\n\n"
"Returns\n-------\ntuple of int\n    Major and minor number, e.g. (12, 9).\n\n"
"Raises\n------\nCudaError\n    If the driver cannot be opened.");

PyDoc_STRVAR(pool_counters_doc,
"pool_counters($module, /)\n--\n\n"
"Read what the pools hold, summed over devices and allocation flags.\n\n"
"Returns\n-------\ndict of str to dict of str to int\n"
"    For \"pinned\", \"mapped\", \"managed\" and \"device\": bytes and blocks live (handed out),\n"
"    in flight (freed while work may still run) and cached (ready for reuse);\n"
"    ``reserved_nbytes`` is their sum. ``peak_live_nbytes`` adds up the peaks of each pool.\n"
"    All 0 before the first use.");

PyDoc_STRVAR(shutdown_doc,
"shutdown($module, /, *, reset_devices=False)\n--\n\n"
"Finish all work, join the workers and free everything; the next use starts afresh.\n\n"
"Buffers, streams and events made before are closed.\n\n"
"Parameters\n----------\n"
"reset_devices : bool\n"
"    Also destroy the contexts of the devices that were used, with all that other\n"
"    libraries have on them: for leak checkers.\n\n"
"Raises\n------\n"
"BufferError\n    While a buffer is exported; nothing is done then.\n"
"CudaError\n    If work or a release failed; the rest is still released.\n\n"
"Notes\n-----\n"
"**Blocks** until all work is done, GIL released.");

/* -- streams and devices ----------------------------------------------------------- */

/* An optional device argument of a function that takes nothing else. */
static int
parse_device(const char *function, cm_state *state, PyObject *const *args,
             Py_ssize_t nargs, PyObject *kwnames, int *device)
{
    static const char *const names[] = {"device", NULL};
    PyObject *object;
    if (cm_args_parse(function, args, nargs, kwnames, names, 1, 0, &object) < 0) {
        return -1;
    }
    return cm_arg_device(state, object, "device", device);
}

static PyObject *
current_stream(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    cm_state *state = cm_state_of_module(module);
    int device;
    if (parse_device("current_stream", state, args, nargs, kwnames, &device) < 0) {
        return NULL;
    }
    return cm_current_stream(state, device);
}

static PyObject *
current_device(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    if (cm_state_runtime(state) == NULL) {
        return NULL;
    }
    return cm_device_object_new(state, state->current_device);
}

static PyObject *
set_current_device(PyObject *module, PyObject *object)
{
    cm_state *state = cm_state_of_module(module);
    int device;
    if (object == Py_None) {
        cm_arg_refuse(object, "device", "an int or a Device");
        return NULL;
    }
    if (cm_arg_device(state, object, "device", &device) < 0) {
        return NULL;
    }
    state->current_device = device;
    Py_RETURN_NONE;
}

static PyObject *
memory_info(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
            PyObject *kwnames)
{
    cm_state *state = cm_state_of_module(module);
    int index;
    if (parse_device("memory_info", state, args, nargs, kwnames, &index) < 0) {
        return NULL;
    }
    PyObject *device = cm_device_object_new(state, index);
    if (device == NULL) {
        return NULL;
    }
    PyObject *result = PyObject_CallMethod(device, "memory_info", NULL);
    Py_DECREF(device);
    return result;
}

/* -- the runtime ------------------------------------------------------------------- */

static PyObject *
backend(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_runtime *rt = cm_state_runtime(cm_state_of_module(module));
    if (rt == NULL) {
        return NULL;
    }
    return PyUnicode_FromString(rt->backend == CM_BACKEND_EMULATED ? "emulated"
                                                                   : "cuda");
}

static PyObject *
emulation_reason(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_runtime *rt = cm_state_runtime(cm_state_of_module(module));
    if (rt == NULL) {
        return NULL;
    }
    if (rt->backend != CM_BACKEND_EMULATED) {
        Py_RETURN_NONE;
    }
    bool asked_for = rt->reason == NULL || rt->reason[0] == '\0';
    return PyUnicode_FromString(asked_for ? "emulation was asked for" : rt->reason);
}

/* A number that the driver is asked for at every call. */
static int
ask_number(PyObject *module, cm_status (*ask)(cm_runtime *, int *), int *out)
{
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return -1;
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ask(rt, out);
    Py_END_ALLOW_THREADS
    return cm_is_ok(status) ? 0 : cm_py_raise_int(state, status, NULL);
}

static PyObject *
ask_version(PyObject *module, cm_status (*ask)(cm_runtime *, int *))
{
    int version;
    if (ask_number(module, ask, &version) < 0) {
        return NULL;
    }
    return Py_BuildValue("ii", version / 1000, version % 1000 / 10);
}

static PyObject *
driver_version(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return ask_version(module, cm_rt_driver_version);
}

static PyObject *
runtime_version(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return ask_version(module, cm_rt_runtime_version);
}

static PyObject *
device_count(PyObject *module, PyObject *Py_UNUSED(unused))
{
    int count;
    return ask_number(module, cm_rt_device_count, &count) < 0 ? NULL
                                                              : PyLong_FromLong(count);
}

static PyObject *
shutdown(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"reset_devices", NULL};
    PyObject *object;
    bool reset_devices = false;
    if (cm_args_parse("shutdown", args, nargs, kwnames, names, 0, 0, &object) < 0
        || (object != NULL && cm_arg_bool(object, "reset_devices", &reset_devices) < 0)
        || cm_state_shutdown(cm_state_of_module(module), reset_devices) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* -- pools ------------------------------------------------------------------------- */

/* The pool of the `index`th slot of all; NULL where none was made. */
static cm_pool *
pool_at(const cm_state *state, int index, int *kind)
{
    enum { PER_KIND = CM_POOL_FLAG_SLOTS * CM_MAX_DEVICES };
    *kind = index / PER_KIND;
    return state
        ->pools[*kind][index % PER_KIND / CM_MAX_DEVICES][index % CM_MAX_DEVICES];
}

enum { POOL_SLOT_COUNT = CM_KIND_COUNT * CM_POOL_FLAG_SLOTS * CM_MAX_DEVICES };

static PyObject *
trim(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    if (state->runtime == NULL) {
        return PyLong_FromLong(0); /* not worth opening a driver for */
    }
    if (cm_state_runtime(state) == NULL) { /* also lets go of what is done */
        return NULL;
    }
    uint64_t total = 0;
    cm_status first = cm_ok();
    for (int i = 0; i < POOL_SLOT_COUNT; i++) {
        int kind;
        cm_pool *pool = pool_at(state, i, &kind);
        if (pool == NULL) {
            continue;
        }
        uint64_t released = 0;
        cm_status status;
        cm_pool_hold(pool); /* a shutdown may come while the GIL is released */
        Py_BEGIN_ALLOW_THREADS
        status = cm_pool_trim(pool, false, &released);
        cm_pool_release(pool);
        Py_END_ALLOW_THREADS
        total += released;
        first = cm_is_ok(first) ? status : first;
    }
    if (!cm_is_ok(first)) {
        return cm_py_raise(state, first, "while trimming the pools");
    }
    return PyLong_FromUnsignedLongLong(total);
}

/* The counters by number; all of them are 64-bit. */
static const struct {
    const char *name;
    size_t offset;
} counter_list[] = {
#define COUNTER_ROW(name) {#name, offsetof(cm_pool_counters, name)},
    CM_POOL_COUNTERS(COUNTER_ROW)
#undef COUNTER_ROW
};

enum { COUNTER_COUNT = sizeof counter_list / sizeof *counter_list };

static uint64_t *
counter_at(cm_pool_counters *counters, int index)
{
    return (uint64_t *)(void *)((char *)counters + counter_list[index].offset);
}

static PyObject *
counters_to_dict(cm_pool_counters *counters)
{
    PyObject *dict = PyDict_New();
    for (int i = 0; dict != NULL && i < COUNTER_COUNT; i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(*counter_at(counters, i));
        if (value == NULL
            || PyDict_SetItemString(dict, counter_list[i].name, value) < 0) {
            Py_CLEAR(dict);
        }
        Py_XDECREF(value);
    }
    return dict;
}

static PyObject *
pool_counters(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    cm_pool_counters sums[CM_KIND_COUNT] = {{0}};
    for (int i = 0; i < POOL_SLOT_COUNT; i++) {
        int kind;
        cm_pool *pool = pool_at(state, i, &kind);
        if (pool != NULL) {
            cm_pool_counters one;
            cm_pool_read(pool, &one);
            for (int counter = 0; counter < COUNTER_COUNT; counter++) {
                *counter_at(&sums[kind], counter) += *counter_at(&one, counter);
            }
        }
    }
    PyObject *result = PyDict_New();
    for (int kind = CM_KIND_PINNED; result != NULL && kind < CM_KIND_COUNT; kind++) {
        PyObject *dict = counters_to_dict(&sums[kind]);
        if (dict == NULL
            || PyDict_SetItemString(result, cm_kind_name((cm_kind)kind), dict) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(dict);
    }
    return result;
}

/* -- table ------------------------------------------------------------------------- */

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

PyMethodDef cm_device_methods[] = {
    {"current_stream", FAST(current_stream), METH_FASTCALL | METH_KEYWORDS,
     current_stream_doc},
    {"current_device", current_device, METH_NOARGS, current_device_doc},
    {"set_current_device", set_current_device, METH_O, set_current_device_doc},
    {"device_count", device_count, METH_NOARGS, device_count_doc},
    {"memory_info", FAST(memory_info), METH_FASTCALL | METH_KEYWORDS, memory_info_doc},
    {"trim", trim, METH_NOARGS, trim_doc},
    {"backend", backend, METH_NOARGS, backend_doc},
    {"emulation_reason", emulation_reason, METH_NOARGS, emulation_reason_doc},
    {"driver_version", driver_version, METH_NOARGS, driver_version_doc},
    {"runtime_version", runtime_version, METH_NOARGS, runtime_version_doc},
    {"pool_counters", pool_counters, METH_NOARGS, pool_counters_doc},
    {"shutdown", FAST(shutdown), METH_FASTCALL | METH_KEYWORDS, shutdown_doc},
    {NULL, NULL, 0, NULL},
};
