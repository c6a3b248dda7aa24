/* SPDX-License-Identifier: Apache-2.0 */
/* How a layout is cut into pieces that are moved one after another or by several
 * threads. Knows nothing of who moves them. Locks: none. */
#ifndef CM_TRANSFER_PLAN_CUT_H
#define CM_TRANSFER_PLAN_CUT_H

#include "transfer/plan/layout.h"

/* Walks over a layout in pieces of at most `piece_nbytes`, each byte in exactly one. */
typedef struct cm_cut {
    const cm_layout *whole; /* borrowed */
    int axis;               /* cut across this one; ndim: within runs */
    int64_t step;           /* lengths of `axis` in a piece, or bytes of a run */
    uint64_t unit_nbytes;   /* bytes of one length of it */
    uint64_t least_nbytes;  /* of the first and the last piece; 0: all are alike */
    uint64_t done_nbytes;
    uint64_t left_nbytes;
    int64_t index[CM_MAX_NDIM + 1];
    uintptr_t edge_base; /* where the run begins */
    uintptr_t edge_step; /* a power of two; 0: pieces end anywhere */
    bool done;
} cm_cut;

void cm_cut_init(cm_cut *cut, const cm_layout *whole, uint64_t piece_nbytes);
/* Pieces grow from `least_nbytes` on to their full size, and shrink towards the end:
 * who works on them one after another is soon begun with and soon through. Before the
 * first piece. */
void cm_cut_ramp(cm_cut *cut, uint64_t least_nbytes);
/* Pieces of a single run that begins at `base` end at multiples of `step`, a power of
 * two, where there is one in them. Before the first piece. */
void cm_cut_align(cm_cut *cut, const void *base, uintptr_t step);
/* Pieces in all; before the first. */
uint64_t cm_cut_count(const cm_cut *cut);
/* The next piece; false when there is none. */
bool cm_cut_next(cm_cut *cut, cm_layout *piece);

#endif
