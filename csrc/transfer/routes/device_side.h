/* SPDX-License-Identifier: Apache-2.0 */
/* What a job does on devices, whichever is current: packed bytes in blocks of their
 * memory, and work on more streams than its own. Locks: none; of the job's thread. */
#pragma once

#include "transfer/engine/job.h"

/* Queue a copy of one run, or of a layout's, on a stream of the device that makes it.
 * Fails: as copy_async, cm_kernels_launch. */
CM_NODISCARD cm_status cm_job_copy_run(const cm_job *job, const cm_stream *stream,
                                       cm_address dst, cm_address src, uint64_t nbytes);
CM_NODISCARD cm_status cm_job_copy_layout(cm_job *job, const cm_stream *stream,
                                          const cm_layout *layout, cm_address dst,
                                          cm_address src);
/* The same by a kernel in any case, the device being current. Elements that the layout
 * still has are converted on the way. */
CM_NODISCARD cm_status cm_job_launch(cm_job *job, const cm_stream *stream,
                                     const cm_layout *layout, cm_address dst,
                                     cm_address src);
/* How far one runtime copy or fill may go from `at` on: up to where a registration
 * begins or ends, which is never within memory of a device. */
uint64_t cm_job_run_of(const cm_job *job, cm_address at, uint64_t nbytes);
/* Queue a run that such edges may cut, on the job's stream. Fails: as copy_async. */
CM_NODISCARD cm_status cm_job_copy_over_edges(cm_job *job, cm_address dst,
                                              cm_address src, uint64_t nbytes);
/* Let `waiter` wait for what `worker` has been given so far.
 * Fails: event_create, event_record, stream_wait_event. */
CM_NODISCARD cm_status cm_job_chain_streams(cm_job *job, const cm_stream *worker,
                                            cm_stream *waiter);

/* -- more streams than one: beside the job's own there may be another on each device,
 * also on that of the job's own -- */

/* From here on there is one on `device`, which comes after what the job's own was
 * given: `given`, or (NULL) one that the engine has for that. Once; fails as
 * cm_job_chain_streams, stream_create, CM_ENOMEM. */
CM_NODISCARD cm_status cm_job_open_side(cm_job *job, int device, cm_stream *given);
/* That one, which is about to be given something. */
cm_stream *cm_job_use_side(cm_job *job, int device);
/* The same, but for the device of the job's own stream, which is that itself. */
CM_NODISCARD cm_status cm_job_open_stream_on(cm_job *job, int device, cm_stream *given,
                                             cm_stream **out);
/* A block for packed bytes of a piece there, taken at first need. */
CM_NODISCARD cm_status cm_job_take_block_on(cm_job *job, int device, cm_address *out);
/* The job's stream comes after all that the others were given. */
CM_NODISCARD cm_status cm_job_join_sides(cm_job *job);
/* The same after a failure, or they are waited for. Fails: stream_synchronize: nobody
 * knows what still runs. */
CM_NODISCARD cm_status cm_job_abandon_sides(cm_job *job);

/* A block of the pool of the stream's device; unless it `waits`, if there is one.
 * Fails: CM_EINVALID without a pool. */
CM_NODISCARD cm_status cm_job_alloc_block(cm_job *job, uint64_t nbytes,
                                          cm_stream *stream, bool waits,
                                          cm_block **out);
/* Where the piece of that number lies on the device: in job->block, which is taken at
 * first need; where there is none then there is none later. */
CM_NODISCARD cm_status cm_job_take_device_block(cm_job *job, uint64_t number,
                                                cm_address *out);
/* The same for two pieces (job->has_pair), if there is plenty of room; nothing is
 * waited for. */
CM_NODISCARD cm_status cm_job_try_pair(cm_job *job);
/* At the job's end, with the streams that may still work on it. NULL: nothing. */
void cm_job_free_block(const cm_job *job, cm_block *block);
/* Those that are the job's own, and its other streams. */
void cm_job_free_device_side(cm_job *job);
