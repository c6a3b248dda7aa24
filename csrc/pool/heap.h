/* SPDX-License-Identifier: Apache-2.0 */
/* The heap decides where blocks lie. It cuts ranges of addresses into spans and finds
 * free spans by their size. It knows sizes, places and which stream last worked on a
 * free span; it knows nothing of runtimes, events, limits or threads.
 *
 * Spans
 * -----
 * An arena is one range of addresses. It is covered from end to end by spans, which are
 * linked in the order of their addresses:
 *
 *   [ LIVE 2 MiB ][ FREE 1 MiB ][ FLIGHT 512 KiB ][ FREE 4.5 MiB ]      8 MiB chunk
 *
 * To hand out 600 KiB the heap takes the best free span, here that of 1 MiB, and cuts
 * it in two. To take a block back it makes the span FREE and joins it to free
 * neighbours. The node that describes a span lies outside the span's memory, since the
 * host cannot write to device memory. The same is done for host memory, so that a pool
 * touches no pages of it. The states of spans are listed in cm_span_state.
 *
 * There are two sorts of arenas. A segment is one chunk of memory that the runtime
 * gave. A placed arena is one large range of reserved addresses in which chunks of
 * physical memory are mapped here and there; a span of addresses without memory is a
 * GAP. A granule (2 MiB on today's GPUs) is the smallest unit in which memory can be
 * mapped, and only placed arenas have granules.
 *
 * Finding
 * -------
 * Free spans are in bins by their size, 32 bins for each power of two, so that sizes
 * within a bin differ by about 3 %. A bitmap tells which bins have spans. A search
 * begins in the bin of the requested size, whose spans may be a little too short, and
 * goes on in bins of longer spans. It compares at most a dozen spans that fit, so its
 * time does not grow with the number of spans.
 *
 * A run is a row of neighbouring spans that are free or gaps. If a block can lie at two
 * places of a placed arena, the heap prefers the place where the block touches fewer
 * granules that nothing else uses. If the number is the same at both places, the heap
 * prefers the place in the shorter run. So whole granules stay free, and their memory
 * can be moved to where it is needed (grow.c).
 *
 * Clean, pending, usable
 * -------------------
 * A free span has a tag and an epoch. A pool gives each of its streams a slot, which is
 * a number from 1 on. The tag is the slot of the stream in whose order the span was
 * given back, or 0 if nothing runs on the span. The epoch is a number that says when
 * the span was given back (in_flight.c). The array `done` of a cm_heap_view tells which
 * epochs have ended. If the epoch of a span has ended, the span is clean and any stream
 * may have it. Otherwise it is pending, and only the stream of its tag may have it.
 *
 * Joining has to be careful: if a clean span of 1 GiB took in a pending one of 64 KiB,
 * the whole gigabyte would be pending. So a clean and a pending span join only if at
 * least half of their bytes are pending (`pending_nbytes` counts these), or if only one
 * stream has given spans back so far. Two pending spans with different tags never join.
 *
 * READY spans
 * -----------
 * A program often asks for the same sizes again and again. It should get the spans that
 * it gave back last, without any cutting and joining. So a span that comes back may
 * become READY. It is then free, but it does not join its neighbours, and it is kept in
 * a small table by size instead of a bin. If no other span fits a request, all READY
 * spans become ordinary free spans and join before the heap gives up. So the pool never
 * grows while READY spans could have made room.
 *
 * Invariants are above cm_heap, and cm_heap_check() tests them.
 * Locks: a heap has none of its own. The pool calls it under the pool's lock. */
#pragma once

#include "base/list.h"
#include "pool/pool.h"
#include "pool/source.h"

typedef enum cm_span_state {
    CM_SPAN_LIVE = CM_BLOCK_LIVE,        /* handed out */
    CM_SPAN_FLIGHT = CM_BLOCK_IN_FLIGHT, /* given back, but work may still run on it */
    CM_SPAN_FREE = CM_BLOCK_CACHED,      /* has memory, and is in a bin */
    CM_SPAN_GAP = CM_BLOCK_GAP,          /* addresses without memory */
    /* A listing shows the following two as cached. */
    CM_SPAN_READY, /* free, but kept whole for the next request of its size */
    CM_SPAN_BUSY,  /* the grower is changing the memory behind it */
    CM_SPAN_STATE_COUNT
} cm_span_state;

typedef struct cm_arena cm_arena;

/* A stretch of one arena. The spans of an arena cover it without holes. */
typedef struct cm_heap_span {
    /* The block comes first, because a pointer to a block that users hold is converted
     * back to a pointer to its span. block.nbytes is the length of the whole span. */
    cm_block block;
    cm_list node; /* the span's place in its bin (FREE) or in heap->gaps (GAP); unused
                     in all other states */
    struct cm_heap_span *prev; /* neighbours by address; NULL at the arena's ends */
    struct cm_heap_span *next;
    cm_arena *arena;
    /* The size that was asked for, in the states LIVE and FLIGHT. */
    uint64_t requested_nbytes;
    /* Work of the stream with the slot `tag` may run on the span until this epoch has
     * ended. If the span is LIVE, this is work that was queued before the span was
     * handed out. */
    uint64_t epoch;
    /* On a FREE span, how many of its bytes were given back with the tag. The other
     * bytes were clean when they joined the span. */
    uint64_t pending_nbytes;
    uint32_t tag; /* 0 if nothing runs on it */
    cm_span_state state;
    /* The number of the first fork whose children share this block, or 0 if none do.
     * Children of later forks share the block too. This field belongs to fork.c. */
    _Atomic uint64_t first_fork;
    /* The recorder of pool events has noted already that the block is given back, so
     * it does not note this again. */
    bool was_noted;
} cm_heap_span;

/* One range of addresses. A segment is a single chunk; a placed arena has many chunks,
 * with gaps between them. */
struct cm_arena {
    cm_list node; /* in heap->arenas */
    struct cm_heap *heap;
    void *host; /* NULL if the host cannot use it */
    cm_address base;
    uint64_t nbytes;
    cm_heap_span *first;
    cm_chunk chunk; /* the single chunk of a segment */
    /* Owned. In a placed arena, chunk_at[i] is the chunk behind granule i, or NULL if
     * the granule has no memory. In a segment the whole table is NULL. */
    cm_chunk **chunk_at;
    uint64_t granule; /* in bytes; only for placed arenas */
    /* The members from here on are for fork.c. */

    char *child_copy; /* owned; set only during a fork */
    bool is_living;   /* a block in this arena is live at the fork */
    bool keeps_place; /* what cm_host_hide() answered */
    /* In a forked child: the blocks that were live at the fork can be read. */
    bool is_inherited;
};

/* What a search needs to decide whether a stream may have a span. The stream may have
 * it if nothing runs on the span, or only work of that stream. */
typedef struct cm_heap_view {
    uint32_t tag; /* the slot of the stream that asks; 0 if the stream has none */
    const uint64_t *done; /* for each tag, the last epoch that has ended */
    /* At most one stream has given spans back, so any free spans may join. */
    bool single_stream;
} cm_heap_view;

/* The table of READY spans has CM_READY_SETS sets of CM_READY_WAYS entries each, and
 * the size of a span says in which set the span is. This is for spans of up to
 * CM_READY_NBYTES. A longer span normally joins its neighbours at once, because holes
 * between long spans waste memory. It may become READY only if it is the span that was
 * taken last, since giving it back leaves the heap as it was before. The table has a
 * single entry for a longer span, CM_READY_LONG, which must be empty. */
#define CM_READY_NBYTES (UINT64_C(64) << 10)
enum { CM_READY_SETS = 32, CM_READY_WAYS = 4 };
enum { CM_READY_LONG = CM_READY_SETS * CM_READY_WAYS, CM_READY_COUNT };

/* A place for a block in an arena: addresses where nothing is live. In a placed arena
 * the place may include gaps, to which memory has to be brought. Two places are
 * compared in these steps, until they differ:
 *
 *   1. If the pool is to grow, the place with fewer `missing` granules is better.
 *   2. The place with fewer `touched` granules is better.
 *   3. The place in the shorter run is better. */
typedef struct cm_hole {
    cm_heap_span *first; /* the first span that it covers; NULL if no place was found */
    uint32_t span_count; /* how many spans it covers, from `first` on */
    cm_address begin;
    uint64_t touched;    /* granules that only this place would use */
    uint64_t missing;    /* granules of the place without memory */
    uint64_t run_nbytes; /* the length of the run in which the place lies */
} cm_hole;

enum { CM_HEAP_BIN_COUNT = 1536, CM_BIN_WORDS = CM_HEAP_BIN_COUNT / 64 };

/* Invariants:
 *
 *   - The spans of an arena cover it from base to base + nbytes without holes.
 *   - Two neighbours are never both GAP. Two neighbours are both FREE only if they must
 *     not join (see "Clean, pending, usable"), or if they may join because an epoch has
 *     ended, but cm_heap_join() has not been called since then.
 *   - A span is in the bin of its size exactly when it is FREE, and in `ready` exactly
 *     when it is READY.
 *   - A bit of `occupied` is set exactly when its bin has spans.
 *   - free_nbytes and free_count count all spans that are FREE or READY.
 *   - arena_count = |arenas| */
typedef struct cm_heap {
    cm_list arenas;
    cm_list gaps; /* the spans that are GAP */
    cm_list bins[CM_HEAP_BIN_COUNT];
    uint64_t occupied[CM_BIN_WORDS];
    uint32_t free_count;
    uint32_t ready_count;
    uint64_t arena_count;
    /* READY spans; an unused entry is NULL. See CM_READY_NBYTES. */
    cm_heap_span *ready[CM_READY_COUNT];
    const cm_heap_span *taken_last; /* the span that was taken last; only compared,
                                       never read through */
    cm_list spare_spans;            /* unused nodes, linked by their `node` */
    void *slabs;                    /* owned: the arrays that the nodes are part of */
    uint64_t node_count;            /* of used and spare nodes together */
    uint64_t free_nbytes;
    uint64_t split_count; /* how often a span was cut */
    uint64_t merge_count; /* how often two spans were joined */
    /* How many more calls of cm_heap_take() may prefer a hole to a free span that
     * fits. */
    uint32_t hole_preference_count;
    /* Rises when neighbours could not join. While it is 0, cm_heap_join() has nothing
     * to do. */
    uint64_t unjoined_count;
} cm_heap;

/* Make an empty heap, which has no arena. */
void cm_heap_init(cm_heap *heap);
/* Free all nodes and arenas, in whatever state the spans are. */
void cm_heap_fini(cm_heap *heap);

/* Add an arena. cm_heap_add_chunk() adds a segment, which holds a copy of `chunk` and
 * is one FREE span at first. cm_heap_add_range() adds a placed arena, which is one GAP
 * at first. If there is no memory for nodes, both return NULL and change nothing. */
cm_arena *cm_heap_add_chunk(cm_heap *heap, const cm_chunk *chunk);
cm_arena *cm_heap_add_range(cm_heap *heap, cm_address base, uint64_t nbytes,
                            uint64_t granule);
/* Remove an arena whose only span is FREE, BUSY or GAP. */
void cm_heap_remove_arena(cm_heap *heap, cm_arena *arena);

/* Give back a LIVE span. It becomes READY, without joining anything, if it is short or
 * was taken last; otherwise this does what cm_heap_give() does. */
void cm_heap_give_ready(cm_heap *heap, cm_heap_span *span, uint32_t tag, uint64_t epoch,
                        const cm_heap_view *view);
/* Take a READY span of exactly `nbytes` and make it LIVE. Returns NULL if there is none
 * that the view may have. */
cm_heap_span *cm_heap_take_ready(cm_heap *heap, uint64_t nbytes,
                                 const cm_heap_view *view);
/* Turn all READY spans into FREE ones and join them to their neighbours. */
void cm_heap_join_ready(cm_heap *heap, const cm_heap_view *view);

/* Take the best free span for `nbytes`, cut to size and LIVE; its address is a multiple
 * of `align`, a power of two. If none fits, this turns READY spans into free ones and
 * tries once more. Returns NULL if nothing fits, or if a hole would be the better place
 * for the block (hole_preference_count). */
cm_heap_span *cm_heap_take(cm_heap *heap, uint64_t nbytes, uint64_t align,
                           const cm_heap_view *view);
/* Do the same as cm_heap_take(), but look at every FREE span, and leave READY spans
 * alone. */
cm_heap_span *cm_heap_search(cm_heap *heap, uint64_t nbytes, uint64_t align,
                             const cm_heap_view *view);
/* Find the best place for `nbytes` that covers at least one gap; it may cover free
 * spans too. `best` holds the best place known so far and is replaced only by a better
 * one. If `grows` is set, the pool is about to add memory anyway, so any number of
 * granules may be missing, and the addresses behind all memory are considered too. If
 * `grows` is not set, only a few granules may be missing, and a run that reaches the
 * end of the arena is not considered. */
void cm_heap_find_hole(const cm_heap *heap, uint64_t nbytes, uint64_t align,
                       const cm_heap_view *view, bool grows, cm_hole *best);
/* Make a LIVE, FLIGHT or BUSY span FREE, with that tag and epoch, and join it to its
 * neighbours. If the tag is 0 the span is clean. Returns the span that it is now part
 * of. */
cm_heap_span *cm_heap_give(cm_heap *heap, cm_heap_span *span, uint32_t tag,
                           uint64_t epoch, const cm_heap_view *view);
/* Make a BUSY span, whose memory is gone, a GAP, and join it to gaps beside it. */
void cm_heap_give_gap(cm_heap *heap, cm_heap_span *span);
/* Cut [address, address + nbytes) out of a FREE or GAP span and make it BUSY. If there
 * is no memory for nodes, this changes nothing and returns NULL. */
cm_heap_span *cm_heap_carve(cm_heap *heap, cm_heap_span *span, cm_address address,
                            uint64_t nbytes);
/* Cut a BUSY span so that it keeps `nbytes`. Returns the rest, which is BUSY too. If
 * there is no memory for a node, this changes nothing and returns NULL. */
cm_heap_span *cm_heap_cut(cm_heap *heap, cm_heap_span *span, uint64_t nbytes);
/* Join a BUSY span and the next one, which is BUSY too. */
void cm_heap_join_next(cm_heap *heap, cm_heap_span *span);
/* Join all FREE neighbours that may join by now, in all arenas. Returns true if any
 * did. */
bool cm_heap_join(cm_heap *heap, const cm_heap_view *view);

/* True if nothing runs on the FREE span any more. */
static inline bool
cm_span_is_clean(const cm_heap_span *span, const cm_heap_view *view)
{
    return span->tag == 0 || span->epoch <= view->done[span->tag];
}

/* True if the stream of the view may have the FREE span, because nothing runs on it or
 * only that stream's own work. */
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

/* A piece is the span that neighbouring free spans would become if they joined now.
 * Some neighbours join late, or never, so the counters of a pool count pieces and not
 * spans. */
typedef struct cm_heap_pieces {
    uint64_t largest_nbytes;
    uint64_t count;
    uint64_t looked_count; /* spans that were looked at for this */
} cm_heap_pieces;

/* cm_heap_count_pieces() looks at no more free spans than this, since the pool's lock
 * is held while it counts. */
enum { CM_PIECE_LOOKS = 512 };

/* Count the pieces and find the largest. If there are more than CM_PIECE_LOOKS free
 * spans, this counts the spans instead, and looks only at spans of the bin with the
 * longest ones. What it returns as the largest may then be up to 3 % shorter than the
 * longest span. */
cm_heap_pieces cm_heap_count_pieces(const cm_heap *heap, const cm_heap_view *view);
/* Return the last span of the piece that begins with `first`, a free span, and store
 * the length of the piece in *nbytes. */
const cm_heap_span *cm_heap_follow_piece(const cm_heap_span *first,
                                         const cm_heap_view *view, uint64_t *nbytes);
typedef struct cm_heap_sums {
    uint64_t nbytes;
    uint64_t count;
} cm_heap_sums;

/* True if the invariants hold. Adds the number and length of the spans in each state to
 * `sums`. */
bool cm_heap_check(const cm_heap *heap, cm_heap_sums sums[CM_SPAN_STATE_COUNT]);
