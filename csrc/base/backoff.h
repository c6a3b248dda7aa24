/* SPDX-License-Identifier: Apache-2.0 */
/* Decides how long a thread pauses before it asks again whether the device is done. The
 * pause is proportional to the time that the work has taken so far. So a short copy is
 * hardly delayed, and a long one does not make the thread ask thousands of times.
 * Example: after 200 us the next look is 1.6 us later, and after 100 ms it is 300 us
 * later, so the answer is late by less than 1 %. */
#pragma once

#include <sched.h>

#include "base/thread.h"

enum {
    CM_BACKOFF_PART = 128, /* the pause is the time that has passed, divided by this */
    CM_BACKOFF_LEAST_NS = 500,
    CM_BACKOFF_MOST_NS = 300 * 1000,
    /* In shorter pauses the thread spins instead of sleeping, since a timer would wake
     * it too late. */
    CM_BACKOFF_SLEEP_NS = 100 * 1000,
    /* For how long cm_nap_after() spins before it begins to sleep. */
    CM_BACKOFF_SPIN_NS = 50 * 1000,
    /* How long cm_nap_after() sleeps at least. The timer adds to this. */
    CM_BACKOFF_NAP_NS = 20 * 1000,
};

static inline uint64_t
cm_backoff_ns(uint64_t elapsed_ns)
{
    uint64_t gap = elapsed_ns / CM_BACKOFF_PART;
    if (gap < CM_BACKOFF_LEAST_NS) {
        return CM_BACKOFF_LEAST_NS;
    }
    return gap < CM_BACKOFF_MOST_NS ? gap : CM_BACKOFF_MOST_NS;
}

/* Wait until a time. In a short pause the thread spins, as CUDA does when it waits, but
 * lets other threads run. */
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

/* Pause before asking again, after waiting for `elapsed_ns` so far. */
static inline void
cm_pause_after(uint64_t elapsed_ns)
{
    cm_pause_until(cm_now_ns() + cm_backoff_ns(elapsed_ns));
}

/* Pause as cm_pause_after() does, but sleep instead of spinning once the wait is
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
