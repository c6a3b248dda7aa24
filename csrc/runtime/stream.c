/* SPDX-License-Identifier: Apache-2.0 */
/* Makes, wraps and releases streams, and finds out which of them may be capturing. */
#include "runtime/stream.h"

#include <stdlib.h>

#include "runtime/scope.h"

/* The bit of `capture_refs` that is set for good once the stream may capture at any
 * time. The other bits count the waits under way that could take the stream into a
 * capture. */
#define CAPTURE_FOR_GOOD (1u << 31)

/* A number for each thread, which tells its per-thread default stream from those of
 * other threads. It is 0 until the thread needs one. No two threads get the same
 * number. */
static _Thread_local uint64_t own_number;
static _Atomic uint64_t last_number;

/* This bit is set in the ids of per-thread streams. The driver gives no stream such an
 * id. */
#define OWN_BIT (UINT64_C(1) << 63)

static uint64_t
id_of_own_stream(void)
{
    if (own_number == 0) {
        own_number = atomic_fetch_add(&last_number, 1) + 1;
    }
    return OWN_BIT | own_number;
}

bool
cm_stream_is_of_this_thread(const cm_stream *stream)
{
    return stream->handle != CM_STREAM_PER_THREAD || stream->id == id_of_own_stream();
}

static uint64_t
normal_handle(uint64_t handle)
{
    return handle == 0 ? CM_STREAM_LEGACY : handle;
}

bool
cm_stream_is_handle(const cm_stream *stream, int device, uint64_t handle)
{
    return stream->device == device && cm_stream_is_of_this_thread(stream)
           && normal_handle(stream->handle) == normal_handle(handle);
}

static void
destroy_handle(cm_runtime *rt, int device, uint64_t handle)
{
    if (cm_runtime_is_forked(rt)) {
        return; /* leaked: the driver may not be used in a child */
    }
    cm_device_guard guard;
    if (!CM_TRY_TWICE(cm_device_enter(rt, device, &guard))) {
        return; /* the stream leaks */
    }
    /* A stream that cannot be destroyed is left alone: it may be gone in spite of the
     * failure, and a second try could meet another stream that has its handle now. */
    cm_ignore(cm_rt_stream_destroy(rt, handle));
    cm_device_leave(rt, &guard);
}

static cm_status
stream_new(cm_runtime *rt, int device, uint64_t handle, uint64_t id, cm_stream **out)
{
    cm_stream *stream = calloc(1, sizeof(*stream));
    CM_TRY(cm_allocated(stream != NULL, sizeof(*stream)));
    atomic_init(&stream->refs, 1);
    atomic_init(&stream->capture_refs, 0);
    stream->handle = handle;
    stream->id = id;
    stream->device = device;
    stream->rt = rt;
    cm_list_init(&stream->capturable);
    *out = stream;
    return cm_ok();
}

/* Make a stream on the current device, whose index is `device`.
 * Fails: as cm_stream_create(). */
static cm_status
create_on_current(cm_runtime *rt, int device, unsigned flags, int priority,
                  cm_stream **out)
{
    uint64_t handle;
    CM_TRY(cm_rt_stream_create(rt, flags, priority, &handle));
    uint64_t id = 0;
    cm_status status = cm_rt_stream_get_id(rt, handle, &id);
    if (cm_is_ok(status)) {
        status = stream_new(rt, device, handle, id, out);
    }
    if (!cm_is_ok(status)) {
        cm_ignore(cm_rt_stream_destroy(rt, handle));
        return status;
    }
    (*out)->owns_handle = true;
    return cm_ok();
}

cm_status
cm_stream_create(cm_runtime *rt, int device, unsigned flags, int priority,
                 cm_stream **out)
{
    return CM_ON_DEVICE(rt, device,
                        create_on_current(rt, device, flags, priority, out));
}

/* Asking a stream that captures for its id would break the capture. While the capture
 * is under way no other stream gets the same handle, so the handle stands in for the
 * id. */
static cm_status
ask_id(cm_runtime *rt, uint64_t handle, uint64_t *id)
{
    bool capturing = false;
    CM_TRY(cm_rt_stream_is_capturing(rt, handle, &capturing));
    *id = CM_STREAM_CAPTURING | handle;
    return capturing ? cm_ok() : cm_rt_stream_get_id(rt, handle, id);
}

static cm_status
read_id(cm_runtime *rt, int device, uint64_t handle, uint64_t *id)
{
    if (handle <= CM_STREAM_PER_THREAD) {
        *id = handle == CM_STREAM_PER_THREAD ? id_of_own_stream() : CM_STREAM_LEGACY;
        return cm_ok();
    }
    return CM_ON_DEVICE(rt, device, ask_id(rt, handle, id));
}

/* Put the stream into the list of streams that cm_streams_capture() asks. */
static void
enlist(cm_stream *stream)
{
    cm_runtime *rt = stream->rt;
    if (!cm_stream_is_kept(stream) || cm_stream_is_legacy(stream)
        || cm_runtime_is_forked(rt)) {
        return;
    }
    cm_mutex_lock(&rt->capturable_lock);
    if (rt->capturable.next == NULL) {
        cm_list_init(&rt->capturable);
    }
    if (cm_list_is_empty(&stream->capturable)) {
        cm_list_push_back(&rt->capturable, &stream->capturable);
    }
    cm_mutex_unlock(&rt->capturable_lock);
}

static void
delist(cm_stream *stream)
{
    if (!cm_list_is_empty(&stream->capturable) && !cm_runtime_is_forked(stream->rt)) {
        cm_mutex_lock(&stream->rt->capturable_lock);
        cm_list_remove(&stream->capturable);
        cm_mutex_unlock(&stream->rt->capturable_lock);
    }
}

cm_status
cm_stream_wrap(cm_runtime *rt, int device, uint64_t handle, void *owner,
               void (*drop_owner)(void *), cm_stream **out)
{
    uint64_t id;
    CM_TRY(read_id(rt, device, handle, &id));
    CM_TRY(stream_new(rt, device, handle, id, out));
    atomic_init(&(*out)->capture_refs,
                handle > CM_STREAM_LEGACY ? CAPTURE_FOR_GOOD : 0);
    (*out)->owner = owner;
    (*out)->drop_owner = owner != NULL ? drop_owner : NULL;
    enlist(*out);
    return cm_ok();
}

cm_status
cm_stream_ask_capturing(cm_runtime *rt, int device, uint64_t handle, bool *out)
{
    *out = false;
    if (handle <= CM_STREAM_LEGACY) {
        return cm_ok();
    }
    /* the per-thread handle means a stream of the current device */
    return CM_ON_DEVICE(rt, device, cm_rt_stream_is_capturing(rt, handle, out));
}

cm_status
cm_stream_check_not_capturing(const cm_stream *stream)
{
    bool capturing = false;
    if (cm_stream_may_capture(stream)) {
        CM_TRY(cm_stream_ask_capturing(stream->rt, stream->device, stream->handle,
                                       &capturing));
    }
    return capturing ? cm_fail(CM_ECAPTURING, stream->handle) : cm_ok();
}

static void
may_capture_for_good(cm_stream *stream)
{
    unsigned before = atomic_fetch_or_explicit(&stream->capture_refs, CAPTURE_FOR_GOOD,
                                               memory_order_relaxed);
    if ((before & CAPTURE_FOR_GOOD) == 0) {
        enlist(stream);
    }
}

/* True if a blocking stream of the current device captures. */
static bool
legacy_waits_for_capture(cm_runtime *rt)
{
    bool capturing = false;
    cm_status status = cm_rt_stream_is_capturing(rt, CM_STREAM_LEGACY, &capturing);
    return capturing || status.code == CM_CUDA_CAPTURE_IMPLICIT;
}

/* Return the devices of the streams in the list, as bits. */
static uint64_t
capturable_devices(cm_runtime *rt)
{
    uint64_t devices = 0;
    cm_mutex_lock(&rt->capturable_lock);
    for (const cm_list *n = rt->capturable.next; n != NULL && n != &rt->capturable;
         n = n->next) {
        devices |= UINT64_C(1) << CM_LIST_ENTRY(n, cm_stream, capturable)->device;
    }
    cm_mutex_unlock(&rt->capturable_lock);
    return devices;
}

/* True if a stream that is in the list and on `device`, which is current, captures. */
static bool
one_captures(cm_runtime *rt, int device)
{
    bool found = false;
    cm_mutex_lock(&rt->capturable_lock); /* not for long: the driver answers at once */
    for (const cm_list *n = rt->capturable.next;
         n != NULL && n != &rt->capturable && !found; n = n->next) {
        const cm_stream *stream = CM_LIST_ENTRY(n, cm_stream, capturable);
        if (stream->device == device) {
            cm_ignore(cm_rt_stream_is_capturing(rt, stream->handle, &found));
        }
    }
    cm_mutex_unlock(&rt->capturable_lock);
    return found;
}

/* Enters each device once, however many streams it has. */
bool
cm_streams_capture(cm_runtime *rt)
{
    bool found = false;
    if (cm_runtime_is_forked(rt)) {
        return false;
    }
    uint64_t devices = capturable_devices(rt);
    for (int device = 0; device < rt->device_count && !found; device++) {
        cm_device_guard guard;
        bool is_asked =
            cm_device_was_entered(rt, device) || (devices >> device & 1) != 0;
        if (is_asked && cm_is_ok(cm_device_enter(rt, device, &guard))) {
            found = legacy_waits_for_capture(rt) || one_captures(rt, device);
            cm_device_leave(rt, &guard);
        }
    }
    return found;
}

/* Let the stream wait. If the event belongs to a capture, the wait takes the stream
 * into that capture, so this asks afterwards whether the stream captures. */
static cm_status
wait_event(cm_stream *stream, uint64_t event)
{
    /* Look only at the bit that stays for good. What other threads have counted is
     * subtracted again when their waits are over. */
    bool may_join =
        stream->handle > CM_STREAM_LEGACY
        && (atomic_load_explicit(&stream->capture_refs, memory_order_relaxed)
            & CAPTURE_FOR_GOOD)
               == 0;
    if (!may_join) {
        return cm_rt_stream_wait_event(stream->rt, stream->handle, event);
    }
    atomic_fetch_add_explicit(&stream->capture_refs, 1, memory_order_relaxed);
    cm_status status = cm_rt_stream_wait_event(stream->rt, stream->handle, event);
    bool joined = false;
    cm_status asked = cm_rt_stream_is_capturing(stream->rt, stream->handle, &joined);
    if (joined || !cm_is_ok(asked)) {
        may_capture_for_good(stream);
    }
    atomic_fetch_sub_explicit(&stream->capture_refs, 1, memory_order_relaxed);
    return status;
}

cm_status
cm_stream_wait_event(cm_stream *stream, uint64_t event)
{
    return CM_ON_DEVICE(stream->rt, stream->device, wait_event(stream, event));
}

uint64_t
cm_stream_export_handle(cm_stream *stream)
{
    if (stream->handle > CM_STREAM_LEGACY) {
        may_capture_for_good(stream);
    }
    return stream->handle;
}

/* Record an event, while the stream's device is current. */
static cm_status
record(const cm_stream *stream, uint64_t event)
{
    cm_runtime *rt = stream->rt;
    if (cm_stream_is_of_this_thread(stream)) {
        return cm_rt_event_record(rt, event, stream->handle);
    }
    if (cm_runtime_has(rt, CM_OP_context_record_event)) {
        return cm_rt_context_record_event(rt, event);
    }
    CM_TRY(cm_rt_device_synchronize(rt));
    return cm_rt_event_record(rt, event, CM_STREAM_PER_THREAD);
}

cm_status
cm_stream_record(const cm_stream *stream, uint64_t event)
{
    return CM_ON_DEVICE(stream->rt, stream->device, record(stream, event));
}

/* Record the stream's work in an event. Then let `consumer` wait for the event or, if
 * `consumer` is NULL, ask whether it has passed. Called while the stream's device is
 * current. */
static cm_status
use_event(const cm_stream *stream, cm_stream *consumer, bool *done)
{
    cm_runtime *rt = stream->rt;
    uint64_t event;
    CM_TRY(cm_rt_event_create(rt, CM_EVENT_DISABLE_TIMING, &event));
    cm_status status = record(stream, event);
    if (cm_is_ok(status)) {
        status = consumer != NULL ? cm_stream_wait_event(consumer, event)
                                  : cm_rt_event_query(rt, event, done);
    }
    /* The event may be destroyed at once, since the driver keeps it until it has
     * happened. */
    return cm_first_failure(status, cm_rt_event_destroy(rt, event));
}

cm_status
cm_stream_query(const cm_stream *stream, bool *done)
{
    return CM_ASKING(stream->rt, stream->device,
                     cm_stream_is_of_this_thread(stream)
                         ? cm_rt_stream_query(stream->rt, stream->handle, done)
                         : use_event(stream, NULL, done));
}

/* The query is made inside a cm_scope, so that it breaks no capture of the calling
 * thread. It waits for nothing. */
bool
cm_stream_is_idle(const cm_stream *stream)
{
    cm_runtime *rt = stream->rt;
    bool done = false;
    return !cm_stream_is_foreign(stream) && cm_device_was_entered(rt, stream->device)
           && cm_is_ok(cm_stream_check_not_capturing(stream))
           && cm_is_ok(CM_IN_SCOPE(rt, stream->device,
                                   cm_rt_stream_query(rt, stream->handle, &done)))
           && done;
}

cm_status
cm_stream_follow(cm_stream *consumer, const cm_stream *producer)
{
    return cm_stream_same(consumer, producer)
               ? cm_ok()
               : CM_ON_DEVICE(producer->rt, producer->device,
                              use_event(producer, consumer, NULL));
}

cm_stream *
cm_stream_hold(cm_stream *stream)
{
    (void)atomic_fetch_add_explicit(&stream->refs, 1, memory_order_relaxed);
    return stream;
}

bool
cm_stream_try_release(cm_stream *stream)
{
    unsigned refs = atomic_load_explicit(&stream->refs, memory_order_relaxed);
    while (refs > 1) {
        if (atomic_compare_exchange_weak_explicit(&stream->refs, &refs, refs - 1,
                                                  memory_order_release,
                                                  memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

void
cm_stream_release(cm_stream *stream)
{
    if (atomic_fetch_sub_explicit(&stream->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    delist(stream);
    if (stream->owns_handle) {
        destroy_handle(stream->rt, stream->device, stream->handle);
    }
    if (stream->drop_owner != NULL) {
        stream->drop_owner(stream->owner);
    }
    free(stream);
}
