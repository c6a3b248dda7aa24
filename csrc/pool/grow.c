/* SPDX-License-Identifier: Apache-2.0 */
/* Gets memory for a pool from the runtime, and gives memory back to it.
 *
 * Segments
 * --------
 * If each chunk is a segment of its own (host and managed memory, and devices that
 * cannot map), a growth is one call of the runtime. For a small request it takes more
 * than the request needs: 1/16 of what is held, but between 2 and 64 MiB, so that many
 * small requests cause few growths. If the runtime or a limit refuses that much, the
 * growth tries once more with what the request needs.
 *
 * Placed memory
 * -------------
 * If chunks can be mapped anywhere in one range of addresses, a growth takes only the
 * memory that is missing at one place:
 *
 *   1. The heap finds the place that lacks the fewest granules (cm_hole).
 *   2. Free chunks from elsewhere are moved there: unmapped, and mapped again.
 *   3. Of the free chunks that do not fit into the place, enough are given back to make
 *      up for the new chunks of step 4.
 *   4. The granules that are still bare get new chunks.
 *
 * Example with granules of 2 MiB. The range holds 8 MiB, of which 2 + 2 MiB are free
 * but not side by side, and 6 MiB are asked for:
 *
 *   before   [free][LIVE][free][LIVE][ gap ........
 *   step 1                           [ gap 6 MiB  ]     3 granules are missing
 *   step 2   [ gap][LIVE][ gap][LIVE][moved][moved][bare]
 *   step 4   [ gap][LIVE][ gap][LIVE][     LIVE 6 MiB   ]
 *
 * The pool held 8 MiB before and holds 10 MiB now, not 14. So a pool holds hardly more
 * than the granules in which blocks lie; the exception is a chunk of several granules
 * that one block keeps in place. Moving a chunk takes as long as making one (about 35
 * us on an H200, whatever its size), but takes no further memory.
 *
 * Only clean spans are moved: nothing in them is live, and the host has seen all work
 * on them end. The addresses that a chunk leaves become a gap.
 *
 * How long new chunks are
 * -----------------------
 * A chunk can move or go back only when all of it is free. So chunks are short in
 * comparison with all that the pool holds, and one small block that keeps a chunk in
 * place wastes little. But the copy engines of a device lose speed at each border of
 * two chunks, though kernels do not. From one H200 to another they copy 373 GB/s if
 * chunks have 2 MiB, 388 at 4 MiB, 391 at 8 MiB, and 394 at 16 MiB and at any length
 * above that. A long copy needs a long block, and where a long block was, memory is
 * free in long stretches later. So chunks for a long block may be longer, in proportion
 * to it, up to 16 MiB. Recorded programs then reserve 0.1 % more. With chunks of 1/48,
 * 1/32 or 1/16 of the block, one of these programs reserves 3 to 6 % more.
 *
 * Plans
 * -----
 * Runtime calls are made without the pool's lock, so a growth has three parts. Under
 * the lock, plan_place_locked() chooses everything and makes its spans BUSY, so that
 * nobody else takes them. Without the lock, fill() makes the calls. Under the lock
 * again, finish_place_locked() turns spans that have memory into free ones and the rest
 * into gaps, whether the calls worked or not. So a failure half-way loses nothing:
 * chunks that were moved stay moved, new ones are closed again, and the request fails.
 *
 * Trimming
 * --------
 * A trim takes whole free chunks out of the heap in batches, closes them without the
 * lock, and looks again until few enough are cached. The idle trim watches windows of
 * time: the least that was cached during a window was not needed in it, and goes back
 * at its end. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "base/nvtx.h"
#include "pool/private.h"
#include "runtime/scope.h"

enum {
    GAP_SHARE = 64, /* a new chunk may have 1/64 of the gap that it fills */
    /* After a growth this many requests may take a hole although free memory would do
     * (heap.c). */
    TIDY_TAKES = 300
};

/* GAP_SHARE allows a chunk to be this long, but no longer. */
#define GAP_CHUNK_MAX (UINT64_C(16) << 20)

/* If every chunk is a segment, a growth takes at least a share of what is held, within
 * bounds. */
#define SEGMENT_SHARE 16
#define SEGMENT_STEP_MIN (UINT64_C(2) << 20)
#define SEGMENT_STEP_MAX (UINT64_C(64) << 20)

/* -- chunks that nobody uses ------------------------------------------------------------ */

/* A free chunk that was taken out of the heap, to be moved or closed. */
typedef struct idle_chunk {
    cm_chunk *chunk;
    /* A BUSY span that covers exactly the chunk; NULL once the chunk is no longer
     * there. */
    cm_heap_span *span;
    cm_heap_span *to; /* a BUSY span without memory, to which the chunk is moved */
} idle_chunk;

typedef struct idle_chunks {
    idle_chunk *items;
    uint32_t count;
    uint32_t room;
    bool to_move;           /* the chunks are to be moved, else closed */
    uint64_t nbytes;        /* the bytes of all chunks together */
    uint64_t enough_nbytes; /* once the chunks have this many bytes, no more are
                               taken */
    uint64_t most_nbytes;   /* a chunk that would bring them above this is not taken */
} idle_chunks;

/* Take the chunks that lie wholly in `span`, a free span of the range, out of the heap.
 * Returns false if no more chunks are wanted, or if there is no memory for nodes. */
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
            span = span->next; /* carving has cut `span` up, so find the part with the
                                  chunk */
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

/* Return the chunk behind the start of a span of the range, or NULL if there is
 * none. */
static cm_chunk *
chunk_of(const cm_heap_span *span)
{
    const cm_arena *range = span->arena;
    return range->chunk_at[(span->block.address - range->base) / range->granule];
}

/* Enter `chunk` as the memory of the whole span; NULL means that it has none. */
static void
set_chunk_of(const cm_heap_span *span, cm_chunk *chunk)
{
    const cm_arena *range = span->arena;
    uint64_t first = (span->block.address - range->base) / range->granule;
    for (uint64_t i = 0; i < span->block.nbytes / range->granule; i++) {
        range->chunk_at[first + i] = chunk;
    }
}

/* Forget a chunk whose memory has gone back to the runtime. If `slept` is true, this
 * happened when the pool fell asleep, else just now. The BUSY `span` covers the chunk,
 * and is freed here. */
static void
forget_chunk(cm_pool *pool, cm_heap_span *span, cm_chunk *chunk, bool slept)
{
    uint64_t nbytes = span->block.nbytes;
    cm_block block = span->block; /* a copy, since the span is freed below */
    cm_spin_lock_take(&pool->lock);
    if (span->arena == pool->range) {
        set_chunk_of(span, NULL);
        cm_heap_give_gap(&pool->heap, span);
        free(chunk);
    }
    else {
        /* The chunk is part of the arena. */
        cm_heap_remove_arena(&pool->heap, span->arena);
    }
    pool->counters.reserved_nbytes -= nbytes;
    pool->counters.asleep_nbytes -= slept ? nbytes : 0;
    uint64_t left_nbytes = cm_pool_held_nbytes(pool);
    cm_spin_lock_give(&pool->lock);
    if (slept) {
        return; /* the refund was made and recorded when the pool fell asleep */
    }
    cm_budget_refund(pool->config.budget, nbytes);
    if (cm_recorder_is_on()) {
        cm_pool_note(pool, CM_EVENT_TRIM, &block, nbytes, left_nbytes, NULL);
    }
}

/* Give a chunk back to the runtime. If the runtime refuses to take the chunk, the chunk
 * becomes free memory of the pool again, and counts as lost. */
static cm_status
close_chunk(cm_pool *pool, idle_chunk idle, uint64_t *released_nbytes)
{
    uint64_t nbytes = idle.chunk->nbytes;
    bool slept = !cm_chunk_has_memory(idle.chunk);
    cm_status status = pool->source->ops->close_chunk(pool->source, idle.chunk);
    if (cm_is_ok(status)) {
        forget_chunk(pool, idle.span, idle.chunk, slept);
        *released_nbytes += slept ? 0 : nbytes;
        return status;
    }
    cm_spin_lock_take(&pool->lock);
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    (void)cm_heap_give(&pool->heap, idle.span, 0, 0, &view);
    cm_pool_note_peaks_locked(pool); /* in case the peaks have begun anew meanwhile */
    cm_spin_lock_give(&pool->lock);
    atomic_fetch_add(&pool->lost_count, 1);
    return status;
}

/* -- a place, and what goes there ------------------------------------------------------------ */
/* A plan says at which place the request will lie, which free chunks are moved there
 * from elsewhere, and where new chunks are needed. Spans that a plan holds are BUSY, so
 * that nobody else takes them. */

typedef struct place_plan {
    cm_hole at;
    /* The first of the spans that are held; they are neighbours. */
    cm_heap_span *first;
    uint32_t held_count;
    idle_chunks idle;
    /* How many of the idle chunks, counted from the first, have a place to go. The
     * others are closed. */
    uint32_t moved_count;
    cm_heap_span **bare; /* owned; held spans without memory, each of which is to get a
                            new chunk */
    uint32_t bare_count;
    uint32_t made_count;    /* how many of the bare spans have a chunk by now */
    uint64_t create_nbytes; /* the length of all bare spans */
    /* The bytes of the new chunks. They count as reserved when the plan ends. */
    uint64_t made_nbytes;
    uint32_t tag; /* the tag of the pending free spans at the place */
    uint64_t epoch;
    uint32_t share; /* a new chunk may have 1/share of what is held */
} place_plan;

static void
fini_plan(place_plan *plan)
{
    free(plan->idle.items);
    free(plan->bare);
}

/* Hold the free spans at the place, and those parts of its gaps that will get memory.
 * Returns false if there is no memory for nodes. */
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

/* Choose free chunks to move. They come from the longest spans first, since that leaves
 * the fewest short remnants, and only from spans that are clean. */
static void
choose_moves_locked(cm_pool *pool, place_plan *plan, const cm_heap_view *view)
{
    for (uint32_t bin = CM_HEAP_BIN_COUNT; bin-- > 0;) {
        cm_list *list = &pool->heap.bins[bin];
        for (cm_list *n = list->next, *next; n != list; n = next) {
            cm_heap_span *span = CM_LIST_ENTRY(n, cm_heap_span, node);
            next = n->next; /* read first: carving moves the span, and its rest holds no
                               whole chunk */
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

/* Return the length of the longest chunk to make for a gap of `nbytes`. */
static uint64_t
longest_chunk(const cm_pool *pool, const place_plan *plan, uint64_t nbytes)
{
    uint64_t granule = pool->source->granule;
    uint64_t held = pool->counters.reserved_nbytes + plan->create_nbytes;
    /* In a pool that spills, two blocks that share a long chunk would keep each other
     * from giving it back. */
    uint64_t most = pool->config.spills ? 0 : (held + nbytes) / plan->share;
    cm_pool_raise(&most, cm_least(nbytes / GAP_SHARE, GAP_CHUNK_MAX));
    most = most / granule * granule;
    return most < granule ? granule : most;
}

/* Cut the held part of a gap into spans for new chunks. Returns false if there is no
 * memory for nodes. */
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

/* Cut the held part of a gap, from its lowest address on, into places for the chunks
 * that move there, the longest chunk first. The rest is bare. Returns false if there is
 * no memory for nodes. */
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

/* Some of the chosen chunks fit nowhere in the place. The plan will close enough of
 * them to make up for the new chunks that it makes. The others go back to the heap. */
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

/* End a plan: held spans that have memory become free, and the others become gaps. If
 * all of the place has memory, this returns the span that covers the place. The parts
 * of the place are joined with each other before their neighbours join them. Otherwise
 * a neighbour that is still pending might join only one part, and the parts might then
 * not join each other. */
static cm_heap_span *
finish_place_locked(cm_pool *pool, place_plan *plan, const cm_heap_view *view)
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
        next = span->next; /* it is still BUSY, so giving `span` does not join it */
        if (has_memory) {
            whole = cm_heap_give(heap, span, plan->tag, plan->epoch, view);
        }
        else {
            cm_heap_give_gap(heap, span);
        }
    }
    return whole;
}

/* Make the plan, and take all that it needs out of the heap.
 * Fails: CM_ENOMEM; CM_ELIMIT or CM_CUDA_OUT_OF_MEMORY if no addresses are left. After
 *        a failure the plan holds nothing. */
static cm_status
plan_place_locked(cm_pool *pool, uint64_t size, uint32_t share,
                  const cm_heap_view *view, place_plan *plan)
{
    uint64_t granule = pool->source->granule;
    *plan = (place_plan){.share = share};
    cm_heap_join_ready(&pool->heap, view);
    cm_heap_find_hole(&pool->heap, size, cm_pool_align_of(pool, size), view, true,
                      &plan->at);
    if (plan->at.first == NULL) {
        /* No addresses are left for the request. There are several times as many
         * addresses as memory, so there would be no memory for it either. If the
         * request would exceed a limit, that is the more useful answer. */
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
        (void)finish_place_locked(pool, plan, view);
        return cm_fail(CM_ENOMEM, missing * sizeof(idle_chunk));
    }
    drop_unneeded_locked(pool, plan, view);
    return cm_ok();
}

/* -- the calls that bring it --------------------------------------------------------------- */

/* Move a chunk. If it can neither be moved nor put back it is closed, and a gap is left
 * where it was. */
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
        forget_chunk(pool, idle->span, chunk, false);
        idle->span = NULL;
    }
    return status;
}

/* Make the chunk for the next bare span. */
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

/* Close the chunks that were made for a request which then failed. If the driver
 * refuses to take a chunk back, it stays as free memory. */
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

/* Make the runtime calls of a plan, without the lock. This closes spare chunks, charges
 * the budget, moves chunks and makes new ones, in this order. */
static cm_status
fill(cm_pool *pool, place_plan *plan)
{
    uint64_t released_nbytes = 0;
    while (plan->idle.count > plan->moved_count) {
        idle_chunk spare = plan->idle.items[--plan->idle.count];
        /* if this fails, the pool just holds more than it needs */
        cm_ignore(close_chunk(pool, spare, &released_nbytes));
    }
    /* A plan that only moves chunks charges nothing, so no limit can refuse it. */
    if (plan->create_nbytes > 0
        && !cm_budget_try_charge(pool->config.budget, plan->create_nbytes)) {
        return cm_fail(CM_ELIMIT, plan->create_nbytes);
    }
    cm_status status = cm_ok();
    /* Do not even begin if the whole device has too little memory for this. The free
     * memory that the driver reports is not used as a bound, since the driver can move
     * managed memory out of the way. */
    uint64_t held_nbytes = cm_pool_held_nbytes(pool);
    if (plan->create_nbytes > 0
        && held_nbytes + plan->create_nbytes > pool->source->most_nbytes) {
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

/* Grow a pool of placed memory: plan, make the calls, and cut the BUSY span *out of
 * `size` bytes from the place.
 * Fails: CM_ENOMEM, CM_ELIMIT, CM_CUDA_OUT_OF_MEMORY; as the source's calls. */
static cm_status
grow_placed(cm_pool *pool, uint64_t size, uint32_t share, const cm_stream *stream,
            cm_heap_span **out)
{
    place_plan plan;
    cm_spin_lock_take(&pool->lock);
    cm_heap_view view = cm_pool_view_for_locked(pool, stream);
    cm_status status = plan_place_locked(pool, size, share, &view, &plan);
    cm_spin_lock_give(&pool->lock);
    if (!cm_is_ok(status)) {
        fini_plan(&plan);
        return status;
    }
    status = fill(pool, &plan);
    cm_spin_lock_take(&pool->lock);
    pool->counters.reserved_nbytes += plan.made_nbytes;
    if (plan.made_nbytes > 0) {
        pool->heap.hole_preference_count = TIDY_TAKES;
    }
    view = cm_pool_view_for_locked(pool, stream);
    cm_heap_span *span = finish_place_locked(pool, &plan, &view);
    if (cm_is_ok(status)) {
        *out = cm_heap_carve(&pool->heap, span, plan.at.begin, size);
        if (*out == NULL) {
            status = cm_fail(CM_ENOMEM, sizeof(cm_heap_span));
        }
    }
    cm_pool_note_peaks_locked(pool);
    uint64_t reserved_nbytes = cm_pool_held_nbytes(pool);
    cm_spin_lock_give(&pool->lock);
    if (cm_recorder_is_on() && plan.made_nbytes > 0) {
        cm_pool_note(pool, CM_EVENT_GROW, cm_is_ok(status) ? &(*out)->block : NULL,
                     plan.made_nbytes, reserved_nbytes, stream);
    }
    fini_plan(&plan);
    if (status.code == CM_CUDA_OUT_OF_MEMORY && status.op == CM_OP_physical_create
        && status.arg < size) {
        status.arg = size; /* users know this size, not that of the chunk */
    }
    return status;
}

/* -- one chunk, one segment ------------------------------------------------------------- */

/* Grow by one segment of `nbytes`, and cut the BUSY span *out of `size` bytes from it.
 * After a failure the pool is as before, unless the runtime refuses to take the chunk
 * back, which then counts as lost.
 * Fails: CM_ELIMIT, CM_ENOMEM; as open_chunk(). */
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
    uint64_t reserved_nbytes = cm_pool_held_nbytes(pool);
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

/* Open the source, at the first growth. Its kind depends on the config and on the
 * device. */
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

void
cm_pool_expect(cm_pool *pool, uint64_t nbytes, uint64_t count)
{
    cm_mutex_lock(&pool->growing);
    if (pool->source == NULL && count > 0) {
        /* A growth meets the same failure, and reports it. */
        cm_ignore(CM_IN_SCOPE(pool->rt, pool->config.device, open_source(pool)));
    }
    if (pool->source != NULL && pool->source->ops->expect != NULL) {
        pool->source->ops->expect(pool->source, nbytes, count);
    }
    cm_mutex_unlock(&pool->growing);
}

/* Replace limits that are shares of the device by bytes (budget.h). */
static cm_status
resolve_shares(const cm_pool *pool)
{
    cm_device_info info;
    CM_TRY(cm_rt_device_describe(pool->rt, pool->config.device, &info));
    cm_budget_resolve_shares(pool->config.budget, info.total_nbytes);
    return cm_ok();
}

cm_status
cm_pool_grow(cm_pool *pool, uint64_t size, uint32_t share, const cm_stream *stream,
             cm_heap_span **out)
{
    CM_NVTX("grow", size);
    if (pool->source == NULL) {
        CM_TRY(open_source(pool));
    }
    if (CM_UNLIKELY(cm_budget_has_share(pool->config.budget))) {
        CM_TRY(resolve_shares(pool));
    }
    if (size > INT64_MAX - pool->source->granule) {
        return cm_fail(CM_EOVERFLOW, size);
    }
    if (pool->source->is_placed) {
        return grow_placed(pool, size, share, stream, out);
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

/* Return the span of the longest segment that is wholly free and may go, or NULL if
 * there is none. The longest ones go first because small blocks need only short
 * ones. */
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

/* Take as many free chunks out of the heap, to be closed, as can go while `keep_nbytes`
 * stay cached. */
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
    /* If the runtime refused a chunk, the next batch would find the same chunk again,
     * so one failure ends the loop. */
    while (count == TRIM_BATCH && cm_is_ok(first)) {
        idle_chunks leaving = {
            .items = batch, .room = TRIM_BATCH, .enough_nbytes = UINT64_MAX};
        cm_spin_lock_take(&pool->lock);
        cm_heap_view view = cm_pool_view_locked(pool, 0);
        cm_heap_join_ready(&pool->heap, &view);
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

/* A pool that is shut gives nothing back, since its bytes are being copied. */
static cm_status
trim(cm_pool *pool, uint64_t keep_nbytes, uint64_t *released_nbytes)
{
    cm_status status = cm_ok();
    cm_mutex_lock(&pool->growing);
    cm_spin_lock_take(&pool->lock);
    bool is_shut = pool->phase == CM_POOL_SHUT;
    cm_spin_lock_give(&pool->lock);
    if (pool->source != NULL && !is_shut) {
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

/* Memory goes back in whole chunks. The first attempt gives back no more than the
 * excess. If every free chunk is longer than the excess, this is nothing. If a limit is
 * still exceeded, the second attempt gives back all free chunks. */
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
        /* Blocks for which asking fails stay in flight. */
        cm_ignore(cm_pool_poll(pool, may_fence));
        cm_spin_lock_take(&pool->lock);
        uint64_t cached = pool->heap.free_nbytes;
        cm_spin_lock_give(&pool->lock);
        uint64_t released_nbytes = 0;
        uint64_t keep_nbytes = cached > excess && attempt == 0 ? cached - excess : 0;
        /* If the runtime refuses to take a chunk back, the chunk counts as lost. A trim
         * that the user asks for would report the failure. */
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
    cm_pool_poll_children(pool);
    if (waits) {
        first = cm_pool_wait(pool, hooks, false);
        if (first.code == CM_ECANCELLED) {
            return first;
        }
    }
    else { /* a caller that does not wait need not know that asking failed */
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
    /* Only clean spans can go back, and the last short block that joined a span may
     * have made the span pending. So this first asks which work has ended. */
    cm_ignore(cm_pool_poll(pool, false));
    cm_spin_lock_take(&pool->lock);
    /* Another thread may have trimmed meanwhile, so look again. */
    over = cm_pool_is_trim_due_locked(pool);
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
        /* If the runtime refuses to take a chunk back, the chunk counts as lost. A trim
         * that the user asks for would report the failure. */
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
    pool->window_ns = 0; /* the first window begins when the idle trim looks next */
    cm_spin_lock_give(&pool->lock);
}
