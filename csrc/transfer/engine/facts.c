/* SPDX-License-Identifier: Apache-2.0 */
/* What must be known of two ends beyond their regions before a copy is planned. */
#include "base/fresh_pages.h"
#include "transfer/engine/private.h"

cm_end_facts
cm_engine_facts_of(cm_engine *engine, const cm_region *region)
{
    int64_t low, high;
    cm_end_facts facts = {.locked = !cm_kind_is_pageable(region->kind), .whole = true};
    if (cm_region_is_on_device(region)) {
        return (cm_end_facts){.locked = true, .whole = true};
    }
    if (engine->registry == NULL || !cm_is_ok(cm_region_bounds(region, &low, &high))
        || low == high) {
        return facts;
    }
    bool locked = false;
    uint64_t nbytes = (uint64_t)(high - low);
    facts.whole = cm_registry_run(engine->registry, (const char *)region->host + low,
                                  nbytes, &locked)
                  == nbytes;
    facts.locked = facts.locked || (facts.whole && locked);
    return facts;
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

/* Emulated device memory has a second mapping, which is exported as memory of the host.
 */
static bool
overlaps_second_mapping(cm_runtime *rt, const cm_region *device, const cm_region *host)
{
    int64_t low, high;
    if (rt->host_alias == NULL || !cm_region_is_on_device(device)
        || cm_region_is_on_device(host)
        || !cm_is_ok(cm_region_bounds(device, &low, &high)) || low == high) {
        return false;
    }
    char *alias = cm_runtime_host_alias(rt, device->address + (uint64_t)low,
                                        (uint64_t)(high - low));
    if (alias == NULL) {
        return false;
    }
    cm_region mapped = *device;
    mapped.host = alias - low;
    mapped.address = 0;
    return cm_region_may_overlap(&mapped, host);
}

bool
cm_engine_may_overlap(cm_runtime *rt, const cm_region *dst, const cm_region *src)
{
    return cm_region_may_overlap(dst, src) || overlaps_second_mapping(rt, dst, src)
           || overlaps_second_mapping(rt, src, dst);
}

static bool
are_peers(const cm_region *dst, const cm_region *src)
{
    return cm_region_is_on_device(dst) && cm_region_is_on_device(src)
           && dst->device != src->device;
}

/* What is known of the way between them; nothing, unless they are on two devices. May
 * enable peer access. */
static cm_peer_facts
peer_facts_of(cm_engine *engine, const cm_region *dst, const cm_region *src)
{
    return are_peers(dst, src) ? cm_peer_access_look(&engine->peers, dst, src)
                               : (cm_peer_facts){0};
}

cm_plan_options
cm_engine_plan_options(cm_engine *engine, const cm_copy_request *request,
                       cm_end_facts dst_facts)
{
    /* No stream orders what the host writes: the call returns once it is written. The
     * parts of a whole are waited for together. */
    bool in_call = request->stream != NULL && request->part_of == NULL;
    return (cm_plan_options){
        .may_wait = request->blocking || (in_call && !dst_facts.locked),
        .on_stream = request->stream != NULL && !request->blocking,
        .peers = peer_facts_of(engine, &request->dst, &request->src),
    };
}
