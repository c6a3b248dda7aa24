/* SPDX-License-Identifier: Apache-2.0 */
/* What a buffer does: as an array, a number or a collection; for devices and streams;
 * and its end. */
#include "python/buffer/methods.h"

#include "python/core/arguments.h"
#include "python/core/errors.h"

/* -- as a NumPy array, and what follows from that: numbers -------------------------------- */

CM_DOC(cm_buffer_numpy_doc,
"numpy($self, /)\n--\n\n"
"View the buffer as a NumPy array, without a copy.\n\n"
"Returns\n-------\nnumpy.ndarray\n"
"    Same shape, strides and dtype, read-only if the buffer is. The array keeps the\n"
"    memory alive, and `free` is refused while it lives.\n\n"
"Raises\n------\nTypeError\n"
"    The memory is on the device: copy it with `to_numpy`, or use a managed buffer,\n"
"    which both sides can read.\n"
"ValueError\n    The buffer is closed.\n"
"CudaError\n    A transfer into the buffer failed.\n"
"RuntimeError\n"
"    In a child made by ``fork``: of managed memory, where a transfer was writing, or\n"
"    where there was no room for a copy.\n\n"
"Notes\n-----\n"
"Blocks: until unfinished transfers into the memory are done (GIL released, Ctrl-C\n"
"works).\n"
"Ordered after: those transfers; not after kernels of other libraries on managed or\n"
"mapped memory, for which a stream must be synchronised.");

static int
refuse_device(cm_buffer *self, const char *what)
{
    if (Py_TYPE((PyObject *)self) != self->state->device_buffer_type) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "%s: the host cannot read device memory; copy it first, with "
                 "buf.to_numpy() or cumem.asnumpy(buf), or use a managed buffer",
                 what);
    return -1;
}

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
    int64_t shape[1] = {high - low};
    return cm_buffer_new_view(self, NULL, self->offset + low, self->state->uint8_dtype,
                              1, shape, NULL);
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
    if (cm_buffer_check_open(self) < 0 || refuse_device(self, "numpy()") < 0
        || cm_buffer_check_inherited(self) < 0
        || cm_storage_wait(self->storage, false) < 0
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

CM_DOC(cm_buffer_array_doc,
"__array__($self, /, dtype=None, *, copy=None)\n--\n\n"
"NumPy's protocol: the array of `numpy`, or a copy of it.\n\n"
"Parameters\n----------\ndtype : dtype_like, optional\n"
"    Converts, which copies, if it differs.\n"
"copy : bool, optional\n    True always copies, False never does.\n\n"
"Raises\n------\nValueError\n"
"    A copy is needed and `copy` is False, or the buffer is closed.\n"
"TypeError\n    The memory is a device's: NumPy cannot read it in place.\n\n"
"Notes\n-----\nBlocks: until unfinished transfers into the memory are done.\n"
"Ordered after: those transfers.");

PyObject *
cm_buffer_array(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    static const char *const names[] = {"dtype", "copy", NULL};
    PyObject *values[2];
    if (cm_args_parse("__array__", args, nargs, kwnames, names, 1, 0, values) < 0) {
        return NULL;
    }
    bool has_dtype = values[0] != NULL && values[0] != Py_None;
    bool has_copy = values[1] != NULL && values[1] != Py_None;
    bool copy = false;
    PyObject *array = cm_buffer_numpy(object, NULL);
    if (array == NULL || (!has_dtype && !has_copy)) {
        return array;
    }
    PyObject *dtype = has_dtype ? cm_numpy_dtype(values[0]) : Py_NewRef(Py_None);
    if (dtype == NULL || (has_copy && cm_arg_bool(values[1], "copy", &copy) < 0)) {
        Py_XDECREF(dtype);
        Py_DECREF(array);
        return NULL;
    }
    PyObject *choice = !has_copy ? Py_None : copy ? Py_True : Py_False;
    return cm_package_call("views", "convert",
                           Py_BuildValue("(NNO)", array, dtype, choice));
}

/* Without these Python would read the bytes of a buffer as digits. */
static PyObject *
as_number(PyObject *object, PyObject *(*convert)(PyObject *))
{
    PyObject *array = cm_buffer_numpy(object, NULL);
    PyObject *result = array == NULL ? NULL : convert(array);
    Py_XDECREF(array);
    return result;
}

PyObject *
cm_buffer_int(PyObject *object)
{
    return as_number(object, PyNumber_Long);
}

PyObject *
cm_buffer_float(PyObject *object)
{
    return as_number(object, PyNumber_Float);
}

CM_DOC(cm_buffer_complex_doc,
"__complex__($self, /)\n--\n\n"
"The only element, for ``complex(buf)``.\n\n"
"Raises\n------\nTypeError\n"
"    There is not one element, it is no number, or the memory is a device's.\n\n"
"Notes\n-----\nBlocks: until unfinished transfers into the memory are done.\n"
"Ordered after: those transfers.");

static PyObject *
to_complex(PyObject *array)
{
    return PyObject_CallFunctionObjArgs((PyObject *)&PyComplex_Type, array, NULL);
}

PyObject *
cm_buffer_complex(PyObject *object, PyObject *unused CM_UNUSED)
{
    return as_number(object, to_complex);
}

/* -- as a collection: what would need its bytes reads them where the host can, or says
 * what to do -------------------------------------------------------------------------
 */

/* map(buffer.__getitem__, range(start, stop, step)): lazy, and it holds the buffer. */
static PyObject *
iterate(PyObject *object, Py_ssize_t start, Py_ssize_t stop, Py_ssize_t step)
{
    PyObject *range =
        PyObject_CallFunction((PyObject *)&PyRange_Type, "nnn", start, stop, step);
    PyObject *get =
        range == NULL ? NULL : PyObject_GetAttrString(object, "__getitem__");
    PyObject *views = NULL;
    if (get != NULL) {
        views = PyObject_CallFunctionObjArgs((PyObject *)&PyMap_Type, get, range, NULL);
    }
    Py_XDECREF(get);
    Py_XDECREF(range);
    return views;
}

/* The length of the first axis, or -1 with an exception. */
static Py_ssize_t
check_iterable(PyObject *object)
{
    const cm_buffer *self = (const cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return -1;
    }
    if (self->ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "iteration over a buffer without dimensions");
        return -1;
    }
    return (Py_ssize_t)cm_buffer_shape(self)[0];
}

PyObject *
cm_buffer_iter(PyObject *object)
{
    Py_ssize_t length = check_iterable(object);
    return length < 0 ? NULL : iterate(object, 0, length, 1);
}

CM_DOC(cm_buffer_reversed_doc,
"__reversed__($self, /)\n--\n\n"
"Iterate over the views ``buf[-1]``, ``buf[-2]``, … of the first axis.\n\n"
"Raises\n------\nTypeError\n    The buffer has no dimensions.\n"
"ValueError\n    The buffer is closed.");

PyObject *
cm_buffer_reversed(PyObject *object, PyObject *unused CM_UNUSED)
{
    Py_ssize_t length = check_iterable(object);
    return length < 0 ? NULL : iterate(object, length - 1, -1, -1);
}

/* Without this `in` would compare the views one by one, by identity. */
int
cm_buffer_contains(PyObject *object, PyObject *value CM_UNUSED)
{
    const cm_buffer *self = (const cm_buffer *)object;
    if (Py_TYPE(object) == self->state->device_buffer_type) {
        PyErr_SetString(PyExc_TypeError,
                        "a buffer does not search its values; copy it to the host "
                        "first, as in cumem.array(buf, kind=\"pinned\"), and use "
                        "`value in buf.numpy()` on that");
    }
    else {
        PyErr_SetString(PyExc_TypeError,
                        "a buffer does not search its values; use `value in "
                        "buf.numpy()`");
    }
    return -1;
}

/* As NumPy's arrays: that of the only element. */
int
cm_buffer_bool(PyObject *object)
{
    const cm_buffer *self = (const cm_buffer *)object;
    uint64_t nbytes = cm_buffer_nbytes(self);
    if (nbytes != (uint64_t)self->itemsize) {
        PyErr_Format(PyExc_ValueError,
                     "the truth of a buffer of %llu elements is ambiguous; use "
                     "`buf is not None`, `buf.size > 0` or buf.numpy().any()",
                     (unsigned long long)(nbytes / (uint64_t)self->itemsize));
        return -1;
    }
    PyObject *array = cm_buffer_numpy(object, NULL);
    int truth = array == NULL ? -1 : PyObject_IsTrue(array);
    Py_XDECREF(array);
    return truth;
}

/* -- managed memory: moving its pages ahead of use ----------------------------------------- */

CM_DOC(cm_buffer_prefetch_doc,
"prefetch($self, /, device=None, *, stream=None)\n--\n\n"
"Move the pages to a device or to the host ahead of use.\n\n"
"Parameters\n----------\ndevice : Device, int, str or 'host', optional\n"
"    Where to; default: cumem's current device.\n"
"stream : Stream or other stream object, optional\n"
"    Default: the current stream of that device.\n\n"
"Raises\n------\nValueError\n    There is no such device, or the buffer is closed.\n"
"TypeError\n    `device` or `stream` is of another type.\n"
"CudaError\n"
"    The driver refused, e.g. on devices without concurrent managed access.\n\n"
"Notes\n-----\nBlocks: no, the move is queued.\n"
"Ordered after: work on `stream`. Pages that the view shares with its neighbours move\n"
"whole.");

static bool
is_host_name(PyObject *object)
{
    return PyUnicode_Check(object)
           && (PyUnicode_CompareWithASCIIString(object, "host") == 0
               || PyUnicode_CompareWithASCIIString(object, "cpu") == 0);
}

static int
parse_location(cm_state *state, PyObject *object, int *out)
{
    if (object != NULL && is_host_name(object)) {
        *out = CM_HOST_LOCATION;
        return 0;
    }
    return cm_arg_device(state, object == NULL ? Py_None : object, "device", out);
}

/* The bytes from the lowest to the highest element. *nbytes 0 when there are none. */
static int
span(const cm_buffer *self, cm_address *address, uint64_t *nbytes)
{
    int64_t low;
    int64_t high;
    if (cm_buffer_bounds(self, &low, &high) < 0) {
        return -1;
    }
    *address = cm_buffer_address(self) + (uint64_t)low;
    *nbytes = (uint64_t)(high - low);
    return 0;
}

static int
prefetch(cm_buffer *self, int location, PyObject *stream_object)
{
    cm_storage *storage = self->storage;
    cm_address address;
    uint64_t nbytes;
    int home = location == CM_HOST_LOCATION ? storage->device : location;
    cm_stream *stream = cm_stream_from_object(
        self->state, stream_object == NULL ? Py_None : stream_object, home);
    if (stream == NULL) {
        return -1;
    }
    cm_runtime *runtime = cm_state_runtime(self->state);
    int result = -1;
    /* Both may have run Python code, which may have freed us. */
    if (runtime == NULL || cm_buffer_check_open(self) < 0
        || span(self, &address, &nbytes) < 0) {
        cm_stream_give(self->state, stream);
        return -1;
    }
    if (nbytes == 0) {
        result = 0;
    }
    else if (cm_storage_add_use(storage, stream) == 0) {
        cm_status status;
        cm_storage_pin(storage);
        Py_BEGIN_ALLOW_THREADS
        CM_ON_DEVICE(
            status, runtime, stream->device,
            cm_rt_prefetch_async(runtime, address, nbytes, location, stream->handle));
        Py_END_ALLOW_THREADS
        cm_storage_unpin(storage);
        result = cm_is_ok(status) ? 0
                                  : cm_py_raise_int(self->state, status,
                                                    "while prefetching managed memory");
    }
    cm_stream_give(self->state, stream);
    return result;
}

PyObject *
cm_buffer_prefetch(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    cm_buffer *self = (cm_buffer *)object;
    static const char *const names[] = {"device", "stream", NULL};
    PyObject *values[2];
    int location;
    if (cm_args_parse("prefetch", args, nargs, kwnames, names, 1, 0, values) < 0
        || cm_buffer_check_open(self) < 0
        || parse_location(self->state, values[0], &location) < 0
        || prefetch(self, location, values[1]) < 0) {
        return NULL;
    }
    return Py_NewRef(Py_None);
}

int
cm_buffer_read_prefetch_location(const cm_buffer *self, int *out)
{
    cm_address address;
    uint64_t nbytes;
    *out = CM_NO_LOCATION;
    cm_runtime *runtime = cm_state_runtime(self->state); /* may run Python code */
    if (runtime == NULL || cm_buffer_check_open(self) < 0
        || span(self, &address, &nbytes) < 0) {
        return -1;
    }
    if (nbytes == 0) {
        return 0;
    }
    cm_status status;
    cm_storage_pin(self->storage);
    cm_state_enter(self->state);
    Py_BEGIN_ALLOW_THREADS
    CM_ON_DEVICE(status, runtime, self->storage->device,
                 cm_rt_prefetch_location(runtime, address, nbytes, out));
    Py_END_ALLOW_THREADS
    cm_state_leave(self->state);
    cm_storage_unpin(self->storage);
    return cm_is_ok(status) ? 0
                            : cm_py_raise_int(self->state, status,
                                              "while asking for the prefetch location");
}

CM_DOC(cm_buffer_prefetch_location_doc,
"Where the memory was last prefetched to: a `Device`, ``'host'``, or None if nowhere\n"
"or to several places.");

PyObject *
cm_buffer_get_prefetch_location(PyObject *object, void *closure CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    int location;
    if (cm_buffer_check_open(self) < 0
        || cm_buffer_read_prefetch_location(self, &location) < 0) {
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

CM_DOC(cm_buffer_as_device_doc,
"as_device($self, /)\n--\n\n"
"View mapped or managed memory as a plain device buffer.\n\n"
"For consumers that refuse the other kinds: torch and JAX refuse managed memory, CuPy\n"
"refuses page-locked memory.\n\n"
"Returns\n-------\nDeviceBuffer\n"
"    The same bytes at their device address; it keeps the memory alive. A device\n"
"    buffer answers itself.\n\n"
"Raises\n------\nTypeError\n"
"    The memory is pinned or ordinary, so no device address is promised.\n"
"ValueError\n    The buffer is closed.");

PyObject *
cm_buffer_as_device(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    const cm_state *state = self->state;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    if (Py_TYPE(object) == state->device_buffer_type) {
        return Py_NewRef(object);
    }
    if (Py_TYPE(object) != state->mapped_type
        && Py_TYPE(object) != state->managed_type) {
        PyErr_Format(PyExc_TypeError,
                     "as_device() needs mapped or managed memory, and this is %s; use "
                     "empty_mapped() or empty_managed()",
                     cm_kind_name(self->storage->kind));
        return NULL;
    }
    return cm_buffer_new_view(self, state->device_buffer_type, self->offset,
                              self->dtype, self->ndim, cm_buffer_shape(self),
                              cm_buffer_strides(self));
}

/* -- record_stream -------------------------------------------------------------------- */

CM_DOC(cm_buffer_record_stream_doc,
"record_stream($self, stream, /)\n--\n\n"
"Say that a stream works on the memory, which cumem cannot see by itself.\n\n"
"After the buffer is dropped its memory is reused only when the work that the stream\n"
"had queued by then is done. If the stream is being captured now the memory belongs\n"
"to the graph, and is not reused before `shutdown`.\n\n"
"Parameters\n----------\n"
"stream : Stream, object with ``__cuda_stream__``, torch or CuPy or Numba stream, int\n"
"    None means the current stream.\n\n"
"Raises\n------\nTypeError\n    `stream` is no stream.\n"
"ValueError\n    The buffer or the stream is closed.\n"
"CudaError\n    The driver does not know the stream.");

PyObject *
cm_buffer_record_stream(PyObject *object, PyObject *stream_object)
{
    cm_buffer *self = (cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    cm_stream *stream =
        cm_stream_from_object(self->state, stream_object, self->storage->device);
    if (stream == NULL) {
        return NULL;
    }
    cm_storage *storage = cm_storage_hold(self->storage);
    int result = cm_storage_record_stream(storage, stream);
    cm_storage_release(storage, true);
    cm_stream_give(self->state, stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* -- the end -------------------------------------------------------------------------- */

CM_DOC(cm_buffer_free_doc,
"free($self, /)\n--\n\n"
"Give the memory back now instead of when the last reference goes.\n\n"
"All buffers that share the memory are closed. The pool reuses it when the work that\n"
"streams had queued on it is done. Where a transfer of the buffer is unfinished the\n"
"memory goes when that is done. Where the buffer ever went through the buffer protocol\n"
"it goes with the last reference: ``torch.frombuffer`` keeps no more than the object.\n"
"Freeing twice does nothing.\n\n"
"Raises\n------\nBufferError\n"
"    An array, memoryview or tensor over the memory is alive, or another thread is\n"
"    working on it.\n"
"CudaError\n    The memory was registered, and unlocking it failed.");

PyObject *
cm_buffer_free(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    return cm_storage_close(self->storage) < 0 ? NULL : Py_NewRef(Py_None);
}

CM_DOC(cm_buffer_enter_doc,
"__enter__($self, /)\n--\n\n"
"Return the buffer itself.\n\n"
"Raises\n------\nValueError\n    The buffer is closed.");

PyObject *
cm_buffer_enter(PyObject *object, PyObject *unused CM_UNUSED)
{
    return cm_buffer_check_open((cm_buffer *)object) < 0 ? NULL : Py_NewRef(object);
}

CM_DOC(cm_buffer_exit_doc,
"__exit__($self, exc_type, exc, tb, /)\n--\n\n"
"Close the buffer and views of it; the memory goes back once nothing uses it.\n\n"
"Unlike `free` it never fails: arrays and tensors made inside the block stay valid, and\n"
"the memory goes back with the last of them, or when the last transfer of the buffer is\n"
"done: at once where there are none. Where the buffer went through the buffer protocol or\n"
"``__cuda_array_interface__``, whose users may have kept no more than the object, it goes\n"
"with the last reference. For a view only the view is closed, and the memory is its\n"
"buffer's.");

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
