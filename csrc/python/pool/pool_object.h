/* SPDX-License-Identifier: Apache-2.0 */
/* A Pool as a C object, and all pools there are. GIL held throughout. */
#pragma once

#include "python/device/objects.h"

typedef struct cm_pool_object {
    PyObject_HEAD
    cm_state *state;
    cm_pool *pool;         /* held; NULL after close() or shutdown() */
    cm_list node;          /* in state->pool_objects while open */
    cm_pool_config config; /* what is told after close() too; its budget is not used */
    uint64_t generation;
    PyObject *weakrefs;
} cm_pool_object;

extern PyMethodDef cm_pool_methods[]; /* default_pool and what the package calls */
extern PyMethodDef cm_numpy_memory_methods[]; /* numpy_memory.c's, for the package */

int cm_register_pool_type(PyObject *module, cm_state *state);

/* A new Pool around `pool`, which it holds. NULL with an exception. */
PyObject *cm_pool_object_new(cm_state *state, cm_pool *pool);
/* Its pool, held on loan while the GIL may be released; NULL with ValueError. */
cm_pool *cm_pool_object_take(PyObject *op);
void cm_pool_object_give(PyObject *op, cm_pool *pool); /* NULL: does nothing */
/* Release a pool. The last release frees what is cached and waits, GIL released, for
 * what is in flight; in a forked child it does nothing. */
void cm_pool_let_go(cm_state *state, cm_pool *pool);
/* Let go of the pool; nothing is done where it is closed. */
void cm_pool_object_close(cm_pool_object *self);
/* Close every open Pool, for shutdown: what they held moves to `out`, which has room.
 * Returns how many. */
size_t cm_pool_objects_collect(cm_state *state, cm_pool **out);

/* An argument: NULL or None gives NULL, anything but a Pool TypeError. 0 or -1. */
int cm_arg_pool(const cm_state *state, PyObject *object, cm_pool_object **out);

/* What a request of kind, flags and device is served from, held: `wanted` (may be
 * NULL), else the pool that is current in this context, else the default one. `flags`
 * that are not the kind's usual ones are only served by pools that have them. NULL with
 * an exception. */
cm_pool *cm_pool_choose(cm_state *state, cm_pool_object *wanted, cm_kind kind,
                        unsigned flags, int device);
/* The innermost pool of this context that serves such a request, held; those that were
 * closed are passed over. NULL without an exception: there is none. May run Python. */
cm_pool *cm_pool_find_current(cm_state *state, cm_kind kind, unsigned flags,
                              int device);

/* cm_pools_trim(); with `wait` for work on freed memory first. 0, or -1 with the
 * exception of a signal's handler. */
int cm_state_trim(cm_state *state, cm_trim_request *r, bool wait);

/* Open all pools' memory to the devices that have got a context. Keeps no exception: a
 * failure goes to the unraisable hook. */
void cm_pools_admit_peers(cm_state *state);
