/* SPDX-License-Identifier: Apache-2.0 */
#include "python/copy/call.h"

#include <stdlib.h>

#include "python/buffer/buffer_object.h"
#include "python/buffer/memory_watch.h"
#include "python/core/arguments.h"
#include "python/core/numpy_bridge.h"
#include "python/device/objects.h"
#include "python/device/wait.h"

/* -- ends --------------------------------------------------------------------------------- */

int
cm_check_target(const char *before, const cm_operand *dst, PyObject *object)
{
    if (dst->readonly) {
        PyErr_Format(PyExc_ValueError, "%sthe target (%R) is read-only", before,
                     (PyObject *)Py_TYPE(object));
        return -1;
    }
    if (CM_UNLIKELY(dst->run_nbytes == 0 && cm_region_shares_bytes(&dst->region))) {
        return cm_package_refuse(
            "interchange.foreign_memory", "refuse_shared",
            Py_BuildValue("(sNN)", before,
                          cm_tuple_from(dst->region.shape, dst->region.ndim),
                          cm_tuple_from(dst->region.strides, dst->region.ndim)));
    }
    return 0;
}

int
cm_check_shapes(const char *before, const cm_operand *dst, const cm_operand *src,
                cm_region *stretched)
{
    const cm_region *wanted = &dst->region;
    const cm_region *given = &src->region;
    *stretched = *given;
    return cm_is_ok(cm_region_broadcast(wanted, stretched))
               ? 0
               : cm_package_refuse(
                     "interchange.foreign_memory", "refuse_shapes",
                     Py_BuildValue("(sNN)", before,
                                   cm_tuple_from(wanted->shape, wanted->ndim),
                                   cm_tuple_from(given->shape, given->ndim)));
}

/* Return the device of the first memory on a device that is found in `object` or, down
 * to `depth`, in its items, or -1 if there is none. If `asks` is true, objects of other
 * libraries are asked as well. */
static int
find_device(const cm_state *state, PyObject *object, bool asks, int depth)
{
    if (cm_buffer_check(state, object)) {
        const cm_storage *storage = ((const cm_buffer *)(void *)object)->storage;
        return cm_kind_is_on_device(storage->copy_kind) ? storage->device : -1;
    }
    bool is_tuple = PyTuple_Check(object);
    if (!is_tuple && !PyList_Check(object)) {
        return asks ? cm_exporter_device(state, object) : -1;
    }
    Py_ssize_t count = is_tuple ? PyTuple_Size(object) : PyList_Size(object);
    int found = -1;
    for (Py_ssize_t i = 0; depth > 0 && i < count && found < 0; i++) {
        PyObject *item =
            is_tuple ? PyTuple_GetItem(object, i) : PyList_GetItem(object, i);
        Py_XINCREF(item); /* asking it may run code that changes the list */
        found = item == NULL ? -1 : find_device(state, item, asks, depth - 1);
        Py_XDECREF(item);
        count = is_tuple ? count : PyList_Size(object);
    }
    return found;
}

int
cm_device_hint(const cm_state *state, PyObject *object, PyObject *stream, int depth)
{
    bool has_device = !cm_arg_is_given(stream) || Py_TYPE(stream) == state->stream_type;
    return has_device ? -1 : find_device(state, object, PyLong_Check(stream), depth);
}

int
cm_device_hint_of(const cm_state *state, PyObject *dst, PyObject *src, PyObject *stream,
                  int depth)
{
    int hint = cm_device_hint(state, dst, stream, depth);
    return hint >= 0 ? hint : cm_device_hint(state, src, stream, depth);
}

/* -- the arguments that all calls have ---------------------------------------------------- */

int
cm_call_enter(cm_call_frame *frame, cm_state *state, PyObject *stream, int device,
              PyObject *progress, const char *title)
{
    *frame = (cm_call_frame){.state = state};
    cm_state_enter(state);
    if (cm_arg_is_given(stream)) {
        frame->stream = cm_stream_from_object(state, stream, device);
        if (frame->stream == NULL) {
            return -1;
        }
    }
    return cm_arg_is_given(progress)
               ? cm_progress_open(progress, title, &frame->progress)
               : 0;
}

PyObject *
cm_call_leave(cm_call_frame *frame, PyObject *result)
{
    if (frame->progress.report != NULL && cm_progress_close(&frame->progress) < 0) {
        Py_CLEAR(result);
    }
    if (frame->stream != NULL) {
        cm_stream_give(frame->state, frame->stream);
    }
    cm_state_leave(frame->state);
    return result;
}

/* -- arrays ------------------------------------------------------------------------------- */

/* Make room for one more item of an array of the call. The first few items are inside
 * the call. */
#define RESERVE(call, array, first, count, room)                                       \
    cm_reserve(&(call)->array, sizeof((call)->first[0]), (call)->first,                \
               sizeof((call)->first) / sizeof((call)->first[0]), (call)->count,        \
               &(call)->room)

/* -- its stream --------------------------------------------------------------------------- */

int
cm_call_choose_stream(cm_call *call, const char *function, cm_stream *given,
                      uint64_t devices, int device)
{
    if (given != NULL && devices != 0 && (devices >> given->device & 1) == 0) {
        return cm_package_refuse(
            "interchange.foreign_stream", "refuse_device",
            Py_BuildValue("(siK)", function, given->device, devices));
    }
    bool is_current = given == NULL && call->blocking && device >= 0;
    if (given != NULL) {
        call->stream = cm_stream_take(call->state, given);
    }
    else if (is_current) {
        call->stream = cm_stream_lent(call->state, device);
        call->stream_is_lent = call->stream != NULL;
    }
    if (is_current && call->stream == NULL) {
        call->stream = cm_stream_from_object(call->state, Py_None, device);
    }
    if (is_current && call->stream == NULL) {
        return -1;
    }
    return 0;
}

/* -- what comes first --------------------------------------------------------------------- */

int
cm_call_come_after_stream(cm_call *call, cm_stream *stream)
{
    for (uint32_t i = call->after_count; i > 0; i--) {
        if (cm_stream_same(call->after[i - 1], stream)) {
            return 0;
        }
    }
    if (RESERVE(call, after, first_after, after_count, after_room) < 0) {
        return -1;
    }
    call->after[call->after_count++] = cm_stream_take(call->state, stream);
    return 0;
}

int
cm_call_come_after_given(cm_call *call, PyObject *after, PyObject *dst, PyObject *src,
                         int depth)
{
    cm_state *state = call->state;
    if (!cm_arg_is_given(after)) {
        return 0;
    }
    bool many = PyTuple_Check(after) || PyList_Check(after);
    PyObject *items = many ? PySequence_Tuple(after) : PyTuple_Pack(1, after);
    int result = items == NULL ? -1 : 0;
    for (Py_ssize_t i = 0; result == 0 && i < PyTuple_Size(items); i++) {
        PyObject *item = PyTuple_GetItem(items, i);
        if (item == Py_None) {
            result = cm_arg_refuse(item, "after", "a stream or several");
            break;
        }
        int device = cm_device_hint_of(state, dst, src, item, depth);
        cm_stream *stream = cm_stream_from_argument(state, item, "after", device);
        result = stream == NULL ? -1 : cm_call_come_after_stream(call, stream);
        cm_stream_give(state, stream);
    }
    Py_XDECREF(items);
    return result;
}

int
cm_call_come_after_ticket(cm_call *call, cm_ticket *ticket)
{
    cm_ticket_info info;
    /* Buffers that were written together have the same transfer. */
    if (call->ticket_count > 0
        && call->after_tickets[call->ticket_count - 1] == ticket) {
        return 0;
    }
    cm_ticket_peek(ticket, &info);
    if (info.done && cm_is_ok(info.status)) {
        return 0; /* there is nothing to wait for */
    }
    if (RESERVE(call, after_tickets, first_tickets, ticket_count, ticket_room) < 0) {
        return -1;
    }
    call->after_tickets[call->ticket_count++] = cm_ticket_hold(ticket);
    return 0;
}

static bool
is_on_stream(const cm_call *call)
{
    return !call->blocking && call->stream != NULL;
}

/* True if the call already comes after all that `extent` needs. That is so if the use
 * that was added last is of the same storage, covers these bytes, and writes if
 * `extent` does. */
static bool
is_named(const cm_call *call, const cm_storage *storage, cm_extent extent)
{
    if (call->use_count == 0) {
        return false;
    }
    const cm_call_use *last = &call->uses[call->use_count - 1];
    return last->storage == storage && last->extent.low <= extent.low
           && last->extent.high >= extent.high
           && (last->extent.writes || !extent.writes);
}

int
cm_call_come_after(cm_call *call, cm_storage *storage, cm_extent extent)
{
    if (is_named(call, storage, extent)) {
        return 0;
    }
    if (RESERVE(call, uses, first_uses, use_count, use_room) < 0) {
        return -1;
    }
    cm_storage_prune_uses(storage);
    uint64_t before = call->before != 0 ? call->before : call->state->transfer_total;
    /* One of several copies that begin together comes after all streams of the storage,
     * since _end_parts() lets the storage forget all of them. A call that meets very
     * many streams comes after all of them as well. */
    bool after_all = call->before != 0 || storage->use_count > CM_MOST_USES;
    const cm_stream *own = is_on_stream(call) ? call->stream : NULL;
    call->uses[call->use_count++] =
        (cm_call_use){storage, extent, before, storage->use_calls, after_all};
    for (uint32_t i = 0; i < storage->use_count; i++) {
        bool waits = after_all || cm_storage_is_in_the_way(storage, i, extent, own);
        if (waits && cm_call_come_after_stream(call, storage->uses[i]) < 0) {
            return -1;
        }
    }
    for (uint32_t i = 0; i < storage->transfer_count; i++) {
        const cm_storage_transfer *transfer = &storage->transfers[i];
        if (transfer->number < before && !(call->has_ticket && transfer->covered)
            && cm_storage_transfer_is_in_the_way(transfer, extent)
            && cm_call_come_after_ticket(call, transfer->ticket) < 0) {
            return -1;
        }
    }
    return 0;
}

/* True if the call has to know which bytes of the storage it uses. A blocking call
 * leaves no work behind that the storage must remember. Knowing the bytes could only
 * help the storage to forget earlier work, and most storages of blocking copies have
 * none. */
static bool
needs_extent(const cm_call *call, const cm_storage *storage)
{
    return !call->blocking || call->before != 0 || cm_storage_has_past(storage);
}

int
cm_call_come_after_end(cm_call *call, const cm_operand *end, bool writes)
{
    cm_storage *storage = end->storage;
    if (storage == NULL) {
        return 0;
    }
    if (needs_extent(call, storage)) {
        return cm_call_come_after(call, storage,
                                  cm_storage_extent(storage, &end->region, writes));
    }
    /* The copy comes after its own stream in any case, and most storages remember no
     * other. If another record stands for the same stream, the engine passes over
     * it. */
    for (uint32_t i = 0; i < storage->use_count; i++) {
        cm_stream *stream = storage->uses[i];
        if (stream != call->stream && cm_call_come_after_stream(call, stream) < 0) {
            return -1;
        }
    }
    return 0;
}

/* -- what is kept ------------------------------------------------------------------------- */

static int
add_keep(cm_call *call, cm_keep keep, cm_deferred *deferred)
{
    if (RESERVE(call, keeps, first_keeps, keep_count, keep_room) < 0) {
        keep.drop(keep.object);
        return -1;
    }
    call->keeps[call->keep_count++] = (cm_call_keep_entry){
        keep, deferred == NULL ? NULL : cm_deferred_share(deferred)};
    return 0;
}

int
cm_call_keep_storage(cm_call *call, cm_storage *storage)
{
    /* A copy in the background may still touch the memory when its caller has long gone
     * on, and the owner of the memory might move it before the copy ends. Memory of our
     * own stays where it is. */
    if (!call->blocking && storage->memory != NULL
        && (cm_memory_watch(storage) < 0
            || cm_memory_note(storage, &call->watched) < 0)) {
        return -1;
    }
    cm_keep keep = {cm_storage_hold_transfer(storage), cm_storage_drop_transfer};
    return add_keep(call, keep, NULL);
}

int
cm_call_keep_object(cm_call *call, PyObject *object)
{
    cm_deferred *deferred = cm_deferred_new(call->state, object);
    cm_keep keep = {deferred, cm_deferred_add};
    return deferred == NULL ? -1 : add_keep(call, keep, deferred);
}

int
cm_call_keep(cm_call *call, const cm_operand *end)
{
    if (end->storage != NULL) {
        return cm_call_keep_storage(call, end->storage);
    }
    PyObject *under = call->blocking ? NULL : cm_memory_under(call->state, end->keep);
    int result = 0;
    if (under != NULL
        && (cm_memory_note_place(call->state, under, &call->watched) < 0
            || cm_call_keep_object(call, under) < 0)) {
        result = -1;
    }
    Py_XDECREF(under);
    return result < 0 ? -1 : cm_call_keep_object(call, end->keep);
}

void
cm_call_keep_on_request(cm_call *call, const cm_operand *end)
{
    call->deferred_ends[call->deferred_count++] = end;
}

/* A bundle is one keep that stands for several, for calls with more keeps than a
 * request has room for. */
typedef struct bundle {
    uint32_t count;
    cm_keep keeps[];
} bundle;

static void
drop_bundle(void *object)
{
    bundle *all = object;
    for (uint32_t i = 0; i < all->count; i++) {
        all->keeps[i].drop(all->keeps[i].object);
    }
    free(all);
}

/* Hand the keeps over to the request, as they are if it has room for them, and
 * otherwise in a bundle. Returns 0, or -1 with MemoryError. */
static int
give_keeps(cm_call *call, cm_copy_request *request)
{
    uint32_t count = call->keep_count;
    cm_keep *keeps = request->keep;
    bundle *all = NULL;
    if (count > sizeof(request->keep) / sizeof(request->keep[0])) {
        all = malloc(sizeof(*all) + count * sizeof(all->keeps[0]));
        if (all == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        all->count = count;
        keeps = all->keeps;
        request->keep[0] = (cm_keep){all, drop_bundle};
    }
    for (uint32_t i = 0; i < count; i++) {
        keeps[i] = call->keeps[i].keep;
        call->keeps[i].keep.drop = NULL;
    }
    request->keep_count = all == NULL ? count : 1;
    return 0;
}

bool
cm_call_take_keeps(void *argument)
{
    cm_call *call = argument;
    bool was_let_go = call->thread != NULL;
    uint32_t count = call->deferred_count;
    if (count == 0) {
        return true;
    }
    cm_call_take_back(call);
    call->deferred_count = 0;
    int result = 0;
    for (uint32_t i = 0; result == 0 && i < count; i++) {
        result = cm_call_keep(call, call->deferred_ends[i]);
    }
    if (result == 0) {
        result = give_keeps(call, call->request);
    }
    if (was_let_go) {
        cm_call_let_go(call);
    }
    return result == 0;
}

/* -- the call ----------------------------------------------------------------------------- */

cm_engine *
cm_call_engine(cm_state *state, uint64_t devices)
{
    cm_engine *engine = cm_state_engine(state, -1);
    /* `devices & (devices - 1)` takes the lowest index out of the set. */
    for (; devices != 0 && engine != NULL; devices &= devices - 1) {
        engine = cm_state_engine(state, __builtin_ctzll(devices));
    }
    return engine;
}

cm_status
cm_call_ask_capturing(const cm_stream *stream, bool *out)
{
    *out = false;
    if (stream == NULL || !cm_stream_may_capture(stream)) {
        return cm_ok();
    }
    cm_status status = CM_WITHOUT_GIL(
        cm_stream_ask_capturing(stream->rt, stream->device, stream->handle, out));
    return status;
}

/* Let the storages remember the call's stream. Afterwards use->use_calls is the count
 * that the storage has if nobody but this call has used it since cm_call_come_after().
 * Earlier streams are forgotten only if the storage still has that count at the end of
 * the call. Example: the count was 7 in cm_call_come_after() and is 9 now, so others
 * used the storage twice. This call's use makes it 10, and use->use_calls becomes 10 -
 * 2 = 8, a count that the storage never has again. Returns 0, or -1 with an exception.
 */
static int
add_uses(cm_call *call)
{
    for (uint32_t i = 0; i < call->use_count; i++) {
        cm_call_use *use = &call->uses[i];
        /* For now this is the number of uses by others since cm_call_come_after(). The
         * last loop turns it into the count. */
        use->use_calls = use->storage->use_calls - use->use_calls;
    }
    for (uint32_t i = 0; i < call->use_count; i++) {
        const cm_call_use *use = &call->uses[i];
        if (cm_storage_add_use_of(use->storage, call->stream, use->extent) < 0) {
            return -1;
        }
    }
    for (uint32_t i = 0; i < call->use_count; i++) {
        cm_call_use *use = &call->uses[i];
        use->use_calls = use->storage->use_calls - use->use_calls;
    }
    return 0;
}

void
cm_call_fill_request(cm_call *call, cm_copy_request *request)
{
    request->stream = call->stream;
    request->blocking = call->blocking;
    request->after = call->after;
    request->after_count = call->after_count;
    request->after_tickets = call->after_tickets;
    request->after_ticket_count = call->ticket_count;
    if (call->blocking || call->stream != NULL) {
        request->interrupted = cm_call_is_interrupted;
        request->ticket_out = cm_call_reports_progress(call) ? &call->ticket : NULL;
    }
    /* A thread that gives the GIL up may get it back only after 5 ms, if another thread
     * computes in Python. That is a hundred times longer than a short copy takes. So
     * the GIL is not released here. The engine calls let_go() once the copy is going to
     * take long enough. */
    request->let_go = cm_call_let_go;
    request->interrupted_argument = call;
}

int
cm_call_prepare(cm_call *call, cm_copy_request *request)
{
    if (is_on_stream(call) && add_uses(call) < 0) {
        return -1;
    }
    if (call->deferred_count > 0) {
        call->request = request;
        request->take_keeps = cm_call_take_keeps;
    }
    else if (give_keeps(call, request) < 0) {
        return -1;
    }
    cm_call_fill_request(call, request);
    return 0;
}

void
cm_call_let_go(void *argument)
{
    cm_call *call = argument;
    cm_turns *turns = &call->state->turns;
    if (call->thread == NULL) {
        bool may_shorten = turns->is_contested || turns->call_count > 0;
        call->has_short_turns = may_shorten && cm_turns_shorten(turns);
        call->thread = cm_gil_give();
    }
}

void
cm_call_take_back(cm_call *call)
{
    cm_turns *turns = &call->state->turns;
    if (call->thread != NULL) {
        uint64_t begin_ns = cm_now_ns();
        cm_gil_take(call->thread);
        call->thread = NULL;
        turns->is_contested = cm_now_ns() - begin_ns >= CM_TURNS_CONTESTED_NS;
        if (call->has_short_turns) {
            cm_turns_restore(turns);
        }
    }
}

static int
report_progress(const cm_call *call)
{
    cm_ticket_info info;
    if (!cm_call_reports_progress(call) || call->ticket == NULL) {
        return 0;
    }
    cm_ticket_peek(call->ticket, &info);
    return cm_progress_report(call->progress, cm_ticket_count_moved(call->ticket),
                              info.nbytes);
}

/* The engine calls this without the GIL to ask whether it has to stop waiting. Signal
 * handlers run in the main thread alone, so another thread that reports no progress has
 * nothing to look for. Beside threads that compute in Python, taking the GIL would make
 * it wait for many milliseconds. */
bool
cm_call_is_interrupted(void *argument)
{
    cm_call *call = argument;
    if (!cm_sees_signals() && !cm_call_reports_progress(call)) {
        return false;
    }
    cm_gil_take(call->thread); /* the engine has called let_go() before */
    bool interrupted = PyErr_CheckSignals() < 0 || report_progress(call) < 0;
    call->thread = cm_gil_give();
    return interrupted;
}

/* -- what is remembered ------------------------------------------------------------------- */

bool
cm_call_moves_bytes(const cm_region *dst, const cm_region *src)
{
    return (dst->host != src->host || dst->address != src->address)
           && !cm_region_is_empty(dst);
}

void
cm_call_mark_captured(const cm_call *call)
{
    for (uint32_t i = 0; i < call->use_count; i++) {
        call->uses[i].storage->was_captured = true;
    }
}

/* Let the target remember the transfer. If no stream says that the source is read, the
 * source remembers the transfer too, since its next writer has to wait. Returns 0, or
 * -1 with MemoryError. */
static int
add_transfers(const cm_call *call, cm_ticket *ticket)
{
    for (uint32_t i = 0; i < call->use_count; i++) {
        const cm_call_use *use = &call->uses[i];
        if ((use->extent.writes || !is_on_stream(call))
            && cm_storage_add_transfer(use->storage, ticket, use->extent, use->before)
                   < 0) {
            return -1;
        }
    }
    return 0;
}

int
cm_call_remember(cm_call *call, cm_ticket *ticket)
{
    cm_ticket_info info;
    cm_ticket_peek(ticket, &info);
    if (info.captured) {
        cm_call_mark_captured(call);
    }
    if (info.done && cm_is_ok(info.status)) {
        for (uint32_t i = 0; i < call->use_count; i++) {
            cm_storage_note_written(call->uses[i].storage);
        }
        return 0;
    }
    if (add_transfers(call, ticket) == 0) {
        return 0;
    }
    call->is_ordered = false;
    Py_BEGIN_ALLOW_THREADS
    cm_ignore(cm_ticket_wait(ticket, UINT64_MAX));
    cm_ticket_release(ticket);
    Py_END_ALLOW_THREADS
    return -1;
}

PyObject *
cm_call_report_end(const cm_call *call, cm_ticket *ticket)
{
    cm_ticket_info info;
    cm_ticket_peek(ticket, &info);
    cm_ticket_release(ticket);
    int result = cm_call_reports_progress(call)
                     ? cm_progress_report(call->progress, info.nbytes, info.nbytes)
                     : 0;
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static void
forget_streams(const cm_call *call)
{
    for (uint32_t i = 0; i < call->use_count; i++) {
        const cm_call_use *use = &call->uses[i];
        cm_storage_forget_uses(use->storage, is_on_stream(call) ? call->stream : NULL,
                               use->extent, use->after_all, use->use_calls);
    }
}

void
cm_call_join(const cm_call *call, uint64_t number)
{
    for (uint32_t i = 0; number != 0 && call->moves_bytes && i < call->use_count; i++) {
        const cm_call_use *use = &call->uses[i];
        use->storage->many_call = number;
        use->storage->many_index = use->use_calls;
    }
}

void
cm_call_fini(cm_call *call)
{
    for (uint32_t i = 0; i < call->after_count; i++) {
        cm_stream_give(call->state, call->after[i]);
    }
    for (uint32_t i = 0; i < call->ticket_count; i++) {
        cm_ticket_release(call->after_tickets[i]);
    }
    if (call->is_ordered && call->moves_bytes
        && (call->blocking || call->stream != NULL)) {
        forget_streams(call);
    }
    for (uint32_t i = 0; i < call->keep_count; i++) {
        const cm_call_keep_entry *entry = &call->keeps[i];
        if (entry->keep.drop != NULL) {
            entry->keep.drop(entry->keep.object);
        }
        if (entry->deferred != NULL) {
            cm_deferred_end(entry->deferred);
        }
    }
    void *arrays[] = {call->uses, call->after, call->after_tickets, call->keeps};
    const void *firsts[] = {call->first_uses, call->first_after, call->first_tickets,
                            call->first_keeps};
    for (int i = 0; i < 4; i++) {
        if (arrays[i] != firsts[i]) {
            free(arrays[i]);
        }
    }
    if (call->stream != NULL && !call->stream_is_lent) {
        cm_stream_give(call->state, call->stream);
    }
    Py_CLEAR(call->watched);
}

PyObject *
cm_call_handle(const cm_call *call, cm_ticket *ticket, PyObject *dst, PyObject *src,
               int device)
{
    PyObject *handle = cm_transfer_object_new(call->state, ticket, dst, src, device);
    if (handle != NULL && call->watched != NULL) {
        cm_transfer_watch(handle, call->watched, cm_memory_check_noted);
    }
    return handle;
}

int
cm_operands_lock(cm_state *state, cm_operand *dst, cm_operand *src)
{
    bool is_late = (dst->storage != NULL && dst->storage->locks_late)
                   || (src->storage != NULL && src->storage->locks_late);
    return CM_UNLIKELY(is_late) ? cm_operands_lock_late(state, dst, src) : 0;
}
