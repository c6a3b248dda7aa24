/* SPDX-License-Identifier: Apache-2.0 */
/* The job of a group of runs that go together. */
#include "base/checked_math.h"
#include "transfer/batch/call.h"

static bool
host_ends_are_whole(const cm_job *job, const cm_piece_end *end, uint64_t nbytes)
{
    bool locked;
    cm_registry *registry = job->engine->registry;
    return cm_piece_end_is_on_device(end) || registry == NULL
           || cm_registry_run(registry, end->host, nbytes, &locked) == nbytes;
}

/* One pitched copy may not cross the edge of a registration. */
static bool
can_go_as_rows(const cm_job *job, const cm_many *many)
{
    uint64_t dst_pitch, src_pitch;
    if (!cm_many_is_rows(many, &dst_pitch, &src_pitch)) {
        return false;
    }
    uint64_t width = many->pieces[0].nbytes;
    return host_ends_are_whole(job, &many->pieces[0].dst,
                               (many->count - 1) * dst_pitch + width)
           && host_ends_are_whole(job, &many->pieces[0].src,
                                  (many->count - 1) * src_pitch + width);
}

static cm_route
route_of(const cm_job *job, const cm_many *many)
{
    switch (many->way) {
    case CM_MANY_HOST:
        return CM_ROUTE_HOST;
    case CM_MANY_TABLE:
        return can_go_as_rows(job, many) ? CM_ROUTE_DIRECT_2D : CM_ROUTE_TABLE;
    case CM_MANY_PEER: /* graphs do not take the call for many */
        return !job->capturing
                       && cm_runtime_has(job->engine->rt, CM_OP_copy_batch_async)
                   ? CM_ROUTE_BATCH
                   : CM_ROUTE_PEER;
    default:
        return CM_ROUTE_STAGED_TABLE;
    }
}

/* The plan of a group, whose layout is its packed space. */
static void
plan_group(cm_job *job)
{
    enum {
        BLOCK_UNIT = 64
    }; /* so that what is aligned in the space is so in a block */
    const cm_many *many = job->many;
    cm_plan *plan = &job->plan;
    plan->route = route_of(job, many);
    plan->device = many->device;
    plan->src_device = many->src_device >= 0 ? many->src_device : many->device;
    plan->is_download = many->way == CM_MANY_DOWN;
    plan->nbytes = many->nbytes;
    plan->layout = (cm_layout){.run_nbytes = many->span};
    cm_plan_count_pieces(plan, &job->tuning);
    plan->piece_nbytes = cm_round_up_to(plan->piece_nbytes, BLOCK_UNIT);
    job->dst_facts = (cm_end_facts){.locked = false, .whole = true};
    job->src_facts = job->dst_facts;
}

/* Takes over `many`. */
static cm_status
start_job(cm_many_call *c, const cm_copy_request *request, cm_many *many,
          cm_ticket *ticket)
{
    cm_job *job;
    cm_status status = cm_job_create(c->engine, request, &c->tuning, ticket, &job);
    if (!cm_is_ok(status)) {
        cm_many_destroy(many);
        return status;
    }
    job->many = many;
    status = cm_job_look_for_capture(job);
    plan_group(job);
    job->blocking = job->blocking || cm_request_is_written_in_call(request, &job->plan);
    if (cm_is_ok(status)) {
        status = cm_job_check_capture(job, request);
    }
    if (cm_is_ok(status)) {
        status = cm_job_record_after(job, request);
    }
    return cm_job_start(job, request, status);
}

/* What is page-locked of the group's ends stays so until it is done. */
static cm_status
share_locked(cm_engine *engine, const cm_many *many, cm_ticket *ticket)
{
    cm_registry *registry = engine->registry;
    for (uint64_t i = 0; i < many->count && registry != NULL; i++) {
        const cm_piece *piece = &many->pieces[i];
        const cm_piece_end *ends[2] = {&piece->dst, &piece->src};
        for (int k = 0; k < 2; k++) {
            if (!cm_piece_end_is_on_device(ends[k])) {
                CM_TRY(cm_registry_share(registry, ends[k]->host, piece->nbytes,
                                         &ticket->locked));
            }
        }
    }
    return cm_ok();
}

/* As start_on_device() of request.c: the device is current for all that follows. */
cm_status
cm_many_start_group(cm_many_call *c, const cm_copy_request *request, cm_many *many,
                    cm_ticket **out)
{
    cm_runtime *rt = c->engine->rt;
    cm_ticket *ticket = cm_ticket_create(c->engine, request);
    if (ticket == NULL) {
        cm_many_destroy(many);
        cm_request_drop_keeps(request);
        return cm_fail(CM_ENOMEM, 0);
    }
    if (request->ticket_seen != NULL) {
        *request->ticket_seen = ticket;
    }
    int device = request->stream != NULL ? request->stream->device : many->device;
    cm_device_guard guard;
    bool entered = device >= 0 && cm_is_ok(cm_device_enter(rt, device, &guard));
    cm_status status = share_locked(c->engine, many, ticket);
    if (cm_is_ok(status)) {
        status = start_job(c, request, many, ticket);
    }
    else {
        cm_many_destroy(many);
        cm_ticket_finish(ticket, status, true);
    }
    if (entered) {
        cm_device_leave(rt, &guard);
    }
    if (status.code == CM_ECANCELLED && cm_request_waits(request)) {
        cm_ticket_drain(ticket);
    }
    return cm_ticket_hand_over(ticket, status, out);
}

static cm_region
region_of(const cm_piece_end *end, uint64_t nbytes)
{
    cm_region region = {.host = end->host,
                        .address = end->address,
                        .kind = end->kind,
                        .device = end->device,
                        .ndim = 1,
                        .itemsize = 1};
    region.shape[0] = (int64_t)nbytes;
    region.strides[0] = 1;
    return region;
}

void
cm_many_set_ends(cm_copy_request *request, const cm_piece *piece)
{
    request->dst = region_of(&piece->dst, piece->nbytes);
    request->src = region_of(&piece->src, piece->nbytes);
}
