/* SPDX-License-Identifier: Apache-2.0 */
/* This header has Pools as C objects, and the list of all Pools. The GIL is held
 * throughout. */
#pragma once

#include "python/device/objects.h"

typedef struct cm_pool_object {
    PyObject_HEAD
    cm_state *state;
    cm_pool *pool; /* held; NULL after close() or shutdown() */
    cm_list node;  /* in state->pool_objects while open */
    /* The config that a Pool shows even after close(). Its budget is not used. */
    cm_pool_config config;
    uint64_t generation;
    PyObject *weakrefs;
} cm_pool_object;

extern PyMethodDef cm_pool_methods[]; /* the Python functions about pools */
/* Functions of numpy_memory.c for the package. */
extern PyMethodDef cm_numpy_memory_methods[];

int cm_register_pool_type(PyObject *module, cm_state *state);

/* Make a Pool around `pool`, which it holds. Returns NULL with an exception if it
 * fails. */
PyObject *cm_pool_object_new(cm_state *state, cm_pool *pool);
/* Take the pool of a Pool on loan, so that it is held while the GIL is released.
 * Returns NULL with ValueError if the Pool is closed. */
cm_pool *cm_pool_object_take(PyObject *op);
void cm_pool_object_give(PyObject *op, cm_pool *pool); /* does nothing for NULL */
/* Release a pool. The last release frees cached memory and waits, with the GIL
 * released, for memory in flight. In a forked child it does nothing. */
void cm_pool_let_go(cm_state *state, cm_pool *pool);
/* Return the pool of page-locked memory that bytes of `pool` go to while they have no
 * device memory. The first call makes it. It counts against `limit_nbytes` and against
 * the pinned limit. Returns it, borrowed, or NULL with an exception that says `what`
 * cumem was doing. */
cm_pool *cm_pool_find_host(cm_state *state, cm_pool *pool, uint64_t limit_nbytes,
                           const char *what);
/* Close a Pool: release its pool. This does nothing if the Pool is closed. */
void cm_pool_object_close(cm_pool_object *self);
/* Close every open Pool, for shutdown. Their pools, still held, move to `out`, which
 * has room for all of them. Returns how many there were. */
size_t cm_pool_objects_collect(cm_state *state, cm_pool **out);

/* Read an argument that is a Pool: NULL and None give NULL, and anything but a Pool is
 * a TypeError. Returns 0, or -1 with an exception. */
int cm_arg_pool(const cm_state *state, PyObject *object, cm_pool_object **out);

/* Choose the pool that serves a request of this kind, flags and device: `wanted` (may
 * be NULL), or else the pool that is current in this context, or else the default one.
 * `flags` that are not the kind's usual ones are served only by pools that have them.
 * Returns the pool, held, or NULL with an exception. */
cm_pool *cm_pool_choose(cm_state *state, cm_pool_object *wanted, cm_kind kind,
                        unsigned flags, int device);
/* Find the innermost pool of this context that serves such a request. Pools that were
 * closed are passed over. Returns the pool, held, or NULL without an exception if there
 * is none. May run Python code. */
cm_pool *cm_pool_find_current(cm_state *state, cm_kind kind, unsigned flags,
                              int device);

/* The Python functions _is_memory_in_flight(device, nbytes) and _reserve(device,
 * nbytes). */
PyObject *cm_is_memory_in_flight(PyObject *module, PyObject *args);
PyObject *cm_reserve_memory(PyObject *module, PyObject *args);

/* Call cm_pools_trim(). With `wait`, this first waits for work on freed memory. Returns
 * 0, or -1 with what a signal handler raised. */
int cm_state_trim(cm_state *state, cm_trim_request *r, bool wait);

/* Open the memory of all pools to the devices that have got a context. Sets no
 * exception: a failure goes to the unraisable hook. */
void cm_pools_admit_peers(cm_state *state);
