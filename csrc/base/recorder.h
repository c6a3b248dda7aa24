/* SPDX-License-Identifier: Apache-2.0 */
/* The recorder writes down what happens to memory, as rows of a ring in which new rows
 * overwrite the oldest. The hooks that note events are not passed a ring, so there is
 * one for the whole process. While the recorder is off, a hook costs one look at a
 * flag. The recorder knows nothing of Python. The origin of an event, that is, on whose
 * behalf it happens, is a pair of numbers for a stack and a tag, and only the layer
 * above knows what the numbers mean.
 * Locks: one of its own, for copying rows; hooks hold no other lock. Callers see to it
 * that no two threads open or close it at the same time. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In the order of OPS in cumem/recording/events.py. */
enum {
    CM_EVENT_ALLOCATE,
    CM_EVENT_FREE,
    CM_EVENT_GROW,
    CM_EVENT_TRIM,
    CM_EVENT_TRANSFER,
    CM_EVENT_PREFETCH,
    CM_EVENT_OUT_OF_MEMORY,
};
/* The kinds of memory in events, in the order of KINDS in the same file. Records that
 * were saved have these numbers: a kind keeps its own, and a new one comes last. */
enum {
    CM_EVENT_PINNED,
    CM_EVENT_MAPPED,
    CM_EVENT_MANAGED,
    CM_EVENT_DEVICE,
    CM_EVENT_REGISTERED, /* memory of others that is page-locked */
    CM_EVENT_STAGING,    /* memory that copies use on the way */
    CM_EVENT_PAGEABLE,
};

/* A row, laid out as EVENT in the same file says, which has no padding at the end. */
typedef struct cm_event {
    uint64_t time_ns; /* by cm_now_ns(); 0: filled in with the present time */
    uint64_t address;
    uint64_t nbytes;
    uint64_t value;
    uint64_t source;
    uint64_t stream;
    uint32_t pool;
    uint32_t thread; /* filled in by cm_recorder_note() */
    uint32_t stack;
    uint32_t tag;
    uint8_t op;
    uint8_t kind;
    uint8_t source_kind;
    int8_t device;
} cm_event;
enum { CM_EVENT_NBYTES = offsetof(cm_event, device) + 1 };

/* On whose behalf something happens; 0: not known. */
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

/* Note an event, from any thread, with nothing locked. cm_recorder_note_here() also
 * finds the origin and fills it in. */
void cm_recorder_note(cm_event event);
void cm_recorder_note_here(cm_event event);

/* On whose behalf this thread works on `nbytes`: what the layer above says, or else the
 * origin that the thread was lent. Called with nothing locked. */
cm_event_origin cm_recorder_find_origin(uint64_t nbytes);
/* Lend this thread the origin of another. Returns the one before, which the caller puts
 * back afterwards in the same way. */
cm_event_origin cm_recorder_lend_origin(cm_event_origin origin);

/* Note events from now on, with room for at least `capacity` rows; rows that are there
 * stay. `asked` is the function that cm_recorder_find_origin() asks; it is passed the
 * origin that the thread was lent. If it is NULL, that origin is the answer. Returns
 * false if there is no memory. A forked child notes nothing until it calls this
 * itself. */
typedef cm_event_origin cm_recorder_asked(uint64_t nbytes, cm_event_origin lent);
bool cm_recorder_open(uint64_t capacity, cm_recorder_asked *asked);
void cm_recorder_close(void);
/* Return how many rows were ever noted, including those of earlier times that the
 * recorder was open. */
uint64_t cm_recorder_count(void);
/* Copy rows `begin` up to `end`, or those of them that are still there, to `out`, which
 * has room for CM_EVENT_NBYTES for each row asked for. If the first of these rows have
 * been overwritten, their places in `out` are left as they are. Returns the number of
 * the first row that was copied. */
uint64_t cm_recorder_read(uint64_t begin, uint64_t end, char *out);
