/* SPDX-License-Identifier: Apache-2.0 */
/* A copy between two objects. GIL held; what can wait releases it. */
#pragma once

#include "python/copy/call.h"

/* What is done with the request that a copy would be, instead of the copy. */
typedef PyObject *cm_copy_use(cm_state *state, const cm_copy_request *request);

/* How it is made; all of it borrowed. */
typedef struct cm_copy_how {
    cm_stream *stream; /* NULL: the current one of a blocking copy, else none: in the
                          background */
    bool blocking;
    PyObject *after; /* a stream that comes first as well, or a tuple or list of them;
                        NULL, None: none */
    cm_casting casting;
    const cm_progress *progress; /* of a blocking copy; NULL: nobody is told */
    PyObject *targets; /* of one in the background: a tuple of dst and more targets of
                          its shape (see cm_broadcast); NULL: dst alone */
    uint64_t before;   /* one of several that begin together: see cm_call; else 0 */
    uint64_t number;   /* of them all: see cm_call_join() */
    bool beside; /* on a stream of the engine's, for which the caller will make `stream`
                    wait */
    cm_copy_use *look; /* makes the answer; NULL: copy */
} cm_copy_how;

/* Checks shapes (broadcast of the source), dtypes (see cm_casting) and read-only
 * targets. A new Transfer, a list of one for each of `targets`, None when blocking. */
PyObject *cm_copy_objects(cm_state *state, PyObject *dst, PyObject *src,
                          cm_copy_how how);
