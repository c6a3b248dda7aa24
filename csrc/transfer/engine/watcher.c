/* SPDX-License-Identifier: Apache-2.0 */
/* The watcher is a thread that asks from time to time whether submitted transfers have
 * ended. So what a transfer keeps alive is dropped when it ends, and threads that sleep
 * until then wake up, even if no user asks about it. It also asks whether jobs that
 * wait for an event can go on, and it trims idle pools when that is due.
 *
 * The pause between two rounds begins at FIRST_PAUSE_NS, doubles while nothing happens,
 * and starts anew when a transfer ends or a ticket is added. */
#include "transfer/engine/ticket.h"

enum {
    BATCH = 32,
    FIRST_PAUSE_NS = 20 * 1000,
    LAST_PAUSE_NS = 1000 * 1000,
    /* The longest pause while a job waits for an event, since it is also the longest
     * time for which the job may notice the event too late. */
    JOB_PAUSE_NS = 200 * 1000,
};

/* Update up to `limit` (<= BATCH) watched tickets, beginning with the one that was
 * looked at longest ago. Returns true if one of them is over. */
static bool
update_some(cm_engine *engine, int limit)
{
    cm_ticket *batch[BATCH];
    int count = 0;
    cm_mutex_lock(&engine->lock);
    const cm_list *last = engine->watched.prev;
    cm_list *node = &engine->watched;
    while (node != last && count < limit && count < BATCH) {
        /* The ticket goes to the end of the list, so that each gets its turn. */
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

/* The least time between two rounds of idle trims. A pool may ask for an idle time of a
 * nanosecond, which must not keep this thread busy. */
#define LEAST_IDLE_NS (UINT64_C(10) * 1000 * 1000)

/* Trim idle pools if that is due. Returns true if it was due. The lock is then released
 * meanwhile. */
static bool
trim_idle_locked(cm_engine *engine)
{
    if (engine->stop || engine->idle_due_ns == 0 || cm_now_ns() < engine->idle_due_ns) {
        return false;
    }
    engine->idle_due_ns = 0; /* a pool that gets an idle trim meanwhile sets it again */
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

/* The loop of the thread, which ends when the engine is closed. */
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
        /* In the default capture mode, asking about an event would break a capture that
         * another thread has under way, so this thread goes to the relaxed mode. While
         * nobody has started the driver there are neither events nor captures, and
         * copies from host to host must not start it. If the change of mode fails, so
         * will the question about an event, which reports it. */
        if (!is_relaxed && cm_runtime_wake_if_started(engine->rt)) {
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
    /* The lock may be held here, as starting a thread waits for nothing of ours. */
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
        return cm_ok(); /* a forked child gives no memory back */
    }
    CM_TRY(cm_engine_need_watcher(engine));
    cm_mutex_lock(&engine->lock);
    engine->idle_due_ns = 1; /* trim at once; that round finds out when the next trim is
                                due */
    cm_cond_signal_all(&engine->watch);
    cm_mutex_unlock(&engine->lock);
    return cm_ok();
}

void
cm_engine_poll(cm_engine *engine)
{
    /* A busy caller that updates two tickets at each call sees its own work end sooner
     * than the watcher would. All the others are left to the watcher. */
    enum { POLL_COUNT = 2 };
    if (!cm_engine_is_forked(engine)) {
        (void)update_some(engine, POLL_COUNT);
    }
}
