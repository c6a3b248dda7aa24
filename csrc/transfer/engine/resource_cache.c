/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps spare events and streams of each device and lends them to jobs, so that a copy
 * need not make new ones and destroy them. This file also counts the page-locked memory
 * that is in use by rings (routes/ring.h), so that all rings together keep to a limit.
 */
#include "transfer/engine/private.h"

/* Take a spare. Returns false if there is none. */
static bool
take(cm_engine *engine, cm_spares *spares, uint64_t *out)
{
    cm_mutex_lock(&engine->lock);
    bool has = spares->count > 0;
    if (has) {
        *out = spares->items[--spares->count];
    }
    cm_mutex_unlock(&engine->lock);
    return has;
}

/* Add a spare. Returns false if there is no room for it. */
static bool
keep(cm_engine *engine, cm_spares *spares, uint64_t item)
{
    cm_mutex_lock(&engine->lock);
    bool has_room = spares->count < CM_CACHE_SLOTS;
    if (has_room) {
        spares->items[spares->count++] = item;
    }
    cm_mutex_unlock(&engine->lock);
    return has_room;
}

cm_status
cm_cache_take_event(cm_engine *engine, int device, cm_event_sort sort, uint64_t *out)
{
    unsigned flags =
        sort == CM_POLLED ? CM_EVENT_DISABLE_TIMING : CM_EVENT_BLOCKING_SYNC;
    return take(engine, &engine->cache[device].events[sort], out)
               ? cm_ok()
               : CM_ON_DEVICE(engine->rt, device,
                              cm_rt_event_create(engine->rt, flags, out));
}

/* Destroy an event while its device is current. In a thread that has no current
 * context, the runtime would otherwise create a context on device 0. */
static cm_status
destroy_event(cm_runtime *rt, int device, uint64_t event)
{
    return CM_ON_DEVICE(rt, device, cm_rt_event_destroy(rt, event));
}

void
cm_cache_give_event(cm_engine *engine, int device, cm_event_sort sort, uint64_t event)
{
    if (event != 0 && !keep(engine, &engine->cache[device].events[sort], event)) {
        cm_ignore(destroy_event(engine->rt, device, event));
    }
}

cm_status
cm_cache_take_stream(cm_engine *engine, int device, cm_stream **out)
{
    uint64_t spare;
    if (!take(engine, &engine->cache[device].streams, &spare)) {
        return cm_stream_create(engine->rt, device, CM_STREAM_NON_BLOCKING, 0, out);
    }
    *out = (cm_stream *)(uintptr_t)spare;
    return cm_ok();
}

void
cm_cache_give_stream(cm_engine *engine, cm_stream *stream)
{
    if (stream != NULL
        && !keep(engine, &engine->cache[stream->device].streams, (uintptr_t)stream)) {
        cm_stream_release(stream);
    }
}

/* Find the entry of the side stream (cm_side_stream in private.h) that works beside the
 * user's stream with the id `beside`. If there is no such entry, find an entry that is
 * free or whose stream nobody uses. Returns NULL if there is no entry of either sort.
 * The caller holds the lock. */
static cm_side_stream *
find_side(cm_resource_cache *cache, uint64_t beside)
{
    cm_side_stream *found = NULL;
    for (int i = 0; i < CM_CACHE_SLOTS; i++) {
        cm_side_stream *side = &cache->sides[i];
        if (side->stream != NULL && side->beside == beside) {
            return side;
        }
        if (side->stream == NULL || atomic_load(&side->stream->refs) == 1) {
            found = side;
        }
    }
    return found;
}

cm_status
cm_cache_take_side(cm_engine *engine, int device, const cm_stream *beside,
                   cm_stream **out)
{
    cm_resource_cache *cache = &engine->cache[device];
    cm_mutex_lock(&engine->lock);
    cm_side_stream *side = find_side(cache, beside->id);
    bool has = side != NULL && side->stream != NULL;
    if (has) {
        side->beside = beside->id;
        *out = cm_stream_hold(side->stream);
    }
    cm_mutex_unlock(&engine->lock);
    if (has) {
        return cm_ok();
    }
    CM_TRY(cm_cache_take_stream(engine, device, out));
    cm_mutex_lock(&engine->lock);
    /* The new stream is shared if there is a free entry for it, and if no other thread
     * has meanwhile added a side stream for the same user's stream. Otherwise it
     * belongs to this caller alone, which does no harm. */
    side = find_side(cache, beside->id);
    if (side != NULL && side->stream == NULL) {
        *side = (cm_side_stream){beside->id, cm_stream_hold(*out)};
    }
    cm_mutex_unlock(&engine->lock);
    return cm_ok();
}

cm_status
cm_cache_chain_streams(cm_engine *engine, const cm_stream *worker, cm_stream *waiter)
{
    uint64_t event;
    CM_TRY(cm_cache_take_event(engine, worker->device, CM_WAITED, &event));
    cm_status status = cm_stream_record(worker, event);
    if (cm_is_ok(status)) {
        status = cm_stream_wait_event(waiter, event);
    }
    cm_cache_give_event(engine, worker->device, CM_WAITED, event);
    return status;
}

cm_pool *
cm_cache_enter_ring(cm_engine *engine, uint64_t nbytes, uint64_t most)
{
    cm_mutex_lock(&engine->lock);
    bool fits = nbytes <= most && engine->ring_used_nbytes <= most - nbytes;
    cm_pool *pool = fits ? engine->pinned_pool : NULL;
    engine->ring_used_nbytes += pool != NULL ? nbytes : 0;
    cm_mutex_unlock(&engine->lock);
    return pool;
}

void
cm_cache_leave_ring(cm_engine *engine, uint64_t nbytes)
{
    cm_mutex_lock(&engine->lock);
    engine->ring_used_nbytes -= nbytes;
    cm_mutex_unlock(&engine->lock);
}

cm_status
cm_cache_fini(cm_engine *engine)
{
    cm_status first = cm_ok();
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        cm_resource_cache *cache = &engine->cache[device];
        uint64_t item;
        for (int sort = 0; sort < CM_EVENT_SORT_COUNT; sort++) {
            while (take(engine, &cache->events[sort], &item)) {
                first =
                    cm_first_failure(first, destroy_event(engine->rt, device, item));
            }
        }
        while (take(engine, &cache->streams, &item)) {
            cm_stream_release((cm_stream *)(uintptr_t)item);
        }
        for (int i = 0; i < CM_CACHE_SLOTS; i++) {
            if (cache->sides[i].stream != NULL) {
                cm_stream_release(cache->sides[i].stream);
            }
        }
    }
    return first;
}
