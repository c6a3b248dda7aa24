/* SPDX-License-Identifier: Apache-2.0 */
/* view(dtype): the same bytes read as another dtype, by NumPy's rules. */
#include <string.h>

#include "python/buffer/buffer_object.h"
#include "python/buffer/views.h"
#include "python/core/arguments.h"

const char cm_buffer_view_doc[] =
    "view($self, /, dtype)\n"
    "--\n"
    "\n"
    "View the same bytes as another dtype, by NumPy's rules.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "dtype : dtype_like\n"
    "    Any dtype without Python objects. Where its itemsize differs, the last axis "
    "is\n"
    "    lengthened or shortened and must be contiguous.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "Buffer\n"
    "    A view of the same type; it keeps the memory alive.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError\n"
    "    The itemsize differs and the buffer has no dimensions, its last axis is not\n"
    "    contiguous, or the sizes do not divide; or the buffer is closed.\n"
    "TypeError\n"
    "    `dtype` is not a dtype or holds Python objects.\n";

/* Change the last axis for another itemsize. */
static int
resize_last_axis(const cm_buffer *self, int64_t itemsize, int64_t *shape,
                 int64_t *strides)
{
    if (self->ndim == 0) {
        PyErr_SetString(
            PyExc_ValueError,
            "the dtype of a buffer without dimensions can only change to one "
            "of the same itemsize");
        return -1;
    }
    int last = self->ndim - 1;
    if (shape[last] != 1 && cm_buffer_nbytes(self) != 0
        && strides[last] != self->itemsize) {
        PyErr_SetString(PyExc_ValueError,
                        "to view as a dtype of another itemsize, the last axis must be "
                        "contiguous");
        return -1;
    }
    int64_t nbytes = shape[last] * self->itemsize;
    if (itemsize < self->itemsize && self->itemsize % itemsize != 0) {
        PyErr_Format(
            PyExc_ValueError,
            "an itemsize of %lld does not divide the buffer's itemsize of %lld",
            (long long)itemsize, (long long)self->itemsize);
        return -1;
    }
    if (itemsize > self->itemsize && nbytes % itemsize != 0) {
        PyErr_Format(PyExc_ValueError,
                     "an itemsize of %lld does not divide the last axis of %lld bytes",
                     (long long)itemsize, (long long)nbytes);
        return -1;
    }
    shape[last] = nbytes / itemsize;
    strides[last] = itemsize;
    return 0;
}

PyObject *
cm_buffer_view(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    cm_buffer *self = (cm_buffer *)object;
    static const char *const names[] = {"dtype", NULL};
    PyObject *values[1];
    if (cm_args_parse("view", args, nargs, kwnames, names, 1, 1, values) < 0
        || cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    PyObject *dtype = cm_numpy_dtype(values[0]);
    if (dtype == NULL) {
        return NULL;
    }
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
    size_t nbytes = (size_t)self->ndim * sizeof(int64_t);
    if (nbytes > 0) {
        memcpy(shape, cm_buffer_shape(self), nbytes);
        memcpy(strides, cm_buffer_strides(self), nbytes);
    }
    int64_t itemsize = cm_numpy_itemsize(dtype);
    PyObject *view = NULL;
    if (itemsize == self->itemsize
        || resize_last_axis(self, itemsize, shape, strides) == 0) {
        view = cm_buffer_new_view(self, NULL, self->offset, dtype, self->ndim, shape,
                                  strides);
    }
    Py_DECREF(dtype);
    return view;
}
