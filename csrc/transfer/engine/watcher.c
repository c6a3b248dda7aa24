/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that looks whether submitted transfers are through, so that what they keep
 * alive is dropped and those who sleep on them wake, without anybody asking; and
 * whether jobs that wait for an event can go on. */
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

static void *
watch(void *argument)
{
    cm_engine *engine = argument;
    uint64_t pause = FIRST_PAUSE_NS;
    /* Looking at an event would break a capture that another thread has under way.
     * Where this fails the looking itself will say so. */
    int mode = CM_CAPTURE_RELAXED;
    cm_ignore(cm_rt_capture_mode_exchange(engine->rt, &mode));
    for (;;) {
        cm_mutex_lock(&engine->lock);
        while (!engine->stop && cm_list_is_empty(&engine->watched)) {
            cm_cond_wait(&engine->watch, &engine->lock);
            pause = FIRST_PAUSE_NS;
        }
        bool stop = engine->stop;
        cm_mutex_unlock(&engine->lock);
        if (stop) {
            return NULL;
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

void
cm_engine_poll(cm_engine *engine)
{
    /* The watcher does the rest; a busy caller sees its own work end sooner so. */
    enum { POLL_COUNT = 2 };
    if (!cm_engine_is_forked(engine)) {
        (void)update_some(engine, POLL_COUNT);
    }
}
