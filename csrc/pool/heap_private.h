/* SPDX-License-Identifier: Apache-2.0 */
/* What heap.c (cutting and joining) and heap_bins.c (finding) share. Nobody else
 * includes this. Locks: as heap.h. */
#ifndef CM_POOL_HEAP_PRIVATE_H
#define CM_POOL_HEAP_PRIVATE_H

#include "pool/heap.h"

/* A FREE span enters and leaves the bin of its size. */
void cm_heap_bin(cm_heap *heap, cm_span *span);
void cm_heap_unbin(cm_heap *heap, cm_span *span);

/* Turn a FREE span, which is long enough, into a LIVE one of exactly `nbytes`; what is
 * left on either side is FREE. NULL: no memory for nodes, nothing changed. */
cm_span *cm_heap_cut_live(cm_heap *heap, cm_span *span, uint64_t nbytes,
                          uint64_t align);

#endif
