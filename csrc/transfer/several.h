/* SPDX-License-Identifier: Apache-2.0 */
/* What jobs that work on more than one stream share. Locks: none; of the thread that
 * runs the job. */
#ifndef CM_TRANSFER_SEVERAL_H
#define CM_TRANSFER_SEVERAL_H

#include "transfer/job.h"

/* Let `waiter` wait for what `worker` has been given so far, whichever device is
 * current. Fails: event_create, event_record, stream_wait_event. */
CM_NODISCARD cm_status cm_job_chain_streams(cm_job *job, const cm_stream *worker,
                                            cm_stream *waiter);

/* Queue the strided copy on `stream`, of `device`, whichever is current. Fails: as
 * cm_kernels_launch. */
CM_NODISCARD cm_status cm_job_launch_on(cm_job *job, int device,
                                        const cm_layout *layout, cm_address dst,
                                        cm_address src, const cm_stream *stream);

#endif
