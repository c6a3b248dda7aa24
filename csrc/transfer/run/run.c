/* SPDX-License-Identifier: Apache-2.0 */
/* A job run, and giving back what it has borrowed. */
#include "transfer/run/run.h"

#include <stdlib.h>

#include "transfer/routes/pieces.h"
#include "transfer/routes/several.h"

/* -- the run ------------------------------------------------------------------------ */

static cm_status
move_bytes(cm_job *job)
{
    const cm_route_row *route = &cm_routes[job->plan.route];
    cm_status (*move)(cm_job *) = job->many != NULL ? route->move_many : route->move;
    if (!cm_job_waits_for_source(job)) {
        CM_TRY(cm_job_begin(job));
    }
    return move == NULL ? cm_ok() : move(job);
}

/* The end of what is queued becomes the ticket's. */
static cm_status
submit_end(cm_job *job, cm_status outcome)
{
    cm_engine *engine = job->engine;
    uint64_t event;
    int device = job->stream->device;
    CM_TRY(cm_engine_need_watcher(engine));
    CM_TRY(cm_cache_take_event(engine, device, &event));
    cm_status status = cm_rt_event_record(engine->rt, event, job->stream->handle);
    if (cm_is_ok(status) && job->request_stream != NULL
        && job->request_stream != job->stream) {
        status = cm_stream_wait_event(job->request_stream, event);
    }
    if (!cm_is_ok(status)) {
        cm_cache_give_event(engine, device, event);
        return status;
    }
    cm_stream *side = job->gather_stream;
    if (side != NULL) { /* what it waits for may lie before the caller's stream */
        job->gather_is_passed = true;
        job->gather_stream = cm_stream_hold(side);
    }
    cm_ticket_submit(job->ticket, device, job->start_event, event, job->lent, side,
                     outcome);
    job->start_event = 0;
    job->lent = NULL;
    job->submitted = true;
    return cm_ok();
}

/* The stream asked for goes on once another has done the work. */
static cm_status
join_request_stream(cm_job *job)
{
    cm_engine *engine = job->engine;
    if (job->request_stream == job->stream || job->request_stream == NULL) {
        return cm_ok();
    }
    uint64_t event;
    int device = job->stream->device;
    CM_TRY(cm_cache_take_event(engine, device, &event));
    cm_status status = cm_rt_event_record(engine->rt, event, job->stream->handle);
    if (cm_is_ok(status)) {
        status = cm_stream_wait_event(job->request_stream, event);
    }
    cm_cache_give_event(engine, device, event);
    return status;
}

/* All is queued: what tells when it is over? */
static cm_status
end_asynchronously(cm_job *job)
{
    if (job->plan.is_download) {
        job->draining = true; /* what is left is unpacking, by a job thread */
        return join_request_stream(job);
    }
    if (job->is_fill) {
        job->detached = true;
        return join_request_stream(job);
    }
    return submit_end(job, cm_ok());
}

/* What is queued behind the work of others cannot be called back: a call that may be
 * interrupted, and then leaves nothing behind, waits for that first. */
static cm_status
wait_for_others(cm_job *job)
{
    bool idle = false;
    CM_TRY(cm_rt_stream_query(job->engine->rt, job->stream->handle, &idle));
    return idle ? cm_ok() : cm_job_wait_stream(job);
}

/* All up to the moving. */
static cm_status
prepare_stream(cm_job *job)
{
    if (!job->capturing) {
        bool stops = job->blocking && job->interrupted != NULL;
        job->has_queued = !stops;
        job->leaves_waits = stops;
        CM_TRY(cm_job_wait_after(job));
        if (stops) {
            CM_TRY(wait_for_others(job));
            job->has_queued = true;
            job->leaves_waits = false;
        }
        /* The parts of several copies have their own. */
        bool is_timed = !job->blocking && !job->is_fill && !job->plan.is_download
                        && job->plan.route != CM_ROUTE_SEVERAL;
        if (is_timed) {
            CM_TRY(cm_cache_take_event(job->engine, job->stream->device,
                                       &job->start_event));
            CM_TRY(cm_rt_event_record(job->engine->rt, job->start_event,
                                      job->stream->handle));
        }
    }
    if (!job->overlaps) {
        return cm_ok();
    }
    CM_TRY(cm_job_begin(job));
    return cm_job_replace_source(job);
}

static cm_status
run_on_stream(cm_job *job)
{
    if (job->step == CM_JOB_ORDER) {
        CM_TRY(prepare_stream(job));
        job->step = CM_JOB_MOVE;
    }
    if (job->step == CM_JOB_MOVE) {
        CM_TRY(job->fan == NULL ? cm_ok() : cm_fan_begin(job));
        CM_TRY(move_bytes(job));
        CM_TRY(job->fan == NULL ? cm_ok() : cm_fan_end(job));
        job->step = CM_JOB_END;
    }
    if (job->capturing) {
        return cm_ok();
    }
    if (!job->blocking) {
        return end_asynchronously(job);
    }
    if (job->plan.is_download) {
        return cm_job_drain(job);
    }
    if (job->may_park) {
        CM_TRY(cm_job_settle_upload(job));
    }
    return cm_job_wait_stream(job);
}

/* Nothing of a failed copy may be in flight when its caller hears of it. One that the
 * user interrupted goes on behind the ticket, and so does one of a job thread, which
 * others need, and a part of several, whose caller hears of the whole. The stream's
 * device is current. */
static void
abandon(cm_job *job, cm_status status)
{
    cm_runtime *rt = job->engine->rt;
    bool is_ours = job->lent != NULL && job->gather_stream == NULL;
    bool waits_here = status.code != CM_ECANCELLED && !(job->may_park && is_ours)
                      && job->ticket->part_of == NULL;
    if (job->is_parked) {
        return;
    }
    cm_job_stop_staging(job);
    if (!job->begun) { /* nothing but waits for others is queued */
        job->has_queued = false;
        job->leaves_waits = true;
    }
    if (!job->has_queued) {
        return;
    }
    job->draining = false;
    job->detached = false;
    job->lost_track = !cm_is_ok(cm_fan_abandon(job));
    if (!waits_here && cm_is_ok(submit_end(job, status))) {
        return;
    }
    cm_status waited = cm_rt_stream_synchronize(rt, job->stream->handle);
    if (job->gather_stream != NULL) {
        cm_status also = cm_rt_stream_synchronize(rt, job->gather_stream->handle);
        waited = cm_is_ok(waited) ? also : waited;
    }
    job->lost_track = job->lost_track || !cm_is_ok(waited);
}

/* What is queued already has to be looked after: such a job tries twice. */
static cm_status
enter_device(cm_job *job, cm_device_guard *guard)
{
    cm_runtime *rt = job->engine->rt;
    cm_status status = cm_device_enter(rt, job->stream->device, guard);
    if (!cm_is_ok(status) && job->has_queued) {
        status = cm_device_enter(rt, job->stream->device, guard);
    }
    job->lost_track = !cm_is_ok(status) && job->has_queued;
    return status;
}

cm_status
cm_job_run(cm_job *job)
{
    cm_engine *engine = job->engine;
    if (job->plan.route == CM_ROUTE_HOST) {
        return cm_job_run_on_host(job);
    }
    if (job->stream != NULL) {
        /* it was parked: the same again */
    }
    else if (cm_job_fits_stream(job)) {
        job->stream = cm_stream_hold(job->request_stream);
    }
    else {
        CM_TRY(cm_cache_take_stream(engine, job->plan.device, &job->lent));
        job->stream = cm_stream_hold(job->lent);
    }
    cm_device_guard guard;
    CM_TRY(enter_device(job, &guard));
    cm_status status = run_on_stream(job);
    if (!cm_is_ok(status)) {
        abandon(job, status);
    }
    cm_device_leave(engine->rt, &guard);
    return status;
}

cm_status
cm_job_finish_drain(cm_job *job)
{
    cm_runtime *rt = job->engine->rt;
    cm_device_guard guard;
    CM_TRY(enter_device(job, &guard));
    cm_status status = cm_job_drain(job);
    if (!cm_is_ok(status)) {
        abandon(job, status);
    }
    cm_device_leave(rt, &guard);
    return status;
}

/* -- the end ------------------------------------------------------------------------ */

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
