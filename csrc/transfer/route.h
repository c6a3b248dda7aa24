/* SPDX-License-Identifier: Apache-2.0 */
/* The ways that a copy can go, and what they are called. */
#ifndef CM_TRANSFER_ROUTE_H
#define CM_TRANSFER_ROUTE_H

/* How the bytes went. X(name, text for users). */
#define CM_ROUTES(X)                                                                   \
    X(NOTHING, "nothing")             /* no bytes */                                   \
    X(HOST, "host")                   /* host to host, by the CPU */                   \
    X(DIRECT, "direct")               /* one runtime copy */                           \
    X(DIRECT_2D, "direct-2d")         /* one pitched runtime copy */                   \
    X(PEER, "peer")                   /* between two devices */                        \
    X(PEER_STAGED, "peer-staged")     /* … that do not reach each other */             \
    X(KERNEL, "kernel")               /* strided, by the device */                     \
    X(STAGED, "staged")               /* packed or unpacked on the host on the way */  \
    X(STAGED_KERNEL, "staged-kernel") /* … and scattered or gathered on the device */  \
    X(FILL, "fill")                   /* memset */                                     \
    /* of many at once: */                                                             \
    X(TABLE, "table")               /* runs, by one kernel */                          \
    X(BATCH, "batch")               /* runs, by the runtime's call for many */         \
    X(STAGED_TABLE, "staged-table") /* gathered or spread out on the host */           \
    X(SEVERAL, "several")           /* of these and the others */

typedef enum cm_route {
#define CM_ROUTE_ENUM(name, text) CM_ROUTE_##name,
    CM_ROUTES(CM_ROUTE_ENUM)
#undef CM_ROUTE_ENUM
        CM_ROUTE_COUNT
} cm_route;

const char *cm_route_text(cm_route route);

#endif
