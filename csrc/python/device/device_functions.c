/* SPDX-License-Identifier: Apache-2.0 */
/* Functions of the module about devices, the current stream and versions. */
#include "python/device/device_functions.h"

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/objects.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(current_stream_doc,
"current_stream($module, /, device=None)\n--\n\n"
"Stream that functions use when none is given.\n\n"
"Parameters\n----------\n"
"device : Device, int or str, optional\n    cumem's current device by default.\n\n"
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
"Parameters\n----------\ndevice : Device, int or str\n\n"
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
"device : Device, int or str, optional\n    cumem's current device by default.\n\n"
"Returns\n-------\ntuple of int\n    Free and total bytes.\n\n"
"Raises\n------\n"
"ValueError\n    If the device does not exist.\n"
"CudaError\n    If the driver cannot answer.\n\n"
"Notes\n-----\n"
"Creates a context on the device if there is none.");

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
        cm_arg_refuse(object, "device", "an int, a Device or \"cuda:N\"");
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
    cm_state_enter(state);
    Py_BEGIN_ALLOW_THREADS
    status = ask(rt, out);
    Py_END_ALLOW_THREADS
    cm_state_leave(state);
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

/* -- table ------------------------------------------------------------------------- */

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

PyMethodDef cm_device_methods[] = {
    {"current_stream", FAST(current_stream), METH_FASTCALL | METH_KEYWORDS,
     current_stream_doc},
    {"current_device", current_device, METH_NOARGS, current_device_doc},
    {"set_current_device", set_current_device, METH_O, set_current_device_doc},
    {"device_count", device_count, METH_NOARGS, device_count_doc},
    {"memory_info", FAST(memory_info), METH_FASTCALL | METH_KEYWORDS, memory_info_doc},
    {"backend", backend, METH_NOARGS, backend_doc},
    {"emulation_reason", emulation_reason, METH_NOARGS, emulation_reason_doc},
    {"driver_version", driver_version, METH_NOARGS, driver_version_doc},
    {"runtime_version", runtime_version, METH_NOARGS, runtime_version_doc},
    {NULL, NULL, 0, NULL},
};
