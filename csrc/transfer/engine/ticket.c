/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/engine/job.h"

#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pool/scope.h"
#include "transfer/host/backoff.h"

cm_status
cm_engine_share_locked(cm_engine *engine, const cm_region *region,
                       cm_page_shares *shares)
{
    int64_t low, high;
    if (engine->registry == NULL || region->host == NULL
        || cm_region_is_on_device(region)
        || !cm_is_ok(cm_region_bounds(region, &low, &high)) || low == high) {
        return cm_ok(); /* what is wrong with a region is said when the copy is planned
                         */
    }
    return cm_registry_share(engine->registry, (const char *)region->host + low,
                             (uint64_t)(high - low), shares);
}

cm_ticket *
cm_ticket_create(cm_engine *engine, const cm_copy_request *request)
{
    cm_ticket *ticket = calloc(1, sizeof(*ticket));
    if (ticket == NULL) {
        return NULL;
    }
    if (!cm_is_ok(cm_engine_share_locked(engine, &request->dst, &ticket->locked))
        || !cm_is_ok(cm_engine_share_locked(engine, &request->src, &ticket->locked))) {
        cm_registry_unshare(engine->registry, &ticket->locked);
        free(ticket);
        return NULL;
    }
    atomic_init(&ticket->refs, 2);
    cm_list_init(&ticket->waiters);
    ticket->engine = cm_engine_hold(engine);
    ticket->start_ns = cm_now_ns();
    ticket->part_of = request->part_of;
    for (uint32_t i = 0; i < request->keep_count; i++) {
        ticket->keep[ticket->keep_count++] = request->keep[i];
    }
    cm_mutex_lock(&engine->lock);
    cm_list_push_back(&engine->pending, &ticket->node);
    engine->pending_count++;
    cm_mutex_unlock(&engine->lock);
    return ticket;
}

cm_ticket *
cm_ticket_hold(cm_ticket *ticket)
{
    atomic_fetch_add_explicit(&ticket->refs, 1, memory_order_relaxed);
    return ticket;
}

cm_ticket *
cm_ticket_share(cm_ticket *ticket)
{
    cm_mutex_lock(&ticket->engine->lock);
    ticket->other_count++;
    cm_mutex_unlock(&ticket->engine->lock);
    return cm_ticket_hold(ticket);
}

/* Lock held. Keep a failure that nobody was told of for cm_engine_take_unread, with a
 * reference; false when there is none, or the engine has ended and nobody will ask. */
static bool
queue_unread_locked(cm_ticket *ticket)
{
    if (cm_is_ok(ticket->status) || ticket->read
        || atomic_load(&ticket->engine->over)) {
        return false;
    }
    ticket->read = true;
    atomic_fetch_add_explicit(&ticket->refs, 1, memory_order_relaxed);
    cm_list_push_back(&ticket->engine->unread, &ticket->node);
    atomic_store_explicit(&ticket->engine->has_unread, true, memory_order_relaxed);
    return true;
}

/* True when the reference was the last, and nobody wants to hear of a failure. */
static bool
drop_reference(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    if (atomic_fetch_sub_explicit(&ticket->refs, 1, memory_order_acq_rel) != 1
        || cm_engine_is_forked(engine)) {
        return false;
    }
    bool queued = false;
    if (!cm_is_ok(ticket->status) && !ticket->read) {
        cm_mutex_lock(&engine->lock);
        queued = queue_unread_locked(ticket);
        cm_mutex_unlock(&engine->lock);
    }
    return !queued;
}

/* Those that it owes may be as many as were ever cancelled: one after the other,
 * chained by what was their place in a list. */
static void
free_with_inherited(cm_ticket *ticket)
{
    cm_list *gone = &ticket->node;
    gone->next = NULL;
    while (gone != NULL) {
        cm_ticket *next = CM_LIST_ENTRY(gone, cm_ticket, node);
        cm_engine *engine = next->engine;
        gone = gone->next;
        for (uint32_t i = 0; i < next->inherited_count; i++) {
            if (drop_reference(next->inherited[i])) {
                next->inherited[i]->node.next = gone;
                gone = &next->inherited[i]->node;
            }
        }
        free(next->inherited);
        free(next);
        cm_engine_release(engine);
    }
}

void
cm_ticket_release(cm_ticket *ticket)
{
    if (drop_reference(ticket)) {
        free_with_inherited(ticket);
    }
}

cm_status
cm_ticket_abandon(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    cm_status untold = cm_ok();
    if (cm_engine_is_forked(engine)) {
        return untold;
    }
    cm_mutex_lock(&engine->lock);
    bool others = ticket->other_count > 0;
    ticket->other_count -= others;
    ticket->abandoned = !others;
    if (!others && ticket->state == CM_TICKET_DONE && !queue_unread_locked(ticket)
        && !ticket->read) {
        untold = ticket->status;
        ticket->read = true;
    }
    cm_mutex_unlock(&engine->lock);
    cm_ticket_release(ticket);
    return untold;
}

cm_status
cm_ticket_hand_over(cm_ticket *ticket, cm_status status, cm_ticket **out)
{
    if (out != NULL && (cm_is_ok(status) || ticket->part_of != NULL)) {
        *out = ticket;
        return status;
    }
    cm_status untold = cm_ticket_abandon(ticket);
    (void)untold; /* nothing: the engine goes on, and is asked later */
    return status;
}

static cm_status
take_unread(cm_engine *engine, bool end)
{
    cm_mutex_lock(&engine->lock);
    cm_list *node = cm_list_pop_front(&engine->unread);
    bool more = !cm_list_is_empty(&engine->unread);
    atomic_store_explicit(&engine->has_unread, more, memory_order_relaxed);
    if (node == NULL && end) {
        atomic_store(&engine->over, true);
    }
    cm_mutex_unlock(&engine->lock);
    if (node == NULL) {
        return cm_ok();
    }
    cm_ticket *ticket = CM_LIST_ENTRY(node, cm_ticket, node);
    cm_status status = ticket->status;
    cm_ticket_release(ticket);
    return status;
}

bool
cm_engine_has_unread(const cm_engine *engine)
{
    return atomic_load_explicit(&engine->has_unread, memory_order_relaxed);
}

cm_status
cm_engine_take_unread(cm_engine *engine)
{
    return cm_engine_is_forked(engine) ? cm_ok() : take_unread(engine, false);
}

cm_status
cm_engine_end_unread(cm_engine *engine)
{
    return take_unread(engine, true);
}

/* Lock held. Those who wait for this state go on, those for a later one go back. */
static void
hand_on_waiters_locked(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    cm_list waiters;
    cm_list_init(&waiters);
    cm_list_splice_back(&waiters, &ticket->waiters);
    while (!cm_list_is_empty(&waiters)) {
        cm_job *job = CM_LIST_ENTRY(waiters.next, cm_job, node);
        cm_engine_unlist_job_locked(engine, job);
        cm_engine_list_job_locked(engine, job, false);
    }
}

/* Lock held. */
static void
advance_locked(cm_ticket *ticket, cm_ticket_state state)
{
    cm_engine *engine = ticket->engine;
    cm_list_remove(&ticket->node);
    engine->watched_count -= cm_ticket_is_watched(ticket);
    ticket->state = state;
    engine->watched_count += cm_ticket_is_watched(ticket);
    if (state == CM_TICKET_DONE) {
        engine->pending_count--;
    }
    else {
        cm_list_push_back(&engine->watched, &ticket->node);
    }
    hand_on_waiters_locked(ticket);
    cm_cond_signal_all(&engine->changed);
}

void
cm_ticket_submit(cm_ticket *ticket, int device, uint64_t start_event,
                 uint64_t end_event, cm_stream *lent, cm_stream *side, cm_status status)
{
    cm_engine *engine = ticket->engine;
    cm_mutex_lock(&engine->lock);
    ticket->device = device;
    ticket->start_event = start_event;
    ticket->end_event = end_event;
    ticket->lent = lent;
    ticket->side = side;
    ticket->status = status;
    ticket->read = status.code == CM_ECANCELLED; /* the call tells */
    advance_locked(ticket, CM_TICKET_SUBMITTED);
    cm_cond_signal_all(&engine->watch);
    cm_mutex_unlock(&engine->lock);
}

/* Write to all and free them. */
static void
send_notices(cm_notice *notice)
{
    while (notice != NULL) {
        cm_notice *next = notice->next;
        uint64_t one = 1;
        ssize_t written = write(notice->fd, &one, sizeof(one));
        (void)written; /* a full counter wakes its reader all the same */
        (void)close(notice->fd);
        free(notice);
        notice = next;
    }
}

/* Give back what a ticket that is done and that nobody queries still has on loan. */
static void
give_back(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    cm_mutex_lock(&engine->lock);
    uint64_t start = 0;
    uint64_t end = 0;
    cm_stream *lent = NULL;
    cm_stream *side = NULL;
    if (ticket->state == CM_TICKET_DONE && ticket->query_count == 0) {
        start = ticket->start_event;
        end = ticket->end_event;
        lent = ticket->lent;
        side = ticket->side;
        ticket->start_event = 0;
        ticket->end_event = 0;
        ticket->lent = NULL;
        ticket->side = NULL;
    }
    cm_mutex_unlock(&engine->lock);
    cm_cache_give_event(engine, ticket->device, start);
    cm_cache_give_event(engine, ticket->device, end);
    cm_cache_give_stream(engine, lent);
    cm_cache_give_side(engine, side, true);
}

/* Nobody waits for them here: a job thread has others to serve, and a caller may want
 * to stop. */
static bool
are_parts_over(cm_ticket *ticket)
{
    bool over = true;
    for (uint64_t i = 0; i < ticket->part_count; i++) {
        over = cm_ticket_update(ticket->parts[i]) && over;
    }
    return over;
}

/* From now on a look at it is a look at them. */
static void
leave_to_parts(cm_ticket *ticket, cm_status status, bool read)
{
    cm_engine *engine = ticket->engine;
    /* Without the watcher its end is seen at the next poll, wait or close. */
    (void)!cm_is_ok(cm_engine_need_watcher(engine));
    cm_mutex_lock(&engine->lock);
    ticket->status = cm_is_ok(ticket->status) ? status : ticket->status;
    ticket->read = ticket->read || read;
    advance_locked(ticket, CM_TICKET_LEFT);
    cm_cond_signal_all(&engine->watch);
    cm_mutex_unlock(&engine->lock);
}

/* Of the parts, which have ended, the first failure is the whole's. The count of one
 * that has parts is not asked for any more: it has started. */
static cm_status
end_parts(cm_ticket *ticket, cm_status status)
{
    cm_engine *engine = ticket->engine;
    if (ticket->part_count == 0) {
        return status; /* a thread that cancels it may be looking at that */
    }
    uint32_t inherited_count = 0;
    for (uint64_t i = 0; i < ticket->part_count; i++) {
        cm_ticket *part = ticket->parts[i];
        cm_mutex_lock(&engine->lock);
        status = cm_is_ok(status) ? part->status : status;
        part->read = true;
        cm_mutex_unlock(&engine->lock);
        if (part->inherited_count > 0) {
            ticket->parts[inherited_count++] = part;
        }
        else {
            cm_ticket_release(part);
        }
    }
    ticket->inherited = ticket->parts;
    ticket->inherited_count = inherited_count;
    ticket->parts = NULL;
    ticket->part_count = 0;
    return status;
}

void
cm_ticket_finish(cm_ticket *ticket, cm_status status, bool read)
{
    cm_engine *engine = ticket->engine;
    if (ticket->part_count > 0) {
        cm_mutex_lock(&engine->lock);
        ticket->started = true; /* its parts did something: it cannot be cancelled */
        cm_mutex_unlock(&engine->lock);
        if (!are_parts_over(ticket)) {
            leave_to_parts(ticket, status, read);
            return;
        }
    }
    status = end_parts(ticket, status);
    double seconds = (double)(cm_now_ns() - ticket->start_ns) * 1e-9;
    if (ticket->start_event != 0 && ticket->end_event != 0 && cm_is_ok(status)) {
        float milliseconds = 0;
        cm_scope scope;
        /* A thread without a context would make one on device 0. The copy is done,
         * whatever comes of asking how long it took. */
        if (cm_is_ok(cm_scope_enter(engine->rt, ticket->device, &scope))) {
            if (cm_is_ok(cm_rt_event_elapsed(engine->rt, ticket->start_event,
                                             ticket->end_event, &milliseconds))) {
                seconds = (double)milliseconds * 1e-3;
            }
            cm_scope_leave(&scope);
        }
    }
    /* Before anybody sees that it is done: then nothing is kept alive any more. The
     * pages go first: with what keeps them they may be unmapped. */
    cm_registry_unshare(engine->registry, &ticket->locked);
    for (uint32_t i = 0; i < ticket->keep_count; i++) {
        ticket->keep[i].drop(ticket->keep[i].object);
    }
    ticket->keep_count = 0;
    cm_mutex_lock(&engine->lock);
    ticket->finishing = true;
    status = ticket->cancelled ? cm_fail(CM_ECANCELLED, 0) : status;
    ticket->status = cm_is_ok(ticket->status) ? status : ticket->status;
    ticket->read = ticket->read || read;
    ticket->seconds = seconds;
    if (!cm_is_ok(ticket->status)) {
        atomic_fetch_add_explicit(&engine->failed_count, 1, memory_order_relaxed);
    }
    advance_locked(ticket, CM_TICKET_DONE);
    if (cm_is_ok(ticket->status)) {
        cm_ticket_set_moved(ticket, ticket->nbytes);
    }
    cm_notice *notices = ticket->notices;
    ticket->notices = NULL;
    if (ticket->abandoned) {
        (void)queue_unread_locked(ticket);
    }
    cm_mutex_unlock(&engine->lock);
    send_notices(notices);
    give_back(ticket);
    cm_ticket_release(ticket);
}

void
cm_ticket_unread(cm_ticket *ticket)
{
    cm_mutex_lock(&ticket->engine->lock);
    ticket->read = false;
    cm_mutex_unlock(&ticket->engine->lock);
}

/* Lock held. Another thread has seen the end and is about to say so: that is not long,
 * and until then nobody could tell when it is done. */
static void
await_finishing_locked(cm_ticket *ticket)
{
    while (cm_ticket_is_watched(ticket) && ticket->finishing) {
        cm_cond_wait(&ticket->engine->changed, &ticket->engine->lock);
    }
}

static cm_status
ask_device(const cm_ticket *ticket, bool *done)
{
    cm_runtime *rt = ticket->engine->rt;
    cm_scope scope;
    if (ticket->end_event == 0) {
        *done = true; /* it has parts alone */
        return cm_ok();
    }
    /* A thread without a context would make one on device 0, and the question would
     * break a capture that the thread has under way. */
    CM_TRY(cm_scope_enter(rt, ticket->device, &scope));
    cm_status status = cm_rt_event_query(rt, ticket->end_event, done);
    cm_scope_leave(&scope);
    return status;
}

/* Only then can a whole be, whatever has come of its own event: nobody waits for the
 * others here, where parked ones are woken. The ticket is `finishing`. */
static bool
let_parts_end(cm_ticket *ticket, cm_status status)
{
    bool over = are_parts_over(ticket);
    if (!over) {
        cm_mutex_lock(&ticket->engine->lock);
        ticket->status = cm_is_ok(ticket->status) ? status : ticket->status;
        ticket->finishing = false;
        cm_cond_signal_all(&ticket->engine->changed);
        cm_mutex_unlock(&ticket->engine->lock);
    }
    return over;
}

bool
cm_ticket_update(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    cm_mutex_lock(&engine->lock);
    await_finishing_locked(ticket);
    bool query = cm_ticket_is_watched(ticket) && !ticket->finishing;
    bool over = ticket->state == CM_TICKET_DONE;
    ticket->query_count += query;
    engine->caller_count += query;
    cm_mutex_unlock(&engine->lock);
    if (!query) {
        return over;
    }
    bool done = false;
    cm_status status = ask_device(ticket, &done);
    if (!cm_is_ok(status)) {
        /* One question that failed does not end the copy; a second one does. */
        status = ask_device(ticket, &done);
    }
    cm_mutex_lock(&engine->lock);
    ticket->query_count--;
    bool mine = (done || !cm_is_ok(status)) && !ticket->finishing;
    await_finishing_locked(ticket);
    ticket->finishing = ticket->finishing || mine;
    over = ticket->state == CM_TICKET_DONE;
    cm_mutex_unlock(&engine->lock);
    if (mine && let_parts_end(ticket, status)) {
        cm_ticket_finish(ticket, status, false);
        over = true;
    }
    else if (over) {
        give_back(ticket);
    }
    cm_engine_end_call(engine);
    return over;
}

bool
cm_ticket_is_all_over(cm_ticket *ticket)
{
    bool over = cm_ticket_update(ticket);
    for (uint32_t i = 0; over && i < ticket->inherited_count; i++) {
        cm_ticket *inherited = ticket->inherited[i];
        /* How far down that may go is not worth the answer. */
        over = cm_ticket_update(inherited) && inherited->inherited_count == 0;
    }
    return over;
}

void
cm_ticket_set_moved(cm_ticket *ticket, uint64_t moved)
{
    uint64_t before =
        atomic_exchange_explicit(&ticket->moved, moved, memory_order_release);
    if (ticket->part_of != NULL) {
        atomic_fetch_add_explicit(&ticket->part_of->parts_moved, moved - before,
                                  memory_order_release);
    }
}

uint64_t
cm_ticket_count_moved(const cm_ticket *ticket)
{
    return cm_ticket_moved(ticket);
}

uint64_t
cm_engine_count_failed(const cm_engine *engine)
{
    return atomic_load_explicit(&engine->failed_count, memory_order_relaxed);
}

uint64_t
cm_engine_count_pending(cm_engine *engine)
{
    if (cm_engine_is_forked(engine)) {
        return 0;
    }
    cm_mutex_lock(&engine->lock);
    uint64_t count = engine->pending_count;
    cm_mutex_unlock(&engine->lock);
    return count;
}

/* -- reading, waiting, and letting streams and event loops wait --- */

static void
read_state(const cm_ticket *ticket, cm_ticket_info *out)
{
    out->route = ticket->route;
    out->cancelled = ticket->cancelled;
    out->done = ticket->state == CM_TICKET_DONE;
    if (out->done) {
        out->status = ticket->status;
        out->seconds = ticket->seconds;
    }
}

void
cm_ticket_look(const cm_ticket *ticket, cm_ticket_info *out)
{
    cm_engine *engine = ticket->engine;
    *out = (cm_ticket_info){.nbytes = ticket->nbytes, .captured = ticket->captured};
    if (cm_engine_is_forked(engine)) {
        read_state(ticket, out); /* a copy that nobody changes; the lock may be held */
        return;
    }
    cm_mutex_lock(&engine->lock);
    read_state(ticket, out);
    cm_mutex_unlock(&engine->lock);
}

void
cm_ticket_read(cm_ticket *ticket, cm_ticket_info *out)
{
    if (!cm_engine_is_forked(ticket->engine)) {
        (void)cm_ticket_update(ticket);
    }
    cm_ticket_look(ticket, out);
}

static uint64_t
deadline_after(uint64_t timeout_ns)
{
    uint64_t now = cm_now_ns();
    return timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
}

/* Lock held. The host or another thread has to act first. */
static void
wait_for_change(cm_engine *engine, uint64_t deadline)
{
    if (deadline == UINT64_MAX) {
        cm_cond_wait(&engine->changed, &engine->lock);
    }
    else {
        (void)cm_cond_wait_until(&engine->changed, &engine->lock, deadline);
    }
}

/* Wait until the ticket has reached `state` or the deadline has passed; the state. */
static cm_ticket_state
wait_for_state(cm_ticket *ticket, cm_ticket_state state, uint64_t deadline)
{
    cm_engine *engine = ticket->engine;
    uint64_t start = 0; /* of the looking */
    for (;;) {
        (void)cm_ticket_update(ticket);
        cm_mutex_lock(&engine->lock);
        cm_ticket_state reached = ticket->state;
        uint64_t now = cm_now_ns();
        bool over = reached >= state || now >= deadline;
        if (!over && reached == CM_TICKET_QUEUED) {
            wait_for_change(engine, deadline);
        }
        else if (!over) {
            start = start == 0 ? now : start;
            uint64_t gap = cm_backoff_ns(now - start);
            uint64_t until = deadline - now < gap ? deadline : now + gap;
            if (gap > CM_BACKOFF_SLEEP_NS) {
                (void)cm_cond_wait_until(&engine->changed, &engine->lock, until);
            }
            else {
                cm_mutex_unlock(&engine->lock);
                while (cm_now_ns() < until) {
                    (void)sched_yield();
                }
                continue;
            }
        }
        cm_mutex_unlock(&engine->lock);
        if (over) {
            return reached;
        }
    }
}

static cm_status
take_status(cm_ticket *ticket)
{
    cm_mutex_lock(&ticket->engine->lock);
    cm_status status = ticket->status;
    ticket->read = true;
    cm_mutex_unlock(&ticket->engine->lock);
    return status;
}

cm_status
cm_ticket_wait(cm_ticket *ticket, uint64_t timeout_ns)
{
    if (cm_engine_is_forked(ticket->engine)) {
        return ticket->state == CM_TICKET_DONE ? ticket->status
                                               : cm_fail(CM_EFORKED, 0);
    }
    uint64_t deadline = deadline_after(timeout_ns);
    if (wait_for_state(ticket, CM_TICKET_DONE, deadline) != CM_TICKET_DONE) {
        return cm_fail(CM_ETIMEOUT, timeout_ns);
    }
    return take_status(ticket);
}

cm_status
cm_ticket_settle(cm_ticket *ticket, uint64_t timeout_ns)
{
    if (cm_engine_is_forked(ticket->engine)) {
        return cm_fail(CM_EFORKED, 0);
    }
    uint64_t deadline = deadline_after(timeout_ns);
    if (wait_for_state(ticket, CM_TICKET_SUBMITTED, deadline) < CM_TICKET_SUBMITTED) {
        return cm_fail(CM_ETIMEOUT, timeout_ns);
    }
    return cm_ok();
}

/* Queue a wait for a submitted ticket; nothing to do for one that is done. */
static cm_status
queue_wait(cm_ticket *ticket, cm_stream *stream)
{
    cm_engine *engine = ticket->engine;
    cm_mutex_lock(&engine->lock);
    bool query = ticket->state == CM_TICKET_SUBMITTED;
    ticket->query_count += query; /* the event stays ours meanwhile */
    engine->caller_count += query;
    cm_mutex_unlock(&engine->lock);
    if (!query) {
        return cm_ok();
    }
    cm_status status = cm_stream_wait_event(stream, ticket->end_event);
    cm_mutex_lock(&engine->lock);
    ticket->query_count--;
    cm_mutex_unlock(&engine->lock);
    give_back(ticket);
    cm_engine_end_call(engine);
    return status;
}

cm_status
cm_ticket_depend(cm_ticket *ticket, cm_stream *stream, uint64_t timeout_ns)
{
    cm_ticket_state wanted = stream == NULL ? CM_TICKET_DONE : CM_TICKET_SUBMITTED;
    if (wait_for_state(ticket, wanted, deadline_after(timeout_ns)) < wanted) {
        return cm_fail(CM_ETIMEOUT, timeout_ns);
    }
    return stream == NULL ? cm_ok() : queue_wait(ticket, stream);
}

void
cm_ticket_drain(cm_ticket *ticket)
{
    (void)!cm_is_ok(cm_ticket_depend(ticket, NULL, ticket->engine->drain_ns));
}

cm_status
cm_ticket_order(cm_ticket *ticket, cm_stream *stream)
{
    if (cm_engine_is_forked(ticket->engine)) {
        return cm_fail(CM_EFORKED, 0);
    }
    CM_TRY(cm_ticket_depend(ticket, stream, UINT64_MAX));
    cm_mutex_lock(&ticket->engine->lock);
    bool failed = !cm_is_ok(ticket->status); /* perhaps before it is done */
    cm_mutex_unlock(&ticket->engine->lock);
    return failed ? take_status(ticket) : cm_ok();
}

cm_status
cm_ticket_notify(cm_ticket *ticket, int fd)
{
    cm_engine *engine = ticket->engine;
    if (cm_engine_is_forked(engine)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_notice *notice = malloc(sizeof(*notice));
    if (notice == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*notice));
    }
    *notice = (cm_notice){.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)};
    if (notice->fd < 0) {
        free(notice);
        return cm_fail(CM_ESYSTEM, (uint64_t)(int64_t)fd);
    }
    cm_mutex_lock(&engine->lock);
    bool done = ticket->state == CM_TICKET_DONE;
    if (!done) {
        notice->next = ticket->notices;
        ticket->notices = notice;
    }
    cm_mutex_unlock(&engine->lock);
    if (done) {
        send_notices(notice);
    }
    return cm_ok();
}

/* -- the watcher: the thread that looks whether submitted transfers are through, so that
 * what they keep alive is dropped and those who sleep on them wake, without anybody
 * asking; and whether jobs that were suspended can go on -- */

enum {
    BATCH = 32,
    FIRST_PAUSE_NS = 20 * 1000,
    LAST_PAUSE_NS = 1000 * 1000,
    PARKED_PAUSE_NS = 200 * 1000, /* while a job is late by what we are */
};

/* Update up to `limit` (<= BATCH) watched tickets, the longest unlooked-at first; true
 * when one became done. */
static bool
update_some(cm_engine *engine, int limit)
{
    cm_ticket *batch[BATCH];
    int count = 0;
    cm_mutex_lock(&engine->lock);
    uint64_t left = engine->watched_count;
    for (; left > 0 && count < limit && count < BATCH; left--) {
        /* Whoever was looked at goes to the end: each gets its turn. */
        cm_list *node = cm_list_pop_front(&engine->watched);
        cm_list_push_back(&engine->watched, node);
        cm_ticket *ticket = CM_LIST_ENTRY(node, cm_ticket, node);
        if (!ticket->finishing) {
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

/* Lock held. */
static bool
has_work(const cm_engine *engine)
{
    return engine->parked_count + engine->watched_count > 0;
}

/* Lock held. */
static uint64_t
last_pause(const cm_engine *engine)
{
    bool late = engine->parked_count + engine->waiting_count > 0;
    return late ? PARKED_PAUSE_NS : LAST_PAUSE_NS;
}

static void *
watch(void *argument)
{
    cm_engine *engine = argument;
    uint64_t pause = FIRST_PAUSE_NS;
    /* Looking at an event would break a capture that another thread has under way.
     * Where this fails the looking itself will say so. */
    int mode = CM_CAPTURE_RELAXED;
    (void)!cm_is_ok(cm_rt_capture_mode_exchange(engine->rt, &mode));
    for (;;) {
        cm_mutex_lock(&engine->lock);
        while (!engine->stop && !has_work(engine)) {
            cm_cond_wait(&engine->watch, &engine->lock);
            pause = FIRST_PAUSE_NS;
        }
        bool stop = engine->stop;
        cm_mutex_unlock(&engine->lock);
        if (stop) {
            return NULL;
        }
        bool any = update_some(engine, BATCH);
        any = cm_engine_wake_jobs(engine) || any;
        if (any) {
            pause = FIRST_PAUSE_NS;
            continue;
        }
        cm_mutex_lock(&engine->lock);
        if (!engine->stop
            && cm_cond_wait_until(&engine->watch, &engine->lock, cm_now_ns() + pause)) {
            pause = FIRST_PAUSE_NS;
        }
        else if (pause < last_pause(engine)) {
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
cm_engine_join_watcher(cm_engine *engine)
{
    cm_mutex_lock(&engine->lock);
    bool running = engine->has_watcher;
    engine->has_watcher = false;
    engine->stop = true;
    cm_cond_signal_all(&engine->watch);
    cm_mutex_unlock(&engine->lock);
    if (running) {
        cm_thread_join(engine->watcher);
    }
}

void
cm_engine_poll(cm_engine *engine)
{
    /* The watcher does the rest; this makes a busy caller see its own work end sooner.
     */
    enum { POLL_COUNT = 2 };
    if (!cm_engine_is_forked(engine) && cm_engine_count_pending(engine) != 0) {
        (void)update_some(engine, POLL_COUNT);
    }
}
