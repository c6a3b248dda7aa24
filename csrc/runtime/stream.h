/* SPDX-License-Identifier: Apache-2.0 */
/* A stream is a counted record of its handle, id, device and owner. Code that remembers
 * a stream holds its record. So nobody uses a handle after its stream was destroyed, or
 * confuses that stream with a later one that got the same handle.
 *
 * The owner of a stream decides what may be done with it later:
 *
 *   - Ours (cm_stream_create()): the record owns the handle, and it lives until the
 *     last release.
 *   - The legacy default stream: it lives for ever, and its handle means the same
 *     everywhere.
 *   - Another library's, with an owner: `owner` keeps the object that had the handle
 *     alive, so the handle may be used later (cm_stream_is_kept()). But that library
 *     may still destroy the stream (cm_stream_is_foreign()), unless it said that it
 *     will not (is_lasting).
 *   - Another library's, without an owner: the handle may be used only during the call
 *     that brought it.
 *   - A per-thread default stream: all threads use the same handle for it, but in each
 *     thread the handle means another stream. Its record belongs to the thread that
 *     wrapped it, and its id distinguishes it from the records of other threads.
 *
 * Captures
 * --------
 * While a stream is captured, nobody may query it, record an event on it or wait for it
 * in the usual way. Asking the driver whether it is captured costs a call, so
 * `capture_refs` counts the reasons why it may be. A stream gets into a capture only if
 * other code that knows its handle captures it, or if it waits for an event of a
 * capture. While the count is 0, neither is so, and the driver need not be asked.
 * Example: the driver is never asked about a stream of ours until somebody has read
 * `stream.handle`; from then on it is asked each time. Threads: the counts are atomic,
 * `capturable` is guarded by the lock of its list, and everything else is set once. */
#pragma once

#include <stdatomic.h>

#include "runtime/runtime.h"

typedef struct cm_stream {
    atomic_uint refs;
    /* How many reasons there are to ask whether the stream is in a capture. If there
     * are 0 it is in no capture; see cm_stream_may_capture(). */
    atomic_uint capture_refs;
    uint64_t handle; /* other code gets it from cm_stream_export_handle() */
    /* From cudaStreamGetId. The id of the legacy stream is its handle, and the id of a
     * per-thread default stream belongs to one thread alone. */
    uint64_t id;
    int device;       /* index */
    bool owns_handle; /* the handle is destroyed with the record */
    bool is_lasting;  /* the stream lives as long as `owner`, which alone destroys it */
    void *owner;      /* keeps a foreign stream alive; may be NULL */
    /* Called once, with the last release. It must not take a lock of the core. NULL if
     * owner is NULL. */
    void (*drop_owner)(void *owner);
    cm_runtime *rt; /* borrowed */
    /* In the runtime's list, if the stream is kept and other code may capture it.
     * Guarded by that list's lock. */
    cm_list capturable;
} cm_stream;

/* Make a stream of our own on `device`.
 * Fails: stream_create, stream_get_id, CM_ENOMEM. */
CM_NODISCARD cm_status cm_stream_create(cm_runtime *rt, int device, unsigned flags,
                                        int priority, cm_stream **out);

/* Make a record of a stream of other code. On success the record takes over `owner`.
 * Fails: stream_is_capturing, stream_get_id (a dead or wrong handle), CM_ENOMEM. */
CM_NODISCARD cm_status cm_stream_wrap(cm_runtime *rt, int device, uint64_t handle,
                                      void *owner, void (*drop_owner)(void *),
                                      cm_stream **out);

static inline bool
cm_stream_is_legacy(const cm_stream *stream)
{
    return stream->id == CM_STREAM_LEGACY;
}

/* True if the handle may be used later. If nobody keeps the stream alive, it may have
 * been destroyed by then, and another stream may have its handle. The per-thread handle
 * means another stream on each thread. */
static inline bool
cm_stream_is_kept(const cm_stream *stream)
{
    return stream->handle != CM_STREAM_PER_THREAD
           && (cm_stream_is_legacy(stream) || stream->owns_handle
               || stream->owner != NULL);
}

/* This bit is set in the id of a record whose stream was capturing when it was wrapped,
 * so that its real id could not be read. */
#define CM_STREAM_CAPTURING (UINT64_C(1) << 62)

/* True if two records are of the same stream. A record whose id could not be read is
 * compared by its handle: while its stream captures, no other stream can have that
 * handle, and all work that is queued on the stream meanwhile goes into a graph. */
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

/* True if the handle may become invalid while the record exists: the stream is neither
 * ours nor the legacy one, and its library has not promised to keep it. This holds even
 * if `owner` is kept alive, and for per-thread handles, which mean another stream in
 * another thread. */
static inline bool
cm_stream_is_foreign(const cm_stream *stream)
{
    return !stream->owns_handle && !stream->is_lasting && !cm_stream_is_legacy(stream);
}

/* True if the handle means this stream in the calling thread. */
bool cm_stream_is_of_this_thread(const cm_stream *stream);
/* True if `handle`, on `device`, means this stream in the calling thread. */
bool cm_stream_is_handle(const cm_stream *stream, int device, uint64_t handle);

/* Record `event` over the stream's work so far, whichever device is current. The handle
 * of another thread's default stream would mean this thread's, so for such a stream the
 * event covers all work of its device.
 * Fails: event_record, context_record_event, device_synchronize; as
 * cm_device_enter(). */
CM_NODISCARD cm_status cm_stream_record(const cm_stream *stream, uint64_t event);
/* Set *done to whether the stream's work has ended. For the default stream of another
 * thread it says whether all work of its device has ended.
 * Fails: stream_query, event_create; as cm_stream_record(). */
CM_NODISCARD cm_status cm_stream_query(const cm_stream *stream, bool *done);

/* True if all of the stream's work is known to have ended, so that nobody need wait for
 * it. Streams that other code may have destroyed are not asked, nor those of a device
 * that has no context, nor one that is captured. */
bool cm_stream_is_idle(const cm_stream *stream);

/* Set *out to whether the stream with that handle is capturing. *out is false for
 * default streams, which cannot be captured, and which may not be asked while another
 * stream captures.
 * Fails: stream_is_capturing; as cm_device_enter(). */
CM_NODISCARD cm_status cm_stream_ask_capturing(cm_runtime *rt, int device,
                                               uint64_t handle, bool *out);
/* Fail with CM_ECAPTURING while the stream is captured. The driver is asked only if the
 * stream may be in a capture (cm_stream_may_capture()).
 * Fails: CM_ECAPTURING; stream_is_capturing. */
CM_NODISCARD cm_status cm_stream_check_not_capturing(const cm_stream *stream);

/* True if some stream is found to be capturing. This asks each stream that cumem knows
 * and keeps and that other code may capture, its own streams included, and the legacy
 * stream of each device in use, which knows whether any blocking stream captures. It
 * cannot find a capture on a stream that cumem has never seen. Called before actions
 * that would end a capture in any mode: recording an event over a context, and waiting
 * for a device. A stream that cannot be asked counts as not capturing. */
bool cm_streams_capture(cm_runtime *rt);

/* Let `stream` wait for `event`. Any device may be current: this enters the stream's
 * own device, since a default handle means the default stream of the current device.
 * Fails: stream_wait_event; as cm_device_enter(). */
CM_NODISCARD cm_status cm_stream_wait_event(cm_stream *stream, uint64_t event);

/* Let `consumer` wait for all work that has been queued on `producer` so far. Does
 * nothing if they are the same stream.
 * Fails: event_create, cm_stream_record(), stream_wait_event, event_destroy. */
CM_NODISCARD cm_status cm_stream_follow(cm_stream *consumer, const cm_stream *producer);

/* Return the handle for other code, which may begin a capture with it. */
uint64_t cm_stream_export_handle(cm_stream *stream);

/* False if the stream cannot be in a capture, so that the runtime need not be asked.
 * This is so for default streams, and for a stream of ours whose handle no other code
 * knows and which no wait has taken into the capture of another stream. */
static inline bool
cm_stream_may_capture(const cm_stream *stream)
{
    return atomic_load_explicit(&stream->capture_refs, memory_order_relaxed) != 0;
}

/* Hold the record until a release. Returns the stream. */
cm_stream *cm_stream_hold(cm_stream *stream);
/* Release the record. The last release destroys the handle if the record owns it. Work
 * that is queued on the stream still completes. */
void cm_stream_release(cm_stream *stream);
/* Release the record unless this would be the last release. In that case this function
 * does nothing and returns false. Makes no runtime call. */
bool cm_stream_try_release(cm_stream *stream);
