/* SPDX-License-Identifier: Apache-2.0 */
/* Where blocks lie: ranges of addresses cut into spans, the free ones found by size.
 * Knows sizes, places and which stream last worked on a free span; knows nothing of
 * runtimes, events, limits or threads.
 * Locks: none of its own; its owner calls it under one. */
#pragma once

#include "base/list.h"
#include "pool/pool.h"
#include "pool/source.h"

typedef enum cm_span_state {
    CM_SPAN_LIVE = CM_BLOCK_LIVE,        /* handed out */
    CM_SPAN_FLIGHT = CM_BLOCK_IN_FLIGHT, /* given back, work may still run on it */
    CM_SPAN_FREE = CM_BLOCK_CACHED,      /* backed and in a bin */
    CM_SPAN_GAP = CM_BLOCK_GAP,          /* addresses with no memory behind them */
    /* listed as cached: */
    CM_SPAN_READY, /* free too, but kept as it is for the next request of its size */
    CM_SPAN_BUSY,  /* its owner is changing what is behind it */
    CM_SPAN_STATE_COUNT
} cm_span_state;

typedef struct cm_arena cm_arena;

/* A stretch of one arena. Neighbours by address cover the arena without holes. */
typedef struct cm_heap_span {
    cm_block block; /* first: what callers hold; nbytes is the span's whole length */
    cm_list node;   /* FREE: in its bin; GAP: in heap->gaps; else the user's */
    struct cm_heap_span *prev; /* by address; NULL at the arena's ends */
    struct cm_heap_span *next;
    cm_arena *arena;
    uint64_t requested_nbytes; /* LIVE, FLIGHT: what was asked for */
    uint64_t epoch; /* work of stream `tag` may run on it until that epoch ended; on a
                       LIVE span, work from before it was handed out */
    uint64_t late_nbytes; /* FREE: so many of them were given with the tag; the others
                             were clean and joined */
    uint32_t tag;         /* 0: nothing runs on it */
    cm_span_state state;
    _Atomic uint64_t first_fork; /* LIVE, FLIGHT: children of that fork and later ones
                                    share it; 0: none does. fork.c's */
    bool was_noted;              /* LIVE: the recorder was told that it is given back */
} cm_heap_span;

/* One range of addresses: a single chunk, or (placed) many side by side with gaps. */
struct cm_arena {
    cm_list node; /* in heap->arenas */
    struct cm_heap *heap;
    void *host; /* NULL: not for the host */
    cm_address base;
    uint64_t nbytes;
    cm_heap_span *first;
    cm_chunk chunk;      /* the single chunk */
    cm_chunk **chunk_at; /* owned; placed: chunk that backs granule i, else NULL; or
                            NULL */
    uint64_t granule;
    char *child_copy;  /* the rest is fork.c's: owned, for a fork under way */
    bool is_living;    /* a block of it lives at that fork */
    bool keeps_place;  /* what cm_host_hide() answered */
    bool is_inherited; /* a forked child: the blocks that lived have their bytes */
};

/* Whether a stream may have a span: nothing runs on it, or only that stream's work. */
typedef struct cm_heap_view {
    uint32_t tag;         /* of the asking stream; 0: none */
    const uint64_t *done; /* per tag: the last epoch that has ended */
    bool alone;           /* there is one stream only: all free spans may join */
} cm_heap_view;

/* Spans given back last, by size: taking one again changes nothing but its state. Long
 * ones join at once, since holes between them are what wastes memory, but for one that
 * was taken last: giving it back leaves all as it was. */
#define CM_READY_NBYTES (UINT64_C(64) << 10)
enum { CM_READY_SETS = 32, CM_READY_WAYS = 4 };
enum { CM_READY_LONG = CM_READY_SETS * CM_READY_WAYS, CM_READY_COUNT };

/* A place in a placed arena that nothing lives in. Memory that nothing lives in can be
 * moved to where it is needed, a granule at a time: of two places the one is better
 * that is the first to need fewer granules, then the one in the shorter run; where
 * memory has to be brought, the one that lacks fewer comes before that. */
typedef struct cm_hole {
    cm_heap_span *first; /* that it covers; NULL: none */
    uint32_t span_count;
    cm_address begin;
    uint64_t touched;    /* granules that nothing else lies in */
    uint64_t missing;    /* of them: that have no memory */
    uint64_t run_nbytes; /* of the free spans and gaps side by side around it */
} cm_hole;

enum { CM_HEAP_BIN_COUNT = 1536, CM_BIN_WORDS = CM_HEAP_BIN_COUNT / 64 };

/* Invariants: the spans of an arena are contiguous from base to base + nbytes; two
 * neighbours are not both GAP, nor both FREE where they may join and have the same tag;
 * a span is in the bin of its size exactly when FREE; a bit of `occupied` is set
 * exactly when its bin has spans; free_nbytes = sum of FREE; arena_count = |arenas|. */
typedef struct cm_heap {
    cm_list arenas;
    cm_list gaps;
    cm_list bins[CM_HEAP_BIN_COUNT];
    uint64_t occupied[CM_BIN_WORDS];
    uint32_t free_count;
    uint32_t ready_count;
    uint64_t arena_count;
    /* NULL: none. Sets of ways by size, and at CM_READY_LONG one too long for them. */
    cm_heap_span *ready[CM_READY_COUNT];
    const cm_heap_span *taken_last; /* compared only */
    cm_list spare_spans;            /* unused nodes, by `node` */
    void *slabs;                    /* owned: where the nodes come from */
    uint64_t node_count;            /* of nodes, used or spare */
    uint64_t free_nbytes;
    uint64_t split_count;
    uint64_t merge_count;
    uint32_t tidy_count;  /* so many takes from bins may yet ask for a hole instead */
    uint64_t apart_count; /* times neighbours stayed apart for their tags: join() may
                             help */
} cm_heap;

void cm_heap_init(cm_heap *heap);
/* Frees the nodes and arenas, whatever they say. */
void cm_heap_fini(cm_heap *heap);

/* A new arena, wholly FREE (`chunk` given: copied) or, placed, wholly a GAP.
 * NULL: no memory, nothing changed. */
cm_arena *cm_heap_add_chunk(cm_heap *heap, const cm_chunk *chunk);
cm_arena *cm_heap_add_range(cm_heap *heap, cm_address base, uint64_t nbytes,
                            uint64_t granule);
/* Forget an arena whose only span is FREE, BUSY or GAP. */
void cm_heap_remove_arena(cm_heap *heap, cm_arena *arena);

/* A LIVE span becomes READY if it is short or was taken last, without joining anything;
 * else as cm_heap_give(). */
void cm_heap_give_ready(cm_heap *heap, cm_heap_span *span, uint32_t tag, uint64_t epoch,
                        const cm_heap_view *view);
/* A READY span of exactly `nbytes`, LIVE again; NULL: none. */
cm_heap_span *cm_heap_take_ready(cm_heap *heap, uint64_t nbytes,
                                 const cm_heap_view *view);
/* All READY spans become FREE and join. */
void cm_heap_settle(cm_heap *heap, const cm_heap_view *view);

/* The best free span for `nbytes`, cut to size and LIVE; its address is a multiple of
 * `align` (a power of two). READY spans are settled if no other fits. NULL: none. */
cm_heap_span *cm_heap_take(cm_heap *heap, uint64_t nbytes, uint64_t align,
                           const cm_heap_view *view);
/* As above, but looks at every free span. */
cm_heap_span *cm_heap_search(cm_heap *heap, uint64_t nbytes, uint64_t align,
                             const cm_heap_view *view);
/* The best place for `nbytes` over free spans and at least one gap that lacks few
 * granules; `best` is beaten or stays. `grows`: memory is brought in any case, however
 * much is missing, and the addresses after all memory count. */
void cm_heap_find_hole(const cm_heap *heap, uint64_t nbytes, uint64_t align,
                       const cm_heap_view *view, bool grows, cm_hole *best);
/* A LIVE, FLIGHT or BUSY span becomes FREE with that tag and epoch (tag 0: clean) and
 * joins its neighbours. Returns the span it is part of then. */
cm_heap_span *cm_heap_give(cm_heap *heap, cm_heap_span *span, uint32_t tag,
                           uint64_t epoch, const cm_heap_view *view);
/* The same for a BUSY span that has nothing behind it any more. */
void cm_heap_give_gap(cm_heap *heap, cm_heap_span *span);
/* Cut [address, address + nbytes) out of one FREE or GAP span as a BUSY one.
 * NULL: no memory for nodes, nothing changed. */
cm_heap_span *cm_heap_carve(cm_heap *heap, cm_heap_span *span, cm_address address,
                            uint64_t nbytes);
/* Cut a BUSY span so that it keeps `nbytes`; returns the rest, BUSY too. NULL: no
 * memory, nothing changed. */
cm_heap_span *cm_heap_cut(cm_heap *heap, cm_heap_span *span, uint64_t nbytes);
/* A BUSY span takes in the next one, BUSY too. */
void cm_heap_join_next(cm_heap *heap, cm_heap_span *span);
/* Clean what has ended and join what may be joined, everywhere. True: something did. */
bool cm_heap_join(cm_heap *heap, const cm_heap_view *view);

/* True when a stream with this view may have the FREE span. */
static inline bool
cm_span_is_clean(const cm_heap_span *span, const cm_heap_view *view)
{
    return span->tag == 0 || span->epoch <= view->done[span->tag];
}

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

/* The free pieces that joining would leave, which comes late or not at all. */
typedef struct cm_heap_runs {
    uint64_t largest_nbytes;
    uint64_t count;
    uint64_t looked_count; /* spans that it took */
} cm_heap_runs;

/* Free spans that are looked at: the lock is held meanwhile. */
enum { CM_RUN_LOOKS = 512 };

/* Of more than CM_RUN_LOOKS free spans the count is that of the spans as they lie, and
 * the largest is one of them, at most 3 % shorter than the longest. */
cm_heap_runs cm_heap_count_runs(const cm_heap *heap, const cm_heap_view *view);
/* The last span of the piece that `first`, a free span, begins; its length. */
const cm_heap_span *cm_heap_follow_run(const cm_heap_span *first,
                                       const cm_heap_view *view, uint64_t *nbytes);
typedef struct cm_heap_sums {
    uint64_t nbytes;
    uint64_t count;
} cm_heap_sums;

/* True when the invariants hold. To `sums` is added what is in each state. */
bool cm_heap_check(const cm_heap *heap, cm_heap_sums sums[CM_SPAN_STATE_COUNT]);
