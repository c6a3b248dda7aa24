/* SPDX-License-Identifier: Apache-2.0 */
/* What happens to memory, as rows of one ring of the process: the oldest are
 * overwritten. Hooks have nothing passed in that could lead to a ring, so there is one
 * for all, and off it costs them a look at a flag. Knows nothing of Python: who
 * is working on what, a stack and a tag, are numbers that a layer above gives a
 * meaning.
 * Locks: one of its own, for copying rows; hooks hold no other. Opening, closing and
 * setting who is asked keep each other out: the caller sees to that. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The order of OPS and KINDS in cumem/recording/events.py. */
enum {
    CM_EVENT_ALLOCATE,
    CM_EVENT_FREE,
    CM_EVENT_GROW,
    CM_EVENT_TRIM,
    CM_EVENT_TRANSFER,
    CM_EVENT_PREFETCH,
    CM_EVENT_OUT_OF_MEMORY,
};
enum { CM_EVENT_REGISTERED = 4, CM_EVENT_STAGING = 5, CM_EVENT_PAGEABLE = 6 };

/* A row, as EVENT there says, which has no padding at the end. */
typedef struct cm_event {
    uint64_t time_ns; /* of cm_now_ns(); 0: now */
    uint64_t address;
    uint64_t nbytes;
    uint64_t value;
    uint64_t source;
    uint64_t stream;
    uint32_t pool;
    uint32_t thread; /* filled in */
    uint32_t stack;
    uint32_t tag;
    uint8_t op;
    uint8_t kind;
    uint8_t source_kind;
    int8_t device;
} cm_event;
enum { CM_EVENT_NBYTES = offsetof(cm_event, device) + 1 };

/* On whose behalf; 0: not known. */
typedef struct cm_event_origin {
    uint32_t stack;
    uint32_t tag;
} cm_event_origin;

extern atomic_bool cm_recorder_on;

static inline bool
cm_recorder_is_on(void)
{
    return __builtin_expect(atomic_load_explicit(&cm_recorder_on, memory_order_relaxed),
                            0);
}

/* Any thread, with nothing locked; the second finds its origin too. */
void cm_recorder_note(cm_event event);
void cm_recorder_note_here(cm_event event);

/* On whose behalf this thread works on `nbytes`: what the layer above finds, else what
 * the thread was lent. With nothing locked. */
cm_event_origin cm_recorder_find_origin(uint64_t nbytes);
/* Lend this thread another's, until the answer is put back. */
cm_event_origin cm_recorder_lend_origin(cm_event_origin origin);

/* Note from now on, with room for `capacity` rows at least; what is there stays.
 * `asked` (NULL: nobody) finds origins, and is told what the thread was lent. False: no
 * memory. A forked child notes nothing until it does this itself. */
typedef cm_event_origin cm_recorder_asked(uint64_t nbytes, cm_event_origin lent);
bool cm_recorder_open(uint64_t capacity, cm_recorder_asked *asked);
void cm_recorder_close(void);
/* Rows noted so far, over all times that it was open. */
uint64_t cm_recorder_count(void);
/* Put rows `begin` up to `end`, or what is still there of them, into `out`, which has
 * CM_EVENT_NBYTES for each of them, at its end. Returns the first that was. */
uint64_t cm_recorder_read(uint64_t begin, uint64_t end, char *out);
