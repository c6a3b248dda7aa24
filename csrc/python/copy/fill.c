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

/* Memory that only devices see, and that stays until its streams are done with it:
 * nobody can look too early, so the fill need not be waited for. */
static bool
is_unseen(const cm_storage *storage)
{
    return storage->pool != NULL && cm_kind_is_on_device(storage->residency);
}

/* The device whose work the fill is; -1: the host's. Memory that both reach is the
 * stream's where one was `named`, else it is filled where it is. -2 with an exception.
 */
static int
choose_filler(cm_buffer *self, const cm_stream *stream, bool named)
{
    const cm_storage *storage = self->storage;
    bool on_device = cm_kind_is_on_device(storage->residency);
    bool managed = cm_kind_migrates(storage->residency);
    if ((!on_device && !cm_kind_is_shared(storage->residency))
        || (managed && storage->flags == CM_MANAGED_HOST)) { /* attached: no device */
        return -1;
    }
    if (managed && named) {
        return stream->device;
    }
    if (on_device || named) {
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
            storage->late_count++;
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

/* Other memory than a device's own may be filled by any. */
static cm_stream *
find_stream(const cm_buffer *self, PyObject *object)
{
    const cm_storage *storage = self->storage;
    object = object == NULL ? Py_None : object;
    return cm_kind_is_on_device(storage->residency)
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
    return cm_import_object(state, value, stream, 0);
}

static bool
is_device_buffer(const cm_state *state, PyObject *object)
{
    return cm_buffer_check(state, object)
           && cm_kind_is_on_device(cm_buffer_kind((const cm_buffer *)object));
}

/* Device memory is copied in the order of `stream`, on a stream of its own device. */
static int
copy_to_host(cm_buffer *source, PyObject *dst, cm_stream *stream)
{
    cm_stream_list after = {&stream, 1};
    bool is_own = stream->device == source->storage->device;
    cm_copy_how how = {is_own ? stream : NULL, .blocking = true, .after = &after};
    PyObject *done = cm_copy_objects(source->state, dst, (PyObject *)source, how);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* The values of device memory as an array of their own dtype. */
static PyObject *
fetch(cm_buffer *source, cm_stream *stream)
{
    PyObject *array =
        cm_numpy_empty(source->dtype, source->ndim, cm_buffer_shape(source), 'C');
    if (array != NULL && copy_to_host(source, array, stream) < 0) {
        Py_CLEAR(array);
    }
    return array;
}

/* The values of a Buffer as an array of their own dtype; what is no Buffer as it is. */
static PyObject *
read_values(cm_state *state, PyObject *source, cm_stream *stream)
{
    return is_device_buffer(state, source)  ? fetch((cm_buffer *)source, stream)
           : cm_buffer_check(state, source) ? cm_buffer_numpy(source, NULL)
                                            : Py_NewRef(source);
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
    if (is_device_buffer(self->state, source)) {
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

/* From a Buffer, or an array of the buffer's dtype. */
static int
fill_from(cm_buffer *self, PyObject *values, bool named, cm_stream *stream)
{
    cm_region element;
    PyObject *dtype;
    bool readonly;
    bool is_array = cm_numpy_is_array(values);
    if (!is_array && !cm_kind_is_on_device(self->storage->residency)) {
        return copy_to_host((cm_buffer *)values, (PyObject *)self, stream);
    }
    if (is_array) {
        if (cm_numpy_region(values, &element, &dtype, &readonly) < 0) {
            return -1;
        }
        Py_DECREF(dtype);
        if (element.ndim == 0) {
            return cm_buffer_nbytes(self) == 0
                       ? 0
                       : run_fill(self, element.host, stream, named);
        }
    }
    return cm_copy_now(self->state, (PyObject *)self, values, stream);
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
    int result = values == NULL
                     ? -1
                     : fill_from(self, values, cm_arg_is_given(stream_object), stream);
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
            result = run_fill(self, element, stream, cm_arg_is_given(stream_object));
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
