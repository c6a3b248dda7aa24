/* SPDX-License-Identifier: Apache-2.0 */
/* Says what a copy would do, and makes no copy. */
#pragma once

#include "transfer/engine/engine.h"
#include "transfer/plan/plan.h"

typedef struct cm_explanation {
    cm_plan plan;
    cm_tuning tuning; /* as cm_tuning_resolve() left it */
    cm_end_facts dst_facts;
    cm_end_facts src_facts;
    /* The calling thread makes the copy with few calls of the runtime. */
    bool is_short;
    bool is_bounced; /* the short copy goes through a page-locked block of its own */
    /* The ends overlap, so the source is read as a whole first. */
    bool overlaps;
    bool is_broadcast;     /* the source is repeated */
    uint64_t piece_nbytes; /* the size of the largest piece */
    /* How many threads of the host would work on a piece; 0 if the host has no part in
     * it. */
    uint32_t thread_count;
    /* The axis of the target along which the copy is cut; -1 if the copy is one
     * piece. */
    int axis;
} cm_explanation;

/* Describe what cm_engine_copy() would do with the request now. It makes no copy and
 * keeps no memory. If the request has a stream, the function asks whether the stream is
 * idle.
 * Fails: as cm_plan_init(); CM_ENOMEM. */
CM_NODISCARD cm_status cm_engine_explain(cm_engine *engine,
                                         const cm_copy_request *request,
                                         cm_explanation *out);
