/* SPDX-License-Identifier: Apache-2.0 */
/* Methods of buffers and their docstrings, which buffer_type.c puts into its tables.
 * GIL held; what can wait releases it. */
#ifndef CM_PYTHON_BUFFER_METHODS_H
#define CM_PYTHON_BUFFER_METHODS_H

#include "python/objects.h"

/* METH_NOARGS */
PyObject *cm_buffer_numpy(PyObject *self, PyObject *unused);
PyObject *cm_buffer_as_device(PyObject *self, PyObject *unused);
PyObject *cm_buffer_dunder_copy(PyObject *self, PyObject *unused);
PyObject *cm_buffer_reversed(PyObject *self, PyObject *unused);
PyObject *cm_buffer_free(PyObject *self, PyObject *unused);
PyObject *cm_buffer_enter(PyObject *self, PyObject *unused);
PyObject *cm_buffer_complex(PyObject *self, PyObject *unused);
/* METH_O */
PyObject *cm_buffer_deepcopy(PyObject *self, PyObject *memo);
PyObject *cm_buffer_record_stream(PyObject *self, PyObject *stream);
PyObject *cm_buffer_reduce_ex(PyObject *self, PyObject *protocol);
/* METH_FASTCALL */
PyObject *cm_buffer_exit(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
/* Py_nb_int, Py_nb_float, Py_nb_bool */
PyObject *cm_buffer_int(PyObject *self);
PyObject *cm_buffer_float(PyObject *self);
int cm_buffer_bool(PyObject *self);
/* METH_FASTCALL | METH_KEYWORDS */
PyObject *cm_buffer_copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_buffer_to_numpy(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames);
PyObject *cm_buffer_array(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames);
PyObject *cm_buffer_fill(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_buffer_prefetch(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames);
/* getter of ManagedBuffer */
PyObject *cm_buffer_get_prefetch_location(PyObject *self, void *closure);

extern const char cm_buffer_numpy_doc[];
extern const char cm_buffer_to_numpy_doc[];
extern const char cm_buffer_as_device_doc[];
extern const char cm_buffer_copy_doc[];
extern const char cm_buffer_dunder_copy_doc[];
extern const char cm_buffer_deepcopy_doc[];
extern const char cm_buffer_reversed_doc[];
extern const char cm_buffer_free_doc[];
extern const char cm_buffer_enter_doc[];
extern const char cm_buffer_exit_doc[];
extern const char cm_buffer_record_stream_doc[];
extern const char cm_buffer_reduce_ex_doc[];
extern const char cm_buffer_array_doc[];
extern const char cm_buffer_complex_doc[];
extern const char cm_buffer_fill_doc[];
extern const char cm_buffer_prefetch_doc[];
extern const char cm_buffer_prefetch_location_doc[];

/* `value` as fill() reads it: what must be asked for by protocol, since NumPy cannot
 * read it or would lose sight of where it is, becomes a Buffer; `stream` (may be NULL)
 * comes after its exporter's. New reference. */
PyObject *cm_fill_source(cm_state *state, PyObject *value, cm_stream *stream);

/* Fill `self` with one element or a broadcast array; NULL stream: the current one. 0 or
 * -1. */
int cm_buffer_fill_value(cm_buffer *self, PyObject *value, PyObject *stream);

/* Where the buffer was last prefetched to: a device, CM_HOST_LOCATION or
 * CM_NO_LOCATION. Releases the GIL. 0 or -1. */
int cm_buffer_read_prefetch_location(const cm_buffer *self, int *out);

/* Set all bytes to zero. */
int cm_buffer_zero(cm_buffer *self, PyObject *stream);

/* `_rebuild` of the module, which unpickling calls. */
extern PyMethodDef cm_pickle_methods[];

#endif
