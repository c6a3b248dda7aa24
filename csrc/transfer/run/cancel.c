/* SPDX-License-Identifier: Apache-2.0 */
/* The line between a copy in the background that has not begun and one that has, and
 * ending those before it. */
#include "pool/scope.h"
#include "transfer/run/run.h"

void
cm_job_drop(cm_job *job)
{
    cm_engine *engine = job->engine;
    cm_ticket *ticket = cm_ticket_hold(job->ticket);
    cm_scope scope;
    int device = job->stream == NULL ? -1 : job->stream->device;
    bool entered = device >= 0 && cm_is_ok(cm_scope_enter(engine->rt, device, &scope));
    job->leaves_waits = true;
    cm_job_destroy(job);
    if (entered) {
        cm_scope_leave(&scope);
    }
    cm_ticket_finish(ticket, cm_fail(CM_ECANCELLED, 0), true);
    cm_ticket_release(ticket);
}

void
cm_ticket_hurry(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    if (cm_engine_is_forked(engine)) {
        return;
    }
    cm_mutex_lock(&engine->lock);
    cm_job *job = ticket->job;
    if (job != NULL && job->place == CM_JOB_IN_WAITERS) {
        cm_engine_unlist_job_locked(engine, job);
        cm_engine_list_job_locked(engine, job, false);
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
    if (ticket->state == CM_TICKET_QUEUED && !ticket->started
        && ticket->part_count == 0) {
        ticket->cancelled = true;
        ticket->read = true; /* whoever cancels knows */
        job = ticket->job;
    }
    bool cancelled = ticket->cancelled;
    if (job != NULL) {
        cm_engine_unlist_job_locked(engine, job);
        engine->caller_count++;
    }
    cm_mutex_unlock(&engine->lock);
    if (job != NULL) {
        cm_job_drop(job);
        cm_engine_end_call(engine);
    }
    else if (cancelled) {
        /* A thread has it in hand that will see it at once. */
        cm_status done = cm_ticket_depend(ticket, NULL, UINT64_MAX);
        (void)done;
    }
    return cancelled;
}
