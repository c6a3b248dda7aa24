/* SPDX-License-Identifier: Apache-2.0 */
/* Has the oracle's hooks for streams, gates and events. Each hook calls the emulated
 * runtime, and on success notes what that means for the order. */
#include <stdlib.h>

#include "order_private.h"
#include "runtime/emulated/emulated.h"

/* -- streams ---------------------------------------------------------------------------- */

/* Find the line of the stream with this handle, and the clock of the work that it has
 * been given so far, or with `next` of the next work that it will be given. Returns
 * ORACLE_LINES if the handle is stale. */
static uint32_t
look_up(uint64_t handle, bool next, oracle_clock *clock)
{
    int device = handle <= CM_STREAM_PER_THREAD ? order_current_device() : 0;
    cm_mutex_lock(&order_it->lock);
    uint32_t line = order_find_locked(handle, device);
    if (line < ORACLE_DEVICES || (next && line < ORACLE_LINES)) {
        *clock = order_clock_locked(line);
    }
    else if (line < ORACLE_LINES) {
        *clock = order_it->lines[line].after;
        clock->of[line] = order_it->lines[line].seq;
    }
    cm_mutex_unlock(&order_it->lock);
    return line;
}

/* True if a new stream may get this place: its stream was destroyed, and the host has
 * seen the end of each use that is noted for it. */
static bool
is_line_free_locked(uint32_t index)
{
    for (uint32_t i = 0; i < order_it->use_count; i++) {
        if (order_it->uses[i].line == index
            && !order_is_seen_locked(&order_it->uses[i])) {
            return false;
        }
    }
    return !order_it->lines[index].is_open;
}

static cm_status
hook_stream_create(cm_runtime *rt, unsigned flags, int priority, uint64_t *out)
{
    cm_status status = order_it->real->stream_create(rt, flags, priority, out);
    if (cm_is_ok(status)) {
        int device = order_current_device();
        cm_mutex_lock(&order_it->lock);
        uint32_t i = 2 * ORACLE_DEVICES;
        while (i < order_it->line_count && !is_line_free_locked(i)) {
            i++;
        }
        if (i == ORACLE_LINES) {
            abort(); /* the test should have called oracle_drain(), which makes room */
        }
        order_it->line_count = i == order_it->line_count ? i + 1 : order_it->line_count;
        order_it->lines[i] =
            (oracle_line){.handle = *out,
                          .device = device,
                          .is_open = true,
                          .is_blocking = (flags & CM_STREAM_NON_BLOCKING) == 0,
                          .seq = order_it->lines[i].seq};
        cm_mutex_unlock(&order_it->lock);
    }
    return status;
}

static cm_status
hook_stream_destroy(cm_runtime *rt, uint64_t stream)
{
    cm_mutex_lock(&order_it->lock);
    uint32_t line = order_find_locked(stream, 0);
    if (line < ORACLE_LINES) {
        order_it->lines[line].is_open = false;
        order_it->lines[line].is_shut = false; /* destroying it opens its gate */
    }
    cm_mutex_unlock(&order_it->lock);
    return order_it->real->stream_destroy(rt, stream);
}

static cm_status
hook_stream_query(cm_runtime *rt, uint64_t stream, bool *done)
{
    oracle_clock clock;
    uint32_t line = look_up(stream, false, &clock);
    cm_status status = order_it->real->stream_query(rt, stream, done);
    if (cm_is_ok(status) && *done && line < ORACLE_LINES) {
        order_see(&clock);
    }
    return status;
}

/* Note the new state and move the gate under one lock, so that no other thread sees one
 * without the other. */
static cm_status
gate_locked(uint32_t index, bool shut)
{
    oracle_line *line = &order_it->lines[index];
    uint64_t context = 0;
    CM_TRY(order_it->real->context_get(order_it->rt, &context));
    CM_TRY(order_it->real->device_set(order_it->rt, line->device));
    if (shut && !line->is_shut) {
        line->shut_seq = line->seq;
    }
    line->is_shut = shut;
    cm_status status = shut ? cm_emulated_gate_close(order_it->rt, line->handle)
                            : cm_emulated_gate_open(order_it->rt, line->handle);
    CM_TRY(order_it->real->context_set(order_it->rt, context));
    return status;
}

void
oracle_gate(order_oracle *oracle, uint32_t line, bool shut)
{
    cm_mutex_lock(&oracle->lock);
    cm_status status = gate_locked(line, shut);
    if (!cm_is_ok(status)) {
        order_fail("a gate does not move", line, (uint64_t)status.code);
    }
    cm_mutex_unlock(&oracle->lock);
}

void
oracle_open_gates(order_oracle *oracle)
{
    cm_mutex_lock(&oracle->lock);
    for (uint32_t i = 0; i < oracle->line_count; i++) {
        cm_status status = oracle->lines[i].is_shut ? gate_locked(i, false) : cm_ok();
        if (!cm_is_ok(status)) {
            order_fail("a gate does not open", i, (uint64_t)status.code);
        }
    }
    cm_mutex_unlock(&oracle->lock);
}

static cm_status
hook_stream_synchronize(cm_runtime *rt, uint64_t stream)
{
    oracle_clock clock;
    oracle_open_gates(order_it);
    uint32_t line = look_up(stream, false, &clock);
    cm_status status = order_it->real->stream_synchronize(rt, stream);
    if (cm_is_ok(status) && line < ORACLE_LINES) {
        order_see(&clock);
    }
    return status;
}

/* Return the clock of all work that the device was given so far. */
static oracle_clock
device_clock(int device)
{
    oracle_clock clock = {{0}};
    cm_mutex_lock(&order_it->lock);
    for (uint32_t i = 0; i < order_it->line_count; i++) {
        /* A stream counts even if it was destroyed. */
        if (order_it->lines[i].device == device) {
            order_join_locked(&clock, &order_it->lines[i].after);
            clock.of[i] = order_it->lines[i].seq;
        }
    }
    cm_mutex_unlock(&order_it->lock);
    return clock;
}

cm_status
order_device_synchronize(cm_runtime *rt)
{
    oracle_open_gates(order_it);
    oracle_clock clock = device_clock(order_current_device());
    cm_status status = order_it->real->device_synchronize(rt);
    if (cm_is_ok(status)) {
        order_see(&clock);
    }
    return status;
}

/* -- events ----------------------------------------------------------------------------- */

/* Return the event with this handle, or NULL if nothing was recorded. */
static oracle_event *
event_of(uint64_t handle)
{
    oracle_event *event = order_it->events[handle / 2 % ORACLE_BUCKETS];
    while (event != NULL && event->handle != handle) {
        event = event->next;
    }
    return event;
}

/* Set *out to the clock of the event. Returns false, with an empty clock, if nothing
 * was recorded. */
static bool
event_clock(uint64_t handle, oracle_clock *out)
{
    cm_mutex_lock(&order_it->lock);
    const oracle_event *event = event_of(handle);
    *out = event != NULL ? event->clock : (oracle_clock){{0}};
    cm_mutex_unlock(&order_it->lock);
    return event != NULL;
}

/* Note that the event now stands for the work in the clock. */
static void
set_event(uint64_t handle, const oracle_clock *clock)
{
    cm_mutex_lock(&order_it->lock);
    oracle_event *event = event_of(handle);
    if (event == NULL) {
        event = calloc(1, sizeof(*event));
        if (event == NULL) {
            abort();
        }
        event->handle = handle;
        event->next = order_it->events[handle / 2 % ORACLE_BUCKETS];
        order_it->events[handle / 2 % ORACLE_BUCKETS] = event;
    }
    event->clock = *clock;
    cm_mutex_unlock(&order_it->lock);
}

static cm_status
hook_event_destroy(cm_runtime *rt, uint64_t handle)
{
    cm_status status = order_it->real->event_destroy(rt, handle);
    cm_mutex_lock(&order_it->lock);
    oracle_event **at = &order_it->events[handle / 2 % ORACLE_BUCKETS];
    while (*at != NULL && (*at)->handle != handle) {
        at = &(*at)->next;
    }
    if (cm_is_ok(status) && *at != NULL) {
        oracle_event *gone = *at;
        *at = gone->next;
        free(gone);
    }
    cm_mutex_unlock(&order_it->lock);
    return status;
}

/* Note that the next work of the line comes after the work in the clock. */
static void
follow(uint32_t line, const oracle_clock *clock)
{
    cm_mutex_lock(&order_it->lock);
    order_join_locked(&order_it->lines[line].after, clock);
    cm_mutex_unlock(&order_it->lock);
}

static cm_status
hook_event_record(cm_runtime *rt, uint64_t event, uint64_t stream)
{
    oracle_clock clock;
    uint32_t line = look_up(stream, true, &clock);
    cm_status status = order_it->real->event_record(rt, event, stream);
    if (cm_is_ok(status) && line < ORACLE_LINES) {
        set_event(event, &clock);
        follow(line, &clock);
    }
    return status;
}

static cm_status
hook_context_record_event(cm_runtime *rt, uint64_t event)
{
    oracle_clock clock = device_clock(order_current_device());
    cm_status status = order_it->real->context_record_event(rt, event);
    if (cm_is_ok(status)) {
        set_event(event, &clock);
    }
    return status;
}

static cm_status
hook_stream_wait_event(cm_runtime *rt, uint64_t stream, uint64_t event)
{
    oracle_clock clock, own;
    bool known = event_clock(event, &clock);
    uint32_t line = look_up(stream, false, &own);
    cm_status status = order_it->real->stream_wait_event(rt, stream, event);
    if (cm_is_ok(status) && known && line < ORACLE_LINES) {
        follow(line, &clock);
    }
    return status;
}

static cm_status
hook_event_query(cm_runtime *rt, uint64_t event, bool *done)
{
    oracle_clock clock;
    bool known = event_clock(event, &clock);
    cm_status status = order_it->real->event_query(rt, event, done);
    if (cm_is_ok(status) && *done && known) {
        order_see(&clock);
    }
    return status;
}

static cm_status
hook_event_synchronize(cm_runtime *rt, uint64_t event)
{
    oracle_clock clock;
    oracle_open_gates(order_it);
    bool known = event_clock(event, &clock);
    cm_status status = order_it->real->event_synchronize(rt, event);
    if (cm_is_ok(status) && known) {
        order_see(&clock);
    }
    return status;
}

void
order_hook_streams(cm_ops_table *table)
{
    table->stream_create = hook_stream_create;
    table->stream_destroy = hook_stream_destroy;
    table->stream_query = hook_stream_query;
    table->stream_synchronize = hook_stream_synchronize;
    table->stream_wait_event = hook_stream_wait_event;
    table->device_synchronize = order_device_synchronize;
    table->event_record = hook_event_record;
    table->event_destroy = hook_event_destroy;
    table->event_query = hook_event_query;
    table->event_synchronize = hook_event_synchronize;
    table->context_record_event = hook_context_record_event;
}
