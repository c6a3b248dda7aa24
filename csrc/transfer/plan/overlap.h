/* SPDX-License-Identifier: Apache-2.0 */
/* Do strided regions share a byte? Exactly, where their bounds alone would take rows
 * that interleave for the same memory. Knows no copies. Locks: none. */
#ifndef CM_TRANSFER_PLAN_OVERLAP_H
#define CM_TRANSFER_PLAN_OVERLAP_H

#include "transfer/plan/batch_plan.h"

/* Where `nbytes` of memory lie, one number for all views of the same byte: emulated
 * device memory has a second mapping, which is exported as memory of the host. */
uint64_t cm_overlap_place(cm_runtime *rt, cm_address address, const void *host,
                          bool on_device, uint64_t nbytes);
/* From the lowest byte of the region to its highest. */
cm_byte_span cm_overlap_span(cm_runtime *rt, const cm_region *region);

/* Is there a byte in both, when their lowest bytes lie at `a_begin` and `b_begin`?
 * Where that takes too long to find out, the answer is yes: strides that are neither
 * multiples of each other nor of one array. */
bool cm_overlap_is_real(const cm_region *a, uint64_t a_begin, const cm_region *b,
                        uint64_t b_begin);

/* Two of the regions, *first < *second, that share a byte; *out false: there are none.
 * With `skips_same` regions that are one and the same do not count.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_overlap_find(cm_runtime *rt, const cm_region *regions,
                                       uint32_t count, bool skips_same, uint32_t *first,
                                       uint32_t *second, bool *out);

#endif
