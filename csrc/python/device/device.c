/* SPDX-License-Identifier: Apache-2.0 */
/* Devices by their index: what cumem/devices.py asks of the runtime, the current device
 * and the current stream. */
#include <string.h>

#include "docstrings.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/device/wait.h"

/* -- Devices, of which there is one for each index --------------------------------- */

PyObject *
cm_device_object_new(cm_state *state, int index)
{
    if (CM_UNLIKELY(state->devices[index] == NULL)) {
        PyObject *made =
            cm_package_call("devices", "make", Py_BuildValue("(i)", index));
        if (made == NULL) {
            return NULL;
        }
        cm_replace(&state->devices[index], made); /* another thread may have made one */
    }
    return Py_NewRef(state->devices[index]);
}

static PyObject *
device(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *object;
    const char *name;
    int index;
    if (!PyArg_ParseTuple(args, "Os:_device", &object, &name)
        || cm_arg_device(state, object, name, &index) < 0) {
        return NULL;
    }
    return cm_device_object_new(state, index);
}

/* -- one device --------------------------------------------------------------------- */

/* The runtime, once it is certain that it has the device whose index is the first of
 * the arguments, of which there may be a second: after a shutdown another may have been
 * opened. shutdown() is refused until the answer. Borrowed; NULL with an exception, and
 * then nothing is to be answered. */
static cm_runtime *
take(PyObject *module, PyObject *args, int *index, int *second)
{
    cm_state *state = cm_state_of_module(module);
    *second = 0;
    cm_runtime *rt =
        PyArg_ParseTuple(args, "i|i", index, second) ? cm_state_runtime(state) : NULL;
    if (rt == NULL) {
        return NULL;
    }
    if (*index < 0 || *index >= rt->device_count) {
        PyErr_Format(PyExc_ValueError, "device %d does not exist%s", *index,
                     rt->device_count > 0 ? " any more" : ": there are 0 devices");
        return NULL;
    }
    cm_state_enter(state);
    return rt;
}

/* Takes over `value`. */
static PyObject *
answer(PyObject *module, cm_status status, PyObject *value)
{
    cm_state *state = cm_state_of_module(module);
    cm_state_leave(state);
    return cm_py_answer(state, status, NULL, value);
}

static PyObject *
describe_device(PyObject *module, PyObject *args)
{
    int index, unused;
    cm_runtime *rt = take(module, args, &index, &unused);
    if (rt == NULL) {
        return NULL;
    }
    cm_device_info info = {0};
    cm_status status = CM_WITHOUT_GIL(cm_rt_device_describe(rt, index, &info));
    Py_ssize_t length = (Py_ssize_t)strnlen(info.name, sizeof(info.name));
    return answer(module, status,
                  Py_BuildValue("(y#y#sK)", info.name, length, info.uuid,
                                (Py_ssize_t)sizeof(info.uuid), info.pci_bus_id,
                                (unsigned long long)info.total_nbytes));
}

static PyObject *
device_attribute(PyObject *module, PyObject *args)
{
    int index, number;
    cm_runtime *rt = take(module, args, &index, &number);
    if (rt == NULL) {
        return NULL;
    }
    int value = 0;
    cm_status status = cm_rt_device_attribute(rt, number, index, &value);
    if (status.code == CM_CUDA_INVALID_VALUE) { /* this driver does not know it */
        return answer(module, cm_ok(), Py_NewRef(Py_None));
    }
    return answer(module, status, PyLong_FromLong(value));
}

static PyObject *
can_access_peer(PyObject *module, PyObject *args)
{
    int index, peer;
    cm_runtime *rt = take(module, args, &index, &peer);
    if (rt == NULL) {
        return NULL;
    }
    int reaches = 0;
    cm_status status = CM_WITHOUT_GIL(cm_rt_peer_can_access(rt, index, peer, &reaches));
    return answer(module, status, PyBool_FromLong(reaches));
}

static PyObject *
synchronize_device(PyObject *module, PyObject *args)
{
    int index, unused;
    cm_runtime *rt = take(module, args, &index, &unused);
    if (rt == NULL) {
        return NULL;
    }
    cm_status status = cm_ok();
    bool waited = cm_wait_for_device(cm_state_of_module(module), rt, index, &status);
    return answer(module, status, waited ? Py_NewRef(Py_None) : NULL);
}

static PyObject *
memory_info(PyObject *module, PyObject *args)
{
    int index, unused;
    cm_runtime *rt = take(module, args, &index, &unused);
    if (rt == NULL) {
        return NULL;
    }
    uint64_t free_nbytes = 0;
    uint64_t total_nbytes = 0;
    cm_status status = CM_WITHOUT_GIL(
        CM_ON_DEVICE(rt, index, cm_rt_memory_info(rt, &free_nbytes, &total_nbytes)));
    return answer(module, status,
                  Py_BuildValue("KK", (unsigned long long)free_nbytes,
                                (unsigned long long)total_nbytes));
}

/* -- what is current ----------------------------------------------------------------- */

static PyObject *
current_stream(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    static const char *const names[] = {"device", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *object;
    int index;
    if (cm_args_parse("current_stream", args, nargs, kwnames, names, 1, 0, &object) < 0
        || cm_arg_device(state, object, "device", &index) < 0) {
        return NULL;
    }
    return cm_current_stream(state, index);
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
    int index;
    if (object == Py_None) {
        cm_arg_refuse(object, "device", "an int, a Device or \"cuda:N\"");
        return NULL;
    }
    if (cm_arg_device(state, object, "device", &index) < 0) {
        return NULL;
    }
    state->current_device = index;
    Py_RETURN_NONE;
}

/* -- the runtime ------------------------------------------------------------------- */

static PyObject *
is_emulated(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(cm_state_is_emulated(cm_state_of_module(module)));
}

static PyObject *
read_backend(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_runtime *rt = cm_state_runtime(cm_state_of_module(module));
    if (rt == NULL) {
        return NULL;
    }
    if (rt->backend != CM_BACKEND_EMULATED) {
        return Py_BuildValue("(sz)", "cuda", NULL);
    }
    bool asked_for = rt->reason == NULL || rt->reason[0] == '\0';
    return Py_BuildValue("(ss)", "emulated",
                         asked_for ? "emulation was asked for" : rt->reason);
}

/* A number that the driver is asked for at every call. */
static PyObject *
ask_driver(PyObject *module, PyObject *args)
{
    static cm_status (*const asks[])(cm_runtime *, int *) = {
        cm_rt_device_count, cm_rt_driver_version, cm_rt_runtime_version};
    int what, number = 0;
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt =
        PyArg_ParseTuple(args, "i", &what) ? cm_state_runtime(state) : NULL;
    if (rt == NULL) {
        return NULL;
    }
    cm_state_enter(state);
    cm_status status = CM_WITHOUT_GIL(asks[(unsigned)what % 3](rt, &number));
    return answer(module, status, PyLong_FromLong(number));
}

/* -- table ------------------------------------------------------------------------- */

PyMethodDef cm_device_methods[] = {
    {"current_stream", CM_METHOD(current_stream), CM_KEYWORDS, CM_DOC_current_stream},
    {"current_device", current_device, METH_NOARGS, CM_DOC_current_device},
    {"set_current_device", set_current_device, METH_O, CM_DOC_set_current_device},
    {"_device", device, METH_VARARGS, CM_DOC__device},
    {"_describe_device", describe_device, METH_VARARGS, CM_DOC__describe_device},
    {"_device_attribute", device_attribute, METH_VARARGS, CM_DOC__device_attribute},
    {"_can_access_peer", can_access_peer, METH_VARARGS, CM_DOC__can_access_peer},
    {"_synchronize_device", synchronize_device, METH_VARARGS,
     CM_DOC__synchronize_device},
    {"_memory_info", memory_info, METH_VARARGS, CM_DOC__memory_info},
    {"_is_emulated", is_emulated, METH_NOARGS, CM_DOC__is_emulated},
    {"_read_backend", read_backend, METH_NOARGS, CM_DOC__read_backend},
    {"_ask_driver", ask_driver, METH_VARARGS, CM_DOC__ask_driver},
    {NULL, NULL, 0, NULL},
};
