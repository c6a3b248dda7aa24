/* SPDX-License-Identifier: Apache-2.0 */
/* Stream order for device memory: a freed block whose only user was one stream goes
 * back to the heap at once, tagged with that stream. Nothing is recorded then; an event
 * is recorded when another stream wants the memory, one for all blocks of the stream.
 */
#include "pool/private.h"
#include "pool/scope.h"

void
cm_pool_destroy_event(cm_pool *pool, uint64_t event)
{
    for (int attempt = 0; attempt < 2; attempt++) {
        if (cm_is_ok(cm_scope_settle(cm_rt_event_destroy(pool->rt, event)))) {
            return;
        }
    }
    atomic_fetch_add(&pool->lost_count, 1);
}

bool
cm_stream_is_kept(const cm_stream *stream)
{
    if (stream->handle == CM_STREAM_PER_THREAD) {
        return false;
    }
    return cm_stream_is_legacy(stream) || stream->owns_handle || stream->owner != NULL;
}

uint32_t
cm_pool_search_slot_locked(const cm_pool *pool, const cm_stream *stream)
{
    if (stream->handle == CM_STREAM_PER_THREAD) {
        return 0;
    }
    for (uint32_t i = 1; i < pool->slot_count; i++) {
        const cm_stream_epochs *slot = &pool->epochs[i];
        if (slot->key == stream->id && slot->device == stream->device
            && slot->stream != NULL) {
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
    for (i = 1; i < CM_EPOCHS_MAX && pool->epochs[i].stream != NULL; i++) {
    }
    if (i == CM_EPOCHS_MAX) {
        return 0;
    }
    /* A slot's epochs go on where its last stream's ended, so that no old tag can be
     * taken for a new one. */
    cm_stream_epochs *slot = &pool->epochs[i];
    uint64_t epoch = pool->done[i] + 1;
    *slot = (cm_stream_epochs){.stream = cm_stream_hold(stream),
                               .key = stream->id,
                               .device = stream->device,
                               .epoch = epoch};
    pool->slot_count = i >= pool->slot_count ? i + 1 : pool->slot_count;
    return i;
}

cm_heap_view
cm_pool_view_locked(const cm_pool *pool, uint32_t slot)
{
    return (cm_heap_view){
        .tag = slot, .done = pool->done, .alone = pool->slot_count <= 2};
}

/* -- asking ----------------------------------------------------------------------------- */

static bool
is_late_locked(const cm_pool *pool, uint32_t i)
{
    return i < pool->slot_count && pool->epochs[i].stream != NULL
           && pool->epochs[i].given_epoch > pool->done[i];
}

static bool
is_late(cm_pool *pool, uint32_t i)
{
    cm_fast_lock_take(&pool->lock);
    bool late = is_late_locked(pool, i);
    cm_fast_lock_give(&pool->lock);
    return late;
}

bool
cm_pool_is_other_late_locked(const cm_pool *pool, uint32_t own)
{
    for (uint32_t i = 1; i < pool->slot_count; i++) {
        if (i != own && is_late_locked(pool, i)) {
            return true;
        }
    }
    return false;
}

/* End the slot's epoch: what is given from now on is not covered. */
static uint64_t
next_epoch(cm_pool *pool, cm_stream_epochs *slot)
{
    cm_fast_lock_take(&pool->lock);
    uint64_t epoch = slot->epoch++;
    cm_fast_lock_give(&pool->lock);
    return epoch;
}

static void
end_epoch(cm_pool *pool, uint32_t i, uint64_t epoch)
{
    cm_fast_lock_take(&pool->lock);
    pool->done[i] = epoch;
    cm_fast_lock_give(&pool->lock);
}

/* Nothing may be recorded on a stream that captures, or that cannot be asked. */
static cm_status
ask_capturing(cm_pool *pool, const cm_stream *stream, bool *out)
{
    cm_status status = cm_rt_stream_is_capturing(pool->rt, stream->handle, out);
    if (status.code == CM_CUDA_CAPTURE_IMPLICIT) {
        *out = true; /* the legacy stream, where another that it waits for captures */
        return cm_ok();
    }
    return status;
}

/* A handle that is not ours may be gone by the time its event is wanted, whatever keeps
 * the object it came in: its work is recorded when a block is given, never later. */
static bool
is_foreign(const cm_stream *stream)
{
    return !stream->owns_handle && !cm_stream_is_legacy(stream);
}

/* Record the slot's event over its stream's work so far. Inside a cm_scope of its
 * device, and not while it captures. */
static cm_status
record(cm_pool *pool, cm_stream_epochs *slot)
{
    if (slot->event == 0) {
        CM_TRY(cm_rt_event_create(pool->rt, CM_EVENT_DISABLE_TIMING, &slot->event));
    }
    uint64_t epoch = next_epoch(pool, slot);
    slot->asked_epoch = 0;
    CM_TRY(cm_rt_event_record(pool->rt, slot->event, slot->stream->handle));
    slot->asked_epoch = epoch;
    return cm_ok();
}

/* Has the recorded event passed (`wait`: once it has)? */
static cm_status
look(cm_pool *pool, uint32_t i, bool wait)
{
    cm_stream_epochs *slot = &pool->epochs[i];
    bool done = wait;
    CM_TRY(cm_scope_settle(wait ? cm_rt_event_synchronize(pool->rt, slot->event)
                                : cm_rt_event_query(pool->rt, slot->event, &done)));
    if (done) {
        end_epoch(pool, i, slot->asked_epoch);
        slot->asked_epoch = 0;
    }
    return cm_ok();
}

/* Without an event: for the stream, or where that is refused (its owner may have
 * destroyed it) or may not be tried for all its device is doing. */
static cm_status
wait_stream(cm_pool *pool, uint32_t i)
{
    const cm_stream *stream = pool->epochs[i].stream;
    uint64_t epoch = next_epoch(pool, &pool->epochs[i]);
    cm_status status = cm_fail(CM_CUDA_INVALID_HANDLE, stream->handle);
    if (!is_foreign(stream)) {
        status = cm_scope_settle(cm_rt_stream_synchronize(pool->rt, stream->handle));
    }
    if (!cm_is_ok(status)) {
        cm_status all = cm_scope_settle(cm_rt_device_synchronize(pool->rt));
        status = cm_is_ok(all) || is_foreign(stream) ? all : status;
    }
    if (cm_is_ok(status)) {
        end_epoch(pool, i, epoch);
    }
    return status;
}

/* An idle stream needs no event, which would be done only a little later. */
static bool
is_stream_idle(cm_pool *pool, uint32_t i)
{
    bool done = false;
    uint64_t epoch = next_epoch(pool, &pool->epochs[i]);
    cm_status status =
        cm_rt_stream_query(pool->rt, pool->epochs[i].stream->handle, &done);
    if (!cm_is_ok(status) || !done) {
        return false;
    }
    end_epoch(pool, i, epoch);
    return true;
}

static cm_status
poll_slot(cm_pool *pool, uint32_t i, bool wait)
{
    cm_stream_epochs *slot = &pool->epochs[i];
    if (slot->asked_epoch != 0) {
        cm_status looked = look(pool, i, false);
        (void)looked; /* asked again below, or the next time */
    }
    if (is_foreign(slot->stream)) {
        cm_status status =
            wait && slot->asked_epoch != 0 ? look(pool, i, true) : cm_ok();
        /* Where an event could not be recorded none stands for all that was given. */
        return wait && is_late(pool, i) ? wait_stream(pool, i) : status;
    }
    /* The event may stand for less than was given since. */
    if (!is_late(pool, i) || (slot->asked_epoch != 0 && !wait)) {
        return cm_ok();
    }
    bool capturing = false;
    cm_status asked = ask_capturing(pool, slot->stream, &capturing);
    if (!cm_is_ok(asked)) {
        return wait ? wait_stream(pool, i) : asked;
    }
    if (capturing || (!wait && is_stream_idle(pool, i))) {
        return cm_ok();
    }
    cm_status status = record(pool, slot);
    if (cm_is_ok(status)) {
        status = look(pool, i, wait);
    }
    return cm_is_ok(status) || !wait ? status : wait_stream(pool, i);
}

cm_status
cm_pool_poll_slots(cm_pool *pool, bool wait)
{
    cm_status first = cm_ok();
    for (uint32_t i = 1; i < CM_EPOCHS_MAX; i++) {
        cm_scope scope;
        if (!is_late(pool, i)) {
            continue;
        }
        cm_status status = cm_scope_enter(pool->rt, pool->epochs[i].device, &scope);
        if (cm_is_ok(status)) {
            status = poll_slot(pool, i, wait);
            cm_scope_leave(&scope);
        }
        first = cm_is_ok(first) ? status : first;
    }
    return wait ? first : cm_ok();
}

uint64_t
cm_pool_try_record_slot(cm_pool *pool, cm_stream *stream)
{
    cm_fast_lock_take(&pool->lock);
    uint32_t i = cm_pool_slot_locked(pool, stream);
    cm_fast_lock_give(&pool->lock);
    cm_scope scope;
    if (i == 0 || !cm_is_ok(cm_scope_enter(pool->rt, stream->device, &scope))) {
        return 0;
    }
    cm_status status = record(pool, &pool->epochs[i]);
    cm_scope_leave(&scope);
    return cm_is_ok(status) ? pool->epochs[i].asked_epoch : 0;
}

bool
cm_pool_slot_needs_record(cm_pool *pool, cm_stream *stream)
{
    cm_fast_lock_take(&pool->lock);
    uint32_t i = cm_pool_find_slot_locked(pool, stream);
    bool needed = is_foreign(i != 0 ? pool->epochs[i].stream : stream);
    cm_fast_lock_give(&pool->lock);
    return needed;
}

/* An event over all that was given of the slot's stream. Inside a cm_scope. */
static bool
try_cover(cm_pool *pool, cm_stream_epochs *slot)
{
    bool capturing = true;
    if (is_foreign(slot->stream)) {
        return slot->asked_epoch != 0;
    }
    return cm_is_ok(ask_capturing(pool, slot->stream, &capturing)) && !capturing
           && cm_is_ok(record(pool, slot));
}

bool
cm_pool_order_after_slots(cm_pool *pool, cm_stream *stream,
                          uint64_t done[CM_EPOCHS_MAX])
{
    bool any = false;
    for (uint32_t i = 0; i < CM_EPOCHS_MAX; i++) {
        cm_fast_lock_take(&pool->lock);
        done[i] = pool->done[i];
        cm_fast_lock_give(&pool->lock);
        cm_stream_epochs *slot = &pool->epochs[i];
        cm_scope scope;
        if (i == 0 || !is_late(pool, i)
            || !cm_is_ok(cm_scope_enter(pool->rt, slot->device, &scope))) {
            continue;
        }
        bool recorded = try_cover(pool, slot);
        cm_scope_leave(&scope);
        if (recorded && cm_is_ok(cm_stream_wait_event(stream, slot->event))) {
            done[i] = slot->asked_epoch;
            any = true;
        }
    }
    return any;
}

/* -- forgetting ------------------------------------------------------------------------- */

/* Untag what has ended and note which slots are still named: also by spans that a
 * growth holds and by blocks that were handed out in stream order. */
static void
clean_spans_locked(cm_pool *pool, bool named[CM_EPOCHS_MAX])
{
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    for (cm_list *n = pool->heap.arenas.next; n != &pool->heap.arenas; n = n->next) {
        for (cm_heap_span *s = CM_LIST_ENTRY(n, cm_arena, node)->first; s;
             s = s->next) {
            if (cm_span_is_clean(s, &view)) {
                s->tag = 0;
                s->epoch = 0;
            }
            named[s->tag] = true;
        }
    }
}

bool
cm_pool_has_orphan_slots(cm_pool *pool)
{
    uint32_t used = 0;
    bool orphan = false;
    cm_fast_lock_take(&pool->lock);
    for (uint32_t i = 1; i < pool->slot_count; i++) {
        const cm_stream_epochs *slot = &pool->epochs[i];
        if (slot->stream != NULL) {
            used++;
            orphan |=
                atomic_load_explicit(&slot->stream->refs, memory_order_relaxed) == 1
                && slot->given_epoch <= pool->done[i];
        }
    }
    cm_fast_lock_give(&pool->lock);
    return orphan || used == CM_EPOCHS_MAX - 1;
}

void
cm_pool_drop_slots(cm_pool *pool, bool all)
{
    bool named[CM_EPOCHS_MAX] = {false};
    cm_stream *streams[CM_EPOCHS_MAX];
    uint64_t events[CM_EPOCHS_MAX];
    uint32_t count = 0;
    cm_fast_lock_take(&pool->lock);
    clean_spans_locked(pool, named);
    for (uint32_t i = 1; i < pool->slot_count; i++) {
        cm_stream_epochs *slot = &pool->epochs[i];
        if (slot->stream != NULL && (all || !named[i])) {
            streams[count] = slot->stream;
            events[count++] = slot->event;
            if (pool->done[i] < slot->epoch) {
                pool->done[i] = slot->epoch;
            }
            *slot = (cm_stream_epochs){.epoch = slot->epoch};
        }
    }
    while (pool->slot_count > 1 && pool->epochs[pool->slot_count - 1].stream == NULL) {
        pool->slot_count--;
    }
    cm_fast_lock_give(&pool->lock);
    for (uint32_t i = 0; i < count; i++) {
        if (events[i] != 0) {
            cm_scope scope;
            bool entered =
                cm_is_ok(cm_scope_enter(pool->rt, streams[i]->device, &scope));
            cm_pool_destroy_event(pool, events[i]); /* by any context's thread */
            if (entered) {
                cm_scope_leave(&scope);
            }
        }
        cm_stream_release(streams[i]);
    }
}
