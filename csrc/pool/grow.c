/* SPDX-License-Identifier: Apache-2.0 */
/* More memory: how much at once, what it counts against, and how it comes. Where every
 * chunk is a segment of its own that is one call. Where chunks can be put anywhere in
 * one range of addresses it takes three steps: where the request goes, which memory
 * goes there, and the calls that bring it. A move costs as much as making a chunk
 * (about 35 us on an H200, whatever its size) and holds nothing more. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "pool/private.h"

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

/* Memory in flight comes back by itself: so much less is taken. */
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

/* How much to take at once when `size` is needed: so much more as costs little memory
 * and saves many small growths. */
static uint64_t
growth_step(const cm_pool *pool, uint64_t size)
{
    uint64_t step = pool->source->is_placed ? placed_step(pool) : segment_step(pool);
    return cm_round_up_to(size > step ? size : step, pool->source->granule);
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

/* -- where a request goes ------------------------------------------------------------------ */
/* One that fits in no free span: over free spans and the gaps between them, where the
 * least memory is missing. */

enum {
    PLACE_SPANS = 32,  /* free spans and gaps under one request */
    PLACE_GAPS = 16,   /* and the gaps among them */
    PLACE_MOVES = 48,  /* chunks moved by one growth, */
    PLACE_CREATES = 64 /* and made (for one gap) */
};

/* Where a request goes: over neighbouring free spans and gaps, from inside the first
 * to inside the last. */
typedef struct place {
    cm_heap_span *spans[PLACE_SPANS]; /* by address; BUSY once the plan holds them */
    uint32_t count;
    cm_address begin;
    uint64_t missing_nbytes; /* in whole granules: what the gaps under it need */
} place;

/* A free chunk on its way to another place. */
typedef struct chunk_move {
    cm_chunk *chunk;
    cm_heap_span *span; /* BUSY and exactly the chunk; NULL once it has moved */
} chunk_move;

/* One gap of a place. Its part from `fill` on gets memory: first chunks that are moved
 * there, then new ones. */
typedef struct filling {
    cm_heap_span *gap;    /* compared only, once the plan holds its part of it */
    cm_heap_span *target; /* BUSY: that part; NULL: not held */
    cm_heap_span *spare;  /* a node for cutting off what stayed without memory */
    cm_address fill;
    uint64_t need_nbytes;
    uint64_t room_nbytes; /* at most so much, in the direction it may grow */
    bool downward;        /* grows towards lower addresses */
    uint64_t moved_nbytes;
    uint64_t create_nbytes;
    uint64_t made_nbytes; /* of new chunks, so far: the last of done_nbytes */
    uint64_t done_nbytes; /* of the target: what has memory by now */
    uint32_t move_end;    /* its moves end before this one; they begin where those of
                             the gap before it end */
} filling;

typedef struct place_plan {
    place at;
    filling fillings[PLACE_GAPS];
    uint32_t filling_count;
    chunk_move moves[PLACE_MOVES];
    uint32_t move_count;
    uint64_t create_nbytes; /* of all fillings */
    uint64_t made_nbytes;   /* in so much of it; reserved from when the plan settles */
    uint32_t tag;           /* of the place's free spans */
    uint64_t epoch;
} place_plan;

enum { GAPS_LOOKED_AT = 512 };

/* The surroundings of one gap: what a place may cover whose first gap it is. */
typedef struct window {
    cm_heap_span *spans[PLACE_SPANS];
    uint32_t count;
    uint32_t gap; /* index of the first gap: 0, or 1 after a free span */
} window;

static bool
is_usable(const cm_heap_span *span, const cm_heap_view *view)
{
    return span != NULL
           && (span->state == CM_SPAN_GAP
               || (span->state == CM_SPAN_FREE && cm_span_is_usable(span, view)));
}

/* Up to where a place that begins at the end of the first gap would end. */
static void
look_around(cm_heap_span *gap, uint64_t size, const cm_heap_view *view, window *out)
{
    cm_heap_span *left = gap->prev;
    out->count = 0;
    out->gap = 0;
    if (left != NULL && left->state == CM_SPAN_FREE && is_usable(left, view)) {
        out->spans[out->count++] = left;
        out->gap = 1;
    }
    out->spans[out->count++] = gap;
    cm_address end = cm_span_end(gap) + size;
    uint32_t gaps = 1;
    for (cm_heap_span *span = gap->next;
         is_usable(span, view) && span->block.address < end && out->count < PLACE_SPANS;
         span = span->next) {
        gaps += span->state == CM_SPAN_GAP;
        if (gaps > PLACE_GAPS) {
            break;
        }
        out->spans[out->count++] = span;
    }
}

/* The place from `begin` on, which lies in the window's first gap or before it, if it
 * beats `best`: less new memory, then the shorter gaps. */
static void
try_begin(const cm_pool *pool, const window *w, cm_address begin, uint64_t size,
          place *best, uint64_t *best_gaps)
{
    uint64_t granule = pool->source->granule;
    cm_address end = begin + size;
    uint64_t missing = 0;
    uint64_t gaps = 0;
    uint32_t first = begin < w->spans[w->gap]->block.address ? 0 : w->gap;
    uint32_t i = first;
    cm_address reached = 0;
    for (; i < w->count && (i == first || w->spans[i]->block.address < end); i++) {
        const cm_heap_span *span = w->spans[i];
        reached = cm_span_end(span);
        if (span->state == CM_SPAN_GAP) {
            cm_address low = span->block.address;
            low = begin > low ? begin / granule * granule : low;
            cm_address high = cm_round_up_to(end, granule);
            high = high < reached ? high : reached;
            missing += high - low;
            gaps += span->block.nbytes;
        }
    }
    if (reached < end || missing == 0
        || (best->count > 0
            && (missing > best->missing_nbytes
                || (missing == best->missing_nbytes && gaps >= *best_gaps)))) {
        return;
    }
    best->count = i - first;
    for (uint32_t k = 0; k < best->count; k++) {
        best->spans[k] = w->spans[first + k];
    }
    best->begin = begin;
    best->missing_nbytes = missing;
    *best_gaps = gaps;
}

/* Least is missing either from the first usable address on, or where the place ends
 * with a free span. */
static void
try_gap(const cm_pool *pool, cm_heap_span *gap, uint64_t size, const cm_heap_view *view,
        place *best, uint64_t *best_gaps)
{
    uint64_t align = cm_pool_align_of(pool, size);
    window w;
    look_around(gap, size, view, &w);
    cm_address lowest = cm_round_up_to(w.spans[0]->block.address, align);
    if (lowest > gap->block.address) {
        lowest = gap->block.address;
    }
    try_begin(pool, &w, lowest, size, best, best_gaps);
    for (uint32_t i = w.gap + 1; i < w.count; i++) {
        if (w.spans[i]->state != CM_SPAN_FREE || cm_span_end(w.spans[i]) < size) {
            continue;
        }
        cm_address begin = (cm_span_end(w.spans[i]) - size) & ~(align - 1);
        if (begin >= lowest && begin < cm_span_end(gap)) {
            try_begin(pool, &w, begin, size, best, best_gaps);
        }
    }
}

/* The place for `size` bytes that is short of the least memory. False: there is none.
 */
static bool
choose_place_locked(cm_pool *pool, uint64_t size, const cm_heap_view *view, place *out)
{
    uint64_t best_gaps = 0;
    int looked_at = 0;
    out->count = 0;
    for (cm_list *n = pool->heap.gaps.prev;
         n != &pool->heap.gaps && looked_at < GAPS_LOOKED_AT;
         n = n->prev, looked_at++) {
        try_gap(pool, CM_LIST_ENTRY(n, cm_heap_span, node), size, view, out,
                &best_gaps);
    }
    return out->count > 0;
}

/* -- which memory goes there --------------------------------------------------------------- */
/* Free chunks from elsewhere, whose memory is moved there, and new ones. */

enum {
    SOURCE_SPANS = 64, /* free spans searched for chunks to move */
    CANDIDATES = 256   /* and the chunks found in them */
};

/* A chunk wholly inside a free span. */
typedef struct candidate {
    cm_chunk *chunk;    /* NULL: taken */
    cm_heap_span *span; /* that free span; its node keeps the lowest part when cut */
    uint32_t source;
} candidate;

typedef struct candidates {
    candidate at[CANDIDATES];
    uint32_t count;
    uint32_t source_count;
} candidates;

/* -- fillings --------------------------------------------------------------------------- */

static void
add_filling(const cm_pool *pool, place_plan *plan, cm_heap_span *gap, uint64_t size)
{
    uint64_t granule = pool->source->granule;
    cm_address begin = plan->at.begin;
    cm_address low = gap->block.address;
    cm_address high = cm_round_up_to(begin + size, granule);
    filling *f = &plan->fillings[plan->filling_count++];
    *f = (filling){.gap = gap};
    low = begin > low ? begin / granule * granule : low;
    high = high < cm_span_end(gap) ? high : cm_span_end(gap);
    f->downward = low > gap->block.address;
    f->fill = low;
    f->need_nbytes = high - low;
    f->room_nbytes = f->downward ? high - gap->block.address : cm_span_end(gap) - low;
}

/* The free spans of the place stay out of everyone's hands meanwhile. */
static void
hold_spans_locked(cm_pool *pool, place_plan *plan, uint64_t size,
                  const cm_heap_view *view)
{
    for (uint32_t i = 0; i < plan->at.count; i++) {
        cm_heap_span *span = plan->at.spans[i];
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
add_candidates(const cm_arena *range, cm_heap_span *span, candidates *out)
{
    cm_address end = cm_span_end(span);
    cm_address at = cm_round_up_to(span->block.address, range->granule);
    uint32_t source = out->source_count++;
    while (at < end && out->count < CANDIDATES) {
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
    for (uint32_t bin = CM_HEAP_BIN_COUNT; bin-- > 0;) {
        cm_list *list = &pool->heap.bins[bin];
        for (cm_list *n = list->next; n != list; n = n->next) {
            cm_heap_span *span = CM_LIST_ENTRY(n, cm_heap_span, node);
            if (span->block.nbytes < pool->source->granule
                || out->source_count == SOURCE_SPANS || out->count == CANDIDATES) {
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
take_candidate_locked(cm_pool *pool, candidate *c, chunk_move *out)
{
    cm_heap_span *span = c->span;
    while (cm_span_end(span) <= c->chunk->address) {
        span = span->next; /* what was cut off its end by another candidate */
    }
    out->chunk = c->chunk;
    out->span = cm_heap_carve(&pool->heap, span, c->chunk->address, c->chunk->nbytes);
    c->chunk = NULL;
    return out->span != NULL;
}

static void
choose_moves_locked(cm_pool *pool, place_plan *plan, candidates *all)
{
    for (uint32_t i = 0; i < plan->filling_count; i++) {
        filling *f = &plan->fillings[i];
        while (f->moved_nbytes < f->need_nbytes && plan->move_count < PLACE_MOVES) {
            candidate *best = best_candidate(all, f->need_nbytes - f->moved_nbytes,
                                             f->room_nbytes - f->moved_nbytes);
            chunk_move *move = &plan->moves[plan->move_count];
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
choose_creates(const cm_pool *pool, place_plan *plan, bool with_step)
{
    filling *open = NULL;
    uint64_t room = 0;
    for (uint32_t i = 0; i < plan->filling_count; i++) {
        filling *f = &plan->fillings[i];
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
        uint64_t more = growth_step(pool, plan->create_nbytes) - plan->create_nbytes;
        more = more < room ? more : room;
        open->create_nbytes += more;
        plan->create_nbytes += more;
    }
}

/* Take the part of the gap that is filled, and the node that settling may need. */
static bool
hold_filling_locked(cm_pool *pool, filling *f)
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

/* What has memory of one gap; the rest is a gap again. NULL: nothing has. */
static cm_heap_span *
settle_filling_locked(cm_pool *pool, filling *f)
{
    cm_heap *heap = &pool->heap;
    cm_heap_span *filled = f->target;
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
    for (uint32_t i = 0; i < plan->at.count; i++) {
        cm_heap_span *span = plan->at.spans[i];
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

/* Fill in the plan and take all that it needs out of the heap. `with_step`: may make
 * more than is missing. Fails: CM_ENOMEM, no addresses; nothing is held then. */
static cm_status
plan_place_locked(cm_pool *pool, uint64_t size, bool with_step,
                  const cm_heap_view *view, place_plan *plan)
{
    candidates all;
    *plan = (place_plan){0};
    cm_heap_settle(&pool->heap, view);
    if (!choose_place_locked(pool, size, view, &plan->at)) {
        /* No addresses are left, so there could not be memory for all of them either,
         * unless a limit says so before. */
        if (!cm_budget_try_charge(pool->config.budget, size)) {
            return cm_fail(CM_ELIMIT, size);
        }
        cm_budget_refund(pool->config.budget, size);
        return (cm_status){CM_CUDA_OUT_OF_MEMORY, CM_OP_physical_create, 0, size};
    }
    hold_spans_locked(pool, plan, size, view);
    find_candidates_locked(pool, &all, view);
    choose_moves_locked(pool, plan, &all);
    choose_creates(pool, plan, with_step);
    for (uint32_t i = 0; i < plan->filling_count; i++) {
        if (!hold_filling_locked(pool, &plan->fillings[i])) {
            (void)settle_place_locked(pool, plan, view);
            return cm_fail(CM_ENOMEM, sizeof(cm_heap_span));
        }
    }
    return cm_ok();
}

/* -- the calls that bring it --------------------------------------------------------------- */

enum {
    CHUNK_GRANULES = 5,       /* the least a new chunk is worth, */
    CHUNK_SHARE = 32,         /* and the greatest share of what is held then; */
    HURRIED_CHUNK_SHARE = 18, /* the same while growths come close together, */
    HURRIED_ALLOCATIONS = 16  /* with fewer allocations than so many between them */
};

static void
set_chunk_at(const cm_arena *range, cm_address address, uint64_t nbytes,
             cm_chunk *chunk)
{
    uint64_t first = (address - range->base) / range->granule;
    for (uint64_t i = 0; i < nbytes / range->granule; i++) {
        range->chunk_at[first + i] = chunk;
    }
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
        cm_address to = f->fill + f->done_nbytes;
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

/* Chunks are kept small against the whole, since one can move only when all of it is
 * free; but each costs a call. */
static uint64_t
piece_nbytes(const cm_pool *pool, uint64_t nbytes, uint64_t made_nbytes)
{
    uint64_t granule = pool->source->granule;
    uint64_t held = pool->counters.reserved_nbytes + made_nbytes;
    uint64_t share = pool->hurried ? HURRIED_CHUNK_SHARE : CHUNK_SHARE;
    uint64_t most = cm_round_up_to((held + nbytes) / share, granule);
    most = most < CHUNK_GRANULES * granule ? CHUNK_GRANULES * granule : most;
    uint64_t count = (nbytes + most - 1) / most;
    count = count > PLACE_CREATES ? PLACE_CREATES : count;
    return cm_round_up_to(nbytes / count, granule);
}

static cm_status
create_chunks(cm_pool *pool, place_plan *plan, filling *f)
{
    const cm_arena *range = pool->range;
    uint64_t left = f->create_nbytes;
    uint64_t piece = left == 0 ? 0 : piece_nbytes(pool, left, plan->made_nbytes);
    while (left > 0) {
        uint64_t nbytes = piece < left ? piece : left;
        cm_address to = f->fill + f->done_nbytes;
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
        cm_address end = f->fill + f->done_nbytes;
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

static cm_status
fill(cm_pool *pool, place_plan *plan)
{
    uint64_t charged = plan->create_nbytes;
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
grow(cm_pool *pool, uint64_t size, const cm_stream *stream, bool with_step,
     cm_heap_span **out)
{
    place_plan plan;
    cm_fast_lock_take(&pool->lock);
    cm_heap_view view =
        cm_pool_view_locked(pool, cm_pool_find_slot_locked(pool, stream));
    cm_status status = plan_place_locked(pool, size, with_step, &view, &plan);
    cm_fast_lock_give(&pool->lock);
    CM_TRY(status);
    status = fill(pool, &plan);
    cm_fast_lock_take(&pool->lock);
    count_reserved_locked(pool, plan.made_nbytes);
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
    return status;
}

static cm_status
grow_placed(cm_pool *pool, uint64_t size, const cm_stream *stream, cm_heap_span **out)
{
    cm_fast_lock_take(&pool->lock);
    uint64_t count = pool->counters.allocation_count;
    cm_fast_lock_give(&pool->lock);
    pool->hurried = count - pool->grown_count < HURRIED_ALLOCATIONS;
    pool->grown_count = count;
    cm_status status = grow(pool, size, stream, true, out);
    if (cm_pool_is_short(status) && status.code != CM_ENOMEM) {
        status = grow(pool, size, stream, false, out); /* the need alone */
    }
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
    uint64_t step = growth_step(pool, size);
    uint64_t least = cm_round_up_to(size, pool->source->granule);
    cm_status status = grow_segment(pool, size, step, out);
    if (cm_pool_is_short(status) && step > least) {
        status = grow_segment(pool, size, least, out);
    }
    return status;
}
