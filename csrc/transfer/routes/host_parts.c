/* SPDX-License-Identifier: Apache-2.0 */
/* This file has the work that threads of the host do for a job, part by part. It is the
 * same for all routes. routes.h declares and describes the functions. */
#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "transfer/host/host_copy.h"
#include "transfer/routes/numbered.h"
#include "transfer/routes/pieces.h"
#include "transfer/routes/routes.h"

/* The source of a fill is memory of our own, which cannot be gone, so the function does
 * not check it. */
cm_status
cm_job_probe_pages(const cm_job *job, const cm_layout *layout)
{
    if (job->many != NULL) {
        return layout == &job->plan.layout ? cm_many_probe_pages(job->many) : cm_ok();
    }
    bool on_host = job->plan.device < 0;
    bool by_src = cm_kind_is_pageable(job->src.kind) && !job->src.is_heap
                  && !job->src_facts.locked && !job->is_fill;
    bool by_dst = cm_kind_is_pageable(job->dst.kind) && !job->dst.is_heap
                  && !job->dst_facts.locked;
    uint64_t least = on_host ? CM_PROBE_HOST_NBYTES : CM_PROBE_NBYTES;
    CM_TRY(by_src ? cm_host_probe(layout, CM_SRC, job->src.host, least) : cm_ok());
    return by_dst ? cm_host_probe(layout, CM_DST, job->dst.host, least) : cm_ok();
}

/* cm_job_populate_ahead() brings in the pages of an end before the parts of the copy
 * begin. It does so AHEAD_STEP_NBYTES at a time, and before each step the job asks
 * whether to go on. If an end is longer than AHEAD_MOST_NBYTES, its pages are not
 * brought in ahead, since the first ones might be gone again before the copy needs
 * them. */
enum { AHEAD_STEP_NBYTES = 32 << 20, AHEAD_MOST_NBYTES = 1 << 30 };

/* Bring in the pages of one end, which maps a file, unless its elements lie side by
 * side in the order in which they are copied. *done tells whether the pages are in. */
static cm_status
populate_end_ahead(cm_job *job, cm_side side, const void *base, bool *done)
{
    cm_host_hull hull;
    const cm_layout *layout = &job->plan.layout;
    if (*done || cm_layout_is_packed(layout, side)
        || !cm_host_find_hull(layout, side, base, &hull)
        || hull.nbytes > AHEAD_MOST_NBYTES) {
        return cm_ok();
    }
    for (uint64_t at = 0; at < hull.nbytes; at += AHEAD_STEP_NBYTES) {
        CM_TRY(cm_job_check_cancelled(job, &job->host.asked_ns));
        CM_TRY(cm_pages_populate(hull.start + at,
                                 cm_least(hull.nbytes - at, AHEAD_STEP_NBYTES),
                                 side == CM_DST));
    }
    *done = true;
    return cm_ok();
}

cm_status
cm_job_populate_ahead(cm_job *job)
{
    if (cm_job_is_file(&job->src, job->src_facts)) {
        CM_TRY(
            populate_end_ahead(job, CM_SRC, job->src.host, &job->is_populated[CM_SRC]));
    }
    return cm_job_is_file(&job->dst, job->dst_facts)
               ? populate_end_ahead(job, CM_DST, job->dst.host,
                                    &job->is_populated[CM_DST])
               : cm_ok();
}

/* Populate the pages of a part. If all pages of the end were populated ahead, only
 * check that the pages of the part are still there, since the file may have been cut
 * short meanwhile. */
static cm_status
populate_part(const cm_job *job, const cm_layout *part, cm_side side, const void *base)
{
    return job->is_populated[side] ? cm_host_probe(part, side, base, 0)
                                   : cm_host_populate(part, side, base);
}

void
cm_job_move_part(const void *context, const cm_layout *part, void *dst, const void *src,
                 bool wide)
{
    cm_job *job = (cm_job *)(uintptr_t)context;
    if (atomic_load(&job->lost_error) != 0) {
        return;
    }
    cm_status status = cm_ok();
    if (cm_job_is_file(&job->src, job->src_facts)) {
        status = populate_part(job, part, CM_SRC, src);
    }
    if (cm_is_ok(status) && cm_job_is_file(&job->dst, job->dst_facts)) {
        status = populate_part(job, part, CM_DST, dst);
    }
    if (!cm_is_ok(status)) {
        atomic_store(&job->lost_error, (int)status.arg);
        return;
    }
    if (cm_job_converts(job)) {
        if (!cm_host_convert(&job->convert, part, dst, src)) {
            atomic_store(&job->lost_error, CM_LOST_CAST);
        }
    }
    else {
        cm_host_copy(part, dst, src, wide);
    }
}

void
cm_job_open_group(cm_job *job, cm_task_group *group)
{
    cm_task_group_open(group, &job->engine->workers, &job->tuning);
    if (job->many != NULL) {
        group->move =
            job->many->rows != NULL ? cm_numbered_move_part : cm_many_move_part;
        group->context = job;
    }
    else if (cm_job_has_file(job) || cm_job_converts(job)) {
        group->move = cm_job_move_part;
        group->context = job;
    }
}

void
cm_job_share(cm_job *job, const cm_layout *layout, void *dst, const void *src,
             cm_copy_way way)
{
    cm_task_group group;
    cm_copy_task task = {.next = 0};
    cm_job_open_group(job, &group);
    cm_task_group_post(&group, &task, layout, dst, src, way);
    cm_task_group_wait(&group, &task);
    cm_task_group_close(&group);
}

/* `nbytes` comes from the layout of a piece. If the source is repeated, it counts the
 * repeated bytes, and in a job of many runs it counts the gaps between the runs. The
 * ticket counts neither, so the sum is scaled down to the bytes of the plan. */
void
cm_job_count_moved(cm_job *job, uint64_t nbytes)
{
    double payload =
        (double)job->plan.nbytes / (double)cm_layout_nbytes(&job->plan.layout);
    job->moved_nbytes += nbytes;
    uint64_t moved = (uint64_t)((double)job->moved_nbytes * payload);
    /* The last piece is not counted here. cm_ticket_finish() counts it if nothing has
     * failed. */
    if (moved < job->plan.nbytes) {
        cm_ticket_set_moved(job->ticket, moved);
    }
}

cm_status
cm_job_moved_status(const cm_job *job)
{
    int error = atomic_load(&job->lost_error);
    if (error == 0) {
        return cm_ok();
    }
    if (error == CM_LOST_CAST) {
        return cm_fail(CM_ECAST, job->convert.cast->number);
    }
    return cm_fail(job->file != NULL ? CM_ESYSTEM : CM_EFAULT, (uint64_t)error);
}
