/* SPDX-License-Identifier: Apache-2.0 */
/* Asks the driver, for the package, about the driver itself and its devices. There is
 * one function for each question, devices are given by their index, and no answer is
 * kept. */
#include <string.h>

#include "docstrings.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/device/wait.h"

/* Open the runtime for a question, and keep shutdown() away until end(). Returns NULL
 * with an exception if it fails. */
static cm_runtime *
begin(cm_state *state)
{
    cm_runtime *rt = cm_state_runtime(state);
    if (rt != NULL) {
        cm_state_enter(state);
    }
    return rt;
}

/* End a question. Returns 0, or -1 with the exception for the driver's answer. */
static int
end(cm_state *state, cm_status status)
{
    cm_state_leave(state);
    return cm_py_check(state, status, NULL);
}

/* Do the same as begin() for a question about a device. The index is checked last,
 * because Python code that ran before may have called shutdown() and opened a backend
 * with fewer devices. */
static cm_runtime *
begin_on(cm_state *state, int device)
{
    cm_runtime *rt = begin(state);
    if (rt == NULL) {
        return NULL;
    }
    if (device >= 0 && device < rt->device_count) {
        return rt;
    }
    PyErr_Format(PyExc_ValueError, "device %d does not exist%s", device,
                 rt->device_count > 0 ? " any more" : ": there are 0 devices");
    cm_state_leave(state);
    return NULL;
}

/* -- the driver itself ---------------------------------------------------------------- */

static PyObject *
driver_device_count(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = begin(state);
    int count;
    if (rt == NULL || end(state, CM_WITHOUT_GIL(cm_rt_device_count(rt, &count))) < 0) {
        return NULL;
    }
    return PyLong_FromLong(count);
}

static PyObject *
driver_version(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = begin(state);
    int version;
    if (rt == NULL
        || end(state, CM_WITHOUT_GIL(cm_rt_driver_version(rt, &version))) < 0) {
        return NULL;
    }
    return PyLong_FromLong(version);
}

static PyObject *
runtime_version(PyObject *module, PyObject *Py_UNUSED(unused))
{
    cm_state *state = cm_state_of_module(module);
    cm_runtime *rt = begin(state);
    int version;
    if (rt == NULL
        || end(state, CM_WITHOUT_GIL(cm_rt_runtime_version(rt, &version))) < 0) {
        return NULL;
    }
    return PyLong_FromLong(version);
}

/* Make a dict from the name of each CUDA call to the oldest driver that has it. */
static PyObject *
oldest_drivers(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    PyObject *found = PyDict_New();
    for (int op = CM_OP_none + 1; found != NULL && op < CM_OP_COUNT; op++) {
        PyObject *oldest = PyLong_FromLong(cm_op_facts[op].min_driver);
        if (oldest == NULL
            || PyDict_SetItemString(found, cm_op_facts[op].cuda_name, oldest) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(oldest);
    }
    return found;
}

/* -- a device ------------------------------------------------------------------------- */

#define ATTRIBUTE_ROW(name, number, cuda) {#name, number},
static const struct attribute {
    const char *name;
    int number; /* CUDA's number */
} attributes[] = {CM_DEVICE_ATTRIBUTES(ATTRIBUTE_ROW)};
#undef ATTRIBUTE_ROW

enum { ATTRIBUTE_COUNT = sizeof(attributes) / sizeof(attributes[0]) };

static PyObject *
device_attribute_names(PyObject *module, PyObject *Py_UNUSED(unused))
{
    (void)module;
    PyObject *names = PyTuple_New(ATTRIBUTE_COUNT);
    for (Py_ssize_t i = 0; names != NULL && i < ATTRIBUTE_COUNT; i++) {
        PyObject *name = PyUnicode_FromString(attributes[i].name);
        if (name == NULL || PyTuple_SetItem(names, i, name) < 0) {
            Py_CLEAR(names);
        }
    }
    return names;
}

static PyObject *
device_attribute(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    int device, value;
    const char *name;
    if (!PyArg_ParseTuple(args, "is:_device_attribute", &device, &name)) {
        return NULL;
    }
    int i = 0;
    while (i < ATTRIBUTE_COUNT && strcmp(attributes[i].name, name) != 0) {
        i++;
    }
    if (i == ATTRIBUTE_COUNT) {
        PyErr_Format(PyExc_ValueError, "there is no attribute '%s' of devices", name);
        return NULL;
    }
    cm_runtime *rt = begin_on(state, device);
    if (rt == NULL) {
        return NULL;
    }
    cm_status status = CM_WITHOUT_GIL(
        cm_rt_device_attribute(rt, attributes[i].number, device, &value));
    /* The driver is too old to know the attribute. */
    if (status.code == CM_CUDA_INVALID_VALUE) {
        cm_state_leave(state);
        Py_RETURN_NONE;
    }
    return end(state, status) < 0 ? NULL : PyLong_FromLong(value);
}

static PyObject *
can_access_peer(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    int device, peer, can;
    if (!PyArg_ParseTuple(args, "ii:_can_access_peer", &device, &peer)) {
        return NULL;
    }
    cm_runtime *rt = begin_on(state, device);
    if (rt == NULL) {
        return NULL;
    }
    if (peer < 0 || peer >= rt->device_count) {
        cm_state_leave(state);
        PyErr_Format(PyExc_ValueError, "device %d does not exist any more", peer);
        return NULL;
    }
    cm_status status = CM_WITHOUT_GIL(cm_rt_peer_can_access(rt, device, peer, &can));
    return end(state, status) < 0 ? NULL : PyBool_FromLong(can);
}

static PyObject *
device_memory(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    int device;
    uint64_t free_nbytes = 0;
    uint64_t total_nbytes = 0;
    if (!PyArg_ParseTuple(args, "i:_device_memory", &device)) {
        return NULL;
    }
    cm_runtime *rt = begin_on(state, device);
    if (rt == NULL) {
        return NULL;
    }
    cm_status status = CM_WITHOUT_GIL(
        CM_ON_DEVICE(rt, device, cm_rt_memory_info(rt, &free_nbytes, &total_nbytes)));
    if (end(state, status) < 0) {
        return NULL;
    }
    return Py_BuildValue("(KK)", (unsigned long long)free_nbytes,
                         (unsigned long long)total_nbytes);
}

static PyObject *
describe_device(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    int device;
    cm_device_info info;
    if (!PyArg_ParseTuple(args, "i:_describe_device", &device)) {
        return NULL;
    }
    cm_runtime *rt = begin_on(state, device);
    if (rt == NULL) {
        return NULL;
    }
    cm_status status = CM_WITHOUT_GIL(cm_rt_device_describe(rt, device, &info));
    if (end(state, status) < 0) {
        return NULL;
    }
    PyObject *members[CM_DeviceFacts_COUNT] = {
        [CM_DeviceFacts_name] = PyBytes_FromString(info.name),
        [CM_DeviceFacts_uuid] =
            PyBytes_FromStringAndSize((const char *)info.uuid, sizeof(info.uuid)),
        [CM_DeviceFacts_pci_bus_id] = PyUnicode_FromString(info.pci_bus_id),
        [CM_DeviceFacts_total_nbytes] = PyLong_FromUnsignedLongLong(info.total_nbytes),
    };
    return cm_structseq_new(state, CM_STRUCTSEQ_DeviceFacts, members);
}

static PyObject *
synchronize_device(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    int device;
    if (!PyArg_ParseTuple(args, "i:_synchronize_device", &device)) {
        return NULL;
    }
    cm_runtime *rt = begin_on(state, device);
    if (rt == NULL) {
        return NULL;
    }
    cm_status status;
    bool is_over = cm_wait_for_device(state, rt, device, &status);
    if (!is_over) { /* a signal handler has raised */
        cm_state_leave(state);
        return NULL;
    }
    if (end(state, status) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* -- table ---------------------------------------------------------------------------- */

PyMethodDef cm_driver_methods[] = {
    {"_driver_device_count", driver_device_count, METH_NOARGS,
     CM_DOC__driver_device_count},
    {"_driver_version", driver_version, METH_NOARGS, CM_DOC__driver_version},
    {"_runtime_version", runtime_version, METH_NOARGS, CM_DOC__runtime_version},
    {"_oldest_drivers", oldest_drivers, METH_NOARGS, CM_DOC__oldest_drivers},
    {"_device_attribute_names", device_attribute_names, METH_NOARGS,
     CM_DOC__device_attribute_names},
    {"_device_attribute", device_attribute, METH_VARARGS, CM_DOC__device_attribute},
    {"_can_access_peer", can_access_peer, METH_VARARGS, CM_DOC__can_access_peer},
    {"_device_memory", device_memory, METH_VARARGS, CM_DOC__device_memory},
    {"_describe_device", describe_device, METH_VARARGS, CM_DOC__describe_device},
    {"_synchronize_device", synchronize_device, METH_VARARGS,
     CM_DOC__synchronize_device},
    {NULL, NULL, 0, NULL},
};
