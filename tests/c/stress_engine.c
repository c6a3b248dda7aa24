/* SPDX-License-Identifier: Apache-2.0 */
/* A stress of the engine: eight threads make random copies. They use every route,
 * strides, and all ways to wait. They also cancel, drop and interrupt transfers, and
 * runtime calls fail at random. After each copy the target is compared byte by byte,
 * and the ticket with what has happened. A keep is an object that a copy must drop
 * once, when it is over. Arguments: seconds (4), seed (1). */
#include <stdlib.h>
#include <unistd.h>

#include "base/thread.h"
#include "engine_world.h"
#include "transfer/engine/private.h"

enum {
    THREADS = 8,
    KINDS = 6,
    SMALL_NBYTES = (2 << 20) / CHECK_EVERY(8),
    LARGE_NBYTES = 64 << 20, /* used by one thread at a time */
    LARGE_KINDS = 3,
    UNTOUCHED = 255, /* no byte of a source has this value */
    STUCK_SECONDS = 100,
    FAULT = 998,
};

static world w;
static double seconds = 4;
static uint64_t seed = 1;
static uint64_t deadline_ns;
static _Atomic uint64_t counts[5];
enum { DONE, FAILED, CANCELLED, INTERRUPTED, DROPPED };
static _Atomic uint64_t step_count;
static atomic_bool over;
static atomic_flag large_taken = ATOMIC_FLAG_INIT;
static memory large[LARGE_KINDS];

/* -- random numbers ---------------------------------------------------------------- */

static _Thread_local uint64_t chance;
/* Set while the test itself makes calls, which must not fail. */
static _Thread_local bool exempt;
static _Thread_local bool just_failed;
static atomic_bool faults_on;

static uint64_t
dice(uint64_t sides)
{
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return chance % sides;
}

/* -- calls that fail --------------------------------------------------------------------- */

static const cm_ops_table *real_ops;
static cm_ops_table failing_ops;

/* Decide whether this call fails. Two calls in a row of one thread never do, so a wait
 * that is tried again works, and it is known what is still running. */
static bool
should_fail(void)
{
    static _Atomic uint64_t thread_count;
    if (chance == 0) {
        chance = seed * 1000003 + atomic_fetch_add(&thread_count, 1) * 7919 + 17;
    }
    just_failed = !just_failed && !exempt && atomic_load(&faults_on) && dice(120) == 0;
    return just_failed;
}

/* The operations that may fail. */
#define FAILING(X)                                                                     \
    X(copy_async)                                                                      \
    X(copy_2d_async)                                                                   \
    X(copy_peer_async)                                                                 \
    X(kernel_launch)                                                                   \
    X(stream_create)                                                                   \
    X(stream_query)                                                                    \
    X(stream_wait_event)                                                               \
    X(event_create)                                                                    \
    X(event_record)                                                                    \
    X(event_query)                                                                     \
    X(event_elapsed)                                                                   \
    X(host_register)                                                                   \
    X(physical_create)

#define FAILING_BODY(name, cuda, driver, arg, params, args)                            \
    CM_UNUSED static cm_status failing_##name CM_OP_PARAMS params                      \
    {                                                                                  \
        if (should_fail()) {                                                           \
            return (cm_status){FAULT, CM_OP_##name, 0,                                 \
                               (uint64_t)CM_ARGUMENT_VALUE arg};                       \
        }                                                                              \
        return real_ops->name CM_OP_ARGS args;                                         \
    }
CM_OPS(FAILING_BODY)
#undef FAILING_BODY

/* Replace these operations of the runtime by ones that may fail. */
static void
let_calls_fail(void)
{
    real_ops = w.rt->ops;
    failing_ops = *real_ops;
#define FAILING_FIELD(name) failing_ops.name = failing_##name;
    FAILING(FAILING_FIELD)
#undef FAILING_FIELD
    w.rt->ops = &failing_ops;
}

/* -- memory ------------------------------------------------------------------------------ */

typedef struct places {
    memory of[2][KINDS]; /* targets and sources */
} places;

static const struct {
    cm_kind kind;
    int device;
} kinds[KINDS] = {
    {CM_KIND_PAGEABLE, 0}, {CM_KIND_DEVICE, 0}, {CM_KIND_PINNED, 0},
    {CM_KIND_DEVICE, 1},   {CM_KIND_MAPPED, 0}, {CM_KIND_MANAGED, 0},
};

/* -- one copy ---------------------------------------------------------------------------- */

typedef struct copy {
    const memory *dst;
    const memory *src;
    int64_t count;
    /* The steps of target and source in bytes. With a negative step the bytes run
     * backwards. */
    int64_t steps[2];
    unsigned char first;
    atomic_int drops;
    /* How often the engine may still ask whether to go on before it is interrupted. */
    int asks;
    /* The request, as long as it has no keep and the engine has to ask for one. NULL
     * once the engine has asked. */
    cm_copy_request *unkept;
} copy;

/* Return byte number `i` of the source. */
static unsigned char
source_byte(const copy *c, int64_t i)
{
    return (unsigned char)((c->first + (uint64_t)i * 7 + ((uint64_t)i >> 9)) % 251);
}

/* Describe the bytes of the copy in this memory as a region. */
static cm_region
region_of(const memory *m, const copy *c, int64_t step)
{
    int64_t start = step < 0 ? -step * (c->count - 1) : 0;
    return row(m, (uint64_t)start, c->count, step, 1);
}

/* Return the offset of byte number `i` in a memory that is passed through with this
 * step. */
static int64_t
place_of(const copy *c, int64_t step, int64_t i)
{
    return step < 0 ? -step * (c->count - 1 - i) : step * i;
}

/* Write the source's bytes, and fill the target and the gaps with UNTOUCHED. */
static void
fill_ends(const copy *c)
{
    int64_t steps[2] = {llabs(c->steps[0]), llabs(c->steps[1])};
    memset(c->dst->bytes, UNTOUCHED, (size_t)(c->count * steps[0]));
    memset(c->src->bytes, UNTOUCHED, (size_t)(c->count * steps[1]));
    for (int64_t i = 0; i < c->count; i++) {
        c->src->bytes[place_of(c, c->steps[1], i)] = source_byte(c, i);
    }
}

/* Check the target: with `all` every byte has arrived, with `none` no byte has changed,
 * and otherwise each byte is either right or unchanged. The gaps must be unchanged in
 * any case. */
static void
check_target(const copy *c, bool all, bool none)
{
    int64_t step = llabs(c->steps[0]);
    for (int64_t i = 0; i < c->count; i++) {
        const unsigned char *at = &c->dst->bytes[place_of(c, c->steps[0], i)];
        bool right = !none && *at == source_byte(c, i);
        if (!right && (all || *at != UNTOUCHED)) {
            CHECK_FAIL_("byte %lld of %lld is %d, not %d (all %d, none %d)",
                        (long long)i, (long long)c->count, *at, source_byte(c, i), all,
                        none);
            return;
        }
    }
    for (int64_t i = 0; i + 1 < c->count; i++) {
        for (int64_t k = 1; k < step; k++) {
            CHECK_EQ(c->dst->bytes[i * step + k], UNTOUCHED);
        }
    }
}

/* This is the hook cm_copy_request.interrupted. It interrupts after a number of
 * calls. */
static bool
is_interrupted(void *argument)
{
    copy *c = argument;
    return c->asks-- <= 0;
}

/* This is the hook cm_copy_request.take_keeps. Now and then it has no memory for the
 * keep, and the engine has to wait until the copy is over. */
static bool
take_keep(void *argument)
{
    copy *c = argument;
    if (dice(4) == 0) {
        return false;
    }
    c->unkept->keep[0] = (cm_keep){&c->drops, count_drop};
    c->unkept->keep_count = 1;
    c->unkept = NULL;
    return true;
}

/* Wait until the keep was dropped, and check that it was dropped once. */
static void
await_drop(const copy *c)
{
    WAIT_UNTIL(atomic_load(&c->drops) != 0);
    CHECK_EQ(atomic_load(&c->drops), 1);
}

static void
count_outcome(int what)
{
    atomic_fetch_add(&counts[what], 1);
    atomic_fetch_add(&step_count, 1);
}

/* Check that the ticket is right about the copy, which is over. */
static void
check_ticket(const copy *c, cm_ticket *ticket, cm_status status, bool cancelled)
{
    cm_ticket_info info;
    cm_ticket_query(ticket, &info);
    uint64_t moved = cm_ticket_count_moved(ticket);
    CHECK(info.done);
    CHECK_EQ(info.cancelled, cancelled);
    CHECK_EQ(info.nbytes, c->count);
    CHECK_EQ(info.status.code, status.code);
    CHECK_EQ(status.code == CM_ECANCELLED, cancelled);
    CHECK(cm_is_ok(status) || cancelled || status.code == FAULT);
    CHECK_EQ(moved == (uint64_t)c->count, cm_is_ok(status));
    CHECK_LE(moved, c->count);
    CHECK_EQ(atomic_load(&c->drops), 1);
    check_target(c, cm_is_ok(status), cancelled);
}

/* Follow the copy to its end: wait for it, cancel it, make a stream wait for it, or
 * drop its ticket. */
static void
follow(copy *c, cm_ticket *ticket)
{
    bool cancelled = false;
    uint64_t before = 0;
    cm_status status = {CM_ETIMEOUT, 0, 0, 0};
    if (dice(3) == 0) {
        for (uint64_t spins = dice(2000); spins > 0; spins--) {
            (void)cm_ticket_count_moved(ticket);
        }
        cancelled = cm_ticket_cancel(ticket);
    }
    if (dice(5) == 0) {
        cm_status untold = cm_ticket_abandon(ticket);
        (void)untold;
        await_drop(c);
        check_target(c, false, cancelled);
        count_outcome(DROPPED);
        return;
    }
    if (dice(4) == 0) {
        cm_status ordered = cm_ticket_order(ticket, w.streams[dice(WORLD_DEVICES)]);
        (void)ordered; /* cm_ticket_wait() reports the same failure */
    }
    while (status.code == CM_ETIMEOUT) {
        status = cm_ticket_wait(ticket, dice(2) == 0 ? UINT64_MAX : 100000);
        uint64_t moved = cm_ticket_count_moved(ticket);
        if (moved < before) {
            CHECK_FAIL_("the progress of a copy fell");
        }
        before = moved;
    }
    check_ticket(c, ticket, status, cancelled);
    cm_ticket_release(ticket);
    count_outcome(cm_is_ok(status) ? DONE : cancelled ? CANCELLED : FAILED);
}

/* Make one copy in a random way, and check its outcome. */
static void
make_copy(copy *c, uint32_t index)
{
    int how = (int)dice(3);
    int device = c->dst->device >= 0 ? c->dst->device : c->src->device;
    cm_stream *stream = w.streams[device >= 0 ? device : (int)dice(WORLD_DEVICES)];
    cm_copy_request request = {
        .dst = region_of(c->dst, c, c->steps[0]),
        .src = region_of(c->src, c, c->steps[1]),
        .stream = how == 0 ? NULL : stream,
        .blocking = how == 2,
        .after = &w.streams[index % WORLD_DEVICES],
        .after_count = dice(4) == 0,
        .keep = {{&c->drops, count_drop}},
        .keep_count = 1,
        .interrupted = how == 2 && dice(3) == 0 ? is_interrupted : NULL,
        .interrupted_argument = c,
    };
    c->asks = (int)dice(3);
    c->unkept = how == 2 && dice(2) == 0 ? &request : NULL;
    if (c->unkept != NULL) {
        request.keep_count = 0;
        request.take_keeps = take_keep;
    }
    fill_ends(c);
    cm_ticket *ticket;
    cm_status status = cm_engine_copy(w.engine, &request, &ticket);
    /* The engine did not ask for the keep, so nothing is under way. */
    if (c->unkept != NULL) {
        count_drop(&c->drops);
    }
    if (cm_is_ok(status)) {
        follow(c, ticket);
        return;
    }
    CHECK(status.code == FAULT || status.code == CM_ECANCELLED);
    /* If the call was interrupted, the copy may still be under way, and drops its keep
     * soon. */
    await_drop(c);
    check_target(c, false, false);
    count_outcome(status.code == FAULT ? FAILED : INTERRUPTED);
}

/* -- threads ----------------------------------------------------------------------------- */

/* Choose a short copy between two memories of this thread. */
static void
choose_copy(copy *c, const places *mine)
{
    static const int64_t steps[] = {1, 1, 1, 2, 3, -1, -2};
    c->dst = &mine->of[0][dice(KINDS)];
    c->src = &mine->of[1][dice(KINDS)];
    c->steps[0] = steps[dice(7)];
    c->steps[1] = steps[dice(7)];
    c->first = (unsigned char)dice(251);
    atomic_init(&c->drops, 0);
    int64_t step = llabs(c->steps[llabs(c->steps[1]) > llabs(c->steps[0])]);
    uint64_t most = (uint64_t)(SMALL_NBYTES / step);
    c->count = 1 + (int64_t)dice(most >> dice(20) | 1);
}

/* Choose a long copy between two of the memories that all threads share. */
static void
choose_large_copy(copy *c)
{
    uint64_t to = dice(LARGE_KINDS);
    c->dst = &large[to];
    c->src = &large[(to + 1 + dice(LARGE_KINDS - 1)) % LARGE_KINDS];
    c->steps[0] = c->steps[1] = 1;
    c->first = (unsigned char)dice(251);
    atomic_init(&c->drops, 0);
    c->count = LARGE_NBYTES / 2 + (int64_t)dice(LARGE_NBYTES / 2 + 1);
}

/* The body of a thread: make copies until the time is over. */
static void *
work(void *argument)
{
    uint32_t index = (uint32_t)(uintptr_t)argument;
    places mine;
    copy c;
    chance = seed * 7919 + index * 104729 + 1;
    exempt = true;
    for (int end = 0; end < 2; end++) {
        for (int i = 0; i < KINDS; i++) {
            mine.of[end][i] =
                take_memory(&w, kinds[i].kind, kinds[i].device, SMALL_NBYTES + 8);
        }
    }
    while (cm_now_ns() < deadline_ns && atomic_load(&check_failures) == 0) {
        exempt = false;
        if (dice(CHECK_EVERY(8) * 100) == 0
            && !atomic_flag_test_and_set(&large_taken)) {
            choose_large_copy(&c);
            make_copy(&c, index);
            atomic_flag_clear(&large_taken);
        }
        choose_copy(&c, &mine);
        make_copy(&c, index);
        exempt = true;
        cm_status unread = cm_engine_take_unread(w.engine);
        (void)unread; /* failures of copies whose tickets were dropped are expected */
    }
    for (int i = 0; i < 2 * KINDS; i++) {
        give_memory(&w, &mine.of[i / KINDS][i % KINDS]);
    }
    return NULL;
}

/* The body of a thread that ends the program if no copy has ended for a long time. */
static void *
watch(void *unused)
{
    uint64_t last = 0;
    for (int still = 0; !atomic_load(&over); still++) {
        usleep(100000);
        uint64_t now = atomic_load(&step_count);
        still = now == last ? still : 0;
        last = now;
        if (still > STUCK_SECONDS * 10) {
            fprintf(stderr, "nothing has moved for %d seconds\n", STUCK_SECONDS);
            _exit(2);
        }
    }
    return unused;
}

/* Return how much is still borrowed: memory of the ring, of jobs and of pools. */
static uint64_t
count_left(void)
{
    cm_pool *pools[] = {w.pinned, w.device[0], w.device[1]};
    cm_mutex_lock(&w.engine->lock);
    uint64_t left = w.engine->ring_used_nbytes + w.engine->job_count;
    left += w.engine->waiting_count;
    cm_mutex_unlock(&w.engine->lock);
    for (int k = 0; k < 3; k++) {
        cm_pool_counters counters;
        cm_pool_read(pools[k], &counters);
        left += counters.live_nbytes;
    }
    return left;
}

static void
check_nothing_left(void)
{
    WAIT_UNTIL(cm_engine_count_pending(w.engine) == 0);
    for (int i = 0; i < WORLD_DEVICES; i++) {
        MUST(cm_rt_stream_synchronize(w.rt, w.streams[i]->handle));
    }
    /* Job threads may still be giving back the last slots. */
    WAIT_UNTIL(count_left() == 0);
}

static void
stress(void)
{
    static const cm_kind large_kinds[LARGE_KINDS] = {CM_KIND_PAGEABLE, CM_KIND_DEVICE,
                                                     CM_KIND_PINNED};
    cm_thread threads[THREADS];
    cm_thread watcher;
    cm_tuning tuning;
    exempt = true;
    open_world(&w);
    let_calls_fail();
    cm_tuning_init(&tuning);
    tuning.chunk_min_nbytes = 16 << 10; /* so that short copies also have many pieces */
    MUST(cm_engine_set_tuning(w.engine, &tuning));
    /* An interrupted call may wait without a bound, since no stream is shut here. */
    w.engine->drain_ns = UINT64_MAX >> 1;
    for (int i = 0; i < LARGE_KINDS; i++) {
        large[i] = take_memory(&w, large_kinds[i], 0, LARGE_NBYTES);
    }
    deadline_ns = cm_now_ns() + (uint64_t)(seconds * 1e9);
    atomic_store(&faults_on, true);
    MUST(cm_thread_start(&watcher, watch, NULL));
    for (uintptr_t i = 0; i < THREADS; i++) {
        MUST(cm_thread_start(&threads[i], work, (void *)i));
    }
    for (int i = 0; i < THREADS; i++) {
        cm_thread_join(threads[i]);
    }
    atomic_store(&faults_on, false);
    atomic_store(&over, true);
    cm_thread_join(watcher);
    check_nothing_left();
    for (int i = 0; i < LARGE_KINDS; i++) {
        give_memory(&w, &large[i]);
    }
    while (!cm_is_ok(cm_engine_take_unread(w.engine))) {
    }
    close_world(&w);
    printf("%llu done, %llu failed, %llu cancelled, %llu interrupted, %llu dropped\n",
           (unsigned long long)counts[DONE], (unsigned long long)counts[FAILED],
           (unsigned long long)counts[CANCELLED],
           (unsigned long long)counts[INTERRUPTED],
           (unsigned long long)counts[DROPPED]);
    CHECK_GT(counts[DONE], 0);
}

int
main(int argc, char **argv)
{
    seconds = argc > 1 ? atof(argv[1]) : seconds;
    seed = argc > 2 ? strtoull(argv[2], NULL, 10) : seed;
    stress();
    int failed = atomic_load(&check_failures);
    printf("seed %llu: %d failed checks\n", (unsigned long long)seed, failed);
    return failed == 0 ? 0 : 1;
}
