/* SPDX-License-Identifier: Apache-2.0 */
/* Makes buffers over fresh memory of a pool. The GIL is held; whatever can wait
 * releases it. */
#pragma once

#include "python/pool/pool_object.h"

/* Compute strides without gaps, in bytes, for the lengths of `like` in `order`. That is
 * C, F, A (F if `like` is only Fortran-contiguous, else C) or K (the axes of `like` in
 * the order of falling strides). The bytes of all elements must fit in 63 bits. */
void cm_strides_in_order(const cm_region *like, char order, int64_t itemsize,
                         int64_t *strides);
/* Make a buffer over memory of `pool`, with the lengths of `like` and strides in
 * `order`. This takes over the caller's hold of the pool; if `pool` is NULL because
 * finding it failed, this returns NULL too. `stream` is the first stream that uses the
 * memory. If it is NULL, any stream may use the memory first. Returns NULL with an
 * exception if it fails. */
PyObject *cm_buffer_allocate(cm_state *state, cm_pool *pool, PyObject *dtype,
                             const cm_region *like, char order, cm_stream *stream);

/* Do the same as cm_buffer_allocate() with the pool that is current for this kind,
 * `flags` and `device`. If the kind is one that streams order, the device's current
 * stream is the first to use the memory. */
PyObject *cm_buffer_allocate_kind(cm_state *state, cm_kind kind, unsigned flags,
                                  int device, PyObject *dtype, const cm_region *like,
                                  char order);

/* The engine's cm_relief, which it calls when there is not enough memory for the blocks
 * that a copy goes through. Its argument is the state. It is called without the GIL, by
 * a thread that has given it up. If it returns CM_ECANCELLED, a callback or a signal
 * handler has raised an exception, which is set. */
cm_status cm_shortage_relieve(void *state, cm_pool *pool, uint64_t nbytes,
                              cm_stream *stream, cm_status status, cm_block **out);

/* The Python function by which cumem/pools/out_of_memory.py tries again;
 * METH_VARARGS. */
PyObject *cm_shortage_retry(PyObject *module, PyObject *args);

/* -- fast_path.c -------------------------------------------------------------------------- */

/* Make a buffer the fast way: only from arguments that can be read without running
 * Python code, and only from a pool that exists already. Returns NULL without an
 * exception if the caller has to go the long way. Returns NULL with an exception if the
 * dtype is wrong or there is not enough memory. */
PyObject *cm_fast_kind(cm_state *state, cm_kind kind, PyObject *const *args,
                       Py_ssize_t nargs, PyObject *kwnames);

/* Do the same as cm_fast_kind() for a call that has the kind as an argument. */
PyObject *cm_fast_any(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames);

/* Do the same as cm_fast_any(), with the values of empty()'s parameters in their order.
 * NULL stands for a value that was not given; the shape is always given. */
PyObject *cm_fast_read(cm_state *state, PyObject *const *values);

/* Do the same as cm_fast_kind() for `nbytes` (>= 0) bytes of a Pool, if the pool has a
 * free block at hand. If `stream` is NULL, it is the current stream, where that
 * matters. */
PyObject *cm_fast_bytes(cm_state *state, const cm_pool_object *pool, int64_t nbytes,
                        PyObject *stream);
