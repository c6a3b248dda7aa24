/* SPDX-License-Identifier: Apache-2.0 */
/* More memory: how much at once, what it counts against, and whole segments where the
 * source cannot put chunks side by side. */
#include "base/checked_math.h"
#include "pool/pool_private.h"

/* What is taken beyond the need, so that many small requests are few growths. Where
 * chunks join up: a share of what is held while growths come close together, more while
 * little is held, and almost nothing later, when a growth is rare and what is held soon
 * at its peak. Where every chunk is a segment of its own: a greater share, up to a
 * bound. */
#define HURRIED_SHARE 32
#define EARLY_SHARE 8
#define EARLY_GRANULES 4
#define CALM_SHARE 320
#define SEGMENT_SHARE 16
#define SEGMENT_STEP_MIN (UINT64_C(2) << 20)
#define SEGMENT_STEP_MAX (UINT64_C(64) << 20)

/* Memory that work is late with comes back by itself: so much less is taken. */
static uint64_t
placed_step(const cm_pool *pool)
{
    uint64_t reserved = pool->counters.reserved_nbytes;
    uint64_t in_flight = pool->counters.in_flight_nbytes;
    uint64_t calm = reserved / CALM_SHARE;
    uint64_t step = reserved / HURRIED_SHARE;
    uint64_t early = reserved / EARLY_SHARE;
    uint64_t most = EARLY_GRANULES * pool->source->granule;
    early = early < most ? early : most;
    step = step > early ? step : early;
    return pool->hurried && step > calm + in_flight ? step - in_flight : calm;
}

static uint64_t
segment_step(const cm_pool *pool)
{
    uint64_t step = pool->counters.reserved_nbytes / SEGMENT_SHARE;
    return step < SEGMENT_STEP_MIN   ? SEGMENT_STEP_MIN
           : step > SEGMENT_STEP_MAX ? SEGMENT_STEP_MAX
                                     : step;
}

uint64_t
cm_pool_growth_step(const cm_pool *pool, uint64_t size)
{
    uint64_t step = pool->source->is_placed ? placed_step(pool) : segment_step(pool);
    return cm_round_up_to(size > step ? size : step, pool->source->granule);
}

bool
cm_pool_try_charge(cm_pool *pool, uint64_t nbytes)
{
    return pool->config.budget == NULL
           || cm_budget_try_charge(pool->config.budget, nbytes);
}

void
cm_pool_refund(cm_pool *pool, uint64_t nbytes)
{
    if (pool->config.budget != NULL) {
        cm_budget_refund(pool->config.budget, nbytes);
    }
}

void
cm_pool_count_reserved_locked(cm_pool *pool, uint64_t nbytes)
{
    cm_pool_counters *c = &pool->counters;
    c->reserved_nbytes += nbytes;
    if (c->reserved_nbytes > c->peak_reserved_nbytes) {
        c->peak_reserved_nbytes = c->reserved_nbytes;
    }
}

/* -- one chunk, one segment ------------------------------------------------------------- */

static cm_status
add_segment(cm_pool *pool, const cm_chunk *chunk, uint64_t size, cm_span **out)
{
    cm_fast_lock_take(&pool->lock);
    cm_arena *arena = cm_heap_add_chunk(&pool->heap, chunk);
    if (arena != NULL) {
        cm_span *span = cm_heap_carve(&pool->heap, arena->first, chunk->address, size);
        if (span != NULL) {
            cm_pool_count_reserved_locked(pool, chunk->nbytes);
            cm_pool_note_cached_locked(pool);
        }
        else {
            cm_heap_remove_arena(&pool->heap, arena);
            arena = NULL;
        }
        *out = span;
    }
    cm_fast_lock_give(&pool->lock);
    return arena != NULL ? cm_ok() : cm_fail(CM_ENOMEM, sizeof(*arena));
}

static cm_status
grow_segment(cm_pool *pool, uint64_t size, uint64_t nbytes, cm_span **out)
{
    if (!cm_pool_try_charge(pool, nbytes)) {
        return cm_fail(CM_ELIMIT, nbytes);
    }
    cm_chunk chunk;
    cm_status status = pool->source->ops->open_chunk(pool->source, 0, nbytes, &chunk);
    if (cm_is_ok(status)) {
        status = add_segment(pool, &chunk, size, out);
        if (!cm_is_ok(status)) {
            cm_status closed = pool->source->ops->close_chunk(pool->source, &chunk);
            if (!cm_is_ok(closed)) {
                atomic_fetch_add(&pool->lost_count, 1);
            }
        }
    }
    if (!cm_is_ok(status)) {
        cm_pool_refund(pool, nbytes);
    }
    return status;
}

/* The first growth: find out where memory comes from. */
static cm_status
open_source(cm_pool *pool)
{
    const cm_pool_config *config = &pool->config;
    cm_source_config wanted = {.kind = config->kind,
                               .device = config->device,
                               .flags = config->flags,
                               .segments = config->segments,
                               .numa_node = config->numa_node};
    cm_source *source = NULL;
    CM_TRY(cm_source_open(pool->rt, &wanted, &source));
    if (source->is_placed) {
        cm_fast_lock_take(&pool->lock);
        pool->range = cm_heap_add_range(&pool->heap, source->base, source->range_nbytes,
                                        source->granule);
        cm_fast_lock_give(&pool->lock);
        if (pool->range == NULL) {
            source->ops->destroy(source);
            return cm_fail(CM_ENOMEM, source->range_nbytes / source->granule);
        }
    }
    if (config->kind == CM_KIND_PINNED || config->kind == CM_KIND_MAPPED) {
        cm_status status = cm_pool_watch_forks(pool);
        if (!cm_is_ok(status)) {
            source->ops->destroy(source);
            return status;
        }
    }
    pool->source = source;
    return cm_ok();
}

cm_status
cm_pool_grow(cm_pool *pool, uint64_t size, const cm_stream *stream, cm_span **out)
{
    if (pool->source == NULL) {
        CM_TRY(open_source(pool));
    }
    if (size > INT64_MAX - pool->source->granule) {
        return cm_fail(CM_EOVERFLOW, size);
    }
    if (pool->source->is_placed) {
        return cm_pool_grow_placed(pool, size, stream, out);
    }
    uint64_t step = cm_pool_growth_step(pool, size);
    uint64_t least = cm_round_up_to(size, pool->source->granule);
    cm_status status = grow_segment(pool, size, step, out);
    if (cm_pool_is_short(status) && step > least) {
        status = grow_segment(pool, size, least, out);
    }
    return status;
}
