/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the order of copies: after streams and after other copies, on a captured
 * stream, in calls that are interrupted, and in queues of many copies. They also test
 * tickets and keeps. A keep is an object that a copy holds until it is over and then
 * drops. A shut gate holds a stream up while a test looks. */
#include "engine_world.h"
#include "route_of.h"
#include "transfer/engine/private.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* -- order and lifetime ------------------------------------------------------------------ */

/* The stream is shut, and yet the call must have read its ordinary source when it
 * returns. Nothing may arrive before the gate opens, and the keep is dropped only when
 * the copy is done. */
static void
test_engine_pageable_source_is_read_before_the_call_returns(void)
{
    world w;
    atomic_int drops = 0;
    cm_ticket_info info;
    open_world(&w);
    memory src = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    memory dst = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    memset(dst.bytes, 0, 4096);
    memset(src.bytes, 9, 4096);
    shut(&w, w.streams[0]);
    cm_copy_request request = {.dst = row(&dst, 0, 4096, 1, 1),
                               .src = row(&src, 0, 4096, 1, 1),
                               .stream = w.streams[0],
                               .keep = {{&drops, count_drop}},
                               .keep_count = 1};
    cm_ticket *ticket;
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    memset(src.bytes, 1, 4096);
    cm_ticket_query(ticket, &info);
    CHECK(!info.done);
    CHECK_EQ(route_of(info.row), CM_ROUTE_STAGED);
    CHECK_CODE(cm_ticket_wait(ticket, 2000000), CM_ETIMEOUT);
    CHECK_EQ(atomic_load(&drops), 0);
    CHECK_FILLED(dst.bytes, 0, 4096);
    unshut(&w, w.streams[0]);
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    CHECK_EQ(atomic_load(&drops), 1);
    CHECK_FILLED(dst.bytes, 9, 4096);
    cm_ticket_query(ticket, &info);
    CHECK(info.seconds > 0);
    cm_ticket_release(ticket);
    give_memory(&w, &src);
    give_memory(&w, &dst);
    close_world(&w);
}

/* The caller takes no ticket. The call must return while the stream is shut, and the
 * copy must still be made and drop its keeps. */
static void
test_engine_dropped_ticket_neither_blocks_nor_cancels(void)
{
    world w;
    atomic_int drops = 0;
    open_world(&w);
    memory src = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    memory dst = take_memory(&w, CM_KIND_PINNED, 0, 4096);
    memset(src.bytes, 9, 4096);
    memset(dst.bytes, 0, 4096);
    shut(&w, w.streams[0]);
    cm_copy_request request = {.dst = row(&dst, 0, 4096, 1, 1),
                               .src = row(&src, 0, 4096, 1, 1),
                               .stream = w.streams[0],
                               .keep = {{&drops, count_drop}, {&drops, count_drop}},
                               .keep_count = 2};
    CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
    CHECK_EQ(cm_engine_count_pending(w.engine), 1);
    CHECK_EQ(atomic_load(&drops), 0);
    unshut(&w, w.streams[0]);
    WAIT_UNTIL(cm_engine_count_pending(w.engine) == 0);
    CHECK_EQ(atomic_load(&drops), 2);
    CHECK_FILLED(dst.bytes, 9, 4096);
    give_memory(&w, &src);
    give_memory(&w, &dst);
    close_world(&w);
}

/* There are three copies. The second and the third each read the target of the one
 * before. The second names the stream that it comes after, and the third names the
 * second's ticket. */
static void
test_engine_waits_for_streams_and_tickets_named(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PINNED, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    memory c = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    memset(a.bytes, 5, 4096);
    memset(b.bytes, 0, 4096);
    cm_copy_request first = {.dst = row(&b, 0, 4096, 1, 1),
                             .src = row(&a, 0, 4096, 1, 1),
                             .stream = w.streams[0]};
    cm_copy_request second = {.dst = row(&c, 0, 4096, 1, 1),
                              .src = row(&b, 0, 4096, 1, 1),
                              .after = &w.streams[0],
                              .after_count = 1};
    cm_ticket *tickets[3];
    shut(&w, w.streams[0]);
    CHECK_OK(cm_engine_copy(w.engine, &first, &tickets[0]));
    CHECK_OK(cm_engine_copy(w.engine, &second, &tickets[1]));
    /* This copy within the host comes after one that a job thread has still to make. */
    memory d = take_memory(&w, CM_KIND_MANAGED, 0, 4096);
    cm_copy_request third = {.dst = row(&d, 0, 4096, 1, 1),
                             .src = row(&c, 0, 4096, 1, 1),
                             .after_tickets = &tickets[1],
                             .after_ticket_count = 1};
    CHECK_OK(cm_engine_copy(w.engine, &third, &tickets[2]));
    CHECK_CODE(cm_ticket_wait(tickets[2], 1000000), CM_ETIMEOUT);
    unshut(&w, w.streams[0]);
    CHECK_OK(cm_ticket_wait(tickets[2], UINT64_MAX));
    CHECK_FILLED(d.bytes, 5, 4096);
    for (int i = 0; i < 3; i++) {
        cm_ticket_release(tickets[i]);
    }
    give_memory(&w, &a);
    give_memory(&w, &b);
    give_memory(&w, &c);
    give_memory(&w, &d);
    close_world(&w);
}

/* One copy runs in the background, and cm_ticket_order() makes a stream wait for it. A
 * copy on that stream must find its bytes, and cm_ticket_notify() must ring a bell when
 * that copy is done. */
static void
test_ticket_order_and_notify(void)
{
    world w;
    uint64_t count = 0;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    memory c = take_memory(&w, CM_KIND_PINNED, 0, 4096);
    memset(a.bytes, 6, 4096);
    int fd = eventfd(0, EFD_CLOEXEC);
    cm_bell *bell;
    CHECK_OK(cm_bell_create(fd, &bell));
    cm_copy_request up = {.dst = row(&b, 0, 4096, 1, 1), .src = row(&a, 0, 4096, 1, 1)};
    cm_copy_request down = {.dst = row(&c, 0, 4096, 1, 1),
                            .src = row(&b, 0, 4096, 1, 1),
                            .stream = w.streams[0]};
    cm_ticket *first, *second;
    CHECK_OK(cm_engine_copy(w.engine, &up, &first));
    CHECK_OK(cm_ticket_order(first, w.streams[0]));
    CHECK_OK(cm_engine_copy(w.engine, &down, &second));
    CHECK_OK(cm_ticket_order(second, w.streams[1]));
    CHECK_OK(cm_ticket_notify(second, bell));
    CHECK_EQ(read(fd, &count, sizeof(count)), (ssize_t)sizeof(count));
    CHECK_EQ(count, 1);
    /* The ticket is done before anybody is notified. */
    CHECK_OK(cm_ticket_wait(second, 0));
    CHECK_FILLED(c.bytes, 6, 4096);
    /* The ticket is done, so this rings the bell at once. */
    CHECK_OK(cm_ticket_notify(second, bell));
    CHECK_EQ(read(fd, &count, sizeof(count)), (ssize_t)sizeof(count));
    cm_bell_release(bell);
    (void)close(fd);
    cm_status status = cm_bell_create(-1, &bell);
    CHECK_CODE(status, CM_ESYSTEM);
    CHECK_EQ(status.arg, EBADF);
    cm_ticket_release(first);
    cm_ticket_release(second);
    give_memory(&w, &a);
    give_memory(&w, &b);
    give_memory(&w, &c);
    close_world(&w);
}

/* Closing the engine must wait for a copy in the background. Its ticket can still be
 * asked afterwards. */
static void
test_engine_close_waits_for_all_and_tickets_outlive_it(void)
{
    world w;
    cm_ticket *ticket;
    cm_ticket_info info;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, 1 << 20);
    memory b = take_memory(&w, CM_KIND_DEVICE, 1, 1 << 20);
    memset(a.bytes, 8, 1 << 20);
    cm_copy_request up = {.dst = row(&b, 0, 1 << 20, 1, 1),
                          .src = row(&a, 0, 1 << 20, 1, 1)};
    CHECK_OK(cm_engine_copy(w.engine, &up, &ticket));
    CHECK_OK(cm_engine_close(w.engine));
    CHECK_FILLED(b.bytes, 8, 1 << 20);
    /* close_world() closes an engine, so make a new one. */
    MUST(cm_engine_create(w.rt, w.registry, NULL, NULL, &w.engine));
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
    cm_ticket_query(ticket, &info);
    CHECK(info.done);
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    cm_ticket_release(ticket);
}

/* The body of a thread that opens the gate once everybody else waits. */
static void *
open_gate_soon(void *argument)
{
    world *w = argument;
    let_others_run(); /* until the main thread waits in its call */
    unshut(w, w->streams[0]);
    return NULL;
}

/* A copy into page-locked memory is only queued on its stream. A second copy reads that
 * memory on the host, so it has to wait for the first one. This must hold when all of
 * the memory that it reads is page-locked, and when only a part is. */
static void
test_engine_registered_source_is_read_after_the_stream(void)
{
    enum { NBYTES = 4 << 16, LOCKED = 2 << 16 };
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    unsigned char *host = aligned_alloc(1 << 16, NBYTES);
    memory h = {.kind = CM_KIND_PAGEABLE, .device = -1, .nbytes = NBYTES};
    h.host = h.bytes = host;
    for (int i = 0; i < 2; i++) {
        uint64_t read_nbytes = i == 0 ? LOCKED : NBYTES;
        cm_registration *registration;
        cm_ticket *tickets[2];
        pthread_t opener;
        number_bytes(&a, 3);
        memset(host, 0, NBYTES);
        memset(b.bytes, 0, NBYTES);
        MUST(cm_registry_register(w.registry, 0, host, LOCKED, false, &registration));
        cm_copy_request down = {.dst = row(&h, 0, LOCKED, 1, 1),
                                .src = row(&a, 0, LOCKED, 1, 1),
                                .stream = w.streams[0]};
        cm_copy_request up = {.dst = row(&b, 0, (int64_t)read_nbytes / 8, 8, 4),
                              .src = row(&h, 0, (int64_t)read_nbytes / 8, 8, 4),
                              .stream = w.streams[0]};
        shut(&w, w.streams[0]);
        CHECK_OK(cm_engine_copy(w.engine, &down, &tickets[0]));
        CHECK_EQ(pthread_create(&opener, NULL, open_gate_soon, &w), 0);
        CHECK_OK(cm_engine_copy(w.engine, &up, &tickets[1]));
        uint64_t wrong = 0;
        for (int k = 0; k < 2; k++) {
            CHECK_OK(cm_ticket_wait(tickets[k], UINT64_MAX));
            cm_ticket_release(tickets[k]);
        }
        (void)pthread_join(opener, NULL);
        for (uint64_t k = 0; k < LOCKED; k++) {
            wrong += b.bytes[k] != (k % 8 < 4 ? a.bytes[k] : 0);
        }
        CHECK_EQ(wrong, 0);
        MUST(cm_registration_release(registration));
    }
    free(host);
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* -- registrations ----------------------------------------------------------------------- */

typedef struct ending {
    world *w;
    cm_registration *registration; /* NULL once it is released */
    /* How many pieces were registered just after the release. */
    uint64_t count_when_ended;
    /* How many were registered when the keep was dropped. */
    uint64_t count_when_dropped;
} ending;

/* A cm_copy_request.interrupted that releases the registration while the call waits for
 * its copy, and lets the copy go on. */
static bool
end_registration(void *argument)
{
    ending *e = argument;
    if (e->registration != NULL) {
        MUST(cm_registration_release(e->registration));
        e->registration = NULL;
        e->count_when_ended = cm_registry_count(e->w->registry);
        unshut(e->w, e->w->streams[0]);
    }
    return false;
}

/* A cm_keep.drop that notes how many pieces are registered. */
static void
note_pieces(void *argument)
{
    ending *e = argument;
    e->count_when_dropped = cm_registry_count(e->w->registry);
}

/* A registration is released while a copy reads or writes its memory. The pages must
 * stay page-locked until the copy is done, and must be unlocked before its keep is
 * dropped. */
static void
test_engine_pages_stay_locked_until_the_copy_is_done(void)
{
    enum { NBYTES = 1 << 16 };
    world w;
    open_world(&w);
    memory device = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    memory h = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory *pairs[][2] = {{&device, &h}, {&h, &device}};
    for (int i = 0; i < 4; i++) {
        ending e = {.w = &w, .count_when_dropped = UINT64_MAX};
        /* A copy with a stride of 4 needs no job, and one with a stride of 8 does. */
        int64_t stride = i < 2 ? 4 : 8;
        cm_copy_request request = {.dst = row(pairs[i % 2][0], 0, 512, stride, 4),
                                   .src = row(pairs[i % 2][1], 0, 512, stride, 4),
                                   .stream = w.streams[0],
                                   .blocking = true,
                                   .keep = {{&e, note_pieces}},
                                   .keep_count = 1,
                                   .interrupted = end_registration,
                                   .interrupted_argument = &e};
        MUST(cm_registry_register(w.registry, 0, h.host, NBYTES, false,
                                  &e.registration));
        MUST(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
        number_bytes(pairs[i % 2][1], (unsigned)i + 1);
        shut(&w, w.streams[0]);
        CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
        CHECK(e.registration == NULL);
        CHECK_EQ(e.count_when_ended, 1);
        CHECK_EQ(e.count_when_dropped, 0);
        for (int64_t k = 0; k < 512; k++) {
            CHECK_BYTES_EQ(pairs[i % 2][0]->bytes + k * stride,
                           pairs[i % 2][1]->bytes + k * stride, 4);
        }
    }
    give_memory(&w, &device);
    give_memory(&w, &h);
    close_world(&w);
}

/* -- memory ------------------------------------------------------------------------------ */

/* What the relief of the next test does: whether it helps, and how often it was
 * asked. */
typedef struct helper {
    world *w;
    int asked;
    bool helps;
} helper;

/* A cm_relief that raises the limit if it is to help. It also changes the current
 * device, which the engine has to put right. */
static cm_status
relieve(void *argument, cm_pool *pool, uint64_t nbytes, cm_stream *stream,
        cm_status status, cm_block **out)
{
    helper *h = argument;
    h->asked++;
    MUST(cm_rt_device_set(h->w->rt, 1)); /* as code of a user may do */
    if (!h->helps) {
        return status;
    }
    atomic_store(&cm_pool_get_config(pool)->budget->limit_nbytes, UINT64_MAX);
    const cm_wait_hooks uninterrupted = {.interrupted = NULL};
    return cm_pool_alloc(pool, nbytes, stream, &uninterrupted, out);
}

/* A cm_copy_request.interrupted that never interrupts. */
static bool
go_on(void *argument)
{
    (void)argument;
    return false;
}

/* A copy needs a little device memory and the limit allows none. The engine must ask
 * for relief, but only in a call that may be kept waiting, and copy in another way if
 * that does not help. */
static void
test_engine_short_of_device_memory_asks_for_relief(void)
{
    world w;
    open_world(&w);
    helper h = {.w = &w};
    w.engine->relief = relieve;
    w.engine->relief_argument = &h;
    memory device = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    memory host = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    cm_copy_request request = {.dst = row(&device, 0, 512, 8, 4),
                               .src = row(&host, 0, 512, 8, 4),
                               .stream = w.streams[0],
                               .blocking = true};
    cm_budget *budget = cm_pool_get_config(w.device[0])->budget;
    atomic_store(&budget->limit_nbytes, 1);
    /* In the first round the call may not be kept waiting, so nobody is asked. */
    for (int asked = 0; asked <= 2; asked++) {
        request.interrupted = asked == 0 ? NULL : go_on;
        /* If relief does not help, a kernel reads the page-locked memory instead. */
        h.helps = asked == 2;
        number_bytes(&host, 5 + (unsigned)asked);
        CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
        CHECK_EQ(h.asked, asked);
        for (int64_t k = 0; k < 512; k++) {
            CHECK_BYTES_EQ(device.bytes + 8 * k, host.bytes + 8 * k, 4);
        }
    }
    /* If there is no page-locked memory either, the call must report that. */
    atomic_store(&budget->limit_nbytes, 1);
    atomic_store(&cm_pool_get_config(w.pinned)->budget->limit_nbytes, 1);
    h.helps = false;
    uint64_t released;
    CHECK_OK(cm_pool_trim(w.device[0], 0, NULL, &released));
    CHECK_OK(cm_pool_trim(w.pinned, 0, NULL, &released));
    CHECK_CODE(cm_engine_copy(w.engine, &request, NULL), CM_ELIMIT);
    CHECK_EQ(h.asked, 3);
    give_memory(&w, &device);
    give_memory(&w, &host);
    close_world(&w);
}

/* -- capture and interruption ------------------------------------------------------------ */

/* On a stream that is captured, a copy that only queues work goes into the graph. One
 * that blocks, or for which the host has to work, must be refused before it queues
 * anything. After the capture it works again. */
static void
test_engine_on_a_capturing_stream(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PINNED, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    memory c = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    cm_ticket *ticket;
    cm_ticket_info info;
    cm_copy_request request = {.dst = row(&b, 0, 512, 8, 4),
                               .src = row(&a, 0, 512, 8, 4),
                               .stream = w.streams[0]};
    MUST(cm_emulated_set_capturing(w.rt, w.streams[0]->handle, true));
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    cm_ticket_query(ticket, &info);
    CHECK(info.done);
    CHECK_EQ(route_of(info.row), CM_ROUTE_KERNEL);
    cm_ticket_release(ticket);
    request.blocking = true;
    CHECK_CODE(cm_engine_copy(w.engine, &request, NULL), CM_ECAPTURING);
    request.blocking = false;
    request.src = row(&c, 0, 512, 8, 4);
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    CHECK_CODE(cm_engine_copy(w.engine, &request, NULL), CM_ECAPTURING);
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_kernel_launch), 0);
    MUST(cm_emulated_set_capturing(w.rt, w.streams[0]->handle, false));
    CHECK_OK(cm_engine_copy(w.engine, &request, NULL));
    MUST(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
    WAIT_UNTIL(cm_engine_count_pending(w.engine) == 0);
    give_memory(&w, &a);
    give_memory(&w, &b);
    give_memory(&w, &c);
    close_world(&w);
}

/* A call that is interrupted while its copy is queued behind a shut gate. */
typedef struct interrupted_call {
    world *w;
    cm_copy_request request;
    int asked;     /* how often the engine asked whether to go on */
    int taken;     /* how often the engine asked for the keeps */
    bool is_short; /* keeps cannot be had, as if memory were short */
    atomic_int drops;
} interrupted_call;

/* A cm_copy_request.interrupted that ends the wait when it is called a second time. */
static bool
interrupt_second_time(void *argument)
{
    interrupted_call *call = argument;
    return ++call->asked == 2;
}

/* A cm_copy_request.take_keeps, called when the copy is to go on without its caller. */
static bool
take_keep_late(void *argument)
{
    interrupted_call *call = argument;
    call->taken++;
    if (call->is_short) {
        /* The call now waits for the queued work. */
        unshut(call->w, call->w->streams[0]);
        return false;
    }
    call->request.keep[0] = (cm_keep){&call->drops, count_drop};
    call->request.keep_count = 1;
    return true;
}

/* Prepare a call that copies 512 elements and is interrupted. */
static void
init_interrupted_call(interrupted_call *call, world *w, memory *to, memory *from,
                      int64_t stride)
{
    *call = (interrupted_call){.w = w,
                               .request = {.dst = row(to, 0, 512, stride, 4),
                                           .src = row(from, 0, 512, stride, 4),
                                           .stream = w->streams[0],
                                           .blocking = true,
                                           .interrupted = interrupt_second_time,
                                           .interrupted_argument = call}};
}

/* A call is interrupted while its work is already queued. It must return, and the copy
 * must go on and drop its keep at its end. The keep is given with the request, or only
 * when the engine asks for it. */
static void
test_engine_interrupted_copy_goes_on_behind_its_keeps(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PINNED, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    memory c = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    memory *pairs[][2] = {{&b, &a}, {&b, &c}, {&c, &b}};
    /* An interrupted call waits this long for its queued work, which here stays behind
     * the gate. */
    w.engine->drain_ns = 1000000;
    for (int i = 0; i < 12; i++) {
        interrupted_call call;
        /* A copy with a stride of 4 needs no job, and one with a stride of 8 does. */
        int64_t stride = i % 6 == 0 || i % 6 >= 3 ? 4 : 8;
        init_interrupted_call(&call, &w, pairs[i % 3][0], pairs[i % 3][1], stride);
        if (i < 6) {
            CHECK(take_keep_late(&call)); /* the keep is given before the copy */
        }
        else {
            call.request.take_keeps = take_keep_late;
        }
        MUST(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
        /* The stream must be idle here, or the copy would wait before it is queued. */
        shut(&w, w.streams[0]);
        CHECK_CODE(cm_engine_copy(w.engine, &call.request, NULL), CM_ECANCELLED);
        CHECK_EQ(call.taken, 1);
        CHECK_EQ(atomic_load(&call.drops), 0);
        unshut(&w, w.streams[0]);
        WAIT_UNTIL(cm_engine_count_pending(w.engine) == 0);
        CHECK_EQ(atomic_load(&call.drops), 1);
        CHECK(cm_is_ok(cm_engine_take_unread(w.engine)));
    }
    give_memory(&w, &a);
    give_memory(&w, &b);
    give_memory(&w, &c);
    close_world(&w);
}

/* The engine must not ask for keeps if the caller stays until the copy is over. If it
 * asks and there are none, the caller has to stay although it was interrupted. */
static void
test_engine_call_that_stays_to_the_end_takes_no_keeps(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PINNED, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    for (int i = 0; i < 4; i++) {
        interrupted_call call;
        init_interrupted_call(&call, &w, &b, &a, i % 2 == 0 ? 4 : 8);
        call.is_short = true;
        call.request.take_keeps = take_keep_late;
        if (i < 2) {
            MUST(cm_engine_copy(w.engine, &call.request, NULL));
            CHECK_EQ(call.taken, 0);
        }
        else {
            shut(&w, w.streams[0]);
            CHECK_CODE(cm_engine_copy(w.engine, &call.request, NULL), CM_ECANCELLED);
            CHECK_EQ(call.taken, 1);
        }
        CHECK_EQ(cm_engine_count_pending(w.engine), 0);
        bool is_idle;
        MUST(cm_stream_query(w.streams[0], &is_idle));
        CHECK(is_idle);
    }
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* A call that a hook holds in its wait until the test lets it go. */
typedef struct held_call {
    world *w;
    cm_copy_request request;
    cm_status status;
    atomic_bool asked;
    atomic_bool go_away;
} held_call;

/* A cm_copy_request.interrupted that says when it was called, waits for the test, and
 * then interrupts. */
static bool
stay_until_stopped(void *argument)
{
    held_call *call = argument;
    atomic_store(&call->asked, true);
    WAIT_UNTIL(atomic_load(&call->go_away));
    return true;
}

/* The body of the thread that makes the call. */
static void *
make_held_call(void *argument)
{
    held_call *call = argument;
    call->status = cm_engine_copy(call->w->engine, &call->request, NULL);
    return NULL;
}

/* The body of a thread that lets the call be interrupted and then opens the gate. */
static void *
end_held_call(void *argument)
{
    held_call *call = argument;
    let_others_run(); /* until the main thread waits in cm_engine_close() */
    atomic_store(&call->go_away, true);
    let_others_run();
    unshut(call->w, call->w->streams[0]);
    return NULL;
}

/* The engine is closed while another thread is inside a copy without a job. That call
 * is interrupted and leaves a ticket, and cm_engine_close() must wait for that copy
 * too. */
static void
test_engine_close_waits_for_what_an_interrupted_call_left(void)
{
    world w;
    atomic_int drops = 0;
    pthread_t threads[2];
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PINNED, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    held_call call = {.w = &w,
                      .request = {.dst = row(&b, 0, 4096, 1, 1),
                                  .src = row(&a, 0, 4096, 1, 1),
                                  .stream = w.streams[0],
                                  .blocking = true,
                                  .keep = {{&drops, count_drop}},
                                  .keep_count = 1,
                                  .interrupted = stay_until_stopped}};
    call.request.interrupted_argument = &call;
    shut(&w, w.streams[0]);
    CHECK_EQ(pthread_create(&threads[0], NULL, make_held_call, &call), 0);
    WAIT_UNTIL(atomic_load(&call.asked));
    CHECK_EQ(pthread_create(&threads[1], NULL, end_held_call, &call), 0);
    cm_status closed = cm_engine_close(w.engine);
    int dropped = atomic_load(&drops);
    for (int i = 0; i < 2; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    CHECK_OK(closed);
    CHECK_CODE(call.status, CM_ECANCELLED);
    CHECK_EQ(dropped, 1);
    give_memory(&w, &a);
    give_memory(&w, &b);
    /* close_world() closes an engine, so make a new one. */
    MUST(cm_engine_create(w.rt, w.registry, NULL, NULL, &w.engine));
    close_world(&w);
}

/* There are more downloads in the background than job threads. Each has more pieces
 * than may be in flight, and the host has to gather and scatter its ends. They all wait
 * for a shut stream, and a short copy must still be made meanwhile. */
static void
test_engine_held_jobs_leave_the_workers_to_others(void)
{
    enum { COUNT = 7, NBYTES = 40 << 20 };
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PINNED, 0, NBYTES);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    memory c = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory d[2] = {take_memory(&w, CM_KIND_PAGEABLE, 0, 4096),
                   take_memory(&w, CM_KIND_PAGEABLE, 0, 4096)};
    cm_ticket *held[COUNT];
    cm_ticket *quick;
    memset(b.bytes, 0, NBYTES);
    memset(c.bytes, 0, NBYTES);
    number_bytes(&a, 3);
    number_bytes(&d[0], 4);
    cm_copy_request first = {.dst = row(&b, 0, NBYTES, 1, 1),
                             .src = row(&a, 0, NBYTES, 1, 1),
                             .stream = w.streams[0]};
    cm_copy_request again = {.dst = row(&c, 0, NBYTES / 8, 8, 4),
                             .src = row(&b, 0, NBYTES / 8, 8, 4),
                             .after = &w.streams[0],
                             .after_count = 1};
    cm_copy_request small = {.dst = row(&d[1], 0, 4096, 1, 1),
                             .src = row(&d[0], 0, 4096, 1, 1)};
    shut(&w, w.streams[0]);
    CHECK_OK(cm_engine_copy(w.engine, &first, &held[0]));
    for (int i = 1; i < COUNT; i++) {
        CHECK_OK(cm_engine_copy(w.engine, &again, &held[i]));
        /* Each copy waits for the one before, without occupying a thread. */
        again.after_tickets = &held[i];
        again.after_ticket_count = 1;
    }
    CHECK_OK(cm_engine_copy(w.engine, &small, &quick));
    CHECK_OK(cm_ticket_wait(quick, UINT64_C(20000000000)));
    CHECK_EQ(memcmp(d[0].bytes, d[1].bytes, 4096), 0);
    CHECK_CODE(cm_ticket_wait(held[COUNT - 1], 1000000), CM_ETIMEOUT);
    unshut(&w, w.streams[0]);
    for (int i = 0; i < COUNT; i++) {
        CHECK_OK(cm_ticket_wait(held[i], UINT64_MAX));
        cm_ticket_release(held[i]);
    }
    /* The second half of each eight bytes was no part of the copies. */
    CHECK_EQ(count_equal(c.bytes, 8, a.bytes, 8, 4, NBYTES / 8), NBYTES / 8);
    static const unsigned char zeros[4];
    CHECK_EQ(count_equal(c.bytes + 4, 8, zeros, 0, 4, NBYTES / 8), NBYTES / 8);
    cm_ticket_release(quick);
    give_memory(&w, &a);
    give_memory(&w, &b);
    give_memory(&w, &c);
    give_memory(&w, &d[0]);
    give_memory(&w, &d[1]);
    close_world(&w);
}

/* A copy in the background would only have to be queued, but it comes after one that is
 * not queued yet. The caller must not wait for that. */
static void
test_engine_never_waits_for_a_ticket_in_the_background(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PINNED, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    memory c = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    cm_ticket *tickets[2];
    cm_ticket_info info;
    memset(a.bytes, 5, 4096);
    memset(b.bytes, 6, 4096);
    cm_copy_request down = {.dst = row(&c, 0, 4096, 1, 1),
                            .src = row(&b, 0, 4096, 1, 1),
                            .after = &w.streams[0],
                            .after_count = 1};
    cm_copy_request up = {.dst = row(&b, 0, 4096, 1, 1),
                          .src = row(&a, 0, 4096, 1, 1),
                          .after_tickets = tickets,
                          .after_ticket_count = 1};
    cm_copy_request hold = {
        .dst = row(&b, 0, 1, 1, 1), .src = row(&b, 0, 1, 1, 1), .stream = w.streams[0]};
    shut(&w, w.streams[0]);
    CHECK_OK(cm_engine_copy(w.engine, &hold, NULL));
    CHECK_OK(cm_engine_copy(w.engine, &down, &tickets[0]));
    CHECK_OK(cm_engine_copy(w.engine, &up, &tickets[1]));
    CHECK_CODE(cm_ticket_wait_submitted(tickets[1], 5000000), CM_ETIMEOUT);
    unshut(&w, w.streams[0]);
    CHECK_OK(cm_ticket_wait(tickets[1], UINT64_MAX));
    cm_ticket_query(tickets[1], &info);
    CHECK(info.seconds > 0);
    CHECK_FILLED(c.bytes, 6, 4096);
    CHECK_FILLED(b.bytes, 5, 4096);
    cm_ticket_release(tickets[0]);
    cm_ticket_release(tickets[1]);
    give_memory(&w, &a);
    give_memory(&w, &b);
    give_memory(&w, &c);
    close_world(&w);
}

/* A queue of copies to the host. The first one waits for a stream that is shut, and
 * each of the others for the one before it. */
typedef struct queue {
    memory source;
    memory target;
    uint32_t count;
    cm_ticket **tickets;
} queue;

static void
open_queue(world *w, queue *q, uint32_t count)
{
    q->source = take_memory(w, CM_KIND_DEVICE, 0, 4096);
    q->target = take_memory(w, CM_KIND_PAGEABLE, 0, 4096);
    q->count = count;
    q->tickets = calloc(count, sizeof(*q->tickets));
    memset(q->source.bytes, 5, 4096);
    cm_copy_request hold = {.dst = row(&q->source, 0, 1, 1, 1),
                            .src = row(&q->source, 0, 1, 1, 1),
                            .stream = w->streams[0]};
    cm_copy_request down = {.dst = row(&q->target, 0, 4096, 1, 1),
                            .src = row(&q->source, 0, 4096, 1, 1),
                            .after = &w->streams[0],
                            .after_count = 1};
    shut(w, w->streams[0]);
    CHECK_OK(cm_engine_copy(w->engine, &hold, NULL));
    for (uint32_t i = 0; i < count; i++) {
        CHECK_OK(cm_engine_copy(w->engine, &down, &q->tickets[i]));
        down.after_count = 0;
        down.after_tickets = &q->tickets[i];
        down.after_ticket_count = 1;
    }
}

static void
close_queue(world *w, queue *q)
{
    for (uint32_t i = 0; i < q->count; i++) {
        cm_ticket_release(q->tickets[i]);
    }
    free(q->tickets);
    give_memory(w, &q->source);
    give_memory(w, &q->target);
}

/* Return how many jobs cannot go on yet. */
static uint64_t
count_waiting(cm_engine *engine)
{
    cm_mutex_lock(&engine->lock);
    uint64_t count = engine->waiting_count;
    cm_mutex_unlock(&engine->lock);
    return count;
}

/* A job thread must pick each copy when its turn has come, and must not look through
 * the rest of the queue again and again. */
static void
test_engine_long_queue_is_not_looked_through(void)
{
    enum { COUNT = 500, MORE = 50 };
    world w;
    queue q;
    open_world(&w);
    open_queue(&w, &q, COUNT);
    WAIT_UNTIL(count_waiting(w.engine) == COUNT);
    let_others_run();
    cm_mutex_lock(&w.engine->lock);
    /* A job thread may be looking at one of them at this moment. */
    CHECK_GE(w.engine->waiting_count, COUNT - CM_MAX_JOB_THREADS);
    CHECK_LT(w.engine->pick_count, MORE);
    cm_mutex_unlock(&w.engine->lock);
    unshut(&w, w.streams[0]);
    for (uint32_t i = 0; i < COUNT; i++) {
        CHECK_OK(cm_ticket_wait(q.tickets[i], UINT64_MAX));
    }
    cm_mutex_lock(&w.engine->lock);
    CHECK_EQ(w.engine->waiting_count, 0);
    /* Some copies are picked twice, since what they wait for comes late. */
    CHECK_LT(w.engine->pick_count, 2 * COUNT);
    cm_mutex_unlock(&w.engine->lock);
    close_queue(&w, &q);
    close_world(&w);
}

/* A copy waits for another one, which is cancelled. The first copy must still wait for
 * everything that the cancelled one would have waited for. */
static void
test_engine_cancelled_ticket_keeps_its_place(void)
{
    enum { COUNT = 300 };
    world w;
    queue q;
    open_world(&w);
    open_queue(&w, &q, COUNT);
    memory last = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    memset(q.target.bytes, 4, 4096);
    /* The copies are cancelled from the end, so that a chain of cancelled ones
     * remains. */
    for (uint32_t i = COUNT - 1; i > 0; i--) {
        CHECK(cm_ticket_cancel(q.tickets[i]));
    }
    cm_copy_request request = {.dst = row(&last, 0, 4096, 1, 1),
                               .src = row(&q.target, 0, 4096, 1, 1),
                               .after_tickets = &q.tickets[COUNT - 1],
                               .after_ticket_count = 1};
    cm_ticket *ticket;
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    CHECK_CODE(cm_ticket_wait(ticket, 20000000), CM_ETIMEOUT);
    unshut(&w, w.streams[0]);
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    CHECK_FILLED(last.bytes, 5, 4096);
    cm_ticket_release(ticket);
    give_memory(&w, &last);
    close_queue(&w, &q);
    close_world(&w);
}

/* A copy that is stopped before its turn has come must end at once. */
static void
test_engine_stopped_copy_ends_at_once(void)
{
    world w;
    queue q;
    open_world(&w);
    open_queue(&w, &q, 1);
    memory other = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    cm_copy_request request = {.dst = row(&other, 0, 4096, 1, 1),
                               .src = row(&q.target, 0, 4096, 1, 1),
                               .after_tickets = q.tickets,
                               .after_ticket_count = 1};
    cm_ticket *ticket;
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    CHECK_CODE(cm_ticket_wait(ticket, 5000000), CM_ETIMEOUT);
    cm_ticket_stop(ticket);
    CHECK_CODE(cm_ticket_wait(ticket, UINT64_C(20000000000)), CM_ECANCELLED);
    unshut(&w, w.streams[0]);
    CHECK_OK(cm_ticket_wait(q.tickets[0], UINT64_MAX));
    cm_ticket_release(ticket);
    give_memory(&w, &other);
    close_queue(&w, &q);
    close_world(&w);
}

MAIN(RUN(test_engine_pageable_source_is_read_before_the_call_returns) RUN(
    test_engine_dropped_ticket_neither_blocks_nor_cancels)
         RUN(test_engine_waits_for_streams_and_tickets_named) RUN(
             test_engine_registered_source_is_read_after_the_stream)
             RUN(test_engine_pages_stay_locked_until_the_copy_is_done) RUN(
                 test_engine_short_of_device_memory_asks_for_relief)
                 RUN(test_ticket_order_and_notify) RUN(
                     test_engine_close_waits_for_all_and_tickets_outlive_it)
                     RUN(test_engine_on_a_capturing_stream) RUN(
                         test_engine_interrupted_copy_goes_on_behind_its_keeps)
                         RUN(test_engine_call_that_stays_to_the_end_takes_no_keeps) RUN(
                             test_engine_close_waits_for_what_an_interrupted_call_left)
                             RUN(test_engine_held_jobs_leave_the_workers_to_others) RUN(
                                 test_engine_never_waits_for_a_ticket_in_the_background)
                                 RUN(test_engine_long_queue_is_not_looked_through)
                                     RUN(test_engine_cancelled_ticket_keeps_its_place)
                                         RUN(test_engine_stopped_copy_ends_at_once))
