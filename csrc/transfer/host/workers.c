/* SPDX-License-Identifier: Apache-2.0 */
/* First the threads and the parts that they take, then the task groups: posting,
 * helping and waiting, by the thread that posts. */
#include "transfer/host/workers.h"

#include <sched.h>

#include "base/fresh_pages.h"
#include "transfer/host/host_copy.h"

enum {
    LOCK_TRIES = 200, /* for the spin lock, before the processor is given up */
    MANY_THREADS = 4, /* so many do without the one that posts */
    REST_TURNS = 20,
    RESTS = 64, /* in vain, before the one that posted copies a part all the same */
};

#define POSTER UINT32_MAX /* in place of a thread's number */

static void
lock(cm_workers *workers)
{
    for (int tries = 0;
         atomic_flag_test_and_set_explicit(&workers->spin, memory_order_acquire);
         tries++) {
        if (tries < LOCK_TRIES) {
            cm_relax();
        }
        else {
            (void)sched_yield();
        }
    }
}

static void
unlock(cm_workers *workers)
{
    atomic_flag_clear_explicit(&workers->spin, memory_order_release);
}

/* Where threads do not get in each other's way: to make pages and to read files. */
static bool
is_for_all(const cm_copy_task *task)
{
    return task->way >= CM_COPY_PLAIN_ALL || task->run != NULL;
}

cm_status
cm_workers_init(cm_workers *workers)
{
    *workers = (cm_workers){.spin = ATOMIC_FLAG_INIT, .limit = UINT32_MAX};
    cm_list_init(&workers->groups);
    cm_short_task_init(&workers->short_task);
    CM_TRY(cm_mutex_init(&workers->sleep));
    uint32_t count = 0;
    cm_status status = cm_cond_init(&workers->done);
    if (!cm_is_ok(status)) {
        goto no_done;
    }
    for (; count < CM_WORKERS_MAX; count++) {
        status = cm_cond_init(&workers->wake[count]);
        if (!cm_is_ok(status)) {
            goto no_wake;
        }
    }
    return status;
no_wake:
    while (count > 0) {
        cm_cond_fini(&workers->wake[--count]);
    }
    cm_cond_fini(&workers->done);
no_done:
    cm_mutex_fini(&workers->sleep);
    return status;
}

/* The mutex is held. */
static void
signal_all(cm_workers *workers)
{
    for (uint32_t i = 0; i < CM_WORKERS_MAX; i++) {
        cm_cond_signal_one(&workers->wake[i]);
    }
}

void
cm_workers_fini(cm_workers *workers)
{
    cm_mutex_lock(&workers->sleep);
    atomic_store(&workers->stop, true);
    signal_all(workers);
    cm_mutex_unlock(&workers->sleep);
    for (uint32_t i = 0; i < workers->thread_count; i++) {
        cm_thread_join(workers->threads[i]);
    }
    for (uint32_t i = 0; i < CM_WORKERS_MAX; i++) {
        cm_cond_fini(&workers->wake[i]);
    }
    cm_cond_fini(&workers->done);
    cm_mutex_fini(&workers->sleep);
}

void
cm_workers_set_limit(cm_workers *workers, uint32_t limit)
{
    cm_mutex_lock(&workers->sleep);
    lock(workers);
    atomic_store(&workers->limit, limit);
    unlock(workers);
    signal_all(workers);
    cm_mutex_unlock(&workers->sleep);
}

/* -- parts ------------------------------------------------------------------------------ */

/* The spin lock is held: the task has parts to take from now on. */
static void
begin_parts(cm_workers *workers, const cm_copy_task *task)
{
    workers->open_counts[task->limit]++;
    if (atomic_load(&workers->reach) < task->limit) {
        atomic_store(&workers->reach, task->limit);
    }
    atomic_fetch_add(&workers->part_count, 1);
    atomic_fetch_add(&workers->shared_part_count, is_for_all(task));
}

/* The spin lock is held: all parts of the task are taken. */
static void
end_parts(cm_workers *workers, const cm_copy_task *task)
{
    uint32_t reach = atomic_load(&workers->reach);
    workers->open_counts[task->limit]--;
    while (reach > 0 && workers->open_counts[reach] == 0) {
        reach--;
    }
    atomic_store(&workers->reach, reach);
    atomic_fetch_sub(&workers->part_count, 1);
    atomic_fetch_sub(&workers->shared_part_count, is_for_all(task));
}

/* The next part of the group's oldest task that has one for a thread of that number, or
 * for whoever posted it (POSTER); NULL: none. The spin lock is held. */
static cm_copy_task *
take_part(cm_task_group *group, uint32_t number, cm_layout *part)
{
    for (cm_list *n = group->tasks.next; n != &group->tasks; n = n->next) {
        cm_copy_task *task = CM_LIST_ENTRY(n, cm_copy_task, node);
        bool fits = number == POSTER || number < task->limit;
        if (fits && cm_cut_next(&task->cut, part)) {
            task->running_count++;
            if (task->cut.done) {
                end_parts(group->workers, task);
            }
            return task;
        }
    }
    return NULL;
}

/* A part that was taken is over: the task may be gone. */
static void
end_part(cm_workers *workers, cm_copy_task *task)
{
    lock(workers);
    task->running_count--;
    bool ends = task->running_count == 0 && task->cut.done;
    if (ends) {
        cm_list_remove(&task->node);
        atomic_store(&task->done, true); /* from here on the task may be gone */
    }
    unlock(workers);
    if (ends && atomic_load(&workers->waiter_count) > 0) {
        cm_mutex_lock(&workers->sleep);
        cm_cond_signal_all(&workers->done);
        cm_mutex_unlock(&workers->sleep);
    }
}

static void
copy_part(const cm_copy_task *task, const cm_layout *part)
{
    if (task->run != NULL) {
        task->run(task->argument, (uint64_t)part->dst_offset, part->run_nbytes);
    }
    else if (task->move != NULL) {
        task->move(task->context, part, task->dst, task->src,
                   task->way == CM_COPY_WIDE || task->way == CM_COPY_WIDE_ALL);
    }
    else if (task->way == CM_COPY_WIDE || task->way == CM_COPY_WIDE_ALL) {
        cm_host_copy_wide(part, task->dst, task->src);
    }
    else {
        cm_host_copy(part, task->dst, task->src);
    }
}

static uint32_t
mask_below(uint32_t end)
{
    return (UINT32_C(1) << (end < CM_WORKERS_MAX ? end : CM_WORKERS_MAX)) - 1;
}

/* Of those below number `end` that sleep, at most `count`. */
static void
wake_below(cm_workers *workers, uint32_t end, uint32_t count)
{
    uint32_t able = mask_below(end);
    if ((atomic_load(&workers->asleep) & able) == 0) {
        return;
    }
    cm_mutex_lock(&workers->sleep);
    uint32_t found = atomic_load(&workers->asleep) & able;
    uint32_t chosen = 0;
    for (; count > 0 && chosen != found; count--) {
        uint32_t rest = found & ~chosen;
        chosen |= rest & (~rest + 1);
    }
    atomic_fetch_and(&workers->asleep, ~chosen); /* the next waker takes another
                                                  */
    cm_mutex_unlock(&workers->sleep); /* which the woken thread needs at once */
    for (uint32_t i = 0; chosen >> i != 0; i++) {
        if (chosen >> i & 1) {
            cm_cond_signal_one(&workers->wake[i]);
        }
    }
}

/* Waking takes time: each thread that has found a part wakes the next. */
static void
wake_one(cm_workers *workers)
{
    uint32_t reach = atomic_load(&workers->reach);
    uint32_t limit = atomic_load(&workers->limit);
    wake_below(workers, reach < limit ? reach : limit,
               atomic_load(&workers->shared_part_count) > 0 ? CM_WORKERS_MAX : 1);
}

/* -- threads ---------------------------------------------------------------------------- */

/* A thread that finds the lock taken looks again whether anything is left to take. */
static bool
try_lock(cm_workers *workers)
{
    while (atomic_flag_test_and_set_explicit(&workers->spin, memory_order_acquire)) {
        for (int i = 0; i < LOCK_TRIES / 8; i++) {
            cm_relax();
        }
        if (atomic_load(&workers->part_count) == 0) {
            return false;
        }
    }
    return true;
}

/* In turn: the group that is served goes to the end. Nothing for a thread that ought to
 * rest. */
static cm_copy_task *
take_any_part(cm_workers *workers, uint32_t number, cm_layout *part)
{
    cm_copy_task *task = NULL;
    if (!try_lock(workers)) {
        return NULL;
    }
    bool works = number < atomic_load(&workers->limit);
    for (cm_list *n = workers->groups.next;
         works && n != &workers->groups && task == NULL;) {
        cm_list *next = n->next;
        task = take_part(CM_LIST_ENTRY(n, cm_task_group, node), number, part);
        if (task != NULL) {
            cm_list_remove(n);
            cm_list_push_back(&workers->groups, n);
        }
        n = next;
    }
    unlock(workers);
    return task;
}

static bool
has_news(cm_workers *workers, uint32_t number)
{
    return number < atomic_load(&workers->reach) || atomic_load(&workers->stop)
           || cm_short_task_is_open(&workers->short_task, number);
}

/* More parts come soon as a rule, sooner than a sleeping thread is awake: also where
 * what a thread was woken for is over when it comes. */
static void
wait_for_news(cm_workers *workers, uint32_t number)
{
    uint64_t spin_ns = atomic_load(&workers->spin_ns);
    uint64_t begin_ns = cm_now_ns();
    while (!has_news(workers, number) && cm_now_ns() - begin_ns < spin_ns) {
        cm_relax();
    }
    if (has_news(workers, number)) {
        return;
    }
    uint32_t me = UINT32_C(1) << number;
    cm_mutex_lock(&workers->sleep);
    atomic_fetch_or(&workers->asleep, me);
    if (!has_news(workers, number)) {
        cm_cond_wait(&workers->wake[number], &workers->sleep);
    }
    atomic_fetch_and(&workers->asleep, ~me);
    cm_mutex_unlock(&workers->sleep);
}

/* There are enough others. */
static void
rest_thread(cm_workers *workers, uint32_t number)
{
    wake_one(workers); /* somebody may have woken this one for it */
    cm_mutex_lock(&workers->sleep);
    while (number >= atomic_load(&workers->limit) && !atomic_load(&workers->stop)) {
        cm_cond_wait(&workers->wake[number], &workers->sleep);
    }
    cm_mutex_unlock(&workers->sleep);
}

static void *
serve(void *argument)
{
    cm_workers *workers = argument;
    cm_layout part;
    uint32_t number = atomic_fetch_add(&workers->begun, 1);
    while (!atomic_load(&workers->stop)) {
        if (number >= atomic_load(&workers->limit)) {
            rest_thread(workers, number);
            continue;
        }
        cm_copy_task *task = NULL;
        if (cm_short_task_is_open(&workers->short_task, number)) {
            cm_workers_wake(workers);
            cm_short_task_join(&workers->short_task, number);
        }
        if (has_news(workers, number)) {
            task = take_any_part(workers, number, &part);
        }
        if (task == NULL) {
            wait_for_news(workers, number);
            continue;
        }
        wake_one(workers);
        copy_part(task, &part);
        end_part(workers, task);
    }
    return NULL;
}

/* As many as the group may have beside the thread that posts. One that cannot be
 * started is done without. */
static void
start_threads(cm_workers *workers, const cm_tuning *tuning, uint32_t limit)
{
    uint32_t most = atomic_load(&workers->limit);
    limit = limit < most ? limit : most;
    lock(workers);
    bool mine = !workers->starting && workers->thread_count < limit;
    workers->starting |= mine;
    unlock(workers);
    atomic_store(&workers->spin_ns, tuning->spin_ns);
    if (!mine) {
        return;
    }
    uint32_t count = workers->thread_count;
    while (count < limit
           && cm_is_ok(cm_thread_start(&workers->threads[count], serve, workers))) {
        count++;
    }
    lock(workers);
    workers->thread_count = count;
    workers->starting = false;
    unlock(workers);
}

uint32_t
cm_workers_muster(cm_workers *workers, const cm_tuning *tuning, uint32_t count)
{
    uint32_t most = (uint32_t)tuning->thread_count - 1;
    count = count < most ? count : most;
    if (atomic_load(&workers->thread_count) < count) {
        start_threads(workers, tuning, count);
    }
    uint32_t there = atomic_load(&workers->thread_count);
    return there < count ? there : count;
}

void
cm_workers_wake(cm_workers *workers)
{
    wake_below(workers, atomic_load(&workers->short_task.open), 2);
}

/* Of those below number `end`. */
static uint32_t
count_asleep_below(const cm_workers *workers, uint32_t end)
{
    return (uint32_t)__builtin_popcount(atomic_load(&workers->asleep)
                                        & mask_below(end));
}

uint32_t
cm_workers_count_asleep(const cm_workers *workers)
{
    return count_asleep_below(workers, CM_WORKERS_MAX);
}

/* -- task groups ------------------------------------------------------------------------ */

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
    lock(workers);
    cm_list_push_back(&workers->groups, &group->node);
    unlock(workers);
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
        lock(workers);
        empty = cm_list_is_empty(&group->tasks);
        unlock(workers);
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
    lock(workers);
    for (cm_list *n = group->tasks.next; n != &group->tasks;) {
        cm_copy_task *task = CM_LIST_ENTRY(n, cm_copy_task, node);
        n = n->next;
        if (!task->cut.done) {
            task->cut.done = true;
            end_parts(workers, task);
        }
        if (task->running_count == 0) {
            cm_list_remove(&task->node);
        }
    }
    bool empty = cm_list_is_empty(&group->tasks);
    unlock(workers);
    if (!empty) {
        wait_until_empty(group);
    }
    lock(workers);
    cm_list_remove(&group->node);
    unlock(workers);
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
    uint32_t wanted = is_for_all(task) ? all : few + group->more;
    task->limit = wanted < all ? wanted : all > few ? all : few;
    if (nbytes > least) {
        uint64_t parts = (nbytes + least - 1) / least;
        start_threads(workers, group->tuning,
                      parts < task->limit ? (uint32_t)parts : task->limit);
    }
    lock(workers);
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
    begin_parts(workers, task);
    unlock(workers);
    if (nbytes > part) {
        wake_one(workers);
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
    lock(group->workers);
    cm_copy_task *task = take_part(group, POSTER, &part);
    unlock(group->workers);
    if (task == NULL) {
        return false;
    }
    copy_part(task, &part);
    end_part(group->workers, task);
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
        && (count_asleep_below(workers, few) >= few || ++group->rests % RESTS == 0)) {
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
