/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers over `__cuda_array_interface__` dictionaries, which the package reads and
 * checks, entry by entry. */
#include "python/core/arguments.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

#define CAI "__cuda_array_interface__"

static const char what[] = CAI;

/* 0, or -1 with TypeError or ValueError that names the entry. out->dtype is owned. */
static int
read_entries(PyObject *entries, cm_import *out, uint64_t *stream)
{
    PyObject *answer =
        cm_package_call("extension.array_interface", "read", PyTuple_Pack(1, entries));
    PyObject *shape;
    PyObject *strides;
    unsigned long long data;
    unsigned long long handle;
    int readonly;
    int result = -1;
    if (answer != NULL
        && PyArg_ParseTuple(answer, "KpOOOK", &data, &readonly, &shape, &strides,
                            &out->dtype, &handle)) {
        cm_region *region = &out->region;
        out->data = data;
        out->readonly = readonly != 0;
        *stream = handle;
        region->itemsize = cm_numpy_itemsize(out->dtype);
        result = cm_extents_read(shape, strides, &region->ndim, region->shape,
                                 region->strides);
        out->dtype = result == 0 ? Py_NewRef(out->dtype) : NULL;
    }
    Py_XDECREF(answer);
    return result;
}

static int
place(cm_state *state, cm_import *import)
{
    cm_pointer_info info;
    import->kind = CM_KIND_DEVICE;
    if (import->nbytes == 0) {
        cm_import_place(import, NULL, cm_state_device(state));
        return 0;
    }
    if (cm_import_probe(state, import, what, &info) < 0) {
        return -1;
    }
    if (cm_kind_is_pageable(info.kind)) {
        PyErr_Format(PyExc_ValueError,
                     CAI "['data']: to the driver %p is ordinary host memory, which a "
                         "device cannot reach",
                     (void *)(uintptr_t)import->data);
        return -1;
    }
    /* page-locked memory that a device may use is what we call mapped */
    import->kind = cm_kind_is_page_locked(info.kind) ? CM_KIND_MAPPED : info.kind;
    cm_import_place(import, &info, cm_state_device(state));
    return 0;
}

static PyObject *
import_entries(cm_state *state, PyObject *object, PyObject *entries, cm_stream *given)
{
    cm_import import = {.foreign = object};
    uint64_t handle;
    if (read_entries(entries, &import, &handle) < 0) {
        return NULL;
    }
    PyObject *buffer = NULL;
    if (cm_import_measure(&import, what) == 0 && place(state, &import) == 0) {
        buffer = cm_import_finish(state, &import);
    }
    Py_XDECREF(import.locked);
    Py_DECREF(import.dtype);
    int device = buffer == NULL ? -1 : ((cm_buffer *)(void *)buffer)->storage->device;
    if (buffer != NULL && handle != 0 && import.nbytes > 0
        && cm_import_order(state, buffer, given, device, handle) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

PyObject *
cm_import_array_interface(cm_state *state, PyObject *object, cm_stream *stream)
{
    PyObject *entries = NULL;
    int found = PyType_Check(object) ? 0 : cm_arg_find_attribute(object, CAI, &entries);
    if (found <= 0) {
        return found < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }
    PyObject *buffer = import_entries(state, object, entries, stream);
    Py_DECREF(entries);
    return buffer;
}
