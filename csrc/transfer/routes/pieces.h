/* SPDX-License-Identifier: Apache-2.0 */
/* What a job does that moves many runs of bytes instead of one region: the parts of its
 * steps that differ. Its plan's layout is the packed space of the runs. Locks: none. */
#pragma once

#include "transfer/plan/batch_plan.h"
#include "transfer/routes/ring.h"

/* The plan, whose layout is the packed space. */
void cm_many_plan(cm_job *job);
/* What is page-locked of its ends stays so until the ticket is done. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_many_share_locked(cm_job *job);

/* Before the host touches ordinary memory of long runs: see that what is mapped there
 * still is. Fails: CM_EFAULT. */
CM_NODISCARD cm_status cm_many_look(const cm_many *many);
/* On the way up: does the slot hold several runs, all for memory of the device? */
bool cm_many_can_go_by_block(const cm_many *many, const cm_slot *s);
/* On the way up, queue what lies in a slot, or already in memory of the device
 * (`block`, else 0), to where it belongs; on the way down, what belongs in the slot. */
CM_NODISCARD cm_status cm_many_move_slot(cm_job *job, const cm_slot *s,
                                         cm_address block);
/* The host's part of it: a cm_move_part whose context is the job. Pieces of mapped
 * files are populated first; what of them is gone is the job's failure. */
void cm_many_move_part(const void *context, const cm_layout *part, void *dst,
                       const void *src, bool wide);
