/* SPDX-License-Identifier: Apache-2.0 */
/* What streams ask of events. GIL held throughout. */
#ifndef CM_PYTHON_EVENT_TYPE_H
#define CM_PYTHON_EVENT_TYPE_H

#include "python/objects.h"

/* A new Event on `device` (trusted). NULL with CudaError. */
PyObject *cm_event_object_new(cm_state *state, int device, bool timing, bool blocking);
/* 0, or -1 with ValueError "the event is closed", CudaError in a forked child. */
int cm_event_check_open(const cm_event_object *event);
/* Around a call with the GIL released: close() then waits for the give before it
 * destroys the handle. */
void cm_event_take(cm_event_object *event);
void cm_event_give(cm_event_object *event);
/* Move the event to the end of `stream` (borrowed). 0, or -1 with ValueError,
 * CudaError. */
int cm_event_record(cm_event_object *event, const cm_stream *stream);

#endif
