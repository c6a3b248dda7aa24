/* SPDX-License-Identifier: Apache-2.0 */
/* What a place is filled with: free chunks from elsewhere, whose memory is moved there,
 * and what is still missing from the driver. */
#include "base/checked_math.h"
#include "pool/pool_place.h"

enum {
    SOURCE_SPANS = 64, /* free spans searched for chunks to move */
    CHUNKS = 256       /* and the chunks found in them */
};

/* A chunk wholly inside a free span. */
typedef struct candidate {
    cm_chunk *chunk; /* NULL: taken */
    cm_span *span;   /* that free span; its node keeps the lowest part when cut */
    uint32_t source;
} candidate;

typedef struct candidates {
    candidate at[CHUNKS];
    uint32_t count;
    uint32_t source_count;
} candidates;

/* -- fillings --------------------------------------------------------------------------- */

static void
add_filling(const cm_pool *pool, cm_place_plan *plan, cm_span *gap, uint64_t size)
{
    uint64_t granule = pool->source->granule;
    cm_address begin = plan->at.begin;
    cm_address low = gap->block.address;
    cm_address high = cm_round_up_to(begin + size, granule);
    cm_filling *f = &plan->fillings[plan->filling_count++];
    *f = (cm_filling){.gap = gap};
    low = begin > low ? begin / granule * granule : low;
    high = high < cm_span_end(gap) ? high : cm_span_end(gap);
    f->downward = low > gap->block.address;
    f->fill = low;
    f->need_nbytes = high - low;
    f->room_nbytes = f->downward ? high - gap->block.address : cm_span_end(gap) - low;
}

/* The free spans of the place stay out of everyone's hands meanwhile. */
static void
hold_spans_locked(cm_pool *pool, cm_place_plan *plan, uint64_t size,
                  const cm_heap_view *view)
{
    for (uint32_t i = 0; i < plan->at.count; i++) {
        cm_span *span = plan->at.spans[i];
        if (span->state == CM_SPAN_GAP) {
            add_filling(pool, plan, span, size);
            continue;
        }
        if (!cm_span_is_clean(span, view)) {
            plan->tag = span->tag;
            plan->epoch = span->epoch > plan->epoch ? span->epoch : plan->epoch;
        }
        (void)cm_heap_carve(&pool->heap, span, span->block.address, span->block.nbytes);
    }
}

/* -- chunks to move --------------------------------------------------------------------- */

static void
add_candidates(const cm_arena *range, cm_span *span, candidates *out)
{
    cm_address end = cm_span_end(span);
    cm_address at = cm_round_up_to(span->block.address, range->granule);
    uint32_t source = out->source_count++;
    while (at < end && out->count < CHUNKS) {
        cm_chunk *chunk = range->chunk_at[(at - range->base) / range->granule];
        if (chunk->address == at && at + chunk->nbytes <= end && chunk->handle != 0) {
            out->at[out->count++] = (candidate){chunk, span, source};
        }
        at = chunk->address + chunk->nbytes;
    }
}

/* Free chunks elsewhere, from the longest spans first: those leave the fewest odd ends.
 * Only what the host has seen idle can be moved. */
static void
find_candidates_locked(cm_pool *pool, candidates *out, const cm_heap_view *view)
{
    out->count = 0;
    out->source_count = 0;
    for (uint32_t bin = CM_BIN_COUNT; bin-- > 0;) {
        cm_list *list = &pool->heap.bins[bin];
        for (cm_list *n = list->next; n != list; n = n->next) {
            cm_span *span = CM_LIST_ENTRY(n, cm_span, node);
            if (span->block.nbytes < pool->source->granule
                || out->source_count == SOURCE_SPANS || out->count == CHUNKS) {
                return;
            }
            if (cm_span_is_clean(span, view)) {
                add_candidates(pool->range, span, out);
            }
        }
    }
}

/* The chunk that serves a need best and is no longer than `room`, of the first free
 * span that has one: the smallest that covers the need, else the largest. */
static candidate *
best_candidate(candidates *all, uint64_t need, uint64_t room)
{
    candidate *best = NULL;
    for (uint32_t i = 0; i < all->count; i++) {
        candidate *c = &all->at[i];
        if (c->chunk == NULL || c->chunk->nbytes > room) {
            continue;
        }
        if (best != NULL && c->source != best->source) {
            break;
        }
        uint64_t nbytes = c->chunk->nbytes;
        uint64_t least = best == NULL ? 0 : best->chunk->nbytes;
        if (best == NULL
            || (nbytes >= need ? least < need || nbytes <= least
                               : least < need && nbytes >= least)) {
            best = c;
        }
    }
    return best;
}

/* Cut the candidate's chunk out of its free span. False: no memory, nothing changed. */
static bool
take_candidate_locked(cm_pool *pool, candidate *c, cm_move *out)
{
    cm_span *span = c->span;
    while (cm_span_end(span) <= c->chunk->address) {
        span = span->next; /* what was cut off its end by another candidate */
    }
    out->chunk = c->chunk;
    out->span = cm_heap_carve(&pool->heap, span, c->chunk->address, c->chunk->nbytes);
    c->chunk = NULL;
    return out->span != NULL;
}

static void
choose_moves_locked(cm_pool *pool, cm_place_plan *plan, candidates *all)
{
    for (uint32_t i = 0; i < plan->filling_count; i++) {
        cm_filling *f = &plan->fillings[i];
        while (f->moved_nbytes < f->need_nbytes && plan->move_count < CM_PLACE_MOVES) {
            candidate *best = best_candidate(all, f->need_nbytes - f->moved_nbytes,
                                             f->room_nbytes - f->moved_nbytes);
            cm_move *move = &plan->moves[plan->move_count];
            if (best == NULL || !take_candidate_locked(pool, best, move)) {
                break;
            }
            f->moved_nbytes += move->chunk->nbytes;
            plan->move_count++;
        }
        f->move_end = plan->move_count;
    }
}

/* -- chunks to make --------------------------------------------------------------------- */

/* What is missing, and where the place can grow also the step of a growth. */
static void
choose_creates(const cm_pool *pool, cm_place_plan *plan, bool with_step)
{
    cm_filling *open = NULL;
    uint64_t room = 0;
    for (uint32_t i = 0; i < plan->filling_count; i++) {
        cm_filling *f = &plan->fillings[i];
        if (f->moved_nbytes >= f->need_nbytes) {
            continue;
        }
        f->create_nbytes = f->need_nbytes - f->moved_nbytes;
        plan->create_nbytes += f->create_nbytes;
        if (f->room_nbytes - f->need_nbytes > room) {
            room = f->room_nbytes - f->need_nbytes;
            open = f;
        }
    }
    if (open != NULL && with_step) {
        uint64_t more =
            cm_pool_growth_step(pool, plan->create_nbytes) - plan->create_nbytes;
        more = more < room ? more : room;
        open->create_nbytes += more;
        plan->create_nbytes += more;
    }
}

/* -- together --------------------------------------------------------------------------- */

/* Take the part of the gap that is filled, and the node that settling may need. */
static bool
hold_filling_locked(cm_pool *pool, cm_filling *f)
{
    uint64_t nbytes = f->moved_nbytes + f->create_nbytes;
    if (f->downward) {
        f->fill = f->fill + f->need_nbytes - nbytes;
    }
    f->spare = cm_heap_take_node(&pool->heap);
    if (f->spare != NULL) {
        f->target = cm_heap_carve(&pool->heap, f->gap, f->fill, nbytes);
    }
    return f->target != NULL;
}

cm_status
cm_pool_plan_place_locked(cm_pool *pool, uint64_t size, bool with_step,
                          const cm_heap_view *view, cm_place_plan *plan)
{
    candidates all;
    *plan = (cm_place_plan){0};
    cm_heap_settle(&pool->heap, view);
    if (!cm_pool_choose_place_locked(pool, size, view, &plan->at)) {
        /* No addresses are left, so there could not be memory for all of them either,
         * unless a limit says so before. */
        if (!cm_pool_try_charge(pool, size)) {
            return cm_fail(CM_ELIMIT, size);
        }
        cm_pool_refund(pool, size);
        return (cm_status){CM_CUDA_OUT_OF_MEMORY, CM_OP_physical_create, 0, size};
    }
    hold_spans_locked(pool, plan, size, view);
    find_candidates_locked(pool, &all, view);
    choose_moves_locked(pool, plan, &all);
    choose_creates(pool, plan, with_step);
    for (uint32_t i = 0; i < plan->filling_count; i++) {
        if (!hold_filling_locked(pool, &plan->fillings[i])) {
            (void)cm_pool_settle_place_locked(pool, plan, view);
            return cm_fail(CM_ENOMEM, sizeof(cm_span));
        }
    }
    return cm_ok();
}

/* What has memory of one gap; the rest is a gap again. NULL: nothing has. */
static cm_span *
settle_filling_locked(cm_pool *pool, cm_filling *f)
{
    cm_heap *heap = &pool->heap;
    cm_span *filled = f->target;
    if (filled != NULL && f->done_nbytes == 0) {
        cm_heap_give_gap(heap, filled);
        filled = NULL;
    }
    else if (filled != NULL && f->done_nbytes < filled->block.nbytes) {
        cm_heap_split_busy(heap, filled, f->done_nbytes, f->spare);
        cm_heap_give_gap(heap, f->spare);
        f->spare = NULL;
    }
    if (f->spare != NULL) {
        cm_heap_give_node(heap, f->spare);
    }
    return filled;
}

cm_span *
cm_pool_settle_place_locked(cm_pool *pool, cm_place_plan *plan,
                            const cm_heap_view *view)
{
    cm_heap *heap = &pool->heap;
    cm_span *whole = NULL;
    cm_filling *f = plan->fillings;
    for (uint32_t i = 0; i < plan->move_count; i++) {
        if (plan->moves[i].span != NULL) {
            (void)cm_heap_give(heap, plan->moves[i].span, 0, 0, view);
        }
    }
    for (uint32_t i = 0; i < plan->at.count; i++) {
        cm_span *span = plan->at.spans[i];
        if (f < plan->fillings + plan->filling_count && f->gap == span) {
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
