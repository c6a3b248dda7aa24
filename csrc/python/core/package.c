/* SPDX-License-Identifier: Apache-2.0 */
#include "python/core/package.h"

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
cm_package_call(const char *module, const char *function, PyObject *arguments)
{
    PyObject *loaded = arguments == NULL ? NULL : cm_package_load(module);
    PyObject *callable =
        loaded == NULL ? NULL : PyObject_GetAttrString(loaded, function);
    PyObject *answer =
        callable == NULL ? NULL : PyObject_CallObject(callable, arguments);
    Py_XDECREF(loaded);
    Py_XDECREF(callable);
    Py_XDECREF(arguments);
    return answer;
}

int
cm_package_refuse(const char *module, const char *function, PyObject *arguments)
{
    Py_XDECREF(cm_package_call(module, function, arguments));
    return -1;
}
