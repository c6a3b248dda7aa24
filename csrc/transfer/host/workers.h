/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that share out copies between user memory and page-locked blocks. They make
 * no runtime call and know no stream: a copy here is host memory to host memory, in
 * parts that any thread may take. The thread that posts the copies helps, so that all
 * of it gets done where no other thread can be started.
 * Locks: a mutex for those who sleep. Parts are taken without one, by counting. */
#pragma once

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "transfer/plan/layout.h"
#include "transfer/plan/tuning.h"

enum { CM_WORKERS_MAX = CM_THREAD_MAX - 1, CM_OPEN_TASKS_MAX = 64 };

/* One part of a task, moved in another way than as a layout says. Any thread. */
typedef void (*cm_move_part)(const void *context, const cm_layout *part, void *dst,
                             const void *src, bool wide);

/* Where memory is the limit few threads do as well as all, and without waiting for each
 * other; not so where each element costs instructions, or the kernel's. */
typedef enum cm_copy_way {
    CM_COPY_PLAIN,
    CM_COPY_WIDE,      /* past the caches */
    CM_COPY_PLAIN_ALL, /* by every thread there is, and so are the next */
    CM_COPY_WIDE_ALL,
    CM_COPY_FRESH, /* pages of the target come into being: a huge one has one thread */
} cm_copy_way;

/* One copy that is shared out; zero before it is posted for the first time. What is not
 * atomic changes only while no part can be taken and those taken are done: the thread
 * that has one may read it. It fetches few cache lines, the first ones here. */
typedef struct cm_copy_task {
    _Atomic uint64_t next;        /* which posting << 32 | its next part */
    _Atomic uint32_t ready_count; /* parts before that may be taken */
    _Atomic uint32_t done_count;
    _Atomic uint32_t part_count; /* of all */
    cm_copy_way way;
    void *dst;
    const void *src;
    cm_move_part move;   /* the group's */
    const void *context; /* borrowed */
    uint32_t limit; /* threads below that number may take parts, beside the poster */
    int place;      /* among workers->places; -1: none was free */
    cm_cut cut;
    cm_layout whole;
    cm_list node; /* of its group */
} cm_copy_task;

/* A task with parts to take, as threads look for one: the lowest turn is first. */
typedef struct cm_task_place {
    _Atomic(cm_copy_task *) task; /* NULL: the place is free */
    _Atomic uint64_t turn;
    _Atomic uint32_t limit;
} cm_task_place;

/* What a thread may read of tasks, in a cache line of its own. */
typedef struct cm_task_view {
    _Atomic(cm_copy_task *) task; /* or NULL */
    char rest[64 - sizeof(void *)];
} cm_task_view;

/* 0 <= thread_count <= CM_WORKERS_MAX. Opening a task and ending one is followed by a
 * look at `asleep` or waiter_count, going to sleep is the other way round: one of the
 * two sees the other. In the same way a thread says in its view which task it looks at,
 * and then looks whether that is still open. */
typedef struct cm_workers {
    _Atomic uint64_t open; /* a bit for each place whose task has parts to take */
    atomic_bool stop;
    _Atomic uint64_t spin_ns; /* how long an idle thread looks before it sleeps */
    _Atomic uint32_t asleep;  /* a bit for each thread that sleeps for want of work */
    _Atomic uint32_t called;  /* threads below that number were last called for */
    _Atomic uint32_t waiter_count; /* and how many sleep until a task ends */
    _Atomic uint32_t thread_count; /* by the one that is `starting` others */
    atomic_bool starting;
    _Atomic uint32_t begun; /* threads that have taken their number */
    cm_task_place places[CM_OPEN_TASKS_MAX];
    cm_task_view views[CM_WORKERS_MAX];
    cm_mutex sleep;
    cm_cond done;                 /* a task has ended, or a thread has left one */
    cm_cond wake[CM_WORKERS_MAX]; /* of each thread: a part, or an end to all work */
    cm_thread threads[CM_WORKERS_MAX];
} cm_workers;

/* What one transfer has posted. Groups are served in turn, the tasks of each in order.
 * Used by one thread at a time. */
typedef struct cm_task_group {
    cm_workers *workers;     /* borrowed */
    const cm_tuning *tuning; /* borrowed */
    cm_list tasks;           /* posted, oldest first */
    uint64_t turn;           /* of the last one */
    uint32_t post_count;
    uint32_t rests; /* moments that the poster let pass */
    /* for what is posted from now on: */
    uint32_t more;        /* threads beyond those that do as a rule; as far as there may
                             be so many */
    bool lets_sleep;      /* posting wakes nobody: cm_task_group_wake() does, or what is
                             posted is over before a sleeping thread is awake */
    bool is_early;        /* parts can be taken once cm_copy_task_set_ready() says so */
    uint64_t part_nbytes; /* parts begin at multiples of it; 0: as is best */
    cm_move_part move;    /* NULL: as the layout says */
    const void *context;
} cm_task_group;

/* Starts no thread yet. */
void cm_workers_init(cm_workers *workers);
/* Joins the threads. No group may be open. */
void cm_workers_fini(cm_workers *workers);

/* `tuning`, which is resolved, stays until the group is closed. It says how many
 * threads the group has; other groups may have more or fewer at the same time. */
void cm_task_group_open(cm_task_group *group, cm_workers *workers,
                        const cm_tuning *tuning);
/* What nobody has begun is left undone. Blocks until no thread touches its memory. */
void cm_task_group_close(cm_task_group *group);

/* Share out what `layout` describes, which is copied; both ends stay until the task is
 * done or the group is closed, the task until the latter. A task that is done may be
 * posted again. */
void cm_task_group_post(cm_task_group *group, cm_copy_task *task,
                        const cm_layout *layout, void *dst, const void *src,
                        cm_copy_way way);
/* Wake some threads for what is posted now or soon. */
void cm_task_group_wake(cm_task_group *group);
/* Copy one part of what the group has posted; false when all parts are taken. */
bool cm_task_group_help(cm_task_group *group);
/* For a poster with nothing else to do at the moment: copies a
 * part where threads are few, and waits for `task` (NULL: not) where there is none;
 * else lets a moment pass. */
void cm_task_group_rest(cm_task_group *group, cm_copy_task *task);
/* Blocks until the task is done; parts that nobody has taken are copied here. */
void cm_task_group_wait(cm_task_group *group, cm_copy_task *task);

/* So many bytes of a task posted early, one run, are there to be copied. */
static inline void
cm_copy_task_set_ready(cm_copy_task *task, uint64_t nbytes)
{
    bool is_all = nbytes >= task->whole.run_nbytes;
    uint64_t parts = nbytes / (uint64_t)task->cut.step;
    atomic_store(&task->ready_count,
                 is_all ? atomic_load(&task->part_count) : (uint32_t)parts);
}

static inline bool
cm_copy_task_is_done(const cm_copy_task *task)
{
    return atomic_load(&task->done_count) == atomic_load(&task->part_count);
}
