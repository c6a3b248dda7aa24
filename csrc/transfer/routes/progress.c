/* SPDX-License-Identifier: Apache-2.0 */
/* How far a copy is, told as its pieces end. */
#include "transfer/routes/pieces.h"

/* Of what the first bytes of the layout hold. */
static uint64_t
payload_of(cm_job *job, uint64_t nbytes)
{
    if (job->many != NULL) {
        return cm_many_count_payload(job->many, nbytes);
    }
    uint64_t repeats = cm_layout_nbytes(&job->plan.layout) / job->plan.nbytes;
    return nbytes / repeats;
}

void
cm_job_count_moved(cm_job *job, uint64_t nbytes)
{
    job->moved_nbytes += nbytes;
    uint64_t moved = payload_of(job, job->moved_nbytes);
    if (moved < job->plan.nbytes) { /* the last piece is told of when nothing failed */
        cm_ticket_set_moved(job->ticket, moved);
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
