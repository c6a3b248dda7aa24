/* SPDX-License-Identifier: Apache-2.0 */
/* Who of the jobs that wait for a worker is next, and when one that has a worker leaves
 * it to others: a short copy does not wait for the end of long ones. */
#include "transfer/job_order.h"

enum {
    TURN_NBYTES = 16 << 20, /* a worker's work on a job before it looks for others */
    OLDEST_EVERY = 4,       /* so that no long copy waits for ever */
};

/* Lock held. What is left of it to be moved, as far as others can tell. */
static uint64_t
left_of(const cm_job *job)
{
    return job->plan.nbytes - cm_ticket_count_moved(job->ticket);
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
    cm_ticket *blocker = cm_job_find_blocker_locked(job);
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
