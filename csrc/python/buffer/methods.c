/* SPDX-License-Identifier: Apache-2.0 */
/* What a buffer does: as an array, a number or a collection; for devices and streams;
 * and its end. */
#include "python/buffer/methods.h"

#include "python/core/arguments.h"
#include "python/core/errors.h"

/* -- as a NumPy array, and what follows from that: numbers -------------------------------- */

/* The bytes that the buffer spans, as a flat buffer of the same storage: what can
 * export dtypes that have no buffer format. */
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

/* A memoryview counts as an export until the last array over it is gone; through it the
 * owner of the array can be found. */
static PyObject *
export_for_numpy(cm_buffer *self)
{
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
        self->storage->view_count--; /* counted while it lives, not merely remembered */
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
        PyErr_SetString(PyExc_TypeError,
                        "numpy(): the host cannot read device memory; copy it first, "
                        "with buf.to_numpy() or cumem.asnumpy(buf), or use a managed "
                        "buffer");
        return NULL;
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

/* What cumem.extension.views.<function>(buffer, more) answers. */
static PyObject *
ask_package(const char *function, PyObject *object, PyObject *more)
{
    return cm_package_call("extension.views", function, PyTuple_Pack(2, object, more));
}

PyObject *
cm_buffer_array(PyObject *object, PyObject *arguments, PyObject *keywords)
{
    return cm_package_call("extension.views", "as_array",
                           Py_BuildValue("(OOO)", object, arguments,
                                         keywords == NULL ? Py_None : keywords));
}

/* Without these Python would read the bytes of a buffer as digits. */
static PyObject *
read_number(PyObject *object, PyObject *(*read)(PyObject *))
{
    PyObject *array = cm_buffer_numpy(object, NULL);
    PyObject *number = array == NULL ? NULL : read(array);
    Py_XDECREF(array);
    return number;
}

PyObject *
cm_buffer_int(PyObject *object)
{
    return read_number(object, PyNumber_Long);
}

PyObject *
cm_buffer_float(PyObject *object)
{
    return read_number(object, PyNumber_Float);
}

PyObject *
cm_buffer_complex(PyObject *object, PyObject *unused CM_UNUSED)
{
    return ask_package("as_number", object, (PyObject *)&PyComplex_Type);
}

int
cm_buffer_bool(PyObject *object)
{
    PyObject *answer = ask_package("as_number", object, (PyObject *)&PyBool_Type);
    Py_XDECREF(answer);
    return answer == NULL ? -1 : answer == Py_True;
}

/* -- as a collection ---------------------------------------------------------------------- */

static PyObject *
iterate(PyObject *object, PyObject *backwards)
{
    return cm_buffer_check_open((cm_buffer *)object) < 0
               ? NULL
               : ask_package("iterate", object, backwards);
}

PyObject *
cm_buffer_iter(PyObject *object)
{
    return iterate(object, Py_False);
}

PyObject *
cm_buffer_reversed(PyObject *object, PyObject *unused CM_UNUSED)
{
    return iterate(object, Py_True);
}

/* Without this `in` would compare the views one by one, by identity. */
int
cm_buffer_contains(PyObject *object, PyObject *value CM_UNUSED)
{
    return cm_package_refuse("extension.views", "refuse_search",
                             PyTuple_Pack(1, object));
}

/* -- managed memory: moving its pages ahead of use ----------------------------------------- */

/* Move the pages from the lowest to the highest element to `location`, on `stream`;
 * NULL: ask where they were moved to last. Nothing is done where there are none. */
static int
prefetch(const cm_buffer *self, cm_stream *stream, int *location)
{
    cm_storage *storage = self->storage;
    cm_runtime *rt = cm_state_runtime(self->state);
    int64_t low;
    int64_t high;
    /* This and reading the arguments may have run Python code, which may have freed us.
     */
    if (rt == NULL || cm_buffer_check_open(self) < 0
        || cm_buffer_bounds(self, &low, &high) < 0) {
        return -1;
    }
    if (low == high) {
        return 0;
    }
    if (stream != NULL && cm_storage_add_use(storage, stream) < 0) {
        return -1;
    }
    cm_address address = cm_buffer_address(self) + (uint64_t)low;
    uint64_t nbytes = (uint64_t)(high - low);
    cm_storage_pin(storage);
    cm_state_enter(self->state);
    cm_status status = CM_WITHOUT_GIL(CM_ON_DEVICE(
        rt, stream != NULL ? stream->device : storage->device,
        stream != NULL
            ? cm_rt_prefetch_async(rt, address, nbytes, *location, stream->handle)
            : cm_rt_prefetch_location(rt, address, nbytes, location)));
    cm_state_leave(self->state);
    cm_storage_unpin(storage);
    return cm_py_check(self->state, status,
                       stream != NULL ? "while prefetching managed memory"
                                      : "while asking for the prefetch location");
}

static bool
is_host_name(PyObject *object)
{
    return PyUnicode_Check(object)
           && (PyUnicode_CompareWithASCIIString(object, "host") == 0
               || PyUnicode_CompareWithASCIIString(object, "cpu") == 0);
}

PyObject *
cm_buffer_prefetch(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    cm_buffer *self = (cm_buffer *)object;
    static const char *const names[] = {"device", "stream", NULL};
    PyObject *values[2];
    int location = CM_HOST_LOCATION;
    if (cm_args_parse("prefetch", args, nargs, kwnames, names, 1, 0, values) < 0
        || cm_buffer_check_open(self) < 0
        || ((values[0] == NULL || !is_host_name(values[0]))
            && cm_arg_device(self->state, values[0], "device", &location) < 0)) {
        return NULL;
    }
    int home = location == CM_HOST_LOCATION ? self->storage->device : location;
    cm_stream *stream = cm_stream_from_object(
        self->state, values[1] == NULL ? Py_None : values[1], home);
    if (stream == NULL) {
        return NULL;
    }
    int result = prefetch(self, stream, &location);
    cm_stream_give(self->state, stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

int
cm_buffer_read_prefetch_location(const cm_buffer *self, int *out)
{
    *out = CM_NO_LOCATION;
    return prefetch(self, NULL, out);
}

PyObject *
cm_buffer_get_prefetch_location(PyObject *object, void *closure CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    int location;
    if (cm_buffer_read_prefetch_location(self, &location) < 0) {
        return NULL;
    }
    if (location == CM_HOST_LOCATION) {
        return PyUnicode_FromString("host");
    }
    if (location < 0) {
        return Py_NewRef(Py_None);
    }
    return cm_device_object_new(self->state, location);
}

/* -- as_device ------------------------------------------------------------------------ */

PyObject *
cm_buffer_as_device(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    const cm_state *state = self->state;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (cm_kind_is_on_device(cm_buffer_kind(self))) {
        return Py_NewRef(object);
    }
    if (!cm_kind_is_shared(self->storage->kind)) {
        PyErr_Format(PyExc_TypeError,
                     "as_device() needs mapped or managed memory, and this is %s; use "
                     "empty_mapped() or empty_managed()",
                     cm_kinds[self->storage->kind].text);
        return NULL;
    }
    return cm_buffer_new_view(self, state->buffer_types[CM_KIND_DEVICE], self->offset,
                              self->dtype, self->ndim, cm_buffer_shape(self),
                              cm_buffer_strides(self));
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
    self->deferred = true;
    if (self->base == NULL && !self->storage->was_named) {
        cm_storage_retire(self->storage);
    }
    return Py_NewRef(Py_None);
}
