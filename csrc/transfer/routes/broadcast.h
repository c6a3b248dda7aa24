/* SPDX-License-Identifier: Apache-2.0 */
/* A broadcast copies one source to several targets. This header has the further targets
 * of such a request, and the steps that a job takes for them.
 *
 * Locks: none; these functions belong to the thread that runs the job. */
#pragma once

#include "transfer/routes/ring.h"

/* Further targets of a copy in the background whose own target is device memory. All
 * further targets have the shape of that target. There is one ticket for the copies to
 * all of them.
 *
 * A further target on the device of the copy's own target is copied from that target. A
 * target on another device needs a source that goes through page-locked blocks. Each
 * block is then sent to that device as well, at the same time. The first target on each
 * such device must have the strides of the copy's own target, and others on that device
 * are copied from the first. */
typedef struct cm_broadcast {
    const cm_region *dsts; /* borrowed for the call */
    uint32_t dst_count;
} cm_broadcast;

/* Set job->targets, before the copy is planned. If the source must be sent to other
 * devices, job->has_more_targets is set too, and the plan has to go through page-locked
 * blocks. The functions below are called only for jobs with further targets.
 * Fails: CM_EINVALID (an end that is not where it should be), CM_ENOMEM. */
CM_NODISCARD cm_status cm_targets_create(cm_job *job, const cm_copy_request *request);
/* Check the plan.
 * Fails: CM_EINVALID (a source that cannot go to other devices). */
CM_NODISCARD cm_status cm_targets_check(const cm_job *job);
/* Open the streams of the other devices. Their work comes after what the job has waited
 * for. Called once. */
CM_NODISCARD cm_status cm_targets_begin(cm_job *job);
/* Queue the copies of a slot to the other devices, as the job did for its own device,
 * and record the slot's event after all of them. */
CM_NODISCARD cm_status cm_targets_send(cm_job *job, cm_slot *s);
/* Queue the copies from target to target on one device, once all else is queued, and
 * make the job's stream wait for everything. */
CM_NODISCARD cm_status cm_targets_end(cm_job *job);
