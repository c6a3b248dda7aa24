/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/spread.h"

#include "transfer/engine/private.h"

/* Does it share its copy with others? */
static bool
may_share(const cm_region *dst, const cm_region *src)
{
    return cm_region_is_on_device(dst) && !cm_region_may_overlap(dst, src);
}

/* The first of those on `device` (-1: any) that share, one in a single run if there is
 * one. UINT32_MAX: none. */
static uint32_t
find_lead(const cm_region *const *dsts, uint32_t count, const cm_region *src,
          int device)
{
    uint32_t first = UINT32_MAX;
    for (uint32_t i = 0; i < count; i++) {
        if ((device >= 0 && dsts[i]->device != device) || !may_share(dsts[i], src)) {
            continue;
        }
        if (cm_region_is_c_contiguous(dsts[i])) {
            return i;
        }
        first = first == UINT32_MAX ? i : first;
    }
    return first;
}

static bool
has_strides_there(const cm_region *const *dsts, uint32_t count, const cm_region *src,
                  int device, const cm_region *wanted)
{
    for (uint32_t i = 0; i < count; i++) {
        if (dsts[i]->device == device && may_share(dsts[i], src)
            && cm_region_has_strides_of(dsts[i], wanted)) {
            return true;
        }
    }
    return false;
}

void
cm_engine_group_targets(cm_engine *engine, const cm_region *const *dsts,
                        uint32_t dst_count, const cm_region *src, uint32_t *lead)
{
    cm_end_facts facts = cm_engine_facts_of(engine, src);
    bool is_staged = !cm_region_is_on_device(src) && !(facts.locked && facts.whole);
    uint32_t first = find_lead(dsts, dst_count, src, -1);
    for (uint32_t i = 0; i < dst_count; i++) {
        int device = dsts[i]->device;
        lead[i] = i;
        if (!may_share(dsts[i], src)) {
            continue;
        }
        bool joins =
            is_staged && has_strides_there(dsts, dst_count, src, device, dsts[first]);
        lead[i] = joins ? first : find_lead(dsts, dst_count, src, device);
    }
}
