/* SPDX-License-Identifier: Apache-2.0 */
/* Handing out: from what is free, else from what has come to be free, else from new
 * memory, else by waiting. */
#include "base/checked_math.h"
#include "pool/private.h"
#include "pool/scope.h"

static bool
round_size(const cm_pool *pool, uint64_t nbytes, uint64_t *out)
{
    uint64_t step = nbytes >= pool->large ? CM_PAGE_NBYTES : pool->align;
    return nbytes != 0 && cm_round_up_u64(nbytes, step, out) && *out <= INT64_MAX;
}

void
cm_pool_hand_out_locked(cm_pool *pool, cm_heap_span *span, uint64_t requested_nbytes,
                        bool hit)
{
    cm_pool_counters *c = &pool->counters;
    span->state = CM_SPAN_LIVE;
    span->requested_nbytes = requested_nbytes;
    c->allocation_count++;
    c->hit_count += hit;
    c->miss_count += !hit;
    c->live_count++;
    c->requested_nbytes += requested_nbytes;
    c->live_nbytes += span->block.nbytes;
    if (c->live_nbytes > c->peak_live_nbytes) {
        c->peak_live_nbytes = c->live_nbytes;
    }
    if (c->requested_nbytes > c->peak_requested_nbytes) {
        c->peak_requested_nbytes = c->requested_nbytes;
    }
    if (c->live_nbytes - c->requested_nbytes > c->peak_waste_nbytes) {
        c->peak_waste_nbytes = c->live_nbytes - c->requested_nbytes;
    }
    if (pool->heap.free_nbytes < pool->window_cached) {
        pool->window_cached = pool->heap.free_nbytes;
    }
}

static uint32_t
find_slot_locked(const cm_pool *pool, const cm_stream *stream)
{
    return pool->config.kind == CM_KIND_DEVICE ? cm_pool_find_slot_locked(pool, stream)
                                               : 0;
}

/* A good part of what is held. Where such a block lies badly it leaves holes that cost
 * as much, so it is worth a question whether other streams' memory is idle. */
enum { LONG_SHARE = 18 };

static inline bool
is_long_locked(const cm_pool *pool, uint64_t size)
{
    return size >= pool->counters.reserved_nbytes / LONG_SHARE;
}

static inline bool
must_ask_locked(const cm_pool *pool, uint64_t size, const cm_heap_view *view)
{
    return pool->slot_count > 2 && is_long_locked(pool, size)
           && cm_pool_is_other_late_locked(pool, view->tag);
}

/* NULL: there is none, or something is due first: a trim, a question. */
static inline cm_block *
take_locked(cm_pool *pool, uint64_t nbytes, uint64_t size, const cm_stream *stream)
{
    if (pool->config.idle_trim_ns != 0
        && cm_now_ns() - pool->window_ns >= pool->config.idle_trim_ns) {
        return NULL;
    }
    cm_heap_view view = cm_pool_view_locked(pool, find_slot_locked(pool, stream));
    cm_heap_span *span = cm_heap_take_ready(&pool->heap, size, &view);
    if (span == NULL && !must_ask_locked(pool, size, &view)) {
        span = cm_heap_take(&pool->heap, size, cm_pool_align_of(pool, size), &view);
    }
    if (span != NULL) {
        cm_pool_hand_out_locked(pool, span, nbytes, true);
    }
    return span == NULL ? NULL : &span->block;
}

cm_block *
cm_pool_try_alloc(cm_pool *pool, uint64_t nbytes, const cm_stream *stream)
{
    uint64_t size = 0;
    if (cm_runtime_is_forked(pool->rt) || !round_size(pool, nbytes, &size)) {
        return NULL;
    }
    cm_fast_lock_take(&pool->lock);
    cm_block *block = take_locked(pool, nbytes, size, stream);
    cm_fast_lock_give(&pool->lock);
    return block;
}

cm_block *
cm_pool_quick_alloc(cm_pool *pool, uint64_t nbytes, const cm_stream *stream)
{
    uint64_t size = 0;
    if (cm_runtime_is_forked(pool->rt) || !round_size(pool, nbytes, &size)) {
        return NULL;
    }
    cm_fast_lock_enter(&pool->lock);
    cm_block *block = take_locked(pool, nbytes, size, stream);
    cm_fast_lock_leave(&pool->lock);
    return block;
}

/* -- a miss ----------------------------------------------------------------------------- */

typedef struct alloc_request {
    uint64_t nbytes;
    uint64_t size;
    cm_stream *stream;
    bool capturing; /* nothing may be waited for or recorded on the stream */
    const cm_wait_hooks *hooks; /* NULL: nothing may be waited for */
} alloc_request;

/* As a hit, but thorough: neighbours are joined, every free span is looked at. Joining
 * walks all spans: before the first look it is for blocks that are worth it. */
static cm_heap_span *
take_thoroughly(cm_pool *pool, const alloc_request *r)
{
    uint64_t align = cm_pool_align_of(pool, r->size);
    cm_fast_lock_take(&pool->lock);
    cm_heap_view view = cm_pool_view_locked(pool, find_slot_locked(pool, r->stream));
    cm_heap_span *span = NULL;
    if (pool->heap.free_nbytes >= r->size) {
        cm_heap_settle(&pool->heap, &view);
        bool joined = is_long_locked(pool, r->size) && cm_heap_join(&pool->heap, &view);
        span = cm_heap_take(&pool->heap, r->size, align, &view);
        if (span == NULL && !joined && cm_heap_join(&pool->heap, &view)) {
            span = cm_heap_take(&pool->heap, r->size, align, &view);
        }
        if (span == NULL) {
            span = cm_heap_search(&pool->heap, r->size, align, &view);
        }
    }
    if (span != NULL) {
        cm_pool_hand_out_locked(pool, span, r->nbytes, false);
    }
    cm_fast_lock_give(&pool->lock);
    return span;
}

/* Bytes freed that wait for a fence. */
static uint64_t
fence_due_nbytes(cm_pool *pool)
{
    uint64_t due_nbytes = 0;
    cm_fast_lock_take(&pool->lock);
    for (cm_list *n = pool->in_flight.next; n != &pool->in_flight; n = n->next) {
        const cm_flight *flight = CM_LIST_ENTRY(n, cm_flight, node);
        due_nbytes += flight->fence_devices != 0 ? flight->span->block.nbytes : 0;
    }
    cm_fast_lock_give(&pool->lock);
    return due_nbytes;
}

/* Without context events, blocks with fences would pile up until memory runs out: so
 * many bytes may wait before their devices are waited for. */
static uint64_t
sync_limit_nbytes(cm_pool *pool)
{
    cm_fast_lock_take(&pool->lock);
    uint64_t quarter = pool->counters.live_nbytes / 4;
    cm_fast_lock_give(&pool->lock);
    uint64_t least = UINT64_C(64) << 20;
    return quarter > least ? quarter : least;
}

static bool
has_work_to_poll(cm_pool *pool)
{
    cm_fast_lock_take(&pool->lock);
    bool any = !cm_list_is_empty(&pool->in_flight) || pool->slot_count > 1;
    cm_fast_lock_give(&pool->lock);
    return any;
}

/* From what has ended meanwhile; NULL if there is nothing that fits. */
static cm_heap_span *
take_ended(cm_pool *pool, const alloc_request *r)
{
    if (!has_work_to_poll(pool)) {
        return take_thoroughly(pool, r);
    }
    uint64_t due_nbytes = r->capturing ? 0 : fence_due_nbytes(pool);
    cm_status looked =
        cm_pool_poll(pool, CM_POLL_LOOK, due_nbytes > pool->config.fence_limit_nbytes);
    (void)looked; /* never fails */
    cm_heap_span *span = take_thoroughly(pool, r);
    if (span == NULL && r->hooks != NULL && due_nbytes > sync_limit_nbytes(pool)) {
        cm_status status = cm_pool_poll(pool, CM_POLL_SYNC,
                                        due_nbytes > pool->config.fence_limit_nbytes);
        (void)status; /* what could not be waited for stays in flight */
        span = take_thoroughly(pool, r);
    }
    return span;
}

/* From new memory; someone else's growth may have been enough. */
static cm_status
grow(cm_pool *pool, const alloc_request *r, cm_heap_span **out)
{
    cm_pool_begin_growing(pool);
    cm_status status = cm_ok();
    *out = take_thoroughly(pool, r);
    if (*out == NULL) {
        cm_scope scope;
        status = cm_scope_enter(pool->rt, pool->config.device, &scope);
        if (cm_is_ok(status)) {
            uint64_t begin_ns = cm_now_ns();
            status = cm_pool_grow(pool, r->size, r->stream, out);
            cm_scope_leave(&scope);
            cm_fast_lock_take(&pool->lock);
            pool->counters.growth_ns += cm_now_ns() - begin_ns;
            if (cm_is_ok(status)) {
                pool->counters.growth_count++;
                cm_pool_hand_out_locked(pool, *out, r->nbytes, false);
            }
            cm_fast_lock_give(&pool->lock);
        }
    }
    cm_pool_end_growing(pool);
    return status;
}

/* `span` was taken for `stream`, which waits for the late work on it: from now on that
 * stream's own order is what protects it. `recorded`: the epoch
 * of an event recorded just now; 0: none was. */
static void
retag_locked(cm_pool *pool, cm_heap_span *span, cm_stream *stream, uint64_t recorded)
{
    uint32_t tag = cm_pool_slot_locked(pool, stream);
    if (tag != 0 && span->tag != 0) {
        span->tag = tag;
        span->epoch = recorded != 0 ? recorded : pool->epochs[tag].epoch;
        pool->epochs[tag].given_epoch = span->epoch;
    }
}

/* Memory with work of another stream pending, once this stream waits for that work. */
static cm_heap_span *
take_ordered(cm_pool *pool, const alloc_request *r)
{
    if (pool->config.kind != CM_KIND_DEVICE || r->stream == NULL || r->capturing
        || !cm_pool_begin_poll(pool, true)) {
        return NULL;
    }
    uint64_t done[CM_EPOCHS_MAX];
    cm_heap_span *span = NULL;
    if (cm_pool_order_after_slots(pool, r->stream, done)) {
        bool can_retag = cm_stream_is_kept(r->stream);
        uint64_t recorded = 0;
        if (can_retag && cm_pool_slot_needs_record(pool, r->stream)) {
            recorded = cm_pool_try_record_slot(pool, r->stream);
            can_retag = recorded != 0;
        }
        cm_fast_lock_take(&pool->lock);
        cm_heap_view view =
            cm_pool_view_locked(pool, find_slot_locked(pool, r->stream));
        view.done = done;
        span = cm_heap_search(&pool->heap, r->size, cm_pool_align_of(pool, r->size),
                              &view);
        if (span != NULL) {
            pool->counters.cross_stream_wait_count++;
            if (can_retag) {
                retag_locked(pool, span, r->stream, recorded);
            }
            cm_pool_hand_out_locked(pool, span, r->nbytes, false);
        }
        cm_fast_lock_give(&pool->lock);
    }
    cm_pool_end_poll(pool);
    return span;
}

/* There is no more memory to be had: wait for what there is. */
static cm_status
make_room(cm_pool *pool, const alloc_request *r, cm_status refused, cm_heap_span **out)
{
    if (r->hooks != NULL && (*out = take_ordered(pool, r)) != NULL) {
        return cm_ok();
    }
    if (!r->capturing && r->hooks != NULL) {
        CM_TRY(cm_pool_await(pool, r->hooks));
        cm_status waited = cm_pool_poll(pool, CM_POLL_WAIT, true);
        (void)waited; /* the retry's own answer is what the caller needs */
    }
    if ((*out = take_thoroughly(pool, r)) != NULL) {
        return cm_ok();
    }
    uint64_t released_nbytes = 0;
    cm_status trimmed = cm_pool_trim(pool, 0, false, &released_nbytes);
    (void)trimmed;
    cm_status status = released_nbytes > 0 ? grow(pool, r, out) : refused;
    if (!cm_is_ok(status)) {
        cm_fast_lock_take(&pool->lock);
        pool->counters.out_of_memory_count++;
        cm_fast_lock_give(&pool->lock);
    }
    return status;
}

/* A stream that cannot be asked counts as capturing: nothing is then waited for. */
static bool
is_capturing(cm_pool *pool, const cm_stream *stream)
{
    bool capturing;
    return stream != NULL && cm_stream_may_capture(stream)
           && (!cm_is_ok(cm_stream_ask_capturing(pool->rt, stream->device,
                                                 stream->handle, &capturing))
               || capturing);
}

static cm_status
alloc(cm_pool *pool, uint64_t nbytes, cm_stream *stream, const cm_wait_hooks *hooks,
      cm_block **out)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, nbytes);
    }
    cm_block *block = cm_pool_try_alloc(pool, nbytes, stream);
    if (block != NULL) {
        *out = block;
        return cm_ok();
    }
    alloc_request r = {.nbytes = nbytes, .stream = stream, .hooks = hooks};
    if (!round_size(pool, nbytes, &r.size)) {
        return cm_fail(nbytes == 0 ? CM_EINVALID : CM_EOVERFLOW, nbytes);
    }
    cm_pool_trim_idle(pool);
    r.capturing = is_capturing(pool, stream);
    cm_heap_span *span = take_ended(pool, &r);
    if (span == NULL) {
        cm_status status = grow(pool, &r, &span);
        if (cm_pool_is_short(status)) {
            status = make_room(pool, &r, status, &span);
        }
        CM_TRY(status);
    }
    CM_POOL_DEBUG_CHECK(pool);
    *out = &span->block;
    return cm_ok();
}

cm_status
cm_pool_alloc(cm_pool *pool, uint64_t nbytes, cm_stream *stream, cm_block **out)
{
    return alloc(pool, nbytes, stream, &(cm_wait_hooks){.interrupted = NULL}, out);
}

cm_status
cm_pool_alloc_asking(cm_pool *pool, uint64_t nbytes, cm_stream *stream,
                     const cm_wait_hooks *hooks, cm_block **out)
{
    return alloc(pool, nbytes, stream, hooks, out);
}

cm_status
cm_pool_alloc_now(cm_pool *pool, uint64_t nbytes, cm_stream *stream, cm_block **out)
{
    return alloc(pool, nbytes, stream, NULL, out);
}
