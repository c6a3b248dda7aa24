/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Registration: page-locked memory of somebody else as a Python object. */
#include "python/pool/registration.h"

#include "python/core/types.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(registration_doc,
"Memory that `register` page-locked.\n\n"
"In a ``with`` block the target is the buffer. When the last reference to the buffer and\n"
"its views dies, the memory is unlocked as well.");

PyDoc_STRVAR(close_doc,
"close($self, /)\n--\n\n"
"Unlock the memory now; doing it twice is no error.\n\n"
"Raises\n------\n"
"BufferError\n    While the buffer or a view of it is exported, or another thread works on it;\n"
"    nothing is done then.\n"
"CudaError\n    If work that uses the memory or the unlocking failed.\n\n"
"Notes\n-----\n"
"**Blocks** until the transfers and streams that use the memory are done with it, and\n"
"where it was exported, the device as well (GIL released; Ctrl-C ends the wait for\n"
"transfers and streams, and the memory stays locked). Copies that were given the array\n"
"itself, or a neighbour on its pages, are not waited for: such pages are unlocked when\n"
"the last of those copies is done.");

PyDoc_STRVAR(enter_doc, "__enter__($self, /)\n--\n\nThe buffer.");
PyDoc_STRVAR(exit_doc,
"__exit__($self, exc_type, exc, tb, /)\n--\n\n"
"`close`, but while the buffer is exported the memory is unlocked with the last\n"
"export.");

/* -- construction and end ---------------------------------------------------------- */

typedef struct registration_object {
    PyObject_HEAD
    cm_state *state;
    PyObject *buffer; /* owned; NULL after close() */
    uint64_t nbytes;
    PyObject *weakrefs;
} registration_object;

PyObject *
cm_registration_object_new(cm_state *state, PyObject *buffer)
{
    PyObject *op = PyType_GenericAlloc(state->registration_type, 0);
    if (op != NULL) {
        registration_object *self = (registration_object *)(void *)op;
        self->state = state;
        self->buffer = Py_NewRef(buffer);
        self->nbytes = ((cm_buffer *)(void *)buffer)->storage->nbytes;
    }
    return op;
}

static void
registration_dealloc(PyObject *op)
{
    registration_object *self = (registration_object *)(void *)op;
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    Py_XDECREF(self->buffer);
    cm_object_free(op);
}

/* -- methods ----------------------------------------------------------------------- */

/* Until nothing but buffers knows the memory; the GIL is released in between. 0, or -1
 * with BufferError, a transfer's failure or what a signal handler raised. */
static int
wait_until_unused(cm_storage *storage)
{
    static const char what[] = "unregister memory";
    do {
        if (cm_storage_check_not_exported(storage, what) < 0
            || cm_storage_wait(storage, true) < 0
            || cm_storage_wait_transfers(storage) < 0
            || cm_storage_check_not_exported(storage, what) < 0) {
            return -1;
        }
    } while (storage->state->engine != NULL && cm_storage_is_in_transfer(storage));
    return 0;
}

static PyObject *
registration_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    registration_object *self = (registration_object *)(void *)op;
    if (self->buffer == NULL) {
        Py_RETURN_NONE;
    }
    cm_storage *storage = cm_storage_hold(((cm_buffer *)(void *)self->buffer)->storage);
    /* free() may have closed it, and left the pages to a transfer */
    bool open = !storage->closed || storage->registration != NULL;
    int result = open ? wait_until_unused(storage) : 0;
    if (result == 0) {
        Py_CLEAR(self->buffer);
    }
    if (result == 0 && open && !cm_storage_is_in_transfer(storage)) {
        result = cm_storage_unlock(storage);
    }
    cm_storage_release(storage, true);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
registration_enter(PyObject *op, PyObject *Py_UNUSED(unused))
{
    PyObject *buffer = ((registration_object *)(void *)op)->buffer;
    if (buffer == NULL) {
        PyErr_SetString(PyExc_ValueError, "the registration is closed");
    }
    return Py_XNewRef(buffer);
}

static PyObject *
registration_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    registration_object *self = (registration_object *)(void *)op;
    cm_buffer *buffer = (cm_buffer *)(void *)self->buffer;
    if (buffer != NULL && cm_storage_count_exports(buffer->storage) > 0) {
        buffer->deferred = true;
        cm_storage_retire(buffer->storage);
        Py_CLEAR(self->buffer);
        Py_RETURN_NONE;
    }
    return registration_close(op, NULL);
}

/* -- getters ----------------------------------------------------------------------- */

static PyObject *
registration_get_buffer(PyObject *op, void *Py_UNUSED(closure))
{
    return registration_enter(op, NULL);
}

static PyObject *
registration_repr(PyObject *op)
{
    registration_object *self = (registration_object *)(void *)op;
    if (self->buffer == NULL) {
        return PyUnicode_FromString("<cumem.Registration, closed>");
    }
    return PyUnicode_FromFormat("<cumem.Registration of %llu bytes: %R>",
                                (unsigned long long)self->nbytes, self->buffer);
}

/* -- tables ------------------------------------------------------------------------ */

static PyMethodDef registration_methods[] = {
    {"close", registration_close, METH_NOARGS, close_doc},
    {"__enter__", registration_enter, METH_NOARGS, enter_doc},
    {"__exit__", registration_exit, METH_VARARGS, exit_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef registration_getset[] = {
    {"buffer", registration_get_buffer, NULL,
     "PinnedBuffer, or MappedBuffer if made with ``mapped=True``, over the memory.\n"
     "Raises ValueError after close().",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef registration_members[] = {
    {"nbytes", T_ULONGLONG, offsetof(registration_object, nbytes), READONLY,
     "Bytes from the first to the last element, gaps between elements included."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(registration_object, weakrefs),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot registration_slots[] = {
    {Py_tp_doc, (void *)registration_doc},
    {Py_tp_dealloc, registration_dealloc},
    {Py_tp_repr, registration_repr},
    {Py_tp_methods, registration_methods},
    {Py_tp_getset, registration_getset},
    {Py_tp_members, registration_members},
    {0, NULL},
};

static PyType_Spec registration_spec = {
    .name = "cumem.Registration",
    .basicsize = sizeof(registration_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE
             | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = registration_slots,
};

int
cm_register_registration_type(PyObject *module, cm_state *state)
{
    return cm_type_add(module, &registration_spec, NULL, &state->registration_type);
}
