/* SPDX-License-Identifier: Apache-2.0 */
/* A lock for a few instructions of list work: one atomic exchange to take it, a plain
 * store to give it back. A pthread mutex needs two such exchanges and two calls, which
 * shows in an allocation of 50 ns. A thread that finds it taken spins, yields, then
 * sleeps for microseconds: fit for locks that are held for a fraction of one.
 *
 * Where nearly all its takers are kept apart by a lock of their own anyway, even the
 * exchange is saved: they take it as one side, by cm_fast_lock_enter(). When that side
 * was alone for a while the lock leans to it, and entering is a plain store and a load.
 * The next cm_fast_lock_take() takes the lean away, with a barrier in all threads of
 * the process that costs microseconds (Linux' membarrier; without it nothing ever
 * leans). Not recursive, no fairness, nothing to destroy. */
#ifndef CM_BASE_FAST_LOCK_H
#define CM_BASE_FAST_LOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/attributes.h"

typedef struct cm_fast_lock {
    _Atomic uint32_t held;
    _Atomic uint32_t inside; /* the one side is, by leaning */
    atomic_bool leans;       /* changes while held */
    bool may_lean;           /* set before use */
    uint32_t alone_count;    /* while held: the side's entries since anyone else's */
} cm_fast_lock;

/* The contended half: until it is taken. */
void cm_fast_lock_wait(cm_fast_lock *lock);
/* Held, and it leans: until nobody is inside and nobody will be. */
void cm_fast_lock_straighten(cm_fast_lock *lock);
/* Held by the side: it was alone for long enough. */
void cm_fast_lock_lean(cm_fast_lock *lock);

static inline void
cm_fast_lock_init(cm_fast_lock *lock)
{
    atomic_init(&lock->held, 0);
    atomic_init(&lock->inside, 0);
    atomic_init(&lock->leans, false);
    lock->may_lean = false;
    lock->alone_count = 0;
}

/* Let it lean where the system can take that back. Before anyone takes it. */
void cm_fast_lock_allow_leaning(cm_fast_lock *lock);

static inline void
cm_fast_lock_take(cm_fast_lock *lock)
{
    if (CM_UNLIKELY(atomic_exchange_explicit(&lock->held, 1, memory_order_acquire)
                    != 0)) {
        cm_fast_lock_wait(lock);
    }
    if (CM_UNLIKELY(atomic_load_explicit(&lock->leans, memory_order_relaxed))) {
        cm_fast_lock_straighten(lock);
    }
    lock->alone_count = 0;
}

static inline void
cm_fast_lock_give(cm_fast_lock *lock)
{
    atomic_store_explicit(&lock->held, 0, memory_order_release);
}

/* By threads that keep each other out from before entering until after leaving. */
static inline void
cm_fast_lock_enter(cm_fast_lock *lock)
{
    atomic_store_explicit(&lock->inside, 1, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst); /* the barrier of straighten() makes it a
                                                  real one when it matters */
    if (CM_LIKELY(atomic_load_explicit(&lock->leans, memory_order_acquire))) {
        return;
    }
    atomic_store_explicit(&lock->inside, 0, memory_order_relaxed);
    if (CM_UNLIKELY(atomic_exchange_explicit(&lock->held, 1, memory_order_acquire)
                    != 0)) {
        cm_fast_lock_wait(lock);
    }
    if (CM_UNLIKELY(lock->may_lean)) {
        cm_fast_lock_lean(lock);
    }
}

static inline void
cm_fast_lock_leave(cm_fast_lock *lock)
{
    if (CM_LIKELY(atomic_load_explicit(&lock->inside, memory_order_relaxed) != 0)) {
        atomic_store_explicit(&lock->inside, 0, memory_order_release);
        return;
    }
    atomic_store_explicit(&lock->held, 0, memory_order_release);
}

#endif
