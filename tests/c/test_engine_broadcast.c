/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of a broadcast: one copy from one source to targets on several devices. Each
 * piece is packed once and sent to each device. Further targets on a device are copied
 * from its first one. A keep is an object that the copy must drop once, when it is
 * over. */
#define EMULATED_DELAY_US 20

#include "engine_world.h"
#include "transfer/routes/broadcast.h"

#include <unistd.h>

enum { COUNT = 1 << 20, TARGETS = 4 };

typedef struct targets {
    memory src;
    /* The targets are on device 0, on device 1, on device 1 with gaps, and on device 0
     * again. */
    memory dst[TARGETS];
    cm_region regions[TARGETS];
} targets;

/* Allocate a source of `count` elements and the targets. */
static void
take_targets(world *w, targets *t, int64_t count, cm_kind kind)
{
    t->src = take_memory(w, kind, 0, (uint64_t)count * 4);
    number_bytes(&t->src, 3);
    for (int i = 0; i < TARGETS; i++) {
        int device = i == 1 || i == 2;
        int64_t stride = i == 2 ? 8 : 4;
        t->dst[i] = take_memory(w, CM_KIND_DEVICE, device, (uint64_t)(count * stride));
        t->regions[i] = row(&t->dst[i], 0, count, stride, 4);
    }
}

static void
give_targets(world *w, targets *t)
{
    give_memory(w, &t->src);
    for (int i = 0; i < TARGETS; i++) {
        give_memory(w, &t->dst[i]);
    }
}

/* Check that every target has the source's elements. The test compares words itself,
 * since memcmp() is slow under a sanitizer. */
CHECK_UNWATCHED static void
check_targets(const targets *t, int64_t count)
{
    const uint32_t *src = (const void *)t->src.bytes;
    int64_t wrong = 0;
    for (int i = 0; i < TARGETS; i++) {
        const uint32_t *dst = (const void *)t->dst[i].bytes;
        int64_t step = t->regions[i].strides[0] / 4;
        for (int64_t k = 0; k < count; k++) {
            wrong += dst[k * step] != src[k];
        }
    }
    CHECK_EQ(wrong, 0);
}

/* Make one copy to all targets and return its outcome, whether the call or the ticket
 * reports it. With `stops` the copy is stopped at once and the first stream's gate is
 * opened. */
static cm_status
broadcast(world *w, const targets *t, int64_t count, bool stops, atomic_int *drops)
{
    cm_broadcast more = {.dsts = t->regions + 1, .dst_count = TARGETS - 1};
    cm_copy_request request = {
        .dst = t->regions[0],
        .src = row(&t->src, 0, count, 4, 4),
        .broadcast = &more,
        .after = w->streams,
        .after_count = WORLD_DEVICES,
        .keep = {{drops, count_drop}},
        .keep_count = 1,
    };
    cm_ticket *ticket;
    cm_status status = cm_engine_copy(w->engine, &request, &ticket);
    if (cm_is_ok(status)) {
        if (stops) {
            cm_ticket_stop(ticket);
            unshut(w, w->streams[0]);
        }
        status = cm_ticket_wait(ticket, UINT64_MAX);
        cm_ticket_release(ticket);
    }
    return status;
}

/* From each kind of host memory all targets get the right bytes, and the keep is
 * dropped once. */
static void
test_broadcast_sends_each_piece_to_every_device(void)
{
    static const cm_kind kinds[] = {CM_KIND_PAGEABLE, CM_KIND_PINNED, CM_KIND_MAPPED};
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        world w;
        targets t;
        atomic_int drops = 0;
        open_world(&w);
        take_targets(&w, &t, COUNT, kinds[i]);
        CHECK_OK(broadcast(&w, &t, COUNT, false, &drops));
        check_targets(&t, COUNT);
        CHECK_EQ(atomic_load(&drops), 1);
        give_targets(&w, &t);
        close_world(&w);
    }
}

/* A broadcast is stopped when its two slots are in use. It must end, leave no failure
 * that nobody has read, and the next broadcast must work. */
static void
test_broadcast_that_is_stopped_leaves_nothing(void)
{
    world w;
    targets t;
    atomic_int drops = 0;
    open_world(&w);
    take_targets(&w, &t, COUNT, CM_KIND_PAGEABLE);
    cm_tuning tuning;
    cm_tuning_init(&tuning);
    tuning.slot_count = 2; /* two slots for eight pieces */
    CHECK_OK(cm_engine_set_tuning(w.engine, &tuning));
    shut(&w, w.streams[0]);
    CHECK_CODE(broadcast(&w, &t, COUNT, true, &drops), CM_ECANCELLED);
    CHECK_EQ(atomic_load(&drops), 1);
    CHECK_OK(broadcast(&w, &t, COUNT, false, &drops));
    check_targets(&t, COUNT);
    CHECK(cm_is_ok(cm_engine_take_unread(w.engine)));
    give_targets(&w, &t);
    close_world(&w);
}

/* A target in host memory is refused, and so are targets on another device if none of
 * them has the strides of the first target. */
static void
test_broadcast_refuses_what_makes_no_sense(void)
{
    world w;
    targets t;
    atomic_int drops = 0;
    open_world(&w);
    take_targets(&w, &t, 100, CM_KIND_PAGEABLE);
    cm_region good = t.regions[1];
    t.regions[1] = row(&t.src, 0, 100, 4, 4); /* a target in host memory */
    CHECK_CODE(broadcast(&w, &t, 100, false, &drops), CM_EINVALID);
    /* Neither target on device 1 has the strides of the copy's own target. */
    t.regions[1] = t.regions[2];
    CHECK_CODE(broadcast(&w, &t, 100, false, &drops), CM_EINVALID);
    t.regions[1] = good;
    CHECK_OK(broadcast(&w, &t, 100, false, &drops));
    check_targets(&t, 100);
    CHECK_EQ(atomic_load(&drops), 3);
    give_targets(&w, &t);
    close_world(&w);
}

/* Two owners share the ticket of a copy that has failed. Only when both have let go of
 * it unread may the failure be handed to cm_engine_take_unread(). */
static void
test_shared_ticket_is_unread_when_all_have_let_go(void)
{
    world w;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_PAGEABLE, 0, 4096);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, 4096);
    cm_copy_request request = {.dst = row(&b, 0, 4096, 1, 1),
                               .src = row(&a, 0, 4096, 1, 1)};
    cm_ticket *ticket;
    cm_faults_plan(w.rt, CM_OP_copy_async, 1, 999, false);
    CHECK_OK(cm_engine_copy(w.engine, &request, &ticket));
    cm_ticket *other = cm_ticket_share(ticket);
    CHECK_OK(cm_ticket_abandon(ticket));
    WAIT_UNTIL(cm_engine_count_pending(w.engine) == 0);
    CHECK(cm_is_ok(cm_engine_take_unread(w.engine)));
    CHECK_OK(cm_ticket_abandon(other));
    CHECK_CODE(cm_engine_take_unread(w.engine), 999);
    CHECK(cm_is_ok(cm_engine_take_unread(w.engine)));
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* Each runtime call of a broadcast fails once. The failure must be reported, nothing
 * may stay behind, and the next broadcast must work. The pieces are short, so that
 * there are several of them in little memory. */
static void
test_broadcast_fault_sweep(void)
{
    enum { SWEPT_COUNT = COUNT / 32, PIECE_NBYTES = SWEPT_COUNT * 4 / 2 };
    uint64_t calls = 1;
    cm_tuning tuning;
    cm_tuning_init(&tuning);
    tuning.chunk_nbytes = PIECE_NBYTES;
    tuning.chunk_min_nbytes = PIECE_NBYTES;
    for (uint64_t nth = 0; nth <= calls; nth += nth == 0 ? 1 : CHECK_EVERY(16)) {
        world w;
        targets t;
        atomic_int drops = 0;
        open_world(&w);
        CHECK_OK(cm_engine_set_tuning(w.engine, &tuning));
        take_targets(&w, &t, SWEPT_COUNT, CM_KIND_PAGEABLE);
        cm_faults_plan(w.rt, CM_OP_none, nth, 998, false);
        cm_status status = broadcast(&w, &t, SWEPT_COUNT, false, &drops);
        calls = nth == 0 ? cm_faults_count(w.rt, CM_OP_none) : calls;
        CHECK_EQ(atomic_load(&drops), 1);
        cm_op injected = cm_faults_last_injected(w.rt);
        cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
        if (cm_is_ok(status)) {
            check_targets(&t, SWEPT_COUNT);
        }
        else {
            CHECK_STR_EQ(cm_op_facts[status.op].name, cm_op_facts[injected].name);
            CHECK_EQ(status.code, 998);
        }
        CHECK_EQ(cm_engine_count_pending(w.engine), 0);
        CHECK_OK(broadcast(&w, &t, SWEPT_COUNT, false, &drops));
        check_targets(&t, SWEPT_COUNT);
        give_targets(&w, &t);
        close_world(&w);
    }
}

/* clang-format off */
MAIN(RUN(test_broadcast_sends_each_piece_to_every_device)
     RUN(test_broadcast_that_is_stopped_leaves_nothing)
     RUN(test_broadcast_refuses_what_makes_no_sense)
     RUN(test_shared_ticket_is_unread_when_all_have_let_go)
     RUN(test_broadcast_fault_sweep))
/* clang-format on */
