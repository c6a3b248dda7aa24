/* SPDX-License-Identifier: Apache-2.0 */
/* From kind, shape and dtype to a buffer over fresh memory. */
#include "python/arguments.h"
#include "python/buffer_object.h"

/* Over a NumPy array of our own making: ordinary memory has no pool. */
static PyObject *
allocate_pageable(cm_state *state, PyObject *dtype, int ndim, const int64_t *shape,
                  char order)
{
    PyObject *array = cm_numpy_empty(dtype, ndim, shape, order);
    if (array == NULL) {
        return NULL;
    }
    cm_region region;
    PyObject *same_dtype = NULL;
    bool readonly;
    if (cm_numpy_region(array, &region, &same_dtype, &readonly) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    Py_DECREF(same_dtype);
    cm_storage *storage = cm_storage_new(state, CM_KIND_PAGEABLE, 0);
    if (storage == NULL) {
        Py_DECREF(array);
        return NULL;
    }
    storage->foreign = array;
    storage->host = region.host;
    int64_t count = 0;
    cm_status status = cm_region_count(&region, &count);
    storage->nbytes = cm_is_ok(status) ? (uint64_t)(count * region.itemsize) : 0;
    PyObject *buffer =
        cm_buffer_new(state, state->host_type, storage, 0, dtype, ndim, shape,
                      ndim > 0 ? region.strides : NULL, false, NULL);
    cm_storage_release(storage, true);
    return buffer;
}

static void
set_f_strides(int ndim, int64_t itemsize, const int64_t *shape, int64_t *strides)
{
    int64_t step = itemsize;
    for (int i = 0; i < ndim; i++) {
        strides[i] = step;
        step *= shape[i] > 0 ? shape[i] : 1;
    }
}

PyObject *
cm_buffer_allocate(cm_state *state, cm_kind kind, unsigned flags, int device,
                   PyObject *dtype, int ndim, const int64_t *shape, char order,
                   cm_stream *stream)
{
    if (kind == CM_KIND_PAGEABLE) {
        return allocate_pageable(state, dtype, ndim, shape, order);
    }
    int64_t itemsize = cm_numpy_itemsize(dtype);
    uint64_t nbytes;
    if (cm_arg_nbytes(ndim, shape, itemsize, &nbytes) < 0) {
        return NULL;
    }
    cm_storage *storage = cm_storage_alloc(state, kind, flags, device, nbytes, stream);
    if (storage == NULL) {
        return NULL;
    }
    int64_t f_strides[CM_MAX_NDIM];
    const int64_t *strides = NULL;
    if (order == 'F' && ndim > 1) {
        set_f_strides(ndim, itemsize, shape, f_strides);
        strides = f_strides;
    }
    PyObject *buffer = cm_buffer_new(state, cm_buffer_type_of(state, kind), storage, 0,
                                     dtype, ndim, shape, strides, false, NULL);
    cm_storage_release(storage, true);
    return buffer;
}
