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

/* _device(object, name, about=None): see cm_arg_device_about(). */
static PyObject *
device(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    PyObject *object;
    const char *name;
    PyObject *about = Py_None;
    int index;
    if (!PyArg_ParseTuple(args, "Os|O:_device", &object, &name, &about)
        || cm_arg_device_about(state, object, name, about, &index) < 0) {
        return NULL;
    }
    return cm_device_object_new(state, index);
}

/* -- the driver ---------------------------------------------------------------------- */

/* What it is asked by number, as cumem/extension/driver.py writes it: first what is not
 * about one device. */
enum {
    DEVICE_COUNT,
    DRIVER_VERSION,
    RUNTIME_VERSION,
    ATTRIBUTE,
    PEER_ACCESS,
    PRIORITIES,
    MEMORY,
    DESCRIPTION,
    SYNCHRONIZE,
};

typedef struct question {
    int what;
    int device;
    int second; /* the attribute, the peer; of priorities the greatest */
    int number; /* the answer, where it is one; of priorities the least */
    uint64_t free_nbytes;
    uint64_t total_nbytes;
    cm_device_info info;
} question;

static cm_status
ask(cm_runtime *rt, question *q)
{
    switch (q->what) {
    case DEVICE_COUNT:
        return cm_rt_device_count(rt, &q->number);
    case DRIVER_VERSION:
        return cm_rt_driver_version(rt, &q->number);
    case RUNTIME_VERSION:
        return cm_rt_runtime_version(rt, &q->number);
    case ATTRIBUTE:
        return cm_rt_device_attribute(rt, q->second, q->device, &q->number);
    case PEER_ACCESS:
        return cm_rt_peer_can_access(rt, q->device, q->second, &q->number);
    case PRIORITIES:
        return CM_ON_DEVICE(rt, q->device,
                            cm_rt_stream_priority_range(rt, &q->number, &q->second));
    case MEMORY:
        return CM_ON_DEVICE(rt, q->device,
                            cm_rt_memory_info(rt, &q->free_nbytes, &q->total_nbytes));
    default:
        return cm_rt_device_describe(rt, q->device, &q->info);
    }
}

static PyObject *
tell(const question *q)
{
    const cm_device_info *info = &q->info;
    switch (q->what) {
    case PRIORITIES:
        return Py_BuildValue("(ii)", q->number, q->second);
    case MEMORY:
        return Py_BuildValue("(KK)", (unsigned long long)q->free_nbytes,
                             (unsigned long long)q->total_nbytes);
    case DESCRIPTION:
        return Py_BuildValue(
            "(yNsK)", info->name,
            PyBytes_FromStringAndSize((const char *)info->uuid, sizeof(info->uuid)),
            info->pci_bus_id, (unsigned long long)info->total_nbytes);
    case SYNCHRONIZE:
        return Py_NewRef(Py_None);
    default:
        return PyLong_FromLong(q->number);
    }
}

/* Python code may have shut down since the index was read, and opened others. */
static int
check_device(const cm_runtime *rt, int index)
{
    if (index >= 0 && index < rt->device_count) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "device %d does not exist%s", index,
                 rt->device_count > 0 ? " any more" : ": there are 0 devices");
    return -1;
}

static PyObject *
ask_driver(PyObject *module, PyObject *args)
{
    question q = {.device = 0};
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = PyArg_ParseTuple(args, "i|ii", &q.what, &q.device, &q.second)
                         ? cm_state_runtime(state)
                         : NULL;
    if (rt == NULL || cm_arg_check_range(q.what, "what", 0, SYNCHRONIZE + 1) < 0
        || (q.what >= ATTRIBUTE && check_device(rt, q.device) < 0)
        || (q.what == PEER_ACCESS && check_device(rt, q.second) < 0)) {
        return NULL;
    }
    cm_status status = cm_ok();
    bool answered = true;
    cm_state_enter(state);
    if (q.what == SYNCHRONIZE) {
        answered = cm_wait_for_device(state, rt, q.device, &status);
    }
    else {
        status = CM_WITHOUT_GIL(ask(rt, &q));
    }
    cm_state_leave(state);
    if (q.what == ATTRIBUTE && status.code == CM_CUDA_INVALID_VALUE) {
        Py_RETURN_NONE; /* this driver does not know it */
    }
    if (!answered || cm_py_check(state, status, NULL) < 0) {
        return NULL;
    }
    return tell(&q);
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
    return cm_device_object_new(state, cm_state_device(state));
}

static PyObject *
set_current_device(PyObject *module, PyObject *object)
{
    cm_state *state = cm_state_of_module(module);
    int index;
    if (object == Py_None) {
        cm_state_choose_device(state, -1);
        Py_RETURN_NONE;
    }
    if (cm_arg_device(state, object, "device", &index) < 0) {
        return NULL;
    }
    cm_state_choose_device(state, index);
    Py_RETURN_NONE;
}

/* `with device:` begins with the device alone, and ends with what was raised. */
static PyObject *
device_block(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    cm_override *entered = &cm_state_of_module(module)->entered_device;
    PyObject *index = nargs == 0 ? NULL : PyNumber_Index(args[0]);
    if (index == NULL) {
        return NULL;
    }
    PyObject *done = nargs == 1 ? cm_override_enter(entered, index)
                                : cm_override_exit(entered, index, "device");
    Py_DECREF(index);
    Py_XDECREF(done);
    return done == NULL ? NULL : Py_NewRef(nargs == 1 ? args[0] : Py_None);
}

/* -- the runtime ------------------------------------------------------------------- */

static PyObject *
is_emulated(PyObject *module, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(cm_state_is_emulated(cm_state_of_module(module)));
}

static PyObject *
is_host_only(PyObject *module, PyObject *Py_UNUSED(unused))
{
    const cm_state *state = cm_state_of_module(module);
    return PyBool_FromLong(state->runtime != NULL && state->runtime->is_host_only);
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
    cm_state *state = cm_state_of_module(module);
    bool asked_for = rt->reason == NULL || rt->reason[0] == '\0';
    cm_state_enter(state); /* a collection while the answer is made may run Python code
                            */
    PyObject *answer = Py_BuildValue(
        "(ss)", "emulated", asked_for ? "emulation was asked for" : rt->reason);
    cm_state_leave(state);
    return answer;
}

/* -- table ------------------------------------------------------------------------- */

PyMethodDef cm_device_methods[] = {
    {"current_stream", CM_METHOD(current_stream), CM_KEYWORDS, CM_DOC_current_stream},
    {"current_device", current_device, METH_NOARGS, CM_DOC_current_device},
    {"set_current_device", set_current_device, METH_O, CM_DOC_set_current_device},
    {"_device", device, METH_VARARGS, CM_DOC__device},
    {"_device_block", CM_METHOD(device_block), METH_FASTCALL, CM_DOC__device_block},
    {"_is_emulated", is_emulated, METH_NOARGS, CM_DOC__is_emulated},
    {"_is_host_only", is_host_only, METH_NOARGS, CM_DOC__is_host_only},
    {"_read_backend", read_backend, METH_NOARGS, CM_DOC__read_backend},
    {"_make_event", cm_make_event, METH_VARARGS, CM_DOC__make_event},
    {"_make_stream", cm_make_stream, METH_VARARGS, CM_DOC__make_stream},
    {"_wrap_stream", cm_wrap_stream, METH_VARARGS, CM_DOC__wrap_stream},
    {"_ask_driver", ask_driver, METH_VARARGS, CM_DOC__ask_driver},
    {NULL, NULL, 0, NULL},
};
