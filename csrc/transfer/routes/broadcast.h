/* SPDX-License-Identifier: Apache-2.0 */
/* One source, several targets: what a copy is asked for beyond one target, and what a
 * job does for its further ones. Locks: none; of the thread that runs the job. */
#pragma once

#include "transfer/routes/ring.h"

/* Further targets of a copy in the background whose own target is device memory; all
 * have its shape. One on the same device is copied from it there. Where the source goes
 * through page-locked blocks, one on another device gets each block as well, at the
 * same time, and must have the target's strides; others on that device are then copied
 * from it. The ticket is that of all. */
typedef struct cm_broadcast {
    const cm_region *dsts; /* borrowed for the call */
    uint32_t dst_count;
} cm_broadcast;

/* Those below are called for jobs that have further targets (job->targets != NULL), and
 * the first sets job->targets, before the copy is planned: where other devices are to
 * be sent to, it has to go through page-locked blocks (job->has_more_targets).
 * Fails: CM_EINVALID (an end that is not where it should be), CM_ENOMEM. */
CM_NODISCARD cm_status cm_targets_create(cm_job *job, const cm_copy_request *request);
/* Once it is planned. Fails: CM_EINVALID (a source that cannot go to other devices). */
CM_NODISCARD cm_status cm_targets_check(const cm_job *job);
/* The streams of other devices come after what the job has waited for. Once. */
CM_NODISCARD cm_status cm_targets_begin(cm_job *job);
/* Queue the slot's bytes for the other devices, as the job did for its own; the slot's
 * event tells of all. */
CM_NODISCARD cm_status cm_targets_send(cm_job *job, cm_slot *s);
/* All is queued but copies on the same device; the job's stream comes last. */
CM_NODISCARD cm_status cm_targets_end(cm_job *job);
