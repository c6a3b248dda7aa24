/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces of many copies made together, as plain data: runs of bytes, and regions. */
#ifndef CM_TRANSFER_PLAN_PIECES_H
#define CM_TRANSFER_PLAN_PIECES_H

#include "transfer/plan/region.h"

/* One end of a piece: the first of its bytes. */
typedef struct cm_piece_end {
    char *host;         /* as the host knows it; NULL if it may not touch it */
    cm_address address; /* as the device does; 0 if it cannot reach it */
    const void *owner;  /* the same for bytes of one allocation; NULL: nobody knows */
    cm_kind kind;
    int device; /* -1 for PAGEABLE */
} cm_piece_end;

/* A run of bytes, nbytes > 0. */
typedef struct cm_piece {
    cm_piece_end dst;
    cm_piece_end src;
    uint64_t nbytes;
    uint64_t index; /* which copy it is, of all that are asked for */
} cm_piece;

/* A copy that is no run; never empty. */
typedef struct cm_piece_regions {
    cm_region dst;
    cm_region src; /* broadcast to dst's shape, same itemsize */
    uint64_t index;
} cm_piece_regions;

#endif
