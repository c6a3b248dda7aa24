/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of what the engine refuses, of failures that nobody asks about, and of copies
 * that run out of memory. A sweep also makes each runtime call of a copy fail once. A
 * keep is an object that a copy must drop once, when it is over. */
#define EMULATED_DELAY_US 20

#include "engine_hook.h"
#include "fault_sweep.h"
#include "route_of.h"

#include <unistd.h>

/* -- failures ---------------------------------------------------------------------------- */

/* Shapes that differ and itemsizes that differ are refused, and the keep is dropped
 * each time. */
static void
test_engine_refuses_what_makes_no_sense(void)
{
    world w;
    atomic_int drops = 0;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    cm_copy_request request = {.dst = row(&a, 0, 10, 4, 4),
                               .src = row(&a, 0, 11, 4, 4),
                               .keep = {{&drops, count_drop}},
                               .keep_count = 1};
    CHECK_CODE(cm_engine_copy(w.engine, &request, NULL), CM_ESHAPE);
    CHECK_EQ(atomic_load(&drops), 1);
    request.src = row(&a, 0, 10, 8, 8);
    CHECK_CODE(cm_engine_copy(w.engine, &request, NULL), CM_EINVALID);
    CHECK_EQ(atomic_load(&drops), 2);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    request.dst = row(&b, 0, 10, 4, 4); /* a copy of this length would need no job */
    request.src = row(&a, 0, 11, 4, 4);
    request.stream = w.streams[0];
    request.blocking = true;
    CHECK_CODE(cm_engine_copy(w.engine, &request, NULL), CM_ESHAPE);
    CHECK_EQ(atomic_load(&drops), 3);
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* A copy without a ticket fails. cm_engine_take_unread() must return that failure once.
 * A failure that somebody has read from a ticket is not returned there. */
static void
test_engine_unread_failure_is_handed_out_once(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    cm_copy_request request = {.dst = row(&b, 0, 4096, 1, 1),
                               .src = row(&a, 0, 4096, 1, 1)};
    cm_faults_plan(w.rt, CM_OP_copy_async, 1, 999, false);
    CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
    WAIT_UNTIL(cm_engine_count_pending(w.engine) == 0);
    cm_status unread;
    do { /* the engine drops its own reference just after the ticket is done */
        unread = cm_engine_take_unread(w.engine);
    } while (cm_is_ok(unread));
    CHECK_EQ(unread.code, 999);
    CHECK_EQ(unread.op, CM_OP_copy_async);
    CHECK(cm_is_ok(cm_engine_take_unread(w.engine)));
    cm_ticket *ticket;
    cm_faults_plan(w.rt, CM_OP_copy_async, 1, 999, false);
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    CHECK_CODE(cm_ticket_wait(ticket, UINT64_MAX), 999);
    CHECK_CODE(cm_ticket_wait(ticket, UINT64_MAX), 999);
    CHECK_CODE(cm_ticket_order(ticket, w.streams[0]), 999);
    cm_ticket_release(ticket);
    CHECK(cm_is_ok(cm_engine_take_unread(w.engine)));
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket)); /* the engine still works */
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    cm_ticket_release(ticket);
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* Tickets of failed copies are let go of after the engine has ended, by a release and
 * by cm_ticket_abandon(), which must then return the failure itself. */
static void
test_engine_failure_let_go_of_after_the_end_is_no_leak(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    cm_copy_request request = {.dst = row(&b, 0, 4096, 1, 1),
                               .src = row(&a, 0, 4096, 1, 1)};
    cm_ticket *released;
    cm_ticket *abandoned;
    cm_faults_plan(w.rt, CM_OP_copy_async, 1, 999, true);
    CHECK_OK(cm_engine_copy(w.engine, &request, &released));
    CHECK_OK(cm_engine_copy(w.engine, &request, &abandoned));
    WAIT_UNTIL(cm_engine_count_pending(w.engine) == 0);
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
    cm_ticket_release(released); /* AddressSanitizer would report a leak */
    /* Nobody else can report this failure any more. */
    CHECK_CODE(cm_ticket_abandon(abandoned), 999);
}

typedef struct scenario {
    cm_kind dst;
    cm_kind src;
    int dst_device;
    int64_t stride;
    int stream_device; /* -1 for a copy in the background, or without a stream if it
                          blocks */
    bool blocking;
    bool overlap;
} scenario;

/* Make one copy and return its outcome, whether the call or the ticket reports it. */
static cm_status
run_scenario(world *w, const scenario *s, memory *dst, memory *src, atomic_int *drops)
{
    cm_copy_request request = {
        .dst = row(dst, s->overlap ? 4 : 0, 500, s->stride, 4),
        .src = row(s->overlap ? dst : src, 0, 500, s->stride, 4),
        .stream = s->stream_device < 0 ? NULL : w->streams[s->stream_device],
        .blocking = s->blocking,
        .after = w->streams,
        .after_count = WORLD_DEVICES,
        .keep = {{drops, count_drop}},
        .keep_count = 1,
    };
    cm_ticket *ticket;
    cm_status status = cm_engine_copy(w->engine, &request, &ticket);
    if (cm_is_ok(status)) {
        status = cm_ticket_wait(ticket, UINT64_MAX);
        cm_ticket_release(ticket);
    }
    return status;
}

/* Run the scenario in a fresh world with the `nth` call of the operation failing (0 for
 * none), and then once more without a fault. If `calls` is not NULL, a sweep over the
 * calls of the first run begins there. */
static void
run_with_fault(const scenario *s, cm_op op, uint64_t nth, fault_sweep *calls)
{
    world w;
    atomic_int drops = 0;
    open_world(&w);
    memory dst = take_memory(&w, s->dst, s->dst_device, 8192);
    memory src = take_memory(&w, s->src, 0, 8192);
    number_bytes(&src, 6);
    cm_faults_plan(w.rt, op, nth, 998, false);
    cm_status status = run_scenario(&w, s, &dst, &src, &drops);
    if (calls != NULL) {
        fault_sweep_begin(calls, w.rt, CHECK_TSAN ? 2 : UINT64_MAX);
    }
    CHECK_EQ(atomic_load(&drops), 1);
    cm_op injected = cm_faults_last_injected(w.rt);
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    /* Some calls are not part of the copy itself: those of the watcher, and those that
     * give back what is not needed. The copy succeeds if one of these fails. */
    if (!cm_is_ok(status)) {
        CHECK_STR_EQ(cm_op_facts[status.op].name, cm_op_facts[injected].name);
        CHECK_EQ(status.code, 998);
    }
    CHECK_EQ(cm_engine_count_pending(w.engine), 0);
    CHECK_OK(run_scenario(&w, s, &dst, &src, &drops));
    if (!s->overlap) {
        for (int64_t i = 0; i < 500; i++) {
            CHECK_BYTES_EQ(dst.bytes + i * s->stride, src.bytes + i * s->stride, 4);
        }
    }
    give_memory(&w, &dst);
    give_memory(&w, &src);
    close_world(&w);
}

/* Each runtime call of the scenario fails once. The failure must be reported, nothing
 * may stay behind, and the next copy must work. */
static void
sweep(const scenario *s)
{
    fault_sweep calls;
    run_with_fault(s, CM_OP_none, 0, &calls);
    while (fault_sweep_next(&calls)) {
        run_with_fault(s, calls.op, calls.nth, NULL);
    }
}

static void
test_engine_fault_sweep(void)
{
    static const scenario scenarios[] = {
        {CM_KIND_DEVICE, CM_KIND_PINNED, 0, 4, 0, true, false},
        {CM_KIND_DEVICE, CM_KIND_PINNED, 0, 8, 0, false, false},
        {CM_KIND_DEVICE, CM_KIND_PAGEABLE, 0, 8, 0, false, false},
        {CM_KIND_DEVICE, CM_KIND_PAGEABLE, 0, 8, -1, false, false},
        {CM_KIND_PAGEABLE, CM_KIND_DEVICE, 0, 8, 0, false, false},
        {CM_KIND_PAGEABLE, CM_KIND_DEVICE, 0, 8, 1, false, false},
        {CM_KIND_PAGEABLE, CM_KIND_DEVICE, 0, 8, -1, true, false},
        {CM_KIND_DEVICE, CM_KIND_DEVICE, 1, 8, 0, false, false},
        {CM_KIND_DEVICE, CM_KIND_DEVICE, 1, 4, 0, false, false},
        {CM_KIND_MANAGED, CM_KIND_PINNED, 0, 8, -1, false, false},
        {CM_KIND_DEVICE, CM_KIND_DEVICE, 0, 8, 0, false, true},
    };
    for (size_t i = 0; i < sizeof(scenarios) / sizeof(scenarios[0]); i++) {
        int before = atomic_load(&check_failures);
        sweep(&scenarios[i]);
        if (atomic_load(&check_failures) != before) {
            CHECK_FAIL_("this was scenario %zu", i);
        }
    }
}

/* Short downloads go through page-locked memory because that is faster, and must work
 * without it. */
static void
test_engine_short_copy_down_does_without_page_locked_memory(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    number_bytes(&a, 1);
    number_bytes(&b, 2);
    cm_copy_request request = {.dst = row(&a, 0, 4096, 1, 1),
                               .src = row(&b, 0, 4096, 1, 1),
                               .stream = w.streams[0],
                               .blocking = true};
    cm_faults_plan(w.rt, CM_OP_host_register, 1, CM_CUDA_OUT_OF_MEMORY, true);
    CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    CHECK_EQ(memcmp(a.bytes, b.bytes, 4096), 0);
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

static uint64_t user_source;
static uint64_t odd_count;

/* This is called before each copy (hook_copies()). It counts sources that are neither
 * the user's memory nor at the beginning of a page. */
static void
count_odd_sources(cm_address dst CM_UNUSED, cm_address src, uint64_t nbytes CM_UNUSED)
{
    odd_count += src != user_source && src % (uint64_t)sysconf(_SC_PAGESIZE) != 0;
}

/* No page-locked memory can be had, so the engine packs into ordinary memory. That
 * memory must not share a page with memory that others have registered. Otherwise the
 * device might read it after the call has returned, and one copy of the runtime could
 * not read it across the edge of the registration. */
static void
test_engine_block_that_is_not_page_locked_has_pages_of_its_own(void)
{
    enum { NBYTES = 16 << 20 };
    world w;
    open_world(&w);
    hook_copies(&w, count_odd_sources);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    user_source = (uintptr_t)a.host;
    number_bytes(&a, 1);
    cm_copy_request request = {.dst = row(&b, 0, NBYTES, 1, 1),
                               .src = row(&a, 0, NBYTES, 1, 1),
                               .stream = w.streams[0]};
    cm_faults_plan(w.rt, CM_OP_host_register, 1, CM_CUDA_OUT_OF_MEMORY, true);
    CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
    MUST(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
    CHECK_GE(cm_faults_count(w.rt, CM_OP_copy_async), 2);
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    CHECK_EQ(odd_count, 0);
    CHECK_BYTES_EQ(b.bytes, a.bytes, NBYTES);
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* The user's limit leaves the pool room for only two pieces. Long copies must go
 * through as few slots as there are. */
static void
test_engine_long_copy_goes_through_as_few_blocks_as_there_are(void)
{
    enum { NBYTES = 24 << 20 };
    world w;
    cm_budget budget;
    cm_budget_init(&budget, 10 << 20, NULL);
    cm_pool_config config = {.kind = CM_KIND_PINNED,
                             .flags = CM_HOST_ALLOC_PORTABLE,
                             .numa_node = -1,
                             .budget = &budget};
    open_world_with(&w, &config);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    memory *pairs[][2] = {{&b, &a}, {&a, &b}};
    for (int i = 0; i < 4; i++) {
        cm_copy_request request = {.dst = row(pairs[i % 2][0], 0, NBYTES, 1, 1),
                                   .src = row(pairs[i % 2][1], 0, NBYTES, 1, 1),
                                   .stream = w.streams[0],
                                   .blocking = i < 2};
        cm_ticket *ticket;
        number_bytes(&a, 1 + (unsigned)i);
        number_bytes(&b, 9 + (unsigned)i);
        CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
        CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
        cm_ticket_release(ticket);
        CHECK_EQ(memcmp(a.bytes, b.bytes, NBYTES), 0);
    }
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* A transposed source is sent as it is and rearranged on the device if there is memory
 * for that. Otherwise the host has to rearrange it. */
static void
test_engine_transposed_source_needs_no_device_memory(void)
{
    enum { SIDE = 1024, NBYTES = SIDE * SIDE * 4 };
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    cm_copy_request request = {.dst = row(&b, 0, SIDE, SIDE * 4, 4),
                               .src = row(&a, 0, SIDE, 4, 4),
                               .stream = w.streams[0]};
    request.dst.ndim = request.src.ndim = 2;
    request.dst.shape[1] = request.src.shape[1] = SIDE;
    request.dst.strides[1] = 4;
    request.src.strides[1] = SIDE * 4;
    for (int full = 0; full < 2; full++) {
        cm_ticket *ticket;
        cm_ticket_info info;
        uint64_t wrong = 0;
        number_bytes(&a, 1 + (unsigned)full);
        memset(b.bytes, 0, NBYTES);
        if (full) {
            cm_faults_plan(w.rt, CM_OP_physical_create, 1, CM_CUDA_OUT_OF_MEMORY, true);
            uint64_t released;
            const cm_wait_hooks uninterrupted = {.interrupted = NULL};
            MUST(cm_pool_trim(w.device[0], 0, &uninterrupted, &released));
        }
        CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
        CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
        cm_ticket_query(ticket, &info);
        cm_ticket_release(ticket);
        cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
        CHECK_EQ(route_of(info.row), full ? CM_ROUTE_STAGED : CM_ROUTE_STAGED_KERNEL);
        for (uint64_t i = 0; i < SIDE; i++) {
            for (uint64_t k = 0; k < SIDE; k++) {
                wrong += memcmp(b.bytes + (i * SIDE + k) * 4,
                                a.bytes + (k * SIDE + i) * 4, 4)
                         != 0;
            }
        }
        CHECK_EQ(wrong, 0);
    }
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

MAIN(RUN(test_engine_refuses_what_makes_no_sense)
         RUN(test_engine_failure_let_go_of_after_the_end_is_no_leak)
             RUN(test_engine_unread_failure_is_handed_out_once)
                 RUN(test_engine_short_copy_down_does_without_page_locked_memory) RUN(
                     test_engine_block_that_is_not_page_locked_has_pages_of_its_own)
                     RUN(test_engine_long_copy_goes_through_as_few_blocks_as_there_are)
                         RUN(test_engine_transposed_source_needs_no_device_memory)
                             RUN(test_engine_fault_sweep))
