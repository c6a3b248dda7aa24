/* SPDX-License-Identifier: Apache-2.0 */
/* What a Stream does: waiting, recording, being current. */
#include "python/core/arguments.h"
#include "python/device/device_wait.h"
#include "python/device/event_type.h"
#include "python/device/stream_convert.h"
#include "python/device/stream_type.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(from_external_doc,
"from_external($type, obj, /, *, device=None)\n--\n\n"
"Stream made by another library; it is kept alive, and stays its owner's.\n\n"
"Parameters\n----------\n"
"obj : object\n"
"    Anything with ``__cuda_stream__``, ``.cuda_stream`` (PyTorch), ``.ptr`` (CuPy) or\n"
"    ``.handle`` (Numba), or a handle as an int: 0 and 1 are the legacy default stream,\n"
"    2 is the calling thread's.\n"
"device : Device, int or str, optional\n"
"    Whose default stream is meant, where neither `obj` nor the driver can say it.\n\n"
"Returns\n-------\nStream\n\n"
"Raises\n------\n"
"TypeError\n    If `obj` is no stream.\n"
"ValueError\n"
"    If a handle is negative, ``__cuda_stream__`` answers a version that is not known, or\n"
"    the stream belongs to another device than `device`.\n"
"CudaError\n    If the driver does not know the handle.");

PyDoc_STRVAR(synchronize_doc,
"synchronize($self, /)\n--\n\n"
"Wait until everything queued so far is done.\n\n"
"Raises\n------\n"
"CudaError\n    If work on the stream failed.\n"
"ValueError\n    If the stream is closed.\n\n"
"Notes\n-----\n"
"**Blocks** until the stream is empty, GIL released; Ctrl-C interrupts it in the main\n"
"thread.");

PyDoc_STRVAR(wait_doc,
"wait($self, other, /)\n--\n\n"
"Let work queued from now on start only after `other`.\n\n"
"Parameters\n----------\n"
"other : Event, Transfer or stream\n"
"    An event as recorded last, a transfer, or all that is queued on a stream so far.\n\n"
"Raises\n------\n"
"TypeError\n    If `other` is none of these.\n"
"ValueError\n    If one of them is closed.\n"
"CudaError\n    If the driver refuses, or the transfer failed.\n\n"
"Notes\n-----\n"
"**Blocks** only for a Transfer, until its last piece is submitted; for one that ends on\n"
"the host, until it is done. **Ordered after** `other`.");

PyDoc_STRVAR(record_doc,
"record($self, event=None, /)\n--\n\n"
"Mark this point of the stream.\n\n"
"Parameters\n----------\n"
"event : Event, optional\n    Moved to this point; a new one is made by default.\n\n"
"Returns\n-------\nEvent\n    `event`, or the new one.\n\n"
"Raises\n------\n"
"ValueError\n    If one of them is closed or they belong to different devices.\n"
"CudaError\n    If the event cannot be made or recorded.\n\n"
"Notes\n-----\n"
"Never blocks. **Ordered after** all that is queued on the stream.");

PyDoc_STRVAR(close_doc,
"close($self, /)\n--\n\n"
"Let go of the stream; queued work still completes.\n\n"
"Notes\n-----\n"
"Never waits for that work. Buffers and transfers that used the stream keep it until\n"
"they are done with it. Does nothing for ``current_stream()`` where that is a device's\n"
"default stream.");

PyDoc_STRVAR(cuda_stream_doc,
"__cuda_stream__($self, /)\n--\n\n"
"Protocol of other libraries: ``(0, handle)``.");

PyDoc_STRVAR(enter_doc,
"__enter__($self, /)\n--\n\n"
"Make it the current stream of its device in this thread or task.\n\n"
"Blocks may end in any order, as those of generators do: the innermost of those still open\n"
"is current. Tasks started inside and contexts copied inside keep it after the block.\n\n"
"Raises\n------\nValueError\n    If the stream is closed.");
PyDoc_STRVAR(exit_doc,
"__exit__($self, exc_type, exc, tb, /)\n--\n\n"
"End the block that was entered here; the others stay as they are.\n\n"
"Raises\n------\nRuntimeError\n"
"    If the block was entered in another thread or context, as that of a generator may be\n"
"    that another thread closes: it is over there and here; or if it was not entered.");

/* -- methods ----------------------------------------------------------------------- */

static PyObject *
stream_from_external(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"", "device", NULL};
    PyObject *object;
    PyObject *device_object = Py_None;
    int device = -1;
    cm_state *state =
        cm_state_of_module(PyType_GetModule((PyTypeObject *)(void *)type));
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O:from_external", keywords,
                                     &object, &device_object)
        || (device_object != Py_None
            && cm_arg_device(state, device_object, "device", &device) < 0)) {
        return NULL;
    }
    if (object == Py_None) {
        cm_arg_refuse(object, "obj", "a stream of another library or an int");
        return NULL;
    }
    cm_stream *stream = cm_stream_from_argument(state, object, "obj", device);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    if (device >= 0 && stream->device != device) {
        PyErr_Format(PyExc_ValueError, "the stream belongs to device %d, not %d",
                     stream->device, device);
    }
    else if (Py_TYPE(object) == state->stream_type) {
        Py_INCREF(object);
        result = object;
    }
    else {
        result = cm_stream_object_new(state, stream);
    }
    cm_stream_give(state, stream);
    return result;
}

static cm_status
synchronize(const cm_stream *stream)
{
    cm_device_guard guard; /* the default streams mean those of the current device */
    CM_TRY(cm_device_enter(stream->rt, stream->device, &guard));
    cm_status status = cm_rt_stream_synchronize(stream->rt, stream->handle);
    cm_device_leave(stream->rt, &guard);
    return status;
}

static PyObject *
stream_synchronize(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_stream *stream = cm_stream_object_take(op);
    if (stream == NULL) {
        return NULL;
    }
    cm_status status;
    if (!cm_wait_polling(stream->rt, stream->device, cm_rt_stream_query, stream->handle,
                         false, &status)) {
        cm_stream_give(((cm_stream_object *)(void *)op)->state, stream);
        return NULL;
    }
    if (cm_is_ok(status)) {
        Py_BEGIN_ALLOW_THREADS
        status = synchronize(stream);
        Py_END_ALLOW_THREADS
    }
    return cm_stream_object_give(op, stream, status, -1);
}

static PyObject *
stream_wait(PyObject *op, PyObject *other)
{
    cm_stream *stream = cm_stream_object_take(op);
    if (stream == NULL) {
        return NULL;
    }
    cm_state *state = ((cm_stream_object *)(void *)op)->state;
    int result = cm_stream_wait_object(state, stream, other);
    cm_stream_give(state, stream);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
stream_record(PyObject *op, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const names[] = {"event", NULL};
    cm_state *state = ((cm_stream_object *)(void *)op)->state;
    PyObject *event;
    if (cm_args_parse("record", args, nargs, NULL, names, 1, 0, &event) < 0) {
        return NULL;
    }
    cm_stream *stream = cm_stream_object_take(op);
    if (stream == NULL) {
        return NULL;
    }
    PyObject *result = NULL;
    if (event == NULL || event == Py_None) {
        result = cm_event_object_new(state, stream->device, true, false);
    }
    else if (Py_TYPE(event) == state->event_type) {
        Py_INCREF(event);
        result = event;
    }
    else {
        cm_arg_refuse(event, "event", "an Event or None");
    }
    if (result != NULL
        && cm_event_record((cm_event_object *)(void *)result, stream) < 0) {
        Py_CLEAR(result);
    }
    cm_stream_give(state, stream);
    return result;
}

static PyObject *
stream_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    if (self->stream != NULL && self->state->legacy_streams[self->device] != op) {
        cm_stream_object_close(self);
    }
    Py_RETURN_NONE;
}

static PyObject *
stream_enter(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    cm_stream *stream = cm_stream_object_take(op);
    if (stream == NULL) {
        return NULL;
    }
    cm_stream_give(self->state, stream);
    if (cm_override_enter(&self->state->current_stream, op) < 0) {
        return NULL;
    }
    Py_INCREF(op);
    return op;
}

static PyObject *
stream_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    cm_state *state = ((cm_stream_object *)(void *)op)->state;
    if (cm_override_exit(&state->current_stream, op, "stream") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
stream_cuda_stream(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_stream *stream = ((cm_stream_object *)(void *)op)->stream;
    if (stream == NULL) {
        PyErr_SetString(PyExc_ValueError, "the stream is closed");
        return NULL;
    }
    return Py_BuildValue("iK", 0, (unsigned long long)cm_stream_tell_handle(stream));
}

/* -- table ------------------------------------------------------------------------- */

PyMethodDef cm_stream_methods[] = {
    {"from_external", (PyCFunction)(void (*)(void))stream_from_external,
     METH_VARARGS | METH_KEYWORDS | METH_CLASS, from_external_doc},
    {"synchronize", stream_synchronize, METH_NOARGS, synchronize_doc},
    {"wait", stream_wait, METH_O, wait_doc},
    {"record", (PyCFunction)(void (*)(void))stream_record, METH_FASTCALL, record_doc},
    {"close", stream_close, METH_NOARGS, close_doc},
    {"__cuda_stream__", stream_cuda_stream, METH_NOARGS, cuda_stream_doc},
    {"__enter__", stream_enter, METH_NOARGS, enter_doc},
    {"__exit__", stream_exit, METH_VARARGS, exit_doc},
    {NULL, NULL, 0, NULL},
};
