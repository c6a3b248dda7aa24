/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of single blocks that sleep while their pool is in use (pool/spill.c). The test
 * itself copies the bytes, by the host's view of the emulated device. The last part is
 * a fault sweep: it runs a scenario again and again, each time with another runtime
 * call that fails. */
#define EMULATED_DELAY_US 20

#include "pool_world.h"

/* -- helpers ----------------------------------------------------------------------------- */

/* A block with its saved bytes. */
typedef struct sleeper {
    cm_block *block;
    unsigned seed;
    cm_address from;
    uint64_t nbytes;
    unsigned char *saved; /* NULL while it is awake */
} sleeper;

static void
write_bytes(cm_runtime *rt, const sleeper *s)
{
    unsigned char *at = cm_runtime_host_alias(rt, s->block->address, s->block->nbytes);
    for (uint64_t i = 0; i < s->block->nbytes; i += 256) {
        at[i] = (unsigned char)(s->seed + i / 256);
    }
    at[s->block->nbytes - 1] = (unsigned char)s->seed;
}

static bool
has_bytes(cm_runtime *rt, const sleeper *s)
{
    const unsigned char *at =
        cm_runtime_host_alias(rt, s->block->address, s->block->nbytes);
    bool good = at != NULL && at[s->block->nbytes - 1] == (unsigned char)s->seed;
    for (uint64_t i = 0; good && i + 256 < s->block->nbytes; i += 256) {
        good = at[i] == (unsigned char)(s->seed + i / 256);
    }
    return good;
}

static cm_status
make_sleeper(cm_runtime *rt, cm_pool *pool, uint64_t nbytes, unsigned seed,
             sleeper *out)
{
    *out = (sleeper){.seed = seed};
    CM_TRY(pool_alloc(pool, nbytes, NULL, &out->block));
    write_bytes(rt, out);
    return cm_ok();
}

/* Save the bytes and put the block to sleep. If the block does not sleep afterwards, it
 * still has its bytes. */
static cm_status
put_to_sleep(cm_runtime *rt, cm_pool *pool, sleeper *s)
{
    bool asleep = false;
    s->nbytes = cm_block_inside(pool, s->block, &s->from);
    s->saved = malloc(s->nbytes);
    memcpy(s->saved, cm_runtime_host_alias(rt, s->from, s->nbytes), s->nbytes);
    cm_status status = cm_block_fall_asleep(pool, s->block, &asleep);
    if (!asleep) {
        free(s->saved);
        s->saved = NULL;
    }
    return status;
}

static cm_status
wake(cm_runtime *rt, cm_pool *pool, sleeper *s)
{
    CM_TRY(cm_block_bring_back(pool, s->block));
    memcpy(cm_runtime_host_alias(rt, s->from, s->nbytes), s->saved, s->nbytes);
    free(s->saved);
    s->saved = NULL;
    return cm_ok();
}

static void
end(cm_pool *pool, sleeper *s)
{
    if (s->saved != NULL) {
        cm_block_free_asleep(pool, s->block);
        free(s->saved);
        s->saved = NULL;
    }
    else {
        give(pool, s->block, NULL, 0);
    }
    CHECK(cm_pool_check(pool));
}

static uint64_t
free_nbytes(cm_runtime *rt)
{
    uint64_t left, total;
    cm_device_guard guard;
    MUST(cm_device_enter(rt, 0, &guard));
    MUST(cm_rt_memory_info(rt, &left, &total));
    cm_device_leave(rt, &guard);
    return left;
}

/* -- which bytes -------------------------------------------------------------------------- */

/* Only chunks that no neighbour shares count. */
static void
test_inside_is_whole_chunks(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *small = take(pool, 512, NULL);
    cm_block *block = take(pool, 5 * MIB, NULL);
    cm_address from = 0;
    CHECK_EQ(block->address % CHUNK, 4096); /* after the page of the small block */
    CHECK_EQ(cm_block_inside(pool, block, &from), CHUNK);
    CHECK_EQ(from % CHUNK, 0);
    CHECK_EQ(cm_block_inside(pool, small, &from), 0);
    give(pool, small, NULL, 0);
    give(pool, block, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* If the pool's memory is not a range of chunks, no part of it can be given back. */
static void
test_inside_is_nothing_in_segments(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
    cm_pool_config config = DEVICE;
    config.segments = CM_SEGMENTS_PLAIN;
    cm_pool *pool = open_pool(rt, config);
    cm_block *block = take(pool, 16 * MIB, NULL);
    cm_address from = 1;
    CHECK_EQ(cm_block_inside(pool, block, &from), 0);
    give(pool, block, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* -- sleep and wake ------------------------------------------------------------------------ */

/* A block sleeps and wakes at its addresses, while its neighbours stay in use, and
 * others have its memory in between. */
static void
test_block_sleeps_and_wakes_beside_others(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    sleeper low, middle, high;
    MUST(make_sleeper(rt, pool, 1000, 1, &low));
    MUST(make_sleeper(rt, pool, 9 * MIB, 2, &middle));
    MUST(make_sleeper(rt, pool, 1 * MIB, 3, &high));
    uint64_t before = free_nbytes(rt);
    for (unsigned round = 1; round <= 2; round++) {
        MUST(put_to_sleep(rt, pool, &middle));
        CHECK_EQ(middle.nbytes, 6 * MIB);
        CHECK_EQ(free_nbytes(rt), before + 6 * MIB);
        CHECK(cm_runtime_host_alias(rt, middle.from, 1) == NULL);
        cm_pool_counters c = read_counters(pool);
        CHECK_EQ(c.asleep_nbytes, 6 * MIB);
        CHECK_EQ(c.spill_count, round);
        CHECK_EQ(c.spilled_nbytes, round * 6 * MIB);
        CHECK(has_bytes(rt, &low) && has_bytes(rt, &high));
        sleeper other;
        MUST(make_sleeper(rt, pool, 6 * MIB, 4, &other));
        CHECK(has_bytes(rt, &other));
        end(pool, &other);
        uint64_t released;
        MUST(pool_trim(pool, 0, true, &released));
        MUST(wake(rt, pool, &middle));
        CHECK(has_bytes(rt, &low) && has_bytes(rt, &middle) && has_bytes(rt, &high));
        c = read_counters(pool);
        CHECK_EQ(c.asleep_nbytes, 0);
        CHECK_EQ(c.wake_count, round);
        CHECK_EQ(c.woken_nbytes, round * 6 * MIB);
    }
    end(pool, &low);
    end(pool, &middle);
    end(pool, &high);
    cm_pool_release(pool);
    CHECK_EQ(free_nbytes(rt), 512 * MIB);
    close_emulated(rt);
}

/* A pool may hand out more memory than the device has, as long as enough of the blocks
 * sleep. */
static void
test_blocks_may_be_more_than_the_device_has(void)
{
    enum { COUNT = 12 };
    cm_runtime *rt = open_emulated(13000, 1, 24 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    sleeper all[COUNT];
    for (unsigned i = 0; i < COUNT; i++) {
        if (i >= 4) {
            MUST(put_to_sleep(rt, pool, &all[i - 4]));
        }
        MUST(make_sleeper(rt, pool, 6 * MIB, i, &all[i]));
    }
    for (unsigned i = 0; i < COUNT; i++) {
        if (all[i].saved != NULL) {
            unsigned last = (i + 8) % COUNT;
            MUST(put_to_sleep(rt, pool, &all[last]));
            MUST(wake(rt, pool, &all[i]));
        }
        CHECK(has_bytes(rt, &all[i]));
    }
    for (unsigned i = 0; i < COUNT; i++) {
        end(pool, &all[i]);
    }
    CHECK_EQ(read_counters(pool).asleep_nbytes, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* A block is freed while it sleeps. Its chunks must become gaps, and its memory in
 * chunks that it shares with neighbours must become free. */
static void
test_block_that_sleeps_may_be_freed(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    sleeper low, middle, high;
    MUST(make_sleeper(rt, pool, 1000, 1, &low));
    MUST(make_sleeper(rt, pool, 9 * MIB, 2, &middle));
    MUST(make_sleeper(rt, pool, 512 * KIB, 3, &high));
    MUST(put_to_sleep(rt, pool, &middle));
    end(pool, &middle);
    cm_pool_counters c = read_counters(pool);
    CHECK_EQ(c.asleep_nbytes, 0);
    CHECK_EQ(c.live_count, 2);
    CHECK_EQ(c.reserved_nbytes, 2 * CHUNK);
    CHECK_EQ(c.free_count, 1);
    CHECK(has_bytes(rt, &low) && has_bytes(rt, &high));
    MUST(make_sleeper(rt, pool, 32 * MIB, 5, &middle));
    CHECK(has_bytes(rt, &low) && has_bytes(rt, &middle) && has_bytes(rt, &high));
    end(pool, &low);
    end(pool, &high);
    /* The block may also be the last that keeps the pool alive. */
    MUST(put_to_sleep(rt, pool, &middle));
    cm_pool_release(pool);
    cm_block_free_asleep(pool, middle.block);
    free(middle.saved);
    CHECK_EQ(free_nbytes(rt), 512 * MIB);
    close_emulated(rt);
}

/* A block that sleeps counts against no limit. When it wakes, a limit may stop it. */
static void
test_blocks_count_against_limits(void)
{
    cm_budget budget;
    cm_budget_init(&budget, 16 * MIB, NULL);
    cm_pool_config config = DEVICE;
    config.budget = &budget;
    cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
    cm_pool *pool = open_pool(rt, config);
    sleeper first, second;
    cm_block *block = NULL;
    MUST(make_sleeper(rt, pool, 12 * MIB, 1, &first));
    CHECK_CODE(pool_alloc(pool, 12 * MIB, NULL, &block), CM_ELIMIT);
    MUST(put_to_sleep(rt, pool, &first));
    CHECK_EQ(atomic_load(&budget.used_nbytes), 0);
    MUST(make_sleeper(rt, pool, 12 * MIB, 2, &second));
    CHECK_CODE(cm_block_bring_back(pool, first.block), CM_ELIMIT);
    CHECK_EQ(atomic_load(&budget.used_nbytes), 12 * MIB);
    MUST(put_to_sleep(rt, pool, &second));
    MUST(wake(rt, pool, &first));
    CHECK(has_bytes(rt, &first));
    end(pool, &first);
    end(pool, &second);
    cm_pool_release(pool);
    CHECK_EQ(atomic_load(&budget.used_nbytes), 0);
    close_emulated(rt);
}

static void
test_block_does_not_wake_while_others_have_the_memory(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 64 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_pool *other = open_pool(rt, DEVICE);
    sleeper s;
    MUST(make_sleeper(rt, pool, 48 * MIB, 1, &s));
    MUST(put_to_sleep(rt, pool, &s));
    cm_block *taken = take(other, 32 * MIB, NULL);
    for (int round = 0; round < 2; round++) {
        CHECK_CODE(cm_block_bring_back(pool, s.block), CM_CUDA_OUT_OF_MEMORY);
        CHECK_EQ(read_counters(pool).asleep_nbytes, 48 * MIB);
        CHECK_EQ(free_nbytes(rt), 32 * MIB);
    }
    give(other, taken, NULL, 0);
    cm_pool_release(other);
    MUST(wake(rt, pool, &s));
    CHECK(has_bytes(rt, &s));
    end(pool, &s);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* -- whose turn it is ---------------------------------------------------------------------- */

/* A thread that asks for the turn while another thread has it. */
typedef struct asker {
    cm_pool *pool;
    bool is_refused;
} asker;

static void *
ask_for_turn(void *argument)
{
    asker *self = argument;
    self->is_refused =
        !cm_pool_take_spill_turn(self->pool) && !cm_pool_has_spill_turn(self->pool);
    return NULL;
}

static void
test_one_thread_at_a_time_has_the_turn(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 64 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    pthread_t thread;
    CHECK(!cm_pool_has_spill_turn(pool));
    CHECK(cm_pool_take_spill_turn(pool));
    CHECK(!cm_pool_take_spill_turn(pool)); /* nor can the thread that has it take it
                                              twice */
    CHECK(cm_pool_has_spill_turn(pool));
    asker other = {.pool = pool};
    MUST(pthread_create(&thread, NULL, ask_for_turn, &other) == 0
             ? cm_ok()
             : cm_fail(CM_ETHREAD, 0));
    (void)pthread_join(thread, NULL);
    CHECK(other.is_refused);
    cm_pool_give_spill_turn(pool);
    CHECK(cm_pool_take_spill_turn(pool));
    cm_pool_give_spill_turn(pool);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* -- every call may fail -------------------------------------------------------------------- */

/* Put two blocks to sleep, wake one and free the other, and try again after a failure,
 * which may come at any call. Bytes are never lost. Writes the first failure to *out.
 */
static void
run_scenario(cm_runtime *rt, cm_pool *pool, cm_status *out)
{
    static const uint64_t sizes[3] = {5 * MIB, 500, 5 * MIB};
    sleeper all[3];
    cm_status first = cm_ok();
    for (unsigned i = 0; i < 3; i++) {
        cm_status status = make_sleeper(rt, pool, sizes[i], i, &all[i]);
        first = cm_first_failure(first, status);
        if (!cm_is_ok(status)) {
            MUST(make_sleeper(rt, pool, sizes[i], i, &all[i]));
        }
    }
    for (unsigned i = 0; i < 3; i += 2) {
        cm_status status = put_to_sleep(rt, pool, &all[i]);
        first = cm_first_failure(first, status);
        if (all[i].saved == NULL) {
            CHECK(has_bytes(rt, &all[i]));
            MUST(put_to_sleep(rt, pool, &all[i]));
        }
        CHECK(cm_pool_check(pool));
    }
    cm_status status = wake(rt, pool, &all[0]);
    first = cm_first_failure(first, status);
    if (!cm_is_ok(status)) {
        MUST(wake(rt, pool, &all[0]));
    }
    CHECK(has_bytes(rt, &all[0]) && has_bytes(rt, &all[1]));
    end(pool, &all[0]);
    end(pool, &all[1]);
    end(pool, &all[2]);
    uint64_t released;
    first = cm_first_failure(first, pool_trim(pool, 0, true, &released));
    *out = cm_first_failure(first, pool_trim(pool, 0, true, &released));
}

static void
sweep(int32_t code)
{
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_status status = cm_ok();
    run_scenario(rt, pool, &status);
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    run_scenario(rt, pool, &status);
    CHECK_OK(status);
    uint64_t total = cm_faults_count(rt, CM_OP_none);
    CHECK_GT(total, 20);
    for (uint64_t nth = 1; nth <= total; nth += CHECK_EVERY(24)) {
        int before = atomic_load(&check_failures);
        cm_faults_plan(rt, CM_OP_none, nth, code, false);
        run_scenario(rt, pool, &status);
        cm_op injected = cm_faults_last_injected(rt);
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        CHECK(cm_pool_check(pool));
        CHECK_EQ(read_counters(pool).reserved_nbytes, 0);
        CHECK_EQ(read_counters(pool).asleep_nbytes, 0);
        if (atomic_load(&check_failures) != before) {
            fprintf(stderr, "  … when call %llu (%s) failed with code %d\n",
                    (unsigned long long)nth, cm_op_facts[injected].name, code);
        }
    }
    cm_pool_release(pool);
    check_only_streams_live(rt);
    close_emulated(rt);
}

static void
test_any_call_may_fail_and_no_byte_is_lost(void)
{
    sweep(999);
    sweep(CM_CUDA_OUT_OF_MEMORY);
}

/* The runtime refuses to release the memory of a block that is put to sleep, so the
 * pool keeps that memory. It goes back later, when the block fails to wake or is freed,
 * and only then must the counters and the budget count it as gone. */
static void
test_refused_handle_is_counted_when_it_goes_back(void)
{
    cm_budget budget;
    cm_budget_init(&budget, 64 * MIB, NULL);
    cm_pool_config config = DEVICE;
    config.budget = &budget;
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, config);
    sleeper s, other;
    MUST(make_sleeper(rt, pool, 8 * MIB, 1, &other));
    for (int round = 0; round < 2; round++) {
        MUST(make_sleeper(rt, pool, 8 * MIB, 2, &s));
        cm_faults_plan(rt, CM_OP_physical_release, 1, 999, true);
        CHECK_CODE(put_to_sleep(rt, pool, &s), 999);
        CHECK(s.saved != NULL);
        CHECK_EQ(read_counters(pool).asleep_nbytes, 0);
        CHECK_EQ(atomic_load(&budget.used_nbytes), 16 * MIB);
        if (round == 0) {
            cm_faults_plan(rt, CM_OP_address_map, 1, 999, false);
            CHECK_CODE(cm_block_bring_back(pool, s.block), 999);
            CHECK_EQ(read_counters(pool).asleep_nbytes, 8 * MIB);
            CHECK_EQ(atomic_load(&budget.used_nbytes), 8 * MIB);
        }
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        end(pool, &s);
        CHECK_EQ(read_counters(pool).asleep_nbytes, 0);
        CHECK_EQ(read_counters(pool).reserved_nbytes, 8 * MIB);
        CHECK_EQ(atomic_load(&budget.used_nbytes), 8 * MIB);
    }
    end(pool, &other);
    cm_pool_release(pool);
    CHECK_EQ(atomic_load(&budget.used_nbytes), 0);
    close_emulated(rt);
}

/* The pool does not hold bytes that sleep, so no peak may count them. */
static void
test_peak_does_not_count_what_sleeps(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    sleeper first, second;
    MUST(make_sleeper(rt, pool, 16 * MIB, 1, &first));
    MUST(put_to_sleep(rt, pool, &first));
    MUST(make_sleeper(rt, pool, 16 * MIB, 2, &second));
    CHECK_EQ(read_counters(pool).peak_reserved_nbytes, 16 * MIB);
    MUST(wake(rt, pool, &first));
    CHECK_EQ(read_counters(pool).peak_reserved_nbytes, 32 * MIB);
    MUST(put_to_sleep(rt, pool, &second));
    cm_pool_reset_peaks(pool);
    CHECK_EQ(read_counters(pool).peak_reserved_nbytes, 16 * MIB);
    end(pool, &first);
    end(pool, &second);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* From some moment on every call of one operation fails, until the test ends the plan
 * of faults. So the pool cannot undo its earlier steps either. */
static void
test_block_survives_an_operation_that_goes_on_failing(void)
{
    static const cm_op ops[] = {CM_OP_address_unmap, CM_OP_address_map,
                                CM_OP_address_set_access, CM_OP_physical_create,
                                CM_OP_physical_release};
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    for (size_t k = 0; k < sizeof(ops) / sizeof(*ops); k++) {
        for (uint64_t nth = 1; nth <= 6; nth++) {
            sleeper s, freed;
            MUST(make_sleeper(rt, pool, 8 * MIB, (unsigned)nth, &s));
            MUST(make_sleeper(rt, pool, 8 * MIB, 1, &freed));
            cm_faults_plan(rt, ops[k], nth, 999, true);
            cm_ignore(put_to_sleep(rt, pool, &s));
            if (s.saved != NULL) {
                cm_ignore(wake(rt, pool, &s));
            }
            cm_ignore(put_to_sleep(rt, pool, &freed));
            end(pool, &freed);
            cm_faults_plan(rt, CM_OP_none, 0, 0, false);
            if (s.saved != NULL) {
                MUST(wake(rt, pool, &s));
            }
            CHECK(has_bytes(rt, &s));
            end(pool, &s);
        }
    }
    cm_pool_release(pool);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_inside_is_whole_chunks)
     RUN(test_inside_is_nothing_in_segments)
     RUN(test_block_sleeps_and_wakes_beside_others)
     RUN(test_blocks_may_be_more_than_the_device_has)
     RUN(test_block_that_sleeps_may_be_freed)
     RUN(test_blocks_count_against_limits)
     RUN(test_block_does_not_wake_while_others_have_the_memory)
     RUN(test_one_thread_at_a_time_has_the_turn)
     RUN(test_any_call_may_fail_and_no_byte_is_lost)
     RUN(test_refused_handle_is_counted_when_it_goes_back)
     RUN(test_peak_does_not_count_what_sleeps)
     RUN(test_block_survives_an_operation_that_goes_on_failing))
/* clang-format on */
