/* SPDX-License-Identifier: Apache-2.0 */
/* The ways that a copy can go: one row a route says what it is called, which function
 * moves the bytes and what it needs. */
#ifndef CM_TRANSFER_PLAN_ROUTE_H
#define CM_TRANSFER_PLAN_ROUTE_H

#include "base/status.h"

/* X(name, text for users, function, flags of cm_route_row) */
/* clang-format off */
#define CM_ROUTES(X)                                                                     \
    /* host to host, by the CPU */                                                       \
    X(HOST, "host", cm_job_run_on_host, .uses_host = true)                               \
    /* one runtime copy; one pitched one */                                              \
    X(DIRECT, "direct", cm_job_copy_direct, .fits_graph = true)                          \
    X(DIRECT_2D, "direct-2d", cm_job_copy_2d, .fits_graph = true)                        \
    /* between two devices; that do not reach each other: in a graph as if they did */   \
    X(PEER, "peer", cm_job_copy_peer, .crosses = true, .fits_graph = true)               \
    X(PEER_STAGED, "peer-staged", cm_job_copy_peer,                                      \
      .uses_ring = true, .crosses = true, .fits_graph = true)                            \
    /* strided, by the device */                                                         \
    X(KERNEL, "kernel", cm_job_copy_by_kernel, .fits_graph = true)                       \
    /* packed or unpacked on the host on the way; and scattered or gathered on the       \
     * device */                                                                         \
    X(STAGED, "staged", cm_job_copy_staged,                                              \
      .uses_host = true, .uses_ring = true, .packs = true)                               \
    X(STAGED_KERNEL, "staged-kernel", cm_job_copy_staged,                                \
      .uses_host = true, .uses_ring = true, .packs = true)                               \
    /* memset */                                                                         \
    X(FILL, "fill", cm_job_fill, .fits_graph = true)                                     \
    /* of many runs at once: by one kernel, by the runtime's call for many, gathered or  \
     * spread out on the host */                                                         \
    X(TABLE, "table", cm_many_copy_by_table, .fits_graph = true)                         \
    X(BATCH, "batch", cm_many_copy_in_batches, .needs_stream = true)                     \
    X(STAGED_TABLE, "staged-table", cm_job_copy_staged,                                  \
      .uses_host = true, .uses_ring = true)                                              \
    /* between a file and memory of any kind */                                          \
    X(FILE, "file", cm_job_copy_file, .uses_host = true, .uses_ring = true)
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

typedef struct cm_route_row {
    const char *text; /* for users */
    /* Queue or make the copy, or the many copies, of a job. NULL: nothing to do. */
    cm_status (*move)(struct cm_job *job);
    bool uses_host;    /* a thread of the host works until the end */
    bool uses_ring;    /* the bytes go through page-locked slots */
    bool packs;        /* ... and the host packs or unpacks them */
    bool crosses;      /* between two devices */
    bool fits_graph;   /* a stream in a capture can take it; one that crosses, in one
                          run */
    bool needs_stream; /* any but the legacy stream, which the runtime refuses */
} cm_route_row;

extern const cm_route_row cm_routes[CM_ROUTE_COUNT];

#endif
