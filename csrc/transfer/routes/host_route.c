/* SPDX-License-Identifier: Apache-2.0 */
/* Makes copies between two ends that the host reaches. Each copy is cut into pieces, so
 * that the thread that runs the job can stop between two pieces, if the caller is
 * interrupted or if another job needs the thread. The workers help with long pieces. */
#include "base/fresh_pages.h"
#include "transfer/routes/numbered.h"
#include "transfer/routes/routes.h"

enum {
    PIECE_NBYTES = 8 << 20,   /* a piece in a job thread, since other jobs may wait for
                                 that thread */
    TURNED_NBYTES = 64 << 20, /* the same for a transposing copy; its pieces are longer,
                                 since a cache line of the source has elements of many
                                 rows of the target */
    SHARED_PIECE_NBYTES = 64 << 20, /* a piece in a thread that no other job needs */
    SHARED_NBYTES = 1 << 20,  /* shorter pieces are over before other threads wake */
    CACHED_NBYTES = 32 << 20, /* a shorter target may still be in a cache when somebody
                                 reads it */
};

bool
cm_host_suits(cm_plan *plan CM_UNUSED, const cm_plan_ends *ends CM_UNUSED)
{
    return true;
}

static uint64_t
piece_limit(const cm_layout *layout, bool in_background)
{
    if (!in_background) {
        return SHARED_PIECE_NBYTES;
    }
    return cm_layout_near_axis(layout) >= 0 ? TURNED_NBYTES : PIECE_NBYTES;
}

static bool
is_fresh(const cm_layout *layout, const cm_region *dst)
{
    return layout->ndim == 0 && cm_kind_is_pageable(dst->kind)
           && cm_pages_are_fresh((char *)dst->host + layout->offset[CM_DST],
                                 layout->run_nbytes);
}

/* True if the copy is a single run whose target overlaps its source. Like memmove(),
 * the copy then begins at the end from which no byte is overwritten before it is
 * read. */
static bool
shifts(const cm_job *job)
{
    return job->overlaps && !job->is_two_maps && job->plan.layout.ndim == 0;
}

uint32_t
cm_host_thread_count(const cm_job *job, bool in_background)
{
    const cm_layout *layout = &job->plan.layout;
    uint64_t nbytes = cm_layout_nbytes(layout);
    uint64_t most = piece_limit(layout, in_background);
    cm_tuning all = job->tuning;
    nbytes = nbytes < most ? nbytes : most;
    if (nbytes < SHARED_NBYTES || shifts(job)) {
        return 1;
    }
    if (is_fresh(layout, &job->dst)) {
        all.thread_count = all.fresh_thread_count;
    }
    return cm_tuning_piece_threads(&all, nbytes);
}

/* Choose how the host writes the target. If the target is a single run on pages that do
 * not exist yet, ask the system for huge pages. */
static cm_copy_way
choose_way(const cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    uint64_t nbytes = cm_layout_nbytes(layout);
    if (job->many != NULL) {
        return job->many->rows != NULL
                   ? cm_numbered_choose_way(job, nbytes >= CACHED_NBYTES)
                   : CM_COPY_PLAIN;
    }
    if (is_fresh(layout, &job->dst)) {
        cm_pages_ask_huge((char *)job->dst.host + layout->offset[CM_DST], nbytes);
        return CM_COPY_FRESH;
    }
    if (cm_job_has_file(job)) {
        return nbytes < CACHED_NBYTES ? CM_COPY_PLAIN_ALL : CM_COPY_WIDE_ALL;
    }
    return nbytes < CACHED_NBYTES ? CM_COPY_PLAIN : CM_COPY_WIDE;
}

/* Cut the next piece from a run whose target overlaps its source (see shifts()). Pieces
 * are cut from the end of the run at which a piece overwrites nothing that is still to
 * be read. Returns false if nothing is left. */
static bool
next_of_overlapping(const cm_job *job, cm_layout *piece)
{
    *piece = job->plan.layout;
    uint64_t left = piece->run_nbytes - job->moved_nbytes;
    piece->run_nbytes = left < PIECE_NBYTES ? left : PIECE_NBYTES;
    const char *dst = (const char *)job->dst.host + piece->offset[CM_DST];
    const char *src = (const char *)job->src.host + piece->offset[CM_SRC];
    uint64_t offset = dst < src ? job->moved_nbytes : left - piece->run_nbytes;
    piece->offset[CM_DST] += (int64_t)offset;
    piece->offset[CM_SRC] += (int64_t)offset;
    return left > 0;
}

/* Copy the pieces that are left. Between two pieces a job thread turns to another job
 * if that job is more urgent, and the caller is asked whether to go on. Before the
 * first piece, all pages of mapped files at both ends are checked. The pages of each
 * later piece are checked again before it is copied, unless the target's pages are
 * fresh. */
static cm_status
copy_pieces(cm_job *job)
{
    bool is_shifted = shifts(job);
    cm_layout piece;
    for (;;) {
        if (job->in_background) {
            CM_TRY(cm_job_take_turn(job, 0));
        }
        if (!(is_shifted ? next_of_overlapping(job, &piece)
                         : cm_cut_next(&job->host.cut, &piece))) {
            return cm_ok();
        }
        uint64_t nbytes = cm_layout_nbytes(&piece);
        bool shared = (nbytes >= SHARED_NBYTES && !is_shifted) || job->many != NULL;
        bool first = job->moved_nbytes == 0;
        if (!first) {
            CM_TRY(cm_job_check_cancelled(job, &job->host.asked_ns));
        }
        if (first || job->host.way != CM_COPY_FRESH) {
            CM_TRY(cm_job_probe_pages(job, first ? &job->plan.layout : &piece));
        }
        if (shared) {
            cm_job_share(job, &piece, job->dst.host, job->src.host, job->host.way);
        }
        else {
            cm_job_move_part(job, &piece, job->dst.host, job->src.host, false);
        }
        CM_TRY(cm_job_moved_status(job));
        cm_job_count_moved(job, nbytes);
        job->turn_nbytes += nbytes;
    }
}

cm_status
cm_job_run_on_host(cm_job *job)
{
    if (job->step == CM_JOB_ORDER) {
        CM_TRY(cm_job_wait_after(job));
        CM_TRY(cm_job_begin(job));
        if (job->overlaps && !shifts(job)) {
            CM_TRY(cm_job_probe_pages(job, &job->plan.layout));
            CM_TRY(cm_job_populate_ahead(job)); /* the source is about to be read */
            CM_TRY(cm_job_replace_source(job));
        }
        cm_cut_init(
            &job->host.cut, &job->plan.layout,
            piece_limit(&job->plan.layout, job->in_background && job->many == NULL));
        job->host.way = choose_way(job);
        CM_TRY(cm_job_populate_ahead(job));
        job->step = CM_JOB_MOVE;
    }
    return copy_pieces(job);
}
