/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the emulated device's events, of handles that must be refused, and of
 * captures. An event stands for the work that its stream had been given when it was
 * recorded. A capture notes the work of a stream for a graph instead of running it. */
#include "emulated_bench.h"

/* A query of an event that was never recorded, and a wait for it, must succeed at once,
 * as with CUDA. */
static void
test_event_never_recorded_has_happened(void)
{
    bench t = set_up(0, 0);
    uint64_t event;
    CHECK_OK(cm_rt_event_create(t.rt, 0, &event));
    CHECK(has_happened(t.rt, event));
    CHECK_OK(cm_rt_event_synchronize(t.rt, event));
    CHECK_OK(cm_rt_stream_wait_event(t.rt, t.a, event));
    CHECK(is_done(t.rt, t.a));
    CHECK_OK(cm_rt_event_destroy(t.rt, event));
    tear_down(&t);
}

/* Stream b waits for an event of stream a, which is held behind a gate. Nothing of b
 * may run before the gate opens. */
static void
test_event_orders_streams(void)
{
    bench t = set_up(CM_STREAM_NON_BLOCKING, CM_STREAM_NON_BLOCKING);
    uint64_t event;
    CHECK_OK(cm_rt_event_create(t.rt, CM_EVENT_DISABLE_TIMING, &event));
    CHECK_OK(cm_emulated_gate_close(t.rt, t.a));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 1, N, t.a));
    CHECK_OK(cm_rt_event_record(t.rt, event, t.a));
    CHECK(!has_happened(t.rt, event));
    CHECK_OK(cm_rt_stream_wait_event(t.rt, t.b, event));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 2, N, t.b));
    /* The event is recorded again and then destroyed. A stream that waits already must
     * still wait for the first record. */
    CHECK_OK(cm_rt_event_record(t.rt, event, t.a));
    CHECK_OK(cm_rt_event_destroy(t.rt, event));
    let_run();
    CHECK_FILLED(t.alias, 0, N);
    CHECK(!is_done(t.rt, t.b));
    CHECK_OK(cm_emulated_gate_open(t.rt, t.a));
    CHECK_OK(cm_rt_stream_synchronize(t.rt, t.b));
    CHECK_FILLED(t.alias, 2, N);
    tear_down(&t);
}

/* After a second record the event must stand for the later work, and not for the work
 * that has ended. */
static void
test_event_recorded_again_means_the_later_work(void)
{
    bench t = set_up(CM_STREAM_NON_BLOCKING, CM_STREAM_NON_BLOCKING);
    uint64_t event;
    CHECK_OK(cm_rt_event_create(t.rt, 0, &event));
    CHECK_OK(cm_rt_event_record(t.rt, event, t.b));
    CHECK_OK(cm_rt_event_synchronize(t.rt, event));
    CHECK(has_happened(t.rt, event));
    CHECK_OK(cm_emulated_gate_close(t.rt, t.a));
    CHECK_OK(cm_rt_event_record(t.rt, event, t.a));
    CHECK(!has_happened(t.rt, event));
    CHECK_OK(cm_emulated_gate_open(t.rt, t.a));
    CHECK_OK(cm_rt_event_synchronize(t.rt, event));
    CHECK(has_happened(t.rt, event));
    CHECK_OK(cm_rt_event_destroy(t.rt, event));
    tear_down(&t);
}

/* The time between two events is refused for events without time, and as long as one of
 * them has not happened. After that it must contain the time for which the gate was
 * shut. */
static void
test_event_elapsed_measures_and_refuses(void)
{
    bench t = set_up(CM_STREAM_NON_BLOCKING, 0);
    uint64_t start, end, untimed;
    float ms = -1;
    CHECK_OK(cm_rt_event_create(t.rt, 0, &start));
    CHECK_OK(cm_rt_event_create(t.rt, CM_EVENT_BLOCKING_SYNC, &end));
    CHECK_OK(cm_rt_event_create(t.rt, CM_EVENT_DISABLE_TIMING, &untimed));
    CHECK_CODE(cm_rt_event_elapsed(t.rt, start, end, &ms), CM_CUDA_INVALID_HANDLE);
    CHECK_OK(cm_rt_event_record(t.rt, start, t.a));
    CHECK_OK(cm_rt_event_synchronize(t.rt, start));
    CHECK_CODE(cm_rt_event_elapsed(t.rt, start, end, &ms), CM_CUDA_INVALID_HANDLE);
    CHECK_OK(cm_emulated_gate_close(t.rt, t.a));
    CHECK_OK(cm_rt_event_record(t.rt, end, t.a));
    CHECK_OK(cm_rt_event_record(t.rt, untimed, t.a));
    CHECK_CODE(cm_rt_event_elapsed(t.rt, start, end, &ms), CM_CUDA_NOT_READY);
    let_run();
    CHECK_OK(cm_emulated_gate_open(t.rt, t.a));
    CHECK_OK(cm_rt_stream_synchronize(t.rt, t.a));
    CHECK_OK(cm_rt_event_elapsed(t.rt, start, end, &ms));
    CHECK_GE(ms, 5);
    CHECK_OK(cm_rt_event_elapsed(t.rt, end, start, &ms));
    CHECK_LE(ms, -5);
    CHECK_CODE(cm_rt_event_elapsed(t.rt, start, untimed, &ms), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_event_elapsed(t.rt, start, 4711, &ms), CM_CUDA_INVALID_HANDLE);
    CHECK_OK(cm_rt_event_destroy(t.rt, start));
    CHECK_OK(cm_rt_event_destroy(t.rt, end));
    CHECK_OK(cm_rt_event_destroy(t.rt, untimed));
    tear_down(&t);
}

/* cm_rt_context_record_event() makes an event over all streams of a device. It must not
 * have happened while one of them is shut. */
static void
test_event_of_device_stands_behind_every_stream(void)
{
    bench t = set_up(CM_STREAM_NON_BLOCKING, 0);
    uint64_t event;
    CHECK_OK(cm_rt_event_create(t.rt, CM_EVENT_DISABLE_TIMING, &event));
    CHECK_OK(cm_emulated_gate_close(t.rt, t.a));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 1, N, t.a));
    CHECK_OK(cm_rt_context_record_event(t.rt, event));
    CHECK_OK(cm_rt_stream_synchronize(t.rt, t.b));
    let_run();
    CHECK(!has_happened(t.rt, event));
    CHECK_OK(cm_emulated_gate_open(t.rt, t.a));
    CHECK_OK(cm_rt_event_synchronize(t.rt, event));
    CHECK_FILLED(t.alias, 1, N);
    CHECK_OK(cm_rt_event_destroy(t.rt, event));
    CHECK_CODE(cm_rt_context_record_event(t.rt, event), CM_CUDA_INVALID_HANDLE);
    CHECK_OK(cm_rt_context_set(t.rt, 0));
    CHECK_CODE(cm_rt_context_record_event(t.rt, event), CM_CUDA_DEVICE_UNINITIALIZED);
    tear_down(&t);
}

/* Device 1 is current. Work on a stream of device 0 must be refused, but waits may go
 * across devices. Handle 0 means the default stream of the current device. */
static void
test_handles_of_other_devices_are_refused(void)
{
    bench t = set_up(0, 0);
    uint64_t event;
    int device;
    CHECK_OK(cm_rt_device_set(t.rt, 1));
    CHECK_OK(cm_rt_event_create(t.rt, 0, &event));
    CHECK_CODE(cm_rt_event_record(t.rt, event, t.a), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_fill_8_async(t.rt, t.device, 1, N, t.a), CM_CUDA_INVALID_HANDLE);
    CHECK_OK(cm_rt_event_record(t.rt, event, 0));
    /* A wait may go across devices. */
    CHECK_OK(cm_rt_stream_wait_event(t.rt, t.a, event));
    CHECK_OK(cm_rt_stream_get_device(t.rt, t.a, &device));
    CHECK_EQ(device, 0);
    CHECK_OK(cm_rt_stream_get_device(t.rt, 0, &device));
    CHECK_EQ(device, 1);
    CHECK_OK(cm_rt_event_destroy(t.rt, event));
    CHECK_OK(cm_rt_device_set(t.rt, 0));
    tear_down(&t);
}

/* Each call with a stream or event that was destroyed must be refused, and default
 * streams cannot be destroyed. */
static void
test_handles_stale_are_refused(void)
{
    bench t = set_up(0, 0);
    uint64_t event, stream, id;
    bool flag;
    CHECK_OK(cm_rt_stream_create(t.rt, 0, 0, &stream));
    CHECK_OK(cm_rt_event_create(t.rt, 0, &event));
    CHECK_OK(cm_rt_event_destroy(t.rt, event));
    CHECK_OK(cm_rt_stream_destroy(t.rt, stream));
    CHECK_CODE(cm_rt_stream_destroy(t.rt, stream), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_stream_query(t.rt, stream, &flag), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_stream_synchronize(t.rt, stream), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_stream_get_id(t.rt, stream, &id), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_stream_is_capturing(t.rt, stream, &flag), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_stream_wait_event(t.rt, t.a, event), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_fill_8_async(t.rt, t.device, 0, 1, stream),
               CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_copy_async(t.rt, t.device, t.device, 1, stream),
               CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_event_destroy(t.rt, event), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_event_record(t.rt, event, t.a), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_event_query(t.rt, event, &flag), CM_CUDA_INVALID_HANDLE);
    CHECK_CODE(cm_rt_event_synchronize(t.rt, event), CM_CUDA_INVALID_HANDLE);
    for (uint64_t handle = 0; handle <= CM_STREAM_PER_THREAD; handle++) {
        CHECK_CODE(cm_rt_stream_destroy(t.rt, handle), CM_CUDA_INVALID_HANDLE);
    }
    tear_down(&t);
}

/* While stream b is captured, calls that may wait for a device must fail and break the
 * capture. In the thread's relaxed mode only calls about b itself fail. Ending the
 * broken capture reports code 901. */
static void
test_capture_forbids_what_may_synchronise(void)
{
    bench t = set_up(0, CM_STREAM_NON_BLOCKING);
    cm_address address;
    uint64_t event, module;
    void *host;
    bool flag;
    int mode = CM_CAPTURE_RELAXED;
    CHECK_OK(cm_rt_event_create(t.rt, 0, &event));
    CHECK_OK(cm_emulated_set_capturing(t.rt, t.b, true));
    CHECK_OK(cm_rt_stream_is_capturing(t.rt, t.b, &flag));
    CHECK(flag);
    CHECK_OK(cm_rt_stream_is_capturing(t.rt, t.a, &flag));
    CHECK(!flag);
    CHECK_CODE(cm_rt_stream_query(t.rt, t.b, &flag), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_stream_synchronize(t.rt, t.b), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_stream_query(t.rt, t.a, &flag), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_stream_synchronize(t.rt, t.a), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_event_query(t.rt, event, &flag), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_event_synchronize(t.rt, event), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_device_alloc(t.rt, 10, &address), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_managed_alloc(t.rt, 10, 1, &address), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_host_alloc(t.rt, 10, 0, &host), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_device_free(t.rt, t.device), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_device_synchronize(t.rt), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_module_load(t.rt, ".version .target", &module),
               CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_rt_context_record_event(t.rt, event), CM_CUDA_CAPTURE_UNSUPPORTED);

    CHECK_OK(cm_rt_capture_mode_exchange(t.rt, &mode));
    CHECK_EQ(mode, 0);
    CHECK_OK(cm_rt_host_alloc(t.rt, 10, 0, &host));
    CHECK_OK(cm_rt_host_free(t.rt, host));
    CHECK_OK(cm_rt_event_query(t.rt, event, &flag));
    CHECK_OK(cm_rt_stream_query(t.rt, t.a, &flag));
    CHECK_CODE(cm_rt_stream_query(t.rt, t.b, &flag), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_OK(cm_rt_capture_mode_exchange(t.rt, &mode));
    CHECK_EQ(mode, CM_CAPTURE_RELAXED);
    mode = 3;
    CHECK_CODE(cm_rt_capture_mode_exchange(t.rt, &mode), CM_CUDA_INVALID_VALUE);
    CHECK_CODE(cm_emulated_set_capturing(t.rt, t.b, false), 901);
    CHECK_OK(cm_rt_host_alloc(t.rt, 10, 0, &host));
    CHECK_OK(cm_rt_host_free(t.rt, host));
    CHECK_OK(cm_rt_event_destroy(t.rt, event));
    tear_down(&t);
}

/* Work on a captured stream goes into the graph, which nobody runs, so the memory must
 * stay as it was. Events of the capture cannot be queried, and work in the capture
 * cannot wait for events from outside. */
static void
test_capture_takes_work_that_then_never_runs(void)
{
    bench t = set_up(0, 0);
    uint64_t event, outside;
    bool flag;
    int mode = CM_CAPTURE_RELAXED;
    CHECK_OK(cm_rt_event_create(t.rt, 0, &event));
    CHECK_OK(cm_rt_event_create(t.rt, 0, &outside));
    CHECK_OK(cm_rt_event_record(t.rt, outside, t.a));
    CHECK_OK(cm_emulated_set_capturing(t.rt, t.b, true));
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 3, N, t.b));
    CHECK_OK(cm_rt_event_record(t.rt, event, t.b));
    CHECK_CODE(cm_rt_stream_wait_event(t.rt, t.b, outside), 905);
    CHECK_OK(cm_rt_stream_wait_event(t.rt, t.b, event));
    CHECK_OK(cm_rt_capture_mode_exchange(t.rt, &mode));
    CHECK_CODE(cm_rt_event_query(t.rt, event, &flag), 907);
    /* Work on the legacy stream would have to wait for the capture, so it is
     * refused. */
    CHECK_CODE(cm_rt_fill_8_async(t.rt, t.device, 4, N, 0), 906);
    CHECK_CODE(cm_rt_stream_is_capturing(t.rt, 0, &flag), 906);
    CHECK_CODE(cm_emulated_set_capturing(t.rt, 0, true), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_OK(cm_emulated_set_capturing(t.rt, t.b, false));
    CHECK_OK(cm_rt_capture_mode_exchange(t.rt, &mode));
    CHECK_OK(cm_rt_device_synchronize(t.rt));
    CHECK_FILLED(t.alias, 0, N);
    CHECK(has_happened(t.rt, event));
    CHECK_OK(cm_rt_event_destroy(t.rt, event));
    CHECK_OK(cm_rt_event_destroy(t.rt, outside));
    tear_down(&t);
}

/* A stream that waits for an event of a capture becomes part of it, until the capture
 * ends. A stream of another capture cannot. */
static void
test_capture_takes_a_stream_that_waits_for_its_event(void)
{
    bench t = set_up(0, CM_STREAM_NON_BLOCKING);
    uint64_t event, other;
    bool flag;
    CHECK_OK(cm_rt_event_create(t.rt, 0, &event));
    CHECK_OK(cm_rt_stream_create(t.rt, CM_STREAM_NON_BLOCKING, 0, &other));
    CHECK_OK(cm_emulated_set_capturing(t.rt, t.b, true));
    CHECK_OK(cm_rt_event_record(t.rt, event, t.b));
    CHECK_CODE(cm_rt_stream_wait_event(t.rt, 0, event), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_OK(cm_rt_stream_wait_event(t.rt, t.a, event));
    CHECK_OK(cm_rt_stream_is_capturing(t.rt, t.a, &flag));
    CHECK(flag);
    CHECK_OK(cm_rt_fill_8_async(t.rt, t.device, 3, N, t.a));
    CHECK_OK(cm_emulated_set_capturing(t.rt, other, true));
    CHECK_CODE(cm_rt_stream_wait_event(t.rt, other, event), 902);
    CHECK_OK(cm_emulated_set_capturing(t.rt, other, false));
    CHECK_OK(cm_rt_event_record(t.rt, event, t.a));
    CHECK_OK(cm_rt_stream_wait_event(t.rt, t.b, event));
    CHECK_OK(cm_emulated_set_capturing(t.rt, t.b, false));
    CHECK_OK(cm_rt_stream_is_capturing(t.rt, t.a, &flag));
    CHECK(!flag);
    CHECK_OK(cm_rt_device_synchronize(t.rt));
    CHECK_FILLED(t.alias, 0, N);
    CHECK_OK(cm_rt_stream_destroy(t.rt, other));
    CHECK_OK(cm_rt_event_destroy(t.rt, event));
    tear_down(&t);
}

/* The body of a thread that begins a capture of stream b. */
static void *
set_capturing_elsewhere(void *arg)
{
    const bench *t = arg;
    MUST(cm_emulated_set_capturing(t->rt, t->b, true));
    return NULL;
}

/* Another thread has begun a capture. In the global mode that capture forbids this
 * thread's calls. In the thread-local mode only captures that this thread began forbid
 * them. */
static void
test_capture_of_other_thread_counts_in_global_mode_only(void)
{
    bench t = set_up(0, CM_STREAM_NON_BLOCKING);
    cm_thread thread;
    void *host;
    int mode = 1; /* the thread-local mode */
    CHECK_OK(cm_thread_start(&thread, set_capturing_elsewhere, &t));
    cm_thread_join(thread);
    CHECK_CODE(cm_rt_host_alloc(t.rt, 10, 0, &host), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_OK(cm_rt_capture_mode_exchange(t.rt, &mode));
    CHECK_OK(cm_rt_host_alloc(t.rt, 10, 0, &host));
    CHECK_OK(cm_rt_host_free(t.rt, host));
    CHECK_CODE(cm_emulated_set_capturing(t.rt, t.b, false), 901);
    CHECK_OK(cm_emulated_set_capturing(t.rt, t.b, true));
    CHECK_CODE(cm_rt_host_alloc(t.rt, 10, 0, &host), CM_CUDA_CAPTURE_UNSUPPORTED);
    CHECK_CODE(cm_emulated_set_capturing(t.rt, t.b, false), 901);
    CHECK_OK(cm_emulated_set_capturing(t.rt, t.b, true));
    CHECK_OK(cm_emulated_set_capturing(t.rt, t.b, false));
    CHECK_OK(cm_rt_capture_mode_exchange(t.rt, &mode));
    tear_down(&t);
}

/* clang-format off */
MAIN(RUN(test_event_never_recorded_has_happened)
     RUN(test_event_orders_streams)
     RUN(test_event_recorded_again_means_the_later_work)
     RUN(test_event_elapsed_measures_and_refuses)
     RUN(test_event_of_device_stands_behind_every_stream)
     RUN(test_handles_of_other_devices_are_refused)
     RUN(test_handles_stale_are_refused)
     RUN(test_capture_forbids_what_may_synchronise)
     RUN(test_capture_takes_work_that_then_never_runs)
     RUN(test_capture_takes_a_stream_that_waits_for_its_event)
     RUN(test_capture_of_other_thread_counts_in_global_mode_only))
/* clang-format on */
