/* SPDX-License-Identifier: Apache-2.0 */
/* DLPack as an exporter speaks it: element types, what is asked of __dlpack__(), and
 * capsules. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/protocols/dlpack.h"

/* -- element types ------------------------------------------------------------------ */

static const struct {
    char kind;
    uint8_t code;
} plain_kinds[] = {
    {'b', CM_DL_BOOL},  {'i', CM_DL_INT},     {'u', CM_DL_UINT},
    {'f', CM_DL_FLOAT}, {'c', CM_DL_COMPLEX},
};

/* Types of the ml_dtypes package, one byte or more an element. */
static const struct {
    const char *name;
    uint8_t code;
    uint8_t bits;
} named_types[] = {
    {"bfloat16", CM_DL_BFLOAT, 16},
    {"float8_e3m4", CM_DL_FLOAT8_E3M4, 8},
    {"float8_e4m3", CM_DL_FLOAT8_E4M3, 8},
    {"float8_e4m3b11fnuz", CM_DL_FLOAT8_E4M3B11FNUZ, 8},
    {"float8_e4m3fn", CM_DL_FLOAT8_E4M3FN, 8},
    {"float8_e4m3fnuz", CM_DL_FLOAT8_E4M3FNUZ, 8},
    {"float8_e5m2", CM_DL_FLOAT8_E5M2, 8},
    {"float8_e5m2fnuz", CM_DL_FLOAT8_E5M2FNUZ, 8},
    {"float8_e8m0fnu", CM_DL_FLOAT8_E8M0FNU, 8},
    {"complex32", CM_DL_COMPLEX, 32},
};

enum {
    PLAIN_COUNT = sizeof plain_kinds / sizeof *plain_kinds,
    NAMED_COUNT = sizeof named_types / sizeof *named_types,
};

static int
refuse_dtype(PyObject *dtype, const char *why)
{
    PyErr_Format(PyExc_BufferError, "DLPack cannot describe dtype %R: %s", dtype, why);
    return -1;
}

static int
from_named(PyObject *dtype, cm_dl_dtype *out)
{
    PyObject *name = PyObject_GetAttrString(dtype, "name");
    if (name == NULL) {
        return -1;
    }
    for (size_t i = 0; i < NAMED_COUNT; i++) {
        if (PyUnicode_Check(name)
            && PyUnicode_CompareWithASCIIString(name, named_types[i].name) == 0) {
            *out = (cm_dl_dtype){named_types[i].code, named_types[i].bits, 1};
            Py_DECREF(name);
            return 0;
        }
    }
    Py_DECREF(name);
    return refuse_dtype(dtype, "it has no code for this type");
}

int
cm_dlpack_from_dtype(PyObject *dtype, cm_dl_dtype *out)
{
    cm_dtype_traits traits;
    cm_numpy_dtype_traits(dtype, &traits);
    if (traits.user) {
        return from_named(dtype, out);
    }
    if (!traits.native) {
        return refuse_dtype(dtype, "the bytes are not in this machine's order");
    }
    if (traits.extended) {
        return refuse_dtype(dtype, "extended precision has no code");
    }
    for (size_t i = 0; i < PLAIN_COUNT; i++) {
        if (plain_kinds[i].kind == traits.kind) {
            *out =
                (cm_dl_dtype){plain_kinds[i].code, (uint8_t)(traits.itemsize * 8), 1};
            return 0;
        }
    }
    if (traits.kind == 'M' || traits.kind == 'm') {
        return refuse_dtype(dtype,
                            "it has no code for times; hand over view('i8') and view "
                            "the result as this dtype again");
    }
    return refuse_dtype(dtype,
                        "only numbers and booleans have codes; view('u1') carries the "
                        "bytes");
}

static PyObject *
refuse_type(cm_dl_dtype type, const char *why)
{
    PyErr_Format(PyExc_BufferError, "DLPack element type code %d with %d bits: %s",
                 (int)type.code, (int)type.bits, why);
    return NULL;
}

static PyObject *
to_named(cm_dl_dtype type, const char *name)
{
    PyObject *module = PyImport_ImportModule("ml_dtypes");
    PyObject *scalar = module == NULL ? NULL : PyObject_GetAttrString(module, name);
    Py_XDECREF(module);
    if (scalar == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_ImportError)
            && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return NULL;
        }
        PyErr_Clear();
        return refuse_type(type, "NumPy has this type only with the ml_dtypes package, "
                                 "which is not installed or too old");
    }
    PyObject *dtype = cm_numpy_dtype(scalar);
    Py_DECREF(scalar);
    return dtype;
}

PyObject *
cm_dlpack_to_dtype(cm_dl_dtype type)
{
    if (type.lanes != 1) {
        PyErr_Format(PyExc_BufferError, "DLPack element type has %d lanes, not 1",
                     (int)type.lanes);
        return NULL;
    }
    for (size_t i = 0; i < NAMED_COUNT; i++) {
        if (named_types[i].code == type.code && named_types[i].bits == type.bits) {
            return to_named(type, named_types[i].name);
        }
    }
    if (type.bits == 0 || type.bits % 8 != 0) {
        return refuse_type(type, "elements must fill whole bytes");
    }
    for (size_t i = 0; i < PLAIN_COUNT; i++) {
        if (plain_kinds[i].code == type.code) {
            PyObject *dtype =
                cm_numpy_dtype_of_kind(plain_kinds[i].kind, type.bits / 8);
            if (dtype != NULL || PyErr_Occurred()) {
                return dtype;
            }
        }
    }
    return refuse_type(type, "NumPy has no such type");
}

/* -- the arguments of __dlpack__() -------------------------------------------------- */

static int
read_pair(PyObject *object, const char *name, int64_t *first, int64_t *second)
{
    if (!PyTuple_Check(object) || PyTuple_Size(object) != 2) {
        PyErr_Format(PyExc_TypeError, "%s must be None or a tuple of two ints, not %R",
                     name, object);
        return -1;
    }
    if (cm_arg_int64(PyTuple_GetItem(object, 0), name, first) < 0) {
        return -1;
    }
    return cm_arg_int64(PyTuple_GetItem(object, 1), name, second);
}

static int
read_max_version(PyObject *object, cm_dlpack_request *out)
{
    int64_t major;
    int64_t minor;
    out->versioned = false;
    out->minor = 0;
    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (read_pair(object, "max_version", &major, &minor) < 0) {
        return -1;
    }
    out->versioned = major >= CM_DL_MAJOR;
    bool newest = major > CM_DL_MAJOR || minor > CM_DL_MINOR;
    out->minor = newest ? (uint32_t)CM_DL_MINOR : (uint32_t)(minor < 0 ? 0 : minor);
    return 0;
}

static int
read_device(PyObject *object, cm_dlpack_request *out)
{
    int64_t type;
    int64_t id;
    out->has_device = object != NULL && object != Py_None;
    if (!out->has_device) {
        return 0;
    }
    if (read_pair(object, "dl_device", &type, &id) < 0) {
        return -1;
    }
    if (type < 0 || type > INT32_MAX || id < 0 || id > INT32_MAX) {
        PyErr_Format(PyExc_BufferError, "dl_device %R is no device", object);
        return -1;
    }
    out->device = (cm_dl_device){(int32_t)type, (int32_t)id};
    return 0;
}

int
cm_dlpack_refuse_stream(int64_t stream)
{
    PyErr_Format(PyExc_ValueError,
                 "stream=%lld: CUDA streams are None, -1 (do not wait), 1 (legacy "
                 "default), 2 (per-thread default) or a handle; 0 is ambiguous",
                 (long long)stream);
    return -1;
}

int
cm_dlpack_read_request(PyObject *const *values, cm_dlpack_request *out)
{
    PyObject *stream = values[0];
    PyObject *copy = values[3];
    out->has_stream = stream != NULL && stream != Py_None;
    out->stream = 0;
    out->copy = -1;
    if (out->has_stream && cm_arg_int64(stream, "stream", &out->stream) < 0) {
        return -1;
    }
    if (out->stream < -1) {
        return cm_dlpack_refuse_stream(out->stream);
    }
    if (read_max_version(values[1], out) < 0 || read_device(values[2], out) < 0) {
        return -1;
    }
    if (copy != NULL && copy != Py_None) {
        bool wanted;
        if (cm_arg_bool(copy, "copy", &wanted) < 0) {
            return -1;
        }
        out->copy = wanted ? 1 : 0;
    }
    return 0;
}

/* -- capsules ----------------------------------------------------------------------- */

/* What a capsule owns. */
typedef struct export {
    cm_storage *storage; /* held, counted as an export */
    union {
        cm_dl_legacy legacy;
        cm_dl_versioned versioned;
    } managed;
    int64_t extents[]; /* shape, then strides in elements; never empty */
} export;

static void
export_destroy(export *self)
{
    cm_storage_drop_export(self->storage);
    free(self);
}

static void
delete_legacy(cm_dl_legacy *managed)
{
    export_destroy(managed->context);
}

static void
delete_versioned(cm_dl_versioned *managed)
{
    export_destroy(managed->context);
}

/* A capsule that nobody consumed still owns its tensor; a used one has another name. */
static void
destroy_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, CM_DL_LEGACY_NAME)) {
        cm_dl_legacy *managed = PyCapsule_GetPointer(capsule, CM_DL_LEGACY_NAME);
        managed->deleter(managed);
    }
    else if (PyCapsule_IsValid(capsule, CM_DL_VERSIONED_NAME)) {
        cm_dl_versioned *managed = PyCapsule_GetPointer(capsule, CM_DL_VERSIONED_NAME);
        managed->deleter(managed);
    }
}

/* Shape, and strides in elements. 0, or -1 with BufferError. */
static int
fill_extents(const cm_buffer *buffer, int64_t *extents)
{
    int64_t *steps = extents + buffer->ndim;
    bool empty = cm_buffer_nbytes(buffer) == 0;
    int64_t dense = 1;
    for (int i = buffer->ndim - 1; i >= 0; i--) {
        int64_t length = cm_buffer_shape(buffer)[i];
        int64_t step = cm_buffer_strides(buffer)[i];
        extents[i] = length;
        if (empty || length == 1) {
            steps[i] = dense; /* never stepped by */
        }
        else if (step < 0) {
            PyErr_SetString(
                PyExc_BufferError,
                "DLPack export of negative strides: PyTorch ends the process "
                "over them; hand over copy() of this view, or the buffer "
                "before it is reversed");
            return -1;
        }
        else if (step % buffer->itemsize == 0) {
            steps[i] = step / buffer->itemsize;
        }
        else {
            PyErr_Format(
                PyExc_BufferError,
                "DLPack counts strides in elements: %lld bytes are no multiple of "
                "the itemsize %lld",
                (long long)step, (long long)buffer->itemsize);
            return -1;
        }
        (void)cm_mul_i64(dense, length > 0 ? length : 1, &dense); /* if empty: any */
    }
    return 0;
}

/* Hold and count the storage, and describe the buffer in *tensor. */
static export *
export_new(const cm_buffer *buffer, cm_dl_dtype type, cm_dl_device device, void *data,
           cm_dl_tensor *tensor)
{
    size_t extents = 2 * (size_t)(buffer->ndim > 0 ? buffer->ndim : 1);
    export *self = calloc(1, sizeof *self + extents * sizeof *self->extents);
    if (self == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (fill_extents(buffer, self->extents) < 0) {
        free(self);
        return NULL;
    }
    tensor->data = data;
    tensor->device = device;
    tensor->ndim = buffer->ndim;
    tensor->dtype = type;
    tensor->shape = self->extents;
    tensor->strides = self->extents + buffer->ndim;
    tensor->byte_offset = 0;
    self->storage = cm_storage_hold(buffer->storage);
    cm_storage_begin_export(self->storage);
    return self;
}

PyObject *
cm_dlpack_legacy(const cm_buffer *buffer, cm_dl_dtype type, cm_dl_device device,
                 void *data)
{
    if (buffer->readonly) {
        PyErr_SetString(
            PyExc_BufferError,
            "the buffer is read-only, which DLPack before 1.0 cannot say: ask "
            "with max_version=(1, 0)");
        return NULL;
    }
    cm_dl_tensor tensor;
    export *self = export_new(buffer, type, device, data, &tensor);
    if (self == NULL) {
        return NULL;
    }
    self->managed.legacy = (cm_dl_legacy){tensor, self, delete_legacy};
    PyObject *capsule =
        PyCapsule_New(&self->managed.legacy, CM_DL_LEGACY_NAME, destroy_capsule);
    if (capsule == NULL) {
        export_destroy(self);
    }
    return capsule;
}

PyObject *
cm_dlpack_versioned(const cm_buffer *buffer, cm_dl_dtype type, cm_dl_device device,
                    void *data, uint32_t minor, bool copied)
{
    cm_dl_tensor tensor;
    export *self = export_new(buffer, type, device, data, &tensor);
    if (self == NULL) {
        return NULL;
    }
    self->managed.versioned = (cm_dl_versioned){
        .version = {CM_DL_MAJOR, minor},
        .context = self,
        .deleter = delete_versioned,
        .flags = (buffer->readonly ? CM_DL_FLAG_READ_ONLY : 0u)
                 | (copied ? CM_DL_FLAG_IS_COPIED : 0u),
        .tensor = tensor,
    };
    PyObject *capsule =
        PyCapsule_New(&self->managed.versioned, CM_DL_VERSIONED_NAME, destroy_capsule);
    if (capsule == NULL) {
        export_destroy(self);
    }
    return capsule;
}
