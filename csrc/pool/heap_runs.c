/* SPDX-License-Identifier: Apache-2.0 */
/* What free memory there is, as joining would leave it, without joining. */
#include "pool/heap_private.h"

/* The span as it is when nothing keeps it ready any more. */
static cm_span
settled(const cm_span *span)
{
    cm_span copy = *span;
    if (copy.state == CM_SPAN_READY) {
        copy.state = CM_SPAN_FREE;
        copy.late_nbytes = copy.tag == 0 ? 0 : copy.block.nbytes;
    }
    return copy;
}

const cm_span *
cm_heap_follow_run(const cm_span *first, const cm_heap_view *view, uint64_t *nbytes)
{
    cm_span run = settled(first);
    const cm_span *last = first;
    while (last->next != NULL && cm_span_is_free(last->next)) {
        cm_span next = settled(last->next);
        if (!cm_heap_may_join(&run, &next, view)) {
            break;
        }
        cm_heap_add_up(&run, &next, view);
        last = last->next;
    }
    *nbytes = run.block.nbytes;
    return last;
}

/* All pieces from `first` on to the next span that is not free; nothing where another
 * free span precedes it. */
static void
count_from(const cm_span *first, const cm_heap_view *view, cm_heap_runs *out)
{
    if (first->prev != NULL && cm_span_is_free(first->prev)) {
        return;
    }
    for (const cm_span *at = first; at != NULL && cm_span_is_free(at);) {
        uint64_t nbytes = 0;
        at = cm_heap_follow_run(at, view, &nbytes)->next;
        out->looked_count++;
        out->largest_nbytes =
            nbytes > out->largest_nbytes ? nbytes : out->largest_nbytes;
        out->count++;
    }
}

static void
see(const cm_span *span, cm_heap_runs *out)
{
    out->looked_count++;
    if (span->block.nbytes > out->largest_nbytes) {
        out->largest_nbytes = span->block.nbytes;
    }
}

/* Of many spans: the longest bin, of whose spans none is much longer than another. */
static void
look_at_longest(const cm_heap *heap, cm_heap_runs *out)
{
    uint32_t word = CM_BIN_WORDS;
    while (word > 0 && heap->occupied[word - 1] == 0) {
        word--;
    }
    if (word == 0) {
        return;
    }
    uint32_t bit = 63u - (uint32_t)__builtin_clzll(heap->occupied[word - 1]);
    const cm_list *bin = &heap->bins[(word - 1) * 64 + bit];
    for (const cm_list *n = bin->next; n != bin && out->looked_count < CM_RUN_LOOKS;
         n = n->next) {
        see(CM_LIST_ENTRY(n, cm_span, node), out);
    }
}

/* The spans that are kept ready, of which there are few. */
static void
count_ready(const cm_heap *heap, const cm_heap_view *view, bool is_many,
            cm_heap_runs *out)
{
    const cm_span *spans[CM_READY_SETS * CM_READY_WAYS + 1];
    uint32_t count = 0;
    if (heap->ready_long != NULL) {
        spans[count++] = heap->ready_long;
    }
    for (int i = 0; i < CM_READY_SETS && heap->ready_count > 0; i++) {
        for (int way = 0; way < CM_READY_WAYS; way++) {
            if (heap->ready[i].span[way] != NULL) {
                spans[count++] = heap->ready[i].span[way];
            }
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        if (is_many) {
            see(spans[i], out);
        }
        else {
            count_from(spans[i], view, out);
        }
    }
}

cm_heap_runs
cm_heap_count_runs(const cm_heap *heap, const cm_heap_view *view)
{
    cm_heap_runs runs = {0, 0, 0};
    uint64_t left = heap->free_count;
    if (left > CM_RUN_LOOKS) {
        look_at_longest(heap, &runs);
        count_ready(heap, view, true, &runs);
        runs.count = left;
        return runs;
    }
    for (uint32_t word = 0; word < CM_BIN_WORDS; word++) {
        for (uint64_t bits = heap->occupied[word]; bits != 0; bits &= bits - 1) {
            const cm_list *bin =
                &heap->bins[word * 64 + (uint32_t)__builtin_ctzll(bits)];
            for (const cm_list *n = bin->next; n != bin && left > 0;
                 n = n->next, left--) {
                count_from(CM_LIST_ENTRY(n, cm_span, node), view, &runs);
            }
        }
    }
    count_ready(heap, view, false, &runs);
    return runs;
}
