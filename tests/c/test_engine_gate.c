/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that a copy which waits for a shut stream holds up nothing else: it must keep
 * no job thread, no page-locked memory and no stream from other copies. A stream is
 * shut while its gate holds back the work that is queued on it. */
#include "many_world.h"
#include "route_of.h"
#include "transfer/engine/private.h"

#include <stdlib.h>

/* -- each route, behind the stream and beside it ----------------------------------------- */

enum {
    COUNT = 128 << 10,
    ITEM = 8,
    NBYTES = 2 * COUNT * ITEM,
    PIECE_NBYTES = 64 << 10
};

/* A way to copy, which takes a certain route. With `many` it is a batch of two runs.
 * Strides are in bytes. */
typedef struct way {
    cm_route route;
    cm_kind dst, src;
    int dst_device, src_device;
    int64_t dst_stride, src_stride, itemsize;
    bool many;
    bool denied; /* no device may reach another */
} way;

static const way ways[] = {
    {CM_ROUTE_HOST, CM_KIND_PAGEABLE, CM_KIND_PAGEABLE, 0, 0, 8, 8, 8, false, false},
    {CM_ROUTE_HOST, CM_KIND_PAGEABLE, CM_KIND_PAGEABLE, 0, 0, 8, 8, 8, true, false},
    {CM_ROUTE_DIRECT, CM_KIND_DEVICE, CM_KIND_PINNED, 0, 0, 8, 8, 8, false, false},
    {CM_ROUTE_DIRECT_2D, CM_KIND_PINNED, CM_KIND_DEVICE, 0, 0, 1024, 1024, 512, false,
     false},
    {CM_ROUTE_KERNEL, CM_KIND_DEVICE, CM_KIND_DEVICE, 0, 0, 16, 16, 8, false, false},
    {CM_ROUTE_STAGED, CM_KIND_DEVICE, CM_KIND_PAGEABLE, 0, 0, 8, 8, 8, false, false},
    {CM_ROUTE_STAGED, CM_KIND_PAGEABLE, CM_KIND_DEVICE, 0, 0, 8, 8, 8, false, false},
    {CM_ROUTE_STAGED_KERNEL, CM_KIND_DEVICE, CM_KIND_PAGEABLE, 0, 0, 16, 8, 8, false,
     false},
    {CM_ROUTE_STAGED_KERNEL, CM_KIND_PAGEABLE, CM_KIND_DEVICE, 0, 0, 8, 16, 8, false,
     false},
    {CM_ROUTE_PEER, CM_KIND_DEVICE, CM_KIND_DEVICE, 1, 0, 8, 8, 8, false, false},
    {CM_ROUTE_PEER, CM_KIND_DEVICE, CM_KIND_DEVICE, 1, 0, 16, 16, 8, false, false},
    {CM_ROUTE_PEER_STAGED, CM_KIND_DEVICE, CM_KIND_DEVICE, 1, 0, 8, 8, 8, false, true},
    {CM_ROUTE_PEER_STAGED, CM_KIND_DEVICE, CM_KIND_DEVICE, 1, 0, 16, 16, 8, false,
     true},
    {CM_ROUTE_TABLE, CM_KIND_DEVICE, CM_KIND_DEVICE, 0, 0, 8, 8, 8, true, false},
    {CM_ROUTE_TABLE, CM_KIND_DEVICE, CM_KIND_DEVICE, 1, 0, 8, 8, 8, true, false},
    {CM_ROUTE_STAGED_TABLE, CM_KIND_DEVICE, CM_KIND_PAGEABLE, 0, 0, 8, 8, 8, true,
     false},
    {CM_ROUTE_STAGED_TABLE, CM_KIND_PAGEABLE, CM_KIND_DEVICE, 0, 0, 8, 8, 8, true,
     false},
};

enum { WAYS = sizeof(ways) / sizeof(ways[0]) };

/* One copy that goes such a way. */
typedef struct going {
    const way *way;
    memory dst, src;
    cm_ticket *before; /* a ticket that it comes after, or NULL */
    cm_ticket *ticket;
} going;

/* Allocate the ends of a copy that goes this way. */
static void
open_going(world *w, going *g, const way *how)
{
    g->way = how;
    g->before = NULL;
    g->dst = take_memory(w, how->dst, how->dst_device, NBYTES);
    g->src = take_memory(w, how->src, how->src_device, NBYTES);
    memset(g->dst.bytes, 0xee, NBYTES);
    number_bytes(&g->src, (unsigned)(how - ways) + 1);
}

/* Start the copy. It comes after the work that the stream `after` has been given, if
 * that is not NULL. It runs on the stream `on` or, if that is NULL, in the background.
 */
static void
start_going(world *w, going *g, cm_stream *after, cm_stream *on)
{
    const way *how = g->way;
    int64_t count = (int64_t)COUNT * ITEM / how->itemsize;
    cm_copy_request request = {
        .dst = row(&g->dst, 0, count, how->dst_stride, how->itemsize),
        .src = row(&g->src, 0, count, how->src_stride, how->itemsize),
        .stream = on,
        .after = &after,
        .after_count = after != NULL,
        .after_tickets = &g->before,
        .after_ticket_count = g->before != NULL,
    };
    cm_piece pieces[2] = {
        piece_between(&g->dst, 0, &g->src, 0, COUNT, 0),
        piece_between(&g->dst, 2 * COUNT, &g->src, 3 * COUNT, COUNT - 8, 1)};
    cm_many_request many = {.common = request, .pieces = pieces, .piece_count = 2};
    cm_engine_deny_peers(w->engine, how->denied);
    CHECK_OK(how->many ? cm_engine_copy_many(w->engine, &many, &g->ticket)
                       : cm_engine_copy(w->engine, &request, &g->ticket));
    cm_engine_deny_peers(w->engine, false);
}

/* Check the bytes of the target. */
static void
check_bytes(const going *g)
{
    const way *how = g->way;
    if (how->many) {
        CHECK_BYTES_EQ(g->dst.bytes, g->src.bytes, COUNT);
        CHECK_BYTES_EQ(g->dst.bytes + 2 * COUNT, g->src.bytes + 3 * COUNT, COUNT - 8);
        return;
    }
    uint64_t wrong = 0;
    for (int64_t i = 0; i < (int64_t)COUNT * ITEM / how->itemsize; i++) {
        wrong += memcmp(g->dst.bytes + i * how->dst_stride,
                        g->src.bytes + i * how->src_stride, (size_t)how->itemsize)
                 != 0;
    }
    CHECK_EQ(wrong, 0);
}

/* Wait for the copy, and check that it took its route and moved the right bytes. */
static void
finish_going(world *w, going *g)
{
    cm_ticket_info info;
    CHECK_OK(cm_ticket_wait(g->ticket, UINT64_C(60000000000)));
    cm_ticket_query(g->ticket, &info);
    if (route_of(info.row) != g->way->route) {
        CHECK_FAIL_("the copy of way %d took route %d", (int)(g->way - ways),
                    (int)route_of(info.row));
    }
    check_bytes(g);
    cm_ticket_release(g->ticket);
    give_memory(w, &g->dst);
    give_memory(w, &g->src);
}

/* Return whether no copy holds page-locked memory or a job thread, and none asks for
 * one. */
static bool
nothing_is_held(world *w)
{
    cm_mutex_lock(&w->engine->lock);
    bool nothing = w->engine->ring_used_nbytes == 0 && w->engine->job_count == 0
                   && w->engine->idle_count == w->engine->thread_count;
    cm_mutex_unlock(&w->engine->lock);
    return nothing;
}

/* A copy of each way waits for a shut stream. A copy of each way that does not wait
 * must then be made, in the background and on another stream. When the gate opens the
 * first copies must be made too. */
static void
test_shut_stream_holds_up_no_route_elsewhere(void)
{
    world w;
    going held[WAYS], free_ones[WAYS];
    cm_stream *shut_stream;
    cm_tuning tuning;
    open_world(&w);
    cm_tuning_init(&tuning); /* with these values one copy could take the whole ring */
    tuning.ring_nbytes = COUNT * ITEM;
    /* This is less than a copy has, but more than a run of a batch. */
    tuning.staged_peer_nbytes = 2 * COUNT * ITEM / 3;
    tuning.chunk_nbytes = tuning.chunk_min_nbytes = PIECE_NBYTES;
    CHECK_OK(cm_engine_set_tuning(w.engine, &tuning));
    MUST(cm_stream_create(w.rt, 0, CM_STREAM_NON_BLOCKING, 0, &shut_stream));
    memory filler = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    uint32_t byte = 1;
    shut(&w, shut_stream);
    cm_region whole = row(&filler, 0, 4096, 1, 1);
    CHECK_OK(fill(&w, &whole, &byte, shut_stream, false, NULL));
    for (int i = 0; i < WAYS; i++) {
        open_going(&w, &held[i], &ways[i]);
        start_going(&w, &held[i], shut_stream, NULL);
    }
    let_others_run();
    WAIT_UNTIL(nothing_is_held(&w));
    /* The copies run in the background first, and then on another stream. */
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < WAYS; i++) {
            open_going(&w, &free_ones[i], &ways[i]);
            start_going(&w, &free_ones[i], NULL, round == 0 ? NULL : w.streams[0]);
        }
        for (int i = 0; i < WAYS; i++) {
            finish_going(&w, &free_ones[i]);
        }
    }
    for (int i = 0; i < WAYS; i++) {
        cm_ticket_info info;
        cm_ticket_query(held[i].ticket, &info);
        CHECK(!info.done);
        CHECK_FILLED(held[i].dst.bytes, 0xee, NBYTES);
    }
    unshut(&w, shut_stream);
    for (int i = 0; i < WAYS; i++) {
        finish_going(&w, &held[i]);
    }
    give_memory(&w, &filler);
    cm_stream_release(shut_stream);
    close_world(&w);
}

/* -- failures behind a shut stream ------------------------------------------------- */

/* Return the way with this route and this stride of the source. */
static const way *
find_way(cm_route route, int64_t src_stride)
{
    const way *how = ways;
    while (how->route != route || how->src_stride != src_stride) {
        how++;
    }
    return how;
}

/* Shut the stream's gate and queue a fill behind it. */
static void
fill_behind(world *w, memory *filler, cm_stream *stream)
{
    cm_region whole = row(filler, 0, 4096, 1, 1);
    shut(w, stream);
    CHECK_OK(fill(w, &whole, "\1", stream, false, NULL));
}

/* Let as many copies fail behind a shut stream as there are job threads. Each of them
 * uses a second stream as well. They are run by job threads, after a copy that makes
 * way for them, or else by the thread that asks for them. No thread may stay with a
 * failed copy, so another copy must still be made. */
static void
fail_behind_a_shut_stream(bool by_job_threads)
{
    enum { COPIES = CM_MAX_JOB_THREADS };
    world w;
    going first, failing[COPIES], free_one;
    cm_stream *shut_streams[2];
    open_world(&w);
    memory filler = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    for (int i = 0; i < 2; i++) {
        MUST(cm_stream_create(w.rt, 0, CM_STREAM_NON_BLOCKING, 0, &shut_streams[i]));
        fill_behind(&w, &filler, shut_streams[i]);
    }
    cm_faults_plan(w.rt, CM_OP_copy_peer_async, 1, 999, true);
    open_going(&w, &first, find_way(CM_ROUTE_STAGED, 8));
    start_going(&w, &first, shut_streams[1], NULL);
    for (int i = 0; i < COPIES; i++) {
        open_going(&w, &failing[i], find_way(CM_ROUTE_PEER, 16));
        failing[i].before = by_job_threads ? first.ticket : NULL;
        start_going(&w, &failing[i], shut_streams[0], NULL);
    }
    unshut(&w, shut_streams[1]);
    finish_going(&w, &first);
    WAIT_UNTIL(cm_faults_count(w.rt, CM_OP_copy_peer_async) == COPIES);
    open_going(&w, &free_one, find_way(CM_ROUTE_HOST, 8));
    start_going(&w, &free_one, NULL, NULL);
    finish_going(&w, &free_one);
    unshut(&w, shut_streams[0]);
    for (int i = 0; i < COPIES; i++) {
        CHECK_CODE(cm_ticket_wait(failing[i].ticket, UINT64_MAX), 999);
        cm_ticket_release(failing[i].ticket);
        give_memory(&w, &failing[i].dst);
        give_memory(&w, &failing[i].src);
    }
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    give_memory(&w, &filler);
    for (int i = 0; i < 2; i++) {
        cm_stream_release(shut_streams[i]);
    }
    close_world(&w);
}

/* Run fail_behind_a_shut_stream() for copies that job threads run, and for copies that
 * the caller queues. */
static void
test_failed_copy_behind_a_shut_stream_keeps_no_thread(void)
{
    fail_behind_a_shut_stream(true);
    fail_behind_a_shut_stream(false);
}

/* -- copies of the same bytes ------------------------------------------------------------ */

/* Queue copies of the same bytes behind a shut stream, each after the one before, and
 * then open it. All of them together must need no more streams than one of them. */
static void
run_same_bytes(cm_kind kind)
{
    enum { QUEUED = 600, SMALL = 16, FEW = 8 };
    world w;
    cm_ticket *tickets[QUEUED];
    open_world(&w);
    memory src = take_memory(&w, kind, 0, SMALL);
    memory dst = take_memory(&w, CM_KIND_DEVICE, 0, SMALL);
    memset(src.bytes, 7, SMALL);
    memset(dst.bytes, 0, SMALL);
    cm_copy_request hold = {.dst = row(&dst, 0, 1, 1, 1),
                            .src = row(&dst, 0, 1, 1, 1),
                            .stream = w.streams[0]};
    cm_copy_request request = {.dst = row(&dst, 0, SMALL, 1, 1),
                               .src = row(&src, 0, SMALL, 1, 1),
                               .after = w.streams,
                               .after_count = 1};
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    shut(&w, w.streams[0]);
    CHECK_OK(cm_engine_copy(w.engine, &hold, NULL));
    for (int i = 0; i < QUEUED; i++) {
        CHECK_OK(cm_engine_copy(w.engine, &request, &tickets[i]));
        request.after_count = 0;
        request.after_tickets = &tickets[i];
        request.after_ticket_count = 1;
    }
    unshut(&w, w.streams[0]);
    for (int i = 0; i < QUEUED; i++) {
        CHECK_OK(cm_ticket_wait(tickets[i], UINT64_MAX));
        cm_ticket_release(tickets[i]);
    }
    CHECK_LT(cm_faults_count(w.rt, CM_OP_stream_create), FEW);
    CHECK_FILLED(dst.bytes, 7, SMALL);
    give_memory(&w, &src);
    give_memory(&w, &dst);
    close_world(&w);
}

static void
test_copies_of_the_same_bytes_share_a_stream(void)
{
    run_same_bytes(CM_KIND_PINNED);
    run_same_bytes(CM_KIND_DEVICE);
    run_same_bytes(CM_KIND_PAGEABLE);
}

MAIN(RUN(test_shut_stream_holds_up_no_route_elsewhere)
         RUN(test_failed_copy_behind_a_shut_stream_keeps_no_thread)
             RUN(test_copies_of_the_same_bytes_share_a_stream))
