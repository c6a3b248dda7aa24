/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of one kind on one device, cut into blocks of exactly the size asked for and
 * taken back while work on it may still run. A block that fits in what is free costs no
 * runtime call; a miss looks at what is in flight, then grows. Device blocks are reused
 * in stream order, blocks the host may write only once the host has seen their work
 * end. Knows nothing of Python.
 * Locks: one short lock for the lists, never held across a runtime call; and turns at
 * growing and at polling, which are. */
#pragma once

#include "base/thread.h"
#include "pool/budget.h"
#include "runtime/runtime.h"
#include "runtime/stream.h"

typedef struct cm_pool cm_pool;

/* What forked children get of the page-locked blocks that live at a fork. */
typedef enum cm_fork {
    CM_FORK_COPY,  /* a copy of their own, which the parent makes before the fork */
    CM_FORK_SHARE, /* the same memory; no block is reused while a child has it */
    CM_FORK_OMIT,  /* the addresses, which they cannot touch */
} cm_fork;

typedef enum cm_segments {
    CM_SEGMENTS_AUTO,  /* mapped on demand where the device can, else as below */
    CM_SEGMENTS_PLAIN, /* one allocation of the runtime each: cudaIpc, older MPI */
} cm_segments;

typedef struct cm_pool_config {
    cm_kind kind;   /* PINNED, MAPPED, MANAGED or DEVICE */
    int device;     /* whose context allocates, and where device memory lies */
    unsigned flags; /* of cudaHostAlloc or cudaMallocManaged */
    cm_segments segments;
    cm_fork fork;  /* page-locked memory; SHARE: where it can be registered */
    int numa_node; /* host memory: where its pages belong; -1: nearest to the device */
    /* So much freed memory that someone unknown may still use waits before a miss takes
     * a fence. A fence breaks a capture that another library has going on a stream of
     * its own, and no driver says whether one has: seldom taken, but by trim always. */
    uint64_t fence_limit_nbytes;
    /* Borrowed, may be NULL: charged with what is reserved, as is a budget of the
     * pool's own, unlimited at first, that cm_pool_get_config() tells in its place. */
    cm_budget *budget;
    uint64_t idle_trim_ns; /* memory unused for so long goes back by itself; 0: never */
    uint64_t serial;       /* the caller's, never used again, as an address is */
    uint64_t number;       /* the caller's: what it is told as */
    bool is_staging;       /* what copies go through: the recorder tells it apart */
} cm_pool_config;

/* What a user of the pool holds. Read-only for callers. */
typedef struct cm_block {
    void *host;         /* host-usable address; NULL for device memory */
    cm_address address; /* device-usable; 0 if there is none (never for a pool) */
    uint64_t nbytes;    /* usable bytes, >= what was asked for */
} cm_block;

/* The one list of counters, which makes cm_pool_counters. Bytes unless the name says
 * count or ns. */
#define CM_POOL_PEAKS(X)                                                               \
    X(peak_live_nbytes)                                                                \
    X(peak_requested_nbytes)                                                           \
    X(peak_waste_nbytes) /* of live - requested */                                     \
    X(peak_in_flight_nbytes)                                                           \
    X(peak_cached_nbytes) /* but for what a growth under way is for */                 \
    X(peak_reserved_nbytes)
#define CM_POOL_COUNTERS(X)                                                            \
    X(live_nbytes) /* in blocks handed out, rounding included */                       \
    X(live_count)                                                                      \
    X(requested_nbytes) /* asked for by them; live - requested is lost to rounding */  \
    X(in_flight_nbytes) /* freed, work may still run on them */                        \
    X(in_flight_count)                                                                 \
    X(cached_nbytes) /* free for reuse; what comes or goes just now included */        \
    X(cached_count) /* free pieces, as joining would leave them; see cm_pool_read() */ \
    X(reserved_nbytes) /* held from the runtime = live + in flight + cached */         \
    CM_POOL_PEAKS(X)                                                                   \
    X(largest_free_nbytes) /* the longest of them */                                   \
    X(segment_count)       /* ranges of addresses the memory lies in */                \
    X(allocation_count)                                                                \
    X(free_count)                                                                      \
    X(hit_count)  /* allocations that made no runtime call */                          \
    X(miss_count) /* the others */                                                     \
    X(split_count)                                                                     \
    X(merge_count)                                                                     \
    X(cross_stream_wait_count) /* a stream was made to wait for another's work */      \
    X(growth_count)                                                                    \
    X(growth_ns)   /* time spent growing */                                            \
    X(remap_count) /* chunks whose memory moved to where it was needed */              \
    X(remap_nbytes)                                                                    \
    X(trim_count)                                                                      \
    X(trimmed_nbytes)                                                                  \
    X(out_of_memory_count)                                                             \
    X(lost_count) /* times the runtime refused to take something back */

typedef struct cm_pool_counters {
#define CM_POOL_FIELD(name) uint64_t name;
    CM_POOL_COUNTERS(CM_POOL_FIELD)
#undef CM_POOL_FIELD
} cm_pool_counters;

/* Owns: the pool borrows `rt`, which must outlive it. Fails: CM_EINVALID (the device),
 * CM_ENOMEM. Makes no runtime call. */
CM_NODISCARD cm_status cm_pool_create(cm_runtime *rt, const cm_pool_config *config,
                                      cm_pool **out);

/* Counted: a live block keeps the pool too. The last release frees what is cached and,
 * after waiting for it, what is in flight; it makes runtime calls and blocks. */
cm_pool *cm_pool_hold(cm_pool *pool);
void cm_pool_release(cm_pool *pool);

/* A block of `nbytes` (> 0) for `stream` (NULL: any) from what is free, without a
 * runtime call; NULL: ask cm_pool_alloc. Page-locked memory is to be asked for once
 * more than `fence_limit` (0: the pool's) was given back with a fence. */
cm_block *cm_pool_try_alloc(cm_pool *pool, uint64_t nbytes, const cm_stream *stream,
                            uint64_t fence_limit);

/* True for failures for want of memory, of whatever sort: less may still be had. */
static inline bool
cm_pool_is_short(cm_status status)
{
    return status.code == CM_CUDA_OUT_OF_MEMORY || status.code == CM_ELIMIT
           || status.code == CM_ENOMEM || status.code == CM_EHOSTMEMORY;
}

/* How long somebody waits, asked in the thread that waits and with nothing locked. */
typedef struct cm_wait_hooks {
    /* Asked every 50 ms: true ends the wait with CM_ECANCELLED. NULL: nobody would. */
    bool (*interrupted)(void *argument);
    void *argument;
    /* Wait for all that a device is doing; false: ends the wait likewise. NULL: where
     * the wait cannot be interrupted. */
    bool (*wait_device)(void *argument, int device, cm_status *out);
    /* Does another library capture, on a stream that the runtime cannot be asked about?
     * Then no fence is taken and no device waited for, which would end the capture.
     * NULL: nobody knows. */
    bool (*others_capture)(void *argument);
    /* Grow without waiting for fences first (cm_pool_alloc()): by allocators of others,
     * whose callers do not expect a wait where there is memory. */
    bool grows_at_once;
} cm_wait_hooks;

static inline bool
cm_others_capture(const cm_wait_hooks *hooks)
{
    return hooks != NULL && hooks->others_capture != NULL
           && hooks->others_capture(hooks->argument);
}

enum { CM_ASK_NS = 50 * 1000 * 1000 };
/* Ask whether to go on, if that was last done, at *asked_ns, so long ago.
 * Fails: CM_ECANCELLED. */
CM_NODISCARD static inline cm_status
cm_wait_ask(const cm_wait_hooks *hooks, uint64_t *asked_ns)
{
    if (hooks->interrupted == NULL || cm_now_ns() - *asked_ns < CM_ASK_NS) {
        return cm_ok();
    }
    bool interrupted = hooks->interrupted(hooks->argument);
    *asked_ns = cm_now_ns();
    return interrupted ? cm_fail(CM_ECANCELLED, 0) : cm_ok();
}

/* Hand out at least `nbytes` (> 0) bytes, usable on `stream` (NULL: any) from now on.
 * `hooks` NULL: no wait for work of unknown length, neither for memory in flight nor
 * for another stream's. It still grows, after a growth that another thread has begun.
 * Where more is in flight than the larger of 256 MiB and half of what lives, it waits
 * for fences that are recorded, at most a second, before it grows.
 * Owns:   the caller owns *out until cm_pool_free.
 * Blocks: may wait in the runtime on a miss, without the lock.
 * Fails:  the allocating operation; CM_ELIMIT (the budget); CM_EFORKED; CM_EOVERFLOW;
 *         CM_ECANCELLED by the hooks. Before it fails for want of memory all in-flight
 *         blocks were waited for, the cache freed and the call retried once. */
CM_NODISCARD cm_status cm_pool_alloc(cm_pool *pool, uint64_t nbytes, cm_stream *stream,
                                     const cm_wait_hooks *hooks, cm_block **out);

/* A block, for any stream, for who has other memory too: from what is free or has
 * ended, or by growing where the limits have room for it, but not while more is in
 * flight than ever lived at once and 256 MiB. NULL: use the other. Waits for no work,
 * only behind a growth or a trim of another thread; gives nothing back but by an idle
 * trim, and what is above a limit. */
cm_block *cm_pool_alloc_optional(cm_pool *pool, uint64_t nbytes, uint64_t fence_limit);

/* A limit that the pool counts against may have been lowered: give free memory back to
 * the runtime until all of them hold, as far as there is any. What lives and what is in
 * flight stays; while that is too much the pool hands out nothing that is free, and
 * what becomes free goes back before the next allocation. Does nothing in a forked
 * child. `may_fence`: of memory that others had a fence may be taken, so that it goes
 * back soon.
 * Blocks: behind a growth or a trim, and in the runtime; waits for no work. */
void cm_pool_obey_limits(cm_pool *pool, bool may_fence);
/* The same of all pools of a runtime. */
void cm_pools_obey_limits(const cm_runtime *rt, bool may_fence);

/* Bytes that the limits leave it, free ones of its own included, whole or in pieces;
 * UINT64_MAX: there is no limit. */
uint64_t cm_pool_room(cm_pool *pool);

/* What is known of a block beyond the streams that worked on it. */
enum {
    CM_POOL_FREE_FENCE = 1,    /* others did that nobody knows: the block waits for
                                  everything its device was doing */
    CM_POOL_FREE_CAPTURED = 2, /* a stream did while it was being captured */
};

/* Give a block back. `uses` are the streams that worked on it (borrowed). Never blocks
 * (unless it is the pool's last holder): events are recorded here and looked at later,
 * and a fence is taken at the next look. A runtime failure while recording turns into a
 * fence; so does a stream that nobody keeps alive, and one beyond the 255 that a pool
 * tells apart. A block used in a capture, or on a stream that is capturing now, belongs
 * to the graph: it comes back when the pool ends. In a forked child it is leaked. */
void cm_pool_free(cm_pool *pool, cm_block *block, cm_stream *const *uses,
                  uint32_t use_count, unsigned flags);
/* True when cm_pool_free() of such a block makes no runtime call. */
bool cm_pool_free_is_quick(const cm_pool *pool, cm_stream *const *uses,
                           uint32_t use_count, unsigned flags);

/* Where a live block is from, borrowed. */
cm_pool *cm_block_pool(const cm_block *block);

/* In a forked child: its copy of a block that lived at the fork is there. Never so for
 * managed and device memory. */
bool cm_block_is_inherited(const cm_block *block);

/* A cm_pool_free() without flags, if that makes no runtime call; false: not done. */
bool cm_pool_quick_free(cm_pool *pool, cm_block *block, cm_stream *const *uses,
                        uint32_t use_count);

/* Return cached memory to the runtime until at most `keep_nbytes` stay cached, after
 * waiting for all that is in flight; `hooks` NULL: after a look at it. Whole chunks
 * only. While a capture is known of, what only a fence or a whole device tells of is
 * not waited for.
 * Fails: CM_ECANCELLED by the hooks, nothing is returned then; else the first failing
 * operation, the rest is still tried. */
CM_NODISCARD cm_status cm_pool_trim(cm_pool *pool, uint64_t keep_nbytes,
                                    const cm_wait_hooks *hooks,
                                    uint64_t *released_nbytes);

/* All pools of a runtime that anyone holds or that keep a live block, in the order in
 * which they were made: the one after `pool` (held; NULL: the first), held. NULL: that
 * was the last. */
cm_pool *cm_pool_after(const cm_runtime *rt, const cm_pool *pool);
/* The same, and lets go of `pool`. */
static inline cm_pool *
cm_pool_next(const cm_runtime *rt, cm_pool *pool)
{
    cm_pool *next = cm_pool_after(rt, pool);
    if (pool != NULL) {
        cm_pool_release(pool);
    }
    return next;
}

/* Live blocks keep it for ever, also without its runtime: it is listed no more, and
 * counts against its own limit alone. By the only user that is left. */
void cm_pool_forsake(cm_pool *pool);

/* A request to many pools to give memory back, and what became of it. */
typedef struct cm_trim_request {
    cm_kind kind;         /* which pools; CM_KIND_PAGEABLE: of any kind */
    int device;           /* < 0: of any */
    const cm_pool *only;  /* NULL: any */
    const cm_pool *other; /* NULL, or of which the others are meant: see below */
    uint64_t keep_nbytes; /* of all together; lowered by what each has kept */
    bool only_looks;      /* waits for nothing; the hooks say whether others capture */
    uint64_t released_nbytes;
    int count;         /* of pools */
    cm_status refused; /* the first failure */
} cm_trim_request;

/* Trim the pools that are asked, as cm_pool_trim() does. Fails: CM_ECANCELLED. */
CM_NODISCARD cm_status cm_pools_trim(const cm_runtime *rt, cm_trim_request *r,
                                     const cm_wait_hooks *hooks);
/* The same of the others that take memory from where `pool` does or count against the
 * same limit, after it answered `status`; of none where a limit of its own is met. */
CM_NODISCARD cm_status cm_pool_trim_others(cm_pool *pool, cm_status status,
                                           const cm_wait_hooks *hooks,
                                           cm_trim_request *r);

/* Idle trims of all pools of a runtime whose time has come, for a thread that has
 * nothing else to do: so memory goes back though nobody allocates. Takes no fence.
 * Returns when to
 * come again, by cm_now_ns(); 0: no pool has an idle trim. Blocks: behind growths and
 * trims, and in the runtime. */
uint64_t cm_pools_trim_idle(const cm_runtime *rt);

/* The config's idle_trim_ns from now on; 0: never. Callers keep each other and those of
 * cm_pool_get_config() out. Does nothing in a forked child. */
void cm_pool_set_idle_trim(cm_pool *pool, uint64_t ns);

/* Let devices that got a context since reach what is held for another: a chunk is
 * opened for those that have one by then. To be called when one was made, which
 * cm_runtime's `context_count` tells. Does nothing, at the cost of a look, where all
 * have been let in.
 * Blocks: behind a growth or a trim, and in the runtime. Fails: address_set_access, what
 * cm_scope_enter does; the next call tries again. */
CM_NODISCARD cm_status cm_pool_admit_peers(cm_pool *pool);

/* A consistent snapshot. Looks at a few hundred free pieces under the lock; where there
 * are more, cached_count is of pieces that may join yet, and largest_free_nbytes, of
 * one of them, at most 3 % too small. */
void cm_pool_read(cm_pool *pool, cm_pool_counters *out);
/* Peaks start again from what is now. */
void cm_pool_reset_peaks(cm_pool *pool);
/* The same snapshot with the peaks since the last call of this function, or since the
 * pool was made; the peaks that cm_pool_read() tells are not disturbed, nor are these
 * by cm_pool_reset_peaks(). */
void cm_pool_read_window(cm_pool *pool, cm_pool_counters *out);

typedef enum cm_block_state {
    CM_BLOCK_LIVE,
    CM_BLOCK_IN_FLIGHT,
    CM_BLOCK_CACHED,
    CM_BLOCK_GAP, /* addresses without memory */
} cm_block_state;

/* One row of a listing, in order of address within a segment. */
typedef struct cm_block_row {
    uint32_t segment; /* its number in the listing */
    cm_address address;
    const void *host; /* NULL: not for the host */
    uint64_t nbytes;
    uint64_t requested_nbytes;
    cm_block_state state;
} cm_block_row;

/* All segments and blocks at one moment. *out is to be freed. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_pool_list(cm_pool *pool, cm_block_row **out, uint64_t *count);

const cm_pool_config *cm_pool_get_config(const cm_pool *pool);
void cm_pool_set_number(cm_pool *pool, uint64_t number);

/* True when the invariants in private.h hold; tests and debug builds. */
bool cm_pool_check(cm_pool *pool);
