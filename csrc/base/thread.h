/* SPDX-License-Identifier: Apache-2.0 */
/* Wraps the mutexes, conditions and threads of pthreads, since C11 <threads.h> crashes
 * under ThreadSanitizer. Also has a clock and a spin lock. On Linux a mutex or a
 * condition is plain memory: making or locking one cannot fail, a mutex of zeros is
 * unlocked, and neither has to be destroyed. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "base/status.h"

typedef pthread_mutex_t cm_mutex;
typedef pthread_cond_t cm_cond;
typedef pthread_t cm_thread;

void cm_cond_init(cm_cond *cond); /* its waits use the monotonic clock */

static inline void
cm_mutex_lock(cm_mutex *mutex)
{
    (void)pthread_mutex_lock(mutex);
}

/* Lock a mutex. Without `waits` this returns false if another thread has it. */
static inline bool
cm_mutex_take(cm_mutex *mutex, bool waits)
{
    return (waits ? pthread_mutex_lock(mutex) : pthread_mutex_trylock(mutex)) == 0;
}

static inline void
cm_mutex_unlock(cm_mutex *mutex)
{
    (void)pthread_mutex_unlock(mutex);
}

static inline void
cm_cond_wait(cm_cond *cond, cm_mutex *mutex)
{
    (void)pthread_cond_wait(cond, mutex);
}

static inline void
cm_cond_signal_all(cm_cond *cond)
{
    (void)pthread_cond_broadcast(cond);
}

static inline void
cm_cond_signal_one(cm_cond *cond)
{
    (void)pthread_cond_signal(cond);
}

/* Wait for a signal, until the time `deadline_ns` of cm_now_ns() at most. Returns false
 * if that time has passed. */
bool cm_cond_wait_until(cm_cond *cond, cm_mutex *mutex, uint64_t deadline_ns);

/* A lock for a few instructions of list work: one atomic exchange takes it and a plain
 * store gives it back. A mutex needs two exchanges and two calls, which shows in an
 * allocation of 50 ns. A thread that finds the lock taken spins, then yields, then
 * sleeps for microseconds. The lock is neither recursive nor fair. A lock of zeros is
 * free, and a lock need not be destroyed. */
typedef struct cm_spin_lock {
    _Atomic uint32_t held; /* 1 while a thread has the lock, else 0 */
} cm_spin_lock;

/* Take a lock that another thread has: the slow part of cm_spin_lock_take(). */
void cm_spin_lock_wait(cm_spin_lock *lock);

static inline void
cm_spin_lock_take(cm_spin_lock *lock)
{
    if (CM_UNLIKELY(atomic_exchange_explicit(&lock->held, 1, memory_order_acquire)
                    != 0)) {
        cm_spin_lock_wait(lock);
    }
}

static inline void
cm_spin_lock_give(cm_spin_lock *lock)
{
    atomic_store_explicit(&lock->held, 0, memory_order_release);
}

/* Start `run(arg)` in a new thread, with all signals blocked except those of faults, so
 * that Ctrl-C reaches the main thread.
 * Fails: CM_ETHREAD. */
CM_NODISCARD cm_status cm_thread_start(cm_thread *thread, void *(*run)(void *),
                                       void *arg);

/* Wait until the thread has ended. */
static inline void
cm_thread_join(cm_thread thread)
{
    (void)pthread_join(thread, NULL);
}

/* Pause for a moment within a loop that looks at memory which another thread will
 * write. */
static inline void
cm_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sleep for at least this long, whatever signals arrive. */
void cm_sleep_ns(uint64_t delay_ns);

/* Monotonic time in nanoseconds. */
static inline uint64_t
cm_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}
