/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that long copies in the background do not keep short ones waiting. For this a
 * long copy leaves its job thread after a while if other copies wait for a thread. */
#include "engine_hook.h"
#include "transfer/engine/job.h"

enum {
    GIANT_COUNT = CM_MAX_JOB_THREADS + 1,
    GIANT_NBYTES = 64 << 20,
    PAGE_NBYTES = 4096,
};

static atomic_bool small_queued;
static atomic_bool small_done;
static uint64_t giant_source;

/* This is called before each copy of the runtime (hook_copies()). It holds each giant
 * copy before its first pieces until the small copies are queued, and before its last
 * piece until they are done. */
static void
hold_giants(cm_address dst CM_UNUSED, cm_address src, uint64_t nbytes)
{
    if (src >= giant_source && src < giant_source + GIANT_NBYTES) {
        bool last = src + nbytes == giant_source + GIANT_NBYTES;
        wait_for_flag(last ? &small_done : &small_queued);
    }
}

/* Start the giant copies, then two small ones, and wait for these. They must be done
 * while each giant copy is still under way. */
static void
race(world *w, const memory *source, memory *giants)
{
    cm_ticket *tickets[GIANT_COUNT];
    cm_ticket *small[2];
    cm_ticket_info info;
    memory a = take_memory(w, CM_KIND_PAGEABLE, 0, PAGE_NBYTES);
    memory b = take_memory(w, CM_KIND_PAGEABLE, 0, PAGE_NBYTES);
    memory c = take_memory(w, CM_KIND_DEVICE, 0, PAGE_NBYTES);
    number_bytes(&a, 5);
    for (int i = 0; i < GIANT_COUNT; i++) {
        cm_copy_request giant = {.dst = row(&giants[i], 0, GIANT_NBYTES, 1, 1),
                                 .src = row(source, 0, GIANT_NBYTES, 1, 1)};
        CHECK_OK(cm_engine_copy(w->engine, &giant, &tickets[i]));
    }
    cm_copy_request requests[2] = {
        {.dst = row(&b, 0, PAGE_NBYTES, 1, 1), .src = row(&a, 0, PAGE_NBYTES, 1, 1)},
        {.dst = row(&c, 0, PAGE_NBYTES, 1, 1), .src = row(&a, 0, PAGE_NBYTES, 1, 1)}};
    for (int i = 0; i < 2; i++) {
        CHECK_OK(cm_engine_copy(w->engine, &requests[i], &small[i]));
    }
    atomic_store(&small_queued, true);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(cm_ticket_wait(small[i], UINT64_C(60000000000)));
        cm_ticket_release(small[i]);
    }
    for (int i = 0; i < GIANT_COUNT; i++) {
        cm_ticket_query(tickets[i], &info);
        CHECK(!info.done);
        CHECK_LT(cm_ticket_count_moved(tickets[i]), GIANT_NBYTES);
    }
    atomic_store(&small_done, true);
    for (int i = 0; i < GIANT_COUNT; i++) {
        CHECK_OK(cm_ticket_wait(tickets[i], UINT64_MAX));
        CHECK_EQ(cm_ticket_count_moved(tickets[i]), GIANT_NBYTES);
        cm_ticket_release(tickets[i]);
        CHECK_EQ(memcmp(giants[i].bytes, source->bytes, GIANT_NBYTES), 0);
    }
    CHECK_EQ(memcmp(a.bytes, b.bytes, PAGE_NBYTES), 0);
    CHECK_EQ(memcmp(a.bytes, c.bytes, PAGE_NBYTES), 0);
    give_memory(w, &a);
    give_memory(w, &b);
    give_memory(w, &c);
}

/* There are more giant downloads than job threads, and the small copies must be done
 * first all the same. */
static void
test_small_copies_overtake_more_long_downloads_than_workers(void)
{
    world w;
    memory giants[GIANT_COUNT];
    open_world(&w);
    hook_copies(&w, hold_giants);
    memory source = take_memory(&w, CM_KIND_DEVICE, 0, GIANT_NBYTES);
    number_bytes(&source, 3);
    giant_source = source.address;
    for (int i = 0; i < GIANT_COUNT; i++) {
        giants[i] = take_memory(&w, CM_KIND_PAGEABLE, 0, GIANT_NBYTES);
    }
    race(&w, &source, giants);
    for (int i = 0; i < GIANT_COUNT; i++) {
        give_memory(&w, &giants[i]);
    }
    give_memory(&w, &source);
    close_world(&w);
}

/* Start a long copy within the host on each job thread, and then a short copy. Nothing
 * holds any of them up. Return whether the short copy was done before all long ones. */
static bool
overtakes_all(world *w, const memory *source, memory *targets, memory *target)
{
    cm_ticket *tickets[CM_MAX_JOB_THREADS];
    cm_ticket *small;
    cm_ticket_info info;
    int done = 0;
    for (int i = 0; i < CM_MAX_JOB_THREADS; i++) {
        cm_copy_request giant = {.dst = row(&targets[i], 0, GIANT_NBYTES, 1, 1),
                                 .src = row(source, 0, GIANT_NBYTES, 1, 1)};
        MUST(cm_engine_copy(w->engine, &giant, &tickets[i]));
    }
    for (int i = 0; i < CM_MAX_JOB_THREADS; i++) {
        WAIT_UNTIL(cm_ticket_count_moved(tickets[i]) != 0);
    }
    cm_copy_request request = {.dst = row(target, 0, PAGE_NBYTES, 1, 1),
                               .src = row(source, 0, PAGE_NBYTES, 1, 1)};
    MUST(cm_engine_copy(w->engine, &request, &small));
    MUST(cm_ticket_wait(small, UINT64_MAX));
    cm_ticket_release(small);
    for (int i = 0; i < CM_MAX_JOB_THREADS; i++) {
        cm_ticket_query(tickets[i], &info);
        done += info.done;
    }
    for (int i = 0; i < CM_MAX_JOB_THREADS; i++) {
        MUST(cm_ticket_wait(tickets[i], UINT64_MAX));
        cm_ticket_release(tickets[i]);
    }
    return done == 0;
}

/* On a busy machine a long copy may be done first by chance, so the test tries several
 * times. If job threads did not give way, a long copy would be first each time. */
static void
test_small_copy_overtakes_long_host_copies_on_all_workers(void)
{
    enum { TRIES = 30 };
    world w;
    memory targets[CM_MAX_JOB_THREADS];
    bool overtook = false;
    open_world(&w);
    memory source = take_memory(&w, CM_KIND_PAGEABLE, 0, GIANT_NBYTES);
    memory target = take_memory(&w, CM_KIND_PAGEABLE, 0, PAGE_NBYTES);
    number_bytes(&source, 3);
    for (int i = 0; i < CM_MAX_JOB_THREADS; i++) {
        targets[i] = take_memory(&w, CM_KIND_PAGEABLE, 0, GIANT_NBYTES);
    }
    for (int i = 0; i < TRIES && !overtook; i++) {
        overtook = overtakes_all(&w, &source, targets, &target);
    }
    CHECK(overtook);
    for (int i = 0; i < CM_MAX_JOB_THREADS; i++) {
        CHECK_EQ(memcmp(targets[i].bytes, source.bytes, GIANT_NBYTES), 0);
        give_memory(&w, &targets[i]);
    }
    CHECK_EQ(memcmp(target.bytes, source.bytes, PAGE_NBYTES), 0);
    give_memory(&w, &target);
    give_memory(&w, &source);
    close_world(&w);
}

/* A job waits for a stream, leaves its thread, and comes back when the stream is idle.
 * If more work is queued then, the next wait must be for that work. It must not end
 * because the event of the first wait has happened. */
static void
test_later_wait_for_a_stream_does_not_end_with_an_earlier_one(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PINNED, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    cm_copy_request request = {.dst = row(&b, 0, 4096, 1, 1),
                               .src = row(&a, 0, 4096, 1, 1)};
    cm_stream *stream = w.streams[0];
    cm_job job = {.engine = w.engine,
                  .ticket = cm_ticket_create(w.engine, &request),
                  .stream = stream,
                  .in_background = true,
                  .step = CM_JOB_MOVE};
    for (int wait = 0; wait < 3; wait++) {
        shut(&w, stream);
        CHECK_OK(cm_rt_copy_async(w.rt, b.address, a.address, 4096, stream->handle));
        CHECK_CODE(cm_job_wait_stream(&job), CM_ETIMEOUT);
        CHECK_EQ(job.wait, CM_WAIT_EVENT);
        job.wait = CM_WAIT_NONE;
        unshut(&w, stream);
        CHECK_OK(cm_rt_stream_synchronize(w.rt, stream->handle));
        CHECK_OK(cm_job_wait_stream(&job));
        CHECK_EQ(job.wait, CM_WAIT_NONE);
    }
    CHECK_EQ(job.idle_event, 0);
    cm_ticket_finish(job.ticket, cm_ok(), true);
    cm_ticket_release(job.ticket);
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

MAIN(RUN(test_small_copies_overtake_more_long_downloads_than_workers)
         RUN(test_small_copy_overtakes_long_host_copies_on_all_workers)
             RUN(test_later_wait_for_a_stream_does_not_end_with_an_earlier_one))
