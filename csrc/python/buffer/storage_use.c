/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps track of the work on a storage. A storage remembers streams and unfinished
 * transfers. The functions here wait for these, and order other streams after them.
 *
 * The question
 * ------------
 * Whoever is about to read or write a storage has to come after earlier work that
 * conflicts. Two pieces of work conflict if both touch the same byte and at least one
 * of them writes it. Work that does not conflict should not wait: four GPUs that read
 * rows of one page-locked batch, or write rows of their own to it, do so at the same
 * time.
 *
 * Two kinds of work are remembered:
 *   uses       streams that were given work on the memory, each with the spans of bytes
 *              that it reads and writes (cm_use_span), since nobody else remembers them
 *   transfers  copies of ours that have a ticket and have not ended
 *              (cm_storage_transfer)
 *
 * Uses
 * ----
 * A copy of ours says which bytes it reads and writes (cm_storage_add_use_of()).
 * Streams on which other code works, which record_stream() names, may do anything for
 * as long as the memory lives. They are lasting uses: they come first in the list,
 * every call waits for them, and they are never forgotten. The stream for which device
 * memory was allocated is one of them.
 *
 * Forgetting
 * ----------
 * A list that only grows would make each copy slower than the one before. A use can be
 * forgotten when every later call that would have to wait for it also has to wait for
 * newer work, which itself waited for that use. Example, all on bytes 0 to 99 of one
 * storage:
 *
 *   W writes on stream 1    uses: W
 *   A reads on stream 2     waits for W. W cannot be forgotten: another reader has to
 *                           wait for W, and not for A. uses: W, A
 *   A reads once more       does not wait for W again: A's span says that it followed W
 *   B reads on stream 3     waits for W, but not for A. uses: W, A, B
 *   C writes on stream 4    waits for W, A and B. Whatever has to wait for one of them
 *                           has to wait for C, which covers their bytes. uses: C
 *
 * cm_storage_is_in_the_way() decides what a call waits for, and is_covered() what can
 * be forgotten. `followed` in A's span is why A does not wait for W twice. A call that
 * waited on the host for a use just forgets it.
 *
 * In addition, once eight streams or more have gathered, those that are idle are looked
 * for and forgotten (cm_storage_prune_uses()). With more than CM_MOST_USES a call waits
 * for all of them.
 *
 * Pending transfers
 * -----------------
 * A ticket says itself when it is done, so finished ones are dropped from time to time:
 * the list is looked through again when it has doubled, or when some transfer has
 * failed. A transfer is `covered` when a later transfer writes, contains its bytes, and
 * came after it. A failure undoes this: a transfer that failed may have ended before
 * those that it covers.
 *
 * Consumers
 * ---------
 * A library that takes the memory by DLPack or __cuda_array_interface__ names the
 * stream that it will use. cm_storage_order_handle() makes that stream wait, on the
 * device, for all that is remembered: a snapshot is taken under the GIL
 * (cm_pending_take()), what has finished is removed without it, and the stream is
 * ordered after the rest. */
#include <stdlib.h>

#include "base/backoff.h"
#include "base/nvtx.h"
#include "python/buffer/buffer_object.h"
#include "python/core/errors.h"
#include "python/device/wait.h"

/* -- the streams that work on it --------------------------------------------------------- */

static bool
meets(cm_extent a, cm_extent b)
{
    return a.low < b.high && b.low < a.high;
}

static bool
contains(cm_extent outer, cm_extent inner)
{
    return inner.low >= inner.high
           || (outer.low <= inner.low && inner.high <= outer.high);
}

static void
widen(cm_extent *extent, cm_extent by)
{
    if (by.low >= by.high) {
        return;
    }
    bool is_empty = extent->low >= extent->high;
    if (is_empty || by.low < extent->low) {
        extent->low = by.low;
    }
    if (is_empty || by.high > extent->high) {
        extent->high = by.high;
    }
}

/* Return the span of a use, borrowed, or NULL if nothing is known of that use. */
static cm_use_span *
span_of(const cm_storage *storage, uint32_t index)
{
    return index < storage->span_count ? &storage->spans[index] : NULL;
}

/* Give each use that has no span one that says that nothing is known. Returns 0, or -1
 * with MemoryError. */
static int
fill_spans(cm_storage *storage)
{
    while (storage->span_count < storage->use_count) {
        if (cm_reserve(&storage->spans, sizeof(*storage->spans), &storage->first_span,
                       1, storage->span_count, &storage->span_capacity)
            < 0) {
            storage->span_count = 0; /* then nothing is known of any use */
            return -1;
        }
        storage->spans[storage->span_count++] = (cm_use_span){.is_known = false};
    }
    return 0;
}

static int64_t
find_use(const cm_storage *storage, const cm_stream *stream)
{
    for (uint32_t i = 0; i < storage->use_count; i++) {
        if (cm_stream_same(storage->uses[i], stream)) {
            return i;
        }
    }
    return -1;
}

/* Find the stream among the uses, or add it; *is_new says which. Returns its index, or
 * -1 with MemoryError. */
static int64_t
name_use(cm_storage *storage, cm_stream *stream, bool *is_new)
{
    CM_NEEDS_GIL();
    storage->use_calls++;
    int64_t index = find_use(storage, stream);
    *is_new = index < 0;
    if (index >= 0) {
        return index;
    }
    if (cm_reserve(&storage->uses, sizeof(*storage->uses), &storage->first_use, 1,
                   storage->use_count, &storage->use_capacity)
        < 0) {
        return -1;
    }
    storage->uses[storage->use_count] = cm_stream_hold(stream);
    index = storage->use_count++;
    if (storage->span_count > 0 && fill_spans(storage) < 0) {
        return -1;
    }
    return index;
}

int64_t
cm_storage_add_use(cm_storage *storage, cm_stream *stream)
{
    bool is_new;
    int64_t index = name_use(storage, stream, &is_new);
    cm_use_span *span = index < 0 ? NULL : span_of(storage, (uint32_t)index);
    if (span != NULL) {
        span->is_known = false;
        span->named_at = storage->use_calls;
    }
    return index;
}

int64_t
cm_storage_add_use_of(cm_storage *storage, cm_stream *stream, cm_extent extent)
{
    bool is_new;
    int64_t index = name_use(storage, stream, &is_new);
    if (index < 0 || fill_spans(storage) < 0) {
        return -1;
    }
    cm_use_span *span = &storage->spans[index];
    span->is_known = is_new || span->is_known;
    span->named_at = storage->use_calls;
    widen(extent.writes ? &span->writes : &span->reads, extent);
    return index;
}

static void
swap_uses(cm_storage *storage, uint32_t a, uint32_t b)
{
    cm_stream *use = storage->uses[a];
    storage->uses[a] = storage->uses[b];
    storage->uses[b] = use;
    if (storage->span_count > 0) {
        cm_use_span span = storage->spans[a];
        storage->spans[a] = storage->spans[b];
        storage->spans[b] = span;
    }
}

int
cm_storage_add_lasting_use(cm_storage *storage, cm_stream *stream)
{
    int64_t index = cm_storage_add_use(storage, stream);
    if (index >= storage->lasting_count) {
        swap_uses(storage, storage->lasting_count++, (uint32_t)index);
    }
    return index < 0 ? -1 : 0;
}

/* True if the stream of `own` has already come after the work of `span`, as far as that
 * conflicts with work on `extent`. */
static bool
was_followed(const cm_use_span *own, const cm_use_span *span, cm_extent extent)
{
    return own != NULL && own->followed_at != 0 && span->named_at <= own->followed_at
           && contains(own->followed, extent)
           && (own->followed.writes || !extent.writes);
}

bool
cm_storage_is_in_the_way(const cm_storage *storage, uint32_t index, cm_extent extent,
                         const cm_stream *stream)
{
    const cm_use_span *span = span_of(storage, index);
    if (span == NULL || index < storage->lasting_count) {
        return true;
    }
    bool conflicts = !span->is_known || meets(span->writes, extent)
                     || (extent.writes && meets(span->reads, extent));
    if (!conflicts || stream == NULL) {
        return conflicts;
    }
    int64_t own = find_use(storage, stream);
    return own < 0 || !was_followed(span_of(storage, (uint32_t)own), span, extent);
}

/* True if all work that has to come after uses[index] also has to come after uses[own],
 * which itself came after uses[index]. Then nobody needs to know of uses[index] any
 * more. */
static bool
is_covered(const cm_storage *storage, uint32_t index, int64_t own)
{
    const cm_use_span *span = span_of(storage, index);
    const cm_use_span *by = own < 0 ? NULL : span_of(storage, (uint32_t)own);
    if (own < 0) {
        return false;
    }
    if (own < storage->lasting_count || by == NULL || !by->is_known) {
        return true; /* everybody has to come after uses[own] */
    }
    if (span == NULL || !span->is_known) {
        return by->writes.low == 0 && by->writes.high >= storage->nbytes;
    }
    return contains(by->writes, span->writes)
           && (contains(by->writes, span->reads) || contains(by->reads, span->reads));
}

/* Let the use `by`, which came after the use `index`, stand for both from now on. */
static void
absorb(const cm_storage *storage, int64_t by, uint32_t index)
{
    cm_use_span *own = by < 0 ? NULL : span_of(storage, (uint32_t)by);
    const cm_use_span *span = span_of(storage, index);
    if (own == NULL || !own->is_known) {
        return; /* it stands for everything already */
    }
    if (span == NULL || !span->is_known) {
        own->is_known = false;
        return;
    }
    widen(&own->reads, span->reads);
    widen(&own->writes, span->writes);
}

static void
remove_use(cm_storage *storage, uint32_t index)
{
    swap_uses(storage, index, storage->use_count - 1);
    storage->use_count--;
    storage->span_count -= storage->span_count > 0;
}

/* Release streams that were forgotten. This may let other threads run. */
static void
give_streams(const cm_storage *storage, cm_stream *const *streams, uint32_t count)
{
    while (count > 0) {
        cm_state_enter(storage->state);
        cm_stream_give(storage->state, streams[--count]);
    }
}

void
cm_storage_forget_uses(cm_storage *storage, const cm_stream *by, cm_extent extent,
                       bool all, uint64_t use_calls)
{
    enum { SOME = 16 }; /* any others are forgotten another time */
    cm_stream *gone[SOME];
    uint32_t count = 0;
    if (storage->use_calls != use_calls || storage->was_captured) {
        return;
    }
    int64_t own = by == NULL ? -1 : find_use(storage, by);
    for (uint32_t i = storage->use_count; i > storage->lasting_count && count < SOME;
         i--) {
        cm_stream *use = storage->uses[i - 1];
        bool is_own = by != NULL && cm_stream_same(use, by);
        bool was_met = all || cm_storage_is_in_the_way(storage, i - 1, extent, NULL);
        bool is_over = by == NULL || all || is_covered(storage, i - 1, own);
        if (is_own || !was_met || !is_over) {
            continue;
        }
        if (by != NULL && all) {
            absorb(storage, own, i - 1);
        }
        remove_use(storage, i - 1);
        gone[count++] = use;
        own = by == NULL ? -1 : find_use(storage, by); /* removing may have moved it */
    }
    cm_use_span *span = own < 0 ? NULL : span_of(storage, (uint32_t)own);
    if (span != NULL) {
        span->followed = extent;
        span->followed_at = use_calls;
    }
    give_streams(storage, gone, count);
}

static cm_status
query_stream(const cm_stream *stream, bool *done, bool *capturing)
{
    if (cm_stream_is_of_this_thread(stream)) { /* only this thread can ask it */
        CM_TRY(cm_stream_ask_capturing(stream->rt, stream->device, stream->handle,
                                       capturing));
    }
    if (*capturing) {
        return cm_ok();
    }
    return cm_stream_query(stream, done);
}

void
cm_storage_prune_uses(cm_storage *storage)
{
    enum { FEW = 8 };
    cm_stream *gone[FEW];
    uint32_t count = 0;
    if (CM_LIKELY(storage->use_count < FEW) || storage->use_count < storage->prune_at
        || storage->was_captured) {
        return;
    }
    for (uint32_t i = storage->use_count; i > storage->lasting_count && count < FEW;
         i--) {
        cm_stream *use = storage->uses[i - 1];
        bool done = false;
        bool capturing = false;
        /* Another thread's default stream cannot be asked without more calls. */
        cm_status status = cm_stream_is_of_this_thread(use)
                               ? query_stream(use, &done, &capturing)
                               : cm_ok();
        if (cm_is_ok(status) && done && !capturing) {
            remove_use(storage, i - 1);
            gone[count++] = use;
        }
    }
    storage->prune_at = count > 0 ? 0 : 2 * storage->use_count;
    give_streams(storage, gone, count);
}

/* -- the transfers of it ------------------------------------------------------------------ */

/* Called when a transfer failed or was cancelled: it may have ended before those that
 * it covers. */
static void
uncover_all(cm_storage *storage)
{
    for (uint32_t i = 0; i < storage->transfer_count; i++) {
        storage->transfers[i].covered = false;
    }
}

static void
remove_transfer(cm_storage *storage, uint32_t index)
{
    cm_ticket *ticket = storage->transfers[index].ticket;
    storage->transfers[index] = storage->transfers[--storage->transfer_count];
    cm_ticket_release(ticket);
}

static void
forget_finished_pending(cm_storage *storage)
{
    bool failed = false;
    for (uint32_t i = storage->transfer_count; i > 0; i--) {
        cm_ticket_info info;
        cm_ticket_peek(storage->transfers[i - 1].ticket, &info);
        if (info.done) {
            failed = failed || !cm_is_ok(info.status);
            remove_transfer(storage, i - 1);
        }
    }
    if (failed) {
        uncover_all(storage);
    }
}

/* Drop some finished transfers. Asking all of them each time would take longer the more
 * there are. A failure is forgotten at once, so that it is not reported to anybody who
 * comes later. */
static void
forget_some_pending(cm_storage *storage)
{
    enum { FEW = 8 };
    cm_engine *engine = storage->state->engine;
    uint64_t failed = engine == NULL
                          ? 0
                          : atomic_load_explicit(&cm_engine_counts(engine)->failed,
                                                 memory_order_relaxed);
    if (storage->transfer_count < storage->forget_transfers_at
        && failed == storage->failed_total) {
        return;
    }
    forget_finished_pending(storage);
    storage->failed_total = failed;
    storage->forget_transfers_at = 2 * storage->transfer_count + FEW;
}

cm_extent
cm_storage_extent(const cm_storage *storage, const cm_region *region, bool writes)
{
    int64_t low, high;
    uint64_t first = UINT64_MAX;
    if (storage->host != NULL && region->host != NULL) {
        first = (uintptr_t)region->host - (uintptr_t)storage->host;
    }
    else if (storage->address != 0 && region->address != 0) {
        first = region->address - storage->address;
    }
    if (first > storage->nbytes || !cm_is_ok(cm_region_bounds(region, &low, &high))) {
        return CM_EXTENT_ALL(writes); /* the region is seen through another address */
    }
    uint64_t from = first + (uint64_t)low;
    uint64_t to = first + (uint64_t)high;
    return from <= to && to <= storage->nbytes ? (cm_extent){from, to, writes}
                                               : CM_EXTENT_ALL(writes);
}

/* Mark transfers that a new one covers: it contains their bytes and came after them, so
 * whatever would have to wait for them has to wait for it. A new transfer that only
 * reads covers none, since other readers do not wait for it. */
static void
cover_others(cm_storage *storage, cm_extent extent, uint64_t seen)
{
    for (uint32_t i = 0; i < storage->transfer_count && extent.writes; i++) {
        cm_storage_transfer *transfer = &storage->transfers[i];
        transfer->covered =
            transfer->covered
            || (transfer->number < seen && extent.low <= transfer->extent.low
                && transfer->extent.high <= extent.high);
    }
}

int
cm_storage_add_transfer(cm_storage *storage, cm_ticket *ticket, cm_extent extent,
                        uint64_t seen)
{
    cm_ticket_info info;
    CM_NEEDS_GIL();
    forget_some_pending(storage);
    if (cm_reserve(&storage->transfers, sizeof(*storage->transfers), NULL, 0,
                   storage->transfer_count, &storage->transfer_capacity)
        < 0) {
        return -1;
    }
    cm_ticket_peek(ticket, &info);
    if (!info.done) { /* an ended one may not have waited for the others */
        cover_others(storage, extent, seen);
    }
    storage->transfers[storage->transfer_count++] =
        (cm_storage_transfer){.ticket = cm_ticket_hold(ticket),
                              .extent = extent,
                              .number = storage->state->transfer_total++};
    if (info.done) { /* it failed, and was counted, before it was remembered here */
        storage->forget_transfers_at = 0;
    }
    return 0;
}

void
cm_storage_note_written(cm_storage *storage)
{
    if (CM_UNLIKELY(storage->transfer_count > 0)) {
        forget_some_pending(storage);
    }
}

/* True if the transfer writes to the storage. A copy from one part of the storage to
 * another is in the list twice, since it also reads. */
static bool
is_written_by(const cm_storage *storage, const cm_ticket *ticket)
{
    for (uint32_t i = 0; i < storage->transfer_count; i++) {
        const cm_storage_transfer *transfer = &storage->transfers[i];
        if (transfer->ticket == ticket && transfer->extent.writes) {
            return true;
        }
    }
    return false;
}

/* Wait for a transfer, and forget it. If the transfer only reads the storage its
 * failure is not raised here, since the bytes of the storage are whole; the failure
 * stays, and whoever asks the target or the handle gets it. Returns 0, or -1 with
 * KeyboardInterrupt or the failure of a transfer that writes. */
static int
wait_for_transfer(cm_storage *storage, cm_ticket *ticket)
{
    cm_status status;
    bool writes = is_written_by(storage, ticket);
    CM_NVTX("wait for buffer", storage->nbytes);
    if (!cm_wait_for_ticket(ticket, writes ? cm_ticket_wait : cm_ticket_wait_ended,
                            UINT64_MAX, NULL, 0, &status)) {
        return -1;
    }
    /* A child never learns how a transfer of its parent ended. */
    if (status.code != CM_EFORKED) {
        for (uint32_t i = storage->transfer_count; i > 0; i--) {
            if (storage->transfers[i - 1].ticket == ticket) {
                remove_transfer(storage, i - 1);
            }
        }
        cm_ticket_info info;
        cm_ticket_peek(ticket, &info);
        if (!cm_is_ok(info.status)) {
            uncover_all(storage);
        }
    }
    if (!cm_is_ok(status) && status.code != CM_ECANCELLED) {
        return cm_py_raise_int(storage->state, status,
                               "while waiting for a transfer into the buffer");
    }
    return 0;
}

/* Record an event on another thread's default stream, which cannot be asked; *event is
 * 0 for other streams. Called without the GIL. */
static cm_status
mark_stream(const cm_stream *stream, uint64_t *event)
{
    *event = 0;
    if (cm_stream_is_of_this_thread(stream)) {
        return cm_ok();
    }
    cm_status status =
        CM_ON_DEVICE(stream->rt, stream->device,
                     cm_rt_event_create(stream->rt, CM_EVENT_DISABLE_TIMING, event));
    return cm_is_ok(status) ? cm_stream_record(stream, *event) : status;
}

static int
wait_for_stream(cm_storage *storage, cm_stream *stream)
{
    if (cm_state_runtime(storage->state) == NULL) {
        return -1;
    }
    uint64_t event;
    bool waited = true;
    CM_NVTX("wait for buffer", storage->nbytes);
    cm_status status = CM_WITHOUT_GIL(mark_stream(stream, &event));
    if (cm_is_ok(status)) {
        waited = cm_wait_polling(stream->rt, stream->device,
                                 event != 0 ? cm_rt_event_query : cm_rt_stream_query,
                                 event != 0 ? event : stream->handle, true, &status);
    }
    if (event != 0) {
        status = cm_first_failure(
            status, CM_WITHOUT_GIL(cm_rt_event_destroy(stream->rt, event)));
    }
    if (!waited) {
        return -1;
    }
    return cm_py_check(storage->state, status,
                       "while waiting for a stream that uses the buffer");
}

/* Poll with growing naps, until it is time to look for signals. Called without the
 * GIL. */
static void
poll_transfers(const cm_storage *storage, cm_engine *engine)
{
    uint64_t start = cm_now_ns();
    uint64_t elapsed = 0;
    while (cm_storage_is_in_transfer(storage) && elapsed < CM_SIGNAL_SLICE_NS) {
        cm_nap_after(elapsed);
        cm_engine_poll(engine);
        elapsed = cm_now_ns() - start;
    }
}

int
cm_storage_wait_transfers(cm_storage *storage)
{
    while (cm_storage_is_in_transfer(storage)) {
        if (cm_state_runtime(storage->state) == NULL) {
            return -1;
        }
        cm_engine *engine = storage->state->engine;
        if (engine == NULL) {
            /* The interpreter is ending, and nothing is given back any more. */
            return 0;
        }
        cm_state_enter(storage->state); /* so that shutdown() leaves the engine alone */
        Py_BEGIN_ALLOW_THREADS
        poll_transfers(storage, engine);
        Py_END_ALLOW_THREADS
        cm_state_leave(storage->state);
        if (PyErr_CheckSignals() < 0) {
            return -1;
        }
    }
    return 0;
}

int
cm_storage_wait_pending(cm_storage *storage)
{
    while (storage->transfer_count > 0) {
        cm_ticket *ticket = cm_ticket_hold(storage->transfers[0].ticket);
        int result = wait_for_transfer(storage, ticket);
        cm_ticket_release(ticket);
        if (result < 0) {
            return -1;
        }
    }
    return 0;
}

int
cm_storage_wait(cm_storage *storage, bool streams)
{
    if (cm_storage_wait_pending(storage) < 0) {
        return -1;
    }
    if (!streams && !cm_storage_has_pending_fill(storage)) {
        return 0;
    }
    /* Other threads may add fills while we wait, and must wait for those themselves. */
    uint64_t stream_fill_count = storage->stream_fill_count;
    cm_pending pending;
    int result = cm_pending_take(storage, &pending);
    for (uint32_t i = 0; result == 0 && i < pending.stream_count; i++) {
        result = wait_for_stream(storage, pending.streams[i]);
    }
    cm_pending_give(&pending);
    if (result == 0 && storage->awaited_fill_count < stream_fill_count) {
        storage->awaited_fill_count = stream_fill_count;
    }
    return result;
}

/* -- a consumer's stream after them --------------------------------------------------------- */

int
cm_pending_take(const cm_storage *storage, cm_pending *out)
{
    uint32_t stream_count = storage->use_count;
    uint32_t ticket_count = storage->transfer_count;
    *out = (cm_pending){.state = NULL};
    void **room = malloc((stream_count + ticket_count + 1u) * sizeof(*room));
    if (room == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *out = (cm_pending){.state = storage->state,
                        .streams = (cm_stream **)(void *)room,
                        .stream_count = stream_count,
                        .tickets = (cm_ticket **)(void *)(room + stream_count),
                        .ticket_count = ticket_count,
                        .use_calls = storage->use_calls};
    for (uint32_t i = 0; i < stream_count; i++) {
        out->streams[i] = cm_stream_hold(storage->uses[i]);
    }
    uint32_t end = ticket_count;
    for (uint32_t i = 0; i < ticket_count; i++) {
        const cm_storage_transfer *transfer = &storage->transfers[i];
        uint32_t place = transfer->extent.writes ? out->writer_count++ : --end;
        out->tickets[place] = cm_ticket_hold(transfer->ticket);
    }
    cm_state_enter(out->state);
    return 0;
}

void
cm_pending_give(cm_pending *pending)
{
    if (pending->state == NULL) {
        return;
    }
    for (uint32_t i = 0; i < pending->stream_count; i++) {
        cm_stream_release(pending->streams[i]);
    }
    for (uint32_t i = 0; i < pending->ticket_count; i++) {
        cm_ticket_release(pending->tickets[i]);
    }
    free((void *)pending->streams);
    cm_state_leave(pending->state);
    *pending = (cm_pending){.state = NULL};
}

cm_status
cm_pending_prune(cm_pending *pending, int device, uint64_t consumer)
{
    uint32_t left = 0;
    uint32_t writers_left = 0;
    for (uint32_t i = 0; i < pending->ticket_count; i++) {
        cm_ticket_info info;
        cm_ticket_query(pending->tickets[i], &info);
        if (info.done) {
            cm_ticket_release(pending->tickets[i]);
        }
        else {
            pending->tickets[left++] = pending->tickets[i];
            writers_left += i < pending->writer_count;
        }
    }
    pending->ticket_count = left;
    pending->writer_count = writers_left;
    cm_status status = cm_ok();
    left = 0;
    for (uint32_t i = 0; i < pending->stream_count; i++) {
        cm_stream *stream = pending->streams[i];
        bool done = device >= 0 && cm_stream_is_handle(stream, device, consumer);
        bool capturing = false;
        if (cm_is_ok(status) && !done) {
            status = query_stream(stream, &done, &capturing);
        }
        if (cm_is_ok(status) && capturing) {
            pending->captured = true;
            done = device < 0;
        }
        if (cm_is_ok(status) && done) {
            cm_stream_release(stream);
        }
        else {
            pending->streams[left++] = stream;
        }
    }
    pending->stream_count = left;
    return status;
}

cm_status
cm_pending_order(const cm_pending *pending, cm_stream *consumer)
{
    for (uint32_t i = 0; i < pending->writer_count; i++) {
        cm_status status = cm_ticket_order(pending->tickets[i], consumer);
        if (!cm_is_ok(status) && status.code != CM_ECANCELLED) {
            return status;
        }
    }
    for (uint32_t i = pending->writer_count; i < pending->ticket_count; i++) {
        CM_TRY(cm_ticket_follow(pending->tickets[i], consumer));
    }
    for (uint32_t i = 0; i < pending->stream_count; i++) {
        CM_TRY(cm_stream_follow(consumer, pending->streams[i]));
    }
    return cm_ok();
}

static cm_status
order_handle(cm_runtime *rt, cm_pending *pending, int device, uint64_t handle,
             bool *capturing)
{
    CM_TRY(cm_stream_ask_capturing(rt, device, handle, capturing));
    CM_TRY(cm_pending_prune(pending, device, handle));
    if (pending->stream_count == 0 && pending->ticket_count == 0) {
        return cm_ok();
    }
    cm_stream *consumer;
    CM_TRY(cm_stream_wrap(rt, device, handle, NULL, NULL, &consumer));
    cm_status status = cm_pending_order(pending, consumer);
    cm_stream_release(consumer);
    return status;
}

int
cm_storage_order_handle(cm_storage *storage, int device, uint64_t handle)
{
    bool pooled = storage->pool != NULL && handle > CM_STREAM_LEGACY;
    if (storage->use_count == 0 && storage->transfer_count == 0 && !pooled) {
        return 0;
    }
    cm_runtime *rt = cm_state_runtime(storage->state);
    cm_pending pending;
    if (rt == NULL || cm_pending_take(storage, &pending) < 0) {
        return -1;
    }
    bool capturing = false;
    cm_status status =
        CM_WITHOUT_GIL(order_handle(rt, &pending, device, handle, &capturing));
    storage->was_captured = storage->was_captured || capturing;
    cm_pending_give(&pending);
    return cm_py_check(storage->state, status, "while ordering a consumer's stream");
}
