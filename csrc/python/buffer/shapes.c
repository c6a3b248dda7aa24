/* SPDX-License-Identifier: Apache-2.0 */
/* Makes views with another shape, for reshape(). Also tells ravel() whether one row can
 * hold all elements without a copy.
 *
 * A shape is a way of counting: the fastest index runs over its whole length before the
 * next one moves. So the axes of the old and of the new shape are compared, the fastest
 * ones first, in runs that have the same number of elements in both: (4, 6) as (2, 2,
 * 3, 2) is the run 6 = 2 * 3 and the run 4 = 2 * 2. Within a run the old axes must step
 * as one axis would: each step is the length times the step of the axis before it. The
 * strides of the new axes follow by the same rule, and begin with the step of the run's
 * fastest old axis. If an old run does not step evenly, no strides describe the new
 * shape, and reshape() has to copy the elements.
 *
 *     (4, 6) with strides (6, 1)    as (24): 6 == 6 * 1, so the stride is 1
 *     (4, 5) of that, strides (6, 1), as (20): 6 != 5 * 1, so there is no stride
 *     the same as (2, 2, 5): run 5 with stride 1, run 4 = 2 * 2 with strides 6 and 12
 *
 * Axes of length 1 are left out. Negative strides and strides of 0 need no case of
 * their own. In Fortran's order the first axis is the fastest, and in C's order the
 * last one. */
#include "base/checked_math.h"
#include "python/buffer/methods.h"
#include "python/core/arguments.h"

/* -- strides ------------------------------------------------------------------------------ */

/* Return the axis at a place, where place 0 is the fastest of `ndim` axes in either
 * order. */
static int
axis_at(int place, int ndim, bool fortran)
{
    return fortran ? place : ndim - 1 - place;
}

/* The old axes, the fastest first, without those of length 1. */
typedef struct old_axes {
    int count;
    int64_t lengths[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
} old_axes;

static void
collect_axes(const cm_buffer *self, bool fortran, old_axes *out)
{
    out->count = 0;
    for (int place = 0; place < self->ndim; place++) {
        int axis = axis_at(place, self->ndim, fortran);
        if (cm_buffer_shape(self)[axis] != 1) {
            out->lengths[out->count] = cm_buffer_shape(self)[axis];
            out->strides[out->count] = cm_buffer_strides(self)[axis];
            out->count++;
        }
    }
}

/* True if one step along the axis is as long as the whole axis before it, so that the
 * two step as one axis would. */
static bool
goes_on(const old_axes *old, int axis)
{
    int64_t reach;
    return cm_mul_i64(old->lengths[axis - 1], old->strides[axis - 1], &reach)
           && reach == old->strides[axis];
}

/* Find strides for the same elements in `lengths`, the fastest axis first. There is at
 * least one element, and both shapes have the same number, so neither runs out of axes
 * before the other; the tests for their ends only make sure of that. Returns false if
 * this takes a copy. */
static bool
match_strides(const old_axes *old, int count, const int64_t *lengths, int64_t itemsize,
              int64_t *strides)
{
    int64_t step = itemsize;
    int next_old = 0;
    int next = 0;
    while (next < count) {
        if (lengths[next] == 1) {
            strides[next++] = step;
            continue;
        }
        if (next_old == old->count) {
            return false;
        }
        int first_old = next_old++;
        int first = next++;
        int64_t have = old->lengths[first_old];
        int64_t want = lengths[first];
        while (have != want) {
            if (have > want) {
                if (next == count) {
                    return false;
                }
                want *= lengths[next++];
                continue;
            }
            if (next_old == old->count || !goes_on(old, next_old)) {
                return false;
            }
            have *= old->lengths[next_old++];
        }
        step = old->strides[first_old];
        for (int i = first; i < next; i++) {
            strides[i] = step;
            /* The last step is never taken, so it need not fit. */
            (void)cm_mul_i64(step, lengths[i], &step);
        }
    }
    return true;
}

/* Compute strides without gaps for a shape without elements. A stride that does not fit
 * does no harm, since no step is ever taken. */
static void
set_dense(int count, const int64_t *lengths, int64_t itemsize, int64_t *strides)
{
    int64_t step = itemsize;
    for (int i = 0; i < count; i++) {
        strides[i] = step;
        (void)cm_mul_i64(step, lengths[i] > 1 ? lengths[i] : 1, &step);
    }
}

/* Find strides of the new shape over the buffer's memory. Returns false if this takes a
 * copy. */
static bool
find_strides(const cm_buffer *self, bool fortran, int ndim, const int64_t *shape,
             int64_t *strides)
{
    int64_t lengths[CM_MAX_NDIM];
    int64_t steps[CM_MAX_NDIM];
    for (int place = 0; place < ndim; place++) {
        lengths[place] = shape[axis_at(place, ndim, fortran)];
    }
    if (cm_buffer_size(self) == 0) {
        set_dense(ndim, lengths, self->itemsize, steps);
    }
    else {
        old_axes old;
        collect_axes(self, fortran, &old);
        if (!match_strides(&old, ndim, lengths, self->itemsize, steps)) {
            return false;
        }
    }
    for (int place = 0; place < ndim; place++) {
        strides[axis_at(place, ndim, fortran)] = steps[place];
    }
    return true;
}

PyObject *
cm_buffer_in_a_row(cm_buffer *self)
{
    int64_t stride;
    int64_t length = cm_buffer_size(self);
    if (!find_strides(self, false, 1, &length, &stride)) {
        return Py_NewRef(Py_NotImplemented);
    }
    return cm_buffer_new_view(self, NULL, self->offset, self->dtype, 1, &length,
                              &stride);
}

/* -- reshape() ---------------------------------------------------------------------------- */

static int
refuse_count(const cm_buffer *self, int ndim, const int64_t *shape)
{
    PyObject *lengths = cm_tuple_from(shape, ndim);
    if (lengths != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "cannot reshape a buffer of %lld elements into shape %R",
                     (long long)cm_buffer_size(self), lengths);
        Py_DECREF(lengths);
    }
    return -1;
}

/* Replace the -1, if there is one, by the length that is left for it, and check that
 * there are as many elements as before. Returns 0, or -1 with ValueError. */
static int
complete_shape(const cm_buffer *self, int ndim, int64_t *shape)
{
    int64_t size = cm_buffer_size(self);
    int64_t known = 1;
    int unknown = -1;
    bool fits = true;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < -1) {
            PyErr_Format(PyExc_ValueError, "shape holds the negative length %lld",
                         (long long)shape[i]);
            return -1;
        }
        if (shape[i] == -1 && unknown >= 0) {
            PyErr_SetString(PyExc_ValueError, "only one length of shape can be -1");
            return -1;
        }
        if (shape[i] == -1) {
            unknown = i;
        }
        else if (shape[i] == 0) {
            known = 0;
            fits = true;
        }
        else if (known > 0 && !cm_mul_i64(known, shape[i], &known)) {
            known = 1; /* a length of 0 may still follow */
            fits = false;
        }
    }
    if (unknown >= 0) {
        if (!fits || known == 0 || size % known != 0) {
            return refuse_count(self, ndim, shape);
        }
        shape[unknown] = size / known;
        known *= shape[unknown];
    }
    if (!fits || known != size) {
        return refuse_count(self, ndim, shape);
    }
    /* If there are no elements, the other lengths may be anything whose strides fit. */
    uint64_t nbytes;
    return size > 0 ? 0 : cm_arg_nbytes(ndim, shape, self->itemsize, &nbytes);
}

PyObject *
cm_buffer_reshape(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    static const char *const names[] = {"order", NULL};
    cm_buffer *self = (cm_buffer *)object;
    int64_t shape[CM_MAX_NDIM];
    int64_t strides[CM_MAX_NDIM];
    PyObject *order_object = NULL;
    char order;
    int ndim;
    if (kwnames != NULL
        && cm_args_parse("reshape", args + nargs, 0, kwnames, names, 0, 0,
                         &order_object)
               < 0) {
        return NULL;
    }
    if (cm_arg_order(order_object, "order", "CFA", 'C', &order) < 0) {
        return NULL;
    }
    if (nargs == 0) {
        PyErr_SetString(PyExc_TypeError, "reshape() needs a shape");
        return NULL;
    }
    if (cm_arg_integers(args, nargs, "shape", "integers or a sequence of integers",
                        &ndim, shape)
            < 0
        || complete_shape(self, ndim, shape) < 0 || cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    bool fortran = order == 'F' || (order == 'A' && cm_buffer_is_fortran(self));
    if (!find_strides(self, fortran, ndim, shape, strides)) {
        PyErr_Format(PyExc_ValueError,
                     "the strides of the buffer do not allow that shape in order '%c' "
                     "without a copy; copy() it first",
                     fortran ? 'F' : 'C');
        return NULL;
    }
    return cm_buffer_new_view(self, NULL, self->offset, self->dtype, ndim, shape,
                              strides);
}
