/* SPDX-License-Identifier: Apache-2.0 */
/* Makes and ends pools, hands blocks out and takes them back, opens them to other
 * devices, and keeps the counters and the listing.
 *
 * The idea
 * --------
 * cudaMalloc and cudaHostAlloc cost from tens of microseconds to whole seconds
 * (gigabytes of page-locked memory), and cudaFree waits for the device. A pool makes
 * these calls rarely and for large chunks, and hands out blocks by cutting the chunks
 * up. Unlike malloc, it has to deal with memory that the host gives back while a GPU
 * may still be reading or writing it. So the pool knows two facts about each piece of
 * memory that is not handed out: how long it is (heap.c) and whose work may still run
 * on it (in_flight.c). All memory of a pool is divided into spans (heap.h), and a block
 * is a span that is handed out.
 *
 * A block passes through these states (cm_span_state):
 *
 *              alloc                free: nothing runs on it, or one
 *      FREE  --------->  LIVE  -------------------------------------->  FREE
 *      READY             |     stream's order protects it               READY
 *        ^               |
 *        |               |  free: anything else
 *        |               v
 *        +----------- FLIGHT     until the host has seen all its work end
 *
 * FREE memory has a tag: 0 if nothing runs on it, or the slot (a small index) of the
 * one stream whose work may still run on it. An epoch, which is a number beside the
 * tag, says how far that stream has to get until the work has ended (in_flight.c). That
 * stream may have the memory back at once, because a stream runs new work after old
 * work. Anybody else may have it once the work has ended. READY is FREE memory that is
 * kept whole for the next request of exactly its size.
 *
 * Handing out
 * -----------
 * The size of a request is rounded up. For device memory it becomes a multiple of 512
 * bytes or, if it is 1 MiB or more, of 4 KiB, which is a page. For host memory it
 * becomes a multiple of 64 bytes or, if it is 64 KiB or more, of a page. A request for
 * 1000 bytes of device memory gets a block of 1024 bytes.
 *
 * A request that cm_pool_try_alloc() serves is a hit. Under one short spin lock this
 * function takes a READY span of that size, or else the best free span of the heap, and
 * makes no runtime call. It declines if something else has to come first: if an idle
 * trim is due, if a limit was lowered, if much memory waits for a fence (see "Taking
 * back"), or if the block is long and the memory of other streams may be idle by now.
 *
 * Any other request is a miss. cm_pool_alloc() goes down this ladder for it, and stops
 * at the first rung that yields memory:
 *
 *   1. take_ended()     ask events which work has ended, join neighbours, look at
 *                       every free span
 *   2. await_fences()   if much is in flight, wait at most 1 s for fences
 *   3. grow()           new chunks, or free chunks moved to where they are needed
 *   4. take_ordered()   make this stream wait, on the device, for another stream's work
 *   5. cm_pool_wait()   make the host wait for everything in flight
 *   6. trim and grow()  give back each chunk of which all is free, and try to grow
 *                       once more
 *
 * Example: a loop allocates 100 MB on stream A, launches a kernel on it, and frees it.
 * The first round misses and grows. The free tags the span with A and its epoch and
 * makes no runtime call. The second round finds the span free, sees A's tag, and is a
 * hit although the kernel still runs. If stream B asks instead, it cannot use that
 * span, and the request is a miss. It asks the driver whether A is idle (rung 1). If A
 * is, B gets the same 100 MB. If not, the pool grows, because memory is cheaper than a
 * wait. The pool makes B wait for A (rung 4) only once the budget or the device is
 * exhausted.
 *
 * Rungs 2, 4 and 5 need hooks, which say how the caller's wait can be interrupted.
 * Without hooks nothing waits for work of unknown length.
 *
 * Taking back
 * -----------
 * cm_pool_free() asks three questions, in this order:
 *
 *   - Do forked children share the block? If so, it is kept until they have ended
 *     (fork.c).
 *   - Has no stream used the block? Or is it device memory that only one stream has
 *     used, and is that stream kept alive and not capturing? If so, the block goes back
 *     to the heap at once, clean in the first case, and with the tag of the stream in
 *     the second.
 *   - Otherwise it goes into flight with one event for each stream that used it, or
 *     with a fence (an event over everything that a device is doing) if its users are
 *     not known.
 *
 * Host memory is never given back in a stream's order, because the next user may be the
 * host, which no stream holds back.
 *
 * Edges
 * -----
 *   - Work from before a block was handed out may still run when the block is given
 *     back. So the span keeps its old tag and epoch while it is LIVE. If its new user
 *     was another stream, the order of neither stream alone protects it, and it goes
 *     into flight.
 *   - While a stream captures, the pool may neither record an event on the stream nor
 *     wait for the stream. A block that a capture used belongs to the graph. The graph
 *     can run at any time, so the block stays in flight until the pool ends.
 *   - A live block keeps its pool alive. When the pool has neither a holder nor a live
 *     block left, leave() ends the pool, in the thread that released the last holder or
 *     freed the last block.
 *   - In a forked child the pool hands out nothing and takes nothing back: the driver's
 *     memory is the parent's. */
#include <stdlib.h>

#include "base/backoff.h"
#include "base/checked_math.h"
#include "base/nvtx.h"
#include "pool/private.h"
#include "runtime/scope.h"

/* -- beginning and ending ------------------------------------------------------------------ */

/* Blocks of at least this size begin and end at the boundaries of pages. */
#define LARGE_HOST_NBYTES (UINT64_C(64) << 10)
#define LARGE_DEVICE_NBYTES (UINT64_C(1) << 20)

static void
free_pool(cm_pool *pool)
{
    cm_heap_fini(&pool->heap);
    free(pool);
}

cm_status
cm_pool_create(cm_runtime *rt, const cm_pool_config *config, cm_pool **out)
{
    if (config->device < 0 || config->device >= rt->device_count) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)config->device);
    }
    bool is_host = cm_kind_is_page_locked(config->kind);
    cm_pool *pool = calloc(1, sizeof(*pool));
    CM_TRY(cm_allocated(pool != NULL, sizeof(*pool)));
    atomic_init(&pool->holds, 1);
    pool->rt = rt;
    pool->config = *config;
    pool->config.flags |= config->kind == CM_KIND_MAPPED ? CM_HOST_ALLOC_MAPPED : 0u;
    pool->config.budget = &pool->budget;
    cm_budget_init(&pool->budget, UINT64_MAX, config->budget);
    pool->align = is_host ? 64 : 512;
    pool->large = is_host ? LARGE_HOST_NBYTES : LARGE_DEVICE_NBYTES;
    cm_heap_init(&pool->heap);
    cm_list_init(&pool->in_flight);
    cm_list_init(&pool->held_by_children);
    cm_pool_init_slots(pool);
    cm_status status = cm_pool_watch_forks(pool);
    if (!cm_is_ok(status)) {
        free_pool(pool);
        return status;
    }
    *out = pool;
    return status;
}

/* Called once nobody holds the pool and no block is live. This is the last chance to
 * give memory back, so each call that does so is tried twice. There is no caller any
 * more to whom a failure could be reported. */
static void
destroy(cm_pool *pool)
{
    cm_pool_unwatch_forks(pool); /* no block is live, so the rest needs no lock */
    cm_pool_end_children(pool);
    /* Wait first. With some kinds of memory, the call that gives it back does not wait
     * for work that still runs on the memory. */
    (void)CM_TRY_TWICE(cm_pool_wait(pool, NULL, false));
    if (pool->saved.forget != NULL) {
        pool->saved.forget(pool);
    }
    if (cm_pool_is_fence_due(pool) && cm_streams_capture(pool->rt)) {
        /* Unknown work may still run on some of the memory. To wait for this work the
         * pool would have to wait for the whole device, which would end a capture that
         * is under way. So the memory is leaked, and no longer counts against a
         * limit. */
        cm_budget_refund(pool->config.budget, cm_pool_held_nbytes(pool));
        return;
    }
    cm_scope scope;
    bool entered = pool->source != NULL
                   && CM_TRY_TWICE(cm_scope_enter(pool->rt, pool->config.device,
                                                  CM_CAPTURE_RELAXED, &scope));
    cm_pool_abandon_work(pool);
    if (entered) {
        for (int attempt = 0; attempt < 2 && pool->heap.free_nbytes > 0; attempt++) {
            uint64_t released_nbytes = 0;
            cm_ignore(cm_pool_release_chunks(pool, 0, &released_nbytes));
        }
        pool->source->ops->destroy(pool->source);
        cm_scope_leave(&scope);
    }
    cm_budget_refund(pool->config.budget, cm_pool_held_nbytes(pool));
    free_pool(pool);
}

/* Give the lock back, and end the pool if nobody holds it and no block is live. */
static void
leave(cm_pool *pool)
{
    bool unused = atomic_load_explicit(&pool->holds, memory_order_relaxed) == 0
                  && pool->counters.live_count == 0;
    cm_spin_lock_give(&pool->lock);
    if (unused) {
        destroy(pool);
    }
}

cm_pool *
cm_pool_hold(cm_pool *pool)
{
    atomic_fetch_add_explicit(&pool->holds, 1, memory_order_relaxed);
    return pool;
}

void
cm_pool_release(cm_pool *pool)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return; /* leaked: a forked child can give nothing back */
    }
    uint64_t holds = atomic_load_explicit(&pool->holds, memory_order_relaxed);
    while (holds > 1) { /* others still hold it, so nothing ends */
        if (atomic_compare_exchange_weak_explicit(&pool->holds, &holds, holds - 1,
                                                  memory_order_release,
                                                  memory_order_relaxed)) {
            return;
        }
    }
    cm_spin_lock_take(&pool->lock);
    (void)atomic_fetch_sub_explicit(&pool->holds, 1, memory_order_acq_rel);
    leave(pool);
}

/* -- telling the recorder ------------------------------------------------------------------ */
/* A free is recorded before anybody else can get the block, and an allocation only
 * after the block was taken. So the events about one address are in order. */

static inline void
note_block(const cm_pool *pool, uint8_t op, cm_heap_span *span, const cm_stream *stream)
{
    if (cm_recorder_is_on() && span != NULL) {
        cm_pool_note(pool, op, &span->block, span->block.nbytes,
                     op == CM_EVENT_ALLOCATE ? span->requested_nbytes : 0, stream);
        span->was_noted = op == CM_EVENT_FREE;
    }
}

/* -- handing out ---------------------------------------------------------------------------- */
/* A block comes from memory that is known to be free, if it fits there. Otherwise the
 * pool asks which work has ended, and the block comes from memory that turns out to be
 * free, or else from new memory. If none of these suffices, the call waits for
 * memory. */

static bool
round_size(const cm_pool *pool, uint64_t nbytes, uint64_t *out)
{
    uint64_t step = cm_pool_align_of(pool, nbytes);
    return nbytes != 0 && cm_round_up_u64(nbytes, step, out) && *out <= INT64_MAX;
}

/* Count `span` as handed out; it is LIVE from now on. */
static void
hand_out_locked(cm_pool *pool, cm_heap_span *span, uint64_t requested_nbytes, bool hit)
{
    cm_pool_counters *c = &pool->counters;
    span->state = CM_SPAN_LIVE;
    span->was_noted = false;
    span->requested_nbytes = requested_nbytes;
    c->allocation_count++;
    c->hit_count += hit;
    c->miss_count += !hit;
    c->live_count++;
    c->requested_nbytes += requested_nbytes;
    c->live_nbytes += span->block.nbytes;
    cm_pool_note_live_locked(pool);
    if (pool->heap.free_nbytes < pool->window_cached) {
        pool->window_cached = pool->heap.free_nbytes;
    }
}

/* A block is long if it is at least 1/18 of what the pool holds. A long block in a bad
 * place leaves holes that cost as much memory as the block. So for a long block it is
 * worth asking the driver, as a miss does, whether the memory of other streams is
 * idle. */
enum { LONG_SHARE = 18 };

static inline bool
is_long_locked(const cm_pool *pool, uint64_t size)
{
    return size >= pool->counters.reserved_nbytes / LONG_SHARE;
}

static inline bool
must_ask_locked(const cm_pool *pool, uint64_t size, const cm_heap_view *view)
{
    return pool->given_count > 1 && is_long_locked(pool, size)
           && cm_pool_has_other_pending_locked(pool, view->tag);
}

/* True if blocks of many bytes that need a fence have been given back since a miss last
 * asked. The next miss should then ask about this memory, even if other memory is free.
 * Memory that was used lately is worth having, since the processor's cache still holds
 * it. If `limit` is 0, the pool's own limit applies. */
static inline bool
must_fence_locked(const cm_pool *pool, uint64_t limit)
{
    limit = limit != 0 ? limit : pool->config.fence_limit_nbytes;
    return pool->unasked_nbytes > limit && cm_kind_is_page_locked(pool->config.kind);
}

cm_block *
cm_pool_try_alloc(cm_pool *pool, uint64_t nbytes, const cm_stream *stream,
                  uint64_t fence_limit)
{
    uint64_t size = 0;
    if (cm_runtime_is_forked(pool->rt) || !round_size(pool, nbytes, &size)) {
        return NULL;
    }
    cm_heap_span *span = NULL;
    cm_spin_lock_take(&pool->lock);
    if (!cm_pool_is_trim_due_locked(pool) && !must_fence_locked(pool, fence_limit)
        && CM_LIKELY(!pool->is_over && pool->phase == CM_POOL_AWAKE)) {
        cm_heap_view view = cm_pool_view_for_locked(pool, stream);
        span = cm_heap_take_ready(&pool->heap, size, &view);
        if (span == NULL && !must_ask_locked(pool, size, &view)) {
            span = cm_heap_take(&pool->heap, size, cm_pool_align_of(pool, size), &view);
        }
    }
    if (span != NULL) {
        hand_out_locked(pool, span, nbytes, true);
    }
    cm_spin_lock_give(&pool->lock);
    note_block(pool, CM_EVENT_ALLOCATE, span, stream);
    return span == NULL ? NULL : &span->block;
}

bool
cm_pool_is_awake(cm_pool *pool)
{
    cm_spin_lock_take(&pool->lock);
    bool is_awake = pool->phase == CM_POOL_AWAKE;
    cm_spin_lock_give(&pool->lock);
    return is_awake;
}

/* -- a miss ----------------------------------------------------------------------------- */

typedef struct alloc_request {
    uint64_t nbytes;
    uint64_t size;
    cm_stream *stream;
    uint64_t fence_limit; /* 0 for the pool's own limit */
    bool capturing;       /* no event may be recorded or waited for on the stream */
    const cm_wait_hooks *hooks; /* if NULL the call waits for no work */
} alloc_request;

/* Take a block from free memory as a hit does, but join neighbours first and look at
 * every free span. Joining walks all spans, so for short blocks it is done only if the
 * first look finds nothing. Returns NULL if nothing fits. */
static cm_heap_span *
take_thoroughly(cm_pool *pool, const alloc_request *r)
{
    uint64_t align = cm_pool_align_of(pool, r->size);
    cm_spin_lock_take(&pool->lock);
    cm_heap_view view = cm_pool_view_for_locked(pool, r->stream);
    cm_heap_span *span = NULL;
    if (pool->heap.free_nbytes >= r->size && !cm_pool_is_over_locked(pool)) {
        cm_heap_join_ready(&pool->heap, &view);
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
        hand_out_locked(pool, span, r->nbytes, false);
    }
    cm_spin_lock_give(&pool->lock);
    return span;
}

/* Ask which work has ended, and take a block from the memory that is free then. Returns
 * NULL if nothing fits. A block stays in flight if asking about it, or waiting for it,
 * fails. */
static cm_heap_span *
take_ended(cm_pool *pool, const alloc_request *r)
{
    /* If the driver cannot record an event over a context, there are no fences, and the
     * blocks that need one would pile up until memory runs out. So if blocks of more
     * bytes than this need a fence, the call waits for the devices that may still use
     * these blocks. */
    uint64_t most_fenced = UINT64_C(64) << 20;
    cm_spin_lock_take(&pool->lock);
    bool any = !cm_list_is_empty(&pool->in_flight) || pool->slot_count > 1;
    uint64_t fenced = cm_pool_fenced_nbytes_locked(pool);
    bool must_fence = must_fence_locked(pool, r->fence_limit);
    pool->unasked_nbytes = 0;
    cm_pool_raise(&most_fenced, pool->counters.live_nbytes / 4);
    cm_spin_lock_give(&pool->lock);
    bool may_fence = !r->capturing
                     && (must_fence || fenced > pool->config.fence_limit_nbytes)
                     && !cm_others_capture(r->hooks);
    if (any) {
        cm_ignore(cm_pool_poll(pool, may_fence));
    }
    cm_heap_span *span = take_thoroughly(pool, r);
    /* Growing host memory takes milliseconds. A fence of an idle device passes much
     * sooner, so it is worth waiting 50 us for. */
    uint64_t until_ns = cm_now_ns() + 50 * 1000;
    bool looks = any && may_fence && !cm_kind_is_ordered(pool->config.kind);
    while (span == NULL && looks && r->hooks != NULL && cm_now_ns() < until_ns) {
        cm_pause_until(cm_now_ns() + 5 * 1000);
        cm_ignore(cm_pool_poll(pool, false));
        span = take_thoroughly(pool, r);
    }
    if (span == NULL && r->hooks != NULL && !r->capturing && fenced > most_fenced
        && !cm_runtime_has(pool->rt, CM_OP_context_record_event)) {
        cm_ignore(cm_pool_wait(pool, NULL, true));
        span = take_thoroughly(pool, r);
    }
    return span;
}

/* -- a wait before growing ----------------------------------------------------------------- */
/* Memory that was exported may be used by other libraries on any stream, so when it is
 * given back it waits for a fence. On a device that is never idle a fence passes late.
 * A loop that makes one array in each round would then take new memory in each round: a
 * pool was seen to hold 6.6 GB for arrays of 2.5 MB, of which one at a time was live.
 * So if more than a bound is in flight, the pool does not grow at once. It first waits
 * for the fences that have been recorded already, and records no new ones to wait for.
 * If no block fits even when the wait ends, the device's work takes longer than the
 * wait, and the loop really needs the memory. So nobody waits again until a fence has
 * passed. */

#define FLIGHT_BOUND (UINT64_C(256) << 20)
#define FENCE_WAIT_NS UINT64_C(1000000000)

/* True if so much memory is in flight that the pool should wait for fences before it
 * grows. */
static bool
is_piled_up(cm_pool *pool)
{
    uint64_t most = FLIGHT_BOUND;
    cm_spin_lock_take(&pool->lock);
    cm_pool_raise(&most, pool->counters.live_nbytes / 2);
    bool piled_up = pool->counters.in_flight_nbytes > most && !pool->waited_in_vain
                    && cm_pool_has_fence_locked(pool);
    cm_spin_lock_give(&pool->lock);
    return piled_up;
}

/* If is_piled_up(), wait until a block fits, no recorded fence is left, or a second has
 * passed. If no block fits, *out stays NULL.
 * Fails: CM_ECANCELLED if the hooks say so. */
static cm_status
await_fences(cm_pool *pool, const alloc_request *r, cm_heap_span **out)
{
    if (r->hooks == NULL || r->hooks->grows_at_once || r->capturing
        || !is_piled_up(pool) || cm_streams_capture(pool->rt)
        || cm_others_capture(r->hooks)) {
        return cm_ok();
    }
    CM_NVTX("wait for fences", r->size);
    uint64_t start = cm_now_ns();
    uint64_t asked = start;
    bool may_pass = true;
    while (*out == NULL && may_pass && cm_now_ns() - start < FENCE_WAIT_NS) {
        CM_TRY(cm_wait_check_interrupted(r->hooks, &asked));
        cm_nap_after(cm_now_ns() - start);
        /* A block stays in flight if asking about it fails. */
        cm_ignore(cm_pool_poll(pool, false));
        *out = take_thoroughly(pool, r);
        cm_spin_lock_take(&pool->lock);
        may_pass = cm_pool_has_fence_locked(pool);
        cm_spin_lock_give(&pool->lock);
    }
    cm_spin_lock_take(&pool->lock);
    pool->waited_in_vain = *out == NULL && may_pass;
    cm_spin_lock_give(&pool->lock);
    return cm_ok();
}

static bool
is_over(cm_pool *pool)
{
    cm_spin_lock_take(&pool->lock);
    bool over = cm_pool_is_over_locked(pool);
    cm_spin_lock_give(&pool->lock);
    return over;
}

/* Grow, and count the growth. Only the grower calls this, which is the thread that
 * holds pool->growing. */
static cm_status
grow_now(cm_pool *pool, uint64_t size, uint32_t share, const cm_stream *stream,
         cm_heap_span **out)
{
    uint64_t begin_ns = cm_now_ns();
    cm_status status = CM_IN_SCOPE(pool->rt, pool->config.device,
                                   cm_pool_grow(pool, size, share, stream, out));
    cm_spin_lock_take(&pool->lock);
    pool->counters.growth_ns += cm_now_ns() - begin_ns;
    pool->counters.growth_count += cm_is_ok(status);
    cm_spin_lock_give(&pool->lock);
    return status;
}

/* Take a block from new memory. If another thread has grown the pool while this thread
 * waited for its turn to grow, that memory may suffice. */
static cm_status
grow(cm_pool *pool, const alloc_request *r, cm_heap_span **out)
{
    cm_mutex_lock(&pool->growing);
    cm_status status = cm_ok();
    *out = take_thoroughly(pool, r);
    if (*out == NULL && !cm_pool_is_awake(pool)) {
        status = cm_fail(CM_EASLEEP, r->size);
    }
    else if (*out == NULL && is_over(pool)) {
        /* A growth that only moves chunks charges nothing, so the limit would not stop
         * it. */
        status = cm_fail(CM_ELIMIT, r->size);
    }
    else if (*out == NULL) {
        status = grow_now(pool, r->size, CM_CHUNK_SHARE, r->stream, out);
        if (cm_is_ok(status)) {
            cm_spin_lock_take(&pool->lock);
            hand_out_locked(pool, *out, r->nbytes, false);
            cm_spin_lock_give(&pool->lock);
        }
    }
    cm_mutex_unlock(&pool->growing);
    return status;
}

/* Make the stream of the request wait, on the device, for the work of other streams,
 * and take memory on which such work is pending. From then on the order of the
 * request's stream protects the memory. Returns NULL if that yields nothing. */
static cm_heap_span *
take_ordered(cm_pool *pool, const alloc_request *r)
{
    if (!cm_kind_is_ordered(pool->config.kind) || r->stream == NULL || r->capturing) {
        return NULL;
    }
    cm_mutex_lock(&pool->polling);
    uint64_t done[CM_EPOCHS_MAX];
    cm_heap_span *span = NULL;
    if (cm_pool_order_after_slots(pool, r->stream, done)) {
        cm_due due = {0, 0};
        bool can_retag = cm_stream_is_kept(r->stream)
                         && cm_pool_try_mark_foreign(pool, r->stream, &due);
        cm_spin_lock_take(&pool->lock);
        cm_heap_view view = cm_pool_view_for_locked(pool, r->stream);
        view.done = done;
        span = cm_pool_is_over_locked(pool)
                   ? NULL
                   : cm_heap_search(&pool->heap, r->size,
                                    cm_pool_align_of(pool, r->size), &view);
        if (span != NULL) {
            pool->counters.cross_stream_wait_count++;
            if (can_retag && due.slot == 0) {
                due.slot = cm_pool_slot_locked(pool, r->stream);
            }
            if (can_retag && due.slot != 0 && span->tag != 0) {
                cm_pool_give_in_order_locked(pool, &due);
                span->tag = due.slot;
                span->epoch = due.epoch;
            }
            hand_out_locked(pool, span, r->nbytes, false);
        }
        cm_spin_lock_give(&pool->lock);
    }
    cm_mutex_unlock(&pool->polling);
    return span;
}

/* Called when the runtime or a limit refuses more memory (`refused`). Tries rungs 4 to
 * 6 of the ladder above: ordering after other streams, waiting, and trimming before
 * another growth. */
static cm_status
make_room(cm_pool *pool, const alloc_request *r, cm_status refused, cm_heap_span **out)
{
    if (r->hooks != NULL && (*out = take_ordered(pool, r)) != NULL) {
        return cm_ok();
    }
    /* While there is a capture this waits for events only. */
    if (!r->capturing && r->hooks != NULL) {
        cm_status waited = cm_pool_wait(pool, r->hooks, false);
        if (waited.code == CM_ECANCELLED) {
            return waited;
        } /* after other failures the retry below decides */
    }
    if ((*out = take_thoroughly(pool, r)) != NULL) {
        return cm_ok();
    }
    uint64_t released_nbytes = 0;
    /* The call has already done all waiting that it may do, so this trim neither waits
     * nor records fences. */
    cm_ignore(cm_pool_trim_as(pool, 0, NULL, false, false, &released_nbytes));
    cm_status status = released_nbytes > 0 ? grow(pool, r, out) : refused;
    if (!cm_is_ok(status)) {
        cm_spin_lock_take(&pool->lock);
        pool->counters.out_of_memory_count++;
        uint64_t reserved_nbytes = cm_pool_held_nbytes(pool);
        cm_spin_lock_give(&pool->lock);
        if (cm_recorder_is_on()) {
            cm_pool_note(pool, CM_EVENT_OUT_OF_MEMORY, NULL, r->nbytes, reserved_nbytes,
                         r->stream);
        }
    }
    return status;
}

cm_status
cm_pool_alloc(cm_pool *pool, uint64_t nbytes, cm_stream *stream,
              const cm_wait_hooks *hooks, cm_block **out)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, nbytes);
    }
    cm_block *block = cm_pool_try_alloc(pool, nbytes, stream, 0);
    if (block != NULL) {
        *out = block;
        return cm_ok();
    }
    alloc_request r = {.nbytes = nbytes, .stream = stream, .hooks = hooks};
    if (!round_size(pool, nbytes, &r.size)) {
        return cm_fail(nbytes == 0 ? CM_EINVALID : CM_EOVERFLOW, nbytes);
    }
    if (CM_UNLIKELY(!cm_pool_is_awake(pool))) {
        return cm_fail(CM_EASLEEP, nbytes);
    }
    cm_pool_poll_children(pool);
    cm_pool_trim_idle(pool);
    /* A stream that cannot be asked counts as capturing, so that the call neither
     * records on it nor waits for it. */
    r.capturing = stream != NULL && !cm_is_ok(cm_stream_check_not_capturing(stream));
    if (is_over(pool)) {
        bool may_fence = !r.capturing && !cm_others_capture(hooks);
        cm_pool_obey_limits(pool, may_fence); /* gives back memory that has become free
                                                 in the meantime */
    }
    cm_heap_span *span = take_ended(pool, &r);
    if (span == NULL) {
        CM_TRY(await_fences(pool, &r, &span));
    }
    if (span == NULL) {
        cm_status status = grow(pool, &r, &span);
        if (cm_pool_is_short(status)) {
            status = make_room(pool, &r, status, &span);
        }
        CM_TRY(status);
    }
    CM_POOL_DEBUG_CHECK(pool);
    note_block(pool, CM_EVENT_ALLOCATE, span, stream);
    *out = &span->block;
    return cm_ok();
}

void
cm_pool_reserve(cm_pool *pool, uint64_t nbytes)
{
    enum { FREE_SHARE = 8 };
    uint64_t size;
    if (cm_runtime_is_forked(pool->rt) || !round_size(pool, nbytes, &size)) {
        return;
    }
    cm_mutex_lock(&pool->growing);
    cm_spin_lock_take(&pool->lock);
    bool grows =
        pool->heap.free_nbytes + pool->counters.in_flight_nbytes < size / FREE_SHARE
        && !cm_pool_is_over_locked(pool);
    cm_spin_lock_give(&pool->lock);
    cm_heap_span *span = NULL;
    if (grows && cm_is_ok(grow_now(pool, size, CM_RESERVE_SHARE, NULL, &span))) {
        cm_spin_lock_take(&pool->lock);
        cm_heap_view view = cm_pool_view_locked(pool, 0);
        (void)cm_heap_give(&pool->heap, span, span->tag, span->epoch, &view);
        cm_pool_note_peaks_locked(pool);
        cm_spin_lock_give(&pool->lock);
    }
    cm_mutex_unlock(&pool->growing);
    CM_POOL_DEBUG_CHECK(pool);
}

cm_pool *
cm_block_pool(const cm_block *block)
{
    return CM_LIST_ENTRY(((const cm_heap_span *)(const void *)block)->arena->heap,
                         cm_pool, heap);
}

cm_block *
cm_pool_alloc_optional(cm_pool *pool, uint64_t nbytes, uint64_t fence_limit)
{
    uint64_t most_in_flight = UINT64_C(256) << 20;
    alloc_request r = {.nbytes = nbytes, .fence_limit = fence_limit};
    if (cm_runtime_is_forked(pool->rt) || !round_size(pool, nbytes, &r.size)) {
        return NULL;
    }
    cm_pool_poll_children(pool);
    cm_pool_trim_idle(pool);
    if (is_over(pool)) {
        cm_pool_obey_limits(pool, true);
    }
    cm_heap_span *span = take_ended(pool, &r);
    cm_spin_lock_take(&pool->lock);
    cm_pool_raise(&most_in_flight, pool->counters.peak_live_nbytes);
    bool grows = pool->counters.in_flight_nbytes <= most_in_flight
                 && cm_budget_room(pool->config.budget) >= r.size;
    cm_spin_lock_give(&pool->lock);
    if (span == NULL && grows) {
        cm_ignore(grow(pool, &r, &span)); /* the caller can do without the block */
    }
    else if (span == NULL) {
        cm_ignore(cm_pool_poll(pool, true)); /* the caller can do without the block */
        span = take_thoroughly(pool, &r);
    }
    CM_POOL_DEBUG_CHECK(pool);
    note_block(pool, CM_EVENT_ALLOCATE, span, NULL);
    return span == NULL ? NULL : &span->block;
}

/* -- taking back ---------------------------------------------------------------------------- */
/* A block goes back to the heap at once if nothing runs on it, or if the order of one
 * stream protects it. Otherwise it goes into flight until the host has seen its work
 * end. */

bool
cm_pool_free_is_quick(const cm_pool *pool, cm_stream *const *uses, uint32_t use_count,
                      unsigned flags)
{
    if (flags != 0 || atomic_load_explicit(&pool->holds, memory_order_relaxed) == 0) {
        /* This block may be the last thing that keeps the pool alive, and ending a pool
         * waits. */
        return false;
    }
    return use_count == 0
           || (use_count == 1 && cm_kind_is_ordered(pool->config.kind)
               && !cm_stream_may_capture(uses[0]));
}

/* Give a span back to the heap. Until the work of `stream` has ended, only that stream
 * may have the span. `stream` is NULL if nothing worked on the span. Work that ran on
 * the span before it was handed out may still be running; the span's old tag and epoch
 * say so. If the caller has just recorded an event on the stream, `due` has the
 * stream's slot and the epoch that the event ends. Otherwise due.slot is 0. Returns
 * false, with nothing changed, if there is no free slot for the stream, or if work of
 * another stream may still run on the span. */
static bool
try_give(cm_pool *pool, cm_heap_span *span, cm_stream *stream, cm_due due)
{
    cm_spin_lock_take(&pool->lock);
    bool was_pending = span->epoch > pool->done[span->tag];
    if (stream != NULL) {
        due.slot = due.slot != 0 ? due.slot : cm_pool_slot_locked(pool, stream);
        if (due.slot == 0 || (was_pending && span->tag != due.slot)) {
            cm_spin_lock_give(&pool->lock);
            return false;
        }
        cm_pool_give_in_order_locked(pool, &due);
    }
    else if (was_pending) {
        due = (cm_due){span->tag, span->epoch};
    }
    cm_heap_view view = cm_pool_view_locked(pool, due.slot);
    cm_pool_take_back_locked(pool, span);
    cm_heap_give_ready(&pool->heap, span, due.slot, due.epoch, &view);
    cm_pool_raise(&pool->counters.peak_cached_nbytes, pool->heap.free_nbytes);
    leave(pool);
    return true;
}

bool
cm_pool_quick_free(cm_pool *pool, cm_block *block, cm_stream *const *uses,
                   uint32_t use_count)
{
    if (!cm_pool_free_is_quick(pool, uses, use_count, 0)
        || cm_runtime_is_forked(pool->rt)) {
        return false;
    }
    cm_heap_span *span = (cm_heap_span *)(void *)block;
    if (CM_UNLIKELY(atomic_load_explicit(&span->first_fork, memory_order_relaxed)
                    != 0)) {
        return false;
    }
    cm_stream *stream = use_count == 0 ? NULL : uses[0];
    note_block(pool, CM_EVENT_FREE, span, stream);
    return try_give(pool, span, stream, (cm_due){0, 0});
}

/* Do the same as try_give(), but also for a stream that other code may use. Such a
 * stream is first asked whether it captures. If it does, this returns false, since the
 * captured graph could use the memory whenever the graph runs. */
static bool
try_give_asking(cm_pool *pool, cm_heap_span *span, cm_stream *stream)
{
    cm_due due = {0, 0};
    bool asks = stream != NULL && cm_stream_may_capture(stream);
    return (stream == NULL || cm_kind_is_ordered(pool->config.kind))
           && (!asks
               || (cm_stream_is_kept(stream)
                   && cm_is_ok(cm_stream_check_not_capturing(stream))
                   && cm_pool_try_mark_foreign(pool, stream, &due)))
           && try_give(pool, span, stream, due);
}

/* Each block that waits for a fence counts as this many bytes more than it has, so that
 * a miss asks about many short blocks as it does about a few long ones. */
enum { FLIGHT_NBYTES = 16 << 10 };

/* Put a LIVE span into flight. `flight` is its node in the list of flights, and `held`
 * its node in the list of blocks that forked children hold. Each of the two may be
 * NULL. If this was the last live block of a pool that nobody holds, the pool ends. */
static void
give_to_flight(cm_pool *pool, cm_heap_span *span, cm_flight *flight, bool fenced,
               cm_list *held)
{
    cm_pool_counters *c = &pool->counters;
    cm_spin_lock_take(&pool->lock);
    cm_pool_take_back_locked(pool, span);
    span->state = CM_SPAN_FLIGHT;
    c->in_flight_count++;
    c->in_flight_nbytes += span->block.nbytes;
    pool->unasked_nbytes += fenced ? span->block.nbytes + FLIGHT_NBYTES : 0;
    cm_pool_note_peaks_locked(pool);
    if (flight != NULL) {
        cm_list_push_back(&pool->in_flight, &flight->node);
    }
    if (held != NULL) {
        cm_list_push_back(&pool->held_by_children, held);
    }
    leave(pool);
}

void
cm_pool_free(cm_pool *pool, cm_block *block, cm_stream *const *uses, uint32_t use_count,
             unsigned flags)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return;
    }
    cm_heap_span *span = (cm_heap_span *)(void *)block;
    /* If cm_pool_quick_free() was tried first, it may have recorded the free
     * already. */
    if (!span->was_noted) {
        note_block(pool, CM_EVENT_FREE, span, use_count == 0 ? NULL : uses[0]);
    }
    cm_list *held = NULL;
    if (CM_UNLIKELY(atomic_load_explicit(&span->first_fork, memory_order_relaxed) != 0)
        && cm_pool_try_hold_for_children(pool, span, flags, &held)) {
        give_to_flight(pool, span, NULL, false, held);
        return;
    }
    if (flags == 0 && use_count <= 1
        && try_give_asking(pool, span, use_count == 0 ? NULL : uses[0])) {
        return;
    }
    cm_flight *flight = cm_flight_create(pool, span, uses, use_count, flags);
    if (flight == NULL) {
        /* Nobody will find out when the block is idle, so it stays in flight until the
         * pool ends. */
        atomic_fetch_add(&pool->lost_count, 1);
    }
    give_to_flight(pool, span, flight, (flags & CM_POOL_FREE_FENCE) != 0, NULL);
}

const cm_pool_config *
cm_pool_get_config(const cm_pool *pool)
{
    return &pool->config;
}

void
cm_pool_set_number(cm_pool *pool, uint64_t number)
{
    pool->config.number = number;
}

/* -- checking --------------------------------------------------------------------------- */

/* Check those invariants in private.h that can be checked by counting. True if they
 * hold. */
static bool
check_locked(const cm_pool *pool)
{
    const cm_pool_counters *c = &pool->counters;
    cm_heap_sums sums[CM_SPAN_STATE_COUNT] = {{0, 0}};
    for (uint32_t i = 1; i < CM_EPOCHS_MAX; i++) {
        const cm_epochs *slot = &pool->epochs[i];
        if (pool->done[i] > slot->epoch
            || (slot->given_epoch > pool->done[i] && slot->stream == NULL)) {
            return false;
        }
    }
    return cm_heap_check(&pool->heap, sums) && c->live_count == sums[CM_SPAN_LIVE].count
           && c->live_nbytes == sums[CM_SPAN_LIVE].nbytes
           && c->in_flight_nbytes == sums[CM_SPAN_FLIGHT].nbytes
           && c->in_flight_count == sums[CM_SPAN_FLIGHT].count
           && (sums[CM_SPAN_BUSY].count != 0
               || c->reserved_nbytes
                      == c->live_nbytes + c->in_flight_nbytes + pool->heap.free_nbytes)
           && c->hit_count + c->miss_count == c->allocation_count
           && c->requested_nbytes <= c->live_nbytes
           && c->peak_live_nbytes >= c->live_nbytes
           && c->peak_reserved_nbytes >= cm_pool_held_nbytes(pool)
           && c->peak_in_flight_nbytes >= c->in_flight_nbytes
           && c->peak_cached_nbytes >= pool->heap.free_nbytes
           && c->peak_waste_nbytes >= c->live_nbytes - c->requested_nbytes;
}

bool
cm_pool_check(cm_pool *pool)
{
    cm_spin_lock_take(&pool->lock);
    bool good = check_locked(pool);
    cm_spin_lock_give(&pool->lock);
    return good;
}

uint64_t
cm_pool_room(cm_pool *pool)
{
    uint64_t left = cm_budget_room(pool->config.budget);
    if (left == UINT64_MAX) {
        return left;
    }
    /* Bytes by which a limit is exceeded have to go back first. */
    uint64_t excess = cm_budget_excess(pool->config.budget);
    cm_spin_lock_take(&pool->lock);
    uint64_t room = left + pool->heap.free_nbytes;
    cm_spin_lock_give(&pool->lock);
    return room > excess ? room - excess : 0;
}

/* -- peers --------------------------------------------------------------------------------- */
/* Other devices that may use a chunk are its peers. When a chunk is made it is opened
 * to all peers that have a context at that moment. The functions here open it to peers
 * that got their context later. */

/* Open all chunks to all peers that have a context by now. Only the grower calls this,
 * inside a cm_scope. No other thread may change which chunk is where. */
static cm_status
admit(cm_pool *pool)
{
    const cm_arena *range = pool->range;
    uint64_t count = range->nbytes / range->granule;
    cm_status first = cm_ok();
    for (uint64_t i = 0; i < count; i++) {
        const cm_chunk *chunk = range->chunk_at[i];
        if (chunk != NULL && !chunk->is_unmapped
            && (i == 0 || range->chunk_at[i - 1] != chunk)) {
            first = cm_first_failure(
                first, pool->source->ops->admit_peers(pool->source, chunk));
        }
    }
    return first;
}

cm_status
cm_pool_admit_peers(cm_pool *pool)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    uint64_t others =
        cm_devices_in_use(pool->rt, false) & ~(UINT64_C(1) << pool->config.device);
    if (!cm_kind_is_on_device(pool->config.kind) || (others & ~pool->admitted) == 0) {
        return cm_ok(); /* this common case waits for nobody */
    }
    cm_status status = cm_ok();
    cm_mutex_lock(&pool->growing);
    if (pool->range != NULL && (others & pool->source->peers & ~pool->admitted) != 0) {
        status = CM_IN_SCOPE(pool->rt, pool->config.device, admit(pool));
    }
    if (cm_is_ok(status)) {
        /* Chunks that are made from now on are open to these peers at once. */
        pool->admitted |= others;
    }
    cm_mutex_unlock(&pool->growing);
    return status;
}

/* -- counters and peaks -------------------------------------------------------------------- */

/* Return the bytes that are reserved but neither live nor in flight. They are free, or
 * just on their way between the heap and the runtime. */
static uint64_t
cached_nbytes(const cm_pool_counters *c)
{
    return c->reserved_nbytes - c->live_nbytes - c->in_flight_nbytes;
}

bool
cm_pool_fits_after_flight(cm_pool *pool, uint64_t nbytes)
{
    const cm_pool_counters *counters = &pool->counters;
    cm_spin_lock_take(&pool->lock);
    bool is_behind =
        counters->in_flight_nbytes >= nbytes && cached_nbytes(counters) < nbytes;
    cm_spin_lock_give(&pool->lock);
    return is_behind;
}

/* Copy the counters to *out, and compute the ones that are not kept in `counters`. */
static void
read_locked(cm_pool *pool, cm_pool_counters *out)
{
    /* A value that a caller sees counts for the peak, even if some of the memory was
     * only on its way between the heap and the runtime. */
    cm_pool_raise(&pool->counters.peak_cached_nbytes, cached_nbytes(&pool->counters));
    *out = pool->counters;
    out->cached_nbytes = cached_nbytes(&pool->counters);
    out->reserved_nbytes -= out->asleep_nbytes;
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    cm_heap_pieces runs = cm_heap_count_pieces(&pool->heap, &view);
    out->cached_count = runs.count;
    out->largest_free_nbytes = runs.largest_nbytes;
    out->split_count = pool->heap.split_count;
    out->merge_count = pool->heap.merge_count;
    out->segment_count = pool->heap.arena_count;
    out->lost_count = atomic_load(&pool->lost_count);
}

static void
raise_peaks(cm_pool_counters *peaks, const cm_pool_counters *others)
{
#define RAISE_PEAK(name) cm_pool_raise(&peaks->name, others->name);
    CM_POOL_PEAKS(RAISE_PEAK)
#undef RAISE_PEAK
}

/* Begin the peaks in `counters` anew, from the present values. There are two sets of
 * older peaks (private.h). `own` is the set of the reader that begins anew, and is
 * cleared. The peaks so far are merged into `other`, the set of the other reader. */
static void
begin_peaks_locked(cm_pool *pool, cm_pool_counters *other, cm_pool_counters *own)
{
    raise_peaks(other, &pool->counters);
    *own = (cm_pool_counters){0};
#define CLEAR_PEAK(name) pool->counters.name = 0;
    CM_POOL_PEAKS(CLEAR_PEAK)
#undef CLEAR_PEAK
    cm_pool_note_peaks_locked(pool);
}

void
cm_pool_read(cm_pool *pool, cm_pool_counters *out)
{
    cm_spin_lock_take(&pool->lock);
    read_locked(pool, out);
    raise_peaks(out, &pool->peaks_before);
    cm_spin_lock_give(&pool->lock);
}

void
cm_pool_read_window(cm_pool *pool, cm_pool_counters *out)
{
    cm_spin_lock_take(&pool->lock);
    read_locked(pool, out);
    raise_peaks(out, &pool->window_peaks);
    begin_peaks_locked(pool, &pool->peaks_before, &pool->window_peaks);
    cm_spin_lock_give(&pool->lock);
}

void
cm_pool_reset_peaks(cm_pool *pool)
{
    cm_spin_lock_take(&pool->lock);
    begin_peaks_locked(pool, &pool->window_peaks, &pool->peaks_before);
    cm_spin_lock_give(&pool->lock);
}

/* -- listing ------------------------------------------------------------------------------- */

/* Write the rows of a listing, and return the end of what was written. Neighbouring
 * free spans that could join now are one row. */
static cm_block_row *
write_rows_locked(const cm_pool *pool, cm_block_row *rows)
{
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    uint32_t segment = 0;
    const cm_list *arenas = &pool->heap.arenas;
    for (const cm_list *n = arenas->next; n != arenas; n = n->next, segment++) {
        for (const cm_heap_span *s = CM_LIST_ENTRY(n, cm_arena, node)->first; s;
             s = s->next) {
            bool held = s->state == CM_SPAN_LIVE || s->state == CM_SPAN_FLIGHT;
            bool is_listed = s->state <= CM_SPAN_GAP;
            cm_block_row *row = rows++;
            *row =
                (cm_block_row){segment,
                               s->block.address,
                               s->block.host,
                               s->block.nbytes,
                               held ? s->requested_nbytes : 0,
                               is_listed ? (cm_block_state)s->state : CM_BLOCK_CACHED};
            if (cm_span_is_free(s)) {
                s = cm_heap_follow_piece(s, &view, &row->nbytes);
            }
        }
    }
    return rows;
}

cm_status
cm_pool_list(cm_pool *pool, cm_block_row **out, uint64_t *count)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_block_row *rows = NULL;
    /* Rows cannot be allocated under the lock, so count the nodes, allocate, and start
     * again if there are more nodes by then. */
    for (uint64_t room = 0;;) {
        cm_spin_lock_take(&pool->lock);
        bool enough = rows != NULL && pool->heap.node_count <= room;
        room = pool->heap.node_count;
        if (enough) {
            *count = (uint64_t)(write_rows_locked(pool, rows) - rows);
        }
        cm_spin_lock_give(&pool->lock);
        if (enough) {
            *out = rows;
            return cm_ok();
        }
        free(rows);
        rows = malloc((room + 1) * sizeof(*rows));
        CM_TRY(cm_allocated(rows != NULL, (room + 1) * sizeof(*rows)));
    }
}
