/* SPDX-License-Identifier: Apache-2.0 */
/* The stream that is current in a context, and from any stream argument to its record.
 */
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/stream_convert.h"
#include "python/device/stream_type.h"

/* Borrowed: the Stream of the legacy default stream of `device`, made on first need. */
static PyObject *
legacy_stream(cm_state *state, int device)
{
    cm_runtime *rt = state->runtime;
    if (state->legacy_streams[device] == NULL) {
        rt = cm_state_runtime(state); /* may run Python code, which may make it */
        if (rt == NULL) {
            return NULL;
        }
    }
    if (state->legacy_streams[device] == NULL) {
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
    cm_stream *record = cm_stream_object_take(stream);
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

int
cm_stream_list_take(cm_state *state, PyObject *object, const char *argument, int device,
                    cm_stream_list *out)
{
    *out = (cm_stream_list){.count = 0};
    if (object == NULL || object == Py_None) {
        return 0;
    }
    bool many = PyTuple_Check(object) || PyList_Check(object);
    PyObject *items = many ? PySequence_Tuple(object) : PyTuple_Pack(1, object);
    Py_ssize_t count = items == NULL ? 0 : PyTuple_Size(items);
    out->streams =
        items == NULL ? NULL : PyMem_Calloc((size_t)count + 1, sizeof(cm_stream *));
    if (items != NULL && out->streams == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count && out->streams != NULL; i++) {
        PyObject *item = PyTuple_GetItem(items, i);
        cm_stream *stream =
            item == Py_None ? NULL
                            : cm_stream_from_argument(state, item, argument, device);
        if (stream == NULL) {
            if (item == Py_None) {
                (void)cm_arg_refuse(item, argument, "a stream or several");
            }
            break;
        }
        out->streams[out->count++] = stream;
    }
    Py_XDECREF(items);
    return PyErr_Occurred() ? -1 : 0;
}

void
cm_stream_list_give(cm_state *state, cm_stream_list *list)
{
    for (uint32_t i = 0; i < list->count; i++) {
        cm_stream_give(state, list->streams[i]);
    }
    PyMem_Free(list->streams);
    *list = (cm_stream_list){.count = 0};
}
