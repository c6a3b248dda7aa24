/* SPDX-License-Identifier: Apache-2.0 */
/* One counted record of a stream: handle, id, device, owner. Everything that remembers
 * a stream holds one of these, so a handle is never used after its stream died and
 * never mistaken for a recycled one. The per-thread default stream has one handle, but
 * in every thread it is another stream: its record belongs to the thread that wrapped
 * it. Threads: the counts are atomic, the rest is set once. */
#pragma once

#include <stdatomic.h>

#include "runtime/runtime.h"

typedef struct cm_stream {
    atomic_uint refs;
    atomic_uint capture_refs; /* reasons why it may be in a capture; see
                                 cm_stream_may_capture() */
    uint64_t handle;          /* for others: cm_stream_tell_handle() */
    uint64_t id; /* cudaStreamGetId; the legacy stream's is its handle, a per-thread
                    default stream's is its thread's alone */
    int device;  /* index */
    bool owns_handle; /* destroyed with the record */
    bool is_lasting;  /* as long as `owner`, which alone destroys it, lives */
    void *owner;      /* keeps a foreign stream alive; NULL: nothing has to */
    void (*drop_owner)(void *owner); /* called once at the end; must not need any lock
                                        of the core; NULL when owner is NULL */
    cm_runtime *rt;                  /* borrowed */
    cm_list capturable; /* in the runtime's list once other code may capture it, and
                           kept; its lock */
} cm_stream;

/* Make a stream of our own on `device`. Fails: stream_create, stream_get_id, CM_ENOMEM. */
CM_NODISCARD cm_status cm_stream_create(cm_runtime *rt, int device, unsigned flags,
                                        int priority, cm_stream **out);

/* Record a stream of other code. Takes over `owner` on success only.
 * Fails: stream_is_capturing, stream_get_id (a dead or wrong handle), CM_ENOMEM. */
CM_NODISCARD cm_status cm_stream_wrap(cm_runtime *rt, int device, uint64_t handle,
                                      void *owner, void (*drop_owner)(void *),
                                      cm_stream **out);

static inline bool
cm_stream_is_legacy(const cm_stream *stream)
{
    return stream->id == CM_STREAM_LEGACY;
}

/* May the handle be used later? One that nobody keeps alive may be dead or recycled,
 * and the per-thread handle means another stream on each thread. */
static inline bool
cm_stream_is_kept(const cm_stream *stream)
{
    return stream->handle != CM_STREAM_PER_THREAD
           && (cm_stream_is_legacy(stream) || stream->owns_handle
               || stream->owner != NULL);
}

/* In place of the id that a stream has which captured when it was wrapped. */
#define CM_STREAM_CAPTURING (UINT64_C(1) << 62)

/* Records of the same stream. One that was not asked for its id has its handle: that is
 * no other stream's while it captures, and what it does then belongs to a graph. */
static inline bool
cm_stream_same(const cm_stream *a, const cm_stream *b)
{
    if (a == b || a->id == b->id) {
        return a->device == b->device;
    }
    const cm_stream *known = (a->id & CM_STREAM_CAPTURING) != 0 ? b : a;
    return ((a->id | b->id) & CM_STREAM_CAPTURING) != 0 && a->handle == b->handle
           && a->device == b->device && cm_stream_is_kept(known);
}

/* Neither ours nor the legacy one: its handle may be gone before the record is,
 * whatever keeps the object it came in, or mean another stream in another thread. */
static inline bool
cm_stream_is_foreign(const cm_stream *stream)
{
    return !stream->owns_handle && !stream->is_lasting && !cm_stream_is_legacy(stream);
}

/* Does the handle mean this stream in the calling thread? */
bool cm_stream_is_here(const cm_stream *stream);
/* Is it what `handle`, on `device`, means in the calling thread? */
bool cm_stream_is_handle(const cm_stream *stream, int device, uint64_t handle);

/* Record `event`, whichever device is current, over the stream's work so far; over all
 * work of its device where the stream is another thread's, which cannot be named here.
 * Fails: event_record, context_record_event, device_synchronize, cm_device_enter. */
CM_NODISCARD cm_status cm_stream_record(const cm_stream *stream, uint64_t event);
/* Is its work done, or, of another thread's default stream, all work of its device?
 * Fails: stream_query, event_create, and what cm_stream_record does. */
CM_NODISCARD cm_status cm_stream_query(const cm_stream *stream, bool *done);

/* Is the stream of that handle capturing? False for the default ones, which cannot be
 * captured and may not be asked while another is.
 * Fails: stream_is_capturing, what cm_device_enter does. */
CM_NODISCARD cm_status cm_stream_ask_capturing(cm_runtime *rt, int device,
                                               uint64_t handle, bool *out);
/* Fails: CM_ECAPTURING while it is captured; stream_is_capturing. A stream that no
 * other code can have begun to capture is not asked. */
CM_NODISCARD cm_status cm_stream_check_not_capturing(const cm_stream *stream);

/* Is a capture going on that can be known of? Of the streams that cumem was ever told
 * of and keeps, its own included, each is asked, and of each device in use the legacy
 * stream, which knows of blocking streams that capture. A capture on a stream that
 * nobody told of no driver tells. For what would end a capture in any mode: events over
 * a context, waits for devices. Asks only; a stream that cannot be asked counts as not
 * capturing. */
bool cm_streams_capture(cm_runtime *rt);

/* Let `stream` wait for `event`, whichever device is current: the default streams'
 * handles mean those of the current one. Fails: stream_wait_event, what cm_device_enter does. */
CM_NODISCARD cm_status cm_stream_wait_event(cm_stream *stream, uint64_t event);

/* Let `consumer` wait for all that `producer` has been given so far; nothing to do when
 * they are the same. Fails: event_create, cm_stream_record, stream_wait_event,
 * event_destroy. */
CM_NODISCARD cm_status cm_stream_follow(cm_stream *consumer, const cm_stream *producer);

/* The handle, for code that is not ours: it may begin a capture. */
uint64_t cm_stream_tell_handle(cm_stream *stream);

/* False: it is not being captured, and the runtime need not be asked. A default stream
 * never is, nor is one of ours whose handle no other code knows and that no wait took
 * into the capture of another. */
static inline bool
cm_stream_may_capture(const cm_stream *stream)
{
    return atomic_load_explicit(&stream->capture_refs, memory_order_relaxed) != 0;
}

cm_stream *cm_stream_hold(cm_stream *stream);
/* The last release destroys an owned handle (work queued on it still completes). */
void cm_stream_release(cm_stream *stream);
/* The same but for the last: false, and nothing is done. Makes no runtime call. */
bool cm_stream_try_release(cm_stream *stream);
