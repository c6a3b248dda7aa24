/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets as the engine's own files see them: the place of a copy in the order of all,
 * and its outcome. Each hangs on the first of those it comes after that is not far
 * enough, with its job or, cancelled or failed before its turn, without: so what comes
 * after it still comes after them. A whole comes after its parts in the same way: it is
 * submitted once they are, and done with the last of them.
 * Whoever finds that the device is through makes the ticket done, be it the watcher, a
 * waiter or a reader. Locks: the engine's. */
#pragma once

#include "transfer/engine/private.h"

typedef enum cm_ticket_state {
    CM_TICKET_QUEUED = 0,    /* device work is still to be queued, or the host to act */
    CM_TICKET_SUBMITTED = 1, /* done as soon as end_event is, or a whole's parts over */
    CM_TICKET_DONE = 2,      /* the outcome is known; what it came after is not over */
    CM_TICKET_OVER = 4,
} cm_ticket_state;

typedef struct cm_notice {
    struct cm_notice *next;
    int fd; /* owned */
} cm_notice;

/* What a ticket has of the cache. */
typedef struct cm_loan {
    int device;           /* of the events and the stream */
    uint64_t start_event; /* 0: none */
    uint64_t end_event;
    cm_stream *stream; /* NULL: not ours */
    cm_stream *side;   /* beside the one that ends it; NULL: none */
} cm_loan;

struct cm_ticket {
    cm_list node; /* in engine->watched or engine->unread */
    cm_engine *engine;
    uint64_t start_ns;
    cm_event noted;         /* what the recorder is told at the end; `op` 0: nothing */
    uint64_t nbytes;        /* set before anybody else sees it, as is the next */
    _Atomic uint64_t moved; /* see cm_ticket_count_moved */
    _Atomic uint64_t parts_moved; /* the same of all parts */
    cm_ticket *part_of;           /* borrowed: it is done later; NULL: of none */
    /* Its place in the order, set before anybody else sees it. Held, owned array; of a
     * whole, its parts. */
    cm_ticket **after;
    uint64_t after_count;
    bool is_whole;
    atomic_uint refs;    /* one of them until it is over */
    bool captured;       /* put into a graph, not run */
    atomic_bool stopped; /* by cm_ticket_stop() */
    bool is_chained;     /* the first of them must not fail */
    bool by_host; /* they have to be over; else what follows submitted ones waits for
                     them on a stream */
    /* under engine->lock */
    uint64_t passed_count;   /* of `after`, the first */
    cm_list order_node;      /* in `waiters` of the next */
    cm_list waiters;         /* tickets */
    struct cm_job *job;      /* that no thread has in hand; NULL: none */
    const cm_route_row *row; /* of its plan, once that is made */
    cm_ticket_state state;
    bool started; /* too late to cancel */
    bool cancelled;
    bool busy;            /* one thread looks at the events, or makes it done */
    bool read;            /* somebody was told of the failure, or will be */
    uint32_t asker_count; /* who might ask for it */
    cm_status status;
    double seconds;
    cm_loan loan; /* until it is done */
    cm_notice *notices;
    cm_keep keep[4];
    uint32_t keep_count;
    cm_page_shares locked; /* of what is page-locked at its ends, so that it stays so */
};

/* What the recorder is told of a copy, but for its time and length. */
cm_event cm_request_event(const cm_copy_request *request);
/* A ticket with two references: the caller's and the order's, and what is
 * page-locked now at the ends of the request stays so until it is done. NULL: no memory
 * (the keeps are then still the caller's). */
cm_ticket *cm_ticket_create(cm_engine *engine, const cm_copy_request *request);
/* The call that waits for it will not stay to the end: take the keeps of its request.
 * False: there is no memory for them. Nobody else must see the ticket yet. */
bool cm_ticket_take_keeps(cm_ticket *ticket, const cm_copy_request *request);
/* Add shares of what is page-locked now at that end of a copy. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_engine_share_locked(cm_engine *engine,
                                              const cm_region *region,
                                              cm_page_shares *shares);
/* At the end of the call that made it, with the outcome of that: the caller's reference
 * goes to *out, or is abandoned where that is NULL or the call failed; not where it is
 * a part, of which something may be under way all the same. */
CM_NODISCARD cm_status cm_ticket_hand_over(cm_ticket *ticket, cm_status status,
                                           cm_ticket **out);
/* Device work is queued: from now on an event decides that is recorded here, over what
 * `stream`, whose device is current, has been given; `follower` (NULL: none) waits for
 * it. There is a watcher. Takes over the start event, and holds what is lent. An
 * `outcome` that is a failure is what the ticket will end with. Fails: event_create,
 * event_record, stream_wait_event; then it is not submitted. */
CM_NODISCARD cm_status cm_ticket_submit(cm_ticket *ticket, cm_stream *stream,
                                        cm_stream *follower, uint64_t start_event,
                                        cm_stream *lent, cm_stream *side,
                                        cm_status outcome);
/* Done. Drops the shares and the keeps first. `read`: the caller tells the user of a
 * failure itself. */
void cm_ticket_finish(cm_ticket *ticket, cm_status status, bool read);
/* The same for a whole, which nobody else sees yet, once all of its parts are over;
 * takes over the array. */
void cm_ticket_finish_after_parts(cm_ticket *ticket, cm_ticket **parts,
                                  uint64_t part_count, cm_status status, bool read);
/* So many bytes have moved so far; its whole is told. By one thread at a time. */
void cm_ticket_set_moved(cm_ticket *ticket, uint64_t moved);
static inline bool
cm_ticket_is_stopped(const cm_ticket *ticket)
{
    return atomic_load_explicit(&ticket->stopped, memory_order_relaxed);
}
/* The first failure so far, perhaps before the end. `read`: the user is told of it. */
CM_NODISCARD cm_status cm_ticket_outcome(cm_ticket *ticket, bool read);
/* Look whether the device is through, or a job that waits for it can go on; true when
 * the ticket is over. */
bool cm_ticket_update(cm_ticket *ticket);
/* Come after it: make `stream` wait for it once it is submitted; NULL: wait until it is
 * over. Its own failure is not ours. Blocks up to `timeout_ns`: CM_ETIMEOUT. */
CM_NODISCARD cm_status cm_ticket_depend(cm_ticket *ticket, cm_stream *stream,
                                        uint64_t timeout_ns);
/* The stream that it is on, of that device, if nothing else is behind it there: the
 * caller's from now on. NULL: there is none. */
cm_stream *cm_ticket_take_stream(cm_ticket *ticket, int device);
/* A caller that is told that a copy is over may use its memory: after CM_ECANCELLED
 * wait a while for what is still in flight. */
void cm_ticket_drain(cm_ticket *ticket);
/* order.c, all under the lock: does what comes after it, by the host or on a stream,
 * have to wait no longer? */
bool cm_ticket_is_passed(const cm_ticket *ticket, bool by_host);
/* Those that become over thereby, itself too, and wholes whose last part did, are put
 * into `settled`, by `order_node`. */
void cm_ticket_enter_state_locked(cm_ticket *ticket, cm_ticket_state state,
                                  cm_list *settled);
/* To where it waits: for its event, for what comes before it, or for a job thread. */
void cm_order_put_job_locked(cm_engine *engine, struct cm_job *job);
/* Out of that; NULL: a thread has it in hand, or there is none. */
struct cm_job *cm_order_take_job_locked(cm_ticket *ticket);

/* watcher.c: start the thread that watches submitted tickets, and jobs that wait for an
 * event. Fails: CM_ETHREAD. */
CM_NODISCARD cm_status cm_engine_need_watcher(cm_engine *engine);
