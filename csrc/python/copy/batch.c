/* SPDX-License-Identifier: Apache-2.0 */
/* copy_many() and copy_many_async(): from pairs to one request of the engine, with what
 * must come first, what must stay alive, and what must be remembered afterwards. */
#include "python/copy/batch_pairs.h"
#include "python/copy/call.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/device/objects.h"

/* One call. */
typedef struct many_call {
    cm_call call;
    cm_progress progress;
    cm_many_pairs pairs;
    cm_many_request request;
} many_call;

/* -- streams ------------------------------------------------------------------------------ */

/* Where device memory is an end, a stream of another device has no part in it. */
static int
choose_stream(many_call *call, cm_stream *given)
{
    uint64_t devices = call->pairs.devices;
    if (given != NULL) {
        if (devices != 0 && (devices >> given->device & 1) == 0) {
            PyErr_Format(PyExc_ValueError,
                         "copy_many: stream is of device %d, but no end is its memory",
                         given->device);
            return -1;
        }
        call->call.stream = cm_stream_take(call->call.state, given);
    }
    else if (call->call.blocking && devices != 0) {
        call->call.stream =
            cm_stream_from_object(call->call.state, Py_None, call->pairs.first_device);
        if (call->call.stream == NULL) {
            return -1;
        }
    }
    return 0;
}

/* -- the call ----------------------------------------------------------------------------- */

static int
init_call(many_call *call, PyObject *iterable, cm_stream *given)
{
    cm_many_pairs *pairs = &call->pairs;
    pairs->state = call->call.state;
    pairs->stream = given;
    if (cm_state_runtime(pairs->state) == NULL
        || cm_many_pairs_read(pairs, iterable) < 0 || choose_stream(call, given) < 0) {
        return -1;
    }
    for (size_t i = 0; i < pairs->storage_count; i++) {
        const cm_many_storage *entry = &pairs->storages[i];
        cm_extent all = CM_EXTENT_ALL(entry->written);
        if (cm_call_come_after(&call->call, entry->storage, all) < 0) {
            return -1;
        }
    }
    cm_many_request *request = &call->request;
    request->pieces = pairs->pieces;
    request->piece_count = pairs->piece_count;
    request->others = pairs->others;
    request->other_count = pairs->other_count;
    return 0;
}

static int
prepare(many_call *call)
{
    const cm_many_pairs *pairs = &call->pairs;
    for (size_t i = 0; i < pairs->storage_count; i++) {
        if (cm_call_keep_storage(&call->call, pairs->storages[i].storage) < 0) {
            return -1;
        }
    }
    return (PyList_Size(pairs->kept) > 0
            && cm_call_keep_object(&call->call, pairs->kept) < 0)
                   || cm_call_prepare(&call->call, &call->request.common) < 0
               ? -1
               : 0;
}

/* One that does waits for what came first, and with it the whole. */
static bool
moves_bytes(const cm_many_pairs *pairs)
{
    for (uint64_t i = 0; i < pairs->piece_count; i++) {
        const cm_piece *piece = &pairs->pieces[i];
        if (piece->dst.host != piece->src.host
            || piece->dst.address != piece->src.address) {
            return true;
        }
    }
    return false;
}

static cm_status
run_call(many_call *call, cm_engine *engine, cm_ticket **ticket)
{
    cm_copy_request *common = &call->request.common;
    /* to begin many takes long enough to be interrupted, in the background too */
    common->interrupted = cm_call_is_interrupted;
    call->call.moves_bytes = moves_bytes(&call->pairs); /* the engine sorts them */
    cm_call_hand_over(&call->call);
    cm_call_let_go(&call->call);
    cm_status status = cm_engine_copy_many(engine, &call->request, ticket);
    cm_call_take_back(&call->call);
    return status;
}

/* Of a call that failed some copies may be in a graph: nobody knows which. */
static void
mark_if_capturing(const many_call *call)
{
    const cm_stream *stream = call->call.stream;
    bool capturing = false;
    if (stream == NULL || !cm_stream_may_capture(stream)) {
        return;
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status =
        cm_stream_ask_capturing(stream->rt, stream->device, stream->handle, &capturing);
    Py_END_ALLOW_THREADS
    if (capturing || !cm_is_ok(status)) {
        cm_call_mark_captured(&call->call);
    }
}

/* What a failed call has left under way comes before what uses the same memory next. */
static void
remember_rest(many_call *call, cm_ticket *ticket)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (cm_call_remember(&call->call, ticket) == 0) {
        cm_ticket_release(ticket);
    }
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

static PyObject *
run(many_call *call)
{
    cm_state *state = call->call.state;
    cm_ticket *ticket = NULL;
    cm_engine *engine = cm_call_engine(state, call->pairs.any_devices);
    if (engine == NULL || prepare(call) < 0) {
        return NULL;
    }
    cm_status status = run_call(call, engine, &ticket);
    if (!cm_is_ok(status)) {
        mark_if_capturing(call);
    }
    if (ticket != NULL && (PyErr_Occurred() || !cm_is_ok(status))) {
        remember_rest(call, ticket);
    }
    if (PyErr_Occurred()) {
        return NULL; /* Ctrl-C, even where the copies were done at the same time */
    }
    if (!cm_is_ok(status)) {
        return cm_py_raise(state, status, "while copying many pairs");
    }
    call->call.is_ordered = true;
    if (call->call.blocking) {
        return cm_call_tell_end(&call->call, ticket);
    }
    return cm_call_remember(&call->call, ticket) < 0
               ? NULL
               : cm_transfer_object_new(state, ticket, call->pairs.pairs,
                                        call->pairs.pairs);
}

/* A hint for a stream that does not say its device: the first target's. */
static int
device_hint(const cm_state *state, PyObject *pairs)
{
    PyObject *pair =
        PyTuple_Check(pairs) && PyTuple_Size(pairs) > 0 ? PyTuple_GetItem(pairs, 0)
        : PyList_Check(pairs) && PyList_Size(pairs) > 0 ? PyList_GetItem(pairs, 0)
                                                        : NULL;
    for (Py_ssize_t i = 0;
         pair != NULL && PyTuple_Check(pair) && i < PyTuple_Size(pair); i++) {
        PyObject *end = PyTuple_GetItem(pair, i);
        if (cm_buffer_check(state, end)) {
            const cm_buffer *buffer = (const cm_buffer *)(void *)end;
            if (buffer->storage->residency == CM_KIND_DEVICE) {
                return buffer->storage->device;
            }
        }
    }
    return -1;
}

static PyObject *
copy_with(PyObject *module, const char *function, PyObject *const *args,
          Py_ssize_t nargs, PyObject *kwnames, bool blocking)
{
    static const char *const names[] = {"pairs", "stream", "progress", NULL};
    static const char *const async_names[] = {"pairs", "stream", NULL};
    cm_state *state = cm_state_of_module(module);
    PyObject *values[3] = {NULL, NULL, NULL};
    if (cm_args_parse(function, args, nargs, kwnames, blocking ? names : async_names, 1,
                      1, values)
        < 0) {
        return NULL;
    }
    many_call *call = PyMem_Calloc(1, sizeof(*call));
    if (call == NULL) {
        return PyErr_NoMemory();
    }
    cm_stream *stream = NULL;
    if (values[1] != NULL && values[1] != Py_None) {
        stream = cm_stream_from_object(state, values[1], device_hint(state, values[0]));
        if (stream == NULL) {
            PyMem_Free(call);
            return NULL;
        }
    }
    call->call.state = state;
    call->call.blocking = blocking;
    call->call.has_ticket = true;
    PyObject *result = NULL;
    if (cm_progress_open(values[2], "copy", &call->progress) == 0) {
        call->call.progress = call->progress.tell == NULL ? NULL : &call->progress;
        cm_state_enter(state);
        result = init_call(call, values[0], stream) < 0 ? NULL : run(call);
        cm_call_fini(&call->call);
        cm_many_pairs_fini(&call->pairs);
        cm_stream_give(state, call->call.stream);
        cm_state_leave(state);
    }
    if (cm_progress_close(&call->progress) < 0) {
        Py_CLEAR(result);
    }
    PyMem_Free(call);
    cm_stream_give(state, stream);
    return result;
}

PyDoc_STRVAR(copy_many_doc,
"copy_many($module, /, pairs, *, stream=None, progress=None)\n--\n\n"
"Make many copies with one call, and wait until all the data is there.\n\n"
"Small copies cost far less so than one by one: those between page-locked and device\n"
"memory are made by one kernel, ordinary memory is gathered and sent in large pieces.\n\n"
"Parameters\n----------\n"
"pairs : iterable of (dst, src)\n"
"    Tuples or lists of two; each end is what `copy` takes. All are read and checked before\n"
"    anything is copied.\n"
"stream : stream, optional\n"
"    Where to copy, of a device whose memory is an end; by default the current stream of\n"
"    the first such device.\n"
"progress : bool or callable, optional\n"
"    As for `copy`, of the bytes of all pairs.\n\n"
"Raises\n------\n"
"ImportError\n    If `progress` is True and there is no tqdm.\n"
"TypeError\n    If a pair is no pair, an end is no memory or the dtypes differ.\n"
"ValueError\n"
"    If shapes do not fit, a target is read-only, a buffer is closed or `stream` is of\n"
"    another device. Both name the index of the pair.\n"
"CudaError\n"
"    If a copy failed, or `stream` is being captured. Some of the others may have been\n"
"    made.\n\n"
"Notes\n-----\n"
"**Blocks** until done, GIL released; Ctrl-C interrupts it. **Ordered after** all work\n"
"that cumem knows of on any end. The outcome is that of copying one pair after the other:\n"
"where a target overlaps any other end that is what happens, and else all may be under\n"
"way at the same time.");

PyDoc_STRVAR(copy_many_async_doc,
"copy_many_async($module, /, pairs, *, stream=None)\n--\n\n"
"Start many copies with one call.\n\n"
"Parameters\n----------\n"
"pairs : iterable of (dst, src)\n    As for `copy_many`.\n"
"stream : stream, optional\n"
"    Copy in the order of this stream, of a device whose memory is an end: once it is done,\n"
"    whoever waits for it and however, the bytes are at all targets. Without one the copies\n"
"    run in the background, and only their handle tells of their end.\n\n"
"Returns\n-------\n"
"Transfer\n"
"    One handle for all: done when the last of them is. It keeps all ends alive.\n\n"
"Raises\n------\n"
"TypeError\n    If a pair is no pair, an end is no memory or the dtypes differ.\n"
"ValueError\n"
"    If shapes do not fit, a target is read-only, a buffer is closed or `stream` is of\n"
"    another device. Both name the index of the pair.\n"
"CudaError\n"
"    If the copies could not be started, or `stream` is being captured and they are not of\n"
"    a kind that a graph can hold. Those that were started still run, or are in the graph.\n\n"
"Notes\n-----\n"
"**Blocks** as `copy_async` does, where it would for any of the pairs. **Ordered after** all work that cumem knows of on any\n"
"end. Overlapping ends are treated as by `copy_many`.");

static PyObject *
copy_many_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    return copy_with(module, "copy_many", args, nargs, kwnames, true);
}

static PyObject *
copy_many_async_function(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
    return copy_with(module, "copy_many_async", args, nargs, kwnames, false);
}

PyMethodDef cm_copy_many_methods[] = {
    {"copy_many", (PyCFunction)(void (*)(void))copy_many_function,
     METH_FASTCALL | METH_KEYWORDS, copy_many_doc},
    {"copy_many_async", (PyCFunction)(void (*)(void))copy_many_async_function,
     METH_FASTCALL | METH_KEYWORDS, copy_many_async_doc},
    {NULL, NULL, 0, NULL},
};
