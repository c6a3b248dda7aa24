/* SPDX-License-Identifier: Apache-2.0 */
/* What must come before a copy: the work of other streams, other transfers; and whether
 * the stream it is to be queued on is being captured. */
#include "transfer/job_order.h"

#include <stdlib.h>

static uint64_t
normal_handle(const cm_stream *stream)
{
    return stream->handle == CM_STREAM_LEGACY ? 0 : stream->handle;
}

static bool
is_same_stream(const cm_stream *a, const cm_stream *b)
{
    return a == b
           || (a->device == b->device && normal_handle(a) == normal_handle(b)
               && (a->id == b->id || normal_handle(a) == 0));
}

bool
cm_job_fits_stream(const cm_job *job)
{
    if (job->request_stream == NULL || job->plan.route == CM_ROUTE_HOST) {
        return false;
    }
    if (job->plan.route == CM_ROUTE_BATCH && normal_handle(job->request_stream) == 0) {
        return false; /* the call refuses it */
    }
    int device = job->request_stream->device;
    bool is_plain_peer =
        job->plan.layout.ndim == 0
        && (job->plan.route == CM_ROUTE_PEER
            || (job->plan.route == CM_ROUTE_PEER_STAGED && job->capturing));
    return device == job->plan.device
           || (is_plain_peer && device == job->plan.src_device);
}

static cm_status
record_one(cm_job *job, const cm_stream *stream)
{
    cm_engine *engine = job->engine;
    cm_after after = {.device = stream->device};
    CM_TRY(cm_loan_take_event(engine, stream->device, &after.event));
    cm_device_guard guard;
    cm_status status = cm_device_enter(engine->rt, stream->device, &guard);
    if (cm_is_ok(status)) {
        status = cm_rt_event_record(engine->rt, after.event, stream->handle);
        cm_device_leave(engine->rt, &guard);
    }
    if (!cm_is_ok(status)) {
        cm_loan_give_event(engine, after.device, after.event);
        return status;
    }
    job->afters[job->after_count++] = after;
    return cm_ok();
}

cm_status
cm_job_record_after(cm_job *job, const cm_copy_request *request)
{
    bool fits = cm_job_fits_stream(job);
    size_t room = (size_t)request->after_count + 1;
    job->afters = calloc(room, sizeof(*job->afters));
    job->after_tickets =
        calloc((size_t)request->after_ticket_count + 1, sizeof(*job->after_tickets));
    if (job->afters == NULL || job->after_tickets == NULL) {
        return cm_fail(CM_ENOMEM, room * sizeof(*job->afters));
    }
    for (uint32_t i = 0; i < request->after_ticket_count; i++) {
        job->after_tickets[i] = cm_ticket_hold(request->after_tickets[i]);
        job->after_ticket_count++;
    }
    job->is_chained = request->is_chained;
    if (job->capturing) {
        return cm_ok(); /* seen to be over in cm_job_check_capture */
    }
    for (uint32_t i = 0; i < request->after_count; i++) {
        if (!(fits && is_same_stream(request->after[i], job->request_stream))) {
            CM_TRY(record_one(job, request->after[i]));
        }
    }
    /* Another stream does the work, or the host: that then comes after the one named.
     */
    return job->request_stream != NULL && !fits ? record_one(job, job->request_stream)
                                                : cm_ok();
}

static cm_status
wait_for_ticket(cm_job *job, cm_ticket *ticket)
{
    uint64_t limit = job->may_park              ? CM_PARK_AFTER_NS
                     : job->interrupted != NULL ? CM_ASK_NS
                                                : UINT64_MAX;
    for (;;) {
        cm_status status = cm_ticket_depend(ticket, job->stream, limit);
        if (status.code != CM_ETIMEOUT) {
            return status;
        }
        if (job->may_park && !cm_job_is_interrupted(job)) {
            return cm_job_park_on_ticket(job, ticket);
        }
        if (cm_job_is_interrupted(job)) {
            return cm_fail(CM_ECANCELLED, 0);
        }
    }
}

static cm_status
outcome_of(cm_ticket *ticket)
{
    cm_mutex_lock(&ticket->engine->lock);
    cm_status status = ticket->status; /* perhaps before it is done */
    cm_mutex_unlock(&ticket->engine->lock);
    return status;
}

cm_status
cm_job_wait_after(cm_job *job)
{
    while (job->after_ticket_count > 0) {
        cm_ticket *ticket = job->after_tickets[job->after_ticket_count - 1];
        CM_TRY(wait_for_ticket(job, ticket));
        if (job->is_chained) {
            CM_TRY(outcome_of(ticket));
            job->is_chained = false;
        }
        cm_ticket_release(ticket);
        job->after_ticket_count--;
    }
    while (job->after_count > 0) {
        cm_after *after = &job->afters[job->after_count - 1];
        if (job->stream == NULL) {
            CM_TRY(cm_job_wait_event(job, after->device, after->event));
        }
        else {
            CM_TRY(cm_stream_wait_event(job->stream, after->event));
        }
        cm_loan_give_event(job->engine, after->device, after->event);
        job->after_count--;
    }
    return cm_ok();
}

bool
cm_job_must_wait_after(const cm_job *job)
{
    cm_engine *engine = job->engine;
    bool must = false;
    cm_mutex_lock(&engine->lock);
    for (uint32_t i = 0; i < job->after_ticket_count; i++) {
        must = must || job->after_tickets[i]->state < CM_TICKET_SUBMITTED;
    }
    cm_mutex_unlock(&engine->lock);
    return must;
}

static bool
can_be_captured(const cm_job *job)
{
    if (job->blocking || job->overlaps || !cm_job_fits_stream(job)) {
        return false;
    }
    switch (job->plan.route) {
    case CM_ROUTE_DIRECT:
    case CM_ROUTE_DIRECT_2D:
    case CM_ROUTE_KERNEL:
    case CM_ROUTE_FILL:
    case CM_ROUTE_TABLE:
        return true;
    case CM_ROUTE_PEER:
    case CM_ROUTE_PEER_STAGED: /* the runtime's own way is taken then */
        return job->plan.layout.ndim == 0;
    default:
        return false;
    }
}

/* All that would have to be waited for is over: nothing else can be put into a graph.
 */
static cm_status
check_all_over(cm_job *job, const cm_copy_request *request)
{
    for (uint32_t i = 0; i < request->after_ticket_count; i++) {
        if (!cm_ticket_update(request->after_tickets[i])) {
            return cm_fail(CM_ENOTSUP, i);
        }
    }
    for (uint32_t i = 0; i < request->after_count; i++) {
        const cm_stream *stream = request->after[i];
        if (is_same_stream(stream, job->request_stream)) {
            continue;
        }
        cm_runtime *rt = job->engine->rt;
        bool done = false;
        cm_device_guard guard;
        CM_TRY(cm_device_enter(rt, stream->device, &guard));
        cm_status status = cm_rt_stream_query(rt, stream->handle, &done);
        cm_device_leave(rt, &guard);
        CM_TRY(status);
        if (!done) {
            return cm_fail(CM_ENOTSUP, stream->handle);
        }
    }
    return cm_ok();
}

cm_status
cm_job_look_for_capture(cm_job *job)
{
    cm_runtime *rt = job->engine->rt;
    if (job->request_stream == NULL) {
        return cm_ok();
    }
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, job->request_stream->device, &guard));
    cm_status status =
        cm_rt_stream_is_capturing(rt, job->request_stream->handle, &job->capturing);
    cm_device_leave(rt, &guard);
    return status;
}

cm_status
cm_job_check_capture(cm_job *job, const cm_copy_request *request)
{
    cm_runtime *rt = job->engine->rt;
    if (!job->capturing) {
        return cm_ok();
    }
    if (!can_be_captured(job)) {
        return cm_fail(CM_ENOTSUP, job->request_stream->handle);
    }
    int mode = CM_CAPTURE_RELAXED;
    CM_TRY(cm_rt_capture_mode_exchange(rt, &mode));
    cm_status status = check_all_over(job, request);
    cm_status back = cm_rt_capture_mode_exchange(rt, &mode);
    return cm_is_ok(status) ? back : status;
}
