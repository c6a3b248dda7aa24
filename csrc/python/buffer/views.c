/* SPDX-License-Identifier: Apache-2.0 */
/* Views of a buffer: basic indexing, and other shapes, orders of axes and dtypes, whose
 * strides the package works out. */
#include "base/checked_math.h"
#include "python/buffer/methods.h"
#include "python/core/arguments.h"

/* -- indexing: integers, slices, Ellipsis and None --------------------------------------- */

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

/* -- shapes and strides that the package works out --------------------------------------- */

/* 0, or -1 with an exception. */
static int
read_numbers(PyObject *tuple, int64_t *out)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); i++) {
        out[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (out[i] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

/* The view that cumem.views.<function>(*arguments) answers, as shape and strides of the
 * same bytes; takes over the arguments, a tuple or NULL. */
static PyObject *
view_as(cm_buffer *self, PyObject *dtype, const char *function, PyObject *arguments)
{
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
    PyObject *first;
    PyObject *second;
    PyObject *view = NULL;
    PyObject *answer = cm_package_call("views", function, arguments);
    if (answer != NULL
        && PyArg_ParseTuple(answer, "O!O!", &PyTuple_Type, &first, &PyTuple_Type,
                            &second)) {
        Py_ssize_t ndim = PyTuple_Size(first);
        if (ndim > CM_MAX_NDIM) {
            PyErr_Format(PyExc_ValueError,
                         "shape has %zd dimensions, at most %d are possible", ndim,
                         CM_MAX_NDIM);
        }
        else if (read_numbers(first, shape) == 0
                 && read_numbers(second, strides) == 0) {
            view = cm_buffer_new_view(self, NULL, self->offset, dtype, (int)ndim, shape,
                                      strides);
        }
    }
    Py_XDECREF(answer);
    return view;
}

static PyObject *
to_tuple(PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *tuple = PyTuple_New(nargs);
    for (Py_ssize_t i = 0; tuple != NULL && i < nargs; i++) {
        (void)PyTuple_SetItem(tuple, i, Py_NewRef(args[i]));
    }
    return tuple;
}

/* -- reshape -------------------------------------------------------------------------- */

CM_DOC(cm_buffer_reshape_doc,
"reshape($self, /, *shape, order='C')\n--\n\n"
"View the same bytes with another shape.\n\n"
"Parameters\n----------\n*shape : int or tuple of int\n"
"    New lengths in elements; one of them may be -1 and is worked out.\n"
"order : {'C', 'F'}\n"
"    Which index runs fastest where elements are read and laid out.\n\n"
"Returns\n-------\nBuffer\n"
"    A view of the same type; it keeps the memory alive. Never a copy.\n\n"
"Raises\n------\nValueError\n"
"    The number of elements differs, more than one length is -1, the strides do not\n"
"    allow the shape without a copy, or the buffer is closed.\n"
"TypeError\n    A length is not an integer.");

/* It takes any number of positional arguments, which cm_args_parse does not, so the one
 * keyword is looked up by itself. */
PyObject *
cm_buffer_reshape(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    cm_buffer *self = (cm_buffer *)object;
    static const char *const names[] = {"order", NULL};
    PyObject *values[1];
    char order;
    if (cm_args_parse("reshape", args + nargs, 0, kwnames, names, 0, 0, values) < 0
        || cm_arg_order(values[0] == NULL ? Py_None : values[0], "order", &order) < 0
        || cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (nargs == 0) {
        PyErr_SetString(PyExc_TypeError, "reshape() needs a shape");
        return NULL;
    }
    PyObject *shape = to_tuple(args, nargs);
    return view_as(self, self->dtype, "reshape",
                   shape == NULL ? NULL : Py_BuildValue("(ONC)", object, shape, order));
}

/* -- transpose ------------------------------------------------------------------------ */

CM_DOC(cm_buffer_transpose_doc,
"transpose($self, /, *axes)\n--\n\n"
"View with the axes in another order; without arguments reversed.\n\n"
"Parameters\n----------\n*axes : int or tuple of int\n"
"    A permutation of the axes; negative numbers count from the end.\n\n"
"Returns\n-------\nBuffer\n    A view of the same type; it keeps the memory alive.\n\n"
"Raises\n------\nValueError\n"
"    `axes` is not a permutation, or the buffer is closed.\n"
"TypeError\n    An axis is not an integer.");

static PyObject *
transpose(cm_buffer *self)
{
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
    for (int i = 0; i < self->ndim; i++) {
        shape[i] = cm_buffer_shape(self)[self->ndim - 1 - i];
        strides[i] = cm_buffer_strides(self)[self->ndim - 1 - i];
    }
    return cm_buffer_new_view(self, NULL, self->offset, self->dtype, self->ndim, shape,
                              strides);
}

PyObject *
cm_buffer_transpose(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    cm_buffer *self = (cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (nargs == 0 || (nargs == 1 && args[0] == Py_None)) {
        return transpose(self);
    }
    PyObject *axes = to_tuple(args, nargs);
    return view_as(self, self->dtype, "transpose",
                   axes == NULL ? NULL : Py_BuildValue("(ON)", object, axes));
}

PyObject *
cm_buffer_get_transposed(PyObject *object, void *closure CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    return cm_buffer_check_open(self) < 0 ? NULL : transpose(self);
}

/* -- another dtype ----------------------------------------------------------------------- */

CM_DOC(cm_buffer_view_doc,
"view($self, /, dtype)\n--\n\n"
"View the same bytes as another dtype, by NumPy's rules.\n\n"
"Parameters\n----------\ndtype : dtype_like\n"
"    Any dtype without Python objects. Where its itemsize differs, the last axis is\n"
"    lengthened or shortened and must be contiguous.\n\n"
"Returns\n-------\nBuffer\n    A view of the same type; it keeps the memory alive.\n\n"
"Raises\n------\nValueError\n"
"    The itemsize differs and the buffer has no dimensions, its last axis is not\n"
"    contiguous, or the sizes do not divide; or the buffer is closed.\n"
"TypeError\n    `dtype` is not a dtype or holds Python objects.");

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
    int64_t itemsize = cm_numpy_itemsize(dtype);
    PyObject *view =
        itemsize == self->itemsize
            ? cm_buffer_new_view(self, NULL, self->offset, dtype, self->ndim,
                                 cm_buffer_shape(self), cm_buffer_strides(self))
            : view_as(self, dtype, "recast",
                      Py_BuildValue("(OL)", object, (long long)itemsize));
    Py_DECREF(dtype);
    return view;
}
