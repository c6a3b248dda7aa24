/* SPDX-License-Identifier: Apache-2.0 */
/* First the parts, then the threads that take them, then the task groups: posting,
 * helping and waiting, by the thread that posts. */
#include "transfer/host/workers.h"

#include <sched.h>

#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "transfer/host/host_copy.h"

enum {
    MANY_THREADS = 4, /* so many do without the one that posts */
    WAKE_COUNT = 2,   /* waking takes time: each thread that is awake wakes others */
    REST_TURNS = 20,
    VAIN_TURNS = 2000, /* between two yields of a thread that finds no part */
    RESTS = 64, /* in vain, before the one that posted copies a part all the same */
    PART_EDGE = 4096,
};

/* Where threads do not get in each other's way: to make pages and to read files. */
static bool
is_for_all(const cm_copy_task *task)
{
    return task->way >= CM_COPY_PLAIN_ALL;
}

/* -- parts ------------------------------------------------------------------------------ */

/* Lock held, after a task was opened or closed. */
static void
find_reach(cm_workers *workers)
{
    uint32_t reach = 0;
    for (cm_list *n = workers->open.next; n != &workers->open; n = n->next) {
        uint32_t limit = CM_LIST_ENTRY(n, cm_copy_task, open_node)->limit;
        reach = limit > reach ? limit : reach;
    }
    atomic_store(&workers->reach, reach);
}

/* Behind what its group has posted, but not before what others have for long. */
static void
open_task(cm_workers *workers, cm_task_group *group, cm_copy_task *task)
{
    cm_list *open = &workers->open;
    cm_spin_lock_take(&workers->lock);
    cm_list *n = open->next;
    uint64_t turn = n == open ? 0 : CM_LIST_ENTRY(n, cm_copy_task, open_node)->turn;
    group->turn = group->turn + 1 > turn ? group->turn + 1 : turn;
    task->turn = group->turn;
    while (n != open && CM_LIST_ENTRY(n, cm_copy_task, open_node)->turn <= task->turn) {
        n = n->next;
    }
    cm_list_push_back(n, &task->open_node); /* before that one */
    atomic_fetch_add(&workers->ready, task->ready_count);
    find_reach(workers);
    cm_spin_lock_give(&workers->lock);
}

/* What is not taken counts as done. */
static void
close_task(cm_workers *workers, cm_copy_task *task)
{
    cm_spin_lock_take(&workers->lock);
    uint32_t left = task->part_count - task->next;
    atomic_fetch_sub(&workers->ready, task->ready_count - task->next);
    task->next = task->ready_count = task->part_count;
    cm_list_remove(&task->open_node);
    find_reach(workers);
    cm_spin_lock_give(&workers->lock);
    atomic_fetch_add(&task->done_count, left);
}

/* Of the task whose turn it is a part, for the thread of that number or (`group` not
 * NULL) the poster; NULL: there is none. */
static cm_copy_task *
take_part(cm_workers *workers, const cm_task_group *group, uint32_t number,
          uint32_t *part)
{
    cm_copy_task *found = NULL;
    if (atomic_load(&workers->ready) == 0) {
        return NULL;
    }
    cm_spin_lock_take(&workers->lock);
    for (cm_list *n = workers->open.next; n != &workers->open; n = n->next) {
        cm_copy_task *task = CM_LIST_ENTRY(n, cm_copy_task, open_node);
        bool fits = group == NULL ? number < task->limit : group == task->group;
        if (!fits || task->next == task->ready_count) {
            continue;
        }
        found = task;
        *part = task->next++;
        atomic_fetch_sub(&workers->ready, 1);
        if (task->next == task->part_count) {
            cm_list_remove(&task->open_node);
            find_reach(workers);
        }
        break;
    }
    cm_spin_lock_give(&workers->lock);
    return found;
}

/* A part that was taken. After the last one the task may be posted again, or gone. */
static void
copy_part(cm_workers *workers, cm_copy_task *task, uint32_t number)
{
    bool wide = task->way == CM_COPY_WIDE || task->way == CM_COPY_WIDE_ALL;
    uint32_t count = task->part_count;
    cm_layout part;
    cm_cut_piece(&task->cut, number, &part);
    if (task->move != NULL) {
        task->move(task->context, &part, task->dst, task->src, wide);
    }
    else {
        cm_host_copy(&part, task->dst, task->src, wide);
    }
    if (atomic_fetch_add(&task->done_count, 1) + 1 == count
        && atomic_load(&workers->waiter_count) > 0) {
        cm_mutex_lock(&workers->sleep);
        cm_cond_signal_all(&workers->done);
        cm_mutex_unlock(&workers->sleep);
    }
}

/* -- threads ---------------------------------------------------------------------------- */

static uint32_t
mask_below(uint32_t end)
{
    return (UINT32_C(1) << (end < CM_WORKERS_MAX ? end : CM_WORKERS_MAX)) - 1;
}

/* Of the threads below number `end` that sleep, at most `count`. */
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
    atomic_fetch_and(&workers->asleep, ~chosen); /* the next waker takes another */
    cm_mutex_unlock(&workers->sleep); /* which the woken thread needs at once */
    for (uint32_t i = 0; chosen >> i != 0; i++) {
        if (chosen >> i & 1) {
            cm_cond_signal_one(&workers->wake[i]);
        }
    }
}

/* Call for threads below number `end`: `count` are woken, and each wakes others before
 * it takes a part, which would otherwise lie there meanwhile. */
static void
call_threads(cm_workers *workers, uint32_t end, uint32_t count)
{
    atomic_store(&workers->called, end);
    wake_below(workers, end, count);
}

static bool
has_news(const cm_workers *workers, uint32_t number)
{
    return number < atomic_load(&workers->reach) || atomic_load(&workers->stop);
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
    wake_below(workers, atomic_load(&workers->called), WAKE_COUNT);
}

static void *
serve(void *argument)
{
    cm_workers *workers = argument;
    uint32_t number = atomic_fetch_add(&workers->begun, 1);
    uint32_t vain_count = 0;
    while (!atomic_load(&workers->stop)) {
        uint32_t part;
        cm_copy_task *task = take_part(workers, NULL, number, &part);
        if (task != NULL) {
            copy_part(workers, task, part);
            continue;
        }
        /* What is open may not be ready yet. */
        if (++vain_count % VAIN_TURNS == 0) {
            (void)sched_yield();
        }
        cm_relax();
        wait_for_news(workers, number);
    }
    return NULL;
}

/* As many as a task may have beside the thread that posts. One that cannot be started
 * is done without. */
static void
start_threads(cm_workers *workers, uint32_t wanted)
{
    if (atomic_load(&workers->thread_count) >= wanted
        || atomic_exchange(&workers->starting, true)) {
        return;
    }
    uint32_t count = atomic_load(&workers->thread_count);
    while (count < wanted
           && cm_is_ok(cm_thread_start(&workers->threads[count], serve, workers))) {
        count++;
    }
    atomic_store(&workers->thread_count, count);
    atomic_store(&workers->starting, false);
}

/* -- their beginning and end ------------------------------------------------------------ */

void
cm_workers_init(cm_workers *workers)
{
    *workers = (cm_workers){.stop = false};
    cm_spin_lock_init(&workers->lock);
    cm_list_init(&workers->open);
    cm_mutex_init(&workers->sleep);
    cm_cond_init(&workers->done);
    for (uint32_t i = 0; i < CM_WORKERS_MAX; i++) {
        cm_cond_init(&workers->wake[i]);
    }
}

void
cm_workers_fini(cm_workers *workers)
{
    cm_mutex_lock(&workers->sleep);
    atomic_store(&workers->stop, true);
    for (uint32_t i = 0; i < CM_WORKERS_MAX; i++) {
        cm_cond_signal_one(&workers->wake[i]);
    }
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

/* -- task groups ------------------------------------------------------------------------ */

void
cm_task_group_open(cm_task_group *group, cm_workers *workers, const cm_tuning *tuning)
{
    *group = (cm_task_group){.workers = workers, .tuning = tuning};
    cm_list_init(&group->tasks);
}

/* It is a matter of one part, as a rule sooner over than a sleep. */
static void
wait_until_done(const cm_task_group *group, const cm_copy_task *task)
{
    cm_workers *workers = group->workers;
    uint64_t begin_ns = cm_now_ns();
    while (!cm_copy_task_is_done(task)
           && cm_now_ns() - begin_ns < group->tuning->wait_spin_ns) {
        cm_relax();
    }
    if (cm_copy_task_is_done(task)) {
        return;
    }
    cm_mutex_lock(&workers->sleep);
    atomic_fetch_add(&workers->waiter_count, 1);
    while (!cm_copy_task_is_done(task)) {
        cm_cond_wait(&workers->done, &workers->sleep);
    }
    atomic_fetch_sub(&workers->waiter_count, 1);
    cm_mutex_unlock(&workers->sleep);
}

void
cm_task_group_close(cm_task_group *group)
{
    for (cm_list *n = group->tasks.next; n != &group->tasks; n = n->next) {
        close_task(group->workers, CM_LIST_ENTRY(n, cm_copy_task, node));
    }
    cm_list *n;
    while ((n = cm_list_pop_front(&group->tasks)) != NULL) {
        wait_until_done(group, CM_LIST_ENTRY(n, cm_copy_task, node));
    }
}

/* Threads that may take parts of it, and the parts that it is cut into. */
static void
cut_task(const cm_task_group *group, cm_copy_task *task, uint64_t nbytes)
{
    const cm_tuning *tuning = group->tuning;
    uint64_t least = tuning->part_min_nbytes;
    uint64_t longest = tuning->part_max_nbytes;
    uint32_t few = (uint32_t)tuning->thread_count - 1;
    uint32_t all = (uint32_t)tuning->fresh_thread_count - 1;
    uint32_t wanted = is_for_all(task) ? all : few + group->more;
    task->limit = wanted < all ? wanted : all > few ? all : few;
    if (nbytes > least) {
        uint64_t parts = (nbytes + least - 1) / least;
        start_threads(group->workers,
                      parts < task->limit ? (uint32_t)parts : task->limit);
    }
    uint32_t there = atomic_load(&group->workers->thread_count);
    uint64_t part = nbytes / ((there < few ? there : few) + 1);
    part = part < least ? least : part > longest ? longest : part;
    part = cm_round_up_to(part, PART_EDGE);
    if (task->way == CM_COPY_FRESH) {
        part = CM_HUGE_PAGE_NBYTES;
    }
    cm_cut_init(&task->cut, &task->whole,
                group->part_nbytes != 0 ? group->part_nbytes : part);
    if (task->way == CM_COPY_FRESH) {
        cm_cut_align(&task->cut, (char *)task->dst + task->whole.offset[CM_DST],
                     CM_HUGE_PAGE_NBYTES);
    }
    task->part_count = (uint32_t)cm_cut_count(&task->cut);
    task->ready_count = group->is_early ? 0 : task->part_count;
}

void
cm_task_group_post(cm_task_group *group, cm_copy_task *task, const cm_layout *layout,
                   void *dst, const void *src, cm_copy_way way)
{
    cm_workers *workers = group->workers;
    uint64_t nbytes = cm_layout_nbytes(layout);
    if (task->node.next != NULL) {
        cm_list_remove(&task->node);
    }
    cm_list_push_back(&group->tasks, &task->node);
    cm_list_init(&task->open_node);
    atomic_store(&task->done_count, 0);
    task->next = task->part_count = task->ready_count = 0;
    task->whole = *layout;
    task->dst = dst;
    task->src = src;
    task->way = way;
    task->move = group->move;
    task->context = group->context;
    task->group = group;
    if (nbytes == 0) {
        return;
    }
    if (atomic_load(&workers->spin_ns) != group->tuning->spin_ns) {
        atomic_store(&workers->spin_ns, group->tuning->spin_ns);
    }
    cut_task(group, task, nbytes);
    bool wakes = task->part_count > 1 && !group->lets_sleep;
    open_task(workers, group, task);
    if (wakes) {
        call_threads(workers, task->limit,
                     is_for_all(task) ? CM_WORKERS_MAX : WAKE_COUNT);
    }
}

void
cm_task_group_set_ready(cm_task_group *group, cm_copy_task *task, uint64_t nbytes)
{
    cm_workers *workers = group->workers;
    bool is_all = nbytes >= task->whole.run_nbytes;
    uint32_t ready =
        is_all ? task->part_count : (uint32_t)(nbytes / (uint64_t)task->cut.step);
    cm_spin_lock_take(&workers->lock);
    atomic_fetch_add(&workers->ready, ready - task->ready_count);
    task->ready_count = ready;
    cm_spin_lock_give(&workers->lock);
}

void
cm_task_group_wake(cm_task_group *group)
{
    call_threads(group->workers, (uint32_t)group->tuning->thread_count - 1, WAKE_COUNT);
}

bool
cm_task_group_help(cm_task_group *group)
{
    uint32_t part;
    cm_copy_task *task = take_part(group->workers, group, 0, &part);
    if (task != NULL) {
        copy_part(group->workers, task, part);
    }
    return task != NULL;
}

/* Is a part of the group to be taken, and no other thread likely to take it soon? */
static bool
is_needed(cm_task_group *group, uint32_t few)
{
    const cm_workers *workers = group->workers;
    uint32_t asleep = atomic_load(&workers->asleep) & mask_below(few);
    return (uint32_t)__builtin_popcount(asleep) >= few || ++group->rests % RESTS == 0;
}

void
cm_task_group_rest(cm_task_group *group, cm_copy_task *task)
{
    cm_workers *workers = group->workers;
    uint32_t thread_count = atomic_load(&workers->thread_count);
    uint32_t few = (uint32_t)group->tuning->thread_count - 1;
    few = thread_count < few ? thread_count : few;
    /* A single part wakes none: where all sleep nobody takes it, and where some are
     * busy elsewhere it may take them long to come. */
    if (is_needed(group, few) && cm_task_group_help(group)) {
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
    while (!cm_copy_task_is_done(task) && cm_task_group_help(group)) {
    }
    wait_until_done(group, task);
}
