/* SPDX-License-Identifier: Apache-2.0 */
/* pool/: what is handed out when, what is given back, and what remains when calls fail.
 */
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"
#include "open_emulated.h"
#include "pool/pool.h"

#define MIB (UINT64_C(1) << 20)

static const cm_pool_config PINNED = {CM_KIND_PINNED, 0, CM_HOST_ALLOC_PORTABLE, 0};
static const cm_pool_config DEVICE = {CM_KIND_DEVICE, 0, 0, 0};

static cm_pool *
open_pool(cm_runtime *rt, cm_pool_config config)
{
    cm_pool *pool = NULL;
    MUST(cm_pool_create(rt, &config, &pool));
    return pool;
}

static cm_stream *
open_stream(cm_runtime *rt, int device)
{
    cm_stream *stream = NULL;
    MUST(cm_stream_create(rt, device, CM_STREAM_NON_BLOCKING, 0, &stream));
    return stream;
}

static cm_block *
take(cm_pool *pool, uint64_t nbytes, cm_stream *stream)
{
    cm_block *block = NULL;
    MUST(cm_pool_alloc(pool, nbytes, stream, &block));
    if (!cm_pool_check(pool)) {
        CHECK_FAIL_("invariants broken after alloc");
    }
    return block;
}

static void
give(cm_pool *pool, cm_block *block, cm_stream *stream, bool fence)
{
    cm_stream *uses[1] = {stream};
    (void)cm_pool_hold(pool);
    cm_pool_free(pool, block, uses, stream != NULL ? 1 : 0, fence);
    if (!cm_pool_check(pool)) {
        CHECK_FAIL_("invariants broken after free");
    }
    cm_pool_release(pool);
}

static cm_pool_counters
read_counters(cm_pool *pool)
{
    cm_pool_counters counters;
    cm_pool_read(pool, &counters);
    return counters;
}

static void
synchronize(cm_runtime *rt, const cm_stream *stream)
{
    cm_device_guard guard;
    MUST(cm_device_enter(rt, stream->device, &guard));
    MUST(cm_rt_stream_synchronize(rt, stream->handle));
    cm_device_leave(rt, &guard);
}

/* Shut the gate with work on the block behind it. */
static void
hold_work(cm_runtime *rt, const cm_stream *stream, const cm_block *block)
{
    cm_device_guard guard;
    MUST(cm_device_enter(rt, stream->device, &guard));
    MUST(cm_emulated_gate_close(rt, stream->handle));
    MUST(cm_rt_fill_8_async(rt, block->address, 7, block->nbytes, stream->handle));
    cm_device_leave(rt, &guard);
}

static void
synchronize_device(cm_runtime *rt, int device)
{
    cm_device_guard guard;
    MUST(cm_device_enter(rt, device, &guard));
    MUST(cm_rt_device_synchronize(rt));
    cm_device_leave(rt, &guard);
}

/* -- plain handing out ------------------------------------------------------------------ */

static void
test_pool_each_kind_gives_memory_and_takes_it_back(void)
{
    static const cm_pool_config configs[] = {
        {CM_KIND_PINNED, 0, 0, 0},
        {CM_KIND_PINNED, 1, CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_WRITE_COMBINED, 0},
        {CM_KIND_MAPPED, 0, CM_HOST_ALLOC_PORTABLE, 0},
        {CM_KIND_MANAGED, 0, CM_MANAGED_GLOBAL, 0},
        {CM_KIND_MANAGED, 1, CM_MANAGED_HOST, 0},
        {CM_KIND_DEVICE, 1, 0, 0},
    };
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    for (size_t i = 0; i < sizeof(configs) / sizeof(*configs); i++) {
        cm_pool *pool = open_pool(rt, configs[i]);
        cm_block *block = take(pool, 1000, NULL);
        CHECK_GE(block->nbytes, 1000);
        CHECK_LT(block->nbytes, 1000 + 512);
        CHECK_NE(block->address, 0);
        CHECK_EQ(block->host == NULL, configs[i].kind == CM_KIND_DEVICE);
        if (block->host != NULL) {
            memset(block->host, 0x5a, block->nbytes);
            CHECK_FILLED(block->host, 0x5a, 1000);
        }
        cm_address first = block->address;
        CHECK_EQ(read_counters(pool).live_count, 1);
        give(pool, block, NULL, false);
        CHECK_EQ(read_counters(pool).cached_count, 1);
        uint64_t before = cm_faults_count(rt, CM_OP_none);
        block = take(pool, 990, NULL); /* rounds to the same size in every kind */
        CHECK_EQ(cm_faults_count(rt, CM_OP_none), before); /* a hit calls nothing */
        CHECK_EQ(block->address, first);
        give(pool, block, NULL, false);
        cm_pool_counters c = read_counters(pool);
        CHECK_EQ(c.live_count, 0);
        CHECK_EQ(c.allocation_count, 2);
        CHECK_EQ(c.hit_count, 1);
        CHECK_EQ(c.peak_live_nbytes, 1024);
        CHECK_EQ(c.reserved_nbytes, c.cached_nbytes);
        CHECK_EQ(c.lost_count, 0);
        cm_pool_release(pool);
        check_nothing_live(rt);
    }
    close_emulated(rt);
}

static void
test_pool_sizes_are_exact_to_the_step(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *host = open_pool(rt, PINNED);
    cm_pool *device = open_pool(rt, DEVICE);
    static const uint64_t sizes[][3] = {
        {1, 64, 512},       {64, 64, 512},
        {65, 128, 512},     {4096, 4096, 4096},
        {4097, 8192, 8192}, {3 * MIB + 1, 3 * MIB + 4096, 3 * MIB + 4096}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        cm_block *a = take(host, sizes[i][0], NULL);
        cm_block *b = take(device, sizes[i][0], NULL);
        CHECK_EQ(a->nbytes, sizes[i][1]);
        CHECK_EQ(b->nbytes, sizes[i][2]);
        give(host, a, NULL, false);
        give(device, b, NULL, false);
    }
    cm_block *block = NULL;
    CHECK_CODE(cm_pool_alloc(host, 0, NULL, &block), CM_EINVALID);
    CHECK_CODE(cm_pool_alloc(host, UINT64_MAX - 3, NULL, &block), CM_EOVERFLOW);
    CHECK_CODE(cm_pool_alloc(host, UINT64_C(1) << 63, NULL, &block), CM_EOVERFLOW);
    cm_pool_release(host);
    cm_pool_release(device);
    close_emulated(rt);
}

static void
test_pool_wrong_config_is_refused(void)
{
    static const cm_pool_config wrong[] = {
        {CM_KIND_PAGEABLE, 0, 0, 0}, {CM_KIND_PINNED, 2, 0, 0},
        {CM_KIND_PINNED, -1, 0, 0},  {CM_KIND_PINNED, 0, 8, 0},
        {CM_KIND_DEVICE, 0, 1, 0},   {CM_KIND_MANAGED, 0, 0, 0},
        {CM_KIND_MANAGED, 0, 3, 0},  {CM_KIND_COUNT, 0, 0, 0}};
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        cm_pool *pool = NULL;
        CHECK_CODE(cm_pool_create(rt, &wrong[i], &pool), CM_EINVALID);
    }
    cm_pool *mapped = open_pool(rt, (cm_pool_config){CM_KIND_MAPPED, 1, 0, 0});
    CHECK_EQ(cm_pool_get_config(mapped)->flags, CM_HOST_ALLOC_MAPPED);
    CHECK_EQ(cm_pool_get_config(mapped)->device, 1);
    cm_pool_release(mapped);
    close_emulated(rt);
}

static void
test_pool_calls_leave_the_callers_context_alone(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_pool *pool = open_pool(rt, (cm_pool_config){CM_KIND_DEVICE, 1, 0, 0});
    cm_stream *stream = open_stream(rt, 1);
    uint64_t context = 1;
    give(pool, take(pool, 100, stream), stream, true);
    give(pool, take(pool, 200, stream), stream, false);
    uint64_t released = 0;
    CHECK_OK(cm_pool_trim(pool, true, &released));
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(context, 0);
    int mode = CM_CAPTURE_RELAXED;
    CHECK_OK(cm_rt_capture_mode_exchange(rt, &mode));
    CHECK_EQ(mode, 0); /* global, as every thread begins */
    CHECK_OK(cm_rt_capture_mode_exchange(rt, &mode));
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

static void
test_pool_block_keeps_its_pool(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_block *block = take(pool, 100, NULL);
    cm_pool_release(pool);
    memset(block->host, 1, 100);
    cm_pool_free(pool, block, NULL, 0, false);
    close_emulated(rt);
}

static void
test_pool_surplus_is_given_back_at_the_next_alloc(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 512 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_block *blocks[10];
    for (int i = 0; i < 10; i++) {
        blocks[i] = take(pool, 16 * MIB, NULL);
    }
    for (int i = 0; i < 10; i++) {
        give(pool, blocks[i], NULL, false);
    }
    CHECK_EQ(cm_faults_count(rt, CM_OP_device_free), 0); /* not in free */
    CHECK_EQ(read_counters(pool).cached_nbytes, 160 * MIB);
    cm_block *block = take(pool, 100, NULL);
    CHECK_EQ(read_counters(pool).cached_nbytes, 64 * MIB);
    CHECK_EQ(cm_faults_count(rt, CM_OP_device_free), 6);
    give(pool, block, NULL, false);
    uint64_t released = 0;
    CHECK_OK(cm_pool_trim(pool, false, &released));
    CHECK_EQ(released, 64 * MIB + 512);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* -- in flight -------------------------------------------------------------------------- */

static void
test_pool_block_in_flight_waits_for_its_stream(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stream = open_stream(rt, 0);
    CHECK_OK(cm_emulated_gate_close(rt, stream->handle));
    cm_block *a = take(pool, 1 * MIB, stream);
    void *first = a->host;
    cm_stream *uses[3] = {stream, stream, stream};
    cm_pool_free(pool, a, uses, 3, false);
    CHECK_EQ(cm_faults_count(rt, CM_OP_event_record), 1); /* one per distinct stream */
    CHECK_EQ(read_counters(pool).in_flight_nbytes, 1 * MIB);
    /* the host writes without regard to streams: not even the same stream may have it
     */
    cm_block *b = take(pool, 1 * MIB, stream);
    CHECK(b->host != first);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
    synchronize(rt, stream);
    cm_block *c = take(pool, 1 * MIB, NULL);
    CHECK_PTR_EQ(c->host, first);
    CHECK_EQ(read_counters(pool).in_flight_count, 0);
    CHECK_EQ(read_counters(pool).hit_count, 1);
    give(pool, b, NULL, false);
    give(pool, c, NULL, false);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

static void
test_pool_unfinished_block_holds_up_no_other(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *shut = open_stream(rt, 1); /* portable memory used by another device */
    cm_stream *free_one = open_stream(rt, 0);
    CHECK_OK(cm_emulated_gate_close(rt, shut->handle));
    cm_block *a = take(pool, 1 * MIB, NULL);
    cm_block *b = take(pool, 1 * MIB, NULL);
    cm_block *c = take(pool, 1 * MIB, NULL);
    void *second = b->host;
    cm_stream *both[2] = {free_one, shut};
    cm_pool_free(pool, a, both, 2, false);
    give(pool, b, free_one, false);
    give(pool, c, shut, false);
    synchronize(rt, free_one);
    b = take(pool, 1 * MIB, NULL);
    CHECK_PTR_EQ(b->host, second);
    CHECK_EQ(read_counters(pool).in_flight_count, 2);
    CHECK_OK(cm_emulated_gate_open(rt, shut->handle));
    uint64_t released = 0;
    CHECK_OK(cm_pool_trim(pool, true, &released));
    CHECK_EQ(released, 2 * MIB);
    give(pool, b, NULL, false);
    cm_pool_release(pool);
    cm_stream_release(shut);
    cm_stream_release(free_one);
    close_emulated(rt);
}

static void
test_pool_device_block_is_reused_at_once_on_its_own_stream(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = open_stream(rt, 0);
    cm_stream *other = open_stream(rt, 0);
    CHECK_OK(cm_emulated_gate_close(rt, stream->handle));
    CHECK_OK(cm_emulated_gate_close(rt, other->handle));
    cm_block *a = take(pool, 1 * MIB, stream);
    cm_address first = a->address;
    give(pool, a, stream, false);
    cm_block *b = take(pool, 1 * MIB, other); /* another stream: no */
    CHECK_NE(b->address, first);
    cm_block *c = take(pool, 1 * MIB, NULL); /* any stream: no */
    CHECK_NE(c->address, first);
    a = take(pool, 1 * MIB, stream);
    CHECK_EQ(a->address, first);
    CHECK_EQ(read_counters(pool).hit_count, 1);
    give(pool, a, stream, true); /* a fence, too: no longer only that stream */
    cm_stream *both[2] = {stream, other};
    cm_pool_free(pool, b, both, 2, false);
    a = take(pool, 1 * MIB, stream);
    CHECK_NE(a->address, first);
    CHECK_EQ(read_counters(pool).hit_count, 1);
    give(pool, a, NULL, false);
    give(pool, c, NULL, false);
    CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
    CHECK_OK(cm_emulated_gate_open(rt, other->handle));
    cm_pool_release(pool);
    cm_stream_release(stream);
    cm_stream_release(other);
    close_emulated(rt);
}

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
    CHECK_OK(cm_emulated_gate_close(rt, 0)); /* of device 0, which is current by default
                                              */
    cm_block *a = take(pool, 1 * MIB, legacy[0]);
    cm_address first = a->address;
    give(pool, a, legacy[0], false);
    cm_block *b = take(pool, 1 * MIB, legacy[1]);
    CHECK_NE(b->address, first);
    CHECK_OK(cm_emulated_gate_open(rt, 0));
    give(pool, b, NULL, false);
    cm_pool_release(pool);
    cm_stream_release(legacy[0]);
    cm_stream_release(legacy[1]);
    close_emulated(rt);
}

static void
test_pool_per_thread_stream_is_fenced(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = NULL;
    MUST(cm_stream_wrap(rt, 0, CM_STREAM_PER_THREAD, NULL, NULL, &stream));
    give(pool, take(pool, 100, stream), stream, false);
    CHECK_EQ(cm_faults_count(rt, CM_OP_event_record), 0);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

static void
test_pool_fence_waits_for_every_stream(void)
{
    cm_runtime *rt = open_emulated(12050, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stranger = open_stream(rt, 0);
    cm_block *a = take(pool, 1 * MIB, NULL);
    void *first = a->host;
    hold_work(rt, stranger, a);
    give(pool, a, NULL, true);
    cm_block *b = take(pool, 1 * MIB, NULL);
    CHECK(b->host != first);
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 1);
    CHECK_EQ(cm_faults_count(rt, CM_OP_device_synchronize), 0);
    CHECK_OK(cm_emulated_gate_open(rt, stranger->handle));
    synchronize_device(rt, 0);
    cm_block *c = take(pool, 1 * MIB, NULL);
    CHECK_PTR_EQ(c->host, first);
    CHECK_FILLED(c->host, 7, 1 * MIB);
    give(pool, b, NULL, false);
    give(pool, c, NULL, false);
    cm_pool_release(pool);
    cm_stream_release(stranger);
    close_emulated(rt);
}

static void
test_pool_fence_covers_every_device_in_use(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stranger = open_stream(rt, 1);
    cm_block *a = take(pool, 1 * MIB, NULL);
    void *first = a->host;
    cm_block *blocks[3];
    hold_work(rt, stranger, a);
    give(pool, a, NULL, true);
    synchronize_device(rt, 0); /* not the one that works on it */
    for (int i = 0; i < 3; i++) {
        blocks[i] = take(pool, 1 * MIB, NULL);
        CHECK(blocks[i]->host != first);
    }
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 2);
    CHECK_OK(cm_emulated_gate_open(rt, stranger->handle));
    for (int i = 0; i < 3; i++) {
        give(pool, blocks[i], NULL, false);
    }
    cm_pool_release(pool);
    cm_stream_release(stranger);
    close_emulated(rt);
}

static void
test_pool_fence_on_an_old_driver_waits_for_the_device(void)
{
    cm_runtime *rt = open_emulated(12000, 1, 512 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_block *blocks[3];
    for (int i = 0; i < 3; i++) {
        blocks[i] = take(pool, 1 * MIB, NULL);
    }
    for (int i = 0; i < 3; i++) {
        give(pool, blocks[i], NULL, true);
    }
    cm_block *b = take(pool, 1 * MIB, NULL);
    CHECK_EQ(read_counters(pool).in_flight_count, 3);
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_record_event), 0);
    uint64_t released = 0;
    CHECK_OK(cm_pool_trim(pool, false, &released));
    CHECK_EQ(released, 0);
    CHECK_OK(cm_pool_trim(pool, true, &released));
    CHECK_EQ(released, 3 * MIB);
    CHECK_EQ(cm_faults_count(rt, CM_OP_device_synchronize), 1); /* one for all */
    give(pool, b, NULL, false);
    /* they do not pile up without end */
    for (int i = 0; i < 40; i++) {
        give(pool, take(pool, 4 * MIB, NULL), NULL, true);
    }
    CHECK_LE(read_counters(pool).reserved_nbytes, 140 * MIB);
    CHECK_GE(cm_faults_count(rt, CM_OP_device_synchronize), 2);
    CHECK_GT(read_counters(pool).hit_count, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

static void
test_pool_stream_nobody_keeps_is_never_touched(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *own = open_stream(rt, 0);
    cm_stream *bare = NULL;
    MUST(cm_stream_wrap(rt, 0, own->handle, NULL, NULL, &bare));
    cm_block *a = take(pool, 1 * MIB, bare);
    cm_address first = a->address;
    cm_stream_release(own); /* the handle is dead now */
    give(pool, a, bare, false);
    CHECK_EQ(cm_faults_count(rt, CM_OP_event_record), 0);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    uint64_t released = 0;
    CHECK_OK(cm_pool_trim(pool, true, &released));
    CHECK_EQ(released, 1 * MIB);
    CHECK_NE(first, 0);
    cm_pool_release(pool);
    cm_stream_release(bare);
    close_emulated(rt);
}

static void
test_pool_more_streams_than_events_still_wait_for_all(void)
{
    enum { COUNT = 12 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *streams[COUNT];
    for (int i = 0; i < COUNT; i++) {
        streams[i] = open_stream(rt, 0);
    }
    cm_block *a = take(pool, 1 * MIB, NULL);
    hold_work(rt, streams[COUNT - 1], a);
    void *first = a->host;
    cm_pool_free(pool, a, streams, COUNT, false);
    for (int i = 0; i < COUNT - 1; i++) {
        synchronize(rt, streams[i]);
    }
    cm_block *b[3];
    for (int i = 0; i < 3; i++) {
        b[i] = take(pool, 1 * MIB, NULL);
        CHECK(b[i]->host != first);
    }
    CHECK_OK(cm_emulated_gate_open(rt, streams[COUNT - 1]->handle));
    synchronize_device(rt, 0);
    cm_block *c = take(pool, 1 * MIB, NULL);
    CHECK_PTR_EQ(c->host, first);
    for (int i = 0; i < 3; i++) {
        give(pool, b[i], NULL, false);
    }
    give(pool, c, NULL, false);
    cm_pool_release(pool);
    for (int i = 0; i < COUNT; i++) {
        cm_stream_release(streams[i]);
    }
    close_emulated(rt);
}

static void *
open_gate(void *arg)
{
    cm_stream *stream = arg;
    MUST(cm_emulated_gate_open(stream->rt, stream->handle));
    return NULL;
}

static void
test_pool_last_release_waits_for_what_is_in_flight(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stream = open_stream(rt, 0);
    cm_thread thread;
    cm_block *a = take(pool, 1 * MIB, NULL);
    hold_work(rt, stream, a);
    give(pool, a, stream, false);
    give(pool, take(pool, 2 * MIB, NULL), NULL, true);
    CHECK_OK(cm_thread_start(&thread, open_gate, stream));
    cm_pool_release(pool);
    cm_thread_join(thread);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* -- out of memory, capture, fork ------------------------------------------------------- */

static void
test_pool_out_of_memory_waits_trims_and_retries(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 64 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = open_stream(rt, 0);
    cm_thread thread;
    cm_block *a = take(pool, 24 * MIB, NULL);
    cm_block *b = take(pool, 24 * MIB, NULL);
    CHECK_OK(cm_emulated_gate_close(rt, stream->handle));
    give(pool, a, stream, false);
    give(pool, b, NULL, true);
    CHECK_OK(cm_thread_start(&thread, open_gate, stream));
    a = take(pool, 60 * MIB, NULL);
    cm_thread_join(thread);
    CHECK_EQ(read_counters(pool).reserved_nbytes, 60 * MIB);
    cm_block *none = NULL;
    cm_status status = cm_pool_alloc(pool, 8 * MIB, NULL, &none);
    CHECK_EQ(status.code, CM_CUDA_OUT_OF_MEMORY);
    CHECK_EQ(status.op, CM_OP_device_alloc);
    CHECK_EQ(status.arg, 8 * MIB);
    CHECK(cm_pool_check(pool));
    give(pool, a, NULL, false);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

static void
test_pool_block_used_in_a_capture_stays_with_the_graph(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = open_stream(rt, 0);
    CHECK_OK(cm_emulated_set_capturing(rt, stream->handle, true));
    cm_block *a = take(pool, 1 * MIB, stream);
    cm_address first = a->address;
    give(pool, a, stream, false);
    cm_block *b = take(pool, 1 * MIB, stream);
    CHECK_NE(b->address, first);
    CHECK_OK(cm_emulated_set_capturing(rt, stream->handle, false));
    uint64_t released = 0;
    CHECK_OK(cm_pool_trim(pool, true, &released));
    CHECK_EQ(released, 0);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    give(pool, b, stream, false);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

static void
test_pool_block_of_a_capture_that_has_ended_stays_with_the_graph(void)
{
    static const cm_pool_config *const configs[] = {&DEVICE, &PINNED};
    for (int i = 0; i < 4; i++) {
        cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
        cm_pool *pool = open_pool(rt, *configs[i / 2]);
        cm_stream *stream = open_stream(rt, 0);
        unsigned fence = i % 2 == 0 ? 0u : CM_POOL_FREE_FENCE;
        cm_block *a = take(pool, 1 * MIB, stream);
        cm_address first = a->address;
        cm_pool_free(pool, a, &stream, 1, CM_POOL_FREE_CAPTURED | fence);
        CHECK_OK(cm_rt_stream_synchronize(rt, stream->handle));
        uint64_t released = 0;
        CHECK_OK(cm_pool_trim(pool, true, &released));
        CHECK_EQ(released, 0);
        CHECK_EQ(read_counters(pool).in_flight_count, 1);
        cm_block *b = take(pool, 1 * MIB, stream);
        CHECK_NE(b->address, first);
        CHECK(cm_pool_check(pool));
        give(pool, b, stream, false);
        cm_pool_release(pool);
        cm_emulated_counts counts;
        cm_emulated_read_counts(rt, &counts);
        CHECK_EQ(counts.live_nbytes, 0);
        cm_stream_release(stream);
        close_emulated(rt);
    }
}

static void
test_pool_capture_elsewhere_is_not_in_the_way(void)
{
    static const cm_kind kinds[] = {CM_KIND_PINNED, CM_KIND_MAPPED, CM_KIND_DEVICE, 0};
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_stream *capturing = open_stream(rt, 0);
    cm_stream *stream = open_stream(rt, 0);
    CHECK_OK(cm_emulated_set_capturing(rt, capturing->handle, true));
    for (int i = 0; i < 3; i++) {
        cm_pool *pool = open_pool(rt, (cm_pool_config){kinds[i], 0, 0, 0});
        give(pool, take(pool, 1 * MIB, NULL), stream, false);
        /* waiting is what the capture forbids; asking must work all the same */
        uint64_t total = 0;
        while (read_counters(pool).reserved_nbytes > 0) {
            uint64_t released = 0;
            CHECK_OK(cm_pool_trim(pool, false, &released));
            total += released;
        }
        CHECK_EQ(total, 1 * MIB);
        cm_pool_release(pool);
    }
    CHECK_OK(cm_emulated_set_capturing(rt, capturing->handle, false));
    cm_stream_release(capturing);
    cm_stream_release(stream);
    close_emulated(rt);
}

static void
test_pool_query_refused_during_capture_loses_no_block(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stream = open_stream(rt, 0);
    cm_block *a = take(pool, 1 * MIB, NULL);
    void *first = a->host;
    give(pool, a, stream, false);
    synchronize(rt, stream);
    cm_faults_plan(rt, CM_OP_event_query, 1, CM_CUDA_CAPTURE_UNSUPPORTED, true);
    cm_block *b = take(pool, 1 * MIB, NULL);
    CHECK(b->host != first);
    CHECK_EQ(read_counters(pool).in_flight_count, 1);
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    cm_block *c = take(pool, 1 * MIB, NULL);
    CHECK_PTR_EQ(c->host, first);
    give(pool, b, NULL, false);
    give(pool, c, NULL, false);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

static void
test_pool_forked_child_allocates_nothing_and_leaks(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_block *block = take(pool, 100, NULL);
    pid_t child = fork();
    if (child == 0) {
        cm_block *none = NULL;
        uint64_t released = 0;
        cm_pool_counters c;
        int wrong = cm_pool_alloc(pool, 100, NULL, &none).code != CM_EFORKED;
        wrong |= cm_pool_trim(pool, true, &released).code != CM_EFORKED;
        cm_pool_free(pool, block, NULL, 0, true);
        cm_pool_read(pool, &c);
        wrong |= c.live_count != 1 || !cm_pool_check(pool);
        cm_pool_release(pool);
        _exit(wrong);
    }
    int result = -1;
    CHECK_EQ(waitpid(child, &result, 0), child);
    CHECK_EQ(result, 0);
    give(pool, block, NULL, false);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* -- faults ----------------------------------------------------------------------------- */

static void
test_pool_failed_recording_becomes_a_fence(void)
{
    static const cm_op ops[] = {CM_OP_event_create, CM_OP_event_record,
                                CM_OP_stream_is_capturing};
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_stream *stream = open_stream(rt, 0);
    for (int i = 0; i < 3; i++) {
        cm_pool *pool = open_pool(rt, PINNED);
        cm_block *a = take(pool, 1 * MIB, NULL);
        void *first = a->host;
        hold_work(rt, stream, a);
        cm_faults_plan(rt, ops[i], 1, 999, false);
        give(pool, a, stream, false);
        CHECK_EQ(cm_faults_struck(rt), ops[i]);
        cm_block *b = take(pool, 1 * MIB, NULL);
        CHECK(b->host != first);
        CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
        synchronize_device(rt, 0);
        cm_block *c = take(pool, 1 * MIB, NULL);
        CHECK_PTR_EQ(c->host, first);
        give(pool, b, NULL, false);
        give(pool, c, NULL, false);
        cm_pool_release(pool);
    }
    cm_stream_release(stream);
    close_emulated(rt);
}

static void
test_pool_event_that_cannot_be_waited_for_falls_back_to_the_device(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_stream *stream = open_stream(rt, 0);
    uint64_t released = 0;
    give(pool, take(pool, 1 * MIB, NULL), stream, false);
    cm_faults_plan(rt, CM_OP_event_synchronize, 1, 999, true);
    CHECK_OK(cm_pool_trim(pool, true, &released));
    CHECK_EQ(released, 1 * MIB);
    CHECK_EQ(cm_faults_count(rt, CM_OP_device_synchronize), 1);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

static void
test_pool_refused_free_is_counted_and_tried_again(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    uint64_t released = 7;
    give(pool, take(pool, 1 * MIB, NULL), NULL, false);
    cm_faults_plan(rt, CM_OP_device_free, 1, 999, false);
    cm_status status = cm_pool_trim(pool, false, &released);
    CHECK_EQ(status.code, 999);
    CHECK_EQ(status.op, CM_OP_device_free);
    CHECK_EQ(released, 0);
    CHECK_EQ(read_counters(pool).lost_count, 1);
    CHECK_EQ(read_counters(pool).cached_count, 1);
    CHECK(cm_pool_check(pool));
    CHECK_OK(cm_pool_trim(pool, false, &released));
    CHECK_EQ(released, 1 * MIB);
    cm_pool_release(pool);
    close_emulated(rt);
}

static void
test_pool_free_after_the_driver_is_gone_succeeds(void)
{
    static const int codes[] = {CM_CUDA_UNLOADING, CM_CUDA_CONTEXT_DESTROYED,
                                CM_CUDA_INSUFFICIENT_DRIVER};
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    for (int i = 0; i < 3; i++) {
        cm_pool *pool = open_pool(rt, PINNED);
        cm_block *block = take(pool, 100, NULL);
        void *host = block->host;
        give(pool, block, NULL, false);
        uint64_t released = 0;
        cm_faults_plan(rt, CM_OP_host_free, 1, codes[i], true);
        CHECK_OK(cm_pool_trim(pool, true, &released));
        CHECK_EQ(read_counters(pool).lost_count, 0);
        cm_pool_release(pool);
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        CHECK_OK(cm_rt_host_free(rt, host)); /* the wrapper did not really do it */
    }
    close_emulated(rt);
}

typedef struct scenario {
    cm_runtime *rt;
    cm_pool_config config;
    cm_stream *streams[2]; /* made outside: not what is tested */
} scenario;

/* Every path of the pool once. Answers the first failure; leaves nothing behind. */
static cm_status
run_scenario(const scenario *s)
{
    cm_pool *pool = NULL;
    cm_block *blocks[4] = {NULL, NULL, NULL, NULL};
    cm_stream *uses[2] = {s->streams[0], s->streams[1]};
    uint64_t released = 0;
    CM_TRY(cm_pool_create(s->rt, &s->config, &pool));
    cm_status first = cm_ok();
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < 4; i++) {
            cm_status status = cm_pool_alloc(pool, 8192, s->streams[i % 2], &blocks[i]);
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
        if (!cm_pool_check(pool)) {
            CHECK_FAIL_("invariants broken");
        }
    }
    cm_status status = cm_pool_trim(pool, true, &released);
    first = cm_is_ok(first) ? status : first;
    cm_pool_counters c = read_counters(pool);
    if (c.live_count != 0 || !cm_pool_check(pool)) {
        CHECK_FAIL_("something is live or broken");
    }
    if (cm_is_ok(status) && c.reserved_nbytes != 0) {
        CHECK_FAIL_("trimmed, but %llu bytes are left",
                    (unsigned long long)c.reserved_nbytes);
    }
    cm_pool_release(pool);
    return first;
}

static void
check_only_streams_live(cm_runtime *rt)
{
    cm_emulated_counts counts;
    cm_emulated_read_counts(rt, &counts);
    CHECK_EQ(counts.host_allocs, 0);
    CHECK_EQ(counts.device_allocs, 0);
    CHECK_EQ(counts.managed_allocs, 0);
    CHECK_EQ(counts.live_nbytes, 0);
    CHECK_EQ(counts.events, 0);
}

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
    for (uint64_t nth = 1; nth <= total; nth++) {
        int before = atomic_load(&check_failures);
        cm_faults_plan(s.rt, CM_OP_none, nth, code, false);
        cm_status status = run_scenario(&s);
        cm_op struck = cm_faults_struck(s.rt);
        cm_faults_plan(s.rt, CM_OP_none, 0, 0, false);
        if (!cm_is_ok(status) && (status.code != code || status.op != struck)) {
            CHECK_FAIL_("failure of %s was told as code %d of %s", cm_op_name(struck),
                        status.code, cm_op_name((cm_op)status.op));
        }
        check_only_streams_live(s.rt);
        if (!cm_is_ok(run_scenario(&s))) {
            CHECK_FAIL_("the scenario fails without a fault");
        }
        check_only_streams_live(s.rt);
        if (atomic_load(&check_failures) != before) {
            fprintf(stderr, "  … in call %llu (%s) with code %d on kind %d\n",
                    (unsigned long long)nth, cm_op_name(struck), code,
                    (int)config.kind);
        }
    }
    cm_stream_release(s.streams[0]);
    cm_stream_release(s.streams[1]);
    close_emulated(s.rt);
}

static void
test_pool_any_call_may_fail_and_nothing_leaks(void)
{
    static const cm_pool_config configs[] = {
        {CM_KIND_PINNED, 0, CM_HOST_ALLOC_PORTABLE, 0},
        {CM_KIND_MAPPED, 0, CM_HOST_ALLOC_PORTABLE, 0},
        {CM_KIND_MANAGED, 0, CM_MANAGED_GLOBAL, 0},
        {CM_KIND_DEVICE, 0, 0, 0},
    };
    for (size_t i = 0; i < sizeof(configs) / sizeof(*configs); i++) {
        sweep(13000, configs[i], 999);
        sweep(12000, configs[i], CM_CUDA_OUT_OF_MEMORY);
        sweep(13000, configs[i], CM_CUDA_CAPTURE_UNSUPPORTED);
    }
}

/* clang-format off */
MAIN(RUN(test_pool_each_kind_gives_memory_and_takes_it_back)
     RUN(test_pool_sizes_are_exact_to_the_step)
     RUN(test_pool_wrong_config_is_refused)
     RUN(test_pool_calls_leave_the_callers_context_alone)
     RUN(test_pool_block_keeps_its_pool)
     RUN(test_pool_surplus_is_given_back_at_the_next_alloc)
     RUN(test_pool_block_in_flight_waits_for_its_stream)
     RUN(test_pool_unfinished_block_holds_up_no_other)
     RUN(test_pool_device_block_is_reused_at_once_on_its_own_stream)
     RUN(test_pool_same_stream_needs_the_same_device)
     RUN(test_pool_per_thread_stream_is_fenced)
     RUN(test_pool_fence_waits_for_every_stream)
     RUN(test_pool_fence_covers_every_device_in_use)
     RUN(test_pool_fence_on_an_old_driver_waits_for_the_device)
     RUN(test_pool_stream_nobody_keeps_is_never_touched)
     RUN(test_pool_more_streams_than_events_still_wait_for_all)
     RUN(test_pool_last_release_waits_for_what_is_in_flight)
     RUN(test_pool_out_of_memory_waits_trims_and_retries)
     RUN(test_pool_block_used_in_a_capture_stays_with_the_graph)
    RUN(test_pool_block_of_a_capture_that_has_ended_stays_with_the_graph)
     RUN(test_pool_capture_elsewhere_is_not_in_the_way)
     RUN(test_pool_query_refused_during_capture_loses_no_block)
     RUN(test_pool_forked_child_allocates_nothing_and_leaks)
     RUN(test_pool_failed_recording_becomes_a_fence)
     RUN(test_pool_event_that_cannot_be_waited_for_falls_back_to_the_device)
     RUN(test_pool_refused_free_is_counted_and_tried_again)
     RUN(test_pool_free_after_the_driver_is_gone_succeeds)
     RUN(test_pool_any_call_may_fail_and_nothing_leaks))
/* clang-format on */
