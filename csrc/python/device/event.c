/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Event is a point in a stream. This file makes events, records them, waits for
 * them and closes them. */
#include "docstrings.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/device/wait.h"
#include "runtime/scope.h"
#include "transfer/engine/engine.h"

/* -- as a C object ----------------------------------------------------------------- */

PyObject *
cm_event_object_new(cm_state *state, int device, bool timing, bool blocking)
{
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return NULL;
    }
    if (rt->is_host_only) { /* such a runtime has events for copies only */
        return cm_py_raise(state, cm_fail(CM_EFORKED, 0), "making an event");
    }
    /* From here on shutdown() may not take the runtime away, as Python code in a
     * garbage collection during the allocation could. */
    cm_state_enter(state);
    PyObject *op = PyType_GenericAlloc(state->event_type, 0);
    if (op == NULL) {
        cm_state_leave(state);
        return NULL;
    }
    cm_event_object *self = (cm_event_object *)(void *)op;
    self->state = state;
    self->device = device;
    self->timing = timing;
    self->blocking = blocking;
    cm_list_init(&self->node);
    unsigned flags = (timing ? 0u : CM_EVENT_DISABLE_TIMING)
                     | (blocking ? CM_EVENT_BLOCKING_SYNC : 0u);
    cm_status status = CM_WITHOUT_GIL(
        CM_ON_DEVICE(rt, device, cm_rt_event_create(rt, flags, &self->handle)));
    cm_state_leave(state);
    if (!cm_is_ok(status)) {
        Py_DECREF(op);
        return cm_py_raise(state, status, "making an event");
    }
    self->rt = rt;
    cm_list_push_back(&state->events, &self->node);
    return op;
}

/* Take the handle out of an Event, which closes it. */
static cm_detached_event
detach(cm_event_object *self)
{
    cm_detached_event detached = {self->rt, self->handle, self->device};
    self->rt = NULL;
    cm_list_remove(&self->node);
    return detached;
}

cm_status
cm_detached_event_free(const cm_detached_event *detached)
{
    return cm_runtime_is_forked(detached->rt)
               ? cm_ok()
               : CM_ON_DEVICE(detached->rt, detached->device,
                              cm_rt_event_destroy(detached->rt, detached->handle));
}

/* Destroy the handle, or leave that to the last give(). Work that waits for the event
 * still waits for it. Does nothing if the Event is closed. */
static cm_status
close_event(cm_event_object *self)
{
    if (self->rt == NULL) {
        return cm_ok();
    }
    if (self->users > 0) {
        self->closing = true;
        return cm_ok();
    }
    cm_detached_event detached = detach(self);
    cm_state_enter(self->state);
    cm_status status = CM_WITHOUT_GIL(cm_detached_event_free(&detached));
    cm_state_leave(self->state);
    return status;
}

size_t
cm_events_collect(cm_state *state, cm_detached_event *out)
{
    size_t count = 0;
    while (!cm_list_is_empty(&state->events)) {
        out[count++] = detach(CM_LIST_ENTRY(state->events.next, cm_event_object, node));
    }
    return count;
}

/* Check that an Event can be used. Returns 0, or -1 with ValueError "the event is
 * closed", or with CudaError in a forked child. */
static int
check_open(const cm_event_object *event)
{
    if (event->rt == NULL || event->closing) {
        PyErr_SetString(PyExc_ValueError, "the event is closed");
        return -1;
    }
    if (cm_runtime_is_forked(event->rt)) {
        return cm_py_raise_int(event->state, cm_fail(CM_EFORKED, 0), NULL);
    }
    return 0;
}

/* take() and give() stand around a call that releases the GIL. Meanwhile close() leaves
 * the handle to give(), and shutdown() is refused. */
static void
take(cm_event_object *event)
{
    cm_state_enter(event->state);
    event->users++;
}

static void
give(cm_event_object *event)
{
    event->users--;
    if (event->closing && event->users == 0) {
        /* close() was called while the call was under way */
        cm_py_report(event->state, close_event(event), (PyObject *)event);
    }
    cm_state_leave(event->state);
}

int
cm_event_record(cm_event_object *event, const cm_stream *stream)
{
    if (check_open(event) < 0) {
        return -1;
    }
    if (event->device != stream->device) {
        PyErr_Format(PyExc_ValueError,
                     "the event belongs to device %d, the stream to device %d: "
                     "record an event made by Event(device=%d)",
                     event->device, stream->device, stream->device);
        return -1;
    }
    take(event);
    cm_status status = CM_WITHOUT_GIL(
        CM_ON_DEVICE(event->rt, event->device,
                     cm_rt_event_record(event->rt, event->handle, stream->handle)));
    give(event);
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(event->state, status, NULL);
    }
    event->recorded = true;
    return 0;
}

int
cm_event_order(cm_event_object *event, cm_stream *stream)
{
    if (check_open(event) < 0) {
        return -1;
    }
    take(event);
    cm_status status = CM_WITHOUT_GIL(cm_stream_wait_event(stream, event->handle));
    give(event);
    return cm_py_check(event->state, status, NULL);
}

/* -- construction and end ---------------------------------------------------------- */

/* This is the constructor Event(*, device=None, timing=True, blocking=False). */
static PyObject *
event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device", "timing", "blocking", NULL};
    cm_state *state = PyType_GetModuleState(type);
    PyObject *values[3];
    bool timing;
    bool blocking;
    int device;
    if (cm_args_parse_new("Event", args, kwargs, names, 0, 0, values) < 0
        || cm_arg_flag(values[1], "timing", true, &timing) < 0
        || cm_arg_flag(values[2], "blocking", false, &blocking) < 0
        || cm_arg_device(state, values[0], "device", &device) < 0) {
        return NULL;
    }
    return cm_event_object_new(state, device, timing, blocking);
}

static void
event_dealloc(PyObject *op)
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    PyObject_ClearWeakRefs(op);
    cm_py_report(self->state, close_event(self), NULL);
    cm_object_free(op);
}

/* -- methods ----------------------------------------------------------------------- */

static PyObject *
event_record(PyObject *op, PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const names[] = {"stream", NULL};
    cm_event_object *self = (cm_event_object *)(void *)op;
    PyObject *object;
    if (cm_args_parse("record", args, nargs, NULL, names, 1, 0, &object) < 0
        || check_open(self) < 0) {
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(self->state, object, self->device);
    if (stream == NULL) {
        return NULL;
    }
    int result = cm_event_record(self, stream);
    cm_stream_give(self->state, stream);
    return result < 0 ? NULL : Py_NewRef(op);
}

/* This is the method wait(stream=None). If no stream is given, the current stream of
 * the event's device waits. The stream may be of another device, as in CUDA. */
static PyObject *
event_wait(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"stream", NULL};
    cm_event_object *self = (cm_event_object *)(void *)op;
    PyObject *object;
    if (cm_args_parse("wait", args, nargs, kwnames, names, 1, 0, &object) < 0
        || check_open(self) < 0) {
        return NULL;
    }
    cm_stream *stream = cm_stream_from_object(self->state, object, self->device);
    if (stream == NULL) {
        return NULL;
    }
    int result = cm_event_order(self, stream);
    cm_stream_give(self->state, stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* Wait until the event is reached. Ctrl-C ends the wait. Returns 0, or -1 with an
 * exception. */
static int
wait_until_done(cm_event_object *self)
{
    if (check_open(self) < 0) {
        return -1;
    }
    cm_status status;
    take(self);
    bool waited =
        cm_wait_for(self->rt, self->device, cm_rt_event_query, cm_rt_event_synchronize,
                    self->handle, self->blocking, &status);
    give(self);
    return waited ? cm_py_check(self->state, status, NULL) : -1;
}

static PyObject *
event_synchronize(PyObject *op, PyObject *Py_UNUSED(unused))
{
    int result = wait_until_done((cm_event_object *)(void *)op);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

/* -- the time between two ---------------------------------------------------------- */

/* Check that the event has a time. Errors call it the `which` event. Returns 0, or -1
 * with ValueError. */
static int
check_has_time(const cm_event_object *event, const char *which)
{
    if (check_open(event) < 0) {
        return -1;
    }
    if (!event->timing) {
        PyErr_Format(
            PyExc_ValueError,
            "the %s event was made with timing=False: to measure time, make it by "
            "Event()",
            which);
        return -1;
    }
    if (!event->recorded) {
        PyErr_Format(PyExc_ValueError,
                     "the %s event was never recorded: call its record() first", which);
        return -1;
    }
    return 0;
}

/* Measure the time between two events, after waiting for both. Returns 0, or -1 with an
 * exception. */
static int
measure(cm_event_object *start, cm_event_object *end, double *milliseconds)
{
    if (check_has_time(start, "start") < 0 || check_has_time(end, "end") < 0) {
        return -1;
    }
    if (start->device != end->device) {
        PyErr_Format(PyExc_ValueError,
                     "the events belong to different devices: %d and %d", start->device,
                     end->device);
        return -1;
    }
    /* Another thread may close either of them while they are waited for. */
    if (wait_until_done(start) < 0 || wait_until_done(end) < 0 || check_open(start) < 0
        || check_open(end) < 0) {
        return -1;
    }
    float elapsed = 0;
    take(end);
    take(start);
    cm_status status = CM_WITHOUT_GIL(
        CM_ASKING(end->rt, end->device,
                  cm_rt_event_elapsed(end->rt, start->handle, end->handle, &elapsed)));
    give(start);
    give(end);
    *milliseconds = (double)elapsed;
    return cm_py_check(end->state, status, NULL);
}

static PyObject *
event_seconds_since(PyObject *op, PyObject *start)
{
    if (Py_TYPE(start) != Py_TYPE(op)) { /* Event has no subclasses */
        (void)cm_arg_refuse(start, "start", "an Event");
        return NULL;
    }
    double milliseconds;
    int result = measure((cm_event_object *)(void *)start,
                         (cm_event_object *)(void *)op, &milliseconds);
    return result < 0 ? NULL : PyFloat_FromDouble(milliseconds / 1000.0);
}

/* elapsed_time() is PyTorch's counterpart of seconds_since(): it measures from this
 * event to `end`, in milliseconds. */
static PyObject *
event_elapsed_time(PyObject *op, PyObject *end)
{
    if (Py_TYPE(end) != Py_TYPE(op)) {
        (void)cm_arg_refuse(end, "end", "an Event");
        return NULL;
    }
    double milliseconds;
    int result = measure((cm_event_object *)(void *)op, (cm_event_object *)(void *)end,
                         &milliseconds);
    return result < 0 ? NULL : PyFloat_FromDouble(milliseconds);
}

static PyObject *
event_close(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    return cm_py_answer(self->state, close_event(self), NULL, Py_NewRef(Py_None));
}

/* -- getters ----------------------------------------------------------------------- */

static PyObject *
event_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    if (check_open(self) < 0) {
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
    if (check_open(self) < 0) {
        return NULL;
    }
    bool done = false;
    take(self);
    cm_status status = CM_WITHOUT_GIL(CM_ASKING(
        self->rt, self->device, cm_rt_event_query(self->rt, self->handle, &done)));
    give(self);
    return cm_py_answer(self->state, status, NULL, PyBool_FromLong(done));
}

static PyObject *
event_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    const cm_event_object *self = (cm_event_object *)(void *)op;
    return PyBool_FromLong(self->rt == NULL || self->closing);
}

/* This is the method query(), PyTorch's name for `done`. */
static PyObject *
event_query(PyObject *op, PyObject *Py_UNUSED(unused))
{
    return event_get_done(op, NULL);
}

/* Make a Transfer of no bytes that ends when the event is reached. */
static PyObject *
event_follow(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    cm_ticket *ticket;
    cm_engine *engine = cm_state_engine(self->state, -1);
    if (engine == NULL || check_open(self) < 0) {
        return NULL;
    }
    take(self);
    cm_status status = CM_WITHOUT_GIL(
        cm_engine_follow_event(engine, self->device, self->handle, &ticket));
    give(self);
    if (!cm_is_ok(status)) {
        return cm_py_raise(self->state, status, "while following an event");
    }
    return cm_transfer_object_new(self->state, ticket, Py_None, Py_None, self->device);
}

/* This is `await event`. It first asks whether the event is reached. Most events are,
 * and then nothing has to be waited for. The question also fails for an event that a
 * capture recorded. */
static PyObject *
event_await(PyObject *op)
{
    PyObject *done = event_get_done(op, NULL);
    if (done == NULL) {
        return NULL;
    }
    bool is_done = done == Py_True;
    Py_DECREF(done);
    PyObject *waited = is_done ? PyTuple_New(0) : event_follow(op, NULL);
    if (waited == NULL) {
        return NULL;
    }
    PyObject *answer;
    if (is_done) {
        answer = PyObject_GetIter(waited);
    }
    else {
        answer = cm_package_call("devices.awaiting", "await_transfer",
                                 PyTuple_Pack(1, waited));
    }
    Py_DECREF(waited);
    return answer;
}

static PyObject *
event_repr(PyObject *op)
{
    cm_event_object *self = (cm_event_object *)(void *)op;
    return cm_package_call(
        "buffers.texts", "event_repr",
        Py_BuildValue("(OiN)", op, self->rt == NULL || self->closing,
                      PyBool_FromLong(cm_state_is_emulated(self->state))));
}

CM_PACKAGED(Event, "interchange.listing", list_names)

/* -- tables ------------------------------------------------------------------------ */

static PyMethodDef event_methods[] = {
    {"record", CM_METHOD(event_record), METH_FASTCALL, CM_DOC_Event_record},
    {"synchronize", event_synchronize, METH_NOARGS, CM_DOC_Event_synchronize},
    {"wait", CM_METHOD(event_wait), CM_KEYWORDS, CM_DOC_Event_wait},
    {"query", event_query, METH_NOARGS, CM_DOC_Event_query},
    {"seconds_since", event_seconds_since, METH_O, CM_DOC_Event_seconds_since},
    {"elapsed_time", event_elapsed_time, METH_O, CM_DOC_Event_elapsed_time},
    {"close", event_close, METH_NOARGS, CM_DOC_Event_close},
    {"__dir__", CM_METHOD(Event_list_names), METH_VARARGS | METH_KEYWORDS,
     CM_DOC_Event___dir__},
    {"_follow", event_follow, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef event_getset[] = {
    {"handle", event_get_handle, NULL, CM_DOC_Event_handle, NULL},
    {"device", event_get_device, NULL, CM_DOC_Event_device, NULL},
    {"done", event_get_done, NULL, CM_DOC_Event_done, NULL},
    {"closed", event_get_closed, NULL, CM_DOC_Event_closed, NULL},
    CM_HINT(is_done) CM_HINT(sync) CM_HINT(time_since)
        CM_HINT(time_till){NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef event_members[] = {
    {"_timing", T_BOOL, offsetof(cm_event_object, timing), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(cm_event_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot event_slots[] = {
    {Py_tp_doc, (void *)CM_DOC_Event},
    {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_repr, event_repr},
    {Py_tp_methods, event_methods},
    {Py_tp_getset, event_getset},
    {Py_tp_members, event_members},
    {Py_am_await, event_await},
    {0, NULL},
};

int
cm_register_event_type(PyObject *module, cm_state *state)
{
    cm_list_init(&state->events);
    return cm_type_add(module, "cumem.Event", sizeof(cm_event_object), 0, event_slots,
                       NULL, &state->event_type);
}
