/* SPDX-License-Identifier: Apache-2.0 */
/* This file has the job threads, which run whole jobs in the background and unpack
 * bytes that have arrived at the host. This file also cancels jobs that have not begun,
 * and closes the engine.
 *
 * If a job comes and no thread is idle, a thread is started, until there are
 * CM_MAX_JOB_THREADS. A job that has to wait does not keep its thread: the thread puts
 * the job aside and takes another one. */
#include "base/nvtx.h"
#include "runtime/scope.h"
#include "transfer/run/run.h"

/* Run a job in the calling thread. `status` is the failure with which the thread could
 * not get ready for the job, or CM_OK. If the job's ticket was stopped before the job
 * began, the job ends without having copied anything. */
static void
run_job(cm_engine *engine, cm_job *job, cm_status status)
{
    const cm_ticket *ticket = job->ticket;
    CM_NVTX("background copy", ticket->nbytes);
    cm_event_origin before = cm_recorder_lend_origin(
        (cm_event_origin){ticket->noted.stack, ticket->noted.tag});
    job->in_background = true;
    job->wait = CM_WAIT_NONE;
    if (cm_ticket_is_stopped(ticket) && !ticket->started) {
        job->has_queued = false; /* the job has not queued any copy, only waits for
                                    other streams */
        status = cm_fail(CM_ECANCELLED, 0);
    }
    else if (cm_is_ok(status) || job->step == CM_JOB_DRAIN) {
        /* In the step CM_JOB_DRAIN the job unpacks bytes for a caller that has returned
         * already, so the job has to go on even if `status` is a failure. */
        status = cm_first_failure(status, cm_job_run(job));
    }
    else {
        /* The job may have queued work before it was put aside. It ends here without
         * waiting for that work, so nobody knows when the work ends. */
        job->lost_track = job->has_queued;
    }
    /* A job that has a ring waits for the link, so it stays in its lane while it waits.
     * A lane lets one job at a time use a link (scheduler.c). */
    if (job->wait == CM_WAIT_NONE || job->ring == NULL) {
        cm_job_leave_lane(job);
    }
    if (job->wait != CM_WAIT_NONE) {
        cm_mutex_lock(&engine->lock);
        cm_order_put_job_locked(engine, job);
        cm_mutex_unlock(&engine->lock);
    }
    else {
        cm_ignore(cm_job_finish(job, status, status.code == CM_ECANCELLED));
    }
    (void)cm_recorder_lend_origin(before);
}

static void *
work(void *argument)
{
    cm_engine *engine = argument;
    bool relaxed = false;
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
        cm_mutex_unlock(&engine->lock);
        cm_status status = cm_ok();
        /* The thread sets its capture mode to relaxed before its first job. In another
         * mode some of our calls of the runtime would break a capture that another
         * thread has begun. If this fails for a job that has already queued work, the
         * thread loses track of that work, so it tries a second time for such a job.
         * Nothing can be captured before somebody has started the driver, and a copy
         * from host to host must not start the driver, so until then the thread does
         * not set the mode. */
        bool asks = !relaxed && cm_runtime_wake_if_started(engine->rt);
        for (int i = 0; asks && !relaxed && i <= job->has_queued; i++) {
            int mode = CM_CAPTURE_RELAXED;
            status = cm_rt_capture_mode_exchange(engine->rt, &mode);
            relaxed = cm_is_ok(status);
        }
        run_job(engine, job, status);
        cm_mutex_lock(&engine->lock);
    }
    cm_mutex_unlock(&engine->lock);
    return NULL;
}

cm_status
cm_engine_give_job(cm_engine *engine, cm_job *job)
{
    cm_status status = cm_ok();
    /* The watcher finds out when a waiting job can go on. */
    CM_TRY(cm_engine_need_watcher(engine));
    cm_mutex_lock(&engine->lock);
    if ((uint64_t)engine->idle_count <= engine->job_count + engine->waiting_count
        && engine->thread_count < CM_MAX_JOB_THREADS) {
        status = cm_thread_start(&engine->threads[engine->thread_count], work, engine);
        engine->thread_count += cm_is_ok(status);
    }
    if (engine->thread_count > 0) {
        status = cm_ok(); /* one of the threads that are there will take the job */
        cm_order_put_job_locked(engine, job);
    }
    cm_mutex_unlock(&engine->lock);
    return status;
}

/* -- cancelling --------------------------------------------------------------------- */

void
cm_ticket_stop(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    atomic_store(&ticket->stopped, true);
    if (cm_engine_is_forked(engine)) {
        return;
    }
    cm_mutex_lock(&engine->lock);
    cm_job *job = cm_order_take_job_locked(ticket);
    if (job != NULL) {
        cm_order_put_job_locked(engine, job);
    }
    cm_mutex_unlock(&engine->lock);
}

bool
cm_ticket_cancel(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    if (cm_engine_is_forked(engine)) {
        return false;
    }
    cm_job *job = NULL;
    cm_mutex_lock(&engine->lock);
    if (ticket->state == CM_TICKET_QUEUED && !ticket->started) {
        ticket->cancelled = true;
        atomic_store(&ticket->stopped, true);
        ticket->read = true; /* the caller knows of the failure, so nobody else has to
                                be told */
        job = cm_order_take_job_locked(ticket);
        engine->caller_count += job != NULL;
    }
    bool cancelled = ticket->cancelled;
    cm_mutex_unlock(&engine->lock);
    if (job != NULL) {
        cm_scope scope;
        int device = job->stream == NULL ? -1 : job->stream->device;
        bool entered =
            device >= 0
            && cm_is_ok(cm_scope_enter(engine->rt, device, CM_CAPTURE_RELAXED, &scope));
        run_job(engine, job, cm_ok());
        if (entered) {
            cm_scope_leave(&scope);
        }
        cm_engine_end_call(engine);
    }
    else if (cancelled) {
        /* A thread is working on the job and will see at once that it was cancelled. */
        cm_ignore(cm_ticket_wait(ticket, UINT64_MAX));
    }
    return cancelled;
}

/* -- the end of the engine ---------------------------------------------------------- */

cm_status
cm_engine_close(cm_engine *engine)
{
    if (cm_engine_is_forked(engine)) {
        /* The engine's threads exist only in the parent, and one of them may have held
         * the lock, so the child leaks the whole engine. */
        return cm_ok();
    }
    cm_mutex_lock(&engine->lock);
    engine->closed = true;
    /* Calls that began before the engine was closed may still be running, and may leave
     * transfers under way. The job threads and the watcher bring each transfer to its
     * end. */
    while (engine->caller_count > 0 || engine->pending_count > 0) {
        cm_cond_wait(&engine->changed, &engine->lock);
    }
    engine->stop = true;
    cm_cond_signal_all(&engine->work);
    cm_cond_signal_all(&engine->watch);
    cm_mutex_unlock(&engine->lock);
    for (int i = 0; i < engine->thread_count; i++) { /* nobody starts a thread now */
        cm_thread_join(engine->threads[i]);
    }
    if (engine->has_watcher) {
        cm_thread_join(engine->watcher);
    }
    cm_workers_fini(&engine->workers);
    cm_status first = cm_kernels_fini(&engine->kernels);
    first = cm_first_failure(first, cm_cache_fini(engine));
    for (int device = -1; device < CM_MAX_DEVICES; device++) {
        cm_pool *pool = device < 0 ? engine->pinned_pool : engine->device_pools[device];
        if (pool != NULL) {
            cm_pool_release(pool);
        }
    }
    atomic_store(&engine->over, true); /* from here on no failure is kept for later */
    cm_status unread = cm_engine_take_unread(engine);
    while (!cm_is_ok(cm_engine_take_unread(engine))) {
    }
    first = cm_first_failure(unread, first);
    cm_engine_release(engine);
    return first;
}
