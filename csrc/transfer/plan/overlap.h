/* SPDX-License-Identifier: Apache-2.0 */
/* Do strided regions share a byte? Exactly, where their bounds alone would take rows
 * that interleave for the same memory. Knows no copies. Locks: none. */
#ifndef CM_TRANSFER_PLAN_OVERLAP_H
#define CM_TRANSFER_PLAN_OVERLAP_H

#include "transfer/plan/batch_plan.h"

/* Where `nbytes` of memory lie, one number for all views of the same byte: emulated
 * memory of the device has a second mapping, exported as memory of the host, and what
 * is page-locked has addresses of the device's own. */
uint64_t cm_overlap_place(cm_runtime *rt, cm_address address, const void *host,
                          uint64_t nbytes);
/* From the lowest byte of the region to its highest. */
cm_byte_span cm_overlap_span(cm_runtime *rt, const cm_region *region);

/* May the two have bytes in common, by whatever view of them? */
bool cm_overlap_is_possible(cm_runtime *rt, const cm_region *dst, const cm_region *src);

#endif
