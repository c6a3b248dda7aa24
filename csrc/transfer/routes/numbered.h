/* SPDX-License-Identifier: Apache-2.0 */
/* This header has the host's work for a job that copies rows by their numbers
 * (plan/numbered_rows.h). pieces.h has such functions for runs in a list, and calls
 * these for rows.
 *
 * Locks: none; these functions belong to the thread that runs the job, except
 * cm_numbered_move_part(), which any thread calls. */
#pragma once

#include "transfer/device/rows_kernel.h"
#include "transfer/plan/numbered_rows.h"
#include "transfer/routes/ring.h"

/* The copy engine moves rows of this length or more between a slot and the device no
 * slower than a kernel does, since the slot has to wait for all of its bytes in any
 * case. */
enum { CM_NUMBERED_LONG_NBYTES = 64 << 10 };

/* Do for rows what cm_many_share_locked() and cm_many_probe_pages() do for pieces. */
CM_NODISCARD cm_status cm_numbered_share_locked(cm_job *job);
CM_NODISCARD cm_status cm_numbered_probe_pages(const cm_numbered_rows *rows);
/* Choose how threads copy the rows. With `wide` they write past the caches. The length
 * of the rows decides whether all threads help. */
cm_copy_way cm_numbered_choose_way(const cm_job *job, bool wide);
/* A cm_move_part that does the same as cm_many_move_part(). */
void cm_numbered_move_part(const void *context, const cm_layout *part, void *dst,
                           const void *src, bool wide);

/* True if the kernel of rows_kernel.h moves the rows of a slot between the slot and
 * their places on the device. It does so if these places lie apart and there are more
 * of them than one launch of the table kernel takes. */
bool cm_numbered_goes_by_kernel(cm_job *job, const cm_slot *s);
/* Queue the device's half of such a slot, whose bytes the device reaches at `there`.
 * `is_over_bus` says that they lie in host memory. Incomplete rows at the ends of the
 * slot are added to the table.
 * Fails: as cm_rows_launch(), cm_table_add(). */
CM_NODISCARD cm_status cm_numbered_launch(cm_job *job, const cm_slot *s,
                                          cm_address there, bool is_over_bus,
                                          cm_table *table);
