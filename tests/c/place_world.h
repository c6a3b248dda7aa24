/* SPDX-License-Identifier: Apache-2.0 */
/* Helps tests in which a pool maps chunks of device memory side by side in one range of
 * addresses. */
#pragma once

#include "pool_world.h"

/* The size of one chunk in these tests. A pool that holds little memory also grows by
 * this much at a time. */
#define LUMP (8 * MIB)

/* Return how much memory the driver says is free on device 0. */
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

/* Check that a block can be used: let the device write into each granule (2 MiB) and to
 * the last byte, then read the first and the last byte through the host's mapping. */
CM_UNUSED static void
check_usable(cm_runtime *rt, const cm_block *block)
{
    cm_device_guard guard;
    MUST(cm_device_enter(rt, 0, &guard));
    uint8_t epoch = (uint8_t)(block->address >> 21);
    cm_address end = block->address + block->nbytes;
    for (cm_address at = block->address; at < end;
         at = (at / (2 * MIB) + 1) * (2 * MIB)) {
        /* One byte in each granule is enough, since memory is mapped in whole
         * chunks. */
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
