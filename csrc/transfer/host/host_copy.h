/* SPDX-License-Identifier: Apache-2.0 */
/* Strided copies by the CPU: both ends are plain host memory. */
#pragma once

#include "base/convert.h"
#include "transfer/plan/layout.h"

/* Copy what `layout` describes; dst and src are the addresses of element 0. The two
 * must not overlap unless the layout is a single run. With `wide` they must not at all,
 * and long runs go past the caches: for a target that is larger than they are or that
 * nobody reads soon. */
void cm_host_copy(const cm_layout *layout, void *dst, const void *src, bool wide);

/* The same of elements that are converted; the two must not overlap. False: a cast
 * could not convert some. */
bool cm_host_convert(const cm_convert *convert, const cm_layout *layout, void *dst,
                     const void *src);

/* Before that, at one end whose element 0 is at `base`: cm_pages_look() where it has at
 * least `least_nbytes` from its first byte to its last. Fails: CM_EFAULT. */
CM_NODISCARD cm_status cm_host_look(const cm_layout *layout, cm_side side,
                                    const void *base, uint64_t least_nbytes);

/* Where that is known to be a mapped file's: cm_pages_populate() for each page that the
 * layout touches. Pages that lie between its runs are left alone, as they need not be
 * there. Fails: CM_EFAULT. */
CM_NODISCARD cm_status cm_host_populate(const cm_layout *layout, cm_side side,
                                        const void *base);

/* From the lowest byte of that side to its highest. */
typedef struct cm_host_hull {
    const char *start;
    uint64_t nbytes;
} cm_host_hull;

/* Does the layout touch every page of its hull? */
bool cm_host_find_hull(const cm_layout *layout, cm_side side, const void *base,
                       cm_host_hull *out);
