/* SPDX-License-Identifier: Apache-2.0 */
/* Puts one block of a pool of device memory to sleep while the rest of the pool is in
 * use, and wakes it.
 *
 * The idea
 * --------
 * sleep.c lends all memory of a pool back to the runtime. Here the same is done for one
 * live block. The chunks that lie wholly inside the block are unmapped and released,
 * and the block keeps its addresses. The pool then has room for somebody else. The
 * chunks at the two ends of the block, which it shares with its neighbours, stay as
 * they are.
 *
 * Example with granules of 2 MiB: a block of 5 MiB begins in the middle of a chunk.
 *
 *   awake    [ chunk  B][B chunk B][B chunk B][ ...     3 chunks, 5 MiB of them live
 *   asleep   [ chunk  B][B  none  ][  none   B][ ...    4 MiB went back to the runtime
 *
 * A block without a whole chunk gives nothing back, so nobody puts it to sleep.
 *
 * The pool knows nothing of copies, so its caller takes these steps:
 *
 *      cm_pool_take_spill_turn    no other thread moves blocks of the pool
 *      cm_block_inside            which bytes have to be saved
 *      ... the caller waits for all work on the block, and copies them to the host
 *      cm_block_fall_asleep       the memory goes back
 *
 *      cm_block_bring_back        memory comes, at the same addresses
 *      ... the caller copies the bytes to the device
 *
 * All or nothing
 * --------------
 * As in sleep.c, everything is unmapped before the first handle is released. If an
 * unmapping fails, the same memory is mapped again with its contents. If the runtime
 * refuses to release a handle, the handle stays with its chunk, counts as lost, and is
 * used again when the block wakes.
 *
 * Edges
 * -----
 *   - A block that sleeps may be freed. cm_block_free_asleep() turns the addresses
 *     without memory into gaps, and the rest into free memory.
 *   - If an earlier attempt to close a chunk failed half-way, the chunk no longer has a
 *     handle, so unmapping it frees its memory, and nothing could undo that. Such
 *     chunks are unmapped last.
 * Locks: `growing` is held across the calls of the runtime, as for a growth. */
#include <stdlib.h>

#include "base/checked_math.h"
#include "pool/private.h"
#include "runtime/scope.h"

/* The bytes of a block that lie in whole chunks. */
typedef struct stretch {
    cm_address from;
    cm_address to;
} stretch;

/* -- whose turn it is ------------------------------------------------------------------- */

/* The address of this variable identifies the calling thread. */
static _Thread_local char this_thread;

bool
cm_pool_take_spill_turn(cm_pool *pool)
{
    const char *nobody = NULL;
    return atomic_compare_exchange_strong(&pool->spiller, &nobody, &this_thread);
}

bool
cm_pool_has_spill_turn(cm_pool *pool)
{
    return atomic_load(&pool->spiller) == &this_thread;
}

void
cm_pool_give_spill_turn(cm_pool *pool)
{
    atomic_store(&pool->spiller, NULL);
}

/* -- the chunks inside a block ------------------------------------------------------------ */

static cm_chunk *
chunk_at(const cm_pool *pool, cm_address address)
{
    const cm_arena *range = pool->range;
    return range->chunk_at[(address - range->base) / range->granule];
}

/* Find the whole chunks of a live block. Which chunks these are does not change as long
 * as the block lives. */
static stretch
find_inside(cm_pool *pool, const cm_block *block)
{
    stretch found = {0, 0};
    cm_spin_lock_take(&pool->lock);
    if (pool->range != NULL) {
        const cm_chunk *first = chunk_at(pool, block->address);
        const cm_chunk *last = chunk_at(pool, block->address + block->nbytes - 1);
        bool begins_whole = first->address >= block->address;
        bool ends_whole = cm_chunk_end(last) <= block->address + block->nbytes;
        found.from = begins_whole ? first->address : cm_chunk_end(first);
        found.to = ends_whole ? cm_chunk_end(last) : last->address;
    }
    cm_spin_lock_give(&pool->lock);
    found.to = found.to < found.from ? found.from : found.to;
    return found;
}

uint64_t
cm_block_inside(cm_pool *pool, const cm_block *block, cm_address *first)
{
    stretch inside = find_inside(pool, block);
    *first = inside.from;
    return inside.to - inside.from;
}

/* -- the memory ---------------------------------------------------------------------------- */
/* All of this is called by the grower, inside a cm_scope. */

/* Count `nbytes` that went back to the runtime, and refund them to the budget, so that
 * others may use them. */
static void
count_lent(cm_pool *pool, const cm_block *block, uint64_t nbytes)
{
    cm_spin_lock_take(&pool->lock);
    cm_pool_counters *c = &pool->counters;
    c->asleep_nbytes += nbytes;
    c->spill_count++;
    c->spilled_nbytes += nbytes;
    uint64_t left_nbytes = cm_pool_held_nbytes(pool);
    cm_spin_lock_give(&pool->lock);
    cm_budget_refund(pool->config.budget, nbytes);
    if (cm_recorder_is_on()) {
        cm_pool_note(pool, CM_EVENT_SLEEP, block, nbytes, left_nbytes, NULL);
    }
}

static cm_status
lend(cm_pool *pool, const cm_block *block, stretch s, bool *asleep)
{
    cm_status status = cm_chunks_unmap(pool, s.from, s.to);
    if (!cm_is_ok(status) && cm_chunks_try_map_back(pool, s.from, s.to)) {
        return status;
    }
    *asleep = true;
    uint64_t before = cm_chunks_count_bare(pool, s.from, s.to);
    status = cm_first_failure(status, cm_chunks_drop(pool, s.from, s.to));
    count_lent(pool, block, cm_chunks_count_bare(pool, s.from, s.to) - before);
    return status;
}

cm_status
cm_block_fall_asleep(cm_pool *pool, const cm_block *block, bool *asleep)
{
    stretch inside = find_inside(pool, block);
    *asleep = false;
    cm_mutex_lock(&pool->growing);
    cm_status status =
        CM_IN_SCOPE(pool->rt, pool->config.device, lend(pool, block, inside, asleep));
    cm_mutex_unlock(&pool->growing);
    CM_POOL_DEBUG_CHECK(pool);
    return status;
}

/* Count `nbytes` of a block that have memory again. */
static void
count_woken(cm_pool *pool, const cm_block *block, uint64_t nbytes, bool wakes)
{
    cm_spin_lock_take(&pool->lock);
    cm_pool_counters *c = &pool->counters;
    c->asleep_nbytes -= nbytes;
    c->wake_count += wakes;
    c->woken_nbytes += nbytes;
    cm_pool_note_peaks_locked(pool);
    uint64_t held_nbytes = cm_pool_held_nbytes(pool);
    cm_spin_lock_give(&pool->lock);
    if (cm_recorder_is_on() && nbytes > 0) {
        cm_pool_note(pool, CM_EVENT_WAKE, block, nbytes, held_nbytes, NULL);
    }
}

/* Count `nbytes` of a sleeping block that went back only now, because the runtime
 * refused to release their handles before. */
static void
count_late(cm_pool *pool, const cm_block *block, uint64_t nbytes)
{
    cm_spin_lock_take(&pool->lock);
    pool->counters.asleep_nbytes += nbytes;
    pool->counters.spilled_nbytes += nbytes;
    uint64_t held_nbytes = cm_pool_held_nbytes(pool);
    cm_spin_lock_give(&pool->lock);
    cm_budget_refund(pool->config.budget, nbytes);
    if (cm_recorder_is_on() && nbytes > 0) {
        cm_pool_note(pool, CM_EVENT_SLEEP, block, nbytes, held_nbytes, NULL);
    }
}

/* Undo borrow() after only a part of the stretch has got memory. `missing` is how many
 * bytes had no memory before. */
static void
return_memory(cm_pool *pool, const cm_block *block, stretch s, uint64_t missing)
{
    /* Memory that the runtime refuses to take is counted below. */
    cm_ignore(cm_chunks_drop(pool, s.from, s.to));
    uint64_t left = cm_chunks_count_bare(pool, s.from, s.to);
    cm_budget_refund(pool->config.budget, cm_least(left, missing));
    count_woken(pool, block, missing - cm_least(left, missing), false);
    count_late(pool, block, left - cm_least(left, missing));
}

/* Get memory for the chunks of a stretch that have none, and charge the budget for it.
 * After a failure they have none again.
 * Fails: CM_ELIMIT; as cm_chunks_map(). */
static cm_status
borrow(cm_pool *pool, const cm_block *block, stretch s)
{
    uint64_t missing = cm_chunks_count_bare(pool, s.from, s.to);
    if (missing > 0 && !cm_budget_try_charge(pool->config.budget, missing)) {
        return cm_fail(CM_ELIMIT, missing);
    }
    cm_status status = cm_chunks_map(pool, s.from, s.to);
    if (cm_is_ok(status)) {
        count_woken(pool, block, missing, true);
        return status;
    }
    return_memory(pool, block, s, missing);
    if (status.code == CM_CUDA_OUT_OF_MEMORY && status.op == CM_OP_physical_create) {
        status.arg = missing; /* users know this size, not that of a chunk */
    }
    return status;
}

cm_status
cm_block_bring_back(cm_pool *pool, const cm_block *block)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    stretch inside = find_inside(pool, block);
    cm_mutex_lock(&pool->growing);
    cm_status status =
        CM_IN_SCOPE(pool->rt, pool->config.device, borrow(pool, block, inside));
    cm_mutex_unlock(&pool->growing);
    CM_POOL_DEBUG_CHECK(pool);
    return status;
}

/* -- freeing ------------------------------------------------------------------------------- */

/* Release the memory of unmapped chunks that still have a handle because the runtime
 * refused it before. If the runtime refuses again, the chunk is mapped, so that it can
 * become free memory of the pool. */
static cm_status
close_all(cm_pool *pool, const cm_block *block, stretch s)
{
    cm_source *source = pool->source;
    uint64_t before = cm_chunks_count_bare(pool, s.from, s.to);
    for (cm_address at = s.from; at < s.to; at = cm_chunk_end(chunk_at(pool, at))) {
        cm_chunk *chunk = chunk_at(pool, at);
        if (chunk->is_unmapped && !cm_is_ok(source->ops->drop_chunk(source, chunk))) {
            (void)CM_TRY_TWICE(source->ops->map_chunk(source, chunk));
        }
    }
    count_late(pool, block, cm_chunks_count_bare(pool, s.from, s.to) - before);
    return cm_ok();
}

/* True if there is nothing behind an address of the stretch. */
static bool
is_bare(const cm_pool *pool, stretch s, cm_address at)
{
    return at >= s.from && at < s.to && chunk_at(pool, at)->is_unmapped;
}

/* A part of a span either has memory everywhere or is bare everywhere. Return the end
 * of the part that begins at `at`. */
static cm_address
end_of_part(const cm_pool *pool, stretch s, cm_address at, cm_address end)
{
    bool bare = is_bare(pool, s, at);
    while (at < end && is_bare(pool, s, at) == bare) {
        bool is_before = at < s.from;
        bool is_inside = at >= s.from && at < s.to;
        at = is_inside ? cm_chunk_end(chunk_at(pool, at)) : end;
        at = is_before ? s.from : at;
    }
    return at;
}

/* Cut a BUSY span into parts. Returns false, with the span as it was, if there is no
 * memory for nodes. */
static bool
cut_locked(cm_pool *pool, cm_heap_span *span, stretch s)
{
    cm_address end = cm_span_end(span);
    cm_heap_span *part = span;
    for (;;) {
        cm_address to = end_of_part(pool, s, part->block.address, end);
        if (to == end) {
            return true;
        }
        part = cm_heap_cut(&pool->heap, part, to - part->block.address);
        if (part == NULL) {
            break;
        }
    }
    while (cm_span_end(span) < end) {
        cm_heap_join_next(&pool->heap, span);
    }
    return false;
}

/* Forget the chunks of a bare part, and make it a gap. */
static void
give_bare_locked(cm_pool *pool, cm_heap_span *part)
{
    const cm_arena *range = pool->range;
    cm_address end = cm_span_end(part);
    for (cm_address at = part->block.address, next; at < end; at = next) {
        cm_chunk *chunk = chunk_at(pool, at);
        next = cm_chunk_end(chunk);
        for (cm_address granule = at; granule < next; granule += range->granule) {
            range->chunk_at[(granule - range->base) / range->granule] = NULL;
        }
        pool->counters.reserved_nbytes -= chunk->nbytes;
        /* A handle that could neither be released nor mapped is lost for good. */
        pool->counters.asleep_nbytes -= chunk->handle == 0 ? chunk->nbytes : 0;
        free(chunk);
    }
    cm_heap_give_gap(&pool->heap, part);
}

/* Give the parts of a block back to the heap. Nothing works on them any more. */
static void
give_parts_locked(cm_pool *pool, cm_heap_span *span, stretch s)
{
    cm_pool_take_back_locked(pool, span);
    cm_address end = cm_span_end(span);
    span->state = CM_SPAN_BUSY;
    if (!cut_locked(pool, span, s)) {
        /* Parts of the span have no memory, so nobody may use the span, and it stays in
         * flight until the pool ends. */
        span->state = CM_SPAN_FLIGHT;
        pool->counters.in_flight_count++;
        pool->counters.in_flight_nbytes += span->block.nbytes;
        atomic_fetch_add(&pool->lost_count, 1);
        cm_pool_note_peaks_locked(pool);
        return;
    }
    cm_heap_view view = cm_pool_view_locked(pool, 0);
    for (cm_heap_span *part = span, *next; part != NULL; part = next) {
        bool is_last = cm_span_end(part) == end;
        next = is_last ? NULL : part->next; /* it is BUSY, so it joins nothing yet */
        if (is_bare(pool, s, part->block.address)) {
            give_bare_locked(pool, part);
        }
        else {
            (void)cm_heap_give(&pool->heap, part, 0, 0, &view);
        }
    }
    cm_pool_note_peaks_locked(pool);
}

void
cm_block_free_asleep(cm_pool *pool, cm_block *block)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return;
    }
    cm_heap_span *span = (cm_heap_span *)(void *)block;
    stretch inside = find_inside(pool, block);
    if (cm_recorder_is_on()) {
        cm_pool_note(pool, CM_EVENT_FREE, block, block->nbytes, 0, NULL);
    }
    (void)cm_pool_hold(pool); /* this block may be the last that keeps the pool alive */
    cm_mutex_lock(&pool->growing);
    cm_ignore(
        CM_IN_SCOPE(pool->rt, pool->config.device, close_all(pool, block, inside)));
    cm_spin_lock_take(&pool->lock);
    give_parts_locked(pool, span, inside);
    cm_spin_lock_give(&pool->lock);
    cm_mutex_unlock(&pool->growing);
    CM_POOL_DEBUG_CHECK(pool);
    cm_pool_release(pool);
}
