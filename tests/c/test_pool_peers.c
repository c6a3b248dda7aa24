/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of how a pool of device memory opens its chunks to other devices (its peers). A
 * new chunk is opened to the devices that have a context at that time, and
 * cm_pool_admit_peers() opens all chunks to devices that got a context later. */
#include "pool_world.h"

/* True if the device can write to the block now. */
static bool
can_reach(cm_runtime *rt, int device, const cm_block *block)
{
    cm_device_guard guard;
    /* The inner runtime is used directly, since a call of `rt` would note a context. */
    cm_runtime *inner = rt->inner;
    MUST(cm_device_enter(inner, device, &guard));
    cm_status status = cm_rt_fill_8_async(inner, block->address, 1, block->nbytes, 0);
    MUST(cm_rt_device_synchronize(inner));
    cm_device_leave(inner, &guard);
    return cm_is_ok(status);
}

/* Enter the device, which makes a context there if it has none. */
static void
make_context(cm_runtime *rt, int device)
{
    cm_device_guard guard;
    MUST(cm_device_enter(rt, device, &guard));
    cm_device_leave(rt, &guard);
}

/* Device 1 gets its context after two blocks were made. It must reach both after
 * cm_pool_admit_peers() and each later block at once. Device 2 has no context, so it
 * must stay outside, and nobody may make a context for it. */
static void
test_pool_peer_with_a_later_context_is_let_in(void)
{
    cm_runtime *rt = open_emulated(13000, 3, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *early = take(pool, CHUNK, NULL);
    cm_block *apart = take(pool, 3 * CHUNK, NULL);
    uint64_t contexts = atomic_load(&rt->context_count);
    CHECK(can_reach(rt, 0, early));
    CHECK(!can_reach(rt, 1, early));
    make_context(rt, 1);
    CHECK_EQ(atomic_load(&rt->context_count), contexts + 1);
    CHECK(!can_reach(rt, 1, early));
    CHECK_OK(cm_pool_admit_peers(pool));
    CHECK(can_reach(rt, 1, early));
    CHECK(can_reach(rt, 1, apart));
    CHECK(!can_reach(rt, 2, early)); /* it has no context, and none is made for it */
    CHECK_EQ(atomic_load(&rt->primary[2]), 0);
    cm_block *late = take(pool, 5 * CHUNK, NULL);
    CHECK(can_reach(rt, 1, late));
    make_context(rt, 1);
    CHECK_EQ(atomic_load(&rt->context_count), contexts + 1);
    give(pool, early, NULL, 0);
    give(pool, apart, NULL, 0);
    give(pool, late, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* Only the first cm_pool_admit_peers() after a new context makes runtime calls. The
 * next one makes none. */
static void
test_pool_peer_is_let_in_once(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    CHECK_OK(cm_pool_admit_peers(pool)); /* there is no memory yet */
    cm_block *block = take(pool, CHUNK, NULL);
    make_context(rt, 1);
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    CHECK_OK(cm_pool_admit_peers(pool));
    CHECK_EQ(cm_faults_count(rt, CM_OP_address_set_access), 1);
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    CHECK_OK(cm_pool_admit_peers(pool));
    CHECK_EQ(cm_faults_count(rt, CM_OP_none), 0);
    give(pool, block, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* Each call that cm_pool_admit_peers() makes fails once. The failure of
 * address_set_access must be reported, and the next try must succeed. */
static void
test_pool_peer_is_let_in_at_the_next_try(void)
{
    bool injected = true;
    for (uint64_t nth = 1; injected; nth++) {
        cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
        cm_pool *pool = open_pool(rt, DEVICE);
        cm_block *block = take(pool, CHUNK, NULL);
        make_context(rt, 1);
        cm_faults_plan(rt, CM_OP_none, nth, 999, false);
        cm_status status = cm_pool_admit_peers(pool);
        injected = cm_faults_last_injected(rt) != CM_OP_none;
        bool is_reported = cm_faults_last_injected(rt) == CM_OP_address_set_access;
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        CHECK(!is_reported || status.code == 999);
        CHECK(cm_pool_check(pool));
        CHECK_OK(cm_pool_admit_peers(pool));
        CHECK(can_reach(rt, 1, block));
        give(pool, block, NULL, 0);
        cm_pool_release(pool);
        close_emulated(rt);
    }
}

/* Page-locked memory and device memory that cudaMalloc made are open to every device
 * from the start, so there is nothing to call. */
static void
test_pool_that_is_open_to_all_lets_nobody_in(void)
{
    cm_pool_config plain = DEVICE;
    plain.segments = CM_SEGMENTS_PLAIN;
    const cm_pool_config configs[] = {PINNED, plain};
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    for (int i = 0; i < 2; i++) {
        cm_pool *pool = open_pool(rt, configs[i]);
        cm_block *block = take(pool, CHUNK, NULL);
        make_context(rt, 1);
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        CHECK_OK(cm_pool_admit_peers(pool));
        CHECK_EQ(cm_faults_count(rt, CM_OP_none), 0);
        give(pool, block, NULL, 0);
        cm_pool_release(pool);
    }
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_pool_peer_with_a_later_context_is_let_in)
     RUN(test_pool_peer_is_let_in_once)
     RUN(test_pool_peer_is_let_in_at_the_next_try)
     RUN(test_pool_that_is_open_to_all_lets_nobody_in))
/* clang-format on */
