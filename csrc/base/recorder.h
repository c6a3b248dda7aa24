/* SPDX-License-Identifier: Apache-2.0 */
/* The recorder keeps what happens to memory as rows of a ring, in which new rows
 * overwrite the oldest. The ring is global, because the functions that note events are
 * not told which one to use. While the recorder is off, noting an event costs no more
 * than reading a flag. The recorder knows nothing of Python. An event's origin (a
 * Python stack and a tag) is just a pair of numbers here, which a layer above
 * interprets.
 * Locks: one of its own, for copying rows. Callers that note events hold no other lock.
 *        Callers make sure that only one thread at a time opens or closes the
 *        recorder. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The operations in events, in the order of OPS in cumem/recording/events.py. Saved
 * records have these numbers, so a new operation comes last. */
enum {
    CM_EVENT_ALLOCATE,
    CM_EVENT_FREE,
    CM_EVENT_GROW,
    CM_EVENT_TRIM,
    CM_EVENT_TRANSFER,
    CM_EVENT_PREFETCH,
    CM_EVENT_OUT_OF_MEMORY,
    CM_EVENT_SLEEP,
    CM_EVENT_WAKE,
};
/* The kinds of memory in events, in the order of KINDS in the same file. Records that
 * were saved have these numbers: a kind keeps its number, and a new kind comes last. */
enum {
    CM_EVENT_PINNED,
    CM_EVENT_MAPPED,
    CM_EVENT_MANAGED,
    CM_EVENT_DEVICE,
    CM_EVENT_REGISTERED, /* memory of others that is page-locked */
    CM_EVENT_STAGING,    /* memory that copies use on the way */
    CM_EVENT_PAGEABLE,
};

/* A row. Its layout is that of EVENT in cumem/recording/events.py, which has no padding
 * at the end. */
typedef struct cm_event {
    uint64_t time_ns; /* by cm_now_ns(); if 0, the present time is filled in */
    uint64_t address; /* for a transfer, the address of its target */
    uint64_t nbytes;
    uint64_t value;  /* its meaning depends on `op`: see OPS in events.py */
    uint64_t source; /* the address of a transfer's source; else 0 */
    uint64_t stream; /* the stream's handle; 0 if there is none */
    uint32_t pool;   /* the pool's serial number; 0 if there is none */
    uint32_t thread; /* filled in by cm_recorder_note() */
    uint32_t stack;
    uint32_t tag;
    uint8_t op;   /* one of CM_EVENT_…, an operation */
    uint8_t kind; /* one of CM_EVENT_…, a kind; for a transfer, that of its target */
    uint8_t source_kind;
    int8_t device; /* -1 if there is none */
} cm_event;
enum { CM_EVENT_NBYTES = offsetof(cm_event, device) + 1 };

/* The numbers of the stack and the tag that caused an event, each 0 if unknown. */
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

/* Note an event. Any thread may call this, with nothing locked. cm_recorder_note_here()
 * also finds the origin of the event and fills it in. */
void cm_recorder_note(cm_event event);
void cm_recorder_note_here(cm_event event);

/* Return the origin of an event of `nbytes` bytes that this thread is about to note.
 * The finder that cm_recorder_open() was given chooses it; without a finder it is the
 * origin that was lent to the thread. Called with nothing locked. */
cm_event_origin cm_recorder_find_origin(uint64_t nbytes);
/* Lend the origin of another thread to this one. Returns the origin that was lent
 * before, which the caller puts back afterwards in the same way. */
cm_event_origin cm_recorder_lend_origin(cm_event_origin origin);

/* Note events from now on, with room for at least `capacity` rows. Rows that are
 * already there stay. `find_origin`, which may be NULL, returns the origin of an event
 * of `nbytes` bytes, given the origin that was lent to the thread. Returns false if
 * there is no memory. A forked child notes nothing until it calls this itself. */
typedef cm_event_origin cm_origin_finder(uint64_t nbytes, cm_event_origin lent);
bool cm_recorder_open(uint64_t capacity, cm_origin_finder *find_origin);
/* Stop noting events, and forget all rows. */
void cm_recorder_close(void);
/* Return how many rows were noted so far, in all the times that the recorder was
 * open. */
uint64_t cm_recorder_count(void);
/* Copy the rows with the numbers from `begin` to `end` - 1 to `out`, which has room for
 * CM_EVENT_NBYTES for each of them. Rows that have been overwritten are left out, and
 * their places in `out` stay unwritten. Returns the number of the first row that was
 * copied. */
uint64_t cm_recorder_read(uint64_t begin, uint64_t end, char *out);
