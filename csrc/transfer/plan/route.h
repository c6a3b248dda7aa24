/* SPDX-License-Identifier: Apache-2.0 */
/* The ways that a copy can go: one row a route says what it is called, what it needs
 * and which function moves the bytes. The rows are in run/routes.c. */
#ifndef CM_TRANSFER_PLAN_ROUTE_H
#define CM_TRANSFER_PLAN_ROUTE_H

#include "base/status.h"

typedef enum cm_route {
    CM_ROUTE_NOTHING,       /* no bytes */
    CM_ROUTE_HOST,          /* host to host, by the CPU */
    CM_ROUTE_DIRECT,        /* one runtime copy */
    CM_ROUTE_DIRECT_2D,     /* one pitched runtime copy */
    CM_ROUTE_PEER,          /* between two devices */
    CM_ROUTE_PEER_STAGED,   /* … that do not reach each other */
    CM_ROUTE_KERNEL,        /* strided, by the device */
    CM_ROUTE_STAGED,        /* packed or unpacked on the host on the way */
    CM_ROUTE_STAGED_KERNEL, /* … and scattered or gathered on the device */
    CM_ROUTE_FILL,          /* memset */
    /* of many at once: */
    CM_ROUTE_TABLE,        /* runs, by one kernel */
    CM_ROUTE_BATCH,        /* runs, by the runtime's call for many */
    CM_ROUTE_STAGED_TABLE, /* gathered or spread out on the host */
    CM_ROUTE_SEVERAL,      /* of these and the others */
    CM_ROUTE_FILE,         /* between a file and memory of any kind */
    CM_ROUTE_COUNT
} cm_route;

struct cm_job;

typedef struct cm_route_row {
    const char *text;  /* for users */
    bool uses_host;    /* a thread of the host works until the end */
    bool uses_ring;    /* the bytes go through page-locked slots */
    bool packs;        /* ... and the host packs or unpacks them */
    bool crosses;      /* between two devices */
    bool fits_graph;   /* a stream in a capture can take it; one that crosses, in one
                          run */
    bool needs_stream; /* any but the legacy stream, which the runtime refuses */
    /* Queue or make the copy, or the many copies, of a job. NULL: nothing to do. */
    cm_status (*move)(struct cm_job *job);
} cm_route_row;

extern const cm_route_row cm_routes[CM_ROUTE_COUNT];

#endif
