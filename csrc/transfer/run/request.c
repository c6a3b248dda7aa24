/* SPDX-License-Identifier: Apache-2.0 */
/* Requests for copies enter the engine here. Each request becomes a job, which runs in
 * the caller's thread or in a job thread. A few copies and fills need no job. */
#include <stdlib.h>

#include "base/file_maps.h"
#include "base/fresh_pages.h"
#include "runtime/scope.h"
#include "transfer/file/job.h"
#include "transfer/file/save.h"
#include "transfer/plan/numbered_rows.h"
#include "transfer/routes/broadcast.h"
#include "transfer/routes/kernel_rows.h"
#include "transfer/routes/pieces.h"
#include "transfer/run/run.h"

/* Run the job in this thread. If the host still has to unpack something at the end, a
 * job thread goes on with the job. If `is_reported` is set, this call itself reports a
 * failure to the user. */
static cm_status
run_here(cm_job *job, bool is_reported)
{
    cm_status status = cm_job_run(job);
    if (!cm_is_ok(status) || job->step != CM_JOB_DRAIN) {
        return cm_job_finish(job, status, is_reported);
    }
    cm_wait_hooks hooks = job->hooks;
    job->hooks.interrupted = NULL; /* the caller's thread does not wait any more */
    status = cm_engine_give_job(job->engine, job);
    if (cm_is_ok(status)) {
        return status;
    }
    job->hooks = hooks;
    /* No job thread can be started, so the caller waits after all. */
    return cm_job_finish(job, cm_job_run(job), is_reported);
}

/* If the plan has found that the memory at one end is page-locked, keep it page-locked
 * until the ticket is done. The shares that the ticket took when it was made may lack
 * this memory, which may have been registered since. If the memory is not page-locked
 * any more by now, the runtime copies it as ordinary memory. */
static cm_status
share_found(cm_job *job, const cm_region *region, cm_end_facts facts)
{
    return facts.locked && cm_kind_is_pageable(region->kind)
               ? cm_engine_share_locked(job->engine, region, &job->ticket->locked)
               : cm_ok();
}

/* True if this is a copy on a stream that has to end within the call that asks for it.
 * This is so if the host does the last step, since a stream cannot order what the host
 * writes. It is never so for a part of a batch, since the call waits for all parts
 * together. */
static bool
is_written_in_call(const cm_copy_request *request, const cm_plan *plan)
{
    return request->stream != NULL && request->part_of == NULL && plan->is_download;
}

static cm_status
plan_many(cm_job *job, const cm_copy_request *request)
{
    CM_TRY(cm_many_share_locked(job));
    CM_TRY(cm_job_check_capturing(job));
    cm_many_plan(job);
    job->blocking = job->blocking || is_written_in_call(request, &job->plan);
    return cm_ok();
}

/* True if the copy goes from a device to a single run of host memory, and the pages of
 * this memory do not exist yet. */
static bool
is_fresh(const cm_job *job)
{
    const cm_region *dst = &job->dst;
    cm_layout layout;
    return !job->dst_facts.locked && cm_kind_is_pageable(dst->kind) && dst->host != NULL
           && cm_region_is_on_device(&job->src)
           && cm_is_ok(cm_layout_init(dst, &job->src, &layout)) && layout.ndim == 0
           && cm_pages_are_fresh((char *)dst->host + layout.offset[CM_DST],
                                 layout.run_nbytes);
}

/* Find out whether the two ends show the same bytes of one file through two mappings.
 * This is looked for only where both ends are known to be mappings of files. */
static cm_status
look_for_two_maps(cm_job *job)
{
    if (job->overlaps || job->is_fill || !cm_job_is_file(&job->dst, job->dst_facts)
        || !cm_job_is_file(&job->src, job->src_facts)) {
        return cm_ok();
    }
    cm_byte_span dst = cm_overlap_span(job->engine->rt, &job->dst);
    cm_byte_span src = cm_overlap_span(job->engine->rt, &job->src);
    CM_TRY(cm_file_maps_meet((cm_file_span){dst.begin, dst.end},
                             (cm_file_span){src.begin, src.end}, &job->is_two_maps));
    job->overlaps = job->is_two_maps;
    return cm_ok();
}

cm_status
cm_job_plan(cm_job *job, const cm_copy_request *request)
{
    cm_engine *engine = job->engine;
    const cm_region *dst = &job->dst;
    const cm_region *src = &job->src;
    job->dst_facts = cm_engine_facts_of(engine, dst);
    job->src_facts = cm_engine_facts_of(engine, src);
    job->dst_facts.fresh = is_fresh(job);
    bool in_call = request->stream != NULL && request->part_of == NULL;
    cm_plan_options options = {
        .may_wait = request->blocking || (in_call && !job->dst_facts.locked),
        .on_stream = request->stream != NULL && !request->blocking,
        .converts = job->converts,
        .kernel_can_convert = job->converts && cm_convert_has_kernel(&job->convert),
        .is_fill = request->is_fill,
        .has_more_targets = job->has_more_targets,
        .tuning = &job->tuning,
    };
    if (cm_region_is_on_device(dst) && cm_region_is_on_device(src)
        && dst->device != src->device) {
        options.peers = cm_peer_access_find(&engine->peers, dst, src,
                                            !cm_region_is_c_contiguous(dst)
                                                || !cm_region_is_c_contiguous(src));
    }
    CM_TRY(cm_plan_init(&job->plan, &job->dst, &job->src, job->dst_facts,
                        job->src_facts, options));
    job->blocking = options.may_wait || is_written_in_call(request, &job->plan);
    if (job->plan.row == NULL) {
        return cm_ok();
    }
    job->is_fill = request->is_fill;
    job->overlaps =
        !job->is_fill && cm_overlap_is_possible(engine->rt, &job->dst, &job->src);
    return look_for_two_maps(job);
}

static cm_status
plan_two_ends(cm_job *job, const cm_copy_request *request)
{
    if (request->broadcast != NULL) {
        CM_TRY(cm_targets_create(job, request));
    }
    CM_TRY(cm_job_plan(job, request));
    CM_TRY(share_found(job, &job->dst, job->dst_facts));
    CM_TRY(share_found(job, &job->src, job->src_facts));
    if (job->plan.row == NULL) {
        return cm_ok();
    }
    if (request->broadcast != NULL) {
        CM_TRY(cm_targets_check(job));
    }
    return cm_job_check_capturing(job);
}

static cm_status
plan_rows(cm_job *job)
{
    CM_TRY(cm_many_plan_rows(job));
    return cm_job_check_capturing(job);
}

static cm_status
prepare(cm_job *job, const cm_copy_request *request)
{
    if (job->many != NULL) {
        CM_TRY(plan_many(job, request));
    }
    else if (job->rows != NULL) {
        CM_TRY(plan_rows(job));
    }
    else if (job->file != NULL) {
        CM_TRY(cm_file_plan(job));
    }
    else {
        CM_TRY(plan_two_ends(job, request));
    }
    if (job->plan.row == NULL) {
        return cm_ok();
    }
    CM_TRY(cm_job_check_capture(job, request));
    return cm_job_record_after(job, request);
}

void
cm_job_init(cm_job *job, cm_engine *engine, const cm_copy_request *request,
            const cm_tuning *tuning)
{
    cm_list_init(&job->node);
    job->engine = engine;
    job->tuning = *tuning;
    job->dst = request->dst;
    job->src = request->src;
    if (request->convert != NULL) {
        job->converts = true;
        job->convert = *request->convert;
    }
    job->many = request->many;
    job->rows = request->rows;
    job->file = request->file;
    job->blocking = request->blocking;
    job->hooks = cm_request_hooks(request);
    job->keeps_source = request->take_keeps == NULL ? NULL : request;
}

/* Run the job in this thread, or give it to a job thread. If its preparation failed, or
 * if there is nothing to copy, finish it instead. */
static cm_status
start_job(cm_job *job, const cm_copy_request *request, cm_status prepared)
{
    cm_ticket *ticket = job->ticket;
    ticket->nbytes = job->plan.nbytes;
    ticket->row = job->plan.row;
    ticket->captured = job->capturing;
    if (!cm_is_ok(prepared) || job->plan.row == NULL) {
        return cm_job_finish(job, prepared, true);
    }
    bool background = request->stream == NULL && !request->blocking;
    bool waits = cm_job_uses_host(job);
    if (background && (waits || cm_job_must_wait_after(job))) {
        /* If the host has a part in the copy, a job thread waits for its end. Otherwise
         * the job thread only queues the copy. */
        job->blocking = waits;
        job->hooks.interrupted = NULL;
        cm_status given = cm_engine_give_job(job->engine, job);
        return cm_is_ok(given) ? given : cm_job_finish(job, given, true);
    }
    ticket->started = true;
    /* The ticket reports a failure in the background, whichever thread ran the job. */
    cm_status status = run_here(job, !background);
    return background ? cm_ok() : status;
}

void
cm_request_drop_keeps(const cm_copy_request *request)
{
    for (uint32_t i = 0; i < request->keep_count; i++) {
        request->keep[i].drop(request->keep[i].object);
    }
}

/* Prepare and start the job. The device is entered once here and stays current for the
 * steps that follow. Each step enters the device too, which then costs next to
 * nothing. */
static cm_status
start(cm_job *job, const cm_copy_request *request)
{
    cm_engine *engine = job->engine;
    int device = request->dst.device >= 0 ? request->dst.device : request->src.device;
    if (request->stream != NULL) {
        device = request->stream->device;
    }
    else if (request->many != NULL) {
        device = request->many->device;
    }
    else if (request->rows != NULL) {
        device = request->rows->device;
    }
    cm_scope scope;
    bool entered = device >= 0
                   && cm_is_ok(cm_scope_enter(engine->rt, device,
                                              CM_CAPTURE_THREAD_LOCAL, &scope));
    /* If the device cannot be entered, the step that needs it says so. */
    cm_status status = start_job(job, request, prepare(job, request));
    if (entered) {
        cm_scope_leave(&scope);
    }
    return status;
}

/* Add the ends of a batch or of a file to the recorded event. A batch is represented by
 * its first run or, if it copies rows by numbers, by row 0 of the first layer. A file
 * is represented by the memory of its first range. */
static void
note_ends(const cm_copy_request *request, cm_event *noted)
{
    if (request->many != NULL && request->many->rows != NULL) {
        const cm_numbered_layer *layer = &request->many->rows->layers[0];
        noted->address = cm_piece_end_address(&layer->end[CM_DST]);
        noted->source = cm_piece_end_address(&layer->end[CM_SRC]);
        noted->kind = cm_kind_in_event(layer->end[CM_DST].kind);
        noted->source_kind = cm_kind_in_event(layer->end[CM_SRC].kind);
    }
    else if (request->many != NULL && request->many->count > 0) {
        const cm_piece *piece = &request->many->pieces[0];
        noted->address =
            piece->dst.host == NULL ? piece->dst.address : (uintptr_t)piece->dst.host;
        noted->source =
            piece->src.host == NULL ? piece->src.address : (uintptr_t)piece->src.host;
        noted->kind = cm_kind_in_event(piece->dst.kind);
        noted->source_kind = cm_kind_in_event(piece->src.kind);
    }
    if (request->file != NULL && request->file->request->range_count > 0) {
        const cm_file_request *file = request->file->request;
        const cm_file_range *range = &file->ranges[0];
        bool writes = file->writes;
        cm_address memory =
            range->host == NULL ? range->address : (uintptr_t)range->host;
        *(writes ? &noted->source : &noted->address) = memory;
        *(writes ? &noted->source_kind : &noted->kind) = cm_kind_in_event(range->kind);
    }
}

cm_status
cm_request_start(cm_engine *engine, const cm_copy_request *request,
                 const cm_tuning *tuning, cm_ticket **out)
{
    cm_job *job = calloc(1, sizeof(*job));
    cm_ticket *ticket = job == NULL ? NULL : cm_ticket_create(engine, request);
    if (ticket == NULL) {
        free(job);
        cm_many_destroy(request->many);
        cm_kernel_rows_destroy(request->rows);
        if (request->file != NULL) {
            cm_file_job_drop(request->file);
        }
        cm_request_drop_keeps(request);
        return cm_fail(CM_ENOMEM, 0);
    }
    if (ticket->noted.op == CM_EVENT_TRANSFER) {
        note_ends(request, &ticket->noted);
    }
    if (request->ticket_out != NULL) {
        *request->ticket_out = ticket;
    }
    cm_job_init(job, engine, request, tuning);
    job->ticket = cm_ticket_hold(ticket);
    job->request_stream =
        request->stream == NULL ? NULL : cm_stream_hold(request->stream);
    cm_status status = start(job, request);
    if (status.code == CM_ECANCELLED && cm_request_waits(request)) {
        cm_ticket_drain(ticket);
    }
    return cm_ticket_hand_over(ticket, status, out);
}

/* Try to make the copy without a job. If `out` is NULL, the caller waits in this call
 * and shows no progress, so the copy can be made as a short copy (short_copy.c), unless
 * it is longer than any short copy. If `out` is not NULL, the caller gets a ticket and
 * can ask about the copy later, so its stream can take the copy as it is
 * (queued_copy.c). Returns false if a job is needed. Otherwise *status has the
 * outcome. */
static bool
try_without_job(cm_engine *engine, const cm_copy_request *request,
                const cm_tuning *tuning, cm_ticket **out, cm_status *status,
                bool *ticket_has_keeps)
{
    bool is_long = out == NULL && request->run_nbytes > tuning->quick_nbytes;
    if (request->file != NULL || request->rows != NULL || request->many != NULL
        || is_long) {
        return false;
    }
    return out == NULL ? cm_engine_try_short_copy(engine, request, tuning, status,
                                                  ticket_has_keeps)
                       : cm_engine_try_queue_copy(engine, request, out, status,
                                                  ticket_has_keeps);
}

cm_status
cm_engine_copy(cm_engine *engine, const cm_copy_request *request, cm_ticket **out)
{
    cm_tuning tuning;
    cm_status status = cm_engine_begin_call(engine, &tuning);
    if (!cm_is_ok(status)) {
        cm_many_destroy(request->many);
        cm_kernel_rows_destroy(request->rows);
        if (request->file != NULL) {
            cm_file_job_drop(request->file);
        }
        cm_request_drop_keeps(request);
        return status;
    }
    bool ticket_has_keeps;
    if (try_without_job(engine, request, &tuning, out, &status, &ticket_has_keeps)) {
        if (!ticket_has_keeps) {
            cm_request_drop_keeps(request);
        }
    }
    else {
        cm_request_let_go(request);
        status = cm_request_start(engine, request, &tuning, out);
    }
    cm_engine_end_call(engine);
    return status;
}

bool
cm_engine_try_fill(cm_engine *engine, const cm_short_fill *fill, cm_status *out)
{
    cm_tuning tuning;
    if (!cm_is_ok(cm_engine_begin_call(engine, &tuning))) {
        return false; /* the job that is made instead will say why */
    }
    bool is_made = cm_fill_try_queue(engine, fill, out);
    cm_engine_end_call(engine);
    return is_made;
}

cm_status
cm_engine_transfer_file(cm_engine *engine, const cm_file_request *request,
                        cm_file_failure *failure)
{
    cm_copy_request copy = request->copy;
    int device = cm_file_first_device(request);
    *failure = (cm_file_failure){.at_end = false};
    cm_status status = cm_file_job_create(request, &copy.file);
    if (!cm_is_ok(status)) {
        cm_request_drop_keeps(&copy);
        return status;
    }
    copy.blocking = true;
    copy.dst.device = device;
    copy.src.device = device;
    copy.stream =
        device < 0 || device >= CM_MAX_DEVICES ? NULL : request->streams[device];
    status = cm_engine_copy(engine, &copy, NULL);
    cm_file_job_destroy(copy.file, failure);
    return status;
}

/* Make the state of a file that is written in the background. */
static cm_status
create_save(const cm_file_request *request, const cm_file_place *place,
            cm_file_job **out)
{
    cm_file_save *save;
    CM_TRY(cm_file_save_create(request, place, &save));
    cm_status status = cm_file_job_create(&save->request, out);
    if (!cm_is_ok(status)) {
        cm_file_save_destroy(save);
        return status;
    }
    (*out)->save = save;
    return cm_ok();
}

cm_status
cm_engine_write_file(cm_engine *engine, const cm_file_request *request,
                     const cm_file_place *place, cm_ticket **out)
{
    cm_copy_request copy = request->copy;
    int device = cm_file_first_device(request);
    cm_status status = create_save(request, place, &copy.file);
    if (!cm_is_ok(status)) {
        cm_request_drop_keeps(&copy);
        return status;
    }
    copy.blocking = false;
    copy.dst.device = device;
    copy.src.device = device;
    copy.stream = NULL;
    return cm_engine_copy(engine, &copy, out);
}
