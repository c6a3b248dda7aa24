/* SPDX-License-Identifier: Apache-2.0 */
/* Copies as Python sees them: copy(), copy_async(), asnumpy(), and what buffers have of
 * their kind. */
#include "python/copy/copy_functions.h"

#include "docstrings.h"
#include "python/buffer/methods.h"
#include "python/copy/buffer_methods.h"
#include "python/copy/call.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/core/progress.h"
#include "python/pool/allocate.h"

/* -- arguments ---------------------------------------------------------------------------- */

static int
device_hint(const cm_state *state, PyObject *dst, PyObject *src)
{
    int hint = cm_device_hint(state, dst, 0);
    return hint >= 0 ? hint : cm_device_hint(state, src, 0);
}

int
cm_copy_take_stream(cm_state *state, PyObject *dst, PyObject *src, PyObject *stream,
                    cm_stream **out)
{
    *out = NULL;
    if (!cm_arg_is_given(stream)) {
        return 0;
    }
    *out = cm_stream_from_object(state, stream, device_hint(state, dst, src));
    return *out == NULL ? -1 : 0;
}

/* A blocking copy that tells of its progress as `told` wants. */
static PyObject *
copy_and_tell(cm_state *state, PyObject *dst, PyObject *src, cm_stream *stream,
              PyObject *told)
{
    cm_progress progress;
    if (cm_progress_open(told, "copy", &progress) < 0) {
        return NULL;
    }
    cm_copy_how how = {stream, .blocking = true, .progress = &progress};
    PyObject *done = cm_copy_objects(state, dst, src, how);
    if (cm_progress_close(&progress) < 0) {
        Py_CLEAR(done);
    }
    return done;
}

/* -- copy() and copy_async() -------------------------------------------------------------- */

static PyObject *
copy_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    static const char *const names[] = {"dst", "src", "stream", "progress", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[4];
    cm_stream *stream;
    if (cm_args_parse("copy", args, nargs, kwnames, names, 2, 2, values) < 0
        || cm_copy_take_stream(state, values[0], values[1], values[2], &stream) < 0) {
        return NULL;
    }
    PyObject *done = copy_and_tell(state, values[0], values[1], stream, values[3]);
    cm_stream_give(state, stream);
    return done;
}

static PyObject *
copy_async_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    static const char *const names[] = {"dst", "src", "stream", "after", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[4];
    cm_stream *stream;
    cm_stream_list after;
    if (cm_args_parse("copy_async", args, nargs, kwnames, names, 2, 2, values) < 0
        || cm_copy_take_stream(state, values[0], values[1], values[2], &stream) < 0) {
        return NULL;
    }
    PyObject *transfer = NULL;
    int device = device_hint(state, values[0], values[1]);
    if (cm_stream_list_take(state, values[3], "after", device, &after) == 0) {
        cm_copy_how how = {stream, .after = &after};
        transfer = cm_copy_objects(state, values[0], values[1], how);
    }
    cm_stream_list_give(state, &after);
    cm_stream_give(state, stream);
    return transfer;
}

/* -- a new array: asnumpy(), Buffer.to_numpy() -------------------------------------------- */

static PyObject *
copy_to_array(cm_state *state, PyObject *source, cm_stream *stream, PyObject *told)
{
    cm_operand end;
    PyObject *array = NULL;
    if (cm_operand_init(state, &end, source, NULL, stream) == 0) {
        array = cm_numpy_empty(end.dtype, end.region.ndim, end.region.shape, 'C');
        PyObject *done =
            array == NULL ? NULL : copy_and_tell(state, array, end.keep, stream, told);
        if (done == NULL) {
            Py_CLEAR(array);
        }
        Py_XDECREF(done);
    }
    cm_operand_fini(&end);
    return array;
}

/* Lists, scalars and what only NumPy can read become arrays first. */
static PyObject *
copy_out(cm_state *state, PyObject *object, PyObject *stream_object, PyObject *told)
{
    cm_stream *stream;
    PyObject *array = NULL;
    PyObject *source = cm_operand_is_memory(state, object)
                           ? Py_NewRef(object)
                           : cm_numpy_as_array(object, NULL);
    if (source != NULL
        && cm_copy_take_stream(state, source, source, stream_object, &stream) == 0) {
        cm_state_enter(state);
        array = cm_state_runtime(state) == NULL
                    ? NULL
                    : copy_to_array(state, source, stream, told);
        cm_state_leave(state);
        cm_stream_give(state, stream);
    }
    Py_XDECREF(source);
    return array;
}

PyObject *
cm_buffer_to_numpy(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    static const char *const names[] = {"stream", "progress", NULL};
    PyObject *values[2];
    if (cm_args_parse("to_numpy", args, nargs, kwnames, names, 0, 0, values) < 0) {
        return NULL;
    }
    return copy_out(((cm_buffer *)(void *)object)->state, object, values[0], values[1]);
}

static PyObject *
asnumpy(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"obj", "stream", "progress", NULL};
    PyObject *values[3];
    if (cm_args_parse("asnumpy", args, nargs, kwnames, names, 1, 1, values) < 0) {
        return NULL;
    }
    return copy_out(cm_state_of_module(module), values[0], values[1], values[2]);
}

/* -- new memory of the same kind and place: Buffer.copy(), the module `copy` --------------- */

PyObject *
cm_buffer_copy_to(PyObject *object, cm_kind kind, char order)
{
    cm_buffer *self = (cm_buffer *)object;
    cm_state *state = self->state;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    const cm_storage *storage = self->storage;
    bool pooled = storage->pool != NULL && kind == storage->kind;
    unsigned flags = pooled ? storage->flags : cm_kinds[kind].flags;
    cm_region region;
    cm_buffer_region(self, &region);
    cm_stream *stream = NULL;
    if (cm_kind_is_ordered(kind)) {
        stream = cm_stream_from_object(state, Py_None, storage->device);
        if (stream == NULL) {
            return NULL;
        }
    }
    PyObject *copy = cm_buffer_allocate_like(state, NULL, kind, flags, storage->device,
                                             self->dtype, &region, order, stream);
    if (copy != NULL && cm_copy_now(state, copy, object, stream) < 0) {
        Py_CLEAR(copy);
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
        || (value != NULL && cm_arg_order(value, "order", true, 'C', &order) < 0)) {
        return NULL;
    }
    return cm_buffer_copy_to(object, cm_buffer_kind((cm_buffer *)object), order);
}

PyObject *
cm_buffer_dunder_copy(PyObject *object, PyObject *unused CM_UNUSED)
{
    return cm_buffer_copy_to(object, cm_buffer_kind((cm_buffer *)object), 'K');
}

/* buf[index] = value */
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
    int result = cm_copy_now(self->state, target, value, NULL);
    Py_DECREF(target);
    return result;
}

/* -- table -------------------------------------------------------------------------------- */

PyMethodDef cm_copy_methods[] = {
    {"copy", CM_METHOD(copy_function), CM_KEYWORDS, CM_DOC_copy},
    {"copy_async", CM_METHOD(copy_async_function), CM_KEYWORDS, CM_DOC_copy_async},
    {"asnumpy", CM_METHOD(asnumpy), CM_KEYWORDS, CM_DOC_asnumpy},
    {NULL, NULL, 0, NULL},
};
