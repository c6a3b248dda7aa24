/* SPDX-License-Identifier: Apache-2.0 */
/* Makes Device objects and has their `with` blocks, finds the current device and
 * stream, and answers what cumem/devices/device.py asks about the runtime. */
#include <string.h>

#include "docstrings.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/device/wait.h"

/* -- Devices: one for each index --------------------------------------------------- */

PyObject *
cm_device_object_new(cm_state *state, int index)
{
    if (CM_UNLIKELY(state->devices[index] == NULL)) {
        PyObject *made =
            cm_package_call("devices.device", "make", Py_BuildValue("(i)", index));
        if (made == NULL) {
            return NULL;
        }
        /* Another thread may have made one meanwhile. */
        cm_replace(&state->devices[index], made);
    }
    return Py_NewRef(state->devices[index]);
}

/* This is the Python function _device(object, name, about=None), which calls
 * cm_arg_device_about(). */
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

/* Return the index of a Device. If the state knows the Device, its __index__(), which
 * is Python code, need not be called. Returns a new reference, or NULL with an
 * exception. */
static PyObject *
read_index(const cm_state *state, PyObject *object)
{
    for (int i = 0; i < CM_MAX_DEVICES; i++) {
        if (object == state->devices[i]) {
            return PyLong_FromLong(i);
        }
    }
    return PyNumber_Index(object);
}

/* Begin a block of the device, or end it (`leaves`). The module state is found by
 * `type`, the type that has these methods, since the type of a Device is written in
 * Python and has no module state. */
static PyObject *
device_block(PyObject *op, PyTypeObject *type, bool leaves)
{
    cm_state *state = PyType_GetModuleState(type);
    PyObject *index = read_index(state, op);
    if (index == NULL) {
        return NULL;
    }
    PyObject *done;
    if (leaves) {
        done = cm_override_exit(&state->entered_device, index, "device");
    }
    else {
        done = cm_override_enter(&state->entered_device, index);
        if (done != NULL) {
            cm_replace(&done, Py_NewRef(op));
        }
    }
    Py_DECREF(index);
    return done;
}

static PyObject *
device_enter(PyObject *op, PyTypeObject *type, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames)
{
    static const char *const names[] = {NULL};
    if (cm_args_parse("__enter__", args, nargs, kwnames, names, 0, 0, NULL) < 0) {
        return NULL;
    }
    return device_block(op, type, false);
}

/* The arguments describe an exception that was raised in the block. It is not
 * swallowed. */
static PyObject *
device_exit(PyObject *op, PyTypeObject *type, PyObject *const *Py_UNUSED(args),
            Py_ssize_t Py_UNUSED(nargs), PyObject *Py_UNUSED(kwnames))
{
    return device_block(op, type, true);
}

/* The `with` methods of a Device. They are C functions, since no Python frame may be
 * between the `with` statement and them: a Ctrl-C that came there would leave a block
 * open. */
static PyMethodDef device_blocks[] = {
    {"__enter__", CM_METHOD(device_enter), METH_METHOD | CM_KEYWORDS,
     CM_DOC__DeviceBlocks___enter__},
    {"__exit__", CM_METHOD(device_exit), METH_METHOD | CM_KEYWORDS,
     CM_DOC__DeviceBlocks___exit__},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_doc, (void *)CM_DOC__DeviceBlocks},
    {Py_tp_methods, device_blocks},
    {0, NULL},
};

int
cm_register_device_base(PyObject *module, cm_state *state)
{
    return cm_type_add(module, "cumem._core._DeviceBlocks", sizeof(PyObject),
                       Py_TPFLAGS_BASETYPE, device_slots, NULL, &state->device_base);
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
    /* Making the answer may run a garbage collection, and with it Python code, which
     * must not shut cumem down meanwhile. */
    cm_state_enter(state);
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
    {"_is_emulated", is_emulated, METH_NOARGS, CM_DOC__is_emulated},
    {"_is_host_only", is_host_only, METH_NOARGS, CM_DOC__is_host_only},
    {"_read_backend", read_backend, METH_NOARGS, CM_DOC__read_backend},
    {"_wrap_stream", cm_wrap_stream, METH_VARARGS, CM_DOC__wrap_stream},
    {NULL, NULL, 0, NULL},
};
