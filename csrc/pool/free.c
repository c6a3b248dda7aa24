/* SPDX-License-Identifier: Apache-2.0 */
/* Taking blocks back: at once to the heap where nothing runs on them or one stream's
 * order protects them, else into flight until the host has seen their work end. */
#include <stdlib.h>

#include "pool/private.h"

bool
cm_pool_free_is_quick(const cm_pool *pool, cm_stream *const *uses, uint32_t use_count,
                      unsigned flags)
{
    if (flags != 0 || atomic_load_explicit(&pool->holds, memory_order_relaxed) == 0) {
        return false; /* it may be the last: ending the pool waits */
    }
    return use_count == 0
           || (use_count == 1 && pool->config.kind == CM_KIND_DEVICE
               && !cm_stream_may_capture(uses[0]));
}

/* Count a LIVE span as no longer handed out. */
static void
take_back_locked(cm_pool *pool, const cm_heap_span *span)
{
    cm_pool_counters *c = &pool->counters;
    c->free_count++;
    c->live_count--;
    c->live_nbytes -= span->block.nbytes;
    c->requested_nbytes -= span->requested_nbytes;
}

/* May the stream's own order protect the block from now on? Not while it captures: the
 * graph would use the memory whenever it runs. */
static bool
is_ordered(cm_pool *pool, const cm_stream *stream)
{
    if (pool->config.kind != CM_KIND_DEVICE || !cm_stream_is_kept(stream)) {
        return false;
    }
    bool capturing;
    return !cm_stream_may_capture(stream)
           || (cm_is_ok(cm_stream_ask_capturing(pool->rt, stream->device,
                                                stream->handle, &capturing))
               && !capturing);
}

/* Back to the heap, `stream` (NULL: none) in whose order alone it may be used yet. What
 * ran on it before it was handed out may still run, whoever has used it since.
 * `recorded`: the epoch of an event recorded just now; 0: none was.
 * False: the stream cannot be marked or is not the only one, nothing changed. */
static inline bool
try_give_locked(cm_pool *pool, cm_heap_span *span, cm_stream *stream, uint64_t recorded)
{
    bool was_late = span->epoch > pool->done[span->tag];
    uint32_t tag = was_late ? span->tag : 0;
    uint64_t epoch = was_late ? span->epoch : 0;
    if (stream != NULL) {
        tag = cm_pool_slot_locked(pool, stream);
        if (tag == 0 || (was_late && span->tag != tag)) {
            return false;
        }
        epoch = recorded != 0 ? recorded : pool->epochs[tag].epoch;
        pool->epochs[tag].given_epoch = epoch;
    }
    cm_heap_view view = cm_pool_view_locked(pool, tag);
    take_back_locked(pool, span);
    cm_heap_give_ready(&pool->heap, span, tag, epoch, &view);
    cm_pool_note_cached_locked(pool);
    return true;
}

static bool
try_give(cm_pool *pool, cm_heap_span *span, cm_stream *stream, uint64_t recorded)
{
    cm_fast_lock_take(&pool->lock);
    bool given = try_give_locked(pool, span, stream, recorded);
    bool unused = given && cm_pool_is_unused_locked(pool);
    cm_fast_lock_give(&pool->lock);
    if (unused) {
        cm_pool_destroy(pool);
    }
    return given;
}

bool
cm_pool_quick_free(cm_pool *pool, cm_block *block, cm_stream *const *uses,
                   uint32_t use_count)
{
    if (!cm_pool_free_is_quick(pool, uses, use_count, 0)
        || cm_runtime_is_forked(pool->rt)) {
        return false;
    }
    cm_fast_lock_enter(&pool->lock);
    bool given = try_give_locked(pool, (cm_heap_span *)(void *)block,
                                 use_count == 0 ? NULL : uses[0], 0);
    bool unused = given && cm_pool_is_unused_locked(pool);
    cm_fast_lock_leave(&pool->lock);
    if (CM_UNLIKELY(unused)) { /* its last holder let go just now */
        cm_pool_destroy(pool);
    }
    return given;
}

/* The same for a stream whose order protects the block. */
static bool
try_give_ordered(cm_pool *pool, cm_heap_span *span, cm_stream *stream)
{
    if (!cm_stream_may_capture(stream) || !cm_pool_slot_needs_record(pool, stream)) {
        return try_give(pool, span, stream, 0);
    }
    if (!cm_pool_begin_poll(pool, false)) {
        return false;
    }
    (void)cm_pool_hold(pool); /* giving the last block back must not end it here */
    uint64_t recorded = cm_pool_try_record_slot(pool, stream);
    bool given = recorded != 0 && try_give(pool, span, stream, recorded);
    cm_pool_end_poll(pool);
    cm_pool_release(pool);
    return given;
}

static void
give_to_flight(cm_pool *pool, cm_heap_span *span, cm_flight *flight)
{
    cm_pool_counters *c = &pool->counters;
    cm_fast_lock_take(&pool->lock);
    take_back_locked(pool, span);
    span->state = CM_SPAN_FLIGHT;
    c->in_flight_count++;
    c->in_flight_nbytes += span->block.nbytes;
    if (c->in_flight_nbytes > c->peak_in_flight_nbytes) {
        c->peak_in_flight_nbytes = c->in_flight_nbytes;
    }
    if (flight != NULL) {
        flight->serial = c->free_count;
        cm_list_push_back(&pool->in_flight, &flight->node);
    }
    bool unused = cm_pool_is_unused_locked(pool);
    cm_fast_lock_give(&pool->lock);
    if (unused) {
        cm_pool_destroy(pool);
    }
}

void
cm_pool_free(cm_pool *pool, cm_block *block, cm_stream *const *uses, uint32_t use_count,
             unsigned flags)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return;
    }
    cm_heap_span *span = (cm_heap_span *)(void *)block;
    if (flags == 0 && use_count == 0 && try_give(pool, span, NULL, 0)) {
        return;
    }
    if (flags == 0 && use_count == 1 && is_ordered(pool, uses[0])
        && try_give_ordered(pool, span, uses[0])) {
        return;
    }
    cm_flight *flight = malloc(sizeof(*flight));
    if (flight == NULL) {
        /* There is no way to know when it is idle: it stays in flight for ever. */
        atomic_fetch_add(&pool->lost_count, 1);
        give_to_flight(pool, span, NULL);
        return;
    }
    cm_list_init(&flight->node);
    flight->span = span;
    cm_flight_record(pool, flight, uses, use_count, flags);
    if (cm_flight_is_idle(flight)) {
        free(flight);
        (void)try_give(pool, span, NULL, 0);
        return;
    }
    give_to_flight(pool, span, flight);
}
