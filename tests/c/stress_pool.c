/* SPDX-License-Identifier: Apache-2.0 */
/* A stress of the pool: eight threads take and give blocks of four kinds on shared
 * streams, while gates shut and open, calls fail, limits change and pools are trimmed.
 * Work on the stream fills each block with a mark and copies a part of it. When that
 * work has ended, the copy is compared: if the block was handed out too early, the copy
 * shows somebody else's mark. Arguments: seconds (4), seed (1). */
#include <stdlib.h>
#include <time.h>

#include "pool_world.h"

enum { THREADS = 8, POOLS = 4, STREAMS = 5, HELD = 12 };

static double seconds = 4;
static uint64_t first_seed = 1;

typedef struct world {
    cm_runtime *rt;
    cm_pool *pools[POOLS];
    cm_budget budget;
    cm_stream *streams[STREAMS];
    atomic_bool stop;
    _Atomic uint64_t written, verified, refused;
} world;

/* A block that a thread holds. */
typedef struct held {
    cm_pool *pool;
    cm_block *block;
    cm_stream *stream;
    /* Page-locked memory that gets a copy of the block's bytes on the stream. */
    cm_block *copy;
    uint8_t mark;
} held;

/* What a thread has: its random numbers and its blocks. */
typedef struct job {
    world *w;
    uint64_t random;
    held held[HELD];
} job;

static uint64_t
next_random(job *j)
{
    j->random ^= j->random << 13;
    j->random ^= j->random >> 7;
    j->random ^= j->random << 17;
    return j->random >> 8;
}

/* Allocate a block. Returns NULL if the pool refuses, which a limit or an injected
 * fault may cause. */
static cm_block *
try_take(world *w, cm_pool *pool, uint64_t nbytes, cm_stream *stream)
{
    cm_block *block = NULL;
    if (!cm_is_ok(pool_alloc(pool, nbytes, stream, &block))) {
        atomic_fetch_add(&w->refused, 1);
        return NULL;
    }
    return block;
}

/* Take a block, let the stream or, now and then, the host fill it, and queue the copy
 * that end() compares. */
static void
begin(job *j, held *h)
{
    world *w = j->w;
    uint64_t r = next_random(j);
    h->pool = w->pools[r % POOLS];
    h->stream = w->streams[(r >> 8) % STREAMS];
    h->mark = (uint8_t)(r >> 16);
    uint64_t nbytes = (1 + (r >> 24) % 64) * (r >> 40) % 8 == 0 ? 48 * KIB : 700;
    h->block = try_take(w, h->pool, nbytes, h->stream);
    h->copy = h->block == NULL ? NULL : try_take(w, w->pools[0], 256, NULL);
    if (h->copy == NULL) {
        if (h->block != NULL) {
            cm_pool_free(h->pool, h->block, NULL, 0, 0);
            h->block = NULL;
        }
        return;
    }
    if (h->block->host != NULL && r >> 50 & 1) {
        memset(h->block->host, h->mark, h->block->nbytes);
    }
    else if (!cm_is_ok(cm_rt_fill_8_async(w->rt, h->block->address, h->mark,
                                          h->block->nbytes, h->stream->handle))) {
        h->mark = 0; /* an injected fault has prevented the fill */
    }
    for (int part = 0; part < 2; part++) {
        cm_address from = h->block->address + (part == 0 ? 0 : h->block->nbytes - 128);
        if (!cm_is_ok(cm_rt_copy_async(w->rt, h->copy->address + 128u * (unsigned)part,
                                       from, 128, h->stream->handle))) {
            h->mark = 0;
        }
    }
    atomic_fetch_add(&w->written, 1);
}

/* Give the block back while its work may still run. Then wait for that work and compare
 * the copy. */
static void
end(job *j, held *h)
{
    world *w = j->w;
    bool fence = next_random(j) % 16 == 0;
    cm_pool_free(h->pool, h->block, &h->stream, 1, fence ? CM_POOL_FREE_FENCE : 0);
    bool waited = cm_is_ok(cm_rt_stream_synchronize(w->rt, h->stream->handle));
    if (waited && h->mark != 0) {
        const uint8_t *seen = h->copy->host;
        for (int i = 0; i < 256; i++) {
            if (seen[i] != h->mark) {
                CHECK_FAIL_("byte %d is %u instead of %u: a block was handed out early",
                            i, seen[i], h->mark);
                break;
            }
        }
        atomic_fetch_add(&w->verified, 1);
    }
    cm_pool_free(w->pools[0], h->copy, &h->stream, 1, 0);
    h->block = NULL;
}

/* Make one random operation. */
static void
step(job *j)
{
    world *w = j->w;
    uint64_t r = next_random(j);
    held *h = &j->held[r % HELD];
    cm_pool *pool = w->pools[(r >> 8) % POOLS];
    uint64_t released = 0;
    if (h->block == NULL) {
        begin(j, h);
    }
    else {
        end(j, h);
    }
    if ((r >> 16) % 128 == 0) {
        cm_status ignored =
            pool_trim(pool, (r >> 32) % (4 * MIB), (r >> 30) & 1, &released);
        (void)ignored; /* an injected fault may have made it fail */
    }
    if ((r >> 24) % 8 == 0 && !cm_pool_check(pool)) {
        CHECK_FAIL_("the pool's invariants do not hold");
    }
}

/* The body of a thread: make operations until the stress is over, and give everything
 * back. */
static void *
run(void *arg)
{
    job *j = arg;
    cm_device_guard guard;
    MUST(cm_device_enter(j->w->rt, 0, &guard));
    while (!atomic_load(&j->w->stop) && atomic_load(&check_failures) == 0) {
        step(j);
    }
    for (int i = 0; i < HELD; i++) {
        if (j->held[i].block != NULL) {
            end(j, &j->held[i]);
        }
    }
    cm_device_leave(j->w->rt, &guard);
    return NULL;
}

/* Shut a gate for a moment, change the limit, and perhaps plan a fault. */
static void
disturb(world *w, job *dice, bool faults)
{
    static const cm_op ops[] = {CM_OP_event_record,    CM_OP_event_create,
                                CM_OP_event_query,     CM_OP_stream_is_capturing,
                                CM_OP_physical_create, CM_OP_address_map,
                                CM_OP_host_register,   CM_OP_managed_alloc};
    uint64_t r = next_random(dice);
    cm_stream *stream = w->streams[r % STREAMS];
    MUST(cm_emulated_gate_close(w->rt, stream->handle));
    struct timespec nap = {0, (long)((r >> 8) % 4 * 1000 * 1000)};
    (void)nanosleep(&nap, NULL);
    MUST(cm_emulated_gate_open(w->rt, stream->handle));
    atomic_store(&w->budget.limit_nbytes, (8 + (r >> 16) % 64) * MIB);
    if (faults) {
        int32_t code = (r >> 40) % 2 == 0 ? 999 : CM_CUDA_OUT_OF_MEMORY;
        cm_faults_plan(w->rt, ops[(r >> 32) % 8], 1 + (r >> 44) % 8, code, false);
    }
}

/* Run all threads for half of the time, then check that the pools are empty and
 * consistent. */
static void
stress(int driver_version, bool faults)
{
    static world w;
    static job jobs[THREADS + 1];
    static const cm_pool_config configs[POOLS] = {
        CONFIG(CM_KIND_PINNED, 0, CM_HOST_ALLOC_PORTABLE), CONFIG(CM_KIND_MAPPED, 0, 0),
        CONFIG(CM_KIND_MANAGED, 0, 1), CONFIG(CM_KIND_DEVICE, 0, 0)};
    cm_thread threads[THREADS];
    memset(&w, 0, sizeof(w));
    w.rt = open_emulated(driver_version, 1, UINT64_C(1) << 28);
    cm_budget_init(&w.budget, 64 * MIB, NULL);
    for (int i = 0; i < POOLS; i++) {
        cm_pool_config config = configs[i];
        config.budget = i == 0 ? NULL : &w.budget;
        w.pools[i] = open_pool(w.rt, config);
    }
    for (int i = 0; i < STREAMS; i++) {
        w.streams[i] = open_stream(w.rt, 0);
    }
    for (unsigned i = 0; i <= THREADS; i++) {
        jobs[i] = (job){.w = &w, .random = (first_seed + i) * 0x9e3779b97f4a7c15u | 1};
    }
    for (int i = 0; i < THREADS; i++) {
        MUST(cm_thread_start(&threads[i], run, &jobs[i]));
    }
    uint64_t begin_ns = cm_now_ns();
    while ((double)(cm_now_ns() - begin_ns) < seconds * 1e9 / 2
           && atomic_load(&check_failures) == 0) {
        disturb(&w, &jobs[THREADS], faults);
    }
    atomic_store(&w.stop, true);
    for (int i = 0; i < THREADS; i++) {
        cm_thread_join(threads[i]);
    }
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    for (int i = 0; i < POOLS; i++) {
        uint64_t released = 0;
        CHECK_OK(pool_trim(w.pools[i], 0, true, &released));
        cm_pool_counters c = read_counters(w.pools[i]);
        CHECK_EQ(c.live_count, 0);
        CHECK_EQ(c.in_flight_count, 0);
        CHECK_EQ(c.reserved_nbytes, 0);
        CHECK_GT(c.allocation_count, 0);
        cm_pool_release(w.pools[i]);
    }
    CHECK_EQ(atomic_load(&w.budget.used_nbytes), 0);
    CHECK_GT(atomic_load(&w.verified), 100);
    printf("  %llu blocks written, %llu verified, %llu refused\n",
           (unsigned long long)atomic_load(&w.written),
           (unsigned long long)atomic_load(&w.verified),
           (unsigned long long)atomic_load(&w.refused));
    for (int i = 0; i < STREAMS; i++) {
        cm_stream_release(w.streams[i]);
    }
    close_emulated(w.rt);
}

static void
test_pool_threads_never_share_a_block(void)
{
    stress(13000, false);
}

static void
test_pool_threads_never_share_a_block_under_faults(void)
{
    stress(12000, true);
}

int
main(int argc, char **argv)
{
    const char *only = NULL;
    int ran = 0;
    seconds = argc > 1 ? atof(argv[1]) : seconds;
    first_seed = argc > 2 ? strtoull(argv[2], NULL, 10) : first_seed;
    RUN(test_pool_threads_never_share_a_block)
    RUN(test_pool_threads_never_share_a_block_under_faults)
    return atomic_load(&check_failures) == 0 && ran == 2 ? 0 : 1;
}
