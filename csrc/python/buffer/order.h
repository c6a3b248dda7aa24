/* SPDX-License-Identifier: Apache-2.0 */
/* Work that is still going on in a storage, and how a stream comes after it: what every
 * exporter asks before it hands memory to a consumer. Knows no protocol. */
#ifndef CM_PYTHON_BUFFER_ORDER_H
#define CM_PYTHON_BUFFER_ORDER_H

#include "python/buffer/buffer_object.h"

/* A snapshot: held streams that worked on a storage, held unfinished transfers into it.
 */
typedef struct cm_pending {
    cm_state *state; /* borrowed; NULL: nothing was taken */
    cm_stream **streams;
    uint32_t stream_count;
    cm_ticket **tickets;
    uint32_t ticket_count;
    uint64_t seen;      /* the storage's writer_total */
    uint64_t use_calls; /* the storage's */
    bool captured;      /* prune found a stream that is being captured */
} cm_pending;

/* 0, or -1 with MemoryError. From here to the give shutdown() is refused. GIL held. */
int cm_pending_take(const cm_storage *storage, cm_pending *out);
/* The same, but of the transfers only those that one of `extent` must come after;
 * `few`: without those that others of them come after, which is enough for a request of
 * the engine's that gets a ticket, since that hears of what a cancelled one has left.
 */
int cm_pending_take_extent(const cm_storage *storage, cm_extent extent, bool few,
                           cm_pending *out);
/* GIL held. */
void cm_pending_give(cm_pending *pending);

/* Forget what has finished. A stream that is being captured may not be asked; nothing
 * that was captured runs now, so that only one who `joins_captures` has to know of it.
 * Fails: stream_is_capturing, stream_query. */
CM_NODISCARD cm_status cm_pending_prune(cm_pending *pending, bool joins_captures);

/* Make `consumer` wait, on the device, for everything that is left; what runs on
 * `consumer` itself needs nothing. Blocks as cm_ticket_order does.
 * Fails: event_create, event_record, stream_wait_event, a transfer's own failure. */
CM_NODISCARD cm_status cm_pending_order(const cm_pending *pending, cm_stream *consumer);

/* take, prune and order, GIL released; `handle` is a consumer's stream on `device`, not
 * touched after the call. Where it is being captured the storage is the graph's from
 * now on. 0, or -1 with an exception. */
int cm_storage_order_handle(cm_storage *storage, int device, uint64_t handle);

/* cm_storage_add_use for a stream that others work on: the same is asked of it.
 * Releases the GIL. 0, or -1 with an exception. */
int cm_storage_record_stream(cm_storage *storage, cm_stream *stream);

#endif
