/* SPDX-License-Identifier: Apache-2.0 */
/* What must come before a copy: the work of other streams, other transfers; and whether
 * the stream it is to be queued on is being captured. And how the thread that runs a
 * job waits for an event or a stream. */
#include <stdlib.h>

#include "transfer/engine/job.h"
#include "transfer/host/backoff.h"

/* -- waiting for an event, a stream, the beginning ------------------------------------ */

/* The device of the event is current. */
static cm_status
poll_event(cm_job *job, int device, uint64_t event)
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
        if (job->may_park && cm_job_is_interrupted(job)) {
            return cm_fail(CM_ECANCELLED, 0); /* it may park again and again */
        }
        if (job->may_park && now - start >= CM_PARK_AFTER_NS) {
            return cm_job_park_on_event(job, device, event);
        }
        if (now - asked >= CM_ASK_NS) {
            if (cm_job_is_interrupted(job)) {
                return cm_fail(CM_ECANCELLED, 0);
            }
            asked = cm_now_ns();
        }
        if (job->may_park) {
            cm_nap_after(now - start);
        }
        else {
            cm_pause_until(now + cm_backoff_ns(now - start));
        }
    }
}

cm_status
cm_job_wait_event(cm_job *job, int device, uint64_t event)
{
    cm_runtime *rt = job->engine->rt;
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, device, &guard));
    bool polls = job->may_park || job->interrupted != NULL;
    cm_status status =
        polls ? poll_event(job, device, event) : cm_rt_event_synchronize(rt, event);
    cm_device_leave(rt, &guard);
    return status;
}

/* A job that is parked meanwhile goes on with the event recorded the first time. */
cm_status
cm_job_wait_stream(cm_job *job)
{
    cm_engine *engine = job->engine;
    int device = job->stream->device;
    if (!job->may_park && job->interrupted == NULL) {
        return cm_rt_stream_synchronize(engine->rt, job->stream->handle);
    }
    cm_status status = cm_ok();
    if (job->wait_event == 0) {
        CM_TRY(cm_cache_take_event(engine, device, &job->wait_event));
        status = cm_rt_event_record(engine->rt, job->wait_event, job->stream->handle);
    }
    if (cm_is_ok(status)) {
        status = cm_job_wait_event(job, device, job->wait_event);
    }
    if (!job->is_parked) {
        cm_cache_give_event(engine, device, job->wait_event);
        job->wait_event = 0;
    }
    return status;
}

cm_status
cm_job_begin(cm_job *job)
{
    if (job->begun) {
        return cm_ok();
    }
    cm_ticket *ticket = job->ticket;
    cm_mutex_lock(&job->engine->lock);
    bool cancelled = ticket->cancelled;
    ticket->started = !cancelled;
    cm_mutex_unlock(&job->engine->lock);
    job->begun = !cancelled;
    return cancelled ? cm_fail(CM_ECANCELLED, 0) : cm_ok();
}

/* -- what a job comes after ----------------------------------------------------------- */

bool
cm_job_fits_stream(const cm_job *job)
{
    const cm_stream *stream = job->request_stream;
    if (stream == NULL || job->plan.route == CM_ROUTE_HOST) {
        return false;
    }
    if (cm_routes[job->plan.route].needs_stream && cm_stream_is_legacy(stream)) {
        return false;
    }
    if (stream->handle == CM_STREAM_PER_THREAD && job->ticket->part_of != NULL) {
        return false; /* a job thread may go on with it, where the handle means another
                       */
    }
    int device = stream->device;
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
    /* its event would take ours into the graph */
    CM_TRY(cm_stream_check_not_capturing(stream));
    CM_TRY(cm_cache_take_event(engine, stream->device, &after.event));
    cm_status status = cm_stream_record(stream, after.event);
    if (!cm_is_ok(status)) {
        cm_cache_give_event(engine, after.device, after.event);
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
    for (uint32_t i = request->after_ticket_count; i > 0; i--) {
        job->after_tickets[job->after_ticket_count++] =
            cm_ticket_hold(request->after_tickets[i - 1]);
    }
    job->is_chained = request->is_chained;
    if (job->capturing) {
        return cm_ok(); /* seen to be over in cm_job_check_capture */
    }
    for (uint32_t i = 0; i < request->after_count; i++) {
        if (!(fits && cm_stream_same(request->after[i], job->request_stream))) {
            CM_TRY(record_one(job, request->after[i]));
        }
    }
    /* Another stream does the work, or the host: that then comes after the one named.
     */
    return job->request_stream != NULL && !fits ? record_one(job, job->request_stream)
                                                : cm_ok();
}

/* What the host or its parts are still at takes as long as it takes. */
static uint64_t
park_after_ns(cm_ticket *ticket)
{
    cm_mutex_lock(&ticket->engine->lock);
    bool soon = ticket->state >= CM_TICKET_SUBMITTED;
    cm_mutex_unlock(&ticket->engine->lock);
    return soon ? CM_PARK_AFTER_NS : 0;
}

static cm_status
wait_for_ticket(cm_job *job, cm_ticket *ticket)
{
    uint64_t limit = job->may_park              ? park_after_ns(ticket)
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

static bool
is_after(const cm_job *job, const cm_ticket *ticket)
{
    for (uint32_t i = 0; i < job->after_ticket_count; i++) {
        if (job->after_tickets[i] == ticket) {
            return true;
        }
    }
    return false;
}

/* The ticket, done, was cancelled or has failed before its turn. */
static cm_status
take_over_inherited(cm_job *job, const cm_ticket *ticket)
{
    size_t room = (size_t)job->after_ticket_count + ticket->inherited_count;
    cm_ticket **larger =
        realloc(job->after_tickets, room * sizeof(*job->after_tickets));
    if (larger == NULL) {
        return cm_fail(CM_ENOMEM, room * sizeof(*job->after_tickets));
    }
    job->after_tickets = larger;
    for (uint32_t i = 0; i < ticket->inherited_count; i++) {
        if (!is_after(job, ticket->inherited[i])) {
            job->after_tickets[job->after_ticket_count++] =
                cm_ticket_hold(ticket->inherited[i]);
        }
    }
    return cm_ok();
}

static bool
owes(cm_ticket *ticket)
{
    cm_mutex_lock(&ticket->engine->lock);
    bool any = cm_ticket_owes_locked(ticket);
    cm_mutex_unlock(&ticket->engine->lock);
    return any;
}

static cm_status
wait_for_tickets(cm_job *job)
{
    while (job->waited_count < job->after_ticket_count) {
        cm_ticket *ticket = job->after_tickets[job->waited_count];
        CM_TRY(wait_for_ticket(job, ticket));
        if (job->is_chained) {
            CM_TRY(outcome_of(ticket));
            job->is_chained = false;
        }
        if (owes(ticket)) {
            CM_TRY(take_over_inherited(job, ticket));
        }
        job->waited_count++;
    }
    return cm_ok();
}

/* Lock held. Would whoever comes after the job's ticket come too early? */
static bool
is_inherited_locked(const cm_job *job, uint32_t index)
{
    const cm_ticket *ticket = job->after_tickets[index];
    return ticket->state < CM_TICKET_DONE
           || (index >= job->waited_count && ticket->inherited_count > 0);
}

void
cm_job_leave_order(cm_job *job)
{
    cm_ticket *of = job->ticket;
    /* What is submitted ends after them, and a whole after its parts. */
    bool owes_any = !job->submitted && !job->capturing && of->part_count == 0
                    && of->inherited == NULL;
    uint32_t left = 0;
    for (uint32_t i = 0; i < job->after_ticket_count; i++) {
        cm_ticket *ticket = job->after_tickets[i];
        cm_mutex_lock(&job->engine->lock);
        bool inherited = owes_any && is_inherited_locked(job, i);
        cm_mutex_unlock(&job->engine->lock);
        if (inherited) {
            job->after_tickets[left++] = ticket;
        }
        else {
            cm_ticket_release(ticket);
        }
    }
    if (left == 0) {
        free(job->after_tickets);
        return;
    }
    of->inherited = job->after_tickets;
    of->inherited_count = left;
}

cm_status
cm_job_wait_after(cm_job *job)
{
    CM_TRY(wait_for_tickets(job));
    while (job->after_count > 0) {
        cm_after *after = &job->afters[job->after_count - 1];
        if (job->stream == NULL) {
            CM_TRY(cm_job_wait_event(job, after->device, after->event));
        }
        else {
            CM_TRY(cm_stream_wait_event(job->stream, after->event));
        }
        cm_cache_give_event(job->engine, after->device, after->event);
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
        const cm_ticket *ticket = job->after_tickets[i];
        must = must || ticket->state < CM_TICKET_SUBMITTED
               || cm_ticket_owes_locked(ticket);
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
    const cm_route_row *route = &cm_routes[job->plan.route];
    return route->fits_graph && (!route->crosses || job->plan.layout.ndim == 0);
}

/* All that would have to be waited for is over: nothing else can be put into a graph.
 */
static cm_status
check_all_over(cm_job *job, const cm_copy_request *request)
{
    for (uint32_t i = 0; i < request->after_ticket_count; i++) {
        if (!cm_ticket_is_all_over(request->after_tickets[i])) {
            return cm_fail(CM_ECAPTURING, i);
        }
    }
    for (uint32_t i = 0; i < request->after_count; i++) {
        const cm_stream *stream = request->after[i];
        if (cm_stream_same(stream, job->request_stream)) {
            continue;
        }
        bool done = false;
        CM_TRY(cm_stream_query(stream, &done));
        if (!done) {
            return cm_fail(CM_ECAPTURING, stream->handle);
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
        return cm_fail(CM_ECAPTURING, job->request_stream->handle);
    }
    int mode = CM_CAPTURE_RELAXED;
    CM_TRY(cm_rt_capture_mode_exchange(rt, &mode));
    cm_status status = check_all_over(job, request);
    cm_status back = cm_rt_capture_mode_exchange(rt, &mode);
    return cm_is_ok(status) ? back : status;
}
