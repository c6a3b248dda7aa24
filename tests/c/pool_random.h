/* SPDX-License-Identifier: Apache-2.0 */
/* The world of the random tests of pools: one emulated runtime with faults and two
 * devices, its pools and streams of every sort, the two models, and dice. There is one
 * at a time in a process. Threads: each thread has dice of its own; streams and pools
 * are made and dropped only while a single thread runs. */
#pragma once

#include "pool_model.h"

enum { RANDOM_BLOCKS = 96, RANDOM_STREAMS = 12, RANDOM_FIXED_STREAMS = 3 };

typedef enum random_origin {
    RANDOM_NO_STREAM,
    RANDOM_DEFAULT, /* a default stream */
    RANDOM_OWN,
    RANDOM_KEPT, /* another library's, kept alive by its owner */
    RANDOM_BARE, /* a mere number */
} random_origin;

typedef struct random_stream {
    cm_stream *stream;
    random_origin origin;
} random_stream;

typedef struct random_world {
    cm_runtime *rt;    /* the fault wrapper, which the pools use */
    cm_runtime *inner; /* borrowed: for calls that must not fail */
    order_oracle oracle;
    pool_model model;
    model_block blocks[RANDOM_BLOCKS];
    random_stream streams[RANDOM_STREAMS];
    uint64_t owners_made;
    _Atomic uint64_t owners_dropped;
    /* Injected faults made destroying them fail, which is not tried again. */
    uint64_t lost_stream_count;
    bool with_faults; /* make some operations fail */
} random_world;

extern random_world world;

/* Each thread begins with a seed of its own. */
void random_seed(uint64_t seed);
uint64_t dice(uint64_t n);
/* Begin the next operation of this thread. Now and then several operations in a row are
 * about the same few things. */
void random_step(void);

/* Open a world without pools, on a driver version chosen by chance. */
void random_open(uint64_t seed, bool is_alone);
/* Give everything back, and check that nothing is left. */
void random_close(void);
/* The first thing that is wrong in either model, or NULL. */
const char *random_wrong(void);

/* Perhaps let one of the next calls fail; with `may_repeat` perhaps again and again, if
 * nothing leaks because of it. */
void random_plan_fault(bool may_repeat);

void random_make_stream(random_stream *to);
/* Drop a stream. It may have to stay if blocks that are held were used on it. */
void random_drop_stream(random_stream *to);
cm_stream *random_any_stream(void);
/* A stream, which mostly is one of the device. */
cm_stream *random_stream_for(int device);
/* Ask whether a stream is done, or wait for it. */
void random_wait(void);

/* A size, often one of a few. */
uint64_t random_size(void);
void random_make_pool(int index);
/* A pool that is open. There must be one. */
model_pool *random_pool(void);
/* A place with a block (`taken`) or without one; RANDOM_BLOCKS if there is none. */
uint32_t random_place(bool taken);
/* Let a stream work on the block. */
void random_use(model_block *block, cm_stream *stream);
/* Let the stream that worked on the block before, or another, do so again. */
void random_use_more(model_block *block);
