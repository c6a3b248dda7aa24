/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/job.h"

#include <stdlib.h>

#include "transfer/host_copy.h"
#include "transfer/many_job.h"
#include "transfer/several.h"

/* Read an overlapping source whole into memory of our own, which takes its place. */
static cm_status
replace_source_on_host(cm_job *job, const cm_layout *pack)
{
    if (cm_job_src_is_ordered(job) && job->stream != NULL) {
        CM_TRY(cm_job_wait_stream(job));
    }
    job->host_temporary = malloc((size_t)job->plan.nbytes);
    if (job->host_temporary == NULL) {
        return cm_fail(CM_ENOMEM, job->plan.nbytes);
    }
    cm_host_copy(pack, job->host_temporary, job->src.host);
    job->src.host = job->host_temporary;
    job->src.address = 0;
    job->src.kind = CM_KIND_PAGEABLE;
    job->src_facts = (cm_end_facts){.locked = false, .whole = true};
    return cm_ok();
}

static cm_status
replace_source_on_device(cm_job *job, const cm_layout *pack)
{
    cm_engine *engine = job->engine;
    CM_TRY(cm_job_alloc_block(job, job->plan.device, job->plan.nbytes, job->stream,
                              &job->temporary));
    cm_address to = job->temporary->address;
    if (pack->ndim == 0) {
        cm_address from =
            cm_region_copy_address(&job->src) + (uint64_t)pack->src_offset;
        CM_TRY(cm_rt_copy_async(engine->rt, to, from, pack->run_nbytes,
                                job->stream->handle));
    }
    else {
        CM_TRY(cm_kernels_launch(&engine->kernels, job->plan.device, pack, to,
                                 job->src.address, job->stream->handle));
    }
    job->src.host = NULL;
    job->src.address = to;
    job->src.kind = CM_KIND_DEVICE;
    job->src_facts = (cm_end_facts){.locked = true, .whole = true};
    return cm_ok();
}

cm_status
cm_job_replace_source(cm_job *job)
{
    cm_layout core = job->plan.layout;
    cm_layout repeats;
    cm_layout_take_repeats(&core, &repeats);
    cm_layout pack = core;
    cm_layout_pack_dst(&pack);
    if (job->stream != NULL && job->src_facts.locked && job->src.address != 0) {
        CM_TRY(replace_source_on_device(job, &pack));
    }
    else {
        CM_TRY(replace_source_on_host(job, &pack));
    }
    cm_plan_options options = {.may_wait = job->blocking, .tuning = &job->tuning};
    cm_plan_pack_source(&job->plan, &job->dst, &job->src, job->dst_facts,
                        job->src_facts, options);
    cm_mutex_lock(&job->engine->lock);
    job->ticket->route = job->plan.route;
    cm_mutex_unlock(&job->engine->lock);
    return cm_ok();
}

/* How far one runtime copy or fill may go from `host` on. */
static uint64_t
run_of(const cm_job *job, const cm_region *region, cm_address at, uint64_t nbytes)
{
    bool locked;
    if (cm_region_is_on_device(region) || job->engine->registry == NULL) {
        return nbytes;
    }
    return cm_registry_run(job->engine->registry, (const void *)(uintptr_t)at, nbytes,
                           &locked);
}

static cm_status
copy_direct(cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    cm_address dst = cm_region_copy_address(&job->dst) + (uint64_t)layout->dst_offset;
    cm_address src = cm_region_copy_address(&job->src) + (uint64_t)layout->src_offset;
    CM_TRY(cm_job_look(job, layout));
    if ((job->may_park || (job->interrupted != NULL && !job->blocking))
        && !(job->dst_facts.locked && job->src_facts.locked)) {
        /* The runtime's call waits for the stream and cannot be ended: wait here. */
        CM_TRY(cm_job_wait_stream(job));
    }
    for (uint64_t left = layout->run_nbytes; left > 0;) {
        uint64_t nbytes = run_of(job, &job->dst, dst, left);
        nbytes = run_of(job, &job->src, src, nbytes);
        CM_TRY(
            cm_rt_copy_async(job->engine->rt, dst, src, nbytes, job->stream->handle));
        dst += nbytes;
        src += nbytes;
        left -= nbytes;
    }
    return cm_ok();
}

static cm_status
fill_run(const cm_job *job, cm_address dst, uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    uint64_t stream = job->stream->handle;
    const unsigned char *p = job->pattern;
    switch (job->pattern_nbytes) {
    case 1:
        return cm_rt_fill_8_async(rt, dst, p[0], nbytes, stream);
    case 2:
        return cm_rt_fill_16_async(rt, dst, (uint16_t)(p[0] | p[1] << 8), nbytes / 2,
                                   stream);
    default:
        return cm_rt_fill_32_async(rt, dst,
                                   (uint32_t)p[0] | (uint32_t)p[1] << 8
                                       | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24,
                                   nbytes / 4, stream);
    }
}

/* Registrations end at pages, so each run is whole patterns. */
static cm_status
fill_directly(cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    cm_address dst = job->dst.address + (uint64_t)layout->dst_offset;
    cm_address at = cm_region_copy_address(&job->dst) + (uint64_t)layout->dst_offset;
    for (uint64_t left = cm_layout_nbytes(layout); left > 0;) {
        uint64_t nbytes = run_of(job, &job->dst, at, left);
        CM_TRY(fill_run(job, dst, nbytes));
        dst += nbytes;
        at += nbytes;
        left -= nbytes;
    }
    return cm_ok();
}

static cm_status
move_bytes(cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    cm_engine *engine = job->engine;
    if (!cm_job_waits_for_source(job)) {
        CM_TRY(cm_job_begin(job));
    }
    if (job->many != NULL && job->plan.route != CM_ROUTE_STAGED_TABLE) {
        return cm_many_move(job);
    }
    switch (job->plan.route) {
    case CM_ROUTE_SEVERAL:
        return cm_ok(); /* they were waited for */
    case CM_ROUTE_DIRECT:
        return copy_direct(job);
    case CM_ROUTE_DIRECT_2D:
        return cm_rt_copy_2d_async(
            engine->rt,
            cm_region_copy_address(&job->dst) + (uint64_t)layout->dst_offset,
            (uint64_t)layout->dst_strides[0],
            cm_region_copy_address(&job->src) + (uint64_t)layout->src_offset,
            (uint64_t)layout->src_strides[0], layout->run_nbytes,
            (uint64_t)layout->shape[0], job->stream->handle);
    case CM_ROUTE_PEER:
    case CM_ROUTE_PEER_STAGED:
        return cm_job_copy_peer(job);
    case CM_ROUTE_KERNEL:
        return cm_kernels_launch(&engine->kernels, job->plan.device, layout,
                                 job->dst.address, job->src.address,
                                 job->stream->handle);
    case CM_ROUTE_FILL:
        return fill_directly(job);
    default:
        return job->plan.is_download ? cm_job_download(job) : cm_job_upload(job);
    }
}

/* The end of what is queued becomes the ticket's. */
static cm_status
submit(cm_job *job, cm_status outcome)
{
    cm_engine *engine = job->engine;
    uint64_t event;
    int device = job->stream->device;
    CM_TRY(cm_engine_need_watcher(engine));
    CM_TRY(cm_loan_take_event(engine, device, &event));
    cm_status status = cm_rt_event_record(engine->rt, event, job->stream->handle);
    if (cm_is_ok(status) && job->request_stream != NULL
        && job->request_stream != job->stream) {
        status = cm_stream_wait_event(job->request_stream, event);
    }
    if (!cm_is_ok(status)) {
        cm_loan_give_event(engine, device, event);
        return status;
    }
    cm_stream *side = job->gather_stream;
    if (side != NULL) { /* what it waits for may lie before the caller's stream */
        job->gather_is_passed = true;
        job->gather_stream = cm_stream_hold(side);
    }
    cm_ticket_submit(job->ticket, device, job->start_event, event, job->lent, side,
                     outcome);
    job->start_event = 0;
    job->lent = NULL;
    job->submitted = true;
    return cm_ok();
}

/* The stream asked for goes on once another has done the work. */
static cm_status
join_request_stream(cm_job *job)
{
    cm_engine *engine = job->engine;
    if (job->request_stream == job->stream || job->request_stream == NULL) {
        return cm_ok();
    }
    uint64_t event;
    int device = job->stream->device;
    CM_TRY(cm_loan_take_event(engine, device, &event));
    cm_status status = cm_rt_event_record(engine->rt, event, job->stream->handle);
    if (cm_is_ok(status)) {
        status = cm_stream_wait_event(job->request_stream, event);
    }
    cm_loan_give_event(engine, device, event);
    return status;
}

/* All is queued: who tells when it is over? */
static cm_status
end_asynchronously(cm_job *job)
{
    if (job->plan.is_download) {
        job->draining = true; /* what is left is unpacking, by a worker */
        return join_request_stream(job);
    }
    if (job->is_fill) {
        job->detached = true;
        return join_request_stream(job);
    }
    return submit(job, cm_ok());
}

/* What is queued behind the work of others cannot be called back: a call that may be
 * interrupted, and then leaves nothing behind, waits for that first. */
static cm_status
wait_for_others(cm_job *job)
{
    bool idle = false;
    CM_TRY(cm_rt_stream_query(job->engine->rt, job->stream->handle, &idle));
    return idle ? cm_ok() : cm_job_wait_stream(job);
}

/* All up to the moving. */
static cm_status
prepare_stream(cm_job *job)
{
    if (!job->capturing) {
        bool stops = job->blocking && job->interrupted != NULL;
        job->has_queued = !stops;
        job->leaves_waits = stops;
        CM_TRY(cm_job_wait_after(job));
        if (stops) {
            CM_TRY(wait_for_others(job));
            job->has_queued = true;
            job->leaves_waits = false;
        }
        /* The parts of several copies have their own. */
        bool is_timed = !job->blocking && !job->is_fill && !job->plan.is_download
                        && job->plan.route != CM_ROUTE_SEVERAL;
        if (is_timed) {
            CM_TRY(cm_loan_take_event(job->engine, job->stream->device,
                                      &job->start_event));
            CM_TRY(cm_rt_event_record(job->engine->rt, job->start_event,
                                      job->stream->handle));
        }
    }
    if (!job->overlaps) {
        return cm_ok();
    }
    CM_TRY(cm_job_begin(job));
    return cm_job_replace_source(job);
}

static cm_status
run_on_stream(cm_job *job)
{
    if (job->step == CM_JOB_ORDER) {
        CM_TRY(prepare_stream(job));
        job->step = CM_JOB_MOVE;
    }
    if (job->step == CM_JOB_MOVE) {
        CM_TRY(job->fan == NULL ? cm_ok() : cm_fan_begin(job));
        CM_TRY(move_bytes(job));
        CM_TRY(job->fan == NULL ? cm_ok() : cm_fan_end(job));
        job->step = CM_JOB_END;
    }
    if (job->capturing) {
        return cm_ok();
    }
    if (!job->blocking) {
        return end_asynchronously(job);
    }
    if (job->plan.is_download) {
        return cm_job_drain(job);
    }
    if (job->may_park) {
        CM_TRY(cm_job_settle_upload(job));
    }
    return cm_job_wait_stream(job);
}

/* Nothing of a failed copy may be in flight when its caller hears of it. One that the
 * user interrupted goes on behind the ticket, and so does one of a worker, which others
 * need, and a part of several, whose caller hears of the whole. The stream's device is
 * current. */
static void
abandon(cm_job *job, cm_status status)
{
    cm_runtime *rt = job->engine->rt;
    bool is_ours = job->lent != NULL && job->gather_stream == NULL;
    bool waits_here = status.code != CM_ECANCELLED && !(job->may_park && is_ours)
                      && job->ticket->part_of == NULL;
    if (job->is_parked) {
        return;
    }
    cm_job_stop_staging(job);
    if (!job->begun) { /* nothing but waits for others is queued */
        job->has_queued = false;
        job->leaves_waits = true;
    }
    if (!job->has_queued) {
        return;
    }
    job->draining = false;
    job->detached = false;
    job->lost_track = !cm_is_ok(cm_fan_abandon(job));
    if (!waits_here && cm_is_ok(submit(job, status))) {
        return;
    }
    cm_status waited = cm_rt_stream_synchronize(rt, job->stream->handle);
    if (job->gather_stream != NULL) {
        cm_status also = cm_rt_stream_synchronize(rt, job->gather_stream->handle);
        waited = cm_is_ok(waited) ? also : waited;
    }
    job->lost_track = job->lost_track || !cm_is_ok(waited);
}

/* What is queued already has to be looked after: such a job tries twice. */
static cm_status
enter_device(cm_job *job, cm_device_guard *guard)
{
    cm_runtime *rt = job->engine->rt;
    cm_status status = cm_device_enter(rt, job->stream->device, guard);
    if (!cm_is_ok(status) && job->has_queued) {
        status = cm_device_enter(rt, job->stream->device, guard);
    }
    job->lost_track = !cm_is_ok(status) && job->has_queued;
    return status;
}

cm_status
cm_job_run(cm_job *job)
{
    cm_engine *engine = job->engine;
    if (job->plan.route == CM_ROUTE_HOST) {
        return cm_job_run_on_host(job);
    }
    if (job->stream != NULL) {
        /* it was parked: the same again */
    }
    else if (cm_job_fits_stream(job)) {
        job->stream = cm_stream_hold(job->request_stream);
    }
    else {
        CM_TRY(cm_loan_take_stream(engine, job->plan.device, &job->lent));
        job->stream = cm_stream_hold(job->lent);
    }
    cm_device_guard guard;
    CM_TRY(enter_device(job, &guard));
    cm_status status = run_on_stream(job);
    if (!cm_is_ok(status)) {
        abandon(job, status);
    }
    cm_device_leave(engine->rt, &guard);
    return status;
}

cm_status
cm_job_finish_drain(cm_job *job)
{
    cm_runtime *rt = job->engine->rt;
    cm_device_guard guard;
    CM_TRY(enter_device(job, &guard));
    cm_status status = cm_job_drain(job);
    if (!cm_is_ok(status)) {
        abandon(job, status);
    }
    cm_device_leave(rt, &guard);
    return status;
}
