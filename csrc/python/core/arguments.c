/* SPDX-License-Identifier: Apache-2.0 */
/* Converts Python arguments to plain C values. */
#include "python/core/arguments.h"

#include <stdio.h>
#include <string.h>

#include "base/checked_math.h"
#include "python/core/numpy_bridge.h"

int
cm_arg_find_attribute(PyObject *object, const char *name, PyObject **out)
{
    PyObject *word = PyUnicode_FromString(name);
    int found = word == NULL ? -1 : cm_arg_find_word(object, word, out);
    Py_XDECREF(word);
    return found;
}

int
cm_arg_find_word(PyObject *object, PyObject *word, PyObject **out)
{
    *out = PyObject_GetAttr(object, word);
    if (*out != NULL) {
        return 1;
    }
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
        return -1;
    }
    PyErr_Clear();
    return 0;
}

int
cm_arg_refuse(PyObject *object, const char *name, const char *expected)
{
    return cm_package_refuse("buffers.arguments", "refuse_type",
                             Py_BuildValue("(sOs)", name, object, expected));
}

/* -- keywords ---------------------------------------------------------------------- */

/* Return the slot of a keyword, or -1 if there is none. */
static Py_ssize_t
find_name(const char *const *names, PyObject *keyword)
{
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(keyword, &size);
    for (Py_ssize_t i = 0; text != NULL && names[i] != NULL; i++) {
        if (text[0] == names[i][0] && strcmp(text, names[i]) == 0) {
            return (size_t)size == strlen(names[i]) ? i : -1;
        }
    }
    PyErr_Clear(); /* the text may hold a surrogate, which no name does */
    return -1;
}

/* Put keyword arguments into their slots. Returns false without an exception if a
 * keyword is unknown, or if its slot was given by position. */
static bool
take_keywords(PyObject *const *args, PyObject *kwnames, const char *const *names,
              PyObject **values)
{
    Py_ssize_t count = kwnames == NULL ? 0 : PyTuple_Size(kwnames);
    for (Py_ssize_t k = 0; k < count; k++) {
        Py_ssize_t slot = find_name(names, PyTuple_GetItem(kwnames, k));
        if (slot < 0 || values[slot] != NULL) {
            return false;
        }
        values[slot] = args[k];
    }
    return true;
}

/* Raise TypeError for the arguments of a call. The package finds out what is wrong with
 * them, and says so. Always returns -1. */
CM_COLD static int
refuse_call(const char *function, Py_ssize_t nargs, PyObject *kwnames,
            const char *const *names, int positional)
{
    PyObject *list = PyList_New(0);
    for (; *names != NULL; names++) {
        cm_append(&list, PyUnicode_FromString(*names));
    }
    return cm_package_refuse("buffers.arguments", "refuse_call",
                             Py_BuildValue("(snONi)", function, nargs,
                                           kwnames == NULL ? Py_None : kwnames, list,
                                           positional));
}

int
cm_args_parse(const char *function, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames, const char *const *names, int positional, int required,
              PyObject **values)
{
    for (Py_ssize_t i = 0; names[i] != NULL; i++) {
        values[i] = i < nargs ? args[i] : NULL;
    }
    bool fits =
        nargs <= positional && take_keywords(args + nargs, kwnames, names, values);
    for (int i = 0; i < required && fits; i++) {
        fits = values[i] != NULL;
    }
    return CM_LIKELY(fits) ? 0
                           : refuse_call(function, nargs, kwnames, names, positional);
}

/* Do the same as refuse_call() for a constructor. The keywords become a tuple, which is
 * how a vectorcall passes them. */
CM_COLD static int
refuse_new(const char *function, Py_ssize_t nargs, PyObject *kwargs,
           const char *const *names, int positional)
{
    PyObject *kwnames = NULL;
    if (kwargs != NULL) {
        if (!PyArg_ValidateKeywordArguments(kwargs)) {
            return -1;
        }
        kwnames = PySequence_Tuple(kwargs);
        if (kwnames == NULL) {
            return -1;
        }
    }
    (void)refuse_call(function, nargs, kwnames, names, positional);
    Py_XDECREF(kwnames);
    return -1;
}

int
cm_args_parse_new(const char *function, PyObject *args, PyObject *kwargs,
                  const char *const *names, int positional, int required,
                  PyObject **values)
{
    Py_ssize_t nargs = PyTuple_Size(args);
    for (Py_ssize_t i = 0; names[i] != NULL; i++) {
        values[i] = i < nargs ? PyTuple_GetItem(args, i) : NULL;
    }
    bool fits = nargs <= positional;
    Py_ssize_t place = 0;
    PyObject *keyword;
    PyObject *value;
    while (fits && kwargs != NULL && PyDict_Next(kwargs, &place, &keyword, &value)) {
        Py_ssize_t slot = find_name(names, keyword);
        fits = slot >= 0 && values[slot] == NULL;
        if (fits) {
            values[slot] = value;
        }
    }
    for (int i = 0; i < required && fits; i++) {
        fits = values[i] != NULL;
    }
    return fits ? 0 : refuse_new(function, nargs, kwargs, names, positional);
}

/* -- numbers ----------------------------------------------------------------------- */

/* Read an integer. Returns 0, or -1 with an exception: TypeError, which says what is
 * `expected`, if the object is not an integer, or ValueError if it is too large. */
static int
to_int64(PyObject *object, const char *name, const char *expected, int64_t *out)
{
    PyObject *number = PyIndex_Check(object) ? PyNumber_Index(object) : NULL;
    /* An array of two elements, for example, has __index__(), which raises
     * TypeError. */
    if (number == NULL) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear();
        return cm_arg_refuse(object, name, expected);
    }
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0) {
        PyErr_Format(PyExc_ValueError, "%s: %R does not fit in 63 bits", name, number);
    }
    Py_DECREF(number);
    if (PyErr_Occurred()) {
        return -1;
    }
    *out = value;
    return 0;
}

int
cm_arg_int64(PyObject *object, const char *name, int64_t *out)
{
    return to_int64(object, name, "an int", out);
}

/* A wait of at least this many seconds counts as one for ever. This number still fits
 * in 63 bits when it is converted to nanoseconds. */
static const double for_ever_seconds = 1e9;

int
cm_arg_timeout(PyObject *object, const char *name, uint64_t *out)
{
    *out = UINT64_MAX;
    if (!cm_arg_is_given(object)) {
        return 0;
    }
    double seconds = PyFloat_AsDouble(object);
    if (seconds == -1.0 && PyErr_Occurred() != NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            /* It is an int that is too large for a float, or __float__() raised
             * something else. */
            return -1;
        }
        PyErr_Clear();
        return cm_arg_refuse(object, name, "a number of seconds or None");
    }
    if (!(seconds >= 0)) { /* this refuses nan too */
        PyErr_Format(PyExc_ValueError, "%s must be at least 0 seconds, not %R", name,
                     object);
        return -1;
    }
    if (seconds < for_ever_seconds) {
        *out = (uint64_t)(seconds * 1e9);
    }
    return 0;
}

int
cm_arg_flag(PyObject *object, const char *name, bool fallback, bool *out)
{
    *out = fallback;
    if (object == NULL) {
        return 0;
    }
    int truth = -1;
    if (!PyUnicode_Check(object) && !PyBytes_Check(object)) {
        truth = PyObject_IsTrue(object);
        if (truth < 0 && !PyErr_ExceptionMatches(PyExc_TypeError)
            && !PyErr_ExceptionMatches(PyExc_ValueError)) {
            return -1;
        }
        PyErr_Clear(); /* an array of many elements has no truth value */
    }
    if (truth < 0) {
        return cm_arg_refuse(object, name, "true or false");
    }
    *out = truth > 0;
    return 0;
}

int
cm_arg_check_range(int value, const char *name, int least, int end)
{
    if (value >= least && value < end) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s must be from %d to %d, not %d", name, least,
                 end - 1, value);
    return -1;
}

/* -- shapes and sizes -------------------------------------------------------------- */

/* Return the number of items of a sequence, -1 if the object is not a sequence, or -2
 * with an exception. Bytes are sequences of numbers too, but nobody means them as a
 * shape, so they do not count. */
static Py_ssize_t
count_items(PyObject *object)
{
    if (PyUnicode_Check(object) || PyBytes_Check(object) || PyByteArray_Check(object)
        || !PySequence_Check(object)) {
        return -1;
    }
    Py_ssize_t count = PySequence_Size(object);
    if (count >= 0) {
        return count;
    }
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
        return -2;
    }
    PyErr_Clear(); /* an array or tensor without dimensions is one number */
    return -1;
}

/* Read a length or an axis. Python counts True as an int, but NumPy accepts no bool
 * here, since a caller who passes one probably meant a flag and forgot its name.
 * Returns 0, or -1 with an exception. */
static int
to_length(PyObject *object, const char *name, const char *expected, int64_t *out)
{
    if (PyBool_Check(object) || cm_numpy_is_bool(object)) {
        return cm_arg_refuse(object, name, expected);
    }
    return to_int64(object, name, expected, out);
}

int
cm_arg_integers(PyObject *const *args, Py_ssize_t nargs, const char *name,
                const char *expected, int *count, int64_t *out)
{
    PyObject *sequence = NULL;
    if (nargs == 1) {
        Py_ssize_t items = count_items(args[0]);
        if (items < -1) {
            return -1;
        }
        if (items >= 0) {
            sequence = args[0];
            nargs = items;
        }
    }
    if (nargs > CM_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "%s has %zd dimensions: at most %d are possible",
                     name, nargs, CM_MAX_NDIM);
        return -1;
    }
    for (Py_ssize_t i = 0; i < nargs; i++) {
        /* The item is held, since its __index__() may take it out of the sequence. */
        PyObject *item =
            sequence == NULL ? Py_NewRef(args[i]) : PySequence_GetItem(sequence, i);
        if (item == NULL) {
            return -1;
        }
        int result = to_length(item, name, expected, &out[i]);
        Py_DECREF(item);
        if (result < 0) {
            return -1;
        }
    }
    *count = (int)nargs;
    return 0;
}

int
cm_arg_shape(PyObject *object, const char *name, int *ndim, int64_t *shape)
{
    if (cm_arg_try_shape(object, ndim, shape)) {
        return 0;
    }
    if (cm_arg_integers(&object, 1, name, "an int or a sequence of ints", ndim, shape)
        < 0) {
        return -1;
    }
    for (int i = 0; i < *ndim; i++) {
        if (shape[i] < 0) {
            PyErr_Format(PyExc_ValueError,
                         "%s must not hold negative lengths, got %lld", name,
                         (long long)shape[i]);
            return -1;
        }
    }
    return 0;
}

int
cm_arg_nbytes(int ndim, const int64_t *shape, int64_t itemsize, uint64_t *out)
{
    /* Lengths of 0 are left out of the product, since the strides are computed from the
     * other lengths and have to fit as well. */
    int64_t product = itemsize;
    bool empty = false;
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == 0) {
            empty = true;
        }
        else if (!cm_mul_i64(product, shape[i], &product)) {
            PyErr_SetString(PyExc_ValueError,
                            "shape is too large: its bytes do not fit in 63 bits");
            return -1;
        }
    }
    *out = empty ? 0 : (uint64_t)product;
    return 0;
}

/* -- names ------------------------------------------------------------------------- */

bool
cm_arg_try_kind(PyObject *object, cm_kind *out)
{
    for (int kind = 0; PyUnicode_Check(object) && kind < CM_KIND_COUNT; kind++) {
        if (!cm_kind_is_pageable((cm_kind)kind)
            && PyUnicode_CompareWithASCIIString(object, cm_kinds[kind].text) == 0) {
            *out = (cm_kind)kind;
            return true;
        }
    }
    return false;
}

int
cm_arg_kind(PyObject *object, cm_kind *out)
{
    if (cm_arg_try_kind(object, out)) {
        return 0;
    }
    return cm_package_refuse("base.kinds", "check_kind", PyTuple_Pack(1, object));
}

enum { MOST_ORDERS = 4, ORDER_TEXT_NBYTES = 8 };

/* Spell the letters "CFA" as `"C", "F" or "A"`. */
static void
spell_orders(const char *letters, char *text, size_t nbytes)
{
    size_t count = strlen(letters);
    size_t used = 0;
    for (size_t i = 0; i < count && used < nbytes; i++) {
        const char *before = ", ";
        if (i == 0) {
            before = "";
        }
        else if (i + 1 == count) {
            before = " or ";
        }
        used += (size_t)snprintf(text + used, nbytes - used, "%s\"%c\"", before,
                                 letters[i]);
    }
}

int
cm_arg_order(PyObject *object, const char *name, const char *letters, char fallback,
             char *out)
{
    *out = fallback;
    if (!cm_arg_is_given(object)) {
        return 0;
    }
    for (const char *letter = letters; PyUnicode_Check(object) && *letter != 0;
         letter++) {
        const char text[2] = {*letter, 0};
        if (PyUnicode_CompareWithASCIIString(object, text) == 0) {
            *out = *letter;
            return 0;
        }
    }
    char expected[MOST_ORDERS * ORDER_TEXT_NBYTES];
    spell_orders(letters, expected, sizeof(expected));
    return cm_package_refuse("buffers.arguments", "refuse_choice",
                             Py_BuildValue("(Oss)", object, name, expected));
}

/* -- devices ----------------------------------------------------------------------- */

/* Return the current device, or -1 with an exception. PyTorch is asked only if that can
 * make a difference, that is, if there are several devices and the user has not chosen
 * one for cumem. PyTorch may see other devices than cumem, and if it names a device
 * that cumem does not have, its answer does not count. */
static int
find_current(cm_state *state, PyObject *about)
{
    if (about == NULL || about == Py_None || !state->has_several
        || cm_state_own_device(state) >= 0) {
        return cm_state_device(state);
    }
    PyObject *index = cm_package_call("devices.device", "current_of_torch",
                                      Py_BuildValue("(O)", about));
    if (index == NULL) {
        return -1;
    }
    long theirs = PyLong_AsLong(index);
    Py_DECREF(index);
    /* Python code has run, which may have called shutdown(). */
    const cm_runtime *rt = state->runtime;
    bool is_ours = theirs >= 0 && rt != NULL && theirs < rt->device_count;
    return is_ours ? (int)theirs : cm_state_device(state);
}

/* If an argument is not a device, the error says that this was expected. */
static const char device_expected[] = "an int, a Device, \"cuda:N\" or None";

/* Read "cuda" as -1, which stands for the current device, and "cuda:N" as N. Returns
 * false for every other text. */
static bool
parse_device(const char *text, int64_t *out)
{
    static const char prefix[] = "cuda";
    enum { PREFIX_LENGTH = sizeof(prefix) - 1, MOST_DIGITS = 9 };
    if (strncmp(text, prefix, PREFIX_LENGTH) != 0) {
        return false;
    }
    text += PREFIX_LENGTH;
    if (*text == '\0') {
        *out = -1;
        return true;
    }
    if (*text++ != ':') {
        return false;
    }
    int64_t index = 0;
    int digits = 0;
    for (; *text >= '0' && *text <= '9' && digits < MOST_DIGITS; text++) {
        index = 10 * index + (*text - '0');
        digits++;
    }
    *out = index;
    return digits > 0 && *text == '\0';
}

/* Return the text that names a device. If the object is a text, it is returned as it
 * is. For a device of another library this is the text that str() makes of it, such as
 * PyTorch's "cuda:0" and "cpu". Such a device is recognised by the attributes `type`
 * and `index` of its type. Returns a new reference, or NULL with an exception. */
static PyObject *
name_of_device(PyObject *object, const char *name)
{
    if (PyUnicode_Check(object)) {
        return Py_NewRef(object);
    }
    PyObject *type = (PyObject *)Py_TYPE(object);
    if (PyObject_HasAttrString(type, "type") && PyObject_HasAttrString(type, "index")) {
        return PyObject_Str(object);
    }
    (void)cm_arg_refuse(object, name, device_expected);
    return NULL;
}

/* Read a device that is given by a text, or as another library's object. Returns 0, or
 * -1 with an exception. */
static int
read_named_device(cm_state *state, PyObject *object, const char *name, PyObject *about,
                  int64_t *out)
{
    PyObject *said = name_of_device(object, name);
    if (said == NULL) {
        return -1;
    }
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(said, &length);
    bool is_read =
        text != NULL && strlen(text) == (size_t)length && parse_device(text, out);
    if (!is_read) {
        PyErr_Clear(); /* the text may hold a surrogate, which no device's name does */
        return cm_package_refuse("buffers.arguments", "refuse_device_name",
                                 Py_BuildValue("(sN)", name, said));
    }
    Py_DECREF(said);
    if (*out < 0) {
        *out = find_current(state, about);
    }
    return *out < 0 ? -1 : 0;
}

/* Read a device that was given. For an int and a Device this runs no Python code. */
static int
read_device(cm_state *state, PyObject *object, const char *name, PyObject *about,
            int64_t *out)
{
    for (int i = 0; i < state->runtime->device_count; i++) {
        if (object == state->devices[i]) {
            *out = i;
            return 0;
        }
    }
    if (PyIndex_Check(object) && !PyBool_Check(object)) {
        return to_int64(object, name, device_expected, out);
    }
    return read_named_device(state, object, name, about, out);
}

int
cm_arg_device(cm_state *state, PyObject *object, const char *name, int *out)
{
    return cm_arg_device_about(state, object, name, NULL, out);
}

int
cm_arg_device_about(cm_state *state, PyObject *object, const char *name,
                    PyObject *about, int *out)
{
    const cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return -1;
    }
    int64_t index;
    if (!cm_arg_is_given(object)) {
        index = find_current(state, about);
        if (index < 0) {
            return -1;
        }
    }
    else if (read_device(state, object, name, about, &index) < 0) {
        return -1;
    }
    rt = state->runtime; /* reading the argument may have run code that called
                            shutdown() */
    if (rt == NULL && (rt = cm_state_runtime(state)) == NULL) {
        return -1;
    }
    if (index < 0 || index >= rt->device_count) {
        return cm_package_refuse(
            "buffers.arguments", "refuse_device",
            Py_BuildValue("(sLi)", name, (long long)index, rt->device_count));
    }
    *out = (int)index;
    return 0;
}

/* -- from C to Python ---------------------------------------------------------------- */

PyObject *
cm_tuple_from(const int64_t *values, int count)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple != NULL && i < count; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (value == NULL || PyTuple_SetItem(tuple, i, value) < 0) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}
