/* SPDX-License-Identifier: Apache-2.0 */
/* Has the methods `__dlpack__` and `__dlpack_device__`. This file reads a consumer's
 * arguments, chooses the device that the consumer is told, orders the consumer after
 * the work on the memory, and makes the capsule. If need be the capsule is over a copy.
 */
#include <stdlib.h>

#include "base/checked_math.h"
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/device/objects.h"
#include "python/protocols/dlpack.h"
#include "python/protocols/protocols.h"

/* -- the arguments of __dlpack__() -------------------------------------------------- */

typedef struct export_request {
    bool has_stream;
    int64_t stream; /* -1 if the consumer is not to be ordered */
    bool versioned;
    uint32_t minor;
    bool has_device;
    cm_dl_device device; /* the buffer's own, the CPU, or, for memory that the host and
                            a GPU reach, that GPU */
    bool is_copy; /* the buffer is a copy that was made for the consumer, so there is no
                     work to come after */
} export_request;

/* Raise ValueError. Always returns -1. */
static int
refuse_stream(int64_t stream)
{
    PyErr_Format(PyExc_ValueError,
                 "stream=%lld: CUDA streams are None, -1 (do not wait), 1 (legacy "
                 "default), 2 (per-thread default) or a handle; 0 is ambiguous",
                 (long long)stream);
    return -1;
}

/* Read the arguments stream= and max_version=, for which NULL and None mean that they
 * are not given. Returns 0, or -1 with TypeError or ValueError. */
static int
read_request(PyObject *stream, PyObject *max_version, export_request *out)
{
    int major = 0;
    int minor = 0;
    *out = (export_request){.has_stream = cm_arg_is_given(stream)};
    if (out->has_stream && cm_arg_int64(stream, "stream", &out->stream) < 0) {
        return -1;
    }
    if (out->stream < -1) {
        return refuse_stream(out->stream);
    }
    if (cm_arg_is_given(max_version)
        && (!PyTuple_Check(max_version)
            || !PyArg_ParseTuple(max_version, "ii", &major, &minor))) {
        PyErr_Format(PyExc_TypeError,
                     "max_version must be None or a tuple of two ints, not %R",
                     max_version);
        return -1;
    }
    out->versioned = major >= CM_DL_MAJOR;
    out->minor = (uint32_t)Py_MAX(minor, 0);
    if (major > CM_DL_MAJOR || minor > CM_DL_MINOR) {
        out->minor = CM_DL_MINOR;
    }
    return 0;
}

/* The memory that the consumer gets. */
typedef struct answer {
    cm_dl_tensor tensor; /* dtype, device and data (NULL when empty) */
    bool on_host; /* the consumer reads with the CPU, so all work must be done before */
} answer;

/* -- the device --------------------------------------------------------------------------- */

/* Return the device that __dlpack_device__() names. */
static cm_dl_device
native_device(const cm_buffer *buffer, const cm_runtime *rt)
{
    if (rt->backend == CM_BACKEND_EMULATED) {
        return (cm_dl_device){CM_DL_CPU, 0};
    }
    cm_kind kind = cm_buffer_kind(buffer);
    if (cm_kind_is_on_device(kind)) {
        return (cm_dl_device){CM_DL_CUDA, buffer->storage->device};
    }
    if (cm_kind_is_page_locked(kind)) {
        return (cm_dl_device){CM_DL_CUDA_HOST, 0};
    }
    if (cm_kind_migrates(kind)) {
        return (cm_dl_device){CM_DL_CUDA_MANAGED, 0};
    }
    return (cm_dl_device){CM_DL_CPU, 0};
}

/* Return the host's address of element 0, or NULL if the host cannot reach it. With
 * `alias` this may be the second mapping of emulated device memory. */
static void *
host_data(const cm_buffer *buffer, const cm_runtime *rt, bool alias)
{
    const cm_storage *storage = buffer->storage;
    char *first = storage->host;
    if (first == NULL && alias) {
        first = cm_runtime_host_alias(rt, storage->address, storage->nbytes);
    }
    return first == NULL ? NULL : first + buffer->offset;
}

/* Choose the device and the address that the consumer gets. Returns false if only a
 * copy of the memory can be on that device. */
static bool
find_answer(const cm_buffer *buffer, const cm_runtime *rt, const export_request *asked,
            answer *out)
{
    cm_dl_device device = asked->has_device ? asked->device : native_device(buffer, rt);
    if (!asked->has_device && device.type == CM_DL_CUDA_HOST) {
        device.type = CM_DL_CPU; /* every consumer of the CPU takes it */
    }
    out->tensor.device = device;
    out->tensor.data = NULL;
    out->on_host = device.type == CM_DL_CPU || device.type == CM_DL_CUDA_HOST
                   || (device.type == CM_DL_CUDA_MANAGED && !asked->has_stream);
    if (cm_buffer_nbytes(buffer) == 0) {
        return true;
    }
    out->tensor.data =
        device.type == CM_DL_CUDA
            ? (void *)(uintptr_t)cm_buffer_address(buffer)
            /* A consumer that names the CPU gets a copy of device memory on every
             * backend, also on the emulated one, whose memory the host could read. */
            : host_data(buffer, rt, !asked->has_device || asked->is_copy);
    return out->tensor.data != NULL;
}

/* -- order -------------------------------------------------------------------------------- */

/* Let the consumer come after all work on the memory, by waiting for the work or by
 * ordering the consumer's stream after it. Returns 0, or -1 with an exception. */
static int
order_consumer(const cm_buffer *buffer, const export_request *asked,
               const answer *found)
{
    if (asked->is_copy || (asked->has_stream && asked->stream == -1)) {
        return 0;
    }
    if (found->on_host) { /* whatever stream is named, the CPU does not use it */
        return cm_storage_wait(buffer->storage, true);
    }
    if (asked->has_stream && asked->stream == 0) {
        return refuse_stream(0);
    }
    uint64_t handle = asked->has_stream ? (uint64_t)asked->stream : CM_STREAM_LEGACY;
    return cm_storage_order_handle(buffer->storage, buffer->storage->device, handle);
}

/* -- capsules ----------------------------------------------------------------------- */

/* The struct that a capsule points to. */
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

/* Delete the tensor of a capsule that nobody has consumed. A consumer renames the
 * capsule, so a consumed one is left alone here. */
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

/* Store the shape, and the strides in elements. Returns 0, or -1 with BufferError. */
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
            steps[i] = dense; /* no step along this axis is ever taken */
        }
        else if (step < 0 || step % buffer->itemsize != 0) {
            return cm_package_refuse(
                "interchange.foreign_memory", "refuse_stride",
                Py_BuildValue("(LL)", (long long)step, (long long)buffer->itemsize));
        }
        else {
            steps[i] = step / buffer->itemsize;
        }
        /* An overflow does no harm: it can happen only if the buffer is empty. */
        (void)cm_mul_i64(dense, length > 0 ? length : 1, &dense);
    }
    return 0;
}

/* Make a capsule over `buffer`. `tensor` has the element type, the device and the
 * address of the data there (NULL if the buffer is empty). The storage is held, and
 * counted as exported, until the consumer is done. No Python code may run here before
 * the storage is counted. Returns NULL with an exception if it fails, for example with
 * BufferError for strides that DLPack cannot describe or, in the legacy form, for a
 * read-only buffer. */
static PyObject *
make_capsule(const cm_buffer *buffer, const export_request *asked,
             const cm_dl_tensor *tensor)
{
    if (buffer->readonly && !asked->versioned) {
        PyErr_SetString(
            PyExc_BufferError,
            "the buffer is read-only, which DLPack before 1.0 cannot say: ask "
            "with max_version=(1, 0)");
        return NULL;
    }
    size_t extents = 2 * (size_t)(buffer->ndim > 0 ? buffer->ndim : 1);
    export *self = calloc(1, sizeof *self + extents * sizeof *self->extents);
    if (self == NULL) {
        return PyErr_NoMemory();
    }
    if (fill_extents(buffer, self->extents) < 0) {
        free(self);
        return NULL;
    }
    cm_dl_tensor *filled = asked->versioned ? &self->managed.versioned.tensor
                                            : &self->managed.legacy.tensor;
    if (asked->versioned) {
        self->managed.versioned = (cm_dl_versioned){
            .version = {CM_DL_MAJOR, asked->minor},
            .context = self,
            .deleter = delete_versioned,
            .flags = (buffer->readonly ? CM_DL_FLAG_READ_ONLY : 0u)
                     | (asked->is_copy ? CM_DL_FLAG_IS_COPIED : 0u),
        };
    }
    else {
        self->managed.legacy =
            (cm_dl_legacy){.context = self, .deleter = delete_legacy};
    }
    *filled = *tensor;
    filled->ndim = buffer->ndim;
    filled->shape = self->extents;
    filled->strides = self->extents + buffer->ndim;
    self->storage = cm_storage_hold(buffer->storage);
    cm_storage_begin_export(self->storage);
    PyObject *capsule = PyCapsule_New(
        &self->managed, asked->versioned ? CM_DL_VERSIONED_NAME : CM_DL_LEGACY_NAME,
        destroy_capsule);
    if (capsule == NULL) {
        export_destroy(self);
    }
    return capsule;
}

/* -- the methods -------------------------------------------------------------------------- */

/* Choose the device, order the consumer, and make the capsule. Each step can run Python
 * code that closes the buffer, so the buffer is checked again after each. Returns what
 * export_asked() returns. */
static PyObject *
export_as(cm_buffer *buffer, const cm_runtime *rt, const export_request *asked)
{
    answer found = {.tensor.byte_offset = 0};
    if (cm_dlpack_from_dtype(buffer->dtype, &found.tensor.dtype) < 0
        || cm_buffer_check_open(buffer) < 0) { /* the dtype may have run Python code */
        return NULL;
    }
    if (!find_answer(buffer, rt, asked, &found)) {
        return Py_NewRef(Py_None);
    }
    bool on_device = found.tensor.device.type != CM_DL_CPU;
    if (order_consumer(buffer, asked, &found) < 0
        || cm_buffer_note_side(buffer, on_device) < 0
        || cm_buffer_check_open(buffer) < 0) {
        return NULL;
    }
    return make_capsule(buffer, asked, &found.tensor);
}

/* Export the buffer as it is asked for. Returns a capsule, None if only a copy will do,
 * or NULL with an exception. */
static PyObject *
export_asked(PyObject *self, const export_request *asked)
{
    cm_buffer *buffer = (cm_buffer *)(void *)self;
    cm_runtime *rt =
        cm_buffer_check_open(buffer) < 0 ? NULL : cm_state_runtime(buffer->state);
    if (rt == NULL) {
        return NULL;
    }
    cm_state_enter(buffer->state); /* the export may wait, and needs `rt` afterwards */
    PyObject *capsule = export_as(buffer, rt, asked);
    cm_state_leave(buffer->state);
    return capsule;
}

/* Read `dl_device`, and check that the memory can be exported to that device. It can be
 * exported to its own device, to the CPU and, if both the CPU and a GPU reach it, to
 * that GPU. Returns 0, or -1 with an exception. */
static int
read_place(const cm_buffer *buffer, PyObject *object, cm_dl_device *out)
{
    bool is_pair = PyTuple_Check(object) && PyTuple_Size(object) == 2;
    PyObject *type = is_pair ? PyTuple_GetItem(object, 0) : NULL;
    PyObject *id = is_pair ? PyTuple_GetItem(object, 1) : NULL;
    if (!is_pair || !PyLong_Check(type) || !PyLong_Check(id)) {
        PyErr_Format(PyExc_TypeError,
                     "dl_device must be None or a tuple of two ints, not %R", object);
        return -1;
    }
    int overflow;
    long device_type = PyLong_AsLongAndOverflow(type, &overflow);
    long device_id = PyLong_AsLongAndOverflow(id, &overflow); /* -1 if it is too
                                                                 large */
    const cm_runtime *rt =
        cm_buffer_check_open(buffer) < 0 ? NULL : cm_state_runtime(buffer->state);
    if (rt == NULL) {
        return -1;
    }
    bool is_emulated = rt->backend == CM_BACKEND_EMULATED;
    cm_kind kind = cm_buffer_kind(buffer);
    cm_dl_device native = native_device(buffer, rt);
    bool is_native = device_type == native.type && device_id == native.id;
    bool is_cpu = device_type == CM_DL_CPU && device_id == 0;
    bool both_reach = !is_emulated && cm_kind_is_shared(kind);
    bool is_gpu =
        both_reach && device_type == CM_DL_CUDA && device_id == buffer->storage->device;
    if (!is_native && !is_cpu && !is_gpu) {
        return cm_package_refuse("interchange.foreign_memory", "refuse_export",
                                 Py_BuildValue("(OOsN)", type, id, cm_kinds[kind].text,
                                               PyBool_FromLong(is_emulated)));
    }
    *out = (cm_dl_device){.type = (int32_t)device_type, .id = (int32_t)device_id};
    return 0;
}

/* Export a copy that belongs to the consumer alone. The copy is of the same kind, or is
 * pinned memory if the CPU asks for memory that it cannot reach. Returns a capsule, or
 * NULL with an exception. */
static PyObject *
export_copy(PyObject *self, export_request asked)
{
    cm_buffer *buffer = (cm_buffer *)(void *)self;
    cm_kind kind = cm_buffer_kind(buffer);
    if (cm_kind_is_on_device(kind) && asked.has_device
        && asked.device.type == CM_DL_CPU) {
        kind = CM_KIND_PINNED;
    }
    PyObject *copied = cm_buffer_duplicate(buffer, kind);
    if (copied == NULL) {
        return NULL;
    }
    asked.is_copy = true;
    PyObject *capsule = export_asked(copied, &asked);
    Py_DECREF(copied); /* the capsule holds its memory */
    return capsule;
}

PyObject *
cm_buffer_dlpack(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    static const char *const names[] = {"stream", "max_version", "dl_device", "copy",
                                        NULL};
    PyObject *values[4];
    export_request asked;
    cm_dl_device device = {0};
    bool wants_copy;
    if (cm_args_parse("__dlpack__", args, nargs, kwnames, names, 0, 0, values) < 0) {
        return NULL;
    }
    bool has_device = cm_arg_is_given(values[2]);
    bool has_copy = cm_arg_is_given(values[3]);
    if (cm_arg_flag(has_copy ? values[3] : NULL, "copy", false, &wants_copy) < 0) {
        return NULL;
    }
    if (has_device && read_place((cm_buffer *)(void *)self, values[2], &device) < 0) {
        return NULL;
    }
    if (read_request(values[0], values[1], &asked) < 0) {
        return NULL;
    }
    asked.has_device = has_device;
    asked.device = device;
    if (!wants_copy) {
        PyObject *capsule = export_asked(self, &asked);
        if (capsule != Py_None) {
            return capsule;
        }
        Py_DECREF(capsule);
        if (has_copy) {
            PyErr_SetString(PyExc_BufferError,
                            "device memory reaches the CPU only as a copy, and "
                            "copy=False forbids that");
            return NULL;
        }
    }
    return export_copy(self, asked);
}

PyObject *
cm_dlpack_fresh(PyObject *self, cm_dl_device device)
{
    PyObject *place = Py_BuildValue("(ii)", (int)device.type, (int)device.id);
    if (place == NULL) {
        return NULL;
    }
    export_request asked = {.has_stream = true,
                            .stream = -1,
                            .versioned = true,
                            .minor = CM_DL_MINOR,
                            .has_device = true};
    int result = read_place((cm_buffer *)(void *)self, place, &asked.device);
    Py_DECREF(place);
    return result < 0 ? NULL : export_asked(self, &asked);
}

PyObject *
cm_dlpack_current(PyObject *self)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)self;
    cm_stream *stream = NULL;
    if (cm_buffer_check_open(buffer) == 0) {
        stream = cm_stream_from_object(buffer->state, Py_None, buffer->storage->device);
    }
    if (stream == NULL) {
        return NULL;
    }
    /* The legacy default stream has the handle 0, and DLPack calls it 1. */
    int64_t handle = (int64_t)cm_stream_export_handle(stream);
    export_request asked = {.has_stream = true,
                            .stream = handle + (handle == 0),
                            .versioned = true,
                            .minor = CM_DL_MINOR};
    PyObject *capsule = export_asked(self, &asked);
    cm_stream_give(buffer->state, stream);
    return capsule;
}

PyObject *
cm_buffer_dlpack_device(PyObject *self, PyObject *unused)
{
    (void)unused;
    const cm_buffer *buffer = (const cm_buffer *)(void *)self;
    cm_runtime *rt = cm_state_runtime(buffer->state);
    if (rt == NULL || cm_buffer_check_open(buffer) < 0) {
        return NULL;
    }
    cm_dl_device device = native_device(buffer, rt);
    return Py_BuildValue("ii", (int)device.type, (int)device.id);
}
