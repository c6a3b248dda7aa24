/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Device: one GPU by its index, and the module's functions about devices, the
 * current stream and versions. A Device holds nothing of the runtime, so it outlives a
 * shutdown. */
#include <string.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/device/wait.h"

typedef struct device_object {
    PyObject_HEAD
    cm_state *state;
    int index;
} device_object;

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

PyDoc_STRVAR(device_memory_info_doc,
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
        device_object *self = (device_object *)(void *)op;
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
    PyObject *given = object == NULL ? PyLong_FromLong(0) : Py_NewRef(object);
    int result = given == NULL ? -1 : cm_arg_device(state, given, "device", &index);
    Py_XDECREF(given);
    return result < 0 ? NULL : cm_device_object_new(state, index);
}

/* The runtime, once it is certain that it has the device: after a shutdown another may
 * have been opened. shutdown() is refused until the answer. Borrowed; NULL with an
 * exception, and then nothing is to be answered. */
static cm_runtime *
take(const device_object *self)
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

/* Takes over `value`. */
static PyObject *
answer(const device_object *self, cm_status status, PyObject *value)
{
    cm_state_leave(self->state);
    return cm_py_answer(self->state, status, NULL, value);
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
read_attributes(const device_object *self, cm_runtime *rt)
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
    const device_object *self = (device_object *)(void *)op;
    cm_runtime *rt = take(self);
    if (rt == NULL) {
        return NULL;
    }
    return answer(self, cm_ok(), read_attributes(self, rt));
}

static PyObject *
device_can_access_peer(PyObject *op, PyObject *other)
{
    device_object *self = (device_object *)(void *)op;
    cm_runtime *rt = take(self);
    int peer;
    if (rt == NULL) {
        return NULL;
    }
    int reaches = 0;
    cm_status status = cm_ok();
    if (cm_arg_device(self->state, other, "other", &peer) < 0) {
        return answer(self, status, NULL);
    }
    if (peer != self->index) {
        Py_BEGIN_ALLOW_THREADS
        status = cm_rt_peer_can_access(rt, self->index, peer, &reaches);
        Py_END_ALLOW_THREADS
    }
    return answer(self, status, PyBool_FromLong(reaches));
}

static PyObject *
device_synchronize(PyObject *op, PyObject *Py_UNUSED(unused))
{
    device_object *self = (device_object *)(void *)op;
    cm_runtime *rt = take(self);
    if (rt == NULL) {
        return NULL;
    }
    cm_status status = cm_ok();
    bool waited = cm_wait_for_device(self->state, rt, self->index, &status);
    return answer(self, status, waited ? Py_NewRef(Py_None) : NULL);
}

static PyObject *
device_memory_info(PyObject *op, PyObject *Py_UNUSED(unused))
{
    device_object *self = (device_object *)(void *)op;
    cm_runtime *rt = take(self);
    if (rt == NULL) {
        return NULL;
    }
    uint64_t free_nbytes = 0;
    uint64_t total_nbytes = 0;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    CM_ON_DEVICE(status, rt, self->index,
                 cm_rt_memory_info(rt, &free_nbytes, &total_nbytes));
    Py_END_ALLOW_THREADS
    return answer(self, status,
                  Py_BuildValue("KK", (unsigned long long)free_nbytes,
                                (unsigned long long)total_nbytes));
}

/* -- getters ----------------------------------------------------------------------- */

/* "GPU-…" as nvidia-smi prints it. */
static PyObject *
uuid_text(const cm_device_info *info)
{
    static const char digits[] = "0123456789abcdef";
    char text[64] = "GPU-";
    size_t used = 4;
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10) {
            text[used++] = '-';
        }
        text[used++] = digits[info->uuid[i] >> 4];
        text[used++] = digits[info->uuid[i] & 15];
    }
    return PyUnicode_FromStringAndSize(text, (Py_ssize_t)used);
}

enum info_field { NAME, UUID, PCI_BUS_ID, TOTAL_NBYTES };

static PyObject *
read_field(const cm_device_info *info, enum info_field field)
{
    switch (field) {
    case NAME:
        return PyUnicode_DecodeUTF8(info->name, (Py_ssize_t)strnlen(info->name, 256),
                                    "replace");
    case UUID:
        return uuid_text(info);
    case PCI_BUS_ID:
        return PyUnicode_FromString(info->pci_bus_id);
    default:
        return PyLong_FromUnsignedLongLong(info->total_nbytes);
    }
}

static PyObject *
device_get_info(PyObject *op, void *field)
{
    device_object *self = (device_object *)(void *)op;
    cm_runtime *rt = take(self);
    if (rt == NULL) {
        return NULL;
    }
    cm_device_info info;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_rt_device_describe(rt, self->index, &info);
    Py_END_ALLOW_THREADS
    bool known = cm_is_ok(status);
    return answer(self, status,
                  known ? read_field(&info, (enum info_field)(intptr_t)field) : NULL);
}

static PyObject *
device_get_compute_capability(PyObject *op, void *Py_UNUSED(closure))
{
    enum { MAJOR = 75, MINOR = 76 }; /* as in CM_DEVICE_ATTRIBUTES */
    device_object *self = (device_object *)(void *)op;
    cm_runtime *rt = take(self);
    if (rt == NULL) {
        return NULL;
    }
    int major = 0;
    int minor = 0;
    cm_status status = cm_rt_device_attribute(rt, MAJOR, self->index, &major);
    if (cm_is_ok(status)) {
        status = cm_rt_device_attribute(rt, MINOR, self->index, &minor);
    }
    return answer(self, status, Py_BuildValue("ii", major, minor));
}

static PyObject *
device_get_emulated(PyObject *op, void *Py_UNUSED(closure))
{
    const device_object *self = (device_object *)(void *)op;
    const cm_runtime *rt = take(self);
    if (rt == NULL) {
        return NULL;
    }
    bool emulated = rt->backend == CM_BACKEND_EMULATED;
    return answer(self, cm_ok(), PyBool_FromLong(emulated));
}

static PyGetSetDef device_getset[] = {
    {"name", device_get_info, NULL, "Name of the product.", (void *)NAME},
    {"uuid", device_get_info, NULL,
     "\"GPU-…\" as nvidia-smi prints it; the same in every process.", (void *)UUID},
    {"pci_bus_id", device_get_info, NULL, "Place on the bus: \"0000:1b:00.0\".",
     (void *)PCI_BUS_ID},
    {"total_nbytes", device_get_info, NULL, "Bytes of memory on the device.",
     (void *)TOTAL_NBYTES},
    {"compute_capability", device_get_compute_capability, NULL,
     "Tuple of two ints, e.g. (9, 0).", NULL},
    {"emulated", device_get_emulated, NULL, "True when it is no real GPU.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef device_members[] = {
    {"index", T_INT, offsetof(device_object, index), READONLY,
     "Number of the device, from 0."},
    {NULL, 0, 0, 0, NULL},
};

/* -- number, comparison and text --------------------------------------------------- */

static PyObject *
device_index(PyObject *op)
{
    return PyLong_FromLong(((device_object *)(void *)op)->index);
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
    int index = ((device_object *)(void *)a)->index;
    bool same;
    if (is_device) {
        same = index == ((device_object *)(void *)b)->index;
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
    return Py_BuildValue("O(i)", Py_TYPE(op), ((device_object *)(void *)op)->index);
}

static Py_hash_t
device_hash(PyObject *op)
{
    return ((device_object *)(void *)op)->index;
}

static PyObject *
device_repr(PyObject *op)
{
    device_object *self = (device_object *)(void *)op;
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
    {"memory_info", device_memory_info, METH_NOARGS, device_memory_info_doc},
    {"__reduce__", device_reduce, METH_NOARGS, reduce_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_doc, (void *)device_doc},
    {Py_tp_new, device_new},
    {Py_tp_dealloc, cm_object_free},
    {Py_tp_repr, device_repr},
    {Py_tp_hash, device_hash},
    {Py_tp_richcompare, device_richcompare},
    {Py_nb_index, device_index},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_getset},
    {Py_tp_members, device_members},
    {0, NULL},
};

static PyType_Spec device_spec = {
    .name = "cumem.Device",
    .basicsize = sizeof(device_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = device_slots,
};

int
cm_register_device_type(PyObject *module, cm_state *state)
{
    return cm_type_add(module, &device_spec, NULL, &state->device_type);
}

/* -- functions of the module: docstrings -------------------------------------------------------------------- */

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

/* A number that the driver is asked for at every call; -1 with an exception. */
static int
ask_number(PyObject *module, cm_status (*ask)(cm_runtime *, int *))
{
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = cm_state_runtime(state);
    int number = 0;
    if (rt == NULL) {
        return -1;
    }
    cm_status status;
    cm_state_enter(state);
    Py_BEGIN_ALLOW_THREADS
    status = ask(rt, &number);
    Py_END_ALLOW_THREADS
    cm_state_leave(state);
    return cm_is_ok(status) ? number : cm_py_raise_int(state, status, NULL);
}

static PyObject *
ask_version(PyObject *module, cm_status (*ask)(cm_runtime *, int *))
{
    int version = ask_number(module, ask);
    return version < 0 ? NULL
                       : Py_BuildValue("ii", version / 1000, version % 1000 / 10);
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
    int count = ask_number(module, cm_rt_device_count);
    return count < 0 ? NULL : PyLong_FromLong(count);
}

/* -- table ------------------------------------------------------------------------- */

PyMethodDef cm_device_methods[] = {
    {"current_stream", CM_METHOD(current_stream), CM_KEYWORDS, current_stream_doc},
    {"current_device", current_device, METH_NOARGS, current_device_doc},
    {"set_current_device", set_current_device, METH_O, set_current_device_doc},
    {"device_count", device_count, METH_NOARGS, device_count_doc},
    {"memory_info", CM_METHOD(memory_info), CM_KEYWORDS, memory_info_doc},
    {"backend", backend, METH_NOARGS, backend_doc},
    {"emulation_reason", emulation_reason, METH_NOARGS, emulation_reason_doc},
    {"driver_version", driver_version, METH_NOARGS, driver_version_doc},
    {"runtime_version", runtime_version, METH_NOARGS, runtime_version_doc},
    {NULL, NULL, 0, NULL},
};
