/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the fault wrapper of runtimes: it must count calls, make the planned ones
 * fail without reaching the inner runtime, delay them, and otherwise act as the runtime
 * that it wraps. */
#include "base/thread.h"
#include "open_emulated.h"

/* The wrapper must have the same facts about driver and devices as the inner
 * runtime. */
static void
test_faults_stand_in_for_the_inner_runtime(void)
{
    cm_runtime *rt = open_emulated(12080, 3, 1 << 20);
    CHECK(rt->inner != NULL);
    CHECK_PTR_EQ(rt->inner->inner, NULL);
    CHECK_EQ(rt->backend, CM_BACKEND_EMULATED);
    CHECK_EQ(rt->driver_version, 12080);
    CHECK_EQ(rt->device_count, 3);
    CHECK_PTR_EQ(rt->alive, rt->inner->alive);
    CHECK_PTR_EQ(rt->reason, rt->inner->reason);
    close_emulated(rt);
}

static void
test_faults_count_calls_by_operation(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    int version;
    uint64_t context;
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    CHECK_OK(cm_rt_driver_version(rt, &version));
    CHECK_OK(cm_rt_driver_version(rt, &version));
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(cm_faults_count(rt, CM_OP_driver_version), 2);
    CHECK_EQ(cm_faults_count(rt, CM_OP_context_get), 1);
    CHECK_EQ(cm_faults_count(rt, CM_OP_none), 3);
    CHECK_EQ(cm_faults_count(rt, CM_OP_COUNT), 0);
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    CHECK_EQ(cm_faults_count(rt, CM_OP_none), 0);
    close_emulated(rt);
}

/* The second call of an operation is to fail. It must report the operation and its
 * argument, leave its output alone and not reach the inner runtime. The calls before
 * and after it must succeed. */
static void
test_faults_fail_the_nth_call_only(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_address address = 0;
    cm_emulated_counts counts;
    cm_faults_plan(rt, CM_OP_device_alloc, 2, CM_CUDA_OUT_OF_MEMORY, false);
    CHECK_OK(cm_rt_device_alloc(rt, 100, &address));
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_none);
    CHECK_OK(cm_rt_device_free(rt, address));
    address = 77;
    cm_status status = cm_rt_device_alloc(rt, 123, &address);
    CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
    CHECK_EQ(status.op, CM_OP_device_alloc);
    CHECK_EQ(status.arg, 123);
    CHECK_EQ(address, 77);
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_device_alloc);
    cm_emulated_read_counts(rt, &counts);
    CHECK_EQ(counts.device_allocs, 0);
    CHECK_OK(cm_rt_device_alloc(rt, 100, &address));
    CHECK_OK(cm_rt_device_free(rt, address));
    close_emulated(rt);
}

/* After a free that failed the memory must still be live, so that a second free
 * succeeds. */
static void
test_faults_failed_free_does_not_reach_the_inner_runtime(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_address address = 0;
    CHECK_OK(cm_rt_device_alloc(rt, 100, &address));
    cm_faults_plan(rt, CM_OP_device_free, 1, 999, false);
    CHECK_CODE(cm_rt_device_free(rt, address), 999);
    CHECK(cm_runtime_host_alias(rt, address, 100) != NULL);
    CHECK_OK(cm_rt_device_free(rt, address));
    close_emulated(rt);
}

static void
test_faults_repeat_fails_every_later_call(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    int version;
    uint64_t context;
    cm_faults_plan(rt, CM_OP_driver_version, 2, 999, true);
    CHECK_OK(cm_rt_driver_version(rt, &version));
    for (int i = 0; i < 3; i++) {
        CHECK_CODE(cm_rt_driver_version(rt, &version), 999);
        CHECK_OK(cm_rt_context_get(rt, &context));
    }
    cm_faults_plan(rt, CM_OP_none, 2, 998, true);
    CHECK_OK(cm_rt_driver_version(rt, &version));
    CHECK_CODE(cm_rt_context_get(rt, &context), 998);
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_context_get);
    CHECK_CODE(cm_rt_driver_version(rt, &version), 998);
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_driver_version);
    close_emulated(rt);
}

/* Call each operation of the list with zeros. The plan must make it fail before
 * anything looks at its arguments, and without reaching the inner runtime. A new
 * operation needs a line here, or the count at the end is wrong. */
static void
test_faults_fail_each_operation(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    const cm_ops_table *ops = rt->ops;
    cm_faults_plan(rt, CM_OP_none, 1, 700, true);
/* Check that the call fails as planned, and under the name of this operation. */
#define CHECK_FAILS(name, expression)                                                  \
    CHECK_CODE(expression, 700);                                                       \
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_##name);
    int i = 0;
    uint64_t n = 0;
    bool b = false;
    float f = 0;
    void *p = NULL;
    cm_device_info device;
    cm_pointer_info pointer;
    CHECK_FAILS(driver_version, ops->driver_version(rt, &i))
    CHECK_FAILS(runtime_version, ops->runtime_version(rt, &i))
    CHECK_FAILS(device_count, ops->device_count(rt, &i))
    CHECK_FAILS(device_set, ops->device_set(rt, 0))
    CHECK_FAILS(context_get, ops->context_get(rt, &n))
    CHECK_FAILS(context_set, ops->context_set(rt, 0))
    CHECK_FAILS(context_device, ops->context_device(rt, &i))
    CHECK_FAILS(context_is_active, ops->context_is_active(rt, 0, &b))
    CHECK_FAILS(context_record_event, ops->context_record_event(rt, 0))
    CHECK_FAILS(device_describe, ops->device_describe(rt, 0, &device))
    CHECK_FAILS(device_attribute, ops->device_attribute(rt, 0, 0, &i))
    CHECK_FAILS(device_synchronize, ops->device_synchronize(rt))
    CHECK_FAILS(device_reset, ops->device_reset(rt))
    CHECK_FAILS(memory_info, ops->memory_info(rt, &n, &n))
    CHECK_FAILS(peer_can_access, ops->peer_can_access(rt, 0, 0, &i))
    CHECK_FAILS(peer_enable, ops->peer_enable(rt, 0))
    CHECK_FAILS(host_alloc, ops->host_alloc(rt, 1, 0, &p))
    CHECK_FAILS(host_free, ops->host_free(rt, NULL))
    CHECK_FAILS(host_register, ops->host_register(rt, NULL, 1, 0))
    CHECK_FAILS(host_unregister, ops->host_unregister(rt, NULL))
    CHECK_FAILS(host_device_address, ops->host_device_address(rt, NULL, &n))
    CHECK_FAILS(device_alloc, ops->device_alloc(rt, 1, &n))
    CHECK_FAILS(managed_alloc, ops->managed_alloc(rt, 1, 1, &n))
    CHECK_FAILS(device_free, ops->device_free(rt, 0))
    CHECK_FAILS(pointer_attributes, ops->pointer_attributes(rt, 0, &pointer))
    CHECK_FAILS(pointer_access, ops->pointer_access(rt, 0, &i))
    CHECK_FAILS(prefetch_async, ops->prefetch_async(rt, 0, 1, 0, 0))
    CHECK_FAILS(prefetch_batch_async, ops->prefetch_batch_async(rt, &n, &n, 1, 0, 2))
    CHECK_FAILS(discard_batch_async, ops->discard_batch_async(rt, &n, &n, 1, 2))
    CHECK_FAILS(advise, ops->advise(rt, 0, 1, CM_ADVISE_READ_MOSTLY, 0))
    CHECK_FAILS(range_attribute,
                ops->range_attribute(rt, 0, 1, CM_RANGE_PREFETCHED, &i, 1))
    CHECK_FAILS(physical_granularity, ops->physical_granularity(rt, 0, 0, &n))
    CHECK_FAILS(physical_create, ops->physical_create(rt, 1, 0, 0, &n))
    CHECK_FAILS(physical_release, ops->physical_release(rt, 0))
    CHECK_FAILS(address_reserve, ops->address_reserve(rt, 1, &n))
    CHECK_FAILS(address_free, ops->address_free(rt, 0, 1))
    CHECK_FAILS(address_map, ops->address_map(rt, 0, 1, 0))
    CHECK_FAILS(address_unmap, ops->address_unmap(rt, 0, 1))
    CHECK_FAILS(address_set_access, ops->address_set_access(rt, 0, 1, &i, 1))
    CHECK_FAILS(copy_async, ops->copy_async(rt, 0, 0, 1, 0))
    CHECK_FAILS(copy_2d_async, ops->copy_2d_async(rt, 0, 1, 0, 1, 1, 1, 0))
    CHECK_FAILS(copy_peer_async, ops->copy_peer_async(rt, 0, 0, 0, 0, 1, 0))
    CHECK_FAILS(fill_8_async, ops->fill_8_async(rt, 0, 0, 1, 0))
    CHECK_FAILS(fill_16_async, ops->fill_16_async(rt, 0, 0, 1, 0))
    CHECK_FAILS(fill_32_async, ops->fill_32_async(rt, 0, 0, 1, 0))
    CHECK_FAILS(module_load, ops->module_load(rt, NULL, &n))
    CHECK_FAILS(module_unload, ops->module_unload(rt, 0))
    CHECK_FAILS(module_function, ops->module_function(rt, 0, NULL, &n))
    CHECK_FAILS(kernel_launch, ops->kernel_launch(rt, 0, 1, 1, NULL, 0, 0))
    CHECK_FAILS(stream_priority_range, ops->stream_priority_range(rt, &i, &i))
    CHECK_FAILS(stream_create, ops->stream_create(rt, 0, 0, &n))
    CHECK_FAILS(stream_destroy, ops->stream_destroy(rt, 0))
    CHECK_FAILS(stream_query, ops->stream_query(rt, 0, &b))
    CHECK_FAILS(stream_synchronize, ops->stream_synchronize(rt, 0))
    CHECK_FAILS(stream_wait_event, ops->stream_wait_event(rt, 0, 0))
    CHECK_FAILS(stream_get_id, ops->stream_get_id(rt, 0, &n))
    CHECK_FAILS(stream_get_device, ops->stream_get_device(rt, 0, &i))
    CHECK_FAILS(stream_get_priority, ops->stream_get_priority(rt, 0, &i))
    CHECK_FAILS(stream_is_capturing, ops->stream_is_capturing(rt, 0, &b))
    CHECK_FAILS(capture_mode_exchange, ops->capture_mode_exchange(rt, &i))
    CHECK_FAILS(event_create, ops->event_create(rt, 0, &n))
    CHECK_FAILS(event_destroy, ops->event_destroy(rt, 0))
    CHECK_FAILS(event_record, ops->event_record(rt, 0, 0))
    CHECK_FAILS(event_query, ops->event_query(rt, 0, &b))
    CHECK_FAILS(event_synchronize, ops->event_synchronize(rt, 0))
    CHECK_FAILS(event_elapsed, ops->event_elapsed(rt, 0, 0, &f))
#undef CHECK_FAILS
    CHECK_EQ(cm_faults_count(rt, CM_OP_none), CM_OP_COUNT - 1);
    close_emulated(rt);
}

static void
test_faults_delay_slows_the_operation(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    int version;
    cm_faults_delay(rt, CM_OP_driver_version, 3000);
    uint64_t start = cm_now_ns();
    CHECK_OK(cm_rt_driver_version(rt, &version));
    CHECK_GE(cm_now_ns() - start, 3000000);
    cm_faults_delay(rt, CM_OP_driver_version, 0);
    cm_faults_delay(rt, CM_OP_none, 2000);
    start = cm_now_ns();
    CHECK_OK(cm_rt_runtime_version(rt, &version));
    CHECK_GE(cm_now_ns() - start, 2000000);
    cm_faults_delay(rt, CM_OP_none, 0);
    close_emulated(rt);
}

/* The body of a thread that makes 1000 calls. One of them may fail by the plan. */
static void *
call_many(void *arg)
{
    cm_runtime *rt = arg;
    int version;
    for (int i = 0; i < 1000; i++) {
        cm_status status = cm_rt_driver_version(rt, &version);
        if (!cm_is_ok(status) && status.code != 999) {
            CHECK_FAIL_("a call failed with code %d", status.code);
        }
    }
    return NULL;
}

/* Four threads call at the same time. No call may be lost in the count, and one of them
 * must fail. */
static void
test_faults_count_exactly_from_many_threads(void)
{
    enum { COUNT = 4 };
    cm_runtime *rt = open_emulated(13000, 1, 1 << 20);
    cm_thread threads[COUNT];
    cm_faults_plan(rt, CM_OP_driver_version, 1234, 999, false);
    for (int i = 0; i < COUNT; i++) {
        CHECK_OK(cm_thread_start(&threads[i], call_many, rt));
    }
    for (int i = 0; i < COUNT; i++) {
        cm_thread_join(threads[i]);
    }
    CHECK_EQ(cm_faults_count(rt, CM_OP_driver_version), COUNT * 1000);
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_driver_version);
    close_emulated(rt);
}

/* clang-format off */
MAIN(RUN(test_faults_stand_in_for_the_inner_runtime)
     RUN(test_faults_count_calls_by_operation)
     RUN(test_faults_fail_the_nth_call_only)
     RUN(test_faults_failed_free_does_not_reach_the_inner_runtime)
     RUN(test_faults_repeat_fails_every_later_call)
     RUN(test_faults_fail_each_operation)
     RUN(test_faults_delay_slows_the_operation)
     RUN(test_faults_count_exactly_from_many_threads))
/* clang-format on */
