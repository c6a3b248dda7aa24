/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of one kind on one device, handed out as blocks and taken back while work on
 * it may still run. The first, simple pool: a miss is one runtime call, a freed block
 * waits here until its work is done, and an equal request may have it again. Callers
 * rely only on this header; the caching pool replaces what is behind it. Knows nothing
 * of Python.
 * Locks: one mutex, never held across a runtime call that can wait or allocate. */
#ifndef CM_POOL_POOL_H
#define CM_POOL_POOL_H

#include "runtime/runtime.h"
#include "runtime/stream.h"

typedef struct cm_pool cm_pool;

typedef struct cm_pool_config {
    cm_kind kind;   /* PINNED, MAPPED, MANAGED or DEVICE */
    int device;     /* whose context allocates, and where device memory lies */
    unsigned flags; /* of cudaHostAlloc or cudaMallocManaged */
    /* So much freed memory that someone unknown may still use waits before a miss takes
     * a fence. A fence breaks a capture that another library has going on a stream of
     * its own, and no driver can say whether one has: it is taken seldom. Trim always
     * takes it. */
    uint64_t fence_limit_nbytes;
} cm_pool_config;

/* What a user of the pool holds. Read-only for callers. */
typedef struct cm_block {
    void *host;         /* host-usable address; NULL for device memory */
    cm_address address; /* device-usable address; 0 if there is none (never for a pool)
                         */
    uint64_t nbytes;    /* usable bytes, >= what was asked for */
} cm_block;

/* Counted by one list; the snapshot struct follows it. Bytes unless the name says
 * count. */
#define CM_POOL_COUNTERS(X)                                                            \
    X(live_nbytes) /* in blocks handed out */                                          \
    X(live_count)                                                                      \
    X(in_flight_nbytes) /* freed, work may still run on them */                        \
    X(in_flight_count)                                                                 \
    X(cached_nbytes) /* free and ready for reuse */                                    \
    X(cached_count)                                                                    \
    X(reserved_nbytes) /* = live + in flight + cached: held from the runtime */        \
    X(peak_live_nbytes)                                                                \
    X(allocation_count)                                                                \
    X(hit_count)  /* allocations that made no runtime call to allocate */              \
    X(lost_count) /* times the runtime refused to take something back */

typedef struct cm_pool_counters {
#define CM_POOL_FIELD(name) uint64_t name;
    CM_POOL_COUNTERS(CM_POOL_FIELD)
#undef CM_POOL_FIELD
} cm_pool_counters;

/* Owns: the pool borrows `rt`, which must outlive it. Fails: CM_EINVALID, CM_ENOMEM,
 * CM_ESYSTEM. Makes no runtime call. */
CM_NODISCARD cm_status cm_pool_create(cm_runtime *rt, const cm_pool_config *config,
                                      cm_pool **out);

/* Counted: a block holder keeps the pool. The last release frees what is cached and,
 * after waiting for it, what is in flight; it makes runtime calls and blocks. */
cm_pool *cm_pool_hold(cm_pool *pool);
void cm_pool_release(cm_pool *pool);

/* Hand out at least `nbytes` (> 0) bytes, usable on `stream` (NULL: any) from now on.
 * Owns:   the caller owns *out until cm_pool_free.
 * Blocks: may wait in the runtime on a miss, without the lock.
 * Fails:  the allocating operation; CM_EFORKED; CM_EOVERFLOW. Before an out-of-memory
 *         failure all in-flight blocks were waited for, the cache freed and the call
 *         retried once. */
CM_NODISCARD cm_status cm_pool_alloc(cm_pool *pool, uint64_t nbytes, cm_stream *stream,
                                     cm_block **out);

/* What is known of a block beyond the streams that worked on it. */
enum {
    CM_POOL_FREE_FENCE = 1,    /* others did that nobody knows: the block waits for
                                  everything its device was doing */
    CM_POOL_FREE_CAPTURED = 2, /* a stream did while it was being captured */
};

/* Give a block back. `uses` are the streams that worked on it (borrowed). Never blocks
 * (unless it is the pool's last holder): events are recorded here and looked at later,
 * and a fence is taken at the next look. A runtime failure while recording turns into a
 * fence; a stream that nobody keeps alive counts as one. A block used in a capture, or
 * on a stream that is capturing now, belongs to the graph: it comes back when the pool
 * ends. In a forked child the block is leaked. */
void cm_pool_free(cm_pool *pool, cm_block *block, cm_stream *const *uses,
                  uint32_t use_count, unsigned flags);

/* Return cached blocks to the runtime, after looking at those in flight; with `wait`
 * wait
 * for all of them first. Fails: the first failing operation; the rest is still tried. */
CM_NODISCARD cm_status cm_pool_trim(cm_pool *pool, bool wait,
                                    uint64_t *released_nbytes);

/* A consistent snapshot. */
void cm_pool_read(cm_pool *pool, cm_pool_counters *out);

const cm_pool_config *cm_pool_get_config(const cm_pool *pool);

/* True when the equations above cm_pool's struct hold; tests and debug builds. */
bool cm_pool_check(cm_pool *pool);

#endif
