/* SPDX-License-Identifier: Apache-2.0 */
/* This header has the steps of a job that moves many runs of bytes, while other jobs
 * move one region.
 *
 * The ring moves bytes through slots of page-locked memory, and it expects one range of
 * bytes. So the runs are numbered as if they lay one behind the other in a *packed
 * space*, each aligned as its address on the device is. For example, runs of 100, 8 and
 * 20 bytes may begin at 0, 112 and 128. The packed space is the layout of the job's
 * plan, and the ring cuts it into slots without regard to where a run ends. The
 * functions here find the runs that belong to a slot.
 *
 * There are no locks. The functions belong to the thread that runs the job, except
 * cm_many_move_part(), which any thread may call. */
#pragma once

#include "transfer/plan/batch_plan.h"
#include "transfer/routes/ring.h"

/* Make the plan of a job that has `many`, which is a list of pieces or of rows. */
void cm_many_plan(cm_job *job);
/* Find out which of the memory that the runs are copied from and to is page-locked, and
 * keep that memory page-locked until the ticket is done.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_many_share_locked(cm_job *job);

/* Make the plan of a job that has rows for a kernel (kernel_rows.h). If these rows are
 * copied from or to host memory, keep that memory page-locked.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_many_plan_rows(cm_job *job);

/* If a long run is copied from or to a mapped file, check that the file still has the
 * pages of the run. This is called before the host touches ordinary memory.
 * Fails: CM_EFAULT. */
CM_NODISCARD cm_status cm_many_probe_pages(const cm_many *many);
/* The place of a run is where its bytes lie outside the ring: their target on the way
 * up, and their source on the way down. This function returns how many runs a slot has
 * if all their places are device memory, or 0 if a place is elsewhere. If the job has
 * rows by their numbers (numbered_rows.h), it does not count further than 2. If one run
 * fills the whole slot, *whole is set to the address of its place, and otherwise to
 * 0. */
uint64_t cm_many_count_device_runs(const cm_many *many, const cm_slot *s,
                                   cm_address *whole);
/* Return false if the driver lacks the compiler for the kernel that moves a slot's
 * runs. Then each long run gets a copy of its own, and short ones fail. */
bool cm_many_can_load_kernel(cm_job *job);
/* Queue the copies between a slot and the places of its runs. On the way up they go
 * from the slot to the places, and on the way down from the places to the slot. If
 * `block` is not 0, it is the address of device memory that is used instead of the
 * slot.
 * Fails: if copy_async or the launch of the kernel fails; with ring->refused, if a
 * kernel would have to reach a slot of ordinary memory. */
CM_NODISCARD cm_status cm_many_move_slot(cm_job *job, const cm_slot *s,
                                         cm_address block);
/* Copy a part of a slot on the host, between the block of the slot and the places of
 * the slot's runs. This is a cm_move_part, and `context` is the job. Pages of mapped
 * files are populated first. A failure, such as a file that was cut short, is stored in
 * job->lost_error. */
void cm_many_move_part(const void *context, const cm_layout *part, void *dst,
                       const void *src, bool wide);
