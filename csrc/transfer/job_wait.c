/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>

#include "transfer/backoff.h"
#include "transfer/job.h"

bool
cm_job_is_interrupted(cm_job *job)
{
    return job->interrupted != NULL && job->interrupted(job->interrupted_argument);
}

/* Short pauses are spun, as CUDA's own waiting is, but let others run. */
static void
pause_until(uint64_t deadline_ns)
{
    uint64_t now = cm_now_ns();
    if (deadline_ns > now + CM_BACKOFF_SLEEP_NS) {
        struct timespec span = {.tv_sec = 0, .tv_nsec = (long)(deadline_ns - now)};
        (void)nanosleep(&span, NULL);
    }
    while (cm_now_ns() < deadline_ns) {
        (void)sched_yield();
    }
}

/* The device of the event is current. */
static cm_status
poll_event(cm_job *job, uint64_t event)
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
        if (now - asked >= CM_ASK_NS) {
            if (cm_job_is_interrupted(job)) {
                return cm_fail(CM_ECANCELLED, 0);
            }
            asked = cm_now_ns();
        }
        pause_until(now + cm_backoff_ns(now - start));
    }
}

cm_status
cm_job_wait_event(cm_job *job, int device, uint64_t event)
{
    cm_runtime *rt = job->engine->rt;
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, device, &guard));
    cm_status status = job->interrupted == NULL ? cm_rt_event_synchronize(rt, event)
                                                : poll_event(job, event);
    cm_device_leave(rt, &guard);
    return status;
}

cm_status
cm_job_wait_stream(cm_job *job)
{
    cm_engine *engine = job->engine;
    if (job->interrupted == NULL) {
        return cm_rt_stream_synchronize(engine->rt, job->stream->handle);
    }
    uint64_t event;
    int device = job->stream->device;
    CM_TRY(cm_loan_take_event(engine, device, &event));
    cm_status status = cm_rt_event_record(engine->rt, event, job->stream->handle);
    if (cm_is_ok(status)) {
        status = cm_job_wait_event(job, device, event);
    }
    cm_loan_give_event(engine, device, event);
    return status;
}
