/* SPDX-License-Identifier: Apache-2.0 */
/* A copy between two objects: from them to a request of the engine, with what must come
 * first, what must stay alive, and what must be remembered afterwards. */
#include <string.h>

#include "python/buffer/buffer_object.h"
#include "python/copy/configure.h"
#include "python/copy/copy_objects.h"
#include "python/core/errors.h"
#include "python/core/numpy_bridge.h"
#include "python/core/progress.h"
#include "python/device/objects.h"
#include "python/protocols/protocols.h"

/* One copy being asked for. */
typedef struct copy_call {
    cm_state *state;
    PyObject *dst_object; /* borrowed */
    PyObject *src_object;
    cm_operand dst;
    cm_operand src;
    cm_pending pending[2]; /* of either storage */
    cm_extent extents[2];  /* in it */
    bool orders_all;       /* what was pending is over, or before what is on `stream` */
    cm_stream *stream;     /* held; NULL: none */
    bool blocking;
    const cm_stream_list *later_than; /* borrowed; NULL: nothing was asked for */
    const cm_progress *progress;      /* borrowed; NULL: nobody is told */
    cm_ticket *seen;                  /* borrowed from the engine while it asks */
    PyThreadState *thread;            /* while the GIL is released */
    cm_copy_request request;
    cm_stream **after; /* owned array, borrowed streams */
    cm_ticket **after_tickets;
    cm_deferred *deferred[2]; /* shared with the engine, so that what it is through with
                            goes with the call */
} copy_call;

/* -- checks ------------------------------------------------------------------------------ */

static int
check_target(const copy_call *call)
{
    if (!call->dst.readonly) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "copy: the target (%R) is read-only",
                 (PyObject *)Py_TYPE(call->dst_object));
    return -1;
}

static int
check_pair(copy_call *call)
{
    int equal = cm_numpy_dtype_equal(call->dst.dtype, call->src.dtype);
    if (equal < 0) {
        return -1;
    }
    if (equal == 0) {
        PyErr_Format(PyExc_TypeError,
                     "copy: source has dtype %S, target has dtype %S; convert first",
                     call->src.dtype, call->dst.dtype);
        return -1;
    }
    call->request.dst = call->dst.region;
    call->request.src = call->src.region;
    return cm_is_ok(cm_region_broadcast(&call->request.dst, &call->request.src))
               ? 0
               : cm_refuse_shapes("copy: ", &call->dst.region, &call->src.region);
}

/* -- streams, order, lifetime ------------------------------------------------------------ */

/* The device whose memory is an end; -1 when both are the host's. */
static int
device_of(const copy_call *call)
{
    if (call->dst.region.kind == CM_KIND_DEVICE) {
        return call->dst.region.device;
    }
    return call->src.region.kind == CM_KIND_DEVICE ? call->src.region.device : -1;
}

/* Where device memory is an end, a stream of a third device has no part in it. */
static int
check_stream(const copy_call *call, const cm_stream *given)
{
    const cm_region *dst = &call->dst.region;
    const cm_region *src = &call->src.region;
    if (device_of(call) < 0 || given->device == dst->device
        || given->device == src->device) {
        return 0;
    }
    int device = device_of(call);
    int other = src->device >= 0 ? src->device : device;
    if (other == device) {
        PyErr_Format(PyExc_ValueError,
                     "copy: stream is of device %d, but the memory is of device %d",
                     given->device, device);
    }
    else {
        PyErr_Format(PyExc_ValueError,
                     "copy: stream is of device %d, but the memory is of devices %d "
                     "and %d",
                     given->device, device, other);
    }
    return -1;
}

static int
choose_stream(copy_call *call, cm_stream *given)
{
    int device = device_of(call);
    if (given != NULL) {
        if (check_stream(call, given) < 0) {
            return -1;
        }
        call->stream = cm_stream_take(call->state, given);
    }
    else if (call->blocking && device >= 0) {
        call->stream = cm_stream_from_object(call->state, Py_None, device);
        if (call->stream == NULL) {
            return -1;
        }
    }
    return 0;
}

static void
add_after(copy_call *call, cm_stream *stream)
{
    cm_copy_request *request = &call->request;
    for (uint32_t i = 0; i < request->after_count; i++) {
        if (cm_stream_same(call->after[i], stream)) {
            return;
        }
    }
    call->after[request->after_count++] = stream;
}

static int
collect_after(copy_call *call)
{
    const cm_operand *ends[2] = {&call->dst, &call->src};
    size_t streams = 1 + (call->later_than == NULL ? 0 : call->later_than->count);
    size_t tickets = 1;
    for (int i = 0; i < 2; i++) {
        const cm_storage *storage = ends[i]->storage;
        if (storage == NULL) {
            continue;
        }
        call->extents[i] = cm_storage_extent(storage, &ends[i]->region, i == 0);
        bool few = !call->blocking; /* a short copy has no ticket */
        if (cm_pending_take_extent(storage, call->extents[i], few, &call->pending[i])
            < 0) {
            return -1;
        }
        streams += call->pending[i].stream_count;
        tickets += call->pending[i].ticket_count;
    }
    call->after = PyMem_Malloc(streams * sizeof(cm_stream *));
    call->after_tickets = PyMem_Malloc(tickets * sizeof(cm_ticket *));
    if (call->after == NULL || call->after_tickets == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < 2; i++) {
        for (uint32_t k = 0; k < call->pending[i].stream_count; k++) {
            add_after(call, call->pending[i].streams[k]);
        }
        for (uint32_t k = 0; k < call->pending[i].ticket_count; k++) {
            call->after_tickets[call->request.after_ticket_count++] =
                call->pending[i].tickets[k];
        }
    }
    for (uint32_t i = 0; call->later_than != NULL && i < call->later_than->count; i++) {
        add_after(call, call->later_than->streams[i]);
    }
    call->request.after = call->after;
    call->request.after_tickets = call->after_tickets;
    return 0;
}

static int
add_keep(copy_call *call, const cm_operand *operand)
{
    cm_keep *keep = &call->request.keep[call->request.keep_count];
    if (operand->storage != NULL) {
        *keep = (cm_keep){cm_storage_hold_transfer(operand->storage),
                          cm_storage_drop_transfer};
    }
    else {
        cm_deferred *deferred = cm_deferred_new(call->state, operand->keep);
        if (deferred == NULL) {
            return -1;
        }
        *keep = (cm_keep){deferred, cm_deferred_add};
        call->deferred[call->request.keep_count] = cm_deferred_share(deferred);
    }
    call->request.keep_count++;
    return 0;
}

/* What outlives this call: for a blocking copy only what Ctrl-C may leave running. */
static int
remember(copy_call *call)
{
    cm_storage *storages[2] = {call->dst.storage, call->src.storage};
    for (int i = 0; i < 2 && !call->blocking && call->stream != NULL; i++) {
        if (storages[i] != NULL && cm_storage_add_use(storages[i], call->stream) < 0) {
            return -1;
        }
    }
    return add_keep(call, &call->dst) < 0 || add_keep(call, &call->src) < 0 ? -1 : 0;
}

static void
drop_keeps(copy_call *call)
{
    for (uint32_t i = 0; i < call->request.keep_count; i++) {
        call->request.keep[i].drop(call->request.keep[i].object);
    }
    call->request.keep_count = 0;
}

/* -- the call ---------------------------------------------------------------------------- */

typedef int init_operand(cm_state *, cm_operand *, PyObject *, PyObject *, cm_stream *);

/* Where the caller waits for a copy to or from a device, `other` knows the kind. */
static init_operand *
how_to_init(const copy_call *call, cm_kind other)
{
    return call->blocking && other == CM_KIND_DEVICE ? cm_operand_init_short
                                                     : cm_operand_init;
}

static int
init_ends(copy_call *call, cm_stream *given)
{
    cm_state *state = call->state;
    cm_kind src = cm_buffer_check(state, call->src_object)
                      ? ((cm_buffer *)(void *)call->src_object)->storage->kind
                      : CM_KIND_PAGEABLE;
    return how_to_init(call, src)(state, &call->dst, call->dst_object, NULL, given) < 0
                   || check_target(call) < 0
               ? -1
               : how_to_init(call, call->dst.region.kind)(
                     state, &call->src, call->src_object, call->dst.dtype, given);
}

static int
init_call(copy_call *call, cm_stream *given)
{
    cm_state_enter(call->state);
    if (cm_state_runtime(call->state) == NULL || init_ends(call, given) < 0
        || check_pair(call) < 0 || choose_stream(call, given) < 0
        || collect_after(call) < 0) {
        return -1;
    }
    call->request.stream = call->stream;
    call->request.blocking = call->blocking;
    return 0;
}

/* A copy of nothing waits for nothing, nor does one into its own place. */
static bool
moves_bytes(const copy_call *call)
{
    int64_t count;
    const cm_region *dst = &call->dst.region;
    const cm_region *src = &call->src.region;
    return cm_is_ok(cm_region_count(dst, &count)) && count > 0
           && (dst->host != src->host || dst->address != src->address);
}

/* Lets go of what was pending. Without a copy that orders it a buffer would remember
 * each stream that it ever met, and each copy wait for all of them. */
static void
end_pending(copy_call *call)
{
    cm_storage *storages[2] = {call->dst.storage, call->src.storage};
    bool named = !call->blocking && call->stream != NULL; /* see remember() */
    uint64_t times = named ? 1 + (storages[0] == storages[1]) : 0;
    uint64_t use_calls[2] = {call->pending[0].use_calls, call->pending[1].use_calls};
    cm_pending_give(&call->pending[0]);
    cm_pending_give(&call->pending[1]);
    for (int i = 0; i < 2; i++) {
        if (storages[i] != NULL && call->orders_all && (call->blocking || named)) {
            cm_storage_forget_uses(storages[i], named ? call->stream : NULL,
                                   use_calls[i] + times);
        }
    }
}

static void
fini_call(copy_call *call)
{
    end_pending(call);
    for (int i = 0; i < 2; i++) {
        if (call->deferred[i] != NULL) {
            cm_deferred_end(call->deferred[i]);
        }
    }
    cm_operand_fini(&call->dst);
    cm_operand_fini(&call->src);
    PyMem_Free(call->after);
    PyMem_Free(call->after_tickets);
    cm_stream_give(call->state, call->stream);
    cm_state_leave(call->state);
}

static int
tell_progress(const copy_call *call)
{
    if (call->progress == NULL) {
        return 0;
    }
    cm_ticket_info info;
    cm_ticket_look(call->seen, &info);
    return cm_progress_tell(call->progress, cm_ticket_count_moved(call->seen),
                            info.nbytes);
}

/* The engine asks, without the GIL, whether to go on waiting. */
static bool
is_interrupted(void *argument)
{
    copy_call *call = argument;
    PyEval_RestoreThread(call->thread); /* let_go() came before */
    bool interrupted = PyErr_CheckSignals() < 0 || tell_progress(call) < 0;
    call->thread = PyEval_SaveThread();
    return interrupted;
}

/* A short copy is over before another thread gives the GIL back, which takes that
 * thread 5 ms: whoever computes in Python beside it would make it slower a hundred
 * times. */
static void
let_go(void *argument)
{
    copy_call *call = argument;
    if (call->thread == NULL) {
        call->thread = PyEval_SaveThread();
    }
}

/* The engine with all pools it may need. */
static cm_engine *
get_engine(copy_call *call)
{
    const cm_region *regions[2] = {&call->dst.region, &call->src.region};
    cm_engine *engine = cm_state_engine(call->state, -1);
    for (int i = 0; i < 2 && engine != NULL; i++) {
        if (regions[i]->kind != CM_KIND_PAGEABLE) {
            engine = cm_state_engine(call->state, regions[i]->device);
        }
    }
    return engine;
}

static cm_status
run_call(copy_call *call, cm_engine *engine, cm_ticket **ticket)
{
    if (call->blocking || call->stream != NULL) {
        call->request.interrupted = is_interrupted;
        call->request.ticket_seen = call->progress == NULL ? NULL : &call->seen;
    }
    call->request.let_go = let_go;
    call->request.interrupted_argument = call;
    cm_status status = cm_engine_copy(engine, &call->request, ticket);
    if (call->thread != NULL) {
        PyEval_RestoreThread(call->thread);
    }
    return status;
}

static void
mark_captured(cm_storage *storage)
{
    if (storage != NULL) {
        storage->was_captured = true;
    }
}

/* An unfinished copy is remembered by its target; in the background, where no stream
 * says so, by its source as well: whoever writes that next has to wait. */
static PyObject *
make_transfer(copy_call *call, cm_ticket *ticket)
{
    cm_storage *dst = call->dst.storage;
    cm_storage *src = call->stream == NULL ? call->src.storage : NULL;
    cm_ticket_info info;
    cm_ticket_look(ticket, &info);
    if (info.captured) {
        mark_captured(dst);
        mark_captured(call->src.storage);
    }
    if ((dst != NULL
         && cm_storage_add_writer(dst, ticket, call->extents[0], call->pending[0].seen)
                < 0)
        || (src != NULL
            && cm_storage_add_writer(src, ticket, call->extents[1],
                                     call->pending[1].seen)
                   < 0)) {
        cm_transfer_end_ticket(ticket);
        return NULL;
    }
    return cm_transfer_object_new(call->state, ticket, call->dst_object,
                                  call->src_object);
}

/* The copy that somebody followed is over. */
static PyObject *
tell_end(const copy_call *call, cm_ticket *ticket)
{
    cm_ticket_info info;
    cm_ticket_look(ticket, &info);
    cm_ticket_release(ticket);
    int told = cm_progress_tell(call->progress, info.nbytes, info.nbytes);
    return told < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
run(copy_call *call)
{
    cm_ticket *ticket = NULL;
    cm_engine *engine = get_engine(call);
    if (engine == NULL || cm_configure_look_for(call->state, &call->request) < 0) {
        return NULL;
    }
    if (remember(call) < 0) {
        drop_keeps(call);
        return NULL;
    }
    bool tells = call->progress != NULL; /* blocking */
    cm_status status =
        run_call(call, engine, call->blocking && !tells ? NULL : &ticket);
    call->orders_all = moves_bytes(call);
    if (PyErr_Occurred()) {
        call->orders_all = false;
        if (ticket != NULL) {
            cm_ticket_release(ticket);
        }
        return NULL; /* Ctrl-C, even where the copy was done at the same time */
    }
    if (!cm_is_ok(status)) {
        call->orders_all = false;
        return cm_py_raise(call->state, status, "while copying");
    }
    return tells            ? tell_end(call, ticket)
           : call->blocking ? Py_NewRef(Py_None)
                            : make_transfer(call, ticket);
}

/* The call, and what is done with it; `use` NULL: the copy. */
static PyObject *
make_call(cm_state *state, PyObject *dst, PyObject *src, cm_stream *stream,
          bool blocking, const cm_stream_list *later_than, const cm_progress *progress,
          cm_copy_use *use)
{
    /* Too large for the stack of a thread with little of it. */
    copy_call *call = atomic_exchange(&state->spare_call, NULL);
    if (call == NULL && (call = PyMem_Malloc(sizeof(*call))) == NULL) {
        return PyErr_NoMemory();
    }
    memset(call, 0, sizeof(*call));
    call->state = state;
    call->dst_object = dst;
    call->src_object = src;
    call->blocking = blocking;
    call->later_than = later_than;
    call->progress = progress;
    PyObject *result = NULL;
    if (init_call(call, stream) == 0) {
        result = use == NULL ? run(call) : use(state, &call->request);
    }
    fini_call(call);
    PyMem_Free(atomic_exchange(&state->spare_call, call));
    return result;
}

PyObject *
cm_copy_objects(cm_state *state, PyObject *dst, PyObject *src, cm_stream *stream,
                bool blocking)
{
    return make_call(state, dst, src, stream, blocking, NULL, NULL, NULL);
}

PyObject *
cm_copy_async_after(cm_state *state, PyObject *dst, PyObject *src, cm_stream *stream,
                    const cm_stream_list *after)
{
    return make_call(state, dst, src, stream, false, after, NULL, NULL);
}

PyObject *
cm_copy_and_tell(cm_state *state, PyObject *dst, PyObject *src, cm_stream *stream,
                 const cm_progress *progress)
{
    return make_call(state, dst, src, stream, true, NULL, progress, NULL);
}

PyObject *
cm_copy_look(cm_state *state, PyObject *dst, PyObject *src, cm_stream *stream,
             bool blocking, cm_copy_use *use)
{
    return make_call(state, dst, src, stream, blocking, NULL, NULL, use);
}
