/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs that wait for a stream or for another transfer without a thread: their worker
 * goes on to other jobs. The watcher looks at the streams; the other transfer itself
 * hands on who waits for it, so that a long queue costs nothing per turn. */
#include "transfer/job_order.h"

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

bool
cm_job_can_go_on(cm_job *job)
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
        bool ready = cm_job_can_go_on(batch[i]);
        cm_mutex_lock(&engine->lock);
        ready = ready || batch[i]->ticket->cancelled; /* the worker drops it */
        cm_engine_list_job_locked(engine, batch[i], !ready);
        cm_mutex_unlock(&engine->lock);
        any = any || ready;
    }
    return any;
}
