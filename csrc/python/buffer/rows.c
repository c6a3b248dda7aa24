/* SPDX-License-Identifier: Apache-2.0 */
/* `for row in buf` and reversed(buf) give a view for each index of the first axis. Each
 * view is made only when it is asked for. The iterator holds the buffer. It is a type
 * of its own because Python's iterator over sequences needs sequence slots. Buffers
 * have none, since other libraries would then take them for lists. */
#include "python/buffer/methods.h"
#include "python/core/types.h"

typedef struct rows {
    PyObject_HEAD
    cm_buffer *buffer; /* owned */
    int64_t next;      /* the index of the next row */
    int64_t step;      /* 1 or -1 */
    int64_t left;      /* how many rows are still to come */
} rows;

static PyObject *
row_of(cm_buffer *self, int64_t index)
{
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    int64_t offset = self->offset;
    /* A buffer without elements has no bytes to point at, and its strides may be so
     * large that this product would overflow. */
    if (cm_buffer_size(self) > 0) {
        offset += index * cm_buffer_strides(self)[0];
    }
    return cm_buffer_new_view(self, NULL, offset, self->dtype, self->ndim - 1,
                              cm_buffer_shape(self) + 1, cm_buffer_strides(self) + 1);
}

/* -- slots -------------------------------------------------------------------------------- */

static PyObject *
rows_next(PyObject *object)
{
    rows *self = (rows *)(void *)object;
    if (self->left == 0) {
        return NULL;
    }
    PyObject *row = row_of(self->buffer, self->next);
    if (row != NULL) {
        self->next += self->step;
        self->left--;
    }
    return row;
}

static PyObject *
rows_length_hint(PyObject *object, PyObject *unused CM_UNUSED)
{
    return PyLong_FromLongLong(((rows *)(void *)object)->left);
}

static void
rows_dealloc(PyObject *object)
{
    PyObject *buffer = (PyObject *)((rows *)(void *)object)->buffer;
    cm_object_free(object);
    Py_DECREF(buffer);
}

static PyMethodDef rows_methods[] = {
    {"__length_hint__", rows_length_hint, METH_NOARGS,
     "Return how many rows are still to come."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot rows_slots[] = {
    {Py_tp_dealloc, (void *)rows_dealloc},
    {Py_tp_iter, (void *)PyObject_SelfIter},
    {Py_tp_iternext, (void *)rows_next},
    {Py_tp_methods, rows_methods},
    {0, NULL},
};

int
cm_register_rows_type(PyObject *module, cm_state *state)
{
    return cm_type_add(module, "cumem._core._Rows", sizeof(rows),
                       Py_TPFLAGS_DISALLOW_INSTANTIATION, rows_slots, NULL,
                       &state->rows_type);
}

/* -- the buffer's side -------------------------------------------------------------------- */

static PyObject *
iterate(cm_buffer *self, bool backwards)
{
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (self->ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "iteration over a buffer without dimensions");
        return NULL;
    }
    rows *iterator = PyObject_New(rows, self->state->rows_type);
    if (iterator == NULL) {
        return NULL;
    }
    iterator->buffer = (cm_buffer *)Py_NewRef((PyObject *)self);
    iterator->left = cm_buffer_shape(self)[0];
    iterator->next = backwards ? iterator->left - 1 : 0;
    iterator->step = backwards ? -1 : 1;
    return (PyObject *)(void *)iterator;
}

PyObject *
cm_buffer_iter(PyObject *object)
{
    return iterate((cm_buffer *)object, false);
}

PyObject *
cm_buffer_reversed(PyObject *object, PyObject *unused CM_UNUSED)
{
    return iterate((cm_buffer *)object, true);
}
