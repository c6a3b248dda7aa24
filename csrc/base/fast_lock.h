/* SPDX-License-Identifier: Apache-2.0 */
/* A lock for a few instructions of list work: one atomic exchange to take it, a plain
 * store to give it back. A pthread mutex needs two such exchanges and two calls, which
 * shows in an allocation of 50 ns. Who finds it taken spins, then yields, then sleeps
 * for microseconds: fit for locks that are held for a fraction of one.
 * Not recursive, no fairness, nothing to destroy. */
#ifndef CM_BASE_FAST_LOCK_H
#define CM_BASE_FAST_LOCK_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/attributes.h"

typedef struct cm_fast_lock {
    _Atomic uint32_t held;
} cm_fast_lock;

/* The contended half: until it is taken. */
void cm_fast_lock_wait(cm_fast_lock *lock);

static inline void
cm_fast_lock_init(cm_fast_lock *lock)
{
    atomic_init(&lock->held, 0);
}

static inline void
cm_fast_lock_take(cm_fast_lock *lock)
{
    if (CM_UNLIKELY(atomic_exchange_explicit(&lock->held, 1, memory_order_acquire)
                    != 0)) {
        cm_fast_lock_wait(lock);
    }
}

static inline void
cm_fast_lock_give(cm_fast_lock *lock)
{
    atomic_store_explicit(&lock->held, 0, memory_order_release);
}

#endif
