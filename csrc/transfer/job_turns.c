/* SPDX-License-Identifier: Apache-2.0 */
/* Who of the jobs that wait for a worker is next, and when one that has a worker leaves
 * it to others: a short copy does not wait for the end of long ones. */
#include "transfer/job.h"

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

/* Lock held. NULL: nobody waits. */
static cm_job *
find_shortest(cm_engine *engine)
{
    cm_job *best = NULL;
    for (cm_list *node = engine->jobs.next; node != &engine->jobs; node = node->next) {
        cm_job *job = CM_LIST_ENTRY(node, cm_job, node);
        if (best == NULL || left_of(job) < left_of(best)) {
            best = job;
        }
    }
    return best;
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

void
cm_engine_list_job_locked(cm_engine *engine, cm_job *job, bool parked)
{
    cm_list_push_back(parked ? &engine->parked : &engine->jobs, &job->node);
    engine->parked_count += parked;
    engine->job_count += !parked;
    job->in_parked = parked;
    job->ticket->job = job;
    cm_cond_signal_all(parked ? &engine->watch : &engine->work);
}

void
cm_engine_unlist_job_locked(cm_engine *engine, cm_job *job)
{
    cm_list_remove(&job->node);
    engine->parked_count -= job->in_parked;
    engine->job_count -= !job->in_parked;
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
