/* SPDX-License-Identifier: Apache-2.0 */
/* cumem.Stream: a counted stream record as a Python object. */
#include "python/device/stream_type.h"

#include <stddef.h>

#include "python/core/arguments.h"
#include "python/core/errors.h"

/* -- docstrings -------------------------------------------------------------------- */

PyDoc_STRVAR(stream_doc,
"Stream(*, device=None, priority=0, non_blocking=True)\n--\n\n"
"A queue of device work: what is queued on one stream runs in order.\n\n"
"In a ``with`` block it is the current stream of its device, in this thread or task\n"
"only. Leaving the block neither waits nor closes.\n\n"
"Parameters\n----------\n"
"device : Device, int or str, optional\n"
"    Where the work runs; cumem's current device by default.\n"
"priority : int\n"
"    0 is the lowest; negative numbers come first, as far as the device goes.\n"
"non_blocking : bool\n"
"    False orders it with the legacy default stream, as CUDA's blocking streams are.\n\n"
"Raises\n------\n"
"ValueError\n    If the device does not exist or the priority is out of its range.\n"
"CudaError\n    If the stream cannot be made.\n\n"
"Notes\n-----\n"
"Two Streams are equal when they stand for the same CUDA stream. Everything that was\n"
"queued keeps the stream alive.");

/* -- construction and end ---------------------------------------------------------- */

/* What a device allows: the greatest priority is the lowest number. */
static cm_status
read_priorities(cm_runtime *rt, int device, int *least, int *greatest)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, device, &guard));
    cm_status status = cm_rt_stream_priority_range(rt, least, greatest);
    cm_device_leave(rt, &guard);
    return status;
}

static int
check_priority(cm_state *state, cm_runtime *rt, int device, int64_t priority)
{
    int least = 0;
    int greatest = 0;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = read_priorities(rt, device, &least, &greatest);
    Py_END_ALLOW_THREADS
    if (!cm_is_ok(status)) {
        return cm_py_raise_int(state, status, "making a stream");
    }
    if (priority > least || priority < greatest) {
        PyErr_Format(PyExc_ValueError, "priority must be from %d to %d, not %lld",
                     greatest, least, (long long)priority);
        return -1;
    }
    return 0;
}

static PyObject *
make(cm_state *state, cm_runtime *rt, int device, int64_t priority, bool non_blocking)
{
    if (priority != 0 && check_priority(state, rt, device, priority) < 0) {
        return NULL;
    }
    cm_stream *stream;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_create(rt, device, non_blocking ? CM_STREAM_NON_BLOCKING : 0,
                              (int)priority, &stream);
    Py_END_ALLOW_THREADS
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, "making a stream");
    }
    PyObject *self = cm_stream_object_new(state, stream);
    cm_state_enter(state);
    cm_stream_give(state, stream);
    if (self != NULL && state->context_count != atomic_load(&rt->context_count)) {
        state->when_contexts_grow(state); /* it may work on anything from now on */
    }
    return self;
}

static PyObject *
stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"device", "priority", "non_blocking", NULL};
    PyObject *device_object = Py_None;
    PyObject *non_blocking_object = Py_True;
    PyObject *priority_object = NULL;
    int64_t priority = 0;
    bool non_blocking;
    int device;
    cm_state *state = cm_state_of_module(PyType_GetModule(type));
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOO:Stream", keywords,
                                     &device_object, &priority_object,
                                     &non_blocking_object)
        || (priority_object != NULL
            && cm_arg_int64(priority_object, "priority", &priority) < 0)
        || cm_arg_bool(non_blocking_object, "non_blocking", &non_blocking) < 0
        || cm_arg_device(state, device_object, "device", &device) < 0) {
        return NULL;
    }
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return NULL;
    }
    cm_state_enter(state);
    PyObject *self = make(state, rt, device, priority, non_blocking);
    cm_state_leave(state);
    return self;
}

static void
stream_dealloc(PyObject *op)
{
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    cm_stream_object_close(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(op);
    Py_DECREF(type);
}

/* -- getters ----------------------------------------------------------------------- */

static PyObject *
stream_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    cm_stream *stream = ((cm_stream_object *)(void *)op)->stream;
    if (stream == NULL) {
        PyErr_SetString(PyExc_ValueError, "the stream is closed");
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(cm_stream_tell_handle(stream));
}

static PyObject *
stream_get_id(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(((cm_stream_object *)(void *)op)->id);
}

static PyObject *
stream_get_device(PyObject *op, void *Py_UNUSED(closure))
{
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    return cm_device_object_new(self->state, self->device);
}

static cm_status
read_priority(const cm_stream *stream, int *priority)
{
    cm_device_guard guard; /* the default streams mean those of the current device */
    CM_TRY(cm_device_enter(stream->rt, stream->device, &guard));
    cm_status status = cm_rt_stream_get_priority(stream->rt, stream->handle, priority);
    cm_device_leave(stream->rt, &guard);
    return status;
}

static PyObject *
stream_get_priority(PyObject *op, void *Py_UNUSED(closure))
{
    cm_stream *stream = cm_stream_object_take(op);
    if (stream == NULL) {
        return NULL;
    }
    int priority = 0;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = read_priority(stream, &priority);
    Py_END_ALLOW_THREADS
    cm_stream_give(((cm_stream_object *)(void *)op)->state, stream);
    if (!cm_is_ok(status)) {
        return cm_py_raise(((cm_stream_object *)(void *)op)->state, status, NULL);
    }
    return PyLong_FromLong(priority);
}

static PyObject *
stream_ask(PyObject *op, cm_status (*ask)(cm_runtime *, uint64_t, bool *))
{
    cm_stream *stream = cm_stream_object_take(op);
    if (stream == NULL) {
        return NULL;
    }
    bool answer = false;
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    cm_device_guard guard;
    status = cm_device_enter(stream->rt, stream->device, &guard);
    if (cm_is_ok(status)) {
        status = ask(stream->rt, stream->handle, &answer);
        cm_device_leave(stream->rt, &guard);
    }
    Py_END_ALLOW_THREADS
    return cm_stream_object_give(op, stream, status, answer);
}

static PyObject *
stream_get_done(PyObject *op, void *Py_UNUSED(closure))
{
    return stream_ask(op, cm_rt_stream_query);
}

static PyObject *
stream_get_is_capturing(PyObject *op, void *Py_UNUSED(closure))
{
    return stream_ask(op, cm_rt_stream_is_capturing);
}

/* -- comparison and text ----------------------------------------------------------- */

/* The default streams of all devices have the same small ids. */
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
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    if (self->stream == NULL) {
        return PyUnicode_FromString("<cumem.Stream, closed>");
    }
    const char *emulated =
        self->stream->rt->backend == CM_BACKEND_EMULATED ? ", emulated" : "";
    if (self->stream->handle == CM_STREAM_LEGACY) {
        return PyUnicode_FromFormat("<cumem.Stream legacy default, device %d%s>",
                                    self->device, emulated);
    }
    if (self->stream->handle == CM_STREAM_PER_THREAD) {
        return PyUnicode_FromFormat("<cumem.Stream per-thread default, device %d%s>",
                                    self->device, emulated);
    }
    return PyUnicode_FromFormat("<cumem.Stream id %llu, device %d%s>",
                                (unsigned long long)self->id, self->device, emulated);
}

/* -- tables ------------------------------------------------------------------------ */

static PyGetSetDef stream_getset[] = {
    {"handle", stream_get_handle, NULL,
     "cudaStream_t as an int; 1 is the legacy default stream.", NULL},
    {"id", stream_get_id, NULL,
     "Number that, unlike the handle, no later stream of the process gets again.",
     NULL},
    {"device", stream_get_device, NULL, "Device the stream belongs to.", NULL},
    {"priority", stream_get_priority, NULL,
     "0 for the lowest; negative numbers come first.", NULL},
    {"done", stream_get_done, NULL,
     "True when nothing that was queued is left to do. Never blocks; raises CudaError "
     "when\n"
     "work failed.",
     NULL},
    {"is_capturing", stream_get_is_capturing, NULL,
     "True while work queued on the stream goes into a graph instead of running.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef stream_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(cm_stream_object, weakrefs), READONLY,
     NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, (void *)stream_doc},    {Py_tp_new, stream_new},
    {Py_tp_dealloc, stream_dealloc},    {Py_tp_repr, stream_repr},
    {Py_tp_hash, stream_hash},          {Py_tp_richcompare, stream_richcompare},
    {Py_tp_methods, cm_stream_methods}, {Py_tp_getset, stream_getset},
    {Py_tp_members, stream_members},    {0, NULL},
};

static PyType_Spec stream_spec = {
    .name = "cumem.Stream",
    .basicsize = sizeof(cm_stream_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = stream_slots,
};

int
cm_register_stream_type(PyObject *module, cm_state *state)
{
    cm_list_init(&state->streams);
    PyObject *type = PyType_FromModuleAndSpec(module, &stream_spec, NULL);
    state->stream_type = (PyTypeObject *)(void *)type;
    return type == NULL ? -1 : PyModule_AddType(module, state->stream_type);
}
