/* SPDX-License-Identifier: Apache-2.0 */
/* How many copies are made together: which may go at the same time, which way each
 * goes, and which go with one call. Pure: no runtime call; what must be asked of others
 * comes in as plain facts. Locks: none. */
#pragma once

#include "base/convert.h"
#include "transfer/plan/plan.h"

/* One end of a piece: the first of its bytes. */
typedef struct cm_piece_end {
    char *host;         /* as the host knows it; NULL if it may not touch it */
    cm_address address; /* as the device does; 0 if it cannot reach it */
    const void *owner;  /* the same for bytes of one allocation; NULL: nobody knows */
    cm_kind kind;
    int16_t device; /* -1 for PAGEABLE; short, so that a line of the cache holds two
                       ends */
    bool is_file;   /* a mapped file's: its pages may be gone */
} cm_piece_end;

/* A run of bytes, nbytes > 0. */
typedef struct cm_piece {
    cm_piece_end dst;
    cm_piece_end src;
    uint64_t nbytes;
    uint64_t index; /* which copy it is, of all that are asked for */
} cm_piece;

/* A copy that is no run, or one that converts; never empty. */
typedef struct cm_piece_regions {
    cm_region dst;
    cm_region src; /* broadcast to dst's shape; the same itemsize unless it converts */
    cm_convert convert; /* what elements become on the way, if anything */
    uint64_t index;
} cm_piece_regions;

typedef enum cm_many_way {
    CM_MANY_ALONE, /* as a copy of its own */
    /* those first that only queue work; then those for which the host works as well */
    CM_MANY_TABLE, /* by the kernel, or for long runs the copy engine, of `device` */
    CM_MANY_PEER,  /* from src_device to device */
    CM_MANY_DOWN,  /* gathered by the device, spread out by the host's threads */
    CM_MANY_UP,    /* the reverse */
    CM_MANY_HOST,  /* by the host's threads */
    CM_MANY_WAY_COUNT
} cm_many_way;

/* Pieces that go one way, put together by the plan: owns them. Piece i begins at
 * starts[i] of a packed space of `span` bytes, at an address that is aligned there as
 * it is on the device; starts[count] = span. */
typedef struct cm_many {
    cm_many_way way;
    int device; /* -1: the host */
    int src_device;
    uint64_t count;
    uint64_t nbytes; /* of all pieces */
    uint64_t span;
    cm_piece *pieces; /* owned */
    uint64_t *starts; /* owned; HOST, UP and DOWN; else NULL */
} cm_many;

/* Does one span of `dst` share an address with another of them or with one of `src`?
 * Sorts both. */
bool cm_byte_spans_touch(cm_byte_span *dst, cm_byte_span *src, uint64_t count);

/* The way, and the devices it is between; `on_stream` as in cm_plan_options. */
cm_many_way cm_piece_choose_way(const cm_piece *piece, cm_end_facts dst,
                                cm_end_facts src, bool on_stream, int *device,
                                int *src_device);

/* Those pieces for which groups[i] is `which`, with neighbours of one allocation
 * joined;
 * `shape` has the way and the devices, and nothing else. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_many_create(const cm_piece *pieces, const uint8_t *groups,
                                      uint64_t piece_count, uint8_t which,
                                      const cm_many *shape, cm_many **out);
void cm_many_destroy(cm_many *many); /* NULL: nothing */

/* Is it one pitched copy, from one allocation to another? The two ends of that. */
bool cm_many_is_rows(const cm_many *many, cm_region *dst, cm_region *src);

/* Which piece `at` of the packed space belongs to: the last that begins no later. */
uint64_t cm_many_find(const cm_many *many, uint64_t at);

cm_address cm_piece_end_address(const cm_piece_end *end); /* what copies take */
bool cm_piece_end_is_on_device(const cm_piece_end *end);
cm_region cm_piece_end_region(const cm_piece_end *end, uint64_t nbytes);
