/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/plan.h"

#include "transfer/plan/ring_policy.h"

bool
cm_plan_is_packed_there(const cm_layout *layout, bool up)
{
    cm_layout core;
    int repeat_count = cm_layout_get_core(layout, &core);
    if (up) {
        return repeat_count == 0 && cm_layout_is_packed(&core, CM_DST);
    }
    return cm_layout_is_packed(&core, CM_SRC);
}

/* Both ends of the copy lie in memory of the host. Find the device that can make the
 * copy on a stream, between the earlier and the later work of that stream. Such a
 * device reaches both ends, or it reaches one end while the host reads or writes the
 * other. Returns -1 if the host makes the copy alone. The runtime's own copy does not
 * serve here, since it would block the caller until the stream has done all of its
 * earlier work. */
static int
find_host_device(const cm_plan_ends *ends)
{
    const cm_region *dst = ends->dst;
    const cm_region *src = ends->src;
    bool on_stream = ends->options->on_stream && !ends->options->converts;
    bool reaches_dst = on_stream && ends->dst_facts.locked && dst->address != 0;
    bool reaches_src = on_stream && ends->src_facts.locked && src->address != 0;
    if (reaches_dst && reaches_src && dst->device != src->device) {
        return -1;
    }
    if (reaches_dst) {
        return dst->device;
    }
    return reaches_src ? src->device : -1;
}

static void
find_devices(cm_plan *plan, const cm_plan_ends *ends)
{
    bool dst_on_device = cm_region_is_on_device(ends->dst);
    bool src_on_device = cm_region_is_on_device(ends->src);
    if (dst_on_device) {
        plan->device = ends->dst->device;
    }
    else if (src_on_device) {
        plan->device = ends->src->device;
    }
    else {
        plan->device = find_host_device(ends);
    }
    plan->src_device = src_on_device ? ends->src->device : plan->device;
}

/* Set the route, and how many pieces the copy is cut into, which depends on the
 * route. */
static void
choose_route(cm_plan *plan, const cm_plan_ends *ends)
{
    plan->row = cm_route_choose(plan, ends);
    if (plan->row->uses_ring || plan->row->crosses) {
        cm_ring_policy_init(plan, ends->options->tuning);
        return;
    }
    plan->is_cached = false;
    plan->piece_nbytes = plan->nbytes;
    plan->piece_count = 1;
    plan->slot_count = 1;
}

void
cm_plan_choose_again(cm_plan *plan, const cm_region *dst, const cm_region *src,
                     cm_end_facts dst_facts, cm_end_facts src_facts,
                     cm_plan_options options)
{
    cm_plan_ends ends = {dst, src, dst_facts, src_facts, &options};
    if (plan->rearranges_on_device) {
        /* The route that was chosen before put the axes of the layout in the order of
         * the source. The choice of a route expects them in the order of the target. */
        cm_layout_sort(&plan->layout, CM_DST);
    }
    choose_route(plan, &ends);
}

void
cm_plan_pack_source(cm_plan *plan, const cm_region *dst, const cm_region *src,
                    cm_end_facts dst_facts, cm_end_facts src_facts,
                    cm_plan_options options)
{
    cm_plan_ends ends = {dst, src, dst_facts, src_facts, &options};
    cm_layout repeats;
    cm_layout_take_repeats(&plan->layout, &repeats);
    cm_layout_pack(&plan->layout, CM_SRC);
    cm_layout_put_repeats(&plan->layout, &repeats);
    choose_route(plan, &ends);
}

/* True if the device should convert an upload. Then the link carries the elements of
 * the source, which are shorter than those of the target. For a short copy, launching
 * the kernel costs more than the link saves. The kernel writes floats, so each element
 * of the target must be aligned as a float is. */
static bool
should_convert_on_device(const cm_plan *plan, const cm_region *dst,
                         const cm_region *src)
{
    enum { LEAST_NBYTES = 1 << 20 };
    uint64_t bits = dst->address + (uint64_t)plan->layout.offset[CM_DST];
    for (int axis = 0; axis < plan->layout.ndim; axis++) {
        bits |= (uint64_t)plan->layout.axes[axis].stride[CM_DST];
    }
    return cm_region_is_on_device(dst) && !cm_region_is_on_device(src)
           && plan->nbytes >= LEAST_NBYTES
           && bits % cm_number_nbytes(CM_DEVICE_CONVERTS_TO) == 0;
}

/* True if each element lies at an address where one load or store can move it. */
static bool
is_aligned(const cm_region *region)
{
    uint64_t bits = region->address;
    for (int axis = 0; axis < region->ndim; axis++) {
        bits |= region->shape[axis] > 1 ? (uint64_t)region->strides[axis] : 0;
    }
    return bits % (uint64_t)region->itemsize == 0;
}

/* True if one kernel can convert the elements without help of the host. This is so if
 * both ends lie on one device, which runs the kernel, and are aligned. */
static bool
can_convert_within(const cm_region *dst, const cm_region *src)
{
    return dst->device == src->device && is_aligned(dst) && is_aligned(src);
}

bool
cm_plan_goes_via_host(cm_runtime *rt, const cm_region *dst, const cm_region *src,
                      const cm_convert *convert)
{
    bool between = cm_region_is_on_device(dst) && cm_region_is_on_device(src);
    if (convert == NULL || !cm_convert_is_on(convert) || !between) {
        return false;
    }
    return !cm_convert_has_kernel(convert) || !can_convert_within(dst, src)
           || cm_overlap_is_possible(rt, dst, src);
}

static bool
is_device(int device)
{
    return device >= 0 && device < CM_MAX_DEVICES;
}

cm_status
cm_plan_init(cm_plan *plan, const cm_region *dst, const cm_region *src,
             cm_end_facts dst_facts, cm_end_facts src_facts, cm_plan_options options)
{
    cm_plan_ends ends = {dst, src, dst_facts, src_facts, &options};
    cm_layout core;
    *plan = (cm_plan){.device = -1, .src_device = -1, .target = (uintptr_t)dst->host};
    bool down = cm_region_is_on_device(src);
    CM_TRY(options.converts
               ? cm_layout_init_items(dst, src, down ? src->itemsize : dst->itemsize,
                                      &plan->layout)
               : cm_layout_init(dst, src, &plan->layout));
    (void)cm_layout_get_core(&plan->layout, &core);
    plan->nbytes = cm_layout_nbytes(&core);
    if (plan->nbytes == 0) {
        return cm_ok();
    }
    bool between = down && cm_region_is_on_device(dst);
    bool within = between && options.kernel_can_convert && can_convert_within(dst, src);
    if (within
        || (options.kernel_can_convert && should_convert_on_device(plan, dst, src))) {
        uint64_t counted = (uint64_t)(down ? src->itemsize : dst->itemsize);
        plan->converts_on_device = true;
        plan->nbytes = plan->nbytes / counted * (uint64_t)src->itemsize;
        CM_TRY(cm_layout_init_items(dst, src, src->itemsize, &plan->layout));
    }
    if ((options.converts && between && !within) || cm_region_copy_address(dst) == 0
        || cm_region_copy_address(src) == 0) {
        return cm_fail(CM_EINVALID, 0);
    }
    if (!options.converts && cm_region_is_same(dst, src)) {
        return cm_ok();
    }
    find_devices(plan, &ends);
    bool by_device = plan->device != -1 || cm_plan_has_device_end(&ends);
    if (by_device && !(is_device(plan->device) && is_device(plan->src_device))) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)plan->device);
    }
    choose_route(plan, &ends);
    return cm_ok();
}
