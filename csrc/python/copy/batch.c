/* SPDX-License-Identifier: Apache-2.0 */
/* copy_many() and copy_many_async(): from pairs to one request of the engine, with what
 * must come first, what must stay alive, and what must be remembered afterwards. */
#include <stdlib.h>
#include <string.h>

#include "python/copy/batch_pairs.h"
#include "python/copy/copy_functions.h"
#include "python/core/arguments.h"
#include "python/core/errors.h"
#include "python/core/progress.h"
#include "python/device/objects.h"

/* One call. */
typedef struct many_call {
    cm_state *state;
    cm_stream *stream; /* on loan; NULL: none */
    bool blocking;
    cm_progress progress;
    cm_ticket *seen;       /* borrowed from the engine while it asks */
    PyThreadState *thread; /* while the GIL is released */
    cm_many_pairs pairs;
    cm_many_request request;
    cm_stream **after; /* owned array, held */
    uint32_t after_count;
    uint32_t after_room;
    cm_ticket **after_tickets; /* owned array, held */
    uint32_t ticket_count;
    uint32_t ticket_room;
    cm_deferred *deferred; /* shared with the engine, as those of copy() */
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
        call->stream = cm_stream_take(call->state, given);
    }
    else if (call->blocking && devices != 0) {
        call->stream =
            cm_stream_from_object(call->state, Py_None, call->pairs.first_device);
        if (call->stream == NULL) {
            return -1;
        }
    }
    return 0;
}

/* -- what comes first --------------------------------------------------------------------- */

static int
reserve_one(void *array_pointer, uint32_t count, uint32_t *room)
{
    if (count < *room) {
        return 0;
    }
    void **array;
    memcpy(&array, array_pointer, sizeof(array));
    uint32_t wanted = *room == 0 ? 8 : *room * 2;
    void **larger = PyMem_Realloc(array, (size_t)wanted * sizeof(*larger));
    if (larger == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(array_pointer, &larger, sizeof(larger));
    *room = wanted;
    return 0;
}

static int
add_after(many_call *call, cm_stream *stream)
{
    for (uint32_t i = call->after_count; i > 0; i--) {
        if (cm_stream_same(call->after[i - 1], stream)) {
            return 0;
        }
    }
    if (reserve_one(&call->after, call->after_count, &call->after_room) < 0) {
        return -1;
    }
    call->after[call->after_count++] = cm_stream_hold(stream);
    return 0;
}

/* Buffers that were written together were so by one transfer. */
static int
add_ticket(many_call *call, cm_ticket *ticket)
{
    if (call->ticket_count > 0
        && call->after_tickets[call->ticket_count - 1] == ticket) {
        return 0;
    }
    if (reserve_one(&call->after_tickets, call->ticket_count, &call->ticket_room) < 0) {
        return -1;
    }
    call->after_tickets[call->ticket_count++] = cm_ticket_hold(ticket);
    return 0;
}

static int
collect_after(many_call *call)
{
    for (size_t i = 0; i < call->pairs.storage_count; i++) {
        cm_many_storage *entry = &call->pairs.storages[i];
        const cm_storage *storage = entry->storage;
        cm_extent extent = CM_EXTENT_ALL(entry->written);
        entry->seen = storage->writer_total;
        for (uint32_t k = 0; k < storage->use_count; k++) {
            if (add_after(call, storage->uses[k]) < 0) {
                return -1;
            }
        }
        for (uint32_t k = 0; k < storage->writer_count; k++) {
            const cm_writer *writer = &storage->pending[k];
            if (!writer->covered && cm_writer_is_in_the_way(writer, extent)
                && add_ticket(call, writer->ticket) < 0) {
                return -1;
            }
        }
    }
    cm_copy_request *common = &call->request.common;
    common->after = call->after;
    common->after_count = call->after_count;
    common->after_tickets = call->after_tickets;
    common->after_ticket_count = call->ticket_count;
    return 0;
}

/* -- lifetime ----------------------------------------------------------------------------- */

typedef struct kept_storages {
    size_t count;
    cm_storage *storages[]; /* held as by a transfer */
} kept_storages;

static void
drop_storages(void *object)
{
    kept_storages *kept = object;
    for (size_t i = 0; i < kept->count; i++) {
        cm_storage_drop_transfer(kept->storages[i]);
    }
    free(kept);
}

static int
keep_storages(many_call *call)
{
    size_t count = call->pairs.storage_count;
    if (count == 0) {
        return 0;
    }
    kept_storages *kept = malloc(sizeof(*kept) + count * sizeof(cm_storage *));
    if (kept == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    kept->count = count;
    for (size_t i = 0; i < count; i++) {
        kept->storages[i] = cm_storage_hold_transfer(call->pairs.storages[i].storage);
    }
    cm_copy_request *common = &call->request.common;
    common->keep[common->keep_count++] = (cm_keep){kept, drop_storages};
    return 0;
}

static int
keep_objects(many_call *call)
{
    if (PyList_Size(call->pairs.kept) == 0) {
        return 0;
    }
    cm_deferred *deferred = cm_deferred_new(call->state, call->pairs.kept);
    if (deferred == NULL) {
        return -1;
    }
    cm_copy_request *common = &call->request.common;
    common->keep[common->keep_count++] = (cm_keep){deferred, cm_deferred_add};
    call->deferred = cm_deferred_share(deferred);
    return 0;
}

/* What outlives this call: for a blocking one only what Ctrl-C may leave running. */
static int
remember(many_call *call)
{
    for (size_t i = 0; i < call->pairs.storage_count; i++) {
        if (!call->blocking && call->stream != NULL
            && cm_storage_add_use(call->pairs.storages[i].storage, call->stream) < 0) {
            return -1;
        }
    }
    return keep_storages(call) < 0 || keep_objects(call) < 0 ? -1 : 0;
}

static void
drop_keeps(many_call *call)
{
    cm_copy_request *common = &call->request.common;
    for (uint32_t i = 0; i < common->keep_count; i++) {
        common->keep[i].drop(common->keep[i].object);
    }
    common->keep_count = 0;
}

/* -- the call ----------------------------------------------------------------------------- */

static int
init_call(many_call *call, PyObject *iterable, cm_stream *given)
{
    cm_state_enter(call->state);
    call->pairs.state = call->state;
    call->pairs.stream = given;
    if (cm_state_runtime(call->state) == NULL
        || cm_many_pairs_read(&call->pairs, iterable) < 0
        || choose_stream(call, given) < 0 || collect_after(call) < 0) {
        return -1;
    }
    cm_many_request *request = &call->request;
    request->common.stream = call->stream;
    request->common.blocking = call->blocking;
    request->pieces = call->pairs.pieces;
    request->piece_count = call->pairs.piece_count;
    request->others = call->pairs.others;
    request->other_count = call->pairs.other_count;
    return 0;
}

static void
fini_call(many_call *call)
{
    if (call->deferred != NULL) {
        cm_deferred_end(call->deferred);
    }
    cm_many_pairs_fini(&call->pairs);
    for (uint32_t i = 0; i < call->after_count; i++) {
        cm_stream_release(call->after[i]);
    }
    for (uint32_t i = 0; i < call->ticket_count; i++) {
        cm_ticket_release(call->after_tickets[i]);
    }
    PyMem_Free(call->after);
    PyMem_Free(call->after_tickets);
    cm_stream_give(call->state, call->stream);
    cm_state_leave(call->state);
}

static int
tell_progress(const many_call *call)
{
    if (call->progress.tell == NULL || call->seen == NULL) {
        return 0;
    }
    cm_ticket_info info;
    cm_ticket_look(call->seen, &info);
    return cm_progress_tell(&call->progress, cm_ticket_count_moved(call->seen),
                            info.nbytes);
}

/* The engine asks, without the GIL, whether to go on waiting. */
static bool
is_interrupted(void *argument)
{
    many_call *call = argument;
    PyEval_RestoreThread(call->thread);
    bool interrupted = PyErr_CheckSignals() < 0 || tell_progress(call) < 0;
    call->thread = PyEval_SaveThread();
    return interrupted;
}

/* The engine with all pools it may need. */
static cm_engine *
get_engine(const many_call *call)
{
    cm_engine *engine = cm_state_engine(call->state, -1);
    uint64_t devices = call->pairs.any_devices;
    for (int device = 0; device < CM_MAX_DEVICES && engine != NULL; device++) {
        if (devices >> device & 1) {
            engine = cm_state_engine(call->state, device);
        }
    }
    return engine;
}

static cm_status
run_call(many_call *call, cm_engine *engine, cm_ticket **ticket)
{
    call->request.common.interrupted = is_interrupted;
    call->request.common.interrupted_argument = call;
    if (call->blocking || call->stream != NULL) {
        call->request.common.ticket_seen = &call->seen;
    }
    call->thread = PyEval_SaveThread();
    cm_status status = cm_engine_copy_many(engine, &call->request, ticket);
    PyEval_RestoreThread(call->thread);
    return status;
}

static void
mark_captured(const many_call *call)
{
    for (size_t i = 0; i < call->pairs.storage_count; i++) {
        call->pairs.storages[i].storage->was_captured = true;
    }
}

/* Of a call that failed some copies may be in a graph: nobody knows which. */
static void
mark_if_capturing(const many_call *call)
{
    const cm_stream *stream = call->stream;
    bool capturing = false;
    if (stream == NULL || !cm_stream_may_capture(stream)) {
        return;
    }
    cm_status status;
    Py_BEGIN_ALLOW_THREADS
    status = cm_stream_ask_capturing(call->state->runtime, stream->device,
                                     stream->handle, &capturing);
    Py_END_ALLOW_THREADS
    if (capturing || !cm_is_ok(status)) {
        mark_captured(call);
    }
}

/* Unfinished copies are remembered as those of copy_async() are. */
static int
remember_transfer(const many_call *call, cm_ticket *ticket)
{
    cm_ticket_info info;
    cm_ticket_look(ticket, &info);
    bool over = info.done && cm_is_ok(info.status);
    if (info.captured) {
        mark_captured(call);
    }
    for (size_t i = 0; i < call->pairs.storage_count; i++) {
        const cm_many_storage *entry = &call->pairs.storages[i];
        if (!over && (entry->written || call->stream == NULL)
            && cm_storage_add_writer(entry->storage, ticket,
                                     CM_EXTENT_ALL(entry->written), entry->seen)
                   < 0) {
            return -1;
        }
    }
    return 0;
}

/* -1 with MemoryError: nobody could wait for it later, so that was done now. */
static int
remember_or_wait(const many_call *call, cm_ticket *ticket)
{
    if (remember_transfer(call, ticket) == 0) {
        return 0;
    }
    cm_transfer_end_ticket(ticket);
    return -1;
}

/* What a failed call has left under way comes before what uses the same memory next. */
static void
remember_rest(const many_call *call, cm_ticket *ticket)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (remember_or_wait(call, ticket) == 0) {
        cm_ticket_release(ticket);
    }
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

static PyObject *
make_transfer(const many_call *call, cm_ticket *ticket)
{
    if (remember_or_wait(call, ticket) < 0) {
        return NULL;
    }
    return cm_transfer_object_new(call->state, ticket, call->pairs.pairs,
                                  call->pairs.pairs);
}

/* All is there; lets go of the ticket. */
static PyObject *
tell_end(const many_call *call, cm_ticket *ticket)
{
    cm_ticket_info info;
    cm_ticket_look(ticket, &info);
    cm_ticket_release(ticket);
    int told = cm_progress_tell(&call->progress, info.nbytes, info.nbytes);
    return told < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
run(many_call *call)
{
    cm_ticket *ticket = NULL;
    cm_engine *engine = get_engine(call);
    if (engine == NULL) {
        return NULL;
    }
    if (remember(call) < 0) {
        drop_keeps(call);
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
        return cm_py_raise(call->state, status, "while copying many pairs");
    }
    if (!call->blocking) {
        return make_transfer(call, ticket);
    }
    return tell_end(call, ticket);
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
    call->state = state;
    call->blocking = blocking;
    PyObject *result = NULL;
    if (cm_progress_open(values[2], "copy", &call->progress) == 0) {
        result = init_call(call, values[0], stream) < 0 ? NULL : run(call);
        fini_call(call);
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
