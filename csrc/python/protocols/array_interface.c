/* SPDX-License-Identifier: Apache-2.0 */
/* `__cuda_array_interface__` version 3 of mapped, managed and device buffers. */
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/core/errors.h"
#include "python/protocols/protocols.h"

/* Bring all that is left onto one stream: a single one is that stream, else the first
 * of them (the current one when only background transfers are left) waits for the
 * others. *joined is held, or NULL where nothing is left: consumers block on every
 * import that names a stream. */
static cm_status
join(cm_pending *pending, cm_stream *current, cm_stream **joined)
{
    *joined = NULL;
    CM_TRY(cm_pending_prune(pending, -1, 0));
    if (pending->stream_count == 0 && pending->ticket_count == 0) {
        return cm_ok();
    }
    cm_stream *stream = pending->stream_count > 0 ? pending->streams[0] : current;
    CM_TRY(cm_pending_order(pending, stream));
    *joined = cm_stream_hold(stream);
    return cm_ok();
}

/* The handle of the stream that a consumer must wait for, or None. */
static PyObject *
stream_entry(cm_state *state, cm_storage *storage)
{
    if (storage->use_count == 0 && storage->writer_count == 0) {
        return Py_NewRef(Py_None);
    }
    cm_stream *current = cm_stream_from_object(state, Py_None, storage->device);
    cm_stream *joined;
    cm_pending pending;
    if (current == NULL || cm_pending_take(storage, &pending) < 0) {
        cm_stream_give(state, current);
        return NULL;
    }
    cm_status status = CM_WITHOUT_GIL(join(&pending, current, &joined));
    storage->was_captured = storage->was_captured || pending.captured;
    cm_pending_give(&pending);
    int result = cm_py_check(state, status, "while ordering pending work");
    if (joined == current) {
        /* it stands for the transfers from now on, and must outlive the consumer */
        result = cm_storage_add_lasting_use(storage, current);
    }
    PyObject *entry = result == 0 && joined == NULL ? Py_NewRef(Py_None) : NULL;
    if (result == 0 && joined != NULL) {
        /* 0 is forbidden in the interface: the legacy default stream is written as 1 */
        uint64_t handle = cm_stream_tell_handle(joined);
        handle = handle == 0 ? CM_STREAM_LEGACY : handle;
        entry = PyLong_FromUnsignedLongLong(handle);
    }
    if (joined != NULL) {
        cm_stream_release(joined);
    }
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
