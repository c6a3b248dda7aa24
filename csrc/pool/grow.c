/* SPDX-License-Identifier: Apache-2.0 */
/* More memory. Where every chunk is a segment of its own that is one call, for somewhat
 * more than is needed. Where chunks can be put anywhere in one range of addresses just
 * what is missing is brought: the heap says where the request goes (cm_hole), free
 * chunks from elsewhere are moved there, those that fit nowhere are given back, and
 * only then new ones are made. So what is held is what blocks lie in, to the granule,
 * but for chunks of several granules that a block keeps in place. A move costs as much
 * as making a chunk (about 35 us on an H200, whatever its size) and holds no more. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "base/nvtx.h"
#include "pool/private.h"
#include "runtime/scope.h"

enum {
    CHUNK_SHARE = 500, /* a new chunk is at most this part of what is held */
    TIDY_TAKES = 300   /* blocks rather go into holes, after memory was made */
};

/* What is taken beyond the need where every chunk is a segment of its own, so that many
 * small requests are few growths: a share of what is held, up to a bound. */
#define SEGMENT_SHARE 16
#define SEGMENT_STEP_MIN (UINT64_C(2) << 20)
#define SEGMENT_STEP_MAX (UINT64_C(64) << 20)

/* -- chunks that nobody uses ------------------------------------------------------------ */

/* One that was taken out of the heap, to be moved or closed. */
typedef struct idle_chunk {
    cm_chunk *chunk;
    cm_heap_span *span; /* BUSY and exactly the chunk; NULL: it has left there */
    cm_heap_span *to;   /* BUSY and without memory: where it is to be moved */
} idle_chunk;

typedef struct idle_chunks {
    idle_chunk *items;
    uint32_t count;
    uint32_t room;
    bool to_move;           /* else to close */
    uint64_t nbytes;        /* of all */
    uint64_t enough_nbytes; /* none is taken once there are so many, */
    uint64_t most_nbytes;   /* nor one that would make them more than this */
} idle_chunks;

/* Take the chunks of the range that lie wholly in a free span out of it. False: no more
 * are wanted, or there is no memory for that. */
static bool
take_chunks_locked(cm_pool *pool, idle_chunks *idle, cm_heap_span *span)
{
    const cm_arena *range = pool->range;
    uint64_t granule = range->granule;
    bool upwards = idle->to_move && span->prev != NULL
                   && span->prev->state == CM_SPAN_GAP
                   && !(span->next != NULL && span->next->state == CM_SPAN_GAP);
    cm_address low = span->block.address;
    cm_address end = cm_span_end(span);
    cm_address from = cm_round_up_to(low, granule);
    cm_address to = end / granule * granule;
    while (from < to) {
        if (idle->count == idle->room || idle->nbytes >= idle->enough_nbytes) {
            return false;
        }
        cm_address at = upwards ? from : to - granule;
        cm_chunk *chunk = range->chunk_at[(at - range->base) / granule];
        from = upwards ? chunk->address + chunk->nbytes : from;
        to = upwards ? to : chunk->address;
        if (chunk->address < low || chunk->address + chunk->nbytes > end
            || idle->nbytes + chunk->nbytes > idle->most_nbytes
            || (idle->to_move && chunk->handle == 0)) {
            continue;
        }
        while (cm_span_end(span) <= chunk->address) {
            span = span->next; /* the rest of what it was */
        }
        while (span->block.address > chunk->address) {
            span = span->prev;
        }
        span = cm_heap_carve(&pool->heap, span, chunk->address, chunk->nbytes);
        if (span == NULL) {
            return false;
        }
        idle->items[idle->count++] = (idle_chunk){chunk, span, NULL};
        idle->nbytes += chunk->nbytes;
    }
    return true;
}

/* NULL: no memory is there. */
static cm_chunk *
chunk_of(const cm_heap_span *span)
{
    const cm_arena *range = span->arena;
    return range->chunk_at[(span->block.address - range->base) / range->granule];
}

static void
set_chunk_of(const cm_heap_span *span, cm_chunk *chunk)
{
    const cm_arena *range = span->arena;
    uint64_t first = (span->block.address - range->base) / range->granule;
    for (uint64_t i = 0; i < span->block.nbytes / range->granule; i++) {
        range->chunk_at[first + i] = chunk;
    }
}

/* The memory of a chunk is gone, which was that of the BUSY `span`. */
static void
forget_chunk(cm_pool *pool, cm_heap_span *span, cm_chunk *chunk)
{
    uint64_t nbytes = span->block.nbytes;
    cm_block block = span->block; /* the span ends here */
    cm_spin_lock_take(&pool->lock);
    if (span->arena == pool->range) {
        set_chunk_of(span, NULL);
        cm_heap_give_gap(&pool->heap, span);
        free(chunk);
    }
    else {
        cm_heap_remove_arena(&pool->heap, span->arena); /* with its chunk */
    }
    pool->counters.reserved_nbytes -= nbytes;
    uint64_t left_nbytes = pool->counters.reserved_nbytes;
    cm_spin_lock_give(&pool->lock);
    cm_budget_refund(pool->config.budget, nbytes);
    if (cm_recorder_is_on()) {
        cm_pool_note(pool, CM_EVENT_TRIM, &block, nbytes, left_nbytes, NULL);
    }
}

/* Give one back; where that is refused it is free memory again. */
static cm_status
close_chunk(cm_pool *pool, idle_chunk idle, uint64_t *released_nbytes)
{
    uint64_t nbytes = idle.chunk->nbytes;
    cm_status status = pool->source->ops->close_chunk(pool->source, idle.chunk);
    if (cm_is_ok(status)) {
        forget_chunk(pool, idle.span, idle.chunk);
        *released_nbytes += nbytes;
        return status;
    }
    cm_spin_lock_take(&pool->lock);
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    (void)cm_heap_give(&pool->heap, idle.span, 0, 0, &view);
    cm_pool_note_peaks_locked(pool); /* they may have begun anew meanwhile */
    cm_spin_lock_give(&pool->lock);
    atomic_fetch_add(&pool->lost_count, 1);
    return status;
}

/* -- a place, and what goes there ------------------------------------------------------------ */
/* Free chunks from elsewhere, whose memory is moved there, and new ones. */

typedef struct place_plan {
    cm_hole at;
    cm_heap_span *first; /* of those that are held: BUSY and side by side */
    uint32_t held_count;
    idle_chunks idle;
    uint32_t moved_count; /* of them: that have a place to go; the others go back */
    cm_heap_span **bare;  /* held, without memory: each is to be a new chunk */
    uint32_t bare_count;
    uint32_t made_count;    /* of them, by now */
    uint64_t create_nbytes; /* of the bare ones */
    uint64_t made_nbytes;   /* of those made; reserved once the plan settles */
    uint32_t tag;           /* of the place's free spans */
    uint64_t epoch;
} place_plan;

static void
fini_plan(place_plan *plan)
{
    free(plan->idle.items);
    free(plan->bare);
}

/* The free spans of the place stay out of everyone's hands meanwhile, as do those parts
 * of its gaps that will be filled. False: no memory. */
static bool
hold_place_locked(cm_pool *pool, place_plan *plan, uint64_t size,
                  const cm_heap_view *view)
{
    uint64_t granule = pool->source->granule;
    cm_address low = plan->at.begin / granule * granule;
    cm_address high = cm_round_up_to(plan->at.begin + size, granule);
    cm_heap_span *span = plan->at.first;
    for (; plan->held_count < plan->at.span_count; span = span->next) {
        cm_address from = span->block.address;
        cm_address to = cm_span_end(span);
        if (span->state == CM_SPAN_GAP) {
            from = from > low ? from : low;
            to = to < high ? to : high;
        }
        else if (!cm_span_is_clean(span, view)) {
            plan->tag = span->tag;
            plan->epoch = span->epoch > plan->epoch ? span->epoch : plan->epoch;
        }
        span = cm_heap_carve(&pool->heap, span, from, to - from);
        if (span == NULL) {
            return false;
        }
        plan->first = plan->held_count++ == 0 ? span : plan->first;
    }
    return true;
}

/* From the longest spans first: those leave the fewest odd ends. Only what the host has
 * seen idle can be moved. */
static void
choose_moves_locked(cm_pool *pool, place_plan *plan, const cm_heap_view *view)
{
    for (uint32_t bin = CM_HEAP_BIN_COUNT; bin-- > 0;) {
        cm_list *list = &pool->heap.bins[bin];
        for (cm_list *n = list->next, *next; n != list; n = next) {
            cm_heap_span *span = CM_LIST_ENTRY(n, cm_heap_span, node);
            next = n->next; /* what is left of this one is shorter than a chunk */
            if (span->block.nbytes < pool->source->granule
                || (cm_span_is_clean(span, view)
                    && !take_chunks_locked(pool, &plan->idle, span))) {
                return;
            }
        }
    }
}

static int
compare_lengths(const void *a, const void *b)
{
    uint64_t x = ((const idle_chunk *)a)->chunk->nbytes;
    uint64_t y = ((const idle_chunk *)b)->chunk->nbytes;
    return (x < y) - (x > y);
}

/* Each chunk costs a call, but can leave only when all of it is free: kept small
 * against the whole. */
static uint64_t
longest_chunk(const cm_pool *pool, const place_plan *plan, uint64_t nbytes)
{
    uint64_t granule = pool->source->granule;
    uint64_t held = pool->counters.reserved_nbytes + plan->create_nbytes;
    uint64_t most = (held + nbytes) / CHUNK_SHARE / granule * granule;
    return most < granule ? granule : most;
}

/* Cut what is held of a gap for new chunks. False: no memory. */
static bool
cut_bare_locked(cm_pool *pool, place_plan *plan, cm_heap_span *gap)
{
    uint64_t most = longest_chunk(pool, plan, gap->block.nbytes);
    plan->create_nbytes += gap->block.nbytes;
    plan->bare[plan->bare_count++] = gap;
    while (gap->block.nbytes > most) {
        gap = cm_heap_cut(&pool->heap, gap, most);
        if (gap == NULL) {
            return false;
        }
        plan->held_count++;
        plan->bare[plan->bare_count++] = gap;
    }
    return true;
}

/* Cut what is held of a gap, from its lowest address on, for the chunks that go there,
 * the longest first; what is left over is bare. False: no memory. */
static bool
assign_moves_locked(cm_pool *pool, place_plan *plan, cm_heap_span *gap)
{
    idle_chunk *items = plan->idle.items;
    for (uint32_t i = plan->moved_count; i < plan->idle.count && gap != NULL; i++) {
        idle_chunk idle = items[i];
        if (idle.chunk->nbytes > gap->block.nbytes) {
            continue;
        }
        idle.to = gap;
        gap = NULL;
        if (idle.chunk->nbytes < idle.to->block.nbytes) {
            gap = cm_heap_cut(&pool->heap, idle.to, idle.chunk->nbytes);
            if (gap == NULL) {
                return false;
            }
            plan->held_count++;
        }
        items[i] = items[plan->moved_count];
        items[plan->moved_count++] = idle;
    }
    return gap == NULL || cut_bare_locked(pool, plan, gap);
}

/* Those that fit nowhere go back for the new ones, as far as that takes them all. */
static void
drop_unneeded_locked(cm_pool *pool, place_plan *plan, const cm_heap_view *view)
{
    idle_chunks *idle = &plan->idle;
    uint64_t spare_nbytes = idle->nbytes;
    for (uint32_t i = 0; i < plan->moved_count; i++) {
        spare_nbytes -= idle->items[i].chunk->nbytes;
    }
    while (idle->count > plan->moved_count) {
        const idle_chunk *last = &idle->items[idle->count - 1];
        spare_nbytes -= last->chunk->nbytes;
        if (spare_nbytes < plan->create_nbytes) {
            break;
        }
        (void)cm_heap_give(&pool->heap, last->span, 0, 0, view);
        idle->count--;
    }
}

/* What of the place has memory becomes free, the rest is a gap. Returns the span that
 * covers the whole place if all of it has memory, which is one before its neighbours
 * join: one that a stream is late with could join a part of it only. */
static cm_heap_span *
settle_place_locked(cm_pool *pool, place_plan *plan, const cm_heap_view *view)
{
    cm_heap *heap = &pool->heap;
    for (uint32_t i = 0; i < plan->idle.count; i++) {
        if (plan->idle.items[i].span != NULL) {
            (void)cm_heap_give(heap, plan->idle.items[i].span, 0, 0, view);
        }
    }
    cm_heap_span *whole = NULL;
    cm_heap_span *next = plan->first;
    for (; plan->held_count > 0; plan->held_count--) {
        cm_heap_span *span = next;
        bool has_memory = chunk_of(span) != NULL;
        while (has_memory && plan->held_count > 1 && chunk_of(span->next) != NULL) {
            cm_heap_join_next(heap, span);
            plan->held_count--;
        }
        next = span->next; /* BUSY: it is not joined before its turn */
        if (has_memory) {
            whole = cm_heap_give(heap, span, plan->tag, plan->epoch, view);
        }
        else {
            cm_heap_give_gap(heap, span);
        }
    }
    return whole;
}

/* Fill in the plan and take all that it needs out of the heap. Fails: CM_ENOMEM, no
 * addresses; nothing is held then. */
static cm_status
plan_place_locked(cm_pool *pool, uint64_t size, const cm_heap_view *view,
                  place_plan *plan)
{
    uint64_t granule = pool->source->granule;
    *plan = (place_plan){0};
    cm_heap_settle(&pool->heap, view);
    cm_heap_find_hole(&pool->heap, size, cm_pool_align_of(pool, size), view, true,
                      &plan->at);
    if (plan->at.first == NULL) {
        /* No addresses are left, so there could not be memory for all of them either,
         * unless a limit says so before. */
        if (!cm_budget_try_charge(pool->config.budget, size)) {
            return cm_fail(CM_ELIMIT, size);
        }
        cm_budget_refund(pool->config.budget, size);
        return (cm_status){CM_CUDA_OUT_OF_MEMORY, CM_OP_physical_create, 0, size};
    }
    uint64_t missing = plan->at.missing;
    plan->idle = (idle_chunks){.items = calloc(missing, sizeof(idle_chunk)),
                               .room = (uint32_t)missing,
                               .to_move = true,
                               .enough_nbytes = missing * granule,
                               .most_nbytes = UINT64_MAX};
    plan->bare = calloc(missing, sizeof(cm_heap_span *));
    bool good = plan->idle.items != NULL && plan->bare != NULL
                && hold_place_locked(pool, plan, size, view);
    if (good) {
        choose_moves_locked(pool, plan, view);
        qsort(plan->idle.items, plan->idle.count, sizeof(idle_chunk), compare_lengths);
    }
    cm_heap_span *span = plan->first;
    for (uint32_t left = plan->held_count; good && left > 0; left--) {
        cm_heap_span *next = span->next;
        good = chunk_of(span) != NULL || assign_moves_locked(pool, plan, span);
        span = next;
    }
    if (!good) {
        (void)settle_place_locked(pool, plan, view);
        return cm_fail(CM_ENOMEM, missing * sizeof(idle_chunk));
    }
    drop_unneeded_locked(pool, plan, view);
    return cm_ok();
}

/* -- the calls that bring it --------------------------------------------------------------- */

/* One that can neither be moved nor put back is lost, and a gap where it was. */
static cm_status
move_chunk(cm_pool *pool, idle_chunk *idle)
{
    cm_chunk *chunk = idle->chunk;
    cm_status status = pool->source->ops->move_chunk(
        pool->source, chunk, idle->to->block.address - pool->range->base);
    if (cm_is_ok(status)) {
        set_chunk_of(idle->span, NULL);
        set_chunk_of(idle->to, chunk);
        cm_spin_lock_take(&pool->lock);
        cm_heap_give_gap(&pool->heap, idle->span);
        pool->counters.remap_count++;
        pool->counters.remap_nbytes += chunk->nbytes;
        cm_spin_lock_give(&pool->lock);
        idle->span = NULL;
    }
    else if (chunk->address == 0) {
        forget_chunk(pool, idle->span, chunk);
        idle->span = NULL;
    }
    return status;
}

/* Make the next of the new chunks. */
static cm_status
make_chunk(cm_pool *pool, place_plan *plan)
{
    const cm_heap_span *span = plan->bare[plan->made_count];
    uint64_t nbytes = span->block.nbytes;
    uint64_t offset = span->block.address - pool->range->base;
    cm_chunk *chunk = calloc(1, sizeof(*chunk));
    CM_TRY(cm_allocated(chunk != NULL, sizeof(*chunk)));
    cm_status status =
        pool->source->ops->open_chunk(pool->source, offset, nbytes, chunk);
    if (!cm_is_ok(status)) {
        free(chunk);
        return status;
    }
    set_chunk_of(span, chunk);
    plan->made_count++;
    plan->made_nbytes += nbytes;
    return status;
}

/* A request that fails leaves nothing behind: what was made for it goes back. What the
 * driver refuses to take stays, as free memory. */
static void
close_made(cm_pool *pool, place_plan *plan)
{
    while (plan->made_count > 0) {
        const cm_heap_span *span = plan->bare[--plan->made_count];
        cm_chunk *chunk = chunk_of(span);
        if (!cm_is_ok(pool->source->ops->close_chunk(pool->source, chunk))) {
            atomic_fetch_add(&pool->lost_count, 1);
            continue;
        }
        set_chunk_of(span, NULL);
        plan->made_nbytes -= span->block.nbytes;
        free(chunk);
    }
}

static cm_status
fill(cm_pool *pool, place_plan *plan)
{
    uint64_t released_nbytes = 0;
    while (plan->idle.count > plan->moved_count) {
        idle_chunk spare = plan->idle.items[--plan->idle.count];
        /* Where it stays the pool holds more than it needs. */
        cm_ignore(close_chunk(pool, spare, &released_nbytes));
    }
    /* Moves alone are never too much, also where the limit was lowered. */
    if (plan->create_nbytes > 0
        && !cm_budget_try_charge(pool->config.budget, plan->create_nbytes)) {
        return cm_fail(CM_ELIMIT, plan->create_nbytes);
    }
    cm_status status = cm_ok();
    /* Nothing is begun that even the whole device has no memory for. What the driver
     * says is free is no bound: it can move managed memory out of the way. */
    if (plan->create_nbytes > 0
        && pool->counters.reserved_nbytes + plan->create_nbytes
               > pool->source->most_nbytes) {
        status = (cm_status){CM_CUDA_OUT_OF_MEMORY, CM_OP_physical_create, 0,
                             plan->create_nbytes};
    }
    for (uint32_t i = 0; i < plan->moved_count && cm_is_ok(status); i++) {
        status = move_chunk(pool, &plan->idle.items[i]);
    }
    while (plan->made_count < plan->bare_count && cm_is_ok(status)) {
        status = make_chunk(pool, plan);
    }
    if (!cm_is_ok(status)) {
        close_made(pool, plan);
    }
    cm_budget_refund(pool->config.budget, plan->create_nbytes - plan->made_nbytes);
    return status;
}

static cm_status
grow_placed(cm_pool *pool, uint64_t size, const cm_stream *stream, cm_heap_span **out)
{
    place_plan plan;
    cm_spin_lock_take(&pool->lock);
    cm_heap_view view = cm_pool_view_for_locked(pool, stream);
    cm_status status = plan_place_locked(pool, size, &view, &plan);
    cm_spin_lock_give(&pool->lock);
    if (!cm_is_ok(status)) {
        fini_plan(&plan);
        return status;
    }
    status = fill(pool, &plan);
    cm_spin_lock_take(&pool->lock);
    pool->counters.reserved_nbytes += plan.made_nbytes;
    if (plan.made_nbytes > 0) {
        pool->heap.tidy_count = TIDY_TAKES;
    }
    view = cm_pool_view_for_locked(pool, stream);
    cm_heap_span *span = settle_place_locked(pool, &plan, &view);
    if (cm_is_ok(status)) {
        *out = cm_heap_carve(&pool->heap, span, plan.at.begin, size);
        if (*out == NULL) {
            status = cm_fail(CM_ENOMEM, sizeof(cm_heap_span));
        }
    }
    cm_pool_note_peaks_locked(pool);
    uint64_t reserved_nbytes = pool->counters.reserved_nbytes;
    cm_spin_lock_give(&pool->lock);
    if (cm_recorder_is_on() && plan.made_nbytes > 0) {
        cm_pool_note(pool, CM_EVENT_GROW, cm_is_ok(status) ? &(*out)->block : NULL,
                     plan.made_nbytes, reserved_nbytes, stream);
    }
    fini_plan(&plan);
    if (status.code == CM_CUDA_OUT_OF_MEMORY && status.op == CM_OP_physical_create
        && status.arg < size) {
        status.arg = size; /* more telling than the piece of it that failed */
    }
    return status;
}

/* -- one chunk, one segment ------------------------------------------------------------- */

static cm_status
grow_segment(cm_pool *pool, uint64_t size, uint64_t nbytes, cm_heap_span **out)
{
    if (!cm_budget_try_charge(pool->config.budget, nbytes)) {
        return cm_fail(CM_ELIMIT, nbytes);
    }
    cm_chunk chunk;
    cm_status status = pool->source->ops->open_chunk(pool->source, 0, nbytes, &chunk);
    if (!cm_is_ok(status)) {
        cm_budget_refund(pool->config.budget, nbytes);
        return status;
    }
    cm_spin_lock_take(&pool->lock);
    cm_arena *arena = cm_heap_add_chunk(&pool->heap, &chunk);
    *out = arena == NULL
               ? NULL
               : cm_heap_carve(&pool->heap, arena->first, chunk.address, size);
    if (*out != NULL) {
        pool->counters.reserved_nbytes += nbytes;
        cm_pool_note_peaks_locked(pool);
    }
    else if (arena != NULL) {
        cm_heap_remove_arena(&pool->heap, arena);
    }
    uint64_t reserved_nbytes = pool->counters.reserved_nbytes;
    cm_spin_lock_give(&pool->lock);
    if (cm_recorder_is_on() && *out != NULL) {
        cm_pool_note(pool, CM_EVENT_GROW, &(*out)->block, nbytes, reserved_nbytes,
                     NULL);
    }
    if (*out == NULL) {
        bool closed = cm_is_ok(pool->source->ops->close_chunk(pool->source, &chunk));
        atomic_fetch_add(&pool->lost_count, !closed);
        cm_budget_refund(pool->config.budget, nbytes);
        return cm_fail(CM_ENOMEM, sizeof(*arena));
    }
    return status;
}

/* The first growth: find out where memory comes from. */
static cm_status
open_source(cm_pool *pool)
{
    cm_source *source = NULL;
    CM_TRY(cm_source_open(pool->rt, &pool->config, &source));
    if (source->is_placed) {
        cm_spin_lock_take(&pool->lock);
        pool->range = cm_heap_add_range(&pool->heap, source->base, source->range_nbytes,
                                        source->granule);
        cm_spin_lock_give(&pool->lock);
        if (pool->range == NULL) {
            source->ops->destroy(source);
            return cm_fail(CM_ENOMEM, source->range_nbytes / source->granule);
        }
    }
    pool->source = source;
    return cm_ok();
}

static cm_status
settle_shares(const cm_pool *pool)
{
    cm_device_info info;
    CM_TRY(cm_rt_device_describe(pool->rt, pool->config.device, &info));
    cm_budget_settle(pool->config.budget, info.total_nbytes);
    return cm_ok();
}

cm_status
cm_pool_grow(cm_pool *pool, uint64_t size, const cm_stream *stream, cm_heap_span **out)
{
    CM_NVTX("grow", size);
    if (pool->source == NULL) {
        CM_TRY(open_source(pool));
    }
    if (CM_UNLIKELY(cm_budget_has_share(pool->config.budget))) {
        CM_TRY(settle_shares(pool));
    }
    if (size > INT64_MAX - pool->source->granule) {
        return cm_fail(CM_EOVERFLOW, size);
    }
    if (pool->source->is_placed) {
        return grow_placed(pool, size, stream, out);
    }
    uint64_t least = cm_round_up_to(size, pool->source->granule);
    uint64_t step =
        cm_least(pool->counters.reserved_nbytes / SEGMENT_SHARE, SEGMENT_STEP_MAX);
    cm_pool_raise(&step, SEGMENT_STEP_MIN);
    step = cm_round_up_to(step, pool->source->granule);
    cm_pool_raise(&step, least);
    cm_status status = grow_segment(pool, size, step, out);
    if (cm_pool_is_short(status) && step > least) {
        status = grow_segment(pool, size, least, out);
    }
    return status;
}

/* -- less memory: whole free chunks go back to the runtime ------------------------------------ */

enum { TRIM_BATCH = 64 };

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

static void
take_leaving_locked(cm_pool *pool, uint64_t keep_nbytes, idle_chunks *out)
{
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    uint64_t cached = pool->heap.free_nbytes;
    out->most_nbytes = cached > keep_nbytes ? cached - keep_nbytes : 0;
    cm_heap_span *s = pool->range != NULL ? pool->range->first : NULL;
    for (bool more = true; more && s != NULL; s = s->next) {
        if (s->state == CM_SPAN_FREE && cm_span_is_clean(s, &view)) {
            more = take_chunks_locked(pool, out, s);
        }
    }
    while (out->count < out->room
           && (s = find_segment_locked(pool, keep_nbytes, &view)) != NULL) {
        cm_arena *arena = s->arena;
        s = cm_heap_carve(&pool->heap, s, arena->base, arena->nbytes);
        out->items[out->count++] = (idle_chunk){&arena->chunk, s, NULL};
    }
}

cm_status
cm_pool_release_chunks(cm_pool *pool, uint64_t keep_nbytes, uint64_t *released_nbytes)
{
    cm_status first = cm_ok();
    idle_chunk batch[TRIM_BATCH];
    uint32_t count = TRIM_BATCH;
    /* A refused chunk would be found again: one failure ends the search. */
    while (count == TRIM_BATCH && cm_is_ok(first)) {
        idle_chunks leaving = {
            .items = batch, .room = TRIM_BATCH, .enough_nbytes = UINT64_MAX};
        cm_spin_lock_take(&pool->lock);
        cm_heap_view view = cm_pool_view_locked(pool, 0);
        cm_heap_settle(&pool->heap, &view);
        (void)cm_heap_join(&pool->heap, &view);
        take_leaving_locked(pool, keep_nbytes, &leaving);
        cm_spin_lock_give(&pool->lock);
        count = leaving.count;
        for (uint32_t i = 0; i < count; i++) {
            first =
                cm_first_failure(first, close_chunk(pool, batch[i], released_nbytes));
        }
    }
    return first;
}

static cm_status
trim(cm_pool *pool, uint64_t keep_nbytes, uint64_t *released_nbytes)
{
    cm_status status = cm_ok();
    cm_mutex_lock(&pool->growing);
    if (pool->source != NULL) {
        status =
            CM_IN_SCOPE(pool->rt, pool->config.device,
                        cm_pool_release_chunks(pool, keep_nbytes, released_nbytes));
    }
    cm_mutex_unlock(&pool->growing);
    cm_spin_lock_take(&pool->lock);
    pool->counters.trim_count++;
    pool->counters.trimmed_nbytes += *released_nbytes;
    cm_spin_lock_give(&pool->lock);
    return status;
}

/* Memory goes back in whole chunks: first as many as leave the rest cached, then, where
 * only larger ones are left, all of them. */
void
cm_pool_obey_limits(cm_pool *pool, bool may_fence)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return;
    }
    for (int attempt = 0; attempt < 2; attempt++) {
        cm_spin_lock_take(&pool->lock);
        uint64_t excess = cm_budget_excess(pool->config.budget);
        pool->is_over = excess > 0;
        cm_spin_lock_give(&pool->lock);
        if (excess == 0) {
            return;
        }
        cm_ignore(cm_pool_poll(pool, may_fence)); /* what cannot be asked stays */
        cm_spin_lock_take(&pool->lock);
        uint64_t cached = pool->heap.free_nbytes;
        cm_spin_lock_give(&pool->lock);
        uint64_t released_nbytes = 0;
        uint64_t keep_nbytes = cached > excess && attempt == 0 ? cached - excess : 0;
        /* A refusal is counted as lost; a trim() that is asked for will tell. */
        cm_ignore(trim(pool, keep_nbytes, &released_nbytes));
    }
    cm_spin_lock_take(&pool->lock);
    (void)cm_pool_is_over_locked(pool);
    cm_spin_lock_give(&pool->lock);
}

cm_status
cm_pool_trim(cm_pool *pool, uint64_t keep_nbytes, const cm_wait_hooks *hooks,
             uint64_t *released_nbytes)
{
    return cm_pool_trim_as(pool, keep_nbytes, hooks, hooks != NULL, true,
                           released_nbytes);
}

cm_status
cm_pool_trim_as(cm_pool *pool, uint64_t keep_nbytes, const cm_wait_hooks *hooks,
                bool waits, bool may_fence, uint64_t *released_nbytes)
{
    *released_nbytes = 0;
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_status first = cm_ok();
    cm_pool_look_at_kept(pool);
    if (waits) {
        first = cm_pool_wait(pool, hooks, false);
        if (first.code == CM_ECANCELLED) {
            return first;
        }
    }
    else { /* what cannot be asked about is not what was asked for */
        cm_ignore(cm_pool_poll(pool, may_fence));
    }
    if (cm_mutex_take(&pool->polling, waits)) {
        cm_pool_drop_slots(pool, false);
        cm_mutex_unlock(&pool->polling);
    }
    first = cm_first_failure(first, trim(pool, keep_nbytes, released_nbytes));
    CM_POOL_DEBUG_CHECK(pool);
    return first;
}

void
cm_pool_trim_idle(cm_pool *pool)
{
    cm_spin_lock_take(&pool->lock);
    bool over = cm_pool_is_trim_due_locked(pool);
    cm_spin_lock_give(&pool->lock);
    if (!over) {
        return;
    }
    /* Only what is seen to have ended can go, and a free span is as new as the last
     * small block that was cut from it. */
    cm_ignore(cm_pool_poll(pool, false));
    cm_spin_lock_take(&pool->lock);
    over = cm_pool_is_trim_due_locked(pool); /* another thread may have been here */
    bool first = pool->window_ns == 0;
    uint64_t cached = pool->heap.free_nbytes;
    uint64_t unused = pool->window_cached < cached ? pool->window_cached : cached;
    if (over) {
        pool->window_ns = cm_now_ns();
        pool->window_cached = cached;
    }
    cm_spin_lock_give(&pool->lock);
    if (over && !first && unused > 0) {
        uint64_t released_nbytes = 0;
        /* Counted as lost; a trim() that is asked for will tell. */
        cm_ignore(trim(pool, cached - unused, &released_nbytes));
    }
}

uint64_t
cm_pool_idle_due(cm_pool *pool)
{
    cm_spin_lock_take(&pool->lock);
    uint64_t idle_ns = pool->config.idle_trim_ns;
    uint64_t due = idle_ns == 0 ? 0 : pool->window_ns + idle_ns;
    cm_spin_lock_give(&pool->lock);
    return due;
}

void
cm_pool_set_idle_trim(cm_pool *pool, uint64_t ns)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return;
    }
    cm_spin_lock_take(&pool->lock);
    pool->config.idle_trim_ns = ns;
    pool->window_ns = 0; /* the first window begins with the next look */
    cm_spin_lock_give(&pool->lock);
}
