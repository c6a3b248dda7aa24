/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets as the engine's own files see them: from queued over submitted to done. One
 * that has parts is never done before them.
 * Whoever finds that the device is through makes the ticket done, be it the watcher, a
 * waiter or a reader. Locks: the engine's. */
#ifndef CM_TRANSFER_ENGINE_TICKET_H
#define CM_TRANSFER_ENGINE_TICKET_H

#include "transfer/engine/private.h"

typedef enum cm_ticket_state {
    CM_TICKET_QUEUED, /* device work may still have to be queued, or the host to act */
    CM_TICKET_LEFT,   /* to its parts: done as soon as they are, and nothing to queue
                         a wait for until then */
    CM_TICKET_SUBMITTED, /* done as soon as end_event is, and its parts */
    CM_TICKET_DONE,
} cm_ticket_state;

typedef struct cm_notice {
    struct cm_notice *next;
    int fd; /* owned */
} cm_notice;

struct cm_ticket {
    atomic_uint refs; /* one of them is `pending`'s */
    cm_list node;     /* in engine->pending, engine->watched or engine->unread */
    cm_engine *engine;
    uint64_t start_ns;
    uint64_t nbytes;              /* set before anybody else sees it, as is the next */
    bool captured;                /* put into a graph, not run */
    _Atomic uint64_t moved;       /* see cm_ticket_count_moved */
    _Atomic uint64_t parts_moved; /* the same of all parts */
    cm_ticket *part_of;           /* borrowed: it is done later; NULL: of none */
    cm_ticket **parts;            /* owned array, held */
    uint64_t part_count;
    /* under engine->lock */
    cm_route route;
    cm_ticket_state state;
    struct cm_job *job; /* waits in a list; NULL: it does not */
    cm_list waiters;    /* jobs that go on when its state allows it */
    bool started;       /* too late to cancel */
    bool cancelled;
    bool finishing;       /* one thread is making it done */
    bool read;            /* somebody was told of the failure, or will be */
    bool abandoned;       /* nobody will ask */
    uint32_t other_count; /* that might, beside one */
    uint32_t query_count; /* threads that look at the events now */
    cm_status status;
    double seconds;
    int device;           /* of the events and the stream */
    uint64_t start_event; /* lent; 0: none */
    uint64_t end_event;
    cm_stream *lent; /* internal stream, in use until done; may be NULL */
    cm_stream *side; /* the same, beside the one that ends it */
    cm_notice *notices;
    /* Done before these, which it was to come after: what comes after it comes after
     * them. Owned array, held; set before it is done. */
    cm_ticket **inherited;
    uint32_t inherited_count;
    cm_keep keep[4];
    uint32_t keep_count;
    cm_page_shares locked; /* of what is page-locked at its ends, so that it stays so */
};

/* A ticket in `pending`, with two references: the caller's and pending's, and what is
 * page-locked now at the ends of the request stays so until it is done. NULL: no memory
 * (the keeps are then still the caller's). */
cm_ticket *cm_ticket_create(cm_engine *engine, const cm_copy_request *request);
/* Add shares of what is page-locked now at that end of a copy. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_engine_share_locked(cm_engine *engine,
                                              const cm_region *region,
                                              cm_page_shares *shares);
/* At the end of the call that made it, with the outcome of that: the caller's reference
 * goes to *out, or is abandoned where that is NULL or the call failed; not where it is
 * a part, of which something may be under way all the same. */
CM_NODISCARD cm_status cm_ticket_hand_over(cm_ticket *ticket, cm_status status,
                                           cm_ticket **out);
/* Device work is queued: from now on the events decide. Takes over the cache. A
 * `status` that is a failure is what the ticket will end with. */
void cm_ticket_submit(cm_ticket *ticket, int device, uint64_t start_event,
                      uint64_t end_event, cm_stream *lent, cm_stream *side,
                      cm_status status);
/* Over. Drops the shares and the keeps first. `read`: the caller tells the user of a
 * failure itself. While parts of it are under way it is LEFT to them instead, and over
 * with the last.
 */
void cm_ticket_finish(cm_ticket *ticket, cm_status status, bool read);
/* So many bytes have moved so far, of which its whole is told. By one thread at a time.
 */
void cm_ticket_set_moved(cm_ticket *ticket, uint64_t moved);
/* cm_ticket_count_moved() */
static inline uint64_t
cm_ticket_moved(const cm_ticket *ticket)
{
    uint64_t moved = atomic_load_explicit(&ticket->moved, memory_order_acquire);
    uint64_t parts = atomic_load_explicit(&ticket->parts_moved, memory_order_acquire);
    if (moved > 0 || parts == 0 || parts < ticket->nbytes) {
        return moved > 0 ? moved : parts;
    }
    return ticket->nbytes - 1; /* it is not done yet, though they are */
}
/* The user was not told of the failure after all. */
void cm_ticket_unread(cm_ticket *ticket);
/* Look whether the device is through; true when the ticket is done. */
bool cm_ticket_update(cm_ticket *ticket);
/* The same, and whether all that it owes is. */
bool cm_ticket_is_all_over(cm_ticket *ticket);
/* Under engine->lock: is looking all that it takes to become done? */
static inline bool
cm_ticket_is_watched(const cm_ticket *ticket)
{
    return ticket->state == CM_TICKET_LEFT || ticket->state == CM_TICKET_SUBMITTED;
}
/* Under engine->lock: done, before others that whoever comes after it comes after. */
static inline bool
cm_ticket_owes_locked(const cm_ticket *ticket)
{
    return ticket->state == CM_TICKET_DONE && ticket->inherited_count > 0;
}
/* As cm_engine_take_unread; when nothing is left the engine is over, and no failure is
 * kept any more. */
CM_NODISCARD cm_status cm_engine_end_unread(cm_engine *engine);
/* Make `stream` wait for it (NULL: nothing is queued), once it is submitted or done;
 * its own failure is not ours. Blocks up to `timeout_ns`: CM_ETIMEOUT. Without a stream it
 * must be done. */
CM_NODISCARD cm_status cm_ticket_depend(cm_ticket *ticket, cm_stream *stream,
                                        uint64_t timeout_ns);
/* A caller that is told that a copy is over may use its memory: after CM_ECANCELLED
 * wait a while for what is still in flight. */
void cm_ticket_drain(cm_ticket *ticket);
/* Start the thread that watches submitted tickets. Fails: CM_ETHREAD. */
CM_NODISCARD cm_status cm_engine_need_watcher(cm_engine *engine);
void cm_engine_join_watcher(cm_engine *engine);

#endif
