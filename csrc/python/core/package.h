/* SPDX-License-Identifier: Apache-2.0 */
/* Calls functions of the package cumem from the extension. The modules of the package
 * are loaded at their first use. docs/decisions/0019 says what such calls are for. All
 * functions need the GIL. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "python/python.h"

/* Return what a module, of this package or another, has by this name, as a new
 * reference. This never imports the module. It returns NULL without an exception if
 * nobody else has imported the module, or if the module lacks the name, as it may while
 * another thread is importing it. */
PyObject *cm_find_loaded(const char *module, const char *name);
/* Load the module cumem.<module>. Returns a new reference, or NULL with an
 * exception. */
PyObject *cm_package_load(const char *module);
/* Call cumem.<module>.<function>(*arguments), loading the module if need be, and return
 * its answer. `arguments` is a tuple that this takes over; it may be NULL if it could
 * not be made and an exception is set. Returns NULL with an exception if anything
 * fails. */
PyObject *cm_package_call(const char *module, const char *function,
                          PyObject *arguments);
/* Call such a function as a method of `self`, with the arguments of a METH_VARARGS |
 * METH_KEYWORDS. */
PyObject *cm_package_method(const char *module, const char *function, PyObject *self,
                            PyObject *arguments, PyObject *keywords);
/* Call such a function with the arguments of a METH_FASTCALL | METH_KEYWORDS. */
PyObject *cm_package_pass(const char *module, const char *function,
                          PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
/* These are for tables of a type. CM_PACKAGED defines a method whose code is in the
 * package, and CM_PACKAGED_METHOD is its row. CM_HINT is a row for a name that the type
 * does not have: its AttributeError says what to type instead. */
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
/* Call a function whose answer does not matter. Returns 0, or -1 with an exception. */
int cm_package_do(const char *module, const char *function, PyObject *arguments);
/* Call a function that always raises. Always returns -1. */
int cm_package_refuse(const char *module, const char *function, PyObject *arguments);

/* Read a member by its name from a NamedTuple that a function of the package answered.
 * These return 0, or -1 with an exception. */
int cm_member_flag(PyObject *answer, const char *name, bool *out);
int cm_member_int(PyObject *answer, const char *name, int *out);
int cm_member_uint64(PyObject *answer, const char *name, uint64_t *out);

/* True if the environment has a variable whose name begins with `prefix`. If not, the
 * package need not be loaded to read it. */
bool cm_package_has_variables(const char *prefix);
