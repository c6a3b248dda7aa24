/* SPDX-License-Identifier: Apache-2.0 */
/* What a job waits for, before it begins and between its pieces. Locks: none; of the
 * thread that runs the job. */
#ifndef CM_TRANSFER_JOB_ORDER_H
#define CM_TRANSFER_JOB_ORDER_H

#include "transfer/job.h"

/* job_after.c: what must come first. */
CM_NODISCARD cm_status cm_job_record_after(cm_job *job, const cm_copy_request *request);
CM_NODISCARD cm_status cm_job_wait_after(cm_job *job);
/* Lock held. The next of the tickets without which it is no use to run the job; NULL:
 * there is none. */
cm_ticket *cm_job_find_blocker_locked(cm_job *job);
/* At its end: whoever comes after the job's ticket comes after those of its own that
 * are not over. */
void cm_job_leave_order(cm_job *job);
/* True when that would have to wait before it can queue work on a stream. */
bool cm_job_must_wait_after(const cm_job *job);
/* Sets job->capturing. */
CM_NODISCARD cm_status cm_job_look_for_capture(cm_job *job);
/* Fails: CM_ECAPTURING when a stream captures and the copy, planned, cannot be captured. */
CM_NODISCARD cm_status cm_job_check_capture(cm_job *job,
                                            const cm_copy_request *request);
/* True when the request's own stream can do the work. */
bool cm_job_fits_stream(const cm_job *job);

/* job_wait.c: waits of the thread that runs the job; CM_ECANCELLED when interrupted. */
CM_NODISCARD cm_status cm_job_wait_event(cm_job *job, int device, uint64_t event);
CM_NODISCARD cm_status cm_job_wait_stream(cm_job *job);
bool cm_job_is_interrupted(cm_job *job);

/* Streams may write the source on their own: it is page-locked, in part at least. */
static inline bool
cm_job_src_is_ordered(const cm_job *job)
{
    return job->src.kind != CM_KIND_PAGEABLE || job->src_facts.locked
           || !job->src_facts.whole;
}

/* Such a source is waited for before the copy begins. */
static inline bool
cm_job_waits_for_source(const cm_job *job)
{
    bool staged =
        job->plan.route == CM_ROUTE_STAGED || job->plan.route == CM_ROUTE_STAGED_KERNEL;
    return staged && !job->plan.is_download && cm_job_src_is_ordered(job);
}

/* job_park.c: leave the thread to others until the ticket or the event is done. Returns
 * CM_ETIMEOUT. */
CM_NODISCARD cm_status cm_job_park_on_ticket(cm_job *job, cm_ticket *ticket);
CM_NODISCARD cm_status cm_job_park_on_event(cm_job *job, int device, uint64_t event);
/* Look whether one parked on an event can go on (or will hear that it failed). */
bool cm_job_can_go_on(cm_job *job);

#endif
