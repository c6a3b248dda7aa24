/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a copy between two objects. The GIL is held; whatever can wait releases it. */
#pragma once

#include "python/copy/call.h"

/* Makes the answer of a call that does not make its copy but only describes it, as
 * explain() does. The function reads the request of the copy. Returns NULL with an
 * exception if it fails. */
typedef PyObject *cm_request_reader(cm_state *state, const cm_copy_request *request);

/* How a copy is made. All of it is borrowed. */
typedef struct cm_copy_how {
    /* The copy is in the order of this stream. If it is NULL, a blocking copy takes the
     * current stream, and any other copy is made in the background. */
    cm_stream *stream;
    bool blocking;
    PyObject *after; /* a stream that must come first, or a tuple or list of streams;
                        NULL or None if there is none */
    cm_casting casting;
    const cm_progress *progress; /* for a blocking copy; NULL if there is no
                                    progress= */
    PyObject *targets; /* for a copy in the background: a tuple of dst and of further
                          targets of its shape (see cm_broadcast); NULL if dst is the
                          only target */
    uint64_t before; /* for one of several copies that begin together (see cm_call), or
                        else 0 */
    uint64_t number; /* the number of such a group of copies (see cm_call_join()), or
                        else 0 */
    bool on_engine_stream; /* the copy runs on a stream of the engine's; the caller will
                    make `stream` wait for it */
    const char *prefix; /* the text with which errors about the two ends begin; if the
                           copy is a part of another call, such as fill(), it is "fill:
                           "; NULL stands for "copy: " */
    /* Makes the answer in place of the copy. NULL if the copy is to be made. */
    cm_request_reader *explain;
} cm_copy_how;

/* Copy `src` to `dst`. Shapes (the source is broadcast), dtypes (see cm_casting) and
 * read-only targets are checked first. Returns None if the copy is blocking, and
 * otherwise a new Transfer or, with `targets`, a list with a Transfer for each of them.
 * Returns NULL with an exception if it fails. */
PyObject *cm_copy_objects(cm_state *state, PyObject *dst, PyObject *src,
                          cm_copy_how how);
