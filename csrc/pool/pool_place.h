/* SPDX-License-Identifier: Apache-2.0 */
/* A growth of chunks that can be put anywhere in one range of addresses, in three
 * steps: where the request goes (pool_place.c), which memory goes there
 * (pool_place_plan.c), and the calls that bring it (pool_place_fill.c). Nobody else
 * includes this. Locks: as pool_private.h. */
#ifndef CM_POOL_POOL_PLACE_H
#define CM_POOL_POOL_PLACE_H

#include "pool/pool_private.h"

enum {
    CM_PLACE_SPANS = 32,  /* free spans and gaps under one request */
    CM_PLACE_GAPS = 16,   /* and the gaps among them */
    CM_PLACE_MOVES = 48,  /* chunks moved by one growth, */
    CM_PLACE_CREATES = 64 /* and made (for one gap) */
};

/* Where a request goes: over neighbouring free spans and gaps, from inside the first
 * to inside the last. */
typedef struct cm_place {
    cm_span *spans[CM_PLACE_SPANS]; /* by address; BUSY once the plan holds them */
    uint32_t count;
    cm_address begin;
    uint64_t missing_nbytes; /* in whole granules: what the gaps under it need */
} cm_place;

/* A free chunk on its way to another place. */
typedef struct cm_move {
    cm_chunk *chunk;
    cm_span *span; /* BUSY and exactly the chunk; NULL once it has moved */
} cm_move;

/* One gap of a place. Its part from `fill` on gets memory: first chunks that are moved
 * there, then new ones. */
typedef struct cm_filling {
    cm_span *gap;    /* compared only, once the plan holds its part of it */
    cm_span *target; /* BUSY: that part; NULL: not held */
    cm_span *spare;  /* a node for cutting off what stayed without memory */
    cm_address fill;
    uint64_t need_nbytes;
    uint64_t room_nbytes; /* at most so much, in the direction it may grow */
    bool downward;        /* grows towards lower addresses */
    uint64_t moved_nbytes;
    uint64_t create_nbytes;
    uint64_t made_nbytes; /* of new chunks, so far: the last of done_nbytes */
    uint64_t done_nbytes; /* of the target: what has memory by now */
    uint32_t move_end;    /* its moves end before this one; they begin where those of
                             the gap before it end */
} cm_filling;

typedef struct cm_place_plan {
    cm_place at;
    cm_filling fillings[CM_PLACE_GAPS];
    uint32_t filling_count;
    cm_move moves[CM_PLACE_MOVES];
    uint32_t move_count;
    uint64_t create_nbytes; /* of all fillings */
    uint64_t made_nbytes;   /* in so much of it; reserved from when the plan settles */
    uint32_t tag;           /* of the place's free spans */
    uint64_t epoch;
} cm_place_plan;

/* The place for `size` bytes that is short of the least memory. False: there is none.
 */
bool cm_pool_choose_place_locked(cm_pool *pool, uint64_t size, const cm_heap_view *view,
                                 cm_place *out);
/* Fill in the plan and take all that it needs out of the heap. `with_step`: may make
 * more than is missing. Fails: CM_ENOMEM, no addresses; nothing is held then. */
CM_NODISCARD cm_status cm_pool_plan_place_locked(cm_pool *pool, uint64_t size,
                                                 bool with_step,
                                                 const cm_heap_view *view,
                                                 cm_place_plan *plan);
/* The plan's free spans, and what has memory of its gaps, become free; the rest are
 * gaps. Returns the span that covers the whole place if all of it has memory. */
cm_span *cm_pool_settle_place_locked(cm_pool *pool, cm_place_plan *plan,
                                     const cm_heap_view *view);

#endif
