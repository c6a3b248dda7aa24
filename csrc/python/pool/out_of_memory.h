/* SPDX-License-Identifier: Apache-2.0 */
/* Memory from a pool that has nothing ready: waiting for it, asking others to give up
 * theirs, and the error that explains why there is none. GIL held, released for
 * whatever waits. */
#ifndef CM_PYTHON_POOL_OUT_OF_MEMORY_H
#define CM_PYTHON_POOL_OUT_OF_MEMORY_H

#include "python/pool/pool_object.h"

/* A block as cm_pool_alloc() gives it. When there is not enough: trims the other pools
 * of the same memory, calls the callbacks in order, collects garbage, and tries again
 * after each. NULL with an exception: OutOfMemoryError with all it knows, or what a
 * callback raised that is no Exception. */
cm_block *cm_block_alloc(cm_state *state, cm_pool *pool, uint64_t nbytes,
                         cm_stream *stream);

/* The same for memory that a copy needs in passing: the engine's cm_relief, of which
 * the argument is the state. Called without the GIL by a thread that has let go of it.
 * CM_ECANCELLED with an exception set: of a callback or a signal's handler. */
cm_status cm_shortage_relieve(void *state, cm_pool *pool, uint64_t nbytes,
                              cm_stream *stream, cm_status status, cm_block **out);

/* What an OutOfMemoryError tells. */
typedef struct cm_shortage {
    cm_pool *pool; /* borrowed */
    uint64_t nbytes;
    cm_status status; /* the last answer */
    PyObject *tried;  /* borrowed: list of str */
} cm_shortage;

/* Raise it. */
void cm_shortage_raise(cm_state *state, const cm_shortage *shortage);

#endif
