/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers over `__cuda_array_interface__` dictionaries: strict reading of every entry.
 */
#include <string.h>

#include "python/buffer/buffer_object.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/protocols/import.h"
#include "python/protocols/protocols.h"

#define CAI "__cuda_array_interface__"

static const char what[] = CAI;

enum { NEWEST_VERSION = 3, TYPESTR_MAX = 32 };

static int
refuse(PyObject *exception, const char *key, const char *expected, PyObject *value)
{
    PyErr_Format(exception, CAI "['%s'] must be %s, not %.200R", key, expected, value);
    return -1;
}

/* 1 and a borrowed value, 0 when absent or None, -1 with an exception. */
static int
look_up(PyObject *dict, const char *key, PyObject **out)
{
    PyObject *name = PyUnicode_InternFromString(key);
    if (name == NULL) {
        return -1;
    }
    *out = PyDict_GetItemWithError(dict, name);
    Py_DECREF(name);
    if (*out == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    return *out != Py_None;
}

static int
look_up_required(PyObject *dict, const char *key, PyObject **out)
{
    int found = look_up(dict, key, out);
    if (found == 0) {
        PyErr_Format(PyExc_ValueError, CAI " has no '%s'", key);
    }
    return found == 1 ? 0 : -1;
}

/* -- the entries -------------------------------------------------------------------------- */

static int
read_version(PyObject *dict)
{
    PyObject *value;
    int64_t version;
    if (look_up_required(dict, "version", &value) < 0
        || cm_arg_int64(value, CAI "['version']", &version) < 0) {
        return -1;
    }
    if (version < 0 || version > NEWEST_VERSION) {
        return refuse(PyExc_ValueError, "version", "0 to 3", value);
    }
    return 0;
}

/* Tuple of ints to out[]; its length, or -1. */
static int
read_ints(PyObject *value, const char *key, const char *name, int64_t *out)
{
    if (!PyTuple_Check(value)) {
        return refuse(PyExc_TypeError, key, "a tuple of ints", value);
    }
    Py_ssize_t count = PyTuple_Size(value);
    if (count > CM_MAX_NDIM) {
        PyErr_Format(PyExc_ValueError, CAI "['%s'] has %zd items, more than %d", key,
                     count, CM_MAX_NDIM);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (cm_arg_int64(PyTuple_GetItem(value, i), name, &out[i]) < 0) {
            return -1;
        }
    }
    return (int)count;
}

static int
read_shape(PyObject *dict, cm_region *region)
{
    PyObject *value;
    if (look_up_required(dict, "shape", &value) < 0) {
        return -1;
    }
    region->ndim = read_ints(value, "shape", CAI "['shape']", region->shape);
    for (int i = 0; i < region->ndim; i++) {
        if (region->shape[i] < 0) {
            return refuse(PyExc_ValueError, "shape", "without negative lengths", value);
        }
    }
    return region->ndim < 0 ? -1 : 0;
}

/* After shape and itemsize. */
static int
read_strides(PyObject *dict, cm_region *region)
{
    PyObject *value;
    int found = look_up(dict, "strides", &value);
    if (found == 1) {
        int count = read_ints(value, "strides", CAI "['strides']", region->strides);
        if (count >= 0 && count != region->ndim) {
            return refuse(PyExc_ValueError, "strides", "as long as the shape", value);
        }
        return count < 0 ? -1 : 0;
    }
    if (found == 0 && !cm_is_ok(cm_region_set_c_strides(region))) {
        PyErr_SetString(PyExc_ValueError,
                        CAI "['shape']: the number of bytes does not fit in 63 bits");
        return -1;
    }
    return found;
}

/* Byte order, one letter, digits and, for datetimes, a unit in brackets: numpy.dtype()
 * by itself would take much more than the interface allows. */
static bool
is_typestr(const char *text)
{
    size_t length = strlen(text);
    if (length < 3 || length > TYPESTR_MAX || strchr("<>|", text[0]) == NULL
        || strchr("biufcmMSUV", text[1]) == NULL) {
        return false;
    }
    size_t digits = strspn(text + 2, "0123456789");
    const char *rest = text + 2 + digits;
    bool unit =
        (text[1] == 'm' || text[1] == 'M') && rest[0] == '[' && text[length - 1] == ']';
    return digits >= 1 && digits <= 10 && (*rest == '\0' || unit);
}

/* The pending exception becomes the cause of a ValueError that names the entry. */
static void
blame(const char *key, PyObject *value)
{
    if (PyErr_ExceptionMatches(PyExc_MemoryError)
        || !PyErr_ExceptionMatches(PyExc_Exception)) {
        return; /* Ctrl-C among others */
    }
    PyErr_Clear();
    PyErr_Format(PyExc_ValueError, CAI "['%s'] is no dtype cumem can hold: %.200R", key,
                 value);
}

/* Fields stand in `descr`; typestr then says only how many bytes they have. */
static PyObject *
refine_by_descr(PyObject *dict, PyObject *dtype)
{
    PyObject *descr;
    cm_dtype_traits traits;
    cm_numpy_dtype_traits(dtype, &traits);
    int found = traits.kind == 'V' ? look_up(dict, "descr", &descr) : 0;
    if (found <= 0) {
        return found < 0 ? NULL : Py_NewRef(dtype);
    }
    if (!PyList_Check(descr)) {
        refuse(PyExc_TypeError, "descr", "a list of tuples", descr);
        return NULL;
    }
    PyObject *fields = cm_numpy_dtype(descr);
    if (fields == NULL) {
        blame("descr", descr);
        return NULL;
    }
    if (cm_numpy_itemsize(fields) != traits.itemsize) {
        Py_DECREF(fields);
        refuse(PyExc_ValueError, "descr", "of the size that typestr says", descr);
        return NULL;
    }
    return fields;
}

/* New numpy.dtype. */
static PyObject *
read_dtype(PyObject *dict)
{
    PyObject *value;
    if (look_up_required(dict, "typestr", &value) < 0) {
        return NULL;
    }
    const char *text =
        PyUnicode_Check(value) ? PyUnicode_AsUTF8AndSize(value, NULL) : NULL;
    if (text == NULL) {
        PyErr_Clear();
        refuse(PyExc_TypeError, "typestr", "a str such as '<f4'", value);
        return NULL;
    }
    if (!is_typestr(text)) {
        refuse(PyExc_ValueError, "typestr", "a type string such as '<f4'", value);
        return NULL;
    }
    PyObject *plain = cm_numpy_dtype(value);
    if (plain == NULL) {
        blame("typestr", value);
        return NULL;
    }
    PyObject *dtype = refine_by_descr(dict, plain);
    Py_DECREF(plain);
    return dtype;
}

static int
read_data(PyObject *dict, cm_import *import)
{
    PyObject *value;
    if (look_up_required(dict, "data", &value) < 0) {
        return -1;
    }
    if (!PyTuple_Check(value) || PyTuple_Size(value) != 2) {
        return refuse(PyExc_TypeError, "data", "a tuple (pointer, read_only)", value);
    }
    PyObject *flag = PyTuple_GetItem(value, 1);
    PyObject *number = PyNumber_Index(PyTuple_GetItem(value, 0));
    if (number == NULL && !PyErr_ExceptionMatches(PyExc_TypeError)) {
        return -1; /* the number's own code failed */
    }
    if (number == NULL || !PyLong_Check(flag)) {
        Py_XDECREF(number);
        PyErr_Clear();
        return refuse(PyExc_TypeError, "data", "a tuple (int, bool)", value);
    }
    import->data = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (import->data == UINT64_MAX) { /* also the mark of an overflow */
        PyErr_Clear();
        return refuse(PyExc_ValueError, "data", "a pointer of 64 bits", value);
    }
    int readonly = PyObject_IsTrue(flag);
    import->readonly = readonly != 0;
    return readonly < 0 ? -1 : 0;
}

static int
read_mask(PyObject *dict)
{
    PyObject *value;
    int found = look_up(dict, "mask", &value);
    return found == 1 ? refuse(PyExc_ValueError, "mask",
                               "None: masks are not supported", value)
                      : found;
}

/* 1 and a handle, 0 when nothing is pending, -1. */
static int
read_stream(PyObject *dict, uint64_t *handle)
{
    PyObject *value;
    int found = look_up(dict, "stream", &value);
    if (found != 1) {
        return found;
    }
    if (!PyLong_Check(value) || PyBool_Check(value)) {
        return refuse(PyExc_TypeError, "stream", "None or an int", value);
    }
    *handle = PyLong_AsUnsignedLongLong(value);
    if (PyErr_Occurred() || *handle == 0) {
        PyErr_Clear();
        return refuse(PyExc_ValueError, "stream",
                      "None, 1 (legacy default), 2 (per-thread default) or a handle",
                      value);
    }
    return 1;
}

/* -- place and order ---------------------------------------------------------------------- */

static int
place(cm_state *state, cm_import *import)
{
    cm_pointer_info info;
    import->kind = CM_KIND_DEVICE;
    if (import->nbytes == 0) {
        cm_import_place(import, NULL, state->current_device);
        return 0;
    }
    if (cm_import_probe(state, import, what, &info) < 0) {
        return -1;
    }
    if (info.kind == CM_KIND_PAGEABLE) {
        PyErr_Format(PyExc_ValueError,
                     CAI "['data']: to the driver %p is ordinary host memory, which a "
                         "device cannot reach",
                     (void *)(uintptr_t)import->data);
        return -1;
    }
    /* page-locked memory that a device may use is what we call mapped */
    import->kind = info.kind == CM_KIND_PINNED ? CM_KIND_MAPPED : info.kind;
    cm_import_place(import, &info, state->current_device);
    return 0;
}

static cm_status
follow(cm_stream *consumer, int device, uint64_t handle)
{
    cm_stream *producer;
    CM_TRY(cm_stream_wrap(consumer->rt, device, handle, NULL, NULL, &producer));
    cm_status status = cm_stream_follow(consumer, producer);
    cm_stream_release(producer);
    return status;
}

/* Let our stream wait for the producer's, and remember ours. */
static int
order(cm_state *state, PyObject *object, cm_stream *given, uint64_t handle)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)object;
    cm_stream *stream =
        given != NULL ? cm_stream_take(state, given)
                      : cm_stream_from_object(state, Py_None, buffer->storage->device);
    if (stream == NULL) {
        return -1;
    }
    int device = buffer->storage->device; /* whose streams the exporter means */
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = follow(stream, device, handle);
    Py_END_ALLOW_THREADS
    int result =
        cm_is_ok(status)
            ? cm_storage_add_lasting_use(buffer->storage, stream)
            : cm_py_raise_int(state, status, "while waiting for " CAI "['stream']");
    cm_stream_give(state, stream);
    return result;
}

static PyObject *
import_dict(cm_state *state, PyObject *object, PyObject *dict, cm_stream *stream)
{
    cm_import import = {.foreign = object};
    uint64_t handle = 0;
    int pending;
    PyObject *buffer = NULL;
    if (read_version(dict) < 0 || read_mask(dict) < 0 || read_data(dict, &import) < 0
        || read_shape(dict, &import.region) < 0
        || (pending = read_stream(dict, &handle)) < 0) {
        return NULL;
    }
    PyObject *dtype = read_dtype(dict);
    if (dtype == NULL) {
        return NULL;
    }
    import.dtype = dtype;
    import.region.itemsize = cm_numpy_itemsize(dtype);
    if (read_strides(dict, &import.region) == 0 && cm_import_measure(&import, what) == 0
        && place(state, &import) == 0) {
        buffer = cm_import_finish(state, &import);
    }
    Py_XDECREF(import.locked);
    Py_DECREF(dtype);
    if (buffer != NULL && pending == 1 && import.nbytes > 0
        && order(state, buffer, stream, handle) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

PyObject *
cm_import_array_interface(cm_state *state, PyObject *object, cm_stream *stream)
{
    PyObject *dict = PyType_Check(object) ? NULL : PyObject_GetAttrString(object, CAI);
    if (dict == NULL) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return NULL;
        }
        PyErr_Clear();
        return Py_NewRef(Py_NotImplemented);
    }
    PyObject *buffer = NULL;
    if (!PyDict_Check(dict)) {
        PyErr_Format(PyExc_TypeError, CAI " must be a dict, not %.200R", dict);
    }
    else {
        /* our own copy: an __index__ of the exporter's could change theirs meanwhile */
        PyObject *copy = PyDict_Copy(dict);
        if (copy != NULL) {
            buffer = import_dict(state, object, copy, stream);
            Py_DECREF(copy);
        }
    }
    Py_DECREF(dict);
    return buffer;
}
