/* SPDX-License-Identifier: Apache-2.0 */
/* This header shows tickets as the engine's own files see them. A ticket stands for one
 * copy. It knows which copies have to come before this one, and the copy's outcome.
 * What callers may do with a ticket is in handle.h.
 *
 * The states
 * ----------
 * A ticket only ever moves forward:
 *
 *   QUEUED     The job has not queued all of its work yet, or the host still has
 *              something to do.
 *   SUBMITTED  All work is queued, and the event at its end decides when the copy is
 *              done. A stream can wait for that event from now on.
 *   DONE       The outcome is known, and the objects that the copy used (its keeps) are
 *              dropped. But a copy that has to come before this one is not over yet.
 *   OVER       This copy has ended, and all copies that had to come before it are over.
 *
 * DONE differs from OVER for a copy that ends before its turn, because it was cancelled
 * or failed. Example: A, B and C write the same memory, each after the one before, and
 * B is cancelled while A runs. B is DONE at once. C waits for B alone, and it must not
 * start before A is over. So B becomes OVER only with A, and C starts then.
 *
 * The order
 * ---------
 * The array `after` of a ticket lists all tickets that have to come before it. A ticket
 * that waits hangs on only one of them: it is in the `waiters` of the first ticket in
 * `after` that is not far enough. Once that ticket is far enough, the waiting ticket
 * moves on to the next one in `after`. When no ticket in `after` is left, its job can
 * go on. If a ticket advances, only the tickets that hang on it are looked at. So this
 * costs the same in a queue of a thousand copies as in a queue of two. "Far enough"
 * means OVER if the host is to act next, and SUBMITTED otherwise, since a stream can
 * wait for the rest. order.c has the rules.
 *
 * Wholes
 * ------
 * A batch that is made in several parts has one ticket for the whole batch, and each
 * part has a ticket of its own. The ticket of the batch is called a whole. The whole
 * comes after its parts. It is SUBMITTED once all parts are SUBMITTED, and DONE once
 * all parts are OVER. A whole has no event and no job.
 *
 * No particular thread is needed to make a ticket done. Whoever finds that the event of
 * a ticket has passed makes that ticket done. This may be the watcher, a thread that
 * waits, or one that merely reads the ticket.
 *
 * Locks: the engine's. */
#pragma once

#include "transfer/engine/private.h"

/* The states that the comment at the top explains. The values are bits, so that one
 * number can stand for a set of states. */
typedef enum cm_ticket_state {
    CM_TICKET_QUEUED = 0,
    CM_TICKET_SUBMITTED = 1,
    CM_TICKET_DONE = 2,
    CM_TICKET_OVER = 4,
} cm_ticket_state;

/* A bell to ring when the ticket is done. */
typedef struct cm_notice {
    struct cm_notice *next;
    cm_bell *bell; /* held */
} cm_notice;

/* What a ticket has borrowed from the engine's cache, and gives back when it is
 * done. */
typedef struct cm_loan {
    int device;           /* the device of the events and of the stream */
    uint64_t start_event; /* 0 if there is none */
    uint64_t end_event;   /* the event that decides when the copy is done; 0 if there is
                             none */
    cm_stream *stream; /* the engine's stream that worked for the copy; NULL if the copy
                          was on the caller's stream */
    cm_stream *side;   /* a further stream of the engine's that worked for the copy; may
                          be NULL */
} cm_loan;

struct cm_ticket {
    cm_list node;      /* in engine->watched or engine->unread */
    cm_engine *engine; /* the ticket holds a reference to it */
    uint64_t start_ns; /* when the ticket was made, by cm_now_ns() */
    cm_event noted;    /* what the recorder gets at the end of the copy; if `op` is 0
                          nothing is recorded */
    uint64_t nbytes;   /* payload; set before anybody else sees the ticket */
    _Atomic uint64_t moved;       /* see cm_ticket_count_moved() */
    _Atomic uint64_t parts_moved; /* for a whole: how many bytes all of its parts
                                     together have moved */
    cm_ticket *part_of; /* the ticket of the whole, which is borrowed since the whole is
                           over later than its parts; NULL if this is not a part */
    /* The tickets that come first or, for a whole, its parts. Owned array of held
     * tickets, set before anybody else sees this one. */
    cm_ticket **after;
    uint64_t after_count;
    bool is_whole;    /* this is the ticket of a whole, and `after` has its parts */
    atomic_uint refs; /* order.c has one of these references until the ticket is over */
    /* A word that a kernel sets if numbers of rows are wrong, or NULL if there is none.
     * It is borrowed, since one of the ticket's keeps keeps the word alive.
     * `wrong_rows_bits` is added to the argument of the failure CM_EROWS. The thread
     * that runs the job sets both members before the ticket is submitted. */
    const uint32_t *wrong_rows;
    uint32_t wrong_rows_bits;
    /* Another word, in which several copies gather what was wrong. It is borrowed in
     * the same way, and NULL if there is none. */
    _Atomic uint32_t *wrong_rows_of_all;
    bool captured;         /* the copy went into a graph, and was not run */
    atomic_bool stopped;   /* by cm_ticket_stop() */
    bool is_chained;       /* if after[0] fails, so does this ticket */
    bool needs_completion; /* the tickets in `after` must be over before this one's job
                              goes on; otherwise it is enough that they are submitted,
                              and a stream waits for the rest */
    /* The members from here on are under engine->lock. */
    uint64_t passed_count; /* how many of `after`, from the first, are far enough */
    cm_list order_node; /* in the `waiters` of after[passed_count] or, once it has left
                           that list, in engine->going_on or a list of order.c's */
    cm_list waiters;    /* the tickets that hang on this one */
    struct cm_job *job; /* the ticket's job while no thread runs this job; else NULL */
    const cm_route_row *row; /* the route of the plan, once there is a plan */
    cm_ticket_state state;
    bool started;   /* the copy has begun, so it is too late to cancel the ticket */
    bool cancelled; /* see cm_ticket_info */
    bool busy;      /* a thread is asking the device about the events, or is making the
                       ticket done */
    bool read;      /* somebody has heard of the failure, or will */
    uint32_t asker_count; /* holders that might still ask for the outcome */
    cm_status status;
    double seconds;     /* see cm_ticket_info */
    cm_loan loan;       /* what the ticket has borrowed until it is done */
    cm_notice *notices; /* owned: the bells to ring when the ticket is done */
    cm_keep keep[4];    /* dropped when the ticket is done */
    uint32_t keep_count;
    cm_page_shares locked; /* these keep page-locked memory at the ends of the copy
                              page-locked */
};

/* Return the event that the recorder gets for a copy, without its time and length. */
cm_event cm_request_event(const cm_copy_request *request);
/* Make a ticket with two references, of which one is the caller's and one is order.c's.
 * If memory at the ends of the request is page-locked at this moment, it stays
 * page-locked until the ticket is done. Returns NULL if there is no memory; the keeps
 * are then still the caller's. */
cm_ticket *cm_ticket_create(cm_engine *engine, const cm_copy_request *request);
/* Give the ticket the keeps of a request whose call is going to end before the copy.
 * Nobody else may see the ticket yet. Returns false if there is no memory for the
 * keeps. */
bool cm_ticket_take_keeps(cm_ticket *ticket, const cm_copy_request *request);
/* Add to `shares` a share of each piece that is page-locked now within one end of a
 * copy.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_engine_share_locked(cm_engine *engine,
                                              const cm_region *region,
                                              cm_page_shares *shares);
/* Give the caller's reference away. This is for the end of the call that has made the
 * ticket, and `status` is the outcome of that call. The reference goes to *out. If
 * `out` is NULL or the call failed, the ticket is abandoned instead. But the ticket of
 * a part also goes to *out after a failure, since some work of the part may be under
 * way. Returns `status`. */
CM_NODISCARD cm_status cm_ticket_hand_over(cm_ticket *ticket, cm_status status,
                                           cm_ticket **out);
/* Submit the ticket once all device work is queued. The device of `stream` is current.
 * This records an event on `stream`, behind all work that the stream has so far, and
 * the event decides when the copy is done. If `follower` is not NULL, that stream waits
 * for the event. There must be a watcher. The ticket takes over `start_event`, and
 * holds `lent` and `side`. If `outcome` is a failure the ticket ends with it.
 * Fails: event_create, event_record, stream_wait_event; then it is not submitted. */
CM_NODISCARD cm_status cm_ticket_submit(cm_ticket *ticket, cm_stream *stream,
                                        cm_stream *follower, uint64_t start_event,
                                        cm_stream *lent, cm_stream *side,
                                        cm_status outcome);
/* Make the ticket done. Its shares of page-locked memory and its keeps are dropped
 * before anybody can see that it is done. If `read` is set, the caller itself reports a
 * failure to the user. */
void cm_ticket_finish(cm_ticket *ticket, cm_status status, bool read);
/* Return the outcome of work that has ended with `status`. It is `status`, or CM_EROWS
 * if `status` is a success but the kernel has met wrong numbers. The keeps must still
 * be there. */
CM_NODISCARD cm_status cm_ticket_check_rows(const cm_ticket *ticket, cm_status status);
/* Let a whole become done when the last of its parts is over. Nobody else may see the
 * whole yet. Takes over the array and its references. */
void cm_ticket_finish_after_parts(cm_ticket *ticket, cm_ticket **parts,
                                  uint64_t part_count, cm_status status, bool read);
/* Store how many bytes have moved so far, and add the difference to the whole if there
 * is one. Called by one thread at a time. */
void cm_ticket_set_moved(cm_ticket *ticket, uint64_t moved);
static inline bool
cm_ticket_is_stopped(const cm_ticket *ticket)
{
    return atomic_load_explicit(&ticket->stopped, memory_order_relaxed);
}
/* Return the first failure so far, which may be known before the end. If `read` is set,
 * the caller reports this failure to the user. */
CM_NODISCARD cm_status cm_ticket_outcome(cm_ticket *ticket, bool read);
/* Ask the device whether the copy has ended, or, if its job waits for an event, whether
 * the job can go on. Returns true if the ticket is over. */
bool cm_ticket_update(cm_ticket *ticket);
/* Make the caller's next work come after the ticket. If `stream` is not NULL, block
 * until the ticket is submitted or over, and make the stream wait for the copy. If
 * `stream` is NULL, block until the ticket is over. A failure of the ticket's copy is
 * not a failure of this call.
 * Fails: CM_ETIMEOUT, after `timeout_ns`; CM_EFORKED, stream_wait_event. */
CM_NODISCARD cm_status cm_ticket_depend(cm_ticket *ticket, cm_stream *stream,
                                        uint64_t timeout_ns);
/* Take over the stream of `device` that a submitted ticket has borrowed. What the
 * caller then queues on this stream comes after the ticket's copy without any further
 * wait. Only the first caller gets the stream. Returns NULL if there is none. */
cm_stream *cm_ticket_take_stream(cm_ticket *ticket, int device);
/* After CM_ECANCELLED, wait for the work of the copy that is still in flight. The wait
 * takes at most engine->drain_ns. The caller may use the memory once it hears that the
 * copy has ended. */
void cm_ticket_drain(cm_ticket *ticket);
/* -- order.c, all under the lock -- */

/* True if the ticket is far enough for the work that comes after it. If the host is to
 * act next (`needs_completion`), the ticket has to be over; otherwise it is enough that
 * the ticket is submitted. */
bool cm_ticket_is_passed(const cm_ticket *ticket, bool needs_completion);
/* Put the ticket into `state`, and let the tickets that hang on it advance. Tickets
 * that become OVER in this way, perhaps this one too, are put into `advanced` by their
 * `order_node`. So are wholes whose last part has become OVER. */
void cm_ticket_enter_state_locked(cm_ticket *ticket, cm_ticket_state state,
                                  cm_list *advanced);
/* Let a job wait for its event, for the copies that come before it, or for a job
 * thread. No thread may be running the job. */
void cm_order_put_job_locked(cm_engine *engine, struct cm_job *job);
/* End the wait of the ticket's job and take the job. Returns NULL if a thread is
 * running the job, or if the ticket has no job. */
struct cm_job *cm_order_take_job_locked(cm_ticket *ticket);

/* watcher.c: start the thread that watches submitted tickets and jobs that wait for an
 * event, unless it runs already.
 * Fails: CM_ETHREAD. */
CM_NODISCARD cm_status cm_engine_need_watcher(cm_engine *engine);
