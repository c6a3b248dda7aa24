/* SPDX-License-Identifier: Apache-2.0 */
/* What the threads and those who post for them share: workers.c and task_group.c. */
#ifndef CM_TRANSFER_HOST_WORKERS_PRIVATE_H
#define CM_TRANSFER_HOST_WORKERS_PRIVATE_H

#include <sched.h>

#include "transfer/host/workers.h"

enum {
    CM_WORKERS_TRIES = 200
}; /* for the spin lock, before the processor is given up */

#define CM_WORKERS_POSTER UINT32_MAX /* in place of a thread's number */

static inline void
cm_workers_lock(cm_workers *workers)
{
    for (int tries = 0;
         atomic_flag_test_and_set_explicit(&workers->spin, memory_order_acquire);
         tries++) {
        if (tries < CM_WORKERS_TRIES) {
            cm_relax();
        }
        else {
            (void)sched_yield();
        }
    }
}

static inline void
cm_workers_unlock(cm_workers *workers)
{
    atomic_flag_clear_explicit(&workers->spin, memory_order_release);
}

/* Where threads do not get in each other's way: to make pages and to read files. */
static inline bool
cm_copy_task_is_for_all(const cm_copy_task *task)
{
    return task->way >= CM_COPY_PLAIN_ALL || task->run != NULL;
}

/* The spin lock is held: the task has parts to take from now on, or none any more. */
void cm_workers_begin_parts(cm_workers *workers, const cm_copy_task *task);
void cm_workers_end_parts(cm_workers *workers, const cm_copy_task *task);
/* The next part of the group's oldest task that has one for a thread of that number, or
 * for whoever posted it (CM_WORKERS_POSTER); NULL: none. The spin lock is held. */
cm_copy_task *cm_workers_take_part(cm_task_group *group, uint32_t number,
                                   cm_layout *part);
/* Move the part that was taken; then say that it is over: the task may be gone. */
void cm_workers_copy_part(const cm_copy_task *task, const cm_layout *part);
void cm_workers_end_part(cm_workers *workers, cm_copy_task *task);

/* Waking takes time: each who has found a part wakes the next. */
void cm_workers_wake_one(cm_workers *workers);
/* Of those below number `end`. */
uint32_t cm_workers_count_asleep_below(const cm_workers *workers, uint32_t end);
/* As many as the group may have beside the thread that posts. One that cannot be
 * started is done without. */
void cm_workers_start_threads(cm_workers *workers, const cm_tuning *tuning,
                              uint32_t limit);

#endif
