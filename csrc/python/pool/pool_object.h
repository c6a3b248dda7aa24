/* SPDX-License-Identifier: Apache-2.0 */
/* Pools as C objects, and the list of all of them. The GIL is held throughout. */
#pragma once

#include "python/device/objects.h"

typedef struct cm_pool_object {
    PyObject_HEAD
    cm_state *state;
    cm_pool *pool; /* held; NULL after close() or shutdown() */
    cm_list node;  /* in state->pool_objects while open */
    /* What a Pool shows even after close(); its budget is not used. */
    cm_pool_config config;
    uint64_t generation;
    PyObject *weakrefs;
} cm_pool_object;

extern PyMethodDef cm_pool_methods[]; /* the Python functions about pools */
/* Those of numpy_memory.c, for the package. */
extern PyMethodDef cm_numpy_memory_methods[];

int cm_register_pool_type(PyObject *module, cm_state *state);

/* A new Pool around `pool`, which it holds. NULL with an exception. */
PyObject *cm_pool_object_new(cm_state *state, cm_pool *pool);
/* The pool of a Pool, held on loan while the GIL may be released; NULL with
 * ValueError. */
cm_pool *cm_pool_object_take(PyObject *op);
void cm_pool_object_give(PyObject *op, cm_pool *pool); /* does nothing for NULL */
/* Release a pool. The last release frees what is cached and waits, with the GIL
 * released, for what is in flight. In a forked child it does nothing. */
void cm_pool_let_go(cm_state *state, cm_pool *pool);
/* Release the pool of a Pool. Nothing is done if it is closed. */
void cm_pool_object_close(cm_pool_object *self);
/* Close every open Pool, for shutdown. What they held moves to `out`, which has room.
 * Returns how many there were. */
size_t cm_pool_objects_collect(cm_state *state, cm_pool **out);

/* Read an argument that is a Pool: NULL and None give NULL, and anything but a Pool is
 * a TypeError. 0 or -1. */
int cm_arg_pool(const cm_state *state, PyObject *object, cm_pool_object **out);

/* Choose the pool that serves a request of this kind, flags and device: `wanted` (may
 * be NULL), or else the pool that is current in this context, or else the default one.
 * `flags` that are not the kind's usual ones are served only by pools that have them.
 * Held; NULL with an exception. */
cm_pool *cm_pool_choose(cm_state *state, cm_pool_object *wanted, cm_kind kind,
                        unsigned flags, int device);
/* The innermost pool of this context that serves such a request, held; pools that were
 * closed are passed over. NULL without an exception: there is none. May run Python
 * code. */
cm_pool *cm_pool_find_current(cm_state *state, cm_kind kind, unsigned flags,
                              int device);

/* The Python function _is_memory_in_flight(device, nbytes). */
PyObject *cm_is_memory_in_flight(PyObject *module, PyObject *args);

/* Call cm_pools_trim(); with `wait`, after waiting for work on freed memory. Returns 0,
 * or -1 with the exception of a signal handler. */
int cm_state_trim(cm_state *state, cm_trim_request *r, bool wait);

/* Open the memory of all pools to the devices that have got a context. Sets no
 * exception: a failure goes to the unraisable hook. */
void cm_pools_admit_peers(cm_state *state);
