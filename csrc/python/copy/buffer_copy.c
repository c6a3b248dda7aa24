/* SPDX-License-Identifier: Apache-2.0 */
/* copy(), and what the module `copy` calls: new memory of the same kind and place. */
#include "python/buffer/buffer_object.h"
#include "python/buffer/methods.h"
#include "python/copy/buffer_methods.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/pool/allocate.h"

#define RETURNS                                                                        \
    "\n"                                                                               \
    "Returns\n"                                                                        \
    "-------\n"                                                                        \
    "Buffer\n"                                                                         \
    "    Of the same type, kind, flags and device; writable, also if this one is\n"    \
    "    not. It is no view and shares nothing.\n"                                     \
    "\n"                                                                               \
    "Raises\n"                                                                         \
    "------\n"
#define RAISES                                                                         \
    "ValueError\n"                                                                     \
    "    The buffer is closed.\n"                                                      \
    "OutOfMemoryError\n"                                                               \
    "    There is no room for the copy.\n"                                             \
    "CudaError\n"                                                                      \
    "    The copy failed.\n"                                                           \
    "\n"                                                                               \
    "Notes\n"                                                                          \
    "-----\n"                                                                          \
    "Blocks: until the bytes are there (GIL released).\n"                              \
    "Ordered after: work that cumem knows of on this buffer, and the current "         \
    "stream.\n"

const char cm_buffer_copy_doc[] =
    "copy($self, /, order='C')\n"
    "--\n"
    "\n"
    "Copy into a new buffer of the same kind, flags and device.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "order : {'C', 'F', 'A', 'K'}\n"
    "    Of the copy's elements, as in NumPy: 'A' is 'F' if this buffer is\n"
    "    Fortran-contiguous only, else 'C'; 'K' keeps the order of its "
    "strides.\n" RETURNS "TypeError\n"
    "    `order` is no string.\n" RAISES;

const char cm_buffer_dunder_copy_doc[] =
    "__copy__($self, /)\n"
    "--\n"
    "\n"
    "``copy.copy``: as NumPy's arrays do, ``buf.copy(order='K')``.\n" RETURNS RAISES;

const char cm_buffer_deepcopy_doc[] =
    "__deepcopy__($self, memo, /)\n"
    "--\n"
    "\n"
    "``copy.deepcopy``: ``buf.copy(order='K')``.\n" RETURNS RAISES;

static PyObject *
copy_of(PyObject *object, char order)
{
    cm_buffer *self = (cm_buffer *)object;
    cm_state *state = self->state;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    const cm_storage *storage = self->storage;
    bool pooled = storage->pool != NULL && !self->as_device;
    cm_kind kind = self->as_device ? CM_KIND_DEVICE : storage->kind;
    unsigned flags = pooled ? storage->flags : cm_buffer_default_flags(kind);
    cm_region region;
    cm_buffer_region(self, &region);
    cm_stream *stream = NULL;
    if (kind == CM_KIND_DEVICE) {
        stream = cm_stream_from_object(state, Py_None, storage->device);
        if (stream == NULL) {
            return NULL;
        }
    }
    PyObject *copy = cm_buffer_allocate_like(state, NULL, kind, flags, storage->device,
                                             self->dtype, &region, order, stream);
    if (copy != NULL) {
        PyObject *done = cm_copy_objects(state, copy, object, stream, true);
        if (done == NULL) {
            Py_CLEAR(copy);
        }
        Py_XDECREF(done);
    }
    cm_stream_give(state, stream);
    return copy;
}

PyObject *
cm_buffer_copy(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    static const char *const names[] = {"order", NULL};
    PyObject *value;
    char order = 'C';
    if (cm_args_parse("copy", args, nargs, kwnames, names, 1, 0, &value) < 0
        || (value != NULL && cm_arg_order_like(value, "order", 'C', &order) < 0)) {
        return NULL;
    }
    return copy_of(object, order);
}

PyObject *
cm_buffer_dunder_copy(PyObject *object, PyObject *unused CM_UNUSED)
{
    return copy_of(object, 'K');
}

PyObject *
cm_buffer_deepcopy(PyObject *object, PyObject *memo CM_UNUSED)
{
    return copy_of(object, 'K');
}

int
cm_buffer_ass_subscript(PyObject *object, PyObject *index, PyObject *value)
{
    cm_buffer *self = (cm_buffer *)object;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "the elements of a buffer cannot be deleted");
        return -1;
    }
    PyObject *target = cm_buffer_subscript(object, index);
    if (target == NULL) {
        return -1;
    }
    PyObject *done = cm_copy_objects(self->state, target, value, NULL, true);
    Py_DECREF(target);
    if (done == NULL) {
        return -1;
    }
    Py_DECREF(done);
    return 0;
}
