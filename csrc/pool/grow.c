/* SPDX-License-Identifier: Apache-2.0 */
/* More memory. Where every chunk is a segment of its own that is one call, for somewhat
 * more than is needed. Where chunks can be put anywhere in one range of addresses just
 * what is missing is brought: the heap says where the request goes (cm_hole), free
 * chunks from elsewhere are moved there, those that fit nowhere are given back, and
 * only then new ones are made. So what is held is what blocks lie in, to the granule,
 * but for chunks of several granules that a block keeps in place. A move costs as much
 * as making a chunk (about 35 us on an H200, whatever its size) and holds nothing more.
 */
#include <stdlib.h>

#include "base/checked_math.h"
#include "pool/private.h"

enum {
    CHUNK_SHARE = 200, /* a new chunk is at most this part of what is held */
    TIDY_TAKES = 300   /* blocks rather go into holes, after memory was made */
};

/* What is taken beyond the need where every chunk is a segment of its own, so that many
 * small requests are few growths: a share of what is held, up to a bound. */
#define SEGMENT_SHARE 16
#define SEGMENT_STEP_MIN (UINT64_C(2) << 20)
#define SEGMENT_STEP_MAX (UINT64_C(64) << 20)

static uint64_t
segment_step(const cm_pool *pool)
{
    uint64_t step = pool->counters.reserved_nbytes / SEGMENT_SHARE;
    return step < SEGMENT_STEP_MIN   ? SEGMENT_STEP_MIN
           : step > SEGMENT_STEP_MAX ? SEGMENT_STEP_MAX
                                     : step;
}

static void
count_reserved_locked(cm_pool *pool, uint64_t nbytes)
{
    cm_pool_counters *c = &pool->counters;
    c->reserved_nbytes += nbytes;
    if (c->reserved_nbytes > c->peak_reserved_nbytes) {
        c->peak_reserved_nbytes = c->reserved_nbytes;
    }
}

void
cm_pool_begin_growing(cm_pool *pool)
{
    cm_mutex_lock(&pool->gate);
    while (pool->growing) {
        cm_cond_wait(&pool->gate_moved, &pool->gate);
    }
    pool->growing = true;
    cm_mutex_unlock(&pool->gate);
}

void
cm_pool_end_growing(cm_pool *pool)
{
    cm_mutex_lock(&pool->gate);
    pool->growing = false;
    cm_cond_signal_all(&pool->gate_moved);
    cm_mutex_unlock(&pool->gate);
}

/* -- which memory goes there --------------------------------------------------------------- */
/* Free chunks from elsewhere, whose memory is moved there, and new ones. */

/* A free chunk on its way to another place. */
typedef struct chunk_move {
    cm_chunk *chunk;
    cm_heap_span *span; /* BUSY and exactly the chunk; NULL once it has moved */
} chunk_move;

/* One gap of a place. It gets memory from its lowest address on: first chunks that are
 * moved there, then new ones. */
typedef struct filling {
    cm_heap_span *target; /* BUSY: the part of the gap that is filled */
    cm_heap_span *spare;  /* a node for cutting off what stayed without memory */
    uint64_t create_nbytes;
    uint64_t made_nbytes; /* of new chunks, so far: the last of done_nbytes */
    uint64_t done_nbytes; /* of the target: what has memory by now */
    uint32_t move_end;    /* its moves end before this one; they begin where those of
                             the gap before it end */
} filling;

typedef struct place_plan {
    cm_hole at;
    cm_heap_span **spans; /* by address: free spans and targets, BUSY */
    filling *fillings;
    chunk_move *moves;
    uint32_t span_count;
    uint32_t filling_count;
    uint32_t move_count; /* those behind the last filling's are given back instead */
    uint64_t moved_nbytes;
    uint64_t create_nbytes;
    uint64_t made_nbytes; /* so much of it is there; reserved once the plan settles */
    uint32_t tag;         /* of the place's free spans */
    uint64_t epoch;
} place_plan;

static void
fini_plan(place_plan *plan)
{
    free(plan->spans);
    free(plan->fillings);
    free(plan->moves);
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
    cm_heap_span *next;
    for (uint32_t i = 0; i < plan->at.span_count; i++, span = next) {
        next = span->next;
        if (span->state == CM_SPAN_FREE) {
            if (!cm_span_is_clean(span, view)) {
                plan->tag = span->tag;
                plan->epoch = span->epoch > plan->epoch ? span->epoch : plan->epoch;
            }
            plan->spans[plan->span_count++] = cm_heap_carve(
                &pool->heap, span, span->block.address, span->block.nbytes);
            continue;
        }
        cm_address from = span->block.address > low ? span->block.address : low;
        cm_address to = cm_span_end(span) < high ? cm_span_end(span) : high;
        filling *f = &plan->fillings[plan->filling_count];
        f->spare = cm_heap_take_node(&pool->heap);
        if (f->spare == NULL) {
            return false;
        }
        f->target = cm_heap_carve(&pool->heap, span, from, to - from);
        if (f->target == NULL) {
            cm_heap_give_node(&pool->heap, f->spare);
            return false;
        }
        plan->filling_count++;
        plan->spans[plan->span_count++] = f->target;
    }
    return true;
}

/* -- chunks to move --------------------------------------------------------------------- */

/* Take the chunks that lie wholly in a free span out of it, as many as are needed.
 * False: no memory for that; what was taken is. */
static bool
take_chunks_locked(cm_pool *pool, place_plan *plan, cm_heap_span *span)
{
    const cm_arena *range = pool->range;
    uint64_t missing = plan->at.missing * range->granule;
    bool upwards = span->prev != NULL && span->prev->state == CM_SPAN_GAP
                   && !(span->next != NULL && span->next->state == CM_SPAN_GAP);
    uint64_t granule = range->granule;
    cm_address low = span->block.address;
    cm_address end = cm_span_end(span);
    cm_address from = cm_round_up_to(low, granule);
    cm_address to = end / granule * granule;
    while (from < to && plan->moved_nbytes < missing) {
        cm_address at = upwards ? from : to - granule;
        cm_chunk *chunk = range->chunk_at[(at - range->base) / granule];
        from = upwards ? chunk->address + chunk->nbytes : from;
        to = upwards ? to : chunk->address;
        if (chunk->address < low || chunk->address + chunk->nbytes > end
            || chunk->handle == 0) {
            continue;
        }
        while (cm_span_end(span) <= chunk->address) {
            span = span->next; /* the rest of what it was */
        }
        while (span->block.address > chunk->address) {
            span = span->prev;
        }
        cm_heap_span *taken =
            cm_heap_carve(&pool->heap, span, chunk->address, chunk->nbytes);
        if (taken == NULL) {
            return false;
        }
        plan->moves[plan->move_count++] = (chunk_move){chunk, taken};
        plan->moved_nbytes += chunk->nbytes;
        span = taken;
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
            if (plan->moved_nbytes >= plan->at.missing * pool->source->granule
                || span->block.nbytes < pool->source->granule) {
                return;
            }
            if (cm_span_is_clean(span, view) && !take_chunks_locked(pool, plan, span)) {
                return;
            }
        }
    }
}

static int
compare_moves(const void *a, const void *b)
{
    uint64_t x = ((const chunk_move *)a)->chunk->nbytes;
    uint64_t y = ((const chunk_move *)b)->chunk->nbytes;
    return (x < y) - (x > y);
}

/* Which chunks go to which gap, the longest first; new ones for the rest. */
static void
assign_moves_locked(cm_pool *pool, place_plan *plan, const cm_heap_view *view)
{
    uint32_t assigned = 0;
    qsort(plan->moves, plan->move_count, sizeof(chunk_move), compare_moves);
    for (uint32_t i = 0; i < plan->filling_count; i++) {
        filling *f = &plan->fillings[i];
        uint64_t left = f->target->block.nbytes;
        for (uint32_t k = assigned; k < plan->move_count && left > 0; k++) {
            chunk_move move = plan->moves[k];
            if (move.chunk->nbytes <= left) {
                left -= move.chunk->nbytes;
                plan->moves[k] = plan->moves[assigned];
                plan->moves[assigned++] = move;
            }
        }
        f->move_end = assigned;
        f->create_nbytes = left;
        plan->create_nbytes += left;
    }
    /* Those that fit nowhere go back for the new ones, as far as that takes them all.
     */
    uint64_t spare_nbytes = 0;
    for (uint32_t k = assigned; k < plan->move_count; k++) {
        spare_nbytes += plan->moves[k].chunk->nbytes;
    }
    while (plan->move_count > assigned) {
        const chunk_move *last = &plan->moves[plan->move_count - 1];
        spare_nbytes -= last->chunk->nbytes;
        if (spare_nbytes < plan->create_nbytes) {
            break;
        }
        (void)cm_heap_give(&pool->heap, last->span, 0, 0, view);
        plan->move_count--;
    }
}

/* What has memory of one gap; the rest is a gap again. NULL: nothing has. */
static cm_heap_span *
settle_filling_locked(cm_pool *pool, filling *f)
{
    cm_heap *heap = &pool->heap;
    cm_heap_span *filled = f->target;
    if (f->done_nbytes == 0) {
        cm_heap_give_gap(heap, filled);
        filled = NULL;
    }
    else if (f->done_nbytes < filled->block.nbytes) {
        cm_heap_split_busy(heap, filled, f->done_nbytes, f->spare);
        cm_heap_give_gap(heap, f->spare);
        f->spare = NULL;
    }
    if (f->spare != NULL) {
        cm_heap_give_node(heap, f->spare);
    }
    return filled;
}

/* The plan's free spans, and what has memory of its gaps, become free; the rest are
 * gaps. Returns the span that covers the whole place if all of it has memory. */
static cm_heap_span *
settle_place_locked(cm_pool *pool, place_plan *plan, const cm_heap_view *view)
{
    cm_heap *heap = &pool->heap;
    cm_heap_span *whole = NULL;
    filling *f = plan->fillings;
    for (uint32_t i = 0; i < plan->move_count; i++) {
        if (plan->moves[i].span != NULL) {
            (void)cm_heap_give(heap, plan->moves[i].span, 0, 0, view);
        }
    }
    for (uint32_t i = 0; i < plan->span_count; i++) {
        cm_heap_span *span = plan->spans[i];
        if (f < plan->fillings + plan->filling_count && f->target == span) {
            span = settle_filling_locked(pool, f++);
        }
        if (span == NULL) {
            continue;
        }
        if (whole != NULL && whole->next == span) {
            whole = cm_heap_fuse(heap, whole, span);
            continue;
        }
        if (whole != NULL) {
            (void)cm_heap_give(heap, whole, plan->tag, plan->epoch, view);
        }
        whole = span;
    }
    return whole == NULL ? NULL
                         : cm_heap_give(heap, whole, plan->tag, plan->epoch, view);
}

/* Fill in the plan and take all that it needs out of the heap. Fails: CM_ENOMEM, no
 * addresses; nothing is held then. */
static cm_status
plan_place_locked(cm_pool *pool, uint64_t size, const cm_heap_view *view,
                  place_plan *plan)
{
    *plan = (place_plan){0};
    cm_heap_settle(&pool->heap, view);
    cm_heap_find_hole(&pool->heap, size, cm_pool_align_of(pool, size), view, UINT64_MAX,
                      true, &plan->at);
    if (plan->at.first == NULL) {
        /* No addresses are left, so there could not be memory for all of them either,
         * unless a limit says so before. */
        if (!cm_budget_try_charge(pool->config.budget, size)) {
            return cm_fail(CM_ELIMIT, size);
        }
        cm_budget_refund(pool->config.budget, size);
        return (cm_status){CM_CUDA_OUT_OF_MEMORY, CM_OP_physical_create, 0, size};
    }
    plan->spans = calloc(plan->at.span_count, sizeof(*plan->spans));
    plan->fillings = calloc(plan->at.gap_count, sizeof(*plan->fillings));
    plan->moves = calloc(plan->at.missing, sizeof(*plan->moves));
    if (plan->spans == NULL || plan->fillings == NULL || plan->moves == NULL) {
        return cm_fail(CM_ENOMEM, plan->at.missing * sizeof(*plan->moves));
    }
    if (!hold_place_locked(pool, plan, size, view)) {
        (void)settle_place_locked(pool, plan, view);
        return cm_fail(CM_ENOMEM, sizeof(cm_heap_span));
    }
    choose_moves_locked(pool, plan, view);
    assign_moves_locked(pool, plan, view);
    return cm_ok();
}

/* -- the calls that bring it --------------------------------------------------------------- */

static void
set_chunk_at(const cm_arena *range, cm_address address, uint64_t nbytes,
             cm_chunk *chunk)
{
    uint64_t first = (address - range->base) / range->granule;
    for (uint64_t i = 0; i < nbytes / range->granule; i++) {
        range->chunk_at[first + i] = chunk;
    }
}

cm_status
cm_pool_close_chunk(cm_pool *pool, cm_heap_span *span, cm_chunk *chunk,
                    uint64_t *released_nbytes)
{
    uint64_t nbytes = chunk->nbytes;
    cm_arena *arena = span->arena;
    cm_status status = pool->source->ops->close_chunk(pool->source, chunk);
    cm_fast_lock_take(&pool->lock);
    if (!cm_is_ok(status)) {
        cm_heap_view view = cm_pool_view_locked(pool, 0);
        (void)cm_heap_give(&pool->heap, span, 0, 0, &view);
    }
    else if (arena == pool->range) {
        set_chunk_at(arena, span->block.address, nbytes, NULL);
        cm_heap_give_gap(&pool->heap, span);
    }
    else {
        cm_heap_remove_arena(&pool->heap, arena);
    }
    pool->counters.reserved_nbytes -= cm_is_ok(status) ? nbytes : 0;
    cm_fast_lock_give(&pool->lock);
    if (!cm_is_ok(status)) {
        atomic_fetch_add(&pool->lost_count, 1);
        return status;
    }
    if (arena == pool->range) {
        free(chunk);
    }
    cm_budget_refund(pool->config.budget, nbytes);
    *released_nbytes += nbytes;
    return cm_ok();
}

/* Of one that could neither be moved nor put back: its place is a gap. */
static void
lose_chunk(cm_pool *pool, chunk_move *move, cm_address from)
{
    uint64_t nbytes = move->chunk->nbytes;
    cm_fast_lock_take(&pool->lock);
    set_chunk_at(pool->range, from, nbytes, NULL);
    cm_heap_give_gap(&pool->heap, move->span);
    pool->counters.reserved_nbytes -= nbytes;
    cm_fast_lock_give(&pool->lock);
    cm_budget_refund(pool->config.budget, nbytes);
    free(move->chunk);
    *move = (chunk_move){NULL, NULL};
}

static cm_status
move_chunks(cm_pool *pool, filling *f, chunk_move *moves, uint32_t count)
{
    const cm_arena *range = pool->range;
    for (uint32_t i = 0; i < count; i++) {
        cm_chunk *chunk = moves[i].chunk;
        cm_address to = f->target->block.address + f->done_nbytes;
        cm_address from = chunk->address;
        cm_status status =
            pool->source->ops->move_chunk(pool->source, chunk, to - range->base);
        if (!cm_is_ok(status)) {
            if (chunk->address == 0) {
                lose_chunk(pool, &moves[i], from);
            }
            return status;
        }
        cm_fast_lock_take(&pool->lock);
        set_chunk_at(range, from, chunk->nbytes, NULL);
        set_chunk_at(range, to, chunk->nbytes, chunk);
        cm_heap_give_gap(&pool->heap, moves[i].span);
        pool->counters.remap_count++;
        pool->counters.remap_nbytes += chunk->nbytes;
        cm_fast_lock_give(&pool->lock);
        moves[i].span = NULL;
        f->done_nbytes += chunk->nbytes;
    }
    return cm_ok();
}

/* Each chunk costs a call, but can leave only when all of it is free: kept small
 * against the whole. */
static uint64_t
piece_nbytes(const cm_pool *pool, uint64_t nbytes, uint64_t made_nbytes)
{
    uint64_t granule = pool->source->granule;
    uint64_t held = pool->counters.reserved_nbytes + made_nbytes;
    uint64_t most = (held + nbytes) / CHUNK_SHARE / granule * granule;
    return most < granule ? granule : most;
}

static cm_status
create_chunks(cm_pool *pool, place_plan *plan, filling *f)
{
    const cm_arena *range = pool->range;
    uint64_t left = f->create_nbytes;
    uint64_t piece = left == 0 ? 0 : piece_nbytes(pool, left, plan->made_nbytes);
    while (left > 0) {
        uint64_t nbytes = piece < left ? piece : left;
        cm_address to = f->target->block.address + f->done_nbytes;
        cm_chunk *chunk = calloc(1, sizeof(*chunk));
        if (chunk == NULL) {
            return cm_fail(CM_ENOMEM, sizeof(*chunk));
        }
        cm_status status = pool->source->ops->open_chunk(pool->source, to - range->base,
                                                         nbytes, chunk);
        if (!cm_is_ok(status)) {
            free(chunk);
            return status;
        }
        cm_fast_lock_take(&pool->lock);
        set_chunk_at(range, to, nbytes, chunk);
        cm_fast_lock_give(&pool->lock);
        plan->made_nbytes += nbytes;
        f->made_nbytes += nbytes;
        f->done_nbytes += nbytes;
        left -= nbytes;
    }
    return cm_ok();
}

/* A request that fails leaves nothing behind: what was made for it goes back, the last
 * first. What the driver refuses to take stays, as free memory, and all below it. */
static void
close_made(cm_pool *pool, filling *f, uint64_t *made_nbytes)
{
    const cm_arena *range = pool->range;
    while (f->made_nbytes > 0) {
        cm_address end = f->target->block.address + f->done_nbytes;
        cm_chunk *chunk = range->chunk_at[(end - range->base) / range->granule - 1];
        uint64_t nbytes = chunk->nbytes;
        if (!cm_is_ok(pool->source->ops->close_chunk(pool->source, chunk))) {
            atomic_fetch_add(&pool->lost_count, 1);
            return;
        }
        cm_fast_lock_take(&pool->lock);
        set_chunk_at(range, end - nbytes, nbytes, NULL);
        cm_fast_lock_give(&pool->lock);
        free(chunk);
        f->made_nbytes -= nbytes;
        f->done_nbytes -= nbytes;
        *made_nbytes -= nbytes;
    }
}

/* Nothing is begun that even the whole device has no memory for. What the driver says
 * is free is no bound: it can move managed memory out of the way. */
static cm_status
check_device(const cm_pool *pool, uint64_t nbytes)
{
    uint64_t held = pool->counters.reserved_nbytes; /* changed by growers alone */
    uint64_t most = pool->source->most_nbytes;
    if (held > most || nbytes > most - held) {
        return (cm_status){CM_CUDA_OUT_OF_MEMORY, CM_OP_physical_create, 0, nbytes};
    }
    return cm_ok();
}

static void
give_spare_back(cm_pool *pool, place_plan *plan)
{
    uint32_t assigned = plan->fillings[plan->filling_count - 1].move_end;
    uint64_t released_nbytes = 0;
    while (plan->move_count > assigned) {
        const chunk_move *spare = &plan->moves[--plan->move_count];
        cm_status status =
            cm_pool_close_chunk(pool, spare->span, spare->chunk, &released_nbytes);
        (void)status; /* where it stays the pool holds more than it needs */
    }
}

static cm_status
fill(cm_pool *pool, place_plan *plan)
{
    uint64_t charged = plan->create_nbytes;
    give_spare_back(pool, plan);
    if (charged > 0 && !cm_budget_try_charge(pool->config.budget, charged)) {
        return cm_fail(CM_ELIMIT, charged);
    }
    cm_status status = charged > 0 ? check_device(pool, charged) : cm_ok();
    uint32_t moved = 0;
    for (uint32_t i = 0; i < plan->filling_count && cm_is_ok(status); i++) {
        filling *f = &plan->fillings[i];
        status = move_chunks(pool, f, plan->moves + moved, f->move_end - moved);
        moved = f->move_end;
        if (cm_is_ok(status)) {
            status = create_chunks(pool, plan, f);
        }
    }
    for (uint32_t i = plan->filling_count; i-- > 0 && !cm_is_ok(status);) {
        close_made(pool, &plan->fillings[i], &plan->made_nbytes);
    }
    if (charged > plan->made_nbytes) {
        cm_budget_refund(pool->config.budget, charged - plan->made_nbytes);
    }
    return status;
}

static cm_status
grow_placed(cm_pool *pool, uint64_t size, const cm_stream *stream, cm_heap_span **out)
{
    place_plan plan;
    cm_fast_lock_take(&pool->lock);
    cm_heap_view view =
        cm_pool_view_locked(pool, cm_pool_find_slot_locked(pool, stream));
    cm_status status = plan_place_locked(pool, size, &view, &plan);
    cm_fast_lock_give(&pool->lock);
    if (!cm_is_ok(status)) {
        fini_plan(&plan);
        return status;
    }
    status = fill(pool, &plan);
    cm_fast_lock_take(&pool->lock);
    count_reserved_locked(pool, plan.made_nbytes);
    if (plan.made_nbytes > 0) {
        pool->heap.tidy_count = TIDY_TAKES;
    }
    view = cm_pool_view_locked(pool, cm_pool_find_slot_locked(pool, stream));
    cm_heap_span *span = settle_place_locked(pool, &plan, &view);
    if (cm_is_ok(status)) {
        *out = cm_heap_carve(&pool->heap, span, plan.at.begin, size);
        if (*out == NULL) {
            status = cm_fail(CM_ENOMEM, sizeof(cm_heap_span));
        }
    }
    cm_pool_note_cached_locked(pool);
    cm_fast_lock_give(&pool->lock);
    fini_plan(&plan);
    if (status.code == CM_CUDA_OUT_OF_MEMORY && status.op == CM_OP_physical_create
        && status.arg < size) {
        status.arg = size; /* more telling than the piece of it that failed */
    }
    return status;
}

/* -- one chunk, one segment ------------------------------------------------------------- */

static cm_status
add_segment(cm_pool *pool, const cm_chunk *chunk, uint64_t size, cm_heap_span **out)
{
    cm_fast_lock_take(&pool->lock);
    cm_arena *arena = cm_heap_add_chunk(&pool->heap, chunk);
    if (arena != NULL) {
        cm_heap_span *span =
            cm_heap_carve(&pool->heap, arena->first, chunk->address, size);
        if (span != NULL) {
            count_reserved_locked(pool, chunk->nbytes);
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
grow_segment(cm_pool *pool, uint64_t size, uint64_t nbytes, cm_heap_span **out)
{
    if (!cm_budget_try_charge(pool->config.budget, nbytes)) {
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
        cm_budget_refund(pool->config.budget, nbytes);
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
cm_pool_grow(cm_pool *pool, uint64_t size, const cm_stream *stream, cm_heap_span **out)
{
    if (pool->source == NULL) {
        CM_TRY(open_source(pool));
    }
    if (size > INT64_MAX - pool->source->granule) {
        return cm_fail(CM_EOVERFLOW, size);
    }
    if (pool->source->is_placed) {
        return grow_placed(pool, size, stream, out);
    }
    uint64_t least = cm_round_up_to(size, pool->source->granule);
    uint64_t step = cm_round_up_to(segment_step(pool), pool->source->granule);
    step = step > least ? step : least;
    cm_status status = grow_segment(pool, size, step, out);
    if (cm_pool_is_short(status) && step > least) {
        status = grow_segment(pool, size, least, out);
    }
    return status;
}
