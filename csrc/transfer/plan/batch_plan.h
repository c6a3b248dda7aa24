/* SPDX-License-Identifier: Apache-2.0 */
/* Plans a batch, which is all the copies that one call asks for. The plan says which of
 * them may be made at the same time, which way each of them goes, and which are made by
 * one call of the runtime. Everything is pure: no function calls the runtime, and facts
 * that only others know come in as plain values. There are no locks. */
#pragma once

#include "base/convert.h"
#include "transfer/plan/plan.h"

/* One end of a piece. The addresses are those of its first byte. */
typedef struct cm_piece_end {
    char *host; /* the host's address; NULL if the host may not touch the memory */
    cm_address address; /* the device's address; 0 if the device cannot reach it */
    /* Names the allocation that has the memory: it is equal for all bytes of one
     * allocation, and NULL if nobody knows which allocation that is. */
    const void *owner;
    cm_kind kind;
    /* -1 for PAGEABLE. It has only 16 bits, so that both ends of a piece fit in one
     * cache line. */
    int16_t device;
    /* A mapping of a file: reading it may fault if the file has become shorter. */
    bool is_file;
} cm_piece_end;

/* A copy of one run of bytes; nbytes > 0. */
typedef struct cm_piece {
    cm_piece_end dst;
    cm_piece_end src;
    uint64_t nbytes;
    uint64_t index; /* its number among all copies that are asked for */
} cm_piece;

/* A copy whose ends are not single runs, or one that converts elements. It is never
 * empty. */
typedef struct cm_piece_regions {
    cm_region dst;
    /* Broadcast to dst's shape; the itemsizes are equal unless it converts. */
    cm_region src;
    cm_convert convert; /* how elements are converted on the way, if they are */
    uint64_t index;
} cm_piece_regions;

typedef enum cm_many_way {
    CM_MANY_ALONE, /* made as a copy of its own */
    /* TABLE and PEER only queue work. DOWN, UP and HOST also keep host threads busy. */
    CM_MANY_TABLE, /* by a kernel of `device`; long runs by its copy engine */
    CM_MANY_PEER,  /* from src_device to device */
    CM_MANY_DOWN,  /* gathered by the device, then spread out by host threads */
    CM_MANY_UP,    /* gathered by host threads, then spread out by the device */
    CM_MANY_HOST,  /* by threads of the host alone */
    CM_MANY_WAY_COUNT
} cm_many_way;

/* Pieces that go the same way, brought together by the plan. This owns its two arrays.
 * Where the pieces pass through page-locked blocks or are shared out among threads,
 * they are given places in a packed space of `span` bytes, in which they lie one behind
 * the other. Piece i begins at starts[i] of that space, and starts[count] = span. Each
 * start has the alignment that the piece's address has on the device. */
typedef struct cm_many {
    cm_many_way way;
    int device; /* -1 for the host */
    int src_device;
    uint64_t count;
    uint64_t nbytes; /* of all pieces */
    uint64_t span;
    cm_piece *pieces; /* owned */
    uint64_t *starts; /* owned; for HOST, UP and DOWN, otherwise NULL */
    /* Owned, or NULL if `pieces` lists all runs of bytes. If it is set, `pieces` and
     * `starts` are NULL, and HOST, UP and DOWN make the runs from these rows as they go
     * (numbered_rows.h). */
    struct cm_numbered_rows *rows;
} cm_many;

/* True if a span of `dst` shares an address with another span of `dst`, or with one of
 * `src`. This sorts both arrays. */
bool cm_byte_spans_touch(cm_byte_span *dst, cm_byte_span *src, uint64_t count);

/* Choose the way of one piece and set the devices that it goes between. `on_stream` has
 * the meaning that it has in cm_plan_options. */
cm_many_way cm_piece_choose_way(const cm_piece *piece, cm_end_facts dst,
                                cm_end_facts src, bool on_stream, int *device,
                                int *src_device);

/* Make a cm_many of those pieces i for which groups[i] equals `which`, and join
 * neighbours within one allocation. The new cm_many has the way and the devices of
 * `shape`, of which the caller sets no other member.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_many_create(const cm_piece *pieces, const uint8_t *groups,
                                      uint64_t piece_count, uint8_t which,
                                      const cm_many *shape, cm_many **out);
void cm_many_destroy(cm_many *many); /* does nothing with NULL */

/* The least length of a row, in bytes, for which a pitched copy is used. A kernel
 * copies shorter rows faster than the copy engine does. */
enum { CM_PITCHED_MIN_WIDTH = 512 };

/* True if these pieces are rows of equal length at equal distances, so that one pitched
 * copy from one allocation to another makes them all. If so, this sets `dst` and `src`
 * to its two ends. */
bool cm_many_is_rows(const cm_many *many, cm_region *dst, cm_region *src);

/* Find the piece that byte `at` of the packed space belongs to: the last one that does
 * not begin after it. */
uint64_t cm_many_find(const cm_many *many, uint64_t at);

/* Return the address that the runtime's copies take. */
cm_address cm_piece_end_address(const cm_piece_end *end);
bool cm_piece_end_is_on_device(const cm_piece_end *end);
cm_region cm_piece_end_region(const cm_piece_end *end, uint64_t nbytes);
