/* SPDX-License-Identifier: Apache-2.0 */
/* Chains of what is current, in context variables. What changes one is done here, where
 * no signal comes between. */
#include "python/core/override.h"

#include "python/core/state.h"

int
cm_override_init(cm_override *override, const char *name)
{
    PyObject *contextvars = PyImport_ImportModule("contextvars");
    override->variable =
        contextvars == NULL ? NULL
                            : PyObject_CallMethod(contextvars, "ContextVar", "s", name);
    Py_XDECREF(contextvars);
    if (override->variable == NULL) {
        return -1;
    }
    override->getter = PyObject_GetAttrString(override->variable, "get");
    override->entered = PyDict_New();
    if (override->getter == NULL || override->entered == NULL) {
        return -1;
    }
    return 0;
}

/* -- chains ---------------------------------------------------------------------------- */

/* The places of a block, which is a list. */
enum { OBJECT, FRAME, TOKEN, IS_RELINKED };

/* Borrowed: of the block at the head of a chain; NULL at its end. */
static PyObject *
head_part(PyObject *chain, int place)
{
    return chain == NULL || chain == Py_None
               ? NULL
               : PyList_GetItem(PyTuple_GetItem(chain, 0), place);
}

PyObject *
cm_override_read(const cm_override *override)
{
    return PyObject_CallFunctionObjArgs(override->getter, Py_None, NULL);
}

PyObject *
cm_override_step(PyObject **at)
{
    PyObject *object = Py_None; /* that of a block that is over */
    while (object == Py_None) {
        object = head_part(*at, OBJECT);
        *at = object == NULL ? NULL : PyTuple_GetItem(*at, 1);
    }
    return object;
}

/* -- blocks ---------------------------------------------------------------------------- */

PyObject *
cm_override_enter(const cm_override *override, PyObject *object)
{
    PyObject *chain =
        cm_package_call("extension.blocks", "begin",
                        PyTuple_Pack(2, override->variable, override->entered));
    PyObject *token =
        chain == NULL ? NULL
                      : PyObject_CallMethod(override->variable, "set", "(O)", chain);
    if (token != NULL) {
        PyObject *block = PyTuple_GetItem(chain, 0);
        (void)PyList_SetItem(block, OBJECT, Py_NewRef(object));
        (void)PyList_SetItem(block, TOKEN, token);
    }
    Py_XDECREF(chain);
    return token == NULL ? NULL : Py_NewRef(object);
}

/* Here the innermost block, in the frame and the context that it was entered in, with
 * all around it still as it was; any other is left to the package. */
PyObject *
cm_override_exit(const cm_override *override, PyObject *object, const char *what)
{
    PyObject *chain = cm_override_read(override);
    PyObject *frame = (PyObject *)(void *)PyEval_GetFrame();
    frame = frame == NULL ? Py_None : frame;
    PyObject *token = head_part(chain, TOKEN);
    bool is_usual = head_part(chain, OBJECT) == object
                    && head_part(chain, FRAME) == frame && token != Py_None
                    && head_part(chain, IS_RELINKED) == Py_False;
    PyObject *done =
        is_usual ? PyObject_CallMethod(override->variable, "reset", "(O)", token)
                 : NULL;
    if (done != NULL) { /* contexts that were copied inside go on with the block */
        PyObject *block = PyTuple_GetItem(chain, 0);
        (void)PyList_SetItem(block, FRAME, Py_NewRef(Py_None));
        (void)PyList_SetItem(block, TOKEN, Py_NewRef(Py_None));
    }
    else if (chain != NULL && (!is_usual || PyErr_ExceptionMatches(PyExc_ValueError))) {
        PyErr_Clear();
        done = cm_package_call("extension.blocks", "leave",
                               Py_BuildValue("(OOOOs)", override->variable,
                                             override->entered, object, frame, what));
    }
    Py_XDECREF(chain);
    return done;
}
