/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/overlap.h"

uint64_t
cm_overlap_place(cm_runtime *rt, cm_address address, const void *host, uint64_t nbytes)
{
    cm_address at = address != 0 ? address : (uintptr_t)host;
    const void *alias = cm_runtime_host_alias(rt, at, nbytes);
    return alias != NULL ? (uintptr_t)alias : at;
}

cm_byte_span
cm_overlap_span(cm_runtime *rt, const cm_region *region)
{
    int64_t low = 0;
    int64_t high = 0;
    cm_ignore(cm_region_bounds(region, &low, &high)); /* checked by the plan */
    uint64_t nbytes = (uint64_t)(high - low);
    const char *host = region->host == NULL ? NULL : (const char *)region->host + low;
    uint64_t begin = cm_overlap_place(
        rt, region->address == 0 ? 0 : region->address + (uint64_t)low, host, nbytes);
    return (cm_byte_span){begin, begin + nbytes};
}

bool
cm_overlap_is_possible(cm_runtime *rt, const cm_region *dst, const cm_region *src)
{
    return cm_region_may_overlap(dst, src)
           || cm_byte_spans_meet(cm_overlap_span(rt, dst), cm_overlap_span(rt, src));
}
