/* SPDX-License-Identifier: Apache-2.0 */
/* Carrying out a growth where chunks can be put anywhere in one range of addresses. A
 * move costs as much as making a chunk (about 35 us on an H200, whatever its size) and
 * holds nothing more. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "pool/pool_place.h"

enum {
    CHUNK_GRANULES = 5,       /* the least a new chunk is worth, */
    CHUNK_SHARE = 32,         /* and the greatest share of what is held then; */
    HURRIED_CHUNK_SHARE = 18, /* the same while growths come close together, */
    HURRIED_ALLOCATIONS = 16  /* with fewer allocations than so many between them */
};

/* -- without the lock ------------------------------------------------------------------- */

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
lose_chunk(cm_pool *pool, cm_move *move, cm_address from)
{
    uint64_t nbytes = move->chunk->nbytes;
    cm_fast_lock_take(&pool->lock);
    set_chunk_at(pool->range, from, nbytes, NULL);
    cm_heap_give_gap(&pool->heap, move->span);
    pool->counters.reserved_nbytes -= nbytes;
    cm_fast_lock_give(&pool->lock);
    cm_pool_refund(pool, nbytes);
    free(move->chunk);
    *move = (cm_move){NULL, NULL};
}

static cm_status
move_chunks(cm_pool *pool, cm_filling *f, cm_move *moves, uint32_t count)
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
    count = count > CM_PLACE_CREATES ? CM_PLACE_CREATES : count;
    return cm_round_up_to(nbytes / count, granule);
}

static cm_status
create_chunks(cm_pool *pool, cm_place_plan *plan, cm_filling *f)
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
close_made(cm_pool *pool, cm_filling *f, uint64_t *made_nbytes)
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
fill(cm_pool *pool, cm_place_plan *plan)
{
    uint64_t charged = plan->create_nbytes;
    if (charged > 0 && !cm_pool_try_charge(pool, charged)) {
        return cm_fail(CM_ELIMIT, charged);
    }
    cm_status status = charged > 0 ? check_device(pool, charged) : cm_ok();
    uint32_t moved = 0;
    for (uint32_t i = 0; i < plan->filling_count && cm_is_ok(status); i++) {
        cm_filling *f = &plan->fillings[i];
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
        cm_pool_refund(pool, charged - plan->made_nbytes);
    }
    return status;
}

/* -- from request to span --------------------------------------------------------------- */

static cm_status
grow(cm_pool *pool, uint64_t size, const cm_stream *stream, bool with_step,
     cm_span **out)
{
    cm_place_plan plan;
    cm_fast_lock_take(&pool->lock);
    cm_heap_view view =
        cm_pool_view_locked(pool, cm_pool_find_mark_locked(pool, stream));
    cm_status status = cm_pool_plan_place_locked(pool, size, with_step, &view, &plan);
    cm_fast_lock_give(&pool->lock);
    CM_TRY(status);
    status = fill(pool, &plan);
    cm_fast_lock_take(&pool->lock);
    cm_pool_count_reserved_locked(pool, plan.made_nbytes);
    view = cm_pool_view_locked(pool, cm_pool_find_mark_locked(pool, stream));
    cm_span *span = cm_pool_settle_place_locked(pool, &plan, &view);
    if (cm_is_ok(status)) {
        *out = cm_heap_carve(&pool->heap, span, plan.at.begin, size);
        if (*out == NULL) {
            status = cm_fail(CM_ENOMEM, sizeof(cm_span));
        }
    }
    cm_pool_note_cached_locked(pool);
    cm_fast_lock_give(&pool->lock);
    return status;
}

cm_status
cm_pool_grow_placed(cm_pool *pool, uint64_t size, const cm_stream *stream,
                    cm_span **out)
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
