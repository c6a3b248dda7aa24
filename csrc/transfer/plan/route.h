/* SPDX-License-Identifier: Apache-2.0 */
/* The ways that a copy can go: one row a route says what it is called, which functions
 * choose it and move the bytes, and what it needs. */
#pragma once

#include "base/status.h"

/* X(name, text for users, function that moves, function that suits, flags of
 * cm_route_row). A copy of one region goes the first of these ways that suits it. */
/* clang-format off */
#define CM_ROUTES(X)                                                                     \
    /* host to host */                                                                   \
    X(HOST, "host", cm_job_run_on_host, cm_host_suits, .uses_host = true)                \
    X(DIRECT, "direct", cm_job_copy_direct, cm_direct_suits, .fits_graph = true)         \
    X(DIRECT_2D, "direct-2d", cm_job_copy_2d, cm_2d_suits, .fits_graph = true)           \
    X(KERNEL, "kernel", cm_job_copy_by_kernel, cm_kernel_suits, .fits_graph = true)      \
    /* between devices that do not reach each other: in a graph as if they did */        \
    X(PEER_STAGED, "peer-staged", cm_job_copy_peer, cm_peer_staged_suits,                \
      .uses_ring = true, .crosses = true, .fits_graph = true)                            \
    X(PEER, "peer", cm_job_copy_peer, cm_peer_suits,                                     \
      .crosses = true, .fits_graph = true)                                               \
    /* packed or unpacked on the host on the way; and scattered or gathered on the       \
     * device, by what the row before has found: no row goes between these two */        \
    X(STAGED, "staged", cm_job_copy_staged, cm_staged_suits,                             \
      .uses_host = true, .uses_ring = true, .packs = true)                               \
    X(STAGED_KERNEL, "staged-kernel", cm_job_copy_staged, cm_staged_kernel_suits,        \
      .uses_host = true, .uses_ring = true, .packs = true)                               \
    /* not of one region, or no copy: memset; of many runs at once, by one kernel,       \
     * gathered or spread out on the host; files */                                      \
    X(FILL, "fill", cm_job_fill, cm_never_suits, .fits_graph = true)                     \
    X(TABLE, "table", cm_many_copy_by_table, cm_never_suits, .fits_graph = true)         \
    X(STAGED_TABLE, "staged-table", cm_job_copy_staged, cm_never_suits,                  \
      .uses_host = true, .uses_ring = true)                                              \
    X(FILE, "file", cm_job_copy_file, cm_never_suits,                                    \
      .uses_host = true, .uses_ring = true)
/* clang-format on */

typedef enum cm_route {
    CM_ROUTE_NOTHING, /* no bytes */
#define CM_ROUTE_NAME(name, ...) CM_ROUTE_##name,
    CM_ROUTES(CM_ROUTE_NAME)
#undef CM_ROUTE_NAME
        CM_ROUTE_SEVERAL, /* parts, each of which goes one of these ways */
    CM_ROUTE_COUNT
} cm_route;

struct cm_job;
struct cm_plan;
struct cm_plan_ends;

typedef struct cm_route_row {
    const char *text; /* for users */
    /* Is this the way for the plan, which has its devices and its layout? Sets in it
     * what the route, or a row after this one, needs. Changes and asks nothing else. */
    bool (*suits)(struct cm_plan *plan, const struct cm_plan_ends *ends);
    /* Queue or make the copy, or the many copies, of a job. NULL: nothing to do. */
    cm_status (*move)(struct cm_job *job);
    bool uses_host;  /* a thread of the host works until the end */
    bool uses_ring;  /* the bytes go through page-locked slots */
    bool packs;      /* ... and the host packs or unpacks them */
    bool crosses;    /* between two devices */
    bool fits_graph; /* a stream in a capture can take it; one that crosses, in one
                        run */
} cm_route_row;

extern const cm_route_row cm_routes[CM_ROUTE_COUNT];
