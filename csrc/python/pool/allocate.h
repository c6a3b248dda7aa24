/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers over fresh memory of a pool. GIL held; what can wait releases it. */
#pragma once

#include "python/pool/pool_object.h"

/* A new buffer of memory of `kind`, not PAGEABLE, in C or F `order`, from `pool` (NULL:
 * the current one, see cm_pool_choose()). `stream` (NULL: any) is the first to use it.
 */
PyObject *cm_buffer_allocate(cm_state *state, cm_pool_object *pool, cm_kind kind,
                             unsigned flags, int device, PyObject *dtype, int ndim,
                             const int64_t *shape, char order, cm_stream *stream);

/* The same with the lengths of `like`, and its order where `order` is A (F if it is
 * only Fortran-contiguous, else C) or K (its axes by falling stride). */
PyObject *cm_buffer_allocate_like(cm_state *state, cm_pool_object *pool, cm_kind kind,
                                  unsigned flags, int device, PyObject *dtype,
                                  const cm_region *like, char order, cm_stream *stream);

/* For memory that a copy needs in passing, when there is not enough: the engine's
 * cm_relief, of which the argument is the state. Called without the GIL by a thread
 * that has let go of it. CM_ECANCELLED with an exception set: of a callback or a
 * signal's handler. */
cm_status cm_shortage_relieve(void *state, cm_pool *pool, uint64_t nbytes,
                              cm_stream *stream, cm_status status, cm_block **out);

/* For cumem/out_of_memory.py; METH_VARARGS. */
PyObject *cm_shortage_retry(PyObject *module, PyObject *args);

/* -- fast_path.c -------------------------------------------------------------------------- */

/* A buffer for arguments of which each needs no more than a look, if the pool is warm;
 * else NULL without an exception: take the long way. */
PyObject *cm_fast_kind(cm_state *state, cm_kind kind, PyObject *const *args,
                       Py_ssize_t nargs, PyObject *kwnames);

/* The same where the kind is an argument. */
PyObject *cm_fast_any(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames);

/* The same of `nbytes` (>= 0) bytes from a Pool; `stream` NULL: the current one where
 * it matters. */
PyObject *cm_fast_bytes(cm_state *state, const cm_pool_object *pool, int64_t nbytes,
                        PyObject *stream);
