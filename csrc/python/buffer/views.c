/* SPDX-License-Identifier: Apache-2.0 */
/* Makes views of a buffer by basic indexing, as other dtypes, and by as_device(). Views
 * of other shapes are made in shapes.c, and those with axes in another order in axes.c.
 */
#include "base/checked_math.h"
#include "python/buffer/methods.h"
#include "python/core/arguments.h"

/* -- indexing ----------------------------------------------------------------------------- */

/* Indexing by integers, slices, Ellipsis and None. These functions return false for an
 * index that is wrong, and the package says what is wrong with it. */

typedef struct cursor {
    const cm_buffer *self;
    int axis; /* the next axis of `self` to be indexed */
    int64_t offset;
    int ndim; /* axes of the view so far */
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
} cursor;

static bool
push_axis(cursor *at, int64_t length, int64_t stride)
{
    if (at->ndim == CM_MAX_NDIM) {
        return false;
    }
    at->shape[at->ndim] = length;
    at->strides[at->ndim] = stride;
    at->ndim++;
    return true;
}

/* Move the offset. If it does not fit, the view has no elements, and its offset does
 * not matter. */
static void
move_cursor(cursor *at, int64_t steps, int64_t stride)
{
    int64_t reach;
    (void)cm_mul_i64(steps, stride, &reach);
    (void)cm_add_i64(at->offset, reach, &at->offset);
}

/* Index an axis by an integer. Returns false for anything else, or with an exception
 * that its __index__() raised. */
static bool
apply_integer(cursor *at, PyObject *item, int64_t length, int64_t stride)
{
    if (PyBool_Check(item) || !PyIndex_Check(item)) {
        return false;
    }
    Py_ssize_t i = PyNumber_AsSsize_t(item, NULL);
    if (i == -1 && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear(); /* an array of many elements has __index__() and no value */
        return false;
    }
    if (i < -length || i >= length || PyErr_Occurred()) {
        return false;
    }
    move_cursor(at, i < 0 ? i + length : i, stride);
    return true;
}

/* Index an axis by a slice. Returns false if there are too many axes, or with an
 * exception. */
static bool
apply_slice(cursor *at, PyObject *item, int64_t length, int64_t stride)
{
    Py_ssize_t start;
    Py_ssize_t stop;
    Py_ssize_t step;
    if (PySlice_Unpack(item, &start, &stop, &step) < 0) {
        return false;
    }
    Py_ssize_t count = PySlice_AdjustIndices((Py_ssize_t)length, &start, &stop, step);
    if (count > 0) {
        move_cursor(at, (int64_t)start, stride);
    }
    int64_t new_stride;
    if (!cm_mul_i64(stride, (int64_t)step, &new_stride)) {
        /* Such a step leaves at most one element, so any stride will do. */
        new_stride = stride;
    }
    return push_axis(at, (int64_t)count, new_stride);
}

/* Take the axes before `end` as they are. Returns false if there are too many axes. */
static bool
keep_axes(cursor *at, int end)
{
    bool fits = true;
    for (; at->axis < end && fits; at->axis++) {
        fits = push_axis(at, cm_buffer_shape(at->self)[at->axis],
                         cm_buffer_strides(at->self)[at->axis]);
    }
    return fits;
}

static PyObject *
item_of(PyObject *index, Py_ssize_t i)
{
    return PyTuple_Check(index) ? PyTuple_GetItem(index, i) : index;
}

static bool
apply(cursor *at, PyObject *index)
{
    Py_ssize_t count = PyTuple_Check(index) ? PyTuple_Size(index) : 1;
    Py_ssize_t axes_left = count; /* axes that the items still to come will index */
    Py_ssize_t ellipses = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = item_of(index, i);
        ellipses += item == Py_Ellipsis;
        axes_left -= item == Py_Ellipsis || item == Py_None;
    }
    bool fits = axes_left <= at->self->ndim && ellipses <= 1;
    for (Py_ssize_t i = 0; i < count && fits; i++) {
        PyObject *item = item_of(index, i);
        if (item == Py_None) {
            fits = push_axis(at, 1, 0);
        }
        else if (item == Py_Ellipsis) {
            fits = keep_axes(at, at->self->ndim - (int)axes_left);
        }
        else {
            int64_t length = cm_buffer_shape(at->self)[at->axis];
            int64_t stride = cm_buffer_strides(at->self)[at->axis];
            fits = PySlice_Check(item) ? apply_slice(at, item, length, stride)
                                       : apply_integer(at, item, length, stride);
            at->axis++;
            axes_left--;
        }
    }
    return fits && keep_axes(at, at->self->ndim);
}

PyObject *
cm_buffer_subscript(PyObject *object, PyObject *index)
{
    cm_buffer *self = (cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    cursor at;
    at.self = self;
    at.axis = 0;
    at.offset = self->offset;
    at.ndim = 0;
    if (apply(&at, index)) {
        return cm_buffer_new_view(self, NULL, at.offset, self->dtype, at.ndim, at.shape,
                                  at.strides);
    }
    if (!PyErr_Occurred()) {
        cm_package_refuse("buffers.views", "refuse_index",
                          PyTuple_Pack(2, object, index));
    }
    return NULL;
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

/* -- as another dtype --------------------------------------------------------------------- */

/* Change the last axis so that its elements have `itemsize` bytes. Returns 0, or -1
 * with ValueError. */
static int
recut_last_axis(const cm_buffer *self, int64_t itemsize, int64_t *shape,
                int64_t *strides)
{
    int64_t old = self->itemsize;
    int last = self->ndim - 1;
    if (last < 0) {
        PyErr_SetString(PyExc_ValueError,
                        "the dtype of a buffer without dimensions can only change to "
                        "one of the same itemsize");
        return -1;
    }
    if (shape[last] != 1 && strides[last] != old && cm_buffer_size(self) > 0) {
        PyErr_SetString(PyExc_ValueError,
                        "to view as a dtype of another itemsize, the last axis must be "
                        "contiguous");
        return -1;
    }
    int64_t nbytes = shape[last] * old;
    if (itemsize < old && old % itemsize != 0) {
        PyErr_Format(
            PyExc_ValueError,
            "an itemsize of %lld does not divide the buffer's itemsize of %lld",
            (long long)itemsize, (long long)old);
        return -1;
    }
    if (itemsize > old && nbytes % itemsize != 0) {
        PyErr_Format(PyExc_ValueError,
                     "an itemsize of %lld does not divide the last axis of %lld bytes",
                     (long long)itemsize, (long long)nbytes);
        return -1;
    }
    shape[last] = nbytes / itemsize;
    strides[last] = itemsize;
    return 0;
}

static PyObject *
view_as(cm_buffer *self, PyObject *dtype)
{
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
    int64_t itemsize = cm_numpy_itemsize(dtype);
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    for (int i = 0; i < self->ndim; i++) {
        shape[i] = cm_buffer_shape(self)[i];
        strides[i] = cm_buffer_strides(self)[i];
    }
    if (itemsize != self->itemsize
        && recut_last_axis(self, itemsize, shape, strides) < 0) {
        return NULL;
    }
    return cm_buffer_new_view(self, NULL, self->offset, dtype, self->ndim, shape,
                              strides);
}

PyObject *
cm_buffer_view(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    static const char *const names[] = {"dtype", NULL};
    cm_buffer *self = (cm_buffer *)object;
    PyObject *given = NULL;
    bool is_shape = nargs > 0 && PyLong_Check(args[0]) && !PyBool_Check(args[0]);
    if (is_shape || nargs > 1) { /* PyTorch's view() takes lengths */
        PyErr_SetString(PyExc_TypeError,
                        "view() takes a dtype and nothing else; for another shape use "
                        "reshape()");
        return NULL;
    }
    if (cm_args_parse("view", args, nargs, kwnames, names, 1, 0, &given) < 0) {
        return NULL;
    }
    if (given == NULL) {
        return view_as(self, self->dtype);
    }
    PyObject *dtype = cm_numpy_dtype(given);
    if (dtype == NULL) {
        return NULL;
    }
    PyObject *view = view_as(self, dtype);
    Py_DECREF(dtype);
    return view;
}

/* -- as a plain device buffer ------------------------------------------------------------- */

PyObject *
cm_buffer_as_device(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    cm_kind kind = cm_buffer_kind(self);
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (cm_kind_is_on_device(kind)) {
        return Py_NewRef(object);
    }
    if (!cm_kind_is_shared(kind)) {
        PyErr_Format(PyExc_TypeError,
                     "as_device() needs mapped or managed memory, and this is %s; use "
                     "empty_mapped() or empty_managed()",
                     cm_kinds[kind].text);
        return NULL;
    }
    return cm_buffer_new_view(self, self->state->buffer_types[CM_KIND_DEVICE],
                              self->offset, self->dtype, self->ndim,
                              cm_buffer_shape(self), cm_buffer_strides(self));
}
