/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps the order of tickets. `after` lists the tickets that a ticket comes after. The
 * ticket hangs on the first ticket in this list that is not far enough, and ticket.h
 * says what "far enough" means. Once that first ticket is far enough, the waiting
 * ticket moves on to the next one in the list that is not. If a ticket advances, only
 * the tickets that hang on it are looked at, so each step costs the same in a long
 * queue as in a short one. Callers hold the engine's lock. */
#include "transfer/engine/job.h"

bool
cm_ticket_is_passed(const cm_ticket *ticket, bool needs_completion)
{
    return ticket->state == CM_TICKET_OVER
           || (!needs_completion && ticket->state == CM_TICKET_SUBMITTED);
}

/* True if the ticket has a job that need not wait for its turn, because it has been
 * stopped or because the transfer that it is chained to has failed. */
static bool
is_called_off(const cm_ticket *ticket)
{
    const cm_job *job = ticket->job;
    return job != NULL
           && (cm_ticket_is_stopped(ticket)
               || (ticket->is_chained && !cm_is_ok(ticket->after[0]->status)));
}

/* Hang the ticket on the next ticket in `after` that is not far enough. Returns false
 * if all of them are far enough, so that the ticket can go on. A whole, which is the
 * ticket of a batch in several parts (ticket.h), comes after its parts and waits for
 * them twice. First it waits until all parts are submitted, and then until all parts
 * are over. */
static bool
hang(cm_ticket *ticket)
{
    bool needs_completion =
        ticket->needs_completion || ticket->state != CM_TICKET_QUEUED;
    while (ticket->passed_count < ticket->after_count && !is_called_off(ticket)) {
        cm_ticket *before = ticket->after[ticket->passed_count];
        if (!cm_ticket_is_passed(before, needs_completion)) {
            cm_list_push_back(&before->waiters, &ticket->order_node);
            return true;
        }
        ticket->passed_count++;
    }
    return false;
}

/* Put the ticket into the list of tickets that the watcher looks at, or take it out of
 * the list. */
static void
watch(cm_ticket *ticket, bool is_watched)
{
    cm_engine *engine = ticket->engine;
    cm_list_remove(&ticket->node);
    if (is_watched) {
        cm_list_push_back(&engine->watched, &ticket->node);
        cm_cond_signal_all(&engine->watch);
    }
}

/* Look again at each ticket in engine->going_on. The ticket may have to hang on another
 * one. If it need not, its job is queued or, if it has no job, its state advances. A
 * ticket that becomes OVER adds the tickets that hang on it to the list, so this loop
 * does without recursion. `advanced` has the meaning that it has in
 * cm_ticket_enter_state_locked(). */
static void
go_on(cm_engine *engine, cm_list *advanced)
{
    cm_list *node;
    while ((node = cm_list_pop_front(&engine->going_on)) != NULL) {
        cm_ticket *next = CM_LIST_ENTRY(node, cm_ticket, order_node);
        if (hang(next)) {
            continue;
        }
        if (next->is_whole && next->state == CM_TICKET_QUEUED) {
            cm_ticket_enter_state_locked(next, CM_TICKET_SUBMITTED, advanced);
            if (hang(next)) {
                continue;
            }
        }
        if (next->job != NULL) {
            engine->waiting_count--;
            cm_engine_queue_job_locked(engine, next->job);
        }
        else if (next->state == CM_TICKET_SUBMITTED) { /* a whole whose parts are
                                                          over */
            next->busy = true;
            cm_list_push_back(advanced, &next->order_node);
        }
        else if (next->state == CM_TICKET_DONE) {
            next->state = CM_TICKET_OVER;
            cm_list_splice_back(&engine->going_on, &next->waiters);
            cm_list_push_back(advanced, &next->order_node);
        }
    }
}

void
cm_ticket_enter_state_locked(cm_ticket *ticket, cm_ticket_state state,
                             cm_list *advanced)
{
    cm_engine *engine = ticket->engine;
    ticket->state = state;
    ticket->passed_count = 0; /* begin again with the first ticket in `after`, as the
                                 new state may ask more of these tickets */
    watch(ticket, state == CM_TICKET_SUBMITTED && !ticket->is_whole);
    if (state == CM_TICKET_DONE) {
        atomic_fetch_sub(&engine->pending_count, 1);
        ticket->state = hang(ticket) ? CM_TICKET_DONE : CM_TICKET_OVER;
    }
    if (ticket->state == CM_TICKET_OVER) {
        cm_list_push_back(advanced, &ticket->order_node);
    }
    if (ticket->state != CM_TICKET_DONE) {
        cm_list_splice_back(&engine->going_on, &ticket->waiters);
        go_on(engine, advanced);
    }
    cm_cond_signal_all(&engine->changed);
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
