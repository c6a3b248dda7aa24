/* SPDX-License-Identifier: Apache-2.0 */
/* What must be known of two ends beyond their regions before a copy is planned. */
#include "transfer/engine/private.h"

cm_end_facts
cm_engine_facts_of_end(cm_engine *engine, const cm_piece_end *end, uint64_t nbytes)
{
    cm_end_facts facts = {.locked = !cm_kind_is_pageable(end->kind), .whole = true};
    if (!cm_piece_end_is_on_device(end) && nbytes > 0) {
        bool locked = false;
        facts.whole =
            cm_registry_run(engine->registry, end->host, nbytes, &locked) == nbytes;
        facts.locked = facts.locked || (facts.whole && locked);
    }
    return facts;
}

cm_end_facts
cm_engine_facts_of(cm_engine *engine, const cm_region *region)
{
    int64_t low = 0;
    int64_t high = 0;
    if (cm_region_is_on_device(region)) {
        return (cm_end_facts){.locked = true, .whole = true};
    }
    /* what is wrong with a region is said when the copy is planned */
    cm_ignore(cm_region_bounds(region, &low, &high));
    cm_piece_end end = {.host = (char *)region->host + low, .kind = region->kind};
    return cm_engine_facts_of_end(engine, &end, (uint64_t)(high - low));
}
