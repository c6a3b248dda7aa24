/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Event: a point in a stream as a Python object. */
#include "python/device/event_type.h"

#include <stddef.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/device_wait.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(event_doc,
"Event(*, device=None, timing=True, blocking=False)\n--\n\n"
"A point in a stream, to wait for or to measure from.\n\n"
"Parameters\n----------\n"
"device : Device, int or str, optional\n"
"    Whose streams it is recorded on; cumem's current device by default.\n"
"timing : bool\n"
"    Take the time when the point is reached; without it an event is cheaper.\n"
"blocking : bool\n"
"    Let `synchronize` sleep instead of spinning on a core.\n\n"
"Raises\n------\n"
"ValueError\n    If the device does not exist.\n"
"CudaError\n    If the event cannot be made.\n\n"
"Notes\n-----\n"
"An event that was never recorded counts as done.");

PyDoc_STRVAR(record_doc,
"record($self, stream=None, /)\n--\n\n"
"Move the event to the end of what is queued on a stream.\n\n"
"Parameters\n----------\n"
"stream : object, optional\n"
"    Anything `Stream.from_external` takes; the current stream by default.\n\n"
"Returns\n-------\nEvent\n    The event itself.\n\n"
"Raises\n------\n"
"TypeError\n    If `stream` is no stream.\n"
"ValueError\n    If one of them is closed or they belong to different devices.\n"
"CudaError\n    If the driver refuses.\n\n"
"Notes\n-----\n"
"Never blocks. **Ordered after** all that is queued on the stream.");

PyDoc_STRVAR(synchronize_doc,
"synchronize($self, /)\n--\n\n"
"Wait until the point recorded last is reached.\n\n"
"Raises\n------\n"
"ValueError\n    If the event is closed.\n"
"CudaError\n    If work before it failed.\n\n"
"Notes\n-----\n"
"**Blocks** until then, GIL released; Ctrl-C interrupts it in the main thread.");

PyDoc_STRVAR(seconds_since_doc,
"seconds_since($self, start, /)\n--\n\n"
"Time from another event to this one on the device's clock.\n\n"
"Parameters\n----------\n"
"start : Event\n    An event of the same device.\n\n"
"Returns\n-------\nfloat\n    Seconds, with a resolution of about half a microsecond.\n\n"
"Raises\n------\n"
"TypeError\n    If `start` is no Event.\n"
"ValueError\n"
"    If one of them is closed, was never recorded or was made without ``timing``, or if\n"
"    they belong to different devices.\n"
"CudaError\n    If work before them failed.\n\n"
"Notes\n-----\n"
"**Blocks** until both are reached, GIL released; Ctrl-C interrupts it in the main\n"
"thread. Resolution: CUDA Runtime API,\n"
"``cudaEventElapsedTime``.");

PyDoc_STRVAR(close_doc,
"close($self, /)\n--\n\n"
"Let go of the event; streams that wait for it still do.");

/* -- construction and end ---------------------------------------------------------- */

static PyObject *
event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"device", "timing", "blocking", NULL};
    PyObject *device_object = Py_None;
    PyObject *timing_object = Py_True;
    PyObject *blocking_object = Py_False;
    bool timing;
    bool blocking;
    int device;
    cm_state *state = cm_state_of_module(PyType_GetModule(type));
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOO:Event", keywords,
                                     &device_object, &timing_object, &blocking_object)
        || cm_arg_bool(timing_object, "timing", &timing) < 0
        || cm_arg_bool(blocking_object, "blocking", &blocking) < 0
        || cm_arg_device(state, device_object, "device", &device) < 0) {
        return NULL;
    }
    return cm_event_object_new(state, device, timing, blocking);
}

static void
event_dealloc(PyObject *op)
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    cm_py_report(self->state, cm_event_object_close(self), NULL);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(op);
    Py_DECREF(type);
}

/* -- methods ----------------------------------------------------------------------- */

static PyObject *
event_record(PyObject *op, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const names[] = {"stream", NULL};
    cm_event_object *self = (cm_event_object *)(void *)op;
    PyObject *object;
    if (cm_args_parse("record", args, nargs, NULL, names, 1, 0, &object) < 0
        || cm_event_check_open(self) < 0) {
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(self->state, object, self->device);
    if (stream == NULL) {
        return NULL;
    }
    int result = cm_event_record(self, stream);
    cm_stream_give(self->state, stream);
    if (result < 0) {
        return NULL;
    }
    Py_INCREF(op);
    return op;
}

/* As cm_wait_polling. */
static bool
wait_for_event(const cm_event_object *event, cm_status *out)
{
    return cm_wait_polling(event->rt, event->device, cm_rt_event_query, event->handle,
                           event->blocking, out);
}

static PyObject *
event_synchronize(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    if (cm_event_check_open(self) < 0) {
        return NULL;
    }
    cm_status status;
    cm_event_take(self);
    bool waited = wait_for_event(self, &status);
    if (waited && cm_is_ok(status)) {
        Py_BEGIN_ALLOW_THREADS
        status = cm_rt_event_synchronize(self->rt, self->handle);
        Py_END_ALLOW_THREADS
    }
    cm_event_give(self);
    if (!waited) {
        return NULL;
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, NULL);
    }
    Py_RETURN_NONE;
}

static int
check_timed(const cm_event_object *event, const char *name)
{
    if (cm_event_check_open(event) < 0) {
        return -1;
    }
    if (!event->timing || !event->recorded) {
        PyErr_Format(PyExc_ValueError, "the %s event was %s", name,
                     event->timing ? "never recorded" : "made with timing=False");
        return -1;
    }
    return 0;
}

static cm_status
measure(const cm_event_object *start, const cm_event_object *end, float *milliseconds)
{
    CM_TRY(cm_rt_event_synchronize(start->rt, start->handle));
    CM_TRY(cm_rt_event_synchronize(end->rt, end->handle));
    cm_device_guard guard;
    CM_TRY(cm_device_enter(end->rt, end->device, &guard));
    cm_status status =
        cm_rt_event_elapsed(end->rt, start->handle, end->handle, milliseconds);
    cm_device_leave(end->rt, &guard);
    return status;
}

static PyObject *
event_seconds_since(PyObject *op, PyObject *other)
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    if (Py_TYPE(other) != self->state->event_type) {
        cm_arg_refuse(other, "start", "an Event");
        return NULL;
    }
    cm_event_object *start = (cm_event_object *)(void *)other;
    if (check_timed(start, "start") < 0 || check_timed(self, "end") < 0) {
        return NULL;
    }
    if (start->device != self->device) {
        PyErr_Format(PyExc_ValueError,
                     "the events belong to different devices: %d and %d", start->device,
                     self->device);
        return NULL;
    }
    float milliseconds = 0;
    cm_status status;
    cm_event_take(self);
    cm_event_take(start);
    bool waited = wait_for_event(start, &status)
                  && (!cm_is_ok(status) || wait_for_event(self, &status));
    if (waited && cm_is_ok(status)) {
        Py_BEGIN_ALLOW_THREADS
        status = measure(start, self, &milliseconds);
        Py_END_ALLOW_THREADS
    }
    cm_event_give(start);
    cm_event_give(self);
    if (!waited) {
        return NULL;
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, NULL);
    }
    return PyFloat_FromDouble((double)milliseconds / 1000.0);
}

static PyObject *
event_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    cm_status status = cm_event_object_close(self);
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, NULL);
    }
    Py_RETURN_NONE;
}

/* -- getters ----------------------------------------------------------------------- */

static PyObject *
event_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    if (cm_event_check_open(self) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(self->handle);
}

static PyObject *
event_get_device(PyObject *op, void *Py_UNUSED(closure))
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    return cm_device_object_new(self->state, self->device);
}

static PyObject *
event_get_done(PyObject *op, void *Py_UNUSED(closure))
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    if (cm_event_check_open(self) < 0) {
        return NULL;
    }
    bool done = false;
    cm_status status;
    cm_event_take(self);
    Py_BEGIN_ALLOW_THREADS
    status = cm_rt_event_query(self->rt, self->handle, &done);
    Py_END_ALLOW_THREADS
    cm_event_give(self);
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, NULL);
    }
    return PyBool_FromLong(done);
}

static PyObject *
event_repr(PyObject *op)
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    if (self->rt == NULL || self->closing) {
        return PyUnicode_FromString("<cumem.Event, closed>");
    }
    return PyUnicode_FromFormat(
        "<cumem.Event%s, device %d%s>", self->timing ? "" : " without timing",
        self->device, self->rt->backend == CM_BACKEND_EMULATED ? ", emulated" : "");
}

/* -- tables ------------------------------------------------------------------------ */

static PyMethodDef event_methods[] = {
    {"record", (PyCFunction)(void (*)(void))event_record, METH_FASTCALL, record_doc},
    {"synchronize", event_synchronize, METH_NOARGS, synchronize_doc},
    {"seconds_since", event_seconds_since, METH_O, seconds_since_doc},
    {"close", event_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef event_getset[] = {
    {"handle", event_get_handle, NULL, "cudaEvent_t as an int.", NULL},
    {"device", event_get_device, NULL, "Device whose streams it is recorded on.", NULL},
    {"done", event_get_done, NULL,
     "True when the point recorded last is reached. Never blocks; raises CudaError "
     "when\n"
     "work failed.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef event_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(cm_event_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot event_slots[] = {
    {Py_tp_doc, (void *)event_doc}, {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc}, {Py_tp_repr, event_repr},
    {Py_tp_methods, event_methods}, {Py_tp_getset, event_getset},
    {Py_tp_members, event_members}, {0, NULL},
};

static PyType_Spec event_spec = {
    .name = "cumem.Event",
    .basicsize = sizeof(cm_event_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = event_slots,
};

int
cm_register_event_type(PyObject *module, cm_state *state)
{
    cm_list_init(&state->events);
    PyObject *type = PyType_FromModuleAndSpec(module, &event_spec, NULL);
    state->event_type = (PyTypeObject *)(void *)type;
    return type == NULL ? -1 : PyModule_AddType(module, state->event_type);
}
