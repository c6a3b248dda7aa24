/* SPDX-License-Identifier: Apache-2.0 */
/* The world of the random tests of pools has an emulated runtime with faults and two
 * devices, pools and streams of every sort, the two models (pool_model.h and
 * order_oracle.h), and random numbers, called dice. There is one world at a time in a
 * process. Threads: each thread has its own dice; streams and pools are made and
 * dropped only while a single thread runs. */
#pragma once

#include "pool_model.h"

enum { RANDOM_BLOCKS = 96, RANDOM_STREAMS = 12, RANDOM_FIXED_STREAMS = 3 };

/* Where a stream comes from. */
typedef enum random_origin {
    RANDOM_NO_STREAM,
    RANDOM_DEFAULT, /* a default stream */
    RANDOM_OWN,
    RANDOM_KEPT, /* another library's stream, whose owner keeps it alive */
    RANDOM_BARE, /* another library's stream, known only by its handle */
} random_origin;

typedef struct random_stream {
    cm_stream *stream;
    random_origin origin;
} random_stream;

typedef struct random_world {
    cm_runtime *rt; /* the fault wrapper, which the pools use */
    /* Borrowed: the runtime inside the wrapper, for calls that must not fail. */
    cm_runtime *inner;
    order_oracle oracle;
    pool_model model;
    model_block blocks[RANDOM_BLOCKS];
    random_stream streams[RANDOM_STREAMS];
    uint64_t owners_made;
    _Atomic uint64_t owners_dropped;
    /* Streams that are left because an injected fault made destroying them fail. Nobody
     * tries that again. */
    uint64_t lost_stream_count;
    bool with_faults; /* some operations of this world fail */
} random_world;

extern random_world world;

/* Start the dice of this thread. Each thread has its own seed. */
void random_seed(uint64_t seed);
/* Return a random number from 0 to n - 1. */
uint64_t dice(uint64_t n);
/* Begin the next operation of this thread. Now and then a series of operations is about
 * the same pool, size and streams, since mistakes often need several operations on the
 * same memory. */
void random_step(void);

/* Open a world without pools, on a driver version chosen by chance. `is_alone` says
 * that the test has a single thread. */
void random_open(uint64_t seed, bool is_alone);
/* Close the world after giving everything back, and check that nothing is left. */
void random_close(void);
/* Return the first mistake that either model has found, or NULL. */
const char *random_wrong(void);

/* Perhaps make a plan by which one of the next calls fails. With `may_repeat`, which is
 * for calls that leak nothing when they fail for good, perhaps all later ones fail
 * too. */
void random_plan_fault(bool may_repeat);

/* Make a stream of a random sort. */
void random_make_stream(random_stream *to);
/* Drop a stream. Another library's stream stays if a live block was used on it. */
void random_drop_stream(random_stream *to);
/* Return one of the streams. */
cm_stream *random_any_stream(void);
/* Return a stream, in most cases one of the device. */
cm_stream *random_stream_for(int device);
/* Ask whether a random stream is done, or wait for it. */
void random_wait(void);

/* Return a random size. A few sizes come often. */
uint64_t random_size(void);
/* Make the pool with this number. */
void random_make_pool(int index);
/* Return a pool that has not been released. There must be one. */
model_pool *random_pool(void);
/* Return a place that has a block (with `taken`) or that has none, or RANDOM_BLOCKS if
 * there is no such place. */
uint32_t random_place(bool taken);
/* Queue work on the block on this stream, and report it to the oracle. */
void random_use(model_block *block, cm_stream *stream);
/* Do the same on a stream that has worked on the block before, or on a random one. */
void random_use_more(model_block *block);
