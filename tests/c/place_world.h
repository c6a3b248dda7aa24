/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of chunks that are put side by side share. */
#pragma once

#include "pool_world.h"

/* The size of one chunk. It is also how much a pool that holds little grows by at a
 * time. */
#define LUMP (8 * MIB)

CM_UNUSED static uint64_t
driver_free_nbytes(cm_runtime *rt)
{
    cm_device_guard guard;
    uint64_t free_nbytes = 0;
    uint64_t total_nbytes = 0;
    MUST(cm_device_enter(rt, 0, &guard));
    MUST(cm_rt_memory_info(rt, &free_nbytes, &total_nbytes));
    cm_device_leave(rt, &guard);
    return free_nbytes;
}

/* Write into each granule of the block and at its end, and read it back. */
CM_UNUSED static void
check_usable(cm_runtime *rt, const cm_block *block)
{
    cm_device_guard guard;
    MUST(cm_device_enter(rt, 0, &guard));
    uint8_t epoch = (uint8_t)(block->address >> 21);
    cm_address end = block->address + block->nbytes;
    for (cm_address at = block->address; at < end;
         at = (at / (2 * MIB) + 1) * (2 * MIB)) {
        /* Memory is mapped in whole chunks. */
        MUST(cm_rt_fill_8_async(rt, at, epoch, 1, 0));
    }
    MUST(cm_rt_fill_8_async(rt, end - 1, epoch, 1, 0));
    MUST(cm_rt_device_synchronize(rt));
    cm_device_leave(rt, &guard);
    const uint8_t *seen = cm_runtime_host_alias(rt, block->address, 1);
    const uint8_t *last =
        cm_runtime_host_alias(rt, block->address + block->nbytes - 1, 1);
    CHECK(seen != NULL && last != NULL);
    CHECK_EQ(*seen, epoch);
    CHECK_EQ(*last, epoch);
}
