/* SPDX-License-Identifier: Apache-2.0 */
/* Several groups and copies of their own as the parts of one ticket: each is started as
 * an asynchronous copy, and the whole is done when all of them are. */
#include <stdlib.h>

#include "transfer/batch/call.h"

enum { AHEAD_MAX = 256 }; /* far more than a device is ever behind */

/* -- what is kept -------------------------------------------------------------------------------- */

static void
drop_shared(void *object)
{
    cm_shared_keep *shared = object;
    if (atomic_fetch_sub_explicit(&shared->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    for (uint32_t i = 0; i < shared->count; i++) {
        shared->keep[i].drop(shared->keep[i].object);
    }
    free(shared);
}

/* Each part keeps all that the caller wants kept. */
static cm_keep
share(cm_many_call *c)
{
    atomic_fetch_add_explicit(&c->shared->refs, 1, memory_order_relaxed);
    return (cm_keep){c->shared, drop_shared};
}

/* -- several parts ------------------------------------------------------------------------ */

/* One part alone may be too short to ask by itself. */
static cm_status
ask_whether_to_go_on(cm_many_call *c)
{
    const cm_copy_request *common = &c->request->common;
    if (common->interrupted == NULL || cm_now_ns() - c->asked_ns < CM_ASK_NS) {
        return cm_ok();
    }
    bool stops = common->interrupted(common->interrupted_argument);
    c->asked_ns = cm_now_ns();
    return stops ? cm_fail(CM_ECANCELLED, 0) : cm_ok();
}

/* Until it is done; on a stream, until the rest is the device's. */
static cm_status
wait_for_part(cm_many_call *c, uint64_t index)
{
    bool asks = c->request->common.interrupted != NULL;
    uint64_t limit = asks ? CM_ASK_NS : UINT64_MAX;
    bool late;
    do {
        cm_status status = c->request->common.blocking
                               ? cm_ticket_depend(c->parts[index], NULL, limit)
                               : cm_ticket_settle(c->parts[index], limit);
        late = status.code == CM_ETIMEOUT;
        CM_TRY(ask_whether_to_go_on(c));
    } while (late);
    return cm_ok();
}

/* Before one more that goes alone. What is queued cannot be called back: a caller that
 * waits anyway queues no more than is soon over when it is interrupted. */
static cm_status
make_way(cm_many_call *c)
{
    if (c->request->common.blocking && c->part_count >= AHEAD_MAX) {
        return wait_for_part(c, c->part_count - AHEAD_MAX);
    }
    return ask_whether_to_go_on(c);
}

/* The request of the next part: what touches others comes after the one before, and
 * only where that has not failed: then it is done before what came earlier may be. */
static cm_copy_request *
next_part(cm_many_call *c)
{
    cm_copy_request *part = &c->common;
    const cm_copy_request *common = &c->request->common;
    part->dst = common->dst;
    part->src = common->src;
    part->keep[0] = share(c);
    part->after_ticket_count = common->after_ticket_count;
    part->is_chained = c->in_order && c->last != NULL;
    if (part->is_chained) {
        c->after[part->after_ticket_count++] = c->last;
    }
    return part;
}

/* What was started with that outcome is a part, even where it failed: some of it may be
 * under way. NULL: nothing is. */
static cm_status
add_part(cm_many_call *c, cm_ticket *ticket, cm_status started)
{
    if (ticket == NULL) {
        return started;
    }
    c->nbytes += ticket->nbytes;
    c->parts[c->part_count++] = ticket;
    cm_mutex_lock(&c->engine->lock);
    bool idle = ticket->route == CM_ROUTE_NOTHING;
    cm_mutex_unlock(&c->engine->lock);
    /* One without work is done at once, whatever it was to come after. */
    c->last = idle ? c->last : ticket;
    return started;
}

static cm_status
start_alone(cm_many_call *c, cm_copy_request *part)
{
    cm_ticket *ticket = NULL;
    cm_status status = cm_request_start(c->engine, part, &c->tuning, &ticket);
    return add_part(c, ticket, status);
}

/* In the order of their indices. */
static cm_status
start_those_alone(cm_many_call *c)
{
    const cm_many_request *request = c->request;
    uint64_t other = 0;
    for (uint64_t i = 0; i <= request->piece_count; i++) {
        bool ends = i == request->piece_count;
        if (!ends && c->groups[i] != 0) {
            continue;
        }
        for (; other < request->other_count
               && (ends || request->others[other].index < request->pieces[i].index);
             other++) {
            CM_TRY(make_way(c));
            cm_copy_request *part = next_part(c);
            part->dst = request->others[other].dst;
            part->src = request->others[other].src;
            CM_TRY(start_alone(c, part));
        }
        if (!ends) {
            CM_TRY(make_way(c));
            cm_copy_request *part = next_part(c);
            cm_many_set_ends(part, &request->pieces[i]);
            CM_TRY(start_alone(c, part));
        }
    }
    return cm_ok();
}

static cm_status
start_groups(cm_many_call *c, cm_many_way way)
{
    const cm_many_request *request = c->request;
    for (uint32_t g = 1; g < c->group_count; g++) {
        cm_many *many;
        if (c->shapes[g].way != way) {
            continue;
        }
        CM_TRY(ask_whether_to_go_on(c));
        CM_TRY(cm_many_create(request->pieces, c->groups, request->piece_count,
                              (uint8_t)g, &c->shapes[g], &many));
        cm_ticket *ticket = NULL;
        if (many->count == 1) {
            cm_copy_request *part = next_part(c);
            cm_many_set_ends(part, &many->pieces[0]);
            cm_many_destroy(many);
            CM_TRY(start_alone(c, part));
            continue;
        }
        cm_status status = cm_many_start_group(c, next_part(c), many, &ticket);
        CM_TRY(add_part(c, ticket, status));
    }
    return cm_ok();
}

/* Those first that only queue work; then those for which the host works meanwhile. */
static cm_status
start_parts(cm_many_call *c)
{
    static const cm_many_way order[] = {CM_MANY_TABLE, CM_MANY_PEER, CM_MANY_DOWN,
                                        CM_MANY_UP, CM_MANY_HOST};
    for (size_t i = 0; i < sizeof(order) / sizeof(order[0]); i++) {
        CM_TRY(start_groups(c, order[i]));
    }
    return start_those_alone(c);
}

static bool
all_parts_are_done(cm_many_call *c)
{
    for (uint64_t i = 0; i < c->part_count; i++) {
        if (!cm_ticket_update(c->parts[i])) {
            return false;
        }
    }
    return true;
}

/* A job that does nothing but wait for the parts, on a stream where one has a device.
 */
static cm_status
start_waiting(cm_many_call *c, cm_ticket *ticket)
{
    cm_copy_request request = {.after_tickets = ticket->parts,
                               .after_ticket_count = (uint32_t)ticket->part_count};
    cm_job *job;
    CM_TRY(cm_job_create(c->engine, &request, &c->tuning, ticket, &job));
    job->plan.route = CM_ROUTE_HOST;
    job->plan.device = -1;
    job->plan.nbytes = c->nbytes;
    for (uint32_t g = 1; g < c->group_count && job->plan.device < 0; g++) {
        job->plan.device = c->shapes[g].device;
    }
    if (job->plan.device >= 0) {
        job->plan.route = CM_ROUTE_SEVERAL;
    }
    job->plan.src_device = job->plan.device;
    return cm_job_start(job, &request, cm_job_record_after(job, &request));
}

/* By a caller's thread that waits: until all are done, or CM_ECANCELLED. */
static cm_status
wait_for_parts(cm_many_call *c)
{
    for (uint64_t i = 0; i < c->part_count; i++) {
        CM_TRY(wait_for_part(c, i));
    }
    return cm_ok();
}

/* All are done. Their failure is the whole's, for the caller to tell. */
static cm_status
finish_whole(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    cm_ticket_finish(ticket, cm_ok(), true);
    cm_mutex_lock(&engine->lock);
    cm_status status = ticket->status;
    cm_mutex_unlock(&engine->lock);
    return status;
}

/* What has not begun does not; the last first, so that none comes after one that is not
 * made. */
static void
cancel_parts(cm_ticket *ticket)
{
    for (uint64_t i = ticket->part_count; i > 0; i--) {
        (void)cm_ticket_cancel(ticket->parts[i - 1]);
    }
}

/* Whoever waits here may be interrupted. Of a call that fails what is under way goes on
 * behind the ticket, which nobody asks how it ended. */
static cm_status
join_parts(cm_many_call *c, cm_ticket *ticket, cm_status started)
{
    bool blocking = c->request->common.blocking;
    bool waits = cm_request_waits(&c->request->common);
    cm_status status = started;
    ticket->parts = c->parts;
    ticket->part_count = c->part_count;
    ticket->nbytes = c->nbytes;
    ticket->route = CM_ROUTE_SEVERAL;
    for (uint64_t i = 0; i < c->part_count; i++) {
        ticket->captured = ticket->captured || c->parts[i]->captured;
    }
    if (waits && status.code != CM_ECANCELLED) {
        cm_status waited = wait_for_parts(c);
        status = cm_is_ok(waited) ? status : waited;
    }
    bool done = cm_is_ok(status) && (blocking || all_parts_are_done(c));
    c->parts = NULL; /* the ticket's */
    if (status.code == CM_ECANCELLED) {
        cancel_parts(ticket);
    }
    if (!cm_is_ok(status)) {
        cm_ticket_finish(ticket, cm_fail(CM_ECANCELLED, 0), true);
        if (waits && status.code == CM_ECANCELLED) {
            cm_ticket_drain(ticket);
        }
        return status;
    }
    if (done && blocking) {
        return finish_whole(ticket);
    }
    if (done) {
        cm_ticket_finish(ticket, cm_ok(), false); /* the ticket tells, as when it is
                                                     later */
        return status;
    }
    return start_waiting(c, ticket);
}

static cm_shared_keep *
create_shared(const cm_copy_request *common)
{
    cm_shared_keep *shared = calloc(1, sizeof(*shared));
    if (shared != NULL) {
        atomic_init(&shared->refs, 1);
        shared->count = common->keep_count;
        for (uint32_t i = 0; i < common->keep_count; i++) {
            shared->keep[i] = common->keep[i];
        }
    }
    return shared;
}

/* Room for all parts, and for the tickets that each comes after. Until `shared` is
 * there the keeps are the caller's. */
static cm_status
make_room(cm_many_call *c)
{
    const cm_copy_request *common = &c->request->common;
    uint64_t room = c->group_count + c->alone_count + c->request->other_count;
    size_t after_room = (size_t)common->after_ticket_count + 1;
    c->after = malloc(after_room * sizeof(cm_ticket *));
    c->parts = malloc((size_t)room * sizeof(cm_ticket *));
    c->shared = c->after == NULL || c->parts == NULL ? NULL : create_shared(common);
    c->common = *common;
    c->common.after_tickets = c->after;
    if (c->shared == NULL) {
        return cm_fail(CM_ENOMEM, room * sizeof(cm_ticket *));
    }
    for (uint32_t i = 0; i < common->after_ticket_count; i++) {
        c->after[i] = common->after_tickets[i];
    }
    c->common.keep_count = 1;
    c->common.blocking = false;
    c->common.ticket_seen = NULL;
    c->asked_ns = cm_now_ns();
    if (common->stream == NULL) {
        c->common.interrupted = NULL; /* they run in the background */
    }
    return cm_ok();
}

/* Without what a source repeats. */
static uint64_t
count_nbytes(const cm_many_request *request)
{
    uint64_t nbytes = 0;
    for (uint64_t i = 0; i < request->piece_count; i++) {
        nbytes += request->pieces[i].nbytes;
    }
    for (uint64_t i = 0; i < request->other_count; i++) {
        const cm_region *src = &request->others[i].src;
        uint64_t own = (uint64_t)src->itemsize;
        for (int axis = 0; axis < src->ndim; axis++) {
            own *= src->strides[axis] == 0 ? 1 : (uint64_t)src->shape[axis];
        }
        nbytes += own;
    }
    return nbytes;
}

cm_status
cm_many_start_several(cm_many_call *c, cm_ticket **out)
{
    cm_status status = make_room(c);
    if (!cm_is_ok(status)) {
        cm_request_drop_keeps(&c->request->common);
        return status;
    }
    cm_copy_request whole = {.keep = {share(c)}, .keep_count = 1};
    cm_ticket *ticket = cm_ticket_create(c->engine, &whole);
    if (ticket == NULL) {
        cm_request_drop_keeps(&whole);
        return cm_fail(CM_ENOMEM, 0);
    }
    if (c->request->common.ticket_seen != NULL) {
        *c->request->common.ticket_seen = ticket;
    }
    c->common.part_of = ticket;
    ticket->nbytes = count_nbytes(c->request); /* for a look before all is begun */
    status = join_parts(c, ticket, start_parts(c));
    if (!cm_is_ok(status) && out != NULL && !cm_ticket_update(ticket)) {
        *out = ticket; /* so that others can come after it */
        return status;
    }
    return cm_ticket_hand_over(ticket, status, out);
}

void
cm_many_end_several(cm_many_call *c)
{
    for (uint64_t i = 0; c->parts != NULL && i < c->part_count; i++) {
        cm_ticket_release(c->parts[i]);
    }
    if (c->shared != NULL) {
        drop_shared(c->shared);
    }
    free(c->parts);
    free(c->after);
}
