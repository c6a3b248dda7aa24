/* SPDX-License-Identifier: Apache-2.0 */
/* An Event as a C object: how it is made, recorded, lent to calls and closed. */
#include "python/core/errors.h"
#include "python/device/event_type.h"

static cm_status
create(cm_runtime *rt, int device, unsigned flags, uint64_t *handle)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, device, &guard));
    cm_status status = cm_rt_event_create(rt, flags, handle);
    cm_device_leave(rt, &guard);
    return status;
}

PyObject *
cm_event_object_new(cm_state *state, int device, bool timing, bool blocking)
{
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return NULL;
    }
    PyObject *op = PyType_GenericAlloc(state->event_type, 0);
    if (op == NULL) {
        return NULL;
    }
    cm_event_object *self = (cm_event_object *)(void *)op;
    self->state = state;
    self->device = device;
    self->timing = timing;
    self->blocking = blocking;
    cm_list_init(&self->node);
    unsigned flags = (timing ? 0u : CM_EVENT_DISABLE_TIMING)
                     | (blocking ? CM_EVENT_BLOCKING_SYNC : 0u);
    cm_status status;
    cm_state_enter(state);
    Py_BEGIN_ALLOW_THREADS
    status = create(rt, device, flags, &self->handle);
    Py_END_ALLOW_THREADS
    cm_state_leave(state);
    if (!cm_is_ok(status)) {
        Py_DECREF(op);
        return cm_py_raise(state, status, "making an event");
    }
    self->rt = rt;
    cm_list_push_back(&state->events, &self->node);
    return op;
}

static cm_detached_event
detach(cm_event_object *self)
{
    cm_detached_event detached = {self->rt, self->handle, self->device};
    self->rt = NULL;
    cm_list_remove(&self->node);
    return detached;
}

cm_status
cm_detached_event_free(const cm_detached_event *detached)
{
    cm_device_guard guard;
    if (cm_runtime_is_forked(detached->rt)) {
        return cm_ok();
    }
    CM_TRY(cm_device_enter(detached->rt, detached->device, &guard));
    cm_status status = cm_rt_event_destroy(detached->rt, detached->handle);
    cm_device_leave(detached->rt, &guard);
    return status;
}

cm_status
cm_event_object_close(cm_event_object *self)
{
    if (self->rt == NULL) {
        return cm_ok();
    }
    if (self->users > 0) {
        self->closing = true;
        return cm_ok();
    }
    cm_detached_event detached = detach(self);
    cm_status status;
    cm_state_enter(self->state);
    Py_BEGIN_ALLOW_THREADS
    status = cm_detached_event_free(&detached);
    Py_END_ALLOW_THREADS
    cm_state_leave(self->state);
    return status;
}

size_t
cm_events_collect(cm_state *state, cm_detached_event *out)
{
    size_t count = 0;
    while (!cm_list_is_empty(&state->events)) {
        out[count++] = detach(CM_LIST_ENTRY(state->events.next, cm_event_object, node));
    }
    return count;
}

int
cm_event_check_open(const cm_event_object *event)
{
    if (event->rt == NULL || event->closing) {
        PyErr_SetString(PyExc_ValueError, "the event is closed");
        return -1;
    }
    if (cm_runtime_is_forked(event->rt)) {
        return cm_py_raise_int(event->state, cm_fail(CM_EFORKED, 0), NULL);
    }
    return 0;
}

void
cm_event_take(cm_event_object *event)
{
    cm_state_enter(event->state);
    event->users++;
}

void
cm_event_give(cm_event_object *event)
{
    event->users--;
    if (event->closing && event->users == 0) {
        /* close() came while the call was under way */
        cm_py_report(event->state, cm_event_object_close(event), (PyObject *)event);
    }
    cm_state_leave(event->state);
}

int
cm_event_record(cm_event_object *event, const cm_stream *stream)
{
    if (cm_event_check_open(event) < 0) {
        return -1;
    }
    if (event->device != stream->device) {
        PyErr_Format(PyExc_ValueError,
                     "the event belongs to device %d, the stream to device %d",
                     event->device, stream->device);
        return -1;
    }
    cm_status status;
    cm_event_take(event);
    Py_BEGIN_ALLOW_THREADS
    cm_device_guard guard;
    status = cm_device_enter(event->rt, event->device, &guard);
    if (cm_is_ok(status)) {
        status = cm_rt_event_record(event->rt, event->handle, stream->handle);
        cm_device_leave(event->rt, &guard);
    }
    Py_END_ALLOW_THREADS
    cm_event_give(event);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(event->state, status, NULL);
    }
    event->recorded = true;
    return 0;
}
