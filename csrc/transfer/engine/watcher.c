/* SPDX-License-Identifier: Apache-2.0 */
/* The watcher is a thread that asks from time to time whether submitted transfers have
 * ended. Even if no user asks about a transfer, the objects that it keeps alive are
 * therefore released when it ends, and the threads that sleep until its end wake up.
 * The watcher also asks whether jobs that wait for an event can go on. When an idle
 * trim is due, it makes the pools give back memory that has not been used for a while.
 *
 * Each transfer has a ticket (ticket.h), and `watched` is the list of the tickets that
 * the watcher looks at, in rounds. The pause between two rounds begins at
 * FIRST_PAUSE_NS and doubles while nothing happens. It is FIRST_PAUSE_NS again when a
 * transfer has ended or a ticket has been added. */
#include "transfer/engine/ticket.h"

enum {
    BATCH = 32,
    FIRST_PAUSE_NS = 20 * 1000,
    LAST_PAUSE_NS = 1000 * 1000,
    /* The longest pause while a job waits for an event. It is shorter than
     * LAST_PAUSE_NS, because the job may notice the event late by up to this pause. */
    JOB_PAUSE_NS = 200 * 1000,
};

/* Update up to `limit` (<= BATCH) watched tickets, beginning with the one that was
 * looked at longest ago. Returns true if one of these tickets is over. */
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

/* Trim idle pools if a trim is due. Returns true if it was due. The lock is released
 * while the pools are trimmed. */
static bool
trim_idle_locked(cm_engine *engine)
{
    if (engine->stop || engine->idle_due_ns == 0 || cm_now_ns() < engine->idle_due_ns) {
        return false;
    }
    /* While the lock is released, a pool may be set to trim itself when it is idle.
     * This makes idle_due_ns nonzero again. */
    engine->idle_due_ns = 0;
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
         * another thread has under way, so this thread changes to the relaxed mode. The
         * change would start the driver, which copies from host to host must not do. So
         * this thread makes it only once somebody else has started the driver. Until
         * then there are neither events nor captures. If the change fails, the next
         * question about an event fails too, and the transfer reports that failure. */
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
    /* The lock may be held while the thread is started, because that call does not wait
     * for any thread that takes the lock. */
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
    /* The time 1 is past, so the watcher trims at once. In doing so it finds out when
     * the next trim is due. */
    engine->idle_due_ns = 1;
    cm_cond_signal_all(&engine->watch);
    cm_mutex_unlock(&engine->lock);
    return cm_ok();
}

void
cm_engine_poll(cm_engine *engine)
{
    /* Two tickets are enough for a busy caller, because it calls this often: it notices
     * the end of its own transfers sooner than the watcher would notice it. The watcher
     * updates all other tickets. */
    enum { POLL_COUNT = 2 };
    if (!cm_engine_is_forked(engine)) {
        (void)update_some(engine, POLL_COUNT);
    }
}
