/* SPDX-License-Identifier: Apache-2.0 */
/* When freed memory is idle. Stream order first, for device memory: a block whose only
 * user was one stream goes back to the heap at once, tagged with that stream. Nothing
 * is recorded then; an event is recorded when another stream wants the memory, one for
 * all blocks of the stream. Then blocks in flight: events per stream that worked on
 * them, fences over a device where the workers are unknown, and the looking at both
 * later. */
#include <stdlib.h>
#include <string.h>

#include "pool/private.h"
#include "pool/scope.h"

/* -- who does what one thread alone may do --------------------------------------------------- */

bool
cm_pool_begin(cm_pool *pool, _Atomic bool *role, bool wait)
{
    cm_mutex_lock(&pool->gate);
    while (*role && wait) {
        cm_cond_wait(&pool->gate_moved, &pool->gate);
    }
    bool begun = !*role;
    *role = true;
    cm_mutex_unlock(&pool->gate);
    return begun;
}

void
cm_pool_end(cm_pool *pool, _Atomic bool *role)
{
    cm_mutex_lock(&pool->gate);
    *role = false;
    cm_cond_signal_all(&pool->gate_moved);
    cm_mutex_unlock(&pool->gate);
}

/* -- events ----------------------------------------------------------------------------- */

/* Of a context that is gone its work is, too. */
static cm_status
query_event(cm_pool *pool, uint64_t event, bool *done)
{
    cm_status status = cm_rt_event_query(pool->rt, event, done);
    if (!cm_is_ok(status)) {
        status = cm_scope_settle(status);
        *done = cm_is_ok(status);
    }
    return status;
}

/* `stream` NULL: over all that the current device is doing. */
static cm_status
record_event(cm_pool *pool, uint64_t event, const cm_stream *stream)
{
    return stream != NULL ? cm_rt_event_record(pool->rt, event, stream->handle)
                          : cm_rt_context_record_event(pool->rt, event);
}

/* One that is refused twice is lost. */
static void
destroy_event(cm_pool *pool, uint64_t event)
{
    if (!CM_TRY_TWICE(cm_scope_settle(cm_rt_event_destroy(pool->rt, event)))) {
        atomic_fetch_add(&pool->lost_count, 1);
    }
}

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
    for (i = 1; i < CM_EPOCHS_MAX && pool->epochs[i].stream != NULL; i++) {
    }
    if (i == CM_EPOCHS_MAX) {
        return 0;
    }
    /* A slot's epochs go on where its last stream's ended, so that no old tag can be
     * taken for a new one. */
    pool->epochs[i] = (cm_stream_epochs){.stream = cm_stream_hold(stream),
                                         .epoch = pool->done[i] + 1};
    pool->slot_count = i >= pool->slot_count ? i + 1 : pool->slot_count;
    return i;
}

/* -- asking ----------------------------------------------------------------------------- */

static bool
is_late_locked(const cm_pool *pool, uint32_t i)
{
    return i < pool->slot_count && pool->epochs[i].stream != NULL
           && pool->epochs[i].given_epoch > pool->done[i];
}

static bool
is_slot_late(cm_pool *pool, uint32_t i)
{
    cm_spin_lock_take(&pool->lock);
    bool late = is_late_locked(pool, i);
    cm_spin_lock_give(&pool->lock);
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
    cm_spin_lock_take(&pool->lock);
    uint64_t epoch = slot->epoch++;
    cm_spin_lock_give(&pool->lock);
    return epoch;
}

static void
end_epoch(cm_pool *pool, uint32_t i, uint64_t epoch)
{
    cm_spin_lock_take(&pool->lock);
    cm_pool_raise(&pool->done[i], epoch);
    cm_spin_lock_give(&pool->lock);
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
    CM_TRY(record_event(pool, slot->event, slot->stream));
    slot->asked_epoch = epoch;
    return cm_ok();
}

/* Has the recorded event passed? */
static cm_status
look(cm_pool *pool, uint32_t i)
{
    cm_stream_epochs *slot = &pool->epochs[i];
    bool done = false;
    CM_TRY(query_event(pool, slot->event, &done));
    if (done) {
        end_epoch(pool, i, slot->asked_epoch);
        slot->asked_epoch = 0;
    }
    return cm_ok();
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

/* Inside a cm_scope of its stream's device. */
static cm_status
poll_slot(cm_pool *pool, uint32_t i)
{
    cm_stream_epochs *slot = &pool->epochs[i];
    if (slot->asked_epoch != 0) {
        CM_TRY(look(pool, i));
    }
    /* The event may stand for less than was given since. Where one of a foreign stream
     * could not be recorded none stands for all. */
    if (slot->asked_epoch != 0 || !is_slot_late(pool, i)
        || cm_stream_is_foreign(slot->stream)) {
        return cm_ok();
    }
    CM_TRY(ask_capturing(pool, slot->stream->handle, &slot->is_capturing));
    if (slot->is_capturing || is_stream_idle(pool, i)) {
        return cm_ok();
    }
    CM_TRY(record(pool, slot));
    return look(pool, i);
}

/* Ask of each stream that spans are tagged with whether that work has ended. By the
 * poller. Fails: the first failure. */
static cm_status
poll_slots(cm_pool *pool)
{
    cm_status first = cm_ok();
    for (uint32_t i = 1; i < CM_EPOCHS_MAX; i++) {
        if (is_slot_late(pool, i)) {
            cm_status status;
            CM_IN_SCOPE(status, pool->rt, pool->epochs[i].stream->device,
                        poll_slot(pool, i));
            first = cm_first_failure(first, status);
        }
    }
    return first;
}

uint64_t
cm_pool_try_record_slot(cm_pool *pool, cm_stream *stream)
{
    cm_spin_lock_take(&pool->lock);
    uint32_t i = cm_pool_slot_locked(pool, stream);
    cm_spin_lock_give(&pool->lock);
    if (i == 0) {
        return 0;
    }
    cm_status status;
    CM_IN_SCOPE(status, pool->rt, stream->device, record(pool, &pool->epochs[i]));
    return cm_is_ok(status) ? pool->epochs[i].asked_epoch : 0;
}

bool
cm_pool_slot_needs_record(cm_pool *pool, cm_stream *stream)
{
    cm_spin_lock_take(&pool->lock);
    uint32_t i = cm_pool_find_slot_locked(pool, stream);
    bool needed = cm_stream_is_foreign(i != 0 ? pool->epochs[i].stream : stream);
    cm_spin_lock_give(&pool->lock);
    return needed;
}

/* An event over all that was given of the slot's stream. Inside a cm_scope. */
static cm_status
cover(cm_pool *pool, cm_stream_epochs *slot)
{
    bool capturing;
    uint64_t handle = slot->stream->handle;
    if (cm_stream_is_foreign(slot->stream)) {
        return slot->asked_epoch != 0 ? cm_ok() : cm_fail(CM_ENOTSUP, handle);
    }
    CM_TRY(ask_capturing(pool, handle, &capturing));
    return capturing ? cm_fail(CM_ECAPTURING, handle) : record(pool, slot);
}

bool
cm_pool_order_after_slots(cm_pool *pool, cm_stream *stream,
                          uint64_t done[CM_EPOCHS_MAX])
{
    bool any = false;
    cm_spin_lock_take(&pool->lock);
    memcpy(done, pool->done, sizeof(pool->done));
    cm_spin_lock_give(&pool->lock);
    for (uint32_t i = 1; i < CM_EPOCHS_MAX; i++) {
        cm_stream_epochs *slot = &pool->epochs[i];
        if (!is_slot_late(pool, i)) {
            continue;
        }
        cm_status status;
        CM_IN_SCOPE(status, pool->rt, slot->stream->device, cover(pool, slot));
        if (cm_is_ok(status) && cm_is_ok(cm_stream_wait_event(stream, slot->event))) {
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

/* True when it is time to forget: the table is full, or the pool alone still keeps a
 * stream whose work has ended. */
static bool
has_orphan_slots(cm_pool *pool)
{
    uint32_t used = 0;
    bool orphan = false;
    cm_spin_lock_take(&pool->lock);
    for (uint32_t i = 1; i < pool->slot_count; i++) {
        const cm_stream_epochs *slot = &pool->epochs[i];
        if (slot->stream != NULL) {
            used++;
            orphan |=
                atomic_load_explicit(&slot->stream->refs, memory_order_relaxed) == 1
                && slot->given_epoch <= pool->done[i];
        }
    }
    cm_spin_lock_give(&pool->lock);
    return orphan || used == CM_EPOCHS_MAX - 1;
}

void
cm_pool_drop_slots(cm_pool *pool, bool all)
{
    bool named[CM_EPOCHS_MAX] = {false};
    cm_stream_epochs dropped[CM_EPOCHS_MAX];
    uint32_t count = 0;
    cm_spin_lock_take(&pool->lock);
    clean_spans_locked(pool, named);
    for (uint32_t i = 1; i < pool->slot_count; i++) {
        cm_stream_epochs *slot = &pool->epochs[i];
        if (slot->stream != NULL && (all || !named[i])) {
            dropped[count++] = *slot;
            cm_pool_raise(&pool->done[i], slot->epoch);
            *slot = (cm_stream_epochs){.epoch = slot->epoch};
        }
    }
    while (pool->slot_count > 1 && pool->epochs[pool->slot_count - 1].stream == NULL) {
        pool->slot_count--;
    }
    cm_spin_lock_give(&pool->lock);
    for (uint32_t i = 0; i < count; i++) {
        cm_stream *stream = dropped[i].stream;
        if (dropped[i].event != 0) {
            cm_scope scope;
            bool entered = cm_is_ok(cm_scope_enter(pool->rt, stream->device, &scope));
            destroy_event(pool, dropped[i].event); /* by any context's thread */
            if (entered) {
                cm_scope_leave(&scope);
            }
        }
        cm_stream_release(stream);
    }
}

/* -- blocks in flight ------------------------------------------------------------------------- */

/* A miss asks about at most ASK_MAX events in vain and looks at at most PASS_MAX blocks
 * that stay, so that a long queue costs it little; those then go to the back, so that
 * every block has its turn. */
enum { ASK_MAX = 256, PASS_MAX = 4096, LATE_MAX = 16 };

/* How many go back to the heap before others may take the lock. */
enum { GIVE_MAX = 256 };

/* Streams found late while polling: what was recorded on them later is not asked. */
typedef struct late_streams {
    struct {
        uint64_t key;
        int device;
    } at[LATE_MAX];
    uint32_t count;
    uint32_t asked_count; /* events that were asked in vain */
} late_streams;

static cm_flight *
flight_of(cm_list *node)
{
    return CM_LIST_ENTRY(node, cm_flight, node);
}

static uint64_t
device_bit(int device)
{
    return UINT64_C(1) << device;
}

/* Drop event `i`; the last one takes its place. */
static void
remove_event(cm_pool *pool, cm_flight *flight, uint32_t i)
{
    destroy_event(pool, flight->events[i].handle);
    flight->events[i] = flight->events[--flight->event_count];
}

/* Make an event on the current device, record it (`stream` NULL: over all that the
 * device is doing) and put it on the flight. Fails: nothing has changed. */
static cm_status
add_event(cm_pool *pool, cm_flight *flight, const cm_stream *stream, int device)
{
    uint64_t event;
    if (flight->event_count == CM_FLIGHT_EVENT_MAX) {
        return cm_fail(CM_ENOMEM, 0);
    }
    CM_TRY(cm_rt_event_create(pool->rt, CM_EVENT_DISABLE_TIMING, &event));
    cm_status status = record_event(pool, event, stream);
    if (!cm_is_ok(status)) {
        destroy_event(pool, event);
        return status;
    }
    flight->events[flight->event_count].handle = event;
    flight->events[flight->event_count].key = stream != NULL ? stream->id : 0;
    flight->events[flight->event_count].device = device;
    flight->event_count++;
    return status;
}

/* Inside a cm_scope of its device. Where even the question fails recording could break
 * someone's capture. */
static cm_status
record_use(cm_pool *pool, cm_flight *flight, const cm_stream *stream)
{
    bool capturing = false;
    CM_TRY(cm_rt_stream_is_capturing(pool->rt, stream->handle, &capturing));
    flight->captured = flight->captured || capturing;
    if (capturing || (flight->fence_devices & device_bit(stream->device)) != 0) {
        return cm_ok();
    }
    return add_event(pool, flight, stream, stream->device);
}

/* One event on `stream`; whatever is in the way of that makes a fence due instead. */
static void
note_use(cm_pool *pool, cm_flight *flight, const cm_stream *stream)
{
    cm_status status = cm_fail(CM_ENOTSUP, stream->handle);
    if (cm_stream_is_kept(stream)) {
        CM_IN_SCOPE(status, pool->rt, stream->device, record_use(pool, flight, stream));
    }
    flight->fence_devices |= cm_is_ok(status) ? 0 : device_bit(stream->device);
}

void
cm_flight_record(cm_pool *pool, cm_flight *flight, cm_stream *const *uses,
                 uint32_t use_count, unsigned flags)
{
    bool fence = (flags & CM_POOL_FREE_FENCE) != 0;
    flight->event_count = 0;
    /* Unknown workers may be on any device that this process uses. */
    flight->fence_devices =
        fence ? cm_pool_devices_in_use(pool) | device_bit(pool->config.device) : 0;
    flight->captured = (flags & CM_POOL_FREE_CAPTURED) != 0;
    for (uint32_t i = 0; i < use_count; i++) {
        uint32_t j = 0;
        while (j < i && !cm_stream_same(uses[j], uses[i])) {
            j++;
        }
        if (j == i) {
            note_use(pool, flight, uses[i]);
        }
    }
}

bool
cm_flight_is_idle(const cm_flight *flight)
{
    return flight->event_count == 0 && flight->fence_devices == 0 && !flight->captured;
}

void
cm_pool_abandon_flights(cm_pool *pool)
{
    cm_list *node;
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    while ((node = cm_list_pop_front(&pool->in_flight)) != NULL) {
        cm_flight *flight = flight_of(node);
        while (flight->event_count > 0) {
            remove_event(pool, flight, flight->event_count - 1);
        }
        (void)cm_heap_give(&pool->heap, flight->span, 0, 0, &view);
        free(flight);
    }
    pool->counters.in_flight_count = 0;
    pool->counters.in_flight_nbytes = 0;
}

/* Not while the legacy stream says that a capture runs: recording over the context
 * would break it. */
static cm_status
take_fence(cm_pool *pool, cm_flight *flight, int device)
{
    bool capturing;
    CM_TRY(ask_capturing(pool, CM_STREAM_LEGACY, &capturing));
    if (!capturing) {
        CM_TRY(add_event(pool, flight, NULL, device));
        flight->fence_devices &= ~device_bit(device);
    }
    return cm_ok();
}

/* Turn the fences that are due into events, as far as can be. */
static void
take_fences(cm_pool *pool, cm_flight *flight)
{
    for (int d = 0; d < CM_MAX_DEVICES; d++) {
        if ((flight->fence_devices & device_bit(d)) != 0) {
            cm_status status;
            CM_IN_SCOPE(status, pool->rt, d, take_fence(pool, flight, d));
            cm_ignore(status); /* it stays due */
        }
    }
}

static bool
is_late(const late_streams *late, uint64_t key, int device)
{
    for (uint32_t i = 0; i < late->count; i++) {
        if (late->at[i].key == key && late->at[i].device == device) {
            return true;
        }
    }
    return false;
}

static void
note_late(late_streams *late, uint64_t key, int device)
{
    late->asked_count++;
    if (key != 0 && late->count < LATE_MAX) {
        late->at[late->count].key = key;
        late->at[late->count].device = device;
        late->count++;
    }
}

/* Drop the events that are done, those of `idle` devices unasked. One that cannot be
 * asked stays for the next time. Fails: the first question that failed. */
static cm_status
query_events(cm_pool *pool, cm_flight *flight, uint64_t idle, late_streams *late)
{
    cm_status first = cm_ok();
    for (uint32_t i = flight->event_count; i-- > 0;) {
        uint64_t key = flight->events[i].key;
        int device = flight->events[i].device;
        bool done = (idle & device_bit(device)) != 0;
        if (!done && is_late(late, key, device)) {
            continue;
        }
        if (!done) {
            cm_status status = query_event(pool, flight->events[i].handle, &done);
            first = cm_first_failure(first, status);
            key = cm_is_ok(status) ? key : 0;
        }
#if defined(CM_DEBUG) && defined(CM_TEST_SKIP_EVENTS)
        done = true; /* a build of the stress that must fail */
#endif
        if (done) {
            remove_event(pool, flight, i);
        }
        else {
            note_late(late, key, device);
        }
    }
    return first;
}

/* -- polling ---------------------------------------------------------------------------- */

/* Blocks in flight that one thread looks at. Their order is kept, so that the first
 * late event of a stream tells of all later ones. */
typedef struct flights {
    cm_list left; /* to be looked at, also by the next look */
    cm_list late; /* were looked at, and are not idle */
    cm_list idle;
} flights;

static void
give_flights(cm_pool *pool, flights *f)
{
    uint32_t count = 0;
    cm_spin_lock_take(&pool->lock);
    for (cm_list *n = f->idle.next; n != &f->idle; n = n->next) {
        cm_heap_view view = cm_pool_view_locked(pool, 0);
        cm_heap_span *span = flight_of(n)->span;
        pool->counters.in_flight_count--;
        pool->counters.in_flight_nbytes -= span->block.nbytes;
        /* The tag is of what ran before the block was handed out. */
        (void)cm_heap_give(&pool->heap, span, span->tag, span->epoch, &view);
        cm_pool_note_peaks_locked(pool);
        if (++count % GIVE_MAX == 0) { /* let others in between */
            cm_spin_lock_give(&pool->lock);
            cm_spin_lock_take(&pool->lock);
        }
    }
    cm_list_splice_back(&f->left, &f->late);
    cm_list_splice_back(&f->left, &pool->in_flight);
    cm_list_splice_back(&pool->in_flight, &f->left);
    cm_spin_lock_give(&pool->lock);
    cm_list *node;
    while ((node = cm_list_pop_front(&f->idle)) != NULL) {
        free(flight_of(node));
    }
}

/* What had been given back at some time, and devices that have ended since all that
 * they were doing then. */
typedef struct goal {
    uint64_t serial;                /* of the youngest flight */
    uint64_t epochs[CM_EPOCHS_MAX]; /* the youngest of each slot; 0: none */
    uint64_t idle;                  /* devices, as bits */
} goal;

/* Look at blocks in flight: at some, or with an `aim` at all. Inside a cm_scope. */
static cm_status
poll_flights(cm_pool *pool, bool can_fence, const goal *aim, flights *f)
{
    cm_status first = cm_ok();
    late_streams late = {.count = 0};
    uint64_t passed = 0;
    cm_list *node;
    while ((aim != NULL || (late.asked_count < ASK_MAX && passed < PASS_MAX))
           && (node = cm_list_pop_front(&f->left)) != NULL) {
        cm_flight *flight = flight_of(node);
        uint64_t idle = aim != NULL && flight->serial <= aim->serial ? aim->idle : 0;
        flight->fence_devices &= ~idle;
        if (can_fence && flight->fence_devices != 0) {
            take_fences(pool, flight);
        }
        first = cm_first_failure(first, query_events(pool, flight, idle, &late));
        bool is_idle = cm_flight_is_idle(flight);
        passed += !is_idle;
        cm_list_push_back(is_idle ? &f->idle : &f->late, node);
    }
    return first;
}

/* As cm_pool_poll(), with what is known by an `aim` (NULL: nothing), which also waits
 * for its turn. */
static cm_status
poll(cm_pool *pool, bool may_fence, const goal *aim)
{
    if (!cm_pool_begin(pool, &pool->polling, aim != NULL)) {
        return cm_ok();
    }
    flights f;
    cm_list_init(&f.left);
    cm_list_init(&f.late);
    cm_list_init(&f.idle);
    cm_spin_lock_take(&pool->lock);
    cm_list_splice_back(&f.left, &pool->in_flight);
    for (uint32_t i = 1; aim != NULL && i < pool->slot_count; i++) {
        const cm_stream *stream = pool->epochs[i].stream;
        if (stream != NULL && (aim->idle & device_bit(stream->device)) != 0) {
            cm_pool_raise(&pool->done[i], aim->epochs[i]);
        }
    }
    cm_spin_lock_give(&pool->lock);
    cm_status first = cm_ok();
    if (!cm_list_is_empty(&f.left)) {
        bool can_fence =
            may_fence && cm_runtime_has(pool->rt, CM_OP_context_record_event);
        CM_IN_SCOPE(first, pool->rt, pool->config.device,
                    poll_flights(pool, can_fence, aim, &f));
    }
    first = cm_first_failure(first, poll_slots(pool));
    give_flights(pool, &f);
    if (has_orphan_slots(pool)) {
        cm_pool_drop_slots(pool, false);
    }
    cm_pool_end(pool, &pool->polling);
    return first;
}

cm_status
cm_pool_poll(cm_pool *pool, bool may_fence)
{
    return poll(pool, may_fence, NULL);
}

/* -- waiting ------------------------------------------------------------------------------ */
/* For events, by asking from time to time where the wait can be interrupted; then for
 * devices, where asking does not tell. The hooks are called, and devices waited for,
 * while this thread is neither poller nor grower. */

enum {
    NAP_LEAST_NS = 20 * 1000,
    NAP_MOST_NS = 300 * 1000,
    NAP_SHARE = 128, /* of the time waited so far */
};

static void
set_goal(cm_pool *pool, goal *out)
{
    cm_spin_lock_take(&pool->lock);
    out->serial = pool->counters.free_count;
    out->idle = 0;
    for (uint32_t i = 0; i < CM_EPOCHS_MAX; i++) {
        out->epochs[i] = pool->epochs[i].given_epoch;
    }
    cm_spin_lock_give(&pool->lock);
}

/* An event of it that has not been seen to pass; 0: none. By the poller. */
static uint64_t
find_event(cm_pool *pool, const goal *aim)
{
    uint64_t event = 0;
    cm_spin_lock_take(&pool->lock);
    for (cm_list *n = pool->in_flight.next; n != &pool->in_flight && event == 0;
         n = n->next) {
        const cm_flight *flight = flight_of(n);
        if (flight->serial <= aim->serial && !flight->captured
            && flight->event_count > 0) {
            event = flight->events[0].handle;
        }
    }
    for (uint32_t i = 1; i < pool->slot_count && event == 0; i++) {
        const cm_stream_epochs *slot = &pool->epochs[i];
        if (slot->asked_epoch != 0 && aim->epochs[i] > pool->done[i]) {
            event = slot->event;
        }
    }
    cm_spin_lock_give(&pool->lock);
    return event;
}

/* False: nothing is left that can be asked about, or asking fails. A wait that nobody
 * interrupts sits in the runtime, and takes no fences: it waits for their devices. */
static bool
is_pending(cm_pool *pool, bool can_interrupt, const goal *aim)
{
    cm_status status = cm_pool_poll(pool, can_interrupt);
    if (!cm_is_ok(status)) {
        return false;
    }
    if (!cm_pool_begin(pool, &pool->polling, false)) {
        return true; /* another thread looks, or waits */
    }
    uint64_t event = find_event(pool, aim);
    if (event != 0 && !can_interrupt) {
        CM_IN_SCOPE(status, pool->rt, pool->config.device,
                    cm_rt_event_synchronize(pool->rt, event));
    }
    cm_pool_end(pool, &pool->polling);
    return event != 0 && cm_is_ok(status);
}

/* The devices that tell when what is left of the goal has ended: those of fences, and
 * of events and streams (unless `fences_only`) of which asking did not tell. Only
 * epochs that it is to tell of stay in the goal. By the poller. */
static uint64_t
find_due(cm_pool *pool, bool fences_only, goal *aim)
{
    uint64_t due = 0;
    cm_spin_lock_take(&pool->lock);
    for (cm_list *n = pool->in_flight.next; n != &pool->in_flight; n = n->next) {
        const cm_flight *flight = flight_of(n);
        uint32_t count = fences_only ? 0 : flight->event_count;
        if (flight->serial <= aim->serial) {
            due |= flight->fence_devices;
            for (uint32_t i = 0; i < count; i++) {
                due |= device_bit(flight->events[i].device);
            }
        }
    }
    for (uint32_t i = 1; i < CM_EPOCHS_MAX; i++) {
        cm_stream_epochs *slot = &pool->epochs[i];
        /* No device may be waited for while one of its streams captures. */
        bool is_due = !fences_only && is_late_locked(pool, i) && !slot->is_capturing
                      && aim->epochs[i] > pool->done[i];
        aim->epochs[i] = is_due ? slot->epoch++ : 0;
        due |= is_due ? device_bit(slot->stream->device) : 0;
    }
    cm_spin_lock_give(&pool->lock);
    return due;
}

static cm_status
wait_device(cm_pool *pool, int device)
{
    cm_status status;
    CM_IN_SCOPE(status, pool->rt, device, cm_rt_device_synchronize(pool->rt));
    return cm_scope_settle(status);
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
        if (hooks->wait_device == NULL) {
            status = wait_device(pool, d);
        }
        else if (!hooks->wait_device(hooks->argument, d, &status)) {
            return cm_fail(CM_ECANCELLED, 0);
        }
        *idle |= cm_is_ok(status) ? device_bit(d) : 0;
        first = cm_first_failure(first, status);
    }
    return first;
}

static void
nap_after(uint64_t elapsed_ns)
{
    uint64_t gap = elapsed_ns / NAP_SHARE;
    gap = gap < NAP_LEAST_NS ? NAP_LEAST_NS : gap > NAP_MOST_NS ? NAP_MOST_NS : gap;
    struct timespec span = {.tv_sec = 0, .tv_nsec = (long)gap};
    (void)nanosleep(&span, NULL);
}

/* Until nothing of the goal can be asked about any more. Fails: CM_ECANCELLED. */
static cm_status
wait_events(cm_pool *pool, const cm_wait_hooks *hooks, const goal *aim)
{
    uint64_t start = cm_now_ns();
    uint64_t asked = start;
    while (is_pending(pool, hooks->interrupted != NULL, aim)) {
        CM_TRY(cm_wait_ask(hooks, &asked));
        nap_after(cm_now_ns() - start);
    }
    return cm_ok();
}

cm_status
cm_pool_wait(cm_pool *pool, const cm_wait_hooks *hooks, bool fences_only)
{
    static const cm_wait_hooks uninterrupted = {.interrupted = NULL};
    hooks = hooks != NULL ? hooks : &uninterrupted;
    goal aim;
    set_goal(pool, &aim);
    if (!fences_only) {
        CM_TRY(wait_events(pool, hooks, &aim));
    }
    (void)cm_pool_begin(pool, &pool->polling, true);
    uint64_t due = find_due(pool, fences_only, &aim);
    cm_pool_end(pool, &pool->polling);
    cm_status status = wait_devices(pool, hooks, due, &aim.idle);
    return status.code == CM_ECANCELLED
               ? status
               : cm_first_failure(status, poll(pool, false, &aim));
}

cm_status
cm_pool_await(cm_pool *pool, const cm_wait_hooks *hooks)
{
    if (hooks->interrupted == NULL || cm_runtime_is_forked(pool->rt)) {
        return cm_ok();
    }
    cm_status status = cm_pool_wait(pool, hooks, false);
    /* What else fails will be told by whoever needs the memory. */
    return status.code == CM_ECANCELLED ? status : cm_ok();
}
