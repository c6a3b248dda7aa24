/* SPDX-License-Identifier: Apache-2.0 */
/* When a freed block is idle: events per stream that worked on it, fences over a device
 * where the workers are unknown, and the looking at both later. */
#include <stdlib.h>

#include "pool/private.h"
#include "pool/scope.h"

/* A miss asks the runtime of no more than so many blocks that turn out unfinished, and
 * passes by no more than so many others, so that a long queue costs it little; those
 * then go to the back, so that every block has its turn. */
enum { ASK_MAX = 256, PASS_MAX = 4096, LATE_MAX = 16 };

/* So many go back to the heap in one breath. */
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
device_bit(const cm_pool *pool, int device)
{
    if (device < 0 || device >= CM_MAX_DEVICES) {
        device = pool->config.device;
    }
    return UINT64_C(1) << device;
}

/* Unknown workers may be on any device that this process uses: the pool's own, or any
 * other whose context cumem has entered. */
static uint64_t
devices_in_use(cm_pool *pool)
{
    uint64_t devices = device_bit(pool, pool->config.device);
    for (int d = 0; d < pool->rt->device_count && d < CM_MAX_DEVICES; d++) {
        if (atomic_load(&pool->rt->primary[d]) != 0) {
            devices |= UINT64_C(1) << d;
        }
    }
    return devices;
}

/* Drop event `i`; the last one takes its place. */
static void
remove_event(cm_pool *pool, cm_flight *flight, uint32_t i)
{
    cm_pool_destroy_event(pool, flight->events[i].handle);
    flight->events[i] = flight->events[--flight->event_count];
}

/* Make an event on the current device, record it (`stream` NULL: over the whole
 * context) and put it on the flight. False, with nothing changed, when that failed. */
static bool
add_event(cm_pool *pool, cm_flight *flight, const cm_stream *stream, int device)
{
    uint64_t event = 0;
    if (flight->event_count == CM_FLIGHT_EVENT_MAX
        || !cm_is_ok(cm_rt_event_create(pool->rt, CM_EVENT_DISABLE_TIMING, &event))) {
        return false;
    }
    cm_status status = stream != NULL
                           ? cm_rt_event_record(pool->rt, event, stream->handle)
                           : cm_rt_context_record_event(pool->rt, event);
    if (!cm_is_ok(status)) {
        cm_pool_destroy_event(pool, event);
        return false;
    }
    flight->events[flight->event_count].handle = event;
    flight->events[flight->event_count].key = stream != NULL ? stream->id : 0;
    flight->events[flight->event_count].device = device;
    flight->event_count++;
    return true;
}

/* One event on `stream`; whatever is in the way of that makes a fence due instead. */
static void
record_use(cm_pool *pool, cm_flight *flight, const cm_stream *stream)
{
    uint64_t bit = device_bit(pool, stream->device);
    cm_scope scope;
    if (!cm_stream_is_kept(stream)
        || !cm_is_ok(cm_scope_enter(pool->rt, stream->device, &scope))) {
        flight->fence_devices |= bit;
        return;
    }
    bool capturing = false;
    cm_status status = cm_rt_stream_is_capturing(pool->rt, stream->handle, &capturing);
    if (cm_is_ok(status) && capturing) {
        flight->captured = true;
    }
    else if (!cm_is_ok(status)
             || ((flight->fence_devices & bit) == 0
                 && !add_event(pool, flight, stream, stream->device))) {
        /* A failing question also means: recording could break someone's capture. */
        flight->fence_devices |= bit;
    }
    cm_scope_leave(&scope);
}

void
cm_flight_record(cm_pool *pool, cm_flight *flight, cm_stream *const *uses,
                 uint32_t use_count, unsigned flags)
{
    bool fence = (flags & CM_POOL_FREE_FENCE) != 0;
    flight->event_count = 0;
    flight->fence_devices = fence ? devices_in_use(pool) : 0;
    flight->captured = (flags & CM_POOL_FREE_CAPTURED) != 0;
    flight->ready = false;
    for (uint32_t i = 0; i < use_count; i++) {
        uint32_t j = 0;
        while (j < i && !cm_stream_same(uses[j], uses[i])) {
            j++;
        }
        if (j == i) {
            record_use(pool, flight, uses[i]);
        }
    }
}

bool
cm_flight_is_idle(const cm_flight *flight)
{
    return flight->event_count == 0 && flight->fence_devices == 0 && !flight->captured;
}

void
cm_flight_clear(cm_pool *pool, cm_flight *flight)
{
    while (flight->event_count > 0) {
        remove_event(pool, flight, flight->event_count - 1);
    }
    flight->fence_devices = 0;
    flight->captured = false;
}

/* Turn the fences that are due into events, where the driver can. Not while the legacy
 * stream says that a capture runs: recording over the context would break it. */
static void
take_fences(cm_pool *pool, cm_flight *flight)
{
    for (int d = 0; d < CM_MAX_DEVICES; d++) {
        uint64_t bit = UINT64_C(1) << d;
        cm_scope scope;
        if ((flight->fence_devices & bit) == 0
            || !cm_is_ok(cm_scope_enter(pool->rt, d, &scope))) {
            continue;
        }
        bool capturing = true;
        cm_status status =
            cm_rt_stream_is_capturing(pool->rt, CM_STREAM_LEGACY, &capturing);
        if (cm_is_ok(status) && !capturing && add_event(pool, flight, NULL, d)) {
            flight->fence_devices &= ~bit;
        }
        cm_scope_leave(&scope);
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

/* Drop the events that are done. One that cannot be asked stays for the next time. */
static void
query_events(cm_pool *pool, cm_flight *flight, late_streams *late)
{
    for (uint32_t i = flight->event_count; i-- > 0;) {
        uint64_t key = flight->events[i].key;
        int device = flight->events[i].device;
        bool done = false;
        if (is_late(late, key, device)) {
            continue;
        }
        cm_status status = cm_rt_event_query(pool->rt, flight->events[i].handle, &done);
        if (!cm_is_ok(status)) {
            done = cm_is_ok(cm_scope_settle(status));
            key = 0;
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
}

static cm_status
wait_device(cm_pool *pool, int device)
{
    cm_scope scope;
    CM_TRY(cm_scope_settle(cm_scope_enter(pool->rt, device, &scope)));
    cm_status status = cm_scope_settle(cm_rt_device_synchronize(pool->rt));
    cm_scope_leave(&scope);
    return status;
}

/* One device-wide wait for each device on which any polled block has a fence due. */
static cm_status
wait_fences(cm_pool *pool)
{
    uint64_t due = 0;
    for (cm_list *n = pool->polled.next; n != &pool->polled; n = n->next) {
        due |= flight_of(n)->fence_devices;
    }
    cm_status first = cm_ok();
    for (int d = 0; d < CM_MAX_DEVICES; d++) {
        if ((due & (UINT64_C(1) << d)) == 0) {
            continue;
        }
        cm_status status = wait_device(pool, d);
        if (!cm_is_ok(status)) {
            due &= ~(UINT64_C(1) << d);
            first = cm_is_ok(first) ? status : first;
        }
    }
    for (cm_list *n = pool->polled.next; n != &pool->polled; n = n->next) {
        flight_of(n)->fence_devices &= ~due;
    }
    return first;
}

/* Wait for each event; for one that cannot be waited for, for all its device is doing.
 */
static cm_status
wait_events(cm_pool *pool, cm_flight *flight)
{
    cm_status first = cm_ok();
    for (uint32_t i = flight->event_count; i-- > 0;) {
        cm_status status = cm_scope_settle(
            cm_rt_event_synchronize(pool->rt, flight->events[i].handle));
        if (!cm_is_ok(status)
            && cm_is_ok(wait_device(pool, flight->events[i].device))) {
            status = cm_ok();
        }
        if (cm_is_ok(status)) {
            remove_event(pool, flight, i);
        }
        else {
            first = cm_is_ok(first) ? status : first;
        }
    }
    return first;
}

/* Devices with fences due for what was given back up to `serial`. By the poller. */
static uint64_t
due_fences(cm_pool *pool, uint64_t serial)
{
    uint64_t due = 0;
    cm_fast_lock_take(&pool->lock);
    for (cm_list *n = pool->in_flight.next; n != &pool->in_flight; n = n->next) {
        const cm_flight *flight = flight_of(n);
        due |= flight->serial <= serial ? flight->fence_devices : 0;
    }
    cm_fast_lock_give(&pool->lock);
    return due;
}

/* These fences are no longer due where the bit is set. */
static void
drop_fences(cm_pool *pool, uint64_t serial, uint64_t devices)
{
    cm_fast_lock_take(&pool->lock);
    for (cm_list *n = pool->in_flight.next; n != &pool->in_flight; n = n->next) {
        cm_flight *flight = flight_of(n);
        flight->fence_devices &= flight->serial <= serial ? ~devices : UINT64_MAX;
    }
    cm_fast_lock_give(&pool->lock);
}

/* -- polling ---------------------------------------------------------------------------- */

bool
cm_pool_begin_poll(cm_pool *pool, bool wait)
{
    cm_mutex_lock(&pool->gate);
    while (pool->polling && wait) {
        cm_cond_wait(&pool->gate_moved, &pool->gate);
    }
    bool begun = !pool->polling;
    pool->polling = true;
    cm_mutex_unlock(&pool->gate);
    return begun;
}

void
cm_pool_end_poll(cm_pool *pool)
{
    cm_mutex_lock(&pool->gate);
    pool->polling = false;
    cm_cond_signal_all(&pool->gate_moved);
    cm_mutex_unlock(&pool->gate);
}

static void
take_polled(cm_pool *pool)
{
    cm_fast_lock_take(&pool->lock);
    cm_list_splice_back(&pool->polled, &pool->in_flight);
    cm_fast_lock_give(&pool->lock);
}

static void
give_flight_locked(cm_pool *pool, cm_flight *flight)
{
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    pool->counters.in_flight_count--;
    pool->counters.in_flight_nbytes -= flight->span->block.nbytes;
    /* The tag is of what ran before the block was handed out. */
    (void)cm_heap_give(&pool->heap, flight->span, flight->span->tag,
                       flight->span->epoch, &view);
    cm_pool_note_cached_locked(pool);
    cm_list_remove(&flight->node);
}

/* The first `count` were looked at. Order is kept, so that the first late event of a
 * stream tells of all later ones; where there were more, those begin the next look. */
static void
give_polled(cm_pool *pool, uint64_t count)
{
    cm_list *idle = NULL; /* linked by `next` alone */
    cm_fast_lock_take(&pool->lock);
    cm_list *node = pool->polled.next;
    for (; count > 0; count--) {
        cm_flight *flight = flight_of(node);
        node = node->next;
        if (flight->ready) {
            give_flight_locked(pool, flight);
            flight->node.next = idle;
            idle = &flight->node;
        }
        if (count % GIVE_MAX == 0) { /* let others in between */
            cm_fast_lock_give(&pool->lock);
            cm_fast_lock_take(&pool->lock);
        }
    }
    if (node != &pool->polled) {
        cm_list_remove(&pool->polled);
        cm_list_push_back(node, &pool->polled);
    }
    cm_list_splice_back(&pool->polled, &pool->in_flight);
    cm_list_splice_back(&pool->in_flight, &pool->polled);
    cm_fast_lock_give(&pool->lock);
    while (idle != NULL) {
        cm_flight *flight = flight_of(idle);
        idle = idle->next;
        free(flight);
    }
}

/* Looks at so many from the first on. */
static cm_status
poll_flights(cm_pool *pool, cm_poll_mode mode, bool can_fence, uint64_t *count)
{
    cm_scope scope;
    CM_TRY(cm_scope_enter(pool->rt, pool->config.device, &scope));
    cm_status first = mode != CM_POLL_LOOK ? wait_fences(pool) : cm_ok();
    late_streams late = {.count = 0};
    uint64_t passed = 0;
    for (cm_list *n = pool->polled.next; n != &pool->polled; n = n->next) {
        cm_flight *flight = flight_of(n);
        if (mode == CM_POLL_WAIT) {
            cm_status status = wait_events(pool, flight);
            first = cm_is_ok(first) ? status : first;
        }
        else {
            if (can_fence && flight->fence_devices != 0) {
                take_fences(pool, flight);
            }
            query_events(pool, flight, &late);
        }
        flight->ready = cm_flight_is_idle(flight);
        *count += 1;
        passed += !flight->ready;
        if (mode == CM_POLL_LOOK
            && (late.asked_count >= ASK_MAX || passed >= PASS_MAX)) {
            break;
        }
    }
    cm_scope_leave(&scope);
    return first;
}

cm_status
cm_pool_poll(cm_pool *pool, cm_poll_mode mode, bool may_fence)
{
    if (!cm_pool_begin_poll(pool, mode != CM_POLL_LOOK)) {
        return cm_ok();
    }
    bool can_fence = may_fence && cm_runtime_has(pool->rt, CM_OP_context_record_event);
    take_polled(pool);
    cm_status first = cm_ok();
    uint64_t looked_at = 0;
    if (!cm_list_is_empty(&pool->polled)) {
        first = poll_flights(pool, mode, can_fence, &looked_at);
    }
    cm_status slots = cm_pool_poll_slots(pool, mode == CM_POLL_WAIT);
    give_polled(pool, looked_at);
    if (cm_pool_has_orphan_slots(pool)) {
        cm_pool_drop_slots(pool, false);
    }
    cm_pool_end_poll(pool);
    if (mode == CM_POLL_LOOK) {
        return cm_ok();
    }
    return cm_is_ok(first) ? slots : first;
}

/* -- waiting that can be interrupted ------------------------------------------------------- */
/* By asking, so that whoever waits can be told to stop. The question is put while this
 * thread is neither poller nor grower: what answers it may use the pool. */

enum {
    ASK_NS = 50 * 1000 * 1000, /* between two questions whether to go on */
    NAP_LEAST_NS = 20 * 1000,
    NAP_MOST_NS = 300 * 1000,
    NAP_SHARE = 128,   /* of the time waited so far */
    PASSED_MAX = 1000, /* looks that fail to drop what has passed */
};

/* What had been given back when the wait began: what comes later is not waited for. */
typedef struct goal {
    uint64_t serial; /* the youngest flight */
    uint64_t epochs[CM_EPOCHS_MAX];
} goal;

static void
set_goal(cm_pool *pool, goal *out)
{
    cm_fast_lock_take(&pool->lock);
    out->serial = pool->counters.free_count;
    for (uint32_t i = 0; i < CM_EPOCHS_MAX; i++) {
        out->epochs[i] = pool->epochs[i].given_epoch;
    }
    cm_fast_lock_give(&pool->lock);
}

/* An event that must pass first; 0: none is known. By the poller. */
static uint64_t
find_event(cm_pool *pool, const goal *aim)
{
    uint64_t event = 0;
    cm_fast_lock_take(&pool->lock);
    for (cm_list *n = pool->in_flight.next; n != &pool->in_flight && event == 0;
         n = n->next) {
        const cm_flight *flight = CM_LIST_ENTRY(n, cm_flight, node);
        if (flight->serial <= aim->serial && !flight->captured
            && flight->event_count > 0) {
            event = flight->events[0].handle;
        }
    }
    for (uint32_t i = 1; i < pool->slot_count && event == 0; i++) {
        const cm_stream_epochs *slot = &pool->epochs[i];
        if (slot->stream != NULL && aim->epochs[i] > pool->done[i]
            && slot->asked_epoch != 0) {
            event = slot->event;
        }
    }
    cm_fast_lock_give(&pool->lock);
    return event;
}

/* False: nothing is left that can be asked about. What has passed is dropped by the
 * next look; where even that is refused the caller's own wait will tell. */
static bool
is_pending(cm_pool *pool, const goal *aim, uint32_t *passed)
{
    cm_status looked = cm_pool_poll(pool, CM_POLL_LOOK, true);
    (void)looked; /* never fails */
    if (!cm_pool_begin_poll(pool, false)) {
        return true; /* another thread looks, or waits */
    }
    bool pending = false;
    uint64_t event = find_event(pool, aim);
    cm_scope scope;
    if (event != 0 && cm_is_ok(cm_scope_enter(pool->rt, pool->config.device, &scope))) {
        bool done = false;
        pending = cm_is_ok(cm_rt_event_query(pool->rt, event, &done));
        *passed = done ? *passed + 1 : 0;
        cm_scope_leave(&scope);
    }
    cm_pool_end_poll(pool);
    return pending && *passed < PASSED_MAX;
}

/* Fences are not asked about: whoever waits for the devices can be interrupted, if the
 * wait is left to him. */
static cm_status
await_fences(cm_pool *pool, const cm_wait_hooks *hooks, const goal *aim)
{
    if (hooks->wait_device == NULL || !cm_pool_begin_poll(pool, false)) {
        return cm_ok(); /* or another thread waits for them now */
    }
    uint64_t due = due_fences(pool, aim->serial);
    cm_pool_end_poll(pool);
    uint64_t idle = 0;
    for (int d = 0; d < CM_MAX_DEVICES; d++) {
        cm_status status = cm_ok();
        if ((due >> d & 1) == 0) {
            continue;
        }
        if (!hooks->wait_device(hooks->argument, d, &status)) {
            return cm_fail(CM_ECANCELLED, 0);
        }
        idle |= cm_is_ok(status) ? UINT64_C(1) << d : 0;
    }
    if (idle != 0 && cm_pool_begin_poll(pool, false)) {
        drop_fences(pool, aim->serial, idle);
        cm_pool_end_poll(pool);
    }
    return cm_ok();
}

static void
nap_after(uint64_t elapsed_ns)
{
    uint64_t gap = elapsed_ns / NAP_SHARE;
    gap = gap < NAP_LEAST_NS ? NAP_LEAST_NS : gap > NAP_MOST_NS ? NAP_MOST_NS : gap;
    struct timespec span = {.tv_sec = 0, .tv_nsec = (long)gap};
    (void)nanosleep(&span, NULL);
}

cm_status
cm_pool_await(cm_pool *pool, const cm_wait_hooks *hooks)
{
    if (hooks->interrupted == NULL || cm_runtime_is_forked(pool->rt)) {
        return cm_ok();
    }
    goal aim;
    set_goal(pool, &aim);
    uint64_t start = cm_now_ns();
    uint64_t asked = start;
    uint32_t passed = 0;
    while (is_pending(pool, &aim, &passed)) {
        uint64_t now = cm_now_ns();
        if (now - asked >= ASK_NS) {
            if (hooks->interrupted(hooks->argument)) {
                return cm_fail(CM_ECANCELLED, 0);
            }
            asked = cm_now_ns();
        }
        nap_after(now - start);
    }
    return await_fences(pool, hooks, &aim);
}
