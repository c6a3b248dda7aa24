/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of how a pool places chunks of device memory. It maps them side by side in one
 * range of addresses, and can move a free chunk to where a longer block needs it
 * instead of making new memory. A gap is a stretch of addresses without memory, and a
 * granule (2 MiB) is the smallest chunk. The last part makes each step of such growths
 * fail. */
#include "place_world.h"

/* Each block is one chunk longer than the one before. The pool must add that chunk
 * behind the others, so that every block begins at the same address. */
static void
test_pool_grows_in_place(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *a = take(pool, LUMP, NULL);
    cm_address first = a->address;
    give(pool, a, NULL, 0);
    for (uint64_t nbytes = 2 * LUMP; nbytes <= 10 * LUMP; nbytes += LUMP) {
        a = take(pool, nbytes, NULL);
        CHECK_EQ(a->address, first);
        CHECK_EQ(read_counters(pool).reserved_nbytes, nbytes);
        check_usable(rt, a);
        give(pool, a, NULL, 0);
    }
    CHECK_EQ(read_counters(pool).segment_count, 1);
    CHECK_EQ(read_counters(pool).remap_count, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* Every second chunk is free. A block as long as all free chunks together must get
 * their memory, moved to one place, without any new memory. */
static void
test_pool_moves_free_chunks_instead_of_reserving_more(void)
{
    enum { COUNT = 16 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    uint64_t free_nbytes = driver_free_nbytes(rt);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *blocks[COUNT];
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = take(pool, LUMP, NULL);
    }
    for (int i = 0; i < COUNT; i += 2) {
        give(pool, blocks[i], NULL, 0);
    }
    cm_pool_counters before = read_counters(pool);
    CHECK_EQ(before.reserved_nbytes, COUNT * LUMP);
    CHECK_EQ(before.largest_free_nbytes, LUMP);
    uint64_t created = cm_faults_count(rt, CM_OP_physical_create);
    cm_block *large = take(pool, COUNT / 2 * LUMP, NULL);
    cm_pool_counters c = read_counters(pool);
    CHECK_EQ(c.reserved_nbytes, before.reserved_nbytes);
    CHECK_EQ(c.peak_reserved_nbytes, before.reserved_nbytes);
    CHECK_EQ(c.cached_nbytes, 0);
    CHECK_GE(c.remap_nbytes, (COUNT / 2 - 1) * LUMP);
    CHECK_EQ(c.remap_nbytes, c.remap_count * 2 * MIB);
    CHECK_EQ(cm_faults_count(rt, CM_OP_physical_create), created);
    check_usable(rt, large);
    for (int i = 1; i < COUNT; i += 2) {
        check_usable(rt, blocks[i]);
        give(pool, blocks[i], NULL, 0);
    }
    give(pool, large, NULL, 0);
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 8 * MIB, false, &released));
    CHECK_EQ(released, COUNT * LUMP - 8 * MIB);
    CHECK_EQ(driver_free_nbytes(rt), free_nbytes - 8 * MIB);
    large = take(pool, 40 * MIB, NULL);
    check_usable(rt, large);
    give(pool, large, NULL, 0);
    CHECK_OK(pool_trim(pool, 0, false, &released));
    CHECK_EQ(driver_free_nbytes(rt), free_nbytes);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 0);
    cm_pool_release(pool);
    CHECK_EQ(driver_free_nbytes(rt), free_nbytes);
    close_emulated(rt);
}

/* A chunk for a long block has 1/64 of the block's length, up to 16 MiB. A chunk for a
 * short block has one granule. */
static void
test_pool_makes_longer_chunks_for_longer_blocks(void)
{
    static const struct {
        uint64_t nbytes, chunk_count;
    } blocks[] = {{2 * MIB, 1},     {64 * MIB, 32},    {256 * MIB, 64}, {512 * MIB, 64},
                  {1024 * MIB, 64}, {2048 * MIB, 128}, {2 * MIB, 1},    {8 * MIB, 4}};
    cm_runtime *rt = open_emulated(13000, 1, 4096 * MIB);
    for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++) {
        cm_pool *pool = open_pool(rt, DEVICE);
        uint64_t before = cm_faults_count(rt, CM_OP_physical_create);
        cm_block *block = take(pool, blocks[i].nbytes, NULL);
        CHECK_EQ(cm_faults_count(rt, CM_OP_physical_create) - before,
                 blocks[i].chunk_count);
        CHECK_EQ(read_counters(pool).reserved_nbytes, blocks[i].nbytes);
        give(pool, block, NULL, 0);
        cm_pool_release(pool);
    }
    close_emulated(rt);
}

/* The next two tests make HOLED blocks of one chunk each. Blocks 2 to 6 become gaps or
 * free memory. */
enum { HOLED = 12 };

/* Chunks 2 to 6 become gap, free, gap, free, gap, and chunk 9 is free too. A block of
 * five chunks must go there: two chunks are in their place already, one is moved, and
 * two are made. */
static void
test_pool_places_over_several_gaps(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *blocks[HOLED];
    uint64_t released = 0;
    for (int i = 0; i < HOLED; i++) {
        blocks[i] = take(pool, LUMP, NULL);
    }
    cm_address first = blocks[2]->address;
    for (int i = 2; i <= 6; i += 2) {
        give(pool, blocks[i], NULL, 0);
    }
    CHECK_OK(pool_trim(pool, 0, false, &released));
    CHECK_EQ(released, 3 * LUMP);
    give(pool, blocks[3], NULL, 0);
    give(pool, blocks[5], NULL, 0);
    give(pool, blocks[9], NULL, 0);
    /* Two free chunks are in their place, one is moved, and two are missing. */
    cm_block *large = take(pool, 5 * LUMP, NULL);
    cm_pool_counters c = read_counters(pool);
    CHECK_EQ(large->address, first);
    CHECK_EQ(c.remap_nbytes, LUMP);
    CHECK_EQ(c.reserved_nbytes, (HOLED - 1) * LUMP);
    CHECK_EQ(c.cached_nbytes, 0);
    for (uint64_t i = 0; i < 5; i++) {
        check_usable(rt, &(cm_block){NULL, first + i * LUMP, LUMP});
    }
    /* The next growth fills the gap that the moved chunk has left. */
    blocks[9] = take(pool, LUMP, NULL);
    CHECK_EQ(read_counters(pool).reserved_nbytes, HOLED * LUMP);
    CHECK_LT(blocks[9]->address, blocks[10]->address);
    give(pool, large, NULL, 0);
    for (int i = 0; i < HOLED; i++) {
        if (i < 2 || i > 6) {
            check_usable(rt, blocks[i]);
            give(pool, blocks[i], NULL, 0);
        }
    }
    cm_pool_release(pool);
    close_emulated(rt);
}

/* Chunks 2 to 4 are a gap, and chunks 5 and 6 are free. A block of three chunks needs
 * one chunk of the gap, and must take the last one, next to the free memory. */
static void
test_pool_places_before_free_memory(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *blocks[HOLED];
    uint64_t released = 0;
    for (int i = 0; i < HOLED; i++) {
        blocks[i] = take(pool, LUMP, NULL);
    }
    cm_address end = blocks[7]->address;
    for (int i = 2; i <= 4; i++) {
        give(pool, blocks[i], NULL, 0);
    }
    CHECK_OK(pool_trim(pool, 0, false, &released));
    give(pool, blocks[5], NULL, 0);
    give(pool, blocks[6], NULL, 0);
    cm_block *large = take(pool, 3 * LUMP, NULL);
    CHECK_EQ(large->address + large->nbytes, end);
    CHECK_EQ(read_counters(pool).reserved_nbytes, (HOLED - 2) * LUMP);
    check_usable(rt, large);
    give(pool, large, NULL, 0);
    for (int i = 0; i < HOLED; i++) {
        if (i < 2 || i > 6) {
            give(pool, blocks[i], NULL, 0);
        }
    }
    cm_pool_release(pool);
    close_emulated(rt);
}

/* A growth must take as many granules as are missing and no more, and nothing at all
 * while free memory is enough. */
static void
test_pool_growth_takes_what_is_missing(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *blocks[5];
    cm_block *held = take(pool, 128 * MIB, NULL);
    for (uint64_t i = 0; i < 5; i++) {
        blocks[i] = take(pool, 512 * KIB, NULL);
        CHECK_EQ(read_counters(pool).reserved_nbytes, (130 + i / 4 * 2) * MIB);
    }
    for (int i = 0; i < 5; i++) {
        give(pool, blocks[i], NULL, 0);
    }
    give(pool, held, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* Every other granule is free. One block must get all of them, moved from as many
 * places. */
static void
test_pool_moves_as_many_chunks_as_it_takes(void)
{
    enum { COUNT = 1200 };
    cm_runtime *rt = open_emulated(13000, 1, COUNT * 2 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block **blocks = calloc(COUNT, sizeof(*blocks));
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = take(pool, 2 * MIB, NULL);
    }
    for (int i = 0; i < COUNT; i += 2) {
        give(pool, blocks[i], NULL, 0);
    }
    cm_block *large = take(pool, COUNT * MIB, NULL);
    cm_pool_counters c = read_counters(pool);
    CHECK_GE(c.remap_count, COUNT / 2 - 1);
    CHECK_EQ(c.reserved_nbytes, COUNT * 2 * MIB);
    CHECK_EQ(c.cached_nbytes, 0);
    check_usable(rt, large);
    give(pool, large, NULL, 0);
    for (int i = 1; i < COUNT; i += 2) {
        give(pool, blocks[i], NULL, 0);
    }
    free(blocks);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* The free memory consists of chunks of two granules, and the place that a long block
 * needs is one granule short of a whole number of them. So the last chunk fits nowhere,
 * and must be given back in exchange for a new chunk that does. */
static void
test_pool_gives_back_a_chunk_that_fits_nowhere(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(3840) * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *held = take(pool, 1250 * MIB, NULL);
    cm_block *low = take(pool, 1000 * MIB, NULL);
    cm_block *between = take(pool, 2 * MIB, NULL);
    cm_block *high = take(pool, 750 * MIB, NULL);
    cm_block *last = take(pool, 2 * MIB, NULL);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 3004 * MIB);
    give(pool, low, NULL, 0);
    give(pool, high, NULL, 0);
    uint64_t released = cm_faults_count(rt, CM_OP_physical_release);
    cm_block *large = take(pool, 1748 * MIB, NULL);
    cm_pool_counters c = read_counters(pool);
    CHECK_EQ(c.reserved_nbytes, 3002 * MIB);
    CHECK_EQ(c.cached_nbytes, 0);
    CHECK_EQ(cm_faults_count(rt, CM_OP_physical_release), released + 1);
    check_usable(rt, large);
    give(pool, large, NULL, 0);
    give(pool, held, NULL, 0);
    give(pool, between, NULL, 0);
    give(pool, last, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* Two chunks are free, but a stream is late with one of them. A block of two chunks may
 * move only the other one, and must get a new chunk as well. */
static void
test_pool_moves_nothing_that_a_stream_is_late_with(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *late = open_stream(rt, 0);
    cm_stream *other = open_stream(rt, 0);
    cm_block *blocks[6];
    for (int i = 0; i < 6; i++) {
        blocks[i] = take(pool, LUMP, NULL);
    }
    hold_work(rt, late, blocks[1]);
    give(pool, blocks[1], late, 0);
    give(pool, blocks[3], NULL, 0);
    cm_block *large = take(pool, 2 * LUMP, other);
    cm_pool_counters c = read_counters(pool);
    CHECK_EQ(c.remap_nbytes, LUMP);
    CHECK_EQ(c.reserved_nbytes, 7 * LUMP);
    CHECK_EQ(c.cached_nbytes, LUMP);
    /* The device reports no fault, so no memory was taken away under its work. */
    MUST(cm_rt_fill_8_async(rt, large->address, 5, large->nbytes, other->handle));
    synchronize(rt, other);
    CHECK_OK(cm_emulated_gate_open(rt, late->handle));
    synchronize(rt, late);
    give(pool, large, NULL, 0);
    for (int i = 0; i < 6; i += i == 0 || i == 2 ? 2 : 1) {
        give(pool, blocks[i], NULL, 0);
    }
    cm_pool_release(pool);
    cm_stream_release(late);
    cm_stream_release(other);
    close_emulated(rt);
}

/* A block is placed beside a free piece that a stream is late with. Of the chunks that
 * are mapped for the block, the first part may join that piece and the rest may not.
 * Nevertheless the block must get its whole place. The arguments are the numbers of the
 * late block and of the first of the three blocks that become the gap. */
static void
check_place_beside_late(int late_index, int first_index)
{
    enum { COUNT = 8, WANTED = 3 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *late = open_stream(rt, 0);
    cm_stream *other = open_stream(rt, 0);
    cm_block *blocks[COUNT];
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = take(pool, CHUNK, NULL);
    }
    cm_address first = blocks[first_index]->address;
    for (int i = 0; i < WANTED; i++) {
        give(pool, blocks[first_index + i], NULL, 0);
    }
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 0, false, &released));
    CHECK_EQ(released, WANTED * CHUNK);
    hold_work(rt, late, blocks[late_index]);
    give(pool, blocks[late_index], late, 0);
    /* Now two streams have given memory back. */
    give(pool, blocks[COUNT - 2], other, 0);
    cm_block *block = take(pool, WANTED * CHUNK, other);
    CHECK_EQ(block->address, first);
    CHECK_EQ(block->nbytes, WANTED * CHUNK);
    MUST(cm_rt_fill_8_async(rt, block->address, 5, block->nbytes, other->handle));
    synchronize(rt, other);
    CHECK_OK(cm_emulated_gate_open(rt, late->handle));
    synchronize(rt, late);
    give(pool, block, NULL, 0);
    give(pool, blocks[0], NULL, 0);
    give(pool, blocks[COUNT - 3], NULL, 0);
    give(pool, blocks[COUNT - 1], NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(late);
    cm_stream_release(other);
    close_emulated(rt);
}

static void
test_pool_places_between_late_memory_and_a_block(void)
{
    check_place_beside_late(1, 2);
    check_place_beside_late(4, 1);
}

/* One small block lies in 192 MiB of free memory. A trim must give back everything but
 * the chunk under that block. */
static void
test_pool_small_blocks_pin_their_chunks_only(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 2176 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *whole = take(pool, 192 * MIB, NULL);
    give(pool, whole, NULL, 0);
    cm_block *small = take(pool, 512, NULL);
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 0, false, &released));
    CHECK_GE(released, 176 * MIB); /* a chunk is a small share of what the pool holds */
    CHECK_EQ(read_counters(pool).reserved_nbytes, 192 * MIB - released);
    check_usable(rt, small);
    give(pool, small, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* -- faults ----------------------------------------------------------------------------- */

enum { BLOCKS = 8 };

typedef struct outcome {
    uint64_t refused_count; /* refused allocations and trims */
    cm_status first;        /* the first of these failures */
} outcome;

/* Count a refused allocation or trim, and keep the first failure. */
static void
note(outcome *o, cm_status status)
{
    if (!cm_is_ok(status)) {
        o->refused_count++;
        o->first = cm_is_ok(o->first) ? status : o->first;
    }
}

/* Allocate a block, or note the failure and store NULL. */
static void
take_or_note(cm_pool *pool, uint64_t nbytes, cm_block **block, outcome *o)
{
    cm_status status = pool_alloc(pool, nbytes, NULL, block);
    note(o, status);
    if (!cm_is_ok(status)) {
        *block = NULL;
    }
    if (!cm_pool_check(pool)) {
        CHECK_FAIL_("the pool's invariants do not hold");
    }
}

/* Make the pool grow in place, move chunks and trim, twice. */
static void
run_places(cm_pool *pool, outcome *o)
{
    cm_block *blocks[BLOCKS];
    cm_block *large = NULL;
    uint64_t released = 0;
    for (int i = 0; i < BLOCKS; i++) {
        take_or_note(pool, CHUNK + (uint64_t)(i % 3) * 512 * KIB, &blocks[i], o);
    }
    for (int i = 0; i < BLOCKS; i += 2) {
        if (blocks[i] != NULL) {
            give(pool, blocks[i], NULL, 0);
        }
    }
    take_or_note(pool, 5 * CHUNK, &large, o);
    for (int i = 1; i < BLOCKS; i += 2) {
        if (blocks[i] != NULL) {
            give(pool, blocks[i], NULL, 0);
        }
    }
    note(o, pool_trim(pool, 2 * CHUNK, false, &released));
    if (large != NULL) {
        give(pool, large, NULL, 0);
    }
    take_or_note(pool, 7 * CHUNK, &large, o);
    if (large != NULL) {
        give(pool, large, NULL, 0);
    }
    note(o, pool_trim(pool, 0, false, &released));
}

/* Make the pool grow over three gaps, for which it moves one chunk and makes two. */
static void
run_holes(cm_runtime *rt, cm_pool *pool, outcome *o)
{
    cm_block *blocks[HOLED];
    cm_block *large = NULL;
    uint64_t released = 0;
    for (int i = 0; i < HOLED; i++) {
        take_or_note(pool, CHUNK, &blocks[i], o);
    }
    static const int given[] = {2, 4, 6, -1, 3, 5, 0};
    for (size_t k = 0; k < sizeof(given) / sizeof(*given); k++) {
        int i = given[k];
        if (i < 0) {
            note(o, pool_trim(pool, 0, false, &released));
        }
        else if (blocks[i] != NULL) {
            give(pool, blocks[i], NULL, 0);
            blocks[i] = NULL;
        }
    }
    take_or_note(pool, 5 * CHUNK, &large, o);
    if (large != NULL) {
        check_usable(rt, large);
        give(pool, large, NULL, 0);
    }
    for (int i = 0; i < HOLED; i++) {
        if (blocks[i] != NULL) {
            give(pool, blocks[i], NULL, 0);
        }
    }
}

/* Check that nothing is live, that the budget agrees with the pool, and that the pool
 * can still hand out blocks. */
static void
check_well(cm_runtime *rt, cm_pool *pool, cm_budget *budget)
{
    CHECK(cm_pool_check(pool));
    cm_pool_counters c = read_counters(pool);
    CHECK_EQ(c.live_nbytes, 0);
    CHECK_EQ(c.reserved_nbytes, c.cached_nbytes);
    CHECK_EQ(atomic_load(&budget->used_nbytes), c.reserved_nbytes);
    cm_block *all[2];
    all[0] = take(pool, 20 * MIB, NULL);
    all[1] = take(pool, 10 * MIB, NULL);
    check_usable(rt, all[0]);
    check_usable(rt, all[1]);
    give(pool, all[0], NULL, 0);
    give(pool, all[1], NULL, 0);
}

/* Run both growths again and again, each time with a later call of `op` failing, until
 * no call fails any more. With `repeat` all calls after that one fail too. Each failure
 * must be reported with its code, and the pool must go on working and leave nothing
 * behind. */
static void
sweep(cm_op op, int32_t code, bool repeat)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    uint64_t free_nbytes = driver_free_nbytes(rt);
    uint64_t nth = 1;
    for (bool injected = true; injected && nth < 400; nth++) {
        int before = atomic_load(&check_failures);
        outcome o = {0, cm_ok()};
        cm_budget budget;
        cm_pool_config config = DEVICE;
        cm_budget_init(&budget, 100 * MIB, NULL);
        config.budget = &budget;
        cm_pool *pool = open_pool(rt, config);
        cm_faults_plan(rt, op, nth, code, repeat);
        run_places(pool, &o);
        run_holes(rt, pool, &o);
        injected = cm_faults_last_injected(rt) != CM_OP_none;
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        if (!cm_is_ok(o.first) && o.first.code != code) {
            CHECK_FAIL_("the failure was reported as code %d of %s", o.first.code,
                        cm_op_facts[o.first.op].name);
        }
        CHECK(injected || o.refused_count == 0);
        check_well(rt, pool, &budget);
        cm_pool_release(pool);
        CHECK_EQ(atomic_load(&budget.used_nbytes), 0);
        CHECK_EQ(driver_free_nbytes(rt), free_nbytes);
        check_nothing_live(rt);
        if (atomic_load(&check_failures) != before) {
            fprintf(stderr, "  … when call %llu of %s failed with code %d%s\n",
                    (unsigned long long)nth, cm_op_facts[op].name, code,
                    repeat ? " and all later ones" : "");
            injected = false;
        }
    }
    CHECK_GT(nth, 4);
    close_emulated(rt);
}

/* Each operation of a growth fails once. */
static void
test_pool_each_step_of_a_growth_may_fail(void)
{
    static const cm_op ops[] = {CM_OP_physical_create, CM_OP_address_map,
                                CM_OP_address_set_access, CM_OP_address_unmap,
                                CM_OP_physical_release};
    for (size_t i = 0; i < sizeof(ops) / sizeof(*ops); i++) {
        sweep(ops[i], i % 2 == 0 ? CM_CUDA_OUT_OF_MEMORY : 999, false);
    }
}

/* Some call of an operation in a growth fails, and so do all later calls of that
 * operation. */
static void
test_pool_each_step_of_a_growth_may_fail_for_good(void)
{
    static const cm_op ops[] = {CM_OP_physical_create, CM_OP_address_map,
                                CM_OP_address_set_access};
    for (size_t i = 0; i < sizeof(ops) / sizeof(*ops); i++) {
        sweep(ops[i], CM_CUDA_OUT_OF_MEMORY, true);
    }
}

/* Each call of a pool's first growth fails once, including those that reserve its
 * addresses. The next allocation must succeed. */
static void
test_pool_source_that_cannot_be_opened_is_tried_again(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    for (uint64_t nth = 1; nth < 60; nth++) {
        cm_pool *pool = open_pool(rt, DEVICE);
        cm_block *block = NULL;
        cm_faults_plan(rt, CM_OP_none, nth, 999, false);
        cm_status status = pool_alloc(pool, 3 * MIB, NULL, &block);
        bool injected = cm_faults_last_injected(rt) != CM_OP_none;
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        CHECK(cm_is_ok(status) || status.code == 999);
        if (!cm_is_ok(status)) {
            block = take(pool, 3 * MIB, NULL);
        }
        check_usable(rt, block);
        give(pool, block, NULL, 0);
        cm_pool_release(pool);
        check_nothing_live(rt);
        if (!injected) {
            CHECK_GT(nth, 8);
            break;
        }
    }
    close_emulated(rt);
}

/* -- memory for many blocks ---------------------------------------------------------- */

static void
test_pool_memory_for_many_blocks_comes_in_one_growth(void)
{
    enum { COUNT = 10 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *blocks[COUNT];
    cm_pool_reserve(pool, COUNT * 4 * MIB);
    CHECK_EQ(read_counters(pool).growth_count, 1);
    CHECK_EQ(read_counters(pool).cached_nbytes, COUNT * 4 * MIB);
    CHECK_EQ(read_counters(pool).allocation_count, 0);
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = take(pool, 4 * MIB, NULL);
        check_usable(rt, blocks[i]);
    }
    CHECK_EQ(read_counters(pool).growth_count, 1);
    /* A pool that has an eighth of the memory grows by what is missing, as usual. */
    give(pool, blocks[0], NULL, 0);
    cm_pool_reserve(pool, 32 * MIB);
    CHECK_EQ(read_counters(pool).growth_count, 1);
    cm_pool_reserve(pool, 40 * MIB);
    CHECK_EQ(read_counters(pool).growth_count, 2);
    for (int i = 1; i < COUNT; i++) {
        give(pool, blocks[i], NULL, 0);
    }
    CHECK(cm_pool_check(pool));
    cm_pool_release(pool);
    check_nothing_live(rt);
    close_emulated(rt);
}

/* Memory that is reserved for many blocks at once must consist of fewer chunks than
 * memory that is made for one block after the other. */
static void
test_pool_memory_for_many_blocks_has_long_chunks(void)
{
    enum { LOADED = 64 };
    uint64_t counts[2];
    for (int together = 0; together < 2; together++) {
        cm_runtime *rt = open_emulated(13000, 1, UINT64_C(2) << 30);
        cm_pool *pool = open_pool(rt, DEVICE);
        cm_block *blocks[LOADED];
        if (together) {
            cm_pool_reserve(pool, UINT64_C(1) << 30);
        }
        for (int i = 0; i < LOADED; i++) {
            blocks[i] = take(pool, 16 * MIB, NULL);
        }
        for (int i = 0; i < LOADED; i++) {
            give(pool, blocks[i], NULL, 0);
        }
        counts[together] = cm_faults_count(rt, CM_OP_physical_create);
        cm_pool_release(pool);
        close_emulated(rt);
    }
    CHECK_LE(counts[1], 1024 / 8);
    CHECK_GE(counts[0], 3 * counts[1]);
}

/* Whichever call of the runtime fails, cm_pool_reserve() must leave the pool as it was.
 * Later allocations then grow the pool themselves. */
static void
test_pool_that_can_make_nothing_ahead_is_as_before(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 64 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_pool_reserve(pool, 128 * MIB);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 0);
    for (uint64_t nth = 1; nth <= 12; nth++) {
        cm_faults_plan(rt, CM_OP_none, nth, 999, false);
        cm_pool_reserve(pool, 16 * MIB);
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        CHECK(cm_pool_check(pool));
        CHECK_EQ(read_counters(pool).growth_count, 0);
        CHECK_EQ(read_counters(pool).reserved_nbytes, 0);
    }
    cm_block *block = take(pool, 16 * MIB, NULL);
    check_usable(rt, block);
    cm_pool_reserve(pool, 0);
    cm_pool_reserve(pool, UINT64_MAX);
    give(pool, block, NULL, 0);
    cm_pool_release(pool);
    check_nothing_live(rt);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_pool_grows_in_place)
     RUN(test_pool_moves_free_chunks_instead_of_reserving_more)
     RUN(test_pool_makes_longer_chunks_for_longer_blocks)
     RUN(test_pool_places_over_several_gaps)
     RUN(test_pool_places_before_free_memory)
     RUN(test_pool_growth_takes_what_is_missing)
     RUN_WITHOUT_TSAN(test_pool_moves_as_many_chunks_as_it_takes)
     RUN_WITHOUT_TSAN(test_pool_gives_back_a_chunk_that_fits_nowhere)
     RUN(test_pool_moves_nothing_that_a_stream_is_late_with)
     RUN(test_pool_places_between_late_memory_and_a_block)
     RUN(test_pool_small_blocks_pin_their_chunks_only)
     RUN(test_pool_each_step_of_a_growth_may_fail)
     RUN(test_pool_each_step_of_a_growth_may_fail_for_good)
     RUN(test_pool_source_that_cannot_be_opened_is_tried_again)
     RUN(test_pool_memory_for_many_blocks_comes_in_one_growth)
     RUN(test_pool_memory_for_many_blocks_has_long_chunks)
     RUN(test_pool_that_can_make_nothing_ahead_is_as_before))
/* clang-format on */
