/* SPDX-License-Identifier: Apache-2.0 */
/* The engine: the entry for moving bytes, by one copy or fill (batch.h moves many).
 *
 * The idea
 * --------
 * A request names two regions, and says how it is ordered after other work. The engine
 * plans it (plan.h), which chooses a route: directly, by a kernel, or staged through
 * page-locked memory. The request becomes a job (job.h), which does the work, and a
 * ticket (ticket.h), which outlives the job and tells the outcome.
 *
 * Example: a background copy of 100 MB from ordinary memory to a GPU. The call makes a
 * ticket and a job and returns. A job thread takes the job (scheduler.c), packs pieces
 * into page-locked slots (ring.h) and queues the device's half of each on a stream that
 * the engine lends. When all is queued it records an event, and the ticket is
 * submitted. The watcher, or whoever asks the ticket first, sees that the event has
 * passed: the ticket is done and its keeps are dropped.
 *
 * Who runs a job
 * --------------
 * With a stream, or if the request is blocking, the caller's own thread runs the job,
 * and hands what the host still has to unpack to a job thread. A job in the background
 * goes to a job thread if it uses the host or has to wait; otherwise the caller queues
 * it. A job that has to wait leaves its job thread to other jobs, and goes on later at
 * the step that it had reached.
 *
 * The engine owns its streams, the job threads and the kernels. It knows nothing of
 * Python: whatever must stay alive is a `keep` with a drop function. One mutex guards
 * its lists, and is never held across a runtime call that can wait. */
#pragma once

#include <stdatomic.h>

#include "base/convert.h"
#include "pool/pool.h"
#include "pool/registry.h"
#include "transfer/engine/handle.h"
#include "transfer/plan/plan.h"

typedef struct cm_engine cm_engine;

/* Called when `pool` has no room for `nbytes`, as `status` tells: makes room by
 * whatever means, allocates as cm_pool_alloc() does, and returns how that ended. It is
 * called without any lock, in the thread of a caller who may be interrupted, and never
 * in a job thread. */
typedef cm_status cm_relief(void *argument, cm_pool *pool, uint64_t nbytes,
                            cm_stream *stream, cm_status status, cm_block **out);

/* Starts no thread and makes no runtime call yet. Borrows `rt` and `registry` (asked
 * where host ranges must be split); `relief` may be NULL. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_engine_create(cm_runtime *rt, cm_registry *registry,
                                        cm_relief *relief, void *relief_argument,
                                        cm_engine **out);
/* Set the pool that copies stage through: of page-locked memory (-1) or of a device.
 * The engine holds (counts) the first that it is given for each. Where a pool has no
 * room, the engine asks `lender`, which it borrows (NULL: nobody is asked). */
void cm_engine_set_pool(cm_engine *engine, int device, cm_pool *pool, cm_pool *lender);
/* How copies that begin from now on are made, with the processors that are there now;
 * each value is within its bounds. Fails: CM_EFORKED. */
CM_NODISCARD cm_status cm_engine_set_tuning(cm_engine *engine, const cm_tuning *tuning);
/* For tests and benchmarks: go on as if no device reached another. */
void cm_engine_deny_peers(cm_engine *engine, bool denied);
/* Waits for every transfer, joins the job threads, releases streams, kernels and pools.
 * Fails: the first failure of giving something back; everything is still tried. */
CM_NODISCARD cm_status cm_engine_close(cm_engine *engine);

/* Something a transfer keeps alive. `drop` may be called from any thread, without the
 * GIL or any lock held. */
typedef struct cm_keep {
    void *object;
    void (*drop)(void *object);
} cm_keep;

typedef struct cm_copy_request {
    cm_region dst;
    cm_region src;             /* already broadcast to dst's shape, same itemsize */
    const cm_convert *convert; /* what is done to the elements, whose itemsizes may then
                                  differ; not cm_plan_is_far(). Borrowed for the call,
                                  but its cast lives until the keeps are dropped. NULL:
                                  they stay as they are */
    bool is_fill;              /* src is one element of the host's, read before the call
                                  returns. On a stream the device fills what it reaches;
                                  else, or if blocking, the host its own memory */
    struct cm_many *many; /* runs that go together, instead of both; the engine's from
                             the call on; NULL: none */
    struct cm_file_job *file; /* ranges of a file, instead of both; borrowed; NULL:
                                 none */
    cm_stream *stream;        /* order on it; NULL: in the background */
    const struct cm_broadcast *broadcast; /* further targets; borrowed; NULL: none */
    bool blocking;                        /* return only when the data is there */
    cm_stream *const *after; /* streams whose work so far must come first; borrowed */
    uint32_t after_count;
    cm_ticket *const *after_tickets; /* transfers that must come first; borrowed */
    uint32_t after_ticket_count;
    cm_ticket *chained_to; /* one more: where it failed so does this, and is not made;
                              borrowed; NULL: none */
    cm_ticket *part_of;    /* the ticket this is a part of, done later; borrowed; NULL:
                              none */
    /* While a caller's thread waits this is asked about every 50 ms, without any lock;
     * true ends the call with CM_ECANCELLED. What is queued then still runs to its end,
     * and only then are the keeps dropped: a blocking call, which queues nothing while
     * its stream is busy with other work, waits for that (a second at most). NULL:
     * never. */
    bool (*interrupted)(void *argument);
    void *interrupted_argument;
    /* Called with the same argument in the caller's thread before whatever may take
     * long: maybe more than once, and always before `interrupted`. A short copy on an
     * idle stream does without. NULL: nothing is held. */
    void (*let_go)(void *argument);
    /* Where `interrupted` finds the ticket of the call that asks (NULL for a short
     * copy, which has none); NULL: nowhere. Not to be used after a call that failed. */
    cm_ticket **ticket_seen;
    cm_keep keep[4]; /* dropped when the transfer is done, whatever the outcome */
    uint32_t keep_count;
    /* Fills in `keep`, with the same argument, once the copy is to go on when its call
     * is over. A blocking call has its ends itself until it returns, so that nothing is
     * kept for it unless Ctrl-C ends it while the device is at work. Called at most
     * once, in the caller's thread. False: there is no memory, and what is queued is
     * waited for instead. NULL: `keep` is complete. */
    bool (*take_keeps)(void *argument);
} cm_copy_request;

static inline void
cm_request_let_go(const cm_copy_request *request)
{
    if (request->let_go != NULL) {
        request->let_go(request->interrupted_argument);
    }
}

static inline bool
cm_request_take_keeps(const cm_copy_request *request)
{
    return request->take_keeps == NULL
           || request->take_keeps(request->interrupted_argument);
}

static inline cm_wait_hooks
cm_request_hooks(const cm_copy_request *request)
{
    return (cm_wait_hooks){.interrupted = request->interrupted,
                           .argument = request->interrupted_argument};
}

/* A thread of the caller may wait in the call. */
static inline bool
cm_request_waits(const cm_copy_request *request)
{
    return request->blocking || request->stream != NULL;
}

/* Start (or, if blocking, do) the copy. Overlapping ends behave as if src were read
 * whole first. With a stream, what the device does is only queued, and what the host
 * does is done on return: a source that it packs has been read, a target that it writes
 * has been written. So the bytes are there once the stream is done, whichever library
 * asks. *out is owned by the caller (NULL `out` if it is not wanted). On failure
 * nothing is in flight and `keep` is dropped too. Without a stream, blocking or not, it
 * runs on a stream of the engine's own. On a capturing stream only what needs no
 * waiting can be done; the ticket is then done at once.
 * Fails: any runtime call, CM_ESHAPE, CM_EINVALID, CM_EOVERFLOW, CM_ENOMEM, CM_ETHREAD,
 * CM_ECAPTURING, CM_ECLOSED, CM_EFORKED, CM_ECANCELLED, CM_EFAULT (what an end maps was
 * cut short), CM_ECAST. */
CM_NODISCARD cm_status cm_engine_copy(cm_engine *engine, const cm_copy_request *request,
                                      cm_ticket **out);

/* Bytes of a device without gaps, to be filled with one value again and again. */
typedef struct cm_short_fill {
    cm_stream *stream; /* of the device that has the bytes; borrowed */
    cm_address address;
    uint64_t nbytes; /* a multiple of itemsize, not 0 */
    const void *value;
    uint64_t itemsize;
} cm_short_fill;

/* Queue a fill that comes after nothing but what its stream was given: one call of the
 * runtime, without a ticket. False: it was not tried, since the value repeats no
 * pattern of 1, 2 or 4 bytes, the stream captures, or transfers are recorded;
 * cm_engine_copy() makes it. True: *out says how it went, and after a failure nothing
 * is in flight.
 * Fails: fill_8_async, fill_16_async, fill_32_async. */
bool cm_engine_try_fill(cm_engine *engine, const cm_short_fill *fill, cm_status *out);

/* A ticket of no bytes that is done once `event` of `device` is reached as it is
 * recorded now: recording it again, or destroying it, changes nothing for the ticket.
 * A stream of the engine's own waits for the event, so it must not be one that a
 * capture recorded. Fails: CM_ENOMEM, CM_ETHREAD, CM_ECLOSED, CM_EFORKED, stream_create,
 * stream_wait_event, event_create, event_record. */
CM_NODISCARD cm_status cm_engine_follow_event(cm_engine *engine, int device,
                                              uint64_t event, cm_ticket **out);

/* A pool has an idle trim from now on: the watcher sees to those of all pools of the
 * runtime (cm_pools_trim_idle()), also while nobody allocates. Fails: CM_ETHREAD. */
CM_NODISCARD cm_status cm_engine_need_idle_trims(cm_engine *engine);

/* Look now which transfers have finished, and drop what they keep; the watcher does the
 * same on its own. Makes runtime calls. */
void cm_engine_poll(cm_engine *engine);

/* The next failure that nobody read (CM_OK if none): for the unraisable hook. */
cm_status cm_engine_take_unread(cm_engine *engine);

/* What copies have done so far; any thread may look. All but the last two are for tests
 * and benchmarks. */
typedef struct cm_copy_counts {
    cm_route_counts routes; /* copies that ended, failed ones too */
    _Atomic uint64_t quick; /* short ones, and fills, made by the calling thread without
                               a ticket: not among these */
    _Atomic uint64_t bounced; /* of them, through a page-locked block */
    _Atomic uint64_t pieces;  /* of all that were cut */
    _Atomic uint64_t failed;  /* transfers that did, or were cancelled */
    _Atomic uint64_t unread;  /* failures that cm_engine_take_unread() has to tell */
} cm_copy_counts;

const cm_copy_counts *cm_engine_counts(const cm_engine *engine);

/* What is known of one end of a copy beyond its region. */
cm_end_facts cm_engine_facts_of(cm_engine *engine, const cm_region *region);

/* Count the transfers that are not done. */
uint64_t cm_engine_count_pending(cm_engine *engine);
