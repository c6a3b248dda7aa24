/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of small things in base/: the status value, checked arithmetic, the linked
 * list, threads with their mutex and condition, and the spin lock. */
#include <signal.h>
#include <stdlib.h>

#include "base/checked_math.h"
#include "base/list.h"
#include "base/status.h"
#include "base/thread.h"
#include "check.h"

static void
test_status_is_sixteen_bytes(void)
{
    CHECK_EQ(sizeof(cm_status), 16);
    CHECK(cm_is_ok(cm_ok()));
    cm_status status = cm_fail(CM_ELIMIT, 7);
    CHECK(!cm_is_ok(status));
    CHECK_EQ(status.code, CM_ELIMIT);
    CHECK_EQ(status.arg, 7);
    CHECK_EQ(status.op, 0);
}

/* Return early through CM_TRY if `code` is a failure, or set *reached. */
static cm_status
step(int code, int *reached)
{
    CM_TRY(code == 0 ? cm_ok() : cm_fail(code, 1));
    *reached = 1;
    return cm_ok();
}

static void
test_try_failure_returns_early(void)
{
    int reached = 0;
    CHECK_CODE(step(CM_EBUSY, &reached), CM_EBUSY);
    CHECK_EQ(reached, 0);
    CHECK_OK(step(0, &reached));
    CHECK_EQ(reached, 1);
}

static void
test_math_overflow_is_reported(void)
{
    uint64_t u = 0;
    int64_t i = 0;
    CHECK(cm_add_u64(UINT64_MAX - 1, 1, &u));
    CHECK(u == UINT64_MAX);
    CHECK(!cm_add_u64(UINT64_MAX, 1, &u));
    CHECK(cm_mul_u64(UINT64_C(1) << 32, (UINT64_C(1) << 32) - 1, &u));
    CHECK(!cm_mul_u64(UINT64_C(1) << 32, UINT64_C(1) << 32, &u));
    CHECK(cm_add_i64(INT64_MAX, -1, &i));
    CHECK(!cm_add_i64(INT64_MAX, 1, &i));
    CHECK(!cm_add_i64(INT64_MIN, -1, &i));
    CHECK(cm_mul_i64(-3, 7, &i));
    CHECK_EQ(i, -21);
    CHECK(!cm_mul_i64(INT64_MIN, -1, &i));
}

static void
test_math_round_up_and_powers(void)
{
    uint64_t u = 0;
    CHECK(cm_round_up_u64(0, 512, &u));
    CHECK_EQ(u, 0);
    CHECK(cm_round_up_u64(1, 512, &u));
    CHECK_EQ(u, 512);
    CHECK(cm_round_up_u64(512, 512, &u));
    CHECK_EQ(u, 512);
    CHECK(!cm_round_up_u64(UINT64_MAX - 5, 512, &u));
    CHECK(cm_is_power_of_two(1));
    CHECK(cm_is_power_of_two(UINT64_C(1) << 63));
    CHECK(!cm_is_power_of_two(0));
    CHECK(!cm_is_power_of_two(12));
}

typedef struct item {
    int value;
    cm_list node;
} item;

/* Take the first item from the list and return its value, or -1 if the list is
 * empty. */
static int
take(cm_list *list)
{
    cm_list *node = cm_list_pop_front(list);
    return node == NULL ? -1 : CM_LIST_ENTRY(node, item, node)->value;
}

static void
test_list_order_push_remove_splice(void)
{
    cm_list a;
    cm_list b;
    item items[6];
    cm_list_init(&a);
    cm_list_init(&b);
    for (int i = 0; i < 6; i++) {
        items[i].value = i;
        cm_list_init(&items[i].node);
    }
    CHECK(cm_list_is_empty(&a));
    CHECK_EQ(take(&a), -1);
    cm_list_push_back(&a, &items[1].node);
    cm_list_push_back(&a, &items[2].node);
    cm_list_push_front(&a, &items[0].node);
    cm_list_push_back(&b, &items[3].node);
    cm_list_push_back(&b, &items[4].node);
    cm_list_remove(&items[1].node);
    cm_list_remove(&items[1].node); /* removing it twice does no harm */
    cm_list_remove(&items[5].node); /* nor does removing one that is in no list */
    cm_list_splice_back(&a, &b);
    CHECK(cm_list_is_empty(&b));
    cm_list_splice_back(&a, &b); /* an empty list adds nothing */
    CHECK_EQ(take(&a), 0);
    CHECK_EQ(take(&a), 2);
    CHECK_EQ(take(&a), 3);
    CHECK_EQ(take(&a), 4);
    CHECK_EQ(take(&a), -1);
    CHECK(cm_list_is_empty(&a));
}

typedef struct shared {
    cm_mutex mutex;
    cm_cond cond;
    int turns;
    bool interrupt_blocked;
} shared;

/* The body of a thread: take 1000 turns, and note whether the thread was started with
 * SIGINT blocked, since that signal must reach the main thread. */
static void *
worker(void *arg)
{
    shared *s = arg;
    sigset_t mask;
    (void)pthread_sigmask(SIG_BLOCK, NULL, &mask);
    for (int i = 0; i < 1000; i++) {
        cm_mutex_lock(&s->mutex);
        s->interrupt_blocked = sigismember(&mask, SIGINT) == 1;
        s->turns++;
        cm_cond_signal_all(&s->cond);
        cm_mutex_unlock(&s->mutex);
    }
    return NULL;
}

/* Three threads count under a mutex, and the main thread waits for them by the
 * condition. */
static void
test_thread_counts_under_mutex(void)
{
    shared s = {.turns = 0};
    cm_thread threads[3];
    sigset_t mask;
    cm_cond_init(&s.cond);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(cm_thread_start(&threads[i], worker, &s));
    }
    (void)pthread_sigmask(SIG_BLOCK, NULL, &mask);
    /* Starting a thread must leave the starter's own mask as it was. */
    CHECK_EQ(sigismember(&mask, SIGINT), 0);
    cm_mutex_lock(&s.mutex);
    while (s.turns < 3000) {
        cm_cond_wait(&s.cond, &s.mutex);
    }
    cm_mutex_unlock(&s.mutex);
    for (int i = 0; i < 3; i++) {
        cm_thread_join(threads[i]);
    }
    CHECK_EQ(s.turns, 3000);
    CHECK(s.interrupt_blocked);
}

/* A wait to which nobody signals must end at its deadline, and not before. */
static void
test_cond_deadline_passes(void)
{
    cm_mutex mutex = PTHREAD_MUTEX_INITIALIZER;
    cm_cond cond;
    cm_cond_init(&cond);
    cm_mutex_lock(&mutex);
    uint64_t start = cm_now_ns();
    bool in_time = true;
    while (in_time) {
        in_time = cm_cond_wait_until(&cond, &mutex, start + 2000000);
    }
    cm_mutex_unlock(&mutex);
    CHECK_GE(cm_now_ns() - start, 2000000);
}

/* -- the spin lock ------------------------------------------------------------------------ */

typedef struct spun {
    cm_spin_lock lock;
    uint64_t count; /* guarded by the lock */
} spun;

enum { SPIN_ROUNDS = 200000 };

/* The body of a thread: count under the spin lock, and stay inside long enough for
 * other threads to meet it there. */
static void *
count_slowly(void *argument)
{
    spun *s = argument;
    for (int i = 0; i < SPIN_ROUNDS; i++) {
        cm_spin_lock_take(&s->lock);
        uint64_t count = s->count;
        for (volatile int k = 0; k < 50; k++) {
        }
        s->count = count + 1;
        cm_spin_lock_give(&s->lock);
    }
    return NULL;
}

static void
test_spin_lock_keeps_threads_apart(void)
{
    spun s = {.count = 0};
    cm_thread threads[4];
    for (int i = 0; i < 4; i++) {
        CHECK_OK(cm_thread_start(&threads[i], count_slowly, &s));
    }
    for (int i = 0; i < 4; i++) {
        cm_thread_join(threads[i]);
    }
    CHECK_EQ(s.count, 4 * SPIN_ROUNDS);
    CHECK_EQ(atomic_load(&s.lock.held), 0);
}

/* clang-format off */
MAIN(RUN(test_status_is_sixteen_bytes)
     RUN(test_try_failure_returns_early)
     RUN(test_math_overflow_is_reported)
     RUN(test_math_round_up_and_powers)
     RUN(test_list_order_push_remove_splice)
     RUN(test_thread_counts_under_mutex)
     RUN(test_cond_deadline_passes)
     RUN(test_spin_lock_keeps_threads_apart))
/* clang-format on */
