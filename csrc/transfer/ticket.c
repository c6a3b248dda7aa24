/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/job.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pool/scope.h"

cm_status
cm_engine_share_locked(cm_engine *engine, const cm_region *region,
                       cm_page_shares *shares)
{
    int64_t low, high;
    if (engine->registry == NULL || region->host == NULL
        || cm_region_is_on_device(region)
        || !cm_is_ok(cm_region_bounds(region, &low, &high)) || low == high) {
        return cm_ok(); /* what is wrong with a region is said by who plans the copy */
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

/* Those that it owes may be as many as were ever cancelled: one after the other. */
static void
free_with_owed(cm_ticket *ticket)
{
    cm_list gone;
    cm_list_init(&gone);
    cm_list_push_back(&gone, &ticket->node);
    for (cm_list *node; (node = cm_list_pop_front(&gone)) != NULL;) {
        cm_ticket *next = CM_LIST_ENTRY(node, cm_ticket, node);
        cm_engine *engine = next->engine;
        for (uint32_t i = 0; i < next->owed_count; i++) {
            if (drop_reference(next->owed[i])) {
                cm_list_push_back(&gone, &next->owed[i]->node);
            }
        }
        free(next->owed);
        free(next);
        cm_engine_release(engine);
    }
}

void
cm_ticket_release(cm_ticket *ticket)
{
    if (drop_reference(ticket)) {
        free_with_owed(ticket);
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

void
cm_notices_send(cm_notice *notice)
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

void
cm_ticket_give_loans(cm_ticket *ticket)
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
    cm_loan_give_event(engine, ticket->device, start);
    cm_loan_give_event(engine, ticket->device, end);
    cm_loan_give_stream(engine, lent);
    cm_loan_give_side(engine, side, true);
}

/* Nobody waits for them here: a worker has others to serve, and a caller may want to
 * stop. */
static bool
are_parts_over(cm_ticket *ticket)
{
    bool over = true;
    for (uint64_t i = 0; i < ticket->part_count; i++) {
        over = cm_ticket_update(ticket->parts[i]) && over;
    }
    return over;
}

/* Who looks at it from now on looks at them. */
static void
leave_to_parts(cm_ticket *ticket, cm_status status, bool read)
{
    cm_engine *engine = ticket->engine;
    /* Without a thread that watches it is seen by who polls, waits or closes. */
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
        return status; /* who would cancel it may be looking at that */
    }
    uint32_t owed_count = 0;
    for (uint64_t i = 0; i < ticket->part_count; i++) {
        cm_ticket *part = ticket->parts[i];
        cm_mutex_lock(&engine->lock);
        status = cm_is_ok(status) ? part->status : status;
        part->read = true;
        cm_mutex_unlock(&engine->lock);
        if (part->owed_count > 0) {
            ticket->parts[owed_count++] = part;
        }
        else {
            cm_ticket_release(part);
        }
    }
    ticket->owed = ticket->parts;
    ticket->owed_count = owed_count;
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
    cm_notices_send(notices);
    cm_ticket_give_loans(ticket);
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
        /* That one question failed does not end the copy; who fails again is gone. */
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
        cm_ticket_give_loans(ticket);
    }
    cm_engine_end_call(engine);
    return over;
}

bool
cm_ticket_is_all_over(cm_ticket *ticket)
{
    bool over = cm_ticket_update(ticket);
    for (uint32_t i = 0; over && i < ticket->owed_count; i++) {
        cm_ticket *owed = ticket->owed[i];
        /* How far down that may go is not worth the answer. */
        over = cm_ticket_update(owed) && owed->owed_count == 0;
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
    uint64_t moved = atomic_load_explicit(&ticket->moved, memory_order_acquire);
    uint64_t parts = atomic_load_explicit(&ticket->parts_moved, memory_order_acquire);
    if (moved > 0 || parts == 0 || parts < ticket->nbytes) {
        return moved > 0 ? moved : parts;
    }
    return ticket->nbytes - 1; /* it is not done yet, though they are */
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
