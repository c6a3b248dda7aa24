/* SPDX-License-Identifier: Apache-2.0 */
/* What a job does on devices: it queues copies, keeps packed bytes in blocks of device
 * memory, and uses further streams beside its own.
 *
 * Any device may be current when these functions are called, except where they say
 * otherwise.
 * Locks: none; the functions belong to the thread that runs the job. */
#pragma once

#include "transfer/engine/job.h"

/* Queue a copy of one run, or of all runs of a layout, on a stream of the device that
 * is to make it.
 * Fails: as copy_async, cm_kernels_launch. */
CM_NODISCARD cm_status cm_job_copy_run(const cm_job *job, const cm_stream *stream,
                                       cm_address dst, cm_address src, uint64_t nbytes);
CM_NODISCARD cm_status cm_job_copy_layout(cm_job *job, const cm_stream *stream,
                                          const cm_layout *layout, cm_address dst,
                                          cm_address src);
/* Queue a copy of all runs of a layout by a kernel. The device must be current. If the
 * layout still has items, the kernel converts them on the way. */
CM_NODISCARD cm_status cm_job_launch(cm_job *job, const cm_stream *stream,
                                     const cm_layout *layout, cm_address dst,
                                     cm_address src);
/* Return how many bytes, of the `nbytes` that begin at `at`, one copy or fill of the
 * runtime may touch. Such a call must not pass an address where a registration begins
 * or ends. Memory of a device has no such address in it. */
uint64_t cm_job_run_nbytes(const cm_job *job, cm_address at, uint64_t nbytes);
/* Queue a copy of one run on the job's stream. If registrations begin or end within the
 * run, it is copied in several parts.
 * Fails: as copy_async. */
CM_NODISCARD cm_status cm_job_copy_over_edges(cm_job *job, cm_address dst,
                                              cm_address src, uint64_t nbytes);
/* Make `waiter` wait for all that `worker` has been given so far.
 * Fails: event_create, event_record, stream_wait_event. */
CM_NODISCARD cm_status cm_job_chain_streams(cm_job *job, const cm_stream *worker,
                                            cm_stream *waiter);

/* -- sides ------------------------------------------------------------------------ */

/* A side is a further stream of a job on one device, with a block there for packed
 * bytes. A job may have one side on each device, and also on the device of its own
 * stream, where job->block takes the place of the side's block. */

/* Open the side on `device`, unless it is open: its stream comes after all that the
 * job's own stream was given. The stream is `given` or, if that is NULL, one that the
 * engine lends for such work.
 * Fails: as cm_job_chain_streams, stream_create, CM_ENOMEM. */
CM_NODISCARD cm_status cm_job_open_side(cm_job *job, int device, cm_stream *given);
/* Return the stream of an open side, to which the caller is about to give work. */
cm_stream *cm_job_use_side(cm_job *job, int device);
/* Open the side on `device` and return its stream, to which the caller is about to give
 * work. On the device of the job's own stream this is that stream itself. */
CM_NODISCARD cm_status cm_job_open_stream_on(cm_job *job, int device, cm_stream *given,
                                             cm_stream **out);
/* Return the address of a block on `device` for the packed bytes of a piece. It is
 * allocated when it is needed first. */
CM_NODISCARD cm_status cm_job_take_block_on(cm_job *job, int device, cm_address *out);
/* Make the job's own stream wait for all that the sides were given. */
CM_NODISCARD cm_status cm_job_join_sides(cm_job *job);
/* Do the same as cm_job_join_sides() after the job has failed. If the stream cannot be
 * made to wait, the call itself waits for the sides.
 * Fails: stream_synchronize; then nobody knows what still runs. */
CM_NODISCARD cm_status cm_job_abandon_sides(cm_job *job);

/* Allocate a block from the staging pool of the stream's device. With `waits` the
 * allocation may wait for memory, but never in a capture.
 * Fails: as cm_engine_alloc; CM_EINVALID without a pool. */
CM_NODISCARD cm_status cm_job_alloc_block(cm_job *job, uint64_t nbytes,
                                          cm_stream *stream, bool waits,
                                          cm_block **out);
/* Return where on the device the piece with that number is packed. It lies in
 * job->block, which is allocated when it is needed first. If that fails, each later
 * call fails in the same way without asking the pool again.
 * Fails: as cm_job_alloc_block. */
CM_NODISCARD cm_status cm_job_take_device_block(cm_job *job, uint64_t number,
                                                cm_address *out);
/* If the job can use room for two pieces, and the pool has plenty of it, allocate
 * job->block for two and set job->has_pair. The call does not wait, and a lack of
 * memory is not a failure. */
CM_NODISCARD cm_status cm_job_try_pair(cm_job *job);
/* Free a block at the end of the job, and tell the pool which streams may still work on
 * it. This does nothing for NULL. */
void cm_job_free_block(const cm_job *job, cm_block *block);
/* Free the blocks of the job and of its sides, and release the streams of the sides. */
void cm_job_free_device_side(cm_job *job);
