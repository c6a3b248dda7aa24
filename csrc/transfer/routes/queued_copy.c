/* SPDX-License-Identifier: Apache-2.0 */
/* Queues copies that a stream can take as one command. Such a copy is one run of bytes
 * to, from or within the device of a stream that the caller has named. Its other end
 * may be page-locked memory of a pool, or memory of another device, if access between
 * the two devices is known to be enabled. However long the copy is, one call of the
 * runtime queues it behind the earlier work of the stream, and the host has no part in
 * it. So there is nothing to plan and nothing that a job would have to wait for. Once
 * the copy is queued, only its ticket is left. A job would make the same copy by the
 * route DIRECT or, between two devices, by the route PEER. So this file reports that
 * route to users.
 *
 * A job is still needed if the host would have to wait for transfers that are not
 * submitted yet. It is also needed if a stream is captured, if memory was page-locked
 * in pieces, or if the ends may overlap, since these cases need a closer look. */
#include "runtime/scope.h"
#include "transfer/engine/ticket.h"
#include "transfer/routes/routes.h"

/* -- which copies a stream takes ------------------------------------------------------- */

/* True if the device of the stream reaches this end at any time, and moves its bytes in
 * the order of the stream. */
static bool
is_within_reach(const cm_engine *engine, const cm_region *end, const cm_stream *stream)
{
    if (cm_kind_migrates(end->kind) || cm_kind_is_pageable(end->kind)) {
        return false;
    }
    if (!cm_region_is_on_device(end)) {
        return end->host != NULL;
    }
    return end->device == stream->device
           || cm_peer_access_is_enabled(&engine->peers, end->device, stream->device);
}

static bool
is_on_device_of(const cm_region *end, const cm_stream *stream)
{
    return cm_region_is_on_device(end) && end->device == stream->device;
}

static bool
crosses_devices(const cm_copy_request *request)
{
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    return cm_region_is_on_device(dst) && cm_region_is_on_device(src)
           && dst->device != src->device;
}

/* Return the number of bytes of the copy, or 0 if its stream cannot take the copy as
 * one command. The function asks the registry, but does not call the runtime. */
static uint64_t
queued_nbytes(const cm_engine *engine, const cm_copy_request *request)
{
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    const cm_stream *stream = request->stream;
    bool is_plain = !request->blocking && stream != NULL && request->convert == NULL
                    && request->broadcast == NULL && !request->is_fill;
    if (!is_plain || dst->itemsize != src->itemsize
        || !(is_on_device_of(dst, stream) || is_on_device_of(src, stream))
        || !is_within_reach(engine, dst, stream)
        || !is_within_reach(engine, src, stream) || !cm_request_is_run(request)
        || cm_registry_has_pieces(engine->registry)) {
        return 0;
    }
    uint64_t nbytes =
        cm_request_run_nbytes(request, (uint64_t)dst->itemsize, INT64_MAX);
    bool may_overlap = is_on_device_of(dst, stream) && is_on_device_of(src, stream)
                       && cm_runs_meet(dst->address, src->address, nbytes);
    return may_overlap ? 0 : nbytes;
}

/* -- what comes before it -------------------------------------------------------------- */

/* Make the stream of the copy wait for all work that must come before the copy.
 * Fails: CM_ETIMEOUT, if some of this work is not queued yet, since a stream cannot
 * wait for work before it is queued. */
static cm_status
come_after(cm_engine *engine, const cm_copy_request *request)
{
    cm_stream *stream = request->stream;
    for (uint32_t i = 0; i < request->after_ticket_count; i++) {
        CM_TRY(cm_ticket_depend(request->after_tickets[i], stream, 0));
    }
    for (uint32_t i = 0; i < request->after_count; i++) {
        const cm_stream *other = request->after[i];
        if (crosses_devices(request) && cm_stream_is_idle(other)) {
            continue; /* a job between two devices also skips an idle stream */
        }
        if (!cm_stream_same(other, stream)) {
            /* If the other stream is being captured, an event that it records would
             * make our stream a part of the same capture. */
            CM_TRY(cm_stream_check_not_capturing(other));
            CM_TRY(cm_cache_chain_streams(engine, other, stream));
        }
    }
    return cm_ok();
}

/* -- the copy -------------------------------------------------------------------------- */

static cm_status
queue(cm_engine *engine, const cm_copy_request *request, uint64_t nbytes)
{
    const cm_stream *stream = request->stream;
    cm_address to = cm_region_copy_address(&request->dst);
    cm_address from = cm_region_copy_address(&request->src);
    return crosses_devices(request)
               ? cm_rt_copy_peer_async(engine->rt, to, request->dst.device, from,
                                       request->src.device, nbytes, stream->handle)
               : cm_rt_copy_async(engine->rt, to, from, nbytes, stream->handle);
}

/* Queue the copy between two events. The ticket is done when the second event has
 * passed. If the function fails, no part of the copy is in flight afterwards. The
 * stream's device must be current. */
static cm_status
submit(cm_engine *engine, const cm_copy_request *request, cm_ticket *ticket)
{
    cm_runtime *rt = engine->rt;
    cm_stream *stream = request->stream;
    uint64_t start_event;
    bool is_queued = false;
    CM_TRY(cm_engine_need_watcher(engine));
    CM_TRY(cm_cache_take_event(engine, stream->device, CM_WAITED, &start_event));
    cm_status status = cm_rt_event_record(rt, start_event, stream->handle);
    if (cm_is_ok(status)) {
        status = queue(engine, request, ticket->nbytes);
        is_queued = cm_is_ok(status);
    }
    if (is_queued) {
        status =
            cm_ticket_submit(ticket, stream, stream, start_event, NULL, NULL, cm_ok());
    }
    if (cm_is_ok(status)) {
        return status; /* the ticket has the events now */
    }
    if (is_queued) {
        cm_ignore(cm_rt_stream_synchronize(rt, stream->handle));
    }
    cm_cache_give_event(engine, stream->device, CM_WAITED, start_event);
    return status;
}

/* Make the ticket, and queue the copy that it stands for. */
static cm_status
queue_behind_ticket(cm_engine *engine, const cm_copy_request *request, uint64_t nbytes,
                    cm_ticket **out, bool *ticket_has_keeps)
{
    cm_ticket *ticket = cm_ticket_create(engine, request);
    if (ticket == NULL) {
        return cm_fail(CM_ENOMEM, 0);
    }
    *ticket_has_keeps = true;
    if (request->ticket_out != NULL) {
        *request->ticket_out = ticket;
    }
    ticket->nbytes = nbytes;
    ticket->row =
        &cm_routes[crosses_devices(request) ? CM_ROUTE_PEER : CM_ROUTE_DIRECT];
    ticket->started = true;
    cm_status status = submit(engine, request, ticket);
    cm_engine_count_route(engine, ticket->row); /* failed copies count too */
    if (!cm_is_ok(status)) {
        cm_ticket_finish(ticket, status, true);
    }
    return cm_ticket_hand_over(ticket, status, out);
}

/* Queue the copy. The caller has made the stream's device current by cm_scope_enter().
 * Returns false if a job has to make the copy. */
static bool
try_queue(cm_engine *engine, const cm_copy_request *request, uint64_t nbytes,
          cm_ticket **out, cm_status *status, bool *ticket_has_keeps)
{
    const cm_stream *stream = request->stream;
    bool capturing = false;
    *status =
        cm_stream_ask_capturing(engine->rt, stream->device, stream->handle, &capturing);
    if (cm_is_ok(*status) && !capturing) {
        *status = come_after(engine, request);
    }
    if (capturing || status->code == CM_ETIMEOUT) {
        return false;
    }
    if (cm_is_ok(*status)) {
        *status = queue_behind_ticket(engine, request, nbytes, out, ticket_has_keeps);
    }
    return true;
}

bool
cm_engine_try_queue_copy(cm_engine *engine, const cm_copy_request *request,
                         cm_ticket **out, cm_status *status, bool *ticket_has_keeps)
{
    cm_scope scope;
    *ticket_has_keeps = false;
    uint64_t nbytes = queued_nbytes(engine, request);
    if (nbytes == 0) {
        return false;
    }
    cm_request_let_go(request); /* the runtime may block until it has room for another
                                   command */
    if (!cm_is_ok(cm_scope_enter(engine->rt, request->stream->device,
                                 CM_CAPTURE_THREAD_LOCAL, &scope))) {
        return false;
    }
    bool is_made = try_queue(engine, request, nbytes, out, status, ticket_has_keeps);
    cm_scope_leave(&scope);
    return is_made;
}
