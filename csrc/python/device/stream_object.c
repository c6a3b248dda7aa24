/* SPDX-License-Identifier: Apache-2.0 */
/* A Stream as a C object: how it is made, lent to calls and closed. */
#include "python/core/errors.h"
#include "python/device/stream_type.h"

cm_stream *
cm_stream_take(cm_state *state, cm_stream *stream)
{
    cm_state_enter(state);
    return cm_stream_hold(stream);
}

/* The last release destroys a handle of ours, which takes the driver's locks. In a
 * forked child nothing may be called any more: the record leaks. */
void
cm_stream_give(cm_state *state, cm_stream *stream)
{
    if (stream == NULL) {
        return;
    }
    if (!cm_stream_try_release(stream) && !cm_runtime_is_forked(stream->rt)) {
        Py_BEGIN_ALLOW_THREADS
        cm_stream_release(stream);
        Py_END_ALLOW_THREADS
    }
    cm_state_leave(state);
}

PyObject *
cm_stream_object_new(cm_state *state, cm_stream *stream)
{
    PyObject *op = PyType_GenericAlloc(state->stream_type, 0);
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    if (self == NULL) {
        return NULL;
    }
    self->state = state;
    self->stream = cm_stream_hold(stream);
    cm_list_init(&self->node);
    cm_list_push_back(&state->streams, &self->node);
    self->id = stream->id;
    self->device = stream->device;
    self->generation = state->generation;
    return op;
}

void
cm_stream_object_close(cm_stream_object *self)
{
    cm_stream *stream = self->stream;
    if (stream != NULL) {
        self->stream = NULL;
        cm_list_remove(&self->node);
        cm_state_enter(self->state);
        cm_stream_give(self->state, stream);
    }
}

size_t
cm_streams_collect(cm_state *state, cm_stream **out)
{
    size_t count = 0;
    while (!cm_list_is_empty(&state->streams)) {
        cm_stream_object *self =
            CM_LIST_ENTRY(state->streams.next, cm_stream_object, node);
        out[count++] = self->stream;
        self->stream = NULL;
        cm_list_remove(&self->node);
    }
    return count;
}

/* As in CUDA the per-thread handle means the stream of the thread that uses it. */
static cm_stream *
take_own(cm_state *state, const cm_stream *others)
{
    cm_stream *stream;
    cm_status status =
        cm_stream_wrap(others->rt, others->device, others->handle, NULL, NULL, &stream);
    if (!cm_is_ok(status)) {
        (void)cm_py_raise(state, status, "looking up the thread's default stream");
        return NULL;
    }
    cm_state_enter(state); /* on loan */
    return stream;
}

cm_stream *
cm_stream_object_take(PyObject *op)
{
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    if (self->stream == NULL) {
        PyErr_SetString(PyExc_ValueError, "the stream is closed");
        return NULL;
    }
    if (cm_runtime_is_forked(self->stream->rt)) {
        cm_py_raise(self->state, cm_fail(CM_EFORKED, 0), NULL);
        return NULL;
    }
    if (!cm_stream_is_here(self->stream)) {
        return take_own(self->state, self->stream);
    }
    return cm_stream_take(self->state, self->stream);
}

PyObject *
cm_stream_object_give(PyObject *op, cm_stream *stream, cm_status status, int truth)
{
    cm_state *state = ((cm_stream_object *)(void *)op)->state;
    cm_stream_give(state, stream);
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, NULL);
    }
    PyObject *result = truth < 0 ? Py_None : truth ? Py_True : Py_False;
    Py_INCREF(result);
    return result;
}
