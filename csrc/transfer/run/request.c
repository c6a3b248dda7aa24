/* SPDX-License-Identifier: Apache-2.0 */
/* The entry: from a request to a job that runs here, on a stream or in the background.
 */
#include <stdlib.h>
#include <string.h>

#include "transfer/routes/several.h"
#include "transfer/routes/spread.h"
#include "transfer/run/run.h"

/* A value that repeats every 1, 2 or 4 bytes can be set by the runtime. */
static void
try_fill_route(cm_job *job, const unsigned char *value, uint64_t value_nbytes)
{
    cm_plan *plan = &job->plan;
    if (plan->device < 0 || !cm_layout_dst_is_packed(&plan->layout)) {
        return;
    }
    cm_address dst = job->dst.address + (uint64_t)plan->layout.dst_offset;
    for (uint32_t period = 1; period <= sizeof(job->pattern); period *= 2) {
        if (value_nbytes % period == 0 && dst % period == 0
            && memcmp(value, value + period, (size_t)(value_nbytes - period)) == 0) {
            memcpy(job->pattern, value, period);
            job->pattern_nbytes = period;
            plan->route = CM_ROUTE_FILL;
            return;
        }
    }
}

/* True when the thread that runs the job has to wait for the device or works itself. */
static bool
needs_a_thread(const cm_job *job)
{
    bool reads_whole =
        job->overlaps && !(job->src_facts.locked && job->src.address != 0);
    return cm_routes[job->plan.route].uses_host || reads_whole;
}

static cm_status
finish_here(cm_job *job, cm_status status)
{
    cm_ticket *ticket = cm_ticket_hold(job->ticket);
    bool submitted = job->submitted;
    cm_job_destroy(job);
    if (!submitted) {
        cm_ticket_finish(ticket, status, true);
    }
    cm_ticket_release(ticket);
    return status;
}

static cm_status
run_here(cm_job *job)
{
    cm_status status = cm_job_run(job);
    if (!cm_is_ok(status) || !job->draining) {
        return finish_here(job, status);
    }
    bool (*interrupted)(void *argument) = job->interrupted;
    job->interrupted = NULL; /* no caller's thread waits any more */
    status = cm_engine_give_job(job->engine, job);
    if (cm_is_ok(status)) {
        return status;
    }
    job->interrupted = interrupted;
    /* No thread to be had: the caller waits after all. */
    return finish_here(job, cm_job_finish_drain(job));
}

/* `waits`: there is work for the host until the end. Otherwise a job thread queues it.
 */
static cm_status
run_in_background(cm_job *job, bool waits)
{
    job->blocking = waits;
    job->interrupted = NULL;
    cm_status status = cm_engine_give_job(job->engine, job);
    return cm_is_ok(status) ? status : finish_here(job, status);
}

/* What is found locked may have come after the ticket took its shares. Where it is gone
 * again by now, the runtime copies it as ordinary memory. */
static cm_status
share_found(cm_job *job, const cm_region *region, cm_end_facts facts)
{
    return facts.locked && region->kind == CM_KIND_PAGEABLE
               ? cm_engine_share_locked(job->engine, region, &job->ticket->locked)
               : cm_ok();
}

static cm_status
prepare(cm_job *job, const cm_copy_request *request, const void *fill_value)
{
    cm_engine *engine = job->engine;
    job->dst_facts = cm_engine_facts_of(engine, &job->dst);
    job->src_facts = cm_engine_facts_of(engine, &job->src);
    CM_TRY(share_found(job, &job->dst, job->dst_facts));
    CM_TRY(share_found(job, &job->src, job->src_facts));
    job->dst_facts.fresh = cm_engine_is_fresh(&job->dst, &job->src, job->dst_facts);
    cm_plan_options options = cm_engine_plan_options(engine, request, job->dst_facts);
    options.tuning = &job->tuning;
    CM_TRY(cm_plan_init(&job->plan, &job->dst, &job->src, job->dst_facts,
                        job->src_facts, options));
    job->blocking =
        options.may_wait || cm_request_is_written_in_call(request, &job->plan);
    if (job->plan.route == CM_ROUTE_NOTHING) {
        return cm_ok();
    }
    if (fill_value != NULL) {
        job->is_fill = true;
        try_fill_route(job, fill_value, (uint64_t)job->dst.itemsize);
    }
    else {
        job->overlaps = cm_engine_may_overlap(engine->rt, &job->dst, &job->src);
    }
    if (request->spread != NULL) {
        CM_TRY(cm_fan_create(job, request->spread));
    }
    job->is_file = cm_job_has_file(job);
    CM_TRY(cm_job_look_for_capture(job));
    CM_TRY(cm_job_check_capture(job, request));
    return cm_job_record_after(job, request);
}

cm_status
cm_job_create(cm_engine *engine, const cm_copy_request *request,
              const cm_tuning *tuning, cm_ticket *ticket, cm_job **out)
{
    cm_job *job = calloc(1, sizeof(*job));
    if (job == NULL) {
        cm_status status = cm_fail(CM_ENOMEM, sizeof(*job));
        cm_ticket_finish(ticket, status, true);
        return status;
    }
    cm_list_init(&job->node);
    cm_list_init(&job->bin_node);
    job->engine = engine;
    job->ticket = cm_ticket_hold(ticket);
    job->tuning = *tuning;
    cm_engine_resolve_tuning(engine, &job->tuning);
    job->dst = request->dst;
    job->src = request->src;
    job->blocking = request->blocking;
    job->interrupted = request->interrupted;
    job->interrupted_argument = request->interrupted_argument;
    job->cancelled = request->spread == NULL ? NULL : request->spread->cancelled;
    job->request_stream =
        request->stream == NULL ? NULL : cm_stream_hold(request->stream);
    *out = job;
    return cm_ok();
}

cm_status
cm_job_start(cm_job *job, const cm_copy_request *request, cm_status prepared)
{
    cm_ticket *ticket = job->ticket;
    ticket->nbytes = job->plan.nbytes;
    if (ticket->part_count == 0) { /* a whole has said that it went several ways */
        ticket->route = job->plan.route;
    }
    ticket->captured = job->capturing;
    if (!cm_is_ok(prepared) || job->plan.route == CM_ROUTE_NOTHING) {
        return finish_here(job, prepared);
    }
    bool background = request->stream == NULL && !request->blocking;
    bool waits = needs_a_thread(job);
    if (background && (waits || cm_job_must_wait_after(job))) {
        return run_in_background(job, waits);
    }
    ticket->started = true;
    job->begun = true;
    cm_status status = run_here(job);
    if (!background || cm_is_ok(status)) {
        return status;
    }
    /* What fails in the background is learnt from the ticket, whoever has run it. */
    cm_ticket_unread(ticket);
    return cm_ok();
}

static cm_status
start(cm_engine *engine, const cm_copy_request *request, const void *fill_value,
      const cm_tuning *tuning, cm_ticket *ticket)
{
    cm_job *job;
    CM_TRY(cm_job_create(engine, request, tuning, ticket, &job));
    return cm_job_start(job, request, prepare(job, request, fill_value));
}

void
cm_request_drop_keeps(const cm_copy_request *request)
{
    for (uint32_t i = 0; i < request->keep_count; i++) {
        request->keep[i].drop(request->keep[i].object);
    }
}

/* Entered once here, the device is current for all that follows: each of those steps
 * enters it too, which then costs next to nothing. */
static cm_status
start_on_device(cm_engine *engine, const cm_copy_request *request,
                const void *fill_value, const cm_tuning *tuning, cm_ticket *ticket)
{
    int device = request->dst.device >= 0 ? request->dst.device : request->src.device;
    device = request->stream != NULL ? request->stream->device : device;
    cm_device_guard guard;
    bool entered = device >= 0 && cm_is_ok(cm_device_enter(engine->rt, device, &guard));
    /* Where it cannot be entered, the step that needs it says so. */
    cm_status status = start(engine, request, fill_value, tuning, ticket);
    if (entered) {
        cm_device_leave(engine->rt, &guard);
    }
    return status;
}

static cm_status
start_request(cm_engine *engine, const cm_copy_request *request, const void *fill_value,
              const cm_tuning *tuning, cm_ticket **out)
{
    cm_ticket *ticket = cm_ticket_create(engine, request);
    if (ticket == NULL) {
        cm_request_drop_keeps(request);
        return cm_fail(CM_ENOMEM, 0);
    }
    if (request->ticket_seen != NULL) {
        *request->ticket_seen = ticket;
    }
    cm_status status = start_on_device(engine, request, fill_value, tuning, ticket);
    if (status.code == CM_ECANCELLED && cm_request_waits(request)) {
        cm_ticket_drain(ticket);
    }
    return cm_ticket_hand_over(ticket, status, out);
}

cm_status
cm_request_start(cm_engine *engine, const cm_copy_request *request,
                 const cm_tuning *tuning, cm_ticket **out)
{
    return start_request(engine, request, NULL, tuning, out);
}

static cm_status
submit(cm_engine *engine, const cm_copy_request *request, const void *fill_value,
       const cm_tuning *given, cm_ticket **out)
{
    cm_tuning tuning;
    cm_status status = cm_engine_begin_call(engine, &tuning);
    if (!cm_is_ok(status)) {
        cm_request_drop_keeps(request);
        return status;
    }
    if (given != NULL) {
        tuning = *given;
    }
    bool kept;
    if (out == NULL && fill_value == NULL
        && cm_engine_try_quick(engine, request, &tuning, &status, &kept)) {
        if (!kept) {
            cm_request_drop_keeps(request);
        }
        cm_engine_end_call(engine);
        return status;
    }
    cm_request_let_go(request);
    status = start_request(engine, request, fill_value, &tuning, out);
    cm_engine_end_call(engine);
    return status;
}

cm_status
cm_engine_copy(cm_engine *engine, const cm_copy_request *request, cm_ticket **out)
{
    return submit(engine, request, NULL, NULL, out);
}

cm_status
cm_engine_copy_tuned(cm_engine *engine, const cm_copy_request *request,
                     const cm_tuning *tuning)
{
    return submit(engine, request, NULL, tuning, NULL);
}

cm_status
cm_engine_fill(cm_engine *engine, const cm_region *dst, const void *value,
               cm_stream *stream, cm_stream *const *after, uint32_t after_count,
               bool blocking, const cm_wait_hooks *hooks, cm_ticket_info *out)
{
    cm_copy_request request = {
        .dst = *dst,
        .src = {.host = (void *)(uintptr_t)value,
                .kind = CM_KIND_PAGEABLE,
                .device = -1,
                .itemsize = dst->itemsize},
        .stream = stream,
        .blocking = blocking || stream == NULL,
        .after = after,
        .after_count = after_count,
        .interrupted = hooks->interrupted,
        .interrupted_argument = hooks->argument,
    };
    cm_ticket *ticket;
    CM_TRY(cm_region_broadcast(dst, &request.src));
    CM_TRY(submit(engine, &request, value, NULL, &ticket));
    if (out != NULL) {
        cm_ticket_read(ticket, out);
    }
    cm_ticket_release(ticket);
    return cm_ok();
}
