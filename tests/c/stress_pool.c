/* SPDX-License-Identifier: Apache-2.0 */
/* Threads at one pool: each marks its blocks and leaves before the work on them is
 * done. A block handed out too early shows as another thread's mark (or as a data race
 * under ThreadSanitizer). Argument: rounds per thread. */
#include "base/thread.h"
#include "open_emulated.h"
#include "pool/pool.h"

#define KIB UINT64_C(1024)

enum { THREAD_COUNT = 4, SLOT_COUNT = 8 };

static int round_count = 150;

typedef struct job {
    cm_runtime *rt;
    cm_pool *pool;    /* what is under test */
    cm_pool *results; /* pinned; each thread has one block of it */
    cm_pool *device;
    unsigned seed;
} job;

/* Host memory: the mark is written by the host, then copied away by the stream. */
static void
send_mark(const job *j, cm_stream *stream, cm_block *sink, uint64_t slot, uint8_t mark)
{
    cm_block *block = NULL;
    uint64_t nbytes = (1 + slot % 3) * KIB;
    MUST(cm_pool_alloc(j->pool, nbytes, stream, &block));
    if (block->host != NULL) {
        memset(block->host, mark, nbytes);
    }
    else {
        MUST(cm_rt_fill_8_async(j->rt, block->address, mark, nbytes, stream->handle));
    }
    MUST(cm_rt_copy_async(j->rt, sink->address + slot * KIB, block->address, KIB,
                          stream->handle));
    cm_pool_free(j->pool, block, &stream, 1, slot == SLOT_COUNT - 1);
}

static void *
run(void *arg)
{
    job *j = arg;
    cm_device_guard guard;
    cm_stream *stream = NULL;
    cm_block *sink = NULL;
    cm_block *result = NULL;
    MUST(cm_device_enter(j->rt, 0, &guard));
    MUST(cm_stream_create(j->rt, 0, CM_STREAM_NON_BLOCKING, 0, &stream));
    MUST(cm_pool_alloc(j->device, SLOT_COUNT * KIB, stream, &sink));
    MUST(cm_pool_alloc(j->results, SLOT_COUNT * KIB, stream, &result));
    for (int round = 0; round < round_count; round++) {
        uint8_t marks[SLOT_COUNT];
        for (uint64_t slot = 0; slot < SLOT_COUNT; slot++) {
            marks[slot] = (uint8_t)rand_r(&j->seed);
            send_mark(j, stream, sink, slot, marks[slot]);
        }
        MUST(cm_rt_copy_async(j->rt, result->address, sink->address, SLOT_COUNT * KIB,
                              stream->handle));
        MUST(cm_rt_stream_synchronize(j->rt, stream->handle));
        for (uint64_t i = 0; i < SLOT_COUNT * KIB; i++) {
            if (((const uint8_t *)result->host)[i] != marks[i / KIB]) {
                CHECK_FAIL_("round %d: byte %llu was overwritten", round,
                            (unsigned long long)i);
                break;
            }
        }
        if (rand_r(&j->seed) % 16 == 0) {
            uint64_t released = 0;
            MUST(cm_pool_trim(j->pool, 0, rand_r(&j->seed) % 2 == 0, &released));
        }
        if (!cm_pool_check(j->pool)) {
            CHECK_FAIL_("invariants broken in round %d", round);
        }
    }
    cm_pool_free(j->device, sink, &stream, 1, false);
    cm_pool_free(j->results, result, &stream, 1, false);
    cm_stream_release(stream);
    cm_device_leave(j->rt, &guard);
    return NULL;
}

static void
stress(int driver_version, cm_pool_config config)
{
    cm_runtime *rt = open_emulated(driver_version, 1, UINT64_C(1) << 28);
    cm_pool_config pinned = {CM_KIND_PINNED, 0, CM_HOST_ALLOC_PORTABLE, 0};
    cm_pool_config device = {CM_KIND_DEVICE, 0, 0, 0};
    cm_thread threads[THREAD_COUNT];
    job jobs[THREAD_COUNT];
    cm_pool *pools[3];
    MUST(cm_pool_create(rt, &config, &pools[0]));
    MUST(cm_pool_create(rt, &pinned, &pools[1]));
    MUST(cm_pool_create(rt, &device, &pools[2]));
    for (unsigned i = 0; i < THREAD_COUNT; i++) {
        jobs[i] = (job){rt, pools[0], pools[1], pools[2], i + 1};
        MUST(cm_thread_start(&threads[i], run, &jobs[i]));
    }
    for (int i = 0; i < THREAD_COUNT; i++) {
        cm_thread_join(threads[i]);
    }
    cm_pool_counters c;
    cm_pool_read(pools[0], &c);
    CHECK_EQ(c.live_count, 0);
    CHECK_EQ(c.allocation_count,
             (uint64_t)THREAD_COUNT * SLOT_COUNT * (uint64_t)round_count);
    CHECK_GT(c.hit_count, 0);
    CHECK_EQ(c.lost_count, 0);
    for (int i = 0; i < 3; i++) {
        cm_pool_release(pools[i]);
    }
    close_emulated(rt);
}

static void
test_pool_threads_never_share_a_pinned_block(void)
{
    stress(13000, (cm_pool_config){CM_KIND_PINNED, 0, CM_HOST_ALLOC_PORTABLE, 0});
}

static void
test_pool_threads_never_share_a_mapped_block_without_context_events(void)
{
    stress(12000, (cm_pool_config){CM_KIND_MAPPED, 0, CM_HOST_ALLOC_PORTABLE, 0});
}

static void
test_pool_threads_never_share_a_device_block(void)
{
    stress(13000, (cm_pool_config){CM_KIND_DEVICE, 0, 0, 0});
}

int
main(int argc, char **argv)
{
    const char *only = NULL;
    int ran = 0;
    if (argc > 1) {
        round_count = atoi(argv[1]);
    }
    RUN(test_pool_threads_never_share_a_pinned_block)
    RUN(test_pool_threads_never_share_a_mapped_block_without_context_events)
    RUN(test_pool_threads_never_share_a_device_block)
    return atomic_load(&check_failures) == 0 && ran == 3 ? 0 : 1;
}
