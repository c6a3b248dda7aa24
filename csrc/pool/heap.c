/* SPDX-License-Identifier: Apache-2.0 */
/* Cutting spans out of arenas and joining them again. Finding them is heap_bins.c. */
#include "pool/heap.h"

#include <stdlib.h>
#include <string.h>

#include "pool/heap_private.h"

/* -- nodes ------------------------------------------------------------------------------ */

enum { SLAB_SPANS = 256 };

typedef struct slab {
    struct slab *next;
    cm_span spans[SLAB_SPANS];
} slab;

static bool
add_slab(cm_heap *heap)
{
    slab *fresh = calloc(1, sizeof(*fresh));
    if (fresh == NULL) {
        return false;
    }
    fresh->next = heap->slabs;
    heap->slabs = fresh;
    for (int i = 0; i < SLAB_SPANS; i++) {
        cm_list_push_back(&heap->spare_spans, &fresh->spans[i].node);
    }
    return true;
}

static cm_span *
new_span(cm_heap *heap)
{
    if (cm_list_is_empty(&heap->spare_spans) && !add_slab(heap)) {
        return NULL;
    }
    cm_span *span = CM_LIST_ENTRY(heap->spare_spans.next, cm_span, node);
    cm_list_remove(&span->node);
    span->requested_nbytes = 0;
    span->tag = 0;
    span->epoch = 0;
    span->late_nbytes = 0;
    return span;
}

/* Take `span` out of its arena and keep the node. */
static void
drop_span(cm_heap *heap, cm_span *span)
{
    if (span->prev != NULL) {
        span->prev->next = span->next;
    }
    else {
        span->arena->first = span->next;
    }
    if (span->next != NULL) {
        span->next->prev = span->prev;
    }
    cm_list_push_front(&heap->spare_spans, &span->node);
}

/* Cut `span`, which no list holds, so that it keeps `nbytes`; the rest, `rest`, is of
 * the same kind and in no list. */
static void
cut_with(cm_heap *heap, cm_span *span, uint64_t nbytes, cm_span *rest)
{
    rest->block.address = span->block.address + nbytes;
    rest->block.host =
        span->block.host == NULL ? NULL : (char *)span->block.host + nbytes;
    rest->block.nbytes = span->block.nbytes - nbytes;
    rest->arena = span->arena;
    rest->state = span->state;
    rest->tag = span->tag;
    rest->epoch = span->epoch;
    if (span->late_nbytes == span->block.nbytes) {
        rest->late_nbytes = rest->block.nbytes;
    }
    else { /* nobody knows which bytes they are: in proportion */
        double share = (double)rest->block.nbytes / (double)span->block.nbytes;
        rest->late_nbytes = (uint64_t)(share * (double)span->late_nbytes);
    }
    span->late_nbytes -= rest->late_nbytes;
    rest->prev = span;
    rest->next = span->next;
    if (rest->next != NULL) {
        rest->next->prev = rest;
    }
    span->next = rest;
    span->block.nbytes = nbytes;
    heap->split_count++;
}

/* The same with a node of the heap's. NULL: no memory, nothing changed. */
static cm_span *
cut(cm_heap *heap, cm_span *span, uint64_t nbytes)
{
    cm_span *rest = new_span(heap);
    if (rest != NULL) {
        cut_with(heap, span, nbytes, rest);
    }
    return rest;
}

/* -- arenas ----------------------------------------------------------------------------- */

void
cm_heap_init(cm_heap *heap)
{
    memset(heap, 0, sizeof(*heap)); /* a literal may be built on the stack: 26 KB */
    cm_list_init(&heap->arenas);
    cm_list_init(&heap->gaps);
    cm_list_init(&heap->spare_spans);
    for (int i = 0; i < CM_BIN_COUNT; i++) {
        cm_list_init(&heap->bins[i]);
    }
}

static void
free_arena(cm_arena *arena)
{
    free(arena->chunk_at);
    free(arena);
}

void
cm_heap_fini(cm_heap *heap)
{
    cm_list *node;
    while ((node = cm_list_pop_front(&heap->arenas)) != NULL) {
        free_arena(CM_LIST_ENTRY(node, cm_arena, node));
    }
    for (slab *s = heap->slabs; s != NULL;) {
        slab *next = s->next;
        free(s);
        s = next;
    }
    cm_heap_init(heap);
}

static cm_arena *
add_arena(cm_heap *heap, void *host, cm_address base, uint64_t nbytes,
          cm_span_state state)
{
    cm_arena *arena = calloc(1, sizeof(*arena));
    cm_span *span = arena == NULL ? NULL : new_span(heap);
    if (span == NULL) {
        free(arena);
        return NULL;
    }
    *arena = (cm_arena){.host = host, .base = base, .nbytes = nbytes, .first = span};
    span->block = (cm_block){host, base, nbytes};
    span->arena = arena;
    span->prev = span->next = NULL;
    span->state = state;
    cm_list_push_back(&heap->arenas, &arena->node);
    heap->arena_count++;
    return arena;
}

cm_arena *
cm_heap_add_chunk(cm_heap *heap, const cm_chunk *chunk)
{
    cm_arena *arena =
        add_arena(heap, chunk->host, chunk->address, chunk->nbytes, CM_SPAN_FREE);
    if (arena != NULL) {
        arena->chunk = *chunk;
        cm_heap_bin(heap, arena->first);
    }
    return arena;
}

cm_arena *
cm_heap_add_range(cm_heap *heap, cm_address base, uint64_t nbytes, uint64_t granule)
{
    cm_chunk **chunk_at = calloc(nbytes / granule, sizeof(*chunk_at));
    if (chunk_at == NULL) {
        return NULL;
    }
    cm_arena *arena = add_arena(heap, NULL, base, nbytes, CM_SPAN_GAP);
    if (arena == NULL) {
        free(chunk_at);
        return NULL;
    }
    arena->chunk_at = chunk_at;
    arena->granule = granule;
    cm_list_push_back(&heap->gaps, &arena->first->node);
    return arena;
}

void
cm_heap_remove_arena(cm_heap *heap, cm_arena *arena)
{
    cm_span *only = arena->first;
    if (only->state == CM_SPAN_FREE) {
        cm_heap_unbin(heap, only);
    }
    cm_list_remove(&only->node);
    cm_list_push_front(&heap->spare_spans, &only->node);
    cm_list_remove(&arena->node);
    heap->arena_count--;
    free_arena(arena);
}

/* -- giving and joining ----------------------------------------------------------------- */

static uint64_t
late_nbytes(const cm_span *span, const cm_heap_view *view)
{
    return cm_span_is_clean(span, view) ? 0 : span->late_nbytes;
}

bool
cm_heap_may_join(const cm_span *a, const cm_span *b, const cm_heap_view *view)
{
    bool a_clean = cm_span_is_clean(a, view);
    bool b_clean = cm_span_is_clean(b, view);
    if ((a_clean && b_clean) || (!a_clean && !b_clean && a->tag == b->tag)) {
        return true;
    }
    if (!a_clean && !b_clean) {
        return false;
    }
    uint64_t late = a_clean ? b->late_nbytes : a->late_nbytes;
    return view->alone || late >= a->block.nbytes + b->block.nbytes - late;
}

void
cm_heap_add_up(cm_span *a, const cm_span *b, const cm_heap_view *view)
{
    bool a_clean = cm_span_is_clean(a, view);
    bool b_clean = cm_span_is_clean(b, view);
    a->late_nbytes = late_nbytes(a, view) + late_nbytes(b, view);
    if (a_clean && b_clean) {
        a->tag = 0;
        a->epoch = 0;
    }
    else if (a_clean) {
        a->tag = b->tag;
        a->epoch = b->epoch;
    }
    else if (!b_clean && b->epoch > a->epoch) {
        a->epoch = b->epoch;
    }
    a->block.nbytes += b->block.nbytes;
}

/* Put `b`, the next neighbour of `a`, into `a`. Neither is in a list. */
static void
absorb(cm_heap *heap, cm_span *a, cm_span *b, const cm_heap_view *view)
{
    cm_heap_add_up(a, b, view);
    drop_span(heap, b);
    heap->merge_count++;
}

cm_span *
cm_heap_give(cm_heap *heap, cm_span *span, uint32_t tag, uint64_t epoch,
             const cm_heap_view *view)
{
    span->state = CM_SPAN_FREE;
    span->tag = tag;
    span->epoch = epoch;
    span->late_nbytes = tag == 0 ? 0 : span->block.nbytes;
    cm_span *next = span->next;
    if (next != NULL && next->state == CM_SPAN_FREE) {
        if (cm_heap_may_join(span, next, view)) {
            cm_heap_unbin(heap, next);
            absorb(heap, span, next, view);
        }
        else {
            heap->apart_count++;
        }
    }
    cm_span *prev = span->prev;
    if (prev != NULL && prev->state == CM_SPAN_FREE) {
        if (cm_heap_may_join(prev, span, view)) {
            cm_heap_unbin(heap, prev);
            absorb(heap, prev, span, view);
            span = prev;
        }
        else {
            heap->apart_count++;
        }
    }
    cm_heap_bin(heap, span);
    return span;
}

void
cm_heap_give_gap(cm_heap *heap, cm_span *span)
{
    span->state = CM_SPAN_GAP;
    span->tag = 0;
    span->epoch = 0;
    cm_span *next = span->next;
    if (next != NULL && next->state == CM_SPAN_GAP) {
        cm_list_remove(&next->node);
        span->block.nbytes += next->block.nbytes;
        drop_span(heap, next);
    }
    cm_span *prev = span->prev;
    if (prev != NULL && prev->state == CM_SPAN_GAP) {
        prev->block.nbytes += span->block.nbytes;
        drop_span(heap, span);
        return;
    }
    cm_list_push_back(&heap->gaps, &span->node);
}

cm_span *
cm_heap_take_node(cm_heap *heap)
{
    return new_span(heap);
}

void
cm_heap_give_node(cm_heap *heap, cm_span *node)
{
    cm_list_push_front(&heap->spare_spans, &node->node);
}

void
cm_heap_split_busy(cm_heap *heap, cm_span *span, uint64_t nbytes, cm_span *node)
{
    cut_with(heap, span, nbytes, node);
}

cm_span *
cm_heap_fuse(cm_heap *heap, cm_span *first, cm_span *second)
{
    first->block.nbytes += second->block.nbytes;
    drop_span(heap, second);
    return first;
}

static bool
join_arena(cm_heap *heap, const cm_arena *arena, const cm_heap_view *view)
{
    bool any = false;
    cm_span *span = arena->first;
    while (span != NULL) {
        cm_span *next = span->next;
        if (span->state == CM_SPAN_FREE && next != NULL && next->state == CM_SPAN_FREE
            && cm_heap_may_join(span, next, view)) {
            cm_heap_unbin(heap, span);
            cm_heap_unbin(heap, next);
            absorb(heap, span, next, view);
            cm_heap_bin(heap, span);
            any = true;
            continue;
        }
        span = next;
    }
    return any;
}

bool
cm_heap_join(cm_heap *heap, const cm_heap_view *view)
{
    bool any = false;
    if (heap->apart_count == 0) {
        return false;
    }
    heap->apart_count = 0;
    for (cm_list *n = heap->arenas.next; n != &heap->arenas; n = n->next) {
        any |= join_arena(heap, CM_LIST_ENTRY(n, cm_arena, node), view);
    }
    heap->apart_count = heap->free_count > 1 ? 1 : 0;
    return any;
}

/* -- cutting ---------------------------------------------------------------------------- */

/* Give back to the bins or the gaps what was cut off `like`. */
static void
put_rest(cm_heap *heap, cm_span *rest)
{
    if (rest->state == CM_SPAN_FREE) {
        cm_heap_bin(heap, rest);
    }
    else {
        cm_list_push_back(&heap->gaps, &rest->node);
    }
}

cm_span *
cm_heap_carve(cm_heap *heap, cm_span *span, cm_address address, uint64_t nbytes)
{
    if (span->state == CM_SPAN_FREE) {
        cm_heap_unbin(heap, span);
    }
    else {
        cm_list_remove(&span->node);
    }
    cm_span *middle = span;
    if (address > span->block.address) {
        middle = cut(heap, span, address - span->block.address);
        if (middle == NULL) {
            put_rest(heap, span);
            return NULL;
        }
    }
    if (middle->block.nbytes > nbytes) {
        cm_span *rest = cut(heap, middle, nbytes);
        if (rest == NULL) {
            if (middle != span) {
                span->block.nbytes += middle->block.nbytes;
                drop_span(heap, middle);
            }
            put_rest(heap, span);
            return NULL;
        }
        put_rest(heap, rest);
    }
    if (middle != span) {
        put_rest(heap, span);
    }
    middle->state = CM_SPAN_BUSY;
    return middle;
}

cm_span *
cm_heap_cut_live(cm_heap *heap, cm_span *span, uint64_t nbytes, uint64_t align)
{
    uint64_t pad = (0 - span->block.address) & (align - 1);
    if (pad == 0 && span->block.nbytes == nbytes) {
        cm_heap_unbin(heap, span);
        span->state = CM_SPAN_LIVE;
        heap->taken_last = span;
        return span;
    }
    cm_span *taken = cm_heap_carve(heap, span, span->block.address + pad, nbytes);
    if (taken != NULL) {
        taken->state = CM_SPAN_LIVE;
        heap->taken_last = taken;
    }
    return taken;
}
