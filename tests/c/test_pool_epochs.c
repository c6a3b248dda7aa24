/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of device memory that a stream has used and freed. Its own stream may have it
 * again at once. Any other stream may have it only after the pool has seen, by an event
 * or a query of the stream, that the work has ended. A gate holds back the work of a
 * stream until the test opens it. A fence stands for everything that a device is doing.
 */
#include "pool_world.h"

/* A block is freed while work of its stream is held behind a gate. The same stream must
 * get it back by a hit, and nobody else may get it. A block that also needs a fence, or
 * that two streams used, goes to nobody before all that work has ended. */
static void
test_pool_device_block_is_reused_at_once_on_its_own_stream(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = open_stream(rt, 0);
    cm_stream *other = open_stream(rt, 0);
    cm_block *a = take(pool, CHUNK, stream);
    cm_address first = a->address;
    hold_work(rt, stream, a);
    give(pool, a, stream, 0);
    cm_block *b = take(pool, CHUNK, other); /* another stream must not get it */
    CHECK_NE(b->address, first);
    hold_work(rt, other, b);
    cm_block *c = take(pool, CHUNK, NULL); /* nor may NULL, which stands for any stream
                                            */
    CHECK_NE(c->address, first);
    a = take(pool, CHUNK, stream);
    CHECK_EQ(a->address, first);
    CHECK_EQ(read_counters(pool).hit_count, 1);
    /* With a fence the block is no longer in the order of that stream alone. */
    give(pool, a, stream, CM_POOL_FREE_FENCE);
    cm_stream *both[2] = {stream, other};
    cm_pool_free(pool, b, both, 2, 0);
    a = take(pool, CHUNK, stream);
    CHECK_NE(a->address, first);
    CHECK_EQ(read_counters(pool).hit_count, 1);
    give(pool, a, NULL, 0);
    give(pool, c, NULL, 0);
    CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
    CHECK_OK(cm_emulated_gate_open(rt, other->handle));
    cm_pool_release(pool);
    cm_stream_release(stream);
    cm_stream_release(other);
    close_emulated(rt);
}

/* Count the calls so far that create, record or query an event. */
static uint64_t
event_calls(const cm_runtime *rt)
{
    return cm_faults_count(rt, CM_OP_event_create)
           + cm_faults_count(rt, CM_OP_event_record)
           + cm_faults_count(rt, CM_OP_event_query)
           + cm_faults_count(rt, CM_OP_context_record_event);
}

/* Twenty blocks go round on one stream, for which the pool must need no event. When
 * another stream asks for memory, one event must stand for all twenty. */
static void
test_pool_stream_order_needs_no_event_and_then_one_for_all(void)
{
    enum { COUNT = 20 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = open_stream(rt, 0);
    cm_stream *other = open_stream(rt, 0);
    cm_block *blocks[COUNT];
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = take(pool, CHUNK, stream);
    }
    uint64_t reserved_nbytes = read_counters(pool).reserved_nbytes;
    hold_work(rt, stream, blocks[0]);
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    uint64_t hit_count = read_counters(pool).hit_count;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < COUNT; i++) {
            give(pool, blocks[i], stream, 0);
        }
        CHECK_EQ(read_counters(pool).in_flight_count, 0);
        for (int i = 0; i < COUNT; i++) {
            blocks[i] = take(pool, CHUNK, stream);
        }
    }
    CHECK_EQ(event_calls(rt), 0);
    CHECK_EQ(read_counters(pool).hit_count - hit_count, 3 * COUNT);
    for (int i = 0; i < COUNT; i++) {
        give(pool, blocks[i], stream, 0);
    }
    /* This makes the pool ask about the stream, and grow. */
    cm_block *b = take(pool, CHUNK, other);
    CHECK_EQ(cm_faults_count(rt, CM_OP_event_record), 1);
    CHECK_GT(read_counters(pool).reserved_nbytes, reserved_nbytes);
    cm_block *c = take(pool, CHUNK, NULL);
    /* The event has not happened yet, so the pool neither records a second one nor uses
     * the memory. */
    CHECK_EQ(cm_faults_count(rt, CM_OP_event_record), 1);
    CHECK_EQ(cm_faults_count(rt, CM_OP_stream_wait_event), 0);
    reserved_nbytes = read_counters(pool).reserved_nbytes;
    CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
    synchronize(rt, stream);
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = take(pool, CHUNK, i % 2 == 0 ? other : NULL);
    }
    CHECK_EQ(cm_faults_count(rt, CM_OP_event_record), 1);
    CHECK_EQ(read_counters(pool).reserved_nbytes, reserved_nbytes);
    CHECK_EQ(read_counters(pool).cross_stream_wait_count, 0);
    for (int i = 0; i < COUNT; i++) {
        give(pool, blocks[i], NULL, 0);
    }
    give(pool, b, NULL, 0);
    give(pool, c, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(stream);
    cm_stream_release(other);
    close_emulated(rt);
}

/* An event that has happened must say nothing about a block that was given back after
 * it was recorded. */
static void
test_pool_event_covers_only_what_was_given_before_it(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = open_stream(rt, 0);
    cm_stream *gate = open_stream(rt, 0);
    cm_block *a = take(pool, CHUNK, stream);
    cm_block *b = take(pool, CHUNK, stream);
    cm_address second = b->address;
    give(pool, a, stream, 0);
    /* An event is recorded for the first block. */
    cm_block *c = take(pool, CHUNK, gate);
    synchronize(rt, stream);
    hold_work(rt, stream, b);
    give(pool, b, stream, 0);
    /* The event is reached, but says nothing about the second block. */
    cm_block *d[3];
    for (int i = 0; i < 3; i++) {
        d[i] = take(pool, CHUNK, gate);
        CHECK_NE(d[i]->address, second);
    }
    CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
    for (int i = 0; i < 3; i++) {
        give(pool, d[i], NULL, 0);
    }
    give(pool, c, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(stream);
    cm_stream_release(gate);
    close_emulated(rt);
}

/* A stream gets a block back while its earlier work on it is still held up, and gives
 * it back unused or after use by another stream. The block must stay closed to everyone
 * else until the first stream's work has ended. */
static void
test_pool_block_given_back_unused_is_as_late_as_before(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = open_stream(rt, 0);
    cm_stream *other = open_stream(rt, 0);
    cm_block *a = take(pool, CHUNK, stream);
    cm_address first = a->address;
    hold_work(rt, stream, a);
    give(pool, a, stream, 0);
    for (int used_by_other = 0; used_by_other < 2; used_by_other++) {
        a = take(pool, CHUNK, stream);
        CHECK_EQ(a->address, first);
        give(pool, a, used_by_other ? other : NULL, 0);
        synchronize(rt, other);
        uint64_t released = 0;
        /* The trim must not forget that `stream` is late. */
        CHECK_OK(pool_trim(pool, 0, false, &released));
        CHECK_EQ(released, 0);
        CHECK(cm_pool_try_alloc(pool, CHUNK, other, 0) == NULL);
        CHECK(cm_pool_try_alloc(pool, CHUNK, NULL, 0) == NULL);
    }
    CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
    synchronize(rt, stream);
    a = take(pool, CHUNK, other);
    CHECK_EQ(a->address, first);
    give(pool, a, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(stream);
    cm_stream_release(other);
    close_emulated(rt);
}

/* One stream is late with the first of 32 neighbours, and nothing runs on the other
 * blocks. Another stream must be able to get all but two of them without a growth. */
static void
test_pool_late_stream_strands_no_clean_memory(void)
{
    enum { COUNT = 32 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *late = open_stream(rt, 0);
    cm_stream *other = open_stream(rt, 0);
    cm_block *blocks[COUNT];
    /* Now the pool has seen two streams. */
    give(pool, take(pool, CHUNK, other), other, 0);
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = take(pool, CHUNK, NULL);
    }
    uint64_t reserved_nbytes = read_counters(pool).reserved_nbytes;
    hold_work(rt, late, blocks[0]);
    give(pool, blocks[0], late, 0);
    for (int i = 1; i < COUNT; i++) {
        give(pool, blocks[i], NULL, 0);
    }
    for (int i = 2; i < COUNT; i++) {
        blocks[i] = take(pool, CHUNK, other);
    }
    CHECK_EQ(read_counters(pool).reserved_nbytes, reserved_nbytes);
    for (int i = 2; i < COUNT; i++) {
        give(pool, blocks[i], other, 0);
    }
    CHECK_OK(cm_emulated_gate_open(rt, late->handle));
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 0, true, &released));
    CHECK_EQ(released, reserved_nbytes);
    cm_pool_release(pool);
    cm_stream_release(late);
    cm_stream_release(other);
    close_emulated(rt);
}

/* Two neighbours were freed on two streams that are both idle, and there is more free
 * memory elsewhere. A short request must be served without a question. A long one that
 * needs both neighbours must make the pool ask the streams, and find them idle. */
static void
test_pool_long_block_asks_for_idle_memory_of_other_streams(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *own = open_stream(rt, 0);
    cm_stream *other = open_stream(rt, 0);
    cm_block *a = take(pool, CHUNK, own);
    cm_block *b = take(pool, CHUNK, other);
    cm_block *wall = take(pool, CHUNK, own);
    cm_block *more = take(pool, 4 * CHUNK, own);
    cm_address first = a->address;
    CHECK_EQ(b->address, first + CHUNK);
    give(pool, more, own, 0);
    give(pool, a, own, 0);
    give(pool, b, other, 0);
    uint64_t asked = cm_faults_count(rt, CM_OP_stream_query);
    cm_block *small = take(pool, 128 * KIB, own);
    CHECK_EQ(cm_faults_count(rt, CM_OP_stream_query), asked);
    CHECK_EQ(small->address, first);
    give(pool, small, own, 0);
    cm_block *large = take(pool, 2 * CHUNK, own);
    CHECK_EQ(large->address, first);
    CHECK_GT(cm_faults_count(rt, CM_OP_stream_query), asked);
    asked = cm_faults_count(rt, CM_OP_stream_query);
    /* The pool was given nothing since then, so it need not ask. */
    more = take(pool, 4 * CHUNK, own);
    CHECK_EQ(cm_faults_count(rt, CM_OP_stream_query), asked);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 7 * CHUNK);
    give(pool, more, NULL, 0);
    give(pool, large, NULL, 0);
    give(pool, wall, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(own);
    cm_stream_release(other);
    close_emulated(rt);
}

/* Seventy streams each work on one block. Once all but one have ended, a trim must give
 * back everything except the chunk of the last one, and after a full trim the pool must
 * keep no stream alive. */
static void
test_pool_streams_beyond_the_marks_are_waited_for(void)
{
    enum { COUNT = 70 };
    cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *streams[COUNT];
    for (int i = 0; i < COUNT; i++) {
        streams[i] = open_stream(rt, 0);
        cm_block *block = take(pool, CHUNK, streams[i]);
        hold_work(rt, streams[i], block);
        give(pool, block, streams[i], 0);
    }
    CHECK_GT(read_counters(pool).in_flight_count, 0);
    for (int i = 0; i < COUNT - 1; i++) {
        CHECK_OK(cm_emulated_gate_open(rt, streams[i]->handle));
        synchronize(rt, streams[i]);
    }
    uint64_t reserved_nbytes = read_counters(pool).reserved_nbytes;
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 0, false, &released));
    /* Only the chunk of the block whose stream still works is left. */
    cm_pool_counters left = read_counters(pool);
    CHECK_GE(left.reserved_nbytes, CHUNK);
    CHECK_EQ(left.reserved_nbytes, reserved_nbytes - released);
    CHECK_LT(left.reserved_nbytes, 4 * CHUNK);
    CHECK_OK(cm_emulated_gate_open(rt, streams[COUNT - 1]->handle));
    CHECK_OK(pool_trim(pool, 0, true, &released));
    CHECK_EQ(released, left.reserved_nbytes);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 0);
    for (int i = 0; i < COUNT; i++) {
        cm_stream_release(streams[i]);
    }
    cm_emulated_counts counts;
    cm_emulated_read_counts(rt, &counts);
    CHECK_EQ(counts.streams, 0); /* after a trim the pool keeps no stream alive */
    cm_pool_release(pool);
    close_emulated(rt);
}

/* The default streams of two devices may have the same handle, but they are two
 * streams. A block that one of them is late with must not go to the other. */
static void
test_pool_same_stream_needs_the_same_device(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *legacy[2] = {NULL, NULL};
    for (int d = 0; d < 2; d++) {
        MUST(cm_stream_wrap(rt, d, d == 0 ? 0 : CM_STREAM_LEGACY, NULL, NULL,
                            &legacy[d]));
    }
    cm_block *a = take(pool, CHUNK, legacy[0]);
    cm_address first = a->address;
    hold_work(rt, legacy[0], a);
    give(pool, a, legacy[0], 0);
    cm_block *b = take(pool, CHUNK, legacy[1]);
    CHECK_NE(b->address, first);
    CHECK_OK(cm_emulated_gate_open(rt, 0));
    give(pool, b, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(legacy[0]);
    cm_stream_release(legacy[1]);
    close_emulated(rt);
}

/* When nobody but the pool holds a stream any more, the pool must release it as soon as
 * it sees that the stream's work has ended. */
static void
test_pool_stream_that_only_the_pool_keeps_is_let_go(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 64 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_emulated_counts before;
    cm_emulated_read_counts(rt, &before);
    cm_stream *stream = open_stream(rt, 0);
    give(pool, take(pool, 1000, stream), stream, 0);
    synchronize(rt, stream);
    cm_stream_release(stream);
    /* These are two misses, in which the pool asks what has ended. */
    give(pool, take(pool, 3 * MIB, NULL), NULL, 0);
    give(pool, take(pool, 9 * MIB, NULL), NULL, 0);
    cm_emulated_counts after;
    cm_emulated_read_counts(rt, &after);
    CHECK_EQ(after.streams, before.streams);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* A drop_owner that does nothing, so the test may use any address as the owner. */
static void
let_go(void *owner)
{
    (void)owner;
}

/* A block is handed to a stream of another library, which has to wait for the first
 * stream. It comes back unused, so no event of the second stream stands for that wait.
 * The pool must give the block to others only when both streams are done. */
static void
test_pool_block_ordered_for_a_foreign_stream_comes_back(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *first = open_stream(rt, 0);
    cm_stream *made = open_stream(rt, 0);
    cm_stream *foreign = NULL;
    cm_block *block = take(pool, CHUNK, first);
    MUST(cm_stream_wrap(rt, 0, made->handle, &foreign, let_go, &foreign));
    atomic_store(&cm_pool_get_config(pool)->budget->limit_nbytes, CHUNK);
    hold_work(rt, first, block);
    give(pool, block, first, 0);
    block = take(pool, CHUNK, foreign); /* the pool makes `foreign` wait for `first` */
    CHECK_EQ(read_counters(pool).cross_stream_wait_count, 1);
    give(pool, block, NULL, 0);
    CHECK(cm_pool_try_alloc(pool, CHUNK, NULL, 0) == NULL);
    CHECK_OK(cm_emulated_gate_open(rt, first->handle));
    synchronize(rt, foreign);
    CHECK_OK(pool_alloc(pool, CHUNK, NULL, &block));
    give(pool, block, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(foreign);
    cm_stream_release(made);
    cm_stream_release(first);
    close_emulated(rt);
}

/* The event that should stand for a block's work cannot be recorded. A trim that waits
 * must nevertheless find out that the work has ended, and give back both blocks. */
static void
test_pool_block_of_a_foreign_stream_outlives_a_failed_record(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *made = open_stream(rt, 0);
    cm_stream *foreign = NULL;
    uint64_t released = 0;
    MUST(cm_stream_wrap(rt, 0, made->handle, &foreign, let_go, &foreign));
    cm_block *one = take(pool, CHUNK, foreign);
    cm_block *two = take(pool, CHUNK, foreign);
    hold_work(rt, foreign, one);
    give(pool, one, foreign, 0);
    cm_faults_plan(rt, CM_OP_event_record, 1, 999, false);
    give(pool, two, foreign, 0);
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_event_record);
    CHECK_OK(cm_emulated_gate_open(rt, made->handle));
    CHECK_OK(pool_trim(pool, 0, true, &released));
    CHECK_EQ(read_counters(pool).reserved_nbytes, 0);
    cm_pool_release(pool);
    cm_stream_release(foreign);
    cm_stream_release(made);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_pool_stream_that_only_the_pool_keeps_is_let_go)
     RUN(test_pool_block_ordered_for_a_foreign_stream_comes_back)
     RUN(test_pool_block_of_a_foreign_stream_outlives_a_failed_record)
     RUN(test_pool_device_block_is_reused_at_once_on_its_own_stream)
     RUN(test_pool_stream_order_needs_no_event_and_then_one_for_all)
     RUN(test_pool_event_covers_only_what_was_given_before_it)
     RUN(test_pool_block_given_back_unused_is_as_late_as_before)
     RUN(test_pool_late_stream_strands_no_clean_memory)
     RUN(test_pool_long_block_asks_for_idle_memory_of_other_streams)
     RUN(test_pool_streams_beyond_the_marks_are_waited_for)
     RUN(test_pool_same_stream_needs_the_same_device))
/* clang-format on */
