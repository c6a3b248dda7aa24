/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Stream shows a counted record of a stream as a Python object. */
#include "docstrings.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/types.h"
#include "python/device/objects.h"
#include "python/device/wait.h"
#include "runtime/scope.h"

/* -- construction and end ---------------------------------------------------------- */

/* Read an integer of any size. Returns a new reference, or NULL with TypeError. */
static PyObject *
read_priority(PyObject *object)
{
    if (object == NULL) {
        return PyLong_FromLong(0);
    }
    PyObject *number = PyNumber_Index(object);
    if (number == NULL && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        (void)cm_arg_refuse(object, "priority", "an int");
    }
    return number;
}

/* Check that the device has streams of this priority. All devices have priority 0, so
 * the driver is not asked about it. Returns 0, or -1 with ValueError or CudaError. The
 * caller has entered the state. */
static int
check_priority(cm_state *state, cm_runtime *rt, int device, PyObject *number, int *out)
{
    int is_too_large; /* the value is then -1 or 0, and must not count */
    long value = PyLong_AsLongAndOverflow(number, &is_too_large);
    if (value == 0 && is_too_large == 0) {
        *out = 0;
        return 0;
    }
    int least; /* the least urgent, which has CUDA's highest number */
    int greatest;
    cm_status status = CM_WITHOUT_GIL(
        CM_ON_DEVICE(rt, device, cm_rt_stream_priority_range(rt, &least, &greatest)));
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, NULL);
    }
    if (is_too_large != 0 || value < greatest || value > least) {
        PyErr_Format(PyExc_ValueError, "priority must be from %d to %d, not %S",
                     greatest, least, number);
        return -1;
    }
    *out = (int)value;
    return 0;
}

/* Make a Stream. The caller has entered the state. Returns a new reference, or NULL
 * with an exception. */
static PyObject *
make_stream(cm_state *state, int device, PyObject *priority_number, bool non_blocking)
{
    cm_runtime *rt = state->runtime;
    int priority = 0;
    if (check_priority(state, rt, device, priority_number, &priority) < 0) {
        return NULL;
    }
    cm_stream *stream;
    unsigned flags = non_blocking ? CM_STREAM_NON_BLOCKING : 0;
    cm_status status =
        CM_WITHOUT_GIL(cm_stream_create(rt, device, flags, priority, &stream));
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, "making a stream");
    }
    PyObject *self = cm_stream_object_new(state, stream);
    if (self != NULL && state->context_count != atomic_load(&rt->context_count)) {
        /* The stream may work on any memory from now on. */
        state->admit_peers(state);
    }
    cm_state_enter(state); /* cm_stream_give() leaves it */
    cm_stream_give(state, stream);
    return self;
}

/* This is the constructor Stream(*, device=None, priority=0, non_blocking=True). */
static PyObject *
stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *const names[] = {"device", "priority", "non_blocking", NULL};
    cm_state *state = PyType_GetModuleState(type);
    PyObject *values[3];
    if (cm_args_parse_new("Stream", args, kwargs, names, 0, 0, values) < 0) {
        return NULL;
    }
    PyObject *priority = read_priority(values[1]);
    if (priority == NULL) {
        return NULL;
    }
    PyObject *self = NULL;
    bool non_blocking;
    int device;
    if (cm_arg_flag(values[2], "non_blocking", true, &non_blocking) == 0
        && cm_arg_device(state, values[0], "device", &device) == 0) {
        cm_state_enter(state);
        self = make_stream(state, device, priority, non_blocking);
        cm_state_leave(state);
    }
    Py_DECREF(priority);
    return self;
}

/* Make a Stream of another library's stream. `device` means what it means to
 * cm_stream_from_argument(). `lasts` says that the stream lives as long as the object.
 * Returns NULL with an exception if it fails. */
static PyObject *
wrap_foreign(cm_state *state, PyObject *object, int device, bool lasts)
{
    cm_stream *stream = cm_stream_from_argument(state, object, "obj", device);
    if (stream == NULL) {
        return NULL;
    }
    if (lasts) {
        stream->is_lasting = stream->owner != NULL;
    }
    PyObject *self = cm_stream_object_new(state, stream);
    cm_stream_give(state, stream);
    return self;
}

/* This is the Python function _wrap_stream(object, device, lasts). */
PyObject *
cm_wrap_stream(PyObject *module, PyObject *args)
{
    PyObject *object;
    int device;
    int lasts;
    if (!PyArg_ParseTuple(args, "Oip", &object, &device, &lasts)
        || cm_arg_check_range(device, "device", -1, CM_MAX_DEVICES) < 0) {
        return NULL;
    }
    return wrap_foreign(cm_state_of_module(module), object, device, lasts != 0);
}

/* This is the method Stream.from_external(obj, /, *, device=None). A Stream is returned
 * as it is, so that nobody has another Stream of it when its owner closes it. */
static PyObject *
stream_from_external(PyObject *type, PyObject *const *args, Py_ssize_t nargs,
                     PyObject *kwnames)
{
    static const char *const names[] = {"obj", "device", NULL};
    cm_state *state = PyType_GetModuleState((PyTypeObject *)(void *)type);
    PyObject *values[2];
    int device = -1; /* the one that the object or the driver names */
    if (cm_args_parse("from_external", args, nargs, kwnames, names, 1, 1, values) < 0
        || (cm_arg_is_given(values[1])
            && cm_arg_device(state, values[1], "device", &device) < 0)) {
        return NULL;
    }
    PyObject *object = values[0];
    if (object == Py_None) {
        (void)cm_arg_refuse(object, "obj", "a stream of another library or an int");
        return NULL;
    }
    PyObject *self = Py_TYPE(object) == state->stream_type
                         ? Py_NewRef(object)
                         : wrap_foreign(state, object, device, false);
    if (self == NULL) {
        return NULL;
    }
    int own = ((cm_stream_object *)(void *)self)->device;
    if (device >= 0 && device != own) {
        PyErr_Format(PyExc_ValueError, "the stream belongs to device %d, not %d", own,
                     device);
        Py_CLEAR(self);
    }
    return self;
}

static void
stream_dealloc(PyObject *op)
{
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    PyObject_ClearWeakRefs(op);
    cm_stream_object_close(self);
    cm_object_free(op);
}

/* -- methods ----------------------------------------------------------------------- */

/* Give the record of a Stream back, and return `answer` or raise what `status` says. */
static PyObject *
give(PyObject *op, cm_stream *stream, cm_status status, PyObject *answer)
{
    cm_state *state = ((cm_stream_object *)(void *)op)->state;
    cm_stream_give(state, stream);
    return cm_py_answer(state, status, NULL, answer);
}

static PyObject *
stream_synchronize(PyObject *op, PyObject *Py_UNUSED(unused))
{
    cm_stream *stream = cm_stream_object_take(op);
    if (stream == NULL) {
        return NULL;
    }
    cm_status status;
    bool waited = cm_wait_for(stream->rt, stream->device, cm_rt_stream_query,
                              cm_rt_stream_synchronize, stream->handle, false, &status);
    return give(op, stream, status, waited ? Py_NewRef(Py_None) : NULL);
}

/* This is wait() for an Event, a Transfer or a stream. It blocks only for a Transfer,
 * with the GIL released. */
static PyObject *
stream_wait(PyObject *op, PyObject *other)
{
    cm_state *state = ((cm_stream_object *)(void *)op)->state;
    cm_stream *stream = cm_stream_object_take(op);
    if (stream == NULL) {
        return NULL;
    }
    int result = -1;
    if (Py_TYPE(other) == state->event_type) {
        result = cm_event_order((cm_event_object *)(void *)other, stream);
    }
    else if (Py_TYPE(other) == state->transfer_type) {
        result = cm_transfer_order((cm_transfer_object *)(void *)other, stream);
    }
    else if (other == Py_None) {
        cm_arg_refuse(other, "other", "an Event, a Transfer or a stream");
    }
    else {
        cm_stream *before =
            cm_stream_from_argument(state, other, "other", stream->device);
        if (before != NULL) {
            cm_status status = CM_WITHOUT_GIL(cm_stream_follow(stream, before));
            cm_stream_give(state, before);
            result = cm_py_check(state, status, NULL);
        }
    }
    cm_stream_give(state, stream);
    return result < 0 ? NULL : Py_NewRef(Py_None);
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
    if (!cm_arg_is_given(event)) {
        result = cm_event_object_new(state, stream->device, true, false);
    }
    else if (Py_TYPE(event) == state->event_type) {
        result = Py_NewRef(event);
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
    return cm_override_enter(&self->state->current_stream, op);
}

static PyObject *
stream_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    cm_state *state = ((cm_stream_object *)(void *)op)->state;
    return cm_override_exit(&state->current_stream, op, "stream");
}

static PyObject *
stream_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    cm_stream *stream = ((cm_stream_object *)(void *)op)->stream;
    if (stream == NULL) {
        PyErr_SetString(PyExc_ValueError, "the stream is closed");
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(cm_stream_export_handle(stream));
}

static PyObject *
stream_cuda_stream(PyObject *op, PyObject *Py_UNUSED(unused))
{
    PyObject *handle = stream_get_handle(op, NULL);
    return handle == NULL ? NULL : Py_BuildValue("iN", 0, handle);
}

/* -- getters ----------------------------------------------------------------------- */

static PyObject *
stream_get_device(PyObject *op, void *Py_UNUSED(closure))
{
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    return cm_device_object_new(self->state, self->device);
}

static PyObject *
stream_get_priority(PyObject *op, void *Py_UNUSED(closure))
{
    cm_stream *stream = cm_stream_object_take(op);
    if (stream == NULL) {
        return NULL;
    }
    int priority = 0;
    cm_status status = CM_WITHOUT_GIL(
        CM_ON_DEVICE(stream->rt, stream->device,
                     cm_rt_stream_get_priority(stream->rt, stream->handle, &priority)));
    return give(op, stream, status, PyLong_FromLong(priority));
}

static PyObject *
stream_ask(PyObject *op, void *captures)
{
    cm_stream *stream = cm_stream_object_take(op);
    if (stream == NULL) {
        return NULL;
    }
    cm_wait_query ask =
        captures == NULL ? cm_rt_stream_query : cm_rt_stream_is_capturing;
    bool answer = false;
    cm_status status = CM_WITHOUT_GIL(CM_ASKING(
        stream->rt, stream->device, ask(stream->rt, stream->handle, &answer)));
    return give(op, stream, status, PyBool_FromLong(answer));
}

static PyObject *
stream_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((cm_stream_object *)(void *)op)->stream == NULL);
}

CM_PACKAGED(Stream, "interchange.listing", list_names)

/* -- comparison and text ----------------------------------------------------------- */

/* True if two Streams are the same stream. The default streams of all devices have the
 * same small ids, so the device counts too. */
static bool
is_same(const cm_stream_object *a, const cm_stream_object *b)
{
    return a->id == b->id && a->generation == b->generation && a->device == b->device;
}

static PyObject *
stream_richcompare(PyObject *a, PyObject *b, int operation)
{
    if (Py_TYPE(a) != Py_TYPE(b) || (operation != Py_EQ && operation != Py_NE)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    bool same = is_same((cm_stream_object *)(void *)a, (cm_stream_object *)(void *)b);
    return PyBool_FromLong(same == (operation == Py_EQ));
}

static Py_hash_t
stream_hash(PyObject *op)
{
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    Py_hash_t hash = (Py_hash_t)(self->id * 31u + (uint64_t)self->device);
    return hash == -1 ? -2 : hash;
}

static PyObject *
stream_repr(PyObject *op)
{
    /* Reading .handle would count as giving it to other code. */
    const cm_stream_object *self = (cm_stream_object *)(void *)op;
    unsigned long long handle = self->stream == NULL ? 0 : self->stream->handle;
    return cm_package_call(
        "buffers.texts", "stream_repr",
        Py_BuildValue("(OKN)", op, handle,
                      PyBool_FromLong(cm_state_is_emulated(self->state))));
}

/* -- tables ------------------------------------------------------------------------ */

static PyMethodDef stream_methods[] = {
    {"from_external", CM_METHOD(stream_from_external), CM_KEYWORDS | METH_CLASS,
     CM_DOC_Stream_from_external},
    {"synchronize", stream_synchronize, METH_NOARGS, CM_DOC_Stream_synchronize},
    {"wait", stream_wait, METH_O, CM_DOC_Stream_wait},
    {"wait_event", stream_wait, METH_O, CM_DOC_Stream_wait_event},
    {"record", CM_METHOD(stream_record), METH_FASTCALL, CM_DOC_Stream_record},
    {"close", stream_close, METH_NOARGS, CM_DOC_Stream_close},
    {"__cuda_stream__", stream_cuda_stream, METH_NOARGS, CM_DOC_Stream___cuda_stream__},
    {"__enter__", stream_enter, METH_NOARGS, CM_DOC_Stream___enter__},
    {"__exit__", stream_exit, METH_VARARGS, CM_DOC_Stream___exit__},
    {"__dir__", CM_METHOD(Stream_list_names), METH_VARARGS | METH_KEYWORDS,
     CM_DOC_Stream___dir__},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef stream_getset[] = {
    {"handle", stream_get_handle, NULL, CM_DOC_Stream_handle, NULL},
    {"device", stream_get_device, NULL, CM_DOC_Stream_device, NULL},
    {"priority", stream_get_priority, NULL, CM_DOC_Stream_priority, NULL},
    {"done", stream_ask, NULL, CM_DOC_Stream_done, NULL},
    {"closed", stream_get_closed, NULL, CM_DOC_Stream_closed, NULL},
    {"is_capturing", stream_ask, NULL, CM_DOC_Stream_is_capturing, "captures"},
    CM_HINT(query) CM_HINT(is_done) CM_HINT(sync) CM_HINT(use) CM_HINT(wait_stream)
        CM_HINT(record_event) CM_HINT(wait_for_event) CM_HINT(ptr)
            CM_HINT(cuda_stream){NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef stream_members[] = {
    {"id", T_ULONGLONG, offsetof(cm_stream_object, id), READONLY, CM_DOC_Stream_id},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(cm_stream_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, (void *)CM_DOC_Stream}, {Py_tp_new, stream_new},
    {Py_tp_dealloc, stream_dealloc},    {Py_tp_repr, stream_repr},
    {Py_tp_hash, stream_hash},          {Py_tp_richcompare, stream_richcompare},
    {Py_tp_methods, stream_methods},    {Py_tp_getset, stream_getset},
    {Py_tp_members, stream_members},    {0, NULL},
};

int
cm_register_stream_type(PyObject *module, cm_state *state)
{
    cm_list_init(&state->streams);
    return cm_type_add(module, "cumem.Stream", sizeof(cm_stream_object), 0,
                       stream_slots, NULL, &state->stream_type);
}
