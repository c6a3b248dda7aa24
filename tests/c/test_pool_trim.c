/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of how a pool gives memory back to the runtime (a trim), of its limits, and of
 * calls that fail. The last part is a fault sweep: it runs a scenario again and again,
 * each time with another runtime call that fails. */
#include <time.h>

#define EMULATED_DELAY_US 20

#include "pool_world.h"

/* Trim the pool, check its invariants, and return how many bytes were given back. */
static uint64_t
trim(cm_pool *pool, uint64_t keep_nbytes, bool wait)
{
    uint64_t released = 0;
    MUST(pool_trim(pool, keep_nbytes, wait, &released));
    if (!cm_pool_check(pool)) {
        CHECK_FAIL_("the pool's invariants do not hold after a trim");
    }
    return released;
}

/* -- giving back ------------------------------------------------------------------------ */

/* Ten blocks are freed, and the pool keeps all of their memory. Trims then give back as
 * many whole chunks as they may, and nothing that is in use. */
static void
test_pool_keeps_what_is_freed_until_trimmed(void)
{
    static const cm_pool_config configs[] = {CONFIG(CM_KIND_DEVICE, 0, 0),
                                             CONFIG(CM_KIND_PINNED, 0, 0),
                                             CONFIG(CM_KIND_MANAGED, 0, 1)};
    for (size_t k = 0; k < 3; k++) {
        cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
        cm_pool *pool = open_pool(rt, configs[k]);
        cm_block *blocks[10];
        for (int i = 0; i < 10; i++) {
            blocks[i] = take(pool, 16 * MIB, NULL);
        }
        /* The pool holds nothing beyond the blocks. */
        CHECK_EQ(read_counters(pool).reserved_nbytes, 160 * MIB);
        CHECK_EQ(trim(pool, 0, false), 0);
        uint64_t before = cm_faults_count(rt, CM_OP_none);
        for (int i = 0; i < 10; i++) {
            give(pool, blocks[i], NULL, 0);
        }
        CHECK_EQ(cm_faults_count(rt, CM_OP_none), before);
        CHECK_EQ(read_counters(pool).cached_nbytes, 160 * MIB);
        CHECK_EQ(trim(pool, 64 * MIB, false), 96 * MIB);
        CHECK_EQ(trim(pool, 64 * MIB, false), 0);
        /* Memory goes back in whole chunks, and at least as much as was asked for
         * stays. */
        CHECK_EQ(trim(pool, 63 * MIB, false), 0);
        cm_block *block = take(pool, 100, NULL);
        /* This gives back everything but the chunk with the live block. */
        uint64_t released = trim(pool, 0, false);
        cm_pool_counters c = read_counters(pool);
        CHECK_EQ(released + c.reserved_nbytes, 64 * MIB);
        CHECK_LE(c.reserved_nbytes, 16 * MIB);
        CHECK_EQ(c.reserved_nbytes, c.live_nbytes + c.cached_nbytes);
        CHECK_EQ(c.trimmed_nbytes, 96 * MIB + released);
        CHECK_EQ(c.peak_reserved_nbytes, 160 * MIB);
        give(pool, block, NULL, 0);
        CHECK_EQ(trim(pool, 0, false), c.reserved_nbytes);
        CHECK_EQ(read_counters(pool).reserved_nbytes, 0);
        cm_pool_release(pool);
        close_emulated(rt);
    }
}

/* Allocate and free a block, and return how much memory the pool holds then. */
static uint64_t
reserved_after_use(cm_pool *pool, uint64_t nbytes)
{
    give(pool, take(pool, nbytes, NULL), NULL, 0);
    return read_counters(pool).reserved_nbytes;
}

/* A pool with an idle trim holds twice as much as its program goes on using. Once the
 * time is over, the unused half must go back without being asked for. */
static void
test_pool_idle_trim_gives_back_what_was_not_needed(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool_config config = DEVICE;
    config.idle_trim_ns = UINT64_C(3600) * 1000 * 1000 * 1000;
    cm_pool *pool = open_pool(rt, config);
    cm_block *a = take(pool, 16 * MIB, NULL);
    cm_block *b = take(pool, 16 * MIB, NULL);
    give(pool, a, NULL, 0);
    give(pool, b, NULL, 0);
    /* The hour is not over, so nothing went back and this is a hit. */
    give(pool, take(pool, 16 * MIB, NULL), NULL, 0);
    CHECK_EQ(read_counters(pool).hit_count, 1);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 32 * MIB);
    cm_pool_set_idle_trim(pool, 5 * 1000 * 1000);
    /* The half that is used all the time must stay. */
    WAIT_UNTIL(reserved_after_use(pool, 16 * MIB) < 32 * MIB);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 16 * MIB);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* Two pools are used in the same way, and only one has an idle trim. When that one has
 * given memory back, the other must still hold all of its own. */
static void
test_pool_idle_trim_is_off_by_default(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_pool_config config = DEVICE;
    config.idle_trim_ns = 1000 * 1000;
    cm_pool *witness = open_pool(rt, config);
    CHECK_EQ(reserved_after_use(pool, 16 * MIB), 16 * MIB);
    CHECK_EQ(reserved_after_use(witness, 16 * MIB), 16 * MIB);
    WAIT_UNTIL(reserved_after_use(witness, 1 * MIB) < 16 * MIB);
    CHECK_EQ(reserved_after_use(pool, 4 * MIB), 16 * MIB);
    CHECK_EQ(reserved_after_use(pool, 4 * MIB), 16 * MIB);
    cm_pool_release(pool);
    cm_pool_release(witness);
    close_emulated(rt);
}

/* -- counters --------------------------------------------------------------------------- */

typedef struct churn {
    cm_pool *pool;
    _Atomic bool over;
} churn;

/* The body of a thread that makes the pool grow and shrink. */
static void *
grow_and_trim(void *arg)
{
    churn *c = arg;
    for (int i = 0; i < 20; i++) {
        cm_block *a = take(c->pool, 6 * MIB, NULL);
        cm_block *b = take(c->pool, 2 * MIB, NULL);
        give(c->pool, a, NULL, 0);
        a = take(c->pool, 10 * MIB, NULL);
        give(c->pool, b, NULL, 0);
        give(c->pool, a, NULL, 0);
        (void)trim(c->pool, MIB, false);
    }
    c->over = true;
    return NULL;
}

/* While another thread makes the pool grow and shrink, each reading of the counters
 * must add up. */
static void
test_pool_counters_agree_while_memory_comes_and_goes(void)
{
    for (int plain = 0; plain < 2; plain++) {
        cm_runtime *rt = open_emulated(13000, 1, 128 * MIB);
        cm_pool_config config = DEVICE;
        config.segments = plain ? CM_SEGMENTS_PLAIN : CM_SEGMENTS_AUTO;
        churn c = {.pool = open_pool(rt, config)};
        cm_thread thread;
        CHECK_OK(cm_thread_start(&thread, grow_and_trim, &c));
        uint64_t wrong = 0;
        while (!c.over) {
            cm_pool_counters now = read_counters(c.pool);
            wrong += now.live_nbytes + now.in_flight_nbytes + now.cached_nbytes
                         != now.reserved_nbytes
                     || now.largest_free_nbytes > now.cached_nbytes
                     || now.peak_reserved_nbytes < now.reserved_nbytes;
        }
        cm_thread_join(thread);
        CHECK_EQ(wrong, 0);
        cm_pool_release(c.pool);
        close_emulated(rt);
    }
}

/* -- waiting that can be ended ---------------------------------------------------------- */

/* A cm_wait_hooks.interrupted that ends the wait when it has been called as often as
 * its argument says. */
static bool
stops_at_last(void *argument)
{
    int *questions = argument;
    return --*questions <= 0;
}

/* A trim has to wait for a block behind a shut gate. The first time the hook interrupts
 * it, and it must give back nothing. The second time another thread opens the gate, and
 * it must give back everything. */
static void
test_pool_trim_waits_until_interrupted_or_until_all_has_passed(void)
{
    static const cm_pool_config configs[] = {CONFIG(CM_KIND_DEVICE, 0, 0),
                                             CONFIG(CM_KIND_PINNED, 0, 0)};
    for (size_t k = 0; k < 2; k++) {
        cm_runtime *rt = open_emulated(13000, 1, 64 * MIB);
        cm_pool *pool = open_pool(rt, configs[k]);
        cm_stream *stream = open_stream(rt, 0);
        uint64_t event = 0;
        CHECK_OK(cm_rt_event_create(rt, CM_EVENT_DISABLE_TIMING, &event));
        int questions = 2;
        cm_wait_hooks hooks = {.interrupted = stops_at_last, .argument = &questions};
        uint64_t released = 1;
        /* There is nothing to wait for yet. */
        CHECK_OK(cm_pool_trim(pool, 0, &hooks, &released));
        CHECK_OK(cm_emulated_gate_close(rt, stream->handle));
        cm_block *block = take(pool, 8 * MIB, stream);
        /* This gives the stream work that has not ended. */
        CHECK_OK(cm_rt_event_record(rt, event, stream->handle));
        give(pool, block, stream, 0);
        CHECK_EQ(questions, 2);
        CHECK_EQ(cm_pool_trim(pool, 0, &hooks, &released).code, CM_ECANCELLED);
        CHECK_EQ(questions, 0);
        CHECK_EQ(released, 0);
        questions = 1000;
        cm_thread thread;
        CHECK_OK(cm_thread_start(&thread, open_gate, stream));
        CHECK_OK(cm_pool_trim(pool, 0, &hooks, &released));
        cm_thread_join(thread);
        CHECK_EQ(released, 8 * MIB);
        CHECK_OK(cm_rt_event_destroy(rt, event));
        cm_stream_release(stream);
        cm_pool_release(pool);
        close_emulated(rt);
    }
}

/* -- limits and out of memory ----------------------------------------------------------- */

/* The device is full of blocks in flight. An allocation must wait for them, give their
 * memory back and succeed. When the memory is really in use, the next allocation must
 * fail and be counted. */
static void
test_pool_out_of_memory_waits_trims_and_retries(void)
{
    for (int plain = 0; plain < 2; plain++) {
        cm_runtime *rt = open_emulated(13000, 1, 64 * MIB);
        cm_pool_config config = DEVICE;
        config.segments = plain ? CM_SEGMENTS_PLAIN : CM_SEGMENTS_AUTO;
        cm_pool *pool = open_pool(rt, config);
        cm_stream *stream = open_stream(rt, 0);
        cm_thread thread;
        cm_block *a = take(pool, 24 * MIB, NULL);
        cm_block *b = take(pool, 24 * MIB, NULL);
        CHECK_OK(cm_emulated_gate_close(rt, stream->handle));
        give(pool, a, stream, 0);
        give(pool, b, NULL, CM_POOL_FREE_FENCE);
        CHECK_OK(cm_thread_start(&thread, open_gate, stream));
        a = take(pool, 60 * MIB, NULL);
        cm_thread_join(thread);
        CHECK_LE(read_counters(pool).reserved_nbytes, 64 * MIB);
        /* The memory was found in the end, so nothing is counted. */
        CHECK_EQ(read_counters(pool).out_of_memory_count, 0);
        cm_block *none = NULL;
        cm_status status = pool_alloc(pool, 8 * MIB, NULL, &none);
        CHECK_EQ(status.code, CM_CUDA_OUT_OF_MEMORY);
        CHECK_EQ(status.op, plain ? CM_OP_device_alloc : CM_OP_physical_create);
        CHECK(none == NULL);
        CHECK(cm_pool_check(pool));
        CHECK_EQ(read_counters(pool).out_of_memory_count, 1);
        CHECK_EQ(read_counters(pool).live_nbytes, 60 * MIB);
        give(pool, a, NULL, 0);
        cm_pool_release(pool);
        cm_stream_release(stream);
        close_emulated(rt);
    }
}

/* Two pools share a limit of 40 MiB for their kind, and the first one also has its own
 * limit of 24 MiB. Both limits count what a pool holds, cached memory included. */
static void
test_pool_limit_counts_what_is_reserved(void)
{
    static const cm_pool_config configs[] = {CONFIG(CM_KIND_DEVICE, 0, 0),
                                             CONFIG(CM_KIND_PINNED, 0, 0),
                                             CONFIG(CM_KIND_MANAGED, 0, 1)};
    for (size_t k = 0; k < 3; k++) {
        cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
        cm_budget of_kind, own[2];
        cm_budget_init(&of_kind, 40 * MIB, NULL);
        cm_pool *pools[2];
        for (int i = 0; i < 2; i++) {
            cm_pool_config config = configs[k];
            cm_budget_init(&own[i], i == 0 ? 24 * MIB : UINT64_MAX, &of_kind);
            config.budget = &own[i];
            pools[i] = open_pool(rt, config);
        }
        cm_block *a = take(pools[0], 16 * MIB, NULL);
        cm_block *none = NULL;
        /* The kind has room, but the pool itself has not. */
        CHECK_CODE(pool_alloc(pools[0], 16 * MIB, NULL, &none), CM_ELIMIT);
        CHECK_EQ(atomic_load(&own[0].used_nbytes),
                 read_counters(pools[0]).reserved_nbytes);
        CHECK_EQ(read_counters(pools[0]).peak_reserved_nbytes, 16 * MIB);
        cm_block *b = take(pools[1], 16 * MIB, NULL); /* now the kind has 8 MiB left */
        CHECK_CODE(pool_alloc(pools[1], 16 * MIB, NULL, &none), CM_ELIMIT);
        CHECK_EQ(atomic_load(&of_kind.used_nbytes), 32 * MIB);
        CHECK_EQ(cm_budget_room(&own[0]), 8 * MIB);
        give(pools[0], a, NULL, 0);
        /* Cached memory still counts. */
        CHECK_EQ(atomic_load(&of_kind.used_nbytes), 32 * MIB);
        /* The pool either gives back the cached 16 MiB or enlarges them in place. */
        a = take(pools[0], 24 * MIB, NULL);
        CHECK_EQ(read_counters(pools[0]).reserved_nbytes, 24 * MIB);
        CHECK_EQ(atomic_load(&of_kind.used_nbytes), 40 * MIB);
        give(pools[0], a, NULL, 0);
        give(pools[1], b, NULL, 0);
        CHECK_EQ(trim(pools[1], 0, false), 16 * MIB);
        CHECK_EQ(atomic_load(&of_kind.used_nbytes), 24 * MIB);
        cm_pool_release(pools[0]);
        cm_pool_release(pools[1]);
        CHECK_EQ(atomic_load(&of_kind.used_nbytes), 0);
        CHECK_EQ(atomic_load(&own[0].used_nbytes), 0);
        close_emulated(rt);
    }
}

/* A pool has reached its limit with a block that one stream is late with. When another
 * stream asks, the pool must hand out that block at once and make the second stream
 * wait for the first, on the device. Nobody else may get it before both have ended. */
static void
test_pool_limit_is_met_by_waiting_for_another_stream(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
    cm_budget budget;
    cm_budget_init(&budget, 16 * MIB, NULL);
    cm_pool_config config = DEVICE;
    config.budget = &budget;
    cm_pool *pool = open_pool(rt, config);
    cm_stream *late = open_stream(rt, 0);
    cm_stream *other = open_stream(rt, 0);
    cm_block *a = take(pool, 16 * MIB, late);
    cm_address first = a->address;
    hold_work(rt, late, a);
    give(pool, a, late, 0);
    uint64_t before = cm_faults_count(rt, CM_OP_stream_wait_event);
    /* This returns at once, since the stream waits and not this thread. */
    a = take(pool, 16 * MIB, other);
    CHECK_EQ(a->address, first);
    CHECK_EQ(cm_faults_count(rt, CM_OP_stream_wait_event), before + 1);
    CHECK_EQ(read_counters(pool).cross_stream_wait_count, 1);
    MUST(cm_rt_fill_8_async(rt, a->address, 9, a->nbytes, other->handle));
    bool done = true;
    CHECK_OK(cm_rt_stream_query(rt, other->handle, &done));
    CHECK(!done);
    /* Nobody else may get the block before both streams are done, whether or not the
     * second one has used it. */
    give(pool, a, NULL, 0);
    CHECK(cm_pool_try_alloc(pool, 16 * MIB, NULL, 0) == NULL);
    CHECK(cm_pool_try_alloc(pool, 16 * MIB, late, 0) == NULL);
    CHECK_OK(cm_emulated_gate_open(rt, late->handle));
    synchronize(rt, other);
    a = take(pool, 16 * MIB, NULL);
    CHECK_EQ(a->address, first);
    CHECK_FILLED(cm_runtime_host_alias(rt, first, 16 * MIB), 9, 16 * MIB);
    give(pool, a, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(late);
    cm_stream_release(other);
    close_emulated(rt);
}

/* The runtime refuses to take memory back. The trim must report that and count it, and
 * the memory must stay usable until the next trim, which succeeds. */
static void
test_pool_refused_free_is_counted_and_tried_again(void)
{
    static const struct {
        cm_pool_config config;
        cm_op op;
    } cases[] = {
        {CONFIG(CM_KIND_DEVICE, 0, 0), CM_OP_address_unmap},
        {CONFIG(CM_KIND_DEVICE, 0, 0), CM_OP_physical_release},
        {CONFIG(CM_KIND_PINNED, 0, 0), CM_OP_host_unregister},
        {CONFIG(CM_KIND_PINNED, 0, CM_HOST_ALLOC_WRITE_COMBINED), CM_OP_host_free},
        {CONFIG(CM_KIND_MANAGED, 0, 1), CM_OP_device_free},
    };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        cm_pool *pool = open_pool(rt, cases[i].config);
        uint64_t released = 7;
        give(pool, take(pool, CHUNK, NULL), NULL, 0);
        cm_faults_plan(rt, cases[i].op, 1, 999, false);
        cm_status status = pool_trim(pool, 0, false, &released);
        CHECK_EQ(status.code, 999);
        CHECK_EQ(status.op, cases[i].op);
        CHECK_EQ(released, 0);
        CHECK_EQ(read_counters(pool).lost_count, 1);
        CHECK_EQ(read_counters(pool).cached_nbytes, CHUNK);
        CHECK(cm_pool_check(pool));
        cm_block *block = take(pool, CHUNK, NULL); /* the pool still works */
        MUST(cm_rt_fill_8_async(rt, block->address, 3, CHUNK, 0));
        synchronize_device(rt, 0);
        CHECK_FILLED(cm_runtime_host_alias(rt, block->address, CHUNK), 3, CHUNK);
        give(pool, block, NULL, 0);
        CHECK_OK(pool_trim(pool, 0, false, &released));
        CHECK_EQ(released, CHUNK);
        cm_pool_release(pool);
    }
    close_emulated(rt);
}

static cm_pool *peaks_of;

/* A physical_release that resets the pool's peaks and then fails. */
static cm_status
refuse_with_peaks_reset(cm_runtime *rt CM_UNUSED, uint64_t handle)
{
    cm_pool_reset_peaks(peaks_of);
    return cm_fail(CM_CUDA_INVALID_VALUE, handle);
}

/* The peaks are reset while a chunk is on its way back to the runtime, which then
 * refuses it. The chunk is cached again, so it must count in the new peaks. */
static void
test_pool_refused_free_counts_for_new_peaks(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    const cm_ops_table *real_ops = rt->ops;
    cm_ops_table hooked_ops = *real_ops;
    cm_pool *pool = peaks_of = open_pool(rt, DEVICE);
    uint64_t released = 0;
    give(pool, take(pool, CHUNK, NULL), NULL, 0);
    hooked_ops.physical_release = refuse_with_peaks_reset;
    rt->ops = &hooked_ops;
    CHECK_CODE(pool_trim(pool, 0, false, &released), CM_CUDA_INVALID_VALUE);
    rt->ops = real_ops;
    CHECK(cm_pool_check(pool));
    CHECK_EQ(read_counters(pool).peak_cached_nbytes, CHUNK);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* At the end of a process the driver may be gone before the pool, and then a call that
 * frees memory fails with one of the codes below. The memory is gone too, so the trim
 * must succeed. */
static void
test_pool_free_after_the_driver_is_gone_succeeds(void)
{
    static const int codes[] = {CM_CUDA_UNLOADING, CM_CUDA_CONTEXT_DESTROYED,
                                CM_CUDA_INSUFFICIENT_DRIVER};
    static const cm_op ops[] = {CM_OP_host_free, CM_OP_host_unregister};
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    for (int i = 0; i < 6; i++) {
        cm_pool *pool = open_pool(
            rt, (cm_pool_config)CONFIG(CM_KIND_PINNED, 0,
                                       i < 3 ? CM_HOST_ALLOC_WRITE_COMBINED : 0));
        cm_block *block = take(pool, CHUNK, NULL);
        void *host = block->host;
        give(pool, block, NULL, 0);
        uint64_t released = 0;
        cm_faults_plan(rt, ops[i / 3], 1, codes[i % 3], true);
        CHECK_OK(pool_trim(pool, 0, true, &released));
        CHECK_EQ(released, CHUNK);
        CHECK_EQ(read_counters(pool).lost_count, 0);
        cm_pool_release(pool);
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        /* The fault wrapper returned before the inner runtime could free the memory, so
         * the test frees it. */
        CHECK_OK(i < 3 ? cm_rt_host_free(rt, host) : cm_rt_host_unregister(rt, host));
    }
    close_emulated(rt);
}

/* -- faults ----------------------------------------------------------------------------- */

/* What a run of the sweep's scenario needs. */
typedef struct scenario {
    cm_runtime *rt;
    cm_pool_config config;
    /* The sweep makes these once, since making them is not what is tested. */
    cm_stream *streams[2];
} scenario;

/* Allocate and free blocks of several sizes on streams, with a fence and with several
 * users, and trim the pool. Return the first failure, and leave nothing behind
 * whichever call fails. */
static cm_status
run_scenario(const scenario *s)
{
    cm_pool *pool = NULL;
    cm_budget budget;
    cm_pool_config config = s->config;
    cm_budget_init(&budget, 64 * MIB, NULL);
    config.budget = &budget;
    cm_block *blocks[4] = {NULL, NULL, NULL, NULL};
    cm_stream *uses[2] = {s->streams[0], s->streams[1]};
    uint64_t released = 0;
    int hooks = 1000;
    static const uint64_t sizes[2][4] = {{8192, CHUNK, 8192, 64},
                                         {8192, 3 * MIB, 64, 8192}};
    CM_TRY(cm_pool_create(s->rt, &config, &pool));
    cm_status first = cm_ok();
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < 4; i++) {
            cm_status status =
                pool_alloc(pool, sizes[round][i], s->streams[i % 2], &blocks[i]);
            if (!cm_is_ok(status)) {
                blocks[i] = NULL;
                first = cm_is_ok(first) ? status : first;
            }
        }
        for (uint32_t i = 0; i < 4; i++) {
            if (blocks[i] != NULL) {
                cm_pool_free(pool, blocks[i], uses, i < 3 ? i : 0, i == 3);
            }
        }
        if (!cm_pool_check(pool)
            || atomic_load(&budget.used_nbytes)
                   != read_counters(pool).reserved_nbytes) {
            CHECK_FAIL_("the pool's invariants do not hold");
        }
    }
    cm_status status = cm_pool_trim(
        pool, 0, &(cm_wait_hooks){.interrupted = stops_at_last, .argument = &hooks},
        &released);
    if (status.code == CM_ECANCELLED) {
        CHECK_FAIL_("a wait was cancelled although nobody interrupted it");
    }
    first = cm_is_ok(first) ? status : first;
    cm_pool_counters c = read_counters(pool);
    if (c.live_count != 0 || !cm_pool_check(pool)) {
        CHECK_FAIL_("a block is still live, or an invariant is broken");
    }
    if (cm_is_ok(status) && c.reserved_nbytes != 0) {
        CHECK_FAIL_("the trim succeeded, but %llu bytes are left",
                    (unsigned long long)c.reserved_nbytes);
    }
    cm_pool_release(pool);
    if (atomic_load(&budget.used_nbytes) != 0) {
        CHECK_FAIL_("%llu bytes are still charged to the budget",
                    (unsigned long long)atomic_load(&budget.used_nbytes));
    }
    return first;
}

/* Count the runtime calls of the scenario, and run it again for each of them with that
 * call failing. Each time the failure must be reported as what it is, nothing may be
 * left, and the scenario must succeed afterwards. */
static void
sweep(int driver_version, cm_pool_config config, int32_t code)
{
    scenario s = {open_emulated(driver_version, 2, 256 * MIB), config, {NULL, NULL}};
    s.streams[0] = open_stream(s.rt, 0);
    s.streams[1] = open_stream(s.rt, 1);
    cm_faults_plan(s.rt, CM_OP_none, 0, 0, false);
    CHECK_OK(run_scenario(&s));
    uint64_t total = cm_faults_count(s.rt, CM_OP_none);
    CHECK_GT(total, 20);
    check_only_streams_live(s.rt);
    for (uint64_t nth = 1; nth <= total; nth += CHECK_EVERY(24)) {
        int before = atomic_load(&check_failures);
        cm_faults_plan(s.rt, CM_OP_none, nth, code, false);
        cm_status status = run_scenario(&s);
        cm_op injected = cm_faults_last_injected(s.rt);
        cm_faults_plan(s.rt, CM_OP_none, 0, 0, false);
        if (!cm_is_ok(status) && (status.code != code || status.op != injected)) {
            CHECK_FAIL_("the failure of %s was reported as code %d of %s",
                        cm_op_facts[injected].name, status.code,
                        cm_op_facts[status.op].name);
        }
        check_only_streams_live(s.rt);
        if (!cm_is_ok(run_scenario(&s))) {
            CHECK_FAIL_("the scenario fails without a fault");
        }
        check_only_streams_live(s.rt);
        if (atomic_load(&check_failures) != before) {
            fprintf(stderr, "  … when call %llu (%s) failed with code %d on kind %d\n",
                    (unsigned long long)nth, cm_op_facts[injected].name, code,
                    (int)config.kind);
        }
    }
    cm_stream_release(s.streams[0]);
    cm_stream_release(s.streams[1]);
    close_emulated(s.rt);
}

/* Run the sweep on each kind of memory, with an old and a new driver and several
 * codes. */
static void
test_pool_any_call_may_fail_and_nothing_leaks(void)
{
    static const cm_pool_config configs[] = {
        CONFIG(CM_KIND_PINNED, 0, CM_HOST_ALLOC_PORTABLE),
        CONFIG(CM_KIND_MAPPED, 0, CM_HOST_ALLOC_PORTABLE),
        CONFIG(CM_KIND_MANAGED, 0, CM_MANAGED_GLOBAL),
        CONFIG(CM_KIND_DEVICE, 0, 0),
    };
    for (size_t i = 0; i < sizeof(configs) / sizeof(*configs); i++) {
        sweep(13000, configs[i], 999);
        sweep(12000, configs[i], CM_CUDA_OUT_OF_MEMORY);
        sweep(13000, configs[i], CM_CUDA_CAPTURE_UNSUPPORTED);
    }
}

/* clang-format off */
MAIN(RUN(test_pool_keeps_what_is_freed_until_trimmed)
     RUN(test_pool_idle_trim_gives_back_what_was_not_needed)
     RUN(test_pool_idle_trim_is_off_by_default)
     RUN(test_pool_counters_agree_while_memory_comes_and_goes)
     RUN(test_pool_trim_waits_until_interrupted_or_until_all_has_passed)
     RUN(test_pool_out_of_memory_waits_trims_and_retries)
     RUN(test_pool_limit_counts_what_is_reserved)
     RUN(test_pool_limit_is_met_by_waiting_for_another_stream)
     RUN(test_pool_refused_free_is_counted_and_tried_again)
     RUN(test_pool_refused_free_counts_for_new_peaks)
     RUN(test_pool_free_after_the_driver_is_gone_succeeds)
     RUN(test_pool_any_call_may_fail_and_nothing_leaks))
/* clang-format on */
