/* SPDX-License-Identifier: Apache-2.0 */
/* DLPack's table of C functions, which PyTorch's tensors have since 2.10: what
 * __dlpack__() answers, without Python in between. It also leaves out what __dlpack__()
 * checks there, so only an object that needs no check is taken this way. */
#include "python/dlpack.h"
#include "python/protocols.h"

/* A type's own: one that inherits it may have changed what it means. NULL without an
 * exception: it has none. */
static const cm_dl_exchange *
read_table(PyObject *type)
{
    PyObject *names = PyObject_GetAttrString(type, "__dict__");
    PyObject *lacks = names == NULL ? PyExc_AttributeError : PyExc_KeyError;
    PyObject *capsule =
        names == NULL ? NULL
                      : PyMapping_GetItemString(names, "__dlpack_c_exchange_api__");
    Py_XDECREF(names);
    const cm_dl_exchange *table = NULL;
    if (capsule != NULL && PyCapsule_IsValid(capsule, CM_DL_EXCHANGE_NAME)) {
        table = PyCapsule_GetPointer(capsule, CM_DL_EXCHANGE_NAME);
    }
    Py_XDECREF(capsule);
    if (capsule == NULL && PyErr_ExceptionMatches(lacks)) {
        PyErr_Clear();
    }
    while (table != NULL && table->version.major != CM_DL_MAJOR) {
        table = table->previous;
    }
    return table != NULL && table->from_object != NULL ? table : NULL;
}

/* A type without a table is not remembered: it may be one that is soon to go. */
static const cm_dl_exchange *
find_table(cm_state *state, PyObject *type)
{
    if (state->exchange.type == type) {
        return state->exchange.table;
    }
    const cm_dl_exchange *table = read_table(type);
    if (table != NULL) {
        PyObject *old = state->exchange.type;
        state->exchange.type = Py_NewRef(type);
        state->exchange.table = table;
        Py_XDECREF(old);
    }
    return table;
}

/* Such a tensor is refused by __dlpack__(), which says what to do. -1 with an
 * exception. */
static int
has_gradient(PyObject *object)
{
    PyObject *value = PyObject_GetAttrString(object, "requires_grad");
    if (value == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        return 0;
    }
    int has = value == NULL ? -1 : value != Py_False;
    Py_XDECREF(value);
    return has;
}

/* A device's memory has streams to be asked about, a complex tensor may be one that is
 * to be conjugated when it is read. */
static bool
needs_python(const cm_dl_versioned *managed)
{
    return managed->version.major != CM_DL_MAJOR
           || managed->tensor.device.type != CM_DL_CPU
           || managed->tensor.dtype.code == CM_DL_COMPLEX;
}

PyObject *
cm_import_exchange(cm_state *state, PyObject *object, uint64_t unasked)
{
    cm_dl_versioned *managed = NULL;
    const cm_dl_exchange *table = find_table(state, (PyObject *)Py_TYPE(object));
    int left = table == NULL ? (PyErr_Occurred() ? -1 : 1) : has_gradient(object);
    if (left == 0 && (table->from_object(object, &managed) != 0 || managed == NULL)) {
        bool is_known = !PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_Exception);
        left = is_known ? 1 : -1;
        if (is_known) {
            PyErr_Clear(); /* asked in Python it says why */
        }
    }
    if (left != 0) {
        return left > 0 ? Py_NewRef(Py_NotImplemented) : NULL;
    }
    if (needs_python(managed)) {
        if (managed->deleter != NULL) {
            managed->deleter(managed);
        }
        return Py_NewRef(Py_NotImplemented);
    }
    return cm_dlpack_import_managed(state, managed, unasked);
}
