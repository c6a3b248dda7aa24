/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Device: one GPU by its index. Holds nothing of the runtime, so it outlives a
 * shutdown. */
#include <string.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/device/device_type.h"
#include "python/device/device_wait.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(device_doc,
"Device(index=0, /)\n--\n\n"
"One GPU, or one emulated device.\n\n"
"Parameters\n----------\n"
"index : int or str\n"
"    As CUDA counts the visible devices, from 0; ``\"cuda:0\"`` as torch writes it, and\n"
"    ``\"cuda\"`` for cumem's current device.\n\n"
"Raises\n------\n"
"ValueError\n    If there is no such device.\n"
"CudaError\n    If the driver cannot be opened.\n\n"
"Notes\n-----\n"
"Can be used wherever an index can and equals it: ``buf.device == 0``. Pickles as its\n"
"index. Asking for properties creates no context.");

PyDoc_STRVAR(attributes_doc,
"attributes($self, /)\n--\n\n"
"Attributes of the device that matter for memory.\n\n"
"Returns\n-------\ndict of str to int\n"
"    Named after CUDA's device attributes; one that the driver does not know is left out.\n\n"
"Raises\n------\nCudaError\n    If the driver cannot answer.");

PyDoc_STRVAR(can_access_peer_doc,
"can_access_peer($self, other, /)\n--\n\n"
"Whether this device can reach the memory of another one directly.\n\n"
"Parameters\n----------\nother : Device, int or str\n\n"
"Returns\n-------\nbool\n    False for the device itself.\n\n"
"Raises\n------\n"
"ValueError\n    If `other` does not exist.\n"
"CudaError\n    If the driver cannot answer.");

PyDoc_STRVAR(synchronize_doc,
"synchronize($self, /)\n--\n\n"
"Wait until everything queued on the device so far is done.\n\n"
"Raises\n------\nCudaError\n    If work on the device failed.\n\n"
"Notes\n-----\n"
"**Blocks** until all streams of the device are empty, GIL released; Ctrl-C interrupts it\n"
"in the main thread. Creates a context on the device if there is none.");

PyDoc_STRVAR(memory_info_doc,
"memory_info($self, /)\n--\n\n"
"Memory of the device as its driver sees it, all processes together.\n\n"
"Returns\n-------\ntuple of int\n    Free and total bytes.\n\n"
"Raises\n------\nCudaError\n    If the driver cannot answer.\n\n"
"Notes\n-----\n"
"Creates a context on the device if there is none.");

PyDoc_STRVAR(reduce_doc,
"__reduce__($self, /)\n--\n\n"
"Pickle: the index. Reading it back is a ValueError where there is no such device.");

/* -- construction and end ---------------------------------------------------------- */

PyObject *
cm_device_object_new(cm_state *state, int index)
{
    PyObject *op = PyType_GenericAlloc(state->device_type, 0);
    if (op != NULL) {
        cm_device_object *self = (cm_device_object *)(void *)op;
        self->state = state;
        self->index = index;
    }
    return op;
}

static PyObject *
device_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"", NULL};
    PyObject *object = NULL;
    int index;
    cm_state *state = cm_state_of_module(PyType_GetModule(type));
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:Device", keywords, &object)) {
        return NULL;
    }
    if (object == Py_None) {
        cm_arg_refuse(object, "index", "an int or \"cuda:N\"");
        return NULL;
    }
    PyObject *zero = object == NULL ? PyLong_FromLong(0) : NULL;
    if (object == NULL && zero == NULL) {
        return NULL;
    }
    int result = cm_arg_device(state, object == NULL ? zero : object, "device", &index);
    Py_XDECREF(zero);
    return result < 0 ? NULL : cm_device_object_new(state, index);
}

static void
device_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(op);
    Py_DECREF(type);
}

/* After a shutdown another runtime may have been opened. */
cm_runtime *
cm_device_take_runtime(const cm_device_object *self)
{
    cm_runtime *rt = cm_state_runtime(self->state);
    if (rt == NULL) {
        return NULL;
    }
    if (self->index >= rt->device_count) {
        PyErr_Format(PyExc_ValueError, "device %d does not exist any more",
                     self->index);
        return NULL;
    }
    cm_state_enter(self->state);
    return rt;
}

void
cm_device_give_runtime(const cm_device_object *self)
{
    cm_state_leave(self->state);
}

/* -- methods ----------------------------------------------------------------------- */

static const struct {
    const char *name;
    int number;
} attribute_list[] = {
#define ATTRIBUTE_ROW(name, number) {#name, number},
    CM_DEVICE_ATTRIBUTES(ATTRIBUTE_ROW)
#undef ATTRIBUTE_ROW
};

enum { ATTRIBUTE_COUNT = sizeof attribute_list / sizeof *attribute_list };

/* New dict; NULL with an exception. */
static PyObject *
read_attributes(const cm_device_object *self, cm_runtime *rt)
{
    PyObject *result = PyDict_New();
    for (int i = 0; result != NULL && i < ATTRIBUTE_COUNT; i++) {
        int number = 0;
        cm_status status =
            cm_rt_device_attribute(rt, attribute_list[i].number, self->index, &number);
        if (status.code == CM_CUDA_INVALID_VALUE) {
            continue; /* this driver does not know it */
        }
        PyObject *value = NULL;
        if (cm_is_ok(status)) {
            value = PyLong_FromLong(number);
        }
        else {
            cm_py_raise(self->state, status, NULL);
        }
        if (value == NULL
            || PyDict_SetItemString(result, attribute_list[i].name, value) < 0) {
            Py_CLEAR(result);
        }
        Py_XDECREF(value);
    }
    return result;
}

static PyObject *
device_attributes(PyObject *op, PyObject *Py_UNUSED(unused))
{
    const cm_device_object *self = (cm_device_object *)(void *)op;
    cm_runtime *rt = cm_device_take_runtime(self);
    if (rt == NULL) {
        return NULL;
    }
    PyObject *result = read_attributes(self, rt);
    cm_device_give_runtime(self);
    return result;
}

static PyObject *
device_can_access_peer(PyObject *op, PyObject *other)
{
    cm_device_object *self = (cm_device_object *)(void *)op;
    cm_runtime *rt = cm_device_take_runtime(self);
    int peer;
    if (rt == NULL) {
        return NULL;
    }
    int answer = 0;
    cm_status status = cm_ok();
    int failed = cm_arg_device(self->state, other, "other", &peer);
    if (failed == 0 && peer != self->index) {
        Py_BEGIN_ALLOW_THREADS
        status = cm_rt_peer_can_access(rt, self->index, peer, &answer);
        Py_END_ALLOW_THREADS
    }
    cm_device_give_runtime(self);
    if (failed < 0) {
        return NULL;
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, NULL);
    }
    return PyBool_FromLong(answer);
}

static PyObject *
device_synchronize(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_device_object *self = (cm_device_object *)(void *)op;
    cm_runtime *rt = cm_device_take_runtime(self);
    if (rt == NULL) {
        return NULL;
    }
    cm_status status;
    bool waited = cm_wait_for_device(self->state, rt, self->index, &status);
    cm_device_give_runtime(self);
    if (!waited) {
        return NULL;
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, NULL);
    }
    Py_RETURN_NONE;
}

static PyObject *
device_memory_info(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_device_object *self = (cm_device_object *)(void *)op;
    cm_runtime *rt = cm_device_take_runtime(self);
    if (rt == NULL) {
        return NULL;
    }
    uint64_t free_nbytes = 0;
    uint64_t total_nbytes = 0;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    cm_device_guard guard;
    status = cm_device_enter(rt, self->index, &guard);
    if (cm_is_ok(status)) {
        status = cm_rt_memory_info(rt, &free_nbytes, &total_nbytes);
        cm_device_leave(rt, &guard);
    }
    Py_END_ALLOW_THREADS
    cm_device_give_runtime(self);
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, NULL);
    }
    return Py_BuildValue("KK", (unsigned long long)free_nbytes,
                         (unsigned long long)total_nbytes);
}

/* -- number, comparison and text --------------------------------------------------- */

static PyObject *
device_index(PyObject *op)
{
    return PyLong_FromLong(((cm_device_object *)(void *)op)->index);
}

/* Equal to its index, which is also its hash, but not to other numbers. */
static PyObject *
device_richcompare(PyObject *a, PyObject *b, int operation)
{
    bool is_device = Py_TYPE(a) == Py_TYPE(b);
    bool is_int = (PyLong_Check(b) && !PyBool_Check(b))
                  || (cm_numpy_is_scalar(b) && PyIndex_Check(b));
    if ((operation != Py_EQ && operation != Py_NE) || !(is_device || is_int)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    int index = ((cm_device_object *)(void *)a)->index;
    bool same;
    if (is_device) {
        same = index == ((cm_device_object *)(void *)b)->index;
    }
    else {
        PyObject *number = PyNumber_Index(b);
        int overflow;
        long value = number == NULL ? -1 : PyLong_AsLongAndOverflow(number, &overflow);
        Py_XDECREF(number);
        if (value == -1 && PyErr_Occurred()) {
            return NULL;
        }
        same = value == index;
    }
    return PyBool_FromLong(same == (operation == Py_EQ));
}

static PyObject *
device_reduce(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("O(i)", Py_TYPE(op), ((cm_device_object *)(void *)op)->index);
}

static Py_hash_t
device_hash(PyObject *op)
{
    return ((cm_device_object *)(void *)op)->index;
}

static PyObject *
device_repr(PyObject *op)
{
    cm_device_object *self = (cm_device_object *)(void *)op;
    const cm_runtime *rt = self->state->runtime; /* not opened for a repr */
    bool emulated = rt != NULL && rt->backend == CM_BACKEND_EMULATED;
    return PyUnicode_FromFormat("<cumem.Device %d%s>", self->index,
                                emulated ? ", emulated" : "");
}

/* -- tables ------------------------------------------------------------------------ */

static PyMethodDef device_methods[] = {
    {"attributes", device_attributes, METH_NOARGS, attributes_doc},
    {"can_access_peer", device_can_access_peer, METH_O, can_access_peer_doc},
    {"synchronize", device_synchronize, METH_NOARGS, synchronize_doc},
    {"memory_info", device_memory_info, METH_NOARGS, memory_info_doc},
    {"__reduce__", device_reduce, METH_NOARGS, reduce_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_doc, (void *)device_doc},  {Py_tp_new, device_new},
    {Py_tp_dealloc, device_dealloc},  {Py_tp_repr, device_repr},
    {Py_tp_hash, device_hash},        {Py_tp_richcompare, device_richcompare},
    {Py_nb_index, device_index},      {Py_tp_methods, device_methods},
    {Py_tp_getset, cm_device_getset}, {0, NULL},
};

static PyType_Spec device_spec = {
    .name = "cumem.Device",
    .basicsize = sizeof(cm_device_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = device_slots,
};

int
cm_register_device_type(PyObject *module, cm_state *state)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &device_spec, NULL);
    state->device_type = (PyTypeObject *)(void *)type;
    return type == NULL ? -1 : PyModule_AddType(module, state->device_type);
}
