/* SPDX-License-Identifier: Apache-2.0 */
/* The threads that run whole jobs in the background and unpack what came to the host.
 * One is started when there is a job and nobody idle, up to CM_MAX_JOB_THREADS. A job
 * that waits long for a stream or another transfer is parked: it does not hold up the
 * others. */
#include "transfer/run/run.h"

/* It waits for something, or for a job thread with time. */
static void
put_away(cm_engine *engine, cm_job *job)
{
    cm_mutex_lock(&engine->lock);
    bool cancelled = job->ticket->cancelled;
    if (!cancelled) {
        cm_engine_list_job_locked(engine, job, !job->is_yielding);
    }
    cm_mutex_unlock(&engine->lock);
    if (cancelled) {
        cm_job_drop(job);
    }
}

static void
run_job(cm_engine *engine, cm_job *job)
{
    cm_ticket *ticket = cm_ticket_hold(job->ticket);
    job->may_park = cm_is_ok(cm_engine_need_watcher(engine)); /* which wakes it */
    /* What we call would break a capture that another thread has under way. */
    int mode = CM_CAPTURE_RELAXED;
    bool draining = job->draining;
    job->is_parked = false;
    job->is_yielding = false;
    job->parked_ticket = NULL;
    cm_status status = cm_rt_capture_mode_exchange(engine->rt, &mode);
    if (!cm_is_ok(status) && job->has_queued) {
        status = cm_rt_capture_mode_exchange(engine->rt, &mode); /* it is needed more */
    }
    bool switched = cm_is_ok(status);
    if (draining) {
        cm_status drained = cm_job_finish_drain(job);
        status = cm_is_ok(status) ? drained : status;
    }
    else if (switched) {
        status = cm_job_run(job);
    }
    else {
        job->lost_track = job->has_queued; /* before it was parked */
    }
    bool parked = job->is_parked;
    bool submitted = job->submitted;
    if (!parked) {
        cm_job_destroy(job);
    }
    if (switched) {
        cm_status back = cm_rt_capture_mode_exchange(engine->rt, &mode);
        status = cm_is_ok(status) ? back : status;
    }
    if (parked) {
        put_away(engine, job);
    }
    else if (!submitted) {
        cm_ticket_finish(ticket, status, status.code == CM_ECANCELLED);
    }
    cm_ticket_release(ticket);
}

static void *
work(void *argument)
{
    cm_engine *engine = argument;
    cm_mutex_lock(&engine->lock);
    for (;;) {
        cm_job *job = cm_engine_pick_job_locked(engine);
        if (job == NULL) {
            if (engine->stop) {
                break;
            }
            engine->idle_count++;
            cm_cond_wait(&engine->work, &engine->lock);
            engine->idle_count--;
            continue;
        }
        bool cancelled = job->ticket->cancelled;
        cm_mutex_unlock(&engine->lock);
        if (cancelled) {
            cm_job_drop(job);
        }
        else {
            run_job(engine, job);
        }
        cm_mutex_lock(&engine->lock);
    }
    cm_mutex_unlock(&engine->lock);
    return NULL;
}

cm_status
cm_engine_give_job(cm_engine *engine, cm_job *job)
{
    cm_status status = cm_ok();
    cm_mutex_lock(&engine->lock);
    if ((uint64_t)engine->idle_count <= engine->job_count + engine->waiting_count
        && engine->thread_count < CM_MAX_JOB_THREADS) {
        status = cm_thread_start(&engine->threads[engine->thread_count], work, engine);
        engine->thread_count += cm_is_ok(status);
    }
    if (engine->thread_count > 0) {
        status = cm_ok(); /* there is somebody who will come to it */
        cm_engine_list_job_locked(engine, job, false);
    }
    cm_mutex_unlock(&engine->lock);
    return status;
}

void
cm_engine_join_workers(cm_engine *engine)
{
    cm_mutex_lock(&engine->lock);
    int count = engine->thread_count;
    engine->stop = true;
    cm_cond_signal_all(&engine->work);
    cm_mutex_unlock(&engine->lock);
    for (int i = 0; i < count; i++) {
        cm_thread_join(engine->threads[i]);
    }
}
