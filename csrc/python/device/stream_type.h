/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of Stream share. GIL held throughout. */
#ifndef CM_PYTHON_DEVICE_STREAM_TYPE_H
#define CM_PYTHON_DEVICE_STREAM_TYPE_H

#include "python/device/objects.h"

extern PyMethodDef cm_stream_methods[];

/* Its record, on loan: another thread may close the Stream while the GIL is released.
 * NULL with ValueError, or RuntimeError in a forked child. */
cm_stream *cm_stream_object_take(PyObject *op);
/* Give it back and answer `truth`: None for -1, else a bool; NULL with the failure. */
PyObject *cm_stream_object_give(PyObject *op, cm_stream *stream, cm_status status,
                                int truth);
/* Let go of the record; nothing is done where it is closed. */
void cm_stream_object_close(cm_stream_object *self);
/* Close every open Stream, for shutdown: their records, to be released, move to `out`,
 * which has room. Returns how many. */
size_t cm_streams_collect(cm_state *state, cm_stream **out);

#endif
