/* SPDX-License-Identifier: Apache-2.0 */
/* The heap: where blocks lie. It cuts ranges of addresses into spans and finds free
 * ones by their size. It knows sizes, places and which stream last worked on a free
 * span; it knows nothing of runtimes, events, limits or threads.
 *
 * Spans
 * -----
 * An arena is one range of addresses. It is covered from end to end by spans, which are
 * linked in the order of their addresses:
 *
 *   [ LIVE 2 MiB ][ FREE 1 MiB ][ FLIGHT 512 KiB ][ FREE 4.5 MiB ]      8 MiB chunk
 *
 * To hand out 600 KiB the heap takes the best free span, here that of 1 MiB, and cuts
 * it in two. To take a block back it makes its span FREE and joins it to free
 * neighbours. A span is a node of its own and lies outside the memory that it
 * describes, since the host cannot write to device memory and a pool must not touch
 * pages of the host's either.
 *
 * There are two sorts of arenas. A segment is one chunk of memory that the runtime
 * gave. A placed arena is one large range of reserved addresses in which chunks of
 * physical memory are mapped here and there; where there is none, a span is a GAP. Only
 * placed arenas have granules (2 MiB on today's GPUs), which is what memory can be
 * mapped and moved in.
 *
 * Finding
 * -------
 * Free spans hang in bins by their size, 32 bins for each power of two, so that sizes
 * within a bin differ by about 3 %. A bitmap finds the next bin that has spans. The
 * look begins in the bin of the size asked for, whose spans may be a little too short,
 * and goes on in longer ones. It compares up to a dozen spans that fit, so its time
 * does not grow with the number of spans.
 *
 * Of two places in a placed arena the better one touches fewer granules that nothing
 * else lies in, and is in the shorter run of free addresses. Then whole granules stay
 * free, and their memory can be moved to where it is needed (grow.c).
 *
 * Clean, late, usable
 * -------------------
 * A free span has a tag, the slot of the stream that gave it back, and an epoch. If
 * that epoch has ended (view->done) the span is clean and anybody may have it.
 * Otherwise it is late, and usable by that stream alone. Joining has to be careful with
 * this: if a span of 1 GiB that is clean took in a late one of 64 KiB, the whole
 * gigabyte would be late. So a clean and a late span join only where at least half of
 * the bytes are late (`late_nbytes` counts them), or where only one stream is there at
 * all. Spans that are late by different streams never join.
 *
 * READY spans
 * -----------
 * A program that asks for the same sizes again and again gets the spans that it gave
 * back last, without cutting and joining. Such a span is READY: free, but kept out of
 * the bins, in a small table by size. A request that finds nothing else first turns all
 * READY spans into ordinary free ones, so they never cause a growth.
 *
 * Invariants are above cm_heap, and cm_heap_check() tests them.
 * Locks: none of its own; its owner calls it under one. */
#pragma once

#include "base/list.h"
#include "pool/pool.h"
#include "pool/source.h"

typedef enum cm_span_state {
    CM_SPAN_LIVE = CM_BLOCK_LIVE,        /* handed out */
    CM_SPAN_FLIGHT = CM_BLOCK_IN_FLIGHT, /* given back, but work may still run on it */
    CM_SPAN_FREE = CM_BLOCK_CACHED,      /* has memory, and is in a bin */
    CM_SPAN_GAP = CM_BLOCK_GAP,          /* addresses with no memory behind them */
    /* a listing shows the following two as cached */
    CM_SPAN_READY, /* free too, but kept uncut for the next request of its size */
    CM_SPAN_BUSY,  /* the grower is changing what is behind it */
    CM_SPAN_STATE_COUNT
} cm_span_state;

typedef struct cm_arena cm_arena;

/* A stretch of one arena. The spans of an arena cover it without holes. */
typedef struct cm_heap_span {
    /* Comes first, because callers hold a pointer to it; nbytes is the whole length of
     * the span. */
    cm_block block;
    cm_list node; /* FREE: in its bin; GAP: in heap->gaps; else free for the owner */
    struct cm_heap_span *prev; /* neighbours by address; NULL at the arena's ends */
    struct cm_heap_span *next;
    cm_arena *arena;
    uint64_t requested_nbytes; /* LIVE, FLIGHT: the size that was asked for */
    /* Work of the stream `tag` may run on it until this epoch has ended. On a LIVE span
     * that is work from before it was handed out. */
    uint64_t epoch;
    /* FREE: so many of its bytes were given back with the tag; the others were clean
     * and joined. */
    uint64_t late_nbytes;
    uint32_t tag; /* 0: nothing runs on it */
    cm_span_state state;
    /* LIVE, FLIGHT: children of that fork and of later ones share it; 0: none does.
     * Belongs to fork.c. */
    _Atomic uint64_t first_fork;
    /* LIVE: the recorder has been told that it is given back. */
    bool was_noted;
} cm_heap_span;

/* One range of addresses: a single chunk or, in a placed arena, many chunks side by
 * side with gaps between them. */
struct cm_arena {
    cm_list node; /* in heap->arenas */
    struct cm_heap *heap;
    void *host; /* NULL: the host cannot use it */
    cm_address base;
    uint64_t nbytes;
    cm_heap_span *first;
    cm_chunk chunk; /* the single chunk of a segment */
    /* Owned; in a placed arena the chunk behind granule i, or NULL where there is none.
     * NULL in a segment. */
    cm_chunk **chunk_at;
    uint64_t granule;
    char *child_copy; /* owned, for a fork under way; this and the rest are fork.c's */
    bool is_living;   /* a block in it is live at that fork */
    bool keeps_place; /* what cm_host_hide() answered */
    /* In a forked child: the blocks that were live have their bytes. */
    bool is_inherited;
};

/* Decides whether a stream may have a span: either nothing runs on the span, or only
 * work of that stream. */
typedef struct cm_heap_view {
    uint32_t tag;         /* the slot of the stream that asks; 0: none */
    const uint64_t *done; /* per tag: the last epoch that has ended */
    /* At most one stream gave spans back, so all free spans may join. */
    bool alone;
} cm_heap_view;

/* READY spans: those that were given back last, found by their size. Taking one again
 * changes nothing but its state. Spans of up to CM_READY_NBYTES are kept in sets.
 * Longer ones join at once, because holes between them are what wastes memory; one
 * exception is the span that was taken last, since giving it back leaves everything as
 * it was. */
#define CM_READY_NBYTES (UINT64_C(64) << 10)
enum { CM_READY_SETS = 32, CM_READY_WAYS = 4 };
enum { CM_READY_LONG = CM_READY_SETS * CM_READY_WAYS, CM_READY_COUNT };

/* A place in a placed arena where nothing is live. Memory behind free spans can be
 * moved to where it is needed, one granule at a time. Of two places, the better one is
 * that which lacks fewer granules, where memory has to be brought; then that which
 * touches fewer granules; then that in the shorter run. */
typedef struct cm_hole {
    cm_heap_span *first; /* the first span that it covers; NULL: there is no place */
    uint32_t span_count;
    cm_address begin;
    uint64_t touched;    /* granules in which nothing else lies */
    uint64_t missing;    /* granules of the place that have no memory */
    uint64_t run_nbytes; /* length of the free spans and gaps side by side around it */
} cm_hole;

enum { CM_HEAP_BIN_COUNT = 1536, CM_BIN_WORDS = CM_HEAP_BIN_COUNT / 64 };

/* Invariants:
 *
 *   - The spans of an arena are contiguous from base to base + nbytes.
 *   - Two neighbours are never both GAP. They are both FREE only where their tags keep
 *     them apart, or until the next cm_heap_join().
 *   - A span is in the bin of its size exactly when it is FREE, and in `ready` exactly
 *     when it is READY.
 *   - A bit of `occupied` is set exactly when its bin has spans.
 *   - free_nbytes and free_count are over all spans that are FREE or READY.
 *   - arena_count = |arenas| */
typedef struct cm_heap {
    cm_list arenas;
    cm_list gaps;
    cm_list bins[CM_HEAP_BIN_COUNT];
    uint64_t occupied[CM_BIN_WORDS];
    uint32_t free_count;
    uint32_t ready_count;
    uint64_t arena_count;
    /* READY spans, NULL where there is none: CM_READY_SETS sets of CM_READY_WAYS by
     * size, and at CM_READY_LONG one that is too long for them. */
    cm_heap_span *ready[CM_READY_COUNT];
    const cm_heap_span *taken_last; /* never followed, only compared */
    cm_list spare_spans;            /* unused nodes, linked by `node` */
    void *slabs;                    /* owned: what the nodes are cut from */
    uint64_t node_count;            /* of all nodes, used or spare */
    uint64_t free_nbytes;
    uint64_t split_count;
    uint64_t merge_count;
    uint32_t tidy_count; /* so many more takes may prefer a hole to a fit */
    /* Times that tags kept neighbours apart; if > 0 cm_heap_join() may help. */
    uint64_t apart_count;
} cm_heap;

void cm_heap_init(cm_heap *heap);
/* Free the nodes and arenas, whatever state they are in. */
void cm_heap_fini(cm_heap *heap);

/* Add an arena: a segment, wholly FREE, over a copy of `chunk`; or a placed one, which
 * is one GAP at first. NULL: no memory, and nothing was changed. */
cm_arena *cm_heap_add_chunk(cm_heap *heap, const cm_chunk *chunk);
cm_arena *cm_heap_add_range(cm_heap *heap, cm_address base, uint64_t nbytes,
                            uint64_t granule);
/* Remove an arena whose only span is FREE, BUSY or GAP. */
void cm_heap_remove_arena(cm_heap *heap, cm_arena *arena);

/* Give back a LIVE span. It becomes READY, without joining anything, if it is short or
 * was taken last; otherwise this does what cm_heap_give() does. */
void cm_heap_give_ready(cm_heap *heap, cm_heap_span *span, uint32_t tag, uint64_t epoch,
                        const cm_heap_view *view);
/* Take a READY span of exactly `nbytes`, which is LIVE again; NULL: there is none. */
cm_heap_span *cm_heap_take_ready(cm_heap *heap, uint64_t nbytes,
                                 const cm_heap_view *view);
/* Turn all READY spans into FREE ones and join them to their neighbours. */
void cm_heap_settle(cm_heap *heap, const cm_heap_view *view);

/* Take the best free span for `nbytes`, cut to size and LIVE; its address is a multiple
 * of `align`, a power of two. READY spans are turned into free ones if no other fits.
 * NULL: nothing fits. */
cm_heap_span *cm_heap_take(cm_heap *heap, uint64_t nbytes, uint64_t align,
                           const cm_heap_view *view);
/* As cm_heap_take(), but looks at every free span. */
cm_heap_span *cm_heap_search(cm_heap *heap, uint64_t nbytes, uint64_t align,
                             const cm_heap_view *view);
/* Find the best place for `nbytes` over free spans and at least one gap. `best` holds
 * the best place known so far and is replaced only by a better one. Without `grows`
 * only places are considered that lack few granules, between memory that is there. With
 * `grows` memory is brought in any case, so any number may be missing, and the
 * addresses behind all memory count too. */
void cm_heap_find_hole(const cm_heap *heap, uint64_t nbytes, uint64_t align,
                       const cm_heap_view *view, bool grows, cm_hole *best);
/* A LIVE, FLIGHT or BUSY span becomes FREE with that tag and epoch (tag 0: clean) and
 * joins its neighbours. Returns the span that it is part of then. */
cm_heap_span *cm_heap_give(cm_heap *heap, cm_heap_span *span, uint32_t tag,
                           uint64_t epoch, const cm_heap_view *view);
/* A BUSY span that has no memory behind it any more becomes a GAP and joins gaps beside
 * it. */
void cm_heap_give_gap(cm_heap *heap, cm_heap_span *span);
/* Cut [address, address + nbytes) out of one FREE or GAP span as a BUSY one. NULL: no
 * memory for nodes, and nothing was changed. */
cm_heap_span *cm_heap_carve(cm_heap *heap, cm_heap_span *span, cm_address address,
                            uint64_t nbytes);
/* Cut a BUSY span so that it keeps `nbytes`; returns the rest, which is BUSY too. NULL:
 * no memory, and nothing was changed. */
cm_heap_span *cm_heap_cut(cm_heap *heap, cm_heap_span *span, uint64_t nbytes);
/* Let a BUSY span take in the next one, which is BUSY too. */
void cm_heap_join_next(cm_heap *heap, cm_heap_span *span);
/* Join all neighbours that may be joined by now, in all arenas. True: some were. */
bool cm_heap_join(cm_heap *heap, const cm_heap_view *view);

/* True when nothing runs on the FREE span any more. */
static inline bool
cm_span_is_clean(const cm_heap_span *span, const cm_heap_view *view)
{
    return span->tag == 0 || span->epoch <= view->done[span->tag];
}

/* True when the stream of the view may have the FREE span: nothing runs on it, or only
 * that stream's own work. */
static inline bool
cm_span_is_usable(const cm_heap_span *span, const cm_heap_view *view)
{
    return cm_span_is_clean(span, view) || span->tag == view->tag;
}

static inline cm_address
cm_span_end(const cm_heap_span *span)
{
    return span->block.address + span->block.nbytes;
}

static inline bool
cm_span_is_free(const cm_heap_span *span)
{
    return span->state == CM_SPAN_FREE || span->state == CM_SPAN_READY;
}

/* The free pieces that joining would leave. Joining itself comes late, or never. */
typedef struct cm_heap_runs {
    uint64_t largest_nbytes;
    uint64_t count;
    uint64_t looked_count; /* spans that were looked at for this */
} cm_heap_runs;

/* The most free spans that are looked at, since the lock is held meanwhile. */
enum { CM_RUN_LOOKS = 512 };

/* Count the pieces. Where there are more than CM_RUN_LOOKS free spans, the count is
 * that of the spans as they lie, and the largest is one that is at most 3 % shorter
 * than the longest. */
cm_heap_runs cm_heap_count_runs(const cm_heap *heap, const cm_heap_view *view);
/* Returns the last span of the piece that begins with `first`, a free span, and the
 * length of the piece. */
const cm_heap_span *cm_heap_follow_run(const cm_heap_span *first,
                                       const cm_heap_view *view, uint64_t *nbytes);
typedef struct cm_heap_sums {
    uint64_t nbytes;
    uint64_t count;
} cm_heap_sums;

/* True when the invariants hold. What is in each state is added to `sums`. */
bool cm_heap_check(const cm_heap *heap, cm_heap_sums sums[CM_SPAN_STATE_COUNT]);
