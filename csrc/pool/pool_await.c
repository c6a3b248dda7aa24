/* SPDX-License-Identifier: Apache-2.0 */
/* Waiting for what was freed by asking, so that whoever waits can be told to stop. The
 * question is put while this thread is neither poller nor grower: what answers it may
 * use the pool. */
#include "pool/pool_private.h"
#include "pool/scope.h"

enum {
    ASK_NS = 50 * 1000 * 1000, /* between two questions whether to go on */
    NAP_LEAST_NS = 20 * 1000,
    NAP_MOST_NS = 300 * 1000,
    NAP_SHARE = 128,   /* of the time waited so far */
    PASSED_MAX = 1000, /* looks that fail to drop what has passed */
};

/* What had been given back when the wait began: what comes later is not waited for. */
typedef struct goal {
    uint64_t serial; /* the youngest flight */
    uint64_t epochs[CM_MARK_MAX];
} goal;

static void
set_goal(cm_pool *pool, goal *out)
{
    cm_fast_lock_take(&pool->lock);
    out->serial = pool->counters.free_count;
    for (uint32_t i = 0; i < CM_MARK_MAX; i++) {
        out->epochs[i] = pool->marks[i].given_epoch;
    }
    cm_fast_lock_give(&pool->lock);
}

/* An event that must pass first; 0: none is known. By the poller. */
static uint64_t
find_event(cm_pool *pool, const goal *aim)
{
    uint64_t event = 0;
    cm_fast_lock_take(&pool->lock);
    for (cm_list *n = pool->in_flight.next; n != &pool->in_flight && event == 0;
         n = n->next) {
        const cm_flight *flight = CM_LIST_ENTRY(n, cm_flight, node);
        if (flight->serial <= aim->serial && !flight->captured
            && flight->event_count > 0) {
            event = flight->events[0].handle;
        }
    }
    for (uint32_t i = 1; i < pool->mark_count && event == 0; i++) {
        const cm_mark *mark = &pool->marks[i];
        if (mark->stream != NULL && aim->epochs[i] > pool->done[i]
            && mark->asked_epoch != 0) {
            event = mark->event;
        }
    }
    cm_fast_lock_give(&pool->lock);
    return event;
}

/* False: nothing is left that can be asked about. What has passed is dropped by the
 * next look; where even that is refused the caller's own wait will tell. */
static bool
is_pending(cm_pool *pool, const goal *aim, uint32_t *passed)
{
    cm_status looked = cm_pool_poll(pool, CM_POLL_LOOK, true);
    (void)looked; /* never fails */
    if (!cm_pool_begin_poll(pool, false)) {
        return true; /* another thread looks, or waits */
    }
    bool pending = false;
    uint64_t event = find_event(pool, aim);
    cm_scope scope;
    if (event != 0 && cm_is_ok(cm_scope_enter(pool->rt, pool->config.device, &scope))) {
        bool done = false;
        pending = cm_is_ok(cm_rt_event_query(pool->rt, event, &done));
        *passed = done ? *passed + 1 : 0;
        cm_scope_leave(&scope);
    }
    cm_pool_end_poll(pool);
    return pending && *passed < PASSED_MAX;
}

/* Fences are not asked about: whoever waits for the devices can be interrupted, if the
 * wait is left to him. */
static cm_status
await_fences(cm_pool *pool, const cm_patience *patience, const goal *aim)
{
    if (patience->wait_device == NULL || !cm_pool_begin_poll(pool, false)) {
        return cm_ok(); /* or another thread waits for them now */
    }
    uint64_t due = cm_pool_due_fences(pool, aim->serial);
    cm_pool_end_poll(pool);
    uint64_t idle = 0;
    for (int d = 0; d < CM_MAX_DEVICES; d++) {
        cm_status status = cm_ok();
        if ((due >> d & 1) == 0) {
            continue;
        }
        if (!patience->wait_device(patience->argument, d, &status)) {
            return cm_fail(CM_ECANCELLED, 0);
        }
        idle |= cm_is_ok(status) ? UINT64_C(1) << d : 0;
    }
    if (idle != 0 && cm_pool_begin_poll(pool, false)) {
        cm_pool_drop_fences(pool, aim->serial, idle);
        cm_pool_end_poll(pool);
    }
    return cm_ok();
}

static void
nap_after(uint64_t elapsed_ns)
{
    uint64_t gap = elapsed_ns / NAP_SHARE;
    gap = gap < NAP_LEAST_NS ? NAP_LEAST_NS : gap > NAP_MOST_NS ? NAP_MOST_NS : gap;
    struct timespec span = {.tv_sec = 0, .tv_nsec = (long)gap};
    (void)nanosleep(&span, NULL);
}

cm_status
cm_pool_await(cm_pool *pool, const cm_patience *patience)
{
    if (patience->interrupted == NULL || cm_runtime_is_forked(pool->rt)) {
        return cm_ok();
    }
    goal aim;
    set_goal(pool, &aim);
    uint64_t start = cm_now_ns();
    uint64_t asked = start;
    uint32_t passed = 0;
    while (is_pending(pool, &aim, &passed)) {
        uint64_t now = cm_now_ns();
        if (now - asked >= ASK_NS) {
            if (patience->interrupted(patience->argument)) {
                return cm_fail(CM_ECANCELLED, 0);
            }
            asked = cm_now_ns();
        }
        nap_after(now - start);
    }
    return await_fences(pool, patience, &aim);
}
