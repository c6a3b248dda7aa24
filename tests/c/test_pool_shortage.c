/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of a pool of device memory whose growth fails half-way. Such a growth maps
 * several chunks of physical memory side by side, so it may have made or moved some of
 * them before it fails. */
#include "place_world.h"

/* A device of 256 MiB with two pools. One holds 100 MiB for another user. The other
 * one, `pool`, holds two chunks: `kept` is live in one, and the other is free. */
typedef struct crowd {
    cm_runtime *rt;
    cm_pool *others;
    cm_block *theirs;
    cm_budget budget; /* the budget of `pool` */
    cm_pool *pool;
    cm_block *kept;
    uint64_t free_nbytes; /* the driver's free memory at the end of open_crowd() */
} crowd;

static void
open_crowd(crowd *c)
{
    cm_pool_config plain = DEVICE;
    cm_pool_config config = DEVICE;
    plain.segments = CM_SEGMENTS_PLAIN;
    c->rt = open_emulated(13000, 1, 256 * MIB);
    c->others = open_pool(c->rt, plain);
    c->theirs = take(c->others, 100 * MIB, NULL);
    cm_budget_init(&c->budget, UINT64_MAX, NULL);
    config.budget = &c->budget;
    c->pool = open_pool(c->rt, config);
    cm_block *moved = take(c->pool, LUMP, NULL);
    c->kept = take(c->pool, LUMP, NULL);
    give(c->pool, moved, NULL, 0);
    c->free_nbytes = driver_free_nbytes(c->rt);
}

static void
close_crowd(crowd *c)
{
    give(c->others, c->theirs, NULL, 0);
    give(c->pool, c->kept, NULL, 0);
    cm_pool_release(c->others);
    cm_pool_release(c->pool);
    CHECK_EQ(atomic_load(&c->budget.used_nbytes), 0);
    check_nothing_live(c->rt);
    close_emulated(c->rt);
}

/* A request for 200 MiB finds too little memory. The pool must give back what it took
 * on the way, report how much was asked for, and still be able to serve 140 MiB. */
static void
test_pool_growth_that_fails_gives_back_what_it_took(void)
{
    crowd w;
    cm_block *block = NULL;
    open_crowd(&w);
    cm_status status = pool_alloc(w.pool, 200 * MIB, NULL, &block);
    CHECK_EQ(status.code, CM_CUDA_OUT_OF_MEMORY);
    CHECK_EQ(status.op, CM_OP_physical_create);
    CHECK_EQ(status.arg, 200 * MIB);
    CHECK(cm_pool_check(w.pool));
    cm_pool_counters c = read_counters(w.pool);
    CHECK_EQ(c.live_nbytes, LUMP);
    CHECK_EQ(c.reserved_nbytes, LUMP); /* the free chunk was trimmed */
    CHECK_EQ(c.peak_reserved_nbytes, 2 * LUMP);
    CHECK_EQ(c.lost_count, 0);
    CHECK_EQ(atomic_load(&w.budget.used_nbytes), LUMP);
    CHECK_EQ(driver_free_nbytes(w.rt), w.free_nbytes + LUMP);
    check_usable(w.rt, w.kept);
    block = take(w.pool, 140 * MIB, NULL);
    check_usable(w.rt, block);
    give(w.pool, block, NULL, 0);
    close_crowd(&w);
}

/* A growth by 100 MiB moves the free chunk, and then a call fails. The chunk must be
 * free memory at its new place. */
static void
test_pool_growth_that_fails_once_keeps_what_it_moved(void)
{
    crowd w;
    open_crowd(&w);
    cm_faults_plan(w.rt, CM_OP_physical_create, 4, 999, false);
    cm_block *block = NULL;
    CHECK_CODE(pool_alloc(w.pool, 100 * MIB, NULL, &block), 999);
    CHECK_EQ(cm_faults_last_injected(w.rt), CM_OP_physical_create);
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    CHECK(cm_pool_check(w.pool));
    cm_pool_counters c = read_counters(w.pool);
    CHECK_EQ(c.remap_nbytes, LUMP);
    CHECK_EQ(c.reserved_nbytes, 2 * LUMP);
    CHECK_EQ(c.cached_nbytes, LUMP);
    CHECK_EQ(atomic_load(&w.budget.used_nbytes), 2 * LUMP);
    CHECK_EQ(driver_free_nbytes(w.rt), w.free_nbytes);
    block = take(w.pool, LUMP, NULL);
    CHECK_EQ(read_counters(w.pool).reserved_nbytes, 2 * LUMP);
    check_usable(w.rt, block);
    give(w.pool, block, NULL, 0);
    close_crowd(&w);
}

/* A growth fails, and the driver also refuses to take memory back. That memory must
 * stay in the pool as free memory, and a later block must be able to use it. */
static void
test_pool_growth_that_fails_keeps_what_cannot_go_back(void)
{
    static const cm_op ops[] = {CM_OP_physical_release, CM_OP_address_unmap};
    for (size_t i = 0; i < 2; i++) {
        crowd w;
        cm_block *block = NULL;
        open_crowd(&w);
        cm_faults_plan(w.rt, ops[i], i == 0 ? 1 : 1 + LUMP / (2 * MIB), 999, true);
        CHECK_CODE(pool_alloc(w.pool, 200 * MIB, NULL, &block), CM_CUDA_OUT_OF_MEMORY);
        cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
        CHECK(cm_pool_check(w.pool));
        cm_pool_counters c = read_counters(w.pool);
        CHECK_GT(c.lost_count, 0);
        CHECK_GT(c.cached_nbytes, LUMP);
        CHECK_EQ(c.reserved_nbytes, c.live_nbytes + c.cached_nbytes);
        CHECK_EQ(atomic_load(&w.budget.used_nbytes), c.reserved_nbytes);
        CHECK_EQ(driver_free_nbytes(w.rt), 156 * MIB - c.reserved_nbytes);
        block = take(w.pool, 120 * MIB, NULL);
        check_usable(w.rt, block);
        give(w.pool, block, NULL, 0);
        close_crowd(&w);
    }
}

/* A request for more than the device has must fail without any call that creates
 * memory. For this the pool must add the memory that it holds to the request. */
static void
test_pool_asks_for_no_more_than_the_device_has(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *kept = take(pool, 100 * MIB, NULL);
    uint64_t created = cm_faults_count(rt, CM_OP_physical_create);
    for (int i = 1; i < 3; i++) {
        cm_block *block = NULL;
        /* With the 100 MiB that are held, even the first request is too much. */
        uint64_t nbytes = (uint64_t)i * 160 * MIB;
        cm_status status = pool_alloc(pool, nbytes, NULL, &block);
        CHECK_EQ(status.code, CM_CUDA_OUT_OF_MEMORY);
        CHECK_EQ(status.op, CM_OP_physical_create);
        CHECK_EQ(status.arg, nbytes);
    }
    CHECK_EQ(cm_faults_count(rt, CM_OP_physical_create), created);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 100 * MIB);
    cm_block *rest = take(pool, 156 * MIB, NULL); /* everything that there is */
    check_usable(rt, rest);
    give(pool, rest, NULL, 0);
    give(pool, kept, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_pool_growth_that_fails_gives_back_what_it_took)
     RUN(test_pool_growth_that_fails_once_keeps_what_it_moved)
     RUN(test_pool_growth_that_fails_keeps_what_cannot_go_back)
     RUN(test_pool_asks_for_no_more_than_the_device_has))
/* clang-format on */
