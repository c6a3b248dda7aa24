/* SPDX-License-Identifier: Apache-2.0 */
/* A plan says how a copy is to be made: by which route, by which device, and in which
 * loops. Planning is pure and makes no runtime call. The caller finds out what the
 * regions do not say, for example whether a host range is page-locked, and passes it as
 * facts (cm_end_facts, cm_peer_facts).
 *
 * Planning takes these steps:
 *
 *   1. The two regions become a layout, which is a set of loops over runs (layout.h).
 *   2. The device whose stream does the work is chosen.
 *   3. CM_ROUTES has one row for each route (route.h). The rows for ends of this kind
 *      are asked one after the other, and the first row that suits is taken.
 *   4. If the copy goes in pieces, ring_policy.h decides how it is cut.
 *
 * Example: an array of shape (1000, 64) and 4 bytes an element is copied to the first
 * 64 columns of a device array of shape (1000, 128). The layout has runs of 256 bytes.
 * In the source a run begins every 256 bytes, and in the target every 512. If the
 * source is page-locked, this is one pitched copy ("direct-2d"). If it is ordinary
 * memory, which a device may not simply read, the host packs the runs into slots, and a
 * kernel of the device puts them in their places ("staged-kernel"). */
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
    bool whole; /* the memory is page-locked as one, or not at all: no registration of
                   page-locked memory begins or ends inside it */
    bool fresh; /* the end is a target, one run of host memory, and the pages of that
                   memory do not exist yet */
} cm_end_facts;

/* Whether two devices reach each other's memory, for a copy whose two ends lie on
 * different devices. */
typedef struct cm_peer_facts {
    bool pulls;  /* the target's device can read the source */
    bool pushes; /* the source's device can write the target */
    bool apart;  /* neither device can be made to reach the memory of the other */
} cm_peer_facts;

/* The plan of one copy of one region. ring_policy.h sets the members that say how the
 * copy is cut into pieces. Batches and files fill in plans of their own. */
typedef struct cm_plan {
    const cm_route_row *row; /* the route of the copy; NULL if no bytes have to move */
    int device; /* the device whose stream does the work; -1 for the host */
    /* The device of the source, if the source lies on a device; else the same as
     * `device`. */
    int src_device;
    /* The copy goes through page-locked blocks to the host. */
    bool is_download;
    /* The link carries the elements in the order of the source, and a kernel of the
     * device brings them into the order of the target. The host could do this while it
     * packs, but then it could not read the source in the order of its addresses. */
    bool rearranges_on_device;
    /* The copy is a download, and the pages of its target do not exist yet. */
    bool is_fresh;
    /* The copy is an upload, and its blocks are so few that they stay in the
     * processor's caches. */
    bool is_cached;
    /* A kernel of the device converts the elements, in an upload or in a copy within
     * the device. */
    bool converts_on_device;
    /* The bytes that the link carries, or that the host moves. Bytes that a broadcast
     * source repeats count once. */
    uint64_t nbytes;
    /* The bytes of this copy and of the copies that it follows without a gap; 0 if it
     * follows no other copy. Such a row of copies is a train (engine/scheduler.c). */
    uint64_t train_nbytes;
    uint64_t piece_nbytes; /* the size of the largest piece */
    uint64_t piece_count;  /* 1 if the copy is not cut */
    uint32_t slot_count;   /* the most pieces that are in flight at once */
    /* dst.host as a number. The edges of huge pages in the target are found from it. */
    uintptr_t target;
    cm_layout layout;
} cm_plan;

typedef struct cm_plan_options {
    /* The caller waits for the end anyway, so ordinary memory may be given to the
     * runtime, whose call then blocks. */
    bool may_wait;
    /* The copy is made in the order of a stream, and its caller does not wait for the
     * stream. If both ends are host memory, and at least one is page-locked or managed,
     * a device then makes the copy, because a device can wait for its turn on the
     * stream. */
    bool on_stream;
    /* Elements are converted. The host converts them, so at least one end has to be
     * host memory, unless `kernel_can_convert` is set. */
    bool converts;
    /* A kernel can do this conversion as well (cm_convert_has_kernel()). */
    bool kernel_can_convert;
    /* The source is one element of host memory, which is copied to each element of the
     * target. */
    bool is_fill;
    /* The pieces are sent to other devices as well, so the host has to pack them. */
    bool has_more_targets;
    /* There is no further memory, neither on the device nor page-locked. */
    bool lacks_memory;
    const cm_tuning *tuning; /* as cm_tuning_resolve() left it */
    cm_peer_facts peers;
} cm_plan_options;

/* Everything that a plan is made from. It is passed to the functions in the row of a
 * route. */
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

/* Plan the copy of `src` to `dst`, whose shapes must be the same. If plan->row is NULL
 * afterwards, nothing has to be moved, because the regions are empty or are the same
 * elements.
 * Fails: CM_ESHAPE; CM_EINVALID (nobody can reach an end, itemsizes differ without a
 * conversion, or cm_plan_goes_via_host() is true of the copy); CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_plan_init(cm_plan *plan, const cm_region *dst,
                                    const cm_region *src, cm_end_facts dst_facts,
                                    cm_end_facts src_facts, cm_plan_options options);

/* True if elements are converted between two ends that are memory of devices, and no
 * device can do this conversion. cm_engine_copy_many() then makes the copy by way of
 * the host. A kernel can do only the conversions of cm_convert_has_kernel(), only
 * within one device, and only if both ends are aligned and do not overlap. Neither end
 * may be empty; `convert` is NULL if nothing is converted. */
bool cm_plan_goes_via_host(cm_runtime *rt, const cm_region *dst, const cm_region *src,
                           const cm_convert *convert);

/* True if the end on the device, which is the target if `up` is set and otherwise the
 * source, is one packed run. In an upload the source must not repeat elements either.
 * The link can then bring the bytes straight to their places
 * or take them from there. Otherwise a kernel of the device has to spread the bytes out
 * after an upload, or pack them before a download. */
bool cm_plan_is_packed_there(const cm_layout *layout, bool up);
/* Choose the route again for the plan's present layout. This is called after a fact
 * about the copy, or the memory that is available for it, has changed. */
void cm_plan_choose_again(cm_plan *plan, const cm_region *dst, const cm_region *src,
                          cm_end_facts dst_facts, cm_end_facts src_facts,
                          cm_plan_options options);
/* Adapt the layout of the plan and choose the route and the pieces again. This is
 * called after the whole source has been read into packed memory, which `src` describes
 * now. */
void cm_plan_pack_source(cm_plan *plan, const cm_region *dst, const cm_region *src,
                         cm_end_facts dst_facts, cm_end_facts src_facts,
                         cm_plan_options options);
