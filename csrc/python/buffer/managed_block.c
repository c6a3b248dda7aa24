/* SPDX-License-Identifier: Apache-2.0 */
/* `with buf.on(device):` sends the pages of managed memory to a device for the block,
 * and then back to where they had last been sent before. */
#include "python/buffer/managed.h"
#include "python/buffer/methods.h"
#include "python/core/arguments.h"
#include "python/core/types.h"

typedef enum block_stage { NOT_ENTERED, INSIDE, LEFT } block_stage;

typedef struct managed_block {
    PyObject_HEAD
    cm_buffer *buffer; /* owned */
    PyObject *device;  /* owned; read when the block begins; NULL if it was not given */
    PyObject *stream;  /* owned; NULL for the stream that is current at each end */
    block_stage stage;
    int home; /* the device that a stream counts as having if it names none */
    int back; /* where the pages go when the block ends */
} managed_block;

static PyObject *
block_enter(PyObject *object, PyObject *unused CM_UNUSED)
{
    managed_block *self = (managed_block *)(void *)object;
    cm_buffer *buffer = self->buffer;
    int location, before;
    if (self->stage != NOT_ENTERED) {
        PyErr_SetString(PyExc_RuntimeError,
                        "the block can be entered once: write `with buf.on(...)` for "
                        "each");
        return NULL;
    }
    if (cm_arg_location(buffer->state, self->device, "device", &location) < 0
        || cm_buffer_read_prefetch_location(buffer, &before) < 0) {
        return NULL;
    }
    self->stage = INSIDE;
    self->home = cm_buffer_home(buffer, location);
    self->back = before == CM_NO_LOCATION ? CM_HOST_LOCATION : before;
    if (cm_buffer_prefetch_to(buffer, location, self->stream, self->home) < 0) {
        return NULL;
    }
    return Py_NewRef((PyObject *)buffer);
}

/* Send the pages back. The move is queued on the stream of the first move or, if the
 * block was given no stream, on the current stream of the same device. So it comes
 * after the block's work on that stream, even if the pages go to another device. */
static PyObject *
block_exit(PyObject *object, PyObject *const *args CM_UNUSED,
           Py_ssize_t nargs CM_UNUSED)
{
    managed_block *self = (managed_block *)(void *)object;
    cm_buffer *buffer = self->buffer;
    if (self->stage != INSIDE) {
        PyErr_SetString(PyExc_RuntimeError, "the block was not entered");
        return NULL;
    }
    self->stage = LEFT;
    if (buffer->storage->closed || cm_buffer_with_ended(buffer)) {
        Py_RETURN_NONE;
    }
    int result = cm_buffer_prefetch_to(buffer, self->back, self->stream, self->home);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static void
block_dealloc(PyObject *object)
{
    managed_block *self = (managed_block *)(void *)object;
    PyObject *buffer = (PyObject *)self->buffer;
    PyObject *device = self->device;
    PyObject *stream = self->stream;
    cm_object_free(object);
    Py_DECREF(buffer);
    Py_XDECREF(device);
    Py_XDECREF(stream);
}

PyObject *
cm_buffer_on(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames)
{
    static const char *const names[] = {"device", "stream", NULL};
    cm_buffer *self = (cm_buffer *)object;
    PyObject *values[2];
    if (cm_args_parse("on", args, nargs, kwnames, names, 1, 0, values) < 0) {
        return NULL;
    }
    managed_block *block = PyObject_New(managed_block, self->state->managed_block_type);
    if (block == NULL) {
        return NULL;
    }
    block->buffer = (cm_buffer *)Py_NewRef(object);
    block->device = Py_XNewRef(values[0]);
    block->stream = Py_XNewRef(values[1]);
    block->stage = NOT_ENTERED;
    block->home = block->back = CM_NO_LOCATION;
    return (PyObject *)(void *)block;
}

static PyMethodDef block_methods[] = {
    {"__enter__", block_enter, METH_NOARGS, "Send the pages there."},
    {"__exit__", CM_METHOD(block_exit), METH_FASTCALL, "Send them back."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot block_slots[] = {
    {Py_tp_dealloc, (void *)block_dealloc},
    {Py_tp_methods, block_methods},
    {0, NULL},
};

int
cm_register_managed_block_type(PyObject *module, cm_state *state)
{
    return cm_type_add(module, "cumem._core._ManagedBlock", sizeof(managed_block),
                       Py_TPFLAGS_DISALLOW_INSTANTIATION, block_slots, NULL,
                       &state->managed_block_type);
}
