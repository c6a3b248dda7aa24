/* SPDX-License-Identifier: Apache-2.0 */
/* What the package does for the extension, loaded at its first use. */
#ifndef CM_PYTHON_CORE_PACKAGE_H
#define CM_PYTHON_CORE_PACKAGE_H

#include <stdbool.h>

#include "python/python.h"

/* cumem.<module>, a new reference. */
PyObject *cm_package_load(const char *module);
/* Leave it to the package, whose modules are loaded at their first use: the answer of
 * cumem.<module>.<function>(*arguments), a tuple that it takes over, or NULL for what
 * could not be made. NULL with an exception. */
PyObject *cm_package_call(const char *module, const char *function,
                          PyObject *arguments);
/* The same as a method of `self`, METH_VARARGS | METH_KEYWORDS. */
PyObject *cm_package_method(const char *module, const char *function, PyObject *self,
                            PyObject *arguments, PyObject *keywords);
/* The same of a function that answers nothing: 0, or -1 with an exception. */
int cm_package_do(const char *module, const char *function, PyObject *arguments);
/* The same of a function that always raises; always -1. */
int cm_package_refuse(const char *module, const char *function, PyObject *arguments);

/* Does the environment have a variable whose name begins so? Else the package need not
 * be loaded to read it. */
bool cm_package_has_variables(const char *prefix);

#endif
