/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of a pool that sleeps and wakes (pool/sleep.c). The test itself copies the
 * saved runs, by the host's view of the emulated device. The last part is a fault
 * sweep: it runs a scenario again and again, each time with another runtime call that
 * fails. */
#define EMULATED_DELAY_US 20

#include "pool_world.h"

static const cm_wait_hooks uninterrupted = {.interrupted = NULL};

/* -- helpers ----------------------------------------------------------------------------- */

/* The pool that sleeps, and the pool of page-locked memory that then has its bytes. */
typedef struct pools {
    cm_runtime *rt;
    cm_pool *device;
    cm_pool *host;
} pools;

static pools
open_pools(int device_count, uint64_t memory_nbytes)
{
    cm_pool_config pinned = PINNED;
    pinned.fork = CM_FORK_OMIT;
    pools made = {.rt = open_emulated(13000, device_count, memory_nbytes)};
    made.device = open_pool(made.rt, DEVICE);
    made.host = open_pool(made.rt, pinned);
    return made;
}

static void
close_pools(pools *p)
{
    cm_pool_release(p->device);
    cm_pool_release(p->host);
    close_emulated(p->rt);
}

/* Write a pattern that depends on `seed` to the whole block. */
static void
write_block(const pools *p, const cm_block *block, unsigned seed)
{
    unsigned char *at = cm_runtime_host_alias(p->rt, block->address, block->nbytes);
    for (uint64_t i = 0; i < block->nbytes; i += 256) {
        at[i] = (unsigned char)(seed + i / 256);
    }
    at[block->nbytes - 1] = (unsigned char)seed;
}

static bool
has_pattern(const pools *p, const cm_block *block, unsigned seed)
{
    const unsigned char *at =
        cm_runtime_host_alias(p->rt, block->address, block->nbytes);
    bool good = at != NULL && at[block->nbytes - 1] == (unsigned char)seed;
    for (uint64_t i = 0; good && i + 256 < block->nbytes; i += 256) {
        good = at[i] == (unsigned char)(seed + i / 256);
    }
    return good;
}

/* Copy the saved runs to the host or back. */
static void
copy_runs(const pools *p, bool to_host)
{
    uint64_t count;
    const cm_saved_run *runs = cm_pool_saved_runs(p->device, &count);
    for (uint64_t i = 0; i < count; i++) {
        void *at = cm_runtime_host_alias(p->rt, runs[i].address, runs[i].nbytes);
        char *host = cm_pool_part_block(p->device, runs[i].part)->host;
        memcpy(to_host ? host + runs[i].at : at, to_host ? at : host + runs[i].at,
               runs[i].nbytes);
    }
}

/* Find page-locked memory for all bytes. */
static cm_status
plan_save(const pools *p)
{
    uint64_t count;
    if (cm_pool_get_host(p->device) == NULL) {
        cm_pool_set_host(p->device, p->host);
    }
    CM_TRY(cm_pool_plan_save(p->device, true));
    CM_TRY(cm_pool_check_host(p->device));
    const cm_saved_run *runs = cm_pool_saved_runs(p->device, &count);
    for (uint64_t i = 0; i < count; i++) {
        CM_TRY(cm_pool_take_part(p->device, runs[i].part, &uninterrupted));
    }
    return cm_ok();
}

/* Take all steps to sleep, after the work of `stream` if that is not NULL. After a
 * failure the pool is open again, or asleep. */
static cm_status
put_to_sleep_after(const pools *p, cm_stream *stream, bool keep)
{
    bool asleep = false;
    CM_TRY(cm_pool_shut(p->device));
    cm_status status =
        cm_pool_settle(p->device, &stream, stream != NULL, 0, &uninterrupted);
    if (cm_is_ok(status) && keep) {
        status = plan_save(p);
    }
    if (cm_is_ok(status)) {
        copy_runs(p, true);
        status = cm_pool_fall_asleep(p->device, &asleep);
    }
    if (!asleep) {
        cm_pool_reopen(p->device, false);
    }
    return status;
}

static cm_status
put_to_sleep(const pools *p, bool keep)
{
    return put_to_sleep_after(p, NULL, keep);
}

/* Give the pool all of its memory again. After a failure the pool is asleep. */
static cm_status
bring_back(cm_pool *pool)
{
    CM_TRY(cm_pool_begin_waking(pool));
    cm_status status = cm_pool_map_until(pool, UINT64_MAX);
    cm_pool_end_waking(pool, !cm_is_ok(status));
    return status;
}

static cm_status
wake(const pools *p, bool keep_host)
{
    CM_TRY(bring_back(p->device));
    copy_runs(p, false);
    cm_pool_reopen(p->device, keep_host);
    return cm_ok();
}

static uint64_t
free_nbytes(const pools *p)
{
    uint64_t left, total;
    cm_device_guard guard;
    MUST(cm_device_enter(p->rt, 0, &guard));
    MUST(cm_rt_memory_info(p->rt, &left, &total));
    cm_device_leave(p->rt, &guard);
    return left;
}

/* -- sleep and wake ---------------------------------------------------------------------- */

/* Blocks of several sizes must keep their addresses and bytes, and the device must have
 * its memory back in between. The bytes take more than one block of page-locked
 * memory. */
static void
test_sleep_keeps_addresses_and_bytes(void)
{
    static const uint64_t sizes[] = {
        3, 512, CHUNK, 5 * MIB, 260 * MIB / CHECK_EVERY(8), 1 * MIB};
    enum { COUNT = sizeof(sizes) / sizeof(*sizes) };
    pools p = open_pools(1, 512 * MIB);
    cm_block *blocks[COUNT];
    uint64_t before = free_nbytes(&p);
    for (unsigned i = 0; i < COUNT; i++) {
        blocks[i] = take(p.device, sizes[i], NULL);
        write_block(&p, blocks[i], i);
    }
    for (int round = 0; round < 2; round++) {
        MUST(put_to_sleep(&p, true));
        CHECK(cm_pool_is_asleep(p.device));
        CHECK_EQ(free_nbytes(&p), before);
        for (unsigned i = 0; i < COUNT; i++) {
            CHECK(cm_runtime_host_alias(p.rt, blocks[i]->address, 1) == NULL);
        }
        cm_pool_counters c = read_counters(p.device);
        CHECK_EQ(c.reserved_nbytes, 0);
        CHECK_EQ(c.asleep_nbytes, c.live_nbytes + c.cached_nbytes);
        CHECK(cm_pool_check(p.device));
        MUST(wake(&p, round == 0));
        CHECK_EQ(read_counters(p.host).reserved_nbytes > 0, round == 0);
        for (unsigned i = 0; i < COUNT; i++) {
            CHECK(has_pattern(&p, blocks[i], i));
        }
        CHECK_EQ(read_counters(p.device).asleep_nbytes, 0);
    }
    for (unsigned i = 0; i < COUNT; i++) {
        give(p.device, blocks[i], NULL, 0);
    }
    close_pools(&p);
}

/* Contents that are given up take no page-locked memory, and the addresses stay. */
static void
test_sleep_without_contents_takes_no_host_memory(void)
{
    pools p = open_pools(1, 512 * MIB);
    cm_block *block = take(p.device, 16 * MIB, NULL);
    cm_address address = block->address;
    MUST(put_to_sleep(&p, false));
    CHECK_EQ(read_counters(p.host).reserved_nbytes, 0);
    MUST(wake(&p, false));
    CHECK_EQ(block->address, address);
    write_block(&p, block, 1);
    CHECK(has_pattern(&p, block, 1));
    give(p.device, block, NULL, 0);
    close_pools(&p);
}

/* A pool that was never used sleeps and wakes, and can be used afterwards. */
static void
test_sleep_of_an_unused_pool_does_nothing(void)
{
    pools p = open_pools(1, 512 * MIB);
    MUST(put_to_sleep(&p, true));
    CHECK(cm_pool_is_asleep(p.device));
    MUST(wake(&p, true));
    give(p.device, take(p.device, 100, NULL), NULL, 0);
    close_pools(&p);
}

/* A pool that sleeps hands out nothing, not even memory that is free. */
static void
test_sleep_refuses_allocations(void)
{
    pools p = open_pools(1, 512 * MIB);
    cm_block *kept = take(p.device, 4 * MIB, NULL);
    give(p.device, take(p.device, 4 * MIB, NULL), NULL, 0);
    cm_block *block = NULL;
    MUST(put_to_sleep(&p, true));
    CHECK(cm_pool_try_alloc(p.device, 100, NULL, 0) == NULL);
    CHECK_CODE(pool_alloc(p.device, 100, NULL, &block), CM_EASLEEP);
    CHECK_CODE(pool_alloc(p.device, 64 * MIB, NULL, &block), CM_EASLEEP);
    CHECK(cm_pool_alloc_optional(p.device, 100, 0) == NULL);
    CHECK_CODE(cm_pool_shut(p.device), CM_EBUSY);
    MUST(wake(&p, true));
    CHECK_CODE(bring_back(p.device), CM_EBUSY);
    give(p.device, take(p.device, 4 * MIB, NULL), NULL, 0);
    give(p.device, kept, NULL, 0);
    close_pools(&p);
}

/* Blocks are given back while the pool sleeps. Their memory must not come back, but the
 * bytes of their neighbours must. */
static void
test_sleep_forgets_blocks_that_are_given_back(void)
{
    enum { COUNT = 6 };
    pools p = open_pools(1, 512 * MIB);
    cm_block *blocks[COUNT];
    for (unsigned i = 0; i < COUNT; i++) {
        blocks[i] = take(p.device, CHUNK, NULL);
        write_block(&p, blocks[i], i);
    }
    cm_block *small[2] = {take(p.device, 1000, NULL), take(p.device, 1000, NULL)};
    write_block(&p, small[1], 77);
    MUST(put_to_sleep(&p, true));
    for (unsigned i = 0; i < COUNT; i += 2) {
        give(p.device, blocks[i], NULL, 0);
    }
    give(p.device, small[0], NULL, 0);
    uint64_t released;
    MUST(pool_trim(p.device, 0, true, &released));
    CHECK_EQ(released, 0);
    CHECK_EQ(read_counters(p.device).asleep_nbytes, (COUNT / 2 + 1) * CHUNK);
    MUST(wake(&p, false));
    CHECK_EQ(read_counters(p.device).reserved_nbytes, (COUNT / 2 + 1) * CHUNK);
    for (unsigned i = 1; i < COUNT; i += 2) {
        CHECK(has_pattern(&p, blocks[i], i));
        give(p.device, blocks[i], NULL, 0);
    }
    CHECK(has_pattern(&p, small[1], 77));
    give(p.device, small[1], NULL, 0);
    close_pools(&p);
}

/* The pool ends while it sleeps, and so do its last block and its page-locked memory.
 */
static void
test_sleep_may_be_the_end_of_a_pool(void)
{
    pools p = open_pools(1, 512 * MIB);
    cm_block *block = take(p.device, 16 * MIB, NULL);
    MUST(put_to_sleep(&p, true));
    CHECK_GT(read_counters(p.host).reserved_nbytes, 0);
    cm_pool_release(p.device);
    cm_pool_free(p.device, block, NULL, 0, 0);
    CHECK_EQ(read_counters(p.host).reserved_nbytes, 0);
    cm_pool_release(p.host);
    close_emulated(p.rt);
}

/* -- work that comes first --------------------------------------------------------------- */

typedef struct sleeper {
    cm_pool *pool;
    cm_stream *stream;
    unsigned flags;
    cm_status status;
    atomic_bool has_ended;
} sleeper;

static void *
settle(void *argument)
{
    sleeper *s = argument;
    s->status = cm_pool_settle(s->pool, &s->stream, s->stream != NULL, s->flags,
                               &uninterrupted);
    atomic_store(&s->has_ended, true);
    return NULL;
}

/* Check that a pool that settles waits for the work of a stream that is named to it, or
 * of one that it does not know. */
static void
check_settling_waits(bool is_named)
{
    pools p = open_pools(1, 512 * MIB);
    cm_stream *stream = open_stream(p.rt, 0);
    cm_block *block = take(p.device, CHUNK, stream);
    hold_work(p.rt, stream, block);
    sleeper s = {.pool = p.device,
                 .stream = is_named ? stream : NULL,
                 .flags = is_named ? 0 : CM_POOL_FREE_FENCE};
    pthread_t thread;
    MUST(cm_pool_shut(p.device));
    MUST(pthread_create(&thread, NULL, settle, &s) == 0 ? cm_ok()
                                                        : cm_fail(CM_ETHREAD, 0));
    let_others_run();
    CHECK(!atomic_load(&s.has_ended));
    (void)open_gate(stream);
    (void)pthread_join(thread, NULL);
    CHECK_OK(s.status);
    const unsigned char *at = cm_runtime_host_alias(p.rt, block->address, CHUNK);
    CHECK(at[0] == 7 && at[CHUNK - 1] == 7); /* what the stream has written */
    cm_pool_reopen(p.device, false);
    give(p.device, block, stream, 0);
    cm_stream_release(stream);
    close_pools(&p);
}

static void
test_settle_waits_for_named_and_for_unknown_streams(void)
{
    check_settling_waits(true);
    check_settling_waits(false);
}

/* Memory that was given back in a stream's order has no block any more. The pool must
 * wait for the work on it all the same. */
static void
test_settle_waits_for_memory_that_was_given_back(void)
{
    pools p = open_pools(1, 512 * MIB);
    cm_stream *stream = open_stream(p.rt, 0);
    cm_block *block = take(p.device, CHUNK, stream);
    hold_work(p.rt, stream, block);
    give(p.device, block, stream, 0);
    sleeper s = {.pool = p.device};
    pthread_t thread;
    MUST(cm_pool_shut(p.device));
    MUST(pthread_create(&thread, NULL, settle, &s) == 0 ? cm_ok()
                                                        : cm_fail(CM_ETHREAD, 0));
    let_others_run();
    CHECK(!atomic_load(&s.has_ended));
    (void)open_gate(stream);
    (void)pthread_join(thread, NULL);
    CHECK_OK(s.status);
    cm_pool_reopen(p.device, false);
    cm_stream_release(stream);
    close_pools(&p);
}

/* If the pool knows that a stream is being captured, it must refuse to sleep, since
 * waiting for the stream would end the capture. */
static void
test_settle_refuses_a_capture(void)
{
    pools p = open_pools(1, 512 * MIB);
    cm_stream *stream = open_stream(p.rt, 0);
    cm_block *block = take(p.device, CHUNK, stream);
    cm_device_guard guard;
    MUST(cm_device_enter(p.rt, 0, &guard));
    MUST(cm_emulated_set_capturing(p.rt, stream->handle, true));
    CHECK_CODE(put_to_sleep_after(&p, stream, true), CM_ECAPTURING);
    CHECK_OK(cm_emulated_set_capturing(p.rt, stream->handle, false));
    cm_device_leave(p.rt, &guard);
    CHECK(cm_pool_is_awake(p.device));
    MUST(put_to_sleep(&p, true));
    MUST(wake(&p, true));
    give(p.device, block, stream, 0);
    cm_stream_release(stream);
    close_pools(&p);
}

/* A block that a graph used is given back and stays in flight. Its bytes must be saved,
 * because the graph may read them. */
static void
test_sleep_saves_what_a_graph_may_read(void)
{
    pools p = open_pools(1, 512 * MIB);
    cm_block *block = take(p.device, CHUNK, NULL);
    const cm_block copy = *block;
    write_block(&p, &copy, 5);
    give(p.device, block, NULL, CM_POOL_FREE_CAPTURED);
    MUST(put_to_sleep(&p, true));
    MUST(wake(&p, true));
    CHECK(has_pattern(&p, &copy, 5));
    close_pools(&p);
}

/* -- memory that is not there -------------------------------------------------------------- */

/* Somebody else has taken the memory meanwhile. Waking must fail and change nothing,
 * and must succeed once the memory is there again. */
static void
test_wake_fails_while_others_have_the_memory(void)
{
    pools p = open_pools(1, 64 * MIB);
    cm_pool *other = open_pool(p.rt, DEVICE);
    cm_block *block = take(p.device, 48 * MIB, NULL);
    write_block(&p, block, 9);
    MUST(put_to_sleep(&p, true));
    cm_block *taken = take(other, 32 * MIB, NULL);
    for (int round = 0; round < 2; round++) {
        CHECK_CODE(bring_back(p.device), CM_CUDA_OUT_OF_MEMORY);
        CHECK(cm_pool_is_asleep(p.device));
        CHECK_EQ(read_counters(p.device).asleep_nbytes, 48 * MIB);
        CHECK_EQ(free_nbytes(&p), 32 * MIB);
    }
    give(other, taken, NULL, 0);
    cm_pool_release(other);
    MUST(wake(&p, false));
    CHECK(has_pattern(&p, block, 9));
    give(p.device, block, NULL, 0);
    close_pools(&p);
}

/* A pool that sleeps counts against no limit. When it wakes, a limit may stop it. */
static void
test_sleep_and_wake_count_against_limits(void)
{
    cm_budget budget;
    cm_budget_init(&budget, 64 * MIB, NULL);
    cm_pool_config config = DEVICE;
    config.budget = &budget;
    pools p = open_pools(1, 512 * MIB);
    cm_pool_release(p.device);
    p.device = open_pool(p.rt, config);
    cm_pool *other = open_pool(p.rt, config);
    cm_block *block = take(p.device, 48 * MIB, NULL);
    write_block(&p, block, 3);
    CHECK_EQ(atomic_load(&budget.used_nbytes), 48 * MIB);
    MUST(put_to_sleep(&p, true));
    CHECK_EQ(atomic_load(&budget.used_nbytes), 0);
    cm_block *taken = take(other, 32 * MIB, NULL);
    CHECK_CODE(bring_back(p.device), CM_ELIMIT);
    CHECK_EQ(atomic_load(&budget.used_nbytes), 32 * MIB);
    give(other, taken, NULL, 0);
    cm_pool_release(other);
    MUST(wake(&p, true));
    CHECK_EQ(atomic_load(&budget.used_nbytes), 48 * MIB);
    CHECK(has_pattern(&p, block, 3));
    give(p.device, block, NULL, 0);
    cm_pool_release(p.device);
    CHECK_EQ(atomic_load(&budget.used_nbytes), 0);
    cm_pool_release(p.host);
    close_emulated(p.rt);
}

/* The limit leaves no room for the page-locked memory, so the call must fail and change
 * nothing. */
static void
test_sleep_without_room_on_the_host_changes_nothing(void)
{
    cm_budget budget;
    cm_budget_init(&budget, 80 * MIB, NULL);
    cm_pool_config config = PINNED;
    config.budget = &budget;
    pools p = open_pools(1, 512 * MIB);
    cm_pool_release(p.host);
    p.host = open_pool(p.rt, config);
    cm_block *block = take(p.device, 160 * MIB, NULL);
    write_block(&p, block, 4);
    CHECK_CODE(put_to_sleep(&p, true), CM_ELIMIT);
    CHECK(cm_pool_is_awake(p.device));
    CHECK(has_pattern(&p, block, 4));
    CHECK_EQ(atomic_load(&budget.used_nbytes), 0);
    give(p.device, block, NULL, 0);
    close_pools(&p);
}

/* The granule of a pool is longer than the driver's. Its chunks must be multiples of
 * that granule, and so must the address at which its range begins. */
static void
test_granule_of_a_pool_may_be_longer_than_the_drivers(void)
{
    cm_pool_config config = DEVICE;
    config.granule_nbytes = 32 * MIB;
    pools p = open_pools(1, 512 * MIB);
    cm_pool_release(p.device);
    p.device = open_pool(p.rt, config);
    cm_block *block = take(p.device, 100, NULL);
    CHECK_EQ(block->address % (32 * MIB), 0);
    CHECK_EQ(read_counters(p.device).reserved_nbytes, 32 * MIB);
    cm_block *longer = take(p.device, 33 * MIB, NULL);
    CHECK_EQ(read_counters(p.device).reserved_nbytes, 64 * MIB);
    write_block(&p, longer, 6);
    MUST(put_to_sleep(&p, true));
    MUST(wake(&p, false));
    CHECK(has_pattern(&p, longer, 6));
    give(p.device, block, NULL, 0);
    give(p.device, longer, NULL, 0);
    close_pools(&p);
}

/* -- every call may fail -------------------------------------------------------------------- */

/* Put the pool to sleep and wake it, and try again after a failure, which may come at
 * any call. The bytes are never lost. Writes the first failure to *out. */
static void
run_scenario(const pools *p, bool keep_host, cm_status *out)
{
    cm_block *blocks[3] = {NULL, NULL, NULL};
    static const uint64_t sizes[3] = {3 * MIB, CHUNK, 500};
    cm_status first = cm_ok();
    for (unsigned i = 0; i < 3; i++) {
        cm_status status = pool_alloc(p->device, sizes[i], NULL, &blocks[i]);
        first = cm_first_failure(first, status);
        if (!cm_is_ok(status)) {
            MUST(pool_alloc(p->device, sizes[i], NULL, &blocks[i]));
        }
        write_block(p, blocks[i], i);
    }
    cm_status status = put_to_sleep(p, true);
    first = cm_first_failure(first, status);
    if (!cm_pool_is_asleep(p->device)) {
        CHECK(cm_pool_is_awake(p->device));
        for (unsigned i = 0; i < 3; i++) {
            CHECK(has_pattern(p, blocks[i], i));
        }
        MUST(put_to_sleep(p, true));
    }
    give(p->device, blocks[1], NULL, 0);
    status = wake(p, keep_host);
    first = cm_first_failure(first, status);
    if (!cm_is_ok(status)) {
        CHECK(cm_pool_is_asleep(p->device));
        MUST(wake(p, keep_host));
    }
    for (unsigned i = 0; i < 3; i += 2) {
        CHECK(has_pattern(p, blocks[i], i));
        give(p->device, blocks[i], NULL, 0);
    }
    uint64_t released;
    first = cm_first_failure(first, pool_trim(p->device, 0, true, &released));
    *out = cm_first_failure(first, pool_trim(p->device, 0, true, &released));
}

static void
sweep(int32_t code, bool keep_host)
{
    pools p = open_pools(2, 256 * MIB);
    cm_status status = cm_ok();
    run_scenario(&p, keep_host, &status);
    cm_faults_plan(p.rt, CM_OP_none, 0, 0, false);
    run_scenario(&p, keep_host, &status);
    CHECK_OK(status);
    uint64_t total = cm_faults_count(p.rt, CM_OP_none);
    CHECK_GT(total, 20);
    for (uint64_t nth = 1; nth <= total; nth += CHECK_EVERY(12)) {
        int before = atomic_load(&check_failures);
        cm_faults_plan(p.rt, CM_OP_none, nth, code, false);
        run_scenario(&p, keep_host, &status);
        cm_op injected = cm_faults_last_injected(p.rt);
        cm_faults_plan(p.rt, CM_OP_none, 0, 0, false);
        if (!cm_is_ok(status) && (status.code != code || status.op != injected)) {
            CHECK_FAIL_("the failure of %s was reported as code %d of %s",
                        cm_op_facts[injected].name, status.code,
                        cm_op_facts[status.op].name);
        }
        CHECK(cm_pool_check(p.device));
        CHECK_EQ(read_counters(p.device).reserved_nbytes, 0);
        if (atomic_load(&check_failures) != before) {
            fprintf(stderr, "  … when call %llu (%s) failed with code %d\n",
                    (unsigned long long)nth, cm_op_facts[injected].name, code);
        }
    }
    close_pools(&p);
}

static void
test_sleep_any_call_may_fail_and_no_byte_is_lost(void)
{
    sweep(999, true);
    sweep(CM_CUDA_OUT_OF_MEMORY, false);
}

/* From some moment on every call of one operation fails, until the test ends the plan
 * of faults. So the pool cannot undo its earlier steps either. */
static void
test_sleep_survives_an_operation_that_goes_on_failing(void)
{
    static const cm_op ops[] = {CM_OP_address_unmap, CM_OP_address_map,
                                CM_OP_address_set_access, CM_OP_physical_create,
                                CM_OP_physical_release};
    pools p = open_pools(1, 256 * MIB);
    cm_block *blocks[3];
    for (unsigned i = 0; i < 3; i++) {
        blocks[i] = take(p.device, 4 * MIB, NULL);
        write_block(&p, blocks[i], i);
    }
    for (size_t k = 0; k < sizeof(ops) / sizeof(*ops); k++) {
        for (uint64_t nth = 1; nth <= 4; nth++) {
            cm_faults_plan(p.rt, ops[k], nth, 999, true);
            cm_ignore(put_to_sleep(&p, true));
            if (cm_pool_is_asleep(p.device)) {
                cm_ignore(wake(&p, true));
            }
            cm_faults_plan(p.rt, CM_OP_none, 0, 0, false);
            if (cm_pool_is_asleep(p.device)) {
                MUST(wake(&p, true));
            }
            CHECK(cm_pool_is_awake(p.device) && cm_pool_check(p.device));
            for (unsigned i = 0; i < 3; i++) {
                CHECK(has_pattern(&p, blocks[i], i));
            }
        }
    }
    for (unsigned i = 0; i < 3; i++) {
        give(p.device, blocks[i], NULL, 0);
    }
    close_pools(&p);
}

/* -- blocks that another library has cut up ------------------------------------------------ */

/* Parts that are spare must not be saved. Some are at the beginning, in the middle and
 * at the end of a block, one lies across two blocks, one is a whole block, and one lies
 * where there is no memory. */
static void
test_sleep_leaves_spare_parts_out(void)
{
    pools p = open_pools(1, 512 * MIB);
    cm_block *blocks[3];
    for (unsigned i = 0; i < 3; i++) {
        blocks[i] = take(p.device, 4 * MIB, NULL);
        write_block(&p, blocks[i], i);
    }
    cm_address a = blocks[0]->address;
    CHECK(blocks[1]->address == a + 4 * MIB && blocks[2]->address == a + 8 * MIB);
    const cm_spare_part parts[] = {
        {a - MIB, 512 * KIB},
        {a - 64 * KIB, 128 * KIB},
        {a + 1 * MIB, 512 * KIB},
        {a + 1 * MIB + 512 * KIB, 0},
        {a + 4 * MIB - 4 * KIB, 8 * KIB},
        {a + 8 * MIB, 5 * MIB},
    };
    MUST(cm_pool_set_spare(p.device, parts, 3));
    MUST(cm_pool_set_spare(p.device, parts, sizeof(parts) / sizeof(*parts)));
    MUST(put_to_sleep(&p, true));
    uint64_t count;
    const cm_saved_run *runs = cm_pool_saved_runs(p.device, &count);
    CHECK(count >= 3);
    uint64_t nbytes = 0;
    cm_address end = a + 64 * KIB;
    for (uint64_t i = 0; i < count; i++) {
        CHECK(runs[i].address >= end);
        end = runs[i].address + runs[i].nbytes;
        nbytes += runs[i].nbytes;
    }
    CHECK(runs[0].address == a + 64 * KIB && end == a + 8 * MIB);
    CHECK(nbytes == 8 * MIB - (64 + 512 + 8) * KIB);
    give(p.device, blocks[0], NULL, 0);
    MUST(wake(&p, true));
    unsigned char *at =
        cm_runtime_host_alias(p.rt, blocks[1]->address + 4 * KIB, 4 * MIB - 4 * KIB);
    CHECK(at[0] == 1 + 4 * KIB / 256 && at[4 * MIB - 4 * KIB - 1] == 1);
    /* The next sleep must save everything again. */
    write_block(&p, blocks[1], 8);
    write_block(&p, blocks[2], 9);
    MUST(put_to_sleep(&p, true));
    MUST(wake(&p, false));
    CHECK(has_pattern(&p, blocks[1], 8) && has_pattern(&p, blocks[2], 9));
    MUST(cm_pool_set_spare(p.device, parts, 2)); /* the pool forgets these at its end */
    for (unsigned i = 1; i < 3; i++) {
        give(p.device, blocks[i], NULL, 0);
    }
    close_pools(&p);
}

/* Some chunks are unmapped while others are copied. Then a copy fails, and nothing can
 * be mapped again. The pool must sleep with all of its memory, and wake with its bytes,
 * although none of them are on the host. */
static void
test_sleep_that_cannot_be_undone_keeps_the_memory(void)
{
    pools p = open_pools(1, 256 * MIB);
    cm_block *blocks[3];
    bool asleep = false;
    for (unsigned i = 0; i < 3; i++) {
        blocks[i] = take(p.device, CHUNK, NULL);
        write_block(&p, blocks[i], i);
    }
    uint64_t before = free_nbytes(&p);
    MUST(cm_pool_shut(p.device));
    MUST(plan_save(&p));
    MUST(cm_pool_unmap_until(p.device, blocks[1]->address + CHUNK));
    cm_faults_plan(p.rt, CM_OP_address_map, 1, 999, true);
    cm_pool_map_back(p.device, &asleep);
    CHECK(asleep && cm_pool_is_asleep(p.device));
    CHECK_EQ(free_nbytes(&p), before);
    CHECK_CODE(bring_back(p.device), 999);
    CHECK(cm_pool_is_asleep(p.device));
    CHECK_EQ(free_nbytes(&p), before);
    cm_faults_plan(p.rt, CM_OP_none, 0, 0, false);
    MUST(wake(&p, true));
    for (unsigned i = 0; i < 3; i++) {
        CHECK(has_pattern(&p, blocks[i], i));
    }
    MUST(put_to_sleep(&p, true)); /* it sleeps as any other pool does */
    CHECK_GT(free_nbytes(&p), before);
    MUST(wake(&p, false));
    for (unsigned i = 0; i < 3; i++) {
        CHECK(has_pattern(&p, blocks[i], i));
        give(p.device, blocks[i], NULL, 0);
    }
    close_pools(&p);
}

/* While the bytes of a pool are copied, a trim by another thread must take none of its
 * chunks away. */
static void
test_trim_leaves_a_pool_alone_that_is_shut(void)
{
    pools p = open_pools(1, 256 * MIB);
    give(p.device, take(p.device, CHUNK, NULL), NULL, 0);
    uint64_t released;
    MUST(cm_pool_shut(p.device));
    MUST(pool_trim(p.device, 0, true, &released));
    CHECK_EQ(released, 0);
    cm_pool_reopen(p.device, false);
    MUST(pool_trim(p.device, 0, true, &released));
    CHECK_EQ(released, CHUNK);
    close_pools(&p);
}

/* clang-format off */
MAIN(RUN(test_sleep_keeps_addresses_and_bytes)
     RUN(test_sleep_without_contents_takes_no_host_memory)
     RUN(test_sleep_of_an_unused_pool_does_nothing)
     RUN(test_sleep_refuses_allocations)
     RUN(test_sleep_forgets_blocks_that_are_given_back)
     RUN(test_sleep_may_be_the_end_of_a_pool)
     RUN(test_settle_waits_for_named_and_for_unknown_streams)
     RUN(test_settle_waits_for_memory_that_was_given_back)
     RUN(test_settle_refuses_a_capture)
     RUN(test_sleep_saves_what_a_graph_may_read)
     RUN(test_wake_fails_while_others_have_the_memory)
     RUN(test_sleep_and_wake_count_against_limits)
     RUN(test_sleep_without_room_on_the_host_changes_nothing)
     RUN(test_granule_of_a_pool_may_be_longer_than_the_drivers)
     RUN(test_sleep_leaves_spare_parts_out)
     RUN(test_sleep_any_call_may_fail_and_no_byte_is_lost)
     RUN(test_sleep_survives_an_operation_that_goes_on_failing)
     RUN(test_sleep_that_cannot_be_undone_keeps_the_memory)
     RUN(test_trim_leaves_a_pool_alone_that_is_shut))
/* clang-format on */
