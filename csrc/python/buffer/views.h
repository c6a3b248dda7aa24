/* SPDX-License-Identifier: Apache-2.0 */
/* Views of a buffer: slots, methods and docstrings that module/buffer_type.c puts into
 * its tables. None copies bytes, waits or touches a device. */
#ifndef CM_PYTHON_BUFFER_VIEWS_H
#define CM_PYTHON_BUFFER_VIEWS_H

#include "python/buffer/buffer_object.h"

/* Py_mp_subscript, Py_mp_length, Py_tp_iter and
 * Py_sq_contains (which refuses). */
PyObject *cm_buffer_subscript(PyObject *self, PyObject *index);
Py_ssize_t cm_buffer_length(PyObject *self);
PyObject *cm_buffer_iter(PyObject *self);
int cm_buffer_contains(PyObject *self, PyObject *value);

/* METH_FASTCALL | METH_KEYWORDS */
PyObject *cm_buffer_reshape(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames);
PyObject *cm_buffer_view(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
/* METH_FASTCALL */
PyObject *cm_buffer_transpose(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
/* getter */
PyObject *cm_buffer_get_transposed(PyObject *self, void *closure);

extern const char cm_buffer_reshape_doc[];
extern const char cm_buffer_transpose_doc[];
extern const char cm_buffer_view_doc[];

#endif
