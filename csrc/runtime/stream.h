/* SPDX-License-Identifier: Apache-2.0 */
/* A stream, as a counted record of its handle, id, device and owner. Whoever remembers
 * a stream holds its record, so a handle is never used after its stream died, and never
 * mistaken for another stream that got the same handle.
 *
 * Whose stream it is decides what may be done with it later:
 *
 *   - Ours (cm_stream_create()): the record owns the handle, and it lives until the
 *     last release.
 *   - The legacy default stream: it lives for ever, and its handle means the same
 *     everywhere.
 *   - Another library's, with an owner: `owner` keeps the object alive that it came in,
 *     so the handle may be used later (cm_stream_is_kept()). But that library may still
 *     destroy the stream (cm_stream_is_foreign()), unless it said that it will not
 *     (is_lasting).
 *   - Another library's, without an owner: the handle may be used only now.
 *   - A per-thread default stream: it has one handle for all threads, but is another
 *     stream in each. Its record belongs to the thread that wrapped it, and has an id
 *     of that thread's own.
 *
 * Captures
 * --------
 * While a stream is captured it must not be asked, recorded or waited for as usual.
 * Asking the driver whether it is captured costs a call, so `capture_refs` tells when
 * the answer is known: it is 0 as long as no other code knows the handle and no wait
 * for an event of a capture is under way, which alone could take the stream into a
 * capture. Example: a stream of ours is never asked about until `stream.handle` has
 * been read by somebody; from then on it is asked about each time.
 * Threads: the counts are atomic, everything else is set once. */
#pragma once

#include <stdatomic.h>

#include "runtime/runtime.h"

typedef struct cm_stream {
    atomic_uint refs;
    /* Reasons why it may be in a capture; see cm_stream_may_capture(). */
    atomic_uint capture_refs;
    uint64_t handle; /* others get it by cm_stream_tell_handle() */
    /* From cudaStreamGetId. That of the legacy stream is its handle, and that of a
     * per-thread default stream belongs to its thread alone. */
    uint64_t id;
    int device;       /* index */
    bool owns_handle; /* the handle is destroyed with the record */
    bool is_lasting;  /* it lives as long as `owner`, which alone destroys it */
    void *owner;      /* keeps a foreign stream alive; NULL: nothing has to */
    /* Called once, at the end; must not need any lock of the core. NULL when owner is
     * NULL. */
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

/* Make a record of a stream of other code. Takes over `owner`, on success only.
 * Fails: stream_is_capturing, stream_get_id (a dead or wrong handle), CM_ENOMEM. */
CM_NODISCARD cm_status cm_stream_wrap(cm_runtime *rt, int device, uint64_t handle,
                                      void *owner, void (*drop_owner)(void *),
                                      cm_stream **out);

static inline bool
cm_stream_is_legacy(const cm_stream *stream)
{
    return stream->id == CM_STREAM_LEGACY;
}

/* True if the handle may be used later. A stream that nobody keeps alive may be dead by
 * then, or its handle another's; and the per-thread handle means another stream on each
 * thread. */
static inline bool
cm_stream_is_kept(const cm_stream *stream)
{
    return stream->handle != CM_STREAM_PER_THREAD
           && (cm_stream_is_legacy(stream) || stream->owns_handle
               || stream->owner != NULL);
}

/* Stands in place of the id in a record of a stream that was capturing when it was
 * wrapped. */
#define CM_STREAM_CAPTURING (UINT64_C(1) << 62)

/* True if two records are of the same stream. A record that could not ask for its id
 * has its handle instead. While such a stream captures, its handle belongs to no other
 * stream, and what it does then belongs to a graph. */
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

/* True if the stream is neither ours nor the legacy one: its handle may be gone before
 * the record is, whatever keeps the object alive that it came in; or it may mean
 * another stream in another thread. */
static inline bool
cm_stream_is_foreign(const cm_stream *stream)
{
    return !stream->owns_handle && !stream->is_lasting && !cm_stream_is_legacy(stream);
}

/* True if the handle means this stream in the calling thread. */
bool cm_stream_is_here(const cm_stream *stream);
/* True if this is the stream that `handle`, on `device`, means in the calling
 * thread. */
bool cm_stream_is_handle(const cm_stream *stream, int device, uint64_t handle);

/* Record `event` over the stream's work so far, whichever device is current. The
 * default stream of another thread cannot be named here, so for that one the event
 * covers all work of its device.
 * Fails: event_record, context_record_event, device_synchronize; as
 * cm_device_enter(). */
CM_NODISCARD cm_status cm_stream_record(const cm_stream *stream, uint64_t event);
/* *done says whether the stream's work has ended; for the default stream of another
 * thread, whether all work of its device has.
 * Fails: stream_query, event_create; as cm_stream_record(). */
CM_NODISCARD cm_status cm_stream_query(const cm_stream *stream, bool *done);

/* *out says whether the stream of that handle is capturing. It is false for the default
 * streams, which cannot be captured and may not be asked while another stream is.
 * Fails: stream_is_capturing; as cm_device_enter(). */
CM_NODISCARD cm_status cm_stream_ask_capturing(cm_runtime *rt, int device,
                                               uint64_t handle, bool *out);
/* Fails with CM_ECAPTURING while the stream is captured. A stream that no other code
 * can have begun to capture is not asked.
 * Fails: CM_ECAPTURING; stream_is_capturing. */
CM_NODISCARD cm_status cm_stream_check_not_capturing(const cm_stream *stream);

/* True if a capture is known to go on. This asks each stream that cumem was ever told
 * of and keeps, its own included, and the legacy stream of each device in use, which
 * knows of blocking streams that capture. A capture on a stream that nobody told of
 * cannot be found. Called before what would end a capture in any mode: an event over a
 * context, a wait for a device. It only asks; a stream that cannot be asked counts as
 * not capturing. */
bool cm_streams_capture(cm_runtime *rt);

/* Let `stream` wait for `event`, whichever device is current: the handles of the
 * default streams mean those of the current device.
 * Fails: stream_wait_event; as cm_device_enter(). */
CM_NODISCARD cm_status cm_stream_wait_event(cm_stream *stream, uint64_t event);

/* Let `consumer` wait for all that `producer` has been given so far. Nothing is done if
 * they are the same stream.
 * Fails: event_create, cm_stream_record(), stream_wait_event, event_destroy. */
CM_NODISCARD cm_status cm_stream_follow(cm_stream *consumer, const cm_stream *producer);

/* The handle, for code that is not ours and may begin a capture with it. */
uint64_t cm_stream_tell_handle(cm_stream *stream);

/* False: the stream is not being captured, and the runtime need not be asked. A default
 * stream never is. Nor is a stream of ours whose handle no other code knows and which
 * no wait took into the capture of another. */
static inline bool
cm_stream_may_capture(const cm_stream *stream)
{
    return atomic_load_explicit(&stream->capture_refs, memory_order_relaxed) != 0;
}

cm_stream *cm_stream_hold(cm_stream *stream);
/* Release the record. The last release destroys a handle that it owns; work that is
 * queued on the stream still completes. */
void cm_stream_release(cm_stream *stream);
/* Release the record unless this is the last release: then false, and nothing is done.
 * Makes no runtime call. */
bool cm_stream_try_release(cm_stream *stream);
