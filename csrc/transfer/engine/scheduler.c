/* SPDX-License-Identifier: Apache-2.0 */
/* Decides which of the jobs that can go on a job thread takes next.
 *
 * There are few job threads, and a copy of gigabytes may keep one for a second, while
 * a copy of a few megabytes behind it would be over in a millisecond. The jobs
 * therefore wait in two lists, by the bytes that they still have to move: up to 16 MiB
 * a job is short. Each list is first come, first served. A thread takes a short job if
 * there is one, and every fourth time a long one, so that no long copy waits for ever.
 *
 * A long job that already runs gives way as well: each time it has worked on more than
 * 16 MiB in the background it looks for short jobs, and if one waits it is suspended
 * until its next turn (cm_job_take_turn()). */
#include "transfer/engine/job.h"

enum {
    /* A job with no more than this left to move is short; and a job thread moves as
     * much for one job before it looks whether a short one waits. */
    SHORT_NBYTES = 16 << 20,
    LONG_EVERY = 4, /* each fourth pick prefers the long jobs */
};

void
cm_engine_queue_job_locked(cm_engine *engine, cm_job *job)
{
    uint64_t left = job->plan.nbytes - atomic_load(&job->ticket->moved);
    cm_list_push_back(left > SHORT_NBYTES ? &engine->long_jobs : &engine->short_jobs,
                      &job->node);
    engine->job_count++;
    cm_cond_signal_one(&engine->work);
}

bool
cm_engine_unqueue_job_locked(cm_engine *engine, cm_job *job)
{
    bool is_queued = !cm_list_is_empty(&job->node);
    cm_list_remove(&job->node);
    engine->job_count -= is_queued;
    return is_queued;
}

cm_job *
cm_engine_pick_job_locked(cm_engine *engine)
{
    if (engine->job_count == 0) {
        return NULL;
    }
    bool is_long = ++engine->pick_count % LONG_EVERY == 0;
    cm_list *first = is_long ? &engine->long_jobs : &engine->short_jobs;
    cm_list *other = is_long ? &engine->short_jobs : &engine->long_jobs;
    const cm_list *list = cm_list_is_empty(first) ? other : first;
    cm_job *job = CM_LIST_ENTRY(list->next, cm_job, node);
    (void)cm_engine_unqueue_job_locked(engine, job);
    job->ticket->job = NULL;
    return job;
}

cm_status
cm_job_take_turn(cm_job *job, uint64_t nbytes)
{
    cm_engine *engine = job->engine;
    job->turn_nbytes += nbytes;
    if (job->turn_nbytes <= SHORT_NBYTES) {
        return cm_ok();
    }
    job->turn_nbytes = 0;
    cm_mutex_lock(&engine->lock);
    bool yields = !cm_list_is_empty(&engine->short_jobs);
    cm_mutex_unlock(&engine->lock);
    return yields ? cm_job_suspend(job, CM_WAIT_TURN) : cm_ok();
}
