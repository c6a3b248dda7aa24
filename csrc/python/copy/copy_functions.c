/* SPDX-License-Identifier: Apache-2.0 */
/* Has the functions copy(), copy_async() and asnumpy(), the method to_numpy() of
 * buffers, and the assignment `buf[index] = value`. */
#include "python/copy/copy_functions.h"

#include "docstrings.h"
#include "python/buffer/methods.h"
#include "python/copy/call.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/core/values.h"
#include "python/protocols/protocols.h"

/* -- copy() and copy_async() -------------------------------------------------------------- */

/* The indices of the arguments of copy() and copy_async(). */
enum { DST, SRC, STREAM, PROGRESS, CASTING, SCALE, OFFSET, ARGUMENT_COUNT };
enum { AFTER = PROGRESS };

/* Make a copy with these arguments, among which NULL stands for one that was not
 * given. `before` is the prefix of cm_copy_how. Returns what cm_copy_objects() returns.
 */
static PyObject *
copy_with(cm_state *state, const char *before, PyObject *const *values, bool blocking)
{
    cm_call_frame frame;
    PyObject *answer = NULL;
    int device = cm_device_hint_of(state, values[DST], values[SRC], values[STREAM], 0);
    PyObject *progress = blocking ? values[PROGRESS] : NULL;
    if (cm_call_enter(&frame, state, values[STREAM], device, progress, "copy") == 0) {
        cm_copy_how how = {frame.stream,
                           .blocking = blocking,
                           .after = blocking ? NULL : values[AFTER],
                           .casting = {values[CASTING], values[SCALE], values[OFFSET]},
                           .progress = &frame.progress,
                           .prefix = before};
        answer = cm_copy_objects(state, values[DST], values[SRC], how);
    }
    return cm_call_leave(&frame, answer);
}

static PyObject *
read_and_copy(PyObject *module, const char *function, PyObject *const *args,
              Py_ssize_t nargs, PyObject *kwnames, bool blocking)
{
    const char *fourth = blocking ? "progress" : "after";
    const char *const names[] = {"dst",     "src",   "stream", fourth,
                                 "casting", "scale", "offset", NULL};
    PyObject *values[ARGUMENT_COUNT];
    if (cm_args_parse(function, args, nargs, kwnames, names, 2, 2, values) < 0) {
        return NULL;
    }
    return copy_with(cm_state_of_module(module), NULL, values, blocking);
}

int
cm_copy_now(cm_state *state, const char *before, PyObject *dst, PyObject *src,
            PyObject *stream, PyObject *casting)
{
    PyObject *const values[ARGUMENT_COUNT] = {
        [DST] = dst, [SRC] = src, [STREAM] = stream, [CASTING] = casting};
    PyObject *done = copy_with(state, before, values, true);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int
cm_copy_behind(cm_state *state, const char *before, PyObject *dst, PyObject *src,
               PyObject *after, PyObject *casting)
{
    PyObject *const values[ARGUMENT_COUNT] = {
        [DST] = dst, [SRC] = src, [AFTER] = after, [CASTING] = casting};
    PyObject *transfer = copy_with(state, before, values, false);
    if (transfer == NULL) {
        return -1;
    }
    PyObject *done = PyObject_CallMethod(transfer, "wait", NULL);
    Py_DECREF(transfer);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static PyObject *
copy_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    return read_and_copy(module, "copy", args, nargs, kwnames, true);
}

static PyObject *
copy_async_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    return read_and_copy(module, "copy_async", args, nargs, kwnames, false);
}

/* -- a new array: asnumpy(), Buffer.to_numpy() -------------------------------------------- */

/* Copy a buffer into a new array, and wait for the copy. Returns the array, or NULL
 * with an exception. */
static PyObject *
copy_out(PyObject *object, PyObject *stream, PyObject *progress)
{
    const cm_buffer *self = (const cm_buffer *)object;
    PyObject *array = NULL;
    cm_call_frame frame;
    int device = cm_device_hint(self->state, object, stream, 0);
    if (cm_call_enter(&frame, self->state, stream, device, progress, "copy") == 0
        && cm_buffer_check_open(self) == 0) {
        array = cm_numpy_empty(self->dtype, self->ndim, cm_buffer_shape(self));
    }
    if (array != NULL) {
        cm_copy_how how = {frame.stream, .blocking = true, .progress = &frame.progress};
        PyObject *done = cm_copy_objects(self->state, array, object, how);
        if (done == NULL) {
            Py_CLEAR(array);
        }
        Py_XDECREF(done);
    }
    return cm_call_leave(&frame, array);
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
    return copy_out(object, values[0], values[1]);
}

/* Copy an array into a new one, and wait for the copy. If the array lies in memory of a
 * buffer, the copy comes after the work on that buffer. Returns the new array, or NULL
 * with an exception. */
static PyObject *
copy_array(cm_state *state, PyObject *source, PyObject *stream, PyObject *progress)
{
    cm_region layout;
    cm_numpy_layout(source, &layout);
    PyObject *array =
        cm_numpy_empty(cm_numpy_dtype_of(source), layout.ndim, layout.shape);
    if (array == NULL) {
        return NULL;
    }
    PyObject *const values[ARGUMENT_COUNT] = {
        [DST] = array, [SRC] = source, [STREAM] = stream, [PROGRESS] = progress};
    PyObject *done = copy_with(state, NULL, values, true);
    if (done == NULL) {
        Py_CLEAR(array);
    }
    Py_XDECREF(done);
    return array;
}

/* The function asnumpy(). An object that is neither a buffer nor an array is first made
 * a buffer if it exports memory, or otherwise an array. */
static PyObject *
asnumpy(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"obj", "stream", "progress", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[3];
    if (cm_args_parse("asnumpy", args, nargs, kwnames, names, 1, 1, values) < 0) {
        return NULL;
    }
    PyObject *object = values[0];
    if (cm_buffer_check(state, object)) {
        return copy_out(object, values[1], values[2]);
    }
    if (cm_numpy_is_array(object)) {
        return copy_array(state, object, values[1], values[2]);
    }
    PyObject *array = NULL;
    if (cm_operand_is_memory(state, object)) {
        PyObject *buffer = cm_asbuffer_on(state, object, values[1]);
        if (buffer != NULL) {
            array = copy_out(buffer, values[1], values[2]);
            Py_DECREF(buffer);
        }
        return array;
    }
    PyObject *source = cm_value_read_array(object);
    if (source != NULL) {
        array = copy_array(state, source, values[1], values[2]);
        Py_DECREF(source);
    }
    return array;
}

/* -- assignment to a part ----------------------------------------------------------------- */

/* Make the assignment `buf[index] = value`. Returns 0, or -1 with an exception. */
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
    PyObject *done =
        cm_copy_objects(self->state, target, value, (cm_copy_how){.blocking = true});
    Py_DECREF(target);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* -- table -------------------------------------------------------------------------------- */

PyMethodDef cm_copy_methods[] = {
    {"copy", CM_METHOD(copy_function), CM_KEYWORDS, CM_DOC_copy},
    {"copy_async", CM_METHOD(copy_async_function), CM_KEYWORDS, CM_DOC_copy_async},
    {"asnumpy", CM_METHOD(asnumpy), CM_KEYWORDS, CM_DOC_asnumpy},
    {"_check_casting", cm_check_casting_of, METH_VARARGS, CM_DOC__check_casting},
    {"_explain", cm_explain, METH_VARARGS, CM_DOC__explain},
    {"_flush_cache", cm_flush_cache, METH_O, CM_DOC__flush_cache},
    {"_raw_copy", cm_raw_copy, METH_VARARGS, CM_DOC__raw_copy},
    {"_transfer_file", cm_transfer_file, METH_VARARGS, CM_DOC__transfer_file},
    {"_write_files", cm_write_files, METH_VARARGS, CM_DOC__write_files},
    {"_write_file_async", cm_write_file_async, METH_VARARGS, CM_DOC__write_file_async},
    {"_maps_file", cm_maps_file, METH_VARARGS, CM_DOC__maps_file},
    {NULL, NULL, 0, NULL},
};
