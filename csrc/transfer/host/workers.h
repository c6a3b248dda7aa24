/* SPDX-License-Identifier: Apache-2.0 */
/* The threads of this file share out copies between user memory and page-locked blocks.
 * They make no call of the runtime and know no stream: a copy here is one from host
 * memory to host memory, cut into parts that any thread may take.
 *
 * The thread that runs a transfer opens a group and posts tasks in it, one for each
 * piece that has to be packed or unpacked. While a task has parts left it is in a
 * place, where idle threads find it; they take the task whose turn is lowest, so that
 * several transfers get their share. The poster takes parts as well
 * (cm_task_group_help(), cm_task_group_wait()), and so everything gets done even where
 * no thread can be started.
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

/* Moves one part of a task, for a group that does not copy as the task's layout says.
 * Any thread may call it. */
typedef void (*cm_move_part)(const void *context, const cm_layout *part, void *dst,
                             const void *src, bool wide);

/* How the parts of a task are copied, and by how many threads. If memory is the limit,
 * a few threads are as fast as all, and do not wait for each other. If each element
 * costs instructions, or the kernel has to make pages, all threads help. */
typedef enum cm_copy_way {
    CM_COPY_PLAIN,
    CM_COPY_WIDE,      /* by stores past the caches */
    CM_COPY_PLAIN_ALL, /* by every thread there is, as the next two are */
    CM_COPY_WIDE_ALL,
    /* The copy makes the pages of the target. Each huge page is made by one thread. */
    CM_COPY_FRESH,
} cm_copy_way;

/* One copy that is shared out; all zero before it is posted for the first time. Members
 * that are not atomic change only while no part can be taken and all that were taken
 * are done, so a thread that has a part may read them. The first members are those that
 * a thread reads first, so that it fetches few cache lines. */
typedef struct cm_copy_task {
    _Atomic uint64_t next; /* the number of the posting in the upper 32 bits, and that
                              of the next part in the lower ones */
    _Atomic uint32_t ready_count; /* parts below that number may be taken */
    _Atomic uint32_t done_count;  /* parts that have been copied */
    _Atomic uint32_t part_count;  /* parts of the whole task */
    cm_copy_way way;
    void *dst;
    const void *src;
    cm_move_part move;   /* as in the group */
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
 * The order of steps avoids two races. A thread that opens or ends a task does so
 * before it looks at `asleep` or waiter_count, and a thread that goes to sleep enters
 * itself there before it looks for tasks. So at least one of the two threads sees what
 * the other has done. In the same way a thread names a task in its view before it
 * checks that the task is still in its place, and a group that closes takes its tasks
 * out of their places before it looks at the views. */
typedef struct cm_workers {
    _Atomic uint64_t open; /* has a bit for each place whose task has parts to take */
    atomic_bool stop;      /* the threads are to end */
    /* How long an idle thread looks for work before it sleeps. */
    _Atomic uint64_t spin_ns;
    /* Has a bit for each thread that sleeps because there is no work. */
    _Atomic uint32_t asleep;
    _Atomic uint32_t called; /* the last call_threads() was to the threads whose numbers
                                are below this */
    _Atomic uint32_t waiter_count; /* how many threads sleep until a task ends */
    _Atomic uint32_t thread_count; /* changed by the thread that has set `starting` */
    atomic_bool starting;          /* a thread is starting further threads */
    _Atomic uint32_t begun;        /* how many threads have taken their number */
    cm_task_place places[CM_OPEN_TASKS_MAX];
    cm_task_view views[CM_WORKERS_MAX];
    cm_mutex sleep;
    /* Signalled when a task has ended or a thread has left one. */
    cm_cond done;
    /* One for each thread, signalled when there is a part for it, or at the end of all
     * work. */
    cm_cond wake[CM_WORKERS_MAX];
    cm_thread threads[CM_WORKERS_MAX];
} cm_workers;

/* What one transfer has posted. Groups are served in turn, and the tasks of a group in
 * their order. Only one thread at a time uses a group. */
typedef struct cm_task_group {
    cm_workers *workers;     /* borrowed */
    const cm_tuning *tuning; /* borrowed */
    cm_list tasks;           /* posted, oldest first */
    uint64_t turn;           /* the turn of the task that was posted last */
    uint32_t post_count;     /* how many tasks it has posted so far */
    uint32_t pauses;         /* how often the poster has let a moment pass */

    /* The members from here on concern what is posted later. */

    /* How many threads more than usual may take parts, within the limits of the
     * tuning. */
    uint32_t more;
    /* How many threads take the parts of its tasks, the poster included; 0 leaves that
     * to the way of each task. This is for several tasks of one part each, which as
     * many threads copy at the same time. */
    uint32_t crew;
    /* Posting wakes nobody. Either cm_task_group_wake() wakes threads, or the tasks are
     * over before a sleeping thread would be awake. */
    bool lets_sleep;
    /* Parts can only be taken after cm_copy_task_set_ready() has said so. */
    bool is_early;
    /* How long threads look for more work after its tasks before they sleep. It is the
     * `spin_ns` of the tuning, or shorter if nobody waits for the threads to wake. */
    uint64_t spin_ns;
    /* Parts begin at multiples of this many bytes; 0 leaves the size of the parts to
     * the group. */
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
/* Called by a poster that has nothing else to do at the moment. If there are few
 * threads it copies a part or, if there is none, waits for `task`, unless that is NULL.
 * If there are enough threads it only lets a moment pass. */
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
