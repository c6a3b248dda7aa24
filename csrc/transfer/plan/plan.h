/* SPDX-License-Identifier: Apache-2.0 */
/* How a copy is to be made: the route, the device that does it, and the loops. Pure:
 * what must be asked of others (is this host range page-locked?) comes in as facts. */
#pragma once

#include "base/convert.h"
#include "transfer/plan/layout.h"
#include "transfer/plan/route.h"
#include "transfer/plan/tuning.h"

enum { CM_PITCH_MAX = INT32_MAX }; /* cudaDeviceProp.memPitch of every device so far */

/* What is known of one end beyond its region. */
typedef struct cm_end_facts {
    bool locked; /* page-locked, or not host memory at all: a copy may run behind our
                    back */
    bool whole;  /* no edge of a registration lies within it */
    bool fresh;  /* a target on the host in one run, whose pages are not there yet */
} cm_end_facts;

/* What two devices may do, where each end lies on one of them. */
typedef struct cm_peer_facts {
    bool pulls;  /* the target's may read the source */
    bool pushes; /* the source's may write the target */
    bool apart;  /* neither ever reaches the other */
} cm_peer_facts;

/* Of one copy. What says how it goes in pieces is ring_policy.h's. Batches and files
 * fill in their own. */
typedef struct cm_plan {
    const cm_route_row *row; /* its route; NULL: no bytes have to move */
    int device;              /* whose stream does the work; -1: the host */
    int src_device;          /* PEER…: where the source lies; else = device */
    bool is_download;        /* through page-locked blocks towards the host */
    bool is_turned;        /* in the order of the source, though the target is packed */
    bool is_fresh;         /* a download whose target's pages are not there yet */
    bool is_cached;        /* up, through blocks that stay in the processor's caches */
    bool widens;           /* up, and a kernel converts what arrives; or within one
                              device */
    uint64_t nbytes;       /* payload, not counting repeats of a broadcast source */
    uint64_t piece_nbytes; /* of the largest piece */
    uint64_t piece_count;  /* 1: it goes as a whole */
    uint32_t slot_count;   /* pieces in flight at once, at most */
    uintptr_t target;      /* dst.host as a number: where huge pages begin */
    cm_layout layout;
} cm_plan;

typedef struct cm_plan_options {
    bool may_wait;  /* the caller waits for the end anyway: pageable memory may be given
                       to the runtime as it is */
    bool on_stream; /* in the order of a stream, without waiting: page-locked and
                       managed memory is then moved by the device even between host and
                       host */
    bool converts;  /* elements, by the host, of which one end is at least, or as the
                       next says */
    bool widens;    /* ... which a kernel can do, cm_convert_widens() */
    bool is_fill;   /* the source is one element of the host's, for all of the target */
    bool has_more_targets;   /* what the host packs is sent to other devices as well, so
                                that it has to pack it */
    bool lacks_memory;       /* there is none beside the two ends: neither on the device
                                nor page-locked */
    const cm_tuning *tuning; /* resolved */
    cm_peer_facts peers;
} cm_plan_options;

/* What a plan is made from. */
typedef struct cm_plan_ends {
    const cm_region *dst;
    const cm_region *src;
    cm_end_facts dst_facts;
    cm_end_facts src_facts;
    const cm_plan_options *options;
} cm_plan_ends;

/* A device may have both ends at any time, */
static inline bool
cm_plan_is_locked(const cm_plan_ends *ends)
{
    return ends->dst_facts.locked && ends->src_facts.locked;
}
/* and one of them at least is its memory. */
static inline bool
cm_plan_has_device_end(const cm_plan_ends *ends)
{
    return cm_region_is_on_device(ends->dst) || cm_region_is_on_device(ends->src);
}
/* The host has to touch the elements on the way, which no device does in its place. */
static inline bool
cm_plan_needs_host(const cm_plan_ends *ends)
{
    return ends->options->converts || ends->options->has_more_targets;
}

/* Fails: CM_ESHAPE, CM_EINVALID (an end nobody can reach, itemsizes, two ends on
 * devices where it converts and cm_plan_is_far()), CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_plan_init(cm_plan *plan, const cm_region *dst,
                                    const cm_region *src, cm_end_facts dst_facts,
                                    cm_end_facts src_facts, cm_plan_options options);

/* Both ends are memory of devices and elements are converted between them, which no
 * device does: but for the few that cm_convert_widens(), within one device, where both
 * ends are aligned and apart. Such a copy is made by cm_engine_copy_many(), by way of
 * the host. Neither end is empty; `convert` is NULL where nothing is converted. */
bool cm_plan_is_far(cm_runtime *rt, const cm_region *dst, const cm_region *src,
                    const cm_convert *convert);

/* Is the device's end of the loops one packed run, to which the link brings what
 * arrives (`up`), or from which it takes what leaves? Else a kernel has to place or to
 * pack it. */
bool cm_plan_is_packed_there(const cm_layout *layout, bool up);
/* Choose the route once more, for the layout that the plan has: what is known of the
 * copy, or what there is for it, has changed. */
void cm_plan_choose_again(cm_plan *plan, const cm_region *dst, const cm_region *src,
                          cm_end_facts dst_facts, cm_end_facts src_facts,
                          cm_plan_options options);
/* The source was read whole into packed memory, which `src` now is: layout, route
 * and pieces follow. */
void cm_plan_pack_source(cm_plan *plan, const cm_region *dst, const cm_region *src,
                         cm_end_facts dst_facts, cm_end_facts src_facts,
                         cm_plan_options options);
