/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a ticket, waiting for it, and letting streams and event loops wait. */
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>

#include "transfer/backoff.h"
#include "transfer/ticket.h"

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
    cm_ticket_give_loans(ticket);
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
cm_ticket_linger(cm_ticket *ticket)
{
    (void)!cm_is_ok(cm_ticket_depend(ticket, NULL, ticket->engine->linger_ns));
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
        cm_notices_send(notice);
    }
    return cm_ok();
}
