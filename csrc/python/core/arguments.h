/* SPDX-License-Identifier: Apache-2.0 */
/* Converts Python arguments to C values. Unless a comment says otherwise each function
 * returns 0, or -1 with TypeError or ValueError set, whose text names the argument and
 * says what was expected. All functions need the GIL. */
#pragma once

#include "python/core/state.h"

/* Distribute the arguments of a vectorcall (args, nargs, kwnames) to values[]. names[i]
 * is the keyword of slot i, and NULL ends the list. The first `positional` slots may be
 * given by position, and the first `required` of these must be given; other slots are
 * optional. A slot that was not given is NULL; values are borrowed. `function` is the
 * callee's name in errors. */
int cm_args_parse(const char *function, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames, const char *const *names, int positional,
                  int required, PyObject **values);

/* Do the same as cm_args_parse() for the constructor of a type (tp_new), whose
 * arguments come as a tuple and a dict. The dict is NULL if there are no keywords. */
int cm_args_parse_new(const char *function, PyObject *args, PyObject *kwargs,
                      const char *const *names, int positional, int required,
                      PyObject **values);

/* True if an argument was given, and not as None. */
static CM_INLINE bool
cm_arg_is_given(const PyObject *object)
{
    return object != NULL && object != Py_None;
}

/* Look up an attribute. Returns 1 and a new reference, 0 if there is no such attribute,
 * or -1 with an exception. */
int cm_arg_find_attribute(PyObject *object, const char *name, PyObject **out);
/* Do the same as cm_arg_find_attribute() with one of the state's words as the name,
 * which is quicker. */
int cm_arg_find_word(PyObject *object, PyObject *word, PyObject **out);

/* Set TypeError "{name} must be {expected}, not {type of object}". Always returns
 * -1. */
int cm_arg_refuse(PyObject *object, const char *name, const char *expected);
/* Read integers as NumPy reads lengths and axes: either each of the `nargs` arguments
 * is one, or the only argument is a sequence of them. An integer is whatever has
 * __index__(), except a bool. `out` has room for CM_MAX_NDIM. May run Python code.
 * Fails: TypeError "{name} must be {expected}"; ValueError if there are too many
 * integers or one is too large; whatever __index__() raises. */
int cm_arg_integers(PyObject *const *args, Py_ssize_t nargs, const char *name,
                    const char *expected, int *count, int64_t *out);
/* Read an ordinary int that is not negative. This runs no Python code. Returns false
 * without an exception for every other object. */
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

/* Read an ordinary shape: an int, or a tuple or list of ints, none of them negative.
 * This runs no Python code. Returns false without an exception for every other
 * object. */
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
/* Read a shape: an int or a sequence of ints, each >= 0, at most CM_MAX_NDIM of
 * them. */
int cm_arg_shape(PyObject *object, const char *name, int *ndim, int64_t *shape);
/* Multiply the lengths and the itemsize. ValueError means that the product does not fit
 * in 63 bits. */
int cm_arg_nbytes(int ndim, const int64_t *shape, int64_t itemsize, uint64_t *out);
/* Read the name of a kind of memory that pools can have. Returns false without an
 * exception if the object is not such a name. */
bool cm_arg_try_kind(PyObject *object, cm_kind *out);
/* Do the same as cm_arg_try_kind(), but fail with an exception that says what to
 * type. */
int cm_arg_kind(PyObject *object, cm_kind *out);
/* Read a device. NULL, None and "cuda" mean cumem's current device; else it is an int,
 * a Device, "cuda:N" or a torch.device. Opens the runtime, in order to check the
 * range. */
int cm_arg_device(cm_state *state, PyObject *object, const char *name, int *out);
/* Do the same as cm_arg_device() for work on memory of other libraries. If `about` is a
 * tensor of PyTorch's, or True (as for batches that do not exist yet), None and "cuda"
 * mean PyTorch's current device, unless the user chose a device for cumem. If `about`
 * is NULL this is cm_arg_device(). No other function than this one and
 * cm_state_device() decides which device is meant. */
int cm_arg_device_about(cm_state *state, PyObject *object, const char *name,
                        PyObject *about, int *out);
/* Read the argument order=, which is one of `letters`: "CF" or, if the elements have an
 * order already, "CFA" or "CFAK". If it is not given, the answer is `fallback`. */
int cm_arg_order(PyObject *object, const char *name, const char *letters, char fallback,
                 char *out);
int cm_arg_int64(PyObject *object, const char *name, int64_t *out);
/* Read how long to wait at most, and convert it to nanoseconds. The argument is a
 * number of seconds, of any type that Python reads as a float. UINT64_MAX means for
 * ever; NULL, None, and any time longer than about 30 years give that. A negative
 * number and nan raise ValueError. */
int cm_arg_timeout(PyObject *object, const char *name, uint64_t *out);
/* Read a flag by its truth, as Python does. If the argument is not given, the answer is
 * `fallback`. A str raises TypeError, since even "no" would be true. */
int cm_arg_flag(PyObject *object, const char *name, bool fallback, bool *out);
/* Check a plain number that the package passes and that C uses as an index. Returns
 * 0, or -1 with ValueError unless least <= value < end. */
int cm_arg_check_range(int value, const char *name, int least, int end);
/* Make a tuple of ints, as Python shows shapes and strides. Returns a new reference, or
 * NULL with an exception. */
PyObject *cm_tuple_from(const int64_t *values, int count);
