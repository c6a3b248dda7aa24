/* SPDX-License-Identifier: Apache-2.0 */
/* A layout describes a copy as loops. It is made from the source and the target of the
 * copy, which are two regions of the same shape (region.h), and has the simplest loops
 * that visit all bytes of these regions. It consists of a run, which is a number of
 * bytes that lie together on both sides, and of axes, which say how often and at which
 * distances the run is repeated. This file also cuts layouts into pieces, which are
 * moved one after another or by several threads.
 *
 * An example: a C-contiguous array of shape (4, 3, 8) and 2 bytes an element is copied
 * into `out[:, :3]` of an array of shape (4, 5, 8). On both sides 3 * 8 elements lie
 * together, so the run has 48 bytes, and one axis of length 4 is left, whose strides
 * are 80 bytes in the target and 48 in the source.
 *
 * Everything here is pure: it calls no runtime, allocates nothing, and does not know
 * the kind of the memory or the way in which it is moved. */
#pragma once

#include "transfer/plan/region.h"

enum { CM_LINE_NBYTES = 64 }; /* the length of a line of the processor's caches */

typedef enum cm_side { CM_DST, CM_SRC } cm_side;

typedef struct cm_axis {
    int64_t length; /* how often the run is repeated along the axis */
    /* In bytes, indexed by cm_side. The stride of the target is > 0. The stride of the
     * source may be any number, and is 0 if the source is broadcast along the axis. */
    int64_t stride[2];
} cm_axis;

/* Byte b of run (i, j, …) lies at offset + i*axes[0].stride + j*axes[1].stride + … + b
 * from element 0, on either side. Invariants: every length is > 1, and the strides of
 * the target fall from axis to axis.
 *
 * If elements are converted on the way, each element is a run. `run_nbytes` is then the
 * size that an element has while it crosses the link. If both ends are host memory, no
 * link is crossed, and `run_nbytes` is the size of an element in the target. Such runs
 * are neither joined nor cut. */
typedef struct cm_layout {
    uint64_t run_nbytes; /* 0 if there is nothing to copy */
    int ndim;
    /* Indexed by cm_side: the size of an element that is converted; 0 if none is. */
    uint32_t item_nbytes[2];
    int64_t offset[2]; /* indexed by cm_side; may be negative */
    cm_axis axes[CM_MAX_NDIM];
} cm_layout;

/* Make the loops of a copy. Axes of length 1 are dropped, axes with a negative stride
 * in the target are turned round, the axes are sorted by the strides of the target, and
 * neighbouring axes are joined if their bytes lie together on both sides. If an axis of
 * the target has stride 0, each element along it would overwrite the one before, so
 * only the last one is copied.
 * Fails: CM_ESHAPE (the shapes differ), CM_EINVALID (the itemsizes differ),
 * CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_layout_init(const cm_region *dst, const cm_region *src,
                                      cm_layout *out);
/* Do the same as cm_layout_init() for elements that are converted, whose sizes may
 * differ on the two sides. Each element counts as a run of `run_nbytes`. */
CM_NODISCARD cm_status cm_layout_init_items(const cm_region *dst, const cm_region *src,
                                            int64_t run_nbytes, cm_layout *out);
/* Change the layout to one that does not convert elements. Both sides then have the
 * same bytes, and runs that lie together are joined. */
void cm_layout_drop_items(cm_layout *layout);
static inline bool
cm_layout_has_items(const cm_layout *layout)
{
    return layout->item_nbytes[CM_DST] != 0;
}

/* Return how many bytes are written to the target. */
uint64_t cm_layout_nbytes(const cm_layout *layout);

/* True if the loops visit the bytes of `side` one behind the other, without gaps. */
bool cm_layout_is_packed(const cm_layout *layout, cm_side side);
/* Change `side` so that its bytes are one run without gaps, which begins at offset
 * 0. */
void cm_layout_pack(cm_layout *layout, cm_side side);

/* Move the axes along which the source is broadcast from `layout` to `repeats`. The run
 * and the offsets of `repeats` are set to 0. */
void cm_layout_take_repeats(cm_layout *layout, cm_layout *repeats);
/* Set `core` to the layout without the axes along which the source is broadcast.
 * Returns how many such axes there are. */
int cm_layout_get_core(const cm_layout *layout, cm_layout *core);
/* Put the axes of `repeats` back into `layout`, where they were. */
void cm_layout_put_repeats(cm_layout *layout, const cm_layout *repeats);

/* Find an axis along which several neighbours lie in one cache line of the source,
 * although runs are short and neighbours along the last axis lie in different cache
 * lines. A copy in the order of the target would then use only a few bytes of each
 * cache line of the source. Returns the axis along which neighbours lie closest, or -1
 * if there is no such axis. */
int cm_layout_near_axis(const cm_layout *layout);
/* True if runs are so short that a run costs more in instructions than in memory
 * traffic. It is then worth having every thread help. */
static inline bool
cm_layout_is_scattered(const cm_layout *layout)
{
    return layout->ndim > 0 && layout->run_nbytes < 4096;
}
/* Order the axes so that the strides of `side` fall from axis to axis. A layout is in
 * the order of the target, except while a caller needs the order of the source. */
void cm_layout_sort(cm_layout *layout, cm_side side);

/* Go on to the next index of the first `ndim` axes, and add the step to `offset`. The
 * last of these axes changes fastest. The axis `skipped` is left out, unless `skipped`
 * is -1. After the last index this goes back to the first one and returns false. */
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

/* Walks over a layout in pieces of at most `piece_nbytes`. Each byte is in exactly one
 * piece. */
typedef struct cm_cut {
    const cm_layout *whole; /* borrowed */
    int axis;               /* the axis that is cut; ndim if runs are cut */
    /* How far a piece goes along `axis`, or how many bytes of a run it has. */
    int64_t step;
    uint64_t unit_nbytes; /* how many bytes one step along `axis` has */
    /* If this is not 0, pieces grow from this size to their full size, and shrink again
     * towards the end. If one thread hands each piece on to another thread or to a
     * device, the second one then begins early, and has little left to do when the
     * first one ends. If this is 0, all pieces have their full size. Callers set this
     * member before they take the first piece. */
    uint64_t least_nbytes;
    uint64_t done_nbytes;           /* the bytes of the pieces that were taken */
    uint64_t left_nbytes;           /* the bytes of the pieces that are left */
    uintptr_t edge_base;            /* the address where the run begins */
    uintptr_t edge_step;            /* a power of two; 0 if pieces may end anywhere */
    bool done;                      /* the last piece was taken */
    int64_t index[CM_MAX_NDIM + 1]; /* where the next piece begins, by axis */
} cm_cut;

/* Begin a walk over `whole` in pieces of at most `piece_nbytes`. A single element that
 * is converted may be longer than that. */
void cm_cut_init(cm_cut *cut, const cm_layout *whole, uint64_t piece_nbytes);
/* Let each piece end at an address that is a multiple of `step`, if the piece is long
 * enough to contain one. `step` is a power of two. This has an effect only if the
 * layout is a single run. The run begins at address `base`. Call this before the first
 * piece is taken. */
void cm_cut_align(cm_cut *cut, const void *base, uintptr_t step);
/* Return how many pieces there will be. Called before the first one is taken. */
uint64_t cm_cut_count(const cm_cut *cut);
/* Take the next piece. Returns false if there is none left. */
bool cm_cut_next(cm_cut *cut, cm_layout *piece);
/* Make the piece with this number, which is below cm_cut_count(). It does not matter
 * which pieces were taken before. All pieces must have the same size (least_nbytes is
 * 0). If cm_cut_align() was called, its `step` has to be the length of a piece. */
void cm_cut_piece(const cm_cut *cut, uint64_t number, cm_layout *piece);
