/* SPDX-License-Identifier: Apache-2.0 */
/* Makes many copies that are asked for at once. Runs of bytes are gathered, so that one
 * launch of a kernel copies a whole table of them, or many of them go through one
 * page-locked block. Regions of any other form go as copies of their own. This file
 * knows nothing of Python.
 * Locks: as cm_engine_copy(). */
#pragma once

#include "transfer/engine/engine.h"
#include "transfer/plan/batch_plan.h"

typedef struct cm_many_request {
    cm_copy_request common; /* all but dst and src */
    /* Borrowed until the call returns; the call may change them. */
    cm_piece *pieces;
    uint64_t piece_count;
    const cm_piece_regions *others; /* borrowed until the call returns */
    uint64_t other_count;
    /* The caller knows that cm_many_find_conflicts() would find nothing, so that nobody
     * has to look. */
    bool is_apart;
} cm_many_request;

/* Set *out to whether a target touches another end, or shows bytes of a file that a
 * source shows through another mapping.
 * Fails: CM_ENOMEM; cm_file_maps_meet(). */
CM_NODISCARD cm_status cm_many_find_conflicts(cm_runtime *rt,
                                              const cm_many_request *request,
                                              bool *out);

/* Make all copies of the request, with one ticket, as cm_engine_copy() makes one. The
 * ticket is done when the last copy is.
 *
 * The copies may be made in any order and at the same time, unless one touches what
 * another writes. Then the outcome is as if each were made after those with lower
 * indices. Copies for which cm_plan_goes_via_host() is true go by way of the host. The
 * keeps are dropped once all copies are done.
 *
 * After a failure some copies may have been made, but no copy that has a higher index
 * than the failed one and touches what the failed one touches. Some copies may still be
 * under way. A blocking call waits for these unless it is interrupted. Otherwise *out
 * may be a ticket, which is done once they have ended, in whichever way.
 * Fails: as cm_engine_copy(). */
CM_NODISCARD cm_status cm_engine_copy_many(cm_engine *engine,
                                           const cm_many_request *request,
                                           cm_ticket **out);
