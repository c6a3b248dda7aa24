/* SPDX-License-Identifier: Apache-2.0 */
/* This file has the methods that copy a buffer to a new one. These are copy(),
 * flatten(), astype() and, if no view will do, ravel(). The new buffer has the same
 * kind of memory, the same flags and the same device as the old one, so that a copy of
 * managed memory is managed memory. Pools have no ordinary memory. So NumPy allocates
 * the memory for a copy of an ordinary buffer, and inside numpy_pinned() this memory is
 * page-locked. */
#include "python/buffer/methods.h"
#include "python/copy/copy_functions.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/pool/allocate.h"
#include "python/protocols/import.h"

/* -- memory for the new buffer ------------------------------------------------------------ */

/* Make a buffer over a new array of NumPy's, with the shape of `like`. Returns a new
 * reference, or NULL with an exception. */
static PyObject *
make_ordinary(cm_state *state, PyObject *dtype, const cm_region *like, char order)
{
    int64_t strides[CM_MAX_NDIM];
    int64_t count;
    uint64_t address;
    uint64_t nbytes;
    PyObject *buffer = NULL;
    if (cm_arg_nbytes(like->ndim, like->shape, cm_numpy_itemsize(dtype), &nbytes) < 0) {
        return NULL;
    }
    count = (int64_t)nbytes / cm_numpy_itemsize(dtype);
    PyObject *memory = cm_numpy_empty(dtype, 1, &count);
    if (memory == NULL) {
        return NULL;
    }
    cm_numpy_place(memory, &address, &nbytes);
    cm_strides_in_order(like, order, cm_numpy_itemsize(dtype), strides);
    PyObject *array = cm_numpy_view(memory, (void *)(uintptr_t)address, dtype,
                                    like->ndim, like->shape, strides, false);
    Py_DECREF(memory);
    if (array != NULL) {
        buffer = cm_import_array(state, array);
        Py_DECREF(array);
    }
    return buffer;
}

/* Make a buffer of `kind` with the shape of `like`, and strides in `order`. If `self`
 * has memory of the same kind, the new memory also has the flags of `self`. Returns a
 * new reference, or NULL with an exception. */
static PyObject *
make_like(cm_buffer *self, cm_kind kind, PyObject *dtype, const cm_region *like,
          char order)
{
    cm_state *state = self->state;
    if (cm_kind_is_pageable(kind)) {
        return make_ordinary(state, dtype, like, order);
    }
    if (cm_state_runtime(state) == NULL || cm_buffer_check_open(self) < 0) {
        return NULL; /* cm_state_runtime() opens the runtime anew after shutdown(), but
                        a buffer from before shutdown() is closed */
    }
    int device = self->storage->device;
    unsigned flags = cm_kinds[kind].flags;
    bool is_same = kind == cm_buffer_kind(self);
    if (is_same && self->storage->pool != NULL && !cm_kind_is_on_device(kind)) {
        flags = self->storage->flags;
    }
    return cm_buffer_allocate_kind(state, kind, flags, device, dtype, like, order);
}

/* Copy, and wait for the copy. `casting` is the rule for the elements, or NULL if the
 * dtypes are the same. Returns 0, or -1 with an exception. */
static int
copy_into(cm_state *state, PyObject *dst, PyObject *src, PyObject *casting)
{
    cm_call_frame frame;
    PyObject *done = NULL;
    if (cm_call_enter(&frame, state, NULL, -1, NULL, "copy") == 0) {
        cm_copy_how how = {frame.stream, .blocking = true,
                           .casting = {.casting = casting},
                           .progress = &frame.progress};
        done = cm_copy_objects(state, dst, src, how);
    }
    done = cm_call_leave(&frame, done);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* -- copy() ------------------------------------------------------------------------------- */

/* Make a copy of `kind` whose elements have the dtype `dtype`. `casting` has the
 * meaning that it has in copy_into(). Returns a new buffer, or NULL with an exception.
 */
static PyObject *
duplicate(cm_buffer *self, cm_kind kind, PyObject *dtype, char order, PyObject *casting)
{
    cm_region like;
    cm_buffer_region(self, &like);
    PyObject *made = make_like(self, kind, dtype, &like, order);
    if (made != NULL && copy_into(self->state, made, (PyObject *)self, casting) < 0) {
        Py_CLEAR(made);
    }
    return made;
}

PyObject *
cm_buffer_duplicate(cm_buffer *self, cm_kind kind)
{
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    return duplicate(self, kind, self->dtype, 'C', NULL);
}

PyObject *
cm_buffer_copy(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    static const char *const names[] = {"order", NULL};
    cm_buffer *self = (cm_buffer *)object;
    PyObject *given;
    char order;
    if (cm_args_parse("copy", args, nargs, kwnames, names, 1, 0, &given) < 0
        || cm_buffer_check_open(self) < 0
        || cm_arg_order(given, "order", "CFAK", 'C', &order) < 0) {
        return NULL;
    }
    return duplicate(self, cm_buffer_kind(self), self->dtype, order, NULL);
}

PyObject *
cm_buffer_copied(PyObject *object, PyObject *memo CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    return duplicate(self, cm_buffer_kind(self), self->dtype, 'K', NULL);
}

/* -- in one row --------------------------------------------------------------------------- */

/* Copy the elements of `reordered`, in C's order, to a new buffer with a single axis.
 * The copy needs a target with the axes of `reordered`, so a view of the new buffer is
 * made and dropped afterwards. The result is the new buffer itself and not the view.
 * Returns a new reference, or NULL with an exception. */
static PyObject *
copy_into_a_row(cm_buffer *reordered)
{
    cm_region row = {.ndim = 1, .itemsize = reordered->itemsize};
    cm_region like;
    int64_t strides[CM_MAX_NDIM];
    row.shape[0] = cm_buffer_size(reordered);
    PyObject *made =
        make_like(reordered, cm_buffer_kind(reordered), reordered->dtype, &row, 'C');
    if (made == NULL) {
        return NULL;
    }
    cm_buffer_region(reordered, &like);
    cm_strides_in_order(&like, 'C', reordered->itemsize, strides);
    PyObject *target =
        cm_buffer_new_view((cm_buffer *)made, NULL, ((cm_buffer *)made)->offset,
                           reordered->dtype, reordered->ndim, like.shape, strides);
    if (target == NULL
        || copy_into(reordered->state, target, (PyObject *)reordered, NULL) < 0) {
        Py_CLEAR(made);
    }
    Py_XDECREF(target);
    return made;
}

/* Do the work of flatten(), which always copies, and of ravel(), which copies only if
 * no view will do. Returns a new reference, or NULL with an exception. */
static PyObject *
put_in_a_row(PyObject *object, const char *function, bool copies, PyObject *const *args,
             Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"order", NULL};
    cm_buffer *self = (cm_buffer *)object;
    PyObject *given;
    PyObject *row = NULL;
    char order;
    if (cm_args_parse(function, args, nargs, kwnames, names, 1, 0, &given) < 0
        || cm_arg_order(given, "order", "CFAK", 'C', &order) < 0) {
        return NULL;
    }
    cm_buffer *reordered = (cm_buffer *)cm_buffer_reorder(self, order);
    if (reordered == NULL) {
        return NULL;
    }
    if (!copies) {
        row = cm_buffer_in_a_row(reordered);
    }
    if (copies || row == Py_NotImplemented) {
        Py_XDECREF(row);
        row = copy_into_a_row(reordered);
    }
    Py_DECREF((PyObject *)reordered);
    return row;
}

PyObject *
cm_buffer_ravel(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    return put_in_a_row(self, "ravel", false, args, nargs, kwnames);
}

PyObject *
cm_buffer_flatten(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    return put_in_a_row(self, "flatten", true, args, nargs, kwnames);
}

/* -- astype() ----------------------------------------------------------------------------- */

/* Return 1 if astype() may return the buffer itself, because `copy` is false and
 * neither the dtype nor the order would change. Returns 0 if astype() has to make a new
 * buffer, or -1 with an exception. */
static int
is_answer(const cm_buffer *self, PyObject *dtype, char order, PyObject *copy)
{
    if (copy == NULL || order != 'K' || !cm_numpy_dtype_equal(dtype, self->dtype)) {
        return 0;
    }
    int copies = PyObject_IsTrue(copy);
    return copies < 0 ? -1 : copies == 0;
}

/* Do the work of astype(), once its dtype has been read. Returns a new reference, or
 * NULL with an exception. */
static PyObject *
convert(cm_buffer *self, PyObject *dtype, PyObject *const *values)
{
    char order;
    if (cm_buffer_check_open(self) < 0
        || cm_arg_order(values[1], "order", "CFAK", 'K', &order) < 0) {
        return NULL;
    }
    /* Without casting= every dtype may be converted, so there is nothing to check. */
    if (values[2] != NULL
        && cm_check_rule("astype: ", self->dtype, dtype, values[2]) < 0) {
        return NULL;
    }
    int is_self = is_answer(self, dtype, order, values[3]);
    if (is_self < 0) {
        return NULL;
    }
    if (is_self > 0) {
        return Py_NewRef((PyObject *)self);
    }
    /* Two dtypes that compare equal may still stand for different numbers. If both are
     * the same object they certainly do not, so the elements need no conversion. */
    if (dtype == self->dtype) {
        return duplicate(self, cm_buffer_kind(self), dtype, order, NULL);
    }
    PyObject *casting = values[2];
    casting =
        casting == NULL ? PyUnicode_InternFromString("unsafe") : Py_NewRef(casting);
    if (casting == NULL) {
        return NULL;
    }
    PyObject *made = duplicate(self, cm_buffer_kind(self), dtype, order, casting);
    Py_DECREF(casting);
    return made;
}

PyObject *
cm_buffer_astype(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    static const char *const names[] = {"dtype", "order", "casting", "copy", NULL};
    PyObject *values[4];
    if (cm_args_parse("astype", args, nargs, kwnames, names, 4, 1, values) < 0) {
        return NULL;
    }
    PyObject *dtype = cm_numpy_dtype(values[0]);
    if (dtype == NULL) {
        return NULL;
    }
    PyObject *answer = convert((cm_buffer *)object, dtype, values);
    Py_DECREF(dtype);
    return answer;
}
