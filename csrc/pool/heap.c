/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the heap: spans, the bins in which they are found by size, and the READY
 * spans. heap.h explains all three, and what makes a span clean or pending. */
#include "pool/heap.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked_math.h"

/* -- nodes ------------------------------------------------------------------------------ */

enum { SLAB_SPANS = 256 };

typedef struct slab {
    struct slab *next;
    cm_heap_span spans[SLAB_SPANS];
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
    heap->node_count += SLAB_SPANS;
    for (int i = 0; i < SLAB_SPANS; i++) {
        cm_list_push_back(&heap->spare_spans, &fresh->spans[i].node);
    }
    return true;
}

/* Make sure that at least two nodes are spare, since cm_heap_carve() may cut a span
 * twice and each cut takes a node. A node is the struct that describes a span. Returns
 * false if there is no memory for more nodes. */
static bool
have_nodes(cm_heap *heap)
{
    return heap->spare_spans.next != heap->spare_spans.prev || add_slab(heap);
}

static cm_heap_span *
take_node(cm_heap *heap)
{
    if (!have_nodes(heap)) {
        return NULL;
    }
    cm_heap_span *span = CM_LIST_ENTRY(heap->spare_spans.next, cm_heap_span, node);
    cm_list_remove(&span->node);
    span->requested_nbytes = 0;
    span->tag = 0;
    span->epoch = 0;
    span->pending_nbytes = 0;
    return span;
}

/* Take `span` out of its arena and put its node back among the spare ones. */
static void
drop_span(cm_heap *heap, cm_heap_span *span)
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

cm_heap_span *
cm_heap_cut(cm_heap *heap, cm_heap_span *span, uint64_t nbytes)
{
    cm_heap_span *rest = take_node(heap);
    if (rest == NULL) {
        return NULL;
    }
    rest->block.address = span->block.address + nbytes;
    rest->block.host =
        span->block.host == NULL ? NULL : (char *)span->block.host + nbytes;
    rest->block.nbytes = span->block.nbytes - nbytes;
    rest->arena = span->arena;
    rest->state = span->state;
    rest->tag = span->tag;
    rest->epoch = span->epoch;
    if (span->pending_nbytes == span->block.nbytes) {
        rest->pending_nbytes = rest->block.nbytes;
    }
    /* Nobody knows which bytes are pending, so both parts get a share of them in
     * proportion to their length. */
    else {
        double share = (double)rest->block.nbytes / (double)span->block.nbytes;
        rest->pending_nbytes = (uint64_t)(share * (double)span->pending_nbytes);
    }
    span->pending_nbytes -= rest->pending_nbytes;
    rest->prev = span;
    rest->next = span->next;
    if (rest->next != NULL) {
        rest->next->prev = rest;
    }
    span->next = rest;
    span->block.nbytes = nbytes;
    return rest;
}

/* -- bins ----------------------------------------------------------------------------- */

/* The sizes of two neighbouring bins differ by about 3 %, and a bitmap tells which bins
 * have spans. A search looks at only a few spans of each bin, so its time does not grow
 * with the number of spans. */
enum {
    UNIT_SHIFT = 6,    /* sizes are counted in units of 64 bytes */
    MANTISSA_BITS = 5, /* 32 bins for each power of two */
    /* How many spans a search looks at in the bin of the requested size. Some of the
       spans in this bin may be too short. */
    LOOK_OWN_BIN = 24,
    LOOK_LATER_BINS = 8, /* the same in each bin of longer spans */
    /* How many bins with spans a search looks at before it gives up. It may find
       nothing in them, because all of their spans may be pending for other streams. */
    LOOK_BINS = 8,
    /* The search stops after this many spans that fit and takes the best of them. */
    LOOK_FITS = 12,
    TIDY_NBYTES = 1000000, /* a shorter block never takes a hole if a span fits */
    TIDY_MISSING = 4 /* how many granules of a hole that is preferred to a span may be
                        without memory */
};

static uint32_t
bin_of(uint64_t nbytes)
{
    uint64_t units = nbytes >> UNIT_SHIFT;
    if (units < (1u << MANTISSA_BITS)) {
        return (uint32_t)units;
    }
    uint32_t top = 63u - (uint32_t)__builtin_clzll(units);
    uint32_t shift = top - MANTISSA_BITS;
    uint32_t bin = ((shift + 1) << MANTISSA_BITS)
                   + (uint32_t)((units >> shift) & ((1u << MANTISSA_BITS) - 1));
    return bin < CM_HEAP_BIN_COUNT ? bin : CM_HEAP_BIN_COUNT - 1;
}

/* bin_span() puts a FREE span into the bin of its size, and unbin_span() takes it out
 * again. */
static void
bin_span(cm_heap *heap, cm_heap_span *span)
{
    uint32_t bin = bin_of(span->block.nbytes);
    cm_list_push_front(&heap->bins[bin], &span->node);
    heap->occupied[bin / 64] |= UINT64_C(1) << (bin % 64);
    heap->free_nbytes += span->block.nbytes;
    heap->free_count++;
}

static void
unbin_span(cm_heap *heap, cm_heap_span *span)
{
    uint32_t bin = bin_of(span->block.nbytes);
    cm_list_remove(&span->node);
    if (cm_list_is_empty(&heap->bins[bin])) {
        heap->occupied[bin / 64] &= ~(UINT64_C(1) << (bin % 64));
    }
    heap->free_nbytes -= span->block.nbytes;
    heap->free_count--;
}

/* -- arenas ----------------------------------------------------------------------------- */

void
cm_heap_init(cm_heap *heap)
{
    /* This is no assignment of a compound literal, because a compiler might build the
     * 26 KB of the literal on the stack first. */
    memset(heap, 0, sizeof(*heap));
    cm_list_init(&heap->arenas);
    cm_list_init(&heap->gaps);
    cm_list_init(&heap->spare_spans);
    for (int i = 0; i < CM_HEAP_BIN_COUNT; i++) {
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

/* Add an arena that is covered by one span in the given state. Returns NULL if there is
 * no memory. */
static cm_arena *
add_arena(cm_heap *heap, void *host, cm_address base, uint64_t nbytes,
          cm_span_state state)
{
    cm_arena *arena = calloc(1, sizeof(*arena));
    cm_heap_span *span = arena == NULL ? NULL : take_node(heap);
    if (span == NULL) {
        free(arena);
        return NULL;
    }
    *arena = (cm_arena){.heap = heap, .host = host, .base = base, .nbytes = nbytes};
    arena->first = span;
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
        bin_span(heap, arena->first);
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
    cm_heap_span *only = arena->first;
    if (only->state == CM_SPAN_FREE) {
        unbin_span(heap, only);
    }
    cm_list_remove(&only->node);
    cm_list_push_front(&heap->spare_spans, &only->node);
    cm_list_remove(&arena->node);
    heap->arena_count--;
    free_arena(arena);
}

/* -- giving and joining ----------------------------------------------------------------- */

static uint64_t
pending_nbytes(const cm_heap_span *span, const cm_heap_view *view)
{
    return cm_span_is_clean(span, view) ? 0 : span->pending_nbytes;
}

/* True if two FREE neighbours may become one. Pending work of one stream must not hold
 * up much more memory than it covers. So a clean span joins a pending one only if at
 * least half of the bytes of both together are pending, or if no other stream could
 * want the memory (view->single_stream). */
static bool
may_join(const cm_heap_span *a, const cm_heap_span *b, const cm_heap_view *view)
{
    bool a_clean = cm_span_is_clean(a, view);
    bool b_clean = cm_span_is_clean(b, view);
    if ((a_clean && b_clean) || (!a_clean && !b_clean && a->tag == b->tag)) {
        return true;
    }
    if (!a_clean && !b_clean) {
        return false;
    }
    uint64_t pending = a_clean ? b->pending_nbytes : a->pending_nbytes;
    return view->single_stream
           || pending >= a->block.nbytes + b->block.nbytes - pending;
}

/* Make `a` cover its next neighbour `b` as well. The node of `b` stays in the arena. */
static void
add_up(cm_heap_span *a, const cm_heap_span *b, const cm_heap_view *view)
{
    bool a_clean = cm_span_is_clean(a, view);
    bool b_clean = cm_span_is_clean(b, view);
    a->pending_nbytes = pending_nbytes(a, view) + pending_nbytes(b, view);
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

/* Join `b` to `a`, the neighbour below `b`. One of the two spans is in a bin and the
 * other is in none. `binned` is the span in the bin, and joining takes it out of there.
 * Returns false, and changes nothing, if the two must not join because of work that
 * still runs on them. */
static bool
try_join(cm_heap *heap, cm_heap_span *a, cm_heap_span *b, cm_heap_span *binned,
         const cm_heap_view *view)
{
    if (!may_join(a, b, view)) {
        heap->unjoined_count++;
        return false;
    }
    unbin_span(heap, binned);
    add_up(a, b, view);
    drop_span(heap, b);
    heap->merge_count++;
    return true;
}

cm_heap_span *
cm_heap_give(cm_heap *heap, cm_heap_span *span, uint32_t tag, uint64_t epoch,
             const cm_heap_view *view)
{
    span->state = CM_SPAN_FREE;
    span->tag = tag;
    span->epoch = epoch;
    span->pending_nbytes = tag == 0 ? 0 : span->block.nbytes;
    cm_heap_span *next = span->next;
    if (next != NULL && next->state == CM_SPAN_FREE) {
        (void)try_join(heap, span, next, next, view);
    }
    cm_heap_span *prev = span->prev;
    if (prev != NULL && prev->state == CM_SPAN_FREE
        && try_join(heap, prev, span, prev, view)) {
        span = prev;
    }
    bin_span(heap, span);
    return span;
}

void
cm_heap_join_next(cm_heap *heap, cm_heap_span *span)
{
    span->block.nbytes += span->next->block.nbytes;
    drop_span(heap, span->next);
}

void
cm_heap_give_gap(cm_heap *heap, cm_heap_span *span)
{
    span->state = CM_SPAN_GAP;
    span->tag = 0;
    span->epoch = 0;
    cm_heap_span *next = span->next;
    if (next != NULL && next->state == CM_SPAN_GAP) {
        cm_list_remove(&next->node);
        cm_heap_join_next(heap, span);
    }
    cm_heap_span *prev = span->prev;
    if (prev != NULL && prev->state == CM_SPAN_GAP) {
        cm_heap_join_next(heap, prev);
        return;
    }
    cm_list_push_back(&heap->gaps, &span->node);
}

bool
cm_heap_join(cm_heap *heap, const cm_heap_view *view)
{
    bool any = false;
    if (heap->unjoined_count == 0) {
        return false;
    }
    for (cm_list *n = heap->arenas.next; n != &heap->arenas; n = n->next) {
        for (cm_heap_span *next, *s = CM_LIST_ENTRY(n, cm_arena, node)->first;
             s != NULL && (next = s->next) != NULL;) {
            if (s->state != CM_SPAN_FREE || next->state != CM_SPAN_FREE
                || !may_join(s, next, view)) {
                s = next;
                continue;
            }
            unbin_span(heap, s);
            any |= try_join(heap, s, next, next, view);
            bin_span(heap, s);
        }
    }
    heap->unjoined_count = heap->free_count > 1 ? 1 : 0;
    return any;
}

/* -- cutting ---------------------------------------------------------------------------- */

/* File a part that was cut off a span. If the part is FREE, it goes into the bin of its
 * size, and if it is a GAP, it goes into the list of gaps. */
static void
put_rest(cm_heap *heap, cm_heap_span *rest)
{
    if (rest->state == CM_SPAN_FREE) {
        bin_span(heap, rest);
    }
    else {
        cm_list_push_back(&heap->gaps, &rest->node);
    }
}

cm_heap_span *
cm_heap_carve(cm_heap *heap, cm_heap_span *span, cm_address address, uint64_t nbytes)
{
    if (!have_nodes(heap)) {
        return NULL;
    }
    if (span->state == CM_SPAN_FREE) {
        unbin_span(heap, span);
    }
    else {
        cm_list_remove(&span->node);
    }
    cm_heap_span *middle = span;
    if (address > span->block.address) {
        middle = cm_heap_cut(heap, span, address - span->block.address);
        heap->split_count++;
    }
    if (middle->block.nbytes > nbytes) {
        put_rest(heap, cm_heap_cut(heap, middle, nbytes));
        heap->split_count++;
    }
    if (middle != span) {
        put_rest(heap, span);
    }
    middle->state = CM_SPAN_BUSY;
    return middle;
}

/* -- finding -------------------------------------------------------------------------- */

/* Return the first bin from `bin` on that has spans, or CM_HEAP_BIN_COUNT if there is
 * none. */
static uint32_t
next_bin(const cm_heap *heap, uint32_t bin)
{
    if (bin >= CM_HEAP_BIN_COUNT) {
        return CM_HEAP_BIN_COUNT;
    }
    uint32_t word = bin / 64;
    uint64_t bits = heap->occupied[word] & (~UINT64_C(0) << (bin % 64));
    while (bits == 0) {
        if (++word == CM_BIN_WORDS) {
            return CM_HEAP_BIN_COUNT;
        }
        bits = heap->occupied[word];
    }
    return word * 64 + (uint32_t)__builtin_ctzll(bits);
}

static bool
fits(const cm_heap_span *span, uint64_t nbytes, uint64_t align,
     const cm_heap_view *view)
{
    uint64_t pad = (0 - span->block.address) & (align - 1);
    return span->block.nbytes >= nbytes && span->block.nbytes - nbytes >= pad
           && cm_span_is_usable(span, view);
}

/* Count the granules that a block at `begin` would have to itself. [low, high) is the
 * run of addresses around the block where nothing is live. A granule that reaches
 * beyond the run is shared with other blocks and does not count. */
static uint64_t
count_touched(uint64_t granule, cm_address low, cm_address high, cm_address begin,
              uint64_t nbytes)
{
    cm_address first = begin / granule * granule;
    cm_address end = cm_round_up_to(begin + nbytes, granule);
    uint64_t shared = (uint64_t)(first < low) + (uint64_t)(end > high);
    uint64_t count = (end - first) / granule;
    return count > shared ? count - shared : 0;
}

static bool
is_gap(const cm_heap_span *span)
{
    return span != NULL && span->state == CM_SPAN_GAP;
}

/* True if `a` is a better place than `b` (see cm_hole). If `grows` is set, the pool is
 * going to bring memory to the gaps of the place, so the number of granules without
 * memory matters most. */
static bool
is_better(const cm_hole *a, const cm_hole *b, bool grows)
{
    if (b->first == NULL || (grows && a->missing != b->missing)) {
        return b->first == NULL || a->missing < b->missing;
    }
    if (a->touched != b->touched) {
        return a->touched < b->touched;
    }
    return a->run_nbytes != b->run_nbytes ? a->run_nbytes < b->run_nbytes
                                          : a->missing < b->missing;
}

/* Replace `best` by a place at one end of a free span if that place is better. The
 * function tries the end of the span where the block touches fewer granules. If the
 * block touches equally many granules at both ends, the function tries the lower end.
 * But if a gap lies below the span and no gap lies above it, it tries the upper end. */
static void
try_span(cm_heap_span *span, uint64_t nbytes, uint64_t align, cm_hole *best)
{
    cm_address low = span->block.address;
    cm_address high = cm_span_end(span);
    uint64_t granule = span->arena->granule;
    cm_hole hole = {.first = span,
                    .begin = cm_round_up_to(low, align),
                    .run_nbytes = span->block.nbytes};
    if (granule != 0) {
        cm_address begin = (high - nbytes) & ~(align - 1);
        uint64_t touched = count_touched(granule, low, high, begin, nbytes);
        hole.touched = count_touched(granule, low, high, hole.begin, nbytes);
        bool is_apart = is_gap(span->prev) && !is_gap(span->next);
        if (touched < hole.touched || (touched == hole.touched && is_apart)) {
            hole.begin = begin;
            hole.touched = touched;
        }
    }
    if (is_better(&hole, best, false)) {
        *best = hole;
    }
}

/* Look at the first `look` spans of a bin, and lower *wanted by one for each span that
 * fits. */
static void
look_in_bin(const cm_list *bin, uint64_t look, uint64_t nbytes, uint64_t align,
            const cm_heap_view *view, uint32_t *wanted, cm_hole *best)
{
    for (cm_list *n = bin->next; n != bin && look > 0 && *wanted > 0;
         n = n->next, look--) {
        cm_heap_span *span = CM_LIST_ENTRY(n, cm_heap_span, node);
        if (!fits(span, nbytes, align, view)) {
            continue;
        }
        --*wanted;
        try_span(span, nbytes, align, best);
        if (span->block.nbytes == nbytes && best->first == span) {
            *wanted = 0; /* it fits exactly, so no other can be better */
        }
    }
}

/* Replace `best` by the place that begins at `begin` if that place is better. The place
 * lies in the run (heap.h) that goes from the span `first` to the address `end`. */
static void
try_hole(cm_heap_span *first, cm_address end, cm_address begin, uint64_t nbytes,
         bool grows, cm_hole *best)
{
    uint64_t granule = first->arena->granule;
    cm_address run_begin = first->block.address;
    cm_address low = begin / granule * granule;
    cm_address high = cm_round_up_to(begin + nbytes, granule);
    cm_hole hole = {.begin = begin,
                    .touched = count_touched(granule, run_begin, end, begin, nbytes),
                    .run_nbytes = end - run_begin};
    if (!grows && best->first != NULL && hole.touched > best->touched) {
        return;
    }
    for (cm_heap_span *span = first;
         span != NULL && span->block.address < begin + nbytes; span = span->next) {
        if (cm_span_end(span) <= begin) {
            continue;
        }
        hole.first = hole.first == NULL ? span : hole.first;
        hole.span_count++;
        if (span->state == CM_SPAN_GAP) {
            cm_address from = span->block.address > low ? span->block.address : low;
            cm_address to = cm_span_end(span) < high ? cm_span_end(span) : high;
            hole.missing += (to - from) / granule;
        }
    }
    if (hole.missing > 0 && (grows || hole.missing <= TIDY_MISSING)
        && is_better(&hole, best, grows)) {
        *best = hole;
    }
}

static bool
is_in_run(const cm_heap_span *span, const cm_heap_view *view)
{
    return is_gap(span)
           || (span != NULL && span->state == CM_SPAN_FREE
               && cm_span_is_usable(span, view));
}

/* Try two places in every run that has a gap, one at each end of the run. A place at an
 * end may share a granule with the span beside the run, and a shared granule does not
 * count as touched. At the end of the arena there is no such span, so the upper end is
 * not tried there. */
void
cm_heap_find_hole(const cm_heap *heap, uint64_t nbytes, uint64_t align,
                  const cm_heap_view *view, bool grows, cm_hole *best)
{
    for (cm_list *n = heap->gaps.next; n != &heap->gaps; n = n->next) {
        cm_heap_span *first = CM_LIST_ENTRY(n, cm_heap_span, node);
        cm_heap_span *last = first;
        while (is_in_run(last->next, view)) {
            last = last->next;
        }
        do {
            first = is_in_run(first->prev, view) ? first->prev : NULL;
        } while (first != NULL && !is_gap(first) && is_in_run(first->prev, view));
        if (is_gap(first)) {
            continue; /* this run was tried when its first gap came */
        }
        first = first != NULL ? first : CM_LIST_ENTRY(n, cm_heap_span, node);
        cm_address end = cm_span_end(last);
        cm_address begin = cm_round_up_to(first->block.address, align);
        if (begin > end || end - begin < nbytes || (last->next == NULL && !grows)) {
            continue;
        }
        try_hole(first, end, begin, nbytes, grows, best);
        if (last->next != NULL) {
            begin = (end - nbytes) & ~(align - 1);
            try_hole(first, end, begin, nbytes, grows, best);
        }
    }
}

/* True if a long block should take a hole rather than the place `fit` in a free span. A
 * hole is better if the block would touch fewer granules there, even though the memory
 * of a few granules has to be moved to the hole first. The reason is that the memory of
 * a granule can no longer be moved elsewhere once a block touches the granule. This
 * matters only for a while after the pool had to grow. So each growth sets
 * hole_preference_count, which limits how many calls look for a hole. */
static bool
is_better_in_hole(cm_heap *heap, uint64_t nbytes, uint64_t align,
                  const cm_heap_view *view, const cm_hole *fit)
{
    if (heap->hole_preference_count == 0) {
        return false;
    }
    heap->hole_preference_count--;
    cm_hole best = *fit;
    best.run_nbytes = 0; /* so that a hole wins only if it touches fewer granules */
    best.missing = 0;
    if (nbytes >= TIDY_NBYTES && fit->touched > 0) {
        cm_heap_find_hole(heap, nbytes, align, view, false, &best);
    }
    /* A hole that begins in the same span as `fit` does not count. We tried to count
     * such holes too, by returning `best.missing > 0`. Then the replay of traces (T13
     * of benchmarks/pools.py) reserved 0.9 % more for two_streams, 0.6 % less for
     * unet_attention and the same for three others. */
    return best.first != fit->first;
}

/* Look at a few free spans, or at all of them if `every` is set, take the best one and
 * cut it to size. */
static cm_heap_span *
take_fit(cm_heap *heap, uint64_t nbytes, uint64_t align, const cm_heap_view *view,
         bool every)
{
    uint32_t own = bin_of(nbytes);
    uint32_t bin = next_bin(heap, own);
    uint32_t bins = every ? CM_HEAP_BIN_COUNT : LOOK_BINS;
    uint32_t wanted = every ? UINT32_MAX : LOOK_FITS;
    cm_hole best = {.first = NULL};
    for (; bin < CM_HEAP_BIN_COUNT && bins > 0 && wanted > 0; bins--) {
        uint64_t look = bin == own ? LOOK_OWN_BIN : LOOK_LATER_BINS;
        if (every) {
            look = UINT64_MAX;
        }
        look_in_bin(&heap->bins[bin], look, nbytes, align, view, &wanted, &best);
        if (best.first != NULL && (every || best.touched == 0)) {
            break;
        }
        bin = next_bin(heap, bin + 1);
    }
    if (best.first == NULL || is_better_in_hole(heap, nbytes, align, view, &best)) {
        return NULL;
    }
    cm_heap_span *span = cm_heap_carve(heap, best.first, best.begin, nbytes);
    if (span != NULL) {
        span->state = CM_SPAN_LIVE;
        heap->taken_last = span;
    }
    return span;
}

cm_heap_span *
cm_heap_take(cm_heap *heap, uint64_t nbytes, uint64_t align, const cm_heap_view *view)
{
    cm_heap_span *span = take_fit(heap, nbytes, align, view, false);
    if (span == NULL && heap->ready_count > 0) {
        cm_heap_join_ready(heap, view);
        span = take_fit(heap, nbytes, align, view, false);
    }
    return span;
}

cm_heap_span *
cm_heap_search(cm_heap *heap, uint64_t nbytes, uint64_t align, const cm_heap_view *view)
{
    return take_fit(heap, nbytes, align, view, true);
}

/* -- ready spans ---------------------------------------------------------------------- */

/* heap.h says what READY spans are for. */

static cm_heap_span **
set_of(cm_heap *heap, uint64_t nbytes)
{
    uint64_t hash = (nbytes >> 6) * UINT64_C(0x9E3779B97F4A7C15);
    return &heap->ready[(hash >> 59) * CM_READY_WAYS];
}

_Static_assert(CM_READY_SETS == 32, "set_of takes the top five bits");

/* Take a READY span out of the table. */
static cm_heap_span *
take_from(cm_heap *heap, cm_heap_span **entry)
{
    cm_heap_span *span = *entry;
    *entry = NULL;
    heap->ready_count--;
    heap->free_count--;
    heap->free_nbytes -= span->block.nbytes;
    return span;
}

/* Take a READY span out of the table, make it FREE and join it to its neighbours. */
static void
join_ready(cm_heap *heap, cm_heap_span **entry, const cm_heap_view *view)
{
    cm_heap_span *span = take_from(heap, entry);
    (void)cm_heap_give(heap, span, span->tag, span->epoch, view);
}

static bool
is_fit(const cm_heap_span *span, uint64_t nbytes, const cm_heap_view *view)
{
    return span != NULL && span->block.nbytes == nbytes
           && cm_span_is_usable(span, view);
}

cm_heap_span *
cm_heap_take_ready(cm_heap *heap, uint64_t nbytes, const cm_heap_view *view)
{
    cm_heap_span **entry = &heap->ready[CM_READY_LONG];
    if (nbytes <= CM_READY_NBYTES) {
        entry = set_of(heap, nbytes);
        int way = 0;
        while (way < CM_READY_WAYS && !is_fit(entry[way], nbytes, view)) {
            way++;
        }
        if (way == CM_READY_WAYS) {
            return NULL;
        }
        entry += way;
    }
    else if (!is_fit(*entry, nbytes, view)) {
        if (*entry != NULL) {
            join_ready(heap, entry, view);
        }
        return NULL;
    }
    cm_heap_span *span = take_from(heap, entry);
    span->state = CM_SPAN_LIVE;
    heap->taken_last = span;
    return span;
}

/* Find a place in the table for a short span. If its set is full, the oldest of the set
 * becomes an ordinary free span. */
static cm_heap_span **
find_way(cm_heap *heap, uint64_t nbytes, const cm_heap_view *view)
{
    cm_heap_span **set = set_of(heap, nbytes);
    for (int way = 0; way < CM_READY_WAYS; way++) {
        if (set[way] == NULL) {
            return &set[way];
        }
    }
    join_ready(heap, &set[0], view);
    memmove(&set[0], &set[1], (CM_READY_WAYS - 1) * sizeof(*set));
    return &set[CM_READY_WAYS - 1];
}

void
cm_heap_give_ready(cm_heap *heap, cm_heap_span *span, uint32_t tag, uint64_t epoch,
                   const cm_heap_view *view)
{
    cm_heap_span **at = &heap->ready[CM_READY_LONG];
    if (span->block.nbytes <= CM_READY_NBYTES) {
        at = find_way(heap, span->block.nbytes, view);
    }
    else if (span != heap->taken_last || *at != NULL) {
        (void)cm_heap_give(heap, span, tag, epoch, view);
        return;
    }
    *at = span;
    span->state = CM_SPAN_READY;
    span->tag = tag;
    span->epoch = epoch;
    heap->ready_count++;
    heap->free_count++;
    heap->free_nbytes += span->block.nbytes;
}

void
cm_heap_join_ready(cm_heap *heap, const cm_heap_view *view)
{
    for (int i = 0; i < CM_READY_COUNT && heap->ready_count > 0; i++) {
        if (heap->ready[i] != NULL) {
            join_ready(heap, &heap->ready[i], view);
        }
    }
}

/* -- counting the pieces that joining would leave ------------------------------------- */

/* Return a copy of the span as it would be after cm_heap_join_ready(): a READY span is
 * FREE in it. */
static cm_heap_span
as_free(const cm_heap_span *span)
{
    cm_heap_span copy = *span;
    if (copy.state == CM_SPAN_READY) {
        copy.state = CM_SPAN_FREE;
        copy.pending_nbytes = copy.tag == 0 ? 0 : copy.block.nbytes;
    }
    return copy;
}

const cm_heap_span *
cm_heap_follow_piece(const cm_heap_span *first, const cm_heap_view *view,
                     uint64_t *nbytes)
{
    cm_heap_span piece = as_free(first);
    const cm_heap_span *last = first;
    while (last->next != NULL && cm_span_is_free(last->next)) {
        cm_heap_span next = as_free(last->next);
        if (!may_join(&piece, &next, view)) {
            break;
        }
        add_up(&piece, &next, view);
        last = last->next;
    }
    *nbytes = piece.block.nbytes;
    return last;
}

/* Count the pieces (heap.h) in the row of free spans that begins with `first`. If a
 * free span lies before `first`, do nothing, since the row is counted from its own
 * first span. If `is_many` is set, count the span `first` alone, as if it could not
 * join its neighbours. */
static void
count_from(const cm_heap_span *first, const cm_heap_view *view, bool is_many,
           cm_heap_pieces *out)
{
    if (!is_many && first->prev != NULL && cm_span_is_free(first->prev)) {
        return;
    }
    const cm_heap_span *at = first;
    do {
        uint64_t nbytes = at->block.nbytes;
        at = is_many ? NULL : cm_heap_follow_piece(at, view, &nbytes)->next;
        out->looked_count++;
        out->largest_nbytes =
            nbytes > out->largest_nbytes ? nbytes : out->largest_nbytes;
        out->count++;
    } while (at != NULL && cm_span_is_free(at));
}

/* Return the bin of the longest FREE spans, or CM_HEAP_BIN_COUNT if there are none. */
static uint32_t
last_bin(const cm_heap *heap)
{
    uint32_t word = CM_BIN_WORDS;
    while (word > 0 && heap->occupied[word - 1] == 0) {
        word--;
    }
    return word == 0
               ? CM_HEAP_BIN_COUNT
               : word * 64 - 1 - (uint32_t)__builtin_clzll(heap->occupied[word - 1]);
}

cm_heap_pieces
cm_heap_count_pieces(const cm_heap *heap, const cm_heap_view *view)
{
    cm_heap_pieces pieces = {0, 0, 0};
    uint64_t left = CM_PIECE_LOOKS;
    /* If there are many spans, look only into the last bin that has spans. The longest
     * span is in this bin, and the other spans of the bin are hardly shorter. */
    bool is_many = heap->free_count > CM_PIECE_LOOKS;
    uint32_t bin = is_many ? last_bin(heap) : next_bin(heap, 0);
    for (; bin < CM_HEAP_BIN_COUNT; bin = next_bin(heap, bin + 1)) {
        const cm_list *list = &heap->bins[bin];
        for (const cm_list *n = list->next; n != list && left > 0;
             n = n->next, left--) {
            count_from(CM_LIST_ENTRY(n, cm_heap_span, node), view, is_many, &pieces);
        }
    }
    /* READY spans are in no bin. There are only a few of them. */
    for (int i = 0; i < CM_READY_COUNT && heap->ready_count > 0; i++) {
        if (heap->ready[i] != NULL) {
            count_from(heap->ready[i], view, is_many, &pieces);
        }
    }
    pieces.count = is_many ? heap->free_count : pieces.count;
    return pieces;
}

/* -- checking --------------------------------------------------------------------------- */

static bool
check_arena(const cm_arena *arena, cm_heap_sums *sums)
{
    cm_address at = arena->base;
    const cm_heap_span *prev = NULL;
    for (const cm_heap_span *span = arena->first; span != NULL; span = span->next) {
        if (span->prev != prev || span->block.address != at || span->arena != arena
            || span->block.nbytes == 0 || span->pending_nbytes > span->block.nbytes
            || (span->block.host == NULL) != (arena->host == NULL)
            || (is_gap(prev) && is_gap(span))) {
            return false;
        }
        sums[span->state].nbytes += span->block.nbytes;
        sums[span->state].count++;
        at += span->block.nbytes;
        prev = span;
    }
    return at == arena->base + arena->nbytes;
}

/* True if every span of the bin belongs there, and if heap->occupied says correctly
 * whether the bin has spans. Adds the number of spans in the bin to `count`. */
static bool
check_bin(const cm_heap *heap, uint32_t bin, uint64_t *count)
{
    const cm_list *list = &heap->bins[bin];
    for (const cm_list *n = list->next; n != list; n = n->next, ++*count) {
        const cm_heap_span *span = CM_LIST_ENTRY(n, cm_heap_span, node);
        if (span->state != CM_SPAN_FREE || bin_of(span->block.nbytes) != bin) {
            return false;
        }
    }
    return (heap->occupied[bin / 64] >> (bin % 64) & 1) != cm_list_is_empty(list);
}

bool
cm_heap_check(const cm_heap *heap, cm_heap_sums sums[CM_SPAN_STATE_COUNT])
{
    const cm_heap_sums *bins = &sums[CM_SPAN_FREE];
    const cm_heap_sums *ready = &sums[CM_SPAN_READY];
    uint64_t binned_count = 0;
    uint64_t ready_count = 0;
    bool good = cm_list_count(&heap->arenas) == heap->arena_count;
    for (cm_list *n = heap->arenas.next; good && n != &heap->arenas; n = n->next) {
        good = check_arena(CM_LIST_ENTRY(n, cm_arena, node), sums);
    }
    for (uint32_t bin = 0; good && bin < CM_HEAP_BIN_COUNT; bin++) {
        good = check_bin(heap, bin, &binned_count);
    }
    for (int i = 0; good && i < CM_READY_COUNT; i++) {
        const cm_heap_span *span = heap->ready[i];
        good = span == NULL || span->state == CM_SPAN_READY;
        ready_count += span != NULL;
    }
    return good && bins->nbytes + ready->nbytes == heap->free_nbytes
           && bins->count + ready->count == heap->free_count
           && ready->count == heap->ready_count && ready_count == ready->count
           && binned_count == bins->count;
}
