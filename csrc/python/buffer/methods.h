/* SPDX-License-Identifier: Apache-2.0 */
/* Views, methods and slots of buffers and their docstrings, which module/buffer_type.c
 * puts into its tables. GIL held; what can wait releases it. */
#pragma once

#include "python/buffer/buffer_object.h"
#include "python/core/types.h"

/* -- views: none copies bytes, waits or touches a device ---------------------------------- */

/* Py_mp_subscript and Py_mp_length. */
PyObject *cm_buffer_subscript(PyObject *self, PyObject *index);
Py_ssize_t cm_buffer_length(PyObject *self);

/* getter */
PyObject *cm_buffer_get_transposed(PyObject *self, void *closure);
/* Of the module, for the package; METH_VARARGS. */
PyObject *cm_view(PyObject *module, PyObject *args);

/* -- what else a buffer does -------------------------------------------------------------- */

/* METH_NOARGS */
PyObject *cm_buffer_numpy(PyObject *self, PyObject *unused);
PyObject *cm_buffer_bytes(PyObject *self, PyObject *unused);
PyObject *cm_buffer_free(PyObject *self, PyObject *unused);
PyObject *cm_buffer_enter(PyObject *self, PyObject *unused);
/* METH_O */
PyObject *cm_buffer_read_by(PyObject *self, PyObject *function);
PyObject *cm_buffer_record_stream(PyObject *self, PyObject *stream);
/* METH_FASTCALL */
PyObject *cm_buffer_exit(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* -- of managed memory, and how its pages go to and fro; what calls the driver releases the
 * GIL ---- */

extern PyMethodDef cm_managed_methods[]; /* of the module, with _view */

/* Where the buffer was last prefetched to: a device, CM_HOST_LOCATION, another location
 * or CM_NO_LOCATION. Releases the GIL. 0 or -1. */
int cm_buffer_read_prefetch_location(const cm_buffer *self, int *out);

/* The host, or a device, is about to use the buffer: warns where both keep doing so in
 * turn, once for each storage. Nothing is done for memory that does not migrate. May
 * run Python code. 0, or -1 where the warning is an error. */
int cm_buffer_note_side(cm_buffer *self, bool on_device);
