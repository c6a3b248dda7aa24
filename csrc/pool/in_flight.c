/* SPDX-License-Identifier: Apache-2.0 */
/* When freed memory is idle. Each stream that worked on some has a slot, whose epochs
 * end as events of the stream pass; so has each device, for work of unknown streams: an
 * event over all that a device is doing is a fence. In stream order, for device memory,
 * a block whose only user was one stream goes back to the heap at once, tagged with the
 * stream's epoch. Nothing is recorded then; an event is recorded when another stream
 * wants the memory, one for all blocks of the stream. Other blocks are in flight until
 * the epochs of all their streams have ended, with an event recorded at once, and of
 * devices, whose fences are taken later. */
#include <stdlib.h>
#include <string.h>

#include "base/backoff.h"
#include "pool/private.h"
#include "runtime/scope.h"

/* -- events ----------------------------------------------------------------------------- */

/* Nothing may be recorded on a stream that captures, or that cannot be asked. */
static cm_status
ask_capturing(cm_pool *pool, uint64_t handle, bool *out)
{
    cm_status status = cm_rt_stream_is_capturing(pool->rt, handle, out);
    if (status.code == CM_CUDA_CAPTURE_IMPLICIT) {
        *out = true; /* the legacy stream, where another that it waits for captures */
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

/* Of a slot that something waits for. */
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

/* Is there anything of it to wait for? */
static bool
is_late_locked(const cm_pool *pool, uint32_t i)
{
    return pool->epochs[i].awaited_epoch > pool->done[i];
}

bool
cm_pool_is_other_late_locked(const cm_pool *pool, uint32_t own)
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

/* An event that is refused twice is lost. */
static void
drop_mark(cm_pool *pool, cm_mark *mark)
{
    cm_spin_lock_take(&pool->lock);
    cm_list_remove(&mark->node);
    cm_spin_lock_give(&pool->lock);
    if (!CM_TRY_TWICE(cm_scope_settle(cm_rt_event_destroy(pool->rt, mark->event)))) {
        atomic_fetch_add(&pool->lost_count, 1);
    }
    free(mark);
}

/* Record an event over the slot's work so far, after its `epoch` was ended. Inside a
 * cm_scope of its device, and not while it captures; by any thread, which keeps
 * `stream` (NULL: the device). */
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
    /* Where it is known to have ended the slot may be another stream's by now. */
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

/* The same for what `stream` has been given so far, in the caller's scope; `out` waits
 * for it. Fails: CM_ENOMEM: there are too many streams; as above. */
static cm_status
mark_stream(cm_pool *pool, cm_stream *stream, cm_due *out)
{
    cm_spin_lock_take(&pool->lock);
    out->slot = cm_pool_slot_locked(pool, stream);
    if (out->slot != 0) {
        cm_epochs *slot = &pool->epochs[out->slot];
        out->epoch = slot->epoch++;
        slot->awaited_epoch = out->epoch; /* keeps the slot */
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

/* A mark stays until the poller takes it. NULL: there is none. */
static cm_mark *
find_mark(cm_pool *pool, uint32_t i, bool youngest)
{
    const cm_list *marks = &pool->epochs[i].marks;
    cm_spin_lock_take(&pool->lock);
    cm_list *node = youngest ? marks->prev : marks->next;
    cm_spin_lock_give(&pool->lock);
    return node == marks ? NULL : CM_LIST_ENTRY(node, cm_mark, node);
}

/* Which events have passed? In their order, so that the first late one tells of all. */
static cm_status
look(cm_pool *pool, uint32_t i)
{
    cm_mark *mark;
    while ((mark = find_mark(pool, i, false)) != NULL) {
        bool passed = mark->epoch <= pool->done[i];
        if (!passed) {
            cm_status status = cm_rt_event_query(pool->rt, mark->event, &passed);
            CM_TRY(cm_scope_settle(status));
            /* Of a context that is gone its work is, too. */
            passed = passed || !cm_is_ok(status);
        }
#if defined(CM_DEBUG) && defined(CM_TEST_SKIP_EVENTS)
        passed = true; /* a build of the stress that must fail */
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

/* Does an event have to be recorded for what waits? Of a stream the pool records one at
 * a time, unless another stream shall wait for all of it, and none of a foreign one,
 * which may be gone. Of a device where `can_fence`. */
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

/* Inside a cm_scope of its device. No fence is taken while any stream that we know
 * captures, or the legacy stream says that one does: recording over the context would
 * break the capture. */
static cm_status
poll_slot(cm_pool *pool, uint32_t i, bool can_fence, bool orders)
{
    cm_epochs *slot = &pool->epochs[i];
    const cm_stream *stream = slot->stream;
    uint64_t handle = stream != NULL ? stream->handle : CM_STREAM_LEGACY;
    bool capturing = false;
    bool idle = false;
    CM_TRY(look(pool, i));
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
    uint64_t epoch = slot->epoch++; /* what is given from now on is not covered */
    cm_spin_lock_give(&pool->lock);
    /* An idle stream needs no event, which would be done only a little later. */
    if (stream != NULL && cm_is_ok(cm_rt_stream_query(pool->rt, handle, &idle))
        && idle) {
        end_epoch(pool, i, epoch);
        return cm_ok();
    }
    CM_TRY(record(pool, i, stream, epoch));
    return look(pool, i);
}

/* The first slot from `i` on that can be asked about; CM_EPOCHS_MAX: there is none. */
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

/* Nobody has a context there: nothing runs, and to be asked more would make one. */
static bool
is_unused(cm_pool *pool, int device)
{
    bool active = true; /* one that cannot be asked about counts as in use */
    if (!cm_device_was_entered(pool->rt, device)) {
        cm_ignore(cm_rt_context_is_active(pool->rt, device, &active));
    }
    return !active;
}

/* Ask of all whether their work has ended. By the poller. Fails: the first failure. */
static cm_status
poll_slots(cm_pool *pool, bool can_fence)
{
    cm_status first = cm_ok();
    for (uint32_t i = 0; (i = find_asked(pool, i, can_fence)) < CM_EPOCHS_MAX; i++) {
        int device = device_of(pool, i);
        cm_spin_lock_take(&pool->lock);
        uint64_t epoch = pool->epochs[i].epoch; /* what is given later is not told of */
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
        bool late = pool->epochs[i].given_epoch > pool->done[i];
        cm_spin_lock_give(&pool->lock);
        if (!late) {
            continue;
        }
        /* the events that there are tell of less */
        cm_ignore(
            CM_IN_SCOPE(pool->rt, device_of(pool, i), poll_slot(pool, i, false, true)));
        const cm_mark *mark = find_mark(pool, i, true);
        any = any || pool->done[i] > done[i]; /* it has ended meanwhile */
        done[i] = pool->done[i];
        if (mark != NULL && cm_is_ok(cm_stream_wait_event(stream, mark->event))) {
            done[i] = mark->epoch;
            any = true;
        }
    }
    return any;
}

/* -- forgetting ------------------------------------------------------------------------- */

/* The slot is free from now on, and what names its epochs so far has ended. */
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
    PASS_MAX = 4096, /* a miss looks at so many that stay, the next one at others */
    TURN_MAX = 256   /* looked at before others may take the lock */
};

static cm_flight *
flight_of(cm_list *node)
{
    return CM_LIST_ENTRY(node, cm_flight, node);
}

/* Inside a cm_scope of its device. Where even the question fails recording could break
 * someone's capture. `fenced`: something will tell of all that the device does. */
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
    uint64_t fences = 0; /* the devices that need one */
    if ((flags & CM_POOL_FREE_FENCE) != 0) {
        /* Unknown workers may be on any, which is asked when the fence is taken. */
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
            fences |= bit; /* whatever is in the way */
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

/* Give what is idle back to the heap: of some blocks, of all, or whether it is or not
 * (`at_end`). By the poller. */
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
            break; /* the others could not be noted */
        }
        if (at_end || is_idle_locked(pool, flight_of(node))) {
            cm_heap_view view = cm_pool_view_locked(pool, 0);
            cm_heap_span *span = flight_of(node)->span;
            pool->counters.in_flight_count--;
            pool->counters.in_flight_nbytes -= span->block.nbytes;
            /* The tag is of what ran before the block was handed out. */
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

/* As cm_pool_poll(); waits for its turn where there is an `aim`, the epochs of all
 * slots that have ended on the devices `idle`. */
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
/* For events, by asking from time to time where the wait can be interrupted; then for
 * devices, where asking does not tell. The hooks are called, and devices waited for,
 * while this thread is neither poller nor grower. */

/* False: nothing of the goal is left that can be asked about, or asking fails. A wait
 * that nobody interrupts sits in the runtime, without fences: it waits for devices. */
static bool
is_pending(cm_pool *pool, bool can_interrupt, bool may_fence, const uint64_t *goal)
{
    cm_status status = cm_pool_poll(pool, can_interrupt && may_fence);
    if (!cm_is_ok(status)) {
        return false;
    }
    if (!cm_mutex_take(&pool->polling, false)) {
        return true; /* another thread looks, or waits */
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

/* The devices that tell when what is left of the goal has ended: those of fences, and
 * of streams (unless `fences_only`) of which asking did not tell. Only epochs that they
 * are to tell of stay in the goal. By the poller. */
static uint64_t
find_due(cm_pool *pool, bool fences_only, uint64_t *goal)
{
    uint64_t due = 0;
    cm_spin_lock_take(&pool->lock);
    for (uint32_t i = 1; i < CM_EPOCHS_MAX; i++) {
        cm_epochs *slot = &pool->epochs[i];
        /* No device may be waited for while one of its streams captures. */
        bool is_due = is_late_locked(pool, i) && goal[i] > pool->done[i]
                      && !slot->is_capturing && (i >= CM_STREAMS_MAX || !fences_only);
        goal[i] = is_due ? slot->epoch++ : 0;
        due |= is_due ? device_bit(device_of(pool, i)) : 0;
    }
    cm_spin_lock_give(&pool->lock);
    return due;
}

/* Wait for all that each of these devices is doing, and set the bits of those for which
 * that worked. Fails: CM_ECANCELLED at once, by the hooks; else the first failure. */
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
            status = cm_scope_settle(
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

/* Until nothing of the goal can be asked about any more. Fails: CM_ECANCELLED. */
static cm_status
wait_events(cm_pool *pool, const cm_wait_hooks *hooks, const uint64_t *goal)
{
    uint64_t start = cm_now_ns();
    uint64_t asked = start;
    bool may_fence = !cm_others_capture(hooks);
    while (is_pending(pool, hooks->interrupted != NULL, may_fence, goal)) {
        CM_TRY(cm_wait_ask(hooks, &asked));
        cm_nap_after(cm_now_ns() - start);
    }
    return cm_ok();
}

cm_status
cm_pool_wait(cm_pool *pool, const cm_wait_hooks *hooks, bool fences_only)
{
    static const cm_wait_hooks uninterrupted = {.interrupted = NULL};
    hooks = hooks != NULL ? hooks : &uninterrupted;
    uint64_t goal[CM_EPOCHS_MAX]; /* what had been given back by now; 0: nothing */
    cm_spin_lock_take(&pool->lock);
    for (uint32_t i = 0; i < CM_EPOCHS_MAX; i++) {
        goal[i] = pool->epochs[i].awaited_epoch;
    }
    cm_spin_lock_give(&pool->lock);
    if (!fences_only) {
        CM_TRY(wait_events(pool, hooks, goal));
    }
    if (cm_streams_capture(pool->rt) || cm_others_capture(hooks)) {
        return cm_pool_poll(pool, false); /* a wait for a device would end the capture
                                           */
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
