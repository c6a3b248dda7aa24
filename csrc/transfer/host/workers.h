/* SPDX-License-Identifier: Apache-2.0 */
/* The threads of this file (the workers) copy between user memory and page-locked
 * blocks. They make no call of the runtime and know no stream. A copy here goes from
 * host memory to host memory and is cut into parts, and any worker may take a part.
 *
 * The thread that runs a transfer opens a group and posts tasks in it, one for each
 * piece that has to be packed or unpacked. This thread is the poster of the tasks.
 * While a task has parts left it is in a place, where idle workers find it. Each task
 * has a turn, a number that rises with each task of a group, and workers take the task
 * with the lowest turn. So each of several transfers gets its share. The poster also
 * takes parts of its tasks (cm_task_group_help(), cm_task_group_wait()), so everything
 * gets done even if no thread can be started.
 *
 * Locks: `sleep`, a mutex for threads that go to sleep. Parts are taken without a lock,
 * by counting. */
#pragma once

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "transfer/plan/layout.h"
#include "transfer/plan/tuning.h"

enum { CM_WORKERS_MAX = CM_LINKS_THREAD_MAX - 1, CM_OPEN_TASKS_MAX = 64 };

/* Moves one part of a task. A group has such a function if its tasks are not plain
 * copies, but read a file, for example. Any thread may call it. */
typedef void (*cm_move_part)(const void *context, const cm_layout *part, void *dst,
                             const void *src, bool wide);

/* How the parts of a task are copied, and by how many threads. If the speed of memory
 * is the limit, a few threads are as fast as all of them, and wait less for each other.
 * If each element costs instructions, or the system has to make pages, all threads
 * help. */
typedef enum cm_copy_way {
    CM_COPY_PLAIN,
    CM_COPY_WIDE, /* by stores past the caches */
    /* For this way and the next two, every thread helps. */
    CM_COPY_PLAIN_ALL,
    CM_COPY_WIDE_ALL, /* by stores past the caches */
    /* The pages of the target do not exist before the copy. Each huge page is written,
     * and so made, by one thread. */
    CM_COPY_FRESH,
} cm_copy_way;

/* One copy that threads share. All members are zero before the task is posted for the
 * first time. Members that are not atomic change only while no part can be taken and
 * all parts that were taken are done, so a thread that has a part may read them. The
 * members that a thread reads first stand together at the top, so that they take few
 * cache lines. */
typedef struct cm_copy_task {
    _Atomic uint64_t next; /* the number of the posting in the upper 32 bits, and the
                              number of the next part in the lower 32 bits */
    _Atomic uint32_t ready_count; /* parts whose number is below this may be taken */
    _Atomic uint32_t done_count;  /* parts that have been copied */
    _Atomic uint32_t part_count;  /* parts of the whole task */
    cm_copy_way way;
    void *dst;
    const void *src;
    cm_move_part move;   /* a copy of the group's `move` */
    const void *context; /* borrowed */
    /* Besides the poster, the threads whose numbers are below this may take parts. */
    uint32_t limit;
    int place;       /* the index of its place; -1 if none was free */
    cm_cut cut;      /* how `whole` is cut into parts */
    cm_layout whole; /* what the task copies */
    cm_list node;    /* in the list of its group */
} cm_copy_task;

/* A place is where threads look for a task that has parts to take. The lowest turn
 * comes first. */
typedef struct cm_task_place {
    _Atomic(cm_copy_task *) task; /* NULL if the place is free */
    _Atomic uint64_t turn;        /* the turn of the task */
    _Atomic uint32_t limit;       /* the limit of the task */
} cm_task_place;

/* Names the task that a thread is looking at or working on, or NULL. The task's memory
 * must stay until no view names it. Each view has a cache line of its own. */
typedef struct cm_task_view {
    _Atomic(cm_copy_task *) task;
    char padding[64 - sizeof(void *)];
} cm_task_view;

/* 0 <= thread_count <= CM_WORKERS_MAX.
 *
 * The order of steps avoids two races. The first race is between a thread that opens or
 * ends a task and a thread that goes to sleep. The former changes the task and then
 * looks at `asleep` or waiter_count, where sleeping threads are entered. The latter
 * enters itself in `asleep` or waiter_count and then looks at the tasks. So at least
 * one of the two sees what the other has done.
 *
 * The second race is between a thread that takes up a task and a group that closes. The
 * thread names the task in its view, and then checks that the task is still in its
 * place. The group takes its tasks out of their places, and then looks at the views. */
typedef struct cm_workers {
    _Atomic uint64_t open; /* has a bit for each place whose task has parts to take */
    atomic_bool stop;      /* the threads are to end */
    /* How long an idle thread looks for work before it sleeps. */
    _Atomic uint64_t spin_ns;
    /* Has a bit for each thread that sleeps because there is no work. */
    _Atomic uint32_t asleep;
    _Atomic uint32_t called; /* the last call_threads() called the threads whose numbers
                                are below this */
    _Atomic uint32_t waiter_count; /* how many threads sleep until a task ends */
    /* Only the thread that has set `starting` changes this. */
    _Atomic uint32_t thread_count;
    atomic_bool starting;   /* a thread is starting further threads */
    _Atomic uint32_t begun; /* how many threads have taken their number */
    cm_task_place places[CM_OPEN_TASKS_MAX];
    cm_task_view views[CM_WORKERS_MAX];
    cm_mutex sleep;
    /* Signalled when a task has ended or a thread has left a task. */
    cm_cond done;
    /* One for each thread. It is signalled when there is a part for the thread to take,
     * or when the threads are to end. */
    cm_cond wake[CM_WORKERS_MAX];
    cm_thread threads[CM_WORKERS_MAX];
} cm_workers;

/* The tasks that one transfer has posted. Groups are served in turn, and the tasks of
 * one group in the order in which they were posted. Only one thread at a time uses a
 * group. */
typedef struct cm_task_group {
    cm_workers *workers;     /* borrowed */
    const cm_tuning *tuning; /* borrowed */
    cm_list tasks;           /* posted, oldest first */
    uint64_t turn;           /* the turn of the task that was posted last */
    uint32_t post_count;     /* how many tasks it has posted so far */
    uint32_t pauses;         /* how often the poster has let a moment pass */

    /* A change of a member from here on applies to the tasks that are posted later. */

    /* How many threads more than usual may take parts, within the limits of the
     * tuning. */
    uint32_t more;
    /* How many threads may take parts of a task, the poster included. If this is 0, the
     * way of each task decides. It is set if tasks have only one part each, so that
     * this many threads work on different tasks at the same time. */
    uint32_t crew;
    /* Posting a task wakes no thread. Either cm_task_group_wake() is called, or the
     * tasks are so short that they end before a sleeping thread would be awake. */
    bool lets_sleep;
    /* Tasks are posted before their bytes are there. A part can be taken once
     * cm_copy_task_set_ready() has said that its bytes are there. */
    bool is_early;
    /* How long a thread that finds no part looks for more work before it sleeps. It is
     * the `spin_ns` of the tuning. It is shorter if no time is lost while a thread
     * wakes up. */
    uint64_t spin_ns;
    /* Parts begin at multiples of this many bytes. If this is 0, the group chooses the
     * size of the parts. */
    uint64_t part_nbytes;
    cm_move_part move; /* NULL to copy as the layout says */
    const void *context;
} cm_task_group;

/* This starts no thread yet. */
void cm_workers_init(cm_workers *workers);
/* Joins the threads. No group may be open. */
void cm_workers_fini(cm_workers *workers);

/* Open a group. `tuning` must be resolved, must stay until the group is closed, and
 * says how many threads the group has. Other groups may have more or fewer at the same
 * time. */
void cm_task_group_open(cm_task_group *group, cm_workers *workers,
                        const cm_tuning *tuning);
/* Close the group: parts that nobody has begun are left undone. Blocks until no thread
 * touches the memory of its tasks any more. */
void cm_task_group_close(cm_task_group *group);

/* Share out the copy that `layout` describes. The memory of both ends must stay until
 * the task is done or the group is closed, and the task itself until the group is
 * closed. A task that is done may be posted again. */
void cm_task_group_post(cm_task_group *group, cm_copy_task *task,
                        const cm_layout *layout, void *dst, const void *src,
                        cm_copy_way way);
/* Wake some threads for what has been posted or soon will be. */
void cm_task_group_wake(cm_task_group *group);
/* Copy one part of what the group has posted. Returns false if all parts are taken. */
bool cm_task_group_help(cm_task_group *group);
/* Pass the time usefully. A poster calls this when it has nothing else to do at the
 * moment. If there are few threads, or all of them sleep, the call copies one part. If
 * there are few threads and no part is left, it waits for `task`, unless `task` is
 * NULL. If there are enough threads, it only lets a moment pass, and copies a part now
 * and then. */
void cm_task_group_pause(cm_task_group *group, cm_copy_task *task);
/* Copies the parts that nobody has taken. Blocks until the task is done. */
void cm_task_group_wait(cm_task_group *group, cm_copy_task *task);

/* Say that the first `nbytes` bytes of a task are there, so that the parts within them
 * may be copied. The task was posted early (`is_early`) and is a single run. */
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
