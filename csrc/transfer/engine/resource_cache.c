/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/engine/private.h"

static cm_status
take_event(cm_engine *engine, int device, cm_event_stack *stack, unsigned flags,
           uint64_t *out)
{
    cm_mutex_lock(&engine->lock);
    bool found = stack->count > 0;
    if (found) {
        *out = stack->events[--stack->count];
    }
    cm_mutex_unlock(&engine->lock);
    if (found) {
        return cm_ok();
    }
    cm_device_guard guard;
    CM_TRY(cm_device_enter(engine->rt, device, &guard));
    cm_status status = cm_rt_event_create(engine->rt, flags, out);
    cm_device_leave(engine->rt, &guard);
    return status;
}

/* A thread without a context would make one on device 0. */
static cm_status
destroy_event(cm_runtime *rt, int device, uint64_t event)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, device, &guard));
    cm_status status = cm_rt_event_destroy(rt, event);
    cm_device_leave(rt, &guard);
    return status;
}

static void
give_event(cm_engine *engine, int device, cm_event_stack *stack, uint64_t event)
{
    if (event == 0) {
        return;
    }
    cm_mutex_lock(&engine->lock);
    bool kept = stack->count < CM_CACHE_SLOTS;
    if (kept) {
        stack->events[stack->count++] = event;
    }
    cm_mutex_unlock(&engine->lock);
    if (!kept) {
        (void)!cm_is_ok(destroy_event(engine->rt, device, event));
    }
}

cm_status
cm_cache_take_event(cm_engine *engine, int device, uint64_t *out)
{
    return take_event(engine, device, &engine->cache[device].events,
                      CM_EVENT_BLOCKING_SYNC, out);
}

void
cm_cache_give_event(cm_engine *engine, int device, uint64_t event)
{
    give_event(engine, device, &engine->cache[device].events, event);
}

cm_status
cm_cache_take_untimed_event(cm_engine *engine, int device, uint64_t *out)
{
    return take_event(engine, device, &engine->cache[device].untimed_events,
                      CM_EVENT_DISABLE_TIMING, out);
}

void
cm_cache_give_untimed_event(cm_engine *engine, int device, uint64_t event)
{
    give_event(engine, device, &engine->cache[device].untimed_events, event);
}

cm_status
cm_cache_take_stream(cm_engine *engine, int device, cm_stream **out)
{
    cm_cache_stack *stack = &engine->cache[device];
    cm_mutex_lock(&engine->lock);
    bool found = stack->stream_count > 0;
    if (found) {
        *out = stack->streams[--stack->stream_count];
    }
    cm_mutex_unlock(&engine->lock);
    if (found) {
        return cm_ok();
    }
    return cm_stream_create(engine->rt, device, CM_STREAM_NON_BLOCKING, 0, out);
}

void
cm_cache_give_stream(cm_engine *engine, cm_stream *stream)
{
    if (stream == NULL) {
        return;
    }
    cm_cache_stack *stack = &engine->cache[stream->device];
    cm_mutex_lock(&engine->lock);
    bool kept = stack->stream_count < CM_CACHE_SLOTS;
    if (kept) {
        stack->streams[stack->stream_count++] = stream;
    }
    cm_mutex_unlock(&engine->lock);
    if (!kept) {
        cm_stream_release(stream);
    }
}

/* NULL: a free one. Under the lock, as is the next. */
static cm_side_stream *
find_side(cm_cache_stack *stack, const cm_stream *stream)
{
    for (int i = 0; i < CM_CACHE_SLOTS; i++) {
        if (stack->sides[i].stream == stream) {
            return &stack->sides[i];
        }
    }
    return NULL;
}

static cm_side_stream *
find_beside(cm_cache_stack *stack, const cm_stream *beside)
{
    for (int i = 0; i < CM_CACHE_SLOTS; i++) {
        if (stack->sides[i].stream != NULL && stack->sides[i].beside == beside->id) {
            return &stack->sides[i];
        }
    }
    return NULL;
}

cm_status
cm_cache_take_side(cm_engine *engine, int device, const cm_stream *beside,
                   cm_stream **out)
{
    cm_cache_stack *stack = &engine->cache[device];
    cm_mutex_lock(&engine->lock);
    cm_side_stream *side = find_beside(stack, beside);
    if (side != NULL) {
        side->refs++;
        *out = side->stream;
    }
    cm_mutex_unlock(&engine->lock);
    if (side != NULL) {
        return cm_ok();
    }
    CM_TRY(cm_cache_take_stream(engine, device, out));
    cm_mutex_lock(&engine->lock);
    /* Two threads may both add one; where all are taken it is this user's alone. */
    side = find_side(stack, NULL);
    if (side != NULL) {
        *side = (cm_side_stream){.beside = beside->id, .refs = 1, .stream = *out};
    }
    cm_mutex_unlock(&engine->lock);
    return cm_ok();
}

void
cm_cache_give_side(cm_engine *engine, cm_stream *stream, bool is_idle)
{
    if (stream == NULL) {
        return;
    }
    cm_mutex_lock(&engine->lock);
    cm_side_stream *side = find_side(&engine->cache[stream->device], stream);
    bool is_last = true;
    if (side != NULL) {
        side->is_busy = side->is_busy || !is_idle;
        is_idle = !side->is_busy;
        is_last = --side->refs == 0;
        side->stream = is_last ? NULL : stream;
    }
    cm_mutex_unlock(&engine->lock);
    if (is_last && is_idle) {
        cm_cache_give_stream(engine, stream);
    }
    else if (is_last) { /* its next user would wait for what this one waits for */
        cm_stream_release(stream);
    }
}

cm_pool *
cm_cache_enter_ring(cm_engine *engine, uint64_t nbytes, uint64_t most)
{
    cm_mutex_lock(&engine->lock);
    bool fits = nbytes <= most && engine->ring_nbytes <= most - nbytes;
    cm_pool *pool = fits ? engine->pinned_pool : NULL;
    engine->ring_nbytes += pool != NULL ? nbytes : 0;
    cm_mutex_unlock(&engine->lock);
    return pool;
}

void
cm_cache_leave_ring(cm_engine *engine, uint64_t nbytes)
{
    cm_mutex_lock(&engine->lock);
    engine->ring_nbytes -= nbytes;
    cm_mutex_unlock(&engine->lock);
}

cm_status
cm_cache_take_pinned(cm_engine *engine, uint64_t nbytes, uint64_t most,
                     const cm_wait_hooks *hooks, cm_block **out)
{
    cm_pool *pool = cm_cache_enter_ring(engine, nbytes, most);
    cm_status status = pool == NULL
                           ? cm_fail(CM_EINVALID, 0)
                           : cm_pool_alloc_asking(pool, nbytes, NULL, hooks, out);
    if (!cm_is_ok(status)) {
        *out = NULL;
        if (pool != NULL) {
            cm_cache_leave_ring(engine, nbytes);
        }
    }
    return status;
}

static void
destroy_events(cm_runtime *rt, int device, cm_event_stack *stack, cm_status *first)
{
    while (stack->count > 0) {
        cm_status status = destroy_event(rt, device, stack->events[--stack->count]);
        *first = cm_is_ok(*first) ? status : *first;
    }
}

cm_status
cm_cache_fini(cm_engine *engine)
{
    cm_status first = cm_ok();
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        cm_cache_stack *stack = &engine->cache[device];
        destroy_events(engine->rt, device, &stack->events, &first);
        destroy_events(engine->rt, device, &stack->untimed_events, &first);
        while (stack->stream_count > 0) {
            cm_stream_release(stack->streams[--stack->stream_count]);
        }
    }
    return first;
}
