/* SPDX-License-Identifier: Apache-2.0 */
/* `__cuda_array_interface__` version 3 of mapped, managed and device buffers. */
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/core/errors.h"
#include "python/protocols/protocols.h"

/* True if a consumer may be given the handle of the stream. The handles of the default
 * streams are refused: JAX (0.11) takes the numbers 1 and 2 for "no stream" and reads
 * at once, and 2 means the default stream of whichever thread uses it. */
static bool
may_be_named(const cm_stream *stream)
{
    return stream->handle != 0 && stream->handle != CM_STREAM_LEGACY
           && stream->handle != CM_STREAM_PER_THREAD;
}

/* The first that may be named of the streams with work left, borrowed; NULL: none. */
static cm_stream *
find_named(const cm_pending *pending)
{
    for (uint32_t i = 0; i < pending->stream_count; i++) {
        if (may_be_named(pending->streams[i])) {
            return pending->streams[i];
        }
    }
    return NULL;
}

/* The stream that a consumer is to wait for: one that has work left; else the current
 * one, or else one of our own, and that one stands for the work from now on, so it must
 * outlive the consumer. Held; NULL with an exception. */
static cm_stream *
choose_stream(cm_storage *storage, const cm_pending *pending, cm_stream *current)
{
    cm_stream *found = find_named(pending);
    if (found != NULL) {
        return cm_stream_hold(found);
    }
    found = may_be_named(current) ? cm_stream_hold(current)
                                  : cm_joining_stream(storage->state, storage->device);
    if (found != NULL && cm_storage_add_lasting_use(storage, found) < 0) {
        cm_stream_release(found);
        return NULL;
    }
    return found;
}

/* The handle of a stream that comes after all the work that is left, or None where no
 * work is left, because consumers block on every import that names a stream. */
static PyObject *
join(cm_storage *storage, cm_pending *pending, cm_stream *current)
{
    cm_state *state = storage->state;
    cm_status status = CM_WITHOUT_GIL(cm_pending_prune(pending, -1, 0));
    storage->was_captured = storage->was_captured || pending->captured;
    if (cm_py_check(state, status, "while looking for pending work") < 0) {
        return NULL;
    }
    if (pending->stream_count == 0 && pending->ticket_count == 0) {
        return Py_NewRef(Py_None);
    }
    cm_stream *joined = choose_stream(storage, pending, current);
    if (joined == NULL) {
        return NULL;
    }
    status = CM_WITHOUT_GIL(cm_pending_order(pending, joined));
    PyObject *entry = NULL;
    if (cm_py_check(state, status, "while ordering pending work") == 0) {
        entry = PyLong_FromUnsignedLongLong(cm_stream_tell_handle(joined));
    }
    cm_stream_release(joined);
    return entry;
}

/* The handle of the stream that a consumer must wait for, or None. */
static PyObject *
stream_entry(cm_state *state, cm_storage *storage)
{
    if (storage->use_count == 0 && storage->writer_count == 0) {
        return Py_NewRef(Py_None);
    }
    cm_stream *current = cm_stream_from_object(state, Py_None, storage->device);
    cm_pending pending;
    if (current == NULL || cm_pending_take(storage, &pending) < 0) {
        cm_stream_give(state, current);
        return NULL;
    }
    PyObject *entry = join(storage, &pending, current);
    cm_pending_give(&pending);
    cm_stream_give(state, current);
    return entry;
}

PyObject *
cm_array_interface_dict(PyObject *self)
{
    cm_buffer *buffer = (cm_buffer *)(void *)self;
    unsigned long long address = cm_buffer_address(buffer);
    PyObject *dict = cm_package_call("interchange.array_interface", "describe",
                                     Py_BuildValue("(OK)", self, address));
    if (dict == NULL) {
        return NULL;
    }
    /* the consumer's work cannot be seen from here on */
    buffer->storage->was_exported = true;
    buffer->state->export_total++;
    buffer->storage->was_named = true;
    PyObject *stream = address == 0 ? Py_NewRef(Py_None)
                                    : stream_entry(buffer->state, buffer->storage);
    if (stream == NULL || PyDict_SetItemString(dict, "stream", stream) < 0
        || cm_buffer_note_side(buffer, true) < 0
        || cm_buffer_check_open(buffer) < 0) { /* freed while it was read */
        Py_CLEAR(dict);
    }
    Py_XDECREF(stream);
    return dict;
}

PyObject *
cm_buffer_array_interface(PyObject *self, void *closure)
{
    (void)closure;
    cm_buffer *buffer = (cm_buffer *)(void *)self;
    if (cm_buffer_check_open(buffer) < 0) {
        return NULL;
    }
    cm_runtime *rt = cm_state_runtime(buffer->state);
    if (rt == NULL) {
        return NULL;
    }
    if (rt->backend == CM_BACKEND_EMULATED) {
        PyErr_SetString(PyExc_AttributeError,
                        "__cuda_array_interface__: this buffer lives on the emulated "
                        "device, whose addresses no CUDA library can use");
        return NULL;
    }
    return cm_array_interface_dict(self);
}
