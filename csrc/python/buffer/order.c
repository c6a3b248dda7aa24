/* SPDX-License-Identifier: Apache-2.0 */
/* Order a consumer's stream after the work that still goes on in a storage. */
#include "python/buffer/order.h"

#include <stdlib.h>

#include "python/core/errors.h"

/* `extent` NULL: all. */
static void
take_tickets(const cm_storage *storage, const cm_extent *extent, bool few,
             cm_pending *out)
{
    for (uint32_t i = 0; i < storage->writer_count; i++) {
        const cm_writer *writer = &storage->pending[i];
        if ((few && writer->covered)
            || (extent != NULL && !cm_writer_is_in_the_way(writer, *extent))) {
            continue;
        }
        cm_ticket_info info;
        cm_ticket_look(writer->ticket, &info);
        if (!info.done || !cm_is_ok(info.status)) { /* else there is nothing to wait for
                                                     */
            out->tickets[out->ticket_count++] = cm_ticket_hold(writer->ticket);
        }
    }
}

static int
take(const cm_storage *storage, const cm_extent *extent, bool few, cm_pending *out)
{
    *out = (cm_pending){.state = storage->state,
                        .seen = storage->writer_total,
                        .use_calls = storage->use_calls};
    if (storage->use_count > 0) {
        out->streams = malloc(storage->use_count * sizeof *out->streams);
        if (out->streams == NULL) {
            out->state = NULL;
            PyErr_NoMemory();
            return -1;
        }
    }
    if (storage->writer_count > 0) {
        out->tickets = malloc(storage->writer_count * sizeof *out->tickets);
        if (out->tickets == NULL) {
            free(out->streams);
            out->state = NULL;
            PyErr_NoMemory();
            return -1;
        }
    }
    for (uint32_t i = 0; i < storage->use_count; i++) {
        out->streams[out->stream_count++] = cm_stream_hold(storage->uses[i]);
    }
    take_tickets(storage, extent, few, out);
    cm_state_enter(out->state);
    return 0;
}

int
cm_pending_take(const cm_storage *storage, cm_pending *out)
{
    return take(storage, NULL, false, out);
}

int
cm_pending_take_extent(const cm_storage *storage, cm_extent extent, bool few,
                       cm_pending *out)
{
    return take(storage, &extent, few, out);
}

void
cm_pending_give(cm_pending *pending)
{
    if (pending->state == NULL) {
        return;
    }
    for (uint32_t i = 0; i < pending->stream_count; i++) {
        cm_stream_release(pending->streams[i]);
    }
    for (uint32_t i = 0; i < pending->ticket_count; i++) {
        cm_ticket_release(pending->tickets[i]);
    }
    free(pending->streams);
    free(pending->tickets);
    cm_state_leave(pending->state);
    *pending = (cm_pending){.state = NULL};
}

static cm_status
query_stream(const cm_stream *stream, bool *done, bool *capturing)
{
    if (cm_stream_is_here(stream)) { /* nobody else can ask */
        CM_TRY(cm_stream_ask_capturing(stream->rt, stream->device, stream->handle,
                                       capturing));
    }
    if (*capturing) {
        return cm_ok();
    }
    return cm_stream_query(stream, done);
}

cm_status
cm_pending_prune(cm_pending *pending, bool joins_captures)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < pending->ticket_count; i++) {
        cm_ticket_info info;
        cm_ticket_read(pending->tickets[i], &info);
        if (info.done) {
            cm_ticket_release(pending->tickets[i]);
        }
        else {
            pending->tickets[left++] = pending->tickets[i];
        }
    }
    pending->ticket_count = left;
    cm_status status = cm_ok();
    left = 0;
    for (uint32_t i = 0; i < pending->stream_count; i++) {
        cm_stream *stream = pending->streams[i];
        bool done = false;
        bool capturing = false;
        if (cm_is_ok(status)) {
            status = query_stream(stream, &done, &capturing);
        }
        if (cm_is_ok(status) && capturing) {
            pending->captured = true;
            done = !joins_captures;
        }
        if (cm_is_ok(status) && done) {
            cm_stream_release(stream);
        }
        else {
            pending->streams[left++] = stream;
        }
    }
    pending->stream_count = left;
    return status;
}

cm_status
cm_pending_order(const cm_pending *pending, cm_stream *consumer)
{
    for (uint32_t i = 0; i < pending->ticket_count; i++) {
        cm_status status = cm_ticket_order(pending->tickets[i], consumer);
        if (!cm_is_ok(status) && status.code != CM_ECANCELLED) {
            return status;
        }
    }
    for (uint32_t i = 0; i < pending->stream_count; i++) {
        CM_TRY(cm_stream_follow(consumer, pending->streams[i]));
    }
    return cm_ok();
}

/* What the consumer itself was given comes before it anyway. */
static void
drop_consumer(cm_pending *pending, int device, uint64_t handle)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < pending->stream_count; i++) {
        cm_stream *stream = pending->streams[i];
        if (cm_stream_is_handle(stream, device, handle)) {
            cm_stream_release(stream);
        }
        else {
            pending->streams[left++] = stream;
        }
    }
    pending->stream_count = left;
}

static cm_status
order_handle(cm_runtime *rt, cm_pending *pending, int device, uint64_t handle,
             bool *capturing)
{
    CM_TRY(cm_stream_ask_capturing(rt, device, handle, capturing));
    drop_consumer(pending, device, handle);
    CM_TRY(cm_pending_prune(pending, true));
    if (pending->stream_count == 0 && pending->ticket_count == 0) {
        return cm_ok();
    }
    cm_stream *consumer;
    CM_TRY(cm_stream_wrap(rt, device, handle, NULL, NULL, &consumer));
    cm_status status = cm_pending_order(pending, consumer);
    cm_stream_release(consumer);
    return status;
}

int
cm_storage_order_handle(cm_storage *storage, int device, uint64_t handle)
{
    bool pooled = storage->pool != NULL && handle > CM_STREAM_LEGACY;
    if (storage->use_count == 0 && storage->writer_count == 0 && !pooled) {
        return 0;
    }
    cm_runtime *rt = cm_state_runtime(storage->state);
    cm_pending pending;
    if (rt == NULL || cm_pending_take(storage, &pending) < 0) {
        return -1;
    }
    cm_status status;
    bool capturing = false;
    Py_BEGIN_ALLOW_THREADS
    status = order_handle(rt, &pending, device, handle, &capturing);
    Py_END_ALLOW_THREADS
    storage->was_captured = storage->was_captured || capturing;
    cm_pending_give(&pending);
    return cm_is_ok(status) ? 0
                            : cm_py_raise_int(storage->state, status,
                                              "while ordering a consumer's stream");
}

int
cm_storage_record_stream(cm_storage *storage, cm_stream *stream)
{
    if (cm_storage_add_lasting_use(storage, stream) < 0) {
        return -1;
    }
    cm_status status;
    bool capturing;
    Py_BEGIN_ALLOW_THREADS
    status =
        cm_stream_ask_capturing(stream->rt, stream->device, stream->handle, &capturing);
    Py_END_ALLOW_THREADS
    storage->was_captured = storage->was_captured || capturing;
    return cm_is_ok(status)
               ? 0
               : cm_py_raise_int(storage->state, status, "while recording a stream");
}
