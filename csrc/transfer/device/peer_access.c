/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/device/peer_access.h"

#include "pool/scope.h"

enum {
    STEP_NBYTES = 2 << 20, /* the smallest piece that memory is mapped in */
    MAX_STEPS = 64,        /* of regions with gaps so much is asked about */
};

void
cm_peer_access_init(cm_peer_access *reach, cm_runtime *rt)
{
    reach->rt = rt;
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        atomic_init(&reach->asked[device], 0);
        atomic_init(&reach->able[device], 0);
        atomic_init(&reach->enabled[device], 0);
    }
    atomic_init(&reach->denied, false);
}

static bool
may_use(cm_runtime *rt, cm_address address, int wanted)
{
    int access = 0;
    return cm_is_ok(cm_rt_pointer_access(rt, address, &access))
           && (access & wanted) == wanted;
}

/* A device that may use some memory of another. */
typedef struct claim {
    int device;
    const cm_region *region;
    int wanted;
    bool all; /* a kernel may come to use it: the first byte is not enough to know */
} claim;

/* Memory that was mapped in pieces need not be open all over. */
static bool
may_use_region(cm_runtime *rt, const claim *claimed)
{
    int64_t low, high;
    const cm_region *region = claimed->region;
    int wanted = claimed->wanted;
    if (!cm_is_ok(cm_region_bounds(region, &low, &high)) || low == high) {
        return false;
    }
    if (!claimed->all) {
        return may_use(rt, region->address + (uint64_t)low, wanted);
    }
    uint64_t span = (uint64_t)high - (uint64_t)low;
    uint64_t step = span / MAX_STEPS > STEP_NBYTES ? span / MAX_STEPS : STEP_NBYTES;
    cm_address first = region->address + (uint64_t)low;
    for (uint64_t at = 0; at < span; at += step) {
        if (!may_use(rt, first + at, wanted)) {
            return false;
        }
    }
    return may_use(rt, first + span - 1, wanted);
}

/* Once for each pair. What fails stays as it is: the runtime copies all the same. */
static void
open_pair(cm_peer_access *reach, int device, int owner)
{
    uint64_t bit = UINT64_C(1) << owner;
    int can = 0;
    cm_scope scope;
    if (!cm_is_ok(cm_rt_peer_can_access(reach->rt, device, owner, &can))) {
        return; /* asked again the next time */
    }
    atomic_fetch_or(&reach->able[device], can != 0 ? bit : 0);
    /* Enabling is forbidden while any thread captures in the global mode, unless this
     * thread says that it knows what it does. */
    if (can != 0 && cm_is_ok(cm_scope_enter(reach->rt, device, &scope))) {
        cm_status status = cm_rt_peer_enable(reach->rt, owner);
        bool enabled = cm_is_ok(status) || status.code == CM_CUDA_PEER_ENABLED;
        atomic_fetch_or(&reach->enabled[device], enabled ? bit : 0);
        cm_scope_leave(&scope);
    }
    atomic_fetch_or(&reach->asked[device], bit);
}

static bool
ask(cm_peer_access *reach, const claim *claimed)
{
    cm_device_guard guard;
    if (!cm_is_ok(cm_device_enter(reach->rt, claimed->device, &guard))) {
        return false;
    }
    bool may = may_use_region(reach->rt, claimed);
    cm_device_leave(reach->rt, &guard);
    return may;
}

static bool
is_asked(const cm_peer_access *reach, int device, int owner)
{
    return (atomic_load(&reach->asked[device]) >> owner & 1) != 0;
}

/* The driver calls cudaMalloc's memory open whether access is enabled or not, so that
 * comes first. */
static bool
reaches(cm_peer_access *reach, const claim *claimed)
{
    int owner = claimed->region->device;
    if (!is_asked(reach, claimed->device, owner)) {
        open_pair(reach, claimed->device, owner);
    }
    return (atomic_load(&reach->enabled[claimed->device]) >> owner & 1) != 0
           && ask(reach, claimed);
}

/* Known never to reach it. */
static bool
is_apart(const cm_peer_access *reach, int device, int owner)
{
    return is_asked(reach, device, owner)
           && (atomic_load(&reach->able[device]) >> owner & 1) == 0;
}

cm_peer_facts
cm_peer_access_look(cm_peer_access *reach, const cm_region *dst, const cm_region *src)
{
    int to = dst->device;
    int from = src->device;
    bool are_devices =
        to >= 0 && from >= 0 && to < CM_MAX_DEVICES && from < CM_MAX_DEVICES;
    if (!are_devices || atomic_load(&reach->denied)) {
        return (cm_peer_facts){.apart = are_devices};
    }
    int64_t count;
    if (!cm_is_ok(cm_region_count(dst, &count)) || count == 0) {
        return (cm_peer_facts){.apart = false};
    }
    bool all = !cm_region_is_c_contiguous(dst) || !cm_region_is_c_contiguous(src);
    claim pull = {to, src, CM_ACCESS_READ, all};
    claim push = {from, dst, CM_ACCESS_READ | CM_ACCESS_WRITE, all};
    cm_peer_facts facts = {.pulls = reaches(reach, &pull),
                           .pushes = reaches(reach, &push)};
    facts.apart = is_apart(reach, to, from) && is_apart(reach, from, to);
    return facts;
}
