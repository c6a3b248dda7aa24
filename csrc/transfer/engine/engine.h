/* SPDX-License-Identifier: Apache-2.0 */
/* The engine moves the bytes of copies and fills. This header has the function that
 * starts one copy or one fill, and batch.h has the one for many copies.
 *
 * The idea
 * --------
 * A request names two regions, and says how it is ordered after other work. The engine
 * plans the copy (plan.h). The plan chooses a route: directly, by a kernel, or staged
 * through page-locked memory. The request becomes a job (job.h), which does the work,
 * and a ticket (ticket.h), which outlives the job and tells the outcome.
 *
 * Example: a background copy of 100 MB from ordinary memory to a GPU. The call makes a
 * ticket and a job and returns. A job thread takes the job (scheduler.c), packs pieces
 * into page-locked slots (ring.h) and queues the device's half of each piece, which is
 * the copy from the slot to the GPU, on a stream that the engine lends. When all is
 * queued it records an event, and the ticket is submitted. Once the event has passed,
 * either the watcher, which is a thread of the engine, or a caller that asks about the
 * ticket is the first to notice. The ticket is then done, and its keeps, which are the
 * objects that it has kept alive, are dropped.
 *
 * Who runs a job
 * --------------
 * With a stream, or if the request is blocking, the caller's own thread runs the job.
 * If there are then still bytes to unpack on the host, a job thread does that. A job in
 * the background goes to a job thread if it uses the host or has to wait; otherwise the
 * caller queues it. A job that has to wait leaves its job thread to other jobs, and
 * goes on later at the step that it had reached.
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

/* A callback for a staging pool that has no room. The engine calls it with the `status`
 * of the allocation that failed. The callback frees memory by whatever means it has,
 * allocates again as cm_pool_alloc() does, and returns the outcome of this second
 * allocation. The engine holds no lock when it calls the callback. It calls the
 * callback only from the thread of a caller that may be interrupted, and never from a
 * job thread. */
typedef cm_status cm_relief(void *argument, cm_pool *pool, uint64_t nbytes,
                            cm_stream *stream, cm_status status, cm_block **out);

/* Create an engine. It starts no thread and makes no runtime call until it is used. It
 * borrows `rt` and `registry`; the registry says which parts of host memory are
 * page-locked. Without a `relief` (NULL) an allocation that finds no room simply fails.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_engine_create(cm_runtime *rt, cm_registry *registry,
                                        cm_relief *relief, void *relief_argument,
                                        cm_engine **out);
/* Set the pool from which copies take their staging memory: page-locked memory if
 * `device` is -1, memory of that device otherwise. Only the first call for each
 * `device` has an effect, and the engine then holds a reference to `pool`. When `pool`
 * has no room the engine tries the pool `lender`, which it borrows and which may be
 * NULL. */
void cm_engine_set_pool(cm_engine *engine, int device, cm_pool *pool, cm_pool *lender);
/* Use `tuning` for copies that begin from now on. Every value must be within its
 * bounds. Values that depend on the number of processors are computed in this call,
 * from the number of processors that the process may use at this moment.
 * Fails: CM_EFORKED. */
CM_NODISCARD cm_status cm_engine_set_tuning(cm_engine *engine, const cm_tuning *tuning);
/* For tests and benchmarks: treat all pairs of devices as unable to reach each
 * other. */
void cm_engine_deny_peers(cm_engine *engine, bool denied);
/* Wait for every transfer, join the job threads, and release streams, kernels and
 * pools.
 * Fails: with the failure of a transfer that nobody asked about, if there is one; else
 * with the first failure to release something. The rest is released all the same. */
CM_NODISCARD cm_status cm_engine_close(cm_engine *engine);

/* An object that a transfer keeps alive. The engine calls drop(object) once the
 * transfer no longer needs the object. It may do so in any thread, without the GIL and
 * with no lock held. */
typedef struct cm_keep {
    void *object;
    void (*drop)(void *object);
} cm_keep;

/* What a caller asks the engine to copy or to fill. Pointers are borrowed for the call,
 * except where a member says otherwise. */
typedef struct cm_copy_request {
    cm_region dst;
    cm_region src; /* of dst's shape, to which the caller has broadcast it; of dst's
                      itemsize, unless `convert` is set */
    /* The number of bytes of the copy if its caller knows that each end is one run in
     * C's order and that nothing is converted; 0 if the caller does not know, so that
     * the regions have to be looked at. */
    uint64_t run_nbytes;
    /* How to convert the elements; NULL if they stay as they are. The two ends must not
     * be a pair for which cm_plan_goes_via_host() is true. What `convert->cast` refers
     * to must live until the keeps are dropped. */
    const cm_convert *convert;
    /* `src` is a single element in host memory, which is read before the call returns.
     * With a stream the device fills all that it can reach. Without one, or if the
     * request is blocking, the host fills its own memory. */
    bool is_fill;
    struct cm_many *many; /* runs to copy together, in place of dst and src; the engine
                             owns them from the call on; may be NULL */
    /* Rows that a kernel copies (routes/kernel_rows.h), in place of dst and src. These
     * two then describe only the first pair of arrays that has such rows, so that the
     * recorder can tell where they are. The engine owns this struct from the call on.
     * May be NULL. */
    struct cm_kernel_rows *rows;
    struct cm_file_job *file; /* ranges of a file to read or write, in place of dst and
                                 src; for a write in the background the engine owns this
                                 struct from the call on; may be NULL */
    cm_stream *stream; /* the copy takes its place in the order of this stream; if it is
                          NULL, the copy runs on a stream of the engine's */
    const struct cm_broadcast *broadcast; /* further targets; may be NULL */
    bool blocking;                        /* return only when the data has arrived */
    /* Streams whose work so far must be over before the copy starts. */
    cm_stream *const *after;
    uint32_t after_count;
    /* Transfers that must be over before the copy starts. */
    cm_ticket *const *after_tickets;
    uint32_t after_ticket_count;
    /* One more transfer that must be over before the copy starts. If that transfer
     * fails, this copy is not made, and fails in the same way. May be NULL. */
    cm_ticket *chained_to;
    /* The ticket of the whole batch, if this copy is one part of it (ticket.h tells of
     * such wholes). That ticket is done later than this copy. NULL if this copy is not
     * a part. */
    cm_ticket *part_of;
    /* The engine calls this about every 50 ms while the caller's thread waits, without
     * any lock held. If the answer is true the call ends with CM_ECANCELLED. What has
     * been queued by then still runs to its end, and the keeps are dropped only after
     * that; the call waits for that end, but no longer than a second. A blocking call
     * queues nothing while its stream is busy with other work, so what it waits for in
     * that second is its own work alone. The pointer is NULL if nobody is to be
     * asked. */
    bool (*interrupted)(void *argument);
    void *interrupted_argument;
    /* Called with `interrupted_argument`, in the caller's thread, before anything that
     * may take long, so that the caller can give up the GIL. It may be called more than
     * once, and it is always called before `interrupted`. A short copy on an idle
     * stream does not call it. The pointer is NULL if there is nothing to give up. */
    void (*let_go)(void *argument);
    /* The engine stores the ticket of the call here, for `interrupted` to read. It
     * stores nothing for a short copy, which has no ticket. The ticket must not be used
     * after a call that failed. The pointer may be NULL. */
    cm_ticket **ticket_out;
    cm_keep keep[4]; /* dropped when the transfer is done, whatever its outcome */
    uint32_t keep_count;
    /* Fills in `keep`; called with `interrupted_argument`. The engine calls this at
     * most once, in the caller's thread, when it becomes clear that the copy outlives
     * its call. A blocking call keeps its ends alive itself until it returns, so it
     * needs keeps only if Ctrl-C ends the call while the device is still at work. If
     * the answer is false there is no memory, and the call waits for what is queued
     * instead. The pointer is NULL if `keep` is complete. */
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

/* True if each end is one run in C's order. */
static inline bool
cm_request_is_run(const cm_copy_request *request)
{
    return request->run_nbytes > 0
           || (cm_region_is_c_contiguous(&request->dst)
               && cm_region_is_c_contiguous(&request->src));
}

/* Return the number of bytes of a copy between two runs, where `itemsize` is that of
 * the wider end. Returns 0 if there are more than `most` bytes, or if the shapes
 * differ, which the job will report. */
static inline uint64_t
cm_request_run_nbytes(const cm_copy_request *request, uint64_t itemsize, uint64_t most)
{
    if (request->run_nbytes == 0) {
        return cm_region_common_nbytes(&request->dst, &request->src, itemsize, most);
    }
    return request->run_nbytes <= most ? request->run_nbytes : 0;
}

/* True if the call may make the caller's thread wait. */
static inline bool
cm_request_waits(const cm_copy_request *request)
{
    return request->blocking || request->stream != NULL;
}

/* Start the copy or, if it is blocking, make it. Ends that overlap are copied as if all
 * of src were read first.
 *
 * With a stream, the device's part is only queued, while the host's part is done when
 * the call returns: a source that the host packs has been read, and a target that the
 * host writes has been written. Whoever waits for the stream, in whichever library,
 * therefore finds the bytes there. Without a stream, blocking or not, the copy runs on
 * a stream that the engine owns. On a stream that captures, only copies that need no
 * waiting are possible, and their tickets are done at once.
 *
 * The caller owns *out; `out` may be NULL if it wants no ticket. After a failure
 * nothing is in flight and the keeps have been dropped, except after CM_ECANCELLED (see
 * `interrupted`).
 * Fails: any runtime call, CM_ESHAPE, CM_EINVALID, CM_EOVERFLOW, CM_ENOMEM, CM_ETHREAD,
 * CM_ECAPTURING, CM_ECLOSED, CM_EFORKED, CM_ECANCELLED, CM_EFAULT (the file behind a
 * mapped end was cut short), CM_ECAST, CM_EROWS (see `rows`). */
CM_NODISCARD cm_status cm_engine_copy(cm_engine *engine, const cm_copy_request *request,
                                      cm_ticket **out);

/* A fill of contiguous memory of a device, by one value that is repeated. */
typedef struct cm_short_fill {
    cm_stream *stream; /* of the device that has the bytes; borrowed */
    cm_address address;
    uint64_t nbytes;   /* a multiple of itemsize, not 0 */
    const void *value; /* one element, of `itemsize` bytes; borrowed */
    uint64_t itemsize;
} cm_short_fill;

/* Try to queue a fill that comes after nothing but the earlier work of its stream, by
 * one call of the runtime and without a ticket. If the value does not repeat a pattern
 * of 1, 2 or 4 bytes, if the stream captures, or while transfers are recorded, the
 * function does nothing and returns false, and the caller goes to cm_engine_copy().
 * Otherwise the function returns true and stores the outcome in *out. After a failure
 * nothing is in flight.
 * Fails: fill_8_async, fill_16_async, fill_32_async. */
bool cm_engine_try_fill(cm_engine *engine, const cm_short_fill *fill, cm_status *out);

/* Make a ticket of no bytes that is done once `event` of `device`, as it is recorded
 * now, is reached. Recording the event again or destroying it changes nothing for the
 * ticket. A stream of the engine waits for the event, so the event must not have been
 * recorded in a capture.
 * Fails: CM_ENOMEM, CM_ETHREAD, CM_ECLOSED, CM_EFORKED, stream_create,
 * stream_wait_event, event_create, event_record. */
CM_NODISCARD cm_status cm_engine_follow_event(cm_engine *engine, int device,
                                              uint64_t event, cm_ticket **out);

/* Called when a pool is given an idle trim. From now on the watcher trims idle pools of
 * the runtime when they are due (cm_pools_trim_idle()), even while nobody allocates.
 * Fails: CM_ETHREAD. */
CM_NODISCARD cm_status cm_engine_need_idle_trims(cm_engine *engine);

/* Ask now which transfers have finished, and drop what the finished ones have kept
 * alive. Without this call the watcher does the same, only later. Makes runtime
 * calls. */
void cm_engine_poll(cm_engine *engine);

/* Take the next failure of a transfer that nobody asked about, for sys.unraisablehook.
 * Returns CM_OK if there is none. */
cm_status cm_engine_take_unread(cm_engine *engine);

/* Counts of copies since the engine was made. Any thread may read them. All but the
 * last two are for tests and benchmarks. */
typedef struct cm_copy_counts {
    cm_route_counts routes;   /* copies that ended, failed ones too, by their route */
    _Atomic uint64_t quick;   /* short copies and fills that the calling thread made
                                 without a ticket; `routes` does not count them */
    _Atomic uint64_t bounced; /* those of `quick` that used a page-locked block */
    _Atomic uint64_t pieces;  /* how many pieces all copies were cut into */
    _Atomic uint64_t failed;  /* transfers that failed or were cancelled */
    _Atomic uint64_t unread;  /* failures that wait for cm_engine_take_unread() */
} cm_copy_counts;

const cm_copy_counts *cm_engine_counts(const cm_engine *engine);

/* Find out whether the memory at one end of a copy is page-locked, and whether
 * registrations begin or end within it. The region itself does not say so. */
cm_end_facts cm_engine_facts_of(cm_engine *engine, const cm_region *region);

/* Return the number of transfers that are not done. */
uint64_t cm_engine_count_pending(cm_engine *engine);
