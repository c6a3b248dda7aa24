/* SPDX-License-Identifier: Apache-2.0 */
/* Finding a free span by size: bins 3 % apart, a bitmap over them, and a look at a few
 * spans of a bin, so that the answer is the best fit or within 3 % of it and its time
 * does not depend on how many spans there are. */
#include "pool/heap_private.h"

enum {
    UNIT_SHIFT = 6,      /* sizes in 64 B */
    MANTISSA_BITS = 5,   /* 32 bins for each power of two */
    LOOK_OWN_BIN = 24,   /* spans looked at in the bin of the size, where some are short
                          */
    LOOK_LATER_BINS = 8, /* and in each longer bin, where all are long enough */
    LOOK_BINS = 8        /* longer bins tried before giving up on unusable spans */
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
    return bin < CM_BIN_COUNT ? bin : CM_BIN_COUNT - 1;
}

void
cm_heap_bin(cm_heap *heap, cm_span *span)
{
    uint32_t bin = bin_of(span->block.nbytes);
    cm_list_push_front(&heap->bins[bin], &span->node);
    heap->occupied[bin / 64] |= UINT64_C(1) << (bin % 64);
    heap->occupied_words |= 1u << (bin / 64);
    heap->free_nbytes += span->block.nbytes;
    heap->free_count++;
}

void
cm_heap_unbin(cm_heap *heap, cm_span *span)
{
    uint32_t bin = bin_of(span->block.nbytes);
    cm_list_remove(&span->node);
    if (cm_list_is_empty(&heap->bins[bin])) {
        heap->occupied[bin / 64] &= ~(UINT64_C(1) << (bin % 64));
        if (heap->occupied[bin / 64] == 0) {
            heap->occupied_words &= ~(1u << (bin / 64));
        }
    }
    heap->free_nbytes -= span->block.nbytes;
    heap->free_count--;
}

/* The first occupied bin from `bin` on; CM_BIN_COUNT if there is none. */
static uint32_t
next_bin(const cm_heap *heap, uint32_t bin)
{
    if (bin >= CM_BIN_COUNT) {
        return CM_BIN_COUNT;
    }
    uint32_t word = bin / 64;
    uint64_t bits = heap->occupied[word] & (~UINT64_C(0) << (bin % 64));
    if (bits == 0) {
        uint32_t words = heap->occupied_words & (uint32_t)(~UINT64_C(0) << (word + 1));
        if (words == 0) {
            return CM_BIN_COUNT;
        }
        word = (uint32_t)__builtin_ctz(words);
        bits = heap->occupied[word];
    }
    return word * 64 + (uint32_t)__builtin_ctzll(bits);
}

static bool
fits(const cm_span *span, uint64_t nbytes, uint64_t align, const cm_heap_view *view)
{
    uint64_t pad = (0 - span->block.address) & (align - 1);
    return span->block.nbytes >= nbytes && span->block.nbytes - nbytes >= pad
           && cm_span_is_usable(span, view);
}

/* The shortest fitting span among the first `look` of a bin. */
static cm_span *
best_of_bin(const cm_list *bin, uint64_t look, uint64_t nbytes, uint64_t align,
            const cm_heap_view *view)
{
    cm_span *best = NULL;
    for (cm_list *n = bin->next; n != bin && look > 0; n = n->next, look--) {
        cm_span *span = CM_LIST_ENTRY(n, cm_span, node);
        if (fits(span, nbytes, align, view)
            && (best == NULL || span->block.nbytes < best->block.nbytes)) {
            best = span;
            if (best->block.nbytes == nbytes) {
                break;
            }
        }
    }
    return best;
}

static cm_span *
take_binned(cm_heap *heap, uint64_t nbytes, uint64_t align, const cm_heap_view *view)
{
    uint32_t own = bin_of(nbytes);
    uint32_t bin = next_bin(heap, own);
    for (int tries = 0; bin < CM_BIN_COUNT && tries < LOOK_BINS; tries++) {
        cm_span *best =
            best_of_bin(&heap->bins[bin], bin == own ? LOOK_OWN_BIN : LOOK_LATER_BINS,
                        nbytes, align, view);
        if (best != NULL) {
            return cm_heap_cut_live(heap, best, nbytes, align);
        }
        bin = next_bin(heap, bin + 1);
    }
    return NULL;
}

cm_span *
cm_heap_take(cm_heap *heap, uint64_t nbytes, uint64_t align, const cm_heap_view *view)
{
    cm_span *span = take_binned(heap, nbytes, align, view);
    if (span == NULL && heap->ready_count > 0) {
        cm_heap_settle(heap, view);
        span = take_binned(heap, nbytes, align, view);
    }
    return span;
}

cm_span *
cm_heap_search(cm_heap *heap, uint64_t nbytes, uint64_t align, const cm_heap_view *view)
{
    for (uint32_t bin = next_bin(heap, bin_of(nbytes)); bin < CM_BIN_COUNT;
         bin = next_bin(heap, bin + 1)) {
        cm_span *best = best_of_bin(&heap->bins[bin], UINT64_MAX, nbytes, align, view);
        if (best != NULL) {
            return cm_heap_cut_live(heap, best, nbytes, align);
        }
    }
    return NULL;
}

/* -- checking --------------------------------------------------------------------------- */

static bool
check_arena(const cm_arena *arena, uint64_t *free_nbytes, uint64_t *free_count)
{
    cm_address at = arena->base;
    const cm_span *prev = NULL;
    for (const cm_span *span = arena->first; span != NULL; span = span->next) {
        if (span->prev != prev || span->block.address != at || span->arena != arena
            || span->block.nbytes == 0 || span->late_nbytes > span->block.nbytes
            || (span->block.host == NULL) != (arena->host == NULL)) {
            return false;
        }
        if (prev != NULL && prev->state == CM_SPAN_GAP && span->state == CM_SPAN_GAP) {
            return false;
        }
        if (span->state == CM_SPAN_FREE || span->state == CM_SPAN_READY) {
            *free_nbytes += span->block.nbytes;
            *free_count += 1;
        }
        at += span->block.nbytes;
        prev = span;
    }
    return at == arena->base + arena->nbytes;
}

bool
cm_heap_check(const cm_heap *heap)
{
    uint64_t free_nbytes = 0;
    uint64_t free_count = 0;
    uint64_t binned_count = 0;
    uint64_t arena_count = 0;
    for (cm_list *n = heap->arenas.next; n != &heap->arenas; n = n->next) {
        arena_count++;
        if (!check_arena(CM_LIST_ENTRY(n, cm_arena, node), &free_nbytes, &free_count)) {
            return false;
        }
    }
    for (uint32_t bin = 0; bin < CM_BIN_COUNT; bin++) {
        bool bit = (heap->occupied[bin / 64] >> (bin % 64) & 1) != 0;
        if (bit == cm_list_is_empty(&heap->bins[bin])
            || ((heap->occupied_words >> (bin / 64) & 1) != 0)
                   != (heap->occupied[bin / 64] != 0)) {
            return false;
        }
        for (cm_list *n = heap->bins[bin].next; n != &heap->bins[bin]; n = n->next) {
            const cm_span *span = CM_LIST_ENTRY(n, cm_span, node);
            if (span->state != CM_SPAN_FREE || bin_of(span->block.nbytes) != bin) {
                return false;
            }
            binned_count++;
        }
    }
    uint64_t ready_count = heap->ready_long != NULL;
    if (ready_count != 0 && heap->ready_long->state != CM_SPAN_READY) {
        return false;
    }
    for (int i = 0; i < CM_READY_SETS; i++) {
        for (int way = 0; way < CM_READY_WAYS; way++) {
            const cm_span *span = heap->ready[i].span[way];
            if ((span == NULL) != (heap->ready[i].nbytes[way] == 0)
                || (span != NULL
                    && (span->state != CM_SPAN_READY
                        || span->block.nbytes != heap->ready[i].nbytes[way]))) {
                return false;
            }
            ready_count += span != NULL;
        }
    }
    return free_nbytes == heap->free_nbytes && free_count == heap->free_count
           && ready_count == heap->ready_count && arena_count == heap->arena_count
           && binned_count + ready_count == free_count;
}
