/* SPDX-License-Identifier: Apache-2.0 */
/* The functions copy(), copy_async() and asnumpy(), and the methods of buffers that do
 * the same: to_numpy() and `buf[index] = value`. */
#include "python/copy/copy_functions.h"

#include "docstrings.h"
#include "python/buffer/methods.h"
#include "python/copy/call.h"
#include "python/copy/copy_objects.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"

/* -- copy() and copy_async() -------------------------------------------------------------- */

static PyObject *
copy_with(PyObject *module, const char *function, PyObject *const *args,
          Py_ssize_t nargs, PyObject *kwnames, bool blocking)
{
    const char *fourth = blocking ? "progress" : "after";
    const char *const names[] = {"dst",     "src",   "stream", fourth,
                                 "casting", "scale", "offset", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[7];
    cm_call_frame frame;
    if (cm_args_parse(function, args, nargs, kwnames, names, 2, 2, values) < 0) {
        return NULL;
    }
    PyObject *answer = NULL;
    int device = cm_device_hint_of(state, values[0], values[1], values[2]);
    PyObject *progress = blocking ? values[3] : NULL;
    if (cm_call_enter(&frame, state, values[2], device, progress, "copy") == 0) {
        cm_copy_how how = {
            frame.stream, .blocking = blocking, .after = blocking ? NULL : values[3],
            .casting = {values[4], values[5], values[6]}, .progress = &frame.progress};
        answer = cm_copy_objects(state, values[0], values[1], how);
    }
    return cm_call_leave(&frame, answer);
}

static PyObject *
copy_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    return copy_with(module, "copy", args, nargs, kwnames, true);
}

static PyObject *
copy_async_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    return copy_with(module, "copy_async", args, nargs, kwnames, false);
}

/* -- a new array: asnumpy(), Buffer.to_numpy() -------------------------------------------- */

/* Copy a buffer into a new array, and wait for it. */
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

/* asnumpy(): the package takes any object but a buffer, and makes a buffer or an array
 * of it. */
static PyObject *
asnumpy(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    return nargs == 1 && kwnames == NULL
                   && cm_buffer_check(cm_state_of_module(module), args[0])
               ? copy_out(args[0], NULL, NULL)
               : cm_package_pass("buffers.filling", "asnumpy", args, nargs, kwnames);
}

/* -- assignment to a part ----------------------------------------------------------------- */

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
    {"_maps_file", cm_maps_file, METH_VARARGS, CM_DOC__maps_file},
    {NULL, NULL, 0, NULL},
};
