/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/ring_policy.h"

#include "base/checked_math.h"
#include "base/fresh_pages.h"

enum { PIPELINE = 3 }; /* one slot is packed, one is on the link, one has arrived */

/* Copies that follow one another without a gap are cut as one long copy would be. */
static uint64_t
train_nbytes_of(const cm_plan *plan)
{
    return plan->train_nbytes > plan->nbytes ? plan->train_nbytes : plan->nbytes;
}

static uint64_t
choose_piece_nbytes(const cm_plan *plan, const cm_tuning *tuning)
{
    /* If a slot holds many runs, the length of a piece is rounded up to a multiple of
     * this number of bytes. So each piece begins at such a multiple in the sequence of
     * all packed bytes, and a run that is aligned in the sequence is also aligned in
     * its slot. */
    enum { BLOCK_UNIT = 64 };
    uint64_t share = train_nbytes_of(plan) / tuning->chunk_share;
    share = share < tuning->chunk_min_nbytes ? tuning->chunk_min_nbytes : share;
    share = share > tuning->chunk_nbytes ? tuning->chunk_nbytes : share;
    share = plan->nbytes < share ? plan->nbytes : share;
    if (cm_layout_has_items(&plan->layout) && share < plan->layout.run_nbytes) {
        share = plan->layout.run_nbytes; /* an element that is converted is not cut */
    }
    /* The pages of a fresh target come into being when they are first written. Pieces
     * that are as long as a huge page can begin where the pages begin, so that only one
     * thread writes to each page. The tuning may allow only shorter pieces, as it does
     * with few processors. */
    if (plan->is_fresh && share < CM_HUGE_PAGE_NBYTES
        && tuning->chunk_nbytes >= CM_HUGE_PAGE_NBYTES
        && tuning->ring_nbytes >= PIPELINE * CM_HUGE_PAGE_NBYTES) {
        return CM_HUGE_PAGE_NBYTES;
    }
    return plan->row->joins_runs ? cm_round_up_to(share, BLOCK_UNIT) : share;
}

static uint64_t
choose_slot_count(const cm_plan *plan, const cm_tuning *tuning)
{
    uint64_t count = tuning->slot_count;
    if (plan->row->crosses) {
        count = PIPELINE;
    }
    else if (plan->is_cached) {
        uint64_t fit = tuning->cached_ring_nbytes / plan->piece_nbytes;
        fit = fit < PIPELINE ? PIPELINE : fit;
        count = fit < count ? fit : count;
    }
    uint64_t room =
        plan->row->uses_ring ? tuning->ring_nbytes / plan->piece_nbytes : count;
    count = count < room ? count : room;
    count = count < plan->piece_count ? count : plan->piece_count;
    return count > 0 ? count : 1;
}

void
cm_ring_policy_init(cm_plan *plan, const cm_tuning *tuning)
{
    const cm_route_row *row = plan->row;
    plan->is_cached = (row->packs || row->joins_runs) && !plan->is_download
                      && train_nbytes_of(plan) >= tuning->cached_nbytes
                      && tuning->thread_count >= tuning->cached_thread_count;
    plan->piece_nbytes = choose_piece_nbytes(plan, tuning);
    plan->piece_count = plan->nbytes > 0;
    if (row->uses_ring || (row->crosses && plan->layout.ndim > 0)) {
        cm_layout core;
        cm_cut cut;
        (void)cm_layout_get_core(&plan->layout, &core);
        cm_ring_policy_cut(plan, tuning, &core, &cut);
        plan->piece_count = cm_cut_count(&cut);
    }
    plan->slot_count = (uint32_t)choose_slot_count(plan, tuning);
}

uint32_t
cm_ring_policy_thread_count(const cm_plan *plan, const cm_tuning *tuning)
{
    cm_tuning all = *tuning;
    if (!plan->row->uses_ring || !plan->row->uses_host) {
        return 0;
    }
    if (cm_layout_is_scattered(&plan->layout)) {
        all.thread_count = tuning->fresh_thread_count;
    }
    return cm_tuning_piece_threads(&all, plan->piece_nbytes);
}

/* A chunk that is still in the caches when a thread writes it is written faster. On an
 * H200 one file is written 1.4 times as fast from a ring of 4 MiB as from one of 128
 * MiB. So the ring of writers is small. Several writers each have a chunk to
 * themselves. While these are written, others are on their way from the device or have
 * arrived, and so there are more slots. Their chunks are longer, so that there are
 * fewer of them, because one thread, which runs the job, has to serve all writers. */
static void
keep_in_caches(cm_tuning *tuning, uint32_t writer_count)
{
    enum { ONE_CHUNK = 512 << 10, ONE_COUNT = 8, MANY_CHUNK = 1 << 20 };
    bool is_one = writer_count == 1;
    uint64_t chunk = is_one ? ONE_CHUNK : MANY_CHUNK;
    uint64_t count = is_one ? ONE_COUNT : 2 * tuning->file_slot_count;
    tuning->file_chunk_nbytes = cm_least(tuning->file_chunk_nbytes, chunk);
    tuning->file_slot_count = cm_least(count, CM_SLOT_MAX);
}

/* Even where there is little to move, the first piece should be on its way early, and
 * each thread should have a part of it. So chunks and parts get shorter with the
 * transfer, down to a limit. */
void
cm_ring_policy_init_file(cm_plan *plan, cm_tuning *tuning, uint64_t page_nbytes,
                         uint32_t writer_count)
{
    enum { CHUNKS = 16, PARTS = 8, LEAST_CHUNK = 1 << 20, LEAST_PART = 256 << 10 };
    if (writer_count > 0) {
        keep_in_caches(tuning, writer_count);
    }
    uint64_t chunk = plan->nbytes / CHUNKS;
    chunk = chunk > LEAST_CHUNK ? chunk : LEAST_CHUNK;
    chunk = chunk < tuning->file_chunk_nbytes ? chunk : tuning->file_chunk_nbytes;
    chunk -= chunk % page_nbytes;
    uint64_t part = chunk / PARTS;
    part -= part % page_nbytes;
    part = part > LEAST_PART ? part : LEAST_PART;
    tuning->file_chunk_nbytes = chunk;
    if (part < tuning->file_part_nbytes) {
        tuning->file_part_nbytes = part;
    }
    /* A chunk may begin anywhere within a page, but its memory begins with a page. So
     * one more page is needed at either end. */
    plan->piece_nbytes = chunk + 2 * page_nbytes;
    plan->piece_count = 1;
    plan->slot_count = (uint32_t)tuning->file_slot_count;
}

void
cm_ring_policy_cut(const cm_plan *plan, const cm_tuning *tuning, const cm_layout *core,
                   cm_cut *out)
{
    cm_cut_init(out, core, plan->piece_nbytes);
    if (plan->row->crosses) {
        return;
    }
    /* The link has no work before the first piece is packed, unless another copy came
     * just before this one. So pieces begin short and grow. */
    out->least_nbytes = plan->train_nbytes == 0 ? tuning->chunk_min_nbytes : 0;
    if (plan->is_download && plan->piece_nbytes >= CM_HUGE_PAGE_NBYTES) {
        /* Two pieces never write into the same huge page, which may not exist yet. */
        cm_cut_align(out,
                     (const void *)(plan->target + (uintptr_t)core->offset[CM_DST]),
                     CM_HUGE_PAGE_NBYTES);
    }
}
