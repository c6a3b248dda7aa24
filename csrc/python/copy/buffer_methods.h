/* SPDX-License-Identifier: Apache-2.0 */
/* Methods and slots of buffers that copy bytes, with their docstrings, for the tables
 * in module/buffer_type.c. GIL held; what can wait releases it. */
#ifndef CM_PYTHON_COPY_BUFFER_METHODS_H
#define CM_PYTHON_COPY_BUFFER_METHODS_H

#include "python/buffer/buffer_object.h"

/* METH_NOARGS, and for __deepcopy__ METH_O */
PyObject *cm_buffer_dunder_copy(PyObject *self, PyObject *unused);
/* METH_NOARGS */
PyObject *cm_buffer_dlpack_device(PyObject *self, PyObject *unused);
/* METH_FASTCALL | METH_KEYWORDS */
PyObject *cm_buffer_copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_buffer_to_numpy(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames);
PyObject *cm_buffer_fill(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_buffer_dlpack(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames);
/* METH_VARARGS | METH_KEYWORDS */
PyObject *cm_buffer_astype(PyObject *self, PyObject *arguments, PyObject *keywords);
/* What copy() answers, of a kind of memory. */
PyObject *cm_buffer_copy_to(PyObject *self, cm_kind kind, char order);
/* Py_mp_ass_subscript */
int cm_buffer_ass_subscript(PyObject *self, PyObject *index, PyObject *value);

#endif
