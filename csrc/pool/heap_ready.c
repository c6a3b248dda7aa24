/* SPDX-License-Identifier: Apache-2.0 */
/* Reuse without cutting and joining: a program that asks again and again for the same
 * sizes gets the spans it gave back last. There are few, and any request that finds
 * nothing else turns them into ordinary free spans first, so nothing is wasted by them.
 */
#include "pool/heap_private.h"

static cm_ready_set *
set_of(cm_heap *heap, uint64_t nbytes)
{
    uint64_t hash = (nbytes >> 6) * UINT64_C(0x9E3779B97F4A7C15);
    return &heap->ready[hash >> 59];
}

_Static_assert(CM_READY_SETS == 32, "set_of takes the top five bits");

static void
count_out(cm_heap *heap, const cm_span *span)
{
    heap->ready_count--;
    heap->free_count--;
    heap->free_nbytes -= span->block.nbytes;
}

/* Take a READY span out of its set. */
static cm_span *
take_way(cm_heap *heap, cm_ready_set *set, int way)
{
    cm_span *span = set->span[way];
    set->nbytes[way] = 0;
    set->span[way] = NULL;
    count_out(heap, span);
    return span;
}

/* The one long READY span joins its neighbours. */
static void
settle_long(cm_heap *heap, const cm_heap_view *view)
{
    cm_span *span = heap->ready_long;
    heap->ready_long = NULL;
    count_out(heap, span);
    (void)cm_heap_give(heap, span, span->tag, span->epoch, view);
}

static cm_span *
take_long(cm_heap *heap, uint64_t nbytes, const cm_heap_view *view)
{
    cm_span *span = heap->ready_long;
    if (span == NULL) {
        return NULL;
    }
    if (span->block.nbytes == nbytes && cm_span_is_usable(span, view)) {
        heap->ready_long = NULL;
        count_out(heap, span);
        return span;
    }
    settle_long(heap, view);
    return NULL;
}

static cm_span *
take_short(cm_heap *heap, uint64_t nbytes, const cm_heap_view *view)
{
    cm_ready_set *set = set_of(heap, nbytes);
    for (int way = 0; way < CM_READY_WAYS; way++) {
        if (set->nbytes[way] == nbytes && cm_span_is_usable(set->span[way], view)) {
            return take_way(heap, set, way);
        }
    }
    return NULL;
}

cm_span *
cm_heap_take_ready(cm_heap *heap, uint64_t nbytes, const cm_heap_view *view)
{
    cm_span *span = nbytes > CM_READY_NBYTES ? take_long(heap, nbytes, view)
                                             : take_short(heap, nbytes, view);
    if (span != NULL) {
        span->state = CM_SPAN_LIVE;
        heap->taken_last = span;
    }
    return span;
}

static void
keep_short(cm_heap *heap, cm_span *span, const cm_heap_view *view)
{
    cm_ready_set *set = set_of(heap, span->block.nbytes);
    int way = 0;
    while (way < CM_READY_WAYS && set->nbytes[way] != 0) {
        way++;
    }
    if (way == CM_READY_WAYS) { /* the oldest makes room */
        cm_span *oldest = take_way(heap, set, 0);
        for (way = 0; way < CM_READY_WAYS - 1; way++) {
            set->nbytes[way] = set->nbytes[way + 1];
            set->span[way] = set->span[way + 1];
        }
        (void)cm_heap_give(heap, oldest, oldest->tag, oldest->epoch, view);
    }
    set->nbytes[way] = span->block.nbytes;
    set->span[way] = span;
}

void
cm_heap_give_ready(cm_heap *heap, cm_span *span, uint32_t tag, uint64_t epoch,
                   const cm_heap_view *view)
{
    bool is_long = span->block.nbytes > CM_READY_NBYTES;
    if (is_long && (span != heap->taken_last || heap->ready_long != NULL)) {
        (void)cm_heap_give(heap, span, tag, epoch, view);
        return;
    }
    if (is_long) {
        heap->ready_long = span;
    }
    else {
        keep_short(heap, span, view);
    }
    span->state = CM_SPAN_READY;
    span->tag = tag;
    span->epoch = epoch;
    heap->ready_count++;
    heap->free_count++;
    heap->free_nbytes += span->block.nbytes;
}

void
cm_heap_settle(cm_heap *heap, const cm_heap_view *view)
{
    if (heap->ready_long != NULL) {
        settle_long(heap, view);
    }
    for (int i = 0; i < CM_READY_SETS && heap->ready_count > 0; i++) {
        for (int way = 0; way < CM_READY_WAYS; way++) {
            if (heap->ready[i].nbytes[way] != 0) {
                cm_span *span = take_way(heap, &heap->ready[i], way);
                (void)cm_heap_give(heap, span, span->tag, span->epoch, view);
            }
        }
    }
}
