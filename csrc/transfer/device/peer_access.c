/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/device/peer_access.h"

#include "runtime/scope.h"

enum {
    STEP_NBYTES = 2 << 20, /* the smallest piece that memory is mapped in */
    MAX_STEPS = 64,        /* a long region is cut into about this many steps */
};

static bool
may_use(cm_runtime *rt, cm_address address, int wanted)
{
    int access = 0;
    return cm_is_ok(cm_rt_pointer_access(rt, address, &access))
           && (access & wanted) == wanted;
}

/* True if the device of the current context may use the region in the way that `wanted`
 * (CM_ACCESS_…) says. The driver answers for one address at a time. If memory was
 * mapped in pieces, perhaps only some of the pieces are open to the device. So if `all`
 * is true, because a kernel may come to use the region, the driver is asked about one
 * address in each step of the region and about its last byte. Otherwise the driver is
 * asked about the first byte only. */
static bool
may_use_region(cm_runtime *rt, const cm_region *region, int wanted, bool all)
{
    int64_t low, high;
    if (!cm_is_ok(cm_region_bounds(region, &low, &high)) || low == high) {
        return false;
    }
    uint64_t span = (uint64_t)high - (uint64_t)low;
    uint64_t step = span / MAX_STEPS > STEP_NBYTES ? span / MAX_STEPS : STEP_NBYTES;
    cm_address first = region->address + (uint64_t)low;
    bool may = may_use(rt, first, wanted);
    for (uint64_t at = step; all && may && at < span; at += step) {
        may = may_use(rt, first + at, wanted);
    }
    return may && (!all || may_use(rt, first + span - 1, wanted));
}

static bool
has(const _Atomic uint64_t *bits, int device, int owner)
{
    return (atomic_load(&bits[device]) >> owner & 1) != 0;
}

bool
cm_peer_access_is_enabled(const cm_peer_access *access, int device, int other)
{
    return !atomic_load(&access->denied)
           && (has(access->enabled, device, other)
               || has(access->enabled, other, device));
}

/* Let `device` into the memory of `owner`, if the driver can do that. This is tried
 * once for each pair. If it fails, the pair stays without access. */
static void
open_pair(cm_peer_access *access, int device, int owner)
{
    uint64_t bit = UINT64_C(1) << owner;
    int can = 0;
    cm_scope scope;
    if (!cm_is_ok(cm_rt_peer_can_access(access->rt, device, owner, &can))) {
        return; /* the next call asks again */
    }
    /* While any thread captures a stream in the global mode, the runtime refuses to
     * enable access, unless the calling thread is in the relaxed mode. */
    if (can != 0
        && cm_is_ok(cm_scope_enter(access->rt, device, CM_CAPTURE_RELAXED, &scope))) {
        cm_status status = cm_rt_peer_enable(access->rt, owner);
        bool enabled = cm_is_ok(status) || status.code == CM_CUDA_PEER_ENABLED;
        atomic_fetch_or(&access->enabled[device], enabled ? bit : 0);
        cm_scope_leave(&scope);
    }
    atomic_fetch_or(&access->asked[device], bit);
}

/* True if `device` may use the region, which is memory of another device. The driver
 * says that memory of cudaMalloc is open even while access is not enabled. So the
 * driver's answer counts only once access has been enabled. */
static bool
reaches(cm_peer_access *access, int device, const cm_region *region, int wanted,
        bool all)
{
    cm_device_guard guard;
    if (!has(access->asked, device, region->device)) {
        open_pair(access, device, region->device);
    }
    if (!has(access->enabled, device, region->device)
        || !cm_is_ok(cm_device_enter(access->rt, device, &guard))) {
        return false;
    }
    bool may = may_use_region(access->rt, region, wanted, all);
    cm_device_leave(access->rt, &guard);
    return may;
}

/* True if it is known that `device` cannot be let into the memory of `owner`. */
static bool
is_apart(const cm_peer_access *access, int device, int owner)
{
    return has(access->asked, device, owner) && !has(access->enabled, device, owner);
}

cm_peer_facts
cm_peer_access_find(cm_peer_access *access, const cm_region *dst, const cm_region *src,
                    bool all)
{
    int to = dst->device;
    int from = src->device;
    bool are_devices =
        to >= 0 && from >= 0 && to < CM_MAX_DEVICES && from < CM_MAX_DEVICES;
    if (!are_devices || atomic_load(&access->denied)) {
        return (cm_peer_facts){.apart = are_devices};
    }
    int64_t count;
    if (!cm_is_ok(cm_region_count(dst, &count)) || count == 0) {
        return (cm_peer_facts){.apart = false};
    }
    cm_peer_facts facts = {.pulls = reaches(access, to, src, CM_ACCESS_READ, all)};
    facts.pushes = reaches(access, from, dst, CM_ACCESS_READ_WRITE, all);
    facts.apart = is_apart(access, to, from) && is_apart(access, from, to);
    return facts;
}
