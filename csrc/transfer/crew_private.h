/* SPDX-License-Identifier: Apache-2.0 */
/* What the threads and those who post for them share: crew.c and gang.c. */
#ifndef CM_TRANSFER_CREW_PRIVATE_H
#define CM_TRANSFER_CREW_PRIVATE_H

#include <sched.h>

#include "transfer/crew.h"

enum { CM_CREW_TRIES = 200 }; /* for the spin lock, before the processor is given up */

#define CM_CREW_POSTER UINT32_MAX /* in place of a thread's number */

static inline void
cm_crew_lock(cm_crew *crew)
{
    for (int tries = 0;
         atomic_flag_test_and_set_explicit(&crew->spin, memory_order_acquire);
         tries++) {
        if (tries < CM_CREW_TRIES) {
            cm_relax();
        }
        else {
            (void)sched_yield();
        }
    }
}

static inline void
cm_crew_unlock(cm_crew *crew)
{
    atomic_flag_clear_explicit(&crew->spin, memory_order_release);
}

/* Where threads do not get in each other's way: to make pages and to read files. */
static inline bool
cm_load_is_for_all(const cm_load *load)
{
    return load->way >= CM_COPY_PLAIN_ALL || load->run != NULL;
}

/* The spin lock is held: the load has parts to take from now on, or none any more. */
void cm_crew_begin_parts(cm_crew *crew, const cm_load *load);
void cm_crew_end_parts(cm_crew *crew, const cm_load *load);
/* The next part of the gang's oldest load that has one for a thread of that number, or
 * for whoever posted it (CM_CREW_POSTER); NULL: none. The spin lock is held. */
cm_load *cm_crew_take_part(cm_gang *gang, uint32_t number, cm_layout *part);
/* Move the part that was taken; then say that it is over: the load may be gone. */
void cm_crew_copy_part(const cm_load *load, const cm_layout *part);
void cm_crew_end_part(cm_crew *crew, cm_load *load);

/* Waking takes time: each who has found a part wakes the next. */
void cm_crew_wake_one(cm_crew *crew);
/* Of those below number `end`. */
uint32_t cm_crew_count_asleep_below(const cm_crew *crew, uint32_t end);
/* As many as the gang may have beside the thread that posts. One that cannot be started
 * is done without. */
void cm_crew_start_threads(cm_crew *crew, const cm_tuning *tuning, uint32_t limit);

#endif
