/* SPDX-License-Identifier: Apache-2.0 */
/* Copies and converts elements of strided memory by the processor. Both ends are plain
 * host memory. */
#pragma once

#include "base/convert.h"
#include "transfer/plan/layout.h"

/* Copy what `layout` describes; dst and src are the addresses of element 0. The two
 * ends may overlap only if the layout is a single run and `wide` is false. With `wide`,
 * long runs go past the caches, which suits a target that is larger than the caches or
 * that nobody reads soon. */
void cm_host_copy(const cm_layout *layout, void *dst, const void *src, bool wide);

/* Do the same as cm_host_copy() for elements that are converted. The two ends must not
 * overlap. Returns false if a cast could not convert an element. */
bool cm_host_convert(const cm_convert *convert, const cm_layout *layout, void *dst,
                     const void *src);

/* Check before a copy that the pages of one end, whose element 0 is at `base`, are
 * there (cm_pages_probe()). This does nothing if the end has fewer than `least_nbytes`
 * from its first byte to its last.
 * Fails: CM_EFAULT. */
CM_NODISCARD cm_status cm_host_probe(const cm_layout *layout, cm_side side,
                                     const void *base, uint64_t least_nbytes);

/* Populate each page that the layout touches at an end that is known to be a mapping of
 * a file (cm_pages_populate()). Pages between its runs are left alone, since they need
 * not exist.
 * Fails: CM_EFAULT. */
CM_NODISCARD cm_status cm_host_populate(const cm_layout *layout, cm_side side,
                                        const void *base);

/* All bytes from the lowest byte of one side of a layout to its highest. */
typedef struct cm_host_hull {
    const char *start;
    uint64_t nbytes;
} cm_host_hull;

/* Set `out` to the hull of `side`, and return whether the layout touches every page of
 * the hull. If it does not, `out` is only the first span whose pages are all
 * touched. */
bool cm_host_find_hull(const cm_layout *layout, cm_side side, const void *base,
                       cm_host_hull *out);
