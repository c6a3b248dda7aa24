/* SPDX-License-Identifier: Apache-2.0 */
/* Finds functions of the package and calls them. */
#include "python/core/package.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

PyObject *
cm_package_load(const char *module)
{
    PyObject *package = PyImport_ImportModule("cumem");
    PyObject *loaded =
        package == NULL ? NULL : PyObject_CallMethod(package, "_load", "s", module);
    Py_XDECREF(package);
    return loaded;
}

PyObject *
cm_find_loaded(const char *module, const char *name)
{
    PyObject *loaded = PyDict_GetItemString(PyImport_GetModuleDict(), module);
    PyObject *found = loaded == NULL ? NULL : PyObject_GetAttrString(loaded, name);
    if (found == NULL) {
        PyErr_Clear();
    }
    return found;
}

/* Find a function of a module. Most of the time is saved by looking into sys.modules
 * first. A module that another thread is still loading may lack the function. In that
 * case this imports the module, which waits for that thread. Returns a new reference,
 * or NULL with an exception. */
static PyObject *
find(const char *module, const char *function)
{
    char name[64];
    (void)snprintf(name, sizeof(name), "cumem.%s", module);
    PyObject *callable = cm_find_loaded(name, function);
    if (callable == NULL) {
        PyObject *loaded = cm_package_load(module);
        callable = loaded == NULL ? NULL : PyObject_GetAttrString(loaded, function);
        Py_XDECREF(loaded);
    }
    return callable;
}

PyObject *
cm_package_call(const char *module, const char *function, PyObject *arguments)
{
    PyObject *callable = arguments == NULL ? NULL : find(module, function);
    PyObject *answer =
        callable == NULL ? NULL : PyObject_CallObject(callable, arguments);
    Py_XDECREF(callable);
    Py_XDECREF(arguments);
    return answer;
}

PyObject *
cm_package_method(const char *module, const char *function, PyObject *self,
                  PyObject *arguments, PyObject *keywords)
{
    PyObject *callable = find(module, function);
    PyObject *method =
        callable == NULL ? NULL : PyObject_CallMethod(callable, "__get__", "(O)", self);
    PyObject *answer =
        method == NULL ? NULL : PyObject_Call(method, arguments, keywords);
    Py_XDECREF(method);
    Py_XDECREF(callable);
    return answer;
}

PyObject *
cm_package_pass(const char *module, const char *function, PyObject *const *args,
                Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *callable = find(module, function);
    PyObject *arguments = PyTuple_New(nargs);
    PyObject *keywords = PyDict_New();
    bool made = callable != NULL && arguments != NULL && keywords != NULL;
    for (Py_ssize_t i = 0; i < nargs && made; i++) {
        made = PyTuple_SetItem(arguments, i, Py_NewRef(args[i])) == 0;
    }
    Py_ssize_t named = made && kwnames != NULL ? PyTuple_Size(kwnames) : 0;
    for (Py_ssize_t i = 0; i < named && made; i++) {
        PyObject *name = PyTuple_GetItem(kwnames, i);
        made = PyDict_SetItem(keywords, name, args[nargs + i]) == 0;
    }
    PyObject *answer = made ? PyObject_Call(callable, arguments, keywords) : NULL;
    Py_XDECREF(keywords);
    Py_XDECREF(arguments);
    Py_XDECREF(callable);
    return answer;
}

PyObject *
cm_package_hint(PyObject *self, void *name)
{
    return cm_package_call("buffers.hints", "refuse_attribute",
                           Py_BuildValue("(Os)", self, (const char *)name));
}

int
cm_package_do(const char *module, const char *function, PyObject *arguments)
{
    PyObject *done = cm_package_call(module, function, arguments);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int
cm_package_refuse(const char *module, const char *function, PyObject *arguments)
{
    (void)cm_package_do(module, function, arguments);
    return -1;
}

int
cm_member_flag(PyObject *answer, const char *name, bool *out)
{
    PyObject *member = PyObject_GetAttrString(answer, name);
    int truth = member == NULL ? -1 : PyObject_IsTrue(member);
    Py_XDECREF(member);
    *out = truth > 0;
    return truth < 0 ? -1 : 0;
}

int
cm_member_int(PyObject *answer, const char *name, int *out)
{
    PyObject *member = PyObject_GetAttrString(answer, name);
    long value = member == NULL ? -1 : PyLong_AsLong(member);
    Py_XDECREF(member);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (value < INT_MIN || value > INT_MAX) {
        PyErr_Format(PyExc_OverflowError, "%s=%ld does not fit in an int", name, value);
        return -1;
    }
    *out = (int)value;
    return 0;
}

int
cm_member_uint64(PyObject *answer, const char *name, uint64_t *out)
{
    PyObject *member = PyObject_GetAttrString(answer, name);
    *out = member == NULL ? 0 : PyLong_AsUnsignedLongLong(member);
    Py_XDECREF(member);
    return PyErr_Occurred() ? -1 : 0;
}

bool
cm_package_has_variables(const char *prefix)
{
    char **each = environ;
    while (*each != NULL && strncmp(*each, prefix, strlen(prefix)) != 0) {
        each++;
    }
    return *each != NULL;
}
