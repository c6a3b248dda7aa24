/* SPDX-License-Identifier: Apache-2.0 */
/* Basic indexing: integers, slices, Ellipsis and None, to a view. */
#include "base/checked_math.h"
#include "python/buffer/buffer_object.h"
#include "python/buffer/views.h"

typedef struct cursor {
    cm_buffer *self;
    int axis; /* next axis of self to be indexed */
    int64_t offset;
    int ndim; /* of the view so far */
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
} cursor;

static int
push_axis(cursor *at, int64_t length, int64_t stride)
{
    if (at->ndim == CM_MAX_NDIM) {
        PyErr_Format(PyExc_IndexError, "a view has at most %d dimensions", CM_MAX_NDIM);
        return -1;
    }
    at->shape[at->ndim] = length;
    at->strides[at->ndim] = stride;
    at->ndim++;
    return 0;
}

/* What does not fit is in a view without elements, whose offset nobody uses. */
static void
move(cursor *at, int64_t steps, int64_t stride)
{
    int64_t reach;
    (void)cm_mul_i64(steps, stride, &reach);
    (void)cm_add_i64(at->offset, reach, &at->offset);
}

static int
refuse_advanced(PyObject *item)
{
    PyObject *type = PyType_GetName(Py_TYPE(item));
    if (type != NULL) {
        PyErr_Format(
            PyExc_IndexError,
            "buffers take basic indexing only (integers, slices, Ellipsis, None), "
            "not %U; index the array of numpy() instead",
            type);
        Py_DECREF(type);
    }
    return -1;
}

static int
apply_integer(cursor *at, PyObject *item)
{
    int64_t length = cm_buffer_shape(at->self)[at->axis];
    PyObject *number = PyNumber_Index(item);
    if (number == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) { /* e.g. an array of many elements
                                                        */
            PyErr_Clear();
            return refuse_advanced(item);
        }
        return -1;
    }
    Py_ssize_t i = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (i == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) {
            return -1;
        }
        PyErr_Clear();
        i = PY_SSIZE_T_MAX; /* out of range of any axis */
    }
    if (i < -length || i >= length) {
        PyErr_Format(PyExc_IndexError,
                     "index %S is out of bounds for axis %d with length %lld", item,
                     at->axis, (long long)length);
        return -1;
    }
    int64_t position = i < 0 ? i + length : i;
    move(at, position, cm_buffer_strides(at->self)[at->axis]);
    at->axis++;
    return 0;
}

static int
apply_slice(cursor *at, PyObject *item)
{
    int64_t length = cm_buffer_shape(at->self)[at->axis];
    int64_t stride = cm_buffer_strides(at->self)[at->axis];
    Py_ssize_t start;
    Py_ssize_t stop;
    Py_ssize_t step;
    if (PySlice_Unpack(item, &start, &stop, &step) < 0) {
        return -1;
    }
    Py_ssize_t count = PySlice_AdjustIndices((Py_ssize_t)length, &start, &stop, step);
    int64_t new_stride;
    if (count > 0) {
        move(at, (int64_t)start, stride);
    }
    if (!cm_mul_i64(stride, (int64_t)step, &new_stride)) {
        new_stride = stride; /* such a step leaves one element or none: any stride will
                                do */
    }
    at->axis++;
    return push_axis(at, (int64_t)count, new_stride);
}

static int
keep_axes(cursor *at, int count)
{
    for (int i = 0; i < count; i++, at->axis++) {
        if (push_axis(at, cm_buffer_shape(at->self)[at->axis],
                      cm_buffer_strides(at->self)[at->axis])
            < 0) {
            return -1;
        }
    }
    return 0;
}

static bool
consumes_axis(PyObject *item)
{
    return item != Py_None && item != Py_Ellipsis;
}

/* 0 when `items` are all of basic kinds and fit; *consumed is how many axes they index.
 */
static int
check_items(const cm_buffer *self, PyObject *const *items, Py_ssize_t count,
            int *consumed)
{
    bool seen_ellipsis = false;
    *consumed = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = items[i];
        if (item == Py_Ellipsis) {
            if (seen_ellipsis) {
                PyErr_SetString(PyExc_IndexError,
                                "an index holds at most one Ellipsis");
                return -1;
            }
            seen_ellipsis = true;
        }
        else if (consumes_axis(item)) {
            if (!PySlice_Check(item) && (PyBool_Check(item) || !PyIndex_Check(item))) {
                return refuse_advanced(item);
            }
            *consumed += 1;
        }
        if (*consumed > self->ndim) {
            PyErr_Format(PyExc_IndexError,
                         "too many indices: the buffer has %d dimension%s", self->ndim,
                         self->ndim == 1 ? "" : "s");
            return -1;
        }
    }
    return 0;
}

static int
apply_items(cursor *at, PyObject *const *items, Py_ssize_t count, int consumed)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = items[i];
        int failed;
        if (item == Py_None) {
            failed = push_axis(at, 1, 0);
        }
        else if (item == Py_Ellipsis) {
            failed = keep_axes(at, at->self->ndim - consumed);
        }
        else if (PySlice_Check(item)) {
            failed = apply_slice(at, item);
        }
        else {
            failed = apply_integer(at, item);
        }
        if (failed < 0) {
            return -1;
        }
    }
    return keep_axes(at, at->self->ndim - at->axis);
}

PyObject *
cm_buffer_subscript(PyObject *object, PyObject *index)
{
    cm_buffer *self = (cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    PyObject *single[1] = {index};
    PyObject *items_of_tuple[2 * CM_MAX_NDIM + 1];
    PyObject *const *items = single;
    Py_ssize_t count = 1;
    if (PyTuple_Check(index)) {
        count = PyTuple_Size(index);
        if (count > 2 * CM_MAX_NDIM + 1) {
            PyErr_SetString(PyExc_IndexError, "too many indices");
            return NULL;
        }
        for (Py_ssize_t i = 0; i < count; i++) {
            items_of_tuple[i] = PyTuple_GetItem(index, i); /* the tuple keeps it */
        }
        items = items_of_tuple;
    }
    int consumed;
    cursor at;
    at.self = self;
    at.axis = 0;
    at.offset = self->offset;
    at.ndim = 0;
    if (check_items(self, items, count, &consumed) < 0
        || apply_items(&at, items, count, consumed) < 0) {
        return NULL;
    }
    return cm_buffer_new_view(self, NULL, at.offset, self->dtype, at.ndim, at.shape,
                              at.strides);
}

Py_ssize_t
cm_buffer_length(PyObject *object)
{
    const cm_buffer *self = (const cm_buffer *)object;
    if (self->ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "len() of a buffer without dimensions");
        return -1;
    }
    return (Py_ssize_t)cm_buffer_shape(self)[0];
}
