/* SPDX-License-Identifier: Apache-2.0 */
/* A model of what random operations on pools must add up to. It notes the blocks that
 * are handed out, the sums of each pool and what the pool may hold, and compares them
 * with the pool's own counters, its budgets and the emulated device. It knows nothing
 * about how a pool works. Locks: one, for the sums. Tests compare only while no other
 * thread uses a pool. */
#pragma once

#include "order_oracle.h"
#include "pool/pool.h"

enum { MODEL_POOLS = 7, MODEL_USES = 4, MODEL_KINDS = 4 };

typedef struct model_pool {
    cm_pool *pool;   /* NULL while there is no pool in this place */
    bool is_closing; /* the test has released it, so it ends with its last block */
    cm_pool_config config;
    /* What the pool's counters of these names must be. */
    uint64_t live_nbytes, live_count, requested_nbytes;
    uint64_t alloc_count, free_count, refused_count, trim_count;
    uint64_t peak_live_nbytes, peak_requested_nbytes, peak_waste_nbytes;
    /* The peaks since the last cm_pool_read_window(). */
    uint64_t window_live_nbytes, window_requested_nbytes, window_waste_nbytes;
    uint64_t reserved_nbytes; /* as it was at the last comparison */
} model_pool;

typedef struct model_block {
    cm_block *block; /* NULL if this place is empty */
    model_pool *of;
    uint64_t begin;  /* the host's address, or the device's if the host has none */
    uint64_t nbytes; /* as it was asked for */
    /* The stream that the block was handed out to, if earlier work on its memory may
     * still run on that stream, which is allowed because later work there comes after
     * it. Otherwise NULL. The pointer is only compared, and never used. */
    const cm_stream *behind;
    /* The streams that worked on it, which this struct holds. */
    cm_stream *uses[MODEL_USES];
    uint32_t use_count;
} model_block;

typedef struct pool_model {
    cm_mutex lock;
    cm_runtime *rt; /* borrowed; the fault wrapper */
    order_oracle *oracle;
    model_pool pools[MODEL_POOLS];
    cm_budget kinds[MODEL_KINDS]; /* the budgets that the pools of a kind share */
    /* What they were charged with at the last comparison. */
    uint64_t kind_nbytes[MODEL_KINDS];
    model_block *blocks;
    uint32_t block_count;
    /* The first mistake that was found, or "". */
    char wrong[240];
} pool_model;

/* Return the oracle's line of a stream, or the host's line for NULL. */
uint32_t model_line(const pool_model *model, const cm_stream *stream);
/* Note that a block was handed out for `stream`, and check that no other block has
 * these bytes and that no work may still run there. */
void model_take(pool_model *model, model_pool *of, uint32_t place, cm_block *block,
                uint64_t nbytes, const cm_stream *stream);
/* Note that a block is about to be given back. Its place becomes empty, and the caller
 * gets what was noted there. */
model_block model_give(pool_model *model, uint32_t place);
/* Note that the pool's peaks were reset. */
void model_reset_peaks(model_pool *of);
/* Note that the peaks of the pool's window were reset. */
void model_reset_window(model_pool *of);
/* Check that the pool's counters agree with the model. Also check that the pool holds
 * no more than its limits allow, unless it held more already at the last comparison. */
void model_compare(pool_model *model, model_pool *of);
/* Check that the pool's listing shows exactly the blocks that are handed out, and that
 * it adds up. */
void model_compare_list(pool_model *model, model_pool *of);
/* Check that all pools together hold as much memory as the budgets are charged with,
 * and as the runtime has given. */
void model_compare_all(pool_model *model);
/* Note the first mistake, with the two figures that do not agree. */
void model_fail(pool_model *model, const char *what, uint64_t a, uint64_t b);
