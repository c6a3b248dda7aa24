/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/device_side.h"

#include <stdlib.h>

#include "base/checked_math.h"

/* -- streams -------------------------------------------------------------------------- */

cm_status
cm_job_copy_run(const cm_job *job, const cm_stream *stream, cm_address dst,
                cm_address src, uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    return CM_ON_DEVICE(rt, stream->device,
                        cm_rt_copy_async(rt, dst, src, nbytes, stream->handle));
}

cm_status
cm_job_launch(cm_job *job, const cm_stream *stream, const cm_layout *layout,
              cm_address dst, cm_address src)
{
    return cm_kernels_launch(&job->engine->kernels, stream->device,
                             cm_layout_has_items(layout) ? &job->convert : NULL, layout,
                             dst, src, stream->handle);
}

cm_status
cm_job_copy_layout(cm_job *job, const cm_stream *stream, const cm_layout *layout,
                   cm_address dst, cm_address src)
{
    if (layout->ndim == 0 && !cm_layout_has_items(layout)) {
        return cm_job_copy_run(job, stream, dst + (uint64_t)layout->offset[CM_DST],
                               src + (uint64_t)layout->offset[CM_SRC],
                               layout->run_nbytes);
    }
    return CM_ON_DEVICE(job->engine->rt, stream->device,
                        cm_job_launch(job, stream, layout, dst, src));
}

uint64_t
cm_job_run_nbytes(const cm_job *job, cm_address at, uint64_t nbytes)
{
    bool locked;
    return cm_registry_run_nbytes(job->engine->registry, (const void *)(uintptr_t)at,
                                  nbytes, &locked);
}

cm_status
cm_job_copy_over_edges(cm_job *job, cm_address dst, cm_address src, uint64_t nbytes)
{
    for (uint64_t at = 0; at < nbytes;) {
        uint64_t run = cm_job_run_nbytes(job, dst + at, nbytes - at);
        run = cm_job_run_nbytes(job, src + at, run);
        CM_TRY(cm_rt_copy_async(job->engine->rt, dst + at, src + at, run,
                                job->stream->handle));
        at += run;
    }
    return cm_ok();
}

cm_status
cm_job_chain_streams(cm_job *job, const cm_stream *worker, cm_stream *waiter)
{
    return cm_cache_chain_streams(job->engine, worker, waiter);
}

/* -- more streams than one ------------------------------------------------------------- */

cm_status
cm_job_open_side(cm_job *job, int device, cm_stream *given)
{
    if (job->sides == NULL) {
        job->sides = calloc(CM_MAX_DEVICES, sizeof(*job->sides));
        CM_TRY(cm_allocated(job->sides != NULL, CM_MAX_DEVICES * sizeof(*job->sides)));
    }
    cm_device_side *side = &job->sides[device];
    if (side->stream != NULL) {
        return cm_ok();
    }
    cm_stream *stream = given == NULL ? NULL : cm_stream_hold(given);
    if (stream == NULL) {
        CM_TRY(cm_cache_take_side(job->engine, device, job->stream, &stream));
    }
    cm_status status = cm_job_chain_streams(job, job->stream, stream);
    if (!cm_is_ok(status)) {
        cm_stream_release(stream); /* without the chain it would not wait for the job's
                                      own stream */
        return status;
    }
    side->stream = stream;
    return cm_ok();
}

cm_stream *
cm_job_use_side(cm_job *job, int device)
{
    job->sides[device].is_ahead = true;
    return job->sides[device].stream;
}

cm_status
cm_job_open_stream_on(cm_job *job, int device, cm_stream *given, cm_stream **out)
{
    *out = job->stream;
    if (device != job->stream->device) {
        CM_TRY(cm_job_open_side(job, device, given));
        *out = cm_job_use_side(job, device);
    }
    return cm_ok();
}

cm_status
cm_job_take_block_on(cm_job *job, int device, cm_address *out)
{
    if (device == job->stream->device) {
        return cm_job_take_device_block(job, 0, out);
    }
    cm_device_side *side = &job->sides[device];
    if (side->block == NULL) {
        CM_TRY(cm_job_alloc_block(job, job->plan.piece_nbytes, side->stream, true,
                                  &side->block));
    }
    *out = side->block->address;
    return cm_ok();
}

cm_status
cm_job_join_sides(cm_job *job)
{
    cm_status first = cm_ok();
    for (int device = 0; job->sides != NULL && device < CM_MAX_DEVICES; device++) {
        cm_device_side *side = &job->sides[device];
        if (side->is_ahead) {
            cm_status status = cm_job_chain_streams(job, side->stream, job->stream);
            side->is_ahead = !cm_is_ok(status);
            first = cm_first_failure(first, status);
        }
    }
    return first;
}

cm_status
cm_job_abandon_sides(cm_job *job)
{
    cm_runtime *rt = job->engine->rt;
    cm_status first = cm_ok();
    if (cm_is_ok(cm_job_join_sides(job))) {
        return first;
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        const cm_device_side *side = &job->sides[device];
        if (side->is_ahead) {
            first = cm_first_failure(
                first,
                CM_ON_DEVICE(rt, device,
                             cm_rt_stream_synchronize(rt, side->stream->handle)));
        }
    }
    return first;
}

/* -- blocks --------------------------------------------------------------------------- */

cm_status
cm_job_alloc_block(cm_job *job, uint64_t nbytes, cm_stream *stream, bool waits,
                   cm_block **out)
{
    /* No lock is needed: a pool that was set once stays until the engine is closed. */
    if (job->engine->device_pools[stream->device] == NULL) {
        return cm_fail(CM_EINVALID, (uint64_t)stream->device);
    }
    return cm_engine_alloc(job->engine, stream->device, nbytes, stream,
                           waits && !job->capturing ? &job->hooks : NULL, out);
}

/* Return the distance in bytes between the beginnings of the two pieces that a block
 * for two pieces (job->has_pair) has room for. */
static uint64_t
pair_pitch(const cm_job *job)
{
    enum { EDGE = 256 }; /* the address of each piece is a multiple of this */
    return cm_round_up_to(job->plan.piece_nbytes, EDGE);
}

cm_status
cm_job_try_pair(cm_job *job)
{
    /* The pool has plenty of room if it could hold this many blocks for two pieces. */
    enum { PLENTY = 8 };
    cm_pool *pool = job->engine->device_pools[job->plan.device];
    bool is_download = job->plan.is_download && job->many == NULL;
    if (job->block != NULL || is_download || job->plan.piece_count < 2
        || job->targets != NULL) {
        return cm_ok();
    }
    uint64_t nbytes = 2 * pair_pitch(job);
    if (pool == NULL || cm_pool_room(pool) / PLENTY < nbytes) {
        return cm_ok();
    }
    cm_status status = cm_job_alloc_block(job, nbytes, job->stream, false, &job->block);
    job->has_pair = cm_is_ok(status);
    return cm_pool_is_short(status) ? cm_ok() : status;
}

cm_status
cm_job_take_device_block(cm_job *job, uint64_t number, cm_address *out)
{
    CM_TRY(job->block_status);
    CM_TRY(cm_job_try_pair(job));
    if (job->block == NULL) {
        job->block_status = cm_job_alloc_block(job, job->plan.piece_nbytes, job->stream,
                                               true, &job->block);
        CM_TRY(job->block_status);
    }
    *out = job->block->address + (job->has_pair ? number % 2 * pair_pitch(job) : 0);
    return cm_ok();
}

void
cm_job_free_block(const cm_job *job, cm_block *block)
{
    int device = job->plan.src_device;
    bool is_idle = job->step < CM_JOB_SUBMITTED && !job->lost_track;
    cm_stream *uses[2] = {job->stream};
    uint32_t use_count = 1;
    if (job->sides != NULL && job->sides[device].is_ahead) {
        uses[use_count++] = job->sides[device].stream;
    }
    if (block != NULL) {
        cm_pool_free(cm_block_pool(block), block, uses, is_idle ? 0 : use_count,
                     job->lost_track ? CM_POOL_FREE_FENCE : 0u);
    }
}

void
cm_job_free_device_side(cm_job *job)
{
    for (int device = 0; job->sides != NULL && device < CM_MAX_DEVICES; device++) {
        const cm_device_side *side = &job->sides[device];
        if (side->block != NULL) {
            cm_job_free_block(job, side->block);
        }
        /* If the ticket was submitted, it has its own reference to the stream. */
        if (side->stream != NULL) {
            cm_stream_release(side->stream);
        }
    }
    cm_job_free_block(job, job->block);
    cm_job_free_block(job, job->temporary);
    cm_job_free_block(job, job->row_numbers);
    free(job->sides);
}
