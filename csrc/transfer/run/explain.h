/* SPDX-License-Identifier: Apache-2.0 */
/* What a copy would do, without doing it. */
#pragma once

#include "transfer/engine/engine.h"
#include "transfer/plan/plan.h"

typedef struct cm_explanation {
    cm_plan plan;
    cm_tuning tuning; /* resolved */
    cm_end_facts dst_facts;
    cm_end_facts src_facts;
    bool is_short;         /* made by the calling thread with few runtime calls */
    bool is_bounced;       /* ... through a page-locked block of its own */
    bool overlaps;         /* the source is read whole first */
    bool is_broadcast;     /* the source is repeated */
    uint64_t piece_nbytes; /* of the largest piece, as it is cut */
    uint32_t thread_count; /* of the host that work on a piece; 0: none does */
    int axis;              /* of the target, along which it is cut; -1: one piece */
} cm_explanation;

/* What cm_engine_copy() would do with the request now: makes no copy, and keeps no
 * memory. Asks the stream, if there is one, whether it is idle. Fails: as cm_plan_init,
 * and for want of the host's memory. */
CM_NODISCARD cm_status cm_engine_explain(cm_engine *engine,
                                         const cm_copy_request *request,
                                         cm_explanation *out);
