/* SPDX-License-Identifier: Apache-2.0 */
/* Decides which job a job thread takes next, among the jobs that can go on. A job is
 * the work of one transfer (job.h), and job threads are the engine's threads that run
 * jobs in the background.
 *
 * There are few job threads, and a copy of gigabytes may keep one of them for a second,
 * while a copy of a few megabytes behind it would be over in a millisecond. The jobs
 * therefore wait in two lists. A job is short if it has no more than 16 MiB left to
 * move, and long otherwise. In each list the job that has waited longest is taken
 * first. A thread takes a short job if there is one, but every fourth time it takes a
 * long job if there is one, so that no long copy waits for ever.
 *
 * A long job also gives way while it runs. Each time it has worked on more than 16 MiB
 * in the background, it looks whether a short job waits. If one does, the long job is
 * suspended until its next turn (cm_job_take_turn()).
 *
 * Lanes
 * -----
 * Many jobs go through rings of page-locked slots (routes/ring.h). Two things limit the
 * speed of such a job: the link to its device, and the threads that pack its pieces.
 * Jobs that copy in the same direction over the same link share both. If several job
 * threads worked on such jobs at once, none of these jobs would be done sooner, and
 * they would use too many slots for the caches to hold. So each direction of a link has
 * a lane for short jobs and a lane for long jobs, and only one job is in a lane at a
 * time. In an upload the job leaves the lane when its last piece is packed, and in a
 * download when its last piece is queued. While the last pieces of this job are on the
 * link, the next job begins its first pieces, so that the link goes on without a gap.
 *
 * Jobs that follow one another in this way are a train. They are cut as one long copy
 * would be, that is, in pieces of full length. Once the train is long enough, its jobs
 * together use as few slots as one long copy would, so that the slots stay in the
 * caches and pieces are packed by ordinary stores. To make this possible, a job that
 * has cut its last piece gives each slot back when the piece in the slot has ended, and
 * the next job takes that slot.
 *
 * Example: four copies of 64 MiB each go up to one device. The first copy enters the
 * lane, and the other copies wait for the lane. When the first copy is packed it leaves
 * the lane, although four of its pieces, of 8 MiB each, are still on the link. The
 * second copy enters, and another job thread packs its first piece. As soon as a piece
 * of the first copy has arrived, the slot of that piece goes to the second piece of the
 * second copy.
 *
 * Edges
 * -----
 *   - A job enters a lane before it enters one of the two lists, and not when a thread
 *     takes it from there. So the lists contain only jobs that can go on.
 *   - A job that has to wait before it has a ring, for example for the work of another
 *     stream, leaves the lane and enters it again later.
 *   - A long copy leaves the lane each time it has moved LANE_NBYTES, if another job
 *     waits for the lane. Until the copy enters the lane again, its slots do not count
 *     as slots of the lane, because the other job would otherwise get too few slots.
 *   - Batches enter no lane, since batches of two arrays were 3 % slower on an H200
 *     when they went one at a time.
 *   - A blocking call runs its job in its own thread and enters no lane. */
#include "transfer/engine/job.h"

enum {
    /* A job with no more than this left to move is short. A job thread also moves this
     * much for one job before it looks whether a short job waits. */
    SHORT_NBYTES = 16 << 20,
    LONG_EVERY = 4, /* each fourth pick prefers the long jobs */
    /* After it has moved this much, a job lets the next one into its lane. */
    LANE_NBYTES = 512 << 20,
};

static bool
is_long(const cm_job *job)
{
    return job->plan.nbytes - atomic_load(&job->ticket->moved) > SHORT_NBYTES;
}

static void
enter_list_locked(cm_engine *engine, cm_job *job)
{
    cm_list_push_back(is_long(job) ? &engine->long_jobs : &engine->short_jobs,
                      &job->node);
    cm_cond_signal_one(&engine->work);
}

/* -- lanes ---------------------------------------------------------------------------- */

/* Return the lane of a job, or NULL if the job needs no lane. Only a copy of one region
 * has a lane, and only if the host packs or unpacks its pieces. */
static cm_lane *
lane_of(const cm_job *job)
{
    const cm_plan *plan = &job->plan;
    if (!plan->row->packs || plan->device < 0) {
        return NULL;
    }
    int number = 2 * plan->is_download + is_long(job);
    return &job->engine->lanes[plan->device][number];
}

/* True if the job has to enter its lane before it can go on. A job that has moved
 * everything, or that was stopped, can go on outside the lane. */
static bool
needs_lane(const cm_job *job)
{
    return job->lane != NULL && !job->is_in_lane && job->step <= CM_JOB_MOVE
           && !cm_ticket_is_stopped(job->ticket);
}

static void
enter_lane_locked(cm_job *job)
{
    cm_lane *lane = job->lane;
    lane->is_taken = true;
    job->is_in_lane = true;
    job->lane_nbytes = 0;
    if (job->train_nbytes == 0) {
        bool follows = atomic_load(&lane->slots_nbytes) > 0;
        lane->train_nbytes = job->plan.nbytes + (follows ? lane->train_nbytes : 0);
        job->train_nbytes = lane->train_nbytes;
    }
    if (!job->counts_slots) {
        job->counts_slots = true;
        atomic_fetch_add(&lane->slots_nbytes, job->slots_nbytes);
    }
}

static void
leave_lane_locked(cm_job *job)
{
    cm_lane *lane = job->lane;
    cm_list *node = cm_list_pop_front(&lane->waiting);
    job->is_in_lane = false;
    lane->is_taken = false;
    if (node != NULL) {
        cm_job *next = CM_LIST_ENTRY(node, cm_job, node);
        enter_lane_locked(next);
        enter_list_locked(job->engine, next);
    }
}

void
cm_job_leave_lane(cm_job *job)
{
    if (job->is_in_lane) {
        cm_mutex_lock(&job->engine->lock);
        leave_lane_locked(job);
        cm_mutex_unlock(&job->engine->lock);
    }
}

bool
cm_job_may_take_slot(const cm_job *job, uint64_t nbytes)
{
    if (job->lane == NULL || !job->plan.is_cached) {
        return true;
    }
    uint64_t used = atomic_load(&job->lane->slots_nbytes);
    return used == job->slots_nbytes || used + nbytes <= job->tuning.cached_ring_nbytes;
}

void
cm_job_count_slot(cm_job *job, int64_t nbytes)
{
    job->slots_nbytes += (uint64_t)nbytes;
    if (job->counts_slots) {
        atomic_fetch_add(&job->lane->slots_nbytes, (uint64_t)nbytes);
    }
}

/* -- lists ---------------------------------------------------------------------------- */

void
cm_engine_queue_job_locked(cm_engine *engine, cm_job *job)
{
    if (job->lane == NULL) {
        job->lane = lane_of(job);
    }
    engine->job_count++;
    if (needs_lane(job) && job->lane->is_taken) {
        cm_list_push_back(&job->lane->waiting, &job->node);
        return;
    }
    if (needs_lane(job)) {
        enter_lane_locked(job);
    }
    enter_list_locked(engine, job);
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
    bool takes_long = (engine->pick_count + 1) % LONG_EVERY == 0;
    cm_list *first = takes_long ? &engine->long_jobs : &engine->short_jobs;
    cm_list *other = takes_long ? &engine->short_jobs : &engine->long_jobs;
    const cm_list *list = cm_list_is_empty(first) ? other : first;
    if (cm_list_is_empty(list)) {
        return NULL;
    }
    engine->pick_count++;
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
    job->lane_nbytes += nbytes;
    if (job->turn_nbytes <= SHORT_NBYTES) {
        return cm_ok();
    }
    job->turn_nbytes = 0;
    cm_mutex_lock(&engine->lock);
    bool yields = !cm_list_is_empty(&engine->short_jobs);
    if (job->is_in_lane && job->lane_nbytes > LANE_NBYTES
        && !cm_list_is_empty(&job->lane->waiting)) {
        job->counts_slots = false;
        atomic_fetch_sub(&job->lane->slots_nbytes, job->slots_nbytes);
        leave_lane_locked(job);
        yields = true;
    }
    cm_mutex_unlock(&engine->lock);
    return yields ? cm_job_suspend(job, CM_WAIT_TURN) : cm_ok();
}
