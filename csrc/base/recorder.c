/* SPDX-License-Identifier: Apache-2.0 */
/* Implements the ring of the recorder, and the origins that threads lend each other. */
#include "base/recorder.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/thread.h"

/* The ring holds the last `row_count` of all rows that were noted. The newest is at the
 * place before `next`. Invariants: row_count <= capacity, row_count <= count, and
 * next < capacity unless both are 0. */
typedef struct event_ring {
    cm_spin_lock lock;
    cm_event *rows; /* owned; NULL while closed */
    uint64_t capacity;
    uint64_t next;
    uint64_t row_count;
    uint64_t count;
    bool watches_forks;
} event_ring;

atomic_bool cm_recorder_on;
static event_ring ring;
static cm_origin_finder *_Atomic find_origin;
static _Thread_local cm_event_origin lent;
static _Thread_local uint32_t thread_number;

/* -- noting ----------------------------------------------------------------------------- */

void
cm_recorder_note(cm_event event)
{
    if (thread_number == 0) {
        thread_number = (uint32_t)gettid();
    }
    event.thread = thread_number;
    cm_spin_lock_take(&ring.lock);
    if (ring.rows != NULL) {
        /* Read the clock under the lock, so that rows are in the order of their
         * times. */
        event.time_ns = event.time_ns != 0 ? event.time_ns : cm_now_ns();
        ring.rows[ring.next] = event;
        ring.next = ring.next + 1 == ring.capacity ? 0 : ring.next + 1;
        ring.row_count += ring.row_count < ring.capacity;
        ring.count++;
    }
    cm_spin_lock_give(&ring.lock);
}

cm_event_origin
cm_recorder_find_origin(uint64_t nbytes)
{
    cm_origin_finder *find = atomic_load_explicit(&find_origin, memory_order_acquire);
    return find == NULL ? lent : find(nbytes, lent);
}

cm_event_origin
cm_recorder_lend_origin(cm_event_origin origin)
{
    cm_event_origin before = lent;
    lent = origin;
    return before;
}

void
cm_recorder_note_here(cm_event event)
{
    cm_event_origin origin = cm_recorder_find_origin(event.nbytes);
    event.stack = origin.stack;
    event.tag = origin.tag;
    cm_recorder_note(event);
}

/* -- opening, closing, reading ---------------------------------------------------------- */

/* Free the lock in a forked child, since another thread of the parent may have had it
 * at the fork. */
static void
forget_in_child(void)
{
    atomic_store(&cm_recorder_on, false);
    ring.lock = (cm_spin_lock){0}; /* a lock that is free */
    thread_number = 0;
}

/* Return the place of a row that is still kept. */
static const cm_event *
row_locked(uint64_t number)
{
    uint64_t back = ring.count - number;
    return &ring.rows[back <= ring.next ? ring.next - back
                                        : ring.next + ring.capacity - back];
}

bool
cm_recorder_open(uint64_t capacity, cm_origin_finder *finder)
{
    atomic_store_explicit(&find_origin, finder, memory_order_release);
    if (!ring.watches_forks) {
        ring.watches_forks = pthread_atfork(NULL, NULL, forget_in_child) == 0;
    }
    cm_event *rows = NULL;
    if (capacity > ring.capacity) {
        /* Pages that are never touched cost nothing. */
        rows = calloc(capacity, sizeof(*rows));
        if (rows == NULL) {
            return false;
        }
        cm_spin_lock_take(&ring.lock);
        cm_event *old = ring.rows;
        for (uint64_t i = 0; i < ring.row_count; i++) {
            rows[i] = *row_locked(ring.count - ring.row_count + i);
        }
        ring.rows = rows;
        ring.capacity = capacity;
        ring.next = ring.row_count;
        cm_spin_lock_give(&ring.lock);
        free(old);
    }
    atomic_store(&cm_recorder_on, true);
    return true;
}

void
cm_recorder_close(void)
{
    atomic_store(&cm_recorder_on, false);
    cm_spin_lock_take(&ring.lock);
    cm_event *old = ring.rows;
    ring.rows = NULL;
    ring.capacity = ring.next = ring.row_count = 0;
    cm_spin_lock_give(&ring.lock);
    free(old);
}

uint64_t
cm_recorder_count(void)
{
    cm_spin_lock_take(&ring.lock);
    uint64_t count = ring.count;
    cm_spin_lock_give(&ring.lock);
    return count;
}

/* Copies the newest rows first, and takes the lock for a few rows at a time. So a
 * thread that notes an event waits only until those few are copied. Such threads may
 * overwrite rows that are not copied yet, and these are the oldest ones. */
uint64_t
cm_recorder_read(uint64_t begin, uint64_t end, char *out)
{
    enum { SOME = 256 };
    uint64_t first = end;
    for (bool more = true; more && first > begin;) {
        uint64_t from = first - begin < SOME ? begin : first - SOME;
        cm_spin_lock_take(&ring.lock);
        uint64_t oldest = ring.count - ring.row_count;
        more = from >= oldest;
        from = more ? from : oldest;
        while (first > from) {
            first--;
            memcpy(out + (first - begin) * CM_EVENT_NBYTES, row_locked(first),
                   CM_EVENT_NBYTES);
        }
        cm_spin_lock_give(&ring.lock);
    }
    return first;
}
