/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/crew.h"

#include <sched.h>

#include "base/fresh_pages.h"
#include "transfer/host_copy.h"

enum {
    TRIES = 200,      /* for the spin lock, before the processor is given up */
    MANY_THREADS = 4, /* so many do without the one that posts */
    REST_TURNS = 20,
    RESTS = 64, /* in vain, before the one that posted copies a part all the same */
};

#define POSTER UINT32_MAX /* in place of a thread's number */

static void
lock(cm_crew *crew)
{
    for (int tries = 0;
         atomic_flag_test_and_set_explicit(&crew->spin, memory_order_acquire);
         tries++) {
        if (tries < TRIES) {
            cm_relax();
        }
        else {
            (void)sched_yield();
        }
    }
}

static void
unlock(cm_crew *crew)
{
    atomic_flag_clear_explicit(&crew->spin, memory_order_release);
}

cm_status
cm_crew_init(cm_crew *crew)
{
    *crew = (cm_crew){.spin = ATOMIC_FLAG_INIT, .limit = UINT32_MAX};
    cm_list_init(&crew->gangs);
    cm_brief_init(&crew->brief);
    CM_TRY(cm_mutex_init(&crew->sleep));
    uint32_t count = 0;
    cm_status status = cm_cond_init(&crew->done);
    if (!cm_is_ok(status)) {
        goto no_done;
    }
    for (; count < CM_CREW_MAX; count++) {
        status = cm_cond_init(&crew->wake[count]);
        if (!cm_is_ok(status)) {
            goto no_wake;
        }
    }
    return status;
no_wake:
    while (count > 0) {
        cm_cond_fini(&crew->wake[--count]);
    }
    cm_cond_fini(&crew->done);
no_done:
    cm_mutex_fini(&crew->sleep);
    return status;
}

/* The mutex is held. */
static void
signal_all(cm_crew *crew)
{
    for (uint32_t i = 0; i < CM_CREW_MAX; i++) {
        cm_cond_signal_one(&crew->wake[i]);
    }
}

void
cm_crew_fini(cm_crew *crew)
{
    cm_mutex_lock(&crew->sleep);
    atomic_store(&crew->stop, true);
    signal_all(crew);
    cm_mutex_unlock(&crew->sleep);
    for (uint32_t i = 0; i < crew->thread_count; i++) {
        cm_thread_join(crew->threads[i]);
    }
    for (uint32_t i = 0; i < CM_CREW_MAX; i++) {
        cm_cond_fini(&crew->wake[i]);
    }
    cm_cond_fini(&crew->done);
    cm_mutex_fini(&crew->sleep);
}

void
cm_crew_set_limit(cm_crew *crew, uint32_t limit)
{
    cm_mutex_lock(&crew->sleep);
    lock(crew);
    atomic_store(&crew->limit, limit);
    unlock(crew);
    signal_all(crew);
    cm_mutex_unlock(&crew->sleep);
}

/* -- parts ------------------------------------------------------------------------------ */

/* Where threads do not get in each other's way: to make pages and to read files. */
static bool
is_for_all(const cm_load *load)
{
    return load->way >= CM_COPY_PLAIN_ALL || load->run != NULL;
}

/* The spin lock is held, here and in the next. */
static void
begin_parts(cm_crew *crew, const cm_load *load)
{
    crew->open_counts[load->limit]++;
    if (atomic_load(&crew->reach) < load->limit) {
        atomic_store(&crew->reach, load->limit);
    }
    atomic_fetch_add(&crew->part_count, 1);
    atomic_fetch_add(&crew->shared_part_count, is_for_all(load));
}

static void
end_parts(cm_crew *crew, const cm_load *load)
{
    uint32_t reach = atomic_load(&crew->reach);
    crew->open_counts[load->limit]--;
    while (reach > 0 && crew->open_counts[reach] == 0) {
        reach--;
    }
    atomic_store(&crew->reach, reach);
    atomic_fetch_sub(&crew->part_count, 1);
    atomic_fetch_sub(&crew->shared_part_count, is_for_all(load));
}

/* The next part of the gang's oldest load that has one for a thread of that number, or
 * for whoever posted it. */
static cm_load *
take_part_locked(cm_gang *gang, uint32_t number, cm_layout *part)
{
    for (cm_list *n = gang->loads.next; n != &gang->loads; n = n->next) {
        cm_load *load = CM_LIST_ENTRY(n, cm_load, node);
        bool fits = number == POSTER || number < load->limit;
        if (fits && cm_cut_next(&load->cut, part)) {
            load->running_count++;
            if (load->cut.done) {
                end_parts(gang->crew, load);
            }
            return load;
        }
    }
    return NULL;
}

static void
end_part(cm_crew *crew, cm_load *load)
{
    lock(crew);
    load->running_count--;
    bool ends = load->running_count == 0 && load->cut.done;
    if (ends) {
        cm_list_remove(&load->node);
        atomic_store(&load->done, true); /* from here on the load may be gone */
    }
    unlock(crew);
    if (ends && atomic_load(&crew->waiter_count) > 0) {
        cm_mutex_lock(&crew->sleep);
        cm_cond_signal_all(&crew->done);
        cm_mutex_unlock(&crew->sleep);
    }
}

static void
copy_part(const cm_load *load, const cm_layout *part)
{
    if (load->run != NULL) {
        load->run(load->argument, (uint64_t)part->dst_offset, part->run_nbytes);
    }
    else if (load->move != NULL) {
        load->move(load->context, part, load->dst, load->src,
                   load->way == CM_COPY_WIDE || load->way == CM_COPY_WIDE_ALL);
    }
    else if (load->way == CM_COPY_WIDE || load->way == CM_COPY_WIDE_ALL) {
        cm_host_copy_wide(part, load->dst, load->src);
    }
    else {
        cm_host_copy(part, load->dst, load->src);
    }
}

static uint32_t
mask_below(uint32_t end)
{
    return (UINT32_C(1) << (end < CM_CREW_MAX ? end : CM_CREW_MAX)) - 1;
}

/* Of those below number `end` that sleep, at most `count`. */
static void
wake_below(cm_crew *crew, uint32_t end, uint32_t count)
{
    uint32_t able = mask_below(end);
    if ((atomic_load(&crew->asleep) & able) == 0) {
        return;
    }
    cm_mutex_lock(&crew->sleep);
    uint32_t found = atomic_load(&crew->asleep) & able;
    uint32_t chosen = 0;
    for (; count > 0 && chosen != found; count--) {
        uint32_t rest = found & ~chosen;
        chosen |= rest & (~rest + 1);
    }
    atomic_fetch_and(&crew->asleep, ~chosen); /* the next who wakes one takes another */
    cm_mutex_unlock(&crew->sleep);            /* which who is woken needs at once */
    for (uint32_t i = 0; chosen >> i != 0; i++) {
        if (chosen >> i & 1) {
            cm_cond_signal_one(&crew->wake[i]);
        }
    }
}

/* Waking takes time: each who has found a part wakes the next. */
static void
wake_one(cm_crew *crew)
{
    uint32_t reach = atomic_load(&crew->reach);
    uint32_t limit = atomic_load(&crew->limit);
    wake_below(crew, reach < limit ? reach : limit,
               atomic_load(&crew->shared_part_count) > 0 ? CM_CREW_MAX : 1);
}

/* -- threads ---------------------------------------------------------------------------- */

/* Who finds the lock taken looks again whether there still is something to take. */
static bool
try_lock(cm_crew *crew)
{
    while (atomic_flag_test_and_set_explicit(&crew->spin, memory_order_acquire)) {
        for (int i = 0; i < TRIES / 8; i++) {
            cm_relax();
        }
        if (atomic_load(&crew->part_count) == 0) {
            return false;
        }
    }
    return true;
}

/* In turn: the gang that is served goes to the end. Nothing for a thread that ought to
 * rest. */
static cm_load *
take_any_part(cm_crew *crew, uint32_t number, cm_layout *part)
{
    cm_load *load = NULL;
    if (!try_lock(crew)) {
        return NULL;
    }
    bool works = number < atomic_load(&crew->limit);
    for (cm_list *n = crew->gangs.next; works && n != &crew->gangs && load == NULL;) {
        cm_list *next = n->next;
        load = take_part_locked(CM_LIST_ENTRY(n, cm_gang, node), number, part);
        if (load != NULL) {
            cm_list_remove(n);
            cm_list_push_back(&crew->gangs, n);
        }
        n = next;
    }
    unlock(crew);
    return load;
}

static bool
has_news(cm_crew *crew, uint32_t number)
{
    return number < atomic_load(&crew->reach) || atomic_load(&crew->stop)
           || cm_brief_is_open(&crew->brief, number);
}

/* More parts come soon as a rule, sooner than a sleeping thread is awake: also where
 * what a thread was woken for is over when it comes. */
static void
wait_for_news(cm_crew *crew, uint32_t number)
{
    uint64_t spin_ns = atomic_load(&crew->spin_ns);
    uint64_t begin_ns = cm_now_ns();
    while (!has_news(crew, number) && cm_now_ns() - begin_ns < spin_ns) {
        cm_relax();
    }
    if (has_news(crew, number)) {
        return;
    }
    uint32_t me = UINT32_C(1) << number;
    cm_mutex_lock(&crew->sleep);
    atomic_fetch_or(&crew->asleep, me);
    if (!has_news(crew, number)) {
        cm_cond_wait(&crew->wake[number], &crew->sleep);
    }
    atomic_fetch_and(&crew->asleep, ~me);
    cm_mutex_unlock(&crew->sleep);
}

/* There are enough others. */
static void
rest(cm_crew *crew, uint32_t number)
{
    wake_one(crew); /* somebody may have woken this one for it */
    cm_mutex_lock(&crew->sleep);
    while (number >= atomic_load(&crew->limit) && !atomic_load(&crew->stop)) {
        cm_cond_wait(&crew->wake[number], &crew->sleep);
    }
    cm_mutex_unlock(&crew->sleep);
}

static void *
serve(void *argument)
{
    cm_crew *crew = argument;
    cm_layout part;
    uint32_t number = atomic_fetch_add(&crew->begun, 1);
    while (!atomic_load(&crew->stop)) {
        if (number >= atomic_load(&crew->limit)) {
            rest(crew, number);
            continue;
        }
        cm_load *load = NULL;
        if (cm_brief_is_open(&crew->brief, number)) {
            cm_crew_wake(crew);
            (void)cm_brief_join(&crew->brief, number);
        }
        if (has_news(crew, number)) {
            load = take_any_part(crew, number, &part);
        }
        if (load == NULL) {
            wait_for_news(crew, number);
            continue;
        }
        wake_one(crew);
        copy_part(load, &part);
        end_part(crew, load);
    }
    return NULL;
}

/* As many as the gang may have beside the thread that posts. One that cannot be started
 * is done without. */
static void
start_threads(cm_crew *crew, const cm_tuning *tuning, uint32_t limit)
{
    uint32_t most = atomic_load(&crew->limit);
    limit = limit < most ? limit : most;
    lock(crew);
    bool mine = !crew->starting && crew->thread_count < limit;
    crew->starting |= mine;
    unlock(crew);
    atomic_store(&crew->spin_ns, tuning->spin_ns);
    if (!mine) {
        return;
    }
    uint32_t count = crew->thread_count;
    while (count < limit
           && cm_is_ok(cm_thread_start(&crew->threads[count], serve, crew))) {
        count++;
    }
    lock(crew);
    crew->thread_count = count;
    crew->starting = false;
    unlock(crew);
}

uint32_t
cm_crew_muster(cm_crew *crew, const cm_tuning *tuning, uint32_t count)
{
    uint32_t most = (uint32_t)tuning->thread_count - 1;
    count = count < most ? count : most;
    if (atomic_load(&crew->thread_count) < count) {
        start_threads(crew, tuning, count);
    }
    uint32_t there = atomic_load(&crew->thread_count);
    return there < count ? there : count;
}

void
cm_crew_wake(cm_crew *crew)
{
    wake_below(crew, atomic_load(&crew->brief.open), 2);
}

/* Of those below number `end`. */
static uint32_t
count_asleep(const cm_crew *crew, uint32_t end)
{
    return (uint32_t)__builtin_popcount(atomic_load(&crew->asleep) & mask_below(end));
}

uint32_t
cm_crew_count_asleep(const cm_crew *crew)
{
    return count_asleep(crew, CM_CREW_MAX);
}

/* -- gangs ------------------------------------------------------------------------------ */

void
cm_gang_open(cm_gang *gang, cm_crew *crew, const cm_tuning *tuning)
{
    gang->crew = crew;
    gang->tuning = tuning;
    gang->rests = 0;
    gang->more = 0;
    gang->move = NULL;
    gang->context = NULL;
    cm_list_init(&gang->loads);
    cm_list_init(&gang->node);
    lock(crew);
    cm_list_push_back(&crew->gangs, &gang->node);
    unlock(crew);
}

/* Sleep until no thread is at a load of the gang. */
static void
wait_until_empty(cm_gang *gang)
{
    cm_crew *crew = gang->crew;
    bool empty = false;
    cm_mutex_lock(&crew->sleep);
    atomic_fetch_add(&crew->waiter_count, 1);
    for (;;) {
        lock(crew);
        empty = cm_list_is_empty(&gang->loads);
        unlock(crew);
        if (empty) {
            break;
        }
        cm_cond_wait(&crew->done, &crew->sleep);
    }
    atomic_fetch_sub(&crew->waiter_count, 1);
    cm_mutex_unlock(&crew->sleep);
}

void
cm_gang_close(cm_gang *gang)
{
    cm_crew *crew = gang->crew;
    lock(crew);
    for (cm_list *n = gang->loads.next; n != &gang->loads;) {
        cm_load *load = CM_LIST_ENTRY(n, cm_load, node);
        n = n->next;
        if (!load->cut.done) {
            load->cut.done = true;
            end_parts(crew, load);
        }
        if (load->running_count == 0) {
            cm_list_remove(&load->node);
        }
    }
    bool empty = cm_list_is_empty(&gang->loads);
    unlock(crew);
    if (!empty) {
        wait_until_empty(gang);
    }
    lock(crew);
    cm_list_remove(&gang->node);
    unlock(crew);
}

/* Parts of a load that is not a copy are of `part_nbytes`. */
static void
post(cm_gang *gang, cm_load *load, uint64_t nbytes, uint64_t part_nbytes)
{
    cm_crew *crew = gang->crew;
    uint64_t least = gang->tuning->part_min_nbytes;
    uint64_t longest = gang->tuning->part_max_nbytes;
    cm_list_init(&load->node);
    load->running_count = 0;
    atomic_init(&load->done, nbytes == 0);
    if (nbytes == 0) {
        return;
    }
    uint32_t few = (uint32_t)gang->tuning->thread_count - 1;
    uint32_t all = (uint32_t)gang->tuning->fresh_thread_count - 1;
    uint32_t wanted = is_for_all(load) ? all : few + gang->more;
    load->limit = wanted < all ? wanted : all > few ? all : few;
    if (nbytes > least) {
        uint64_t parts = (nbytes + least - 1) / least;
        start_threads(crew, gang->tuning,
                      parts < load->limit ? (uint32_t)parts : load->limit);
    }
    lock(crew);
    uint32_t there = atomic_load(&crew->thread_count);
    uint64_t part = nbytes / ((there < few ? there : few) + 1);
    part = part < least ? least : part > longest ? longest : part;
    if (load->way == CM_COPY_FRESH) {
        part = CM_HUGE_PAGE_NBYTES;
    }
    part = part_nbytes != 0 ? part_nbytes : part;
    cm_cut_init(&load->cut, &load->whole, part);
    if (load->way == CM_COPY_FRESH) {
        cm_cut_align(&load->cut, (char *)load->dst + load->whole.dst_offset,
                     CM_HUGE_PAGE_NBYTES);
    }
    cm_list_push_back(&gang->loads, &load->node);
    begin_parts(crew, load);
    unlock(crew);
    if (nbytes > part) {
        wake_one(crew);
    }
}

void
cm_gang_post(cm_gang *gang, cm_load *load, const cm_layout *layout, void *dst,
             const void *src, cm_copy_way way)
{
    load->whole = *layout;
    load->dst = dst;
    load->src = src;
    load->way = way;
    load->run = NULL;
    load->move = gang->move;
    load->context = gang->context;
    post(gang, load, cm_layout_nbytes(layout), 0);
}

void
cm_gang_post_work(cm_gang *gang, cm_load *load, uint64_t nbytes, uint64_t part_nbytes,
                  void (*run)(void *argument, uint64_t begin, uint64_t nbytes),
                  void *argument)
{
    load->whole = (cm_layout){.run_nbytes = nbytes};
    load->way = CM_COPY_PLAIN;
    load->move = NULL;
    load->run = run;
    load->argument = argument;
    post(gang, load, nbytes, part_nbytes);
}

bool
cm_gang_help(cm_gang *gang)
{
    cm_layout part;
    lock(gang->crew);
    cm_load *load = take_part_locked(gang, POSTER, &part);
    unlock(gang->crew);
    if (load == NULL) {
        return false;
    }
    copy_part(load, &part);
    end_part(gang->crew, load);
    return true;
}

void
cm_gang_rest(cm_gang *gang, cm_load *load)
{
    cm_crew *crew = gang->crew;
    uint32_t thread_count = atomic_load(&crew->thread_count);
    uint32_t few = (uint32_t)gang->tuning->thread_count - 1;
    uint32_t limit = atomic_load(&crew->limit);
    few = thread_count < few ? thread_count : few;
    few = limit < few ? limit : few;
    /* A single part wakes none: where all sleep nobody takes it, and where some are
     * busy elsewhere it may take them long to come. */
    if (atomic_load(&crew->part_count) > 0
        && (count_asleep(crew, few) >= few || ++gang->rests % RESTS == 0)) {
        (void)cm_gang_help(gang);
        return;
    }
    if (thread_count < MANY_THREADS || gang->tuning->spin_ns == 0) {
        if (!cm_gang_help(gang) && load != NULL) {
            cm_gang_wait(gang, load);
        }
        return;
    }
    for (int i = 0; i < REST_TURNS; i++) {
        cm_relax();
    }
}

void
cm_gang_wait(cm_gang *gang, cm_load *load)
{
    cm_crew *crew = gang->crew;
    while (!cm_load_is_done(load) && cm_gang_help(gang)) {
    }
    uint64_t spin_ns = gang->tuning->wait_spin_ns;
    uint64_t begin_ns = cm_now_ns();
    while (!cm_load_is_done(load) && cm_now_ns() - begin_ns < spin_ns) {
        cm_relax();
    }
    if (cm_load_is_done(load)) {
        return;
    }
    cm_mutex_lock(&crew->sleep);
    atomic_fetch_add(&crew->waiter_count, 1);
    while (!atomic_load(&load->done)) {
        cm_cond_wait(&crew->done, &crew->sleep);
    }
    atomic_fetch_sub(&crew->waiter_count, 1);
    cm_mutex_unlock(&crew->sleep);
}
