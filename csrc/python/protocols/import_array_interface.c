/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a buffer over memory that a `__cuda_array_interface__` dictionary describes.
 * The dictionary is read strictly, entry by entry: numbers must be ints and tuples must
 * be tuples, and an error names the entry that is wrong. */
#include <string.h>

#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/device/objects.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

#define CAI "__cuda_array_interface__"

enum { NEWEST_VERSION = 3, REPR_LENGTH = 200, TYPESTR_LENGTH = 32 };

/* -- the entries ------------------------------------------------------------------- */

/* Make the repr() of a value, cut to the length for which an error has room. Returns a
 * new reference, or NULL with an exception. */
static PyObject *
show(PyObject *value)
{
    PyObject *whole = PyObject_Repr(value);
    PyObject *begin = whole == NULL ? NULL : PyUnicode_Substring(whole, 0, REPR_LENGTH);
    Py_XDECREF(whole);
    return begin;
}

/* Raise that the entry `key`, which has this value, must be something else. Always
 * returns -1. */
static int
refuse(PyObject *error, const char *key, const char *expected, PyObject *value)
{
    PyObject *shown = show(value);
    if (shown != NULL) {
        PyErr_Format(error, CAI "['%s'] must be %s, not %U", key, expected, shown);
    }
    Py_XDECREF(shown);
    return -1;
}

/* Look up an entry. Returns it borrowed, or NULL without an exception if it is missing
 * or None, which mean the same. */
static PyObject *
find_entry(PyObject *entries, const char *key)
{
    PyObject *value = PyDict_GetItemString(entries, key);
    return value == Py_None ? NULL : value;
}

/* Do the same as find_entry(), but raise ValueError if there is no such entry. */
static PyObject *
require_entry(PyObject *entries, const char *key)
{
    PyObject *value = find_entry(entries, key);
    if (value == NULL) {
        PyErr_Format(PyExc_ValueError, CAI " has no '%s'", key);
    }
    return value;
}

/* Read an integer, which is any object that has __index__(). Returns 0, or -1 with an
 * exception. */
static int
read_integer(const char *key, PyObject *value, int64_t *out)
{
    PyObject *number = PyNumber_Index(value);
    if (number == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
            return -1;
        }
        PyErr_Clear();
        PyObject *type = PyType_GetName(Py_TYPE(value));
        if (type != NULL) {
            PyErr_Format(PyExc_TypeError, CAI "['%s'] must be an int, not %U", key,
                         type);
        }
        Py_XDECREF(type);
        return -1;
    }
    int overflow;
    *out = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0) {
        PyErr_Format(PyExc_ValueError, CAI "['%s']: %S does not fit in 63 bits", key,
                     number);
    }
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* Read a tuple of integers, of which `out` has room for CM_MAX_NDIM. */
static int
read_integers(const char *key, PyObject *value, int *count, int64_t *out)
{
    if (!PyTuple_Check(value)) {
        return refuse(PyExc_TypeError, key, "a tuple of ints", value);
    }
    Py_ssize_t length = PyTuple_Size(value);
    if (length > CM_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, CAI "['%s'] has %zd items, more than %d", key,
                     length, CM_MAX_NDIM);
        return -1;
    }
    for (Py_ssize_t i = 0; i < length; i++) {
        if (read_integer(key, PyTuple_GetItem(value, i), &out[i]) < 0) {
            return -1;
        }
    }
    *count = (int)length;
    return 0;
}

static int
read_version(PyObject *entries)
{
    int64_t version;
    PyObject *value = require_entry(entries, "version");
    if (value == NULL || read_integer("version", value, &version) < 0) {
        return -1;
    }
    if (version < 0 || version > NEWEST_VERSION) {
        return refuse(PyExc_ValueError, "version", "0 to 3", value);
    }
    PyObject *mask = find_entry(entries, "mask");
    if (mask != NULL) {
        return refuse(PyExc_ValueError, "mask", "None: masks are not supported", mask);
    }
    return 0;
}

/* Read the entry "data", a pair: the address of the first element, and whether the
 * memory is read-only. */
static int
read_data(PyObject *entries, cm_import *out)
{
    PyObject *value = require_entry(entries, "data");
    if (value == NULL) {
        return -1;
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 2) {
        return refuse(PyExc_TypeError, "data", "a tuple (pointer, read_only)", value);
    }
    PyObject *flag = PyTuple_GetItem(value, 1);
    PyObject *pointer = PyNumber_Index(PyTuple_GetItem(value, 0));
    if (pointer == NULL && !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return -1;
    }
    if (pointer == NULL || !PyLong_Check(flag)) {
        PyErr_Clear();
        Py_XDECREF(pointer);
        return refuse(PyExc_TypeError, "data", "a tuple (int, bool)", value);
    }
    out->data = PyLong_AsUnsignedLongLong(pointer);
    Py_DECREF(pointer);
    if (PyErr_Occurred() || out->data == UINT64_MAX) {
        PyErr_Clear();
        return refuse(PyExc_ValueError, "data", "a pointer of 64 bits", value);
    }
    int readonly = PyObject_IsTrue(flag);
    out->readonly = readonly > 0;
    return readonly < 0 ? -1 : 0;
}

static int
read_shape(PyObject *entries, cm_region *out)
{
    PyObject *value = require_entry(entries, "shape");
    if (value == NULL || read_integers("shape", value, &out->ndim, out->shape) < 0) {
        return -1;
    }
    for (int i = 0; i < out->ndim; i++) {
        if (out->shape[i] < 0) {
            return refuse(PyExc_ValueError, "shape", "without negative lengths", value);
        }
    }
    return 0;
}

/* Read the handle of the stream on which the memory is ready. It is 0 if there is
 * none. */
static int
read_stream(PyObject *entries, uint64_t *out)
{
    PyObject *value = find_entry(entries, "stream");
    *out = 0;
    if (value == NULL) {
        return 0;
    }
    if (!PyLong_Check(value) || PyBool_Check(value)) {
        return refuse(PyExc_TypeError, "stream", "None or an int", value);
    }
    *out = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred() || *out == 0 || *out == UINT64_MAX) {
        PyErr_Clear();
        return refuse(PyExc_ValueError, "stream",
                      "None, 1 (legacy default), 2 (per-thread default) or a handle",
                      value);
    }
    return 0;
}

/* Make a dtype of the value of an entry. Returns a new reference, or NULL with an
 * exception, which is a ValueError whatever NumPy raised. */
static PyObject *
make_dtype(const char *key, PyObject *value)
{
    PyObject *dtype = cm_numpy_dtype(value);
    if (dtype != NULL || !PyErr_ExceptionMatches(PyExc_Exception)
        || PyErr_ExceptionMatches(PyExc_MemoryError)) {
        return dtype;
    }
    PyErr_Clear();
    PyObject *shown = show(value);
    if (shown != NULL) {
        PyErr_Format(PyExc_ValueError, CAI "['%s'] is not a dtype cumem can hold: %U",
                     key, shown);
    }
    Py_XDECREF(shown);
    return NULL;
}

/* True if a text is a byte order, one letter, digits and, for datetimes, a unit.
 * numpy.dtype() alone would accept much more than the interface allows. */
static bool
is_typestr(const char *text)
{
    enum { MOST_DIGITS = 10 };
    if (*text == '\0' || strchr("<>|", *text) == NULL) {
        return false;
    }
    char letter = text[1];
    if (letter == '\0' || strchr("biufcSUVmM", letter) == NULL) {
        return false;
    }
    size_t digits = strspn(text + 2, "0123456789");
    const char *rest = text + 2 + digits;
    if (digits == 0 || digits > MOST_DIGITS) {
        return false;
    }
    if (*rest == '\0') {
        return true;
    }
    bool is_time = letter == 'm' || letter == 'M';
    return is_time && *rest == '[' && rest[strlen(rest) - 1] == ']';
}

/* Read the dtype. It comes from the entry "descr" if there is one and "typestr" stands
 * for raw bytes, such as "|V8". Otherwise it comes from "typestr". Returns a new
 * reference, or NULL with an exception. */
static PyObject *
read_dtype(PyObject *entries)
{
    PyObject *typestr = require_entry(entries, "typestr");
    if (typestr == NULL) {
        return NULL;
    }
    if (!PyUnicode_Check(typestr)) {
        refuse(PyExc_TypeError, "typestr", "a str such as '<f4'", typestr);
        return NULL;
    }
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(typestr, &length);
    if (text == NULL || length > TYPESTR_LENGTH || strlen(text) != (size_t)length
        || !is_typestr(text)) {
        PyErr_Clear(); /* the text may hold a surrogate */
        refuse(PyExc_ValueError, "typestr", "a type string such as '<f4'", typestr);
        return NULL;
    }
    PyObject *plain = make_dtype("typestr", typestr);
    PyObject *descr = find_entry(entries, "descr");
    if (plain == NULL || descr == NULL || text[1] != 'V') {
        return plain;
    }
    /* The type string says only how many bytes an element has. */
    int64_t itemsize = cm_numpy_itemsize(plain);
    Py_DECREF(plain);
    if (!PyList_Check(descr)) {
        refuse(PyExc_TypeError, "descr", "a list of tuples", descr);
        return NULL;
    }
    PyObject *fields = make_dtype("descr", descr);
    if (fields != NULL && cm_numpy_itemsize(fields) != itemsize) {
        Py_CLEAR(fields);
        refuse(PyExc_ValueError, "descr", "of the size that typestr says", descr);
    }
    return fields;
}

/* Read the strides, in bytes; None stands for those of C's order. The shape and the
 * itemsize were read before. */
static int
read_strides(PyObject *entries, cm_region *out)
{
    PyObject *value = find_entry(entries, "strides");
    if (value == NULL) {
        if (!cm_is_ok(cm_region_set_c_strides(out))) {
            PyErr_SetString(PyExc_ValueError, CAI
                            "['shape']: the number of bytes does not fit in 63 bits");
            return -1;
        }
        return 0;
    }
    int count;
    if (read_integers("strides", value, &count, out->strides) < 0) {
        return -1;
    }
    if (count != out->ndim) {
        return refuse(PyExc_ValueError, "strides", "as long as the shape", value);
    }
    return 0;
}

/* Read all entries. The dtype is owned by the caller on success. Returns 0, or -1 with
 * an exception. */
static int
read_entries(PyObject *entries, cm_import *out, uint64_t *stream)
{
    if (read_version(entries) < 0 || read_data(entries, out) < 0
        || read_shape(entries, &out->region) < 0 || read_stream(entries, stream) < 0) {
        return -1;
    }
    out->dtype = read_dtype(entries);
    if (out->dtype == NULL) {
        return -1;
    }
    out->region.itemsize = cm_numpy_itemsize(out->dtype);
    if (read_strides(entries, &out->region) < 0) {
        Py_CLEAR(out->dtype);
        return -1;
    }
    return 0;
}

/* -- the buffer -------------------------------------------------------------------- */

static int
place(cm_state *state, cm_import *import)
{
    cm_pointer_info info;
    import->kind = CM_KIND_DEVICE;
    if (import->nbytes == 0) {
        cm_import_place(import, NULL, cm_state_device(state));
        return 0;
    }
    if (cm_import_probe(state, import, CAI, &info) < 0) {
        return -1;
    }
    if (cm_kind_is_pageable(info.kind)) {
        PyErr_Format(PyExc_ValueError,
                     CAI "['data']: the driver says that %p is ordinary host memory, "
                         "which a device cannot reach",
                     (void *)(uintptr_t)import->data);
        return -1;
    }
    /* Page-locked memory that a device may use is what we call mapped. */
    import->kind = cm_kind_is_page_locked(info.kind) ? CM_KIND_MAPPED : info.kind;
    cm_import_place(import, &info, cm_state_device(state));
    return 0;
}

/* Make a buffer over the memory of `object` as its entries describe it, and order it
 * after the exporter's stream. */
static PyObject *
import_described(cm_state *state, PyObject *object, PyObject *entries, cm_stream *given)
{
    cm_import import = {.host = false, .foreign = object};
    uint64_t handle;
    if (read_entries(entries, &import, &handle) < 0) {
        return NULL;
    }
    PyObject *made = NULL;
    if (cm_state_runtime(state) != NULL && cm_import_measure(&import, CAI) == 0
        && place(state, &import) == 0) {
        made = cm_import_finish(state, &import);
    }
    Py_XDECREF(import.locked);
    Py_DECREF(import.dtype);
    if (made == NULL || handle == 0) {
        return made;
    }
    const cm_buffer *buffer = (const cm_buffer *)(void *)made;
    if (cm_buffer_size(buffer) > 0
        && cm_import_order(state, made, given, buffer->storage->device, handle) < 0) {
        Py_CLEAR(made);
    }
    return made;
}

PyObject *
cm_import_by_array_interface(cm_state *state, PyObject *object, cm_stream *stream)
{
    PyObject *entries;
    int found = cm_arg_find_word(object, state->words[CM_WORD___cuda_array_interface__],
                                 &entries);
    if (found <= 0) {
        return found < 0 ? NULL : Py_NewRef(Py_NotImplemented);
    }
    PyObject *buffer = NULL;
    if (PyDict_Check(entries)) {
        /* An __index__() of the exporter's could change its own dict meanwhile. */
        PyObject *copied = PyDict_Copy(entries);
        if (copied != NULL) {
            buffer = import_described(state, object, copied, stream);
            Py_DECREF(copied);
        }
    }
    else {
        PyObject *shown = show(entries);
        if (shown != NULL) {
            PyErr_Format(PyExc_TypeError, CAI " must be a dict, not %U", shown);
        }
        Py_XDECREF(shown);
    }
    Py_DECREF(entries);
    return buffer;
}
