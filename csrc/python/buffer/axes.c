/* SPDX-License-Identifier: Apache-2.0 */
/* Makes views that have the axes of a buffer in another order, or fewer axes, for T,
 * transpose() and squeeze(). The number of elements, and where each of them is, stay
 * the same. */
#include "base/checked_math.h"
#include "python/buffer/methods.h"
#include "python/core/arguments.h"

/* Make a view whose axis i is axis axes[i] of the buffer. Axes that are not named are
 * left out. Returns NULL with an exception if it fails. */
static PyObject *
view_of_axes(cm_buffer *self, int ndim, const int *axes)
{
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    for (int i = 0; i < ndim; i++) {
        shape[i] = cm_buffer_shape(self)[axes[i]];
        strides[i] = cm_buffer_strides(self)[axes[i]];
    }
    return cm_buffer_new_view(self, NULL, self->offset, self->dtype, ndim, shape,
                              strides);
}

static void
reverse_axes(int ndim, int *axes)
{
    for (int i = 0; i < ndim; i++) {
        axes[i] = ndim - 1 - i;
    }
}

/* -- arguments ---------------------------------------------------------------------------- */

/* Find axes by their numbers; negative ones count from the end. `named` says of each
 * axis of the buffer whether it is among them. Returns 0, or -1 with AxisError (a
 * ValueError and an IndexError) if one does not exist, or ValueError if one is named
 * twice. */
static int
find_axes(const cm_buffer *self, const char *function, int count,
          const int64_t *numbers, int *axes, bool *named)
{
    for (int i = 0; i < self->ndim; i++) {
        named[i] = false;
    }
    for (int i = 0; i < count; i++) {
        int64_t number = numbers[i];
        if (number < -self->ndim || number >= self->ndim) {
            return cm_package_refuse(
                "buffers.views", "refuse_axis",
                Py_BuildValue("(sLi)", function, (long long)number, self->ndim));
        }
        axes[i] = (int)(number < 0 ? number + self->ndim : number);
        if (named[axes[i]]) {
            PyErr_Format(PyExc_ValueError, "%s: axis %d is named twice", function,
                         axes[i]);
            return -1;
        }
        named[axes[i]] = true;
    }
    return 0;
}

/* -- in another order --------------------------------------------------------------------- */

PyObject *
cm_buffer_get_transposed(PyObject *object, void *closure CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    int axes[CM_MAX_NDIM];
    reverse_axes(self->ndim, axes);
    return view_of_axes(self, self->ndim, axes);
}

static int
read_order_of_axes(const cm_buffer *self, PyObject *const *args, Py_ssize_t nargs,
                   int *axes)
{
    int64_t numbers[CM_MAX_NDIM];
    bool named[CM_MAX_NDIM];
    int count;
    if (cm_arg_integers(args, nargs, "axes", "ints or a sequence of ints", &count,
                        numbers)
        < 0) {
        return -1;
    }
    if (count != self->ndim) {
        PyErr_Format(PyExc_ValueError,
                     "axes must be a permutation of the %d axes, not %d numbers",
                     self->ndim, count);
        return -1;
    }
    return find_axes(self, "transpose", count, numbers, axes, named);
}

PyObject *
cm_buffer_transpose(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    static const char *const names[] = {NULL};
    cm_buffer *self = (cm_buffer *)object;
    int axes[CM_MAX_NDIM];
    if (kwnames != NULL
        && cm_args_parse("transpose", args + nargs, 0, kwnames, names, 0, 0, NULL)
               < 0) {
        return NULL;
    }
    if (nargs == 0 || (nargs == 1 && args[0] == Py_None)) {
        reverse_axes(self->ndim, axes);
    }
    else if (read_order_of_axes(self, args, nargs, axes) < 0) {
        return NULL;
    }
    return view_of_axes(self, self->ndim, axes);
}

/* Sort the axes from the one whose elements are furthest apart to the one whose
 * elements are nearest; equal ones stay in their order. */
static void
sort_axes(const cm_buffer *self, int *axes)
{
    for (int i = 0; i < self->ndim; i++) {
        uint64_t step = cm_magnitude(cm_buffer_strides(self)[i]);
        int place = i;
        for (; place > 0; place--) {
            int64_t before = cm_buffer_strides(self)[axes[place - 1]];
            if (cm_magnitude(before) >= step) {
                break;
            }
            axes[place] = axes[place - 1];
        }
        axes[place] = i;
    }
}

PyObject *
cm_buffer_reorder(cm_buffer *self, char order)
{
    int axes[CM_MAX_NDIM];
    bool is_c = order == 'C' || (order == 'A' && !cm_buffer_is_fortran(self))
                || (order == 'K' && cm_buffer_is_contiguous(self, false));
    if (is_c) {
        return cm_buffer_check_open(self) < 0 ? NULL : Py_NewRef((PyObject *)self);
    }
    if (order == 'K') {
        sort_axes(self, axes);
    }
    else {
        reverse_axes(self->ndim, axes);
    }
    return view_of_axes(self, self->ndim, axes);
}

/* -- without axes of length 1 ------------------------------------------------------------- */

/* Read which axes are named, each of which must have length 1. Returns 0, or -1 with an
 * exception. */
static int
read_squeezed(const cm_buffer *self, PyObject *object, bool *named)
{
    int64_t numbers[CM_MAX_NDIM];
    int axes[CM_MAX_NDIM];
    int count;
    if (cm_arg_integers(&object, 1, "axis", "an int or a sequence of ints", &count,
                        numbers)
        < 0) {
        return -1;
    }
    /* In squeeze(), NumPy treats an array without dimensions as one with a single
     * axis. */
    if (self->ndim == 0 && count == 1 && (numbers[0] == 0 || numbers[0] == -1)) {
        return 0;
    }
    if (find_axes(self, "squeeze", count, numbers, axes, named) < 0) {
        return -1;
    }
    for (int axis = 0; axis < self->ndim; axis++) {
        int64_t length = cm_buffer_shape(self)[axis];
        if (named[axis] && length != 1) {
            PyErr_Format(
                PyExc_ValueError,
                "axis %d has length %lld, and only axes of length 1 can be left out",
                axis, (long long)length);
            return -1;
        }
    }
    return 0;
}

PyObject *
cm_buffer_squeeze(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    static const char *const names[] = {"axis", NULL};
    cm_buffer *self = (cm_buffer *)object;
    bool goes[CM_MAX_NDIM];
    int axes[CM_MAX_NDIM];
    int left = 0;
    PyObject *axis;
    if (cm_args_parse("squeeze", args, nargs, kwnames, names, 1, 0, &axis) < 0) {
        return NULL;
    }
    for (int i = 0; i < self->ndim; i++) {
        goes[i] = cm_buffer_shape(self)[i] == 1;
    }
    if (cm_arg_is_given(axis) && read_squeezed(self, axis, goes) < 0) {
        return NULL;
    }
    for (int i = 0; i < self->ndim; i++) {
        if (!goes[i]) {
            axes[left++] = i;
        }
    }
    return view_of_axes(self, left, axes);
}
