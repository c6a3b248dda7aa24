/* SPDX-License-Identifier: Apache-2.0 */
/* Converters from Python arguments to plain C values. */
#include "python/core/arguments.h"

#include <string.h>

#include "base/checked_math.h"

static const char *const kind_names[CM_KIND_COUNT] = {
    [CM_KIND_PAGEABLE] = "pageable", [CM_KIND_PINNED] = "pinned",
    [CM_KIND_MAPPED] = "mapped",     [CM_KIND_MANAGED] = "managed",
    [CM_KIND_DEVICE] = "device",
};

int
cm_arg_refuse(PyObject *object, const char *name, const char *expected)
{
    PyObject *type = PyType_GetName(Py_TYPE(object));
    if (type != NULL) {
        PyErr_Format(PyExc_TypeError, "%s must be %s, not %U", name, expected, type);
        Py_DECREF(type);
    }
    return -1;
}

/* -- keywords ---------------------------------------------------------------------- */

/* The slot; -1: there is none, or an exception. */
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
    return -1;
}

static int
parse_keywords(const char *function, PyObject *const *args, PyObject *kwnames,
               const char *const *names, PyObject **values)
{
    Py_ssize_t count = PyTuple_Size(kwnames);
    for (Py_ssize_t k = 0; k < count; k++) {
        PyObject *keyword = PyTuple_GetItem(kwnames, k);
        if (keyword == NULL) {
            return -1;
        }
        Py_ssize_t slot = find_name(names, keyword);
        if (slot < 0) {
            PyErr_Clear(); /* a surrogate, say, which no name has */
            PyErr_Format(PyExc_TypeError,
                         "%s() got an unexpected keyword argument '%U'", function,
                         keyword);
            return -1;
        }
        if (values[slot] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'",
                         function, names[slot]);
            return -1;
        }
        values[slot] = args[k];
    }
    return 0;
}

int
cm_args_parse(const char *function, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames, const char *const *names, int positional, int required,
              PyObject **values)
{
    if (CM_UNLIKELY(nargs > positional)) {
        PyErr_Format(PyExc_TypeError,
                     "%s() takes at most %d positional argument%s (%zd given)",
                     function, positional, positional == 1 ? "" : "s", nargs);
        return -1;
    }
    for (Py_ssize_t i = 0; names[i] != NULL; i++) {
        values[i] = i < nargs ? args[i] : NULL;
    }
    if (kwnames != NULL
        && parse_keywords(function, args + nargs, kwnames, names, values) < 0) {
        return -1;
    }
    for (int i = 0; i < required; i++) {
        if (values[i] == NULL) {
            PyErr_Format(PyExc_TypeError,
                         "%s() missing required argument '%s' (position %d)", function,
                         names[i], i + 1);
            return -1;
        }
    }
    return 0;
}

/* -- numbers ----------------------------------------------------------------------- */

/* 0, or -1 with TypeError (no integer: `expected` says what was) or ValueError. */
static int
to_int64(PyObject *object, const char *name, const char *expected, int64_t *out)
{
    if (!PyIndex_Check(object)) {
        return cm_arg_refuse(object, name, expected);
    }
    PyObject *number = PyNumber_Index(object);
    if (number == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) { /* e.g. an array of two elements
                                                        */
            PyErr_Clear();
            return cm_arg_refuse(object, name, expected);
        }
        return -1;
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

int
cm_arg_bool(PyObject *object, const char *name, bool *out)
{
    int truth = PyObject_IsTrue(object);
    if (truth < 0) {
        if (PyErr_ExceptionMatches(PyExc_ValueError)
            || PyErr_ExceptionMatches(PyExc_TypeError)) { /* an array of many elements
                                                           */
            PyErr_Clear();
            return cm_arg_refuse(object, name, "true or false");
        }
        return -1;
    }
    *out = truth != 0;
    return 0;
}

/* -- shapes and sizes -------------------------------------------------------------- */

static int
shape_entry(PyObject *item, const char *name, int64_t *out)
{
    if (to_int64(item, name, "an int or a sequence of ints", out) < 0) {
        return -1;
    }
    if (*out < 0) {
        PyErr_Format(PyExc_ValueError, "%s must not hold negative lengths, got %lld",
                     name, (long long)*out);
        return -1;
    }
    return 0;
}

static int
shape_from_sequence(PyObject *object, const char *name, int *ndim, int64_t *shape)
{
    PyObject *items = PySequence_Tuple(object);
    if (items == NULL) {
        return -1;
    }
    Py_ssize_t count = PyTuple_Size(items);
    int result = 0;
    if (count > CM_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, "%s has %zd dimensions: at most %d are possible",
                     name, count, CM_MAX_NDIM);
        result = -1;
    }
    for (Py_ssize_t i = 0; result == 0 && i < count; i++) {
        result = shape_entry(PyTuple_GetItem(items, i), name, &shape[i]);
    }
    Py_DECREF(items);
    if (result == 0) {
        *ndim = (int)count;
    }
    return result;
}

int
cm_arg_shape(PyObject *object, const char *name, int *ndim, int64_t *shape)
{
    if (cm_arg_try_shape(object, CM_MAX_NDIM, ndim, shape)) {
        return 0;
    }
    /* bytes are sequences of ints and True is an int, but nobody means a shape */
    if (PyUnicode_Check(object) || PyBytes_Check(object) || PyByteArray_Check(object)
        || PyBool_Check(object)) {
        return cm_arg_refuse(object, name, "an int or a sequence of ints");
    }
    /* NumPy's arrays have both an index and a length: those with a length are sequences
     */
    if (PySequence_Check(object)) {
        Py_ssize_t length = PySequence_Size(object);
        if (length >= 0) {
            return shape_from_sequence(object, name, ndim, shape);
        }
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear();
    }
    if (shape_entry(object, name, &shape[0]) < 0) {
        return -1;
    }
    *ndim = 1;
    return 0;
}

int
cm_arg_nbytes(int ndim, const int64_t *shape, int64_t itemsize, uint64_t *out)
{
    /* Lengths of 0 are left out of the product, so that strides fit as well. */
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

const char *
cm_kind_name(cm_kind kind)
{
    return kind_names[kind];
}

int
cm_arg_kind(PyObject *object, const char *name, cm_kind *out)
{
    static const char expected[] = "\"pinned\", \"mapped\", \"managed\" or \"device\"";
    if (!PyUnicode_Check(object)) {
        return cm_arg_refuse(object, name, expected);
    }
    for (int kind = CM_KIND_PINNED; kind < CM_KIND_COUNT; kind++) {
        if (PyUnicode_CompareWithASCIIString(object, kind_names[kind]) == 0) {
            *out = (cm_kind)kind;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s must be %s, not %R", name, expected, object);
    return -1;
}

/* One letter of `letters`, which `expected` spells out. */
static int
parse_order(PyObject *object, const char *name, const char *letters,
            const char *expected, char *out)
{
    if (!PyUnicode_Check(object)) {
        return cm_arg_refuse(object, name, expected);
    }
    for (const char *letter = letters; *letter != '\0'; letter++) {
        const char text[2] = {*letter, '\0'};
        if (PyUnicode_CompareWithASCIIString(object, text) == 0) {
            *out = *letter;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s must be %s, not %R", name, expected, object);
    return -1;
}

int
cm_arg_order(PyObject *object, const char *name, char *out)
{
    *out = 'C';
    return object == Py_None ? 0
                             : parse_order(object, name, "CF", "\"C\" or \"F\"", out);
}

int
cm_arg_order_like(PyObject *object, const char *name, char fallback, char *out)
{
    *out = fallback;
    return object == Py_None
               ? 0
               : parse_order(object, name, "CFAK", "\"C\", \"F\", \"A\" or \"K\"", out);
}

/* -- devices ----------------------------------------------------------------------- */

/* "cuda" leaves *index alone, "cuda:3" sets it. */
static int
device_from_text(PyObject *object, const char *name, int64_t *index)
{
    const char *text = PyUnicode_AsUTF8AndSize(object, NULL);
    if (text == NULL) {
        return -1;
    }
    bool known = strncmp(text, "cuda", 4) == 0 && (text[4] == '\0' || text[4] == ':');
    if (known && text[4] == ':') {
        int64_t number = 0;
        const char *digit = text + 5;
        for (; *digit >= '0' && *digit <= '9' && digit < text + 14; digit++) {
            number = number * 10 + (*digit - '0');
        }
        known = *digit == '\0' && digit > text + 5;
        *index = number;
    }
    if (!known) {
        PyErr_Format(PyExc_ValueError, "%s must be \"cuda\" or \"cuda:N\", not %R",
                     name, object);
        return -1;
    }
    return 0;
}

/* torch.device writes itself as its users do: "cuda:0", "cpu". */
static bool
is_torch_device(PyObject *object)
{
    PyObject *type = (PyObject *)Py_TYPE(object);
    return PyObject_HasAttrString(type, "type")
           && PyObject_HasAttrString(type, "index");
}

static int
parse_device(PyObject *object, const char *name, int64_t *index)
{
    static const char expected[] = "an int, a Device, \"cuda:N\" or None";
    if (PyUnicode_Check(object)) {
        return device_from_text(object, name, index);
    }
    if (!PyIndex_Check(object) && is_torch_device(object)) {
        PyObject *text = PyObject_Str(object);
        int result = text == NULL ? -1 : device_from_text(text, name, index);
        Py_XDECREF(text);
        return result;
    }
    if (PyBool_Check(object)) {
        return cm_arg_refuse(object, name, expected);
    }
    return to_int64(object, name, expected, index);
}

int
cm_arg_device(cm_state *state, PyObject *object, const char *name, int *out)
{
    const cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return -1;
    }
    int64_t index = state->current_device;
    if (object != NULL && object != Py_None && parse_device(object, name, &index) < 0) {
        return -1;
    }
    rt = state->runtime; /* reading the argument may have run code that shut it down */
    if (rt == NULL && (rt = cm_state_runtime(state)) == NULL) {
        return -1;
    }
    if (index < 0 || index >= rt->device_count) {
        PyErr_Format(PyExc_ValueError, "%s %lld does not exist: there %s %d device%s",
                     name, (long long)index, rt->device_count == 1 ? "is" : "are",
                     rt->device_count, rt->device_count == 1 ? "" : "s");
        return -1;
    }
    *out = (int)index;
    return 0;
}
