/* SPDX-License-Identifier: Apache-2.0 */
/* What happens when a fast lock is taken already. */
#include "base/fast_lock.h"

#include <sched.h>
#include <time.h>

enum {
    SPIN_COUNT = 128, /* longer than the lock is ever held by a running thread */
    YIELD_COUNT = 16, /* its holder was preempted: let it run */
    SLEEP_NS = 20 * 1000
};

static inline void
pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

void
cm_fast_lock_wait(cm_fast_lock *lock)
{
    for (uint32_t i = 0;; i++) {
        if (atomic_load_explicit(&lock->held, memory_order_relaxed) == 0
            && atomic_exchange_explicit(&lock->held, 1, memory_order_acquire) == 0) {
            return;
        }
        if (i < SPIN_COUNT) {
            pause_briefly();
        }
        else if (i < SPIN_COUNT + YIELD_COUNT) {
            (void)sched_yield();
        }
        else {
            struct timespec nap = {.tv_nsec = SLEEP_NS};
            (void)nanosleep(&nap, NULL);
        }
    }
}
