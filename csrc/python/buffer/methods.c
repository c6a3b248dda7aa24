/* SPDX-License-Identifier: Apache-2.0 */
/* Methods that make an array of a buffer, note a stream that uses it, or end it. */
#include "python/buffer/methods.h"

#include "python/core/arguments.h"
#include "python/core/errors.h"

/* -- as a NumPy array --------------------------------------------------------------------- */

/* Make a flat buffer of the bytes that the buffer spans, over the same storage. It can
 * be exported even if the dtype has no buffer format. */
static PyObject *
flat_span(cm_buffer *self)
{
    int64_t low;
    int64_t high;
    if (cm_buffer_bounds(self, &low, &high) < 0) {
        return NULL;
    }
    const int64_t shape[1] = {high - low};
    const int64_t strides[1] = {1};
    return cm_buffer_new_view(self, NULL, self->offset + low, self->state->uint8_dtype,
                              1, shape, strides);
}

/* Export the buffer as a memoryview, which counts as an export until the last array
 * over it is gone, and through which the owner of the array can be found. */
static PyObject *
export_for_numpy(cm_buffer *self)
{
    /* This is an export, whoever asks for it, so the C stack need not be looked at. */
    self->storage->was_exported = true;
    PyObject *owner = PyMemoryView_FromObject((PyObject *)self);
    if (owner == NULL
        && (PyErr_ExceptionMatches(PyExc_ValueError)
            || PyErr_ExceptionMatches(PyExc_BufferError))) {
        PyErr_Clear();
        PyObject *span = flat_span(self);
        if (span != NULL) {
            owner = PyMemoryView_FromObject(span);
            Py_DECREF(span);
        }
    }
    if (owner != NULL) {
        /* The memoryview counts as an export while it lives, which is enough, so the
         * storage need not remember it for good. */
        self->storage->view_count--;
    }
    return owner;
}

PyObject *
cm_buffer_numpy(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (cm_kind_is_on_device(cm_buffer_kind(self))) {
        return cm_package_call("buffers.views", "refuse_host", PyTuple_Pack(1, object));
    }
    if (cm_buffer_check_inherited(self) < 0 || cm_storage_wait(self->storage, false) < 0
        || cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    PyObject *owner = export_for_numpy(self);
    if (owner == NULL) {
        return NULL;
    }
    PyObject *array =
        cm_numpy_view(owner, cm_buffer_host(self), self->dtype, self->ndim,
                      cm_buffer_shape(self), cm_buffer_strides(self), self->readonly);
    Py_DECREF(owner);
    return array;
}

/* True if nobody but the caller refers to the object, so nobody has kept it. */
static bool
is_alone(PyObject *object)
{
    return Py_REFCNT(object) == 1;
}

PyObject *
cm_buffer_read(cm_buffer *self, cm_array_reader *read, PyObject *argument)
{
    cm_storage *storage = self->storage;
    bool was_exported = storage->was_exported;
    PyObject *array = cm_buffer_numpy((PyObject *)self, NULL);
    if (array == NULL) {
        return NULL;
    }
    uint64_t number = self->state->export_total;
    PyObject *view = PyObject_GetAttrString(array, "base");
    PyObject *answer = view == NULL ? NULL : read(array, argument);
    bool was_kept = !is_alone(array);
    Py_DECREF(array);
    was_kept = was_kept || view == NULL || !is_alone(view);
    if (!was_exported && !was_kept && number == self->state->export_total) {
        storage->was_exported = false;
    }
    cm_kept_error kept = cm_error_keep();
    Py_XDECREF(view);
    cm_error_restore(kept);
    return answer;
}

static PyObject *
call_with(PyObject *array, PyObject *function)
{
    return PyObject_CallFunctionObjArgs(function, array, NULL);
}

PyObject *
cm_buffer_read_by(PyObject *object, PyObject *function)
{
    return cm_buffer_read((cm_buffer *)object, call_with, function);
}

/* -- record_stream -------------------------------------------------------------------- */

PyObject *
cm_buffer_record_stream(PyObject *object, PyObject *stream_object)
{
    cm_buffer *self = (cm_buffer *)object;
    cm_state *state = self->state;
    cm_storage *storage = self->storage;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(state, stream_object, storage->device);
    if (stream == NULL) {
        return NULL;
    }
    int result = cm_storage_add_lasting_use(storage, stream);
    if (result == 0) {
        cm_status status;
        bool capturing = false;
        status = CM_WITHOUT_GIL(cm_stream_ask_capturing(stream->rt, stream->device,
                                                        stream->handle, &capturing));
        storage->was_captured = storage->was_captured || capturing;
        result = cm_py_check(state, status, "while recording a stream");
    }
    cm_stream_give(state, stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* -- keep ------------------------------------------------------------------------------ */

PyObject *
cm_buffer_keep(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    static const char *const names[] = {"keep", NULL};
    cm_buffer *self = (cm_buffer *)object;
    PyObject *given;
    if (cm_args_parse("keep", args, nargs, kwnames, names, 1, 0, &given) < 0) {
        return NULL;
    }
    if (given != NULL && !PyBool_Check(given)) {
        (void)cm_arg_refuse(given, "keep", "a bool");
        return NULL;
    }
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    self->storage->is_kept = given != Py_False;
    return Py_NewRef(Py_None);
}

/* -- the end -------------------------------------------------------------------------- */

PyObject *
cm_buffer_free(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    return cm_storage_close(self->storage) < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *
cm_buffer_enter(PyObject *object, PyObject *unused CM_UNUSED)
{
    return cm_buffer_check_open((cm_buffer *)object) < 0 ? NULL : Py_NewRef(object);
}

PyObject *
cm_buffer_exit(PyObject *object, PyObject *const *args CM_UNUSED, Py_ssize_t nargs)
{
    if (nargs != 3) {
        PyErr_Format(PyExc_TypeError, "__exit__() takes 3 arguments, not %zd", nargs);
        return NULL;
    }
    cm_buffer *self = (cm_buffer *)object;
    self->with_ended = true;
    if (self->base == NULL && !self->storage->address_was_exported) {
        cm_storage_retire(self->storage);
    }
    return Py_NewRef(Py_None);
}
