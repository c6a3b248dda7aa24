/* SPDX-License-Identifier: Apache-2.0 */
/* How far a copy is, told as its pieces end. */
#include "transfer/staging.h"

void
cm_job_count_moved(cm_job *job, uint64_t nbytes)
{
    job->moved_nbytes += nbytes;
    uint64_t repeats = cm_layout_nbytes(&job->plan.layout) / job->plan.nbytes;
    uint64_t moved = job->moved_nbytes / repeats;
    if (moved < job->plan.nbytes) { /* the last piece is told of when nothing failed */
        atomic_store_explicit(&job->ticket->moved, moved, memory_order_release);
    }
}

void
cm_staging_end_piece(cm_job *job)
{
    cm_staging *staging = job->staging;
    cm_job_count_moved(job,
                       cm_layout_nbytes(&cm_slot_at(staging, staging->ended)->piece));
    staging->ended++;
}

cm_status
cm_job_settle_upload(cm_job *job)
{
    cm_staging *staging = job->staging;
    while (staging != NULL && staging->ended < staging->passed) {
        const cm_slot *s = cm_slot_at(staging, staging->ended);
        CM_TRY(cm_job_wait_event(job, job->stream->device, s->event));
        cm_staging_end_piece(job);
    }
    return cm_ok();
}
