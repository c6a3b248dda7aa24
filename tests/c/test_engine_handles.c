/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of tickets: cancelling a copy while it waits or runs, the progress that a
 * ticket counts, and the time that it reports. A keep is an object that a copy drops
 * when it is over or cancelled. */
#include "engine_hook.h"
#include "transfer/engine/private.h"

enum { NBYTES = 4096, PIECE_NBYTES = 1 << 20, SLOT_COUNT = 8, LONG_NBYTES = 64 << 20 };

/* -- cancelling -------------------------------------------------------------------------- */

/* Memory for the tests that cancel copies. */
typedef struct ends {
    memory held; /* page-locked, written by a stream that is shut */
    memory middle;
    memory plain;
    memory device;
} ends;

/* Allocate the ends. The gate of streams[0] is shut, and behind it waits a copy that
 * will fill `held` with 7. */
static ends
open_ends(world *w)
{
    ends e = {take_memory(w, CM_KIND_PINNED, 0, NBYTES),
              take_memory(w, CM_KIND_DEVICE, 0, NBYTES),
              take_memory(w, CM_KIND_PAGEABLE, 0, NBYTES),
              take_memory(w, CM_KIND_DEVICE, 0, NBYTES)};
    memset(e.held.bytes, 0, NBYTES);
    memset(e.middle.bytes, 7, NBYTES);
    memset(e.plain.bytes, 1, NBYTES);
    memset(e.device.bytes, 1, NBYTES);
    shut(w, w->streams[0]);
    cm_copy_request first = {.dst = row(&e.held, 0, NBYTES, 1, 1),
                             .src = row(&e.middle, 0, NBYTES, 1, 1),
                             .stream = w->streams[0]};
    MUST(cm_engine_copy(w->engine, &first, NULL));
    return e;
}

static void
close_ends(world *w, ends *e)
{
    WAIT_UNTIL(cm_engine_count_pending(w->engine) == 0);
    give_memory(w, &e->held);
    give_memory(w, &e->middle);
    give_memory(w, &e->plain);
    give_memory(w, &e->device);
}

/* Make a request whose copy has to wait. With `which` 0 it is a copy within the host
 * that comes after the stream, with 1 a copy that comes after the ticket `*before`, and
 * with 2 an upload from memory that the stream is still to write. */
static cm_copy_request
waiting_request(world *w, ends *e, int which, cm_ticket **before)
{
    cm_copy_request request = {.dst = row(&e->plain, 0, NBYTES / 2, 1, 1),
                               .src = row(&e->held, 0, NBYTES / 2, 1, 1),
                               .after = &w->streams[0],
                               .after_count = 1};
    if (which == 1) {
        request.dst = row(&e->device, 0, NBYTES / 2, 1, 1);
        request.src = row(&e->middle, 0, NBYTES / 2, 1, 1);
        request.after_tickets = before;
        request.after_ticket_count = 1;
    }
    if (which == 2) {
        /* This broadcasts one byte from memory without a device address, so neither the
         * copy engine nor a kernel can make it, and the host has to read the source. */
        request.dst = row(&e->device, 0, NBYTES / 2, 1, 1);
        request.src = row(&e->held, 0, NBYTES / 2, 0, 1);
        request.src.address = 0;
    }
    return request;
}

/* A copy is cancelled while it waits, at once or after a job thread has parked it. Its
 * keep must be dropped at once, its ticket must say so, its target must stay as it was,
 * and the copy before it must still be made. */
static void
test_ticket_cancelled_before_its_copy_begins_lets_go_of_everything(void)
{
    world w;
    open_world(&w);
    for (int which = 0; which < 3; which++) {
        for (int soon = 0; soon < 2; soon++) {
            atomic_int drops = 0;
            cm_ticket *before;
            cm_ticket *ticket;
            cm_ticket_info info;
            ends e = open_ends(&w);
            cm_copy_request request = waiting_request(&w, &e, 0, NULL);
            request.dst = row(&e.plain, NBYTES / 2, NBYTES / 2, 1, 1);
            CHECK_OK(cm_engine_copy(w.engine, &request, &before));
            request = waiting_request(&w, &e, which, &before);
            request.keep[0] = (cm_keep){&drops, count_drop};
            request.keep_count = 1;
            CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
            if (soon == 0) {
                let_others_run(); /* until a job thread has found that it must wait */
            }
            CHECK(cm_ticket_cancel(ticket));
            CHECK_EQ(atomic_load(&drops), 1);
            cm_ticket_query(ticket, &info);
            CHECK(info.done);
            CHECK(info.cancelled);
            CHECK_EQ(info.status.code, CM_ECANCELLED);
            CHECK_EQ(cm_ticket_count_moved(ticket), 0);
            CHECK(cm_ticket_cancel(ticket));
            CHECK_CODE(cm_ticket_wait(ticket, UINT64_MAX), CM_ECANCELLED);
            CHECK_CODE(cm_ticket_order(ticket, w.streams[1]), CM_ECANCELLED);
            cm_ticket_release(ticket);
            CHECK(cm_is_ok(cm_engine_take_unread(w.engine)));
            unshut(&w, w.streams[0]);
            CHECK_OK(cm_ticket_wait(before, UINT64_MAX));
            CHECK(!cm_ticket_cancel(before));
            cm_ticket_release(before);
            MUST(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
            CHECK_FILLED(e.plain.bytes, 1, NBYTES / 2);
            CHECK_FILLED(e.plain.bytes + NBYTES / 2, 7, NBYTES / 2);
            CHECK_FILLED(e.device.bytes, 1, NBYTES);
            close_ends(&w, &e);
        }
    }
    close_world(&w);
}

/* A copy waits for one that is cancelled, and for nothing else. It must go on at once,
 * although the stream is still shut. */
static void
test_ticket_that_waits_for_a_cancelled_one_goes_on(void)
{
    world w;
    cm_ticket *tickets[2];
    open_world(&w);
    ends e = open_ends(&w);
    cm_copy_request request = waiting_request(&w, &e, 0, NULL);
    CHECK_OK(cm_engine_copy(w.engine, &request, &tickets[0]));
    request = waiting_request(&w, &e, 1, &tickets[0]);
    request.after_count = 0;
    CHECK_OK(cm_engine_copy(w.engine, &request, &tickets[1]));
    CHECK(cm_ticket_cancel(tickets[0]));
    CHECK_OK(cm_ticket_wait(tickets[1], UINT64_MAX)); /* the stream is still shut */
    CHECK_FILLED(e.device.bytes, 7, NBYTES / 2);
    unshut(&w, w.streams[0]);
    cm_ticket_release(tickets[0]);
    cm_ticket_release(tickets[1]);
    close_ends(&w, &e);
    close_world(&w);
}

static atomic_int copies_begun;
static atomic_bool copies_may_go;

/* This is called before each copy (hook_copies()), and holds the copy until the test
 * lets it go. */
static void
hold_copy(cm_address dst CM_UNUSED, cm_address src CM_UNUSED, uint64_t nbytes CM_UNUSED)
{
    atomic_fetch_add(&copies_begun, 1);
    wait_for_flag(&copies_may_go);
}

/* All job threads are held inside copies. There is one such copy for each direction of
 * each link, since copies of the same direction take turns in a lane. Copies that wait
 * for their lane or for a thread can be cancelled. They can also be stopped, which
 * means that they are not made when a thread comes to them. A copy that has begun
 * cannot be cancelled any more. */
static void
test_ticket_is_cancelled_before_a_worker_has_it_and_not_after(void)
{
    enum { HELD = 2 * WORLD_DEVICES, IN_LANE = HELD, NO_THREAD, STOPPED, COUNT };
    _Static_assert((int)HELD == (int)CM_MAX_JOB_THREADS,
                   "a held copy for each job thread");
    world w;
    memory src[COUNT];
    memory dst[COUNT];
    cm_ticket *tickets[COUNT];
    open_world(&w);
    hook_copies(&w, hold_copy);
    for (int i = 0; i < COUNT; i++) {
        bool is_download = i < HELD && i % 2 == 1;
        bool is_upload = (i < HELD && i % 2 == 0) || i == IN_LANE;
        int device = i < HELD ? i / 2 : 0;
        src[i] = take_memory(&w, is_download ? CM_KIND_DEVICE : CM_KIND_PAGEABLE,
                             device, NBYTES);
        dst[i] = take_memory(&w, is_upload ? CM_KIND_DEVICE : CM_KIND_PAGEABLE, device,
                             NBYTES);
        memset(src[i].bytes, 9, NBYTES);
        memset(dst[i].bytes, 1, NBYTES);
        cm_copy_request request = {.dst = row(&dst[i], 0, NBYTES, 1, 1),
                                   .src = row(&src[i], 0, NBYTES, 1, 1)};
        CHECK_OK(cm_engine_copy(w.engine, &request, &tickets[i]));
        if (i < HELD) {
            WAIT_UNTIL(atomic_load(&copies_begun) == i + 1);
        }
    }
    CHECK(!cm_ticket_cancel(tickets[0]));
    CHECK(!cm_ticket_cancel(tickets[HELD - 1]));
    CHECK(cm_ticket_cancel(tickets[IN_LANE]));
    CHECK(cm_ticket_cancel(tickets[NO_THREAD]));
    cm_ticket_stop(tickets[STOPPED]);
    atomic_store(&copies_may_go, true);
    for (int i = 0; i < COUNT; i++) {
        bool is_made = i < HELD;
        CHECK_CODE(cm_ticket_wait(tickets[i], UINT64_MAX), is_made ? 0 : CM_ECANCELLED);
        CHECK_FILLED(dst[i].bytes, is_made ? 9 : 1, NBYTES);
        CHECK_EQ(cm_ticket_count_moved(tickets[i]), is_made ? NBYTES : 0);
        cm_ticket_release(tickets[i]);
        give_memory(&w, &src[i]);
        give_memory(&w, &dst[i]);
    }
    close_world(&w);
}

/* Cancel copies at random moments. Whatever the job thread is doing, there are two
 * outcomes. Either the whole copy is made and the ticket says so, or no byte is copied
 * and the ticket is cancelled. */
static void
test_ticket_cancelled_at_any_time_reports_the_truth(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory targets[2] = {take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES),
                         take_memory(&w, CM_KIND_DEVICE, 0, NBYTES)};
    for (int i = 0; i < 400; i++) {
        atomic_int drops = 0;
        memory *target = &targets[i % 2];
        cm_ticket *ticket;
        memset(a.bytes, 2 + i % 200, NBYTES);
        memset(target->bytes, 1, NBYTES);
        cm_copy_request request = {.dst = row(target, 0, NBYTES, 1, 1),
                                   .src = row(&a, 0, NBYTES, 1, 1),
                                   .keep = {{&drops, count_drop}},
                                   .keep_count = 1};
        CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
        for (int k = 0; k < i * 5; k++) {
            (void)cm_ticket_count_moved(ticket);
        }
        bool cancelled = cm_ticket_cancel(ticket);
        CHECK_CODE(cm_ticket_wait(ticket, UINT64_MAX), cancelled ? CM_ECANCELLED : 0);
        CHECK_EQ(atomic_load(&drops), 1);
        CHECK_FILLED(target->bytes, cancelled ? 1 : 2 + i % 200, NBYTES);
        cm_ticket_release(ticket);
    }
    CHECK(cm_is_ok(cm_engine_take_unread(w.engine)));
    give_memory(&w, &a);
    give_memory(&w, &targets[0]);
    give_memory(&w, &targets[1]);
    close_world(&w);
}

/* -- progress ---------------------------------------------------------------------------- */

static cm_ticket *watched;
static atomic_bool watched_set;
static int piece_count;
static uint64_t last_moved;
static int bad_count;

/* This is called before each piece is sent (hook_copies()), in the thread that runs the
 * job. That thread also counts the pieces that have arrived. It cannot have counted
 * more pieces than were sent, and must have counted each piece whose slot is used again
 * now. */
static void
look_at_progress(cm_address dst CM_UNUSED, cm_address src CM_UNUSED, uint64_t nbytes)
{
    if (nbytes != PIECE_NBYTES) {
        bad_count++;
        return;
    }
    wait_for_flag(&watched_set);
    uint64_t moved = cm_ticket_count_moved(watched);
    int least = piece_count > SLOT_COUNT ? piece_count - SLOT_COUNT : 0;
    bad_count += moved < last_moved || moved % PIECE_NBYTES != 0
                 || moved > (uint64_t)piece_count * PIECE_NBYTES
                 || moved < (uint64_t)least * PIECE_NBYTES;
    last_moved = moved;
    piece_count++;
}

/* Follow the progress of a long upload and a long download, from the job's thread at
 * each piece and from the caller. */
static void
test_ticket_progress_counts_pieces_that_are_over(void)
{
    for (int down = 0; down < 2; down++) {
        world w;
        cm_tuning tuning;
        open_world(&w);
        cm_tuning_init(&tuning); /* all pieces have the same size */
        tuning.chunk_nbytes = tuning.chunk_min_nbytes = PIECE_NBYTES;
        CHECK_OK(cm_engine_set_tuning(w.engine, &tuning));
        hook_copies(&w, look_at_progress);
        memory host = take_memory(&w, CM_KIND_PAGEABLE, 0, LONG_NBYTES);
        memory device = take_memory(&w, CM_KIND_DEVICE, 0, LONG_NBYTES);
        cm_copy_request request = {
            .dst = row(down ? &host : &device, 0, LONG_NBYTES, 1, 1),
            .src = row(down ? &device : &host, 0, LONG_NBYTES, 1, 1)};
        atomic_store(&watched_set, false);
        piece_count = bad_count = 0;
        last_moved = 0;
        memset(host.bytes, 3, LONG_NBYTES);
        memset(device.bytes, 3, LONG_NBYTES);
        CHECK_OK(cm_engine_copy(w.engine, &request, &watched));
        CHECK_EQ(cm_ticket_count_moved(watched), 0);
        atomic_store(&watched_set, true);
        uint64_t before = 0;
        cm_status status;
        do { /* progress never falls, and is not complete before the copy is done */
            status = cm_ticket_wait(watched, 100000);
            uint64_t moved = cm_ticket_count_moved(watched);
            CHECK_GE(moved, before);
            before = moved;
        } while (status.code == CM_ETIMEOUT);
        CHECK_OK(status);
        CHECK_EQ(before, LONG_NBYTES);
        CHECK_EQ(bad_count, 0);
        CHECK_EQ(piece_count, LONG_NBYTES / PIECE_NBYTES);
        cm_ticket_release(watched);
        give_memory(&w, &host);
        give_memory(&w, &device);
        close_world(&w);
    }
}

/* A copy that is queued as one call of the runtime has moved nothing until it is over,
 * and then all. Nobody can cancel it. */
static void
test_ticket_progress_of_one_runtime_copy_is_nothing_or_all(void)
{
    world w;
    cm_ticket *ticket;
    cm_ticket_info info;
    open_world(&w);
    ends e = open_ends(&w);
    cm_copy_request request = {.dst = row(&e.device, 0, NBYTES, 1, 1),
                               .src = row(&e.held, 0, NBYTES, 1, 1),
                               .stream = w.streams[0]};
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    CHECK_EQ(cm_ticket_count_moved(ticket), 0);
    /* The copy is on the stream already, so it cannot be cancelled. */
    CHECK(!cm_ticket_cancel(ticket));
    unshut(&w, w.streams[0]);
    WAIT_UNTIL(cm_ticket_count_moved(ticket) >= NBYTES);
    cm_ticket_query(ticket, &info);
    CHECK(info.done);
    CHECK(!info.cancelled);
    cm_ticket_release(ticket);
    close_ends(&w, &e);
    close_world(&w);
}

/* A broadcast counts its payload, in which a source that is repeated counts once. This
 * must also be so if the host copies. */
static void
test_ticket_progress_of_a_broadcast_is_of_its_payload(void)
{
    enum { ROWS = 4, COUNT = 8 << 20 };
    world w;
    cm_ticket *ticket;
    cm_ticket_info info;
    open_world(&w);
    memory src = take_memory(&w, CM_KIND_PAGEABLE, 0, COUNT);
    memory dst = take_memory(&w, CM_KIND_PAGEABLE, 0, ROWS * COUNT);
    number_bytes(&src, 4);
    cm_copy_request request = {.dst = row(&dst, 0, COUNT, 1, 1),
                               .src = row(&src, 0, COUNT, 1, 1)};
    cm_region *regions[2] = {&request.dst, &request.src};
    for (int i = 0; i < 2; i++) {
        regions[i]->ndim = 2;
        regions[i]->shape[1] = COUNT;
        regions[i]->strides[1] = 1;
        regions[i]->shape[0] = ROWS;
        regions[i]->strides[0] = i == 0 ? COUNT : 0;
    }
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    while (cm_ticket_count_moved(ticket) < COUNT) {
        CHECK_LE(cm_ticket_count_moved(ticket), COUNT);
    }
    cm_ticket_query(ticket, &info);
    CHECK(info.done);
    CHECK_EQ(info.nbytes, COUNT);
    CHECK_EQ(memcmp(dst.bytes + 3 * COUNT, src.bytes, COUNT), 0);
    cm_ticket_release(ticket);
    give_memory(&w, &src);
    give_memory(&w, &dst);
    close_world(&w);
}

/* -- time -------------------------------------------------------------------------------- */

/* The stream is shut for a while before the copy. The ticket's time must be that of the
 * copy alone. */
static void
test_ticket_seconds_are_of_the_copy_alone(void)
{
    world w;
    open_world(&w);
    ends e = open_ends(&w);
    cm_ticket_info info;
    cm_ticket *ticket;
    cm_copy_request request = {.dst = row(&e.device, 0, NBYTES, 1, 1),
                               .src = row(&e.held, 0, NBYTES, 1, 1),
                               .stream = w.streams[0]};
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    let_others_run();
    uint64_t opened_ns = cm_now_ns();
    unshut(&w, w.streams[0]);
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    double most = (double)(cm_now_ns() - opened_ns) * 1e-9;
    cm_ticket_query(ticket, &info);
    CHECK(info.seconds > 0);
    CHECK(info.seconds <= most);
    CHECK_EQ(e.device.bytes[NBYTES - 1], 7);
    cm_ticket_release(ticket);
    close_ends(&w, &e);
    close_world(&w);
}

/* The engine keeps two sorts of events, since those that measure time keep the device
 * busy for longer. Brief events (CM_POLLED) must not measure time, and the others
 * (CM_WAITED) must. This holds as well for events that were given back and are lent
 * again. */
static void
test_loan_of_a_brief_event_is_without_time(void)
{
    world w;
    open_world(&w);
    float ms = -1;
    uint64_t brief[2];
    uint64_t timed[2];
    cm_device_guard guard;
    MUST(cm_device_enter(w.rt, 0, &guard));
    /* The second round gets the events that the first one has given back. */
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 2; i++) {
            CHECK_OK(cm_cache_take_event(w.engine, 0, CM_POLLED, &brief[i]));
            CHECK_OK(cm_cache_take_event(w.engine, 0, CM_WAITED, &timed[i]));
            CHECK_OK(cm_rt_event_record(w.rt, brief[i], w.streams[0]->handle));
            CHECK_OK(cm_rt_event_record(w.rt, timed[i], w.streams[0]->handle));
        }
        CHECK_OK(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
        CHECK_CODE(cm_rt_event_elapsed(w.rt, brief[0], brief[1], &ms),
                   CM_CUDA_INVALID_HANDLE);
        CHECK_OK(cm_rt_event_elapsed(w.rt, timed[0], timed[1], &ms));
        CHECK(ms >= 0);
        for (int i = 0; i < 2; i++) {
            cm_cache_give_event(w.engine, 0, CM_POLLED, brief[i]);
            cm_cache_give_event(w.engine, 0, CM_WAITED, timed[i]);
        }
    }
    cm_device_leave(w.rt, &guard);
    close_world(&w);
}

MAIN(RUN(test_ticket_cancelled_before_its_copy_begins_lets_go_of_everything)
         RUN(test_ticket_that_waits_for_a_cancelled_one_goes_on)
             RUN(test_ticket_is_cancelled_before_a_worker_has_it_and_not_after)
                 RUN(test_ticket_cancelled_at_any_time_reports_the_truth)
                     RUN(test_ticket_progress_counts_pieces_that_are_over)
                         RUN(test_ticket_progress_of_one_runtime_copy_is_nothing_or_all)
                             RUN(test_ticket_progress_of_a_broadcast_is_of_its_payload)
                                 RUN(test_ticket_seconds_are_of_the_copy_alone)
                                     RUN(test_loan_of_a_brief_event_is_without_time))
