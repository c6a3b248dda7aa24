/* SPDX-License-Identifier: Apache-2.0 */
/* What the host does for a job whose runs are rows by their numbers
 * (plan/numbered_rows.h). pieces.h has the same for runs in a list, and calls these.
 *
 * Locks: none; these functions belong to the thread that runs the job, except
 * cm_numbered_move_part(), which any thread calls. */
#pragma once

#include "transfer/plan/numbered_rows.h"
#include "transfer/routes/ring.h"

/* The same as cm_many_share_locked() and cm_many_probe_pages(). */
CM_NODISCARD cm_status cm_numbered_share_locked(cm_job *job);
CM_NODISCARD cm_status cm_numbered_probe_pages(const cm_numbered_rows *rows);
/* Choose how threads copy the parts of `nbytes` bytes. */
cm_copy_way cm_numbered_choose_way(const cm_job *job, bool wide);
/* A cm_move_part as cm_many_move_part(). */
void cm_numbered_move_part(const void *context, const cm_layout *part, void *dst,
                           const void *src, bool wide);
