/* SPDX-License-Identifier: Apache-2.0 */
/* What the package does for the extension, loaded at its first use. */
#pragma once

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
/* The same with the arguments of a METH_FASTCALL | METH_KEYWORDS. */
PyObject *cm_package_pass(const char *module, const char *function,
                          PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
/* For tables: such a method; and what a type does not have, whose AttributeError says
 * what to type instead. */
#define CM_PACKAGED(type, module, name)                                                \
    static PyObject *type##_##name(PyObject *self, PyObject *args, PyObject *keywords) \
    {                                                                                  \
        return cm_package_method(module, #name, self, args, keywords);                 \
    }
#define CM_PACKAGED_METHOD(type, name)                                                 \
    {#name, CM_METHOD(type##_##name), METH_VARARGS | METH_KEYWORDS,                    \
     CM_DOC_##type##_##name},
#define CM_HINT(name)                                                                  \
    {#name, cm_package_hint, NULL, "Not there: its error says why.", (void *)#name},
PyObject *cm_package_hint(PyObject *self, void *name);
/* The same of a function that answers nothing: 0, or -1 with an exception. */
int cm_package_do(const char *module, const char *function, PyObject *arguments);
/* The same of a function that always raises; always -1. */
int cm_package_refuse(const char *module, const char *function, PyObject *arguments);

/* Does the environment have a variable whose name begins so? Else the package need not
 * be loaded to read it. */
bool cm_package_has_variables(const char *prefix);
