/* SPDX-License-Identifier: Apache-2.0 */
/* A file transfer among other work: its streams, what comes before it, and what is left
 * when it ends early. */
#include <stdlib.h>

#include "transfer/file/job.h"

/* -- the beginning ------------------------------------------------------------------------ */

static cm_status
open_stream(cm_file_job *job, int device)
{
    if (device < 0 || device >= CM_MAX_DEVICES) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)device);
    }
    if (job->streams[device] != NULL) {
        return cm_ok();
    }
    cm_stream *given = job->request->streams[device];
    if (given == NULL) {
        CM_TRY(cm_cache_take_stream(job->engine, device, &job->lent[device]));
        given = job->lent[device];
    }
    job->streams[device] = cm_stream_hold(given);
    return cm_stream_check_not_capturing(given);
}

static cm_status
open_streams(cm_file_job *job)
{
    const cm_file_request *request = job->request;
    for (uint64_t i = 0; i < request->range_count; i++) {
        const cm_file_range *range = &request->ranges[i];
        bool on_device = range->kind == CM_KIND_DEVICE || range->host == NULL;
        if (range->nbytes == 0) {
            continue;
        }
        if (on_device) {
            CM_TRY(open_stream(job, range->device));
        }
        job->has_host_end = job->has_host_end || !on_device;
        job->has_device_end = job->has_device_end || on_device;
    }
    return cm_ok();
}

static cm_status
wait_for_ticket(cm_file_job *job, cm_ticket *ticket)
{
    for (;;) {
        cm_status status = cm_ticket_depend(ticket, NULL, CM_ASK_NS);
        if (status.code != CM_ETIMEOUT) {
            return status;
        }
        CM_TRY(cm_file_ask(job));
    }
}

static cm_status
record(cm_engine *engine, const cm_stream *stream, uint64_t event)
{
    cm_device_guard guard;
    CM_TRY(cm_device_enter(engine->rt, stream->device, &guard));
    cm_status status = cm_rt_event_record(engine->rt, event, stream->handle);
    cm_device_leave(engine->rt, &guard);
    return status;
}

/* Our streams come after it, and the host where that touches the memory. */
static cm_status
come_after(cm_file_job *job, const cm_stream *stream, uint64_t event)
{
    CM_TRY(record(job->engine, stream, event));
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        if (job->streams[device] != NULL && job->streams[device] != stream) {
            job->has_queued[device] = true;
            CM_TRY(cm_stream_wait_event(job->streams[device], event));
        }
    }
    return job->has_host_end ? cm_file_wait_event(job, stream->device, event) : cm_ok();
}

cm_status
cm_file_begin_order(cm_file_job *job)
{
    const cm_file_request *request = job->request;
    CM_TRY(open_streams(job));
    for (uint32_t i = 0; i < request->after_ticket_count; i++) {
        CM_TRY(wait_for_ticket(job, request->after_tickets[i]));
    }
    for (uint32_t i = 0; i < request->after_count; i++) {
        const cm_stream *stream = request->after[i];
        uint64_t event;
        CM_TRY(cm_cache_take_event(job->engine, stream->device, &event));
        cm_status status = come_after(job, stream, event);
        cm_cache_give_event(job->engine, stream->device, event);
        CM_TRY(status);
    }
    return cm_ok();
}

/* -- the end ------------------------------------------------------------------------------ */

/* The keeps, for the tickets of several devices. */
typedef struct shared_keep {
    atomic_uint refs;
    cm_file_request request; /* of which only they are used */
} shared_keep;

void
cm_file_drop_keeps(const cm_file_request *request)
{
    for (uint32_t i = 0; i < request->keep_count; i++) {
        request->keep[i].drop(request->keep[i].object);
    }
}

static void
drop_shared(void *object)
{
    shared_keep *shared = object;
    if (atomic_fetch_sub(&shared->refs, 1) == 1) {
        cm_file_drop_keeps(&shared->request);
        free(shared);
    }
}

/* What the stream was given keeps its ends until it is done. False: it could not be
 * arranged. */
static bool
leave_to_ticket(cm_file_job *job, int device, shared_keep *shared, cm_status status)
{
    cm_engine *engine = job->engine;
    cm_copy_request request = {.keep = {{shared, drop_shared}}, .keep_count = 1};
    uint64_t event;
    if (!cm_is_ok(cm_cache_take_event(engine, device, &event))) {
        return false;
    }
    cm_ticket *ticket = NULL;
    if (cm_is_ok(record(engine, job->streams[device], event))) {
        ticket = cm_ticket_create(engine, &request);
    }
    if (ticket == NULL) {
        cm_cache_give_event(engine, device, event);
        return false;
    }
    atomic_fetch_add(&shared->refs, 1);
    cm_ticket_submit(ticket, device, 0, event, job->lent[device], NULL, status);
    job->lent[device] = NULL;
    job->in_flight = true;
    cm_status untold = cm_ticket_abandon(ticket);
    (void)untold; /* nothing: the call tells */
    return true;
}

static void
wait_for_stream(cm_file_job *job, int device)
{
    cm_runtime *rt = job->engine->rt;
    cm_device_guard guard;
    cm_status status = cm_device_enter(rt, device, &guard);
    if (cm_is_ok(status)) {
        status = cm_rt_stream_synchronize(rt, job->streams[device]->handle);
        cm_device_leave(rt, &guard);
    }
    if (!cm_is_ok(status)) {
        job->lost_track = true;
        job->in_flight = true;
    }
}

/* A stream that the user gave other work may keep an interrupted call for long. */
static shared_keep *
share_keep(const cm_file_job *job, cm_status status)
{
    if (status.code != CM_ECANCELLED
        || !cm_is_ok(cm_engine_need_watcher(job->engine))) {
        return NULL;
    }
    shared_keep *shared = malloc(sizeof(*shared));
    if (shared != NULL) {
        atomic_init(&shared->refs, 1);
        shared->request = *job->request;
    }
    return shared;
}

void
cm_file_end_order(cm_file_job *job, cm_status status)
{
    cm_engine *engine = job->engine;
    shared_keep *shared = share_keep(job, status);
    for (int device = 0; device < CM_MAX_DEVICES && !cm_is_ok(status); device++) {
        if (job->has_queued[device]
            && (shared == NULL || !leave_to_ticket(job, device, shared, status))) {
            wait_for_stream(job, device);
        }
    }
    if (shared != NULL) {
        drop_shared(shared);
    }
    else {
        cm_file_drop_keeps(job->request);
    }
    cm_file_free_memory(job);
    for (int i = 0; i < CM_SLOT_MAX; i++) {
        cm_cache_give_event(engine, job->chunks[i].event_device, job->chunks[i].event);
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        cm_cache_give_stream(engine, job->lent[device]);
        if (job->streams[device] != NULL) {
            cm_stream_release(job->streams[device]);
        }
    }
}
