/* SPDX-License-Identifier: Apache-2.0 */
/* Puts a pool of device memory to sleep and wakes it. A pool that falls asleep lends
 * all its memory back to the runtime and keeps the addresses. When it wakes it gets
 * memory at the same addresses again.
 *
 * The idea
 * --------
 * The addresses of such a pool are one reserved range, and memory is mapped into it
 * chunk by chunk (source_vmm.c). A reservation costs nothing, so a pool that sleeps
 * keeps it, together with its heap, its blocks and its chunks. Only what is behind the
 * chunks goes. Pointers into the pool, in views, in captured graphs and in other
 * libraries, are right again once the pool is awake. Until then the addresses fault.
 *
 * The pool knows nothing of streams that copy. Its caller copies the bytes, between
 * these steps:
 *
 *      cm_pool_shut         the pool hands out nothing from now on
 *      cm_pool_settle       all work on its memory has ended
 *      cm_pool_plan_save    the bytes that are worth saving become runs with places
 *      cm_pool_expect_parts page-locked memory is prepared ahead, part by part
 *      cm_pool_take_part    a part gets its memory, unless the bytes go to a file
 *      ... the caller copies the saved runs
 *      cm_pool_fall_asleep  the memory goes back
 *
 *      cm_pool_begin_waking  the limits are charged
 *      cm_pool_map_until     memory comes, at the same addresses
 *      ... the caller copies the saved runs to the device
 *      cm_pool_end_waking    the memory is counted, or goes back after a failure
 *      cm_pool_reopen        the pool hands out memory again
 *
 * Whatever fails before cm_pool_fall_asleep() is undone by cm_pool_reopen(). A failure
 * after cm_pool_begin_waking() is undone by cm_pool_end_waking(), since the saved runs
 * are still there.
 *
 * All or nothing
 * --------------
 * Unmapping and releasing are two calls, and the bytes live until the second. So
 * cm_pool_fall_asleep() first unmaps all chunks. If one of these calls fails, the
 * others are undone: the same memory is mapped again, with its contents, and the pool
 * is as before. Only when nothing is mapped any more are the handles released. A handle
 * that the driver refuses to take stays with its chunk, counts as lost, and is used
 * again when the pool wakes.
 *
 * Example: a pool has 4 chunks of 32 MiB. 3 hold live blocks, and the last one is free.
 *
 *   asleep       4 chunks without memory. 128 MiB are refunded to the budget.
 *   a free       The block of the third chunk is dropped. No call is made.
 *   waking       The third and the fourth chunk are wholly free and are forgotten.
 *                64 MiB are charged, created, and mapped where they were.
 *
 * Edges
 * -----
 *   - A block in flight after cm_pool_settle() belongs to a graph, which may read it in
 *     its next run, so its bytes are saved as well. The graph may be running on any
 *     stream, so as long as there is such a block the pool waits for whole devices.
 *   - A chunk whose closing has failed half-way has no handle, so unmapping it frees
 *     its memory, and nothing could undo that. Such chunks are unmapped last.
 *   - If memory can neither be unmapped nor be mapped back, the pool falls asleep all
 *     the same, because its bytes are safe on the host.
 *   - A block may be lent to another library, which has cut it up and needs only some
 *     of its bytes. cm_pool_set_spare() names the other bytes, the spare parts, and
 *     these are not saved.
 *   - If memory cannot be mapped back before all bytes are safe, the pool falls asleep
 *     with all of its memory, which has the bytes. It is mapped when the pool wakes,
 *     and nothing is copied then.
 *   - The page-locked memory comes from a separate pool that nobody else uses, so
 *     giving all of it back takes nothing from anybody. */
#include <stdlib.h>
#include <string.h>

#include "base/array.h"
#include "base/checked_math.h"
#include "pool/private.h"
#include "runtime/scope.h"

/* -- phases ----------------------------------------------------------------------------- */

/* Go from the phase `from` to the phase `to`. Returns false, and changes nothing, if
 * the pool is not in `from`. */
static bool
try_change(cm_pool *pool, cm_pool_phase from, cm_pool_phase to)
{
    cm_spin_lock_take(&pool->lock);
    bool is_there = pool->phase == from;
    pool->phase = is_there ? to : pool->phase;
    cm_spin_lock_give(&pool->lock);
    return is_there;
}

bool
cm_pool_is_asleep(cm_pool *pool)
{
    cm_spin_lock_take(&pool->lock);
    bool is_asleep = pool->phase == CM_POOL_ASLEEP;
    cm_spin_lock_give(&pool->lock);
    return is_asleep;
}

cm_status
cm_pool_shut(cm_pool *pool)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    if (!cm_kind_is_on_device(pool->config.kind)) {
        return cm_fail(CM_ENOTSUP, (uint64_t)pool->config.kind);
    }
    bool was_awake = try_change(pool, CM_POOL_AWAKE, CM_POOL_SHUT);
    return was_awake ? cm_ok() : cm_fail(CM_EBUSY, 0);
}

/* -- the end of all work ------------------------------------------------------------------ */

/* Wait for growths under way, which may still hand out a block. */
static cm_status
await_growth(cm_pool *pool)
{
    cm_mutex_lock(&pool->growing);
    bool can_sleep = pool->source == NULL || pool->source->is_placed;
    cm_mutex_unlock(&pool->growing);
    return can_sleep ? cm_ok() : cm_fail(CM_ENOTSUP, 0);
}

cm_status
cm_pool_settle(cm_pool *pool, cm_stream *const *uses, uint32_t use_count,
               unsigned flags, const cm_wait_hooks *hooks)
{
    CM_TRY(await_growth(pool));
    if (cm_streams_capture(pool->rt) || cm_others_capture(hooks)) {
        return cm_fail(CM_ECAPTURING, 0);
    }
    if (cm_pool_has_unknown_work(pool)) {
        flags |= CM_POOL_FREE_FENCE;
    }
    /* This flight belongs to no block. Creating it records the events that have to be
     * waited for. */
    cm_flight *flight = cm_flight_create(pool, NULL, uses, use_count, flags);
    CM_TRY(cm_allocated(flight != NULL, sizeof(*flight)));
    bool captures = flight->captured;
    free(flight);
    if (captures) {
        return cm_fail(CM_ECAPTURING, 0);
    }
    uint64_t goal[CM_EPOCHS_MAX];
    cm_spin_lock_take(&pool->lock);
    for (uint32_t i = 0; i < CM_EPOCHS_MAX; i++) {
        goal[i] = pool->epochs[i].awaited_epoch;
    }
    cm_spin_lock_give(&pool->lock);
    CM_TRY(cm_pool_wait(pool, hooks, false));
    bool has_ended = true;
    cm_spin_lock_take(&pool->lock);
    for (uint32_t i = 0; i < CM_EPOCHS_MAX; i++) {
        has_ended = has_ended && goal[i] <= pool->done[i];
    }
    cm_spin_lock_give(&pool->lock);
    if (has_ended) {
        return cm_ok();
    }
    /* A wait leaves work unfinished while it knows of a capture. */
    captures = cm_streams_capture(pool->rt) || cm_others_capture(hooks);
    return cm_fail(captures ? CM_ECAPTURING : CM_EBUSY, 0);
}

/* -- what is saved, and where ------------------------------------------------------------- */

static bool
is_worth_saving(const cm_block_row *row)
{
    return row->state == CM_BLOCK_LIVE || row->state == CM_BLOCK_IN_FLIGHT;
}

/* Return the length of a part. If the part's page-locked memory was kept from the last
 * time, the part is as long as that memory. */
static uint64_t
part_length(const cm_saved *saved, uint32_t part, bool to_host)
{
    return to_host && part < saved->block_count ? saved->blocks[part]->nbytes
                                                : CM_SAVED_PART_NBYTES;
}

static void
forget_spare(cm_saved *saved)
{
    free(saved->spare);
    saved->spare = NULL;
    saved->spare_count = 0;
}

/* Give each byte that is worth saving a place, in order of address. A run ends where
 * its part ends, so a block may become several runs. The caller has made room for
 * them. */
static void
place_runs(cm_saved *saved, const cm_block_row *rows, uint64_t row_count, bool to_host)
{
    uint32_t part = 0;
    uint64_t used = 0; /* of the part */
    for (uint64_t i = 0; i < row_count; i++) {
        const cm_block_row *row = &rows[i];
        uint64_t nbytes = is_worth_saving(row) ? row->nbytes : 0;
        for (uint64_t done = 0, length; done < nbytes; done += length) {
            if (used == part_length(saved, part, to_host)) {
                part++;
                used = 0;
            }
            length = cm_least(nbytes - done, part_length(saved, part, to_host) - used);
            saved->runs[saved->run_count++] =
                (cm_saved_run){.address = row->address + done,
                               .nbytes = length,
                               .at = used,
                               .part = part};
            used += length;
        }
    }
}

cm_status
cm_pool_set_spare(cm_pool *pool, const cm_spare_part *parts, uint64_t count)
{
    cm_saved *saved = &pool->saved;
    forget_spare(saved);
    if (count == 0) {
        return cm_ok();
    }
    size_t nbytes = count * sizeof(*parts);
    saved->spare = malloc(nbytes);
    CM_TRY(cm_allocated(saved->spare != NULL, nbytes));
    memcpy(saved->spare, parts, nbytes);
    saved->spare_count = count;
    saved->forget = cm_pool_forget_saved;
    return cm_ok();
}

/* Append what is left of a row without the spare parts. Calls go through the rows in
 * order of address. So the first `*at` parts, which end before this row, need not be
 * looked at again. */
static void
append_without_spare(const cm_saved *saved, cm_block_row row, uint64_t *at,
                     cm_block_row *out, uint64_t *count)
{
    const cm_spare_part *parts = saved->spare;
    cm_address end = row.address + row.nbytes;
    while (*at < saved->spare_count
           && parts[*at].address + parts[*at].nbytes <= row.address) {
        (*at)++;
    }
    for (uint64_t i = *at; i < saved->spare_count && parts[i].address < end; i++) {
        if (parts[i].address > row.address) {
            out[*count] = row;
            out[(*count)++].nbytes = parts[i].address - row.address;
        }
        row.address = cm_least(parts[i].address + parts[i].nbytes, end);
        row.nbytes = end - row.address;
    }
    if (row.nbytes > 0) {
        out[(*count)++] = row;
    }
}

/* Replace a listing by one in which blocks are cut, so that no row has a spare part. */
static cm_status
leave_out_spare(const cm_saved *saved, cm_block_row **rows, uint64_t *row_count)
{
    if (saved->spare_count == 0) {
        return cm_ok();
    }
    /* Each part cuts at most one row into two. */
    size_t room = (*row_count + saved->spare_count) * sizeof(**rows);
    cm_block_row *left = malloc(room);
    CM_TRY(cm_allocated(left != NULL, room));
    uint64_t at = 0;
    uint64_t count = 0;
    for (uint64_t i = 0; i < *row_count; i++) {
        append_without_spare(saved, (*rows)[i], &at, left, &count);
    }
    free(*rows);
    *rows = left;
    *row_count = count;
    return cm_ok();
}

/* List the blocks, without their spare parts. The caller frees *rows. */
static cm_status
list_needed(cm_pool *pool, cm_block_row **rows, uint64_t *row_count)
{
    CM_TRY(cm_pool_list(pool, rows, row_count));
    cm_status status = leave_out_spare(&pool->saved, rows, row_count);
    if (!cm_is_ok(status)) {
        free(*rows);
    }
    return status;
}

cm_status
cm_pool_plan_save(cm_pool *pool, bool to_host)
{
    cm_saved *saved = &pool->saved;
    cm_block_row *rows;
    uint64_t row_count;
    CM_TRY(list_needed(pool, &rows, &row_count));
    uint64_t count = 0;
    uint64_t nbytes = 0;
    for (uint64_t i = 0; i < row_count; i++) {
        nbytes += is_worth_saving(&rows[i]) ? rows[i].nbytes : 0;
        count += is_worth_saving(&rows[i]);
    }
    uint64_t part_count = saved->block_count + nbytes / CM_SAVED_PART_NBYTES + 1;
    size_t room = (count + part_count) * sizeof(*saved->runs);
    cm_saved_run *runs = malloc(room);
    if (runs != NULL) {
        free(saved->runs);
        saved->runs = runs;
        saved->run_count = 0;
        saved->forget = cm_pool_forget_saved;
        place_runs(saved, rows, row_count, to_host);
    }
    free(rows);
    return cm_allocated(runs != NULL, room);
}

const cm_saved_run *
cm_pool_saved_runs(const cm_pool *pool, uint64_t *count)
{
    *count = pool->saved.run_count;
    return pool->saved.runs;
}

/* -- page-locked memory ------------------------------------------------------------------- */

void
cm_pool_set_host(cm_pool *pool, cm_pool *host_pool)
{
    pool->saved.host_pool = cm_pool_hold(host_pool);
    pool->saved.forget = cm_pool_forget_saved;
}

cm_pool *
cm_pool_get_host(const cm_pool *pool)
{
    return pool->saved.host_pool;
}

/* Return how many bytes of a part the saved runs take. */
static uint64_t
used_length(const cm_saved *saved, uint32_t part)
{
    uint64_t nbytes = 0;
    for (uint64_t i = 0; i < saved->run_count && saved->runs[i].part <= part; i++) {
        const cm_saved_run *run = &saved->runs[i];
        nbytes = run->part == part ? run->at + run->nbytes : 0;
    }
    return nbytes;
}

cm_status
cm_pool_check_host(cm_pool *pool)
{
    const cm_saved *saved = &pool->saved;
    uint64_t nbytes = 0;
    for (uint64_t i = 0; i < saved->run_count; i++) {
        bool is_there = saved->runs[i].part < saved->block_count;
        nbytes += is_there ? 0 : saved->runs[i].nbytes;
    }
    const cm_budget *budget = saved->host_pool->config.budget;
    return nbytes <= cm_budget_room(budget) ? cm_ok() : cm_fail(CM_ELIMIT, nbytes);
}

/* Parts get their memory in order, so if this part has none, it is the next one to get
 * some. */
cm_status
cm_pool_take_part(cm_pool *pool, uint32_t part, const cm_wait_hooks *hooks)
{
    cm_saved *saved = &pool->saved;
    if (part < saved->block_count) {
        return cm_ok();
    }
    uint32_t room = cm_array_reserve(&saved->blocks, sizeof(*saved->blocks), NULL,
                                     saved->block_count, saved->block_room);
    CM_TRY(cm_allocated(room > 0, sizeof(*saved->blocks)));
    saved->block_room = room;
    CM_TRY(cm_pool_alloc(saved->host_pool, used_length(saved, part), NULL, hooks,
                         &saved->blocks[saved->block_count]));
    saved->block_count++;
    return cm_ok();
}

void
cm_pool_expect_parts(cm_pool *pool, bool expected)
{
    const cm_saved *saved = &pool->saved;
    uint32_t last = saved->run_count == 0 ? 0 : saved->runs[saved->run_count - 1].part;
    uint32_t full = last > saved->block_count ? last - saved->block_count : 0;
    cm_pool_expect(saved->host_pool, CM_SAVED_PART_NBYTES, expected ? full : 0);
}

const cm_block *
cm_pool_part_block(const cm_pool *pool, uint32_t part)
{
    return pool->saved.blocks[part];
}

/* Forget the saved runs of blocks that have been given back since. Nothing has been
 * handed out meanwhile, so each run lies within a block or wholly outside. */
static cm_status
forget_dead_runs(cm_pool *pool)
{
    cm_saved *saved = &pool->saved;
    cm_block_row *rows;
    uint64_t row_count;
    uint64_t left = 0;
    uint64_t at = 0;
    CM_TRY(cm_pool_list(pool, &rows, &row_count));
    for (uint64_t i = 0; i < saved->run_count; i++) {
        cm_saved_run run = saved->runs[i];
        while (at < row_count && rows[at].address + rows[at].nbytes <= run.address) {
            at++;
        }
        if (at < row_count && rows[at].address <= run.address
            && is_worth_saving(&rows[at])) {
            saved->runs[left++] = run;
        }
    }
    saved->run_count = left;
    free(rows);
    return cm_ok();
}

static void
forget_runs(cm_saved *saved)
{
    free(saved->runs);
    saved->runs = NULL;
    saved->run_count = 0;
}

/* Give the page-locked memory back, first to its pool, and then to the runtime. */
static void
release_host(cm_saved *saved)
{
    uint64_t released_nbytes;
    while (saved->block_count > 0) {
        cm_pool_free(saved->host_pool, saved->blocks[--saved->block_count], NULL, 0, 0);
    }
    if (saved->host_pool != NULL) {
        /* If the runtime refuses a chunk, it counts as lost. */
        cm_ignore(cm_pool_trim(saved->host_pool, 0, NULL, &released_nbytes));
    }
}

void
cm_pool_forget_saved(cm_pool *pool)
{
    cm_saved *saved = &pool->saved;
    forget_runs(saved);
    forget_spare(saved);
    release_host(saved);
    free(saved->blocks);
    if (saved->host_pool != NULL) {
        cm_pool_release(saved->host_pool);
    }
    *saved = (cm_saved){.host_pool = NULL};
}

void
cm_pool_reopen(cm_pool *pool, bool keep_host)
{
    forget_runs(&pool->saved);
    forget_spare(&pool->saved);
    pool->saved.is_in_place = false;
    if (!keep_host) {
        release_host(&pool->saved);
    }
    (void)try_change(pool, CM_POOL_SHUT, CM_POOL_AWAKE);
}

/* -- the memory --------------------------------------------------------------------------- */
/* All of this is called by the grower, inside a cm_scope. */

/* Count the bytes without memory, and record what has gone or come since they were
 * counted last. */
static void
count_asleep(cm_pool *pool)
{
    uint64_t nbytes = cm_chunks_count_bare(pool, 0, UINT64_MAX);
    cm_spin_lock_take(&pool->lock);
    uint64_t before = pool->counters.asleep_nbytes;
    pool->counters.asleep_nbytes = nbytes;
    cm_pool_note_peaks_locked(pool);
    uint64_t held_nbytes = cm_pool_held_nbytes(pool);
    cm_spin_lock_give(&pool->lock);
    if (!cm_recorder_is_on() || nbytes == before) {
        return;
    }
    bool has_gone = nbytes > before;
    cm_pool_note(pool, has_gone ? CM_EVENT_SLEEP : CM_EVENT_WAKE, NULL,
                 has_gone ? nbytes - before : before - nbytes, held_nbytes, NULL);
}

/* Give all memory back that the driver takes. */
static cm_status
lend_memory(cm_pool *pool)
{
    cm_status status = cm_chunks_drop(pool, 0, UINT64_MAX);
    uint64_t before = pool->counters.asleep_nbytes;
    count_asleep(pool);
    cm_budget_refund(pool->config.budget, pool->counters.asleep_nbytes - before);
    return status;
}

static cm_status
give_memory(cm_pool *pool, bool *asleep)
{
    cm_status status = cm_chunks_unmap(pool, 0, UINT64_MAX);
    if (!cm_is_ok(status) && cm_chunks_try_map_back(pool, 0, UINT64_MAX)) {
        return status;
    }
    *asleep = true;
    return cm_first_failure(status, lend_memory(pool));
}

cm_status
cm_pool_unmap_until(cm_pool *pool, cm_address end)
{
    cm_status status = cm_ok();
    cm_mutex_lock(&pool->growing);
    if (pool->range != NULL) {
        status =
            CM_IN_SCOPE(pool->rt, pool->config.device, cm_chunks_unmap(pool, 0, end));
    }
    cm_mutex_unlock(&pool->growing);
    return status;
}

static cm_status
map_back(cm_pool *pool)
{
    return cm_chunks_try_map_back(pool, 0, UINT64_MAX) ? cm_ok() : cm_fail(CM_EBUSY, 0);
}

void
cm_pool_map_back(cm_pool *pool, bool *asleep)
{
    cm_status status = cm_ok();
    cm_mutex_lock(&pool->growing);
    if (pool->range != NULL) {
        status = CM_IN_SCOPE(pool->rt, pool->config.device, map_back(pool));
    }
    *asleep = !cm_is_ok(status);
    if (*asleep) {
        pool->saved.is_in_place = true;
        forget_runs(&pool->saved);
        (void)try_change(pool, CM_POOL_SHUT, CM_POOL_ASLEEP);
    }
    cm_mutex_unlock(&pool->growing);
}

cm_status
cm_pool_fall_asleep(cm_pool *pool, bool *asleep)
{
    cm_status status = cm_ok();
    cm_mutex_lock(&pool->growing);
    *asleep = pool->range == NULL; /* such a pool has no memory */
    if (!*asleep) {
        status = CM_IN_SCOPE(pool->rt, pool->config.device, give_memory(pool, asleep));
    }
    if (*asleep) {
        (void)try_change(pool, CM_POOL_SHUT, CM_POOL_ASLEEP);
    }
    cm_mutex_unlock(&pool->growing);
    return status;
}

/* Forget the chunks in which nothing lives, and charge the limits for the others. */
static cm_status
charge_memory(cm_pool *pool)
{
    uint64_t released_nbytes = 0;
    /* A chunk that the runtime refuses to take is mapped later, as the others are. */
    cm_ignore(cm_pool_release_chunks(pool, 0, &released_nbytes));
    CM_TRY(forget_dead_runs(pool));
    uint64_t nbytes = pool->counters.asleep_nbytes;
    if (nbytes > 0 && !cm_budget_try_charge(pool->config.budget, nbytes)) {
        return cm_fail(CM_ELIMIT, nbytes);
    }
    return cm_ok();
}

cm_status
cm_pool_begin_waking(cm_pool *pool)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_status status = cm_ok();
    cm_mutex_lock(&pool->growing);
    if (!cm_pool_is_asleep(pool)) {
        status = cm_fail(CM_EBUSY, 0);
    }
    else if (pool->range != NULL) {
        status = CM_IN_SCOPE(pool->rt, pool->config.device, charge_memory(pool));
    }
    if (cm_is_ok(status)) {
        (void)try_change(pool, CM_POOL_ASLEEP, CM_POOL_SHUT);
    }
    cm_mutex_unlock(&pool->growing);
    return status;
}

cm_status
cm_pool_map_until(cm_pool *pool, cm_address end)
{
    cm_status status = cm_ok();
    cm_mutex_lock(&pool->growing);
    if (pool->range != NULL) {
        status =
            CM_IN_SCOPE(pool->rt, pool->config.device, cm_chunks_map(pool, 0, end));
    }
    if (status.code == CM_CUDA_OUT_OF_MEMORY && status.op == CM_OP_physical_create) {
        /* Users know this size, not that of a chunk. */
        status.arg = pool->counters.asleep_nbytes;
    }
    cm_mutex_unlock(&pool->growing);
    return status;
}

void
cm_pool_end_waking(cm_pool *pool, bool sleeps_on)
{
    cm_mutex_lock(&pool->growing);
    if (pool->range != NULL && sleeps_on && !pool->saved.is_in_place) {
        /* Memory that stays is counted below. */
        cm_ignore(CM_IN_SCOPE(pool->rt, pool->config.device,
                              cm_chunks_drop(pool, 0, UINT64_MAX)));
    }
    if (pool->range != NULL) {
        /* The limits were charged for all chunks that had no memory when waking began.
         * There may be more of them now, since the driver may have taken back a handle
         * that it refused before. */
        count_asleep(pool);
        cm_budget_refund(pool->config.budget, pool->counters.asleep_nbytes);
    }
    if (sleeps_on) {
        (void)try_change(pool, CM_POOL_SHUT, CM_POOL_ASLEEP);
    }
    cm_mutex_unlock(&pool->growing);
}
