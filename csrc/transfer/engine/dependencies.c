/* SPDX-License-Identifier: Apache-2.0 */
/* Sees to it that a copy comes after the work that must come before it, which may be
 * work of other streams or other transfers. Finds out whether the stream of the copy is
 * being captured. Also has the functions by which the thread that runs a job waits for
 * an event or a stream. */
#include <stdlib.h>

#include "base/backoff.h"
#include "runtime/scope.h"
#include "transfer/engine/job.h"

/* -- waiting for an event, a stream, the beginning ------------------------------------ */

/* Wait for an event of `device`, which must be the current device. */
static cm_status
poll_event(cm_job *job, int device, uint64_t event)
{
    uint64_t begin_ns = cm_now_ns();
    uint64_t asked_ns = begin_ns;
    /* In its first step (CM_JOB_ORDER) the job waits for the work of others, which may
     * take for ever, so a job thread puts the job aside at once. In later steps the job
     * waits for its own work, which may end soon, so the thread asks for a while. */
    uint64_t patience_ns = job->step == CM_JOB_ORDER ? 0 : CM_PARK_AFTER_NS;
    for (;;) {
        bool done = false;
        CM_TRY(cm_rt_event_query(job->engine->rt, event, &done));
        if (done) {
            return cm_ok();
        }
        CM_TRY(cm_job_check_cancelled(job, &asked_ns));
        uint64_t waited_ns = cm_now_ns() - begin_ns;
        if (job->in_background && waited_ns >= patience_ns) {
            job->awaited = (cm_after){.event = event, .device = device};
            return cm_job_suspend(job, CM_WAIT_EVENT);
        }
        if (job->in_background) {
            cm_nap_after(waited_ns);
        }
        else {
            cm_pause_after(waited_ns);
        }
    }
}

cm_status
cm_job_wait_event(cm_job *job, int device, uint64_t event)
{
    return CM_ASKING(job->engine->rt, device, poll_event(job, device, event));
}

/* One wait may take several calls, since the job may be suspended in between. The first
 * call records an event, and the later calls wait for the same event. The call in which
 * the wait ends gives the event back. */
cm_status
cm_job_wait_stream(cm_job *job)
{
    cm_engine *engine = job->engine;
    int device = job->stream->device;
    /* The thread of a caller does nothing but ask until the event has passed. A job
     * thread suspends the job if the event takes long. */
    cm_event_sort sort = job->in_background ? CM_WAITED : CM_POLLED;
    bool idle = false;
    cm_status status = cm_rt_stream_query(engine->rt, job->stream->handle, &idle);
    if (cm_is_ok(status) && !idle && job->idle_event == 0) {
        CM_TRY(cm_cache_take_event(engine, device, sort, &job->idle_event));
        status = cm_rt_event_record(engine->rt, job->idle_event, job->stream->handle);
    }
    if (cm_is_ok(status) && !idle) {
        status = cm_job_wait_event(job, device, job->idle_event);
    }
    if (job->wait == CM_WAIT_NONE) {
        cm_cache_give_event(engine, device, sort, job->idle_event);
        job->idle_event = 0;
    }
    return status;
}

cm_status
cm_job_begin(cm_job *job)
{
    cm_ticket *ticket = job->ticket;
    cm_mutex_lock(&job->engine->lock);
    bool cancelled = ticket->cancelled;
    ticket->started = !cancelled;
    cm_mutex_unlock(&job->engine->lock);
    return cancelled ? cm_fail(CM_ECANCELLED, 0) : cm_ok();
}

/* -- what a job comes after ----------------------------------------------------------- */

bool
cm_job_fits_stream(const cm_job *job)
{
    const cm_stream *stream = job->request_stream;
    const cm_route_row *row = job->plan.row;
    if (stream == NULL || job->plan.device < 0) {
        return false;
    }
    /* A job that is one part of a larger transfer may run in a job thread, and there
     * the handle CM_STREAM_PER_THREAD means a stream of the job thread. */
    if (stream->handle == CM_STREAM_PER_THREAD && job->ticket->part_of != NULL) {
        return false;
    }
    /* A blocking copy between devices gets a stream of the engine's. It does not use
     * the request's stream, since blocks of memory may have been allocated for that
     * stream. All work on such a block comes after the work of the stream. So a copy in
     * the other direction that uses the block would have to wait for this copy. */
    if (row->crosses && job->blocking && !job->capturing) {
        return false;
    }
    int device = stream->device;
    bool is_plain_peer = job->plan.layout.ndim == 0 && row->crosses
                         && (!row->uses_ring || job->capturing);
    return device == job->plan.device
           || (is_plain_peer && device == job->plan.src_device);
}

/* The work that `stream` has been given so far must come before the copy. Record an
 * event behind that work.
 *
 * A copy between devices does not wait for a stream that is idle, so that two copies in
 * opposite directions can be made at the same time. Each of the two comes after the
 * streams for which its memory was allocated. If both waited for events of these
 * streams, the driver would make one copy after the other, even if the streams have no
 * other work. Between two H200s, with memory of cudaMalloc, two such copies together
 * moved 391 GB/s when they waited for events, and 760 GB/s when they did not. */
static cm_status
record_one(cm_job *job, const cm_stream *stream)
{
    cm_engine *engine = job->engine;
    cm_after after = {.device = stream->device};
    if (job->plan.row->crosses && cm_stream_is_idle(stream)) {
        return cm_ok();
    }
    /* If `stream` is being captured, our stream, which will wait for the event, would
     * become a part of the capture. */
    CM_TRY(cm_stream_check_not_capturing(stream));
    CM_TRY(cm_cache_take_event(engine, stream->device, CM_WAITED, &after.event));
    cm_status status = cm_stream_record(stream, after.event);
    if (!cm_is_ok(status)) {
        cm_cache_give_event(engine, after.device, CM_WAITED, after.event);
        return status;
    }
    job->afters[job->after_count++] = after;
    return cm_ok();
}

bool
cm_job_uses_host(const cm_job *job)
{
    bool reads_whole =
        job->overlaps && !(job->src_facts.locked && job->src.address != 0);
    return job->plan.row->uses_host || reads_whole;
}

cm_status
cm_job_record_after(cm_job *job, const cm_copy_request *request)
{
    cm_ticket *ticket = job->ticket;
    bool fits = cm_job_fits_stream(job);
    size_t room = (size_t)request->after_count + 1;
    job->afters = calloc(room, sizeof(*job->afters));
    ticket->after =
        calloc((size_t)request->after_ticket_count + 1, sizeof(cm_ticket *));
    if (job->afters == NULL || ticket->after == NULL) {
        return cm_fail(CM_ENOMEM, room * sizeof(*job->afters));
    }
    ticket->is_chained = request->chained_to != NULL;
    if (ticket->is_chained) {
        ticket->after[ticket->after_count++] = cm_ticket_hold(request->chained_to);
    }
    for (uint32_t i = 0; i < request->after_ticket_count; i++) {
        ticket->after[ticket->after_count++] =
            cm_ticket_hold(request->after_tickets[i]);
    }
    /* If the host has a part in the job, as it has in every ring, the job waits until
     * all work that must come first is over. Until then it takes neither a stream nor
     * slots, since it could do nothing with them. */
    ticket->needs_completion = cm_job_uses_host(job) || job->plan.row->uses_ring;
    if (job->capturing) {
        return cm_ok(); /* cm_job_check_capture() has checked that the streams of
                           request->after have no work left */
    }
    for (uint32_t i = 0; i < request->after_count; i++) {
        if (!(fits && cm_stream_same(request->after[i], job->request_stream))) {
            CM_TRY(record_one(job, request->after[i]));
        }
    }
    /* If another stream or the host makes the copy, the copy must also come after the
     * work of the request's own stream. */
    if (job->request_stream != NULL && !fits) {
        return record_one(job, job->request_stream);
    }
    return cm_ok();
}

/* Wait until the transfer of `before` is submitted or, if the job has no stream, until
 * it is over (cm_ticket_depend()). A caller's thread asks from time to time whether to
 * go on waiting. A job in the background is suspended instead. */
static cm_status
wait_for_ticket(cm_job *job, cm_ticket *before)
{
    uint64_t limit = job->in_background ? 0 : CM_ASK_NS;
    uint64_t asked_ns = 0;
    for (;;) {
        cm_status status = cm_ticket_depend(before, job->stream, limit);
        if (status.code != CM_ETIMEOUT) {
            return status;
        }
        CM_TRY(cm_job_check_cancelled(job, &asked_ns));
        if (job->in_background) {
            return cm_job_suspend(job, CM_WAIT_ORDER);
        }
    }
}

static cm_status
wait_for_tickets(cm_job *job)
{
    const cm_ticket *ticket = job->ticket;
    for (uint32_t i = 0; i < ticket->after_count; i++) {
        bool is_chained = i == 0 && ticket->is_chained;
        CM_TRY(is_chained ? cm_ticket_outcome(ticket->after[0], false) : cm_ok());
        CM_TRY(wait_for_ticket(job, ticket->after[i]));
        CM_TRY(is_chained ? cm_ticket_outcome(ticket->after[0], false) : cm_ok());
    }
    return cm_ok();
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
        cm_cache_give_event(job->engine, after->device, CM_WAITED, after->event);
        job->after_count--;
    }
    return cm_ok();
}

bool
cm_job_must_wait_after(const cm_job *job)
{
    cm_engine *engine = job->engine;
    bool needs_completion = job->ticket->needs_completion;
    bool must = needs_completion && job->after_count > 0;
    cm_mutex_lock(&engine->lock);
    for (uint32_t i = 0; i < job->ticket->after_count; i++) {
        must = must || !cm_ticket_is_passed(job->ticket->after[i], needs_completion);
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
    const cm_route_row *row = job->plan.row;
    return row->fits_graph && (!row->crosses || job->plan.layout.ndim == 0);
}

/* Check that all work that must come before the copy is over. The copy is captured into
 * a graph, which cannot wait for work outside of it.
 * Fails: CM_ECAPTURING, if some of the work is not over; stream_query. */
static cm_status
check_all_over(cm_job *job, const cm_copy_request *request)
{
    for (uint32_t i = 0; i < request->after_ticket_count; i++) {
        if (!cm_ticket_update(request->after_tickets[i])) {
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
cm_job_check_capturing(cm_job *job)
{
    const cm_stream *stream = job->request_stream;
    return stream == NULL ? cm_ok()
                          : cm_stream_ask_capturing(stream->rt, stream->device,
                                                    stream->handle, &job->capturing);
}

cm_status
cm_job_check_capture(cm_job *job, const cm_copy_request *request)
{
    if (!job->capturing) {
        return cm_ok();
    }
    if (!can_be_captured(job)) {
        return cm_fail(CM_ECAPTURING, job->request_stream->handle);
    }
    return CM_IN_SCOPE(job->engine->rt, job->request_stream->device,
                       check_all_over(job, request));
}
