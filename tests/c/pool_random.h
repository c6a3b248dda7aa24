/* SPDX-License-Identifier: Apache-2.0 */
/* The world of the random tests of pools: one emulated runtime with faults and two
 * devices, its pools and streams of every sort, the two models, and dice. One at a time
 * in a process. Threads: the dice are each thread's own; streams and pools come and go
 * only while one thread runs. */
#pragma once

#include "pool_model.h"

enum { RANDOM_BLOCKS = 96, RANDOM_STREAMS = 12, RANDOM_FIXED_STREAMS = 3 };

typedef enum random_origin {
    RANDOM_NO_STREAM,
    RANDOM_DEFAULT, /* a default stream */
    RANDOM_OWN,
    RANDOM_KEPT, /* somebody else's, kept alive by its owner */
    RANDOM_BARE, /* a number */
} random_origin;

typedef struct random_stream {
    cm_stream *stream;
    random_origin origin;
} random_stream;

typedef struct random_world {
    cm_runtime *rt;    /* the fault wrapper: the pools' */
    cm_runtime *inner; /* borrowed: for calls that no fault may strike */
    order_oracle oracle;
    pool_model model;
    model_block blocks[RANDOM_BLOCKS];
    random_stream streams[RANDOM_STREAMS];
    uint64_t owners_made;
    _Atomic uint64_t owners_dropped;
    uint64_t lost_stream_count; /* faults struck destroying them: no second try */
    bool with_faults;           /* strike in some operations */
} random_world;

extern random_world world;

/* Each thread begins with a seed of its own. */
void random_seed(uint64_t seed);
uint64_t dice(uint64_t n);
/* The next operation of this thread. Now and then some are about the same few things.
 */
void random_step(void);

/* A world without pools on a driver by chance. */
void random_open(uint64_t seed, bool is_alone);
/* All is given back, and nothing is left. */
void random_close(void);
/* The first that is wrong in either model; NULL: nothing. */
const char *random_wrong(void);

/* Maybe let one of the next calls fail; with `may_repeat` perhaps again and again, if
 * nothing leaks by it. */
void random_plan_fault(bool may_repeat);

void random_make_stream(random_stream *to);
/* It may stay, where blocks that are held were used on it. */
void random_drop_stream(random_stream *to);
cm_stream *random_any_stream(void);
/* Of the device, mostly. */
cm_stream *random_stream_for(int device);
/* Ask whether a stream is done, or wait for it. */
void random_wait(void);

/* Often one of a few. */
uint64_t random_size(void);
void random_make_pool(int index);
/* One that is open; there must be one. */
model_pool *random_pool(void);
/* A place with a block, or without; RANDOM_BLOCKS: there is none. */
uint32_t random_place(bool taken);
/* Let a stream work on the block. */
void random_use(model_block *block, cm_stream *stream);
/* The stream that did so before, or another. */
void random_use_more(model_block *block);
