/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/engine/job.h"

#include <stdlib.h>

#include "base/backoff.h"
#include "runtime/scope.h"

cm_status
cm_engine_share_locked(cm_engine *engine, const cm_region *region,
                       cm_page_shares *shares)
{
    int64_t low, high;
    if (region->host == NULL || cm_region_is_on_device(region)
        || !cm_is_ok(cm_region_bounds(region, &low, &high)) || low == high) {
        return cm_ok(); /* a region that is wrong is refused when it is planned */
    }
    return cm_registry_share(engine->registry, (const char *)region->host + low,
                             (uint64_t)(high - low), false, shares);
}

cm_event
cm_request_event(const cm_copy_request *request)
{
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    int device = cm_region_is_on_device(dst) ? dst->device : src->device;
    device = request->stream != NULL ? request->stream->device : device;
    int64_t fill_count = 0; /* the elements of a fill, whose plan counts only one */
    if (request->is_fill) {
        cm_ignore(cm_region_count(dst, &fill_count));
    }
    cm_event_origin origin = cm_recorder_find_origin(UINT64_MAX - 1);
    cm_event event = {.op = CM_EVENT_TRANSFER,
                      .address = cm_region_copy_address(dst),
                      .nbytes = (uint64_t)(fill_count * dst->itemsize),
                      .source = request->is_fill ? 0 : cm_region_copy_address(src),
                      .stream = request->stream == NULL ? 0 : request->stream->handle,
                      .kind = cm_kind_in_event(dst->kind),
                      .source_kind = cm_kind_in_event(src->kind),
                      .stack = origin.stack,
                      .tag = origin.tag,
                      .device = (int8_t)device};
    return event;
}

static void
add_keeps(cm_ticket *ticket, const cm_copy_request *request)
{
    for (uint32_t i = 0; i < request->keep_count; i++) {
        ticket->keep[ticket->keep_count++] = request->keep[i];
    }
}

bool
cm_ticket_take_keeps(cm_ticket *ticket, const cm_copy_request *request)
{
    if (!cm_request_take_keeps(request)) {
        return false;
    }
    add_keeps(ticket, request);
    return true;
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
    ticket->asker_count = 1;
    cm_list_init(&ticket->node);
    cm_list_init(&ticket->order_node);
    cm_list_init(&ticket->waiters);
    ticket->engine = engine;
    atomic_fetch_add_explicit(&engine->refs, 1, memory_order_relaxed);
    ticket->start_ns = cm_now_ns();
    if (cm_recorder_is_on()) {
        ticket->noted = cm_request_event(request);
    }
    ticket->part_of = request->part_of;
    add_keeps(ticket, request);
    atomic_fetch_add(&engine->pending_count, 1);
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
    ticket->asker_count++;
    cm_mutex_unlock(&ticket->engine->lock);
    return cm_ticket_hold(ticket);
}

/* If the ticket has failed and nobody has read the failure, put it into the list of
 * cm_engine_take_unread(), which then has a reference. Returns false if there is no
 * such failure, or if the engine has ended, so that nobody will ask. */
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
    atomic_fetch_add_explicit(&ticket->engine->counts.unread, 1, memory_order_relaxed);
    return true;
}

void
cm_ticket_release(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    if (atomic_fetch_sub_explicit(&ticket->refs, 1, memory_order_acq_rel) != 1
        || cm_engine_is_forked(engine)) {
        return;
    }
    free(ticket);
    cm_engine_release(engine);
}

cm_status
cm_ticket_abandon(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    cm_status unreported = cm_ok();
    if (cm_engine_is_forked(engine)) {
        return unreported;
    }
    cm_mutex_lock(&engine->lock);
    if (--ticket->asker_count == 0 && ticket->state >= CM_TICKET_DONE
        && !queue_unread_locked(ticket) && !ticket->read) {
        unreported = ticket->status;
        ticket->read = true;
    }
    cm_mutex_unlock(&engine->lock);
    cm_ticket_release(ticket);
    return unreported;
}

cm_status
cm_ticket_hand_over(cm_ticket *ticket, cm_status status, cm_ticket **out)
{
    if (out != NULL && (cm_is_ok(status) || ticket->part_of != NULL)) {
        *out = ticket;
        return status;
    }
    /* This can only return CM_OK. The engine has not ended, so a failure that nobody
     * has read is queued for cm_engine_take_unread(). */
    cm_ignore(cm_ticket_abandon(ticket));
    return status;
}

cm_status
cm_engine_take_unread(cm_engine *engine)
{
    if (cm_engine_is_forked(engine)) {
        return cm_ok();
    }
    cm_mutex_lock(&engine->lock);
    cm_list *node = cm_list_pop_front(&engine->unread);
    cm_mutex_unlock(&engine->lock);
    if (node == NULL) {
        return cm_ok();
    }
    atomic_fetch_sub_explicit(&engine->counts.unread, 1, memory_order_relaxed);
    cm_ticket *ticket = CM_LIST_ENTRY(node, cm_ticket, node);
    cm_status status = ticket->status;
    cm_ticket_release(ticket);
    return status;
}

/* -- submitted, done, over --------------------------------------------------------------- */

/* Release the tickets that this one had to come after. It no longer needs them, since
 * it is over, or since streams wait for their copies from now on. */
static void
let_go_of_those_before(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    cm_mutex_lock(&engine->lock);
    cm_ticket **after = ticket->after;
    uint64_t count = ticket->after_count;
    ticket->after = NULL;
    ticket->after_count = 0;
    ticket->is_chained = false;
    cm_mutex_unlock(&engine->lock);
    for (uint64_t i = 0; i < count; i++) {
        cm_ticket_release(after[i]);
    }
    free(after);
}

/* Put the ticket into `state` and release the lock, which the caller holds. Then drop
 * the order's reference to each ticket that has become OVER. If the last part of a
 * batch is over, also finish the ticket of the whole batch. */
static void
enter_state_and_unlock(cm_ticket *ticket, cm_ticket_state state)
{
    cm_engine *engine = ticket->engine;
    cm_list advanced;
    cm_list *node;
    cm_list_init(&advanced);
    cm_ticket_enter_state_locked(ticket, state, &advanced);
    if (state == CM_TICKET_DONE && ticket->asker_count == 0) {
        (void)queue_unread_locked(ticket);
    }
    cm_mutex_unlock(&engine->lock);
    while ((node = cm_list_pop_front(&advanced)) != NULL) {
        cm_ticket *next = CM_LIST_ENTRY(node, cm_ticket, order_node);
        if (next->state == CM_TICKET_OVER) {
            let_go_of_those_before(next);
            cm_ticket_release(next);
        }
        else { /* a whole, the last of whose parts is over */
            cm_ticket_finish(next, cm_ok(), false);
        }
    }
}

/* Record an event behind the work of `stream`, and make `follower` wait for it. */
static cm_status
record_end(cm_engine *engine, cm_stream *stream, cm_stream *follower, uint64_t *out)
{
    CM_TRY(cm_cache_take_event(engine, stream->device, CM_WAITED, out));
    cm_status status = cm_rt_event_record(engine->rt, *out, stream->handle);
    if (cm_is_ok(status) && follower != NULL && follower != stream) {
        status = cm_stream_wait_event(follower, *out);
    }
    if (!cm_is_ok(status)) {
        cm_cache_give_event(engine, stream->device, CM_WAITED, *out);
    }
    return status;
}

cm_status
cm_ticket_submit(cm_ticket *ticket, cm_stream *stream, cm_stream *follower,
                 uint64_t start_event, cm_stream *lent, cm_stream *side,
                 cm_status outcome)
{
    cm_engine *engine = ticket->engine;
    uint64_t end_event;
    CM_TRY(record_end(engine, stream, follower, &end_event));
    let_go_of_those_before(ticket); /* from now on the streams keep the order */
    cm_mutex_lock(&engine->lock);
    ticket->loan = (cm_loan){.device = stream->device,
                             .start_event = start_event,
                             .end_event = end_event,
                             .stream = lent == NULL ? NULL : cm_stream_hold(lent),
                             .side = side == NULL ? NULL : cm_stream_hold(side)};
    ticket->status = outcome;
    ticket->read = outcome.code == CM_ECANCELLED; /* the call itself reports that */
    enter_state_and_unlock(ticket, CM_TICKET_SUBMITTED);
    return cm_ok();
}

/* Ring and release all of the bells, and free the list. */
static void
send_notices(cm_notice *notice)
{
    while (notice != NULL) {
        cm_notice *next = notice->next;
        cm_bell_ring(notice->bell);
        cm_bell_release(notice->bell);
        free(notice);
        notice = next;
    }
}

static bool
has_event(const cm_ticket *ticket)
{
    return ticket->state == CM_TICKET_SUBMITTED && !ticket->is_whole;
}

/* Wait while another thread asks about the ticket's events or makes it done. Neither
 * takes long. The lock is released meanwhile. */
static void
await_others_locked(const cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    uint64_t begin_ns = ticket->busy ? cm_now_ns() : 0;
    while (ticket->busy) {
        cm_mutex_unlock(&engine->lock);
        cm_nap_after(cm_now_ns() - begin_ns);
        cm_mutex_lock(&engine->lock);
    }
}

static void
set_idle(cm_ticket *ticket)
{
    cm_mutex_lock(&ticket->engine->lock);
    ticket->busy = false;
    cm_mutex_unlock(&ticket->engine->lock);
}

/* Give what the ticket has borrowed back to the cache. */
static void
give_back(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    cm_mutex_lock(&engine->lock);
    cm_loan loan = ticket->loan;
    ticket->loan = (cm_loan){.device = 0};
    cm_mutex_unlock(&engine->lock);
    cm_cache_give_event(engine, loan.device, CM_WAITED, loan.start_event);
    cm_cache_give_event(engine, loan.device, CM_WAITED, loan.end_event);
    cm_cache_give_stream(engine, loan.stream);
    if (loan.side != NULL) {
        cm_stream_release(loan.side);
    }
}

/* Return the outcome of a whole whose parts are all over. It is `status` or, if that is
 * a success, the first failure among them. The parts count as read from now on. The
 * caller holds the lock. */
static cm_status
outcome_of_parts(const cm_ticket *whole, cm_status status)
{
    for (uint64_t i = 0; i < whole->after_count; i++) {
        cm_ticket *part = whole->after[i];
        status = cm_is_ok(status) ? part->status : status;
        part->read = true;
    }
    return status;
}

/* Record that the ticket has ended. A whole is not recorded itself: each of its parts
 * is. */
static void
note_end(const cm_ticket *ticket, cm_status status, double seconds)
{
    cm_event event = ticket->noted;
    if (event.op != CM_EVENT_TRANSFER || ticket->is_whole || ticket->captured
        || ticket->nbytes == 0 || !cm_is_ok(cm_first_failure(ticket->status, status))
        || !cm_recorder_is_on()) {
        return;
    }
    event.nbytes = event.nbytes != 0 ? event.nbytes : ticket->nbytes;
    event.value = (uint64_t)(seconds * 1e9);
    event.time_ns = cm_now_ns() - event.value;
    cm_recorder_note(event);
}

cm_status
cm_ticket_check_rows(const cm_ticket *ticket, cm_status status)
{
    if (ticket->wrong_rows == NULL || !cm_is_ok(status)) {
        return status;
    }
    /* The word no longer changes, since the kernel that writes it has ended. */
    uint32_t wrong = *(const volatile uint32_t *)ticket->wrong_rows;
    if (wrong != 0 && ticket->wrong_rows_of_all != NULL) {
        atomic_fetch_or(ticket->wrong_rows_of_all, wrong);
    }
    return wrong == 0 ? status : cm_fail(CM_EROWS, wrong | ticket->wrong_rows_bits);
}

void
cm_ticket_finish(cm_ticket *ticket, cm_status status, bool read)
{
    cm_engine *engine = ticket->engine;
    const cm_loan *loan = &ticket->loan;
    double seconds = (double)(cm_now_ns() - ticket->start_ns) * 1e-9;
    if (loan->start_event != 0 && loan->end_event != 0 && cm_is_ok(status)) {
        float milliseconds = 0;
        /* The device is entered, since a thread without a context would otherwise make
         * one on device 0. If the time cannot be read, the copy is done all the
         * same. */
        cm_status asked =
            CM_IN_SCOPE(engine->rt, loan->device,
                        cm_rt_event_elapsed(engine->rt, loan->start_event,
                                            loan->end_event, &milliseconds));
        if (cm_is_ok(asked)) {
            seconds = (double)milliseconds * 1e-3;
        }
    }
    status = cm_ticket_check_rows(ticket, status);
    note_end(ticket, status, seconds);
    /* Whoever sees that the copy is done may rely on nothing being kept alive any more,
     * so shares and keeps are dropped before the ticket says so. The shares of
     * page-locked memory go first, since the pages may be unmapped with the object that
     * keeps them. */
    cm_registry_unshare(engine->registry, &ticket->locked);
    for (uint32_t i = 0; i < ticket->keep_count; i++) {
        ticket->keep[i].drop(ticket->keep[i].object);
    }
    ticket->keep_count = 0;
    give_back(ticket);
    cm_mutex_lock(&engine->lock);
    status = ticket->cancelled ? cm_fail(CM_ECANCELLED, 0) : status;
    status = ticket->is_whole ? outcome_of_parts(ticket, status) : status;
    ticket->status = cm_first_failure(ticket->status, status);
    ticket->read = ticket->read || read;
    ticket->seconds = seconds;
    ticket->busy = false;
    if (cm_is_ok(ticket->status)) {
        cm_ticket_set_moved(ticket, ticket->nbytes);
    }
    else {
        atomic_fetch_add_explicit(&engine->counts.failed, 1, memory_order_relaxed);
    }
    cm_notice *notices = ticket->notices;
    ticket->notices = NULL;
    enter_state_and_unlock(ticket, CM_TICKET_DONE);
    send_notices(notices);
}

void
cm_ticket_finish_after_parts(cm_ticket *ticket, cm_ticket **parts, uint64_t part_count,
                             cm_status status, bool read)
{
    cm_engine *engine = ticket->engine;
    cm_mutex_lock(&engine->lock);
    ticket->started = true; /* its parts are under way, so it cannot be cancelled */
    ticket->is_whole = true;
    ticket->after = parts;
    ticket->after_count = part_count;
    ticket->status = status;
    ticket->read = read;
    cm_list_push_back(&engine->going_on, &ticket->order_node);
    enter_state_and_unlock(ticket, CM_TICKET_QUEUED);
}

/* Ask whether the event has passed. If the call fails it is made once more, so that a
 * single failure does not end the copy. */
static cm_status
ask_device(cm_runtime *rt, int device, uint64_t event, bool *done)
{
    cm_status status = cm_ok();
    *done = false;
    for (int i = 0; i == 0 || (i == 1 && !cm_is_ok(status)); i++) {
        /* A thread without a context would make one on device 0, and the question would
         * break a capture that this thread has under way. The scope prevents both. */
        status = CM_IN_SCOPE(rt, device, cm_rt_event_query(rt, event, done));
    }
    return status;
}

/* Ask about the event of a submitted ticket. If the event has passed, make the ticket
 * done. The ticket is then also over, since its stream has waited for the copies that
 * come before it. Returns true if it is over. */
static bool
query_end(cm_ticket *ticket)
{
    bool done;
    cm_status status = ask_device(ticket->engine->rt, ticket->loan.device,
                                  ticket->loan.end_event, &done);
    if (done || !cm_is_ok(status)) {
        cm_ticket_finish(ticket, status, false);
        return true;
    }
    set_idle(ticket);
    return false;
}

/* Find the first part of a submitted whole, from *index on, that is not known to be
 * over. Returns it with a reference and stores its index. Returns NULL if there is
 * none, or if the ticket is not a submitted whole. */
static cm_ticket *
hold_part(cm_ticket *whole, uint64_t *index)
{
    if (!whole->is_whole) {
        return NULL;
    }
    cm_mutex_lock(&whole->engine->lock);
    *index = *index < whole->passed_count ? whole->passed_count : *index;
    bool has = whole->state == CM_TICKET_SUBMITTED && *index < whole->after_count;
    cm_ticket *part = has ? cm_ticket_hold(whole->after[*index]) : NULL;
    cm_mutex_unlock(&whole->engine->lock);
    return part;
}

/* Ask about the event that a job waits for, and put the job where it belongs now. The
 * job goes on if the event has passed, and also if the question failed, so that it
 * meets the failure itself. */
static void
query_job_event(cm_ticket *ticket, cm_job *job)
{
    cm_engine *engine = ticket->engine;
    bool done;
    cm_status status =
        ask_device(engine->rt, job->awaited.device, job->awaited.event, &done);
    if (done || !cm_is_ok(status)) {
        job->wait = CM_WAIT_TURN;
    }
    cm_mutex_lock(&engine->lock);
    cm_order_put_job_locked(engine, job);
    cm_mutex_unlock(&engine->lock);
}

bool
cm_ticket_update(cm_ticket *ticket)
{
    cm_engine *engine = ticket->engine;
    cm_ticket *part;
    bool goes_on = true; /* a whole is over once its last part is */
    for (uint64_t i = 0; goes_on && (part = hold_part(ticket, &i)) != NULL; i++) {
        goes_on = cm_ticket_update(part);
        cm_ticket_release(part);
    }
    cm_mutex_lock(&engine->lock);
    await_others_locked(ticket);
    bool waits = ticket->state == CM_TICKET_QUEUED && !cm_list_is_empty(&ticket->node);
    cm_job *job = waits ? cm_order_take_job_locked(ticket) : NULL;
    bool looks = has_event(ticket);
    bool over = ticket->state == CM_TICKET_OVER;
    ticket->busy = looks;
    cm_mutex_unlock(&engine->lock);
    if (job != NULL) {
        query_job_event(ticket, job);
    }
    return looks ? query_end(ticket) : over;
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
    return ticket->nbytes - 1; /* all parts have moved, but the whole is not done yet */
}

uint64_t
cm_engine_count_pending(cm_engine *engine)
{
    return cm_engine_is_forked(engine) ? 0 : atomic_load(&engine->pending_count);
}

/* -- reading, waiting, and letting streams and event loops wait --- */

void
cm_ticket_peek(const cm_ticket *ticket, cm_ticket_info *out)
{
    cm_engine *engine = ticket->engine;
    /* In a forked child nobody changes the ticket, and the lock may have been held by
     * another thread when the process forked. */
    bool is_forked = cm_engine_is_forked(engine);
    if (!is_forked) {
        cm_mutex_lock(&engine->lock);
    }
    *out = (cm_ticket_info){.done = ticket->state >= CM_TICKET_DONE,
                            .row = ticket->row,
                            .captured = ticket->captured,
                            .cancelled = ticket->cancelled,
                            .nbytes = ticket->nbytes};
    if (out->done) {
        out->status = ticket->status;
        out->seconds = ticket->seconds;
    }
    if (!is_forked) {
        cm_mutex_unlock(&engine->lock);
    }
}

void
cm_ticket_query(cm_ticket *ticket, cm_ticket_info *out)
{
    if (!cm_engine_is_forked(ticket->engine)) {
        (void)cm_ticket_update(ticket);
    }
    cm_ticket_peek(ticket, out);
}

enum {
    SUBMITTED_OR_LATER = CM_TICKET_SUBMITTED | CM_TICKET_DONE | CM_TICKET_OVER,
    ENDED = CM_TICKET_DONE | CM_TICKET_OVER,
    /* The states in which a stream can be made to wait for the ticket. */
    PASSED = CM_TICKET_SUBMITTED | CM_TICKET_OVER,
};

/* Wait until the ticket is in one of `states`.
 * Fails: CM_EFORKED, CM_ETIMEOUT. */
static cm_status
reach(cm_ticket *ticket, unsigned states, uint64_t timeout_ns)
{
    cm_engine *engine = ticket->engine;
    uint64_t begin = cm_now_ns();
    uint64_t deadline =
        timeout_ns > UINT64_MAX - begin ? UINT64_MAX : begin + timeout_ns;
    uint64_t start = 0; /* when this thread first saw it submitted */
    if (cm_engine_is_forked(engine)) {
        return cm_fail(CM_EFORKED, 0);
    }
    for (;;) {
        (void)cm_ticket_update(ticket);
        cm_mutex_lock(&engine->lock);
        uint64_t now = cm_now_ns();
        /* Until the ticket is submitted another thread has to act, and then signals
         * `changed`. */
        uint64_t until = deadline;
        bool there = (ticket->state & states) != 0;
        if (there || now >= deadline) {
            cm_mutex_unlock(&engine->lock);
            return there ? cm_ok() : cm_fail(CM_ETIMEOUT, timeout_ns);
        }
        if (ticket->state == CM_TICKET_SUBMITTED) {
            start = start == 0 ? now : start;
            uint64_t gap = cm_backoff_ns(now - start);
            until = deadline - now < gap ? deadline : now + gap;
        }
        bool sleeps = until - now > CM_BACKOFF_SLEEP_NS;
        if (sleeps) {
            (void)cm_cond_wait_until(&engine->changed, &engine->lock, until);
        }
        cm_mutex_unlock(&engine->lock);
        if (!sleeps) {
            cm_pause_until(until);
        }
    }
}

cm_status
cm_ticket_outcome(cm_ticket *ticket, bool read)
{
    cm_mutex_lock(&ticket->engine->lock);
    cm_status status = ticket->status;
    ticket->read = ticket->read || (read && !cm_is_ok(status));
    cm_mutex_unlock(&ticket->engine->lock);
    return status;
}

cm_status
cm_ticket_wait(cm_ticket *ticket, uint64_t timeout_ns)
{
    if (cm_engine_is_forked(ticket->engine) && ticket->state >= CM_TICKET_DONE) {
        return ticket->status;
    }
    CM_TRY(reach(ticket, ENDED, timeout_ns));
    return cm_ticket_outcome(ticket, true);
}

cm_status
cm_ticket_wait_ended(cm_ticket *ticket, uint64_t timeout_ns)
{
    if (cm_engine_is_forked(ticket->engine) && ticket->state >= CM_TICKET_DONE) {
        return cm_ok();
    }
    return reach(ticket, ENDED, timeout_ns);
}

cm_status
cm_ticket_wait_submitted(cm_ticket *ticket, uint64_t timeout_ns)
{
    return reach(ticket, SUBMITTED_OR_LATER, timeout_ns);
}

/* Make `stream` wait for the event of a submitted ticket, or for those of its parts. A
 * ticket that is done needs no wait. */
static cm_status
queue_wait(cm_ticket *ticket, cm_stream *stream)
{
    cm_engine *engine = ticket->engine;
    cm_ticket *part;
    for (uint64_t i = 0; (part = hold_part(ticket, &i)) != NULL; i++) {
        cm_status status = queue_wait(part, stream);
        cm_ticket_release(part);
        CM_TRY(status);
    }
    cm_mutex_lock(&engine->lock);
    await_others_locked(ticket);
    bool has = has_event(ticket);
    ticket->busy = has;
    cm_mutex_unlock(&engine->lock);
    if (!has) {
        return cm_ok();
    }
    cm_status status = cm_stream_wait_event(stream, ticket->loan.end_event);
    set_idle(ticket);
    return status;
}

cm_status
cm_ticket_depend(cm_ticket *ticket, cm_stream *stream, uint64_t timeout_ns)
{
    CM_TRY(reach(ticket, stream == NULL ? CM_TICKET_OVER : PASSED, timeout_ns));
    return stream == NULL ? cm_ok() : queue_wait(ticket, stream);
}

cm_stream *
cm_ticket_take_stream(cm_ticket *ticket, int device)
{
    cm_stream *stream = NULL;
    cm_mutex_lock(&ticket->engine->lock);
    if (ticket->state == CM_TICKET_SUBMITTED && ticket->is_whole) {
        ticket = ticket->after[ticket->after_count - 1];
    }
    cm_loan *loan = &ticket->loan;
    if (ticket->state == CM_TICKET_SUBMITTED && loan->stream != NULL
        && loan->device == device) {
        stream = loan->stream;
        loan->stream = NULL;
    }
    cm_mutex_unlock(&ticket->engine->lock);
    return stream;
}

void
cm_ticket_drain(cm_ticket *ticket)
{
    cm_ignore(cm_ticket_depend(ticket, NULL, ticket->engine->drain_ns));
}

cm_status
cm_ticket_follow(cm_ticket *ticket, cm_stream *stream)
{
    CM_TRY(reach(ticket, SUBMITTED_OR_LATER, UINT64_MAX));
    return queue_wait(ticket, stream);
}

cm_status
cm_ticket_order(cm_ticket *ticket, cm_stream *stream)
{
    CM_TRY(cm_ticket_follow(ticket, stream));
    return cm_ticket_outcome(ticket, true);
}

cm_status
cm_ticket_notify(cm_ticket *ticket, cm_bell *bell)
{
    cm_engine *engine = ticket->engine;
    if (cm_engine_is_forked(engine)) {
        return cm_fail(CM_EFORKED, 0);
    }
    cm_notice *notice = malloc(sizeof(*notice));
    CM_TRY(cm_allocated(notice != NULL, sizeof(*notice)));
    *notice = (cm_notice){.bell = cm_bell_hold(bell)};
    cm_mutex_lock(&engine->lock);
    bool done = ticket->state >= CM_TICKET_DONE;
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
