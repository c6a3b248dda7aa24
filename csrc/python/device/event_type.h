/* SPDX-License-Identifier: Apache-2.0 */
/* What streams ask of events. GIL held throughout. */
#ifndef CM_PYTHON_DEVICE_EVENT_TYPE_H
#define CM_PYTHON_DEVICE_EVENT_TYPE_H

#include "python/device/objects.h"

/* What an Event had. */
typedef struct cm_detached_event {
    cm_runtime *rt; /* borrowed */
    uint64_t handle;
    int device;
} cm_detached_event;

/* A new Event on `device` (trusted). NULL with CudaError. */
PyObject *cm_event_object_new(cm_state *state, int device, bool timing, bool blocking);
/* 0, or -1 with ValueError "the event is closed", CudaError in a forked child. */
int cm_event_check_open(const cm_event_object *event);
/* Around a call with the GIL released: close() then leaves the handle to the give, and
 * shutdown() is refused. */
void cm_event_take(cm_event_object *event);
void cm_event_give(cm_event_object *event);
/* Move the event to the end of `stream` (borrowed). 0, or -1 with ValueError,
 * CudaError. */
int cm_event_record(cm_event_object *event, const cm_stream *stream);
/* Destroy the handle, or let the last give do so; work that waits for it still does.
 * Does nothing where it is closed. The GIL may be released. */
CM_NODISCARD cm_status cm_event_object_close(cm_event_object *self);
/* Close every open Event, for shutdown: what they had moves to `out`, which has room.
 * Returns how many. */
size_t cm_events_collect(cm_state *state, cm_detached_event *out);
/* Any thread. In a forked child it leaks. Fails: event_destroy, cm_device_enter. */
CM_NODISCARD cm_status cm_detached_event_free(const cm_detached_event *detached);

#endif
