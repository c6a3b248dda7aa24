/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of allocations from a pool whose memory is in flight, that is, freed while work
 * may still run on it: which of them wait for that work, and which do not. A fence is
 * an event over everything that a device is doing, for which a block waits if its
 * streams are not known. */
#include "pool_world.h"

/* A cm_wait_hooks.interrupted that counts its calls and ends the wait at once. */
static bool
stop(void *argument)
{
    int *count = argument;
    *count += 1;
    return true;
}

/* All memory that the limit allows is in flight behind a shut gate. An allocation
 * without hooks must fail at once instead of waiting, and one with hooks must ask
 * whether it is interrupted. Once the work has ended both kinds of allocation
 * succeed. */
static void
test_pool_alloc_now_waits_for_no_work(void)
{
    const cm_pool_config kinds[] = {PINNED, DEVICE};
    for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++) {
        cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
        cm_pool_config config = kinds[i];
        cm_budget budget;
        cm_budget_init(&budget, 4 * MIB, NULL);
        config.budget = &budget;
        cm_pool *pool = open_pool(rt, config);
        cm_stream *stream = open_stream(rt, 0);
        cm_stream *other = open_stream(rt, 0);
        cm_block *late = take(pool, 4 * MIB, NULL);
        cm_block *block = NULL;
        hold_work(rt, stream, late);
        cm_stream *uses[2] = {stream, other};
        cm_pool_free(pool, late, uses, 2, 0);
        CHECK_CODE(cm_pool_alloc(pool, MIB, NULL, NULL, &block), CM_ELIMIT);
        CHECK_CODE(cm_pool_alloc(pool, MIB, other, NULL, &block), CM_ELIMIT);
        int asked = 0;
        cm_wait_hooks hooks = {.interrupted = stop, .argument = &asked};
        CHECK_CODE(cm_pool_alloc(pool, MIB, other, &hooks, &block), CM_ECANCELLED);
        CHECK_EQ(asked, 1);
        CHECK(cm_pool_check(pool));
        CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
        synchronize(rt, stream);
        synchronize(rt, other);
        CHECK_OK(cm_pool_alloc(pool, 4 * MIB, NULL, NULL, &block));
        give(pool, block, NULL, 0);
        /* The free memory now lies in pieces of another size. The pool has to give as
         * much of it back as the limit demands, without being asked to. */
        cm_block *small = take(pool, 2 * MIB, NULL);
        give(pool, small, NULL, 0);
        CHECK_OK(cm_pool_alloc(pool, 3 * MIB, NULL, NULL, &block));
        give(pool, block, NULL, 0);
        cm_pool_release(pool);
        cm_stream_release(stream);
        cm_stream_release(other);
        check_nothing_live(rt);
        close_emulated(rt);
    }
}

/* cm_pool_alloc_optional() serves callers that have other memory. It must return NULL
 * where an ordinary allocation would wait or give memory back, but it records the fence
 * that a block in flight needs, so that a later call finds the block free. */
static void
test_pool_alloc_optional_takes_fences_but_neither_waits_nor_trims(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool_config config = PINNED;
    cm_budget budget;
    cm_budget_init(&budget, 4 * MIB, NULL);
    config.budget = &budget;
    cm_pool *pool = open_pool(rt, config);
    cm_stream *stream = open_stream(rt, 0);
    CHECK_PTR_EQ(cm_pool_alloc_optional(pool, 0, 0), NULL);
    CHECK_PTR_EQ(cm_pool_alloc_optional(pool, UINT64_MAX, 0), NULL);
    CHECK_PTR_EQ(cm_pool_alloc_optional(pool, 5 * MIB, 0), NULL);
    cm_block *block = cm_pool_alloc_optional(pool, 4 * MIB, 0); /* the pool grows */
    CHECK(block != NULL);
    hold_work(rt, stream, block);
    give(pool, block, NULL, CM_POOL_FREE_FENCE);
    CHECK_PTR_EQ(cm_pool_alloc_optional(pool, MIB, 0), NULL);
    CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
    synchronize_device(rt, 0);
    /* The call before has recorded the fence, which is over now. */
    block = cm_pool_alloc_optional(pool, 4 * MIB, 0);
    CHECK(block != NULL);
    give(pool, block, NULL, 0);
    block = cm_pool_alloc_optional(pool, MIB, 0);
    CHECK(block != NULL);
    CHECK_PTR_EQ(cm_pool_alloc_optional(pool, 4 * MIB, 0), NULL);
    CHECK_EQ(read_counters(pool).trim_count, 0);
    CHECK_EQ(read_counters(pool).growth_count, 1);
    give(pool, block, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(stream);
    check_nothing_live(rt);
    close_emulated(rt);
}

/* A driver before CUDA 12.5 cannot record fences. The memory that waits must be bounded
 * there as well. */
static void
test_pool_alloc_optional_bounds_what_waits(void)
{
    cm_runtime *rt = open_emulated(12000, 1, UINT64_C(2048) * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    int count = 0;
    cm_block *block;
    while (count < 100 && (block = cm_pool_alloc_optional(pool, 16 * MIB, 0)) != NULL) {
        give(pool, block, NULL, CM_POOL_FREE_FENCE);
        count++;
    }
    CHECK_EQ(count, 17); /* the pool grows as long as at most 256 MiB wait */
    CHECK_LE(read_counters(pool).reserved_nbytes, (256 + 2 * 16) * MIB);
    cm_pool_release(pool);
    check_nothing_live(rt);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_pool_alloc_now_waits_for_no_work)
     RUN(test_pool_alloc_optional_takes_fences_but_neither_waits_nor_trims)
     RUN(test_pool_alloc_optional_bounds_what_waits))
/* clang-format on */
