/* SPDX-License-Identifier: Apache-2.0 */
/* fill(): one element into all of a buffer, by memset where the device can. */
#include "python/arguments.h"
#include "python/buffer_methods.h"
#include "python/buffer_object.h"
#include "python/errors.h"
#include "python/order.h"
#include "python/protocols.h"

const char cm_buffer_fill_doc[] =
    "fill($self, /, value, *, stream=None)\n"
    "--\n"
    "\n"
    "Set every element.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "value : array_like\n"
    "    A scalar, converted to the dtype as NumPy does, or an array that broadcasts "
    "to\n"
    "    the shape.\n"
    "stream : Stream or other stream object, optional\n"
    "    Default: the current stream.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError\n"
    "    The buffer is read-only or closed, `value` does not broadcast, or `stream` "
    "is\n"
    "    of another device than the device memory to fill.\n"
    "TypeError, OverflowError\n"
    "    `value` cannot be converted to the dtype.\n"
    "CudaError\n"
    "    The fill failed.\n"
    "\n"
    "Notes\n"
    "-----\n"
    "Blocks: until unfinished background transfers of the memory are done, then, for\n"
    "memory the host can read, until it is filled (GIL released). Device memory of a "
    "pool,\n"
    "and with `stream` also mapped and managed memory, is filled later, by the device "
    "on "
    "the\n"
    "stream; `numpy` and other reads by way of the buffer wait for that. Without "
    "`stream`\n"
    "managed memory is filled by the device that it was prefetched to, else by the "
    "host.\n"
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
    cm_storage_pin(storage);
    Py_BEGIN_ALLOW_THREADS
    status = cm_engine_fill(engine, &region, element, stream, before.streams,
                            before.stream_count, blocking, &info);
    Py_END_ALLOW_THREADS
    cm_storage_unpin(storage);
    cm_pending_give(&before);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(self->state, status, "while filling a buffer");
    }
    if (info.captured) {
        storage->was_captured = true; /* and nothing is written before the graph runs */
    }
    else if (!blocking && !is_unseen(storage)) {
        cm_storage_set_late(storage);
    }
    return 0;
}

/* With a stream that was `named` return when it is queued, else when it is filled,
 * unless nobody can tell. */
static int
run_fill(cm_buffer *self, const void *element, cm_stream *stream, bool named)
{
    cm_storage *storage = self->storage;
    if (cm_storage_wait_writers(storage) < 0 || cm_buffer_check_open(self) < 0) {
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
    int result = -1;
    PyObject *array = cm_numpy_as_value(value, self->dtype);
    Py_ssize_t ndim = -1;
    if (array != NULL) {
        PyObject *number = PyObject_GetAttrString(array, "ndim");
        ndim = number == NULL ? -1 : PyLong_AsSsize_t(number);
        Py_XDECREF(number);
    }
    if (ndim == 0) {
        result = cm_buffer_nbytes(self) == 0
                     ? 0
                     : fill_element(self, array, stream, is_given(stream_object));
    }
    else if (ndim > 0) {
        PyObject *done =
            cm_copy_objects(self->state, (PyObject *)self, array, stream, true);
        result = done == NULL ? -1 : 0;
        Py_XDECREF(done);
    }
    Py_XDECREF(array);
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
