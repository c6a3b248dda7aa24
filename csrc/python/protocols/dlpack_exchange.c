/* SPDX-License-Identifier: Apache-2.0 */
/* DLPack's table of C functions, which PyTorch's tensors have since 2.10: what
 * __dlpack__() answers, without Python in between. It also leaves out what __dlpack__()
 * checks there, so only an object that needs no check is taken this way. On a device it
 * needs no device to be current, which PyTorch's __dlpack__() does. */
#include "python/protocols/dlpack.h"
#include "python/protocols/protocols.h"

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

/* A function of the table failed: 1, since asked in Python the object says why; -1
 * where the exception is no error. */
static int
leave_to_python(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyErr_Clear();
    return 1;
}

/* A complex tensor may be one that is to be conjugated when it is read. */
static bool
needs_python(const cm_dl_versioned *managed)
{
    return managed->version.major != CM_DL_MAJOR
           || managed->tensor.dtype.code == CM_DL_COMPLEX;
}

/* The stream that the exporter works on now, where the memory has any: 0, or 1 where
 * only Python can tell, -1 with an exception. */
static int
ask_stream(const cm_dl_exchange *table, cm_dl_device device, uint64_t *handle)
{
    void *stream = NULL;
    if (device.type == CM_DL_CPU) {
        return 0;
    }
    if (device.type != CM_DL_CUDA || table->current_stream == NULL) {
        return 1;
    }
    if (table->current_stream(device.type, device.id, &stream) != 0) {
        return leave_to_python();
    }
    *handle = (uint64_t)(uintptr_t)stream;
    return 0;
}

static PyObject *
take(cm_state *state, const cm_dl_exchange *table, cm_dl_versioned *managed,
     cm_stream *given, uint64_t unasked)
{
    cm_dl_device device = managed->tensor.device;
    uint64_t handle = 0;
    int left = needs_python(managed) ? 1 : ask_stream(table, device, &handle);
    if (left != 0) {
        cm_dlpack_discard(managed);
        return left > 0 ? Py_NewRef(Py_NotImplemented) : NULL;
    }
    PyObject *buffer = cm_dlpack_import_managed(state, managed, unasked);
    if (buffer != NULL && cm_dlpack_follow(state, buffer, device, given, handle) < 0) {
        Py_CLEAR(buffer);
    }
    return buffer;
}

PyObject *
cm_import_exchange(cm_state *state, PyObject *object, cm_stream *given,
                   uint64_t unasked)
{
    cm_dl_versioned *managed = NULL;
    const cm_dl_exchange *table = find_table(state, (PyObject *)Py_TYPE(object));
    int left = table == NULL ? (PyErr_Occurred() ? -1 : 1) : has_gradient(object);
    if (left == 0 && (table->from_object(object, &managed) != 0 || managed == NULL)) {
        left = leave_to_python();
    }
    if (left != 0) {
        return left > 0 ? Py_NewRef(Py_NotImplemented) : NULL;
    }
    return take(state, table, managed, given, unasked);
}
