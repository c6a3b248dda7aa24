/* SPDX-License-Identifier: Apache-2.0 */
/* Where a request goes that fits in no free span: over free spans and the gaps between
 * them, where the least memory is missing. */
#include "pool/pool_place.h"
#include "base/checked_math.h"

enum { GAPS_LOOKED_AT = 512 };

/* The surroundings of one gap: what a place may cover whose first gap it is. */
typedef struct window {
    cm_span *spans[CM_PLACE_SPANS];
    uint32_t count;
    uint32_t gap; /* index of the first gap: 0, or 1 after a free span */
} window;

static bool
is_usable(const cm_span *span, const cm_heap_view *view)
{
    return span != NULL
           && (span->state == CM_SPAN_GAP
               || (span->state == CM_SPAN_FREE && cm_span_is_usable(span, view)));
}

/* Up to where a place that begins at the end of the first gap would end. */
static void
look_around(cm_span *gap, uint64_t size, const cm_heap_view *view, window *out)
{
    cm_span *left = gap->prev;
    out->count = 0;
    out->gap = 0;
    if (left != NULL && left->state == CM_SPAN_FREE && is_usable(left, view)) {
        out->spans[out->count++] = left;
        out->gap = 1;
    }
    out->spans[out->count++] = gap;
    cm_address end = cm_span_end(gap) + size;
    uint32_t gaps = 1;
    for (cm_span *span = gap->next; is_usable(span, view) && span->block.address < end
                                    && out->count < CM_PLACE_SPANS;
         span = span->next) {
        gaps += span->state == CM_SPAN_GAP;
        if (gaps > CM_PLACE_GAPS) {
            break;
        }
        out->spans[out->count++] = span;
    }
}

/* The place from `begin` on, which lies in the window's first gap or before it, if it
 * beats `best`: less new memory, then the shorter gaps. */
static void
try_begin(const cm_pool *pool, const window *w, cm_address begin, uint64_t size,
          cm_place *best, uint64_t *best_gaps)
{
    uint64_t granule = pool->source->granule;
    cm_address end = begin + size;
    uint64_t missing = 0;
    uint64_t gaps = 0;
    uint32_t first = begin < w->spans[w->gap]->block.address ? 0 : w->gap;
    uint32_t i = first;
    cm_address reached = 0;
    for (; i < w->count && (i == first || w->spans[i]->block.address < end); i++) {
        const cm_span *span = w->spans[i];
        reached = cm_span_end(span);
        if (span->state == CM_SPAN_GAP) {
            cm_address low = span->block.address;
            low = begin > low ? begin / granule * granule : low;
            cm_address high = cm_round_up_to(end, granule);
            high = high < reached ? high : reached;
            missing += high - low;
            gaps += span->block.nbytes;
        }
    }
    if (reached < end || missing == 0
        || (best->count > 0
            && (missing > best->missing_nbytes
                || (missing == best->missing_nbytes && gaps >= *best_gaps)))) {
        return;
    }
    best->count = i - first;
    for (uint32_t k = 0; k < best->count; k++) {
        best->spans[k] = w->spans[first + k];
    }
    best->begin = begin;
    best->missing_nbytes = missing;
    *best_gaps = gaps;
}

/* Least is missing either from the first usable address on, or where the place ends
 * with a free span. */
static void
try_gap(const cm_pool *pool, cm_span *gap, uint64_t size, const cm_heap_view *view,
        cm_place *best, uint64_t *best_gaps)
{
    uint64_t align = cm_pool_align_of(pool, size);
    window w;
    look_around(gap, size, view, &w);
    cm_address lowest = cm_round_up_to(w.spans[0]->block.address, align);
    if (lowest > gap->block.address) {
        lowest = gap->block.address;
    }
    try_begin(pool, &w, lowest, size, best, best_gaps);
    for (uint32_t i = w.gap + 1; i < w.count; i++) {
        if (w.spans[i]->state != CM_SPAN_FREE || cm_span_end(w.spans[i]) < size) {
            continue;
        }
        cm_address begin = (cm_span_end(w.spans[i]) - size) & ~(align - 1);
        if (begin >= lowest && begin < cm_span_end(gap)) {
            try_begin(pool, &w, begin, size, best, best_gaps);
        }
    }
}

bool
cm_pool_choose_place_locked(cm_pool *pool, uint64_t size, const cm_heap_view *view,
                            cm_place *out)
{
    uint64_t best_gaps = 0;
    int looked_at = 0;
    out->count = 0;
    for (cm_list *n = pool->heap.gaps.prev;
         n != &pool->heap.gaps && looked_at < GAPS_LOOKED_AT;
         n = n->prev, looked_at++) {
        try_gap(pool, CM_LIST_ENTRY(n, cm_span, node), size, view, out, &best_gaps);
    }
    return out->count > 0;
}
