/* SPDX-License-Identifier: Apache-2.0 */
/* How long to leave the device alone between two looks at whether it is done: in
 * proportion to how long it has taken already, so that a short copy is not made long
 * and a long one not asked about a thousand times. */
#pragma once

#include <sched.h>

#include "base/thread.h"

enum {
    CM_BACKOFF_LEAST_NS = 500,
    CM_BACKOFF_MOST_NS = 300 * 1000,
    CM_BACKOFF_SLEEP_NS = 100 * 1000, /* the least that is worth sleeping: timers are
                                         late */
    CM_BACKOFF_SPIN_NS = 50 * 1000,   /* how long one spins that would rather sleep */
    CM_BACKOFF_NAP_NS = 20 * 1000,    /* what it sleeps then: the timer adds to it */
};

static inline uint64_t
cm_backoff_ns(uint64_t elapsed_ns)
{
    /* From a millisecond on precision pays: what is late is late by less than 1 %. */
    uint64_t gap = elapsed_ns < 1000000 ? elapsed_ns / 32 : elapsed_ns / 128;
    if (gap < CM_BACKOFF_LEAST_NS) {
        return CM_BACKOFF_LEAST_NS;
    }
    return gap < CM_BACKOFF_MOST_NS ? gap : CM_BACKOFF_MOST_NS;
}

/* Short pauses are spun, as CUDA's own waiting is, but let others run. */
static inline void
cm_pause_until(uint64_t deadline_ns)
{
    uint64_t now = cm_now_ns();
    if (deadline_ns > now + CM_BACKOFF_SLEEP_NS) {
        cm_sleep_ns(deadline_ns - now);
    }
    while (cm_now_ns() < deadline_ns) {
        (void)sched_yield();
    }
}

/* So long after the wait has begun, until the next look. */
static inline void
cm_pause_after(uint64_t elapsed_ns)
{
    cm_pause_until(cm_now_ns() + cm_backoff_ns(elapsed_ns));
}

/* The same for a thread that had better sleep than spin, after so long a wait. */
static inline void
cm_nap_after(uint64_t elapsed_ns)
{
    if (elapsed_ns < CM_BACKOFF_SPIN_NS) {
        cm_pause_after(elapsed_ns);
        return;
    }
    uint64_t gap = cm_backoff_ns(elapsed_ns);
    cm_sleep_ns(gap < CM_BACKOFF_NAP_NS ? CM_BACKOFF_NAP_NS : gap);
}
