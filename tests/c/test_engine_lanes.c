/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the lanes, in which jobs of one direction of one link take turns: the order
 * of their pieces, how many slots they have together, and who goes before whom. */
#include "engine_hook.h"
#include "transfer/engine/job.h"

enum {
    JOBS = 4,
    NBYTES = 20 << 20, /* more than the 16 MiB of a short job */
    PIECE = 1 << 20,
    RING = 4 * PIECE, /* the slots of copies that stay in the caches */
};

static cm_engine *engine;
static const memory *targets[JOBS];
static atomic_bool all_queued;
static atomic_int furthest; /* the last job that has sent a piece */
static atomic_int out_of_order_count;

/* Return which job copies to `dst`, or -1 if none of them does. */
static int
job_at(cm_address dst)
{
    for (int i = 0; i < JOBS; i++) {
        if (targets[i] != NULL && dst >= targets[i]->address
            && dst < targets[i]->address + NBYTES) {
            return i;
        }
    }
    return -1;
}

/* This is called before each copy of the runtime. It holds the first piece until all
 * jobs are queued. */
static void
note_order(cm_address dst, cm_address src CM_UNUSED, uint64_t nbytes CM_UNUSED)
{
    int number = job_at(dst);
    if (number < 0) {
        return;
    }
    (void)wait_for_flag(&all_queued);
    if (number < atomic_load(&furthest)) {
        atomic_fetch_add(&out_of_order_count, 1);
    }
    atomic_store(&furthest, number);
}

/* Open a world in which uploads are cut into pieces of PIECE bytes. Long uploads, and
 * long trains of uploads that follow one another in a lane, keep to slots of RING bytes
 * together. */
static void
open_lanes(world *w, uint64_t slot_count)
{
    cm_tuning tuning;
    open_world(w);
    engine = w->engine;
    cm_tuning_init(&tuning);
    tuning.thread_count = 2;
    tuning.chunk_nbytes = PIECE;
    tuning.slot_count = slot_count;
    tuning.cached_thread_count = 1;
    tuning.cached_nbytes = 2 * NBYTES;
    tuning.cached_ring_nbytes = RING;
    CHECK_OK(cm_engine_set_tuning(w->engine, &tuning));
    atomic_store(&all_queued, false);
    atomic_store(&furthest, 0);
    atomic_store(&out_of_order_count, 0);
}

static cm_ticket *
start(world *w, const memory *dst, const memory *src)
{
    cm_ticket *ticket;
    cm_copy_request request = {.dst = row(dst, 0, NBYTES, 1, 1),
                               .src = row(src, 0, NBYTES, 1, 1)};
    MUST(cm_engine_copy(w->engine, &request, &ticket));
    return ticket;
}

/* Four job threads could work on all copies at once, and then their pieces would mix.
 * Instead the pieces of each copy must follow those of the copy before. */
static void
test_uploads_of_one_link_follow_one_another(void)
{
    world w;
    memory device[JOBS];
    cm_ticket *tickets[JOBS];
    open_lanes(&w, 8);
    hook_copies(&w, note_order);
    memory source = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    number_bytes(&source, 3);
    for (int i = 0; i < JOBS; i++) {
        device[i] = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
        targets[i] = &device[i];
    }
    for (int i = 0; i < JOBS; i++) {
        tickets[i] = start(&w, &device[i], &source);
    }
    atomic_store(&all_queued, true);
    for (int i = 0; i < JOBS; i++) {
        CHECK_OK(cm_ticket_wait(tickets[i], UINT64_MAX));
        CHECK_EQ(cm_ticket_count_moved(tickets[i]), NBYTES);
        cm_ticket_release(tickets[i]);
        CHECK_EQ(memcmp(device[i].bytes, source.bytes, NBYTES), 0);
    }
    CHECK_EQ(atomic_load(&furthest), JOBS - 1);
    CHECK_EQ(atomic_load(&out_of_order_count), 0);
    for (int i = 0; i < JOBS; i++) {
        targets[i] = NULL;
        give_memory(&w, &device[i]);
    }
    give_memory(&w, &source);
    CHECK_EQ(w.engine->ring_used_nbytes, 0);
    for (int i = 0; i < CM_LANES_OF_LINK; i++) {
        CHECK(!w.engine->lanes[0][i].is_taken);
        CHECK_EQ(atomic_load(&w.engine->lanes[0][i].slots_nbytes), 0);
    }
    close_world(&w);
}

/* While the stream of the first copy is shut, none of its pieces can leave. There are
 * slots for all of its pieces, so the first copy is packed nevertheless, and then the
 * next copy must go on beside it. */
static void
test_next_upload_is_packed_while_the_last_pieces_are_on_the_link(void)
{
    world w;
    cm_stream *stream;
    cm_ticket_info info;
    open_lanes(&w, CM_SLOT_MAX);
    atomic_store(&all_queued, true);
    MUST(cm_cache_take_stream(w.engine, 0, &stream));
    cm_cache_give_stream(w.engine, stream); /* the engine lends this stream to the next
                                               job */
    memory source = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory a = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    number_bytes(&source, 5);
    shut(&w, stream);
    cm_ticket *first = start(&w, &a, &source);
    cm_ticket *second = start(&w, &b, &source);
    CHECK_OK(cm_ticket_wait(second, UINT64_C(60000000000)));
    CHECK_EQ(memcmp(b.bytes, source.bytes, NBYTES), 0);
    cm_ticket_query(first, &info);
    CHECK(!info.done);
    unshut(&w, stream);
    CHECK_OK(cm_ticket_wait(first, UINT64_MAX));
    CHECK_EQ(memcmp(a.bytes, source.bytes, NBYTES), 0);
    cm_ticket_release(first);
    cm_ticket_release(second);
    give_memory(&w, &a);
    give_memory(&w, &b);
    give_memory(&w, &source);
    close_world(&w);
}

/* -- the scheduler alone: jobs that no thread runs -------------------------------------- */

static void
make_job(world *w, cm_job *job, cm_copy_request *request, int device, bool down)
{
    *job = (cm_job){.engine = w->engine,
                    .ticket = cm_ticket_create(w->engine, request),
                    .in_background = true};
    cm_list_init(&job->node);
    job->plan.row = &cm_routes[CM_ROUTE_STAGED];
    job->plan.device = device;
    job->plan.is_download = down;
    job->plan.nbytes = UINT64_C(1) << 40;
}

static void
drop_job(cm_job *job)
{
    cm_ticket_finish(job->ticket, cm_ok(), true);
    cm_ticket_release(job->ticket);
}

static void
queue(cm_job *job)
{
    cm_mutex_lock(&engine->lock);
    cm_engine_queue_job_locked(engine, job);
    cm_mutex_unlock(&engine->lock);
}

static cm_job *
pick(void)
{
    cm_mutex_lock(&engine->lock);
    cm_job *job = cm_engine_pick_job_locked(engine);
    cm_mutex_unlock(&engine->lock);
    return job;
}

static void
test_copy_of_many_gigabytes_lets_another_pass(void)
{
    world w;
    cm_job a;
    cm_job b;
    cm_copy_request request = {.dst.ndim = 0};
    open_lanes(&w, 8);
    make_job(&w, &a, &request, 0, false);
    make_job(&w, &b, &request, 0, false);
    queue(&a);
    CHECK(pick() == &a);
    cm_job_count_slot(&a, RING);
    CHECK_OK(cm_job_take_turn(&a, UINT64_C(1) << 30)); /* nobody else is there */
    queue(&b);
    CHECK(pick() == NULL);
    CHECK_CODE(cm_job_take_turn(&a, UINT64_C(1) << 30), CM_ETIMEOUT);
    CHECK_EQ(a.wait, CM_WAIT_TURN);
    queue(&a);
    CHECK(pick() == &b);
    b.plan.is_cached = true;
    b.tuning.cached_ring_nbytes = RING;
    cm_job_count_slot(&b, PIECE);
    CHECK(cm_job_may_take_slot(&b, PIECE)); /* the slots of the other do not count */
    cm_job_count_slot(&b, -PIECE);
    CHECK(pick() == NULL);
    cm_job_leave_lane(&b);
    CHECK(pick() == &a);
    CHECK_EQ(atomic_load(&a.lane->slots_nbytes), RING);
    cm_job_count_slot(&a, -RING);
    cm_job_leave_lane(&a);
    CHECK_EQ(atomic_load(&a.lane->slots_nbytes), 0);
    CHECK_EQ(w.engine->job_count, 0);
    drop_job(&a);
    drop_job(&b);
    close_world(&w);
}

static void
test_job_waits_for_no_lane_but_its_own(void)
{
    world w;
    cm_job a;
    cm_job b;
    cm_job c;
    cm_job d;
    cm_job e;
    cm_copy_request request = {.dst.ndim = 0};
    open_lanes(&w, 8);
    make_job(&w, &a, &request, 0, false);
    make_job(&w, &b, &request, 0, true);
    make_job(&w, &c, &request, 1, false);
    make_job(&w, &d, &request, 0, false);
    make_job(&w, &e, &request, 0, false);
    d.plan.nbytes = PIECE; /* d is a short job */
    e.plan.row = &cm_routes[CM_ROUTE_STAGED_TABLE];
    queue(&a);
    queue(&b);
    queue(&c);
    queue(&d);
    queue(&e);
    CHECK(pick() == &d);
    CHECK(pick() == &a);
    CHECK(pick() == &b);
    CHECK(pick() == &c);
    CHECK(pick() == &e); /* e is a batch */
    CHECK_EQ(w.engine->job_count, 0);
    drop_job(&a);
    drop_job(&b);
    drop_job(&c);
    drop_job(&d);
    drop_job(&e);
    close_world(&w);
}

static void
test_job_that_is_stopped_waits_for_no_lane(void)
{
    world w;
    cm_job a;
    cm_job b;
    cm_copy_request request = {.dst.ndim = 0};
    open_lanes(&w, 8);
    make_job(&w, &a, &request, 0, false);
    make_job(&w, &b, &request, 0, false);
    queue(&a);
    CHECK(pick() == &a);
    atomic_store(&b.ticket->stopped, true);
    queue(&b);
    CHECK(pick() == &b);
    cm_job_leave_lane(&b); /* b is in no lane, and a stays in its own */
    CHECK(a.is_in_lane);
    CHECK(a.lane->is_taken);
    drop_job(&a);
    drop_job(&b);
    close_world(&w);
}

/* Jobs that follow one another in a lane form a train, and the bytes of those before a
 * job count with its own. If a job is cut for the caches, its slots and those of the
 * job before it share the RING bytes. A job that used no slot ends the train. */
static void
test_jobs_that_follow_each_other_count_as_one_long_copy(void)
{
    world w;
    cm_job a;
    cm_job b;
    cm_job c;
    cm_copy_request request = {.dst.ndim = 0};
    open_lanes(&w, 8);
    make_job(&w, &a, &request, 0, false);
    make_job(&w, &b, &request, 0, false);
    make_job(&w, &c, &request, 0, false);
    a.plan.nbytes = b.plan.nbytes = c.plan.nbytes = NBYTES;
    queue(&a);
    CHECK(pick() == &a);
    CHECK_EQ(a.train_nbytes, NBYTES);
    cm_job_count_slot(&a, PIECE);
    queue(&b);
    cm_job_leave_lane(&a); /* its last piece is on the link */
    CHECK(pick() == &b);
    CHECK_EQ(b.train_nbytes, UINT64_C(2) * NBYTES);
    b.tuning.cached_ring_nbytes = RING;
    CHECK(cm_job_may_take_slot(&b, RING)); /* b is not cut for the caches */
    b.plan.is_cached = true;
    CHECK(!cm_job_may_take_slot(&b, RING)); /* a still has one of these slots */
    CHECK(cm_job_may_take_slot(&b, RING - PIECE));
    cm_job_count_slot(&a, -PIECE);
    CHECK(cm_job_may_take_slot(&b, RING));
    cm_job_leave_lane(&b); /* b used no slot, so nothing is on the link */
    queue(&c);
    CHECK(pick() == &c);
    CHECK_EQ(c.train_nbytes, NBYTES);
    drop_job(&a);
    drop_job(&b);
    drop_job(&c);
    close_world(&w);
}

MAIN(RUN(test_uploads_of_one_link_follow_one_another)
         RUN(test_next_upload_is_packed_while_the_last_pieces_are_on_the_link)
             RUN(test_copy_of_many_gigabytes_lets_another_pass)
                 RUN(test_job_waits_for_no_lane_but_its_own)
                     RUN(test_job_that_is_stopped_waits_for_no_lane)
                         RUN(test_jobs_that_follow_each_other_count_as_one_long_copy))
