/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that share out copies between user memory and page-locked blocks. They make
 * no runtime call and know no stream: a copy here is host memory to host memory, in
 * parts that any thread may take. The thread that posts the copies helps, so that all
 * of it gets done where no other thread can be started.
 * Locks: a spin lock over lists and cuts, held for a moment only, since a mutex that many
 * wait for costs them more than a part takes; a mutex for those who sleep,
 * under which the other may be taken. */
#ifndef CM_TRANSFER_HOST_WORKERS_H
#define CM_TRANSFER_HOST_WORKERS_H

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "transfer/host/short_task.h"
#include "transfer/plan/layout.h"
#include "transfer/plan/tuning.h"

enum { CM_WORKERS_MAX = CM_THREAD_MAX - 1 };

/* part_count = tasks in `groups` that have parts left, open_counts[n] those of them
 * that threads below number n may take, reach the highest such n or 0; 0 <=
 * thread_count <= CM_WORKERS_MAX. A change of reach or of a task's end is followed by a
 * look at `asleep` or waiter_count, going to sleep is the other way round: one of the
 * two sees the other. */
typedef struct cm_workers {
    atomic_flag spin;
    cm_list groups;                /* under spin */
    _Atomic uint32_t thread_count; /* set under spin */
    _Atomic uint32_t limit;        /* under spin to write: threads that take parts */
    _Atomic uint32_t begun;        /* threads that have taken their number */
    bool starting;                 /* under spin: one thread starts others */
    uint32_t open_counts[CM_THREAD_MAX]; /* under spin */
    _Atomic uint32_t reach;              /* under spin to write */
    _Atomic uint32_t part_count;
    _Atomic uint32_t shared_part_count; /* of those, tasks for all threads there are */
    _Atomic uint32_t asleep; /* a bit for each thread that sleeps for want of work */
    _Atomic uint32_t waiter_count; /* and how many sleep until a task ends */
    _Atomic uint64_t spin_ns;      /* how long an idle thread looks before it sleeps */
    atomic_bool stop;
    cm_mutex sleep;
    cm_cond done;                 /* a task has ended */
    cm_cond wake[CM_WORKERS_MAX]; /* of each thread: a part, a limit, or an end to all
                                   * work
                                   */
    cm_short_task short_task;
    cm_thread threads[CM_WORKERS_MAX];
} cm_workers;

/* One part of a task, moved in another way than as a layout says. Any thread. */
typedef void (*cm_move_part)(const void *context, const cm_layout *part, void *dst,
                             const void *src, bool wide);

/* What one transfer has posted, oldest first. Gangs are served in turn. */
typedef struct cm_task_group {
    cm_workers *workers;     /* borrowed */
    const cm_tuning *tuning; /* borrowed */
    uint32_t rests;          /* moments that the poster let pass */
    uint32_t more; /* threads for what is posted from now on, beyond those that
                      do as a rule; as far as there may be so many */
    cm_list node;
    cm_list tasks;
    cm_move_part move; /* for what is posted from now on; NULL: as the layout says */
    const void *context;
} cm_task_group;

/* Where memory is the limit few threads do as well as all, and without waiting for each
 * other; not so where each element costs instructions, or the kernel's. */
typedef enum cm_copy_way {
    CM_COPY_PLAIN,
    CM_COPY_WIDE,      /* past the caches */
    CM_COPY_PLAIN_ALL, /* by every thread there is, and so are the next */
    CM_COPY_WIDE_ALL,
    CM_COPY_FRESH, /* pages of the target come into being: a huge one has one thread */
} cm_copy_way;

/* One copy that is shared out. */
typedef struct cm_copy_task {
    cm_list node;
    cm_layout whole;
    cm_cut cut;
    void *dst;
    const void *src;
    cm_copy_way way;
    uint32_t limit; /* threads below that number may take parts, beside the poster */
    /* Not a copy: called for bytes [begin, begin + nbytes) of the task; NULL: a copy.
     */
    void (*run)(void *argument, uint64_t begin, uint64_t nbytes);
    void *argument;
    cm_move_part move;      /* the group's */
    const void *context;    /* borrowed */
    uint32_t running_count; /* parts that threads are at */
    atomic_bool done;
} cm_copy_task;

/* Starts no thread yet. Fails: CM_ESYSTEM. */
CM_NODISCARD cm_status cm_workers_init(cm_workers *workers);
/* At most so many threads take parts from now on, beside those who post; UINT32_MAX: as
 * many as they ask for. The others rest. */
void cm_workers_set_limit(cm_workers *workers, uint32_t limit);
/* Joins the threads. No group may be open. */
void cm_workers_fini(cm_workers *workers);

/* How many threads there are for workers->short_task, at most `count`; as many are
 * started where there are fewer. Brief copies are for those that are awake. */
uint32_t cm_workers_muster(cm_workers *workers, const cm_tuning *tuning,
                           uint32_t count);
/* Wake some that sleep, for workers->short_task, which is open: each that comes wakes
 * others. */
void cm_workers_wake(cm_workers *workers);

/* How many sleep for want of work. */
uint32_t cm_workers_count_asleep(const cm_workers *workers);

/* `tuning`, which is resolved, stays until the group is closed. It says how many
 * threads the group has; other groups may have more or fewer at the same time. */
void cm_task_group_open(cm_task_group *group, cm_workers *workers,
                        const cm_tuning *tuning);
/* What nobody has begun is left undone. Blocks until no thread touches its memory. */
void cm_task_group_close(cm_task_group *group);

/* Share out what `layout` describes, which is copied; both ends and the task stay until
 * it is done or the group is closed. */
void cm_task_group_post(cm_task_group *group, cm_copy_task *task,
                        const cm_layout *layout, void *dst, const void *src,
                        cm_copy_way way);
/* Share out other work on `nbytes` bytes, in parts of at most `part_nbytes` that begin
 * at multiples of that: `run` is called for each by any thread. Otherwise the same. */
void cm_task_group_post_work(
    cm_task_group *group, cm_copy_task *task, uint64_t nbytes, uint64_t part_nbytes,
    void (*run)(void *argument, uint64_t begin, uint64_t nbytes), void *argument);
/* Copy one part of what the group has posted; false when all parts are taken. */
bool cm_task_group_help(cm_task_group *group);
/* For a poster with nothing else to do at the moment: copies a
 * part where threads are few, and waits for `task` (NULL: not) where there is none;
 * else lets a moment pass. */
void cm_task_group_rest(cm_task_group *group, cm_copy_task *task);
/* Blocks until the task is done; parts that nobody has taken are copied here. */
void cm_task_group_wait(cm_task_group *group, cm_copy_task *task);

static inline bool
cm_copy_task_is_done(const cm_copy_task *task)
{
    return atomic_load_explicit(&task->done, memory_order_acquire);
}

#endif
