/* SPDX-License-Identifier: Apache-2.0 */
/* Chains of what is current, in context variables. */
#include "python/override.h"

int
cm_override_init(cm_override *override, const char *name)
{
    override->witness = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    if (override->witness == NULL) {
        return -1;
    }
    override->unheld = Py_REFCNT(override->witness);
    PyObject *contextvars = PyImport_ImportModule("contextvars");
    if (contextvars == NULL) {
        return -1;
    }
    PyObject *type = PyObject_GetAttrString(contextvars, "ContextVar");
    PyObject *names = Py_BuildValue("(s)", name);
    PyObject *keywords = Py_BuildValue("{sO}", "default", Py_None);
    if (type != NULL && names != NULL && keywords != NULL) {
        override->variable = PyObject_Call(type, names, keywords);
    }
    Py_XDECREF(keywords);
    Py_XDECREF(names);
    Py_XDECREF(type);
    Py_DECREF(contextvars);
    if (override->variable == NULL) {
        return -1;
    }
    override->getter = PyObject_GetAttrString(override->variable, "get");
    return override->getter == NULL ? -1 : 0;
}

PyObject *
cm_override_read(const cm_override *override)
{
    return PyObject_CallNoArgs(override->getter);
}

static int
write_chain(const cm_override *override, PyObject *chain)
{
    /* "(O)": a link must not be taken for the argument list */
    PyObject *token = PyObject_CallMethod(override->variable, "set", "(O)", chain);
    Py_XDECREF(token);
    return token == NULL ? -1 : 0;
}

int
cm_override_enter(cm_override *override, PyObject *object)
{
    PyObject *outer = cm_override_read(override);
    if (outer == NULL) {
        return -1;
    }
    PyObject *chain = PyTuple_Pack(3, object, outer, override->witness);
    Py_DECREF(outer);
    if (chain == NULL) {
        return -1;
    }
    int result = write_chain(override, chain);
    Py_DECREF(chain);
    return result;
}

int
cm_override_exit(cm_override *override, PyObject *object, const char *what)
{
    PyObject *chain = cm_override_read(override);
    if (chain == NULL) {
        return -1;
    }
    int result = -1;
    if (chain != Py_None && PyTuple_GetItem(chain, 0) == object) {
        result = write_chain(override, PyTuple_GetItem(chain, 1));
    }
    else {
        PyErr_Format(PyExc_RuntimeError,
                     "the %s is not the one entered last in this context", what);
    }
    Py_DECREF(chain);
    return result;
}
