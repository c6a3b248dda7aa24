/* SPDX-License-Identifier: Apache-2.0 */
/* copy(), the constructors and their like, for the module's method table. */
#ifndef CM_PYTHON_COPY_COPY_FUNCTIONS_H
#define CM_PYTHON_COPY_COPY_FUNCTIONS_H

#include "python/buffer/buffer_object.h"

extern PyMethodDef cm_copy_methods[];
extern PyMethodDef cm_constructor_methods[]; /* constructors.c */
extern PyMethodDef cm_fill_methods[];        /* fill.c: hidden, for the package */
extern PyMethodDef cm_explain_methods[];     /* explain.c */
extern PyMethodDef cm_raw_copy_methods[];  /* raw_copy.c: hidden, for cumem/measuring.py
                                            */
extern PyMethodDef cm_copy_many_methods[]; /* batch.c */
extern PyMethodDef cm_multi_device_methods[]; /* multi_device.c: hidden, for
                                               cumem/multi_device.py */
extern PyMethodDef cm_file_methods[]; /* file_functions.c: hidden, for cumem/files.py */

#endif
