/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/crew_private.h"
#include "transfer/host_copy.h"

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
    cm_crew_lock(crew);
    atomic_store(&crew->limit, limit);
    cm_crew_unlock(crew);
    signal_all(crew);
    cm_mutex_unlock(&crew->sleep);
}

/* -- parts ------------------------------------------------------------------------------ */

void
cm_crew_begin_parts(cm_crew *crew, const cm_load *load)
{
    crew->open_counts[load->limit]++;
    if (atomic_load(&crew->reach) < load->limit) {
        atomic_store(&crew->reach, load->limit);
    }
    atomic_fetch_add(&crew->part_count, 1);
    atomic_fetch_add(&crew->shared_part_count, cm_load_is_for_all(load));
}

void
cm_crew_end_parts(cm_crew *crew, const cm_load *load)
{
    uint32_t reach = atomic_load(&crew->reach);
    crew->open_counts[load->limit]--;
    while (reach > 0 && crew->open_counts[reach] == 0) {
        reach--;
    }
    atomic_store(&crew->reach, reach);
    atomic_fetch_sub(&crew->part_count, 1);
    atomic_fetch_sub(&crew->shared_part_count, cm_load_is_for_all(load));
}

cm_load *
cm_crew_take_part(cm_gang *gang, uint32_t number, cm_layout *part)
{
    for (cm_list *n = gang->loads.next; n != &gang->loads; n = n->next) {
        cm_load *load = CM_LIST_ENTRY(n, cm_load, node);
        bool fits = number == CM_CREW_POSTER || number < load->limit;
        if (fits && cm_cut_next(&load->cut, part)) {
            load->running_count++;
            if (load->cut.done) {
                cm_crew_end_parts(gang->crew, load);
            }
            return load;
        }
    }
    return NULL;
}

void
cm_crew_end_part(cm_crew *crew, cm_load *load)
{
    cm_crew_lock(crew);
    load->running_count--;
    bool ends = load->running_count == 0 && load->cut.done;
    if (ends) {
        cm_list_remove(&load->node);
        atomic_store(&load->done, true); /* from here on the load may be gone */
    }
    cm_crew_unlock(crew);
    if (ends && atomic_load(&crew->waiter_count) > 0) {
        cm_mutex_lock(&crew->sleep);
        cm_cond_signal_all(&crew->done);
        cm_mutex_unlock(&crew->sleep);
    }
}

void
cm_crew_copy_part(const cm_load *load, const cm_layout *part)
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

void
cm_crew_wake_one(cm_crew *crew)
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
        for (int i = 0; i < CM_CREW_TRIES / 8; i++) {
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
        load = cm_crew_take_part(CM_LIST_ENTRY(n, cm_gang, node), number, part);
        if (load != NULL) {
            cm_list_remove(n);
            cm_list_push_back(&crew->gangs, n);
        }
        n = next;
    }
    cm_crew_unlock(crew);
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
    cm_crew_wake_one(crew); /* somebody may have woken this one for it */
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
            cm_brief_join(&crew->brief, number);
        }
        if (has_news(crew, number)) {
            load = take_any_part(crew, number, &part);
        }
        if (load == NULL) {
            wait_for_news(crew, number);
            continue;
        }
        cm_crew_wake_one(crew);
        cm_crew_copy_part(load, &part);
        cm_crew_end_part(crew, load);
    }
    return NULL;
}

void
cm_crew_start_threads(cm_crew *crew, const cm_tuning *tuning, uint32_t limit)
{
    uint32_t most = atomic_load(&crew->limit);
    limit = limit < most ? limit : most;
    cm_crew_lock(crew);
    bool mine = !crew->starting && crew->thread_count < limit;
    crew->starting |= mine;
    cm_crew_unlock(crew);
    atomic_store(&crew->spin_ns, tuning->spin_ns);
    if (!mine) {
        return;
    }
    uint32_t count = crew->thread_count;
    while (count < limit
           && cm_is_ok(cm_thread_start(&crew->threads[count], serve, crew))) {
        count++;
    }
    cm_crew_lock(crew);
    crew->thread_count = count;
    crew->starting = false;
    cm_crew_unlock(crew);
}

uint32_t
cm_crew_muster(cm_crew *crew, const cm_tuning *tuning, uint32_t count)
{
    uint32_t most = (uint32_t)tuning->thread_count - 1;
    count = count < most ? count : most;
    if (atomic_load(&crew->thread_count) < count) {
        cm_crew_start_threads(crew, tuning, count);
    }
    uint32_t there = atomic_load(&crew->thread_count);
    return there < count ? there : count;
}

void
cm_crew_wake(cm_crew *crew)
{
    wake_below(crew, atomic_load(&crew->brief.open), 2);
}

uint32_t
cm_crew_count_asleep_below(const cm_crew *crew, uint32_t end)
{
    return (uint32_t)__builtin_popcount(atomic_load(&crew->asleep) & mask_below(end));
}

uint32_t
cm_crew_count_asleep(const cm_crew *crew)
{
    return cm_crew_count_asleep_below(crew, CM_CREW_MAX);
}
