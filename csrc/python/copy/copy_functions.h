/* SPDX-License-Identifier: Apache-2.0 */
/* copy(), the constructors and their like, for the module's method table. */
#ifndef CM_PYTHON_COPY_COPY_FUNCTIONS_H
#define CM_PYTHON_COPY_COPY_FUNCTIONS_H

#include "python/buffer/buffer_object.h"

extern PyMethodDef cm_copy_methods[];
extern PyMethodDef cm_constructor_methods[];  /* constructors.c */
extern PyMethodDef cm_copy_many_methods[];    /* batch.c */
extern PyMethodDef cm_multi_device_methods[]; /* multi_device.c: hidden, for
                                               cumem/multi_device.py */

/* Hidden, for the package; METH_VARARGS, but for _flush_cache(), which is METH_O. */
PyObject *cm_explain(PyObject *module, PyObject *args);
PyObject *cm_fill_element(PyObject *module, PyObject *args);
PyObject *cm_flush_cache(PyObject *module, PyObject *object);
PyObject *cm_raw_copy(PyObject *module, PyObject *args);
PyObject *cm_transfer_file(PyObject *module, PyObject *args);

#endif
