/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers over fresh memory of a pool. GIL held; what can wait releases it. */
#pragma once

#include "python/pool/pool_object.h"

/* Strides without gaps, in bytes, of the lengths of `like` in `order`: C, F or, as its
 * strides are, A (F if it is only Fortran-contiguous, else C) or K (its axes by falling
 * stride). The bytes of all elements must fit in 63 bits. */
void cm_strides_in_order(const cm_region *like, char order, int64_t itemsize,
                         int64_t *strides);
/* A new buffer of memory of `pool`, whose hold it takes over (NULL with an exception:
 * passed on), with the lengths of `like` and such strides. `stream` (NULL: any) is the
 * first to use it. */
PyObject *cm_buffer_allocate(cm_state *state, cm_pool *pool, PyObject *dtype,
                             const cm_region *like, char order, cm_stream *stream);

/* For memory that a copy needs in passing, when there is not enough: the engine's
 * cm_relief, of which the argument is the state. Called without the GIL by a thread
 * that has let go of it. CM_ECANCELLED with an exception set: of a callback or a
 * signal's handler. */
cm_status cm_shortage_relieve(void *state, cm_pool *pool, uint64_t nbytes,
                              cm_stream *stream, cm_status status, cm_block **out);

/* For cumem/pools/out_of_memory.py; METH_VARARGS. */
PyObject *cm_shortage_retry(PyObject *module, PyObject *args);

/* -- fast_path.c -------------------------------------------------------------------------- */

/* A buffer for arguments of which each needs no more than a look, from a pool that
 * there is; else NULL without an exception: take the long way. NULL with one where the
 * dtype is wrong or memory is short. */
PyObject *cm_fast_kind(cm_state *state, cm_kind kind, PyObject *const *args,
                       Py_ssize_t nargs, PyObject *kwnames);

/* The same where the kind is an argument. */
PyObject *cm_fast_any(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames);

/* The same of `nbytes` (>= 0) bytes from a Pool, if it is warm; `stream` NULL: the
 * current one where it matters. */
PyObject *cm_fast_bytes(cm_state *state, const cm_pool_object *pool, int64_t nbytes,
                        PyObject *stream);
