/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/plan.h"

#include <stddef.h>
#include <stdlib.h>

#include "transfer/plan/ring_policy.h"

/* What a plan is made from. */
typedef struct ends {
    const cm_region *dst;
    const cm_region *src;
    cm_end_facts dst_facts;
    cm_end_facts src_facts;
    const cm_plan_options *options;
} ends;

static bool
is_same_place(const ends *e, const cm_layout *layout)
{
    if (cm_region_copy_address(e->dst) != cm_region_copy_address(e->src)
        || cm_region_is_on_device(e->dst) != cm_region_is_on_device(e->src)
        || layout->offset[CM_DST] != layout->offset[CM_SRC]) {
        return false;
    }
    for (int axis = 0; axis < layout->ndim; axis++) {
        if (layout->axes[axis].stride[CM_DST] != layout->axes[axis].stride[CM_SRC]) {
            return false;
        }
    }
    return true;
}

static uint64_t
payload_of(const cm_layout *layout)
{
    cm_layout core = *layout;
    cm_layout repeats;
    cm_layout_take_repeats(&core, &repeats);
    return cm_layout_nbytes(&core);
}

static bool
is_2d(const cm_layout *layout, const cm_tuning *tuning)
{
    if (layout->ndim != 1 || layout->run_nbytes < tuning->row_min_nbytes) {
        return false;
    }
    int64_t run = (int64_t)layout->run_nbytes;
    const int64_t *pitch = layout->axes[0].stride;
    return pitch[CM_DST] >= run && pitch[CM_SRC] >= run && pitch[CM_DST] <= CM_PITCH_MAX
           && pitch[CM_SRC] <= CM_PITCH_MAX;
}

cm_route
cm_plan_staged_route(const cm_layout *layout, bool up)
{
    cm_layout core = *layout;
    cm_layout repeats;
    cm_layout_take_repeats(&core, &repeats);
    bool packed = up ? repeats.ndim == 0 && cm_layout_is_packed(&core, CM_DST)
                     : cm_layout_is_packed(&core, CM_SRC);
    return packed ? CM_ROUTE_STAGED : CM_ROUTE_STAGED_KERNEL;
}

/* The route for a layout whose ends lie on one device, or one there and one on the
 * host. */
static cm_route
choose_route(const cm_plan *plan, const ends *e)
{
    const cm_tuning *tuning = e->options->tuning;
    bool up = cm_region_is_on_device(e->dst);
    bool locked = e->dst_facts.locked && e->src_facts.locked;
    if (plan->layout.ndim == 0) {
        uint64_t least = up ? tuning->staged_up_nbytes : tuning->staged_down_nbytes;
        /* Pages come into being where they are written first: several threads do more,
         * whoever is faster else. */
        least = e->dst_facts.fresh && tuning->thread_count != 1 ? 0 : least;
        bool direct =
            locked || (e->options->may_wait && plan->layout.run_nbytes < least);
        return direct ? CM_ROUTE_DIRECT : CM_ROUTE_STAGED;
    }
    if (is_2d(&plan->layout, tuning) && locked && e->dst_facts.whole
        && e->src_facts.whole) {
        return CM_ROUTE_DIRECT_2D;
    }
    if (locked && e->dst->address != 0 && e->src->address != 0) {
        return CM_ROUTE_KERNEL;
    }
    return cm_plan_staged_route(&plan->layout, up);
}

/* Between host and host: can a device that works in a stream's order reach both?
 * The runtime's own copy would keep the calling thread until the stream came to it. */
static void
choose_host_route(cm_plan *plan, const ends *e)
{
    bool on_stream = e->options->on_stream;
    bool reaches_dst = on_stream && e->dst_facts.locked && e->dst->address != 0;
    bool reaches_src = on_stream && e->src_facts.locked && e->src->address != 0;
    plan->route = CM_ROUTE_HOST;
    if ((!reaches_dst && !reaches_src)
        || (reaches_dst && reaches_src && e->dst->device != e->src->device)) {
        return;
    }
    plan->device = reaches_dst ? e->dst->device : e->src->device;
    plan->src_device = plan->device;
    plan->is_download = !reaches_dst; /* of those two routes only the staged one */
    plan->route = reaches_dst && reaches_src ? CM_ROUTE_KERNEL : CM_ROUTE_STAGED_KERNEL;
}

/* Between two devices. What is strided takes one kernel where one end at least crosses
 * the link in whole runs; otherwise it is packed on one side and unpacked on the other.
 */
static void
choose_peer_route(cm_plan *plan, const cm_plan_options *options)
{
    cm_layout core = plan->layout;
    cm_layout repeats;
    cm_peer_facts peers = options->peers;
    bool is_long = plan->nbytes >= options->tuning->staged_peer_nbytes;
    plan->route = peers.apart && is_long ? CM_ROUTE_PEER_STAGED : CM_ROUTE_PEER;
    cm_layout_take_repeats(&core, &repeats);
    if (plan->layout.ndim == 0 || repeats.ndim > 0) {
        return; /* what is repeated crosses once */
    }
    if (peers.pushes && cm_layout_is_packed(&core, CM_DST)) {
        plan->route = CM_ROUTE_KERNEL;
        plan->device = plan->src_device;
    }
    else if (peers.pulls
             && (cm_layout_is_packed(&core, CM_SRC)
                 || core.run_nbytes >= options->tuning->pulled_run_nbytes)) {
        plan->route = CM_ROUTE_KERNEL;
        plan->src_device = plan->device;
    }
}

/* Does the device put the elements in order, which has memory to waste? Then the source
 * is read as it lies. That is faster where it is to be transposed, and where short runs
 * fill it without gaps, but neighbours lie along another axis than in the target
 * (pixels to planes). */
static bool
turns_on_device(const cm_layout *layout)
{
    int last = layout->ndim - 1;
    if (cm_layout_near_axis(layout) >= 0) {
        return true;
    }
    if (last < 0 || layout->run_nbytes > CM_LINE_NBYTES / 2) {
        return false;
    }
    cm_layout sorted = *layout;
    for (int axis = 0; axis <= last; axis++) {
        sorted.axes[axis].stride[CM_SRC] = llabs(sorted.axes[axis].stride[CM_SRC]);
    }
    cm_layout_sort(&sorted, CM_SRC);
    return cm_layout_is_packed(&sorted, CM_SRC)
           && sorted.axes[last].stride[CM_DST] != layout->axes[last].stride[CM_DST];
}

static void
choose_device_route(cm_plan *plan, const ends *e)
{
    bool dst_on_device = cm_region_is_on_device(e->dst);
    plan->device = dst_on_device ? e->dst->device : e->src->device;
    plan->src_device = cm_region_is_on_device(e->src) ? e->src->device : plan->device;
    if (plan->device != plan->src_device) {
        choose_peer_route(plan, e->options);
        return;
    }
    plan->route = choose_route(plan, e);
    plan->is_download = cm_routes[plan->route].packs && !dst_on_device;
    plan->is_fresh = plan->is_download && e->dst_facts.fresh;
    if (plan->route == CM_ROUTE_STAGED && dst_on_device
        && turns_on_device(&plan->layout)) {
        cm_layout_sort(&plan->layout, CM_SRC);
        plan->route = CM_ROUTE_STAGED_KERNEL;
        plan->is_turned = true;
    }
}

void
cm_plan_pack_source(cm_plan *plan, const cm_region *dst, const cm_region *src,
                    cm_end_facts dst_facts, cm_end_facts src_facts,
                    cm_plan_options options)
{
    cm_layout repeats;
    cm_layout_take_repeats(&plan->layout, &repeats);
    cm_layout_pack(&plan->layout, CM_SRC);
    cm_layout_put_repeats(&plan->layout, &repeats);
    if (plan->route != CM_ROUTE_HOST) {
        ends e = {dst, src, dst_facts, src_facts, &options};
        plan->route = choose_route(plan, &e);
        cm_ring_policy_init(plan, options.tuning);
    }
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
    ends e = {dst, src, dst_facts, src_facts, &options};
    *plan = (cm_plan){.route = CM_ROUTE_NOTHING,
                      .device = -1,
                      .src_device = -1,
                      .target = (uintptr_t)dst->host};
    CM_TRY(cm_layout_init(dst, src, &plan->layout));
    plan->nbytes = payload_of(&plan->layout);
    if (plan->nbytes == 0) {
        return cm_ok();
    }
    if (cm_region_copy_address(dst) == 0 || cm_region_copy_address(src) == 0) {
        return cm_fail(CM_EINVALID, 0);
    }
    if (is_same_place(&e, &plan->layout)) {
        return cm_ok();
    }
    if (cm_region_is_on_device(dst) || cm_region_is_on_device(src)) {
        choose_device_route(plan, &e);
    }
    else {
        choose_host_route(plan, &e);
    }
    if (plan->route != CM_ROUTE_HOST
        && !(is_device(plan->device) && is_device(plan->src_device))) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)plan->device);
    }
    cm_ring_policy_init(plan, options.tuning);
    return cm_ok();
}
