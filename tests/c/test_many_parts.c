/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the ticket of a batch that is made in several parts, which go different
 * ways. They check the progress that it counts, what becomes of the other parts when
 * one fails, and the order of parts that touch each other. A keep is an object that the
 * batch must drop once, when all its parts are over. */
#include <pthread.h>

#include "engine_hook.h"
#include "many_world.h"

enum { NBYTES = 4096 };

/* -- progress ---------------------------------------------------------------------- */

static atomic_bool arrived, may_go;

/* This is called before each copy of the runtime (hook_copies()). It says that the copy
 * was reached, and holds the copy until the test lets it go. */
static void
stop_at_copy(cm_address dst, cm_address src, uint64_t nbytes)
{
    (void)dst;
    (void)src;
    (void)nbytes;
    atomic_store(&arrived, true);
    wait_for_flag(&may_go);
}

/* The first part is over while the copy of the second one is held before it is queued.
 * The ticket must count the first part alone, and at the end both. */
static void
test_whole_reports_what_its_parts_have_moved(void)
{
    world w;
    open_world(&w);
    hook_copies(&w, stop_at_copy);
    memory device = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    memory first = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory second = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    number_bytes(&first, 1);
    cm_piece pieces[] = {piece_between(&second, 0, &first, 0, NBYTES, 0),
                         piece_between(&device, 0, &second, 0, NBYTES, 1)};
    cm_many_request request = {.pieces = pieces, .piece_count = 2};
    cm_ticket *ticket;
    atomic_store(&arrived, false);
    atomic_store(&may_go, false);
    CHECK_OK(cm_engine_copy_many(w.engine, &request, &ticket));
    wait_for_flag(&arrived);
    CHECK_EQ(cm_ticket_count_moved(ticket), NBYTES);
    atomic_store(&may_go, true);
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    CHECK_EQ(cm_ticket_count_moved(ticket), 2 * NBYTES);
    CHECK_BYTES_EQ(device.bytes, first.bytes, NBYTES);
    cm_ticket_release(ticket);
    give_memory(&w, &device);
    give_memory(&w, &first);
    give_memory(&w, &second);
    close_world(&w);
}

/* What look() has seen. */
typedef struct looker {
    cm_ticket *ticket;
    uint64_t most;
    int count;
} looker;

/* A cm_copy_request.interrupted that notes the ticket's progress and never
 * interrupts. */
static bool
look(void *argument)
{
    looker *me = argument;
    uint64_t moved = cm_ticket_count_moved(me->ticket);
    me->most = moved > me->most ? moved : me->most;
    me->count++;
    return false;
}

/* The host copies two runs together in pieces. Each piece that is over must count, even
 * if it ends inside a run. */
static void
test_runs_on_the_host_tell_their_pieces(void)
{
    enum { PIECE = 64 << 20, RUN = 48 << 20 };
    world w;
    open_world(&w);
    memory from = take_memory(&w, CM_KIND_PAGEABLE, 0, RUN);
    memory to = take_memory(&w, CM_KIND_PAGEABLE, 0, 2 * RUN);
    memset(from.bytes, 5, RUN);
    looker me = {.ticket = NULL};
    cm_piece pieces[] = {piece_between(&to, 0, &from, 0, RUN, 0),
                         piece_between(&to, RUN, &from, 0, RUN, 1)};
    cm_many_request request = {.common = {.blocking = true,
                                          .interrupted = look,
                                          .interrupted_argument = &me,
                                          .ticket_out = &me.ticket},
                               .pieces = pieces,
                               .piece_count = 2};
    CHECK_OK(cm_engine_copy_many(w.engine, &request, NULL));
    CHECK_EQ(me.count, 1);
    CHECK_EQ(me.most, PIECE);
    CHECK_EQ(to.bytes[2 * RUN - 1], 5);
    give_memory(&w, &from);
    give_memory(&w, &to);
    close_world(&w);
}

/* -- a part that fails to start ----------------------------------------------------------- */

/* A batch of two parts. The first copies runs by a kernel, on the stream that was asked
 * for, which is shut. The second goes to the other device, and the launch of its kernel
 * fails. */
typedef struct two_ways {
    memory pinned, near, far;
    cm_piece pieces[4];
    cm_many_request request;
    atomic_int drops;
    atomic_bool is_over;
    world *w;
    cm_ticket *ticket;
    cm_status status;
} two_ways;

static void
open_two_ways(world *w, two_ways *t, bool blocking)
{
    *t = (two_ways){.w = w};
    t->pinned = take_memory(w, CM_KIND_PINNED, 0, NBYTES);
    t->near = take_memory(w, CM_KIND_DEVICE, 0, NBYTES);
    t->far = take_memory(w, CM_KIND_DEVICE, 1, NBYTES);
    number_bytes(&t->pinned, 3);
    memset(t->near.bytes, 0, NBYTES);
    for (uint64_t i = 0; i < 2; i++) {
        t->pieces[i] = piece_between(&t->near, i * 1000, &t->pinned, i * 500, 100, i);
        t->pieces[2 + i] =
            piece_between(&t->far, i * 1000, &t->near, 2500 + i * 500, 100, 2 + i);
    }
    t->request = (cm_many_request){.common = {.stream = w->streams[0],
                                              .blocking = blocking,
                                              .keep = {{&t->drops, count_drop}},
                                              .keep_count = 1},
                                   .pieces = t->pieces,
                                   .piece_count = 4};
    shut(w, w->streams[0]);
    /* This launch is that of the runs to the second device. */
    cm_faults_plan(w->rt, CM_OP_kernel_launch, 2, 999, false);
}

/* Wait until nothing is under way, and check that the keep was dropped, that no failure
 * is unread and that the first part was made. */
static void
close_two_ways(two_ways *t)
{
    world *w = t->w;
    while (cm_engine_count_pending(w->engine) > 0) {
        cm_engine_poll(w->engine);
    }
    CHECK_EQ(atomic_load(&t->drops), 1);
    CHECK_OK(cm_engine_take_unread(w->engine));
    CHECK_BYTES_EQ(t->near.bytes, t->pinned.bytes, 100);
    give_memory(w, &t->pinned);
    give_memory(w, &t->near);
    give_memory(w, &t->far);
}

/* The body of a thread that makes the call. */
static void *
start_two_ways(void *argument)
{
    two_ways *t = argument;
    t->status = cm_engine_copy_many(t->w->engine, &t->request, &t->ticket);
    atomic_store(&t->is_over, true);
    return NULL;
}

/* One part fails to start while the other is on the shut stream. The call must return
 * at once with a ticket for the other part, and the keep must live until that part is
 * over. */
static void
test_failed_part_leaves_the_others_under_way(void)
{
    world w;
    two_ways t;
    pthread_t thread;
    open_world(&w);
    open_two_ways(&w, &t, false);
    CHECK(pthread_create(&thread, NULL, start_two_ways, &t) == 0);
    wait_for_flag(&t.is_over);
    CHECK_EQ(t.status.code, 999);
    CHECK_EQ(atomic_load(&t.drops), 0);
    CHECK(t.ticket != NULL);
    CHECK_EQ(cm_ticket_wait(t.ticket, 1000).code, CM_ETIMEOUT);
    CHECK(!cm_ticket_cancel(t.ticket));
    unshut(&w, w.streams[0]);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQ(cm_ticket_wait(t.ticket, UINT64_MAX).code, CM_ECANCELLED);
    cm_ticket_release(t.ticket);
    close_two_ways(&t);
    close_world(&w);
}

/* A copy that comes after the ticket of the failed call must wait for the part that is
 * still under way. */
static void
test_what_is_left_of_a_failed_call_is_ordered(void)
{
    world w;
    two_ways t;
    open_world(&w);
    open_two_ways(&w, &t, false);
    memory out = take_memory(&w, CM_KIND_PINNED, 0, 100);
    (void)start_two_ways(&t);
    CHECK(t.ticket != NULL);
    /* All that is left is queued. */
    CHECK_OK(cm_ticket_wait_submitted(t.ticket, UINT64_MAX));
    CHECK_EQ(cm_ticket_wait(t.ticket, 1000).code, CM_ETIMEOUT);
    cm_copy_request next = {.dst = row(&out, 0, 100, 1, 1),
                            .src = row(&t.near, 0, 100, 1, 1),
                            .after_tickets = &t.ticket,
                            .after_ticket_count = 1};
    cm_ticket *ticket;
    CHECK_OK(cm_engine_copy(w.engine, &next, &ticket));
    CHECK_EQ(cm_ticket_wait(ticket, 2 * 1000 * 1000).code, CM_ETIMEOUT);
    unshut(&w, w.streams[0]);
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    CHECK_BYTES_EQ(out.bytes, t.pinned.bytes, 100);
    CHECK_EQ(cm_ticket_order(t.ticket, w.streams[1]).code, CM_ECANCELLED);
    cm_ticket_release(ticket);
    cm_ticket_release(t.ticket);
    close_two_ways(&t);
    give_memory(&w, &out);
    close_world(&w);
}

/* A cm_copy_request.interrupted that counts its calls and interrupts. */
static bool
say_stop(void *argument)
{
    atomic_fetch_add((atomic_int *)argument, 1);
    return true;
}

/* A blocking call waits for the other part after one has failed. It must still ask
 * whether it is interrupted, as it is by Ctrl-C. */
static void
test_waiting_for_the_others_of_a_failed_part_is_interrupted(void)
{
    world w;
    two_ways t;
    pthread_t thread;
    atomic_int questions = 0;
    open_world(&w);
    open_two_ways(&w, &t, true);
    t.request.common.interrupted = say_stop;
    t.request.common.interrupted_argument = &questions;
    CHECK(pthread_create(&thread, NULL, start_two_ways, &t) == 0);
    wait_for_flag(&t.is_over);
    CHECK_EQ(t.status.code, CM_ECANCELLED);
    CHECK_GE(atomic_load(&questions), 1);
    CHECK_EQ(atomic_load(&t.drops), 0);
    unshut(&w, w.streams[0]);
    CHECK(pthread_join(thread, NULL) == 0);
    cm_ticket_release(t.ticket);
    close_two_ways(&t);
    close_world(&w);
}

/* -- order -------------------------------------------------------------------------------- */

/* The first copy is held in its job thread. The second comes after it and fails. The
 * third comes after the second, and must not overtake the first. */
static void
test_failed_part_lets_no_later_one_pass(void)
{
    world w;
    open_world(&w);
    hook_copies(&w, stop_at_copy);
    memory near = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    memory far = take_memory(&w, CM_KIND_DEVICE, 1, NBYTES);
    memory first = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory last = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    number_bytes(&first, 1);
    memset(last.bytes, 0xcc, NBYTES);
    cm_piece pieces[] = {piece_between(&near, 0, &first, 0, NBYTES, 0),
                         piece_between(&far, 0, &near, 0, NBYTES, 1),
                         piece_between(&first, 0, &last, 0, NBYTES, 2)};
    cm_many_request request = {.pieces = pieces, .piece_count = 1};
    cm_ticket *ticket;
    /* After this copy a stream of the first device is in the cache, so only the second
     * device needs a new one below. */
    atomic_store(&may_go, true);
    CHECK_OK(cm_engine_copy_many(w.engine, &request, &ticket));
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    cm_ticket_release(ticket);
    memset(near.bytes, 0xee, NBYTES);
    memset(far.bytes, 0xdd, NBYTES);
    atomic_store(&arrived, false);
    atomic_store(&may_go, false);
    request.piece_count = 3;
    cm_faults_plan(w.rt, CM_OP_stream_create, 1, 999, false);
    CHECK_OK(cm_engine_copy_many(w.engine, &request, &ticket));
    wait_for_flag(&arrived);
    let_others_run(); /* the third copy would be over now if it had not waited */
    CHECK_NE(first.bytes[0], 0xcc);
    atomic_store(&may_go, true);
    CHECK_EQ(cm_ticket_wait(ticket, UINT64_MAX).code, 999);
    CHECK_EQ(cm_faults_last_injected(w.rt), CM_OP_stream_create);
    CHECK_BYTES_EQ(near.bytes, first.bytes, NBYTES);
    CHECK_NE(near.bytes[0], 0xee);
    CHECK_EQ(far.bytes[0], 0xdd);
    cm_ticket_release(ticket);
    CHECK_OK(cm_engine_take_unread(w.engine));
    give_memory(&w, &near);
    give_memory(&w, &far);
    give_memory(&w, &first);
    give_memory(&w, &last);
    close_world(&w);
}

/* Three copies each depend on the one before and are made one after another. Each
 * runtime call fails once, and everything must be released. */
static void
test_chain_fails_whole_with_any_call(void)
{
    world w;
    open_world(&w);
    memory near = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    memory host[2];
    atomic_int drops = 0;
    for (unsigned i = 0; i < 2; i++) {
        host[i] = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    }
    for (int how = 0; how < 3; how++) {
        for (uint64_t nth = 1;; nth++) {
            cm_piece pieces[] = {piece_between(&near, 0, &host[0], 0, NBYTES, 0),
                                 piece_between(&host[1], 0, &near, 0, NBYTES, 1),
                                 piece_between(&near, 100, &host[1], 0, 1000, 2)};
            cm_many_request request = {
                .common = {.stream = how < 2 ? w.streams[0] : NULL,
                           .blocking = how == 0,
                           .keep = {{&drops, count_drop}},
                           .keep_count = 1},
                .pieces = pieces,
                .piece_count = 3};
            cm_ticket *ticket = NULL;
            number_bytes(&host[0], (unsigned)nth);
            memset(host[1].bytes, 0, NBYTES);
            atomic_store(&drops, 0);
            cm_faults_plan(w.rt, CM_OP_none, nth, 999, false);
            cm_status status = cm_engine_copy_many(w.engine, &request, &ticket);
            if (cm_is_ok(status)) {
                status = cm_ticket_wait(ticket, UINT64_MAX);
            }
            if (ticket != NULL) {
                cm_ticket_release(ticket);
            }
            bool injected = cm_faults_last_injected(w.rt) != CM_OP_none;
            cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
            while (cm_engine_count_pending(w.engine) > 0) {
                cm_engine_poll(w.engine);
            }
            CHECK_EQ(atomic_load(&drops), 1);
            CHECK_OK(cm_engine_take_unread(w.engine));
            CHECK(cm_is_ok(status) || status.code == 999);
            if (cm_is_ok(status)) {
                CHECK_BYTES_EQ(host[1].bytes, host[0].bytes, NBYTES);
                CHECK_BYTES_EQ(near.bytes + 100, host[0].bytes, 1000);
            }
            if (!injected) {
                CHECK_GT(nth, 10);
                break;
            }
        }
    }
    give_memory(&w, &near);
    give_memory(&w, &host[0]);
    give_memory(&w, &host[1]);
    close_world(&w);
}

/* -- a part with work on two streams ------------------------------------------------------ */

static _Atomic uint64_t shut_stream;

/* A kernel_launch that shuts the gate of the stream on which the first kernel is
 * queued. */
static cm_status
shutting_launch(cm_runtime *rt, uint64_t function, uint32_t block_count,
                uint32_t threads_per_block, const void *params, uint64_t params_nbytes,
                uint64_t stream)
{
    if (atomic_load(&shut_stream) == 0) {
        MUST(cm_emulated_gate_close(rt, stream));
        atomic_store(&shut_stream, stream);
    }
    return real_ops->kernel_launch(rt, function, block_count, threads_per_block, params,
                                   params_nbytes, stream);
}

/* A stream of the source's device gathers the bytes, and the stream of the target's
 * device has to wait for it. The call that makes it wait fails. Nevertheless the source
 * must be kept alive until the bytes are gathered. */
static void
test_failed_part_is_over_after_what_stands_beside_its_stream(void)
{
    world w;
    open_world(&w);
    real_ops = w.rt->ops;
    hooked_ops = *real_ops;
    hooked_ops.kernel_launch = shutting_launch;
    w.rt->ops = &hooked_ops;
    memory from = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    memory to = take_memory(&w, CM_KIND_DEVICE, 1, NBYTES);
    cm_piece_regions both[2] = {{.index = 0}, {.index = 1}};
    for (uint64_t i = 0; i < 2; i++) {
        both[i].dst = row(&to, i * NBYTES / 2, 500, 4, 2);
        both[i].src = row(&from, i * NBYTES / 2, 500, 4, 2);
    }
    atomic_int drops = 0;
    cm_many_request request = {.common = {.stream = w.streams[1],
                                          .keep = {{&drops, count_drop}},
                                          .keep_count = 1},
                               .others = both,
                               .other_count = 2};
    cm_ticket *ticket = NULL;
    cm_engine_deny_peers(w.engine, true);
    atomic_store(&shut_stream, 0);
    cm_faults_plan(w.rt, CM_OP_stream_wait_event, 2, 999, false);
    CHECK_CODE(cm_engine_copy_many(w.engine, &request, &ticket), 999);
    CHECK(ticket != NULL);
    CHECK_CODE(cm_ticket_wait(ticket, 20000000), CM_ETIMEOUT);
    CHECK_EQ(atomic_load(&drops), 0);
    MUST(cm_emulated_gate_open(w.rt, atomic_load(&shut_stream)));
    CHECK_CODE(cm_ticket_wait(ticket, UINT64_MAX), CM_ECANCELLED);
    CHECK_EQ(atomic_load(&drops), 1);
    cm_ticket_release(ticket);
    give_memory(&w, &from);
    give_memory(&w, &to);
    close_world(&w);
}

/* clang-format off */
MAIN(RUN(test_whole_reports_what_its_parts_have_moved)
     RUN(test_runs_on_the_host_tell_their_pieces)
     RUN(test_failed_part_leaves_the_others_under_way)
     RUN(test_what_is_left_of_a_failed_call_is_ordered)
     RUN(test_waiting_for_the_others_of_a_failed_part_is_interrupted)
     RUN(test_failed_part_lets_no_later_one_pass)
     RUN(test_chain_fails_whole_with_any_call)
     RUN(test_failed_part_is_over_after_what_stands_beside_its_stream))
/* clang-format on */
