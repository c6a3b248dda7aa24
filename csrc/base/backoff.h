/* SPDX-License-Identifier: Apache-2.0 */
/* How long to leave the device alone between two looks at whether it is done. The pause
 * is in proportion to how long the work has taken already, so that a short copy does
 * not become long and a long one is not asked about a thousand times. Example: after
 * 100 us the next look is 3.1 us later, and the answer is late by at most 3 %; after
 * 100 ms it is 300 us later. */
#pragma once

#include <sched.h>

#include "base/thread.h"

enum {
    CM_BACKOFF_LEAST_NS = 500,
    CM_BACKOFF_MOST_NS = 300 * 1000,
    /* A shorter sleep is not worth it: timers are late. */
    CM_BACKOFF_SLEEP_NS = 100 * 1000,
    /* How long a thread that would rather sleep spins first. */
    CM_BACKOFF_SPIN_NS = 50 * 1000,
    /* The least that it sleeps afterwards; the timer adds to it. */
    CM_BACKOFF_NAP_NS = 20 * 1000,
};

static inline uint64_t
cm_backoff_ns(uint64_t elapsed_ns)
{
    /* From a millisecond on precision pays: the answer is then late by less than 1
     * %. */
    uint64_t gap = elapsed_ns < 1000000 ? elapsed_ns / 32 : elapsed_ns / 128;
    if (gap < CM_BACKOFF_LEAST_NS) {
        return CM_BACKOFF_LEAST_NS;
    }
    return gap < CM_BACKOFF_MOST_NS ? gap : CM_BACKOFF_MOST_NS;
}

/* Wait until a time. Short pauses are spun, as CUDA's own waiting is, but let other
 * threads run. */
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

/* Pause before the next look, when the wait has lasted `elapsed_ns`. */
static inline void
cm_pause_after(uint64_t elapsed_ns)
{
    cm_pause_until(cm_now_ns() + cm_backoff_ns(elapsed_ns));
}

/* As cm_pause_after(), for a thread that had better sleep than spin once the wait is
 * long. */
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
