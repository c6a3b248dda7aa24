/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between two devices. What is not one run is gathered on the source's device,
 * sent, and scattered on the target's, in pieces; no thread waits for anything. */
#include "transfer/job.h"

/* Let `waiter` wait for what `worker` has been given so far. */
static cm_status
chain_streams(cm_engine *engine, const cm_stream *worker, cm_stream *waiter)
{
    uint64_t event;
    cm_device_guard guard;
    CM_TRY(cm_loan_take_event(engine, worker->device, &event));
    cm_status status = cm_device_enter(engine->rt, worker->device, &guard);
    if (cm_is_ok(status)) {
        status = cm_rt_event_record(engine->rt, event, worker->handle);
        if (cm_is_ok(status)) {
            status = cm_stream_wait_event(waiter, event);
        }
        cm_device_leave(engine->rt, &guard);
    }
    cm_loan_give_event(engine, worker->device, event);
    return status;
}

/* Queue the kernel with its own device current, whatever is now. */
static cm_status
launch_on(cm_job *job, int device, const cm_layout *layout, cm_address dst,
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

static cm_status
gather_piece(cm_job *job, cm_stage *stage, const cm_layout *pack)
{
    cm_engine *engine = job->engine;
    int device = job->plan.src_device;
    if (stage->busy) {
        CM_TRY(cm_stream_wait_event(job->gather_stream, stage->event));
    }
    if (stage->blocks[0] == NULL) {
        CM_TRY(cm_job_alloc_block(job, device, job->plan.piece_nbytes,
                                  job->gather_stream, &stage->blocks[0]));
    }
    CM_TRY(launch_on(job, device, pack, stage->blocks[0]->address, job->src.address,
                     job->gather_stream));
    return chain_streams(engine, job->gather_stream, job->stream);
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
    if (pack.ndim > 0) {
        CM_TRY(gather_piece(job, stage, &pack));
        from = stage->blocks[0]->address;
    }
    if (unpack.ndim > 0) {
        if (stage->blocks[1] == NULL) {
            CM_TRY(cm_job_alloc_block(job, job->plan.device, job->plan.piece_nbytes,
                                      job->stream, &stage->blocks[1]));
        }
        to = stage->blocks[1]->address;
    }
    CM_TRY(cm_rt_copy_peer_async(engine->rt, to, job->plan.device, from,
                                 job->plan.src_device, nbytes, job->stream->handle));
    if (unpack.ndim > 0) {
        CM_TRY(launch_on(job, job->plan.device, &unpack, job->dst.address, to,
                         job->stream));
    }
    if (stage->event == 0) {
        CM_TRY(cm_loan_take_event(engine, job->stream->device, &stage->event));
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
    if (core.ndim == 0) {
        return cm_rt_copy_peer_async(
            job->engine->rt, job->dst.address + (uint64_t)core.dst_offset,
            job->plan.device, job->src.address + (uint64_t)core.src_offset,
            job->plan.src_device, core.run_nbytes, job->stream->handle);
    }
    cm_layout_take_repeats(&core, &repeats);
    CM_TRY(cm_loan_take_stream(job->engine, job->plan.src_device, &job->gather_stream));
    CM_TRY(chain_streams(job->engine, job->stream, job->gather_stream));
    cm_cut_init(&cut, &core, job->plan.piece_nbytes);
    while (cm_cut_next(&cut, &piece)) {
        cm_stage *stage = &job->stages[job->next_stage];
        job->next_stage = (job->next_stage + 1) % CM_STAGE_COUNT;
        CM_TRY(move_piece(job, stage, &piece, &repeats));
        atomic_fetch_add_explicit(&job->engine->piece_count, 1, memory_order_relaxed);
    }
    return cm_ok();
}
