/* SPDX-License-Identifier: Apache-2.0 */
/* The order of tickets: each hangs on the first of those it comes after that is not far
 * enough, and goes on when that is, so that a long queue costs nothing per turn. All
 * under the engine's lock. */
#include "transfer/engine/job.h"

bool
cm_ticket_is_passed(const cm_ticket *ticket, bool by_host)
{
    return ticket->state == CM_TICKET_OVER
           || (!by_host && ticket->state == CM_TICKET_SUBMITTED);
}

/* A job that has to end, or that is to hear of a failure, does not wait for its turn.
 */
static bool
is_called_off(const cm_ticket *ticket)
{
    const cm_job *job = ticket->job;
    return job != NULL
           && (ticket->cancelled || cm_ticket_is_stopped(ticket)
               || (ticket->is_chained && !cm_is_ok(ticket->after[0]->status)));
}

/* False: nothing comes before it any more. */
static bool
hang(cm_ticket *ticket)
{
    bool by_host = ticket->by_host || ticket->state == CM_TICKET_DONE;
    while (ticket->passed_count < ticket->after_count && !is_called_off(ticket)) {
        cm_ticket *before = ticket->after[ticket->passed_count];
        if (!cm_ticket_is_passed(before, by_host)) {
            cm_list_push_back(&before->waiters, &ticket->order_node);
            return true;
        }
        ticket->passed_count++;
    }
    return false;
}

static void
watch(cm_ticket *ticket, bool is_watched)
{
    cm_engine *engine = ticket->engine;
    cm_list_remove(&ticket->node);
    engine->watched_count -= ticket->is_watched;
    ticket->is_watched = is_watched;
    engine->watched_count += is_watched;
    if (ticket->state < CM_TICKET_DONE) {
        cm_list_push_back(is_watched ? &engine->watched : &engine->pending,
                          &ticket->node);
    }
    if (is_watched) {
        cm_cond_signal_all(&engine->watch);
    }
}

/* Of a whole one more part is submitted or over. */
static void
tell_whole(const cm_ticket *part, bool was_submitted, cm_list *settled)
{
    cm_ticket *whole = part->part_of;
    if (whole == NULL || whole->part_count == 0) {
        return;
    }
    whole->unqueued_count -= !was_submitted;
    whole->open_count -= part->state == CM_TICKET_OVER;
    if (whole->open_count == 0) {
        if (whole->is_left_to_parts) {
            cm_list_push_back(settled, &whole->order_node);
        }
    }
    else if (whole->unqueued_count == 0 && !was_submitted) {
        cm_ticket_enter_state_locked(whole, CM_TICKET_SUBMITTED, settled);
    }
}

/* What waits for it and need not any longer goes on; what is over thereby too, as it
 * has no job, lets others go on in turn. */
static void
let_waiters_go_on(cm_ticket *ticket, cm_list *settled)
{
    cm_list *waiters = &ticket->engine->going_on;
    cm_list *node;
    cm_list_splice_back(waiters, &ticket->waiters);
    while ((node = cm_list_pop_front(waiters)) != NULL) {
        cm_ticket *next = CM_LIST_ENTRY(node, cm_ticket, order_node);
        if (hang(next)) {
            continue;
        }
        if (next->job != NULL) {
            next->engine->waiting_count--;
            cm_engine_queue_job_locked(next->engine, next->job);
        }
        else if (next->state == CM_TICKET_DONE) {
            next->state = CM_TICKET_OVER;
            cm_list_splice_back(waiters, &next->waiters);
            cm_list_push_back(settled, &next->order_node);
            tell_whole(next, false, settled);
        }
    }
}

void
cm_ticket_enter_state_locked(cm_ticket *ticket, cm_ticket_state state, cm_list *settled)
{
    bool was_submitted = ticket->state == CM_TICKET_SUBMITTED;
    ticket->state = state;
    watch(ticket, state == CM_TICKET_SUBMITTED && ticket->part_count == 0);
    if (state == CM_TICKET_DONE) {
        ticket->engine->pending_count--;
        ticket->passed_count = 0; /* to be submitted is not enough any more */
        ticket->state = hang(ticket) ? CM_TICKET_DONE : CM_TICKET_OVER;
    }
    if (ticket->state == CM_TICKET_OVER) {
        cm_list_push_back(settled, &ticket->order_node);
    }
    if (ticket->state != CM_TICKET_DONE) {
        tell_whole(ticket, was_submitted, settled);
        let_waiters_go_on(ticket, settled);
    }
    cm_cond_signal_all(&ticket->engine->changed);
}

void
cm_order_put_job_locked(cm_engine *engine, cm_job *job)
{
    cm_ticket *ticket = job->ticket;
    ticket->job = job;
    if (job->wait == CM_WAIT_EVENT && !is_called_off(ticket)) {
        watch(ticket, true);
        engine->waiting_count++;
    }
    else if (job->wait != CM_WAIT_TURN && hang(ticket)) {
        engine->waiting_count++;
    }
    else {
        cm_engine_queue_job_locked(engine, job);
    }
}

cm_job *
cm_order_take_job_locked(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    cm_job *job = ticket->job;
    if (job == NULL) {
        return NULL;
    }
    ticket->job = NULL;
    if (!cm_engine_unqueue_job_locked(engine, job)) {
        cm_list_remove(&ticket->order_node);
        watch(ticket, false);
        engine->waiting_count--;
    }
    return job;
}
