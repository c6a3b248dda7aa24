/* SPDX-License-Identifier: Apache-2.0 */
/* This header declares the functions of this folder that stand in tables elsewhere, and
 * a few that other C code calls. The table of the module's methods has copy(), the
 * constructors and the like. The tables of module/buffer_type.c have the methods and
 * slots of buffers that copy bytes. The caller holds the GIL, and a function that can
 * wait releases it meanwhile. */
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

/* Copy as copy(dst, src, stream=stream, casting=casting) does. If an argument is NULL,
 * it was not given. Errors about `dst` and `src` begin with the text `before`, such as
 * "fill: ". Returns 0, or -1 with an exception. */
int cm_copy_now(cm_state *state, const char *before, PyObject *dst, PyObject *src,
                PyObject *stream, PyObject *casting);
/* Copy as copy_async(dst, src, after=after, casting=casting).wait() does, on a stream
 * of the device of `src`. Errors about `dst` and `src` begin with the text `before`.
 * Returns 0, or -1 with an exception. */
int cm_copy_behind(cm_state *state, const char *before, PyObject *dst, PyObject *src,
                   PyObject *after, PyObject *casting);

/* cm_buffer_fill_new() gives all elements of a new buffer a value, as full() does, and
 * cm_buffer_zero() sets them to 0, as zeros() does. If the value is an array of another
 * dtype, it is converted by the rule `casting`, which is "same_kind" by default. NULL
 * and None mean that a stream or a rule was not given. Returns 0, or -1 with an
 * exception. */
int cm_buffer_fill_new(PyObject *buffer, PyObject *value, PyObject *stream,
                       PyObject *casting);
int cm_buffer_zero(PyObject *buffer, PyObject *stream);
/* True if the value is memory of another library, and NumPy either cannot read this
 * memory or would take it for ordinary memory. Such memory has to be read by a
 * protocol, which orders the reading after the exporter's work. */
bool cm_is_exporter(const cm_state *state, PyObject *value);

/* file_functions.c: make a _FileFailure, which is an object that says what was wrong
 * with a file. Returns NULL with an exception if it fails. */
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
/* The functions from here to cm_buffer_copied() are in duplicates.c.
 * cm_buffer_duplicate() makes a copy in C's order, in memory of `kind` on the buffer's
 * device. It returns a new reference, or NULL with an exception. */
PyObject *cm_buffer_duplicate(cm_buffer *self, cm_kind kind);
PyObject *cm_buffer_copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_buffer_ravel(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames);
PyObject *cm_buffer_flatten(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *kwnames);
PyObject *cm_buffer_astype(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames);
/* This is both __copy__(), which is called as METH_NOARGS, and __deepcopy__(), which is
 * called as METH_O. */
PyObject *cm_buffer_copied(PyObject *self, PyObject *memo);
PyObject *cm_buffer_fill(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames);
PyObject *cm_buffer_dlpack(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                           PyObject *kwnames);
/* The functions from here to cm_buffer_array() are in values.c. The first three are
 * slots. The others are methods, which are called as METH_NOARGS (complex, tolist,
 * bytes), METH_O (format), METH_FASTCALL (item), and METH_FASTCALL | METH_KEYWORDS
 * (array). */
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
