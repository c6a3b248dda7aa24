/* SPDX-License-Identifier: Apache-2.0 */
/* This header has the functions of this folder that are named by tables elsewhere. The
 * table of the module's methods names copy(), the constructors and the like, and the
 * tables of module/buffer_type.c name the methods and slots of buffers that copy bytes.
 * The GIL is held; whatever can wait releases it. */
#pragma once

#include "python/buffer/buffer_object.h"

struct cm_file_failure;

extern PyMethodDef cm_copy_methods[];
extern PyMethodDef cm_constructor_methods[];  /* constructors.c */
extern PyMethodDef cm_copy_many_methods[];    /* batch.c */
extern PyMethodDef cm_row_methods[];          /* rows.c */
extern PyMethodDef cm_sleeping_methods[];     /* sleeping.c */
extern PyMethodDef cm_multi_device_methods[]; /* multi_device.c; private, for
                                               cumem/transfers/multi_device.py */

/* row_plan.c: make the type RowPlan. Returns 0, or -1 with an exception. */
int cm_register_row_plan_type(PyObject *module, cm_state *state);

/* Copy as copy(dst, src, stream=stream, casting=casting) does. NULL means that an
 * argument is not given. Errors about the two ends begin with `before`, such as
 * "fill: ". Returns 0, or -1 with an exception. */
int cm_copy_now(cm_state *state, const char *before, PyObject *dst, PyObject *src,
                PyObject *stream, PyObject *casting);
/* Copy as copy_async(dst, src, after=after, casting=casting).wait() does, on a stream
 * of the source's own device. Errors about the two ends begin with `before`. Returns 0,
 * or -1 with an exception. */
int cm_copy_behind(cm_state *state, const char *before, PyObject *dst, PyObject *src,
                   PyObject *after, PyObject *casting);

/* Give the elements of a new buffer a value, as full() and zeros() do. An array of
 * another dtype is converted by the rule "same_kind" if no rule is given. NULL and None
 * mean that a stream or a rule is not given. Returns 0, or -1 with an exception. */
int cm_buffer_fill_new(PyObject *buffer, PyObject *value, PyObject *stream,
                       PyObject *casting);
int cm_buffer_zero(PyObject *buffer, PyObject *stream);
/* True if the value is memory of another library that NumPy cannot read, or that NumPy
 * would take for ordinary memory. Such memory has to be read by a protocol, which
 * orders the reading after the exporter's work. */
bool cm_is_exporter(const cm_state *state, PyObject *value);

/* Make a _FileFailure, which says what was wrong with a file (file_functions.c).
 * Returns NULL with an exception if it fails. */
PyObject *cm_file_failure_new(cm_state *state, const struct cm_file_failure *failure);

/* These are private functions for the package. They are called as METH_VARARGS, except
 * _flush_cache(), which is called as METH_O. */
PyObject *cm_check_casting_of(PyObject *module, PyObject *args);
PyObject *cm_explain(PyObject *module, PyObject *args);
PyObject *cm_flush_cache(PyObject *module, PyObject *object);
PyObject *cm_raw_copy(PyObject *module, PyObject *args);
PyObject *cm_transfer_file(PyObject *module, PyObject *args);
PyObject *cm_write_files(PyObject *module, PyObject *args);
PyObject *cm_write_file_async(PyObject *module, PyObject *args);
PyObject *cm_maps_file(PyObject *module, PyObject *args);

/* The method __dlpack_device__(), which is called as METH_NOARGS. */
PyObject *cm_buffer_dlpack_device(PyObject *self, PyObject *unused);
/* The methods from here on are called as METH_FASTCALL | METH_KEYWORDS, unless their
 * comment says otherwise. */
PyObject *cm_buffer_to_numpy(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *kwnames);
/* These are in duplicates.c. cm_buffer_duplicate() makes a copy in C's order, in memory
 * of `kind` on the buffer's device. It returns a new reference, or NULL with an
 * exception. */
PyObject *cm_buffer_duplicate(cm_buffer *self, cm_kind kind);
PyObject *cm_buffer_copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_buffer_ravel(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames);
PyObject *cm_buffer_flatten(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames);
PyObject *cm_buffer_astype(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames);
/* The methods __copy__() and __deepcopy__(): METH_NOARGS and METH_O. */
PyObject *cm_buffer_copied(PyObject *self, PyObject *memo);
PyObject *cm_buffer_fill(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_buffer_dlpack(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames);
/* These are in values.c. The first three are slots. The methods are called as
 * METH_NOARGS (complex, tolist, bytes), METH_O (format), METH_FASTCALL (item), and
 * METH_FASTCALL | METH_KEYWORDS (array). */
PyObject *cm_buffer_int(PyObject *self);
PyObject *cm_buffer_float(PyObject *self);
int cm_buffer_bool(PyObject *self);
PyObject *cm_buffer_complex(PyObject *self, PyObject *unused);
PyObject *cm_buffer_tolist(PyObject *self, PyObject *unused);
PyObject *cm_buffer_bytes(PyObject *self, PyObject *unused);
PyObject *cm_buffer_format(PyObject *self, PyObject *spec);
PyObject *cm_buffer_item(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *cm_buffer_array(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames);
/* dlpack_exchange.c: give a type of buffers DLPack's C functions. Returns 0, or -1 with
 * an exception. */
int cm_dlpack_add_exchange(PyTypeObject *type);
/* The slot Py_mp_ass_subscript. */
int cm_buffer_ass_subscript(PyObject *self, PyObject *index, PyObject *value);
