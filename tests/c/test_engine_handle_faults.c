/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of tickets when calls fail. A sweep makes a copy of several pieces on each
 * route and in each mode. It repeats the copy, and lets a different runtime call fail
 * each time. The ticket must report what happened, nothing may stay behind, and the
 * next copy must work. A keep is an object that the copy must drop once, when it is
 * over. */
#define EMULATED_DELAY_US 20

#include "engine_world.h"
#include "fault_sweep.h"

#include <unistd.h>

#include "transfer/engine/private.h"

enum { ROWS = 3, COUNT = 16 << 10, NBYTES = ROWS * COUNT };

typedef enum mode { IN_BACKGROUND, ON_STREAM, BLOCKING, MODE_COUNT } mode;

/* A copy that takes a certain route. Strides are in bytes. */
typedef struct route_case {
    const char *name;
    cm_kind dst;
    cm_kind src;
    int dst_device;
    int64_t dst_stride;
    int64_t src_stride;
    bool turned; /* the source's axes have the opposite order */
} route_case;

static const route_case cases[] = {
    {"direct", CM_KIND_DEVICE, CM_KIND_PINNED, 0, 1, 1, false},
    {"driver", CM_KIND_PAGEABLE, CM_KIND_DEVICE, 0, 1, 1, false},
    {"staged up", CM_KIND_DEVICE, CM_KIND_PAGEABLE, 0, 1, 2, false},
    {"staged down", CM_KIND_PAGEABLE, CM_KIND_DEVICE, 0, 2, 1, false},
    {"staged-kernel up", CM_KIND_DEVICE, CM_KIND_PAGEABLE, 0, 2, 2, false},
    {"staged-kernel down", CM_KIND_PAGEABLE, CM_KIND_DEVICE, 0, 2, 2, false},
    {"turned", CM_KIND_DEVICE, CM_KIND_PAGEABLE, 0, 1, 1, true},
    {"kernel", CM_KIND_DEVICE, CM_KIND_MANAGED, 0, 2, 2, false},
    {"peer", CM_KIND_DEVICE, CM_KIND_DEVICE, 1, 1, 1, false},
    {"peer by pieces", CM_KIND_DEVICE, CM_KIND_DEVICE, 1, 2, 2, false},
    {"host", CM_KIND_PAGEABLE, CM_KIND_PINNED, 0, 2, 1, false},
};

typedef struct ends {
    memory dst;
    memory src;
    cm_region to;
    cm_region from;
} ends;

/* Describe ROWS rows of COUNT bytes of the memory, one row behind the other. With
 * `turned` the rows lie side by side instead, so that the bytes of a row are ROWS *
 * stride apart. */
static cm_region
rows_of(const memory *m, int64_t stride, bool turned)
{
    cm_region region = region_at(m, 0);
    region.ndim = 2;
    region.itemsize = 1;
    region.shape[0] = ROWS;
    region.shape[1] = COUNT;
    region.strides[0] = turned ? stride : COUNT * stride;
    region.strides[1] = turned ? ROWS * stride : stride;
    return region;
}

/* Allocate both ends. The source is numbered, and the target has a value that the
 * source has not. */
static ends
open_ends(world *w, const route_case *c)
{
    ends e = {.dst = take_memory(w, c->dst, c->dst_device, 2 * NBYTES),
              .src = take_memory(w, c->src, 0, 2 * NBYTES)};
    number_bytes(&e.src, 5);
    memset(e.dst.bytes, 255, 2 * NBYTES); /* no byte of the source has this value */
    e.to = rows_of(&e.dst, c->dst_stride, false);
    e.from = rows_of(&e.src, c->src_stride, c->turned);
    return e;
}

/* Count the bytes of the target that differ from the source. */
CHECK_UNWATCHED static uint64_t
count_wrong(const ends *e)
{
    uint64_t wrong = 0;
    for (int64_t i = 0; i < ROWS; i++) {
        for (int64_t k = 0; k < COUNT; k++) {
            wrong += e->dst.bytes[i * e->to.strides[0] + k * e->to.strides[1]]
                     != e->src.bytes[i * e->from.strides[0] + k * e->from.strides[1]];
        }
    }
    return wrong;
}

/* Make the copy, check that its ticket is right about it, and return its outcome. */
static cm_status
copy_and_check(world *w, const ends *e, mode how, atomic_int *drops)
{
    cm_copy_request request = {
        .dst = e->to,
        .src = e->from,
        .stream = how == IN_BACKGROUND ? NULL : w->streams[0],
        .blocking = how == BLOCKING,
        .after = w->streams,
        .after_count = WORLD_DEVICES,
        .keep = {{drops, count_drop}},
        .keep_count = 1,
    };
    cm_ticket *ticket = NULL;
    cm_ticket_info info;
    cm_status status = cm_engine_copy(w->engine, &request, &ticket);
    if (!cm_is_ok(status)) {
        return status; /* there is no ticket */
    }
    status = cm_ticket_wait(ticket, UINT64_MAX);
    cm_ticket_query(ticket, &info);
    uint64_t moved = cm_ticket_count_moved(ticket);
    bool good = info.done && !info.cancelled && info.nbytes == NBYTES
                && info.status.code == status.code
                && (moved == NBYTES) == cm_is_ok(status) && moved <= NBYTES
                && !cm_ticket_cancel(ticket);
    cm_ticket_release(ticket);
    if (!good) {
        CHECK_FAIL_(
            "the ticket is wrong about its copy: status %d, done %d, moved %llu",
            status.code, info.done, (unsigned long long)moved);
    }
    return status;
}

/* True if no copy is under way and no memory is borrowed. After a failure a thread may
 * still be giving back what the job has borrowed, so callers wait for this. */
static bool
is_nothing_left(world *w)
{
    cm_pool *pools[] = {w->pinned, w->device[0], w->device[1]};
    uint64_t left = cm_engine_count_pending(w->engine);
    cm_mutex_lock(&w->engine->lock);
    left +=
        w->engine->ring_used_nbytes + w->engine->job_count + w->engine->waiting_count;
    cm_mutex_unlock(&w->engine->lock);
    for (int i = 0; i < 3; i++) {
        cm_pool_counters counters;
        cm_pool_read(pools[i], &counters);
        left += counters.live_nbytes;
    }
    return left == 0;
}

static void
check_nothing_left(world *w, atomic_int *drops)
{
    WAIT_UNTIL(is_nothing_left(w));
    CHECK_EQ(atomic_load(drops), 1);
    CHECK(cm_is_ok(cm_engine_take_unread(w->engine)));
}

/* Make the copy while the `nth` call of the operation fails, or without a fault if
 * `nth` is 0, and then make it once more without a fault. If `calls` is not NULL, begin
 * a sweep in it over the calls that the first of these copies made, with at most `most`
 * calls of each operation. */
static void
run_with_fault(world *w, const route_case *c, mode how, cm_op op, uint64_t nth,
               fault_sweep *calls, uint64_t most)
{
    atomic_int drops = 0;
    ends e = open_ends(w, c);
    cm_faults_plan(w->rt, op, nth, 998, false);
    cm_status status = copy_and_check(w, &e, how, &drops);
    if (calls != NULL) {
        fault_sweep_begin(calls, w->rt, most);
    }
    cm_op injected = cm_faults_last_injected(w->rt);
    cm_faults_plan(w->rt, CM_OP_none, 0, 0, false);
    /* Some calls are not part of the copy itself: those of the watcher, and those that
     * give back what is not needed. The copy succeeds if one of these fails. */
    if (!cm_is_ok(status)
        && (status.code != 998 || (cm_op)status.op != injected || nth == 0)) {
        CHECK_FAIL_("the copy failed with code %d of %s where %s failed", status.code,
                    cm_op_facts[status.op].name, cm_op_facts[injected].name);
    }
    if (cm_is_ok(status) && count_wrong(&e) != 0) {
        CHECK_FAIL_("%llu bytes are wrong where %s failed, and nothing reported it",
                    (unsigned long long)count_wrong(&e), cm_op_facts[injected].name);
    }
    check_nothing_left(w, &drops);
    atomic_store(&drops, 0);
    memset(e.dst.bytes, 255, 2 * NBYTES);
    status = copy_and_check(w, &e, how, &drops);
    if (!cm_is_ok(status) || count_wrong(&e) != 0) {
        CHECK_FAIL_("the next copy ends with code %d and %llu wrong bytes", status.code,
                    (unsigned long long)count_wrong(&e));
    }
    check_nothing_left(w, &drops);
    give_memory(w, &e.dst);
    give_memory(w, &e.src);
}

/* Open a world whose copies go in several small pieces. */
static void
open_tuned(world *w)
{
    cm_tuning tuning;
    open_world(w);
    cm_tuning_init(&tuning);
    tuning.chunk_nbytes = 64 << 10;
    tuning.chunk_min_nbytes = 4 << 10;
    tuning.chunk_share = 6;
    tuning.slot_count = 3;
    MUST(cm_engine_set_tuning(w->engine, &tuning));
}

/* Let calls of this copy fail, one in each run. The first runs share a world that has
 * made such copies before. With `also_fresh`, each of the later runs has a fresh world,
 * in which the copy also makes threads, streams and blocks. Opening a world takes
 * longer than the copy, so fewer calls of each operation fail in fresh worlds. */
static void
sweep(const route_case *c, mode how, bool also_fresh)
{
    world w;
    fault_sweep fresh;
    fault_sweep later;
    open_tuned(&w);
    run_with_fault(&w, c, how, CM_OP_none, 0, &fresh, CHECK_TSAN ? 1 : 4);
    run_with_fault(&w, c, how, CM_OP_none, 0, &later, CHECK_TSAN ? 1 : UINT64_MAX);
    while (fault_sweep_next(&later)) {
        run_with_fault(&w, c, how, later.op, later.nth, NULL, 0);
    }
    close_world(&w);
    while (also_fresh && fault_sweep_next(&fresh)) {
        open_tuned(&w);
        run_with_fault(&w, c, how, fresh.op, fresh.nth, NULL, 0);
        close_world(&w);
    }
}

static void
test_ticket_reports_the_truth_whichever_call_fails(void)
{
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        for (mode how = 0; how < MODE_COUNT; how++) {
            int before = atomic_load(&check_failures);
            sweep(&cases[i], how, (i + how) % CHECK_EVERY(4) == 0);
            if (atomic_load(&check_failures) != before) {
                CHECK_FAIL_("this was the copy '%s' in mode %d", cases[i].name, how);
            }
        }
    }
}

/* A query of the copy's event fails while the copy is still on its way. The ticket must
 * not count as done, and the ends must be kept until the copy is over. */
static void
test_ticket_is_not_done_because_one_question_failed(void)
{
    world w;
    atomic_int drops = 0;
    cm_ticket *ticket;
    cm_ticket_info info;
    open_tuned(&w);
    ends e = open_ends(&w, &cases[0]);
    shut(&w, w.streams[0]);
    cm_copy_request request = {.dst = e.to,
                               .src = e.from,
                               .stream = w.streams[0],
                               .keep = {{&drops, count_drop}},
                               .keep_count = 1};
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    cm_faults_plan(w.rt, CM_OP_event_query, 1, 998, false);
    do {
        cm_ticket_query(ticket, &info);
        CHECK(!info.done);
        CHECK_EQ(atomic_load(&drops), 0);
    } while (cm_faults_count(w.rt, CM_OP_event_query) < 4);
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    unshut(&w, w.streams[0]);
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    CHECK_EQ(count_wrong(&e), 0);
    cm_ticket_release(ticket);
    give_memory(&w, &e.dst);
    give_memory(&w, &e.src);
    close_world(&w);
}

/* Cancelling a copy gives back what the copy has borrowed. In this test one of the
 * runtime calls that this takes fails, and the copy must be cancelled nevertheless. */
static void
test_ticket_is_cancelled_whichever_call_fails(void)
{
    /* The operations that destroy things are left out, since what cannot be destroyed
     * stays behind. */
    static const cm_op ops[] = {CM_OP_capture_mode_exchange, CM_OP_context_get,
                                CM_OP_context_set,           CM_OP_event_query,
                                CM_OP_stream_wait_event,     CM_OP_device_set};
    enum { OPS = sizeof(ops) / sizeof(ops[0]) };
    world w;
    open_tuned(&w);
    for (uint64_t i = 0; i < 8 * (uint64_t)OPS; i++) {
        atomic_int drops = 0;
        cm_ticket *ticket;
        memory held = take_memory(&w, CM_KIND_PINNED, 0, 4096);
        memory device = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
        memory plain = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
        memset(device.bytes, 1, 4096);
        memset(plain.bytes, 2, 4096);
        shut(&w, w.streams[0]);
        cm_copy_request first = {.dst = row(&held, 0, 4096, 1, 1),
                                 .src = row(&device, 0, 4096, 1, 1),
                                 .stream = w.streams[0]};
        MUST(cm_engine_copy(w.engine, &first, NULL));
        cm_copy_request second = {.dst = row(&plain, 0, 4096, 1, 1),
                                  .src = row(&held, 0, 4096, 1, 1),
                                  .after = w.streams,
                                  .after_count = 1,
                                  .keep = {{&drops, count_drop}},
                                  .keep_count = 1};
        /* In half of the rounds the copy is an upload on a stream of the engine, and
         * that stream waits. */
        if (i / OPS % 2 == 0) {
            second.dst = row(&device, 0, 2048, 1, 1);
            second.src = row(&held, 0, 2048, 0, 1);
            second.src.address = 0;
        }
        MUST(cm_engine_copy(w.engine, &second, &ticket));
        /* In one half of the rounds the job has left its thread before it is
         * cancelled. */
        if (i / OPS % 4 < 2) {
            let_others_run();
        }
        cm_faults_plan(w.rt, ops[i % OPS], i / OPS / 4 + 1, 998, false);
        bool cancelled = cm_ticket_cancel(ticket);
        cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
        cm_status status = cm_ticket_wait(ticket, UINT64_MAX);
        /* If it was not cancelled, the fault hit a call of the job thread. */
        CHECK_EQ(status.code, cancelled ? CM_ECANCELLED : 998);
        CHECK_EQ(atomic_load(&drops), 1);
        cm_ticket_release(ticket);
        unshut(&w, w.streams[0]);
        MUST(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
        CHECK_FILLED(plain.bytes, 2, 4096);
        CHECK_FILLED(device.bytes, 1, 4096);
        atomic_store(&drops, 1);
        check_nothing_left(&w, &drops);
        give_memory(&w, &held);
        give_memory(&w, &device);
        give_memory(&w, &plain);
    }
    close_world(&w);
}

MAIN(RUN(test_ticket_is_cancelled_whichever_call_fails)
         RUN(test_ticket_is_not_done_because_one_question_failed)
             RUN(test_ticket_reports_the_truth_whichever_call_fails))
