/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of when a pool may hand out a block again after streams have worked on it.
 *
 * A gate shuts a stream, so that a test can look before and after the stream's work. A
 * *fence* is an event that comes after everything that a device is doing. The pool
 * waits for a fence if it does not know which streams used a block. A *miss* is an
 * allocation for which the pool has no free block, so that it looks whether any work
 * has ended. */
#include <stdlib.h>

#include "pool_world.h"
#include "wait.h"

/* Page-locked memory is not handed out again before the work on it has ended, not even
 * for the same stream, because the host might write to it at once. */
static void
test_pool_block_in_flight_waits_for_its_stream(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stream = open_stream(rt, 0);
    CHECK_OK(cm_emulated_gate_close(rt, stream->handle));
    cm_block *a = take(pool, CHUNK, stream);
    void *first = a->host;
    cm_stream *uses[3] = {stream, stream, stream};
    cm_pool_free(pool, a, uses, 3, 0);
    /* The stream is named three times, and one event is enough. */
    CHECK_EQ(cm_faults_count(rt, CM_OP_event_record), 1);
    CHECK_EQ(read_counters(pool).in_flight_nbytes, CHUNK);
    /* The gate is still shut, so the pool must hand out another block. */
    cm_block *b = take(pool, CHUNK, stream);
    CHECK(b->host != first);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
    synchronize(rt, stream);
    cm_block *c = take(pool, CHUNK, NULL);
    CHECK_PTR_EQ(c->host, first);
    CHECK_EQ(read_counters(pool).in_flight_count, 0);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 2 * CHUNK);
    give(pool, b, NULL, 0);
    give(pool, c, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* Two blocks wait for a stream of another device that is shut. A third one, freed
 * between them on a stream that has ended, must be handed out again. */
static void
test_pool_unfinished_block_holds_up_no_other(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    /* Streams of all devices may use page-locked memory of a pool. */
    cm_stream *shut = open_stream(rt, 1);
    cm_stream *free_one = open_stream(rt, 0);
    CHECK_OK(cm_emulated_gate_close(rt, shut->handle));
    cm_block *a = take(pool, CHUNK, NULL);
    cm_block *b = take(pool, CHUNK, NULL);
    cm_block *c = take(pool, CHUNK, NULL);
    void *second = b->host;
    cm_stream *both[2] = {free_one, shut};
    cm_pool_free(pool, a, both, 2, 0);
    give(pool, b, free_one, 0);
    give(pool, c, shut, 0);
    synchronize(rt, free_one);
    b = take(pool, CHUNK, NULL);
    CHECK_PTR_EQ(b->host, second);
    CHECK_EQ(read_counters(pool).in_flight_count, 2);
    CHECK_OK(cm_emulated_gate_open(rt, shut->handle));
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 0, true, &released));
    CHECK_EQ(released, 2 * CHUNK);
    give(pool, b, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(shut);
    cm_stream_release(free_one);
    close_emulated(rt);
}

/* How many blocks some tests free. A miss does not query an event for each of so many.
 */
enum { MANY = 600 };

/* Allocate MANY blocks of 16 KiB. */
static void
take_many(cm_pool *pool, cm_block *blocks[MANY])
{
    for (int i = 0; i < MANY; i++) {
        MUST(pool_alloc(pool, 16 * KIB, NULL, &blocks[i]));
    }
}

/* Two streams have ended their work on many small blocks. A single miss must see that,
 * and allocate one block from the memory of all of them. */
static void
test_pool_one_miss_sees_all_that_has_ended(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *both[2] = {open_stream(rt, 0), open_stream(rt, 0)};
    cm_block *blocks[MANY];
    take_many(pool, blocks);
    for (int i = 0; i < MANY; i++) {
        cm_pool_free(pool, blocks[i], both, 2, 0);
    }
    synchronize(rt, both[0]);
    synchronize(rt, both[1]);
    cm_pool_counters before = read_counters(pool);
    CHECK_EQ(before.in_flight_count, MANY);
    cm_block *all = take(pool, MANY * 16 * KIB, NULL);
    CHECK_EQ(read_counters(pool).in_flight_count, 0);
    CHECK_EQ(read_counters(pool).reserved_nbytes, before.reserved_nbytes);
    give(pool, all, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(both[0]);
    cm_stream_release(both[1]);
    close_emulated(rt);
}

/* Many blocks wait for a shut stream, and one block behind them was freed on a stream
 * that has ended. A miss must find that one with two queries, one for each stream. */
static void
test_pool_late_stream_is_asked_once_and_hides_no_other(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *shut = open_stream(rt, 0);
    cm_stream *prompt = open_stream(rt, 0);
    cm_block *blocks[MANY];
    CHECK_OK(cm_emulated_gate_close(rt, shut->handle));
    cm_block *large = take(pool, 4 * MIB, NULL);
    const void *first = large->host;
    take_many(pool, blocks);
    for (int i = 0; i < MANY; i++) {
        give(pool, blocks[i], shut, 0);
    }
    give(pool, large, prompt, 0);
    synchronize(rt, prompt);
    uint64_t asked = cm_faults_count(rt, CM_OP_event_query);
    large = take(pool, 4 * MIB, NULL);
    CHECK_PTR_EQ(large->host, first);
    CHECK_EQ(read_counters(pool).in_flight_count, MANY);
    CHECK_EQ(cm_faults_count(rt, CM_OP_event_query) - asked, 2);
    CHECK_OK(cm_emulated_gate_open(rt, shut->handle));
    give(pool, large, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(shut);
    cm_stream_release(prompt);
    close_emulated(rt);
}

/* So many blocks are in flight that a miss looks at only some of them. The first miss
 * does not find the one block whose work has ended, and the second one must find it. */
static void
test_pool_long_queue_is_looked_at_in_turns(void)
{
    enum { QUEUE = 5000 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *shut = open_stream(rt, 0);
    cm_stream *prompt = open_stream(rt, 0);
    CHECK_OK(cm_emulated_gate_close(rt, shut->handle));
    cm_block **blocks = calloc(QUEUE, sizeof(*blocks));
    cm_block *large = NULL;
    MUST(pool_alloc(pool, 4 * MIB, NULL, &large));
    const void *first = large->host;
    for (int i = 0; i < QUEUE; i++) {
        MUST(pool_alloc(pool, 64, NULL, &blocks[i]));
    }
    for (int i = 0; i < QUEUE; i++) {
        cm_pool_free(pool, blocks[i], &shut, 1, 0);
    }
    cm_pool_free(pool, large, &prompt, 1, 0);
    synchronize(rt, prompt);
    cm_block *other = take(pool, 4 * MIB, NULL);
    large = take(pool, 4 * MIB, NULL);
    CHECK(other->host != first);
    CHECK_PTR_EQ(large->host, first);
    CHECK_OK(cm_emulated_gate_open(rt, shut->handle));
    give(pool, large, NULL, 0);
    give(pool, other, NULL, 0);
    free(blocks);
    cm_pool_release(pool);
    cm_stream_release(shut);
    cm_stream_release(prompt);
    close_emulated(rt);
}

/* The handle of the per-thread default stream means a different stream on each thread.
 * So the pool must record no event on it, and the block must wait for a fence. */
static void
test_pool_per_thread_stream_is_fenced(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = NULL;
    MUST(cm_stream_wrap(rt, 0, CM_STREAM_PER_THREAD, NULL, NULL, &stream));
    give(pool, take(pool, 100, stream), stream, 0);
    CHECK_EQ(cm_faults_count(rt, CM_OP_event_record), 0);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* A stream that the pool does not know works on a block. The block is freed with a
 * fence, and must not be handed out before that stream's work has ended. The driver can
 * record a fence as an event, so nobody has to wait for the device. */
static void
test_pool_fence_waits_for_every_stream(void)
{
    cm_runtime *rt = open_emulated(12050, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stranger = open_stream(rt, 0);
    cm_block *a = take(pool, CHUNK, NULL);
    void *first = a->host;
    hold_work(rt, stranger, a);
    give(pool, a, NULL, CM_POOL_FREE_FENCE);
    cm_block *b = take(pool, CHUNK, NULL);
    CHECK(b->host != first);
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 1);
    CHECK_EQ(cm_faults_count(rt, CM_OP_device_synchronize), 0);
    CHECK_OK(cm_emulated_gate_open(rt, stranger->handle));
    synchronize_device(rt, 0);
    cm_block *c = take(pool, CHUNK, NULL);
    CHECK_PTR_EQ(c->host, first);
    CHECK_FILLED(c->host, 7, CHUNK);
    give(pool, b, NULL, 0);
    give(pool, c, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(stranger);
    close_emulated(rt);
}

/* The unknown work runs on the second device. The fence must cover both devices, so the
 * block must not be handed out when only the first one is idle. */
static void
test_pool_fence_covers_every_device_in_use(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stranger = open_stream(rt, 1);
    cm_block *a = take(pool, CHUNK, NULL);
    void *first = a->host;
    cm_block *blocks[3];
    hold_work(rt, stranger, a);
    give(pool, a, NULL, CM_POOL_FREE_FENCE);
    synchronize_device(rt, 0); /* device 1 still runs the work */
    for (int i = 0; i < 3; i++) {
        blocks[i] = take(pool, CHUNK, NULL);
        CHECK(blocks[i]->host != first);
    }
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 2);
    CHECK_OK(cm_emulated_gate_open(rt, stranger->handle));
    for (int i = 0; i < 3; i++) {
        give(pool, blocks[i], NULL, 0);
    }
    cm_pool_release(pool);
    cm_stream_release(stranger);
    close_emulated(rt);
}

/* Another library works on a device that our runtime has never entered. The fence must
 * cover that device too, but the runtime must not enter a device that nobody uses. */
static void
test_pool_fence_covers_contexts_of_others(void)
{
    cm_runtime *rt = open_emulated(13000, 3, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_block *a = take(pool, CHUNK, NULL);
    void *first = a->host;
    uint64_t before = 0;
    uint64_t theirs = 0;
    CHECK_OK(cm_rt_context_get(rt, &before));
    CHECK_OK(cm_rt_device_set(rt, 1));
    CHECK_OK(cm_rt_stream_create(rt, CM_STREAM_NON_BLOCKING, 0, &theirs));
    CHECK_OK(cm_emulated_gate_close(rt, theirs));
    CHECK_OK(cm_rt_fill_8_async(rt, a->address, 7, CHUNK, theirs));
    CHECK_OK(cm_rt_context_set(rt, before));
    CHECK(!cm_device_was_entered(rt, 1));
    give(pool, a, NULL, CM_POOL_FREE_FENCE);
    /* The pool asks which devices have a context when it records the fence, and not
     * when the block is freed. */
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_is_active), 0);
    cm_block *b = take(pool, CHUNK, NULL);
    CHECK(b->host != first);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 2);
    CHECK(!cm_device_was_entered(rt, 2)); /* nobody works on device 2 */
    CHECK_EQ(cm_devices_in_use(rt, true), 3);
    CHECK_OK(cm_emulated_gate_open(rt, theirs));
    synchronize_device(rt, 0); /* the fence's event on device 0 may be late too */
    synchronize_device(rt, 1);
    cm_block *c = take(pool, CHUNK, NULL);
    CHECK_PTR_EQ(c->host, first);
    CHECK_FILLED(c->host, 7, CHUNK);
    /* If the pool cannot find out whether a device is in use, it counts as in use. */
    cm_faults_plan(rt, CM_OP_context_is_active, 1, 999, false);
    give(pool, c, NULL, CM_POOL_FREE_FENCE);
    cm_block *d = take(pool, CHUNK, NULL);
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 3);
    give(pool, b, NULL, 0);
    give(pool, d, NULL, 0);
    CHECK_OK(cm_rt_stream_destroy(rt, theirs));
    cm_pool_release(pool);
    close_emulated(rt);
}

/* A stream that synchronizes with the legacy default stream is being captured. A fence
 * would wait for the captured work, and the driver would end the capture with an error.
 * So the pool must record no fence before the capture has ended. */
static void
test_pool_takes_no_fence_while_a_capture_runs(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stream = NULL;
    CHECK_OK(cm_stream_create(rt, 0, 0, 0, &stream));
    cm_block *a = take(pool, CHUNK, NULL);
    void *first = a->host;
    CHECK_OK(cm_emulated_set_capturing(rt, cm_stream_export_handle(stream), true));
    give(pool, a, NULL, CM_POOL_FREE_FENCE);
    cm_block *b = take(pool, CHUNK, NULL);
    CHECK(b->host != first);
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 0);
    CHECK_EQ(cm_faults_count(rt, CM_OP_device_synchronize), 0);
    CHECK_OK(cm_emulated_set_capturing(rt, cm_stream_export_handle(stream), false));
    cm_block *c = take(pool, CHUNK, NULL);
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 1);
    give(pool, b, NULL, 0);
    give(pool, c, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* An old driver cannot record a fence as an event. So blocks that need a fence must
 * stay in flight until something waits for the whole device, and the pool must wait for
 * it before too many blocks pile up. */
static void
test_pool_fence_on_an_old_driver_waits_for_the_device(void)
{
    cm_runtime *rt = open_emulated(12000, 2, 512 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_block *blocks[3];
    for (int i = 0; i < 3; i++) {
        blocks[i] = take(pool, CHUNK, NULL);
    }
    for (int i = 0; i < 3; i++) {
        give(pool, blocks[i], NULL, CM_POOL_FREE_FENCE);
    }
    cm_block *b = take(pool, CHUNK, NULL);
    CHECK_EQ(read_counters(pool).in_flight_count, 3);
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 0);
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 0, false, &released));
    CHECK_EQ(released, 0);
    CHECK_OK(pool_trim(pool, 0, true, &released));
    CHECK_EQ(released, 3 * CHUNK);
    /* One wait serves all three blocks. */
    CHECK_EQ(cm_faults_count(rt, CM_OP_device_synchronize), 1);
    give(pool, b, NULL, 0);
    /* Blocks that wait for a fence must not pile up without end. */
    for (int i = 0; i < 40; i++) {
        give(pool, take(pool, 4 * MIB, NULL), NULL, CM_POOL_FREE_FENCE);
    }
    CHECK_LE(read_counters(pool).reserved_nbytes, 140 * MIB);
    CHECK_GE(cm_faults_count(rt, CM_OP_device_synchronize), 2);
    CHECK(!cm_device_was_entered(rt, 1)); /* nobody works on device 1 */
    cm_pool_release(pool);
    close_emulated(rt);
}

typedef struct waited_for {
    cm_runtime *rt;
    cm_stream *stream;
    atomic_bool over;
} waited_for;

/* The body of a thread that opens the gate as soon as somebody waits for the device, or
 * when the test is over. Without this thread, a pool that wrongly waits would hang. */
static void *
open_for_who_waits(void *argument)
{
    waited_for *w = argument;
    WAIT_UNTIL(atomic_load(&w->over)
               || cm_faults_count(w->rt, CM_OP_device_synchronize) > 0);
    MUST(cm_emulated_gate_open(w->rt, w->stream->handle));
    return NULL;
}

/* More memory waits for fences than an old driver would allow. Where fences are events,
 * allocations must take new memory instead of waiting for the device. */
static void
test_pool_fences_that_are_events_are_not_waited_for(void)
{
    enum { COUNT = 24 };
    cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    waited_for w = {.rt = rt, .stream = open_stream(rt, 0)};
    cm_block *blocks[COUNT];
    cm_thread thread;
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = take(pool, 4 * MIB, NULL);
    }
    hold_work(rt, w.stream, blocks[0]);
    for (int i = 0; i < COUNT; i++) { /* more than may pile up with an old driver */
        give(pool, blocks[i], NULL, CM_POOL_FREE_FENCE);
    }
    CHECK_OK(cm_thread_start(&thread, open_for_who_waits, &w));
    /* The first allocation records the fence, and all of them take new memory. */
    for (int i = 0; i < COUNT; i++) {
        blocks[i] = take(pool, 4 * MIB, NULL);
    }
    CHECK_EQ(cm_faults_count(rt, CM_OP_device_synchronize), 0);
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 1);
    atomic_store(&w.over, true);
    cm_thread_join(thread);
    for (int i = 0; i < COUNT; i++) {
        give(pool, blocks[i], NULL, 0);
    }
    cm_pool_release(pool);
    cm_stream_release(w.stream);
    close_emulated(rt);
}

/* A stream that is known only by its handle has been destroyed when its block is freed.
 * The pool must not use the handle any more, and waits for a fence instead. */
static void
test_pool_stream_nobody_keeps_is_never_touched(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *own = open_stream(rt, 0);
    cm_stream *bare = NULL;
    MUST(cm_stream_wrap(rt, 0, own->handle, NULL, NULL, &bare));
    cm_block *a = take(pool, CHUNK, bare);
    cm_address first = a->address;
    cm_stream_release(own); /* the handle is dead now */
    give(pool, a, bare, 0);
    CHECK_EQ(cm_faults_count(rt, CM_OP_event_record), 0);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 0, true, &released));
    CHECK_EQ(released, CHUNK);
    CHECK_NE(first, 0);
    cm_pool_release(pool);
    cm_stream_release(bare);
    close_emulated(rt);
}

/* Twelve streams used a block, and the gate of one of them is shut. The block must not
 * be handed out before that stream has ended its work too. */
static void
test_pool_block_of_many_streams_waits_for_all(void)
{
    enum { COUNT = 12 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *streams[COUNT];
    for (int i = 0; i < COUNT; i++) {
        streams[i] = open_stream(rt, 0);
    }
    cm_block *a = take(pool, CHUNK, NULL);
    hold_work(rt, streams[COUNT - 1], a);
    void *first = a->host;
    cm_pool_free(pool, a, streams, COUNT, 0);
    for (int i = 0; i < COUNT - 1; i++) {
        synchronize(rt, streams[i]);
    }
    cm_block *b[3];
    for (int i = 0; i < 3; i++) {
        b[i] = take(pool, CHUNK, NULL);
        CHECK(b[i]->host != first);
    }
    CHECK_OK(cm_emulated_gate_open(rt, streams[COUNT - 1]->handle));
    synchronize_device(rt, 0);
    cm_block *c = take(pool, CHUNK, NULL);
    CHECK_PTR_EQ(c->host, first);
    for (int i = 0; i < 3; i++) {
        give(pool, b[i], NULL, 0);
    }
    give(pool, c, NULL, 0);
    cm_pool_release(pool);
    for (int i = 0; i < COUNT; i++) {
        cm_stream_release(streams[i]);
    }
    close_emulated(rt);
}

/* The pool has a slot with an event for each of a limited number of streams, and here
 * there are more. It must wait for the others by a fence, and after a trim it must have
 * no stream and no event left. */
static void
test_pool_streams_beyond_all_slots_are_waited_for(void)
{
    enum { COUNT = 300 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *streams[COUNT];
    cm_block *blocks[COUNT];
    for (int i = 0; i < COUNT; i++) {
        streams[i] = open_stream(rt, 0);
        blocks[i] = take(pool, i < COUNT - 1 ? 64 : CHUNK, NULL);
    }
    const void *last = blocks[COUNT - 1]->host;
    hold_work(rt, streams[COUNT - 1], blocks[COUNT - 1]);
    for (int i = 0; i < COUNT; i++) {
        give(pool, blocks[i], streams[i], 0);
    }
    for (int i = 0; i < COUNT - 1; i++) {
        synchronize(rt, streams[i]);
    }
    cm_block *block = take(pool, CHUNK, NULL);
    CHECK(block->host != last);
    CHECK_GE(read_counters(pool).in_flight_count, 1);
    CHECK_LE(read_counters(pool).in_flight_count, COUNT - 255);
    give(pool, block, NULL, 0);
    uint64_t released = 0;
    CHECK_OK(cm_emulated_gate_open(rt, streams[COUNT - 1]->handle));
    CHECK_OK(pool_trim(pool, 0, true, &released));
    CHECK_EQ(read_counters(pool).reserved_nbytes, 0);
    for (int i = 0; i < COUNT; i++) {
        cm_stream_release(streams[i]);
    }
    cm_emulated_counts counts;
    cm_emulated_read_counts(rt, &counts);
    CHECK_EQ(counts.streams, 0);
    CHECK_EQ(counts.events, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* The last reference to the pool is released while blocks are in flight. The release
 * must wait for their work, which ends when a thread opens the gate. */
static void
test_pool_last_release_waits_for_what_is_in_flight(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stream = open_stream(rt, 0);
    cm_thread thread;
    cm_block *a = take(pool, CHUNK, NULL);
    hold_work(rt, stream, a);
    give(pool, a, stream, 0);
    give(pool, take(pool, 2 * MIB, NULL), NULL, CM_POOL_FREE_FENCE);
    CHECK_OK(cm_thread_start(&thread, open_gate, stream));
    cm_pool_release(pool);
    cm_thread_join(thread);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* A block is freed on a stream that is being captured. The graph may use it at any
 * later time, so the pool must not hand it out again, even after a trim that waits. */
static void
test_pool_block_used_in_a_capture_stays_with_the_graph(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = open_stream(rt, 0);
    CHECK_OK(cm_emulated_set_capturing(rt, cm_stream_export_handle(stream), true));
    cm_block *a = take(pool, CHUNK, stream);
    cm_address first = a->address;
    give(pool, a, stream, 0);
    cm_block *b = take(pool, CHUNK, stream);
    CHECK_NE(b->address, first);
    CHECK_OK(cm_emulated_set_capturing(rt, cm_stream_export_handle(stream), false));
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 0, true, &released));
    CHECK_EQ(released, 0);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    give(pool, b, stream, 0);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* As long as nobody has read the handle of a stream of ours, nobody can capture it.
 * Then allocations and frees on the stream must make no runtime call. After the handle
 * was read, a free must ask whether the stream is being captured. */
static void
test_pool_block_of_a_stream_of_our_own_makes_no_runtime_call(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = open_stream(rt, 0);
    give(pool, take(pool, 4 * KIB, stream), stream, 0);
    /* The calls are counted from here on. */
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    for (int i = 0; i < 3; i++) {
        cm_block *block = cm_pool_try_alloc(pool, 4 * KIB, stream, 0);
        CHECK(block != NULL);
        CHECK(cm_pool_quick_free(pool, block, &stream, 1));
        CHECK(cm_pool_check(pool));
    }
    CHECK_EQ(cm_faults_count(rt, CM_OP_none), 0);
    CHECK_EQ(read_counters(pool).hit_count, 3);
    (void)cm_stream_export_handle(stream);
    cm_block *block = cm_pool_try_alloc(pool, 4 * KIB, stream, 0);
    CHECK(!cm_pool_quick_free(pool, block, &stream, 1));
    give(pool, block, stream, 0);
    CHECK_EQ(cm_faults_count(rt, CM_OP_stream_is_capturing), 1);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* The caller of a free says that a capture used the block. The block belongs to the
 * graph then, even though the capture has ended, and with a fence as well as without
 * one. */
static void
test_pool_block_of_a_capture_that_has_ended_stays_with_the_graph(void)
{
    static const cm_pool_config *const configs[] = {&DEVICE, &PINNED};
    for (int i = 0; i < 4; i++) {
        cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
        cm_pool *pool = open_pool(rt, *configs[i / 2]);
        cm_stream *stream = open_stream(rt, 0);
        unsigned fence = i % 2 == 0 ? 0u : CM_POOL_FREE_FENCE;
        cm_block *a = take(pool, CHUNK, stream);
        cm_address first = a->address;
        cm_pool_free(pool, a, &stream, 1, CM_POOL_FREE_CAPTURED | fence);
        CHECK_OK(cm_rt_stream_synchronize(rt, stream->handle));
        uint64_t released = 0;
        CHECK_OK(pool_trim(pool, 0, true, &released));
        CHECK_EQ(released, 0);
        CHECK_EQ(read_counters(pool).in_flight_count, 1);
        cm_block *b = take(pool, CHUNK, stream);
        CHECK_NE(b->address, first);
        CHECK(cm_pool_check(pool));
        give(pool, b, stream, 0);
        cm_pool_release(pool);
        cm_emulated_counts counts;
        cm_emulated_read_counts(rt, &counts);
        CHECK_EQ(counts.live_nbytes, 0);
        cm_stream_release(stream);
        close_emulated(rt);
    }
}

/* One stream is being captured while a block of another stream is in flight. During a
 * capture the driver forbids waiting, but a query whether work has ended succeeds. So a
 * trim must still give the memory back. */
static void
test_pool_capture_elsewhere_is_not_in_the_way(void)
{
    static const cm_kind kinds[] = {CM_KIND_PINNED, CM_KIND_MAPPED, CM_KIND_DEVICE, 0};
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_stream *capturing = open_stream(rt, 0);
    cm_stream *stream = open_stream(rt, 0);
    CHECK_OK(cm_emulated_set_capturing(rt, cm_stream_export_handle(capturing), true));
    for (int i = 0; i < 3; i++) {
        cm_pool *pool = open_pool(rt, (cm_pool_config)CONFIG(kinds[i], 0, 0));
        give(pool, take(pool, CHUNK, NULL), stream, 0);
        uint64_t total = 0;
        while (read_counters(pool).reserved_nbytes > 0) {
            uint64_t released = 0;
            CHECK_OK(pool_trim(pool, 0, false, &released));
            total += released;
        }
        CHECK_EQ(total, CHUNK);
        cm_pool_release(pool);
    }
    CHECK_OK(cm_emulated_set_capturing(rt, cm_stream_export_handle(capturing), false));
    cm_stream_release(capturing);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* The driver may refuse to query an event during a capture. Then the block must stay in
 * flight, and a later query must find it. */
static void
test_pool_query_refused_during_capture_loses_no_block(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stream = open_stream(rt, 0);
    cm_block *a = take(pool, CHUNK, NULL);
    void *first = a->host;
    give(pool, a, stream, 0);
    synchronize(rt, stream);
    cm_faults_plan(rt, CM_OP_event_query, 1, CM_CUDA_CAPTURE_UNSUPPORTED, true);
    cm_block *b = take(pool, CHUNK, NULL);
    CHECK(b->host != first);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    cm_block *c = take(pool, CHUNK, NULL);
    CHECK_PTR_EQ(c->host, first);
    give(pool, b, NULL, 0);
    give(pool, c, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* The pool cannot create or record the event after the work on a block, or cannot find
 * out whether the stream is being captured. The block must then wait for a fence. */
static void
test_pool_failed_recording_becomes_a_fence(void)
{
    static const cm_op ops[] = {CM_OP_event_create, CM_OP_event_record,
                                CM_OP_stream_is_capturing};
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_stream *stream = open_stream(rt, 0);
    for (int i = 0; i < 3; i++) {
        cm_pool *pool = open_pool(rt, PINNED);
        cm_block *a = take(pool, CHUNK, NULL);
        void *first = a->host;
        hold_work(rt, stream, a);
        cm_faults_plan(rt, ops[i], 1, 999, false);
        give(pool, a, stream, 0);
        CHECK_EQ(cm_faults_last_injected(rt), ops[i]);
        cm_block *b = take(pool, CHUNK, NULL);
        CHECK(b->host != first);
        CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
        synchronize_device(rt, 0);
        cm_block *c = take(pool, CHUNK, NULL);
        CHECK_PTR_EQ(c->host, first);
        give(pool, b, NULL, 0);
        give(pool, c, NULL, 0);
        cm_pool_release(pool);
    }
    cm_stream_release(stream);
    close_emulated(rt);
}

/* The body of a thread that opens the gate once somebody has waited for the stream's
 * event. */
static void *
open_gate_late(void *argument)
{
    cm_stream *stream = argument;
    WAIT_UNTIL(cm_faults_count(stream->rt, CM_OP_event_synchronize) > 0);
    MUST(cm_emulated_gate_open(stream->rt, stream->handle));
    return NULL;
}

/* Every wait for the event of a block fails. A trim that waits must then wait for the
 * whole device instead. */
static void
test_pool_event_that_cannot_be_waited_for_falls_back_to_the_device(void)
{
    cm_thread thread;
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stream = open_stream(rt, 0);
    uint64_t released = 0;
    cm_block *block = take(pool, CHUNK, NULL);
    hold_work(rt, stream, block);
    give(pool, block, stream, 0);
    cm_faults_plan(rt, CM_OP_event_synchronize, 1, 999, true);
    CHECK_OK(cm_thread_start(&thread, open_gate_late, stream));
    CHECK_OK(pool_trim(pool, 0, true, &released));
    cm_thread_join(thread);
    CHECK_EQ(released, CHUNK);
    CHECK_EQ(cm_faults_count(rt, CM_OP_device_synchronize), 1);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* A block is handed out while a late stream still uses it, and then a second stream
 * uses it. cm_pool_quick_free() declines to free such a block, so cm_pool_free() is
 * called after it. The recorder must note only one free. */
static void
test_pool_free_that_is_tried_twice_is_noted_once(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *late = open_stream(rt, 0);
    cm_stream *other = open_stream(rt, 0);
    cm_block *first = take(pool, CHUNK, late);
    hold_work(rt, late, first);
    give(pool, first, late, 0);
    cm_block *block = take(pool, CHUNK, late);
    CHECK(block == first);
    uint64_t begin = cm_recorder_count();
    CHECK(cm_recorder_open(16, NULL));
    CHECK(!cm_pool_quick_free(pool, block, &other, 1));
    give(pool, block, other, 0);
    CHECK_EQ(cm_recorder_count() - begin, 1);
    cm_recorder_close();
    CHECK_OK(cm_emulated_gate_open(rt, late->handle));
    cm_pool_release(pool);
    cm_stream_release(late);
    cm_stream_release(other);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_pool_block_in_flight_waits_for_its_stream)
     RUN(test_pool_unfinished_block_holds_up_no_other)
     RUN(test_pool_one_miss_sees_all_that_has_ended)
     RUN(test_pool_late_stream_is_asked_once_and_hides_no_other)
     RUN(test_pool_long_queue_is_looked_at_in_turns)
     RUN(test_pool_per_thread_stream_is_fenced)
     RUN(test_pool_fence_waits_for_every_stream)
     RUN(test_pool_fence_covers_every_device_in_use)
     RUN(test_pool_fence_covers_contexts_of_others)
     RUN(test_pool_fences_that_are_events_are_not_waited_for)
     RUN(test_pool_takes_no_fence_while_a_capture_runs)
     RUN(test_pool_fence_on_an_old_driver_waits_for_the_device)
     RUN(test_pool_stream_nobody_keeps_is_never_touched)
     RUN(test_pool_block_of_many_streams_waits_for_all)
     RUN(test_pool_streams_beyond_all_slots_are_waited_for)
     RUN(test_pool_last_release_waits_for_what_is_in_flight)
     RUN(test_pool_block_used_in_a_capture_stays_with_the_graph)
     RUN(test_pool_block_of_a_stream_of_our_own_makes_no_runtime_call)
     RUN(test_pool_block_of_a_capture_that_has_ended_stays_with_the_graph)
     RUN(test_pool_capture_elsewhere_is_not_in_the_way)
     RUN(test_pool_query_refused_during_capture_loses_no_block)
     RUN(test_pool_failed_recording_becomes_a_fence)
     RUN(test_pool_event_that_cannot_be_waited_for_falls_back_to_the_device)
     RUN(test_pool_free_that_is_tried_twice_is_noted_once))
/* clang-format on */
