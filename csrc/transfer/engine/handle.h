/* SPDX-License-Identifier: Apache-2.0 */
/* A ticket is a copy under way as its callers see it. The ticket tells the outcome of
 * the copy, and other work can be ordered after the ticket. ticket.h says how tickets
 * work inside. Any thread may call these functions, without holding the engine's
 * lock. */
#pragma once

#include "base/bell.h"
#include "runtime/stream.h"
#include "transfer/plan/route.h"

typedef struct cm_ticket cm_ticket;

/* Add a reference. */
cm_ticket *cm_ticket_hold(cm_ticket *ticket);
/* Add a reference whose owner will either ask for the outcome or call
 * cm_ticket_abandon(). */
cm_ticket *cm_ticket_share(cm_ticket *ticket);
/* Drop a reference. */
void cm_ticket_release(cm_ticket *ticket);
/* Drop the reference of an owner that will not ask for the outcome. If no owner is left
 * that may still ask, a failure that nobody has read goes to cm_engine_take_unread(),
 * even while others hold the ticket. If the engine has ended, nobody will call that
 * function, so this one returns the failure instead. Otherwise it returns CM_OK. */
CM_NODISCARD cm_status cm_ticket_abandon(cm_ticket *ticket);

typedef struct cm_ticket_info {
    bool done;               /* the copy has ended, in whichever way */
    cm_status status;        /* the first failure; CM_OK while the ticket is not done */
    const cm_route_row *row; /* the route; NULL if no bytes have to move */
    bool captured;   /* the copy went into a graph, which may run it at any time */
    bool cancelled;  /* cm_ticket_cancel() ended the copy before anything was read or
                        written */
    uint64_t nbytes; /* the payload, in which elements that a broadcast repeats count
                        once */
    double seconds;  /* from the start of the copy to its end, by the device's clock if
                        events were recorded for the copy; 0 until the ticket is done */
} cm_ticket_info;

/* Read what is known about the ticket so far, without a runtime call and without
 * waiting. In a forked child these are the facts that were known at the fork. */
void cm_ticket_peek(const cm_ticket *ticket, cm_ticket_info *out);
/* Ask the device first, and then do the same as cm_ticket_peek(). If another thread is
 * asking at the moment, this waits until that thread has the answer. */
void cm_ticket_query(cm_ticket *ticket, cm_ticket_info *out);
/* Return how many bytes of the payload have certainly arrived, counted in whole pieces.
 * The last piece is counted at the end, so the answer is `nbytes` only once all is done
 * without a failure. Makes no runtime call and takes no lock. */
uint64_t cm_ticket_count_moved(const cm_ticket *ticket);
/* Cancel a copy in the background that has not begun, because it waits for a job thread
 * or for what comes before it. Returns true if it is cancelled, now or by an earlier
 * call: nothing was or will be read or written, the keeps are dropped, the ticket is
 * done with CM_ECANCELLED, and nobody needs to ask for that failure. Returns false if
 * the copy goes on or was done before the call. Blocks for a moment. */
bool cm_ticket_cancel(cm_ticket *ticket);
/* Ask a copy in the background to end early. What is not queued yet is left undone, and
 * the copy ends with CM_ECANCELLED, unless it is done before its thread sees the
 * request. */
void cm_ticket_stop(cm_ticket *ticket);
/* Wait until the ticket is done, and return the outcome of the transfer. Blocks for at
 * most `timeout_ns`; UINT64_MAX stands for ever.
 * Fails: CM_ETIMEOUT, CM_EFORKED; with the transfer's own failure. */
CM_NODISCARD cm_status cm_ticket_wait(cm_ticket *ticket, uint64_t timeout_ns);
/* Wait until the ticket is submitted or done, after which cm_ticket_order() returns at
 * once. Blocks for at most `timeout_ns`.
 * Fails: CM_ETIMEOUT, CM_EFORKED. */
CM_NODISCARD cm_status cm_ticket_wait_submitted(cm_ticket *ticket, uint64_t timeout_ns);
/* Wait until the ticket is done, however the transfer ended; its failure remains to be
 * read. Blocks for at most `timeout_ns`.
 * Fails: CM_ETIMEOUT, CM_EFORKED. */
CM_NODISCARD cm_status cm_ticket_wait_ended(cm_ticket *ticket, uint64_t timeout_ns);
/* Ring the bell when the ticket is done, or at once if the ticket is done by now. The
 * ticket holds the bell until then.
 * Fails: CM_EFORKED, CM_ENOMEM. */
CM_NODISCARD cm_status cm_ticket_notify(cm_ticket *ticket, cm_bell *bell);
/* Make `stream` wait for the ticket. Blocks until the ticket is submitted. A copy
 * to the host in which the host takes part is never submitted before it is done, so
 * this blocks until then.
 * Fails: CM_EFORKED, stream_wait_event; with the transfer's own failure. */
CM_NODISCARD cm_status cm_ticket_order(cm_ticket *ticket, cm_stream *stream);
/* Do the same as cm_ticket_order(), but leave a failure of the transfer to be read by
 * others.
 * Fails: CM_EFORKED, stream_wait_event. */
CM_NODISCARD cm_status cm_ticket_follow(cm_ticket *ticket, cm_stream *stream);
