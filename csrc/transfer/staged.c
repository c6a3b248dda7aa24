/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between a device and host memory that the runtime cannot take as it is, in
 * pieces through page-locked blocks: packed on one side, unpacked on the other. A
 * broadcast source travels once. */
#include "transfer/host_copy.h"
#include "transfer/job.h"

uint64_t
cm_job_piece_limit(const cm_job *job)
{
    return job->plan.nbytes < CM_STAGE_NBYTES ? job->plan.nbytes : CM_STAGE_NBYTES;
}

cm_status
cm_job_alloc_block(cm_job *job, int device, uint64_t nbytes, cm_stream *stream,
                   cm_block **out)
{
    cm_mutex_lock(&job->engine->lock);
    cm_pool *pool = job->engine->device_pools[device];
    cm_mutex_unlock(&job->engine->lock);
    if (pool == NULL) {
        return cm_fail(CM_EINVALID, (uint64_t)device);
    }
    return cm_pool_alloc(pool, nbytes, stream, out);
}

static cm_status
get_device_block(cm_job *job, cm_address *out)
{
    if (job->device_block == NULL) {
        CM_TRY(cm_job_alloc_block(job, job->plan.device, cm_job_piece_limit(job),
                                  job->stream, &job->device_block));
    }
    *out = job->device_block->address;
    return cm_ok();
}

/* The stage's pinned block is free again; what came down is where it belongs. */
static cm_status
finish_stage(cm_job *job, cm_stage *stage)
{
    CM_TRY(cm_job_wait_event(job, job->stream->device, stage->event));
    stage->busy = false;
    if (stage->piece.run_nbytes != 0) {
        cm_host_copy(&stage->piece, job->dst.host, stage->pinned->host);
    }
    return cm_ok();
}

static cm_status
take_stage(cm_job *job, cm_stage **out)
{
    cm_engine *engine = job->engine;
    cm_stage *stage = &job->stages[job->next_stage];
    if (stage->busy) {
        CM_TRY(finish_stage(job, stage));
    }
    job->next_stage = (job->next_stage + 1) % CM_STAGE_COUNT;
    if (stage->event == 0) {
        CM_TRY(cm_loan_take_event(engine, job->stream->device, &stage->event));
    }
    if (stage->pinned == NULL) {
        cm_mutex_lock(&engine->lock);
        cm_pool *pool = engine->pinned_pool;
        cm_mutex_unlock(&engine->lock);
        if (pool == NULL) {
            return cm_fail(CM_EINVALID, 0);
        }
        CM_TRY(cm_pool_alloc(pool, cm_job_piece_limit(job), NULL, &stage->pinned));
    }
    *out = stage;
    return cm_ok();
}

static cm_status
end_stage(cm_job *job, cm_stage *stage)
{
    CM_TRY(cm_rt_event_record(job->engine->rt, stage->event, job->stream->handle));
    stage->busy = true;
    return cm_ok();
}

/* Packed bytes on the host to their places on the device, or in host memory that the
 * device writes for us. What is repeated is read again and again: not over the bus. */
static cm_status
send_piece(cm_job *job, const cm_layout *unpack, const cm_stage *stage, uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    cm_address from = (uintptr_t)stage->pinned->host;
    bool repeats = cm_layout_nbytes(unpack) > nbytes;
    if (!cm_region_is_on_device(&job->dst) && !repeats) {
        return cm_kernels_launch(&job->engine->kernels, job->plan.device, unpack,
                                 job->dst.address, stage->pinned->address,
                                 job->stream->handle);
    }
    if (unpack->ndim == 0) {
        return cm_rt_copy_async(rt, job->dst.address + (uint64_t)unpack->dst_offset,
                                from, nbytes, job->stream->handle);
    }
    cm_address block;
    CM_TRY(get_device_block(job, &block));
    CM_TRY(cm_rt_copy_async(rt, block, from, nbytes, job->stream->handle));
    return cm_kernels_launch(&job->engine->kernels, job->plan.device, unpack,
                             job->dst.address, block, job->stream->handle);
}

/* Unless that was done before the job was parked. */
static void
begin_cut(cm_job *job)
{
    if (!job->is_cut) {
        cm_layout_take_repeats(&job->plan.layout, &job->repeats);
        cm_cut_init(&job->cut, &job->plan.layout, cm_job_piece_limit(job));
        job->is_cut = true;
    }
}

cm_status
cm_job_upload(cm_job *job)
{
    cm_layout piece;
    if (job->src.kind != CM_KIND_PAGEABLE && !job->is_cut) {
        /* Streams may still write it: the host reads only after them. */
        CM_TRY(cm_job_wait_stream(job));
    }
    begin_cut(job);
    while (!job->cut.done) {
        cm_stage *stage;
        CM_TRY(take_stage(job, &stage)); /* the only one that may park */
        (void)cm_cut_next(&job->cut, &piece);
        cm_layout pack = piece;
        cm_layout_pack_dst(&pack);
        cm_host_copy(&pack, stage->pinned->host, job->src.host);
        cm_layout unpack = piece;
        cm_layout_pack_src(&unpack);
        cm_layout_put_repeats(&unpack, &job->repeats);
        CM_TRY(send_piece(job, &unpack, stage, cm_layout_nbytes(&piece)));
        CM_TRY(end_stage(job, stage));
    }
    return cm_ok();
}

/* Bytes from their places to the packed block on the host. */
static cm_status
fetch_piece(cm_job *job, const cm_layout *pack, const cm_stage *stage, uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    cm_address to = (uintptr_t)stage->pinned->host;
    if (!cm_region_is_on_device(&job->src)) {
        return cm_kernels_launch(&job->engine->kernels, job->plan.device, pack,
                                 stage->pinned->address, job->src.address,
                                 job->stream->handle);
    }
    if (pack->ndim == 0) {
        return cm_rt_copy_async(rt, to, job->src.address + (uint64_t)pack->src_offset,
                                nbytes, job->stream->handle);
    }
    cm_address block;
    CM_TRY(get_device_block(job, &block));
    CM_TRY(cm_kernels_launch(&job->engine->kernels, job->plan.device, pack, block,
                             job->src.address, job->stream->handle));
    return cm_rt_copy_async(rt, to, block, nbytes, job->stream->handle);
}

cm_status
cm_job_download(cm_job *job)
{
    cm_layout piece;
    begin_cut(job);
    while (!job->cut.done) {
        cm_stage *stage;
        CM_TRY(take_stage(job, &stage));
        (void)cm_cut_next(&job->cut, &piece);
        cm_layout pack = piece;
        cm_layout_pack_dst(&pack);
        CM_TRY(fetch_piece(job, &pack, stage, cm_layout_nbytes(&piece)));
        stage->piece = piece;
        cm_layout_pack_src(&stage->piece);
        cm_layout_put_repeats(&stage->piece, &job->repeats);
        CM_TRY(end_stage(job, stage));
    }
    return cm_ok();
}

cm_status
cm_job_drain(cm_job *job)
{
    for (int i = 0; i < CM_STAGE_COUNT; i++) {
        cm_stage *stage = &job->stages[job->next_stage];
        if (stage->busy) {
            CM_TRY(finish_stage(job, stage));
        }
        job->next_stage = (job->next_stage + 1) % CM_STAGE_COUNT;
    }
    return cm_ok();
}
