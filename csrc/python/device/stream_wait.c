/* SPDX-License-Identifier: Apache-2.0 */
/* Let a stream wait for an event, a transfer or another stream. */
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/event_type.h"
#include "python/device/stream_convert.h"
#include "python/device/transfer_type.h"

static int
wait_event_object(cm_state *state, cm_stream *stream, cm_event_object *event)
{
    if (cm_event_check_open(event) < 0) {
        return -1;
    }
    cm_status status;
    cm_event_take(event);
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_wait_event(stream, event->handle);
    Py_END_ALLOW_THREADS
    cm_event_give(event);
    return cm_is_ok(status) ? 0 : cm_py_raise_int(state, status, NULL);
}

int
cm_stream_wait_object(cm_state *state, cm_stream *stream, PyObject *other)
{
    if (Py_TYPE(other) == state->event_type) {
        return wait_event_object(state, stream, (cm_event_object *)(void *)other);
    }
    if (Py_TYPE(other) == state->transfer_type) {
        return cm_transfer_order((cm_transfer_object *)(void *)other, stream);
    }
    if (other == Py_None) {
        return cm_arg_refuse(other, "other", "an Event, a Transfer or a stream");
    }
    cm_stream *before = cm_stream_from_argument(state, other, "other", stream->device);
    if (before == NULL) {
        return -1;
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_follow(stream, before);
    Py_END_ALLOW_THREADS
    cm_stream_give(state, before);
    return cm_is_ok(status) ? 0 : cm_py_raise_int(state, status, NULL);
}
