/* SPDX-License-Identifier: Apache-2.0 */
/* Has the clocks of the order oracle, and the functions that tests call. The idea is
 * explained in order_oracle.h. A clock has a number for each line. Work A comes before
 * work B if B's clock contains A's number. */
#include "order_private.h"

#include <stdio.h>
#include <stdlib.h>

order_oracle *order_it;
static cm_ops_table hooked;

void
order_fail(const char *what, uint64_t a, uint64_t b)
{
    if (order_it->wrong[0] == '\0') {
        (void)snprintf(order_it->wrong, sizeof(order_it->wrong), "%s (%#llx, %llu)",
                       what, (unsigned long long)a, (unsigned long long)b);
    }
}

void *
order_more(void *items, uint32_t count, uint32_t *capacity, size_t nbytes)
{
    if (count < *capacity) {
        return items;
    }
    *capacity = 2 * *capacity + 64;
    void *grown = realloc(items, *capacity * nbytes);
    if (grown == NULL) {
        abort();
    }
    return grown;
}

/* -- clocks, with the lock held --------------------------------------------------------- */

void
order_join_locked(oracle_clock *into, const oracle_clock *from)
{
    for (uint32_t i = 0; i < order_it->line_count; i++) {
        into->of[i] = from->of[i] > into->of[i] ? from->of[i] : into->of[i];
    }
}

/* CUDA itself orders the legacy stream of a device and its blocking streams after each
 * other. Every other order is in `after`. */
oracle_clock
order_clock_locked(uint32_t index)
{
    const oracle_line *line = &order_it->lines[index];
    oracle_clock clock = line->after;
    clock.of[index] = line->seq;
    for (uint32_t i = 0; i < order_it->line_count; i++) {
        const oracle_line *other = &order_it->lines[i];
        bool ordered = index < ORACLE_DEVICES ? other->is_blocking && other->is_open
                                              : line->is_blocking && i < ORACLE_DEVICES;
        if (ordered && i != index && other->device == line->device) {
            order_join_locked(&clock, &other->after);
            clock.of[i] = other->seq > clock.of[i] ? other->seq : clock.of[i];
        }
    }
    return clock;
}

/* Note that the host has seen the end of the work in the clock. If some of that work is
 * behind a shut gate, the runtime was wrong, since it cannot have ended. */
static void
see(const oracle_clock *clock)
{
    for (uint32_t i = 0; i < order_it->line_count && order_it->is_alone; i++) {
        const oracle_line *line = &order_it->lines[i];
        if (line->is_shut && clock->of[i] > line->shut_seq) {
            order_fail("work behind a shut gate has ended", line->handle, clock->of[i]);
        }
    }
    order_join_locked(&order_it->seen, clock);
}

bool
order_is_seen_locked(const oracle_use *use)
{
    return order_it->seen.of[use->line] >= use->seq;
}

void
order_see(const oracle_clock *clock)
{
    cm_mutex_lock(&order_it->lock);
    see(clock);
    cm_mutex_unlock(&order_it->lock);
}

int
order_current_device(void)
{
    uint64_t context = 0;
    cm_status status = order_it->real->context_get(order_it->rt, &context);
    return cm_is_ok(status) && context > 0 ? (int)context - 1 : 0;
}

uint32_t
order_find_locked(uint64_t handle, int device)
{
    if (handle <= CM_STREAM_PER_THREAD) {
        return (handle == CM_STREAM_PER_THREAD ? ORACLE_DEVICES : 0u)
               + (uint32_t)device;
    }
    for (uint32_t i = 2 * ORACLE_DEVICES; i < order_it->line_count; i++) {
        if (order_it->lines[i].is_open && order_it->lines[i].handle == handle) {
            return i;
        }
    }
    return ORACLE_LINES;
}

/* -- what tests call -------------------------------------------------------------------- */

void
oracle_open(order_oracle *oracle, cm_runtime *rt, bool is_alone)
{
    *oracle = (order_oracle){.rt = rt, .real = rt->ops, .is_alone = is_alone};
    oracle->line_count = 2 * ORACLE_DEVICES;
    for (int d = 0; d < ORACLE_DEVICES; d++) {
        oracle->lines[d] =
            (oracle_line){.handle = CM_STREAM_LEGACY, .device = d, .is_open = true};
        oracle->lines[ORACLE_DEVICES + d] =
            (oracle_line){.handle = CM_STREAM_PER_THREAD,
                          .device = d,
                          .is_open = true,
                          .is_blocking = true};
    }
    order_it = oracle;
    hooked = *rt->ops;
    order_hook_streams(&hooked);
    order_hook_memory(&hooked);
    rt->ops = &hooked;
}

void
oracle_close(order_oracle *oracle)
{
    oracle->rt->ops = oracle->real;
    for (int i = 0; i < ORACLE_BUCKETS; i++) {
        while (oracle->events[i] != NULL) {
            oracle_event *next = oracle->events[i]->next;
            free(oracle->events[i]);
            oracle->events[i] = next;
        }
    }
    free(oracle->uses);
    free(oracle->ranges);
    order_it = NULL;
}

uint32_t
oracle_find(order_oracle *oracle, uint64_t handle, int device)
{
    cm_mutex_lock(&oracle->lock);
    uint32_t line = order_find_locked(handle, device);
    cm_mutex_unlock(&oracle->lock);
    return line;
}

void
oracle_use_range(order_oracle *oracle, uint32_t line, uint64_t begin, uint64_t nbytes)
{
    cm_mutex_lock(&oracle->lock);
    oracle_line *l = &oracle->lines[line];
    l->after = order_clock_locked(line);
    l->seq++;
    oracle_use use = {begin, begin + nbytes, line, l->seq};
    for (uint32_t i = oracle->use_count; i-- > 0;) {
        const oracle_use *old = &oracle->uses[i];
        bool same = old->line == line && old->begin == use.begin && old->end == use.end;
        if (same || order_is_seen_locked(old)) {
            oracle->uses[i] = oracle->uses[--oracle->use_count];
        }
    }
    oracle->uses =
        order_more(oracle->uses, oracle->use_count, &oracle->use_capacity, sizeof(use));
    oracle->uses[oracle->use_count++] = use;
    cm_mutex_unlock(&oracle->lock);
}

bool
oracle_ask(order_oracle *oracle, uint32_t line, uint64_t begin, uint64_t nbytes)
{
    bool good = true;
    bool ordered = false;
    oracle_clock clock = {{0}};
    cm_mutex_lock(&oracle->lock);
    if (line < ORACLE_LINES) {
        clock = order_clock_locked(line);
    }
    for (uint32_t i = 0; i < oracle->use_count && good; i++) {
        const oracle_use *use = &oracle->uses[i];
        if (use->begin < begin + nbytes && begin < use->end
            && !order_is_seen_locked(use)) {
            ordered = good = clock.of[use->line] >= use->seq;
        }
        if (!good) {
            order_fail("memory is handed out while work may run on it", use->begin,
                       use->line);
        }
    }
    oracle->ordered_count += ordered;
    cm_mutex_unlock(&oracle->lock);
    return ordered;
}

void
oracle_drain(order_oracle *oracle)
{
    oracle_open_gates(oracle);
    uint64_t context = 0;
    cm_status status = oracle->real->context_get(oracle->rt, &context);
    for (int d = 0; d < ORACLE_DEVICES && cm_is_ok(status); d++) {
        status = oracle->real->device_set(oracle->rt, d);
        if (cm_is_ok(status)) {
            status = order_device_synchronize(oracle->rt);
        }
    }
    if (cm_is_ok(status)) {
        status = oracle->real->context_set(oracle->rt, context);
    }
    if (!cm_is_ok(status)) {
        order_fail("the devices cannot be waited for", status.op,
                   (uint64_t)status.code);
    }
}
