/* SPDX-License-Identifier: Apache-2.0 */
/* empty, zeros, full, array, empty_like and empty_pinned, _mapped, _managed, _device.
 * GIL held; allocating and copying release it. */
#ifndef CM_PYTHON_CONSTRUCTORS_H
#define CM_PYTHON_CONSTRUCTORS_H

#include "python/pool_object.h"

extern PyMethodDef cm_constructor_methods[];      /* any kind: constructors.c */
extern PyMethodDef cm_kind_constructor_methods[]; /* one kind each: kind_constructors.c
                                                   */

/* A buffer for arguments of which each needs no more than a look, if the pool is warm;
 * else NULL without an exception: take the long way. */
PyObject *cm_warm_pinned(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_warm_mapped(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_warm_managed(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames);
PyObject *cm_warm_device(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);

/* The same where the kind is an argument. */
PyObject *cm_warm_any(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames);

/* The same of `nbytes` (>= 0) bytes from a Pool; `stream` NULL: the current one where
 * it matters. */
PyObject *cm_warm_bytes(cm_state *state, const cm_pool_object *pool, int64_t nbytes,
                        PyObject *stream);

extern const char cm_empty_doc[]; /* constructor_docs.c */
extern const char cm_zeros_doc[];
extern const char cm_full_doc[];
extern const char cm_array_doc[];
extern const char cm_empty_like_doc[];

#endif
