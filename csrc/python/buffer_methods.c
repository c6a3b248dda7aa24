/* SPDX-License-Identifier: Apache-2.0 */
/* What a buffer gives to the host and when it ends: NumPy views, device views, copies,
 * free() and the context manager. */
#include "python/buffer_methods.h"

#include "python/arguments.h"
#include "python/buffer_object.h"
#include "python/errors.h"
#include "python/order.h"
#include "python/protocols.h"

/* -- numpy ---------------------------------------------------------------------------- */

const char cm_buffer_numpy_doc[] =
    "numpy($self, /)\n"
    "--\n"
    "\n"
    "View the buffer as a NumPy array, without a copy.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "numpy.ndarray\n"
    "    Same shape, strides and dtype, read-only if the buffer is. The array keeps "
    "the\n"
    "    memory alive, and `free` is refused while it lives.\n"
    "\n"
    "Raises\n"
    "------\n"
    "TypeError\n"
    "    The memory is on the device: copy it to a NumPy array with `copy`, or use a\n"
    "    managed buffer, which both sides can read.\n"
    "ValueError\n"
    "    The buffer is closed.\n"
    "CudaError\n"
    "    A transfer into the buffer failed.\n"
    "RuntimeError\n"
    "    In a child made by ``fork``.\n"
    "\n"
    "Notes\n"
    "-----\n"
    "Blocks: until unfinished transfers into the memory are done (GIL released, "
    "Ctrl-C\n"
    "works).\n"
    "Ordered after: those transfers; not after kernels of other libraries on managed "
    "or\n"
    "mapped memory, for which a stream must be synchronised.\n";

static int
refuse_device(cm_buffer *self, const char *what)
{
    if (Py_TYPE((PyObject *)self) != self->state->device_buffer_type) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError,
                 "%s: the host cannot read device memory; copy it first, as in "
                 "cumem.copy(numpy.empty(buf.shape, buf.dtype), buf), or use a managed "
                 "buffer",
                 what);
    return -1;
}

static int
check_not_forked(const cm_buffer *self)
{
    const cm_runtime *runtime = self->state->runtime;
    if (self->storage->pool != NULL && runtime != NULL
        && cm_runtime_is_forked(runtime)) {
        return cm_py_raise_int(self->state, cm_fail(CM_EFORKED, 0), NULL);
    }
    return 0;
}

/* The bytes that the buffer spans, as a flat buffer of the same storage: what can
 * export dtypes that have no buffer format. */
static PyObject *
flat_span(cm_buffer *self)
{
    cm_region region;
    int64_t low;
    int64_t high;
    cm_buffer_region(self, &region);
    cm_status status = cm_region_bounds(&region, &low, &high);
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, NULL);
    }
    PyObject *bytes = PyUnicode_FromString("u1");
    PyObject *dtype = bytes == NULL ? NULL : cm_numpy_dtype(bytes);
    Py_XDECREF(bytes);
    if (dtype == NULL) {
        return NULL;
    }
    int64_t shape[1] = {high - low};
    PyObject *span =
        cm_buffer_new_view(self, NULL, self->offset + low, dtype, 1, shape, NULL);
    Py_DECREF(dtype);
    return span;
}

/* A memoryview counts as an export until the last array over it is gone; through it the
 * owner of the array can be found. */
static PyObject *
export_for_numpy(cm_buffer *self)
{
    cm_storage *storage = self->storage;
    bool was_viewed = storage->was_viewed;
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
    storage->was_viewed = was_viewed; /* this export is counted, not merely remembered
                                       */
    return owner;
}

PyObject *
cm_buffer_numpy(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    if (cm_buffer_check_open(self) < 0 || refuse_device(self, "numpy()") < 0
        || check_not_forked(self) < 0 || cm_storage_wait(self->storage, false) < 0
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

const char cm_buffer_array_doc[] =
    "__array__($self, /, dtype=None, *, copy=None)\n"
    "--\n"
    "\n"
    "NumPy's protocol: the array of `numpy`, or a copy of it.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "dtype : dtype_like, optional\n"
    "    Converts, which copies, if it differs.\n"
    "copy : bool, optional\n"
    "    True always copies, False never does.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError\n"
    "    A copy is needed and `copy` is False, or the buffer is closed.\n"
    "TypeError\n"
    "    The memory is a device's: NumPy cannot read it in place.\n"
    "\n"
    "Notes\n"
    "-----\n"
    "Blocks: until unfinished transfers into the memory are done.\n"
    "Ordered after: those transfers.\n";

static PyObject *
convert_array(PyObject *array, PyObject *dtype, PyObject *copy)
{
    if (dtype != NULL && dtype != Py_None) {
        PyObject *wanted = cm_numpy_dtype(dtype);
        if (wanted == NULL) {
            return NULL;
        }
        PyObject *has = PyObject_GetAttrString(array, "dtype");
        int same = has == NULL ? -1 : PyObject_RichCompareBool(has, wanted, Py_EQ);
        Py_XDECREF(has);
        PyObject *converted = NULL;
        if (same == 0 && copy == Py_False) {
            PyErr_SetString(PyExc_ValueError, "another dtype needs a copy");
        }
        else if (same == 0) {
            converted = PyObject_CallMethod(array, "astype", "O", wanted);
        }
        Py_DECREF(wanted);
        if (same != 1) {
            return converted;
        }
    }
    if (copy == Py_True) {
        return PyObject_CallMethod(array, "copy", NULL);
    }
    return Py_NewRef(array);
}

PyObject *
cm_buffer_array(PyObject *object, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    static const char *const names[] = {"dtype", "copy", NULL};
    PyObject *values[2];
    if (cm_args_parse("__array__", args, nargs, kwnames, names, 1, 0, values) < 0) {
        return NULL;
    }
    PyObject *array = cm_buffer_numpy(object, NULL);
    if (array == NULL) {
        return NULL;
    }
    PyObject *result = convert_array(array, values[0], values[1]);
    Py_DECREF(array);
    return result;
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

/* -- as_device ------------------------------------------------------------------------ */

const char cm_buffer_as_device_doc[] =
    "as_device($self, /)\n"
    "--\n"
    "\n"
    "View mapped or managed memory as a plain device buffer.\n"
    "\n"
    "For consumers that refuse the other kinds: torch and JAX refuse managed memory, "
    "CuPy\n"
    "refuses page-locked memory.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "DeviceBuffer\n"
    "    The same bytes at their device address; it keeps the memory alive. A device\n"
    "    buffer answers itself.\n"
    "\n"
    "Raises\n"
    "------\n"
    "TypeError\n"
    "    The memory is pinned or ordinary, so no device address is promised.\n"
    "ValueError\n"
    "    The buffer is closed.\n";

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

/* -- copy ----------------------------------------------------------------------------- */

const char cm_buffer_copy_doc[] =
    "copy($self, /)\n"
    "--\n"
    "\n"
    "Copy into a new buffer of the same kind, flags and device.\n"
    "\n"
    "Returns\n"
    "-------\n"
    "Buffer\n"
    "    C-contiguous (Fortran-contiguous if this buffer is only that), writable.\n"
    "\n"
    "Raises\n"
    "------\n"
    "ValueError\n"
    "    The buffer is closed.\n"
    "OutOfMemoryError\n"
    "    There is no room for the copy.\n"
    "CudaError\n"
    "    The copy failed.\n"
    "\n"
    "Notes\n"
    "-----\n"
    "Blocks: until the bytes are there (GIL released).\n"
    "Ordered after: work that cumem knows of on this buffer, and the current stream.\n";

PyObject *
cm_buffer_copy(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    cm_state *state = self->state;
    if (cm_buffer_check_open(self) < 0) {
        return NULL;
    }
    cm_region region;
    cm_buffer_region(self, &region);
    bool fortran =
        cm_region_is_f_contiguous(&region) && !cm_region_is_c_contiguous(&region);
    const cm_storage *storage = self->storage;
    bool pooled = storage->pool != NULL && !self->as_device;
    cm_kind kind = self->as_device ? CM_KIND_DEVICE : storage->kind;
    unsigned flags = pooled ? storage->flags : cm_buffer_default_flags(kind);
    cm_stream *stream = NULL;
    if (kind == CM_KIND_DEVICE) {
        stream = cm_stream_from_object(state, Py_None, storage->device);
        if (stream == NULL) {
            return NULL;
        }
    }
    PyObject *copy =
        cm_buffer_allocate(state, kind, flags, storage->device, self->dtype, self->ndim,
                           cm_buffer_shape(self), fortran ? 'F' : 'C', stream);
    if (copy != NULL) {
        PyObject *done = cm_copy_objects(state, copy, object, stream, true);
        if (done == NULL) {
            Py_CLEAR(copy);
        }
        Py_XDECREF(done);
    }
    if (stream != NULL) {
        cm_stream_release(stream);
    }
    return copy;
}

/* -- record_stream -------------------------------------------------------------------- */

const char cm_buffer_record_stream_doc[] =
    "record_stream($self, stream, /)\n"
    "--\n"
    "\n"
    "Say that a stream works on the memory, which cumem cannot see by itself.\n"
    "\n"
    "After the buffer is dropped its memory is reused only when the work that the "
    "stream\n"
    "had queued by then is done. If the stream is being captured now the memory "
    "belongs\n"
    "to the graph, and is not reused before `shutdown`.\n"
    "\n"
    "Parameters\n"
    "----------\n"
    "stream : Stream, object with ``__cuda_stream__``, torch or CuPy or Numba stream, "
    "int\n"
    "    None means the current stream.\n"
    "\n"
    "Raises\n"
    "------\n"
    "TypeError\n"
    "    `stream` is no stream.\n"
    "ValueError\n"
    "    The buffer or the stream is closed.\n"
    "CudaError\n"
    "    The driver does not know the stream.\n";

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
    cm_stream_release(stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* -- the end -------------------------------------------------------------------------- */

const char cm_buffer_free_doc[] =
    "free($self, /)\n"
    "--\n"
    "\n"
    "Give the memory back now instead of when the last reference goes.\n"
    "\n"
    "All buffers that share the memory are closed. The pool reuses it when the work "
    "that\n"
    "streams had queued on it is done. Where the buffer ever went through the buffer\n"
    "protocol, or a transfer is unfinished, it is closed too, but the bytes stay "
    "until\n"
    "the last reference dies: ``torch.frombuffer`` keeps no more than the object. "
    "Freeing\n"
    "twice does nothing.\n"
    "\n"
    "Raises\n"
    "------\n"
    "BufferError\n"
    "    An array, memoryview or tensor over the memory is alive, or another thread "
    "is\n"
    "    working on it.\n";

PyObject *
cm_buffer_free(PyObject *object, PyObject *unused CM_UNUSED)
{
    cm_buffer *self = (cm_buffer *)object;
    return cm_storage_close(self->storage) < 0 ? NULL : Py_NewRef(Py_None);
}

const char cm_buffer_enter_doc[] = "__enter__($self, /)\n"
                                   "--\n"
                                   "\n"
                                   "Return the buffer itself.\n"
                                   "\n"
                                   "Raises\n"
                                   "------\n"
                                   "ValueError\n"
                                   "    The buffer is closed.\n";

PyObject *
cm_buffer_enter(PyObject *object, PyObject *unused CM_UNUSED)
{
    return cm_buffer_check_open((cm_buffer *)object) < 0 ? NULL : Py_NewRef(object);
}

const char cm_buffer_exit_doc[] =
    "__exit__($self, exc_type, exc, tb, /)\n"
    "--\n"
    "\n"
    "Close the buffer and views of it; the memory goes back with the last reference.\n"
    "\n"
    "Unlike `free` it never fails: arrays made inside the block stay valid.\n";

PyObject *
cm_buffer_exit(PyObject *object, PyObject *const *args CM_UNUSED, Py_ssize_t nargs)
{
    if (nargs != 3) {
        PyErr_Format(PyExc_TypeError, "__exit__() takes 3 arguments, not %zd", nargs);
        return NULL;
    }
    ((cm_buffer *)object)->deferred = true;
    return Py_NewRef(Py_None);
}
