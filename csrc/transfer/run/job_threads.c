/* SPDX-License-Identifier: Apache-2.0 */
/* This file has the job threads, which run whole jobs in the background and unpack
 * bytes that have arrived at the host. This file also cancels jobs that have not begun,
 * and closes the engine.
 *
 * A thread is started when there is a job and no thread is idle, up to
 * CM_MAX_JOB_THREADS. A job that has to wait does not keep its thread: it is put back,
 * and the thread takes others. */
#include "base/nvtx.h"
#include "runtime/scope.h"
#include "transfer/run/run.h"

/* Run a job in this thread. `status` says whether the thread could prepare for it. A
 * job that was stopped before it began ends here. */
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
        job->has_queued = false; /* it has queued only waits for other streams */
        status = cm_fail(CM_ECANCELLED, 0);
    }
    else if (cm_is_ok(status) || job->step == CM_JOB_DRAIN) { /* a drain has to go on,
                                                                 as its caller has
                                                                 returned */
        status = cm_first_failure(status, cm_job_run(job));
    }
    else {
        /* If the job queued something before it waited, nobody knows now when that
         * ends. */
        job->lost_track = job->has_queued;
    }
    /* A job that has a ring stays in its lane while it waits, since it waits for the
     * link. */
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
        /* The thread's capture mode is relaxed once, since what we call would otherwise
         * break a capture that another thread has under way. A job that has already
         * queued something needs this more, so the thread then tries twice. Until
         * somebody has started the driver nothing is captured, and a copy from host to
         * host must not start it. */
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
        ticket->read = true; /* the thread that cancels it knows of the failure */
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
        /* Its threads and its lock are the parent's, so all of it is leaked. */
        return cm_ok();
    }
    cm_mutex_lock(&engine->lock);
    engine->closed = true;
    /* A call that began earlier may leave a transfer behind. Job threads and the
     * watcher bring each to its end. */
    while (engine->caller_count > 0 || engine->pending_count > 0) {
        cm_cond_wait(&engine->changed, &engine->lock);
    }
    engine->stop = true;
    cm_cond_signal_all(&engine->work);
    cm_cond_signal_all(&engine->watch);
    cm_mutex_unlock(&engine->lock);
    for (int i = 0; i < engine->thread_count; i++) { /* no more threads are started */
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
