/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out when freed memory is idle, so that it can be used again.
 *
 * The idea: epochs
 * ----------------
 * An event that is recorded on a stream passes when everything before it on the stream
 * has ended. Recording one for each block that is freed would cost a runtime call for
 * each free, and a training step frees hundreds of blocks. So the pool divides the time
 * of each stream into numbered epochs instead. Each stream that worked on memory of the
 * pool has a slot, and each slot has a present epoch, which is just a number. A free in
 * the order of a stream tags the block's span (its place in the heap, heap.h) with
 * (slot, epoch) and does nothing else. When somebody wants to know whether the stream
 * has finished with its spans, the poller closes the epoch: it notes the number, adds
 * one for the frees that follow, and records one event on the stream (a cm_mark). Once
 * that event has passed, done[slot] is raised to the noted number. All spans of the
 * slot that were tagged with this number or a lower one are clean then, which means
 * that any stream may have them. Nobody has to visit these spans, since a span is clean
 * exactly if its epoch <= done[its tag]. Otherwise it is pending.
 *
 * Example, one stream in slot 1 whose present epoch is 7:
 *
 *   free A, free B      A and B are tagged (1, 7). No runtime call.
 *   poll                Epoch 7 is closed and event e recorded; the epoch is 8 now.
 *   free C              C is tagged (1, 8).
 *   e passes, poll      done[1] = 7: anybody may have A and B. C belongs to the stream
 *                       alone until an event of epoch 8 has passed.
 *
 * If cm_rt_stream_query() says that the stream is idle, the poller records no event and
 * raises done[slot] at once.
 *
 * Flights
 * -------
 * Not every block can be given back in a stream's order. Host memory cannot, because
 * the host waits for no stream. A block that two streams used cannot, because neither
 * stream's order covers the other's work. A block whose users are unknown cannot
 * either. Such a block goes into flight: a cm_flight lists the epochs that must all end
 * (its dues). An event is recorded at once on each stream that used the block. The
 * first poll that finds that all dues have ended gives the block back to the heap.
 *
 * Fences
 * ------
 * If nobody knows which stream used a block (because it was exported, say), the block
 * has to wait for everything that the device is doing. Each device has a slot of its
 * own behind those of the streams. The event for such a slot, a fence, is recorded over
 * the whole context of the device. Fences are recorded late and for many blocks at
 * once, by a poll with `may_fence`, because recording one breaks a capture on any
 * stream of the context. If the driver cannot record over a context, the host has to
 * wait for the device instead.
 *
 * Who may do what
 * ---------------
 * Tags and slots change only under the pool's lock. The poller (the thread that has the
 * turn `polling`) alone takes marks away, ends epochs and frees slots, so what it has
 * read of a slot stays true after it has given the lock back. Other threads may add
 * marks, under the lock.
 *
 * Edges
 * -----
 *   - A foreign stream belongs to somebody else, who may destroy it at any time. So an
 *     event is recorded on it when a block is given back, and never later
 *     (cm_pool_try_mark_foreign()).
 *   - The pool records nothing on a stream that captures. Spans with its tag stay
 *     pending until the capture has ended and a poll asks again.
 *   - A block that a graph may use is never idle before the pool ends.
 *   - If a stream gets no slot, since all CM_STREAMS_MAX are taken, its blocks wait for
 *     a fence.
 *   - If the context of a device is gone, its events count as passed, since the work
 *     went with the context. */
#include <stdlib.h>
#include <string.h>

#include "base/backoff.h"
#include "pool/private.h"
#include "runtime/scope.h"

/* -- events ----------------------------------------------------------------------------- */

/* Ask whether a stream captures, since then nothing may be recorded on it. */
static cm_status
ask_capturing(cm_pool *pool, uint64_t handle, bool *out)
{
    cm_status status = cm_rt_stream_is_capturing(pool->rt, handle, out);
    if (status.code == CM_CUDA_CAPTURE_IMPLICIT) {
        /* This is the legacy stream, and a stream for which it would wait is
         * capturing. */
        *out = true;
        return cm_ok();
    }
    return status;
}

/* -- streams and their epochs --------------------------------------------------------------- */

void
cm_pool_init_slots(cm_pool *pool)
{
    pool->slot_count = 1;
    pool->done[0] = UINT64_MAX;
    for (uint32_t i = 0; i < CM_EPOCHS_MAX; i++) {
        pool->epochs[i].epoch = 1;
        cm_list_init(&pool->epochs[i].marks);
    }
}

/* Return the device of a slot that is in use. */
static int
device_of(const cm_pool *pool, uint32_t i)
{
    return i < CM_STREAMS_MAX ? pool->epochs[i].stream->device
                              : (int)(i - CM_STREAMS_MAX);
}

static uint64_t
device_bit(int device)
{
    return UINT64_C(1) << device;
}

uint32_t
cm_pool_search_slot_locked(const cm_pool *pool, const cm_stream *stream)
{
    for (uint32_t i = 1; i < pool->slot_count; i++) {
        const cm_stream *own = pool->epochs[i].stream;
        if (own != NULL && cm_stream_same(own, stream)) {
            return i;
        }
    }
    return 0;
}

uint32_t
cm_pool_slot_locked(cm_pool *pool, cm_stream *stream)
{
    uint32_t i = cm_pool_find_slot_locked(pool, stream);
    if (i != 0) {
        return i;
    }
    for (i = 1; i < CM_STREAMS_MAX && pool->epochs[i].stream != NULL; i++) {
    }
    if (i == CM_STREAMS_MAX) {
        return 0;
    }
    pool->epochs[i].stream = cm_stream_hold(stream);
    pool->slot_count = i >= pool->slot_count ? i + 1 : pool->slot_count;
    return i;
}

/* True if something waits for work of the slot that has not been seen to end. */
static bool
is_late_locked(const cm_pool *pool, uint32_t i)
{
    return pool->epochs[i].awaited_epoch > pool->done[i];
}

bool
cm_pool_has_other_pending_locked(const cm_pool *pool, uint32_t own)
{
    for (uint32_t i = 1; i < pool->slot_count; i++) {
        if (i != own && pool->epochs[i].given_epoch > pool->done[i]) {
            return true;
        }
    }
    return false;
}

static void
end_epoch(cm_pool *pool, uint32_t i, uint64_t epoch)
{
    cm_spin_lock_take(&pool->lock);
    cm_pool_raise(&pool->done[i], epoch);
    pool->waited_in_vain = pool->waited_in_vain && i < CM_STREAMS_MAX;
    cm_spin_lock_give(&pool->lock);
}

/* -- events of slots -------------------------------------------------------------------- */

/* Destroy an event that is no longer needed. If the runtime refuses twice, the event
 * counts as lost. */
static void
drop_mark(cm_pool *pool, cm_mark *mark)
{
    cm_spin_lock_take(&pool->lock);
    cm_list_remove(&mark->node);
    cm_spin_lock_give(&pool->lock);
    if (!CM_TRY_TWICE(
            cm_scope_accept_gone(cm_rt_event_destroy(pool->rt, mark->event)))) {
        atomic_fetch_add(&pool->lost_count, 1);
    }
    free(mark);
}

/* Record an event over all work of the slot so far, for `epoch`, which the caller has
 * closed. `stream` is NULL if the slot belongs to a device. Called inside a cm_scope of
 * the slot's device, by any thread that keeps `stream` alive, while the stream is not
 * capturing. */
static cm_status
record(cm_pool *pool, uint32_t i, const cm_stream *stream, uint64_t epoch)
{
    cm_epochs *slot = &pool->epochs[i];
    cm_mark *mark = malloc(sizeof(*mark));
    CM_TRY(cm_allocated(mark != NULL, sizeof(*mark)));
    cm_status status =
        cm_rt_event_create(pool->rt, CM_EVENT_DISABLE_TIMING, &mark->event);
    if (!cm_is_ok(status)) {
        free(mark);
        return status;
    }
    status = stream != NULL ? cm_rt_event_record(pool->rt, mark->event, stream->handle)
                            : cm_rt_context_record_event(pool->rt, mark->event);
    mark->epoch = epoch;
    cm_list_init(&mark->node);
    cm_spin_lock_take(&pool->lock);
    /* If the epoch has ended meanwhile, the slot may belong to another stream by now,
     * and nobody needs this event. */
    bool added = cm_is_ok(status) && epoch > pool->done[i];
    if (added) {
        cm_list_push_back(&slot->marks, &mark->node);
        cm_pool_raise(&slot->recorded_epoch, epoch);
    }
    cm_spin_lock_give(&pool->lock);
    if (!added) {
        drop_mark(pool, mark);
    }
    return status;
}

/* Close the epoch of `stream` and record an event for it, in the caller's scope. *out
 * then says what a block has to wait for.
 * Fails: CM_ENOMEM if all slots are taken; as record(). */
static cm_status
mark_stream(cm_pool *pool, cm_stream *stream, cm_due *out)
{
    cm_spin_lock_take(&pool->lock);
    out->slot = cm_pool_slot_locked(pool, stream);
    if (out->slot != 0) {
        cm_epochs *slot = &pool->epochs[out->slot];
        out->epoch = slot->epoch++;
        /* This keeps the slot from being freed, since something waits for its work. */
        slot->awaited_epoch = out->epoch;
    }
    cm_spin_lock_give(&pool->lock);
    return out->slot != 0 ? record(pool, out->slot, stream, out->epoch)
                          : cm_fail(CM_ENOMEM, CM_STREAMS_MAX);
}

bool
cm_pool_try_mark_foreign(cm_pool *pool, cm_stream *stream, cm_due *out)
{
    cm_spin_lock_take(&pool->lock);
    uint32_t i = cm_pool_find_slot_locked(pool, stream);
    bool needed = cm_stream_is_foreign(i != 0 ? pool->epochs[i].stream : stream);
    cm_spin_lock_give(&pool->lock);
    return !needed
           || cm_is_ok(
               CM_IN_SCOPE(pool->rt, stream->device, mark_stream(pool, stream, out)));
}

/* Return the youngest or the oldest mark of a slot, or NULL if it has none. The mark
 * stays until the poller takes it away. */
static cm_mark *
find_mark(cm_pool *pool, uint32_t i, bool youngest)
{
    const cm_list *marks = &pool->epochs[i].marks;
    cm_spin_lock_take(&pool->lock);
    cm_list *node = youngest ? marks->prev : marks->next;
    cm_spin_lock_give(&pool->lock);
    return node == marks ? NULL : CM_LIST_ENTRY(node, cm_mark, node);
}

/* Ask which events of a slot have passed, and end their epochs. Events pass in the
 * order in which they were recorded, so the first that has not passed ends the
 * search. */
static cm_status
query_marks(cm_pool *pool, uint32_t i)
{
    cm_mark *mark;
    while ((mark = find_mark(pool, i, false)) != NULL) {
        bool passed = mark->epoch <= pool->done[i];
        if (!passed) {
            cm_status status = cm_rt_event_query(pool->rt, mark->event, &passed);
            CM_TRY(cm_scope_accept_gone(status));
            /* If the context is gone, so is the work. */
            passed = passed || !cm_is_ok(status);
        }
#if defined(CM_DEBUG) && defined(CM_TEST_SKIP_EVENTS)
        passed = true; /* only in the build in which the stress test has to fail */
#endif
        if (!passed) {
            break;
        }
        end_epoch(pool, i, mark->epoch);
        drop_mark(pool, mark);
    }
    return cm_ok();
}

/* -- asking ----------------------------------------------------------------------------- */

/* True if the poller has to record an event for something that waits for this slot. On
 * a stream of ours the pool keeps one event at a time, unless `orders` says that
 * another stream is to wait for all work of this one. On a foreign stream the poller
 * records no event, since the stream may be gone. For a device it records one only if
 * `can_fence` is set. */
static bool
needs_mark_locked(const cm_pool *pool, uint32_t i, bool can_fence, bool orders)
{
    const cm_epochs *slot = &pool->epochs[i];
    if (!is_late_locked(pool, i) || slot->awaited_epoch <= slot->recorded_epoch) {
        return false;
    }
    return slot->stream == NULL ? can_fence
                                : !cm_stream_is_foreign(slot->stream)
                                      && (orders || cm_list_is_empty(&slot->marks));
}

/* Look at the events of a slot and, if that is needed, close its epoch and record
 * another event. Called by the poller, inside a cm_scope of the slot's device. No fence
 * is recorded while a stream that we know of is capturing, or while the legacy stream
 * says that some stream is capturing, since recording over the context would break the
 * capture. */
static cm_status
poll_slot(cm_pool *pool, uint32_t i, bool can_fence, bool orders)
{
    cm_epochs *slot = &pool->epochs[i];
    const cm_stream *stream = slot->stream;
    uint64_t handle = stream != NULL ? stream->handle : CM_STREAM_LEGACY;
    bool capturing = false;
    bool idle = false;
    CM_TRY(query_marks(pool, i));
    cm_spin_lock_take(&pool->lock);
    bool needed = needs_mark_locked(pool, i, can_fence, orders);
    cm_spin_lock_give(&pool->lock);
    if (needed) {
        CM_TRY(ask_capturing(pool, handle, &capturing));
        slot->is_capturing = stream != NULL && capturing;
        capturing = capturing || (stream == NULL && cm_streams_capture(pool->rt));
    }
    if (!needed || capturing) {
        return cm_ok();
    }
    cm_spin_lock_take(&pool->lock);
    /* Blocks that are given back from now on belong to the next epoch, since the event
     * will not cover their work. */
    uint64_t epoch = slot->epoch++;
    cm_spin_lock_give(&pool->lock);
    /* An idle stream needs no event: its work so far has ended. */
    if (stream != NULL && cm_is_ok(cm_rt_stream_query(pool->rt, handle, &idle))
        && idle) {
        end_epoch(pool, i, epoch);
        return cm_ok();
    }
    CM_TRY(record(pool, i, stream, epoch));
    return query_marks(pool, i);
}

/* Return the first slot from `i` on that has an event, or needs one, or CM_EPOCHS_MAX
 * if there is none. */
static uint32_t
find_asked(cm_pool *pool, uint32_t i, bool can_fence)
{
    cm_spin_lock_take(&pool->lock);
    while (i < CM_EPOCHS_MAX && cm_list_is_empty(&pool->epochs[i].marks)
           && !needs_mark_locked(pool, i, can_fence, false)) {
        i = i + 1 == pool->slot_count ? CM_STREAMS_MAX : i + 1;
    }
    cm_spin_lock_give(&pool->lock);
    return i;
}

/* True if nobody has a context on a device, so that nothing can be running there.
 * Asking the device itself would make a context. */
static bool
is_unused(cm_pool *pool, int device)
{
    bool active = true; /* a device that cannot be asked counts as used */
    if (!cm_device_was_entered(pool->rt, device)) {
        cm_ignore(cm_rt_context_is_active(pool->rt, device, &active));
    }
    return !active;
}

/* Ask about the work of all slots. Called by the poller.
 * Fails: the first call that failed. */
static cm_status
poll_slots(cm_pool *pool, bool can_fence)
{
    cm_status first = cm_ok();
    for (uint32_t i = 0; (i = find_asked(pool, i, can_fence)) < CM_EPOCHS_MAX; i++) {
        int device = device_of(pool, i);
        cm_spin_lock_take(&pool->lock);
        /* Blocks that are given back after this belong to the next epoch of the
         * device. */
        uint64_t epoch = pool->epochs[i].epoch;
        pool->epochs[i].epoch += i >= CM_STREAMS_MAX;
        cm_spin_lock_give(&pool->lock);
        if (i >= CM_STREAMS_MAX && is_unused(pool, device)) {
            end_epoch(pool, i, epoch);
            continue;
        }
        first = cm_first_failure(
            first, CM_IN_SCOPE(pool->rt, device, poll_slot(pool, i, can_fence, false)));
    }
    return first;
}

bool
cm_pool_order_after_slots(cm_pool *pool, cm_stream *stream,
                          uint64_t done[CM_EPOCHS_MAX])
{
    bool any = false;
    cm_spin_lock_take(&pool->lock);
    memcpy(done, pool->done, sizeof(pool->done));
    cm_spin_lock_give(&pool->lock);
    for (uint32_t i = 1; i < CM_STREAMS_MAX; i++) {
        cm_spin_lock_take(&pool->lock);
        bool pending = pool->epochs[i].given_epoch > pool->done[i];
        cm_spin_lock_give(&pool->lock);
        if (!pending) {
            continue;
        }
        /* If this fails, there is no new event. An older event covers less work, so
         * `stream` may then take fewer spans. */
        cm_ignore(
            CM_IN_SCOPE(pool->rt, device_of(pool, i), poll_slot(pool, i, false, true)));
        const cm_mark *mark = find_mark(pool, i, true);
        any = any || pool->done[i] > done[i]; /* work has ended meanwhile */
        done[i] = pool->done[i];
        if (mark != NULL && cm_is_ok(cm_stream_wait_event(stream, mark->event))) {
            done[i] = mark->epoch;
            any = true;
        }
    }
    return any;
}

/* -- forgetting ------------------------------------------------------------------------- */

/* Free a slot whose work has all ended. */
static void
empty_slot_locked(cm_pool *pool, uint32_t i)
{
    cm_epochs *slot = &pool->epochs[i];
    pool->given_count -= slot->given_epoch != 0;
    pool->done[i] = slot->epoch++;
    slot->stream = NULL;
    slot->given_epoch = 0;
    slot->awaited_epoch = 0;
    slot->is_capturing = false;
    while (pool->slot_count > 1 && pool->epochs[pool->slot_count - 1].stream == NULL) {
        pool->slot_count--;
    }
}

void
cm_pool_drop_slots(cm_pool *pool, bool orphans_only)
{
    cm_stream *dropped[CM_STREAMS_MAX];
    uint32_t count = 0;
    cm_spin_lock_take(&pool->lock);
    bool is_full = pool->slot_count == CM_STREAMS_MAX;
    for (uint32_t i = pool->slot_count; i-- > 1;) {
        cm_stream *stream = pool->epochs[i].stream;
        if (stream != NULL && !is_late_locked(pool, i)
            && cm_list_is_empty(&pool->epochs[i].marks)
            && (!orphans_only || is_full
                || atomic_load_explicit(&stream->refs, memory_order_relaxed) == 1)) {
            dropped[count++] = stream;
            empty_slot_locked(pool, i);
        }
    }
    cm_spin_lock_give(&pool->lock);
    while (count > 0) {
        cm_stream_release(dropped[--count]);
    }
}

/* -- blocks in flight ------------------------------------------------------------------------- */

enum {
    /* A poll stops after this many blocks that stay in flight. The next poll visits
     * others, since the visited ones go to the end of the list. */
    PASS_MAX = 4096,
    TURN_MAX = 256 /* a poll lets go of the lock after visiting this many blocks */
};

static cm_flight *
flight_of(cm_list *node)
{
    return CM_LIST_ENTRY(node, cm_flight, node);
}

/* Note that a stream used the block. Called inside a cm_scope of the stream's device.
 * If we cannot find out whether the stream captures, no event is recorded, since an
 * event could break somebody's capture. `fenced` says that the block waits for a fence
 * of this device anyway, which covers the stream. */
static cm_status
note_use(cm_pool *pool, cm_flight *flight, cm_stream *stream, bool fenced)
{
    bool capturing = false;
    CM_TRY(cm_rt_stream_is_capturing(pool->rt, stream->handle, &capturing));
    flight->captured = flight->captured || capturing;
    if (!capturing && !fenced) {
        CM_TRY(mark_stream(pool, stream, &flight->dues[flight->due_count]));
        flight->due_count++;
    }
    return cm_ok();
}

cm_flight *
cm_flight_create(cm_pool *pool, cm_heap_span *span, cm_stream *const *uses,
                 uint32_t use_count, unsigned flags)
{
    size_t most = (size_t)use_count + (size_t)pool->rt->device_count;
    cm_flight *flight = calloc(1, sizeof(*flight) + most * sizeof(*flight->dues));
    if (flight == NULL) {
        return NULL;
    }
    flight->span = span;
    flight->captured = (flags & CM_POOL_FREE_CAPTURED) != 0;
    uint64_t fences = 0; /* bits of the devices for which a fence is needed */
    if ((flags & CM_POOL_FREE_FENCE) != 0) {
        /* Unknown work may run on any device. The poller asks later which devices are
         * in use at all. */
        fences = UINT64_MAX >> (CM_MAX_DEVICES - pool->rt->device_count);
    }
    for (uint32_t i = 0; i < use_count; i++) {
        uint64_t bit = device_bit(uses[i]->device);
        cm_status status = cm_fail(CM_ENOTSUP, uses[i]->handle);
        uint32_t j = 0;
        while (j < i && !cm_stream_same(uses[j], uses[i])) {
            j++;
        }
        if (j == i && cm_stream_is_kept(uses[i])) {
            status = CM_IN_SCOPE(pool->rt, uses[i]->device,
                                 note_use(pool, flight, uses[i], (fences & bit) != 0));
        }
        if (j == i && !cm_is_ok(status)) {
            fences |= bit; /* without an event, only a fence can tell when the work has
                              ended */
        }
    }
    cm_spin_lock_take(&pool->lock);
    for (uint32_t i = CM_STREAMS_MAX; i < CM_EPOCHS_MAX; i++) {
        cm_epochs *slot = &pool->epochs[i];
        if ((fences & device_bit(device_of(pool, i))) != 0) {
            slot->awaited_epoch = slot->epoch;
            flight->dues[flight->due_count++] = (cm_due){i, slot->epoch};
        }
    }
    cm_spin_lock_give(&pool->lock);
    return flight;
}

uint64_t
cm_pool_fenced_nbytes_locked(const cm_pool *pool)
{
    uint64_t nbytes = 0;
    for (cm_list *n = pool->in_flight.next; n != &pool->in_flight; n = n->next) {
        const cm_flight *flight = flight_of(n);
        bool fenced = false;
        for (uint32_t i = 0; i < flight->due_count; i++) {
            uint32_t slot = flight->dues[i].slot;
            uint64_t epoch = flight->dues[i].epoch;
            fenced |= slot >= CM_STREAMS_MAX && epoch > pool->done[slot]
                      && epoch > pool->epochs[slot].recorded_epoch;
        }
        nbytes += fenced ? flight->span->block.nbytes : 0;
    }
    return nbytes;
}

bool
cm_pool_has_unknown_work(cm_pool *pool)
{
    uint64_t known_count = 0;
    bool is_captured = false;
    cm_spin_lock_take(&pool->lock);
    for (cm_list *n = pool->in_flight.next; n != &pool->in_flight; n = n->next) {
        is_captured = is_captured || flight_of(n)->captured;
        known_count++;
    }
    bool is_missing = known_count < pool->counters.in_flight_count;
    cm_spin_lock_give(&pool->lock);
    return is_captured || is_missing;
}

bool
cm_pool_has_fence_locked(const cm_pool *pool)
{
    bool found = false;
    for (uint32_t i = CM_STREAMS_MAX; i < CM_EPOCHS_MAX && !found; i++) {
        found = !cm_list_is_empty(&pool->epochs[i].marks);
    }
    return found;
}

bool
cm_pool_is_fence_due(cm_pool *pool)
{
    bool due = false;
    cm_spin_lock_take(&pool->lock);
    for (uint32_t i = CM_STREAMS_MAX; i < CM_EPOCHS_MAX; i++) {
        due = due || is_late_locked(pool, i);
    }
    cm_spin_lock_give(&pool->lock);
    return due;
}

static bool
is_idle_locked(const cm_pool *pool, const cm_flight *flight)
{
    bool idle = !flight->captured;
    for (uint32_t i = 0; idle && i < flight->due_count; i++) {
        idle = flight->dues[i].epoch <= pool->done[flight->dues[i].slot];
    }
    return idle;
}

/* Give idle blocks in flight back to the heap. This visits a limited number of blocks,
 * or all blocks if `all` is set. When the pool ends, `at_end` is set, and then blocks
 * that are not idle are given back too. Called by the poller. */
static void
land_flights(cm_pool *pool, bool all, bool at_end)
{
    cm_list landed;
    cm_list *node;
    cm_list_init(&landed);
    cm_spin_lock_take(&pool->lock);
    uint64_t left = pool->counters.in_flight_count;
    for (uint64_t passed = 0; left > 0 && (all || passed < PASS_MAX); left--) {
        node = cm_list_pop_front(&pool->in_flight);
        if (node == NULL) {
            break; /* the count includes blocks that are not in this list */
        }
        if (at_end || is_idle_locked(pool, flight_of(node))) {
            cm_heap_view view = cm_pool_view_locked(pool, 0);
            cm_heap_span *span = flight_of(node)->span;
            pool->counters.in_flight_count--;
            pool->counters.in_flight_nbytes -= span->block.nbytes;
            /* Work from before the block was handed out may still run, so the span
             * keeps the tag that says so. */
            (void)cm_heap_give(&pool->heap, span, span->tag, span->epoch, &view);
            cm_pool_note_peaks_locked(pool);
            cm_list_push_back(&landed, node);
        }
        else {
            passed++;
            cm_list_push_back(&pool->in_flight, node);
        }
        if (left % TURN_MAX == 0) {
            cm_spin_lock_give(&pool->lock);
            cm_spin_lock_take(&pool->lock);
        }
    }
    cm_spin_lock_give(&pool->lock);
    while ((node = cm_list_pop_front(&landed)) != NULL) {
        free(flight_of(node));
    }
}

void
cm_pool_abandon_work(cm_pool *pool)
{
    for (uint32_t i = 1; i < CM_EPOCHS_MAX; i++) {
        cm_mark *mark;
        while ((mark = find_mark(pool, i, false)) != NULL) {
            drop_mark(pool, mark);
        }
        pool->done[i] = pool->epochs[i].epoch;
    }
    cm_pool_drop_slots(pool, false);
    land_flights(pool, true, true);
}

/* -- polling ---------------------------------------------------------------------------- */

/* If `aim` is NULL this does the same as cm_pool_poll(). Otherwise `aim` holds an epoch
 * for each slot, and the call waits for its turn and visits all blocks. `idle` has a
 * bit for each device that wait_devices() has seen finish its work. In the slots of
 * such a device, the epochs in `aim` have ended. */
static cm_status
poll(cm_pool *pool, bool may_fence, const uint64_t *aim, uint64_t idle)
{
    if (!cm_mutex_take(&pool->polling, aim != NULL)) {
        return cm_ok();
    }
    cm_spin_lock_take(&pool->lock);
    for (uint32_t i = 1; aim != NULL && i < CM_EPOCHS_MAX; i++) {
        if (is_late_locked(pool, i) && (idle & device_bit(device_of(pool, i))) != 0) {
            cm_pool_raise(&pool->done[i], aim[i]);
        }
    }
    cm_spin_lock_give(&pool->lock);
    bool can_fence = may_fence && cm_runtime_has(pool->rt, CM_OP_context_record_event);
    cm_status status = poll_slots(pool, can_fence);
    land_flights(pool, aim != NULL, false);
    cm_pool_drop_slots(pool, true);
    cm_mutex_unlock(&pool->polling);
    return status;
}

cm_status
cm_pool_poll(cm_pool *pool, bool may_fence)
{
    return poll(pool, may_fence, NULL, 0);
}

/* -- waiting ------------------------------------------------------------------------------ */
/* A wait has two parts. First it waits for events. If somebody can interrupt the wait,
 * it asks about the events from time to time. Otherwise it blocks in the runtime. Then
 * it waits for whole devices, because of the work that no event covers. While this
 * thread calls a hook or waits for a device, it has neither the turn `growing` nor the
 * turn `polling`. */

/* Poll once, for a wait whose goal holds an epoch for each slot. Returns false if no
 * event is left that covers a part of the goal, or if asking fails. A wait that nobody
 * can interrupt blocks in the runtime until the next event has passed. It records no
 * fences, because it waits for the devices afterwards anyway. */
static bool
is_pending(cm_pool *pool, bool can_interrupt, bool may_fence, const uint64_t *goal)
{
    cm_status status = cm_pool_poll(pool, can_interrupt && may_fence);
    if (!cm_is_ok(status)) {
        return false;
    }
    if (!cm_mutex_take(&pool->polling, false)) {
        return true; /* another thread is polling, or waiting */
    }
    const cm_mark *mark = NULL;
    for (uint32_t i = 1; i < CM_EPOCHS_MAX && mark == NULL; i++) {
        mark = goal[i] > pool->done[i] ? find_mark(pool, i, false) : NULL;
    }
    if (mark != NULL && !can_interrupt) {
        status = CM_IN_SCOPE(pool->rt, pool->config.device,
                             cm_rt_event_synchronize(pool->rt, mark->event));
    }
    cm_mutex_unlock(&pool->polling);
    return mark != NULL && cm_is_ok(status);
}

/* Return, as bits, the devices for which the host has to wait to reach the rest of the
 * goal. These are the devices whose fences are missing and, unless `fences_only` is
 * set, the devices of streams with work that no event covers. For each slot that the
 * wait is for, this closes the present epoch and makes it the goal. All other slots are
 * taken out of the goal. Called by the poller. */
static uint64_t
find_due(cm_pool *pool, bool fences_only, uint64_t *goal)
{
    uint64_t due = 0;
    cm_spin_lock_take(&pool->lock);
    for (uint32_t i = 1; i < CM_EPOCHS_MAX; i++) {
        cm_epochs *slot = &pool->epochs[i];
        /* Waiting for a device would end the capture of this stream. */
        bool is_due = is_late_locked(pool, i) && goal[i] > pool->done[i]
                      && !slot->is_capturing && (i >= CM_STREAMS_MAX || !fences_only);
        goal[i] = is_due ? slot->epoch++ : 0;
        due |= is_due ? device_bit(device_of(pool, i)) : 0;
    }
    cm_spin_lock_give(&pool->lock);
    return due;
}

/* Wait for everything that each of these devices is doing. Adds to *idle the bits of
 * the devices for which that succeeded.
 * Fails: CM_ECANCELLED, at once, if the hooks say so; else the first failure, after all
 *        devices were tried. */
static cm_status
wait_devices(cm_pool *pool, const cm_wait_hooks *hooks, uint64_t devices,
             uint64_t *idle)
{
    cm_status first = cm_ok();
    for (int d = 0; d < CM_MAX_DEVICES; d++) {
        if ((devices & device_bit(d)) == 0) {
            continue;
        }
        cm_status status = cm_ok();
        if (is_unused(pool, d)) {
            status = cm_ok();
        }
        else if (hooks->wait_device == NULL) {
            status = cm_scope_accept_gone(
                CM_IN_SCOPE(pool->rt, d, cm_rt_device_synchronize(pool->rt)));
        }
        else if (!hooks->wait_device(hooks->argument, d, &status)) {
            return cm_fail(CM_ECANCELLED, 0);
        }
        *idle |= cm_is_ok(status) ? device_bit(d) : 0;
        first = cm_first_failure(first, status);
    }
    return first;
}

/* Wait until no event is left that covers a part of the goal.
 * Fails: CM_ECANCELLED. */
static cm_status
wait_events(cm_pool *pool, const cm_wait_hooks *hooks, const uint64_t *goal)
{
    uint64_t start = cm_now_ns();
    uint64_t asked = start;
    bool may_fence = !cm_others_capture(hooks);
    while (is_pending(pool, hooks->interrupted != NULL, may_fence, goal)) {
        CM_TRY(cm_wait_check_interrupted(hooks, &asked));
        cm_nap_after(cm_now_ns() - start);
    }
    return cm_ok();
}

cm_status
cm_pool_wait(cm_pool *pool, const cm_wait_hooks *hooks, bool fences_only)
{
    static const cm_wait_hooks uninterrupted = {.interrupted = NULL};
    hooks = hooks != NULL ? hooks : &uninterrupted;
    /* For each slot, the youngest epoch that anything waits for now, or 0. */
    uint64_t goal[CM_EPOCHS_MAX];
    cm_spin_lock_take(&pool->lock);
    for (uint32_t i = 0; i < CM_EPOCHS_MAX; i++) {
        goal[i] = pool->epochs[i].awaited_epoch;
    }
    cm_spin_lock_give(&pool->lock);
    if (!fences_only) {
        CM_TRY(wait_events(pool, hooks, goal));
    }
    if (cm_streams_capture(pool->rt) || cm_others_capture(hooks)) {
        /* A wait for a device would end the capture. */
        return cm_pool_poll(pool, false);
    }
    cm_mutex_lock(&pool->polling);
    uint64_t due = find_due(pool, fences_only, goal);
    cm_mutex_unlock(&pool->polling);
    uint64_t idle = 0;
    cm_status status = wait_devices(pool, hooks, due, &idle);
    return status.code == CM_ECANCELLED
               ? status
               : cm_first_failure(status, poll(pool, false, goal, idle));
}
