/* SPDX-License-Identifier: Apache-2.0 */
/* What differs in the steps of a job that moves many runs of bytes in place of one
 * region. Example: three runs of 100, 8 and 20 bytes. Laid one behind the other, each
 * aligned, they make a packed space of bytes; that space is the layout of the plan, and
 * the ring cuts it into pieces without regard to where a run ends.
 *
 * Locks: none; these functions belong to the thread that runs the job, except
 * cm_many_move_part(), which any thread calls. */
#pragma once

#include "transfer/plan/batch_plan.h"
#include "transfer/routes/ring.h"

/* Make the plan of the job. */
void cm_many_plan(cm_job *job);
/* Keep memory at the ends of the runs that is page-locked now page-locked until the
 * ticket is done.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_many_share_locked(cm_job *job);

/* Make the plan of a job that has rows for a kernel (kernel_rows.h), and keep the host
 * memory at their ends page-locked.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_many_plan_rows(cm_job *job);

/* Check that the pages of mapped files at the ends of long runs are still there, before
 * the host touches ordinary memory.
 * Fails: CM_EFAULT. */
CM_NODISCARD cm_status cm_many_probe_pages(const cm_many *many);
/* Count the runs of a slot that lie in memory of the device. Returns 0 if one of them
 * lies elsewhere. With rows by their numbers the count ends at 2. Sets *whole to where
 * the run begins that fills the slot, or to 0 if none does. */
uint64_t cm_many_count_device_runs(const cm_many *many, const cm_slot *s,
                                   cm_address *whole);
/* True unless the driver lacks the compiler for the kernel that moves a slot's runs.
 * Without it each long run is copied by itself, and short ones fail. */
bool cm_many_can_load_kernel(cm_job *job);
/* Queue the device's half of a slot. On the way up the bytes go from the slot to where
 * they belong, and on the way down from their places to the slot. If `block` is not 0,
 * it is device memory that stands in for the slot.
 * Fails: copy_async, the launch of the kernel; with ring->refused, if a kernel would
 * have to reach a slot of ordinary memory. */
CM_NODISCARD cm_status cm_many_move_slot(cm_job *job, const cm_slot *s,
                                         cm_address block);
/* A cm_move_part that makes the host's half; `context` is the job. Pages of mapped
 * files are populated first. A failure, such as a file that was cut short, is stored in
 * job->lost_error. */
void cm_many_move_part(const void *context, const cm_layout *part, void *dst,
                       const void *src, bool wide);
