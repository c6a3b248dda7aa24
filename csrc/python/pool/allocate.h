/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers over fresh memory of a pool. The GIL is held; whatever can wait releases
 * it. */
#pragma once

#include "python/pool/pool_object.h"

/* Strides without gaps, in bytes, for the lengths of `like` in `order`: C, F, A (F if
 * `like` is only Fortran-contiguous, else C) or K (the axes of `like` by falling
 * stride). The bytes of all elements must fit in 63 bits. */
void cm_strides_in_order(const cm_region *like, char order, int64_t itemsize,
                         int64_t *strides);
/* A new buffer over memory of `pool`, with the lengths of `like` and strides in
 * `order`. Takes over the caller's hold of the pool (NULL, with an exception, is passed
 * on). `stream` (NULL: any) is the first to use the memory. NULL with an exception. */
PyObject *cm_buffer_allocate(cm_state *state, cm_pool *pool, PyObject *dtype,
                             const cm_region *like, char order, cm_stream *stream);

/* As cm_buffer_allocate(), with memory of a kind and its `flags` on `device`, from the
 * pool that is current for these. Where streams order the kind, the device's current
 * one is the first to use the memory. */
PyObject *cm_buffer_allocate_kind(cm_state *state, cm_kind kind, unsigned flags,
                                  int device, PyObject *dtype, const cm_region *like,
                                  char order);

/* The engine's cm_relief, for memory that a copy needs in passing when there is not
 * enough; its argument is the state. Called without the GIL, by a thread that has given
 * it up. CM_ECANCELLED: an exception is set, of a callback or of a signal handler. */
cm_status cm_shortage_relieve(void *state, cm_pool *pool, uint64_t nbytes,
                              cm_stream *stream, cm_status status, cm_block **out);

/* The Python function that cumem/pools/out_of_memory.py calls; METH_VARARGS. */
PyObject *cm_shortage_retry(PyObject *module, PyObject *args);

/* -- fast_path.c -------------------------------------------------------------------------- */

/* Make a buffer from arguments that each need no more than a look, out of a pool that
 * exists. NULL without an exception: take the long way. NULL with an exception: the
 * dtype is wrong, or memory is short. */
PyObject *cm_fast_kind(cm_state *state, cm_kind kind, PyObject *const *args,
                       Py_ssize_t nargs, PyObject *kwnames);

/* As cm_fast_kind(), where the kind is an argument. */
PyObject *cm_fast_any(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames);

/* As cm_fast_any(), with the values of empty()'s parameters in their order. NULL stands
 * for one that was not given; the shape is always given. */
PyObject *cm_fast_read(cm_state *state, PyObject *const *values);

/* As cm_fast_kind(), for `nbytes` (>= 0) bytes of a Pool, if it is warm. `stream` NULL:
 * the current stream, where that matters. */
PyObject *cm_fast_bytes(cm_state *state, const cm_pool_object *pool, int64_t nbytes,
                        PyObject *stream);
