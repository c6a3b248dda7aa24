/* SPDX-License-Identifier: Apache-2.0 */
/* What one transfer has posted, from its side: posting, helping, waiting. */
#include "base/fresh_pages.h"
#include "transfer/host/workers_private.h"

enum {
    MANY_THREADS = 4, /* so many do without the one that posts */
    REST_TURNS = 20,
    RESTS = 64, /* in vain, before the one that posted copies a part all the same */
};

void
cm_task_group_open(cm_task_group *group, cm_workers *workers, const cm_tuning *tuning)
{
    group->workers = workers;
    group->tuning = tuning;
    group->rests = 0;
    group->more = 0;
    group->move = NULL;
    group->context = NULL;
    cm_list_init(&group->tasks);
    cm_list_init(&group->node);
    cm_workers_lock(workers);
    cm_list_push_back(&workers->groups, &group->node);
    cm_workers_unlock(workers);
}

/* Sleep until no thread is at a task of the group. */
static void
wait_until_empty(cm_task_group *group)
{
    cm_workers *workers = group->workers;
    bool empty = false;
    cm_mutex_lock(&workers->sleep);
    atomic_fetch_add(&workers->waiter_count, 1);
    for (;;) {
        cm_workers_lock(workers);
        empty = cm_list_is_empty(&group->tasks);
        cm_workers_unlock(workers);
        if (empty) {
            break;
        }
        cm_cond_wait(&workers->done, &workers->sleep);
    }
    atomic_fetch_sub(&workers->waiter_count, 1);
    cm_mutex_unlock(&workers->sleep);
}

void
cm_task_group_close(cm_task_group *group)
{
    cm_workers *workers = group->workers;
    cm_workers_lock(workers);
    for (cm_list *n = group->tasks.next; n != &group->tasks;) {
        cm_copy_task *task = CM_LIST_ENTRY(n, cm_copy_task, node);
        n = n->next;
        if (!task->cut.done) {
            task->cut.done = true;
            cm_workers_end_parts(workers, task);
        }
        if (task->running_count == 0) {
            cm_list_remove(&task->node);
        }
    }
    bool empty = cm_list_is_empty(&group->tasks);
    cm_workers_unlock(workers);
    if (!empty) {
        wait_until_empty(group);
    }
    cm_workers_lock(workers);
    cm_list_remove(&group->node);
    cm_workers_unlock(workers);
}

/* Parts of a task that is not a copy are of `part_nbytes`. */
static void
post(cm_task_group *group, cm_copy_task *task, uint64_t nbytes, uint64_t part_nbytes)
{
    cm_workers *workers = group->workers;
    uint64_t least = group->tuning->part_min_nbytes;
    uint64_t longest = group->tuning->part_max_nbytes;
    cm_list_init(&task->node);
    task->running_count = 0;
    atomic_init(&task->done, nbytes == 0);
    if (nbytes == 0) {
        return;
    }
    uint32_t few = (uint32_t)group->tuning->thread_count - 1;
    uint32_t all = (uint32_t)group->tuning->fresh_thread_count - 1;
    uint32_t wanted = cm_copy_task_is_for_all(task) ? all : few + group->more;
    task->limit = wanted < all ? wanted : all > few ? all : few;
    if (nbytes > least) {
        uint64_t parts = (nbytes + least - 1) / least;
        cm_workers_start_threads(workers, group->tuning,
                                 parts < task->limit ? (uint32_t)parts : task->limit);
    }
    cm_workers_lock(workers);
    uint32_t there = atomic_load(&workers->thread_count);
    uint64_t part = nbytes / ((there < few ? there : few) + 1);
    part = part < least ? least : part > longest ? longest : part;
    if (task->way == CM_COPY_FRESH) {
        part = CM_HUGE_PAGE_NBYTES;
    }
    part = part_nbytes != 0 ? part_nbytes : part;
    cm_cut_init(&task->cut, &task->whole, part);
    if (task->way == CM_COPY_FRESH) {
        cm_cut_align(&task->cut, (char *)task->dst + task->whole.dst_offset,
                     CM_HUGE_PAGE_NBYTES);
    }
    cm_list_push_back(&group->tasks, &task->node);
    cm_workers_begin_parts(workers, task);
    cm_workers_unlock(workers);
    if (nbytes > part) {
        cm_workers_wake_one(workers);
    }
}

void
cm_task_group_post(cm_task_group *group, cm_copy_task *task, const cm_layout *layout,
                   void *dst, const void *src, cm_copy_way way)
{
    task->whole = *layout;
    task->dst = dst;
    task->src = src;
    task->way = way;
    task->run = NULL;
    task->move = group->move;
    task->context = group->context;
    post(group, task, cm_layout_nbytes(layout), 0);
}

void
cm_task_group_post_work(cm_task_group *group, cm_copy_task *task, uint64_t nbytes,
                        uint64_t part_nbytes,
                        void (*run)(void *argument, uint64_t begin, uint64_t nbytes),
                        void *argument)
{
    task->whole = (cm_layout){.run_nbytes = nbytes};
    task->way = CM_COPY_PLAIN;
    task->move = NULL;
    task->run = run;
    task->argument = argument;
    post(group, task, nbytes, part_nbytes);
}

bool
cm_task_group_help(cm_task_group *group)
{
    cm_layout part;
    cm_workers_lock(group->workers);
    cm_copy_task *task = cm_workers_take_part(group, CM_WORKERS_POSTER, &part);
    cm_workers_unlock(group->workers);
    if (task == NULL) {
        return false;
    }
    cm_workers_copy_part(task, &part);
    cm_workers_end_part(group->workers, task);
    return true;
}

void
cm_task_group_rest(cm_task_group *group, cm_copy_task *task)
{
    cm_workers *workers = group->workers;
    uint32_t thread_count = atomic_load(&workers->thread_count);
    uint32_t few = (uint32_t)group->tuning->thread_count - 1;
    uint32_t limit = atomic_load(&workers->limit);
    few = thread_count < few ? thread_count : few;
    few = limit < few ? limit : few;
    /* A single part wakes none: where all sleep nobody takes it, and where some are
     * busy elsewhere it may take them long to come. */
    if (atomic_load(&workers->part_count) > 0
        && (cm_workers_count_asleep_below(workers, few) >= few
            || ++group->rests % RESTS == 0)) {
        (void)cm_task_group_help(group);
        return;
    }
    if (thread_count < MANY_THREADS || group->tuning->spin_ns == 0) {
        if (!cm_task_group_help(group) && task != NULL) {
            cm_task_group_wait(group, task);
        }
        return;
    }
    for (int i = 0; i < REST_TURNS; i++) {
        cm_relax();
    }
}

void
cm_task_group_wait(cm_task_group *group, cm_copy_task *task)
{
    cm_workers *workers = group->workers;
    while (!cm_copy_task_is_done(task) && cm_task_group_help(group)) {
    }
    uint64_t spin_ns = group->tuning->wait_spin_ns;
    uint64_t begin_ns = cm_now_ns();
    while (!cm_copy_task_is_done(task) && cm_now_ns() - begin_ns < spin_ns) {
        cm_relax();
    }
    if (cm_copy_task_is_done(task)) {
        return;
    }
    cm_mutex_lock(&workers->sleep);
    atomic_fetch_add(&workers->waiter_count, 1);
    while (!atomic_load(&task->done)) {
        cm_cond_wait(&workers->done, &workers->sleep);
    }
    atomic_fetch_sub(&workers->waiter_count, 1);
    cm_mutex_unlock(&workers->sleep);
}
