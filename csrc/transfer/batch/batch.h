/* SPDX-License-Identifier: Apache-2.0 */
/* Many copies asked for at once: runs of bytes, of which a whole table goes with one
 * launch or through one page-locked block, and regions of any other form. Knows nothing
 * of Python.
 * Locks: as cm_engine_copy. */
#pragma once

#include "transfer/engine/engine.h"
#include "transfer/plan/batch_plan.h"

typedef struct cm_many_request {
    cm_copy_request common; /* all but dst and src */
    cm_piece *pieces;       /* borrowed until the call returns; may be changed */
    uint64_t piece_count;
    const cm_piece_regions *others; /* borrowed until the call returns */
    uint64_t other_count;
} cm_many_request;

/* As cm_engine_copy for all of them together: one ticket, which is done when the last
 * is; that of a call which failed while some were under way, not NULL, is done when
 * these are, whatever came of them. They may be made in any order and at the same time
 * unless one touches what another writes: then it is as if each were made after those
 * with lower indices. What cm_plan_is_far() goes by way of the host. `keep` is dropped
 * once all are done. On failure some may have been made, none with a higher index that
 * touches what failed, and some may still be:
 * a blocking call waits for them unless it is interrupted. Fails: as
 * cm_engine_copy. */
CM_NODISCARD cm_status cm_engine_copy_many(cm_engine *engine,
                                           const cm_many_request *request,
                                           cm_ticket **out);
