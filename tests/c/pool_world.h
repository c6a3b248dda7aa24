/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers that the tests of the pool share. They open pools and streams on an emulated
 * device, take and give blocks with a check of the pool's invariants after each step,
 * and hold a stream's work back behind a gate. */
#pragma once

#include "base/thread.h"
#include "open_emulated.h"
#include "pool/pool.h"

#define KIB UINT64_C(1024)
#define MIB (UINT64_C(1) << 20)
/* A block of this size fills a whole chunk. If a later block has the same address, the
 * test knows that it got the same chunk. */
#define CHUNK (2 * MIB)

/* clang-format off */
#define CONFIG(kind_, device_, flags_)                                                 \
    {.kind = (kind_), .device = (device_), .flags = (flags_), .numa_node = -1}
/* clang-format on */
CM_UNUSED static const cm_pool_config PINNED =
    CONFIG(CM_KIND_PINNED, 0, CM_HOST_ALLOC_PORTABLE);
CM_UNUSED static const cm_pool_config DEVICE = CONFIG(CM_KIND_DEVICE, 0, 0);

CM_UNUSED static cm_pool *
open_pool(cm_runtime *rt, cm_pool_config config)
{
    cm_pool *pool = NULL;
    MUST(cm_pool_create(rt, &config, &pool));
    return pool;
}

CM_UNUSED static cm_stream *
open_stream(cm_runtime *rt, int device)
{
    cm_stream *stream = NULL;
    MUST(cm_stream_create(rt, device, CM_STREAM_NON_BLOCKING, 0, &stream));
    return stream;
}

/* Call cm_pool_alloc() with hooks that never interrupt a wait, so that it may wait. */
CM_UNUSED static cm_status
pool_alloc(cm_pool *pool, uint64_t nbytes, cm_stream *stream, cm_block **out)
{
    const cm_wait_hooks uninterrupted = {.interrupted = NULL};
    return cm_pool_alloc(pool, nbytes, stream, &uninterrupted, out);
}

/* Call cm_pool_trim(). If `wait` is true it may wait for memory in flight, and nobody
 * interrupts that. */
CM_UNUSED static cm_status
pool_trim(cm_pool *pool, uint64_t keep_nbytes, bool wait, uint64_t *released_nbytes)
{
    const cm_wait_hooks uninterrupted = {.interrupted = NULL};
    return cm_pool_trim(pool, keep_nbytes, wait ? &uninterrupted : NULL,
                        released_nbytes);
}

/* Allocate a block and check the invariants. The program ends if there is no memory. */
CM_UNUSED static cm_block *
take(cm_pool *pool, uint64_t nbytes, cm_stream *stream)
{
    cm_block *block = NULL;
    MUST(pool_alloc(pool, nbytes, stream, &block));
    if (!cm_pool_check(pool)) {
        CHECK_FAIL_("the pool's invariants do not hold after an allocation");
    }
    return block;
}

/* Free a block that `stream` has used, or no stream if that is NULL, and check the
 * invariants. */
CM_UNUSED static void
give(cm_pool *pool, cm_block *block, cm_stream *stream, unsigned flags)
{
    cm_stream *uses[1] = {stream};
    (void)cm_pool_hold(pool);
    cm_pool_free(pool, block, uses, stream != NULL ? 1 : 0, flags);
    if (!cm_pool_check(pool)) {
        CHECK_FAIL_("the pool's invariants do not hold after a free");
    }
    cm_pool_release(pool);
}

CM_UNUSED static cm_pool_counters
read_counters(cm_pool *pool)
{
    cm_pool_counters counters;
    cm_pool_read(pool, &counters);
    return counters;
}

CM_UNUSED static void
synchronize(cm_runtime *rt, const cm_stream *stream)
{
    cm_device_guard guard;
    MUST(cm_device_enter(rt, stream->device, &guard));
    MUST(cm_rt_stream_synchronize(rt, stream->handle));
    cm_device_leave(rt, &guard);
}

/* Shut the gate of the stream and queue work behind it that writes to the block. */
CM_UNUSED static void
hold_work(cm_runtime *rt, const cm_stream *stream, const cm_block *block)
{
    cm_device_guard guard;
    MUST(cm_device_enter(rt, stream->device, &guard));
    MUST(cm_emulated_gate_close(rt, stream->handle));
    MUST(cm_rt_fill_8_async(rt, block->address, 7, block->nbytes, stream->handle));
    cm_device_leave(rt, &guard);
}

CM_UNUSED static void
synchronize_device(cm_runtime *rt, int device)
{
    cm_device_guard guard;
    MUST(cm_device_enter(rt, device, &guard));
    MUST(cm_rt_device_synchronize(rt));
    cm_device_leave(rt, &guard);
}

/* The body of a thread that opens the gate of a stream. */
CM_UNUSED static void *
open_gate(void *arg)
{
    cm_stream *stream = arg;
    MUST(cm_emulated_gate_open(stream->rt, stream->handle));
    return NULL;
}

/* Check that nothing is live except streams, which the tests make themselves. */
CM_UNUSED static void
check_only_streams_live(cm_runtime *rt)
{
    cm_emulated_counts counts;
    cm_emulated_read_counts(rt, &counts);
    CHECK_EQ(counts.host_allocs, 0);
    CHECK_EQ(counts.registrations, 0);
    CHECK_EQ(counts.device_allocs, 0);
    CHECK_EQ(counts.managed_allocs, 0);
    CHECK_EQ(counts.live_nbytes, 0);
    CHECK_EQ(counts.events, 0);
}
