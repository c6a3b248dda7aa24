/* SPDX-License-Identifier: Apache-2.0 */
/* What emulated_stream.c, emulated_line.c and emulated_event.c share: a line is the
 * thread and queue behind a stream, an item is one piece of work in it. Private to
 * them.
 * Locks: everything here is guarded by streams->lock, except what only the line's own
 * thread uses (`random`). */
#ifndef CM_RUNTIME_EMULATED_LINE_H
#define CM_RUNTIME_EMULATED_LINE_H

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "runtime/emulated_handles.h"
#include "runtime/emulated_stream.h"

typedef enum cm_emulated_line_kind {
    CM_LINE_USER,
    CM_LINE_LEGACY,
    CM_LINE_PER_THREAD,
    CM_LINE_FENCE, /* our own, for events over a whole device */
} cm_emulated_line_kind;

typedef struct cm_emulated_item {
    cm_list node;  /* in line->queue until it runs */
    unsigned refs; /* queue or worker, `last`, events, items that depend on it */
    bool done;
    bool is_prompt;       /* no delay of its own: a mere wait */
    uint64_t end_ns;      /* valid once done */
    cm_emulated_job *job; /* owned; NULL: a mark */
    uint32_t dep_count;
    struct cm_emulated_item *deps[]; /* held; must be done before it runs */
} cm_emulated_item;

typedef struct cm_emulated_line {
    cm_list node; /* in streams->lines */
    cm_emulated_streams *streams;
    cm_emulated_line_kind kind;
    uint64_t handle; /* user streams only */
    uint64_t id;
    int device;
    unsigned flags;
    int priority;
    bool is_shut;
    bool is_closed;   /* no more work will come */
    bool is_finished; /* its thread is about to end; may be joined */
    uint64_t capture; /* number of the capture under way; 0: none */
    const cm_emulated_thread *capturer;
    cm_list queue;
    cm_emulated_item *last; /* held: the newest, maybe done; NULL: never any */
    cm_cond work;
    cm_thread thread;
    uint64_t random;
} cm_emulated_line;

struct cm_emulated_streams {
    cm_mutex lock;
    cm_cond progress; /* an item is done */
    cm_emulated_config config;
    void *context;
    cm_list lines;
    cm_emulated_handles by_handle;
    cm_emulated_handles events;
    cm_emulated_line *legacy[CM_MAX_DEVICES]; /* borrowed; NULL: not made yet */
    cm_emulated_line *fence[CM_MAX_DEVICES];
    _Atomic int32_t faults[CM_MAX_DEVICES];
    uint64_t next_handle;
    uint64_t reused_handle; /* of the stream destroyed last; 0: none */
    uint64_t next_id;
    uint64_t next_event;
    uint64_t next_capture;
    uint64_t stream_count; /* user streams */
    uint64_t queued;
    uint32_t capturing;
    bool is_closing;
};

/* -- emulated_line.c ----------------------------------------------------------------- */
int32_t cm_emulated_line_open_locked(cm_emulated_streams *streams,
                                     cm_emulated_line_kind kind, int device,
                                     cm_emulated_line **out);
/* The line behind a handle; makes default lines on first use. */
int32_t cm_emulated_line_find_locked(cm_emulated_streams *streams,
                                     cm_emulated_thread *thread, uint64_t stream,
                                     cm_emulated_line **out);
/* Join and free the lines that have ended. Takes the lock itself. */
void cm_emulated_line_reap(cm_emulated_streams *streams);

/* True when the line takes part in the order with its device's legacy stream. */
static inline bool
cm_emulated_line_is_blocking(const cm_emulated_line *line)
{
    return (line->kind == CM_LINE_USER && (line->flags & CM_STREAM_NON_BLOCKING) == 0)
           || line->kind == CM_LINE_PER_THREAD;
}

/* Queue `job` (owned on success) or a mark behind what CUDA's order puts before it,
 * `after` (may be NULL) included. *out is held for the caller unless `out` is NULL. */
int32_t cm_emulated_line_push_locked(cm_emulated_line *line, cm_emulated_job *job,
                                     cm_emulated_item *after, cm_emulated_item **out);
void cm_emulated_item_release_locked(cm_emulated_item *item);
void cm_emulated_item_wait_locked(cm_emulated_streams *streams,
                                  const cm_emulated_item *item);
/* The capture that the line takes part in or would break: 0 or the code to answer. */
int32_t cm_emulated_line_check_capture_locked(const cm_emulated_line *line);

/* -- emulated_event.c: called by emulated_stream.c with the lock held --------------- */
void cm_emulated_events_reset_locked(cm_emulated_streams *streams, int device);
bool cm_emulated_streams_forbid_locked(const cm_emulated_streams *streams,
                                       const cm_emulated_thread *thread);

#endif
