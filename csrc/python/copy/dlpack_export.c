/* SPDX-License-Identifier: Apache-2.0 */
/* `__dlpack__` and `__dlpack_device__`: which device a consumer is told, and what has
 * to happen before it may read. */
#include "python/buffer/buffer_object.h"
#include "python/copy/buffer_methods.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/pool/allocate.h"
#include "python/protocols/dlpack.h"
#include "python/protocols/protocols.h"

/* How it is answered. */
typedef struct answer {
    cm_dl_dtype type;
    cm_dl_device device;
    void *data;   /* NULL when empty */
    bool on_host; /* the consumer reads with the CPU: everything must be done before */
    bool must_copy;
} answer;

/* -- the device --------------------------------------------------------------------------- */

/* What consumers may do with it: an as_device() view is device memory. */
static cm_kind
kind_of(const cm_buffer *buffer)
{
    if (Py_TYPE((PyObject *)(uintptr_t)buffer) == buffer->state->device_buffer_type) {
        return CM_KIND_DEVICE;
    }
    return buffer->storage->kind;
}

/* What __dlpack_device__ says. */
static cm_dl_device
native_device(const cm_buffer *buffer, const cm_runtime *rt)
{
    if (rt->backend == CM_BACKEND_EMULATED) {
        return (cm_dl_device){CM_DL_CPU, 0};
    }
    switch (kind_of(buffer)) {
    case CM_KIND_PINNED:
    case CM_KIND_MAPPED:
        return (cm_dl_device){CM_DL_CUDA_HOST, 0};
    case CM_KIND_MANAGED:
        return (cm_dl_device){CM_DL_CUDA_MANAGED, 0};
    case CM_KIND_DEVICE:
        return (cm_dl_device){CM_DL_CUDA, buffer->storage->device};
    default:
        return (cm_dl_device){CM_DL_CPU, 0};
    }
}

static int
refuse_device(const cm_buffer *buffer, const cm_runtime *rt, cm_dl_device wanted)
{
    const char *hint = "use copy() into a buffer there";
    if (rt->backend == CM_BACKEND_EMULATED) {
        hint = "the emulated device is ordinary memory: only (1, 0) can be had";
    }
    else if (wanted.type == CM_DL_CUDA && kind_of(buffer) == CM_KIND_PINNED) {
        hint = "memory from empty_mapped() can be exported so";
    }
    PyErr_Format(PyExc_BufferError,
                 "dl_device=(%d, %d): %s memory cannot be exported there "
                 "without a copy; %s",
                 (int)wanted.type, (int)wanted.id, cm_kind_name(kind_of(buffer)), hint);
    return -1;
}

static bool
can_be(const cm_buffer *buffer, const cm_runtime *rt, cm_dl_device wanted)
{
    cm_kind kind = kind_of(buffer);
    if (wanted.type == CM_DL_CPU) {
        return wanted.id == 0;
    }
    if (rt->backend == CM_BACKEND_EMULATED) {
        return false;
    }
    switch (wanted.type) {
    case CM_DL_CUDA_HOST:
        return wanted.id == 0 && (kind == CM_KIND_PINNED || kind == CM_KIND_MAPPED);
    case CM_DL_CUDA_MANAGED:
        return wanted.id == 0 && kind == CM_KIND_MANAGED;
    case CM_DL_CUDA:
        return wanted.id == buffer->storage->device
               && (kind == CM_KIND_MAPPED || kind == CM_KIND_MANAGED
                   || kind == CM_KIND_DEVICE);
    default:
        return false;
    }
}

/* Element 0 for the CPU; NULL where the host has no way to it. With `alias` the second
 * mapping of emulated device memory will do. */
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

static int
find_answer(const cm_buffer *buffer, const cm_runtime *rt,
            const cm_dlpack_request *asked, answer *out)
{
    bool empty = cm_buffer_nbytes(buffer) == 0;
    if (asked->has_device && !can_be(buffer, rt, asked->device)) {
        return refuse_device(buffer, rt, asked->device);
    }
    out->device = asked->has_device ? asked->device : native_device(buffer, rt);
    if (!asked->has_device && out->device.type == CM_DL_CUDA_HOST) {
        out->device.type = CM_DL_CPU; /* every consumer of the CPU takes it then */
    }
    out->data = NULL;
    out->must_copy = asked->copy == 1;
    out->on_host = out->device.type == CM_DL_CPU || out->device.type == CM_DL_CUDA_HOST
                   || (out->device.type == CM_DL_CUDA_MANAGED && !asked->has_stream);
    if (empty) {
        return 0;
    }
    if (out->device.type == CM_DL_CUDA) {
        out->data = (void *)(uintptr_t)cm_buffer_address(buffer);
        return 0;
    }
    /* asked for by name, the CPU's view of device memory is a copy on every backend */
    out->data = host_data(buffer, rt, !asked->has_device);
    if (out->data == NULL) {
        out->must_copy = true;
        if (asked->copy == 0) {
            PyErr_SetString(
                PyExc_BufferError,
                "device memory reaches the CPU only as a copy, and copy=False "
                "forbids that");
            return -1;
        }
    }
    return 0;
}

/* -- order -------------------------------------------------------------------------------- */

/* Whatever the memory is still used for must come before the consumer. */
static int
settle(const cm_buffer *buffer, const cm_dlpack_request *asked, const answer *found)
{
    if (asked->has_stream && asked->stream == -1) {
        return 0;
    }
    if (found->on_host) { /* such memory may be asked for with any stream: it has none
                           */
        return cm_storage_wait(buffer->storage, true);
    }
    if (asked->has_stream && asked->stream == 0) {
        return cm_dlpack_refuse_stream(0);
    }
    uint64_t handle = asked->has_stream ? (uint64_t)asked->stream : CM_STREAM_LEGACY;
    return cm_storage_order_handle(buffer->storage, buffer->storage->device, handle);
}

/* -- copies ------------------------------------------------------------------------------- */

static PyObject *
new_target(const cm_buffer *buffer, cm_kind kind)
{
    static const unsigned flags_of[CM_KIND_COUNT] = {
        [CM_KIND_PINNED] = CM_HOST_ALLOC_PORTABLE,
        [CM_KIND_MAPPED] = CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_MAPPED,
        [CM_KIND_MANAGED] = CM_MANAGED_GLOBAL,
    };
    cm_state *state = buffer->state;
    const int64_t *shape = cm_buffer_shape(buffer);
    if (kind == CM_KIND_PAGEABLE) {
        PyObject *array = cm_numpy_empty(buffer->dtype, buffer->ndim, shape, 'C');
        PyObject *target = array == NULL ? NULL : cm_import_object(state, array, NULL);
        Py_XDECREF(array);
        return target;
    }
    return cm_buffer_allocate(state, NULL, kind, flags_of[kind],
                              buffer->storage->device, buffer->dtype, buffer->ndim,
                              shape, 'C', NULL);
}

/* A fresh buffer with the same values: of the same kind, but pinned where the CPU wants
 * what it cannot reach. Blocks until the data is there. */
static PyObject *
copy_of(PyObject *self, const cm_dlpack_request *asked)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)self;
    cm_kind kind = kind_of(buffer);
    if (kind == CM_KIND_DEVICE && asked->has_device
        && asked->device.type == CM_DL_CPU) {
        kind = CM_KIND_PINNED;
    }
    PyObject *target = new_target(buffer, kind);
    if (target == NULL) {
        return NULL;
    }
    PyObject *done = cm_copy_objects(buffer->state, target, self, NULL, true);
    if (done == NULL) {
        Py_DECREF(target);
        return NULL;
    }
    Py_DECREF(done);
    return target;
}

/* -- the methods -------------------------------------------------------------------------- */

static PyObject *
make_capsule(const cm_buffer *buffer, const cm_dlpack_request *asked,
             const answer *found, bool copied)
{
    return asked->versioned
               ? cm_dlpack_versioned(buffer, found->type, found->device, found->data,
                                     asked->minor, copied)
               : cm_dlpack_legacy(buffer, found->type, found->device, found->data);
}

/* Copy first, then export the copy: it is done, so nothing has to be ordered. */
static PyObject *
export_copy(PyObject *self, cm_runtime *rt, const cm_dlpack_request *asked,
            cm_dl_dtype type)
{
    PyObject *target = copy_of(self, asked);
    if (target == NULL) {
        return NULL;
    }
    const cm_buffer *buffer = (const cm_buffer *)(void *)target;
    cm_dlpack_request direct = *asked;
    direct.copy = 0;
    answer found = {.type = type};
    PyObject *capsule = NULL;
    if (find_answer(buffer, rt, &direct, &found) == 0) {
        capsule = make_capsule(buffer, asked, &found, true);
    }
    Py_DECREF(target);
    return capsule;
}

static PyObject *
export_as(PyObject *self, cm_runtime *rt, const cm_dlpack_request *asked)
{
    const cm_buffer *buffer = (const cm_buffer *)(void *)self;
    answer found;
    if (cm_dlpack_from_dtype(buffer->dtype, &found.type) < 0
        || cm_buffer_check_open(buffer) < 0 /* that may have been Python code */
        || find_answer(buffer, rt, asked, &found) < 0) {
        return NULL;
    }
    if (found.must_copy) {
        return export_copy(self, rt, asked, found.type);
    }
    if (settle(buffer, asked, &found) < 0 || cm_buffer_check_open(buffer) < 0) {
        return NULL;
    }
    return make_capsule(buffer, asked, &found, false);
}

PyObject *
cm_buffer_dlpack(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    static const char *const names[] = {"stream", "max_version", "dl_device", "copy",
                                        NULL};
    const cm_buffer *buffer = (const cm_buffer *)(void *)self;
    PyObject *values[4];
    cm_dlpack_request asked;
    if (cm_args_parse("__dlpack__", args, nargs, kwnames, names, 0, 0, values) < 0
        || cm_dlpack_read_request(values, &asked) < 0
        || cm_buffer_check_open(buffer) < 0) {
        return NULL;
    }
    cm_runtime *rt = cm_state_runtime(buffer->state);
    if (rt == NULL) {
        return NULL;
    }
    cm_state_enter(buffer->state); /* it waits and copies, and needs `rt` afterwards */
    PyObject *capsule = export_as(self, rt, &asked);
    cm_state_leave(buffer->state);
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
