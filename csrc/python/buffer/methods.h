/* SPDX-License-Identifier: Apache-2.0 */
/* This header has the views, methods and slots of buffers that module/buffer_type.c
 * puts into its tables. The GIL is held; whatever can wait releases it. */
#pragma once

#include "python/buffer/buffer_object.h"
#include "python/core/types.h"

/* -- views: none copies bytes, waits or touches a device ---------------------------------- */

/* Py_mp_subscript and Py_mp_length. */
PyObject *cm_buffer_subscript(PyObject *self, PyObject *index);
Py_ssize_t cm_buffer_length(PyObject *self);

/* Called as METH_FASTCALL | METH_KEYWORDS. */
PyObject *cm_buffer_view(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
/* Called as METH_NOARGS. */
PyObject *cm_buffer_as_device(PyObject *self, PyObject *unused);

/* This is in shapes.c, and called as METH_FASTCALL | METH_KEYWORDS. */
PyObject *cm_buffer_reshape(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames);
/* Make a view of all elements with one axis. Returns NotImplemented if that takes a
 * copy, or NULL with an exception. */
PyObject *cm_buffer_in_a_row(cm_buffer *self);

/* These are in axes.c: a getter, and methods called as METH_FASTCALL | METH_KEYWORDS.
 */
PyObject *cm_buffer_get_transposed(PyObject *self, void *closure);
PyObject *cm_buffer_transpose(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames);
PyObject *cm_buffer_squeeze(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames);
/* Return a view, or the buffer itself, whose elements in C's order are those of the
 * buffer in the order `order`. For 'F' that is the view with the axes reversed. 'A'
 * means 'F' for a buffer that is in Fortran's order alone, and 'C' for any other. 'K'
 * means the order in which the elements lie in memory. */
PyObject *cm_buffer_reorder(cm_buffer *self, char order);

/* In rows.c: Py_tp_iter, __reversed__ (METH_NOARGS), and the type of the iterators,
 * which is added to the module. */
PyObject *cm_buffer_iter(PyObject *self);
PyObject *cm_buffer_reversed(PyObject *self, PyObject *unused);
int cm_register_rows_type(PyObject *module, cm_state *state);

/* This is a getter, in flags.c. */
PyObject *cm_buffer_get_flags(PyObject *self, void *closure);

/* -- what else a buffer does -------------------------------------------------------------- */

/* Called as METH_NOARGS. */
PyObject *cm_buffer_numpy(PyObject *self, PyObject *unused);
PyObject *cm_buffer_free(PyObject *self, PyObject *unused);
PyObject *cm_buffer_enter(PyObject *self, PyObject *unused);
/* Call `read` with the array that numpy() returns, and return its answer. This is for
 * reads of our own: if `read` kept nothing of the array, and nothing else was exported
 * meanwhile, the memory does not count as exported. */
typedef PyObject *cm_array_reader(PyObject *array, PyObject *argument);
PyObject *cm_buffer_read(cm_buffer *self, cm_array_reader *read, PyObject *argument);
/* Called as METH_O. */
PyObject *cm_buffer_read_by(PyObject *self, PyObject *function);
PyObject *cm_buffer_record_stream(PyObject *self, PyObject *stream);
/* Called as METH_FASTCALL | METH_KEYWORDS. */
PyObject *cm_buffer_keep(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
/* Called as METH_FASTCALL. */
PyObject *cm_buffer_exit(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* -- managed memory; its methods are in managed.h ------------------------------------------ */

/* Ask where the buffer was last prefetched to: a device, CM_HOST_LOCATION, another
 * location or CM_NO_LOCATION. Releases the GIL. Returns 0, or -1 with an exception. */
int cm_buffer_read_prefetch_location(const cm_buffer *self, int *out);

/* Note that the host, or a device, is about to use the buffer. Warns, once for each
 * storage, if both keep doing so by turns. Does nothing for memory that does not
 * migrate. May run Python code. Returns 0, or -1 if the warning is an error. */
int cm_buffer_note_side(cm_buffer *self, bool on_device);
