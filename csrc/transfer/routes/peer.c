/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between two devices. What is not one run is gathered on the source's device,
 * sent, and scattered on the target's, in pieces; where the devices do not reach each
 * other, pieces are sent through page-locked blocks, so that both links work at the
 * same time. No thread waits for anything. */
#include "transfer/routes/routes.h"
#include "transfer/routes/several.h"

cm_status
cm_job_chain_streams(cm_job *job, const cm_stream *worker, cm_stream *waiter)
{
    cm_engine *engine = job->engine;
    uint64_t event;
    cm_device_guard guard;
    CM_TRY(cm_cache_take_event(engine, worker->device, &event));
    cm_status status = cm_device_enter(engine->rt, worker->device, &guard);
    if (cm_is_ok(status)) {
        status = cm_rt_event_record(engine->rt, event, worker->handle);
        if (cm_is_ok(status)) {
            status = cm_stream_wait_event(waiter, event);
        }
        cm_device_leave(engine->rt, &guard);
    }
    cm_cache_give_event(engine, worker->device, event);
    return status;
}

cm_status
cm_job_launch_on(cm_job *job, int device, const cm_layout *layout, cm_address dst,
                 cm_address src, const cm_stream *stream)
{
    cm_engine *engine = job->engine;
    cm_device_guard guard;
    CM_TRY(cm_device_enter(engine->rt, device, &guard));
    cm_status status =
        cm_kernels_launch(&engine->kernels, device, layout, dst, src, stream->handle);
    cm_device_leave(engine->rt, &guard);
    return status;
}

/* -- page-locked blocks ------------------------------------------------------------------ */

void
cm_job_leave_ring(cm_job *job, const cm_block *pinned)
{
    if (pinned != NULL) {
        cm_cache_leave_ring(job->engine, job->plan.piece_nbytes);
    }
}

/* Each transfer may have one, whatever others have. */
static cm_status
take_pinned(cm_job *job, bool first, cm_block **out)
{
    cm_engine *engine = job->engine;
    uint64_t nbytes = job->plan.piece_nbytes;
    cm_pool *pool = cm_cache_enter_ring(engine, nbytes,
                                        first ? UINT64_MAX : job->tuning.ring_nbytes);
    cm_status status = pool == NULL ? cm_fail(CM_EINVALID, 0)
                                    : cm_pool_alloc_now(pool, nbytes, NULL, out);
    if (pool != NULL && !cm_is_ok(status)) {
        cm_cache_leave_ring(engine, nbytes);
    }
    return status;
}

/* The runtime finds a way of its own where there is no page-locked memory. */
static cm_status
prepare_ring(cm_job *job)
{
    cm_status status = cm_ok();
    job->stage_count = 0;
    while (job->stage_count < CM_STAGE_COUNT && cm_is_ok(status)) {
        bool first = job->stage_count == 0;
        status = take_pinned(job, first, &job->stages[job->stage_count].pinned);
        job->stage_count += cm_is_ok(status);
    }
    if (job->stage_count > 0) {
        return cm_ok();
    }
    bool is_refused = cm_pool_is_short(status) || status.code == CM_EINVALID;
    job->plan.route = CM_ROUTE_PEER;
    cm_mutex_lock(&job->engine->lock);
    job->ticket->route = job->plan.route;
    cm_mutex_unlock(&job->engine->lock);
    return is_refused ? cm_ok() : status;
}

/* -- pieces ------------------------------------------------------------------------------ */

static cm_status
gather_piece(cm_job *job, cm_stage *stage, const cm_layout *pack)
{
    int device = job->plan.src_device;
    if (stage->blocks[0] == NULL) {
        CM_TRY(cm_job_alloc_block(job, device, job->plan.piece_nbytes,
                                  job->gather_stream, &stage->blocks[0]));
    }
    return cm_job_launch_on(job, device, pack, stage->blocks[0]->address,
                            job->src.address, job->gather_stream);
}

/* Down to the host on the source's link, while earlier pieces go up on the target's. */
static cm_status
fetch_piece(cm_job *job, const cm_stage *stage, cm_address from, uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, job->plan.src_device, &guard));
    cm_status status = cm_rt_copy_async(rt, (uintptr_t)stage->pinned->host, from,
                                        nbytes, job->gather_stream->handle);
    cm_device_leave(rt, &guard);
    return status;
}

/* Packed bytes across. */
static cm_status
send_piece(cm_job *job, const cm_stage *stage, cm_address to, cm_address from,
           uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    if (stage->pinned == NULL) {
        return cm_rt_copy_peer_async(rt, to, job->plan.device, from,
                                     job->plan.src_device, nbytes, job->stream->handle);
    }
    return cm_rt_copy_async(rt, to, (uintptr_t)stage->pinned->host, nbytes,
                            job->stream->handle);
}

static cm_status
move_piece(cm_job *job, cm_stage *stage, const cm_layout *piece,
           const cm_layout *repeats)
{
    cm_engine *engine = job->engine;
    uint64_t nbytes = cm_layout_nbytes(piece);
    cm_layout pack = *piece;
    cm_layout unpack = *piece;
    cm_layout_pack_dst(&pack);
    cm_layout_pack_src(&unpack);
    cm_layout_put_repeats(&unpack, repeats);
    cm_address from = job->src.address + (uint64_t)pack.src_offset;
    cm_address to = job->dst.address + (uint64_t)unpack.dst_offset;
    bool begins_there = pack.ndim > 0 || stage->pinned != NULL;
    if (begins_there && stage->busy) {
        CM_TRY(cm_stream_wait_event(job->gather_stream, stage->event));
    }
    if (pack.ndim > 0) {
        CM_TRY(gather_piece(job, stage, &pack));
        from = stage->blocks[0]->address;
    }
    if (stage->pinned != NULL) {
        CM_TRY(fetch_piece(job, stage, from, nbytes));
    }
    if (begins_there) {
        CM_TRY(cm_job_chain_streams(job, job->gather_stream, job->stream));
    }
    if (unpack.ndim > 0) {
        if (stage->blocks[1] == NULL) {
            CM_TRY(cm_job_alloc_block(job, job->plan.device, job->plan.piece_nbytes,
                                      job->stream, &stage->blocks[1]));
        }
        to = stage->blocks[1]->address;
    }
    CM_TRY(send_piece(job, stage, to, from, nbytes));
    if (unpack.ndim > 0) {
        CM_TRY(cm_job_launch_on(job, job->plan.device, &unpack, job->dst.address, to,
                                job->stream));
    }
    if (stage->event == 0) {
        CM_TRY(cm_cache_take_event(engine, job->stream->device, &stage->event));
    }
    CM_TRY(cm_rt_event_record(engine->rt, stage->event, job->stream->handle));
    stage->busy = true;
    return cm_ok();
}

cm_status
cm_job_copy_peer(cm_job *job)
{
    cm_layout core = job->plan.layout;
    cm_layout repeats;
    cm_layout piece;
    cm_cut cut;
    job->stage_count = CM_STAGE_COUNT;
    if (job->plan.route == CM_ROUTE_PEER_STAGED && !job->capturing) {
        CM_TRY(prepare_ring(job));
        job->stage_count = job->stage_count > 0 ? job->stage_count : CM_STAGE_COUNT;
    }
    if (core.ndim == 0 && job->stages[0].pinned == NULL) {
        return cm_rt_copy_peer_async(
            job->engine->rt, job->dst.address + (uint64_t)core.dst_offset,
            job->plan.device, job->src.address + (uint64_t)core.src_offset,
            job->plan.src_device, core.run_nbytes, job->stream->handle);
    }
    cm_layout_take_repeats(&core, &repeats);
    CM_TRY(cm_cache_take_side(job->engine, job->plan.src_device, job->stream,
                              &job->gather_stream));
    CM_TRY(cm_job_chain_streams(job, job->stream, job->gather_stream));
    cm_plan_cut(&job->plan, &job->tuning, &core, &cut);
    while (cm_cut_next(&cut, &piece)) {
        cm_stage *stage = &job->stages[job->next_stage];
        job->next_stage = (job->next_stage + 1) % job->stage_count;
        CM_TRY(move_piece(job, stage, &piece, &repeats));
        atomic_fetch_add_explicit(&job->engine->piece_count, 1, memory_order_relaxed);
    }
    return cm_ok();
}
