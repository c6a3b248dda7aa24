/* SPDX-License-Identifier: Apache-2.0 */
/* What must be known of two ends beyond their regions before a copy is planned. */
#include "base/fresh_pages.h"
#include "transfer/engine/private.h"

cm_end_facts
cm_engine_facts_of_run(cm_engine *engine, cm_kind kind, const void *host,
                       uint64_t nbytes)
{
    cm_end_facts facts = {.locked = !cm_kind_is_pageable(kind), .whole = true};
    if (host != NULL && nbytes > 0) {
        bool locked = false;
        facts.whole =
            cm_registry_run(engine->registry, host, nbytes, &locked) == nbytes;
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
    return cm_engine_facts_of_run(
        engine, region->kind, (const char *)region->host + low, (uint64_t)(high - low));
}

bool
cm_engine_is_fresh(const cm_region *dst, const cm_region *src, cm_end_facts facts)
{
    cm_layout layout;
    return !facts.locked && cm_kind_is_pageable(dst->kind) && dst->host != NULL
           && cm_region_is_on_device(src) && cm_is_ok(cm_layout_init(dst, src, &layout))
           && layout.ndim == 0
           && cm_pages_are_fresh((char *)dst->host + layout.dst_offset,
                                 layout.run_nbytes);
}

cm_plan_options
cm_engine_plan_options(cm_engine *engine, const cm_copy_request *request,
                       cm_end_facts dst_facts)
{
    /* No stream orders what the host writes: the call returns once it is written. The
     * parts of a whole are waited for together. */
    bool in_call = request->stream != NULL && request->part_of == NULL;
    cm_plan_options options = {
        .may_wait = request->blocking || (in_call && !dst_facts.locked),
        .on_stream = request->stream != NULL && !request->blocking,
    };
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    if (cm_region_is_on_device(dst) && cm_region_is_on_device(src)
        && dst->device != src->device) {
        options.peers = cm_peer_access_look(&engine->peers, dst, src);
    }
    return options;
}
