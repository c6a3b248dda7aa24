/* SPDX-License-Identifier: Apache-2.0 */
/* Which stream an argument means: the current one of the context, one of ours, or a
 * foreign object that is read by its protocol. GIL held throughout. */
#ifndef CM_PYTHON_DEVICE_STREAM_CONVERT_H
#define CM_PYTHON_DEVICE_STREAM_CONVERT_H

#include "python/device/objects.h"

/* A record, on loan, of a foreign stream: an int, or an object with
 * __cuda_stream__, .cuda_stream, .ptr or .handle, which the record then keeps alive.
 * `device` (-1: cumem's current one) counts only where neither the object nor the
 * driver says it; errors call it `argument`. NULL with TypeError, ValueError or
 * CudaError. */
cm_stream *cm_stream_from_foreign(cm_state *state, PyObject *object,
                                  const char *argument, int device);

/* cm_stream_from_object() where the argument is not called `stream`. */
cm_stream *cm_stream_from_argument(cm_state *state, PyObject *object,
                                   const char *argument, int device);

/* Queue on `stream` a wait for an Event, a Transfer or a stream object. Blocks (GIL
 * released) only for a transfer. 0, or -1 with an exception. */
int cm_stream_wait_object(cm_state *state, cm_stream *stream, PyObject *other);

#endif
