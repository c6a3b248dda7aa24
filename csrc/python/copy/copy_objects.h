/* SPDX-License-Identifier: Apache-2.0 */
/* A copy between two objects. GIL held; what can wait releases it. */
#ifndef CM_PYTHON_COPY_COPY_OBJECTS_H
#define CM_PYTHON_COPY_COPY_OBJECTS_H

#include "python/core/progress.h"
#include "python/protocols/protocols.h"

/* Have `use` look at the request that a copy would be; its result. Nothing is copied.
 */
typedef PyObject *cm_copy_use(cm_state *state, const cm_copy_request *request);
PyObject *cm_copy_look(cm_state *state, PyObject *dst, PyObject *src, cm_stream *stream,
                       bool blocking, cm_copy_use *use);

/* A copy between two objects, used by copy(), copy_async(), buf[...] = x and fill().
 * Checks shapes (broadcast of the source), dtypes and read-only targets. Returns a new
 * Transfer, or None when `blocking`. stream NULL: in the background (async only; a
 * blocking copy then uses the current stream). */
PyObject *cm_copy_objects(cm_state *state, PyObject *dst, PyObject *src,
                          cm_stream *stream, bool blocking);
/* copy_async() that comes after other streams as well. */
PyObject *cm_copy_async_after(cm_state *state, PyObject *dst, PyObject *src,
                              cm_stream *stream, const cm_stream_list *after);

/* cm_copy_objects, blocking, with somebody to tell. */
PyObject *cm_copy_and_tell(cm_state *state, PyObject *dst, PyObject *src,
                           cm_stream *stream, const cm_progress *progress);

#endif
