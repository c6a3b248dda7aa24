/* SPDX-License-Identifier: Apache-2.0 */
/* Reads streams that are passed as arguments. It finds the counted record of a stream,
 * even if the argument is an object of another library, and the current stream of a
 * context. */
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/objects.h"

/* -- a Stream as a C object --------------------------------------------------------- */

cm_stream *
cm_stream_take(cm_state *state, cm_stream *stream)
{
    cm_state_enter(state);
    return cm_stream_hold(stream);
}

/* The last release destroys a handle of ours, which takes locks of the driver, so the
 * GIL is released for it. In a forked child nothing may be called any more, and the
 * record leaks. */
void
cm_stream_give(cm_state *state, cm_stream *stream)
{
    if (stream == NULL) {
        return;
    }
    if (!cm_stream_try_release(stream) && !cm_runtime_is_forked(stream->rt)) {
        Py_BEGIN_ALLOW_THREADS
        cm_stream_release(stream);
        Py_END_ALLOW_THREADS
    }
    cm_state_leave(state);
}

PyObject *
cm_stream_object_new(cm_state *state, cm_stream *stream)
{
    /* A garbage collection may run Python code, which must not shut down meanwhile. */
    cm_state_enter(state);
    PyObject *op = PyType_GenericAlloc(state->stream_type, 0);
    cm_state_leave(state);
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    if (self == NULL) {
        return NULL;
    }
    self->state = state;
    self->stream = cm_stream_hold(stream);
    cm_list_init(&self->node);
    cm_list_push_back(&state->streams, &self->node);
    self->id = stream->id;
    self->device = stream->device;
    self->generation = state->generation;
    return op;
}

void
cm_stream_object_close(cm_stream_object *self)
{
    cm_stream *stream = self->stream;
    if (stream != NULL) {
        self->stream = NULL;
        cm_list_remove(&self->node);
        cm_state_enter(self->state);
        cm_stream_give(self->state, stream);
    }
}

size_t
cm_streams_collect(cm_state *state, cm_stream **out)
{
    size_t count = 0;
    while (!cm_list_is_empty(&state->streams)) {
        cm_stream_object *self =
            CM_LIST_ENTRY(state->streams.next, cm_stream_object, node);
        out[count++] = self->stream;
        self->stream = NULL;
        cm_list_remove(&self->node);
    }
    return count;
}

/* Take the per-thread stream of the calling thread. As in CUDA, its handle means the
 * stream of whichever thread uses it. */
static cm_stream *
take_own(cm_state *state, const cm_stream *others)
{
    cm_stream *stream;
    cm_status status =
        cm_stream_wrap(others->rt, others->device, others->handle, NULL, NULL, &stream);
    if (!cm_is_ok(status)) {
        (void)cm_py_raise(state, status, "looking up the thread's default stream");
        return NULL;
    }
    cm_state_enter(state); /* the record is on loan */
    return stream;
}

cm_stream *
cm_stream_object_take(PyObject *op)
{
    cm_stream_object *self = (cm_stream_object *)(void *)op;
    if (self->stream == NULL) {
        PyErr_SetString(PyExc_ValueError, "the stream is closed");
        return NULL;
    }
    if (cm_runtime_is_forked(self->stream->rt)) {
        cm_py_raise(self->state, cm_fail(CM_EFORKED, 0), NULL);
        return NULL;
    }
    if (!cm_stream_is_of_this_thread(self->stream)) {
        return take_own(self->state, self->stream);
    }
    return cm_stream_take(self->state, self->stream);
}

/* -- the current one ---------------------------------------------------------------- */

/* Return the Stream of the legacy default stream of `device`, which is made when it is
 * first needed. Returns it borrowed, or NULL with an exception. */
static PyObject *
legacy_stream(cm_state *state, int device)
{
    cm_runtime *rt = state->runtime;
    if (state->legacy_streams[device] == NULL) {
        /* This may run Python code, which may make the Stream. */
        rt = cm_state_runtime(state);
        if (rt == NULL) {
            return NULL;
        }
    }
    if (state->legacy_streams[device] == NULL) {
        cm_stream *record;
        cm_status status =
            cm_stream_wrap(rt, device, CM_STREAM_LEGACY, NULL, NULL, &record);
        if (!cm_is_ok(status)) {
            return cm_py_raise(state, status, "looking up the default stream");
        }
        PyObject *object = cm_stream_object_new(state, record);
        if (object == NULL) {
            cm_stream_release(record);
            return NULL;
        }
        if (state->legacy_streams[device] != NULL) {
            /* A garbage collection during the allocation may have run code that made
             * it. */
            Py_DECREF(object);
            cm_stream_release(record);
            return state->legacy_streams[device];
        }
        state->legacy_streams[device] = object;
        state->default_streams[device] = record;
    }
    return state->legacy_streams[device];
}

cm_stream *
cm_joining_stream(cm_state *state, int device)
{
    cm_stream **slot = &state->joining_streams[device];
    if (*slot == NULL) {
        cm_runtime *rt = cm_state_runtime(state);
        if (rt == NULL) {
            return NULL;
        }
        cm_stream *made;
        cm_status status = CM_WITHOUT_GIL(
            cm_stream_create(rt, device, CM_STREAM_NON_BLOCKING, 0, &made));
        if (!cm_is_ok(status)) {
            cm_py_raise(state, status, "making a stream that joins others");
            return NULL;
        }
        if (*slot != NULL) { /* another thread made one meanwhile */
            cm_stream_release(made);
        }
        else {
            *slot = made;
        }
    }
    return cm_stream_hold(*slot);
}

/* Find the innermost stream of `device` in a chain. Streams that a shutdown closed are
 * passed over, since the next use opens everything anew. Returns it borrowed from
 * `chain`, or NULL if there is none. */
static PyObject *
find_in_chain(const cm_state *state, PyObject *chain, int device)
{
    PyObject *entry;
    while ((entry = cm_override_step(&chain)) != NULL) {
        const cm_stream_object *stream = (const cm_stream_object *)(void *)entry;
        if (stream->device == device && stream->generation == state->generation) {
            return entry;
        }
    }
    return NULL;
}

PyObject *
cm_current_stream(cm_state *state, int device)
{
    if (device < 0) {
        device = cm_state_device(state);
    }
    PyObject *found = NULL;
    if (cm_state_has_blocks(state) && !cm_override_is_empty(&state->current_stream)) {
        PyObject *chain = cm_override_read(&state->current_stream);
        if (chain == NULL) {
            return NULL;
        }
        found = find_in_chain(state, chain, device);
        Py_XINCREF(found);
        Py_DECREF(chain);
    }
    if (found == NULL) {
        found = legacy_stream(state, device);
        Py_XINCREF(found);
    }
    return found;
}

/* -- of another library ------------------------------------------------------------- */

/* Read the device that the object itself names, as device_index in PyTorch or device_id
 * in CuPy, where -1 is "the current one". Returns -1 if it does not say, or -2 with an
 * exception. */
static int
named_device(const cm_runtime *rt, PyObject *object)
{
    static const char *const names[] = {"device_index", "device_id"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        PyObject *value;
        int found = cm_arg_find_attribute(object, names[i], &value);
        if (found < 0) {
            return -2;
        }
        if (found == 1) {
            int overflow; /* a number that is too large is not the index of a device
                             either */
            long long index = PyLong_Check(value)
                                  ? PyLong_AsLongLongAndOverflow(value, &overflow)
                                  : -1;
            Py_DECREF(value);
            if (index >= 0 && index < rt->device_count) {
                return (int)index;
            }
        }
    }
    return -1;
}

/* Find the device of a handle. The object says it, or else the driver, or else the
 * caller. The driver is not asked about a stream that captures, since that would break
 * the capture. Returns -2 with an exception if it fails. */
static int
resolve_device(cm_state *state, cm_runtime *rt, PyObject *object, uint64_t handle,
               int device)
{
    int named = PyLong_Check(object) ? -1 : named_device(rt, object);
    if (named != -1) {
        return named;
    }
    bool capturing = true; /* asking it would break the capture */
    cm_status status = cm_ok();
    if (handle > CM_STREAM_PER_THREAD && cm_runtime_has(rt, CM_OP_stream_get_device)) {
        status = cm_rt_stream_is_capturing(rt, handle, &capturing);
        if (cm_is_ok(status) && !capturing) {
            status = CM_WITHOUT_GIL(cm_rt_stream_get_device(rt, handle, &named));
        }
    }
    if (!cm_is_ok(status)) {
        cm_py_raise(state, status, "looking up the device of a foreign stream");
        return -2;
    }
    if (!capturing) {
        return named;
    }
    return device >= 0 ? device : cm_state_device(state);
}

static cm_stream *
wrap(cm_state *state, cm_runtime *rt, PyObject *object, const char *argument,
     int device)
{
    uint64_t handle = 0;
    bool keep;
    if (cm_stream_read_handle(state, object, argument, &handle, &keep) < 0) {
        return NULL;
    }
    if (handle == 0) {
        handle = CM_STREAM_LEGACY;
    }
    device = resolve_device(state, rt, object, handle, device);
    if (device < 0) {
        return NULL;
    }
    cm_deferred *owner = NULL;
    if (keep) {
        owner = cm_deferred_new(state, object);
        if (owner == NULL) {
            return NULL;
        }
    }
    cm_stream *record;
    cm_status status = CM_WITHOUT_GIL(cm_stream_wrap(
        rt, device, handle, owner, owner ? cm_deferred_add : NULL, &record));
    if (!cm_is_ok(status)) {
        if (owner != NULL) {
            cm_deferred_add(owner);
        }
        cm_py_raise(state, status, "looking up a foreign stream");
        return NULL;
    }
    return record;
}

/* Make a record of a foreign stream. The record keeps the stream's object alive, unless
 * that is an int. `device` (-1: cumem's current one) counts only if neither the object
 * nor the driver says which it is. Returns the record, on loan, or NULL with TypeError,
 * ValueError or CudaError. */
static cm_stream *
from_foreign(cm_state *state, PyObject *object, const char *argument, int device)
{
    cm_runtime *rt = cm_state_runtime(state);
    if (rt == NULL) {
        return NULL;
    }
    cm_state_enter(state); /* the object's own code runs, and `rt` must outlive that */
    cm_stream *record = wrap(state, rt, object, argument, device);
    if (record == NULL) {
        cm_state_leave(state);
    }
    return record; /* on loan: giving it back leaves the state */
}

/* -- any of them ------------------------------------------------------------------- */

cm_stream *
cm_stream_from_argument(cm_state *state, PyObject *object, const char *argument,
                        int device)
{
    bool is_current = !cm_arg_is_given(object);
    if (!is_current && Py_TYPE(object) != state->stream_type) {
        return from_foreign(state, object, argument, device);
    }
    PyObject *stream =
        is_current ? cm_current_stream(state, device) : Py_NewRef(object);
    cm_stream *record = stream == NULL ? NULL : cm_stream_object_take(stream);
    Py_XDECREF(stream);
    return record;
}

cm_stream *
cm_stream_from_object(cm_state *state, PyObject *object, int device)
{
    return cm_stream_from_argument(state, object, "stream", device);
}

cm_stream *
cm_stream_for_device(cm_state *state, PyObject *object, int device)
{
    cm_stream *stream = cm_stream_from_object(state, object, device);
    if (stream != NULL && stream->device != device) {
        PyErr_Format(PyExc_ValueError,
                     "stream is of device %d, but the memory is of device %d: pass a "
                     "stream of device %d",
                     stream->device, device, device);
        cm_stream_give(state, stream);
        return NULL;
    }
    return stream;
}
