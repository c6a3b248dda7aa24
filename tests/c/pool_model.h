/* SPDX-License-Identifier: Apache-2.0 */
/* A model of what random operations on pools must add up to: the blocks that are handed
 * out, the sums of each pool, and what it may hold. These are compared with the pool's
 * own counters, its budgets and the emulated device. The model knows nothing about how
 * a pool works. Locks: one, for the sums. Compare only while no other thread is in a
 * pool. */
#pragma once

#include "order_oracle.h"
#include "pool/pool.h"

enum { MODEL_POOLS = 7, MODEL_USES = 4, MODEL_KINDS = 4 };

typedef struct model_pool {
    cm_pool *pool;   /* may be NULL */
    bool is_closing; /* released, and gone with its last block */
    cm_pool_config config;
    uint64_t live_nbytes, live_count, requested_nbytes;
    uint64_t alloc_count, free_count, refused_count, trim_count;
    uint64_t peak_live_nbytes, peak_requested_nbytes, peak_waste_nbytes;
    uint64_t window_live_nbytes, window_requested_nbytes, window_waste_nbytes;
    uint64_t reserved_nbytes; /* when it was last looked at */
} model_pool;

typedef struct model_block {
    cm_block *block; /* NULL if the place is empty */
    model_pool *of;
    uint64_t begin;  /* the host's address if there is one */
    uint64_t nbytes; /* as asked for */
    /* The stream whose earlier work may still run on it, or NULL; only compared. */
    const cm_stream *behind;
    cm_stream *uses[MODEL_USES]; /* held: streams that worked on it */
    uint32_t use_count;
} model_block;

typedef struct pool_model {
    cm_mutex lock;
    cm_runtime *rt; /* borrowed, the fault wrapper */
    order_oracle *oracle;
    model_pool pools[MODEL_POOLS];
    cm_budget kinds[MODEL_KINDS];      /* the budgets that pools share */
    uint64_t kind_nbytes[MODEL_KINDS]; /* what they were charged with */
    model_block *blocks;
    uint32_t block_count;
    char wrong[240];
} pool_model;

/* The line for new work of a stream, or the host's line for NULL. */
uint32_t model_line(const pool_model *model, const cm_stream *stream);
/* Note that a block was handed out for `stream`, and check that nobody has these bytes
 * and that no work may run there. */
void model_take(pool_model *model, model_pool *of, uint32_t place, cm_block *block,
                uint64_t nbytes, const cm_stream *stream);
/* Note that a block is about to be given back, which empties its place. */
model_block model_give(pool_model *model, uint32_t place);
/* Note that the peaks were begun anew. */
void model_reset_peaks(model_pool *of);
void model_reset_window(model_pool *of);
/* Check that the pool's figures are those of the model, and that it holds no more than
 * its limits allow, unless it held more before they were set. */
void model_compare(pool_model *model, model_pool *of);
/* Check that the pool's listing shows the blocks that are handed out, and adds up. */
void model_compare_list(pool_model *model, model_pool *of);
/* Check that the pools hold what the budgets were charged with and what came from the
 * runtime. */
void model_compare_all(pool_model *model);
void model_fail(pool_model *model, const char *what, uint64_t a, uint64_t b);
