/* SPDX-License-Identifier: Apache-2.0 */
/* Two regions of one shape reduced to the simplest loops that visit the same bytes:
 * runs that lie together on both sides, and the axes over them; and how those are cut
 * into pieces that are moved one after another or by several threads. Pure: no runtime
 * call, no allocation, no idea of what kind of memory it is or what moves it. */
#pragma once

#include "transfer/plan/region.h"

enum { CM_LINE_NBYTES = 64 }; /* of the caches */

typedef enum cm_side { CM_DST, CM_SRC } cm_side;

typedef struct cm_axis {
    int64_t length;
    int64_t stride[2]; /* bytes, by cm_side: of the target > 0; of the source any, 0
                          where it is broadcast */
} cm_axis;

/* Byte b of run (i, j, …) lies at offset + i*axes[0].stride + j*axes[1].stride + … + b
 * from element 0, on either side. Invariants: every length > 1; target strides fall
 * from axis to axis. Where elements are converted on the way, each is a run,
 * of so many bytes as it has on the link or, between host and host, in the target:
 * runs are not joined, nor cut. */
typedef struct cm_layout {
    uint64_t run_nbytes; /* 0: nothing to copy */
    int ndim;
    uint32_t item_nbytes[2]; /* by cm_side: of an element that is converted; else 0 */
    int64_t offset[2];       /* by cm_side; may be negative */
    cm_axis axes[CM_MAX_NDIM];
} cm_layout;

/* Drop axes of length 1, turn those the target runs backwards, sort by the target, join
 * what lies together. A target axis of stride 0 keeps its last element only.
 * Fails: CM_ESHAPE (shapes), CM_EINVALID (itemsizes, ndim), CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_layout_init(const cm_region *dst, const cm_region *src,
                                      cm_layout *out);
/* The same of elements that are converted, whose sizes may differ; `run_nbytes` of each
 * are counted. */
CM_NODISCARD cm_status cm_layout_init_items(const cm_region *dst, const cm_region *src,
                                            int64_t run_nbytes, cm_layout *out);
/* They are no longer: both sides have elements of the same bytes. */
void cm_layout_drop_items(cm_layout *layout);
static inline bool
cm_layout_has_items(const cm_layout *layout)
{
    return layout->item_nbytes[CM_DST] != 0;
}

/* Bytes written to the target. */
uint64_t cm_layout_nbytes(const cm_layout *layout);

/* True when that side is one run without gaps, in the order of the axes. */
bool cm_layout_is_packed(const cm_layout *layout, cm_side side);
/* Let that side be a run without gaps that begins at offset 0. */
void cm_layout_pack(cm_layout *layout, cm_side side);

/* Take the axes along which the source is only repeated out of `layout` and put them,
 * by themselves, into `repeats` (run_nbytes and offsets 0). */
void cm_layout_take_repeats(cm_layout *layout, cm_layout *repeats);
/* The layout without them; returns how many there are. */
int cm_layout_get_core(const cm_layout *layout, cm_layout *core);
/* Put the axes of `repeats` back in, at their places. */
void cm_layout_put_repeats(cm_layout *layout, const cm_layout *repeats);

/* The axis along which neighbours in the source lie, where that is another than in the
 * target and runs are short: reading in the order of the target then uses little of
 * each cache line. -1: there is none. */
int cm_layout_near_axis(const cm_layout *layout);
/* Runs are so short that each costs instructions, not memory: every thread helps. */
static inline bool
cm_layout_is_scattered(const cm_layout *layout)
{
    return layout->ndim > 0 && layout->run_nbytes < 4096;
}
/* Order the axes so that the strides of that side fall: the target's, as they always
 * do, or for a time the source's. */
void cm_layout_sort(cm_layout *layout, cm_side side);

/* On to the next index of the first `ndim` axes but `skipped` (-1: none), the last one
 * fastest; `offset` goes with it. Back to the first one and false after the last. */
static inline bool
cm_layout_step(const cm_layout *layout, int ndim, int skipped, int64_t *index,
               int64_t offset[2])
{
    for (int i = ndim - 1; i >= 0; i--) {
        const cm_axis *axis = &layout->axes[i];
        if (i == skipped) {
            continue;
        }
        bool ends = ++index[i] == axis->length;
        int64_t steps = ends ? 1 - axis->length : 1;
        offset[CM_DST] += axis->stride[CM_DST] * steps;
        offset[CM_SRC] += axis->stride[CM_SRC] * steps;
        if (!ends) {
            return true;
        }
        index[i] = 0;
    }
    return false;
}

/* Walks over a layout in pieces of at most `piece_nbytes`, each byte in exactly one. */
typedef struct cm_cut {
    const cm_layout *whole; /* borrowed */
    int axis;               /* cut across this one; ndim: within runs */
    int64_t step;           /* lengths of `axis` in a piece, or bytes of a run */
    uint64_t unit_nbytes;   /* bytes of one length of it */
    /* Set before the first piece: pieces grow from that on to their full size, and
     * shrink towards the end, so that a thread that works on them in turn begins soon
     * and ends soon; 0: all are alike. */
    uint64_t least_nbytes;
    uint64_t done_nbytes;
    uint64_t left_nbytes;
    uintptr_t edge_base; /* where the run begins */
    uintptr_t edge_step; /* a power of two; 0: pieces end anywhere */
    bool done;
    int64_t index[CM_MAX_NDIM + 1];
} cm_cut;

void cm_cut_init(cm_cut *cut, const cm_layout *whole, uint64_t piece_nbytes);
/* Pieces of a single run that begins at `base` end at multiples of `step`, a power of
 * two, where there is one in them. Before the first piece. */
void cm_cut_align(cm_cut *cut, const void *base, uintptr_t step);
/* Pieces in all; before the first. */
uint64_t cm_cut_count(const cm_cut *cut);
/* The next piece; false when there is none. */
bool cm_cut_next(cm_cut *cut, cm_layout *piece);
/* The piece of that number below cm_cut_count(), whatever came before. Without a ramp,
 * and aligned to multiples of a step of the pieces' length. */
void cm_cut_piece(const cm_cut *cut, uint64_t number, cm_layout *piece);
