/* SPDX-License-Identifier: Apache-2.0 */
/* What a buffer gives to others and when it ends: device views, streams that use it,
 * free() and the context manager. */
#include "python/buffer/methods.h"

#include "python/buffer/buffer_object.h"
#include "python/buffer/order.h"
#include "python/core/arguments.h"

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
    cm_stream_give(self->state, stream);
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
    "streams had queued on it is done. Where a transfer of the buffer is unfinished "
    "the\n"
    "memory goes when that is done. Where the buffer ever went through the buffer "
    "protocol\n"
    "it goes with the last reference: ``torch.frombuffer`` keeps no more than the "
    "object.\n"
    "Freeing twice does nothing.\n"
    "\n"
    "Raises\n"
    "------\n"
    "BufferError\n"
    "    An array, memoryview or tensor over the memory is alive, or another thread "
    "is\n"
    "    working on it.\n"
    "CudaError\n"
    "    The memory was registered, and unlocking it failed.\n";

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
    "Close the buffer and views of it; the memory goes back once nothing uses it.\n"
    "\n"
    "Unlike `free` it never fails: arrays and tensors made inside the block stay "
    "valid, "
    "and\n"
    "the memory goes back with the last of them, or when the last transfer of the "
    "buffer is\n"
    "done: at once where there are none. Where the buffer went through the buffer "
    "protocol or\n"
    "``__cuda_array_interface__``, whose users may have kept no more than the object, "
    "it goes\n"
    "with the last reference. For a view only the view is closed, and the memory is "
    "its\n"
    "buffer's.\n";

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
