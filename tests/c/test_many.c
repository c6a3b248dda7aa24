/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of many copies in one call (a batch): the kernel that copies the runs of a
 * table, the question whether copies of one call touch each other, and batches between
 * all kinds of memory, to several targets at once, under faults and from several
 * threads. A keep is an object that a batch must drop once, when it is over. */
#define EMULATED_DELAY_US 20

#include "many_world.h"
#include "transfer/device/kernel.h"
#include "transfer/plan/batch_plan.h"

#include <pthread.h>

enum { PIECES = 300, WIDTH = 96, ROOM = PIECES * WIDTH };

/* -- the table kernel --------------------------------------------------------------------- */

/* Copy one run of each length from and to each alignment. The bytes around the target
 * must stay as they were. */
static void
test_table_copies_every_alignment_and_size(void)
{
    static const uint64_t sizes[] = {1, 7, 15, 16, 17, 31, 33, 511, 2049, 40000};
    world w;
    cm_kernels kernels = {0};
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_DEVICE, 0, 50000);
    memory b = take_memory(&w, CM_KIND_MAPPED, 0, 50000);
    kernels.rt = w.rt;
    cm_device_guard guard;
    MUST(cm_device_enter(w.rt, 0, &guard));
    number_bytes(&b, 3);
    for (uint64_t to = 0; to < 17; to += 1) {
        for (uint64_t from = 0; from < 17; from += 3) {
            for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
                cm_table table;
                memset(a.bytes, 0xee, a.nbytes);
                cm_table_init(&table, &kernels, 0, w.streams[0]->handle);
                MUST(cm_table_add(&table, a.address + 64 + to, b.address + from,
                                  sizes[i]));
                MUST(cm_table_flush(&table));
                MUST(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
                unsigned char *got = a.bytes + 64 + to;
                CHECK(memcmp(got, b.bytes + from, sizes[i]) == 0);
                CHECK(got[-1] == 0xee && got[sizes[i]] == 0xee);
            }
        }
    }
    cm_device_leave(w.rt, &guard);
    MUST(cm_kernels_fini(&kernels));
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* Runs are added to a table until it has been full twice. Each time it must launch the
 * kernel by itself, and a flush launches it for the rest. */
static void
test_table_launches_when_it_is_full(void)
{
    world w;
    cm_kernels kernels = {0};
    cm_table table;
    cm_device_guard guard;
    open_world(&w);
    memory a = take_memory(&w, CM_KIND_DEVICE, 0, ROOM * 2);
    memory b = take_memory(&w, CM_KIND_DEVICE, 0, ROOM * 2);
    kernels.rt = w.rt;
    MUST(cm_device_enter(w.rt, 0, &guard));
    number_bytes(&b, 1);
    memset(a.bytes, 0, a.nbytes);
    cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
    cm_table_init(&table, &kernels, 0, w.streams[0]->handle);
    for (uint64_t i = 0; i < 2 * CM_TABLE_MAX_COUNT + 1; i++) {
        MUST(cm_table_add(&table, a.address + i * WIDTH, b.address + i * WIDTH, 50));
    }
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_kernel_launch), 2);
    MUST(cm_table_flush(&table));
    MUST(cm_table_flush(&table)); /* the second flush has nothing to launch */
    CHECK_EQ(cm_faults_count(w.rt, CM_OP_kernel_launch), 3);
    MUST(cm_rt_stream_synchronize(w.rt, w.streams[0]->handle));
    for (uint64_t i = 0; i < 2 * CM_TABLE_MAX_COUNT + 1; i++) {
        CHECK(memcmp(a.bytes + i * WIDTH, b.bytes + i * WIDTH, 50) == 0);
        CHECK_EQ(a.bytes[i * WIDTH + 50], 0);
    }
    cm_device_leave(w.rt, &guard);
    MUST(cm_kernels_fini(&kernels));
    give_memory(&w, &a);
    give_memory(&w, &b);
    close_world(&w);
}

/* -- copies that touch each other -------------------------------------------------- */

static unsigned
next_random(unsigned *state)
{
    *state = *state * 1103515245u + 12345u;
    return *state >> 8;
}

/* Compare cm_byte_spans_touch() for random spans with a look at every pair of them. */
static void
test_spans_touch_as_each_two_say(void)
{
    enum { COUNT = 24, ROUNDS = 4000 };
    cm_byte_span dst[COUNT], src[COUNT];
    unsigned state = 1;
    int touching = 0;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t count = 1 + next_random(&state) % COUNT;
        unsigned room = round % 2 == 0 ? 1u << 24 : 4000;
        for (uint64_t i = 0; i < count; i++) {
            dst[i].begin = UINT64_C(0x700000000000) + next_random(&state) % room;
            src[i].begin = UINT64_C(0x700000000000) + next_random(&state) % room;
            dst[i].end = dst[i].begin + 1 + next_random(&state) % 40;
            src[i].end = src[i].begin + 1 + next_random(&state) % 40;
        }
        bool wanted = false;
        for (uint64_t i = 0; i < count; i++) {
            for (uint64_t k = 0; k < count; k++) {
                wanted = wanted
                         || (i != k && dst[i].begin < dst[k].end
                             && dst[k].begin < dst[i].end)
                         || (dst[i].begin < src[k].end && src[k].begin < dst[i].end);
            }
        }
        touching += wanted;
        CHECK(cm_byte_spans_touch(dst, src, count) == wanted);
    }
    CHECK(touching > ROUNDS / 10 && touching < ROUNDS * 9 / 10);
    CHECK(!cm_byte_spans_touch(dst, src, 0));
}

/* -- copies ------------------------------------------------------------------------------- */

/* Make PIECES pieces. Place i of the target gets the bytes of place 7 * i modulo PIECES
 * of the source, except for up to four bytes at the end. The first piece has the index
 * `first`. Returns the number of pieces. */
static uint64_t
make_pieces(cm_piece *pieces, const memory *to, const memory *from, uint64_t first)
{
    for (uint64_t i = 0; i < PIECES; i++) {
        pieces[i] = piece_between(to, i * WIDTH, from, i * 7 % PIECES * WIDTH,
                                  WIDTH - i % 5, first + i);
    }
    return PIECES;
}

/* Check that the target has what make_pieces() asked for. */
CHECK_UNWATCHED static void
check_pieces(const memory *to, const memory *from)
{
    for (uint64_t i = 0; i < PIECES; i++) {
        const unsigned char *got = to->bytes + i * WIDTH;
        const unsigned char *wanted = from->bytes + i * 7 % PIECES * WIDTH;
        CHECK(memcmp(got, wanted, WIDTH - i % 5) == 0);
    }
}

/* Make batches between every two kinds of memory, blocking, on a stream and in the
 * background. */
static void
test_many_goes_between_all_kinds(void)
{
    static const cm_kind kinds[] = {CM_KIND_PAGEABLE, CM_KIND_PINNED, CM_KIND_MANAGED,
                                    CM_KIND_DEVICE};
    world w;
    static cm_piece pieces[PIECES];
    open_world(&w);
    for (int i = 0; i < 4 * 4 * 3; i++) {
        memory to = take_memory(&w, kinds[i % 4], 0, ROOM);
        memory from = take_memory(&w, kinds[i / 4 % 4], 0, ROOM);
        atomic_int drops = 0;
        cm_ticket *ticket = NULL;
        number_bytes(&from, (unsigned)i);
        cm_many_request request = {
            .common = {.stream = i / 16 < 2 ? w.streams[0] : NULL,
                       .blocking = i / 16 == 0,
                       .keep = {{&drops, count_drop}},
                       .keep_count = 1},
            .pieces = pieces,
            .piece_count = make_pieces(pieces, &to, &from, 0)};
        CHECK_OK(cm_engine_copy_many(w.engine, &request, &ticket));
        CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
        CHECK_EQ(atomic_load(&drops), 1);
        check_pieces(&to, &from);
        cm_ticket_release(ticket);
        give_memory(&w, &to);
        give_memory(&w, &from);
    }
    close_world(&w);
}

/* Memory and pieces of a batch that goes several ways at once. */
typedef struct several {
    memory device[2];
    memory pinned, pageable, down, other;
    cm_piece pieces[5 * PIECES];
    cm_many_request request;
    atomic_int drops;
} several;

/* Allocate the memory for a batch that copies to one device by kernel, to another
 * through page-locked slots, from one device to the other, and down to the host. */
static several *
open_several(world *w)
{
    several *s = calloc(1, sizeof(*s));
    s->device[0] = take_memory(w, CM_KIND_DEVICE, 0, ROOM);
    s->device[1] = take_memory(w, CM_KIND_DEVICE, 1, 2 * ROOM);
    s->pinned = take_memory(w, CM_KIND_PINNED, 0, ROOM);
    s->pageable = take_memory(w, CM_KIND_PAGEABLE, 0, ROOM);
    s->down = take_memory(w, CM_KIND_PAGEABLE, 0, ROOM);
    s->other = take_memory(w, CM_KIND_DEVICE, 0, ROOM);
    number_bytes(&s->pinned, 1);
    number_bytes(&s->pageable, 2);
    number_bytes(&s->other, 3);
    return s;
}

/* Make the request. The pieces of each way are in one list. */
static void
request_several(several *s, cm_stream *stream, bool blocking)
{
    memory second = s->device[1];
    second.address += ROOM;
    uint64_t count = make_pieces(s->pieces, &s->device[0], &s->pinned, 0);
    count += make_pieces(s->pieces + count, &s->device[1], &s->pageable, count);
    count += make_pieces(s->pieces + count, &s->down, &s->other, count);
    count += make_pieces(s->pieces + count, &second, &s->other, count);
    for (uint64_t i = 3 * PIECES; i < count; i++) {
        s->pieces[i].dst.owner = &s->device[1];
    }
    s->request = (cm_many_request){.common = {.stream = stream,
                                              .blocking = blocking,
                                              .keep = {{&s->drops, count_drop}},
                                              .keep_count = 1},
                                   .pieces = s->pieces,
                                   .piece_count = count};
}

/* Check all four targets. */
static void
check_several(const several *s)
{
    memory second = s->device[1];
    second.bytes += ROOM;
    check_pieces(&s->device[0], &s->pinned);
    check_pieces(&s->device[1], &s->pageable);
    check_pieces(&s->down, &s->other);
    check_pieces(&second, &s->other);
}

static void
close_several(world *w, several *s)
{
    give_memory(w, &s->device[0]);
    give_memory(w, &s->device[1]);
    give_memory(w, &s->pinned);
    give_memory(w, &s->pageable);
    give_memory(w, &s->down);
    give_memory(w, &s->other);
    free(s);
}

/* Make the batch that goes several ways, blocking, on a stream and in the
 * background. */
static void
test_many_goes_several_ways_at_once(void)
{
    world w;
    open_world(&w);
    several *s = open_several(&w);
    for (int i = 0; i < 9; i++) {
        cm_ticket *ticket;
        request_several(s, i % 3 < 2 ? w.streams[0] : NULL, i % 3 == 0);
        CHECK_OK(cm_engine_copy_many(w.engine, &s->request, &ticket));
        CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
        CHECK_EQ(atomic_load(&s->drops), i + 1);
        check_several(s);
        cm_ticket_release(ticket);
        memset(s->down.bytes, 0, ROOM);
    }
    close_several(&w, s);
    close_world(&w);
}

/* Each runtime call of the batch fails once. The whole batch must fail with it, drop
 * its keep once, and leave nothing in flight. */
static void
test_many_fails_whole_with_any_call(void)
{
    world w;
    open_world(&w);
    several *s = open_several(&w);
    int failures = 0;
    for (int how = 0; how < 3; how++) {
        for (uint64_t nth = 1; nth < 400; nth += CHECK_EVERY(15)) {
            cm_ticket *ticket = NULL;
            int before = atomic_load(&s->drops);
            request_several(s, how < 2 ? w.streams[0] : NULL, how == 0);
            cm_faults_plan(w.rt, CM_OP_none, nth, 999, false);
            cm_status status = cm_engine_copy_many(w.engine, &s->request, &ticket);
            if (cm_is_ok(status)) {
                status = cm_ticket_wait(ticket, UINT64_MAX);
            }
            /* A call that failed may also leave a ticket, for what is still under
             * way. */
            if (ticket != NULL) {
                cm_ticket_release(ticket);
            }
            bool injected = cm_faults_last_injected(w.rt) != CM_OP_none;
            cm_faults_plan(w.rt, CM_OP_none, 0, 0, false);
            while (cm_engine_count_pending(w.engine) > 0) {
                cm_engine_poll(w.engine);
            }
            CHECK_EQ(atomic_load(&s->drops), before + 1);
            CHECK(cm_is_ok(status) || status.code == 999);
            failures += !cm_is_ok(status);
            while (!cm_is_ok(cm_engine_take_unread(w.engine))) {
            }
            if (!injected) {
                break;
            }
        }
        cm_ticket *ticket;
        request_several(s, w.streams[0], false);
        CHECK_OK(cm_engine_copy_many(w.engine, &s->request, &ticket));
        CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
        cm_ticket_release(ticket);
        check_several(s);
    }
    CHECK(failures > 50 / CHECK_EVERY(15));
    close_several(&w, s);
    close_world(&w);
}

/* -- threads ------------------------------------------------------------------------------ */

/* What a thread of the last test has. */
typedef struct worker {
    world *w;
    several *s;
} worker;

/* Make the batch several times and check it. */
static void
copy_again_and_again(worker *me)
{
    for (int i = 0; i < 12; i++) {
        cm_ticket *ticket;
        request_several(me->s, i % 2 == 0 ? NULL : me->w->streams[i % 4 / 2], false);
        CHECK_OK(cm_engine_copy_many(me->w->engine, &me->s->request, &ticket));
        CHECK_OK(cm_ticket_wait(ticket, UINT64_MAX));
        cm_ticket_release(ticket);
        check_several(me->s);
    }
}

static void *
work(void *argument)
{
    copy_again_and_again(argument);
    return NULL;
}

static void
test_many_from_several_threads(void)
{
    enum { THREADS = 4 };
    world w;
    pthread_t threads[THREADS];
    worker workers[THREADS];
    open_world(&w);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (worker){&w, open_several(&w)};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        close_several(&w, workers[i].s);
    }
    close_world(&w);
}

MAIN(RUN(test_table_copies_every_alignment_and_size)
         RUN(test_table_launches_when_it_is_full) RUN(test_spans_touch_as_each_two_say)
             RUN(test_many_goes_between_all_kinds)
                 RUN(test_many_goes_several_ways_at_once)
                     RUN(test_many_fails_whole_with_any_call)
                         RUN(test_many_from_several_threads))
