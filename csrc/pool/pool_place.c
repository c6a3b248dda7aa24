/* SPDX-License-Identifier: Apache-2.0 */
/* Growth where chunks can be put anywhere in one range of addresses: a request that
 * fits in no free span is placed where the least memory is missing, and what is missing
 * comes first from free chunks elsewhere, whose memory is moved there, and only then
 * from the driver. A move costs as much as a small allocation (about 35 us on an H200,
 * whatever the size) and holds nothing more. */
#include <stdlib.h>

#include "pool/pool_private.h"

enum {
    MOVE_MAX = 48,     /* chunks moved by one growth */
    CREATE_MAX = 64,   /* chunks made by one growth */
    SOURCE_SPANS = 64, /* free spans searched for movable chunks */
    GAPS_LOOKED_AT = 512,
    CHUNK_GRANULES = 2, /* the least a new chunk is worth, */
    CHUNK_SHARE = 32    /* and the greatest share of what is held */
};

/* Where a request goes: `fill_nbytes` of the gap from `fill` on get memory; with the
 * free spans left and right of it, `begin` to `begin + size` is then usable. */
typedef struct place {
    cm_span *gap;
    cm_span *left; /* NULL: not used */
    cm_span *right;
    cm_address begin;
    cm_address fill;
    uint64_t fill_nbytes;
    uint64_t room_nbytes; /* what may be filled at most, in the same direction */
    bool downward;        /* grows towards lower addresses: ends at the gap's end */
} place;

typedef struct move {
    cm_chunk *chunk;
    cm_span *from; /* BUSY, exactly the chunk */
} move;

typedef struct plan {
    place at;
    cm_span *target; /* BUSY: the part of the gap that is filled */
    cm_span *spare;  /* a node for cutting off what stayed without memory */
    move moves[MOVE_MAX];
    uint32_t move_count;
    uint64_t moved_nbytes;
    uint64_t create_nbytes;
    uint64_t made_nbytes;
    uint64_t done_nbytes; /* of the target, that have memory: moved or made */
    uint32_t tag;         /* of the place's free spans */
    uint64_t epoch;
} plan;

static uint64_t
round_up(uint64_t n, uint64_t step)
{
    return (n + step - 1) / step * step;
}

/* -- choosing a place ------------------------------------------------------------------- */

static cm_span *
usable(cm_span *span, const cm_heap_view *view)
{
    bool good =
        span != NULL && span->state == CM_SPAN_FREE && cm_span_is_usable(span, view);
    return good ? span : NULL;
}

/* Keep the better of two: less new memory, then the smaller gap. */
static void
keep_better(place *best, const place *p)
{
    if (best->gap == NULL || p->fill_nbytes < best->fill_nbytes
        || (p->fill_nbytes == best->fill_nbytes
            && p->gap->block.nbytes < best->gap->block.nbytes)) {
        *best = *p;
    }
}

static void
try_gap(const cm_pool *pool, cm_span *gap, uint64_t size, const cm_heap_view *view,
        place *best)
{
    uint64_t granule = pool->source->granule;
    uint64_t align = cm_pool_align_of(pool, size);
    cm_span *left = usable(gap->prev, view);
    cm_span *right = usable(gap->next, view);
    cm_address gap_begin = gap->block.address;
    cm_address gap_end = cm_span_end(gap);
    cm_address begin = left == NULL ? gap_begin : round_up(left->block.address, align);
    if (begin >= gap_begin) {
        begin = gap_begin;
        left = NULL;
    }
    cm_address end = begin + size;
    if (end <= gap_end) {
        uint64_t fill = end > gap_begin ? round_up(end - gap_begin, granule) : 0;
        if (fill != 0) {
            place p = {gap,  left, NULL, begin, gap_begin, fill, gap->block.nbytes,
                       false};
            keep_better(best, &p);
        }
    }
    else if (right != NULL && end <= cm_span_end(right)) {
        place p = {
            gap,  left, right, begin, gap_begin, gap->block.nbytes, gap->block.nbytes,
            false};
        keep_better(best, &p);
    }
    if (right != NULL && right->block.nbytes < size) {
        cm_address top = (cm_span_end(right) - size) & ~(align - 1);
        if (top >= gap_begin && top < gap_end) {
            uint64_t fill = round_up(gap_end - top, granule);
            place p = {gap, NULL, right, top, gap_end - fill, fill, gap->block.nbytes,
                       true};
            keep_better(best, &p);
        }
    }
}

static bool
choose_place_locked(cm_pool *pool, uint64_t size, const cm_heap_view *view, place *out)
{
    *out = (place){0};
    int looked_at = 0;
    for (cm_list *n = pool->heap.gaps.prev;
         n != &pool->heap.gaps && looked_at < GAPS_LOOKED_AT;
         n = n->prev, looked_at++) {
        try_gap(pool, CM_LIST_ENTRY(n, cm_span, node), size, view, out);
    }
    return out->gap != NULL;
}

/* -- choosing chunks to move ------------------------------------------------------------ */

/* The chunk wholly inside `span` that serves a need best: the smallest that covers it,
 * else the largest; at most `room`, and not one chosen before (those lie at or above
 * `below`). */
static cm_chunk *
best_chunk(const cm_arena *range, const cm_span *span, cm_address below, uint64_t need,
           uint64_t room)
{
    cm_chunk *best = NULL;
    cm_address end = cm_span_end(span) < below ? cm_span_end(span) : below;
    cm_address at = round_up(span->block.address, range->granule);
    while (at < end) {
        cm_chunk *chunk = range->chunk_at[(at - range->base) / range->granule];
        if (chunk->address == at && at + chunk->nbytes <= end && chunk->nbytes <= room
            && chunk->handle != 0) {
            bool covers = chunk->nbytes >= need;
            if (best == NULL
                || (covers ? best->nbytes < need || chunk->nbytes <= best->nbytes
                           : best->nbytes < need && chunk->nbytes >= best->nbytes)) {
                best = chunk;
            }
        }
        at = chunk->address + chunk->nbytes;
    }
    return best;
}

/* Take chunks out of `span`, from its end downwards so that what remains below keeps
 * the span's node. */
static void
take_chunks_locked(cm_pool *pool, plan *p, cm_span *span)
{
    cm_address below = cm_span_end(span);
    while (p->moved_nbytes < p->at.fill_nbytes && p->move_count < MOVE_MAX) {
        cm_chunk *chunk =
            best_chunk(pool->range, span, below, p->at.fill_nbytes - p->moved_nbytes,
                       p->at.room_nbytes - p->moved_nbytes);
        if (chunk == NULL) {
            return;
        }
        bool at_start = chunk->address == span->block.address;
        cm_span *from = cm_heap_carve(&pool->heap, span, chunk->address, chunk->nbytes);
        if (from == NULL) {
            return;
        }
        p->moves[p->move_count++] = (move){chunk, from};
        p->moved_nbytes += chunk->nbytes;
        below = chunk->address;
        if (at_start) {
            return;
        }
    }
}

/* Free chunks elsewhere, from the longest spans first: those leave the fewest odd ends.
 * Only what the host has seen idle can be moved. */
static void
choose_moves_locked(cm_pool *pool, plan *p, const cm_heap_view *view)
{
    cm_span *spans[SOURCE_SPANS];
    int count = 0;
    for (uint32_t bin = CM_BIN_COUNT; bin-- > 0 && count < SOURCE_SPANS;) {
        cm_list *list = &pool->heap.bins[bin];
        for (cm_list *n = list->next; n != list && count < SOURCE_SPANS; n = n->next) {
            cm_span *span = CM_LIST_ENTRY(n, cm_span, node);
            if (span->block.nbytes < pool->source->granule) {
                bin = 0;
                break;
            }
            if (cm_span_is_clean(span, view)) {
                spans[count++] = span;
            }
        }
    }
    for (int i = 0; i < count && p->moved_nbytes < p->at.fill_nbytes; i++) {
        take_chunks_locked(pool, p, spans[i]);
    }
}

/* -- the plan --------------------------------------------------------------------------- */

/* The free spans beside the gap stay out of everyone's hands meanwhile. */
static void
hold_neighbours_locked(cm_pool *pool, plan *p, const cm_heap_view *view)
{
    cm_span *both[2] = {p->at.left, p->at.right};
    for (int i = 0; i < 2; i++) {
        cm_span *span = both[i];
        if (span == NULL) {
            continue;
        }
        if (!cm_span_is_clean(span, view)) {
            p->tag = span->tag;
            p->epoch = span->epoch > p->epoch ? span->epoch : p->epoch;
        }
        (void)cm_heap_carve(&pool->heap, span, span->block.address, span->block.nbytes);
    }
}

static void
free_neighbour_locked(cm_pool *pool, const plan *p, cm_span *span,
                      const cm_heap_view *view)
{
    if (span != NULL) {
        (void)cm_heap_give(&pool->heap, span, p->tag, p->epoch, view);
    }
}

/* Everything that was taken out for a growth which does not come about. */
static void
undo_locked(cm_pool *pool, const plan *p, const cm_heap_view *view)
{
    for (uint32_t i = 0; i < p->move_count; i++) {
        (void)cm_heap_give(&pool->heap, p->moves[i].from, 0, 0, view);
    }
    free_neighbour_locked(pool, p, p->at.left, view);
    free_neighbour_locked(pool, p, p->at.right, view);
    cm_heap_give_node(&pool->heap, p->spare);
}

/* How much to make: what is missing, and upwards also the step of a growth. */
static uint64_t
create_nbytes(const cm_pool *pool, const plan *p, bool with_step)
{
    if (p->moved_nbytes >= p->at.fill_nbytes) {
        return 0;
    }
    uint64_t need = p->at.fill_nbytes - p->moved_nbytes;
    uint64_t room = p->at.room_nbytes - p->moved_nbytes;
    uint64_t step = with_step ? cm_pool_growth_step(pool, need) : need;
    return step < room ? step : room;
}

/* -- carrying it out, without the lock -------------------------------------------------- */

static void
set_chunk_at(const cm_arena *range, cm_address address, uint64_t nbytes,
             cm_chunk *chunk)
{
    uint64_t first = (address - range->base) / range->granule;
    for (uint64_t i = 0; i < nbytes / range->granule; i++) {
        range->chunk_at[first + i] = chunk;
    }
}

static cm_status
move_chunks(cm_pool *pool, plan *p)
{
    const cm_arena *range = pool->range;
    for (uint32_t i = 0; i < p->move_count; i++) {
        move *m = &p->moves[i];
        cm_address to = p->at.fill + p->done_nbytes;
        cm_address from = m->chunk->address;
        CM_TRY(pool->source->ops->move_chunk(pool->source, m->chunk, to - range->base));
        m->chunk->address = to;
        cm_fast_lock_take(&pool->lock);
        set_chunk_at(range, from, m->chunk->nbytes, NULL);
        set_chunk_at(range, to, m->chunk->nbytes, m->chunk);
        cm_heap_give_gap(&pool->heap, m->from);
        pool->counters.remap_count++;
        pool->counters.remap_nbytes += m->chunk->nbytes;
        cm_fast_lock_give(&pool->lock);
        m->from = NULL;
        p->done_nbytes += m->chunk->nbytes;
    }
    return cm_ok();
}

/* Chunks are kept small against the whole, since one can move only when all of it is
 * free. */
static uint64_t
piece_nbytes(const cm_pool *pool, uint64_t nbytes)
{
    uint64_t granule = pool->source->granule;
    uint64_t held = pool->counters.reserved_nbytes; /* changed by growers alone */
    uint64_t most = round_up(held / CHUNK_SHARE, granule);
    most = most < CHUNK_GRANULES * granule ? CHUNK_GRANULES * granule : most;
    uint64_t count = (nbytes + most - 1) / most;
    count = count > CREATE_MAX ? CREATE_MAX : count;
    return round_up(nbytes / count, granule);
}

static cm_status
create_chunks(cm_pool *pool, plan *p)
{
    const cm_arena *range = pool->range;
    uint64_t left = p->create_nbytes;
    uint64_t piece = left == 0 ? 0 : piece_nbytes(pool, left);
    while (left > 0) {
        uint64_t nbytes = piece < left ? piece : left;
        cm_address to = p->at.fill + p->done_nbytes;
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
        cm_pool_count_reserved_locked(pool, nbytes);
        cm_fast_lock_give(&pool->lock);
        p->made_nbytes += nbytes;
        p->done_nbytes += nbytes;
        left -= nbytes;
    }
    return cm_ok();
}

/* -- from plan to span ------------------------------------------------------------------ */

static cm_status
prepare_locked(cm_pool *pool, uint64_t size, bool with_step, plan *p,
               const cm_heap_view *view)
{
    *p = (plan){0};
    cm_heap_settle(&pool->heap, view);
    if (!choose_place_locked(pool, size, view, &p->at)) {
        /* No addresses are left, so there could not be memory for all of them either.
         */
        return (cm_status){CM_CUDA_OUT_OF_MEMORY, CM_OP_physical_create, 0, size};
    }
    p->spare = cm_heap_take_node(&pool->heap);
    if (p->spare == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(cm_span));
    }
    hold_neighbours_locked(pool, p, view);
    choose_moves_locked(pool, p, view);
    p->create_nbytes = create_nbytes(pool, p, with_step);
    uint64_t fill_nbytes = p->moved_nbytes + p->create_nbytes;
    if (p->at.downward) {
        p->at.fill = cm_span_end(p->at.gap) - fill_nbytes;
    }
    p->target = cm_heap_carve(&pool->heap, p->at.gap, p->at.fill, fill_nbytes);
    if (p->target == NULL) {
        undo_locked(pool, p, view);
        return cm_fail(CM_ENOMEM, sizeof(cm_span));
    }
    return cm_ok();
}

/* The target up to what has memory, its neighbours and what was not moved become free;
 * the rest is a gap again. Returns the span the place is in; NULL: nothing was filled.
 */
static cm_span *
settle_locked(cm_pool *pool, plan *p, const cm_heap_view *view)
{
    cm_heap *heap = &pool->heap;
    cm_span *span = p->target;
    for (uint32_t i = 0; i < p->move_count; i++) {
        if (p->moves[i].from != NULL) {
            (void)cm_heap_give(heap, p->moves[i].from, 0, 0, view);
        }
    }
    if (p->done_nbytes == 0) {
        cm_heap_give_gap(heap, span);
        free_neighbour_locked(pool, p, p->at.left, view);
        free_neighbour_locked(pool, p, p->at.right, view);
        return NULL;
    }
    if (p->done_nbytes < span->block.nbytes) {
        cm_heap_split_busy(heap, span, p->done_nbytes, p->spare);
        cm_heap_give_gap(heap, p->spare);
        p->spare = NULL;
    }
    if (p->at.left != NULL) {
        span = cm_heap_fuse(heap, p->at.left, span);
    }
    if (p->at.right != NULL && span->next == p->at.right) {
        span = cm_heap_fuse(heap, span, p->at.right);
    }
    else {
        free_neighbour_locked(pool, p, p->at.right, view);
    }
    return cm_heap_give(heap, span, p->tag, p->epoch, view);
}

static cm_status
fill(cm_pool *pool, plan *p)
{
    uint64_t charged = p->create_nbytes;
    if (charged > 0 && !cm_pool_try_charge(pool, charged)) {
        return cm_fail(CM_ELIMIT, charged);
    }
    cm_status status = move_chunks(pool, p);
    if (cm_is_ok(status)) {
        status = create_chunks(pool, p);
    }
    if (charged > p->made_nbytes) {
        cm_pool_refund(pool, charged - p->made_nbytes);
    }
    return status;
}

static cm_status
grow(cm_pool *pool, uint64_t size, const cm_stream *stream, bool with_step,
     cm_span **out)
{
    plan p;
    cm_fast_lock_take(&pool->lock);
    cm_heap_view view =
        cm_pool_view_locked(pool, cm_pool_find_mark_locked(pool, stream));
    cm_status status = prepare_locked(pool, size, with_step, &p, &view);
    cm_fast_lock_give(&pool->lock);
    CM_TRY(status);
    status = fill(pool, &p);
    cm_fast_lock_take(&pool->lock);
    view = cm_pool_view_locked(pool, cm_pool_find_mark_locked(pool, stream));
    cm_span *span = settle_locked(pool, &p, &view);
    if (p.spare != NULL) {
        cm_heap_give_node(&pool->heap, p.spare);
    }
    if (cm_is_ok(status)) {
        *out = span == NULL ? NULL : cm_heap_carve(&pool->heap, span, p.at.begin, size);
        if (*out != NULL) {
            (*out)->state = CM_SPAN_LIVE;
        }
        else {
            status = cm_fail(CM_ENOMEM, sizeof(cm_span));
        }
    }
    cm_fast_lock_give(&pool->lock);
    return status;
}

cm_status
cm_pool_grow_placed(cm_pool *pool, uint64_t size, const cm_stream *stream,
                    cm_span **out)
{
    cm_status status = grow(pool, size, stream, true, out);
    if (cm_pool_is_short(status) && status.code != CM_ENOMEM) {
        status = grow(pool, size, stream, false, out); /* the need alone */
    }
    return status;
}
