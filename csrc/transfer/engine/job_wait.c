/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/engine/job.h"
#include "transfer/host/backoff.h"

/* The device of the event is current. */
static cm_status
poll_event(cm_job *job, int device, uint64_t event)
{
    uint64_t start = cm_now_ns();
    uint64_t asked = start;
    for (;;) {
        bool done = false;
        CM_TRY(cm_rt_event_query(job->engine->rt, event, &done));
        if (done) {
            return cm_ok();
        }
        uint64_t now = cm_now_ns();
        if (job->may_park && cm_job_is_interrupted(job)) {
            return cm_fail(CM_ECANCELLED, 0); /* it may park again and again */
        }
        if (job->may_park && now - start >= CM_PARK_AFTER_NS) {
            return cm_job_park_on_event(job, device, event);
        }
        if (now - asked >= CM_ASK_NS) {
            if (cm_job_is_interrupted(job)) {
                return cm_fail(CM_ECANCELLED, 0);
            }
            asked = cm_now_ns();
        }
        if (job->may_park) {
            cm_nap_after(now - start);
        }
        else {
            cm_pause_until(now + cm_backoff_ns(now - start));
        }
    }
}

cm_status
cm_job_wait_event(cm_job *job, int device, uint64_t event)
{
    cm_runtime *rt = job->engine->rt;
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, device, &guard));
    bool polls = job->may_park || job->interrupted != NULL;
    cm_status status =
        polls ? poll_event(job, device, event) : cm_rt_event_synchronize(rt, event);
    cm_device_leave(rt, &guard);
    return status;
}

/* A job that is parked meanwhile goes on with the event recorded the first time. */
cm_status
cm_job_wait_stream(cm_job *job)
{
    cm_engine *engine = job->engine;
    int device = job->stream->device;
    if (!job->may_park && job->interrupted == NULL) {
        return cm_rt_stream_synchronize(engine->rt, job->stream->handle);
    }
    cm_status status = cm_ok();
    if (job->wait_event == 0) {
        CM_TRY(cm_cache_take_event(engine, device, &job->wait_event));
        status = cm_rt_event_record(engine->rt, job->wait_event, job->stream->handle);
    }
    if (cm_is_ok(status)) {
        status = cm_job_wait_event(job, device, job->wait_event);
    }
    if (!job->is_parked) {
        cm_cache_give_event(engine, device, job->wait_event);
        job->wait_event = 0;
    }
    return status;
}

cm_status
cm_job_begin(cm_job *job)
{
    if (job->begun) {
        return cm_ok();
    }
    cm_ticket *ticket = job->ticket;
    cm_mutex_lock(&job->engine->lock);
    bool cancelled = ticket->cancelled;
    ticket->started = !cancelled;
    cm_mutex_unlock(&job->engine->lock);
    job->begun = !cancelled;
    return cancelled ? cm_fail(CM_ECANCELLED, 0) : cm_ok();
}
