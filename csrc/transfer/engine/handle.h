/* SPDX-License-Identifier: Apache-2.0 */
/* A copy under way as its callers see it: its ticket. Locks: as engine.h. */
#pragma once

#include "runtime/stream.h"
#include "transfer/plan/route.h"

typedef struct cm_ticket cm_ticket;

/* Tickets are counted; any thread. */
cm_ticket *cm_ticket_hold(cm_ticket *ticket);
/* One more hold, whose owner will ask for the outcome or abandon it. */
cm_ticket *cm_ticket_share(cm_ticket *ticket);
void cm_ticket_release(cm_ticket *ticket);
/* A release by the last owner that would have asked for the outcome, whoever else still
 * holds the ticket: a failure that nobody has read goes to cm_engine_take_unread, or,
 * where the engine has ended and nobody will ask that, to the caller. */
CM_NODISCARD cm_status cm_ticket_abandon(cm_ticket *ticket);

typedef struct cm_ticket_info {
    bool done;
    cm_status status;        /* first failure; CM_OK while not done */
    const cm_route_row *row; /* its route; NULL: no bytes have to move */
    bool captured;           /* it went into a graph, which may run it at any time */
    bool cancelled;          /* by cm_ticket_cancel: nothing was read or written */
    uint64_t nbytes;         /* payload, not counting broadcast repeats of the source */
    double seconds; /* from start to end; on the device's clock where it has one; 0
                       while not done */
} cm_ticket_info;

/* As far as it is known: makes no runtime call and waits for nobody. In a forked child:
 * as it was at the fork. */
void cm_ticket_look(const cm_ticket *ticket, cm_ticket_info *out);
/* The same, after asking the device; waits for another thread that is asking. */
void cm_ticket_read(cm_ticket *ticket, cm_ticket_info *out);
/* Bytes of the payload that have arrived for certain, in whole pieces; the last of them
 * with the end, so that it is `nbytes` just when all is done without a failure. Makes
 * no runtime call and takes no lock. */
uint64_t cm_ticket_count_moved(const cm_ticket *ticket);
/* End a copy in the background that has not begun: that waits for a job thread or for
 * what comes before it. True: nothing was or will be read or written, what it kept is
 * dropped and it is done with CM_ECANCELLED, for which nobody needs to ask (now, or
 * since an earlier call). False: it goes on, or is done. Blocks for a moment. */
bool cm_ticket_cancel(cm_ticket *ticket);
/* End a copy in the background early: what is not queued yet stays undone, and it ends
 * with CM_ECANCELLED, unless it is done before that is seen. */
void cm_ticket_stop(cm_ticket *ticket);
/* Blocks until done or `timeout_ns` (UINT64_MAX: for ever) has passed: CM_ETIMEOUT. Returns
 * the transfer's own failure otherwise. */
CM_NODISCARD cm_status cm_ticket_wait(cm_ticket *ticket, uint64_t timeout_ns);
/* Blocks, as above, until nothing is left to be queued: cm_ticket_order then returns at
 * once. Fails: CM_ETIMEOUT. */
CM_NODISCARD cm_status cm_ticket_settle(cm_ticket *ticket, uint64_t timeout_ns);
/* Write 8 bytes holding 1 to the eventfd `fd` when done (at once if it is already). The
 * descriptor is duplicated. Fails: CM_ENOMEM, CM_ESYSTEM, CM_ETHREAD. */
CM_NODISCARD cm_status cm_ticket_notify(cm_ticket *ticket, int fd);
/* Make `stream` wait for the ticket. Blocks until the last piece is submitted; for a target
 * on the host, until it is done. Fails: stream_wait_event, event_record, the transfer's. */
CM_NODISCARD cm_status cm_ticket_order(cm_ticket *ticket, cm_stream *stream);
