/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of pool/heap, which decides where blocks lie: how it cuts spans of addresses,
 * finds free ones and joins them again. A stream may give a span back while its work on
 * the span still runs. Such a span is pending, and some tests call it late. When the
 * work has ended the span is clean. Addresses here are made up, and there is no memory
 * behind them. */
#include "check.h"
#include "pool/heap.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define BASE (UINT64_C(1) << 40)

enum { TAGS = 4 };

/* The last epoch that has ended in each stream, indexed by the stream's tag. Here no
 * stream has ended an epoch. A span with tag 0 is one on which no stream works, so it
 * is never pending. */
static const uint64_t NONE_DONE[TAGS] = {UINT64_MAX, 0, 0, 0};
static const cm_heap_view ANY = {.tag = 0, .done = NONE_DONE};

/* True if the heap's invariants hold. */
static bool
is_sound(const cm_heap *heap)
{
    cm_heap_sums sums[CM_SPAN_STATE_COUNT] = {{0, 0}};
    return cm_heap_check(heap, sums);
}

static cm_arena *
add_chunk(cm_heap *heap, cm_address base, uint64_t nbytes)
{
    cm_chunk chunk = {
        .host = (void *)(uintptr_t)base, .address = base, .nbytes = nbytes};
    return cm_heap_add_chunk(heap, &chunk);
}

/* Return the length of the longest free piece. */
static uint64_t
largest_of(const cm_heap *heap)
{
    return cm_heap_count_pieces(heap, &ANY).largest_nbytes;
}

/* Return the view of the stream with this tag, which says what spans the stream may
 * have while no epoch has ended. */
static cm_heap_view
view_of(uint32_t tag)
{
    return (cm_heap_view){.tag = tag, .done = NONE_DONE};
}

static cm_heap_span *
take(cm_heap *heap, uint64_t nbytes, uint32_t tag)
{
    cm_heap_view view = view_of(tag);
    return cm_heap_take(heap, nbytes, 64, &view);
}

static cm_heap_span *
give(cm_heap *heap, cm_heap_span *span, uint32_t tag, uint64_t epoch)
{
    return cm_heap_give(heap, span, tag, epoch, &ANY);
}

/* Fill an arena with `count` blocks of `nbytes`. */
static void
take_all(cm_heap *heap, cm_heap_span **spans, int count, uint64_t nbytes)
{
    for (int i = 0; i < count; i++) {
        spans[i] = take(heap, nbytes, 0);
        CHECK(spans[i] != NULL);
        CHECK_EQ(spans[i]->block.nbytes, nbytes);
    }
}

/* Four blocks are cut from a chunk and given back in another order. At the end the
 * chunk must be one free span again. */
static void
test_heap_cuts_exactly_and_joins_again(void)
{
    cm_heap heap;
    cm_heap_init(&heap);
    CHECK(add_chunk(&heap, BASE, MIB) != NULL);
    cm_heap_span *s[4];
    take_all(&heap, s, 4, 64 * KIB);
    CHECK_EQ(heap.free_nbytes, MIB - 256 * KIB);
    CHECK_EQ(heap.split_count, 4);
    CHECK_PTR_EQ(s[0]->block.host, (void *)(uintptr_t)s[0]->block.address);
    (void)give(&heap, s[0], 0, 0);
    (void)give(&heap, s[2], 0, 0); /* its neighbours are live, so it joins nothing */
    (void)give(&heap, s[1], 0, 0);
    cm_heap_span *whole = give(&heap, s[3], 0, 0);
    CHECK_EQ(whole->block.nbytes, MIB);
    CHECK_EQ(whole->block.address, BASE);
    CHECK_EQ(heap.free_count, 1);
    CHECK_EQ(heap.merge_count, 4);
    CHECK(is_sound(&heap));
    cm_heap_remove_arena(&heap, whole->arena);
    CHECK_EQ(heap.free_nbytes, 0);
    CHECK(cm_list_is_empty(&heap.arenas));
    CHECK(take(&heap, 64, 0) == NULL);
    CHECK(is_sound(&heap));
    cm_heap_fini(&heap);
}

/* A block that must be aligned is cut from the middle of a span. What lies before it
 * must stay free. */
static void
test_heap_aligns_and_keeps_what_is_before(void)
{
    cm_heap heap;
    cm_heap_init(&heap);
    CHECK(add_chunk(&heap, BASE + 64, 64 * KIB) != NULL);
    cm_heap_span *a = cm_heap_take(&heap, 4096, 4096, &ANY);
    CHECK(a != NULL);
    CHECK_EQ(a->block.address, BASE + 4096);
    CHECK_EQ(a->block.nbytes, 4096);
    CHECK_EQ(heap.free_nbytes, 60 * KIB);
    /* The free span in front of the block `a` is the best fit. */
    cm_heap_span *before = take(&heap, 4096 - 64, 0);
    CHECK_EQ(before->block.address, BASE + 64);
    /* This takes BASE + 8 KiB, so what is left is not aligned. */
    CHECK(take(&heap, 64, 0) != NULL);
    CHECK_EQ(largest_of(&heap), 56 * KIB);
    /* The rest is long enough, but not with the padding that the alignment costs. */
    CHECK(cm_heap_search(&heap, 56 * KIB, 4096, &ANY) == NULL);
    cm_heap_span *rest = cm_heap_search(&heap, 52 * KIB, 4096, &ANY);
    CHECK(rest != NULL);
    CHECK_EQ(rest->block.address, BASE + 12 * KIB);
    CHECK(is_sound(&heap));
    cm_heap_fini(&heap);
}

/* There are chunks of twenty lengths, and a request for each. Each request must get the
 * chunk of its own length. */
static void
test_heap_takes_the_best_fit(void)
{
    enum { COUNT = 20 };
    cm_heap heap;
    cm_heap_init(&heap);
    for (uint64_t i = 0; i < COUNT; i++) { /* their sizes differ by 4 KiB */
        CHECK(add_chunk(&heap, BASE + i * MIB, (COUNT - i) * 4 * KIB) != NULL);
    }
    for (uint64_t i = 1; i <= COUNT; i++) {
        cm_heap_span *span = take(&heap, i * 4 * KIB - 64 * (i % 2), 0);
        CHECK(span != NULL);
        CHECK_EQ(span->arena->nbytes, i * 4 * KIB);
    }
    CHECK(is_sound(&heap));
    cm_heap_fini(&heap);
}

/* A stream gives a block back with an epoch. Until that epoch has ended only that
 * stream may have the memory. */
static void
test_heap_late_span_is_for_its_stream_until_the_epoch_ends(void)
{
    uint64_t done[TAGS] = {UINT64_MAX, 4, 0, 0};
    cm_heap heap;
    cm_heap_view own = {.tag = 1, .done = done};
    cm_heap_view other = {.tag = 2, .done = done};
    cm_heap_view none = {.tag = 0, .done = done};
    cm_heap_init(&heap);
    CHECK(add_chunk(&heap, BASE, MIB) != NULL);
    cm_heap_span *span = cm_heap_take(&heap, MIB, 64, &none);
    (void)cm_heap_give(&heap, span, 1, 5, &own);
    CHECK(cm_heap_take(&heap, 64, 64, &other) == NULL);
    CHECK(cm_heap_search(&heap, 64, 64, &none) == NULL);
    span = cm_heap_take(&heap, 64, 64, &own);
    CHECK(span != NULL);
    CHECK_EQ(span->tag, 1); /* the earlier work may still run on it */
    CHECK_EQ(span->epoch, 5);
    (void)cm_heap_give(&heap, span, 1, 6, &own);
    /* Spans of one stream join, and the result has the later epoch. */
    CHECK_EQ(heap.free_count, 1);
    done[1] = 5;
    CHECK(cm_heap_take(&heap, 64, 64, &other) == NULL);
    done[1] = 6;
    CHECK(cm_heap_take(&heap, MIB, 64, &other) != NULL);
    CHECK(is_sound(&heap));
    cm_heap_fini(&heap);
}

/* Neighbours that two streams gave back must not join while both are pending. When one
 * stream has ended, its spans join the others, but the result is still pending. */
static void
test_heap_spans_of_two_streams_stay_apart_until_both_ended(void)
{
    uint64_t done[TAGS] = {UINT64_MAX, 0, 0, 0};
    cm_heap heap;
    cm_heap_view view = {.tag = 1, .done = done};
    cm_heap_init(&heap);
    CHECK(add_chunk(&heap, BASE, 4 * KIB) != NULL);
    cm_heap_span *s[4];
    take_all(&heap, s, 4, KIB);
    for (uint32_t i = 0; i < 4; i++) {
        (void)cm_heap_give(&heap, s[i], 1 + i % 2, 1, &view);
    }
    CHECK_EQ(heap.free_count, 4);
    CHECK(cm_heap_search(&heap, 2 * KIB, 64, &view) == NULL);
    CHECK(!cm_heap_join(&heap, &view));
    done[2] = 1;
    /* Clean spans join pending ones of the same length. */
    CHECK(cm_heap_join(&heap, &view));
    CHECK_EQ(heap.free_count, 1);
    CHECK(is_sound(&heap));
    done[1] = 1;
    view.tag = 3;
    CHECK(cm_heap_take(&heap, 4 * KIB, 64, &view) != NULL);
    cm_heap_fini(&heap);
}

/* One pending block is given back among many clean ones, in both orders of addresses.
 * It may join no more clean memory than its own length, since that memory is out of
 * reach for as long as its stream is busy. */
static void
test_heap_late_span_strands_no_more_than_its_length(void)
{
    enum { COUNT = 64 };
    for (int down = 0; down < 2; down++) {
        cm_heap heap;
        cm_heap_init(&heap);
        CHECK(add_chunk(&heap, BASE, COUNT * KIB) != NULL);
        cm_heap_span *s[COUNT];
        take_all(&heap, s, COUNT, KIB);
        (void)give(&heap, s[down ? COUNT - 1 : 0], 1, 1);
        for (int i = 1; i < COUNT; i++) {
            (void)give(&heap, s[down ? COUNT - 1 - i : i], 0, 0);
        }
        CHECK(is_sound(&heap));
        CHECK_EQ(heap.free_nbytes, COUNT * KIB);
        CHECK(take(&heap, (COUNT - 2) * KIB, 2) != NULL);
        cm_heap_fini(&heap);
    }
}

/* Half of a span is pending. The span is cut in two and joined again. The sum of
 * pending bytes must not change by that, and must never exceed the length. */
static void
test_heap_late_share_survives_cutting(void)
{
    cm_heap heap;
    cm_heap_init(&heap);
    CHECK(add_chunk(&heap, BASE, 16 * KIB) != NULL);
    cm_heap_span *s[16];
    take_all(&heap, s, 16, KIB);
    (void)give(&heap, s[0], 1, 1);
    cm_heap_span *both = give(&heap, s[1], 0, 0);
    CHECK_EQ(both->block.nbytes, 2 * KIB);
    CHECK_EQ(both->pending_nbytes, KIB);
    cm_heap_span *half = cm_heap_carve(&heap, both, both->block.address, KIB);
    CHECK(half != NULL);
    half->state = CM_SPAN_LIVE;
    CHECK_EQ(half->pending_nbytes + half->next->pending_nbytes, KIB);
    both = give(&heap, half, 1, 1);
    CHECK_LE(both->pending_nbytes, both->block.nbytes);
    CHECK(is_sound(&heap));
    cm_heap_fini(&heap);
}

/* If only one stream has ever given spans back, pending and clean spans join without a
 * limit. */
static void
test_heap_alone_joins_everything(void)
{
    cm_heap heap;
    cm_heap_view view = {.tag = 1, .done = NONE_DONE, .single_stream = true};
    cm_heap_init(&heap);
    CHECK(add_chunk(&heap, BASE, MIB) != NULL);
    cm_heap_span *span = cm_heap_take(&heap, 64, 64, &view);
    span = cm_heap_give(&heap, span, 1, 1, &view);
    CHECK_EQ(span->block.nbytes, MIB);
    CHECK(cm_heap_take(&heap, MIB, 64, &view) != NULL);
    cm_heap_fini(&heap);
}

/* One free span lies among a hundred late ones of the same size. The quick search
 * misses it, and the thorough one must find it. */
static void
test_heap_search_finds_what_a_short_look_misses(void)
{
    enum { COUNT = 100 };
    cm_heap heap;
    cm_heap_init(&heap);
    cm_heap_span *s[COUNT];
    for (uint64_t i = 0; i < COUNT; i++) {
        CHECK(add_chunk(&heap, BASE + i * MIB, 64 * KIB) != NULL);
    }
    take_all(&heap, s, COUNT, 64 * KIB);
    (void)give(&heap, s[0], 0, 0);
    for (int i = 1; i < COUNT; i++) {
        (void)give(&heap, s[i], 1, 1);
    }
    /* It is hidden behind the late ones. */
    CHECK(take(&heap, 64 * KIB, 2) == NULL);
    cm_heap_view view = view_of(2);
    cm_heap_span *span = cm_heap_search(&heap, 64 * KIB, 64, &view);
    CHECK_PTR_EQ(span, s[0]);
    CHECK(cm_heap_search(&heap, 64, 64, &view) == NULL);
    CHECK_EQ(largest_of(&heap), 64 * KIB);
    CHECK(is_sound(&heap));
    cm_heap_fini(&heap);
}

/* A range of addresses begins as one gap. Memory is put into it and taken out again,
 * and free spans and gaps must each join their neighbours. */
static void
test_heap_range_fills_and_empties(void)
{
    cm_heap heap;
    cm_heap_init(&heap);
    cm_arena *arena = cm_heap_add_range(&heap, BASE, 16 * MIB, 2 * MIB);
    CHECK(arena != NULL);
    CHECK(take(&heap, 64, 0) == NULL);
    CHECK_EQ(largest_of(&heap), 0);
    cm_heap_span *mid = cm_heap_carve(&heap, arena->first, BASE + 4 * MIB, 4 * MIB);
    CHECK_EQ(mid->state, CM_SPAN_BUSY);
    CHECK_EQ(arena->first->state, CM_SPAN_GAP);
    CHECK(is_sound(&heap));
    cm_heap_span *node = cm_heap_cut(&heap, mid, 2 * MIB);
    CHECK_EQ(mid->block.nbytes, 2 * MIB);
    CHECK_EQ(node->block.address, BASE + 6 * MIB);
    CHECK_PTR_EQ(node->prev, mid);
    cm_heap_give_gap(&heap, node);
    CHECK_EQ(mid->next->block.nbytes, 10 * MIB); /* it has joined the gap behind it */
    cm_heap_span *more = cm_heap_carve(&heap, mid->next, BASE + 6 * MIB, 2 * MIB);
    (void)give(&heap, mid, 0, 0);
    mid = give(&heap, more, 0, 0); /* both are free, so they have joined */
    CHECK_EQ(mid->block.nbytes, 4 * MIB);
    CHECK_EQ(largest_of(&heap), 4 * MIB);
    CHECK(is_sound(&heap));
    mid = cm_heap_carve(&heap, mid, mid->block.address, mid->block.nbytes);
    cm_heap_give_gap(&heap, mid);
    CHECK_EQ(arena->first->block.nbytes, 16 * MIB);
    CHECK(arena->first->next == NULL);
    CHECK(is_sound(&heap));
    cm_heap_remove_arena(&heap, arena);
    CHECK(cm_list_is_empty(&heap.gaps));
    cm_heap_fini(&heap);
}

/* Each of several wrong values must be noticed by the check of the invariants. */
static void
test_heap_check_sees_what_is_wrong(void)
{
    cm_heap heap;
    cm_heap_init(&heap);
    CHECK(add_chunk(&heap, BASE, MIB) != NULL);
    cm_heap_span *span = take(&heap, KIB, 0);
    CHECK(is_sound(&heap));
    span->block.nbytes += 64;
    CHECK(!is_sound(&heap));
    span->block.nbytes -= 64;
    heap.free_nbytes++;
    CHECK(!is_sound(&heap));
    heap.free_nbytes--;
    span->state = CM_SPAN_FREE; /* it is in no bin, so this is wrong */
    CHECK(!is_sound(&heap));
    span->state = CM_SPAN_LIVE;
    CHECK(is_sound(&heap));
    cm_heap_fini(&heap);
}

/* Counting free pieces holds up whoever allocates meanwhile, so with many free spans it
 * may look at only a few of them. The count must then still be right as long as no
 * neighbours could join. */
static void
test_heap_counts_many_free_spans_by_a_look_at_a_few(void)
{
    enum { COUNT = 20000, LONG = 3 };
    cm_heap heap;
    cm_heap_init(&heap);
    static cm_heap_span *spans[COUNT];
    CHECK(add_chunk(&heap, BASE, COUNT * 4 * KIB) != NULL);
    take_all(&heap, spans, COUNT, 4 * KIB);
    uint64_t freed = 0;
    for (int i = 0; i < COUNT; i += 2) {
        (void)give(&heap, spans[i], 0, 0);
        freed++;
        cm_heap_pieces runs = cm_heap_count_pieces(&heap, &ANY);
        CHECK_EQ(runs.count, freed);
        CHECK_EQ(runs.largest_nbytes, 4 * KIB);
        CHECK_LE(runs.looked_count, CM_PIECE_LOOKS + CM_READY_SETS * CM_READY_WAYS + 1);
    }
    /* This span joins its two neighbours. */
    (void)give(&heap, spans[COUNT - 2 - LONG], 0, 0);
    CHECK_EQ(largest_of(&heap), 12 * KIB);
    CHECK_EQ(cm_heap_count_pieces(&heap, &ANY).count, freed - 1);
    CHECK(is_sound(&heap));
    cm_heap_fini(&heap);
}

/* Free spans of three streams alternate. When all streams have ended they count as one
 * piece, although they have not been joined. */
static void
test_heap_counts_few_free_spans_as_joining_would_leave_them(void)
{
    enum { COUNT = CM_PIECE_LOOKS };
    cm_heap heap;
    cm_heap_init(&heap);
    cm_heap_span *spans[COUNT];
    CHECK(add_chunk(&heap, BASE, COUNT * 4 * KIB) != NULL);
    take_all(&heap, spans, COUNT, 4 * KIB);
    /* They belong to three streams in turn, so they stay apart. */
    for (int i = 0; i < COUNT; i++) {
        (void)give(&heap, spans[i], 1 + (uint32_t)i % 3, 1);
    }
    uint64_t done[TAGS] = {UINT64_MAX, 1, 1, 1};
    cm_heap_view view = {.tag = 0, .done = done};
    CHECK_EQ(heap.free_count, COUNT);
    CHECK_EQ(cm_heap_count_pieces(&heap, &view).count, 1);
    CHECK_EQ(cm_heap_count_pieces(&heap, &view).largest_nbytes, COUNT * 4 * KIB);
    cm_heap_fini(&heap);
}

/* The count of arenas must follow each one that comes and goes, and a wrong count must
 * be noticed. */
static void
test_heap_counts_its_arenas(void)
{
    cm_heap heap;
    cm_heap_init(&heap);
    cm_arena *first = add_chunk(&heap, BASE, MIB);
    CHECK(cm_heap_add_range(&heap, 4 * BASE, 8 * MIB, MIB) != NULL);
    CHECK_EQ(heap.arena_count, 2);
    cm_heap_remove_arena(&heap, first);
    CHECK_EQ(heap.arena_count, 1);
    CHECK(is_sound(&heap));
    heap.arena_count++;
    CHECK(!is_sound(&heap));
    heap.arena_count--;
    cm_heap_fini(&heap);
}

/* clang-format off */
MAIN(RUN(test_heap_cuts_exactly_and_joins_again)
     RUN(test_heap_aligns_and_keeps_what_is_before)
     RUN(test_heap_takes_the_best_fit)
     RUN(test_heap_late_span_is_for_its_stream_until_the_epoch_ends)
     RUN(test_heap_spans_of_two_streams_stay_apart_until_both_ended)
     RUN(test_heap_late_span_strands_no_more_than_its_length)
     RUN(test_heap_late_share_survives_cutting)
     RUN(test_heap_alone_joins_everything)
     RUN(test_heap_search_finds_what_a_short_look_misses)
     RUN(test_heap_range_fills_and_empties)
     RUN(test_heap_counts_many_free_spans_by_a_look_at_a_few)
     RUN(test_heap_counts_few_free_spans_as_joining_would_leave_them)
     RUN(test_heap_counts_its_arenas)
     RUN(test_heap_check_sees_what_is_wrong))
/* clang-format on */
