/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that the engine follows its tuning (transfer/plan/tuning.h): the number of
 * threads, the length of pieces, the number of slots, and the bound of the ring, which
 * is the page-locked memory of all copies together. They also check that each copy goes
 * as cm_engine_explain() has said. */
#include "engine_world.h"
#include "route_of.h"
#include "transfer/engine/private.h"
#include "transfer/run/explain.h"

enum { NBYTES = 3 << 20 };

/* Let copies that begin from now on use these values, and send even short ones through
 * slots. */
static void
set_tuning(world *w, uint64_t threads, uint64_t chunk, uint64_t slots, uint64_t ring)
{
    cm_tuning t;
    cm_tuning_init(&t);
    t.thread_count = threads;
    t.chunk_nbytes = chunk;
    t.slot_count = slots;
    t.ring_nbytes = ring;
    t.staged_up_nbytes = 0;
    t.staged_down_nbytes = 0;
    t.quick_nbytes = 0;
    CHECK_OK(cm_engine_set_tuning(w->engine, &t));
}

/* Make one copy, and compare its route, length and pieces with what cm_engine_explain()
 * said before. */
static void
copy_as_explained(world *w, const cm_region *dst, const cm_region *src)
{
    cm_copy_request request = {
        .dst = *dst, .src = *src, .stream = w->streams[0], .blocking = true};
    cm_explanation said;
    const cm_copy_counts *counts = cm_engine_counts(w->engine);
    cm_ticket *ticket;
    cm_ticket_info info;
    CHECK_OK(cm_engine_explain(w->engine, &request, &said));
    cm_copy_counts before = *counts;
    CHECK_OK(cm_engine_copy(w->engine, &request, &ticket));
    cm_ticket_query(ticket, &info);
    cm_ticket_release(ticket);
    CHECK_EQ(route_of(info.row), route_of(said.plan.row));
    CHECK_EQ(info.nbytes, said.plan.nbytes);
    CHECK_EQ(counts->routes.of[route_of(info.row)],
             before.routes.of[route_of(info.row)] + 1);
    CHECK_EQ(route_of(said.plan.row), CM_ROUTE_STAGED);
    CHECK_EQ(counts->pieces - before.pieces, said.plan.piece_count);
    CHECK_LE(said.plan.slot_count, said.tuning.slot_count);
    CHECK_EQ(w->engine->ring_used_nbytes, 0);
}

/* Copy to the device and back, first all elements, then every second one. */
static void
copy_both_ways(world *w, memory *host, memory *back, memory *device)
{
    for (int64_t step = 1; step <= 2; step++) {
        int64_t count = NBYTES / 4 / step;
        cm_region on_device = row(device, 0, count, 4, 4);
        cm_region from = row(host, 0, count, 4 * step, 4);
        cm_region to = row(back, 0, count, 4 * step, 4);
        memset(back->bytes, 0, NBYTES);
        copy_as_explained(w, &on_device, &from);
        copy_as_explained(w, &to, &on_device);
        int64_t stride = 4 * step;
        CHECK_EQ(count_equal(back->bytes, stride, host->bytes, stride, 4, count),
                 count);
    }
}

/* Try many combinations of threads, pieces, slots and ring. */
static void
test_engine_follows_every_tuning(void)
{
    static const uint64_t threads[] = {1, 2, 16, 3, 1};
    static const uint64_t chunks[] = {64 << 10, 300001, 4 << 20};
    static const uint64_t slots[] = {2, 3, CM_SLOT_MAX};
    world w;
    open_world(&w);
    memory host = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory back = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory device = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    number_bytes(&host, 5);
    uint32_t most = 0;
    for (int t = 0; t < 5; t++) {
        for (int c = 0; c < 3; c++) {
            uint64_t ring = c == 1 ? 1 << 20 : 256 << 20;
            set_tuning(&w, threads[t], chunks[c], slots[(t + c) % 3], ring);
            copy_both_ways(&w, &host, &back, &device);
        }
        most = threads[t] > most ? (uint32_t)threads[t] : most;
        CHECK_EQ(w.engine->workers.thread_count, most - 1);
        CHECK_EQ(w.engine->tuning.thread_count, threads[t]);
    }
    give_memory(&w, &host);
    give_memory(&w, &back);
    give_memory(&w, &device);
    close_world(&w);
}

/* What see_full_ring() finds. */
typedef struct full_ring {
    world *w;
    /* How much of the ring was in use when the hook was first called, or 0 if it never
     * was. */
    uint64_t nbytes;
} full_ring;

/* A cm_copy_request.interrupted. The engine calls it when the copy has to wait for a
 * slot of the ring. The hook then opens the gate. */
static bool
see_full_ring(void *argument)
{
    full_ring *seen = argument;
    if (seen->nbytes == 0) {
        cm_mutex_lock(&seen->w->engine->lock);
        seen->nbytes = seen->w->engine->ring_used_nbytes;
        cm_mutex_unlock(&seen->w->engine->lock);
        unshut(seen->w, seen->w->streams[0]);
    }
    return false;
}

/* A copy of twelve pieces may use sixteen slots, but the ring has room for four and
 * other copies have two of these. The stream is shut, so no slot comes back before the
 * copy has to wait for one. The copy must keep to its two slots. */
static void
test_engine_keeps_to_the_bound_of_the_ring(void)
{
    enum {
        PIECE = 256 << 10,
        PIECES = NBYTES / PIECE,
        ROOM = 16,
        RING = 4,
        OTHERS = 2
    };
    world w;
    cm_ticket *ticket;
    cm_pool_counters counters;
    open_world(&w);
    full_ring seen = {.w = &w};
    memory host = take_memory(&w, CM_KIND_PAGEABLE, 0, NBYTES);
    memory device = take_memory(&w, CM_KIND_DEVICE, 0, NBYTES);
    number_bytes(&host, 5);
    set_tuning(&w, 1, PIECE, ROOM, RING * PIECE);
    cm_copy_request request = {.dst = row(&device, 0, NBYTES, 1, 1),
                               .src = row(&host, 0, NBYTES, 1, 1),
                               .stream = w.streams[0],
                               .interrupted = see_full_ring,
                               .interrupted_argument = &seen};
    shut(&w, w.streams[0]);
    uint64_t others = OTHERS * (uint64_t)PIECE;
    CHECK_PTR_EQ(cm_cache_enter_ring(w.engine, others, RING * PIECE), w.pinned);
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    cm_cache_leave_ring(w.engine, others);
    CHECK_EQ(seen.nbytes, RING * PIECE);
    CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
    CHECK_BYTES_EQ(device.bytes, host.bytes, NBYTES);
    CHECK_EQ(PIECES, 12);
    cm_pool_read(w.pinned, &counters);
    CHECK_EQ(counters.peak_live_nbytes, (RING - OTHERS) * PIECE);
    cm_ticket_release(ticket);
    give_memory(&w, &host);
    give_memory(&w, &device);
    close_world(&w);
}

/* A request for more than the ring has left gets nothing, but a request for all that is
 * left must succeed. */
static void
test_engine_ring_gives_what_is_left_and_no_more(void)
{
    world w;
    open_world(&w);
    CHECK_PTR_EQ(cm_cache_enter_ring(w.engine, 11, 10), NULL);
    CHECK_PTR_EQ(cm_cache_enter_ring(w.engine, 4, 10), w.pinned);
    CHECK_PTR_EQ(cm_cache_enter_ring(w.engine, 7, 10), NULL);
    CHECK_EQ(w.engine->ring_used_nbytes, 4);
    CHECK_PTR_EQ(cm_cache_enter_ring(w.engine, 6, 10), w.pinned);
    CHECK_PTR_EQ(cm_cache_enter_ring(w.engine, 1, 10), NULL);
    CHECK_PTR_EQ(cm_cache_enter_ring(w.engine, UINT64_MAX - 10, UINT64_MAX), w.pinned);
    cm_cache_leave_ring(w.engine, UINT64_MAX - 10);
    CHECK_EQ(w.engine->ring_used_nbytes, 10);
    cm_cache_leave_ring(w.engine, 10);
    CHECK_EQ(w.engine->ring_used_nbytes, 0);
    close_world(&w);
}

/* clang-format off */
MAIN(RUN(test_engine_follows_every_tuning)
     RUN(test_engine_keeps_to_the_bound_of_the_ring)
     RUN(test_engine_ring_gives_what_is_left_and_no_more))
/* clang-format on */
