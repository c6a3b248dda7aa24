/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the source of a pool that maps device memory on demand (pool/source_vmm.c).
 * A source makes chunks of memory. This source can place a chunk anywhere in a range of
 * addresses and move it. Each call of opening, moving and closing a chunk is also made
 * to fail. */
#include "emulated_bench.h"
#include "pool/source.h"
#include "runtime/scope.h"

enum { BUDGET = 8 }; /* granules */

static const uint64_t G = UINT64_C(2) << 20;

typedef struct world {
    cm_runtime *rt;
    cm_scope scope;
    cm_source *source;
} world;

static const cm_pool_config device_config = {.kind = CM_KIND_DEVICE, .numa_node = -1};

/* Open a source on a device with BUDGET granules of memory. */
static world
begin(int device_count)
{
    world w = {.rt = open_emulated(13000, device_count, BUDGET * G)};
    MUST(cm_scope_enter(w.rt, 0, CM_CAPTURE_RELAXED, &w.scope));
    MUST(cm_source_vmm_open(w.rt, &device_config, &w.source));
    return w;
}

static void
end(world *w)
{
    w->source->ops->destroy(w->source);
    cm_scope_leave(&w->scope);
    close_emulated(w->rt);
}

/* Let the next call of `op` fail, or with `repeat` each one. */
static void
plan(const world *w, cm_op op, bool repeat)
{
    cm_faults_plan(w->rt, op, 1, CM_CUDA_OUT_OF_MEMORY, repeat);
}

static cm_status
open_at(const world *w, uint64_t at, uint64_t granules, cm_chunk *out)
{
    return w->source->ops->open_chunk(w->source, at * G, granules * G, out);
}

static void
close_it(const world *w, cm_chunk *chunk)
{
    MUST(w->source->ops->close_chunk(w->source, chunk));
}

static cm_status
move_to(const world *w, cm_chunk *chunk, uint64_t at)
{
    return w->source->ops->move_chunk(w->source, chunk, at * G);
}

/* True if the chunk lies at granule `at` and all of it can be written and read. */
static bool
is_usable(const world *w, const cm_chunk *chunk, uint64_t at)
{
    static unsigned char value;
    value++;
    if (chunk->address != w->source->base + at * G || chunk->host != NULL) {
        return false;
    }
    if (!cm_is_ok(cm_rt_fill_8_async(w->rt, chunk->address, value, chunk->nbytes, 0))
        || !cm_is_ok(cm_rt_stream_synchronize(w->rt, 0))) {
        return false;
    }
    const unsigned char *alias =
        cm_runtime_host_alias(w->rt, chunk->address, chunk->nbytes);
    return alias != NULL && alias[0] == value && alias[chunk->nbytes - 1] == value;
}

/* True if nothing is mapped at granule `at`. */
static bool
is_empty(const world *w, uint64_t at)
{
    return cm_runtime_host_alias(w->rt, w->source->base + at * G, 1) == NULL;
}

static cm_emulated_counts
counts_of(const world *w)
{
    cm_emulated_counts counts;
    cm_emulated_read_counts(w->rt, &counts);
    return counts;
}

/* The source reserves eight times as many addresses as the device has memory, and takes
 * no memory yet. */
static void
test_source_says_what_it_is(void)
{
    world w = begin(2);
    CHECK(w.source->is_placed);
    CHECK_EQ(w.source->granule, G);
    CHECK_EQ(w.source->base % G, 0);
    CHECK_EQ(w.source->range_nbytes, 8 * BUDGET * G);
    CHECK_EQ(w.source->config.kind, CM_KIND_DEVICE);
    CHECK_PTR_EQ(w.source->rt, w.rt);
    CHECK_EQ(counts_of(&w).address_ranges, 1);
    CHECK_EQ(counts_of(&w).live_nbytes, 0);
    end(&w);
}

/* A plain pool, a pool of another kind and a device with less than a granule of memory
 * get no such source. */
static void
test_source_is_for_device_memory_that_can_be_mapped(void)
{
    cm_runtime *rt = open_emulated(13000, 1, BUDGET * G);
    cm_pool_config config = device_config;
    cm_source *source = NULL;
    config.segments = CM_SEGMENTS_PLAIN;
    CHECK_CODE(cm_source_vmm_open(rt, &config, &source), CM_ENOTSUP);
    config.segments = CM_SEGMENTS_AUTO;
    config.kind = CM_KIND_PINNED;
    CHECK_CODE(cm_source_vmm_open(rt, &config, &source), CM_ENOTSUP);
    CHECK_PTR_EQ(source, NULL);
    close_emulated(rt);
    rt = open_emulated(13000, 1, MIB); /* the device has less than a granule */
    CHECK_CODE(cm_source_vmm_open(rt, &device_config, &source), CM_ENOTSUP);
    CHECK_PTR_EQ(source, NULL);
    close_emulated(rt);
}

/* Whichever call of opening the source fails, its failure is reported and nothing is
 * left. */
static void
test_source_open_fails_whole(void)
{
    static const cm_op ops[] = {CM_OP_device_attribute, CM_OP_physical_granularity,
                                CM_OP_peer_can_access, CM_OP_memory_info,
                                CM_OP_address_reserve};
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        cm_runtime *rt = open_emulated(13000, 2, BUDGET * G);
        cm_source *source = NULL;
        cm_faults_plan(rt, ops[i], 1, 999, true);
        cm_status status = cm_source_vmm_open(rt, &device_config, &source);
        CHECK_CODE(status, 999);
        CHECK_EQ(status.op, ops[i]);
        CHECK_PTR_EQ(source, NULL);
        close_emulated(rt);
    }
}

/* If the driver has no range that long, the source must try shorter ones, and give up
 * at last. */
static void
test_source_takes_fewer_addresses_where_it_must(void)
{
    cm_runtime *rt = open_emulated(13000, 1, BUDGET * G);
    cm_source *source = NULL;
    cm_faults_plan(rt, CM_OP_address_reserve, 1, CM_CUDA_OUT_OF_MEMORY, false);
    CHECK_OK(cm_source_vmm_open(rt, &device_config, &source));
    CHECK_EQ(cm_faults_count(rt, CM_OP_address_reserve), 2);
    CHECK_EQ(source->range_nbytes, 4 * BUDGET * G);
    source->ops->destroy(source);
    cm_faults_plan(rt, CM_OP_address_reserve, 1, CM_CUDA_OUT_OF_MEMORY, true);
    CHECK_CODE(cm_source_vmm_open(rt, &device_config, &source), CM_CUDA_OUT_OF_MEMORY);
    CHECK_EQ(cm_faults_count(rt, CM_OP_address_reserve), 4);
    close_emulated(rt);
}

/* Chunks beside each other act as one piece of memory. A chunk that is too large for
 * the device is refused, and closing one leaves the other. */
static void
test_chunks_open_join_and_close(void)
{
    world w = begin(1);
    cm_chunk a, b, c;
    CHECK_OK(open_at(&w, 3, 2, &a));
    CHECK_OK(open_at(&w, 5, 1, &b));
    CHECK(is_usable(&w, &a, 3));
    CHECK(is_usable(&w, &b, 5));
    CHECK_EQ(a.nbytes, 2 * G);
    /* This fills both chunks at once, which form one run. */
    CHECK_OK(cm_rt_fill_8_async(w.rt, a.address, 9, 3 * G, 0));
    CHECK_EQ(counts_of(&w).live_nbytes, 3 * G);
    cm_status status = open_at(&w, 8, BUDGET, &c);
    CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
    CHECK_EQ(status.op, CM_OP_physical_create);
    CHECK_EQ(status.arg, BUDGET * G);
    CHECK_OK(cm_rt_stream_synchronize(w.rt, 0));
    close_it(&w, &a);
    CHECK(is_empty(&w, 3));
    CHECK(is_usable(&w, &b, 5));
    CHECK_EQ(counts_of(&w).live_nbytes, G);
    close_it(&w, &b);
    CHECK_OK(open_at(&w, 8 * BUDGET - 1, 1, &c)); /* the last granule of the range */
    close_it(&w, &c);
    end(&w);
}

/* A moved chunk is usable at its new place, and its old place is empty. */
static void
test_chunk_moves_to_where_it_is_needed(void)
{
    world w = begin(1);
    cm_chunk chunk;
    CHECK_OK(open_at(&w, 0, 2, &chunk));
    CHECK_OK(move_to(&w, &chunk, 6));
    CHECK(is_usable(&w, &chunk, 6));
    CHECK(is_empty(&w, 0));
    CHECK(is_empty(&w, 1));
    CHECK_EQ(counts_of(&w).live_nbytes, 2 * G); /* the memory is not counted twice */
    CHECK_EQ(counts_of(&w).mappings, 1);
    CHECK_OK(move_to(&w, &chunk, 0));
    CHECK(is_usable(&w, &chunk, 0));
    close_it(&w, &chunk);
    end(&w);
}

/* If a call of opening a chunk fails, nothing stays behind and the place can be used
 * again. */
static void
test_open_chunk_leaves_nothing_behind(void)
{
    static const cm_op ops[] = {CM_OP_physical_create, CM_OP_address_map,
                                CM_OP_address_set_access};
    world w = begin(1);
    cm_chunk chunk = {.handle = 7};
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        plan(&w, ops[i], true);
        cm_status status = open_at(&w, 0, 1, &chunk);
        CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
        CHECK_EQ(status.op, ops[i]);
        CHECK_EQ(chunk.handle, 7);
        CHECK_EQ(counts_of(&w).physical_allocs, 0);
        CHECK_EQ(counts_of(&w).mappings, 0);
        cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
        cm_chunk after;
        CHECK_OK(open_at(&w, 0, 1, &after)); /* the place is free again */
        close_it(&w, &after);
    }
    end(&w);
}

/* A runtime in which every other call that gives memory back fails. */
static const cm_ops_table *inner_ops;
static int flaky_calls;

static cm_status
flaky_unmap(cm_runtime *rt, cm_address address, uint64_t nbytes)
{
    if (flaky_calls++ % 2 == 0) {
        return (cm_status){998, CM_OP_address_unmap, 0, address};
    }
    return inner_ops->address_unmap(rt, address, nbytes);
}

static cm_status
flaky_release(cm_runtime *rt, uint64_t handle)
{
    if (flaky_calls++ % 2 == 0) {
        return (cm_status){998, CM_OP_physical_release, 0, handle};
    }
    return inner_ops->physical_release(rt, handle);
}

/* Opening a chunk fails, and undoing it fails at first too. The undoing must be tried a
 * second time, and the first failure must be reported. */
static void
test_open_chunk_undoes_it_at_the_second_try(void)
{
    world w = begin(1);
    cm_chunk chunk;
    inner_ops = w.rt->ops;
    cm_ops_table flaky = *inner_ops;
    flaky.address_unmap = flaky_unmap;
    flaky.physical_release = flaky_release;
    w.rt->ops = &flaky;
    plan(&w, CM_OP_address_set_access, false);
    cm_status status = open_at(&w, 0, 1, &chunk);
    w.rt->ops = inner_ops;
    /* This is the first failure, and not one of undoing it. */
    CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
    CHECK_EQ(status.op, CM_OP_address_set_access);
    CHECK_EQ(flaky_calls, 4);
    CHECK_EQ(counts_of(&w).mappings, 0);
    CHECK_EQ(counts_of(&w).physical_allocs, 0);
    end(&w);
}

/* If a call of closing fails, the chunk must stay usable, and closing it later must
 * succeed. A chunk that is half closed cannot be moved. */
static void
test_close_chunk_that_failed_leaves_it_usable(void)
{
    static const cm_op ops[] = {CM_OP_physical_release, CM_OP_address_unmap};
    world w = begin(1);
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        cm_chunk chunk;
        CHECK_OK(open_at(&w, 2, 1, &chunk));
        plan(&w, ops[i], true);
        for (int again = 0; again < 2; again++) {
            cm_status status = w.source->ops->close_chunk(w.source, &chunk);
            CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
            CHECK_EQ(status.op, ops[i]);
            CHECK(is_usable(&w, &chunk, 2));
            CHECK_EQ(counts_of(&w).live_nbytes, G);
        }
        if (ops[i] == CM_OP_address_unmap) {
            CHECK_CODE(move_to(&w, &chunk, 5), CM_EBUSY); /* it is half closed by now */
            CHECK(is_usable(&w, &chunk, 2));
        }
        cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
        close_it(&w, &chunk);
        CHECK_EQ(counts_of(&w).live_nbytes, 0);
        CHECK_EQ(counts_of(&w).mappings, 0);
    }
    end(&w);
}

/* At the end of a process the driver may be gone. Its memory is gone with it, so
 * closing must succeed. */
static void
test_close_chunk_when_the_driver_is_gone(void)
{
    world w = begin(1);
    cm_chunk chunk;
    CHECK_OK(open_at(&w, 0, 1, &chunk));
    cm_chunk copy = chunk;
    cm_faults_plan(w.rt, CM_OP_none, 1, CM_CUDA_UNLOADING, true);
    CHECK_OK(w.source->ops->close_chunk(w.source, &chunk));
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    close_it(&w, &copy);
    end(&w);
}

/* If a call of moving fails, the chunk must be usable at its old place, and the next
 * move must succeed. */
static void
test_move_chunk_that_failed_leaves_it_where_it_was(void)
{
    static const cm_op ops[] = {CM_OP_address_map, CM_OP_address_set_access,
                                CM_OP_address_unmap};
    world w = begin(1);
    cm_chunk chunk;
    CHECK_OK(open_at(&w, 1, 2, &chunk));
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        plan(&w, ops[i], false);
        cm_status status = move_to(&w, &chunk, 4);
        CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
        CHECK_EQ(status.op, ops[i]);
        CHECK(is_usable(&w, &chunk, 1));
        CHECK(is_empty(&w, 4));
        CHECK_EQ(counts_of(&w).mappings, 1);
        CHECK_OK(move_to(&w, &chunk, 4));
        CHECK_OK(move_to(&w, &chunk, 1));
    }
    close_it(&w, &chunk);
    end(&w);
}

/* If moving fails and the chunk cannot be put back either, the chunk must be closed and
 * nothing of it left. */
static void
test_move_chunk_that_cannot_be_put_back_closes_it(void)
{
    static const cm_op ops[] = {CM_OP_address_map, CM_OP_address_set_access};
    world w = begin(1);
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        cm_chunk chunk;
        CHECK_OK(open_at(&w, 1, 2, &chunk));
        plan(&w, ops[i], true);
        cm_status status = move_to(&w, &chunk, 4);
        cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
        CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
        CHECK_EQ(status.op, ops[i]);
        CHECK_EQ(chunk.address, 0);
        CHECK(is_empty(&w, 1));
        CHECK(is_empty(&w, 4));
        CHECK_EQ(counts_of(&w).mappings, 0);
        CHECK_EQ(counts_of(&w).physical_allocs, 0);
    }
    end(&w);
}

/* Memory that was mapped at two places at once cannot be opened to devices that get a
 * context later (driver 580), so the emulated device refuses a second mapping. A move
 * must avoid that, and a device that comes later must reach a chunk that was moved. */
static void
test_peer_that_comes_later_reaches_what_was_moved(void)
{
    world w = begin(2);
    cm_chunk chunk;
    cm_scope peer;
    CHECK_OK(open_at(&w, 1, 2, &chunk));
    CHECK_OK(move_to(&w, &chunk, 4));
    CHECK_OK(cm_scope_enter(w.rt, 1, CM_CAPTURE_RELAXED, &peer));
    CHECK_OK(w.source->ops->admit_peers(w.source, &chunk));
    CHECK_OK(cm_rt_fill_8_async(w.rt, chunk.address, 1, 8, 0));
    CHECK_OK(cm_rt_device_synchronize(w.rt));
    cm_scope_leave(&peer);
    close_it(&w, &chunk);
    end(&w);
}

/* A chunk is opened to the other devices that have a context when it is made or moved.
 * No context is made for a device that has none. */
static void
test_peers_in_use_reach_the_memory(void)
{
    world w = begin(3);
    cm_chunk before, after;
    cm_scope peer;
    CHECK_OK(open_at(&w, 0, 1, &before));
    CHECK_OK(cm_scope_enter(w.rt, 2, CM_CAPTURE_RELAXED, &peer));
    CHECK_OK(open_at(&w, 1, 1, &after));
    CHECK_CODE(cm_rt_fill_8_async(w.rt, before.address, 1, 8, 0),
               CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_fill_8_async(w.rt, after.address, 1, 8, 0));
    CHECK_OK(move_to(&w, &before, 2));
    CHECK_OK(cm_rt_fill_8_async(w.rt, before.address, 1, 8, 0));
    CHECK_OK(cm_rt_device_synchronize(w.rt));
    cm_scope_leave(&peer);
    CHECK_EQ(atomic_load(&w.rt->primary[1]), 0);
    CHECK_OK(cm_rt_device_set(w.rt, 1));
    CHECK_CODE(cm_rt_fill_8_async(w.rt, after.address, 1, 8, 0), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_device_set(w.rt, 0));
    close_it(&w, &before);
    close_it(&w, &after);
    end(&w);
}

/* If giving the addresses back fails once, it must be tried again. */
static void
test_destroy_gives_the_addresses_back_at_the_second_try(void)
{
    world w = begin(1);
    plan(&w, CM_OP_address_free, false);
    end(&w);
}

/* clang-format off */
MAIN(RUN(test_source_says_what_it_is)
     RUN(test_source_is_for_device_memory_that_can_be_mapped)
     RUN(test_source_open_fails_whole)
     RUN(test_source_takes_fewer_addresses_where_it_must)
     RUN(test_chunks_open_join_and_close)
     RUN(test_chunk_moves_to_where_it_is_needed)
     RUN(test_open_chunk_leaves_nothing_behind)
     RUN(test_open_chunk_undoes_it_at_the_second_try)
     RUN(test_close_chunk_that_failed_leaves_it_usable)
     RUN(test_close_chunk_when_the_driver_is_gone)
     RUN(test_move_chunk_that_failed_leaves_it_where_it_was)
     RUN(test_move_chunk_that_cannot_be_put_back_closes_it)
     RUN(test_peer_that_comes_later_reaches_what_was_moved)
     RUN(test_peers_in_use_reach_the_memory)
     RUN(test_destroy_gives_the_addresses_back_at_the_second_try))
/* clang-format on */
