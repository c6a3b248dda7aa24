/* SPDX-License-Identifier: Apache-2.0 */
/* Converters from Python arguments, each with an error that names the argument and what
 * was expected. 0 on success, -1 with TypeError or ValueError set. */
#pragma once

#include "python/core/state.h"

/* Vectorcall arguments (args, nargs, kwnames) to values[]: names[i] is the keyword of
 * slot i, NULL-terminated; the first `positional` slots may be positional, of which the
 * first `required` must be given (keyword-only slots are optional). Unset slots are
 * NULL; values are borrowed. `function` names the callee in errors. */
int cm_args_parse(const char *function, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames, const char *const *names, int positional,
                  int required, PyObject **values);

/* The same for the constructor of a type (tp_new), whose arguments come as a tuple and
 * a dict, or NULL for no keywords. */
int cm_args_parse_new(const char *function, PyObject *args, PyObject *kwargs,
                      const char *const *names, int positional, int required,
                      PyObject **values);

/* Given at all, and not as None. */
static CM_INLINE bool
cm_arg_is_given(const PyObject *object)
{
    return object != NULL && object != Py_None;
}

/* 1 and a new reference, 0 where there is no such attribute, -1 with an exception. */
int cm_arg_find_attribute(PyObject *object, const char *name, PyObject **out);

/* TypeError "{name} must be {expected}, not {type of object}"; always -1. */
int cm_arg_refuse(PyObject *object, const char *name, const char *expected);
/* Integers as NumPy reads lengths and axes: each of the `nargs` arguments is one, or
 * the only argument is a sequence of them. An integer is whatever has __index__() and
 * is no
 * bool. `out` has room for CM_MAX_NDIM. May run Python code. Fails: TypeError "{name}
 * must be {expected}", ValueError for too many or too large ones, and what __index__()
 * raises. */
int cm_arg_integers(PyObject *const *args, Py_ssize_t nargs, const char *name,
                    const char *expected, int *count, int64_t *out);
/* The usual integers at a look. False, without an exception and without a call of
 * Python code, for all others. */
static inline bool
cm_arg_try_length(PyObject *object, int64_t *out)
{
    if (CM_UNLIKELY(!Py_IS_TYPE(object, &PyLong_Type))) {
        return false;
    }
    Py_ssize_t length = PyLong_AsSsize_t(object);
    if (CM_UNLIKELY(length < 0)) {
        PyErr_Clear();
        return false;
    }
    *out = length;
    return true;
}

/* The same of usual shapes: an int, or a tuple or list of ints. */
static inline bool
cm_arg_try_shape(PyObject *object, int *ndim, int64_t *shape)
{
    bool is_tuple = Py_IS_TYPE(object, &PyTuple_Type);
    if (!is_tuple && !Py_IS_TYPE(object, &PyList_Type)) {
        *ndim = 1;
        return cm_arg_try_length(object, shape);
    }
    Py_ssize_t count = is_tuple ? PyTuple_Size(object) : PyList_Size(object);
    if (count > CM_MAX_NDIM) {
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *entry =
            is_tuple ? PyTuple_GetItem(object, i) : PyList_GetItem(object, i);
        if (!cm_arg_try_length(entry, &shape[i])) {
            return false;
        }
    }
    *ndim = (int)count;
    return true;
}
/* An int or a sequence of ints, each >= 0, at most CM_MAX_NDIM of them. */
int cm_arg_shape(PyObject *object, const char *name, int *ndim, int64_t *shape);
/* Product of shape times itemsize; ValueError when it does not fit in 63 bits. */
int cm_arg_nbytes(int ndim, const int64_t *shape, int64_t itemsize, uint64_t *out);
/* Is it the text of a kind that pools can be of? */
bool cm_arg_try_kind(PyObject *object, cm_kind *out);
/* The same; 0, or -1 with the exception that says what to type. */
int cm_arg_kind(PyObject *object, cm_kind *out);
/* NULL, None or "cuda": cumem's current device; an int, a Device, "cuda:N" or a
 * torch.device. Checks the range; needs the runtime. */
int cm_arg_device(cm_state *state, PyObject *object, const char *name, int *out);
/* The same for what is done with memory of other libraries: with None, or "cuda", the
 * current device is PyTorch's where `about` is one of its tensors, or True (such as of
 * batches that are not there yet), unless cumem's own was chosen. This and
 * cm_state_device() are all that decides. NULL: as cm_arg_device(). */
int cm_arg_device_about(cm_state *state, PyObject *object, const char *name,
                        PyObject *about, int *out);
/* One of `letters`: "CF", and for what has an order already "CFA" or "CFAK". Where it
 * is not given it is the `fallback`. */
int cm_arg_order(PyObject *object, const char *name, const char *letters, char fallback,
                 char *out);
int cm_arg_int64(PyObject *object, const char *name, int64_t *out);
/* How long to wait at most, in nanoseconds, from a number of seconds of any type that
 * Python reads as a float. UINT64_MAX means for ever: so do NULL, None, and whatever is
 * longer than about 30 years. ValueError for less than 0 and for nan. */
int cm_arg_timeout(PyObject *object, const char *name, uint64_t *out);
/* By its truth, as Python reads flags; `fallback` where it is not given. A text is a
 * TypeError: it is always true, also "no". */
int cm_arg_flag(PyObject *object, const char *name, bool fallback, bool *out);
/* What the package passes as a plain number and C uses as an index: ValueError unless
 * least <= value < end. */
int cm_arg_check_range(int value, const char *name, int least, int end);
/* Shapes and strides as Python shows them: a new tuple of ints, or NULL. */
PyObject *cm_tuple_from(const int64_t *values, int count);
