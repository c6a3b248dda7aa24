/* SPDX-License-Identifier: Apache-2.0 */
/* A ticket is a copy under way as its callers see it. The ticket tells the outcome of
 * the copy, and other work can be ordered after the ticket. The ticket is submitted
 * once all work of the copy is queued on the device, and it is done once the outcome is
 * known. ticket.h says how tickets work inside. Any thread may call these functions,
 * without holding the engine's lock. */
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
/* Drop the reference of an owner that will not ask for the outcome. If this was the
 * last owner that might have asked, a failure that nobody reads is reported by
 * cm_engine_take_unread() instead, even if the failure is still to come. References of
 * cm_ticket_hold() do not delay the report. If the engine has ended, nobody will call
 * cm_engine_take_unread(), so cm_ticket_abandon() returns the failure itself. Otherwise
 * it returns CM_OK. */
CM_NODISCARD cm_status cm_ticket_abandon(cm_ticket *ticket);

typedef struct cm_ticket_info {
    bool done;               /* the copy has succeeded, failed or been cancelled */
    cm_status status;        /* the first failure; CM_OK while the ticket is not done */
    const cm_route_row *row; /* the route; NULL if no bytes have to move */
    bool captured;   /* the copy went into a graph, which may run it at any time */
    bool cancelled;  /* cm_ticket_cancel() ended the copy before anything was read or
                        written */
    uint64_t nbytes; /* the payload, in which elements that a broadcast repeats count
                        once */
    double seconds;  /* from the start of the copy to its end; 0 until the ticket is
                        done. If events were recorded for the copy, the device's clock
                        measured the time */
} cm_ticket_info;

/* Read what is known about the ticket so far, without a runtime call and without
 * waiting. In a forked child these are the facts that were known at the fork. */
void cm_ticket_peek(const cm_ticket *ticket, cm_ticket_info *out);
/* Ask the device first, and then do the same as cm_ticket_peek(). If another thread is
 * asking the device at the moment, this function waits until that thread has the
 * answer. */
void cm_ticket_query(cm_ticket *ticket, cm_ticket_info *out);
/* Return how many bytes of the payload have certainly arrived. A copy is cut into
 * pieces, and a piece counts once all of it has arrived. The last piece counts only
 * once the copy is done without a failure, so the answer is not `nbytes` before then.
 * Makes no runtime call and takes no lock. */
uint64_t cm_ticket_count_moved(const cm_ticket *ticket);
/* Cancel a copy in the background (engine.h) that has not begun. Such a copy still
 * waits for a job thread, or for earlier work that it is ordered after. Returns true if
 * this call or an earlier one has cancelled the copy. Then nothing was or will be read
 * or written, the objects that the copy kept alive are dropped, the ticket is done with
 * CM_ECANCELLED, and nobody needs to ask for that failure. Returns false if the copy
 * goes on or was done before the call. Blocks for a moment. */
bool cm_ticket_cancel(cm_ticket *ticket);
/* Ask a copy in the background to end early. What is not queued yet is left undone, and
 * the copy ends with CM_ECANCELLED, unless it is done before the thread that runs the
 * copy sees the request. */
void cm_ticket_stop(cm_ticket *ticket);
/* Wait until the ticket is done, and return the outcome of the transfer. Blocks for at
 * most `timeout_ns`; UINT64_MAX stands for ever.
 * Fails: CM_ETIMEOUT, CM_EFORKED; with the transfer's own failure. */
CM_NODISCARD cm_status cm_ticket_wait(cm_ticket *ticket, uint64_t timeout_ns);
/* Wait until the ticket is submitted or done, after which cm_ticket_order() returns at
 * once. Blocks for at most `timeout_ns`.
 * Fails: CM_ETIMEOUT, CM_EFORKED. */
CM_NODISCARD cm_status cm_ticket_wait_submitted(cm_ticket *ticket, uint64_t timeout_ns);
/* Wait until the ticket is done. Returns CM_OK even if the transfer has failed, and
 * does not count as reading that failure. Blocks for at most `timeout_ns`.
 * Fails: CM_ETIMEOUT, CM_EFORKED. */
CM_NODISCARD cm_status cm_ticket_wait_ended(cm_ticket *ticket, uint64_t timeout_ns);
/* Ring the bell when the ticket is done, or at once if the ticket is done already. The
 * ticket holds a reference to the bell until it has rung the bell.
 * Fails: CM_EFORKED, CM_ENOMEM. */
CM_NODISCARD cm_status cm_ticket_notify(cm_ticket *ticket, cm_bell *bell);
/* Make `stream` wait for the ticket. Blocks until the ticket is submitted. If the host
 * itself writes the target, as it does when it unpacks what the device has delivered,
 * the ticket is submitted only when the copy is done, so this call blocks until the
 * copy is done.
 * Fails: CM_EFORKED, stream_wait_event; with the transfer's own failure. */
CM_NODISCARD cm_status cm_ticket_order(cm_ticket *ticket, cm_stream *stream);
/* Do the same as cm_ticket_order(), but do not return a failure of the transfer. The
 * failure still counts as unread.
 * Fails: CM_EFORKED, stream_wait_event. */
CM_NODISCARD cm_status cm_ticket_follow(cm_ticket *ticket, cm_stream *stream);
