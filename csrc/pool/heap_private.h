/* SPDX-License-Identifier: Apache-2.0 */
/* What heap.c (cutting and joining), heap_bins.c (finding) and heap_runs.c (telling)
 * share. Nobody else includes this. Locks: as heap.h. */
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

/* May two FREE neighbours become one? What one stream is late with must not hold up
 * much more than it covers: a clean span joins a late one only if half of both was
 * given by that stream, however they came about. */
bool cm_heap_may_join(const cm_span *a, const cm_span *b, const cm_heap_view *view);
/* Let `a` say what it and `b`, its next neighbour, are together; `b` stays. */
void cm_heap_add_up(cm_span *a, const cm_span *b, const cm_heap_view *view);

#endif
