/* SPDX-License-Identifier: Apache-2.0 */
/* Less memory: whole free chunks go back to the runtime. */
#include <stdlib.h>

#include "pool/private.h"
#include "pool/scope.h"

enum { TRIM_BATCH = 64 };

/* A chunk on its way out: `span` is BUSY and exactly the chunk. */
typedef struct leaving {
    cm_heap_span *span;
    cm_chunk *chunk; /* borrowed of the arena, or owned: a placed one */
} leaving;

/* Chunks of the placed range inside a free span, while more than `keep_nbytes` stay. */
static uint32_t
take_placed_locked(cm_pool *pool, cm_heap_span *span, uint64_t keep_nbytes,
                   leaving *out, uint32_t room)
{
    const cm_arena *range = pool->range;
    uint32_t count = 0;
    cm_address begin = span->block.address;
    cm_address at = cm_span_end(span) / range->granule * range->granule;
    while (count < room && at > begin) {
        cm_chunk *chunk = range->chunk_at[(at - range->base) / range->granule - 1];
        at = chunk->address;
        if (at < begin || at + chunk->nbytes > cm_span_end(span)
            || pool->heap.free_nbytes < keep_nbytes + chunk->nbytes) {
            continue;
        }
        bool at_start = at == begin;
        cm_heap_span *cut = cm_heap_carve(&pool->heap, span, at, chunk->nbytes);
        if (cut == NULL) {
            break;
        }
        out[count++] = (leaving){cut, chunk};
        if (at_start) {
            break;
        }
    }
    return count;
}

/* The longest segment that is free from end to end and may go: what stays cached is
 * then the short ones, which are what small blocks need. NULL: there is none. */
static cm_heap_span *
find_segment_locked(const cm_pool *pool, uint64_t keep_nbytes, const cm_heap_view *view)
{
    cm_heap_span *longest = NULL;
    const cm_list *arenas = &pool->heap.arenas;
    for (const cm_list *n = arenas->next; n != arenas; n = n->next) {
        const cm_arena *arena = CM_LIST_ENTRY(n, cm_arena, node);
        cm_heap_span *s = arena->first;
        if (arena != pool->range && s->state == CM_SPAN_FREE
            && s->block.nbytes == arena->nbytes && cm_span_is_clean(s, view)
            && pool->heap.free_nbytes >= keep_nbytes + arena->nbytes
            && (longest == NULL || arena->nbytes > longest->block.nbytes)) {
            longest = s;
        }
    }
    return longest;
}

static uint32_t
take_leaving_locked(cm_pool *pool, uint64_t keep_nbytes, leaving *out)
{
    uint32_t count = 0;
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    cm_heap_span *s = pool->range != NULL ? pool->range->first : NULL;
    for (; s != NULL && count < TRIM_BATCH; s = s->next) {
        if (s->state == CM_SPAN_FREE && cm_span_is_clean(s, &view)) {
            count += take_placed_locked(pool, s, keep_nbytes, out + count,
                                        TRIM_BATCH - count);
        }
    }
    while (count < TRIM_BATCH
           && (s = find_segment_locked(pool, keep_nbytes, &view)) != NULL) {
        cm_arena *arena = s->arena;
        out[count++] = (leaving){
            cm_heap_carve(&pool->heap, s, arena->base, arena->nbytes), &arena->chunk};
    }
    return count;
}

cm_status
cm_pool_release_chunks(cm_pool *pool, uint64_t keep_nbytes, uint64_t *released_nbytes)
{
    cm_status first = cm_ok();
    uint32_t count = TRIM_BATCH;
    /* A refused chunk would be found again: one failure ends the search. */
    while (count == TRIM_BATCH && cm_is_ok(first)) {
        leaving batch[TRIM_BATCH];
        cm_fast_lock_take(&pool->lock);
        cm_heap_view view = cm_pool_view_locked(pool, 0);
        cm_heap_settle(&pool->heap, &view);
        (void)cm_heap_join(&pool->heap, &view);
        count = take_leaving_locked(pool, keep_nbytes, batch);
        cm_fast_lock_give(&pool->lock);
        for (uint32_t i = 0; i < count; i++) {
            cm_status status = cm_pool_close_chunk(pool, batch[i].span, batch[i].chunk,
                                                   released_nbytes);
            first = cm_is_ok(first) ? status : first;
        }
    }
    return first;
}

static cm_status
trim(cm_pool *pool, uint64_t keep_nbytes, uint64_t *released_nbytes)
{
    cm_status status = cm_ok();
    cm_pool_begin_growing(pool);
    if (pool->source != NULL) {
        cm_scope scope;
        status = cm_scope_enter(pool->rt, pool->config.device, &scope);
        if (cm_is_ok(status)) {
            status = cm_pool_release_chunks(pool, keep_nbytes, released_nbytes);
            cm_scope_leave(&scope);
        }
    }
    cm_pool_end_growing(pool);
    cm_fast_lock_take(&pool->lock);
    pool->counters.trim_count++;
    pool->counters.trimmed_nbytes += *released_nbytes;
    cm_fast_lock_give(&pool->lock);
    return status;
}

cm_status
cm_pool_trim(cm_pool *pool, uint64_t keep_nbytes, bool wait, uint64_t *released_nbytes)
{
    *released_nbytes = 0;
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_status first = cm_pool_poll(pool, wait ? CM_POLL_WAIT : CM_POLL_LOOK, true);
    if (cm_pool_begin_poll(pool, wait)) {
        cm_pool_drop_slots(pool, false);
        cm_pool_end_poll(pool);
    }
    cm_status status = trim(pool, keep_nbytes, released_nbytes);
    CM_POOL_DEBUG_CHECK(pool);
    return cm_is_ok(first) ? status : first;
}

static bool
is_window_over_locked(const cm_pool *pool)
{
    return pool->config.idle_trim_ns != 0
           && cm_now_ns() - pool->window_ns >= pool->config.idle_trim_ns;
}

void
cm_pool_trim_idle(cm_pool *pool)
{
    cm_fast_lock_take(&pool->lock);
    bool over = is_window_over_locked(pool);
    cm_fast_lock_give(&pool->lock);
    if (!over) {
        return;
    }
    /* Only what is seen to have ended can go, and a free span is as new as the last
     * small block that was cut from it. */
    cm_status looked = cm_pool_poll(pool, CM_POLL_LOOK, false);
    (void)looked; /* never fails */
    cm_fast_lock_take(&pool->lock);
    over = is_window_over_locked(pool); /* another thread may have been here */
    bool first = pool->window_ns == 0;
    uint64_t cached = pool->heap.free_nbytes;
    uint64_t unused = pool->window_cached < cached ? pool->window_cached : cached;
    if (over) {
        pool->window_ns = cm_now_ns();
        pool->window_cached = cached;
    }
    cm_fast_lock_give(&pool->lock);
    if (over && !first && unused > 0) {
        uint64_t released_nbytes = 0;
        cm_status refused = trim(pool, cached - unused, &released_nbytes);
        (void)refused; /* counted as lost; a trim() that is asked for will tell */
    }
}

void
cm_pool_set_idle_trim(cm_pool *pool, uint64_t ns)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return;
    }
    cm_fast_lock_take(&pool->lock);
    pool->config.idle_trim_ns = ns;
    pool->window_ns = 0; /* the first window begins with the next allocation */
    cm_fast_lock_give(&pool->lock);
}
