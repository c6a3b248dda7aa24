/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/crew.h"

#include <sched.h>

#include "base/cpu_count.h"
#include "transfer/host_copy.h"

enum {
    PART_MIN = 16 << 10,
    PART_MAX = 256 << 10,
    SPIN_NS = 50 * 1000,      /* about what waking a thread takes */
    WAIT_SPIN_NS = 200 * 1000 /* parts are short: who waits for the last ones spins */
};

static inline void
relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

cm_status
cm_crew_init(cm_crew *crew)
{
    cm_list_init(&crew->gangs);
    atomic_init(&crew->part_count, 0);
    atomic_init(&crew->stop, false);
    crew->limit = UINT32_MAX;
    crew->thread_count = 0;
    crew->idle_count = 0;
    crew->spin_ns = 0;
    CM_TRY(cm_mutex_init(&crew->lock));
    cm_status status = cm_cond_init(&crew->work);
    if (!cm_is_ok(status)) {
        goto no_work;
    }
    status = cm_cond_init(&crew->done);
    if (!cm_is_ok(status)) {
        goto no_done;
    }
    return status;
no_done:
    cm_cond_fini(&crew->work);
no_work:
    cm_mutex_fini(&crew->lock);
    return status;
}

void
cm_crew_fini(cm_crew *crew)
{
    cm_mutex_lock(&crew->lock);
    atomic_store(&crew->stop, true);
    cm_cond_signal_all(&crew->work);
    uint32_t count = crew->thread_count;
    cm_mutex_unlock(&crew->lock);
    for (uint32_t i = 0; i < count; i++) {
        cm_thread_join(crew->threads[i]);
    }
    cm_cond_fini(&crew->done);
    cm_cond_fini(&crew->work);
    cm_mutex_fini(&crew->lock);
}

/* -- parts ------------------------------------------------------------------------------ */

/* The next part of the gang's oldest load that has one. */
static cm_load *
take_part_locked(cm_gang *gang, cm_layout *part)
{
    for (cm_list *n = gang->loads.next; n != &gang->loads; n = n->next) {
        cm_load *load = CM_LIST_ENTRY(n, cm_load, node);
        if (cm_cut_next(&load->cut, part)) {
            load->running_count++;
            if (load->cut.done) {
                atomic_fetch_sub_explicit(&gang->crew->part_count, 1,
                                          memory_order_relaxed);
            }
            return load;
        }
    }
    return NULL;
}

static void
end_part_locked(cm_crew *crew, cm_load *load)
{
    load->running_count--;
    if (load->running_count == 0 && load->cut.done) {
        cm_list_remove(&load->node);
        atomic_store_explicit(&load->done, true, memory_order_release);
        cm_cond_signal_all(&crew->done); /* from here on the load may be gone */
    }
}

static void
copy_part(const cm_load *load, const cm_layout *part)
{
    if (load->wide) {
        cm_host_copy_wide(part, load->dst, load->src);
    }
    else {
        cm_host_copy(part, load->dst, load->src);
    }
}

/* -- threads ---------------------------------------------------------------------------- */

/* Waking takes time: each who has found a part wakes the next. */
static void
wake_one_locked(cm_crew *crew)
{
    if (crew->idle_count > 0
        && atomic_load_explicit(&crew->part_count, memory_order_relaxed) > 0) {
        cm_cond_signal_one(&crew->work);
    }
}

/* In turn: the gang that is served goes to the end. */
static cm_load *
take_any_part_locked(cm_crew *crew, cm_layout *part)
{
    for (cm_list *n = crew->gangs.next; n != &crew->gangs; n = n->next) {
        cm_load *load = take_part_locked(CM_LIST_ENTRY(n, cm_gang, node), part);
        if (load != NULL) {
            cm_list_remove(n);
            cm_list_push_back(&crew->gangs, n);
            return load;
        }
    }
    return NULL;
}

static bool
has_news(const cm_crew *crew)
{
    return atomic_load_explicit(&crew->part_count, memory_order_relaxed) > 0
           || atomic_load_explicit(&crew->stop, memory_order_relaxed);
}

/* More parts come soon as a rule, sooner than a sleeping thread is awake. */
static void
spin_for_news(const cm_crew *crew, uint64_t limit_ns)
{
    uint64_t begin_ns = cm_now_ns();
    while (!has_news(crew) && cm_now_ns() - begin_ns < limit_ns) {
        relax();
    }
}

static void *
serve(void *argument)
{
    cm_crew *crew = argument;
    cm_layout part;
    cm_mutex_lock(&crew->lock);
    while (!atomic_load(&crew->stop)) {
        cm_load *load = take_any_part_locked(crew, &part);
        if (load != NULL) {
            wake_one_locked(crew);
            cm_mutex_unlock(&crew->lock);
            copy_part(load, &part);
            cm_mutex_lock(&crew->lock);
            end_part_locked(crew, load);
            continue;
        }
        cm_mutex_unlock(&crew->lock);
        spin_for_news(crew, crew->spin_ns);
        cm_mutex_lock(&crew->lock);
        if (!has_news(crew)) {
            crew->idle_count++;
            cm_cond_wait(&crew->work, &crew->lock);
            crew->idle_count--;
        }
    }
    cm_mutex_unlock(&crew->lock);
    return NULL;
}

/* As many as the process may use beside the thread that posts. One that cannot be
 * started is done without. */
static void
start_threads_locked(cm_crew *crew, uint64_t nbytes)
{
    if (crew->limit == UINT32_MAX) {
        unsigned count = cm_usable_cpu_count(NULL);
        crew->limit = count - 1 < CM_CREW_MAX ? count - 1 : CM_CREW_MAX;
        crew->spin_ns = count > 2 ? SPIN_NS : 0;
    }
    while (
        crew->thread_count < crew->limit
        && (uint64_t)crew->thread_count * PART_MIN < nbytes
        && cm_is_ok(cm_thread_start(&crew->threads[crew->thread_count], serve, crew))) {
        crew->thread_count++;
    }
}

/* -- gangs ------------------------------------------------------------------------------ */

void
cm_gang_open(cm_gang *gang, cm_crew *crew)
{
    gang->crew = crew;
    cm_list_init(&gang->loads);
    cm_list_init(&gang->node);
    cm_mutex_lock(&crew->lock);
    cm_list_push_back(&crew->gangs, &gang->node);
    cm_mutex_unlock(&crew->lock);
}

void
cm_gang_close(cm_gang *gang)
{
    cm_crew *crew = gang->crew;
    cm_mutex_lock(&crew->lock);
    for (cm_list *n = gang->loads.next; n != &gang->loads;) {
        cm_load *load = CM_LIST_ENTRY(n, cm_load, node);
        n = n->next;
        if (!load->cut.done) {
            load->cut.done = true;
            atomic_fetch_sub_explicit(&crew->part_count, 1, memory_order_relaxed);
        }
        if (load->running_count == 0) {
            cm_list_remove(&load->node);
        }
    }
    while (!cm_list_is_empty(&gang->loads)) {
        cm_cond_wait(&crew->done, &crew->lock);
    }
    cm_list_remove(&gang->node);
    cm_mutex_unlock(&crew->lock);
}

void
cm_gang_post(cm_gang *gang, cm_load *load, const cm_layout *layout, void *dst,
             const void *src, bool wide)
{
    cm_crew *crew = gang->crew;
    uint64_t nbytes = cm_layout_nbytes(layout);
    cm_list_init(&load->node);
    load->whole = *layout;
    load->dst = dst;
    load->src = src;
    load->wide = wide;
    load->running_count = 0;
    atomic_init(&load->done, nbytes == 0);
    if (nbytes == 0) {
        return;
    }
    cm_mutex_lock(&crew->lock);
    if (nbytes > PART_MIN) {
        start_threads_locked(crew, nbytes);
    }
    uint64_t part = nbytes / (crew->thread_count + 1);
    part = part < PART_MIN ? PART_MIN : part > PART_MAX ? PART_MAX : part;
    cm_cut_init(&load->cut, &load->whole, part);
    cm_list_push_back(&gang->loads, &load->node);
    atomic_fetch_add_explicit(&crew->part_count, 1, memory_order_relaxed);
    if (nbytes > part) {
        wake_one_locked(crew);
    }
    cm_mutex_unlock(&crew->lock);
}

bool
cm_gang_help(cm_gang *gang)
{
    cm_crew *crew = gang->crew;
    cm_layout part;
    cm_mutex_lock(&crew->lock);
    cm_load *load = take_part_locked(gang, &part);
    cm_mutex_unlock(&crew->lock);
    if (load == NULL) {
        return false;
    }
    copy_part(load, &part);
    cm_mutex_lock(&crew->lock);
    end_part_locked(crew, load);
    cm_mutex_unlock(&crew->lock);
    return true;
}

void
cm_gang_wait(cm_gang *gang, cm_load *load)
{
    cm_crew *crew = gang->crew;
    while (!cm_load_is_done(load) && cm_gang_help(gang)) {
    }
    uint64_t begin_ns = cm_now_ns();
    uint64_t spin_ns = crew->spin_ns > 0 ? WAIT_SPIN_NS : 0;
    while (!cm_load_is_done(load) && cm_now_ns() - begin_ns < spin_ns) {
        relax();
    }
    cm_mutex_lock(&crew->lock);
    while (!cm_load_is_done(load)) {
        cm_cond_wait(&crew->done, &crew->lock);
    }
    cm_mutex_unlock(&crew->lock);
}
