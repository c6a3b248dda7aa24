/* SPDX-License-Identifier: Apache-2.0 */
/* When a freed block is idle: events per stream that worked on it, fences over a device
 * where the workers are unknown, and the looking at both later. */
#include "pool/pool_private.h"
#include "pool/scope.h"

/* A miss looks at no more than this many blocks, so that a long queue costs it little;
 * the unfinished ones go to the back, so that every block has its turn. */
enum { LOOK_MAX = 256 };

static bool
is_legacy(const cm_stream *stream)
{
    return stream->handle == 0 || stream->handle == CM_STREAM_LEGACY;
}

/* The id for comparisons; the legacy stream has two handles. */
static uint64_t
stream_key(const cm_stream *stream)
{
    return is_legacy(stream) ? CM_STREAM_LEGACY : stream->id;
}

static bool
is_same_stream(const cm_stream *a, const cm_stream *b)
{
    return a == b || (a->device == b->device && stream_key(a) == stream_key(b));
}

/* May the handle be used now? One that nobody keeps alive may be dead or recycled, and
 * the per-thread handle means another stream on this thread than on the one that
 * worked. */
static bool
can_record_on(const cm_stream *stream)
{
    if (stream->handle == CM_STREAM_PER_THREAD) {
        return false;
    }
    return is_legacy(stream) || stream->owns_handle || stream->owner != NULL;
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

static void
destroy_event(cm_pool *pool, uint64_t event)
{
    for (int attempt = 0; attempt < 2; attempt++) {
        if (cm_is_ok(cm_scope_settle(cm_rt_event_destroy(pool->rt, event)))) {
            return;
        }
    }
    atomic_fetch_add(&pool->lost_count, 1);
}

/* Drop event `i`; the last one takes its place. */
static void
remove_event(cm_pool *pool, cm_pool_entry *entry, uint32_t i)
{
    destroy_event(pool, entry->events[i].handle);
    entry->events[i] = entry->events[--entry->event_count];
}

/* Make an event on the current device, record it (`stream` NULL: over the whole
 * context) and put it on the entry. False, with nothing changed, when that failed. */
static bool
add_event(cm_pool *pool, cm_pool_entry *entry, const cm_stream *stream, int device)
{
    uint64_t event = 0;
    if (entry->event_count == CM_ENTRY_EVENT_MAX
        || !cm_is_ok(cm_rt_event_create(pool->rt, CM_EVENT_DISABLE_TIMING, &event))) {
        return false;
    }
    cm_status status = stream != NULL
                           ? cm_rt_event_record(pool->rt, event, stream->handle)
                           : cm_rt_context_record_event(pool->rt, event);
    if (!cm_is_ok(status)) {
        destroy_event(pool, event);
        return false;
    }
    entry->events[entry->event_count].handle = event;
    entry->events[entry->event_count].device = device;
    entry->event_count++;
    return true;
}

/* One event on `stream`; whatever is in the way of that makes a fence due instead. */
static void
record_use(cm_pool *pool, cm_pool_entry *entry, const cm_stream *stream)
{
    uint64_t bit = device_bit(pool, stream->device);
    cm_scope scope;
    if (!can_record_on(stream)
        || !cm_is_ok(cm_scope_enter(pool->rt, stream->device, &scope))) {
        entry->fence_devices |= bit;
        return;
    }
    bool capturing = false;
    cm_status status = cm_rt_stream_is_capturing(pool->rt, stream->handle, &capturing);
    if (cm_is_ok(status) && capturing) {
        entry->captured = true;
    }
    else if (!cm_is_ok(status)
             || ((entry->fence_devices & bit) == 0
                 && !add_event(pool, entry, stream, stream->device))) {
        /* A failing question also means: recording could break someone's capture. */
        entry->fence_devices |= bit;
    }
    cm_scope_leave(&scope);
}

void
cm_pool_entry_record(cm_pool *pool, cm_pool_entry *entry, cm_stream *const *uses,
                     uint32_t use_count, unsigned flags)
{
    bool fence = (flags & CM_POOL_FREE_FENCE) != 0;
    entry->event_count = 0;
    entry->fence_devices = fence ? devices_in_use(pool) : 0;
    entry->captured = (flags & CM_POOL_FREE_CAPTURED) != 0;
    entry->ready = false;
    uint32_t distinct_count = 0;
    for (uint32_t i = 0; i < use_count; i++) {
        uint32_t j = 0;
        while (j < i && !is_same_stream(uses[j], uses[i])) {
            j++;
        }
        if (j == i) {
            distinct_count++;
            record_use(pool, entry, uses[i]);
        }
    }
    entry->has_sole_stream = !fence && distinct_count == 1 && !entry->captured
                             && uses[0]->handle != CM_STREAM_PER_THREAD;
    if (entry->has_sole_stream) {
        entry->sole_id = stream_key(uses[0]);
        entry->sole_device = uses[0]->device;
    }
}

bool
cm_pool_entry_is_idle(const cm_pool_entry *entry)
{
    return entry->event_count == 0 && entry->fence_devices == 0 && !entry->captured;
}

void
cm_pool_entry_clear(cm_pool *pool, cm_pool_entry *entry)
{
    while (entry->event_count > 0) {
        remove_event(pool, entry, entry->event_count - 1);
    }
    entry->fence_devices = 0;
    entry->captured = false;
    entry->has_sole_stream = false;
}

bool
cm_pool_entry_is_ordered_on(const cm_pool_entry *entry, const cm_stream *stream)
{
    return entry->has_sole_stream && entry->sole_device == stream->device
           && stream->handle != CM_STREAM_PER_THREAD
           && entry->sole_id == stream_key(stream);
}

/* Turn the fences that are due into events, where the driver can. Not while the legacy
 * stream says that a capture runs: recording over the context would break it. */
static void
take_fences(cm_pool *pool, cm_pool_entry *entry)
{
    for (int d = 0; d < CM_MAX_DEVICES; d++) {
        uint64_t bit = UINT64_C(1) << d;
        cm_scope scope;
        if ((entry->fence_devices & bit) == 0
            || !cm_is_ok(cm_scope_enter(pool->rt, d, &scope))) {
            continue;
        }
        bool capturing = true;
        cm_status status =
            cm_rt_stream_is_capturing(pool->rt, CM_STREAM_LEGACY, &capturing);
        if (cm_is_ok(status) && !capturing && add_event(pool, entry, NULL, d)) {
            entry->fence_devices &= ~bit;
        }
        cm_scope_leave(&scope);
    }
}

/* Drop the events that are done. One that cannot be asked stays for the next time. */
static void
query_events(cm_pool *pool, cm_pool_entry *entry)
{
    for (uint32_t i = entry->event_count; i-- > 0;) {
        bool done = false;
        cm_status status = cm_rt_event_query(pool->rt, entry->events[i].handle, &done);
        if (!cm_is_ok(status)) {
            done = cm_is_ok(cm_scope_settle(status));
        }
        if (done) {
            remove_event(pool, entry, i);
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
        due |= cm_pool_entry_of(n)->fence_devices;
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
        cm_pool_entry_of(n)->fence_devices &= ~due;
    }
    return first;
}

/* Wait for each event; for one that cannot be waited for, for all its device is doing.
 */
static cm_status
wait_events(cm_pool *pool, cm_pool_entry *entry)
{
    cm_status first = cm_ok();
    for (uint32_t i = entry->event_count; i-- > 0;) {
        cm_status status =
            cm_scope_settle(cm_rt_event_synchronize(pool->rt, entry->events[i].handle));
        if (!cm_is_ok(status) && cm_is_ok(wait_device(pool, entry->events[i].device))) {
            status = cm_ok();
        }
        if (cm_is_ok(status)) {
            remove_event(pool, entry, i);
        }
        else {
            first = cm_is_ok(first) ? status : first;
        }
    }
    return first;
}

/* Take what is in flight into `polled`; false when there is nothing to do. */
static bool
begin_poll(cm_pool *pool, cm_poll_mode mode)
{
    cm_mutex_lock(&pool->lock);
    while (pool->polling && mode != CM_POLL_LOOK) {
        cm_cond_wait(&pool->poll_ended, &pool->lock);
    }
    bool begun = !pool->polling && !cm_list_is_empty(&pool->in_flight);
    if (begun) {
        pool->polling = true;
        if (mode == CM_POLL_LOOK) {
            cm_list *node;
            for (int i = 0; i < LOOK_MAX; i++) {
                if ((node = cm_list_pop_front(&pool->in_flight)) == NULL) {
                    break;
                }
                cm_list_push_back(&pool->polled, node);
            }
        }
        else {
            cm_list_splice_back(&pool->polled, &pool->in_flight);
        }
    }
    cm_mutex_unlock(&pool->lock);
    return begun;
}

static void
end_poll(cm_pool *pool)
{
    cm_mutex_lock(&pool->lock);
    cm_list *node;
    while ((node = cm_list_pop_front(&pool->polled)) != NULL) {
        cm_pool_entry *entry = cm_pool_entry_of(node);
        if (!entry->ready) {
            cm_list_push_back(&pool->in_flight, node);
            continue;
        }
        cm_list_push_back(&pool->cached, node);
        pool->counters.in_flight_count--;
        pool->counters.in_flight_nbytes -= entry->block.nbytes;
        pool->counters.cached_count++;
        pool->counters.cached_nbytes += entry->block.nbytes;
    }
    pool->polling = false;
    cm_cond_signal_all(&pool->poll_ended);
    cm_mutex_unlock(&pool->lock);
}

cm_status
cm_pool_poll(cm_pool *pool, cm_poll_mode mode, bool may_fence)
{
    if (!begin_poll(pool, mode)) {
        return cm_ok();
    }
    bool can_fence = may_fence && cm_runtime_has(pool->rt, CM_OP_context_record_event);
    cm_scope scope;
    cm_status first = cm_scope_enter(pool->rt, pool->config.device, &scope);
    if (cm_is_ok(first)) {
        if (mode != CM_POLL_LOOK) {
            first = wait_fences(pool);
        }
        for (cm_list *n = pool->polled.next; n != &pool->polled; n = n->next) {
            cm_pool_entry *entry = cm_pool_entry_of(n);
            if (mode == CM_POLL_WAIT) {
                cm_status status = wait_events(pool, entry);
                first = cm_is_ok(first) ? status : first;
            }
            else {
                if (can_fence && entry->fence_devices != 0) {
                    take_fences(pool, entry);
                }
                query_events(pool, entry);
            }
            entry->ready = cm_pool_entry_is_idle(entry);
        }
        cm_scope_leave(&scope);
    }
    end_poll(pool);
    return mode == CM_POLL_LOOK ? cm_ok() : first;
}
