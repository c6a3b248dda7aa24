/* SPDX-License-Identifier: Apache-2.0 */
/* The stream that is current in a context, and from any stream argument to its record.
 */
#include "python/errors.h"
#include "python/stream_convert.h"

/* Borrowed: the Stream of the legacy default stream of `device`, made on first need. */
static PyObject *
legacy_stream(cm_state *state, int device)
{
    if (state->legacy_streams[device] == NULL) {
        cm_runtime *rt = cm_state_runtime(state);
        if (rt == NULL) {
            return NULL;
        }
        cm_stream *record;
        cm_status status =
            cm_stream_wrap(rt, device, CM_STREAM_LEGACY, NULL, NULL, &record);
        if (!cm_is_ok(status)) {
            return cm_py_raise(state, status, "looking up the default stream");
        }
        PyObject *object = cm_stream_object_new(state, record);
        if (object == NULL) {
            cm_stream_release(record);
            return NULL;
        }
        state->legacy_streams[device] = object;
        state->default_streams[device] = record;
    }
    return state->legacy_streams[device];
}

/* Borrowed from `chain`: its innermost stream of `device`; NULL if there is none.
 * Streams that a shutdown closed are passed over: the next use starts afresh. */
static PyObject *
find_in_chain(const cm_state *state, PyObject *chain, int device)
{
    PyObject *entry;
    while ((entry = cm_override_step(&chain)) != NULL) {
        const cm_stream_object *stream = (const cm_stream_object *)(void *)entry;
        if (stream->device == device && stream->generation == state->generation) {
            return entry;
        }
    }
    return NULL;
}

PyObject *
cm_current_stream(cm_state *state, int device)
{
    if (device < 0) {
        device = state->current_device;
    }
    PyObject *found = NULL;
    if (!cm_override_is_empty(&state->current_stream)) {
        PyObject *chain = cm_override_read(&state->current_stream);
        if (chain == NULL) {
            return NULL;
        }
        found = find_in_chain(state, chain, device);
        Py_XINCREF(found);
        Py_DECREF(chain);
    }
    if (found == NULL) {
        found = legacy_stream(state, device);
        Py_XINCREF(found);
    }
    return found;
}

cm_stream *
cm_stream_from_argument(cm_state *state, PyObject *object, const char *argument,
                        int device)
{
    PyObject *stream;
    if (object == NULL || object == Py_None) {
        stream = cm_current_stream(state, device);
        if (stream == NULL) {
            return NULL;
        }
    }
    else if (Py_TYPE(object) == state->stream_type) {
        stream = object;
        Py_INCREF(stream);
    }
    else {
        return cm_stream_from_foreign(state, object, argument, device);
    }
    cm_stream *record = ((cm_stream_object *)(void *)stream)->stream;
    if (record == NULL) {
        PyErr_SetString(PyExc_ValueError, "the stream is closed");
    }
    else {
        record = cm_stream_take(state, record);
    }
    Py_DECREF(stream);
    return record;
}

cm_stream *
cm_stream_from_object(cm_state *state, PyObject *object, int device)
{
    return cm_stream_from_argument(state, object, "stream", device);
}

cm_stream *
cm_stream_for_device(cm_state *state, PyObject *object, int device)
{
    cm_stream *stream = cm_stream_from_object(state, object, device);
    if (stream != NULL && stream->device != device) {
        PyErr_Format(PyExc_ValueError,
                     "stream is of device %d, but the memory is of device %d: pass a "
                     "stream of device %d",
                     stream->device, device, device);
        cm_stream_give(state, stream);
        return NULL;
    }
    return stream;
}
