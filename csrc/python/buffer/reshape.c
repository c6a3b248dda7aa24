/* SPDX-License-Identifier: Apache-2.0 */
/* Views with another shape, another order of axes or another dtype. */
#include "base/checked_math.h"
#include "python/buffer/buffer_object.h"
#include "python/buffer/views.h"
#include "python/core/arguments.h"

/* -- reshape -------------------------------------------------------------------------- */

const char cm_buffer_reshape_doc[] =
    "reshape($self, /, *shape, order='C')\n"
    "--\n"
    "\n"
    "View the same bytes with another shape.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "*shape : int or tuple of int\n"
    "    New lengths in elements; one of them may be -1 and is worked out.\n"
    "order : {'C', 'F'}\n"
    "    Which index runs fastest where elements are read and laid out.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "Buffer\n"
    "    A view of the same type; it keeps the memory alive. Never a copy.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError\n"
    "    The number of elements differs, more than one length is -1, the strides do "
    "not\n"
    "    allow the shape without a copy, or the buffer is closed.\n"
    "TypeError\n"
    "    A length is not an integer.\n";

/* Lengths from the arguments; -1 stays for resolve_unknown(). */
static int
parse_shape(PyObject *const *args, Py_ssize_t nargs, int *ndim, int64_t *shape)
{
    PyObject *sequence = NULL;
    if (nargs == 1 && !PyIndex_Check(args[0])) {
        sequence = PySequence_Tuple(args[0]);
        if (sequence == NULL) {
            if (PyErr_ExceptionMatches(PyExc_TypeError)) {
                PyErr_Clear();
                cm_arg_refuse(args[0], "shape", "integers or a sequence of integers");
            }
            return -1;
        }
        nargs = PyTuple_Size(sequence);
    }
    int result = 0;
    if (nargs > CM_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError,
                     "shape has %zd dimensions, at most %d are possible", nargs,
                     CM_MAX_NDIM);
        result = -1;
    }
    for (Py_ssize_t i = 0; result == 0 && i < nargs; i++) {
        PyObject *item = sequence != NULL ? PyTuple_GetItem(sequence, i) : args[i];
        result = cm_arg_int64(item, "shape", &shape[i]);
        if (result == 0 && shape[i] < -1) {
            PyErr_Format(PyExc_ValueError, "shape holds the negative length %lld",
                         (long long)shape[i]);
            result = -1;
        }
    }
    *ndim = (int)nargs;
    Py_XDECREF(sequence);
    return result;
}

/* Put in the length written as -1 and compare the counts. */
static int
resolve_unknown(int64_t count, int ndim, int64_t *shape)
{
    int unknown = -1;
    uint64_t known = 1;
    bool fits = true;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == -1 && unknown >= 0) {
            PyErr_SetString(PyExc_ValueError, "only one length of shape can be -1");
            return -1;
        }
        if (shape[i] == -1) {
            unknown = i;
        }
        else if (known != 0) {
            fits = fits && cm_mul_u64(known, (uint64_t)shape[i], &known);
        }
    }
    /* a zero length makes the product zero whatever overflowed before it */
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == 0) {
            known = 0;
            fits = true;
        }
    }
    if (unknown >= 0 && fits && known > 0 && (uint64_t)count % known == 0) {
        shape[unknown] = count / (int64_t)known;
        return 0;
    }
    if (unknown < 0 && fits && known == (uint64_t)count) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "cannot reshape a buffer of %lld elements into that shape",
                 (long long)count);
    return -1;
}

/* Without gaps, fastest axis first. Past the last axis, and in what is empty, a step
 * may not fit: nobody takes it. */
static void
set_strides(int ndim, const int64_t *shape, int64_t step, int64_t *strides)
{
    for (int i = 0; i < ndim; i++) {
        strides[i] = step;
        (void)cm_mul_i64(step, shape[i] > 0 ? shape[i] : 1, &step);
    }
}

/* One run of old axes against one run of new axes with as many elements: the old run
 * must step evenly, then the new strides follow. Both runs are in order "F" (fastest
 * first). */
static bool
match_run(const int64_t *old_shape, const int64_t *old_strides, int old_count,
          const int64_t *new_shape, int64_t *new_strides, int new_count)
{
    for (int i = 0; i + 1 < old_count; i++) {
        int64_t next;
        if (!cm_mul_i64(old_strides[i], old_shape[i], &next)
            || old_strides[i + 1] != next) {
            return false;
        }
    }
    set_strides(new_count, new_shape, old_strides[0], new_strides);
    return true;
}

/* Strides for the new shape over the old elements, all arrays fastest axis first, no
 * element count of zero. False when a copy would be needed. */
static bool
match_strides(int old_ndim, const int64_t *old_shape, const int64_t *old_strides,
              int new_ndim, const int64_t *new_shape, int64_t *new_strides,
              int64_t itemsize)
{
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
    int count = 0;
    for (int i = 0; i < old_ndim; i++) { /* axes of length 1 have no say */
        if (old_shape[i] != 1) {
            shape[count] = old_shape[i];
            strides[count] = old_strides[i];
            count++;
        }
    }
    int old_axis = 0;
    int new_axis = 0;
    int64_t step = itemsize;
    while (new_axis < new_ndim) {
        if (new_shape[new_axis] == 1) {
            new_strides[new_axis++] = step;
            continue;
        }
        int old_end = old_axis + 1;
        int new_end = new_axis + 1;
        int64_t old_product = shape[old_axis];
        int64_t new_product = new_shape[new_axis];
        while (old_product != new_product) {
            if (old_product < new_product) {
                old_product *= shape[old_end++];
            }
            else {
                new_product *= new_shape[new_end++];
            }
        }
        if (!match_run(shape + old_axis, strides + old_axis, old_end - old_axis,
                       new_shape + new_axis, new_strides + new_axis,
                       new_end - new_axis)) {
            return false;
        }
        (void)cm_mul_i64(new_strides[new_end - 1], new_shape[new_end - 1], &step);
        old_axis = old_end;
        new_axis = new_end;
    }
    return true;
}

static void
copy_axes(int ndim, const int64_t *from, int64_t *to, bool reverse)
{
    for (int i = 0; i < ndim; i++) {
        to[i] = from[reverse ? ndim - 1 - i : i];
    }
}

static PyObject *
reshape(cm_buffer *self, int ndim, int64_t *shape, char order)
{
    int64_t count = (int64_t)(cm_buffer_nbytes(self) / (uint64_t)self->itemsize);
    if (resolve_unknown(count, ndim, shape) < 0) {
        return NULL;
    }
    bool reverse = order == 'C';
    int64_t old_shape[CM_MAX_NDIM];
    int64_t old_strides[CM_MAX_NDIM];
    int64_t new_shape[CM_MAX_NDIM];
    int64_t new_strides[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
    copy_axes(self->ndim, cm_buffer_shape(self), old_shape, reverse);
    copy_axes(self->ndim, cm_buffer_strides(self), old_strides, reverse);
    copy_axes(ndim, shape, new_shape, reverse);
    if (count == 0) {
        set_strides(ndim, new_shape, self->itemsize, new_strides);
    }
    else if (!match_strides(self->ndim, old_shape, old_strides, ndim, new_shape,
                            new_strides, self->itemsize)) {
        PyErr_Format(PyExc_ValueError,
                     "the strides of the buffer do not allow that shape in order '%c' "
                     "without a copy; copy() it first",
                     order);
        return NULL;
    }
    copy_axes(ndim, new_strides, strides, reverse);
    return cm_buffer_new_view(self, NULL, self->offset, self->dtype, ndim, shape,
                              strides);
}

/* The methods below take any number of positional arguments, which cm_args_parse does
 * not, so the one keyword is looked up here. */
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
    int ndim;
    int64_t shape[CM_MAX_NDIM];
    if (parse_shape(args, nargs, &ndim, shape) < 0) {
        return NULL;
    }
    return reshape(self, ndim, shape, order);
}

/* -- transpose ------------------------------------------------------------------------ */

const char cm_buffer_transpose_doc[] =
    "transpose($self, /, *axes)\n"
    "--\n"
    "\n"
    "View with the axes in another order; without arguments reversed.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "*axes : int or tuple of int\n"
    "    A permutation of the axes; negative numbers count from the end.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "Buffer\n"
    "    A view of the same type; it keeps the memory alive.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError\n"
    "    `axes` is not a permutation, or the buffer is closed.\n"
    "TypeError\n"
    "    An axis is not an integer.\n";

static PyObject *
transpose(cm_buffer *self, const int64_t *axes)
{
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
    for (int i = 0; i < self->ndim; i++) {
        int64_t axis = axes == NULL ? self->ndim - 1 - i : axes[i];
        shape[i] = cm_buffer_shape(self)[axis];
        strides[i] = cm_buffer_strides(self)[axis];
    }
    return cm_buffer_new_view(self, NULL, self->offset, self->dtype, self->ndim, shape,
                              strides);
}

static int
check_permutation(int ndim, int64_t count, int64_t *axes)
{
    bool seen[CM_MAX_NDIM] = {false};
    bool good = count == ndim;
    for (int i = 0; good && i < ndim; i++) {
        axes[i] += axes[i] < 0 ? ndim : 0;
        good = axes[i] >= 0 && axes[i] < ndim && !seen[axes[i]];
        if (good) {
            seen[axes[i]] = true;
        }
    }
    if (!good) {
        PyErr_Format(PyExc_ValueError, "axes must be a permutation of the %d axes",
                     ndim);
        return -1;
    }
    return 0;
}

PyObject *
cm_buffer_transpose(PyObject *object, PyObject *const *args, Py_ssize_t nargs)
{
    cm_buffer *self = (cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (nargs == 0 || (nargs == 1 && args[0] == Py_None)) {
        return transpose(self, NULL);
    }
    PyObject *tuple = NULL;
    if (nargs == 1 && !PyIndex_Check(args[0])) {
        tuple = PySequence_Tuple(args[0]);
        if (tuple == NULL) {
            return NULL;
        }
        nargs = PyTuple_Size(tuple);
    }
    int64_t axes[CM_MAX_NDIM];
    int failed = 0;
    for (Py_ssize_t i = 0; failed == 0 && i < nargs && i < CM_MAX_NDIM; i++) {
        failed = cm_arg_int64(tuple != NULL ? PyTuple_GetItem(tuple, i) : args[i],
                              "axes", &axes[i]);
    }
    Py_XDECREF(tuple);
    if (failed < 0 || check_permutation(self->ndim, nargs, axes) < 0) {
        return NULL;
    }
    return transpose(self, axes);
}

PyObject *
cm_buffer_get_transposed(PyObject *object, void *closure CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    return cm_buffer_check_open(self) < 0 ? NULL : transpose(self, NULL);
}
