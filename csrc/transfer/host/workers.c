/* SPDX-License-Identifier: Apache-2.0 */
/* This file has first the functions that take and copy the parts of a task, then the
 * threads that call them, and then the task groups. The poster of a group, which is the
 * thread that runs the transfer, posts tasks, helps with their parts and waits for
 * them. workers.h explains the idea. */
#include "transfer/host/workers.h"

#include <sched.h>

#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "transfer/host/host_copy.h"

enum {
    MANY_THREADS = 4,  /* with this many threads the poster need not copy parts */
    WAKE_COUNT = 2,    /* how many threads a thread wakes at once; waking takes time, so
                          each woken thread wakes others in turn */
    REST_TURNS = 20,   /* how many rounds a poster spins when it has nothing to do */
    VAIN_TURNS = 2000, /* after so many rounds without a part a thread yields its
                          processor */
    PAUSES = 64,       /* after so many pauses the poster copies a part itself */
    PART_EDGE = 4096,
};

/* If a task has this as its next part, no part of it can be taken. */
#define CLOSED UINT32_MAX

/* True if every thread may help with the task, because threads do not get in each
 * other's way when they make pages or read files. */
static bool
is_for_all(const cm_copy_task *task)
{
    return task->way >= CM_COPY_PLAIN_ALL;
}

/* -- parts ------------------------------------------------------------------------------ */

/* Free the task's place: all parts are taken, so nobody needs to find it any more. */
static void
leave_place(cm_workers *workers, const cm_copy_task *task)
{
    if (task->place >= 0) {
        atomic_fetch_and(&workers->open, ~(UINT64_C(1) << task->place));
        atomic_store(&workers->places[task->place].task, NULL);
    }
}

/* Put the task into a free place. No part can be taken yet: cm_task_group_post() allows
 * that afterwards, when it stores the posting in task->next. */
static void
enter_place(cm_workers *workers, cm_copy_task *task, uint64_t turn)
{
    for (task->place = 0; task->place < CM_OPEN_TASKS_MAX; task->place++) {
        cm_task_place *place = &workers->places[task->place];
        cm_copy_task *nobody = NULL;
        if (atomic_compare_exchange_strong(&place->task, &nobody, task)) {
            atomic_store(&place->turn, turn);
            atomic_store(&place->limit, task->limit);
            atomic_fetch_or(&workers->open, UINT64_C(1) << task->place);
            return;
        }
    }
    task->place = -1; /* none is free, so the poster copies all of it */
}

/* Take the next part of the task, and store its number. Returns false if no part can be
 * taken now. */
static bool
take_part(cm_workers *workers, cm_copy_task *task, uint32_t *part)
{
    uint64_t next = atomic_load(&task->next);
    do {
        /* The count is read after `next`. If it belongs to a later posting, `next` has
         * changed by now, and the exchange below fails. */
        if ((uint32_t)next >= atomic_load(&task->ready_count)) {
            return false;
        }
    } while (!atomic_compare_exchange_weak(&task->next, &next, next + 1));
    *part = (uint32_t)next;
    if (*part + 1 == atomic_load(&task->part_count)) {
        leave_place(workers, task);
    }
    return true;
}

static void
wake_waiters(cm_workers *workers)
{
    if (atomic_load(&workers->waiter_count) > 0) {
        cm_mutex_lock(&workers->sleep);
        cm_cond_signal_all(&workers->done);
        cm_mutex_unlock(&workers->sleep);
    }
}

/* Copy a part that was taken. After the last one the task may be posted again. */
static void
copy_part(cm_workers *workers, cm_copy_task *task, uint32_t number)
{
    bool wide = task->way == CM_COPY_WIDE || task->way == CM_COPY_WIDE_ALL;
    uint32_t count = atomic_load(&task->part_count);
    cm_layout part;
    cm_cut_piece(&task->cut, number, &part);
    if (task->move != NULL) {
        task->move(task->context, &part, task->dst, task->src, wide);
    }
    else {
        cm_host_copy(&part, task->dst, task->src, wide);
    }
    if (atomic_fetch_add(&task->done_count, 1) + 1 == count) {
        wake_waiters(workers);
    }
}

/* -- threads ---------------------------------------------------------------------------- */

static uint32_t
mask_below(uint32_t end)
{
    return (UINT32_C(1) << (end < CM_WORKERS_MAX ? end : CM_WORKERS_MAX)) - 1;
}

/* Wake at most `count` of the sleeping threads whose numbers are below `end`. */
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
        chosen |= rest & (~rest + 1); /* the lowest bit of the rest */
    }
    /* This lets the next waker choose other threads. */
    atomic_fetch_and(&workers->asleep, ~chosen);
    cm_mutex_unlock(&workers->sleep); /* before the signals, as a woken thread needs the
                                         mutex at once */
    for (uint32_t i = 0; chosen >> i != 0; i++) {
        if (chosen >> i & 1) {
            cm_cond_signal_one(&workers->wake[i]);
        }
    }
}

/* Call for the threads whose numbers are below `end`. This wakes only `count` of them.
 * Each woken thread wakes others before it takes a part. If it took the part first,
 * that part would have to wait until the others are woken. */
static void
call_threads(cm_workers *workers, uint32_t end, uint32_t count)
{
    atomic_store(&workers->called, end);
    wake_below(workers, end, count);
}

/* Return the highest limit of the tasks that have parts to take. A thread with a lower
 * number may take parts of at least one of them. */
static uint32_t
find_reach(const cm_workers *workers)
{
    uint32_t reach = 0;
    for (uint64_t left = atomic_load(&workers->open); left != 0; left &= left - 1) {
        uint32_t limit = atomic_load(&workers->places[__builtin_ctzll(left)].limit);
        reach = limit > reach ? limit : reach;
    }
    return reach;
}

/* `open` has a bit for each place to look at. Among the tasks in these places that
 * thread `number` may help with, find the one with the lowest turn, and return its
 * place. Returns -1 if there is none. */
static int
find_place(const cm_workers *workers, uint32_t number, uint64_t open)
{
    uint64_t first = UINT64_MAX;
    int found = -1;
    for (; open != 0; open &= open - 1) {
        int i = __builtin_ctzll(open);
        uint64_t turn = atomic_load(&workers->places[i].turn);
        if (number < atomic_load(&workers->places[i].limit) && turn < first) {
            first = turn;
            found = i;
        }
    }
    return found;
}

static void
leave_task(cm_workers *workers, uint32_t number)
{
    atomic_store(&workers->views[number].task, NULL);
    wake_waiters(workers);
}

/* Find a task and take a part of it. Returns NULL if no part can be taken. The view of
 * the thread names the task until the thread leaves it. */
static cm_copy_task *
enter_task(cm_workers *workers, uint32_t number, uint32_t *part)
{
    uint64_t open = atomic_load(&workers->open);
    int i;
    while ((i = find_place(workers, number, open)) >= 0) {
        cm_task_place *place = &workers->places[i];
        cm_copy_task *task = atomic_load(&place->task);
        atomic_store(&workers->views[number].task, task);
        if (task != NULL && atomic_load(&place->task) == task
            && take_part(workers, task, part)) {
            return task;
        }
        leave_task(workers, number);
        open &= ~(UINT64_C(1) << i);
    }
    return NULL;
}

static bool
has_news(const cm_workers *workers, uint32_t number)
{
    return number < find_reach(workers) || atomic_load(&workers->stop);
}

/* Wait for a part. The thread spins first, since more parts usually come sooner than a
 * sleeping thread would be awake. If a woken thread finds that other threads have taken
 * all parts already, it comes here again, and spins again before it sleeps. */
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
        cm_copy_task *task = enter_task(workers, number, &part);
        if (task == NULL) {
            /* A task may still be in its place although all its parts are taken. So
             * wait_for_news() can return at once again and again although there is no
             * part to take. */
            if (++vain_count % VAIN_TURNS == 0) {
                (void)sched_yield();
            }
            cm_relax();
            wait_for_news(workers, number);
            continue;
        }
        do {
            copy_part(workers, task, part);
        } while (take_part(workers, task, &part));
        leave_task(workers, number);
    }
    return NULL;
}

/* Start threads until there are `wanted` of them, not counting the poster. If a thread
 * cannot be started, the work is done without it. */
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

/* -- the beginning and the end of the threads ------------------------------------------- */

void
cm_workers_init(cm_workers *workers)
{
    *workers = (cm_workers){.open = 0};
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
}

/* -- task groups ------------------------------------------------------------------------ */

void
cm_task_group_open(cm_task_group *group, cm_workers *workers, const cm_tuning *tuning)
{
    *group = (cm_task_group){
        .workers = workers, .tuning = tuning, .spin_ns = tuning->spin_ns};
    cm_list_init(&group->tasks);
}

static bool
is_left(const cm_workers *workers, const cm_copy_task *task)
{
    for (uint32_t i = 0; i < CM_WORKERS_MAX; i++) {
        if (atomic_load(&workers->views[i].task) == task) {
            return false;
        }
    }
    return true;
}

static bool
is_over(const cm_workers *workers, const cm_copy_task *task, bool done)
{
    return done ? cm_copy_task_is_done(task) : is_left(workers, task);
}

/* If `done` is set, wait until the task is done. Otherwise wait until no thread looks
 * at it. As a rule only one part is left, which takes less time than it takes to sleep
 * and wake, so this spins first. */
static void
wait_until(const cm_task_group *group, const cm_copy_task *task, bool done)
{
    cm_workers *workers = group->workers;
    uint64_t begin_ns = cm_now_ns();
    while (!is_over(workers, task, done)
           && cm_now_ns() - begin_ns < group->tuning->wait_spin_ns) {
        cm_relax();
    }
    if (is_over(workers, task, done)) {
        return;
    }
    cm_mutex_lock(&workers->sleep);
    atomic_fetch_add(&workers->waiter_count, 1);
    while (!is_over(workers, task, done)) {
        cm_cond_wait(&workers->done, &workers->sleep);
    }
    atomic_fetch_sub(&workers->waiter_count, 1);
    cm_mutex_unlock(&workers->sleep);
}

void
cm_task_group_close(cm_task_group *group)
{
    cm_workers *workers = group->workers;
    for (cm_list *n = group->tasks.next; n != &group->tasks; n = n->next) {
        cm_copy_task *task = CM_LIST_ENTRY(n, cm_copy_task, node);
        uint64_t next = atomic_fetch_or(&task->next, CLOSED);
        if ((uint32_t)next < atomic_load(&task->part_count)) {
            leave_place(workers, task);
        }
    }
    cm_list *n;
    while ((n = cm_list_pop_front(&group->tasks)) != NULL) {
        wait_until(group, CM_LIST_ENTRY(n, cm_copy_task, node), false);
    }
}

/* Decide which threads may take parts of the task, and cut it into parts. */
static void
cut_task(const cm_task_group *group, cm_copy_task *task, uint64_t nbytes)
{
    const cm_tuning *tuning = group->tuning;
    uint64_t least = tuning->part_min_nbytes;
    uint64_t longest = tuning->part_max_nbytes;
    uint32_t few = (uint32_t)tuning->thread_count - 1;
    uint32_t all = (uint32_t)tuning->fresh_thread_count - 1;
    uint32_t most = is_for_all(task) ? all : (uint32_t)tuning->links_thread_count - 1;
    task->limit = is_for_all(task) ? all : few + group->more;
    /* `most` is the most threads that the tuning allows for a task of this kind. It may
     * be less than `few`, and the limit is then `few`. */
    if (task->limit >= most) {
        task->limit = most > few ? most : few;
    }
    if (group->crew > 0 && group->crew - 1 < task->limit) {
        task->limit = group->crew - 1;
    }
    if (nbytes > least) {
        uint64_t parts = (nbytes + least - 1) / least;
        start_threads(group->workers,
                      parts < task->limit ? (uint32_t)parts : task->limit);
    }
    uint32_t there = atomic_load(&group->workers->thread_count);
    uint64_t part = nbytes / ((there < few ? there : few) + 1);
    if (part < least) {
        part = least;
    }
    else if (part > longest) {
        part = longest;
    }
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
    uint32_t count = (uint32_t)cm_cut_count(&task->cut);
    atomic_store(&task->part_count, count);
    atomic_store(&task->ready_count, group->is_early ? 0 : count);
}

void
cm_task_group_post(cm_task_group *group, cm_copy_task *task, const cm_layout *layout,
                   void *dst, const void *src, cm_copy_way way)
{
    cm_workers *workers = group->workers;
    uint64_t nbytes = cm_layout_nbytes(layout);
    uint64_t posting = (uint64_t)++group->post_count << 32;
    if (task->node.next != NULL) {
        cm_list_remove(&task->node);
    }
    cm_list_push_back(&group->tasks, &task->node);
    atomic_store(&task->next, posting | CLOSED);
    atomic_store(&task->done_count, 0);
    atomic_store(&task->part_count, 0);
    atomic_store(&task->ready_count, 0);
    task->whole = *layout;
    task->dst = dst;
    task->src = src;
    task->way = way;
    task->move = group->move;
    task->context = group->context;
    if (nbytes == 0) {
        return;
    }
    if (atomic_load(&workers->spin_ns) != group->spin_ns) {
        atomic_store(&workers->spin_ns, group->spin_ns);
    }
    cut_task(group, task, nbytes);
    bool is_shared = atomic_load(&task->part_count) > 1 || group->crew > 1;
    /* The turn of the task is higher than the turns of all tasks that the group posted
     * before. If the group has been idle, its last turn is far behind, and its tasks
     * would be served before those of all other groups for a long time. So the turn is
     * at least the lowest turn of the tasks that have parts to take. */
    int first = find_place(workers, 0, atomic_load(&workers->open));
    uint64_t turn = first < 0 ? 0 : atomic_load(&workers->places[first].turn);
    group->turn = group->turn + 1 > turn ? group->turn + 1 : turn;
    enter_place(workers, task, group->turn);
    atomic_store(&task->next, posting); /* from here on parts can be taken */
    if (is_shared && !group->lets_sleep) {
        call_threads(workers, task->limit,
                     is_for_all(task) ? CM_WORKERS_MAX : WAKE_COUNT);
    }
}

void
cm_task_group_wake(cm_task_group *group)
{
    call_threads(group->workers, (uint32_t)group->tuning->thread_count - 1, WAKE_COUNT);
}

bool
cm_task_group_help(cm_task_group *group)
{
    for (cm_list *n = group->tasks.next; n != &group->tasks; n = n->next) {
        cm_copy_task *task = CM_LIST_ENTRY(n, cm_copy_task, node);
        uint32_t part;
        if (take_part(group->workers, task, &part)) {
            copy_part(group->workers, task, part);
            return true;
        }
    }
    return false;
}

void
cm_task_group_pause(cm_task_group *group, cm_copy_task *task)
{
    cm_workers *workers = group->workers;
    uint32_t thread_count = atomic_load(&workers->thread_count);
    uint32_t few = (uint32_t)group->tuning->thread_count - 1;
    few = thread_count < few ? thread_count : few;
    /* A task of a single part wakes no thread. If all threads sleep, nobody takes the
     * part, and if some threads are busy with other tasks, it may be long until they
     * come. So the poster helps if all sleep, and otherwise at every PAUSES-th
     * pause. */
    uint32_t asleep = atomic_load(&workers->asleep) & mask_below(few);
    bool all_sleep = (uint32_t)__builtin_popcount(asleep) >= few;
    if ((all_sleep || ++group->pauses % PAUSES == 0) && cm_task_group_help(group)) {
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
    wait_until(group, task, true);
}
