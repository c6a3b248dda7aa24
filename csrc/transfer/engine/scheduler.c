/* SPDX-License-Identifier: Apache-2.0 */
/* Which of the jobs that wait for a job thread is next, and when one that has a
 * thread leaves it to others: a short copy does not wait for the end of long ones. */
#include "transfer/engine/job.h"

enum {
    TURN_NBYTES = 16 << 20, /* a job thread's work on a job before it looks for others
                             */
    OLDEST_EVERY = 4,       /* so that no long copy waits for ever */
};

/* Lock held. What is left of it to be moved, as far as others can tell. */
static uint64_t
left_of(const cm_job *job)
{
    return job->plan.nbytes - cm_ticket_moved(job->ticket);
}

/* Lock held. The oldest of the shortest, to a factor of two: that takes no search, as
 * long as the queue may be. NULL: nobody waits. */
static cm_job *
find_shortest(cm_engine *engine)
{
    if (engine->full_bins == 0) {
        return NULL;
    }
    cm_list *bin = &engine->bins[__builtin_ctzll(engine->full_bins)];
    return CM_LIST_ENTRY(bin->next, cm_job, bin_node);
}

/* Lock held. */
static void
enter_bin(cm_engine *engine, cm_job *job)
{
    job->bin = 63 - __builtin_clzll(left_of(job) | 1);
    cm_list_push_back(&engine->bins[job->bin], &job->bin_node);
    engine->full_bins |= UINT64_C(1) << job->bin;
}

/* Lock held. */
static void
leave_bin(cm_engine *engine, cm_job *job)
{
    cm_list_remove(&job->bin_node);
    if (cm_list_is_empty(&engine->bins[job->bin])) {
        engine->full_bins &= ~(UINT64_C(1) << job->bin);
    }
}

/* Lock held. Only the device is still at it, which a job thread may wait for: one that
 * has done so in vain, or that would not be the first, need not. */
static bool
is_soon_locked(const cm_job *job, const cm_ticket *ticket)
{
    return ticket->state == CM_TICKET_SUBMITTED && job->parked_ticket != ticket
           && cm_list_is_empty(&ticket->waiters);
}

/* Lock held. The next of the tickets without which it is no use to run the job; NULL:
 * there is none. */
static cm_ticket *
find_blocker(cm_job *job)
{
    cm_ticket_state wanted =
        job->plan.route == CM_ROUTE_HOST ? CM_TICKET_DONE : CM_TICKET_SUBMITTED;
    bool stops = job->ticket->cancelled
                 || (job->cancelled != NULL && atomic_load(job->cancelled));
    if (job->step != CM_JOB_ORDER || stops) {
        return NULL;
    }
    if (job->looked_count < job->waited_count) {
        job->looked_count = job->waited_count;
    }
    for (; job->looked_count < job->after_ticket_count; job->looked_count++) {
        cm_ticket *ticket = job->after_tickets[job->looked_count];
        if (ticket->state < wanted) {
            return is_soon_locked(job, ticket) ? NULL : ticket;
        }
        if (cm_ticket_owes_locked(ticket)) {
            return NULL; /* the job thread takes that over */
        }
    }
    return NULL;
}

cm_job *
cm_engine_pick_job_locked(cm_engine *engine)
{
    cm_job *job = find_shortest(engine);
    if (job != NULL && ++engine->pick_count % OLDEST_EVERY == 0) {
        job = CM_LIST_ENTRY(engine->jobs.next, cm_job, node);
    }
    if (job != NULL) {
        cm_engine_unlist_job_locked(engine, job);
    }
    return job;
}

/* Lock held. */
static uint64_t *
count_of(cm_engine *engine, cm_job_place place)
{
    return place == CM_JOB_IN_JOBS     ? &engine->job_count
           : place == CM_JOB_IN_PARKED ? &engine->parked_count
                                       : &engine->waiting_count;
}

void
cm_engine_list_job_locked(cm_engine *engine, cm_job *job, bool parked)
{
    cm_ticket *blocker = find_blocker(job);
    job->ticket->job = job;
    if (blocker != NULL) {
        job->place = CM_JOB_IN_WAITERS;
        cm_list_push_back(&blocker->waiters, &job->node);
    }
    else if (parked && job->parked_ticket == NULL) {
        job->place = CM_JOB_IN_PARKED;
        cm_list_push_back(&engine->parked, &job->node);
        cm_cond_signal_all(&engine->watch);
    }
    else {
        job->place = CM_JOB_IN_JOBS;
        cm_list_push_back(&engine->jobs, &job->node);
        enter_bin(engine, job);
        cm_cond_signal_one(&engine->work);
    }
    ++*count_of(engine, job->place);
}

void
cm_engine_unlist_job_locked(cm_engine *engine, cm_job *job)
{
    cm_list_remove(&job->node);
    if (job->place == CM_JOB_IN_JOBS) {
        leave_bin(engine, job);
    }
    --*count_of(engine, job->place);
    job->ticket->job = NULL;
}

cm_status
cm_job_take_turn(cm_job *job, uint64_t nbytes)
{
    cm_engine *engine = job->engine;
    job->turn_nbytes += nbytes;
    if (!job->may_park || job->turn_nbytes <= TURN_NBYTES) {
        return cm_ok();
    }
    job->turn_nbytes = 0;
    cm_mutex_lock(&engine->lock);
    const cm_job *shortest = find_shortest(engine);
    bool yields = shortest != NULL && left_of(shortest) < left_of(job);
    cm_mutex_unlock(&engine->lock);
    if (!yields) {
        return cm_ok();
    }
    job->is_parked = true;
    job->is_yielding = true;
    return cm_fail(CM_ETIMEOUT, 0);
}

/* -- suspended: jobs that wait for a stream or for another transfer without a thread. The
 * watcher looks at the streams; the other transfer itself resumes what waits for it, so
 * that a long queue costs nothing per turn. -- */

enum { BATCH = 32 };

static cm_status
park(cm_job *job, cm_ticket *ticket, int device, uint64_t event)
{
    job->is_parked = true;
    job->parked_ticket = ticket;
    job->parked_device = device;
    job->parked_event = event;
    return cm_fail(CM_ETIMEOUT, CM_PARK_AFTER_NS);
}

cm_status
cm_job_park_on_ticket(cm_job *job, cm_ticket *ticket)
{
    return park(job, ticket, -1, 0);
}

cm_status
cm_job_park_on_event(cm_job *job, int device, uint64_t event)
{
    return park(job, NULL, device, event);
}

/* Look whether one parked on an event can go on (or will hear that it failed). */
static bool
can_go_on(cm_job *job)
{
    cm_runtime *rt = job->engine->rt;
    if (cm_job_is_interrupted(job)) {
        return true;
    }
    bool done = false;
    cm_device_guard guard;
    cm_status status = cm_device_enter(rt, job->parked_device, &guard);
    if (cm_is_ok(status)) {
        status = cm_rt_event_query(rt, job->parked_event, &done);
        cm_device_leave(rt, &guard);
    }
    return done || !cm_is_ok(status); /* the job asks again, and hears of it */
}

bool
cm_engine_wake_jobs(cm_engine *engine)
{
    cm_job *batch[BATCH];
    int count = 0;
    cm_mutex_lock(&engine->lock);
    while (count < BATCH && !cm_list_is_empty(&engine->parked)) {
        batch[count] = CM_LIST_ENTRY(engine->parked.next, cm_job, node);
        cm_engine_unlist_job_locked(engine, batch[count++]);
    }
    cm_mutex_unlock(&engine->lock);
    bool any = false;
    for (int i = 0; i < count; i++) {
        bool ready = can_go_on(batch[i]);
        cm_mutex_lock(&engine->lock);
        ready = ready || batch[i]->ticket->cancelled; /* the job thread drops it */
        cm_engine_list_job_locked(engine, batch[i], !ready);
        cm_mutex_unlock(&engine->lock);
        any = any || ready;
    }
    return any;
}
