/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the emulated device's streams: the order of work within a stream and between
 * streams, gates, default streams, when a copy reads host memory, and many threads on
 * one runtime. */
#include "emulated_bench.h"
#include "runtime/emulated/private.h"

/* Work behind a shut gate must not run, whatever other streams do, until the gate
 * opens. */
static void
test_gate_holds_work_until_opened(void)
{
    bench t = set_up(CM_STREAM_NON_BLOCKING, CM_STREAM_NON_BLOCKING);
    cm_emulated_counts counts;
    CHECK(is_done(t.rt, t.a));
    CHECK_OK(cm_emulated_gate_close(t.rt, t.a));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 5, N, t.a));
    CHECK(!is_done(t.rt, t.a));
    cm_emulated_read_counts(t.rt, &counts);
    CHECK_EQ(counts.queued, 1);
    let_run();
    CHECK_FILLED(t.alias, 0, N);
    CHECK(is_done(t.rt, t.b));
    CHECK_OK(cm_emulated_gate_open(t.rt, t.a));
    CHECK_OK(cm_rt_stream_synchronize(t.rt, t.a));
    CHECK(is_done(t.rt, t.a));
    CHECK_FILLED(t.alias, 5, N);
    CHECK_CODE(cm_emulated_gate_close(t.rt, 12345), CM_CUDA_INVALID_HANDLE);
    tear_down(&t);
}

/* Fifty fills of the same bytes are queued on one stream. The last one must win. */
static void
test_stream_runs_in_order(void)
{
    bench t = set_up(0, 0);
    for (int i = 1; i <= 50; i++) {
        CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, (uint8_t)i, N, t.a));
    }
    CHECK_OK(cm_rt_stream_synchronize(t.rt, t.a));
    CHECK_FILLED(t.alias, 50, N);
    tear_down(&t);
}

/* Work on the legacy stream must wait for work of blocking streams, and not for that of
 * non-blocking ones. */
static void
test_legacy_waits_for_blocking_streams(void)
{
    bench t = set_up(0, CM_STREAM_NON_BLOCKING);
    CHECK_OK(cm_emulated_gate_close(t.rt, t.a));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 1, N, t.a));
    /* Work of a blocking stream counts as work of the legacy stream. */
    CHECK(!is_done(t.rt, 0));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 2, N, CM_STREAM_LEGACY));
    let_run();
    CHECK_FILLED(t.alias, 0, N);
    CHECK_OK(cm_emulated_gate_open(t.rt, t.a));
    CHECK_OK(cm_rt_stream_synchronize(t.rt, 0));
    CHECK_FILLED(t.alias, 2, N);
    CHECK_OK(cm_emulated_gate_close(t.rt, t.b)); /* b is a non-blocking stream */
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 3, N, t.b));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 4, N, CM_STREAM_LEGACY));
    let_run();
    CHECK(is_done(t.rt, 0));
    CHECK_FILLED(t.alias, 4, N);
    CHECK_OK(cm_emulated_gate_open(t.rt, t.b));
    tear_down(&t);
}

/* Work on a blocking stream must wait for earlier work of the legacy stream. Work on a
 * non-blocking stream need not. */
static void
test_blocking_streams_wait_for_legacy(void)
{
    bench t = set_up(0, CM_STREAM_NON_BLOCKING);
    CHECK_OK(cm_emulated_gate_close(t.rt, 0));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 1, N / 2, 0));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 2, N / 2, t.a));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device + N / 2, 3, N / 2, t.b));
    /* Stream b is non-blocking, so it need not wait. */
    CHECK_OK(cm_rt_stream_synchronize(t.rt, t.b));
    CHECK(!is_done(t.rt, t.a));
    CHECK_FILLED(t.alias, 0, N / 2);
    CHECK_FILLED(t.alias + N / 2, 3, N / 2);
    CHECK_OK(cm_emulated_gate_open(t.rt, 0));
    CHECK_OK(cm_rt_stream_synchronize(t.rt, t.a));
    CHECK_FILLED(t.alias, 2, N / 2);
    tear_down(&t);
}

/* The default stream of device 1 and a wait for device 1 must not wait for a stream of
 * device 0. */
static void
test_legacy_ignores_other_devices(void)
{
    bench t = set_up(0, 0);
    CHECK_OK(cm_emulated_gate_close(t.rt, t.a));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 1, N, t.a));
    CHECK_OK(cm_rt_device_set(t.rt, 1));
    CHECK_OK(cm_rt_stream_synchronize(t.rt, 0)); /* the default stream of device 1 */
    CHECK_OK(cm_rt_device_synchronize(t.rt));
    CHECK_OK(cm_rt_device_set(t.rt, 0));
    CHECK(!is_done(t.rt, t.a));
    CHECK_OK(cm_emulated_gate_open(t.rt, t.a));
    tear_down(&t);
}

typedef struct other_thread {
    const bench *t;
    uint64_t id;
} other_thread;

/* The body of a thread that reads the id of its per-thread stream. */
static void *
read_own_id(void *arg)
{
    other_thread *other = arg;
    MUST(cm_rt_stream_get_id(other->t->rt, CM_STREAM_PER_THREAD, &other->id));
    return NULL;
}

/* The per-thread stream must have the same id whenever one thread asks, and a different
 * id on each thread. It is a blocking stream, so it waits for the legacy stream. */
static void
test_per_thread_stream_is_the_threads_own(void)
{
    bench t = set_up(0, 0);
    other_thread other = {.t = &t};
    cm_thread thread;
    uint64_t mine, again;
    CHECK_OK(cm_rt_stream_get_id(t.rt, CM_STREAM_PER_THREAD, &mine));
    CHECK_OK(cm_rt_stream_get_id(t.rt, CM_STREAM_PER_THREAD, &again));
    CHECK_EQ(mine, again);
    CHECK_OK(cm_thread_start(&thread, read_own_id, &other));
    cm_thread_join(thread);
    CHECK_NE(other.id, mine);
    CHECK_OK(cm_emulated_gate_close(t.rt, 0));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 1, N, 0));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 2, N, CM_STREAM_PER_THREAD));
    let_run();
    CHECK(!is_done(t.rt, CM_STREAM_PER_THREAD)); /* it waits for the legacy stream */
    CHECK_OK(cm_emulated_gate_open(t.rt, 0));
    CHECK_OK(cm_rt_stream_synchronize(t.rt, CM_STREAM_PER_THREAD));
    CHECK_FILLED(t.alias, 2, N);
    tear_down(&t);
}

/* The sources are changed while both copies wait behind a gate. The copy from pinned
 * memory must see the change, and that from ordinary memory must not. */
static void
test_copy_reads_pinned_memory_late_and_pageable_at_once(void)
{
    bench t = set_up(CM_STREAM_NON_BLOCKING, 0);
    void *pinned;
    unsigned char plain[N / 2];
    CHECK_OK(cm_rt_host_alloc(t.rt, N / 2, 0, &pinned));
    memset(pinned, 1, N / 2);
    memset(plain, 1, N / 2);
    CHECK_OK(cm_emulated_gate_close(t.rt, t.a));
    CHECK_OK(cm_rt_copy_async(t.rt, t.device, of(pinned), N / 2, t.a));
    CHECK_OK(cm_rt_copy_async(t.rt, t.device + N / 2, of(plain), N / 2, t.a));
    memset(pinned, 2, N / 2);
    memset(plain, 2, N / 2);
    CHECK_OK(cm_emulated_gate_open(t.rt, t.a));
    CHECK_OK(cm_rt_stream_synchronize(t.rt, t.a));
    CHECK_FILLED(t.alias, 2, N / 2);
    CHECK_FILLED(t.alias + N / 2, 1, N / 2);
    CHECK_OK(cm_rt_host_free(t.rt, pinned));
    tear_down(&t);
}

/* The body of a thread that opens the gate of stream a once everybody else waits. */
static void *
open_later(void *arg)
{
    const bench *t = arg;
    let_run();
    MUST(cm_emulated_gate_open(t->rt, t->a));
    return NULL;
}

/* A copy into ordinary memory must return only when the bytes are there, so it waits
 * for the gate. */
static void
test_copy_to_pageable_returns_when_done(void)
{
    bench t = set_up(CM_STREAM_NON_BLOCKING, 0);
    unsigned char plain[N];
    cm_thread thread;
    memset(plain, 9, N);
    CHECK_OK(cm_emulated_gate_close(t.rt, t.a));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 7, N, t.a));
    CHECK_OK(cm_thread_start(&thread, open_later, &t));
    CHECK_OK(cm_rt_copy_async(t.rt, of(plain), t.device, N, t.a));
    CHECK_FILLED(plain, 7, N);
    cm_thread_join(thread);
    tear_down(&t);
}

/* A new stream may get the handle of one that was destroyed, but never its id. */
static void
test_stream_handles_come_back_and_ids_do_not(void)
{
    bench t = set_up(0, 0);
    uint64_t first, second, first_id, second_id;
    CHECK_OK(cm_rt_stream_create(t.rt, 0, 0, &first));
    CHECK_OK(cm_rt_stream_get_id(t.rt, first, &first_id));
    CHECK_OK(cm_rt_stream_destroy(t.rt, first));
    CHECK_OK(cm_rt_stream_create(t.rt, 0, 0, &second));
    CHECK_OK(cm_rt_stream_get_id(t.rt, second, &second_id));
    CHECK_EQ(first, second);
    CHECK_NE(first_id, second_id);
    CHECK_OK(cm_rt_stream_destroy(t.rt, second));
    tear_down(&t);
}

static void
test_stream_and_event_flags_are_checked(void)
{
    bench t = set_up(0, 0);
    uint64_t handle;
    int least, greatest;
    CHECK_CODE(cm_rt_stream_create(t.rt, 2, 0, &handle), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_event_create(t.rt, 8, &handle), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_rt_event_create(t.rt, 4, &handle), CM_CUDA_INVALID_VALUE);
    CHECK_OK(cm_rt_stream_priority_range(t.rt, &least, &greatest));
    CHECK_LT(greatest, least);
    /* A priority outside the range is clamped, and not refused. */
    CHECK_OK(cm_rt_stream_create(t.rt, 0, greatest - 100, &handle));
    CHECK_OK(cm_rt_stream_destroy(t.rt, handle));
    tear_down(&t);
}

/* A stream is destroyed with work behind its shut gate. The work must still be done. */
static void
test_stream_destroyed_still_does_its_work(void)
{
    bench t = set_up(CM_STREAM_NON_BLOCKING, 0);
    uint64_t stream;
    CHECK_OK(cm_rt_stream_create(t.rt, CM_STREAM_NON_BLOCKING, 0, &stream));
    CHECK_OK(cm_emulated_gate_close(t.rt, stream));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 8, N, stream));
    CHECK_OK(cm_rt_stream_destroy(t.rt, stream));
    CHECK_OK(cm_rt_device_synchronize(t.rt));
    CHECK_FILLED(t.alias, 8, N);
    tear_down(&t);
}

static void
test_device_synchronize_waits_for_all_streams(void)
{
    bench t = set_up(CM_STREAM_NON_BLOCKING, 0);
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 1, N / 2, t.a));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device + N / 2, 1, N / 2, t.b));
    CHECK_OK(cm_rt_device_synchronize(t.rt));
    CHECK_FILLED(t.alias, 1, N);
    tear_down(&t);
}

/* The runtime is closed while streams wait behind a gate. Closing must end, and
 * sanitizers must find nothing left. */
static void
test_close_finishes_shut_streams(void)
{
    cm_emulated_config config;
    cm_runtime *rt;
    void *host;
    uint64_t stream, event;
    default_config(&config);
    CHECK_OK(cm_emulated_open(&config, &rt));
    CHECK_OK(cm_rt_host_alloc(rt, 100, 0, &host));
    CHECK_OK(cm_rt_stream_create(rt, 0, 0, &stream));
    CHECK_OK(cm_rt_event_create(rt, 0, &event));
    CHECK_OK(cm_emulated_gate_close(rt, stream));
    CHECK_OK(cm_rt_fill_8_async(rt, of(host), 1, 100, stream));
    CHECK_OK(cm_rt_event_record(rt, event, stream));
    CHECK_OK(cm_rt_stream_wait_event(rt, 0, event));
    CHECK_OK(cm_rt_fill_8_async(rt, of(host), 2, 100, 0));
    rt->close(rt); /* everything is still open, and work is queued */
}

static void
test_open_refuses_bad_configuration(void)
{
    cm_emulated_config config;
    cm_runtime *rt;
    default_config(&config);
    config.device_count = CM_MAX_DEVICES + 1;
    CHECK_CODE(cm_emulated_open(&config, &rt), CM_EINVALID);
    config.device_count = -1;
    CHECK_CODE(cm_emulated_open(&config, &rt), CM_EINVALID);
}

/* The body of a thread: copy bytes to a device on one new stream and back on another,
 * and check that they arrive. */
static void *
work_hard(void *arg)
{
    cm_runtime *rt = arg;
    for (int round = 0; round < 8; round++) {
        uint64_t there, back, event;
        cm_address device;
        void *pinned;
        MUST(
            cm_rt_stream_create(rt, round % 2 ? CM_STREAM_NON_BLOCKING : 0, 0, &there));
        MUST(cm_rt_stream_create(rt, 0, 0, &back));
        MUST(cm_rt_event_create(rt, 0, &event));
        MUST(cm_rt_device_alloc(rt, N, &device));
        MUST(cm_rt_host_alloc(rt, 2 * N, 0, &pinned));
        unsigned char *bytes = pinned;
        memset(bytes, round + 1, N);
        MUST(cm_rt_copy_async(rt, device, of(bytes), N, there));
        MUST(cm_rt_event_record(rt, event, there));
        MUST(cm_rt_stream_wait_event(rt, back, event));
        MUST(cm_rt_copy_async(rt, of(bytes + N), device, N, back));
        MUST(cm_rt_fill_8_async(rt, of(bytes), 0, N, 0));
        MUST(cm_rt_event_record(rt, event, back));
        MUST(cm_rt_stream_destroy(rt, there));
        MUST(cm_rt_event_synchronize(rt, event));
        for (int i = 0; i < N; i++) {
            if (bytes[N + i] != round + 1) {
                CHECK_FAIL_("byte %d is %d in round %d", i, bytes[N + i], round);
                break;
            }
        }
        MUST(cm_rt_stream_synchronize(rt, 0));
        MUST(cm_rt_stream_synchronize(rt, CM_STREAM_PER_THREAD));
        MUST(cm_rt_event_destroy(rt, event));
        MUST(cm_rt_stream_destroy(rt, back));
        MUST(cm_rt_device_free(rt, device));
        MUST(cm_rt_host_free(rt, pinned));
    }
    return NULL;
}

/* Six threads make streams, events, memory and copies of one runtime at the same
 * time. */
static void
test_many_threads_share_one_runtime(void)
{
    enum { COUNT = 6 };
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    cm_thread threads[COUNT];
    for (int i = 0; i < COUNT; i++) {
        CHECK_OK(cm_thread_start(&threads[i], work_hard, rt));
    }
    for (int i = 0; i < COUNT; i++) {
        cm_thread_join(threads[i]);
    }
    close_emulated(rt);
}

/* The body of a thread that uses its per-thread stream. */
static void *
use_own_stream(void *argument)
{
    bool done;
    cm_runtime *rt = argument;
    MUST(cm_rt_stream_query(rt, CM_STREAM_PER_THREAD, &done));
    return NULL;
}

/* Hundreds of threads use their per-thread stream and end. The runtime must not keep a
 * queue for each of them. */
static void
test_threads_that_have_gone_leave_nothing(void)
{
    /* A few queues may be left, since the kernel forgets a thread a moment after it has
     * ended. */
    enum { COUNT = 300, AT_MOST = 30 };
    cm_runtime *rt = open_emulated(13000, 1, MIB);
    for (int i = 0; i < COUNT; i++) {
        cm_thread thread;
        CHECK_OK(cm_thread_start(&thread, use_own_stream, rt));
        cm_thread_join(thread);
    }
    int queues = 0;
    cm_emulated *emulated = cm_emulated_of(rt);
    let_run(); /* the closed queues of ended threads remove themselves */
    cm_mutex_lock(&emulated->lock);
    const cm_list *list = &emulated->streams.queues;
    for (const cm_list *node = list->next; node != list; node = node->next) {
        queues++;
    }
    cm_mutex_unlock(&emulated->lock);
    CHECK_GE(queues, 1);
    CHECK_LT(queues, AT_MOST);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_gate_holds_work_until_opened)
     RUN(test_stream_runs_in_order)
     RUN(test_legacy_waits_for_blocking_streams)
     RUN(test_blocking_streams_wait_for_legacy)
     RUN(test_legacy_ignores_other_devices)
     RUN(test_per_thread_stream_is_the_threads_own)
     RUN(test_copy_reads_pinned_memory_late_and_pageable_at_once)
     RUN(test_copy_to_pageable_returns_when_done)
     RUN(test_stream_handles_come_back_and_ids_do_not)
     RUN(test_stream_and_event_flags_are_checked)
     RUN(test_stream_destroyed_still_does_its_work)
     RUN(test_device_synchronize_waits_for_all_streams)
     RUN(test_close_finishes_shut_streams)
     RUN(test_open_refuses_bad_configuration)
     RUN(test_many_threads_share_one_runtime)
     RUN(test_threads_that_have_gone_leave_nothing))
/* clang-format on */
