/* SPDX-License-Identifier: Apache-2.0 */
/* What a job does on devices, whichever is current: packed bytes in blocks of their
 * memory, and work on more streams than its own. Locks: none; of the thread that runs
 * the job. */
#ifndef CM_TRANSFER_ROUTES_DEVICE_SIDE_H
#define CM_TRANSFER_ROUTES_DEVICE_SIDE_H

#include "transfer/engine/job.h"

/* Queue a copy of one run, or of a layout's, on a stream of the device that makes it.
 * Fails: as copy_async, cm_kernels_launch. */
CM_NODISCARD cm_status cm_job_copy_run(const cm_job *job, const cm_stream *stream,
                                       cm_address dst, cm_address src, uint64_t nbytes);
CM_NODISCARD cm_status cm_job_copy_layout(cm_job *job, const cm_stream *stream,
                                          const cm_layout *layout, cm_address dst,
                                          cm_address src);
/* How far one runtime copy or fill may go from `at` on: up to where a registration
 * begins or ends. */
uint64_t cm_job_run_of(const cm_job *job, bool on_device, cm_address at,
                       uint64_t nbytes);
/* Queue a run that such edges may cut, on the job's stream. Fails: as copy_async. */
CM_NODISCARD cm_status cm_job_copy_over_edges(cm_job *job, bool to_device,
                                              cm_address dst, bool from_device,
                                              cm_address src, uint64_t nbytes);
/* Let `waiter` wait for what `worker` has been given so far.
 * Fails: event_create, event_record, stream_wait_event. */
CM_NODISCARD cm_status cm_job_chain_streams(cm_job *job, const cm_stream *worker,
                                            cm_stream *waiter);
/* job->side.stream, of `device`, which comes after what the job's own was given;
 * once. Fails: as that, stream_create. */
CM_NODISCARD cm_status cm_job_open_gather_stream(cm_job *job, int device);
/* The job's stream comes after all that one was given. Fails: as cm_job_chain_streams. */
CM_NODISCARD cm_status cm_job_join_side(cm_job *job);

/* -- devices other than that of its stream, each with one stream -- */

/* From here on there is one of `device`: `given`, or (NULL) one lent to the job. It
 * comes after what the job's own was given. Once; fails as cm_job_chain_streams,
 * stream_create, CM_ENOMEM. */
CM_NODISCARD cm_status cm_job_open_stream_on(cm_job *job, int device, cm_stream *given);
/* That one, or the job's own. */
cm_stream *cm_job_stream_on(const cm_job *job, int device);
/* A block for packed bytes of a piece there, taken at first need. */
CM_NODISCARD cm_status cm_job_take_block_on(cm_job *job, int device, cm_address *out);
/* The job's stream comes after all others. */
CM_NODISCARD cm_status cm_job_join_streams(cm_job *job);
/* The same after a failure, or they are waited for. Fails: stream_synchronize: nobody
 * knows what still runs. */
CM_NODISCARD cm_status cm_job_abandon_streams(cm_job *job);

/* It goes another way than was planned, and its ticket says so. */
void cm_job_set_route(cm_job *job, cm_route route);

/* A block of the pool of the stream's device. Fails: CM_EINVALID without a pool. */
CM_NODISCARD cm_status cm_job_alloc_block(cm_job *job, uint64_t nbytes,
                                          cm_stream *stream, cm_block **out);
/* The same, if there is one: nothing is waited for. */
CM_NODISCARD cm_status cm_job_try_block(cm_job *job, uint64_t nbytes, cm_stream *stream,
                                        cm_block **out);
/* Where the piece of that number lies on the device: in job->side.block, which is
 * taken at first need. */
CM_NODISCARD cm_status cm_job_take_device_block(cm_job *job, uint64_t number,
                                                cm_address *out);
/* The same for two pieces (job->side.has_pair), if there is plenty of room; nothing is
 * waited for. */
CM_NODISCARD cm_status cm_job_try_pair(cm_job *job);
/* At the job's end, with the streams that may still work on it. NULL: nothing. */
void cm_job_free_block(const cm_job *job, cm_pool *pool, cm_block *block);
/* Those that are the job's own, its gather stream, and what is on other devices. */
void cm_job_free_device_side(cm_job *job);

#endif
