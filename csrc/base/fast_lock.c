/* SPDX-License-Identifier: Apache-2.0 */
/* What happens when a fast lock is taken already. */
#include "base/fast_lock.h"

#include <linux/membarrier.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    SPIN_COUNT = 128, /* longer than the lock is ever held by a running thread */
    YIELD_COUNT = 16, /* its holder was preempted: let it run */
    SLEEP_NS = 20 * 1000,
    LEAN_AFTER = 256, /* so many exchanges cost as much as one barrier */
    DRAIN_NS = 1000 * 1000
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

static void
back_off(uint32_t attempt)
{
    if (attempt < SPIN_COUNT) {
        pause_briefly();
    }
    else if (attempt < SPIN_COUNT + YIELD_COUNT) {
        (void)sched_yield();
    }
    else {
        struct timespec nap = {.tv_nsec = SLEEP_NS};
        (void)nanosleep(&nap, NULL);
    }
}

void
cm_fast_lock_wait(cm_fast_lock *lock)
{
    for (uint32_t i = 0;; i++) {
        if (atomic_load_explicit(&lock->held, memory_order_relaxed) == 0
            && atomic_exchange_explicit(&lock->held, 1, memory_order_acquire) == 0) {
            return;
        }
        back_off(i);
    }
}

void
cm_fast_lock_allow_leaning(cm_fast_lock *lock)
{
    lock->may_lean =
        syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
}

void
cm_fast_lock_lean(cm_fast_lock *lock)
{
    if (++lock->alone_count >= LEAN_AFTER) {
        atomic_store_explicit(&lock->leans, true, memory_order_release);
    }
}

/* After the barrier, whoever entered before it is seen to be inside, and whoever enters
 * after it sees that the lock leans no more. */
void
cm_fast_lock_straighten(cm_fast_lock *lock)
{
    atomic_store_explicit(&lock->leans, false, memory_order_seq_cst);
    if (syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) != 0) {
        /* forbidden since: no processor keeps a store to itself for so long */
        struct timespec nap = {.tv_nsec = DRAIN_NS};
        (void)nanosleep(&nap, NULL);
    }
    for (uint32_t i = 0; atomic_load_explicit(&lock->inside, memory_order_acquire) != 0;
         i++) {
        back_off(i);
    }
}
