/* SPDX-License-Identifier: Apache-2.0 */
/* empty, zeros, full, array, empty_like and empty_pinned, _mapped, _managed, _device.
 * GIL held; allocating and copying release it. */
#ifndef CM_PYTHON_CONSTRUCTORS_H
#define CM_PYTHON_CONSTRUCTORS_H

#include "python/objects.h"

extern PyMethodDef cm_constructor_methods[];      /* any kind: constructors.c */
extern PyMethodDef cm_kind_constructor_methods[]; /* one kind each: kind_constructors.c
                                                   */

/* A buffer for "shape, dtype" given in any way, if that needs no more than a look; else
 * NULL without an exception: take the long way. */
PyObject *cm_warm_pinned(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_warm_mapped(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_warm_managed(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames);
PyObject *cm_warm_device(cm_state *state, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);

/* The same of `nbytes` (>= 0) bytes from the pool of an open Pool. */
PyObject *cm_warm_bytes(cm_state *state, cm_pool *pool, int64_t nbytes);

extern const char cm_empty_doc[]; /* constructor_docs.c */
extern const char cm_zeros_doc[];
extern const char cm_full_doc[];
extern const char cm_array_doc[];
extern const char cm_empty_like_doc[];

#endif
