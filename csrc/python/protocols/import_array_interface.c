/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a buffer over memory that a `__cuda_array_interface__` dictionary describes.
 * The package has read the dictionary and checked it entry by entry. */
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

#define CAI "__cuda_array_interface__"

static int
place(cm_state *state, cm_import *import)
{
    cm_pointer_info info;
    import->kind = CM_KIND_DEVICE;
    if (import->nbytes == 0) {
        cm_import_place(import, NULL, cm_state_device(state));
        return 0;
    }
    if (cm_import_probe(state, import, CAI, &info) < 0) {
        return -1;
    }
    if (cm_kind_is_pageable(info.kind)) {
        PyErr_Format(PyExc_ValueError,
                     CAI "['data']: the driver says that %p is ordinary host memory, "
                         "which a device cannot reach",
                     (void *)(uintptr_t)import->data);
        return -1;
    }
    /* Page-locked memory that a device may use is what we call mapped. */
    import->kind = cm_kind_is_page_locked(info.kind) ? CM_KIND_MAPPED : info.kind;
    cm_import_place(import, &info, cm_state_device(state));
    return 0;
}

/* _import_entries(object, pointer, read-only, shape, strides, dtype) */
PyObject *
cm_import_entries(PyObject *module, PyObject *args)
{
    cm_state *state = cm_state_of_module(module);
    cm_import import = {.host = false};
    cm_region *region = &import.region;
    PyObject *shape, *strides;
    unsigned long long data;
    int readonly;
    if (!PyArg_ParseTuple(args, "OKpOOO", &import.foreign, &data, &readonly, &shape,
                          &strides, &import.dtype)
        || cm_extents_read(shape, strides, &region->ndim, region->shape,
                           region->strides)
               < 0) {
        return NULL;
    }
    if (!cm_numpy_is_dtype(import.dtype)) {
        (void)cm_arg_refuse(import.dtype, "dtype", "a numpy.dtype");
        return NULL;
    }
    import.data = data;
    import.readonly = readonly != 0;
    region->itemsize = cm_numpy_itemsize(import.dtype);
    PyObject *buffer = NULL;
    if (cm_import_measure(&import, CAI) == 0 && place(state, &import) == 0) {
        buffer = cm_import_finish(state, &import);
    }
    Py_XDECREF(import.locked);
    return buffer;
}
