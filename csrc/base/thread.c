/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the functions of thread.h that are not inline. */
#include "base/thread.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>

void
cm_cond_init(cm_cond *cond)
{
    pthread_condattr_t attributes;
    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(cond, &attributes);
    (void)pthread_condattr_destroy(&attributes);
}

bool
cm_cond_wait_until(cm_cond *cond, cm_mutex *mutex, uint64_t deadline_ns)
{
    struct timespec deadline = {
        .tv_sec = (time_t)(deadline_ns / 1000000000u),
        .tv_nsec = (long)(deadline_ns % 1000000000u),
    };
    return pthread_cond_timedwait(cond, mutex, &deadline) != ETIMEDOUT;
}

void
cm_spin_lock_wait(cm_spin_lock *lock)
{
    enum {
        SPIN_COUNT = 128, /* longer than a running thread ever holds the lock */
        YIELD_COUNT = 16, /* the holder was preempted: let it run */
        SLEEP_NS = 20 * 1000,
    };
    for (uint32_t i = 0;
         atomic_load_explicit(&lock->held, memory_order_relaxed) != 0
         || atomic_exchange_explicit(&lock->held, 1, memory_order_acquire) != 0;
         i++) {
        if (i < SPIN_COUNT) {
            cm_relax();
        }
        else if (i < SPIN_COUNT + YIELD_COUNT) {
            (void)sched_yield();
        }
        else {
            cm_sleep_ns(SLEEP_NS);
        }
    }
}

cm_status
cm_thread_start(cm_thread *thread, void *(*run)(void *), void *arg)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    /* If these were blocked, a thread that faults would end the process without a word,
     * since no handler would run, neither Python's faulthandler nor a sanitizer's. */
    static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS};
    for (size_t i = 0; i < sizeof(faults) / sizeof(*faults); i++) {
        (void)sigdelset(&all, faults[i]);
    }
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, run, arg);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error == 0 ? cm_ok() : cm_fail(CM_ETHREAD, (uint64_t)error);
}

void
cm_sleep_ns(uint64_t delay_ns)
{
    struct timespec left = {
        .tv_sec = (time_t)(delay_ns / 1000000000u),
        .tv_nsec = (long)(delay_ns % 1000000000u),
    };
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}
