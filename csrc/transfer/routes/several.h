/* SPDX-License-Identifier: Apache-2.0 */
/* What jobs that work on more than one stream share; and jobs with more than one
 * target. Locks: none; of the thread that runs the job. */
#ifndef CM_TRANSFER_ROUTES_SEVERAL_H
#define CM_TRANSFER_ROUTES_SEVERAL_H

#include "transfer/routes/staging.h"

/* Let `waiter` wait for what `worker` has been given so far, whichever device is
 * current. Fails: event_create, event_record, stream_wait_event. */
CM_NODISCARD cm_status cm_job_chain_streams(cm_job *job, const cm_stream *worker,
                                            cm_stream *waiter);

/* Queue the strided copy on `stream`, of `device`, whichever is current. Fails: as
 * cm_kernels_launch. */
CM_NODISCARD cm_status cm_job_launch_on(cm_job *job, int device,
                                        const cm_layout *layout, cm_address dst,
                                        cm_address src, const cm_stream *stream);

/* peer.c: what a page-locked block of that route was counted as is over. NULL: nothing.
 */
void cm_job_leave_ring(cm_job *job, const cm_block *pinned);

/* -- fan.c: further targets --------------------------------------------------------- */

/* As cm_spread says; sets job->fan. The plan may become one through page-locked blocks.
 * Fails: CM_EINVALID (an end that is not where it should be), CM_ENOMEM. */
CM_NODISCARD cm_status cm_fan_create(cm_job *job, const struct cm_spread *spread);
/* The streams of other devices come after what the job has waited for. Once. */
CM_NODISCARD cm_status cm_fan_begin(cm_job *job);
/* Queue the slot's bytes for the other devices, as the job did for its own; the slot's
 * event tells of all. */
CM_NODISCARD cm_status cm_fan_send(cm_job *job, const cm_layout *unpack, cm_slot *s,
                                   uint64_t nbytes);
/* All is queued but copies on the same device; the job's stream then comes after all
 * others. */
CM_NODISCARD cm_status cm_fan_end(cm_job *job);
/* After a failure: the job's stream comes after all others, or they are waited for.
 * Fails: stream_synchronize: nobody knows what still runs. */
CM_NODISCARD cm_status cm_fan_abandon(cm_job *job);
/* `idle`: nothing runs any more. */
void cm_fan_destroy(cm_job *job, bool idle);

#endif
