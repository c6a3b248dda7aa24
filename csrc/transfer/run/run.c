/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a job, and gives back what it has borrowed.
 *
 * A job goes through steps (cm_job_step), and cm_job_run() goes on from the step that
 * the job has reached:
 *
 *     ORDER      wait for what comes first, or make the job's stream wait for it
 *     FINALIZE   let the route decide what had to wait for the job's turn (replan.c)
 *     MOVE       call the route's `move`, which queues the copy or makes it
 *
 * After that the copy is over, or somebody else finds out when it is:
 *
 *     END        a blocking call has waited for the copy, or a graph has recorded it,
 *                or the job is one of a file, whose `move` leaves nothing under way
 *     SUBMITTED  the device does the rest, and the ticket has the event at its end
 *     DRAIN      the host still has to unpack what arrives, which a job thread does
 *     DETACHED   a fill: nobody asks for its end
 *
 * If the host makes the whole copy, the job waits for what comes first and then only
 * calls `move`. In a job thread a step that would have to wait returns CM_ETIMEOUT
 * instead and sets job->wait. The thread then puts the job aside, and cm_job_run() is
 * called again when the job can go on. After a failure abandon() makes sure that
 * nothing is left in flight that the caller does not expect. */
#include "transfer/run/run.h"

#include <stdlib.h>

#include "transfer/file/job.h"
#include "transfer/plan/batch_plan.h"
#include "transfer/plan/ring_policy.h"
#include "transfer/routes/broadcast.h"
#include "transfer/routes/device_side.h"
#include "transfer/routes/kernel_rows.h"
#include "transfer/routes/ring.h"

/* -- the run ------------------------------------------------------------------------ */

/* Let the ticket find out when the queued work ends. */
static cm_status
submit_end(cm_job *job, cm_status outcome)
{
    /* The ticket also keeps the second stream of the job, which works on the source's
     * device. That stream may still be waiting for the work that the caller's stream
     * had to come after. */
    CM_TRY(cm_engine_need_watcher(job->engine));
    CM_TRY(cm_ticket_submit(
        job->ticket, job->stream, job->request_stream, job->start_event,
        cm_job_has_lent_stream(job) ? job->stream : NULL,
        job->sides == NULL ? NULL : job->sides[job->plan.src_device].stream, outcome));
    job->start_event = 0;
    job->step = CM_JOB_SUBMITTED;
    return cm_ok();
}

/* Once all work is queued, arrange who finds out when the copy is over. */
static cm_status
end_asynchronously(cm_job *job)
{
    if (!job->plan.is_download && !job->is_fill) {
        return submit_end(job, cm_ok());
    }
    if (cm_job_has_lent_stream(job) && job->request_stream != NULL) {
        CM_TRY(cm_job_chain_streams(job, job->stream, job->request_stream));
    }
    job->step = job->is_fill ? CM_JOB_DETACHED : CM_JOB_DRAIN;
    return cm_ok();
}

/* Do everything that comes before bytes are moved. Work that is queued behind the work
 * of others cannot be called back. So a call that may be interrupted, and must not
 * leave anything behind, first waits for the others. */
static cm_status
prepare_stream(cm_job *job)
{
    if (!job->capturing) {
        /* A file sets has_queued itself when it queues something. */
        bool is_file = job->file != NULL;
        bool stops = job->blocking && job->hooks.interrupted != NULL && !is_file;
        job->has_queued = !stops && !is_file;
        CM_TRY(cm_job_wait_after(job));
        if (stops) {
            CM_TRY(cm_job_wait_stream(job)); /* this waits for the work of others */
            job->has_queued = true;
        }
        if (!job->blocking && !job->is_fill && !job->plan.is_download) {
            CM_TRY(cm_cache_take_event(job->engine, job->stream->device, CM_WAITED,
                                       &job->start_event));
            CM_TRY(cm_rt_event_record(job->engine->rt, job->start_event,
                                      job->stream->handle));
        }
    }
    return cm_ok();
}

/* Do what the host still has to do for work that is queued. */
static cm_status
drain(cm_job *job)
{
    return job->plan.row->drain == NULL ? cm_ok() : job->plan.row->drain(job);
}

/* Make the decisions that had to wait for the job's turn, before anything is moved. If
 * the ends overlap, the whole source is read first. The route takes the memory that it
 * needs (`reserve`). Either step may change the plan, which stays as it is afterwards.
 * Others read the route and the size from the ticket, so the ticket gets them again. */
static cm_status
finalize_plan(cm_job *job)
{
    if (job->plan.row->packs && job->train_nbytes > job->plan.nbytes) {
        job->plan.train_nbytes = job->train_nbytes;
        cm_ring_policy_init(&job->plan, &job->tuning);
    }
    if (!job->overlaps && job->plan.row->reserve == NULL) {
        return cm_ok();
    }
    if (job->overlaps) {
        CM_TRY(cm_job_begin(job));
        CM_TRY(cm_job_replace_source(job));
    }
    if (job->plan.row->reserve != NULL) { /* the plan may have another route now */
        CM_TRY(job->plan.row->reserve(job));
    }
    cm_mutex_lock(&job->engine->lock);
    job->ticket->row = job->plan.row;
    job->ticket->nbytes = job->plan.nbytes;
    cm_mutex_unlock(&job->engine->lock);
    return cm_ok();
}

static cm_status
run_on_stream(cm_job *job)
{
    if (job->step == CM_JOB_DRAIN) {
        return drain(job);
    }
    if (job->step == CM_JOB_ORDER) {
        CM_TRY(prepare_stream(job));
        job->step = CM_JOB_FINALIZE;
    }
    if (job->step == CM_JOB_FINALIZE) {
        CM_TRY(finalize_plan(job));
        job->step = CM_JOB_MOVE;
    }
    if (job->step == CM_JOB_MOVE) {
        const cm_route_row *row = job->plan.row;
        if (job->targets != NULL) {
            CM_TRY(cm_targets_begin(job));
        }
        if (!row->packs || job->plan.is_download) {
            /* A route that packs an upload has begun the job in `reserve`, before it
             * read the source. */
            CM_TRY(cm_job_begin(job));
        }
        CM_TRY(row->move(job));
        cm_job_leave_lane(job); /* so that the next job may begin (scheduler.c) */
        if (job->targets != NULL) {
            CM_TRY(cm_targets_end(job));
        }
        job->step = CM_JOB_END;
    }
    if (job->capturing || job->file != NULL) { /* neither of these leaves work under way
                                                  here */
        return cm_ok();
    }
    if (!job->blocking) {
        return end_asynchronously(job);
    }
    if (job->plan.is_download || job->in_background) {
        CM_TRY(drain(job));
    }
    return job->plan.is_download ? cm_ok() : cm_job_wait_stream(job);
}

/* Leave the queued work to the ticket, which then has to keep the ends of the copy
 * alive. Returns false if the ticket cannot do this, and then the caller has to wait
 * for the queued work. */
static bool
leave_to_ticket(cm_job *job, cm_status status)
{
    if (job->keeps_source != NULL
        && !cm_ticket_take_keeps(job->ticket, job->keeps_source)) {
        return false;
    }
    job->keeps_source = NULL;
    return cm_is_ok(submit_end(job, status));
}

/* Wait for the work that a failed copy has left in flight, since nothing may be in
 * flight any more when its caller learns of the failure. The work of three kinds of
 * copy is left to their tickets instead. The first is a copy that the user interrupted.
 * The second is a copy in the background, whose failure only the ticket reports. The
 * third is a part of a batch, whose caller asks only about the whole batch (ticket.h).
 * The stream's device is current. */
static void
abandon(cm_job *job, cm_status status)
{
    cm_runtime *rt = job->engine->rt;
    bool by_ticket = job->in_background ? cm_job_has_lent_stream(job)
                                        : !job->blocking && job->request_stream == NULL;
    by_ticket =
        by_ticket || status.code == CM_ECANCELLED || job->ticket->part_of != NULL;
    if (job->wait != CM_WAIT_NONE) {
        return;
    }
    cm_ring_stop(job);
    /* A job that has not started has queued nothing of its own. Its stream only waits
     * for the work of others. */
    job->has_queued = job->has_queued && job->ticket->started;
    if (!job->has_queued) {
        return;
    }
    job->lost_track = !cm_is_ok(cm_job_abandon_sides(job));
    if (by_ticket && leave_to_ticket(job, status)) {
        return;
    }
    bool waited = cm_is_ok(cm_rt_stream_synchronize(rt, job->stream->handle));
    job->lost_track = job->lost_track || !waited;
}

/* Enter the device of the job's stream. If the job has queued work, somebody has to
 * enter the device to wait for this work, so the call then tries twice. */
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

/* Take a stream for the job. It is the stream of the request, if that stream can do the
 * work. Otherwise it is the stream of a copy that this one comes after, so that a chain
 * of copies of the same bytes shares one stream. If there is no such copy, it is a
 * spare stream of the engine's. */
static cm_status
take_stream(cm_job *job)
{
    const cm_ticket *ticket = job->ticket;
    if (cm_job_fits_stream(job)) {
        job->stream = cm_stream_hold(job->request_stream);
    }
    for (uint32_t i = 0; i < ticket->after_count && job->stream == NULL; i++) {
        job->stream = cm_ticket_take_stream(ticket->after[i], job->plan.device);
    }
    return job->stream != NULL
               ? cm_ok()
               : cm_cache_take_stream(job->engine, job->plan.device, &job->stream);
}

cm_status
cm_job_run(cm_job *job)
{
    cm_engine *engine = job->engine;
    bool waits_here = job->file != NULL
                          ? job->file->has_host_end
                          : job->in_background && job->ticket->needs_completion;
    if (waits_here && job->step == CM_JOB_ORDER) {
        CM_TRY(cm_job_wait_after(job)); /* waits in this thread, not on a stream */
    }
    if (job->plan.device < 0) {
        return job->plan.row->move(job); /* the host makes the whole copy */
    }
    if (job->stream == NULL) { /* it has one already if it goes on after a wait */
        CM_TRY(take_stream(job));
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

/* -- the end ------------------------------------------------------------------------ */

/* Free the job and give back everything that it has borrowed. */
static void
destroy(cm_job *job)
{
    cm_engine *engine = job->engine;
    cm_engine_count_route(engine, job->plan.row);
    if (job->ring != NULL) {
        cm_ring_destroy(job);
    }
    if (job->sides != NULL || job->block != NULL || job->temporary != NULL
        || job->row_numbers != NULL) {
        cm_job_free_device_side(job);
    }
    free(job->targets);
    if (job->stream != NULL) {
        cm_cache_give_event(engine, job->stream->device, CM_WAITED, job->start_event);
        cm_cache_give_event(engine, job->stream->device, CM_WAITED, job->idle_event);
    }
    for (uint32_t i = 0; i < job->after_count; i++) {
        cm_cache_give_event(engine, job->afters[i].device, CM_WAITED,
                            job->afters[i].event);
    }
    free(job->afters);
    free(job->host_temporary);
    if (job->many != NULL) {
        cm_many_destroy(job->many);
    }
    if (job->rows != NULL) {
        cm_kernel_rows_destroy(job->rows);
    }
    if (job->file != NULL) {
        cm_file_job_drop(job->file);
    }
    if (cm_job_has_lent_stream(job) && job->step != CM_JOB_SUBMITTED && job->has_queued
        && !job->lost_track) {
        cm_cache_give_stream(engine, job->stream);
    }
    /* Otherwise the stream does not become a spare. It is not the engine's own, or the
     * ticket has it, or it may have work left for which its next user would wait. */
    else if (job->stream != NULL) {
        cm_stream_release(job->stream);
    }
    if (job->request_stream != NULL) {
        cm_stream_release(job->request_stream);
    }
    cm_ticket_release(job->ticket);
    free(job);
}

cm_status
cm_job_finish(cm_job *job, cm_status status, bool is_reported)
{
    cm_ticket *ticket = cm_ticket_hold(job->ticket);
    bool submitted = job->step == CM_JOB_SUBMITTED;
    destroy(job);
    if (!submitted) {
        status = cm_ticket_check_rows(ticket, status);
        cm_ticket_finish(ticket, status, is_reported);
    }
    cm_ticket_release(ticket);
    return status;
}
