/* SPDX-License-Identifier: Apache-2.0 */
/* A plan says how a copy is to be made: by which route, by which device, and in which
 * loops. Planning is pure and makes no runtime call. What only others know, such as
 * whether a host range is page-locked, comes in as facts.
 *
 * The two regions become a layout (layout.h), the device whose stream does the work is
 * found, and the rows of CM_ROUTES that are for such ends (route.h) are asked one after
 * the other until one suits. A copy that goes in pieces is then cut by ring_policy.h.
 *
 * Example: an array of shape (1000, 64) and 4 bytes an element is copied to the first
 * 64 columns of a device array of shape (1000, 128). The layout has runs of 256 bytes,
 * which lie 256 bytes apart in the source and 512 in the target. If the source is
 * page-locked, this is one pitched copy ("direct-2d"). If it is ordinary memory, which
 * a device may not simply read, the host packs the runs into slots, and a kernel of the
 * device puts them in their places ("staged-kernel"). */
#pragma once

#include "base/convert.h"
#include "transfer/plan/layout.h"
#include "transfer/plan/route.h"
#include "transfer/plan/tuning.h"

enum { CM_PITCH_MAX = INT32_MAX }; /* cudaDeviceProp.memPitch of every device so far */

/* What is known about one end of a copy that its region does not say. */
typedef struct cm_end_facts {
    /* The memory is page-locked, or is not the host's at all, so a device may still be
     * copying it after our call has returned. */
    bool locked;
    bool whole; /* no registration begins or ends inside it */
    bool fresh; /* a target in one run of host memory whose pages do not exist yet */
} cm_end_facts;

/* What two devices can do to each other, for a copy whose two ends lie on different
 * devices. */
typedef struct cm_peer_facts {
    bool pulls;  /* the target's device can read the source */
    bool pushes; /* the source's device can write the target */
    bool apart;  /* neither device can be made to reach the memory of the other */
} cm_peer_facts;

/* The plan of one copy of one region. ring_policy.h sets the members that say how the
 * copy is cut into pieces. Batches and files fill in plans of their own. */
typedef struct cm_plan {
    const cm_route_row *row; /* its route; NULL if no bytes have to move */
    int device; /* the device whose stream does the work; -1 for the host */
    /* Where the source lies, if that is another device; else the same as `device`. */
    int src_device;
    bool is_download; /* a copy to the host that goes through page-locked blocks */
    /* The link carries the elements in the order of the source, and a kernel of the
     * device rearranges them, although the target is packed. */
    bool rearranges_on_device;
    /* A download whose target's pages do not exist yet. */
    bool is_fresh;
    /* An upload through so few blocks that they stay in the processor's caches. */
    bool is_cached;
    /* A kernel of the device converts the elements: those that an upload brings, or
     * those of a copy within the device. */
    bool converts_on_device;
    /* The bytes that the link carries, or that the host moves. Bytes that a broadcast
     * source repeats count once. */
    uint64_t nbytes;
    /* The bytes of this copy and of those that it follows without a gap; 0 if it
     * follows none (see engine/scheduler.c). */
    uint64_t train_nbytes;
    uint64_t piece_nbytes; /* the size of the largest piece */
    uint64_t piece_count;  /* 1 if the copy goes as a whole */
    uint32_t slot_count;   /* the most pieces that are in flight at once */
    /* dst.host as a number, by which the edges of huge pages are found */
    uintptr_t target;
    cm_layout layout;
} cm_plan;

typedef struct cm_plan_options {
    /* The caller waits for the end anyway, so ordinary memory may be given to the
     * runtime, whose call then blocks. */
    bool may_wait;
    /* The copy takes its place in the order of a stream, for which its caller does not
     * wait. Because of that order a device moves page-locked and managed memory even
     * between two ends of the host. */
    bool on_stream;
    /* Elements are converted. The host converts them, so at least one end has to be
     * host memory, unless `kernel_can_convert` is set. */
    bool converts;
    /* A kernel can do this conversion as well (cm_convert_has_kernel()). */
    bool kernel_can_convert;
    /* The source is one element of host memory, for all of the target. */
    bool is_fill;
    /* The pieces are sent to other devices as well, so the host has to pack them. */
    bool has_more_targets;
    /* There is no further memory, neither on the device nor page-locked. */
    bool lacks_memory;
    const cm_tuning *tuning; /* as cm_tuning_resolve() left it */
    cm_peer_facts peers;
} cm_plan_options;

/* Everything that a plan is made from; the functions of a route's row get it. */
typedef struct cm_plan_ends {
    const cm_region *dst;
    const cm_region *src;
    cm_end_facts dst_facts;
    cm_end_facts src_facts;
    const cm_plan_options *options;
} cm_plan_ends;

/* True if a device is free to read and write both ends at any time. */
static inline bool
cm_plan_is_locked(const cm_plan_ends *ends)
{
    return ends->dst_facts.locked && ends->src_facts.locked;
}
/* True if at least one end is memory that only a device may touch. */
static inline bool
cm_plan_has_device_end(const cm_plan_ends *ends)
{
    return cm_region_is_on_device(ends->dst) || cm_region_is_on_device(ends->src);
}
/* True if the host must touch the elements on the way, so that no device can make the
 * copy alone. */
static inline bool
cm_plan_needs_host(const cm_plan_ends *ends)
{
    return ends->options->converts || ends->options->has_more_targets;
}

/* Plan the copy of `src` to `dst`, whose shapes are the same. If `row` stays NULL
 * nothing has to be moved, because the regions are empty, or are the same elements.
 * Fails: CM_ESHAPE; CM_EINVALID (nobody can reach an end, itemsizes differ without a
 * conversion, or the copy is one of cm_plan_goes_via_host()); CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_plan_init(cm_plan *plan, const cm_region *dst,
                                    const cm_region *src, cm_end_facts dst_facts,
                                    cm_end_facts src_facts, cm_plan_options options);

/* True if elements are converted between two ends that are memory of devices, and no
 * device can do that. A kernel can do only the conversions of cm_convert_has_kernel(),
 * and only within one device, if both ends are aligned and do not overlap. Such copies
 * go by way of the host (cm_engine_copy_many()). Neither end may be empty; `convert` is
 * NULL if nothing is converted. */
bool cm_plan_goes_via_host(cm_runtime *rt, const cm_region *dst, const cm_region *src,
                           const cm_convert *convert);

/* True if the device's end of the loops is one packed run. Then the link can bring the
 * bytes straight to their place (`up`), or take them from it (not `up`). Otherwise a
 * kernel has to spread them out or pack them there. */
bool cm_plan_is_packed_there(const cm_layout *layout, bool up);
/* Choose the route again for the plan's present layout. This is called after a fact
 * about the copy, or the memory that is available for it, has changed. */
void cm_plan_choose_again(cm_plan *plan, const cm_region *dst, const cm_region *src,
                          cm_end_facts dst_facts, cm_end_facts src_facts,
                          cm_plan_options options);
/* The source has been read as a whole into packed memory, and `src` now describes that.
 * This adapts the layout and chooses route and pieces again. */
void cm_plan_pack_source(cm_plan *plan, const cm_region *dst, const cm_region *src,
                         cm_end_facts dst_facts, cm_end_facts src_facts,
                         cm_plan_options options);
