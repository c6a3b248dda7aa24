/* SPDX-License-Identifier: Apache-2.0 */
/* copy(), the constructors and their like, for the module's method table. */
#ifndef CM_PYTHON_COPY_COPY_FUNCTIONS_H
#define CM_PYTHON_COPY_COPY_FUNCTIONS_H

#include "python/buffer/buffer_object.h"

extern PyMethodDef cm_copy_methods[];
extern PyMethodDef cm_constructor_methods[];      /* constructors.c */
extern PyMethodDef cm_kind_constructor_methods[]; /* kind_constructors.c */
extern PyMethodDef cm_explain_methods[];          /* explain.c */
extern PyMethodDef cm_raw_copy_methods[];  /* raw_copies.c: hidden, for the benchmark */
extern PyMethodDef cm_copy_many_methods[]; /* batch.c */
extern PyMethodDef cm_several_methods[];   /* multi_device.c */
extern PyMethodDef cm_asnumpy_methods[];   /* as_numpy.c */
extern PyMethodDef cm_file_methods[]; /* file_functions.c: hidden, for cumem/files.py */

/* The stream argument of a copy, on loan. NULL with an exception. */
cm_stream *cm_copy_stream(cm_state *state, PyObject *dst, PyObject *src,
                          PyObject *stream);

#endif
