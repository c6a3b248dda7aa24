/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of cumem._core._testing, hooks for the test-suite. The functions get the
 * extension itself as their module, where the state is. */
#ifndef CM_PYTHON_MODULE_TESTING_H
#define CM_PYTHON_MODULE_TESTING_H

#include "python/python.h"

#define CM_TESTING_FAST(function) ((PyCFunction)(void (*)(void))(function))
enum { CM_TESTING_KEYWORDS = METH_FASTCALL | METH_KEYWORDS };

extern PyMethodDef cm_testing_fault_methods[];    /* over the fault wrapper */
extern PyMethodDef cm_testing_emulated_methods[]; /* over the emulated device */
extern PyMethodDef cm_testing_file_methods[];     /* over the calls on files */

/* An int from `least` to `most`; an absent one (NULL or None) leaves *out alone. 0 or
 * -1. */
int cm_testing_int(PyObject *object, const char *name, int64_t least, int64_t most,
                   int64_t *out);

#endif
