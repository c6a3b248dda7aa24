/* SPDX-License-Identifier: Apache-2.0 */
/* This header has the steps of a job that work on devices. They queue copies and use
 * further streams beside the job's own. They also keep packed bytes in blocks of device
 * memory. Packed bytes are the bytes of a piece of the copy, laid one behind the other.
 *
 * Any device may be current when these functions are called, except where they say
 * otherwise.
 * Locks: none; the functions belong to the thread that runs the job. */
#pragma once

#include "transfer/engine/job.h"

/* Queue a copy on `stream`, whose device makes the copy. The first function copies one
 * run of bytes, and the second copies all runs of a layout (plan/layout.h).
 * Fails: as copy_async, cm_kernels_launch. */
CM_NODISCARD cm_status cm_job_copy_run(const cm_job *job, const cm_stream *stream,
                                       cm_address dst, cm_address src, uint64_t nbytes);
CM_NODISCARD cm_status cm_job_copy_layout(cm_job *job, const cm_stream *stream,
                                          const cm_layout *layout, cm_address dst,
                                          cm_address src);
/* Queue a copy of all runs of a layout by a kernel. The device must be current. If the
 * layout has items, which are elements that are to be converted, the kernel converts
 * them on the way. */
CM_NODISCARD cm_status cm_job_launch(cm_job *job, const cm_stream *stream,
                                     const cm_layout *layout, cm_address dst,
                                     cm_address src);
/* Return how many bytes from `at` on, but at most `nbytes`, one call of the runtime may
 * copy or fill. One call must not reach across an address where a registration of host
 * memory begins or ends. In memory of a device there are no such addresses. */
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

/* A side is a further stream of a job on one device, and a block of memory on that
 * device for packed bytes. A job may have one side on each device. On the device of the
 * job's own stream a side is only a stream, since the job uses job->block there. */

/* Open the side on `device`, unless it is open. The stream of the side then waits for
 * all work that the job's own stream has been given so far. The stream of the side is
 * `given` or, if `given` is NULL, one that the engine lends for such work.
 * Fails: as cm_job_chain_streams, stream_create, CM_ENOMEM. */
CM_NODISCARD cm_status cm_job_open_side(cm_job *job, int device, cm_stream *given);
/* Return the stream of an open side, to which the caller is about to give work. */
cm_stream *cm_job_use_side(cm_job *job, int device);
/* Set *out to a stream on `device`, to which the caller is about to give work. That is
 * the job's own stream if it belongs to `device`. Otherwise it is the stream of the
 * side on `device`, which this call opens. */
CM_NODISCARD cm_status cm_job_open_stream_on(cm_job *job, int device, cm_stream *given,
                                             cm_stream **out);
/* Set *out to the address of a block on `device` for the packed bytes of a piece. The
 * first call for a device allocates the block. */
CM_NODISCARD cm_status cm_job_take_block_on(cm_job *job, int device, cm_address *out);
/* Make the job's own stream wait for all that the sides were given. */
CM_NODISCARD cm_status cm_job_join_sides(cm_job *job);
/* Do the same as cm_job_join_sides() after the job has failed. If the stream cannot be
 * made to wait, the call itself waits for the sides.
 * Fails: stream_synchronize; then nobody knows what still runs. */
CM_NODISCARD cm_status cm_job_abandon_sides(cm_job *job);

/* Allocate a block from the staging pool of the stream's device. If `waits` is true,
 * the allocation may wait for memory, except while the job's stream is being captured.
 * Fails: as cm_engine_alloc; CM_EINVALID if the device has no pool. */
CM_NODISCARD cm_status cm_job_alloc_block(cm_job *job, uint64_t nbytes,
                                          cm_stream *stream, bool waits,
                                          cm_block **out);
/* Set *out to the device address at which piece `number` is packed. The address lies in
 * job->block, which the first call allocates. If the allocation fails, each later call
 * fails in the same way without asking the pool again.
 * Fails: as cm_job_alloc_block. */
CM_NODISCARD cm_status cm_job_take_device_block(cm_job *job, uint64_t number,
                                                cm_address *out);
/* If the job can use room for two pieces, and the pool has plenty of room, allocate
 * job->block with room for two pieces and set job->has_pair. The call does not wait,
 * and a lack of memory is not a failure. */
CM_NODISCARD cm_status cm_job_try_pair(cm_job *job);
/* Free a block at the end of the job, and tell the pool which streams may still work on
 * it. This does nothing for NULL. */
void cm_job_free_block(const cm_job *job, cm_block *block);
/* Free the blocks of the job and of its sides, and release the streams of the sides. */
void cm_job_free_device_side(cm_job *job);
