/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of runtime/: the names of operations, the guard that makes a device current for
 * a while, what forked children may do with a runtime, and the records of streams. */
#include <sys/wait.h>
#include <unistd.h>

#include "base/thread.h"
#include "open_emulated.h"
#include "runtime/stream.h"

/* Each operation has a name, the name of its CUDA function and the first driver that
 * has it. */
static void
test_op_names_follow_the_list(void)
{
    CHECK_STR_EQ(cm_op_facts[CM_OP_host_alloc].cuda_name, "cudaHostAlloc");
    CHECK_STR_EQ(cm_op_facts[CM_OP_host_alloc].name, "host_alloc");
    CHECK_STR_EQ(cm_op_facts[CM_OP_event_elapsed].cuda_name, "cudaEventElapsedTime");
    CHECK_EQ(cm_op_facts[CM_OP_host_alloc].min_driver, 12000);
    CHECK_EQ(cm_op_facts[CM_OP_context_record_event].min_driver, 12050);
    for (int i = 1; i < CM_OP_COUNT; i++) {
        CHECK(cm_op_facts[i].name != NULL);
        CHECK(cm_op_facts[i].cuda_name != NULL);
        CHECK_GE(cm_op_facts[i].min_driver, 12000);
    }
}

/* A thread without a current context must have none after a guard, however often it
 * uses one. */
static void
test_guard_without_context_leaves_none(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 1 << 20);
    cm_device_guard guard;
    uint64_t context = 99;
    for (int round = 0; round < 3; round++) {
        CHECK_OK(cm_device_enter(rt, 1, &guard));
        CHECK_OK(cm_rt_context_get(rt, &context));
        CHECK_EQ(context, 2);
        cm_device_leave(rt, &guard);
        CHECK_OK(cm_rt_context_get(rt, &context));
        CHECK_EQ(context, 0);
    }
    close_emulated(rt);
}

/* A guard inside a guard changes nothing, and the outer one must put back the device
 * that was current. */
static void
test_guard_puts_back_other_device(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 1 << 20);
    cm_device_guard outer, inner;
    uint64_t context;
    CHECK_OK(cm_rt_device_set(rt, 1));
    CHECK_OK(cm_device_enter(rt, 0, &outer));
    CHECK_OK(cm_device_enter(rt, 0, &inner));
    CHECK(!inner.switched);
    cm_device_leave(rt, &inner);
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(context, 1);
    cm_device_leave(rt, &outer);
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(context, 2);
    close_emulated(rt);
}

/* If the device is current already, entering and leaving it together make one call. */
static void
test_guard_same_device_costs_one_call(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_device_guard guard;
    CHECK_OK(cm_device_enter(rt, 0, &guard));
    cm_device_leave(rt, &guard);
    CHECK_OK(cm_rt_device_set(rt, 0));
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    CHECK_OK(cm_device_enter(rt, 0, &guard));
    cm_device_leave(rt, &guard);
    CHECK_EQ(cm_faults_count(rt, CM_OP_none), 1);
    close_emulated(rt);
}

/* The context that a guard remembers may be gone, which the driver reports. The guard
 * must then make a new one. */
static void
test_guard_stale_context_is_made_anew(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 1 << 20);
    cm_device_guard guard;
    CHECK_OK(cm_device_enter(rt, 1, &guard));
    cm_device_leave(rt, &guard);
    cm_faults_plan(rt, CM_OP_context_set, 1, CM_CUDA_DEVICE_UNINITIALIZED, false);
    CHECK_OK(cm_device_enter(rt, 1, &guard));
    CHECK(guard.switched);
    cm_device_leave(rt, &guard);
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_context_set);
    close_emulated(rt);
}

/* Whichever call of a guard fails, that failure is reported and the thread's context
 * stays what it was. */
static void
test_guard_failures_leave_the_context(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 1 << 20);
    cm_device_guard guard;
    uint64_t context;
    CHECK_CODE(cm_device_enter(rt, 2, &guard), CM_CUDA_INVALID_DEVICE);
    CHECK_CODE(cm_device_enter(rt, -1, &guard), CM_CUDA_INVALID_DEVICE);
    cm_faults_plan(rt, CM_OP_device_set, 1, 46, false);
    CHECK_CODE(cm_device_enter(rt, 1, &guard), 46);
    cm_faults_plan(rt, CM_OP_context_get, 2, 999, false);
    CHECK_CODE(cm_device_enter(rt, 1, &guard), 999);
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(context, 0);
    CHECK_OK(cm_device_enter(rt, 1, &guard));
    cm_device_leave(rt, &guard);
    cm_faults_plan(rt, CM_OP_context_set, 1, 999, false);
    CHECK_CODE(cm_device_enter(rt, 1, &guard), 999);
    close_emulated(rt);
}

/* If putting the device back fails once, the guard must try again. */
static void
test_guard_tries_twice_to_put_back(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 1 << 20);
    cm_device_guard guard;
    uint64_t context;
    CHECK_OK(cm_rt_device_set(rt, 1));
    CHECK_OK(cm_device_enter(rt, 0, &guard));
    cm_faults_plan(rt, CM_OP_context_set, 1, 999, false);
    cm_device_leave(rt, &guard);
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_context_set);
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(context, 2);
    close_emulated(rt);
}

/* A child finds out that it was forked, because the kernel wipes one page of the
 * runtime in it, and its calls must fail. */
static void
test_alive_page_is_wiped_by_fork(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_runtime_bind(rt);
    CHECK(!cm_runtime_is_forked(rt));
    pid_t child = fork();
    if (child == 0) {
        int count;
        bool good =
            cm_runtime_is_forked(rt) && cm_rt_device_count(rt, &count).code == 3;
        _exit(good ? 0 : 1);
    }
    int how = -1;
    CHECK_EQ(waitpid(child, &how, 0), child);
    CHECK_EQ(how, 0);
    CHECK(!cm_runtime_is_forked(rt));
    close_emulated(rt);
}

/* Return what `check` finds in a forked child. */
static bool
is_so_in_child(bool (*check)(cm_runtime *rt), cm_runtime *rt)
{
    pid_t child = fork();
    if (child == 0) {
        _exit(check(rt) ? 0 : 1);
    }
    int how = -1;
    return waitpid(child, &how, 0) == child && how == 0;
}

/* Return whether this process can use the runtime. */
static bool
works(cm_runtime *rt)
{
    void *host;
    return !cm_runtime_is_forked(rt) && cm_is_ok(cm_rt_host_alloc(rt, 64, 0, &host))
           && cm_is_ok(cm_rt_host_free(rt, host));
}

/* Return whether the runtime belongs to the parent, and its driver has been started. */
static bool
is_forked_and_awake(cm_runtime *rt)
{
    return cm_runtime_is_forked(rt) && cm_runtime_is_awake(rt);
}

/* Return whether the runtime belongs to the parent, and its driver has not been
 * started. */
static bool
is_forked_and_asleep(cm_runtime *rt)
{
    return cm_runtime_is_forked(rt) && !cm_runtime_is_awake(rt);
}

/* A runtime that nobody has used for real is asleep: its driver has not been started. A
 * child can go on with it. Once it is bound to its process, or awake, a child
 * cannot. */
static void
test_sleeping_runtime_goes_on_in_child(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 1 << 20);
    int number;
    CHECK_OK(cm_rt_device_count(rt, &number));
    CHECK_OK(cm_rt_driver_version(rt, &number));
    CHECK_OK(cm_rt_runtime_version(rt, &number));
    CHECK(!cm_runtime_is_awake(rt));
    CHECK_EQ(cm_devices_in_use(rt, true), 0);
    CHECK(!cm_runtime_wake_if_started(rt));
    CHECK(is_so_in_child(works, rt));
    CHECK(!cm_runtime_is_awake(rt)); /* only the child's copy of the runtime woke */
    cm_runtime_bind(rt);
    CHECK(is_so_in_child(is_forked_and_asleep, rt));
    CHECK(works(rt));
    CHECK(cm_runtime_is_awake(rt));
    CHECK(is_so_in_child(is_forked_and_awake, rt));
    close_emulated(rt);
}

/* After a fork the child has a runtime for the host alone. It answers questions about
 * devices, and its events and streams are always done. Whatever needs a driver must
 * fail with CM_EFORKED. */
static void
test_runtime_for_the_host_alone_refuses_what_needs_a_driver(void)
{
    cm_runtime *parent = open_emulated(12080, 2, 1 << 20);
    cm_runtime *rt = NULL;
    CHECK_OK(cm_host_only_open(parent, &rt));
    int number = 0;
    bool done = false;
    void *host = NULL;
    cm_address address = 0;
    uint64_t handle = 0;
    CHECK_OK(cm_rt_device_count(rt, &number));
    CHECK_EQ(number, 2);
    CHECK_OK(cm_rt_driver_version(rt, &number));
    CHECK_EQ(number, 12080);
    CHECK_OK(cm_rt_stream_query(rt, 0, &done));
    CHECK(done);
    CHECK_OK(cm_rt_event_create(rt, 0, &handle));
    CHECK_OK(cm_rt_event_record(rt, handle, 0));
    CHECK_OK(cm_rt_event_query(rt, handle, &done));
    CHECK_OK(cm_rt_event_destroy(rt, handle));
    CHECK_CODE(cm_rt_host_alloc(rt, 64, 0, &host), CM_EFORKED);
    CHECK_CODE(cm_rt_device_alloc(rt, 64, &address), CM_EFORKED);
    CHECK_CODE(cm_rt_stream_create(rt, 0, 0, &handle), CM_EFORKED);
    CHECK_CODE(cm_rt_copy_async(rt, 1, 2, 3, 0), CM_EFORKED);
    CHECK(!cm_runtime_wake_if_started(rt));
    CHECK(!cm_runtime_is_forked(rt));
    rt->close(rt);
    close_emulated(parent);
}

/* An operation that the driver is too old for must fail with CM_ENOTSUP and its own
 * name. */
static void
test_operation_newer_than_driver_is_not_supported(void)
{
    cm_runtime *rt = open_emulated(12040, 1, 1 << 20);
    CHECK(!cm_runtime_has(rt, CM_OP_context_record_event));
    CHECK(cm_runtime_has(rt, CM_OP_copy_async));
    int device;
    cm_status status = cm_rt_stream_get_device(rt, 0, &device);
    CHECK_CODE(status, CM_ENOTSUP);
    CHECK_EQ(status.op, CM_OP_stream_get_device);
    CHECK_CODE(cm_rt_context_record_event(rt, 1), CM_ENOTSUP);
    close_emulated(rt);
    rt = open_emulated(12080, 1, 1 << 20);
    CHECK_OK(cm_rt_stream_get_device(rt, 0, &device));
    CHECK_EQ(device, 0);
    close_emulated(rt);
}

/* The handle of a stream that we make lives until the last release of its record. */
static void
test_stream_record_owns_its_handle(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 1 << 20);
    cm_stream *stream = NULL;
    cm_emulated_counts counts;
    uint64_t id;
    CHECK_OK(cm_stream_create(rt, 1, CM_STREAM_NON_BLOCKING, 0, &stream));
    CHECK_EQ(stream->device, 1);
    CHECK(stream->owns_handle);
    CHECK_OK(cm_rt_stream_get_id(rt, stream->handle, &id));
    CHECK_EQ(stream->id, id);
    cm_emulated_read_counts(rt, &counts);
    CHECK_EQ(counts.streams, 1);
    CHECK_PTR_EQ(cm_stream_hold(stream), stream);
    cm_stream_release(stream);
    cm_emulated_read_counts(rt, &counts);
    CHECK_EQ(counts.streams, 1);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* A drop_owner that counts its calls in the owner. */
static void
drop_count(void *owner)
{
    ++*(int *)owner;
}

/* The record of another library's stream must drop its owner with the last release. If
 * wrapping fails, the owner stays with the caller. */
static void
test_stream_wrapped_drops_its_owner_once(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_stream *mine = NULL;
    cm_stream *same = NULL;
    int drops = 0;
    CHECK_OK(cm_stream_create(rt, 0, 0, 0, &mine));
    CHECK_OK(cm_stream_wrap(rt, 0, mine->handle, &drops, drop_count, &same));
    CHECK_EQ(same->id, mine->id);
    (void)cm_stream_hold(same);
    cm_stream_release(same);
    CHECK_EQ(drops, 0);
    cm_stream_release(same);
    CHECK_EQ(drops, 1);
    uint64_t stale = mine->handle;
    cm_stream_release(mine);
    CHECK_CODE(cm_stream_wrap(rt, 0, stale, &drops, drop_count, &same),
               CM_CUDA_INVALID_HANDLE);
    CHECK_EQ(drops, 1);
    close_emulated(rt);
}

/* Both handles of the legacy stream must have the same id. */
static void
test_stream_legacy_handles_have_a_fixed_id(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    for (uint64_t handle = 0; handle < CM_STREAM_PER_THREAD; handle++) {
        cm_stream *stream = NULL;
        CHECK_OK(cm_stream_wrap(rt, 0, handle, NULL, NULL, &stream));
        CHECK_EQ(stream->handle, handle);
        CHECK_EQ(stream->id, CM_STREAM_LEGACY);
        cm_stream_release(stream);
    }
    close_emulated(rt);
}

/* Records of the per-thread streams of two threads. */
typedef struct own_streams {
    cm_runtime *rt;
    cm_stream *of_main;
    cm_stream *of_other; /* the record that the other thread made */
    bool is_main_here; /* whether the other thread takes `of_main` for its own stream */
} own_streams;

/* The body of the other thread. */
static void *
look_from_elsewhere(void *argument)
{
    own_streams *own = argument;
    MUST(cm_stream_wrap(own->rt, 0, CM_STREAM_PER_THREAD, NULL, NULL, &own->of_other));
    own->is_main_here = cm_stream_is_of_this_thread(own->of_main);
    return NULL;
}

/* Two records of one thread's stream are the same stream, and those of two threads are
 * not, although all have the same handle. */
static void
test_stream_of_its_own_is_each_threads(void)
{
    own_streams own = {.rt = open_emulated(13000, 1, 1 << 20)};
    cm_stream *again;
    cm_thread thread;
    CHECK_OK(cm_stream_wrap(own.rt, 0, CM_STREAM_PER_THREAD, NULL, NULL, &own.of_main));
    CHECK_OK(cm_stream_wrap(own.rt, 0, CM_STREAM_PER_THREAD, NULL, NULL, &again));
    MUST(cm_thread_start(&thread, look_from_elsewhere, &own));
    cm_thread_join(thread);
    CHECK(cm_stream_same(own.of_main, again));
    CHECK(!cm_stream_same(own.of_main, own.of_other));
    CHECK(cm_stream_is_of_this_thread(own.of_main));
    CHECK(!cm_stream_is_of_this_thread(own.of_other));
    CHECK(!own.is_main_here);
    cm_stream_release(own.of_main);
    cm_stream_release(again);
    cm_stream_release(own.of_other);
    close_emulated(own.rt);
}

/* A stream of ours cannot be captured before anybody else has its handle. Another
 * library's stream and the per-thread stream can be captured at any time, and the
 * legacy stream never. */
static void
test_stream_that_nobody_else_knows_is_not_captured(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_stream *mine = NULL;
    CHECK_OK(cm_stream_create(rt, 0, 0, 0, &mine));
    CHECK(!cm_stream_may_capture(mine));
    for (uint64_t handle = 0; handle <= CM_STREAM_PER_THREAD + 1; handle++) {
        bool is_known = handle > CM_STREAM_PER_THREAD;
        cm_stream *same = NULL;
        CHECK_OK(
            cm_stream_wrap(rt, 0, is_known ? mine->handle : handle, NULL, NULL, &same));
        CHECK_EQ(cm_stream_may_capture(same), handle >= CM_STREAM_PER_THREAD);
        CHECK_EQ(cm_stream_export_handle(same), same->handle);
        CHECK_EQ(cm_stream_may_capture(same), handle >= CM_STREAM_PER_THREAD);
        cm_stream_release(same);
    }
    CHECK_EQ(cm_stream_export_handle(mine), mine->handle);
    CHECK(cm_stream_may_capture(mine));
    cm_stream_release(mine);
    close_emulated(rt);
}

/* A stream that waits for an event of a capture becomes part of that capture. The
 * record must find this out after such a wait, and after a wait about which the driver
 * gave no answer. */
static void
test_stream_is_asked_whether_a_wait_took_it_into_a_capture(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_stream *streams[3] = {NULL};
    uint64_t event;
    CHECK_OK(cm_rt_event_create(rt, CM_EVENT_DISABLE_TIMING, &event));
    for (int i = 0; i < 3; i++) {
        CHECK_OK(cm_stream_create(rt, 0, CM_STREAM_NON_BLOCKING, 0, &streams[i]));
    }
    CHECK_OK(cm_stream_follow(streams[0], streams[1]));
    CHECK(!cm_stream_may_capture(streams[0]));

    CHECK_OK(cm_emulated_set_capturing(rt, streams[1]->handle, true));
    CHECK_OK(cm_rt_event_record(rt, event, streams[1]->handle));
    /* This is an event of the same capture. */
    CHECK_OK(cm_stream_wait_event(streams[1], event));
    CHECK_OK(cm_emulated_set_capturing(rt, streams[1]->handle, false));
    CHECK(cm_stream_may_capture(streams[1]));

    CHECK_OK(cm_rt_event_record(rt, event, streams[0]->handle));
    cm_faults_plan(rt, CM_OP_stream_is_capturing, 1, 999, false);
    CHECK_OK(cm_stream_wait_event(streams[2], event));
    CHECK(cm_stream_may_capture(streams[2]));
    /* The stream counts as one that may capture now, so the driver is not asked
     * again. */
    CHECK_OK(cm_stream_wait_event(streams[2], event));
    CHECK_EQ(cm_faults_count(rt, CM_OP_stream_is_capturing), 1);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(cm_rt_stream_synchronize(rt, streams[i]->handle));
        cm_stream_release(streams[i]);
    }
    CHECK_OK(cm_rt_event_destroy(rt, event));
    close_emulated(rt);
}

/* -- a race of two waits ----------------------------------------------------------------- */

/* Two threads make one stream wait for events. The first is about to ask whether that
 * took the stream into a capture when the second makes it wait for an event of a
 * capture. The second wait must not be forgotten. In this test a single thread plays
 * both: staged_is_capturing() makes the second wait. */
enum { EVENT_OF_A_CAPTURE = 4711 };

static cm_ops_table staged_ops;
static cm_stream *staged_stream;
static bool staged_joined;
static int staged_asked;

/* A stream_wait_event that only notes whether the stream is in a capture now. */
static cm_status
staged_wait_event(cm_runtime *rt, uint64_t stream, uint64_t event)
{
    (void)rt;
    (void)stream;
    staged_joined = staged_joined || event == EVENT_OF_A_CAPTURE;
    return cm_ok();
}

/* A stream_is_capturing that first makes the wait of the second thread, and then
 * answers with what was true before. */
static cm_status
staged_is_capturing(cm_runtime *rt, uint64_t stream, bool *out)
{
    (void)rt;
    (void)stream;
    *out = staged_joined;
    return staged_asked++ == 0 ? cm_stream_wait_event(staged_stream, EVENT_OF_A_CAPTURE)
                               : cm_ok();
}

static void
test_stream_two_waits_at_once_do_not_hide_a_capture(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    const cm_ops_table *ops = rt->ops;
    CHECK_OK(cm_stream_create(rt, 0, CM_STREAM_NON_BLOCKING, 0, &staged_stream));
    staged_ops = *ops;
    staged_ops.stream_wait_event = staged_wait_event;
    staged_ops.stream_is_capturing = staged_is_capturing;
    rt->ops = &staged_ops;
    CHECK_OK(cm_stream_wait_event(staged_stream, EVENT_OF_A_CAPTURE - 1));
    rt->ops = ops;
    CHECK(staged_joined);
    CHECK(cm_stream_may_capture(staged_stream));
    cm_stream_release(staged_stream);
    close_emulated(rt);
}

/* cm_stream_try_release() must not drop the last reference, since that would make
 * runtime calls. */
static void
test_stream_last_reference_is_not_tried(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_stream *stream = NULL;
    CHECK_OK(cm_stream_create(rt, 0, 0, 0, &stream));
    (void)cm_stream_hold(stream);
    CHECK(cm_stream_try_release(stream));
    CHECK(!cm_stream_try_release(stream));
    cm_stream_release(stream);
    close_emulated(rt);
}

/* Whichever call fails while a stream is made, no stream is left and no context is
 * current. */
static void
test_stream_create_failures_leak_nothing(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_stream *stream = NULL;
    cm_faults_plan(rt, CM_OP_stream_get_id, 1, 999, false);
    CHECK_CODE(cm_stream_create(rt, 0, 0, 0, &stream), 999);
    cm_faults_plan(rt, CM_OP_stream_create, 1, 2, false);
    CHECK_CODE(cm_stream_create(rt, 0, 0, 0, &stream), 2);
    CHECK_CODE(cm_stream_create(rt, 1, 0, 0, &stream), CM_CUDA_INVALID_DEVICE);
    uint64_t context;
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(context, 0);
    close_emulated(rt);
}

/* A stream can be destroyed only while its device is current. If making it current
 * fails once, it must be tried again, so that the stream does not leak. */
static void
test_stream_release_tries_its_device_twice(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_stream *stream = NULL;
    CHECK_OK(cm_stream_create(rt, 0, 0, 0, &stream));
    cm_faults_plan(rt, CM_OP_context_get, 1, 999, false);
    cm_stream_release(stream);
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_context_get);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_op_names_follow_the_list)
     RUN(test_guard_without_context_leaves_none)
     RUN(test_guard_puts_back_other_device)
     RUN(test_guard_same_device_costs_one_call)
     RUN(test_guard_stale_context_is_made_anew)
     RUN(test_guard_failures_leave_the_context)
     RUN(test_guard_tries_twice_to_put_back)
     RUN(test_alive_page_is_wiped_by_fork)
     RUN(test_sleeping_runtime_goes_on_in_child)
     RUN(test_runtime_for_the_host_alone_refuses_what_needs_a_driver)
     RUN(test_operation_newer_than_driver_is_not_supported)
     RUN(test_stream_record_owns_its_handle)
     RUN(test_stream_wrapped_drops_its_owner_once)
     RUN(test_stream_legacy_handles_have_a_fixed_id)
     RUN(test_stream_of_its_own_is_each_threads)
     RUN(test_stream_that_nobody_else_knows_is_not_captured)
     RUN(test_stream_is_asked_whether_a_wait_took_it_into_a_capture)
     RUN(test_stream_two_waits_at_once_do_not_hide_a_capture)
     RUN(test_stream_last_reference_is_not_tried)
     RUN(test_stream_create_failures_leak_nothing)
     RUN(test_stream_release_tries_its_device_twice))
/* clang-format on */
