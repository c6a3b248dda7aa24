/* SPDX-License-Identifier: Apache-2.0 */
/* The one entry for moving bytes: takes two regions, plans, and moves them directly, by
 * kernel or staged. Owns the internal streams, the background worker and the strided-copy
 * kernel. Knows nothing of Python: whoever must stay alive is a `keep` with a drop
 * function.
 * Locks: one mutex over its lists, never held across a runtime call that can wait. */
#ifndef CM_TRANSFER_ENGINE_H
#define CM_TRANSFER_ENGINE_H

#include "pool/pool.h"
#include "pool/registry.h"
#include "transfer/region.h"
#include "transfer/tuning.h"

typedef struct cm_engine cm_engine;

/* How the bytes went. X(name, text for users). */
#define CM_ROUTES(X)                                                                   \
    X(NOTHING, "nothing")             /* no bytes */                                   \
    X(HOST, "host")                   /* host to host, by the CPU */                   \
    X(DIRECT, "direct")               /* one runtime copy */                           \
    X(DIRECT_2D, "direct-2d")         /* one pitched runtime copy */                   \
    X(PEER, "peer")                   /* between two devices */                        \
    X(PEER_STAGED, "peer-staged")     /* … that do not reach each other */             \
    X(KERNEL, "kernel")               /* strided, by the device */                     \
    X(STAGED, "staged")               /* packed or unpacked on the host on the way */  \
    X(STAGED_KERNEL, "staged-kernel") /* … and scattered or gathered on the device */  \
    X(FILL, "fill")                   /* memset */                                     \
    /* of many at once: */                                                             \
    X(TABLE, "table")               /* runs, by one kernel */                          \
    X(BATCH, "batch")               /* runs, by the runtime's call for many */         \
    X(STAGED_TABLE, "staged-table") /* gathered or spread out on the host */           \
    X(SEVERAL, "several")           /* of these and the others */

typedef enum cm_route {
#define CM_ROUTE_ENUM(name, text) CM_ROUTE_##name,
    CM_ROUTES(CM_ROUTE_ENUM)
#undef CM_ROUTE_ENUM
        CM_ROUTE_COUNT
} cm_route;

const char *cm_route_text(cm_route route);

/* Starts no thread and makes no runtime call yet. Borrows `rt` and `registry` (asked
 * where host ranges must be split). Fails: CM_ENOMEM, CM_ESYSTEM. */
CM_NODISCARD cm_status cm_engine_create(cm_runtime *rt, cm_registry *registry,
                                        cm_engine **out);
/* The pools it stages through; held (counted) by the engine. */
void cm_engine_set_pinned_pool(cm_engine *engine, cm_pool *pool);
void cm_engine_set_device_pool(cm_engine *engine, int device, cm_pool *pool);
/* How copies that begin from now on are made. Fails: CM_EINVALID (a value out of bounds).
 */
CM_NODISCARD cm_status cm_engine_set_tuning(cm_engine *engine, const cm_tuning *tuning);
void cm_engine_read_tuning(cm_engine *engine, cm_tuning *out);
/* For tests and benchmarks: go on as if no device reached another. */
void cm_engine_deny_peers(cm_engine *engine, bool denied);
/* Waits for every transfer, joins the workers, releases streams, kernels and pools.
 * Fails: the first failure of giving something back; everything is still tried. */
CM_NODISCARD cm_status cm_engine_close(cm_engine *engine);

/* Something a transfer keeps alive. `drop` may be called from any thread, without the
 * GIL or any lock held. */
typedef struct cm_keep {
    void *object;
    void (*drop)(void *object);
} cm_keep;

typedef struct cm_ticket cm_ticket;

typedef struct cm_copy_request {
    cm_region dst;
    cm_region src;     /* already broadcast to dst's shape, same itemsize */
    cm_stream *stream; /* order on it; NULL: in the background */
    const struct cm_spread *spread; /* spread.h: further targets; borrowed; NULL: none
                                     */
    bool blocking;                  /* return only when the data is there */
    cm_stream *const *after; /* streams whose work so far must come first; borrowed */
    uint32_t after_count;
    cm_ticket *const *after_tickets; /* transfers that must come first; borrowed */
    uint32_t after_ticket_count;
    bool is_chained; /* where the last of them failed so does this, and is not made */
    cm_ticket *part_of; /* the ticket this is a part of; borrowed; NULL: of none */
    /* While a caller's thread waits this is asked about every 50 ms, without any lock;
     * true ends the call with CM_ECANCELLED. What is queued then still runs to its end,
     * and only then are the keeps dropped: a blocking call, which queues nothing while
     * its stream is busy with other work, waits for that (a second at most). NULL:
     * never. */
    bool (*interrupted)(void *argument);
    void *interrupted_argument;
    /* Where `interrupted` finds the ticket of the call that asks (NULL for a short
     * copy, which has none); NULL: nowhere. Not to be used after a call that failed. */
    cm_ticket **ticket_seen;
    cm_keep keep[4]; /* dropped when the transfer is done, whatever the outcome */
    uint32_t keep_count;
} cm_copy_request;

/* Start (or, if blocking, do) the copy. Overlapping ends behave as if src were read
 * whole first. With a stream and an asynchronous request it returns once a pageable
 * source has been read; if both ends are pageable it waits for the stream and is done
 * on return. *out is owned by the caller (NULL `out` if it is not wanted). On failure
 * nothing is in flight and `keep` is dropped too.
 * Without a stream, blocking or not, it runs on a stream of the engine's own. On a
 * capturing stream only what needs no waiting can be done; the ticket is then done at
 * once.
 * Fails: any runtime call, CM_ESHAPE, CM_EINVALID, CM_EOVERFLOW, CM_ENOMEM, CM_ETHREAD,
 * CM_ENOTSUP (capturing), CM_ECLOSED, CM_EFORKED, CM_ECANCELLED. */
CM_NODISCARD cm_status cm_engine_copy(cm_engine *engine, const cm_copy_request *request,
                                      cm_ticket **out);

/* Look now which transfers have finished, and drop what they keep; the watcher does the
 * same on its own. Makes runtime calls. */
void cm_engine_poll(cm_engine *engine);

/* Tickets are counted; any thread. */
cm_ticket *cm_ticket_hold(cm_ticket *ticket);
/* A hold by one more who will ask for the outcome, or abandon it. */
cm_ticket *cm_ticket_share(cm_ticket *ticket);
void cm_ticket_release(cm_ticket *ticket);
/* A release by the last who would have asked for the outcome, whoever else still holds
 * the ticket: a failure that nobody has read goes to cm_engine_take_unread, or, where
 * the engine has ended and nobody will ask that, to the caller. */
CM_NODISCARD cm_status cm_ticket_abandon(cm_ticket *ticket);

typedef struct cm_ticket_info {
    bool done;
    cm_status status; /* first failure; CM_OK while not done */
    cm_route route;
    bool captured;   /* it went into a graph, which may run it at any time */
    bool cancelled;  /* by cm_ticket_cancel: nothing was read or written */
    uint64_t nbytes; /* payload, not counting broadcast repeats of the source */
    double seconds;  /* from start to end; on the device's clock where it has one; 0
                        while not done */
} cm_ticket_info;

/* Fill dst with one element of dst.itemsize bytes at `value` (host memory, read before
 * the call returns). Ordered on `stream`, by the device wherever it reaches dst;
 * without one, or if blocking, it is done on return, and memory of the host is filled
 * by the host. `out` (NULL if it is not wanted) says how; it may be no more than
 * queued. Whoever waits for the host's turn may be interrupted: CM_ECANCELLED. */
CM_NODISCARD cm_status cm_engine_fill(cm_engine *engine, const cm_region *dst,
                                      const void *value, cm_stream *stream,
                                      cm_stream *const *after, uint32_t after_count,
                                      bool blocking, const cm_patience *patience,
                                      cm_ticket_info *out);

/* Never blocks. In a forked child: as it was at the fork. */
void cm_ticket_read(cm_ticket *ticket, cm_ticket_info *out);
/* Bytes of the payload that have arrived for certain, in whole pieces; the last of them
 * with the end, so that it is `nbytes` just when all is done without a failure. Makes
 * no runtime call and takes no lock. */
uint64_t cm_ticket_count_moved(const cm_ticket *ticket);
/* End a copy in the background that has not begun: that waits for a worker or for what
 * comes before it. True: nothing was or will be read or written, what it kept is
 * dropped and it is done with CM_ECANCELLED, for which nobody needs to ask (now, or
 * since an earlier call). False: it goes on, or is done. Blocks for a moment. */
bool cm_ticket_cancel(cm_ticket *ticket);
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

/* The next failure that nobody read (CM_OK if none): for the unraisable hook. */
cm_status cm_engine_take_unread(cm_engine *engine);
/* A look without the lock whether there is one. */
bool cm_engine_has_unread(const cm_engine *engine);

/* Unfinished transfers. */
uint64_t cm_engine_count_pending(cm_engine *engine);

#endif
