/* SPDX-License-Identifier: Apache-2.0 */
/* What one transfer has posted, from its side: posting, helping, waiting. */
#include "base/fresh_pages.h"
#include "transfer/crew_private.h"

enum {
    MANY_THREADS = 4, /* so many do without the one that posts */
    REST_TURNS = 20,
    RESTS = 64, /* in vain, before the one that posted copies a part all the same */
};

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
    cm_crew_lock(crew);
    cm_list_push_back(&crew->gangs, &gang->node);
    cm_crew_unlock(crew);
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
        cm_crew_lock(crew);
        empty = cm_list_is_empty(&gang->loads);
        cm_crew_unlock(crew);
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
    cm_crew_lock(crew);
    for (cm_list *n = gang->loads.next; n != &gang->loads;) {
        cm_load *load = CM_LIST_ENTRY(n, cm_load, node);
        n = n->next;
        if (!load->cut.done) {
            load->cut.done = true;
            cm_crew_end_parts(crew, load);
        }
        if (load->running_count == 0) {
            cm_list_remove(&load->node);
        }
    }
    bool empty = cm_list_is_empty(&gang->loads);
    cm_crew_unlock(crew);
    if (!empty) {
        wait_until_empty(gang);
    }
    cm_crew_lock(crew);
    cm_list_remove(&gang->node);
    cm_crew_unlock(crew);
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
    uint32_t wanted = cm_load_is_for_all(load) ? all : few + gang->more;
    load->limit = wanted < all ? wanted : all > few ? all : few;
    if (nbytes > least) {
        uint64_t parts = (nbytes + least - 1) / least;
        cm_crew_start_threads(crew, gang->tuning,
                              parts < load->limit ? (uint32_t)parts : load->limit);
    }
    cm_crew_lock(crew);
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
    cm_crew_begin_parts(crew, load);
    cm_crew_unlock(crew);
    if (nbytes > part) {
        cm_crew_wake_one(crew);
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
    cm_crew_lock(gang->crew);
    cm_load *load = cm_crew_take_part(gang, CM_CREW_POSTER, &part);
    cm_crew_unlock(gang->crew);
    if (load == NULL) {
        return false;
    }
    cm_crew_copy_part(load, &part);
    cm_crew_end_part(gang->crew, load);
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
        && (cm_crew_count_asleep_below(crew, few) >= few
            || ++gang->rests % RESTS == 0)) {
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
