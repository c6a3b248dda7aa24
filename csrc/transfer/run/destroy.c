/* SPDX-License-Identifier: Apache-2.0 */
/* Giving back what a job has borrowed. */
#include <stdlib.h>

#include "transfer/engine/job.h"
#include "transfer/routes/pieces.h"
#include "transfer/routes/several.h"
#include "transfer/run/run.h"

/* Nothing of the job runs any more. */
static bool
is_idle(const cm_job *job)
{
    return !job->submitted && !job->detached && !job->lost_track;
}

static void
free_block(const cm_job *job, cm_pool *pool, cm_block *block)
{
    cm_stream *uses[2] = {job->stream, job->gather_stream};
    uint32_t use_count = job->gather_stream == NULL || job->gather_is_joined ? 1 : 2;
    if (block != NULL) {
        cm_pool_free(pool, block, uses, is_idle(job) ? 0 : use_count,
                     job->lost_track ? CM_POOL_FREE_FENCE : 0u);
    }
}

void
cm_job_destroy(cm_job *job)
{
    cm_engine *engine = job->engine;
    cm_pool **device_pools = engine->device_pools; /* set once before the first use */
    atomic_fetch_add_explicit(&engine->route_counts[job->plan.route], 1,
                              memory_order_relaxed);
    cm_job_end_staging(job, free_block);
    cm_fan_destroy(job, is_idle(job));
    for (int i = 0; i < CM_STAGE_COUNT; i++) {
        cm_stage *stage = &job->stages[i];
        if (job->plan.device >= 0) {
            free_block(job, device_pools[job->plan.src_device], stage->blocks[0]);
            free_block(job, device_pools[job->plan.device], stage->blocks[1]);
            cm_job_leave_ring(job, stage->pinned);
            free_block(job, engine->pinned_pool, stage->pinned);
        }
        if (job->stream != NULL) {
            cm_cache_give_event(engine, job->stream->device, stage->event);
        }
    }
    if (job->plan.device >= 0) {
        free_block(job, device_pools[job->plan.device], job->device_block);
        if (job->has_pair) {
            atomic_fetch_sub(&engine->pair_count, 1);
        }
        free_block(job, device_pools[job->plan.device], job->temporary);
    }
    if (job->stream != NULL) {
        cm_cache_give_event(engine, job->stream->device, job->start_event);
        cm_cache_give_event(engine, job->stream->device, job->wait_event);
    }
    for (uint32_t i = 0; i < job->after_count; i++) {
        cm_cache_give_event(engine, job->afters[i].device, job->afters[i].event);
    }
    cm_job_leave_order(job);
    free(job->afters);
    free(job->host_temporary);
    cm_many_destroy(job->many);
    if (job->gather_is_passed) {
        cm_stream_release(job->gather_stream);
    }
    else {
        cm_cache_give_side(engine, job->gather_stream, is_idle(job));
    }
    if (job->lent != NULL && job->leaves_waits) {
        cm_stream_release(job->lent); /* the next would wait for the same */
    }
    else {
        cm_cache_give_stream(engine, job->lent);
    }
    if (job->stream != NULL) {
        cm_stream_release(job->stream);
    }
    if (job->request_stream != NULL) {
        cm_stream_release(job->request_stream);
    }
    cm_ticket_release(job->ticket);
    free(job);
}
