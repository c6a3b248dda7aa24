/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that looks whether submitted transfers are through, so that what they keep
 * alive is dropped and those who sleep on them wake, without anybody asking; and
 * whether jobs that wait for an event can go on. As it is the one that looks at things
 * from time to time, it sees to the idle trims of pools as well. */
#include "transfer/engine/ticket.h"

enum {
    BATCH = 32,
    FIRST_PAUSE_NS = 20 * 1000,
    LAST_PAUSE_NS = 1000 * 1000,
    JOB_PAUSE_NS = 200 * 1000, /* while a job is late by what we are */
};

/* Update up to `limit` (<= BATCH) watched tickets, the longest unlooked-at first; true
 * when one is over. */
static bool
update_some(cm_engine *engine, int limit)
{
    cm_ticket *batch[BATCH];
    int count = 0;
    cm_mutex_lock(&engine->lock);
    const cm_list *last = engine->watched.prev;
    cm_list *node = &engine->watched;
    while (node != last && count < limit && count < BATCH) {
        /* Whoever was looked at goes to the end: each gets its turn. */
        node = cm_list_pop_front(&engine->watched);
        cm_list_push_back(&engine->watched, node);
        cm_ticket *ticket = CM_LIST_ENTRY(node, cm_ticket, node);
        if (!ticket->busy) {
            batch[count++] = cm_ticket_hold(ticket);
        }
    }
    cm_mutex_unlock(&engine->lock);
    bool any = false;
    for (int i = 0; i < count; i++) {
        any = cm_ticket_update(batch[i]) || any;
        cm_ticket_release(batch[i]);
    }
    return any;
}

/* Not so often that it would be work: an idle trim may be a nanosecond. */
#define LEAST_IDLE_NS (UINT64_C(10) * 1000 * 1000)

/* True with the lock let go, and taken again: the time had come. */
static bool
trim_idle_locked(cm_engine *engine)
{
    if (engine->stop || engine->idle_due_ns == 0 || cm_now_ns() < engine->idle_due_ns) {
        return false;
    }
    engine->idle_due_ns = 0; /* a pool that gets one meanwhile sets it again */
    cm_mutex_unlock(&engine->lock);
    uint64_t due = cm_pools_trim_idle(engine->rt);
    uint64_t least = cm_now_ns() + LEAST_IDLE_NS;
    cm_mutex_lock(&engine->lock);
    if (due != 0 && engine->idle_due_ns == 0) {
        engine->idle_due_ns = due > least ? due : least;
    }
    return true;
}

/* Sleep until there is something to watch, or an idle trim is due. */
static void
sleep_locked(cm_engine *engine)
{
    if (engine->idle_due_ns == 0) {
        cm_cond_wait(&engine->watch, &engine->lock);
    }
    else {
        (void)cm_cond_wait_until(&engine->watch, &engine->lock, engine->idle_due_ns);
    }
}

static void *
watch(void *argument)
{
    cm_engine *engine = argument;
    uint64_t pause = FIRST_PAUSE_NS;
    bool is_relaxed = false;
    for (;;) {
        cm_mutex_lock(&engine->lock);
        (void)trim_idle_locked(engine);
        while (!engine->stop && cm_list_is_empty(&engine->watched)) {
            if (!trim_idle_locked(engine)) {
                sleep_locked(engine);
            }
            pause = FIRST_PAUSE_NS;
        }
        bool stop = engine->stop;
        cm_mutex_unlock(&engine->lock);
        if (stop) {
            return NULL;
        }
        /* Looking at an event would break a capture that another thread has under way.
         * While nobody has started the driver there are neither, and copies from host
         * to host do not start it. Where this fails the looking itself will say so. */
        if (!is_relaxed && cm_runtime_is_of_use(engine->rt)) {
            int mode = CM_CAPTURE_RELAXED;
            cm_ignore(cm_rt_capture_mode_exchange(engine->rt, &mode));
            is_relaxed = true;
        }
        if (update_some(engine, BATCH)) {
            pause = FIRST_PAUSE_NS;
            continue;
        }
        cm_mutex_lock(&engine->lock);
        uint64_t longest = engine->waiting_count > 0 ? JOB_PAUSE_NS : LAST_PAUSE_NS;
        if (!engine->stop
            && cm_cond_wait_until(&engine->watch, &engine->lock, cm_now_ns() + pause)) {
            pause = FIRST_PAUSE_NS;
        }
        else if (pause < longest) {
            pause *= 2;
        }
        cm_mutex_unlock(&engine->lock);
    }
}

cm_status
cm_engine_need_watcher(cm_engine *engine)
{
    cm_status status = cm_ok();
    cm_mutex_lock(&engine->lock);
    /* Starting a thread waits for nothing of ours. */
    if (!engine->has_watcher) {
        status = cm_thread_start(&engine->watcher, watch, engine);
        engine->has_watcher = cm_is_ok(status);
    }
    cm_mutex_unlock(&engine->lock);
    return status;
}

cm_status
cm_engine_need_idle_trims(cm_engine *engine)
{
    if (cm_engine_is_forked(engine)) {
        return cm_ok(); /* nothing goes back there */
    }
    CM_TRY(cm_engine_need_watcher(engine));
    cm_mutex_lock(&engine->lock);
    engine->idle_due_ns = 1; /* now: it finds out when to come again */
    cm_cond_signal_all(&engine->watch);
    cm_mutex_unlock(&engine->lock);
    return cm_ok();
}

void
cm_engine_poll(cm_engine *engine)
{
    /* The watcher does the rest; a busy caller sees its own work end sooner so. */
    enum { POLL_COUNT = 2 };
    if (!cm_engine_is_forked(engine)) {
        (void)update_some(engine, POLL_COUNT);
    }
}
