/* SPDX-License-Identifier: Apache-2.0 */
/* fill(): one element into all of a buffer, by memset where the device can. */
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/copy/buffer_methods.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/wait.h"
#include "python/protocols/protocols.h"

const char cm_buffer_fill_doc[] =
    "fill($self, /, value, *, stream=None)\n"
    "--\n"
    "\n"
    "Set every element.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "value : array_like, Buffer, or exporter of DLPack or the CUDA array interface\n"
    "    A scalar, or an array that broadcasts to the shape. Its values take the "
    "dtype\n"
    "    where they stay the same kind and come back equal, floats rounded; where "
    "NumPy\n"
    "    would cut them (1.5 in ``int32``) it is an error. Values on a device are "
    "copied\n"
    "    there, and brought to the host only if they must be converted.\n"
    "stream : Stream or other stream object, optional\n"
    "    Default: the current stream.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError\n"
    "    The buffer is read-only or closed, `value` does not broadcast, text or a time "
    "in\n"
    "    it does not fit, or `stream` is of another device than the device memory to "
    "fill.\n"
    "TypeError\n"
    "    `value` is of another kind than the dtype: reals for integers, numbers for "
    "text.\n"
    "OverflowError\n"
    "    A number does not fit into the dtype, or would become infinite.\n"
    "CudaError\n"
    "    The fill failed.\n"
    "\n"
    "Notes\n"
    "-----\n"
    "Blocks: for an array or device memory as `value`, until it is copied; else until\n"
    "unfinished background transfers of the memory are done, then, for\n"
    "memory the host can read, until it is filled (GIL released). Device memory of a "
    "pool,\n"
    "and with `stream` also mapped and managed memory, is filled later, by the device "
    "on "
    "the\n"
    "stream; `numpy` and other reads by way of the buffer wait for that. Without "
    "`stream`\n"
    "managed memory is filled by the device that it was prefetched to, else by the "
    "host.\n"
    "Pinned memory is always written by the host, which waits for the buffer's streams "
    "and\n"
    "for `stream`, with all that those were made to wait for. Ctrl-C ends that wait.\n"
    "Ordered after: work that cumem knows of on this buffer, and on `stream`.\n";

/* Memory that only devices see, and that stays until its streams are done with it:
 * nobody can look too early, so the fill need not be waited for. */
static bool
is_unseen(const cm_storage *storage)
{
    return storage->pool != NULL && storage->residency == CM_KIND_DEVICE;
}

/* The device whose work the fill is; -1: the host's. Memory that both reach is the
 * stream's where one was `named`, else it is filled where it is. -2 with an exception.
 */
static int
choose_filler(cm_buffer *self, const cm_stream *stream, bool named)
{
    const cm_storage *storage = self->storage;
    bool managed = storage->residency == CM_KIND_MANAGED;
    if (storage->residency == CM_KIND_PAGEABLE || storage->residency == CM_KIND_PINNED
        || (managed && storage->flags == CM_MANAGED_HOST)) { /* attached: no device */
        return -1;
    }
    if (managed && named) {
        return stream->device;
    }
    if (storage->residency == CM_KIND_DEVICE || named) {
        return storage->device;
    }
    int location = CM_HOST_LOCATION;
    if (managed && cm_buffer_read_prefetch_location(self, &location) < 0) {
        return -2;
    }
    return location < 0 ? -1 : location;
}

/* Of pinned memory. */
static int
queue_fill(cm_buffer *self, const void *element, cm_stream *stream, int filler)
{
    cm_storage *storage = self->storage;
    cm_region region;
    cm_pending before;
    cm_buffer_region(self, &region);
    cm_engine *engine =
        cm_state_engine(self->state, filler < 0 ? region.device : filler);
    if (engine == NULL || cm_pending_take(storage, &before) < 0) {
        return -1;
    }
    bool blocking = filler < 0;
    region.device = blocking ? region.device : filler;
    cm_ticket_info info;
    cm_status status;
    cm_pool_waiter waiter = {self->state, PyEval_SaveThread()};
    cm_wait_hooks hooks = {.interrupted = NULL};
    if (blocking) { /* what the device fills is queued and waits for nothing */
        hooks = cm_wait_hooks_of(&waiter);
    }
    status = cm_engine_fill(engine, &region, element, stream, before.streams,
                            before.stream_count, blocking, &hooks, &info);
    PyEval_RestoreThread(waiter.thread);
    uint64_t use_calls = before.use_calls;
    cm_pending_give(&before);
    if (status.code == CM_ECANCELLED && PyErr_Occurred()) {
        return -1; /* a signal's handler raised */
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while filling a buffer");
    }
    if (info.captured) {
        storage->was_captured = true; /* and nothing is written before the graph runs */
    }
    else {
        if (!blocking && !is_unseen(storage)) {
            cm_storage_set_late(storage);
        }
        if (info.nbytes > 0) {
            cm_storage_forget_uses(storage, stream, use_calls);
        }
    }
    return 0;
}

static int
fill_pinned(cm_buffer *self, const void *element, cm_stream *stream, bool named)
{
    cm_storage *storage = self->storage;
    if (cm_storage_wait_pending(storage) < 0 || cm_buffer_check_open(self) < 0) {
        return -1;
    }
    int filler = choose_filler(self, stream, named);
    if (filler < -1 || cm_buffer_check_open(self) < 0
        || cm_storage_add_use(storage, stream) < 0
        || queue_fill(self, element, stream, filler) < 0) {
        return -1;
    }
    /* Foreign memory may go when we return; what is registered waits before it goes. */
    bool foreign = storage->pool == NULL && storage->registration == NULL;
    return (foreign || !named) && cm_storage_is_late(storage)
               ? cm_storage_wait(storage, true)
               : 0;
}

/* With a stream that was `named` return when it is queued, else when it is filled,
 * unless nobody can tell. Pinned to the end: the waits let other threads in, and what
 * is deferred or told of on the way may be Python code. */
static int
run_fill(cm_buffer *self, const void *element, cm_stream *stream, bool named)
{
    if (cm_buffer_check_open(self) < 0) {
        return -1;
    }
    cm_storage_pin(self->storage);
    int result = fill_pinned(self, element, stream, named);
    cm_storage_unpin(self->storage);
    return result;
}

/* `array` has no dimensions and the buffer's dtype. */
static int
fill_element(cm_buffer *self, PyObject *array, cm_stream *stream, bool named)
{
    cm_region element;
    PyObject *dtype = NULL;
    bool readonly;
    if (cm_numpy_region(array, &element, &dtype, &readonly) < 0) {
        return -1;
    }
    Py_DECREF(dtype);
    return run_fill(self, element.host, stream, named);
}

static bool
is_given(PyObject *object)
{
    return object != NULL && object != Py_None;
}

/* Other memory than a device's own may be filled by any. */
static cm_stream *
find_stream(const cm_buffer *self, PyObject *object)
{
    const cm_storage *storage = self->storage;
    object = object == NULL ? Py_None : object;
    return storage->residency == CM_KIND_DEVICE
               ? cm_stream_for_device(self->state, object, storage->device)
               : cm_stream_from_object(self->state, object, storage->device);
}

PyObject *
cm_fill_source(cm_state *state, PyObject *value, cm_stream *stream)
{
    if (PyLong_CheckExact(value) || PyFloat_CheckExact(value)
        || cm_buffer_check(state, value) || !cm_object_is_exporter(value)) {
        return Py_NewRef(value);
    }
    return cm_import_object(state, value, stream);
}

/* Device memory is copied in the order of `stream`, on a stream of its own device. */
static PyObject *
copy_to_host(cm_buffer *source, PyObject *dst, cm_stream *stream)
{
    cm_state *state = source->state;
    cm_stream *own =
        stream->device == source->storage->device
            ? cm_stream_take(state, stream)
            : cm_stream_from_object(state, Py_None, source->storage->device);
    if (own == NULL) {
        return NULL;
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_follow(own, stream);
    Py_END_ALLOW_THREADS
    PyObject *done =
        cm_is_ok(status)
            ? cm_copy_objects(state, dst, (PyObject *)source, own, true)
            : cm_py_raise(state, status, "while filling from device memory");
    cm_stream_give(state, own);
    return done;
}

/* The values of device memory as an array of their own dtype. */
static PyObject *
fetch(cm_buffer *source, cm_stream *stream)
{
    PyObject *array =
        cm_numpy_empty(source->dtype, source->ndim, cm_buffer_shape(source), 'C');
    if (array != NULL) {
        PyObject *done = copy_to_host(source, array, stream);
        if (done == NULL) {
            Py_CLEAR(array);
        }
        Py_XDECREF(done);
    }
    return array;
}

/* The values of a Buffer as an array of their own dtype; what is no Buffer as it is. */
static PyObject *
read_values(cm_state *state, PyObject *source, cm_stream *stream)
{
    if (!cm_buffer_check(state, source)) {
        return Py_NewRef(source);
    }
    return Py_TYPE(source) == state->device_buffer_type
               ? fetch((cm_buffer *)source, stream)
               : cm_buffer_numpy(source, NULL);
}

/* What to write, as a Buffer or an array of the dtype of `self`. Device memory stays
 * there unless its values must be converted. */
static PyObject *
fill_values(cm_buffer *self, PyObject *value, cm_stream *stream)
{
    PyObject *source = cm_fill_source(self->state, value, stream);
    if (source == NULL) {
        return NULL;
    }
    if (Py_TYPE(source) == self->state->device_buffer_type) {
        int same = cm_numpy_dtype_equal(((cm_buffer *)source)->dtype, self->dtype);
        if (same != 0) {
            if (same < 0) {
                Py_CLEAR(source);
            }
            return source;
        }
    }
    PyObject *values = read_values(self->state, source, stream);
    PyObject *array = values == NULL ? NULL : cm_numpy_as_value(values, self->dtype);
    Py_XDECREF(values);
    Py_DECREF(source);
    return array;
}

/* The dimensions of an array; 1 for a Buffer, which is copied whatever they are. */
static int
ndim_to_fill(PyObject *values)
{
    if (!cm_numpy_is_array(values)) {
        return 1;
    }
    PyObject *number = PyObject_GetAttrString(values, "ndim");
    long ndim = number == NULL ? -1 : PyLong_AsLong(number);
    Py_XDECREF(number);
    return (int)ndim;
}

static int
fill_from(cm_buffer *self, PyObject *values, PyObject *stream_object, cm_stream *stream)
{
    int ndim = ndim_to_fill(values);
    if (ndim < 0) {
        return -1;
    }
    if (ndim == 0) {
        return cm_buffer_nbytes(self) == 0
                   ? 0
                   : fill_element(self, values, stream, is_given(stream_object));
    }
    bool to_host =
        !cm_numpy_is_array(values) && self->storage->residency != CM_KIND_DEVICE;
    PyObject *done =
        to_host ? copy_to_host((cm_buffer *)values, (PyObject *)self, stream)
                : cm_copy_objects(self->state, (PyObject *)self, values, stream, true);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int
cm_buffer_fill_value(cm_buffer *self, PyObject *value, PyObject *stream_object)
{
    if (cm_buffer_check_open(self) < 0) {
        return -1;
    }
    if (self->readonly) {
        PyErr_SetString(PyExc_ValueError, "the buffer is read-only");
        return -1;
    }
    cm_stream *stream = find_stream(self, stream_object);
    if (stream == NULL) {
        return -1;
    }
    PyObject *values = fill_values(self, value, stream);
    int result = values == NULL ? -1 : fill_from(self, values, stream_object, stream);
    Py_XDECREF(values);
    cm_stream_give(self->state, stream);
    return result;
}

int
cm_buffer_zero(cm_buffer *self, PyObject *stream_object)
{
    cm_stream *stream = find_stream(self, stream_object);
    if (stream == NULL) {
        return -1;
    }
    int result = 0;
    if (cm_buffer_nbytes(self) > 0) {
        void *element = PyMem_Calloc(1, (size_t)self->itemsize);
        result = -1;
        if (element == NULL) {
            PyErr_NoMemory();
        }
        else {
            result = run_fill(self, element, stream, is_given(stream_object));
        }
        PyMem_Free(element);
    }
    cm_stream_give(self->state, stream);
    return result;
}

PyObject *
cm_buffer_fill(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    static const char *const names[] = {"value", "stream", NULL};
    PyObject *values[2];
    if (cm_args_parse("fill", args, nargs, kwnames, names, 1, 1, values) < 0
        || cm_buffer_fill_value((cm_buffer *)object, values[0], values[1]) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}
