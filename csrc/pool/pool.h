/* SPDX-License-Identifier: Apache-2.0 */
/* A pool holds memory of one kind on one device and hands it out in blocks. It takes a
 * block back while work may still run on it, and sees to it that nobody can tell:
 * device blocks are reused in stream order, and blocks that the host may write only
 * once the host has seen their work end. A request that fits in what is free (a hit)
 * makes no runtime call; any other (a miss) first looks at what has ended meanwhile and
 * then grows. The page at the top of pool.c tells the whole story. A pool knows nothing
 * of Python.
 * Locks: one short spin lock guards the lists and is never held across a runtime call.
 * Growing and polling are turns: a thread that has one keeps it across runtime
 * calls. */
#pragma once

#include "base/thread.h"
#include "pool/budget.h"
#include "runtime/runtime.h"
#include "runtime/stream.h"

typedef struct cm_pool cm_pool;

/* What forked children find in the page-locked blocks that are live at a fork. */
typedef enum cm_fork {
    CM_FORK_COPY,  /* a copy of their own, which the parent makes before the fork */
    CM_FORK_SHARE, /* the same memory; a block is not reused while a child has it */
    CM_FORK_OMIT,  /* the addresses alone, which they cannot touch */
} cm_fork;

typedef enum cm_segments {
    CM_SEGMENTS_AUTO, /* mapped on demand where the device can, else as PLAIN */
    /* One allocation of the runtime each, which cudaIpc and older MPI libraries
     * need. */
    CM_SEGMENTS_PLAIN,
} cm_segments;

typedef struct cm_pool_config {
    cm_kind kind; /* PINNED, MAPPED, MANAGED or DEVICE */
    /* The device whose context allocates, and on which device memory lies. */
    int device;
    unsigned flags; /* flags for cudaHostAlloc or cudaMallocManaged */
    cm_segments segments;
    /* For page-locked memory. SHARE needs memory that this system can register. */
    cm_fork fork;
    /* For host memory: the NUMA node that its pages belong on; -1 is the one nearest to
     * the device. */
    int numa_node;
    /* Freed memory that someone unknown may still use comes back after a fence. As long
     * as no more than this waits for one, a miss takes none, since a fence breaks a
     * capture that another library runs on a stream of its own, and no driver says
     * whether there is one. Fences are therefore rare, except that a trim always takes
     * them. */
    uint64_t fence_limit_nbytes;
    /* Borrowed; may be NULL. It is charged with the bytes that the pool reserves. The
     * pool also has a budget of its own, at first without a limit, whose parent this
     * one becomes; cm_pool_get_config() shows the pool's own in this field. */
    cm_budget *budget;
    /* Memory that was unused for so long goes back by itself; 0: never. */
    uint64_t idle_trim_ns;
    /* Chosen by the caller and never used for another pool, as an address might be. */
    uint64_t serial;
    /* Chosen by the caller: the number under which users see the pool. */
    uint64_t number;
    /* This pool holds the slots that copies are staged through; the recorder shows
     * those apart. */
    bool is_staging;
} cm_pool_config;

/* What the user of a block holds. Callers only read it. */
typedef struct cm_block {
    void *host; /* host-usable address; NULL for device memory */
    /* device-usable; 0 if there is none, which no block of a pool has. */
    cm_address address;
    uint64_t nbytes; /* usable bytes, >= what was asked for */
} cm_block;

/* The one list of counters, from which cm_pool_counters is made. A counter is in bytes
 * unless its name says count or ns. */
#define CM_POOL_PEAKS(X)                                                               \
    X(peak_live_nbytes)                                                                \
    X(peak_requested_nbytes)                                                           \
    X(peak_waste_nbytes) /* of live - requested */                                     \
    X(peak_in_flight_nbytes)                                                           \
    X(peak_cached_nbytes) /* without what a growth is about to use */                  \
    X(peak_reserved_nbytes)
#define CM_POOL_COUNTERS(X)                                                            \
    X(live_nbytes) /* in blocks that are handed out, rounding included */              \
    X(live_count)                                                                      \
    X(requested_nbytes) /* asked for; live - requested is lost to rounding */          \
    X(in_flight_nbytes) /* freed, but work may still run on it */                      \
    X(in_flight_count)                                                                 \
    X(cached_nbytes) /* free for reuse, or just now coming or going */                 \
    X(cached_count)  /* free pieces as joining would leave them; see cm_pool_read() */ \
    X(reserved_nbytes) /* held from the runtime = live + in flight + cached */         \
    CM_POOL_PEAKS(X)                                                                   \
    X(largest_free_nbytes) /* the longest of the free pieces */                        \
    X(segment_count)       /* ranges of addresses that the memory lies in */           \
    X(allocation_count)                                                                \
    X(free_count)                                                                      \
    X(hit_count)  /* allocations that made no runtime call */                          \
    X(miss_count) /* all other allocations */                                          \
    X(split_count)                                                                     \
    X(merge_count)                                                                     \
    X(cross_stream_wait_count) /* a stream had to wait for another stream */           \
    X(growth_count)                                                                    \
    X(growth_ns)   /* time spent growing */                                            \
    X(remap_count) /* chunks whose memory was moved to where it was needed */          \
    X(remap_nbytes)                                                                    \
    X(trim_count)                                                                      \
    X(trimmed_nbytes)                                                                  \
    X(out_of_memory_count)                                                             \
    X(lost_count) /* times that the runtime refused to take something back */

typedef struct cm_pool_counters {
#define CM_POOL_FIELD(name) uint64_t name;
    CM_POOL_COUNTERS(CM_POOL_FIELD)
#undef CM_POOL_FIELD
} cm_pool_counters;

/* Make a pool, which holds no memory yet. Makes no runtime call.
 * Owns:   the caller, until cm_pool_release(). The pool borrows `rt`, which must
 *         outlive it.
 * Fails:  CM_EINVALID (there is no such device), CM_ENOMEM. */
CM_NODISCARD cm_status cm_pool_create(cm_runtime *rt, const cm_pool_config *config,
                                      cm_pool **out);

/* Pools are counted, and a live block keeps its pool alive as well. The release after
 * which nobody holds the pool and no block of it is live waits for what is in flight
 * and gives all memory back: it makes runtime calls and blocks. */
cm_pool *cm_pool_hold(cm_pool *pool);
void cm_pool_release(cm_pool *pool);

/* Hand out a block of `nbytes` (> 0) for `stream` (NULL: any stream) from what is free,
 * without a runtime call. Returns NULL where cm_pool_alloc() has to be asked instead:
 * nothing fits, a trim or a limit is due, or, for page-locked memory, more than
 * `fence_limit` bytes (0: the pool's own limit) were given back with a fence since a
 * miss last looked at them. */
cm_block *cm_pool_try_alloc(cm_pool *pool, uint64_t nbytes, const cm_stream *stream,
                            uint64_t fence_limit);

/* True for each failure that is a lack of memory of whatever sort: a smaller request
 * may still succeed. */
static inline bool
cm_pool_is_short(cm_status status)
{
    return status.code == CM_CUDA_OUT_OF_MEMORY || status.code == CM_ELIMIT
           || status.code == CM_ENOMEM || status.code == CM_EHOSTMEMORY;
}

/* How a caller takes part in a wait. The hooks are called in the thread that waits,
 * with nothing locked. */
typedef struct cm_wait_hooks {
    /* Called every 50 ms; true ends the wait with CM_ECANCELLED. NULL: nobody would
     * interrupt. */
    bool (*interrupted)(void *argument);
    void *argument;
    /* Waits for all that a device is doing; false ends the wait with CM_ECANCELLED too.
     * NULL: the pool waits in the runtime itself, and cannot be interrupted. */
    bool (*wait_device)(void *argument, int device, cm_status *out);
    /* Says whether another library is capturing on a stream that the runtime cannot be
     * asked about. If so no fence is taken and no device is waited for, since either
     * would end the capture. NULL: nobody knows of one. */
    bool (*others_capture)(void *argument);
    /* Grow without waiting for fences first (see cm_pool_alloc()). Set by allocators of
     * other libraries, whose callers do not expect a wait while there is memory. */
    bool grows_at_once;
} cm_wait_hooks;

static inline bool
cm_others_capture(const cm_wait_hooks *hooks)
{
    return hooks != NULL && hooks->others_capture != NULL
           && hooks->others_capture(hooks->argument);
}

enum { CM_ASK_NS = 50 * 1000 * 1000 };
/* Call the hook `interrupted` if the last call, at *asked_ns, was at least CM_ASK_NS
 * ago, and note the time of this one.
 * Fails: CM_ECANCELLED, where the hook says so. */
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

/* Hand out at least `nbytes` (> 0) bytes, usable on `stream` (NULL: any stream) from
 * now on.
 *
 * Without `hooks` the call does not wait for work of unknown length, neither for memory
 * in flight nor for the work of another stream; it still grows, if need be after a
 * growth that another thread has begun. With hooks, and where more is in flight than
 * the larger of 256 MiB and half of what is live, it waits at most a second for fences
 * that are already recorded before it grows.
 * Owns:   the caller owns *out until cm_pool_free().
 * Blocks: on a miss, in the runtime; the lock is not held meanwhile.
 * Fails:  as the allocating operation; CM_ELIMIT (the budget); CM_EFORKED;
 *         CM_EOVERFLOW; CM_ECANCELLED by the hooks. Before a call with hooks fails for
 *         lack of memory it has waited for all blocks in flight, given back the cache
 *         and retried once. */
CM_NODISCARD cm_status cm_pool_alloc(cm_pool *pool, uint64_t nbytes, cm_stream *stream,
                                     const cm_wait_hooks *hooks, cm_block **out);

/* Hand out a block, usable on any stream, to a caller that can also do without. It
 * comes from what is free or has ended, or from a growth where the limits leave room
 * for one and no more is in flight than the larger of 256 MiB and the most that was
 * ever live at once. NULL means: use the other memory. The call waits for no work, only
 * behind a growth or a trim of another thread, and gives back nothing but what an idle
 * trim or a lowered limit demands. */
cm_block *cm_pool_alloc_optional(cm_pool *pool, uint64_t nbytes, uint64_t fence_limit);

/* To be called after a limit that the pool counts against may have been lowered: gives
 * free memory back to the runtime until all limits hold or none is free. Memory that is
 * live or in flight stays. While that alone exceeds a limit the pool hands out nothing
 * that is free, and what becomes free goes back before the next allocation. With
 * `may_fence` a fence may be taken for memory that others used, so that it can go back
 * soon. Does nothing in a forked child.
 * Blocks: behind a growth or a trim, and in the runtime; it waits for no work. */
void cm_pool_obey_limits(cm_pool *pool, bool may_fence);
/* Calls cm_pool_obey_limits() for each pool of a runtime. */
void cm_pools_obey_limits(const cm_runtime *rt, bool may_fence);

/* How many bytes the limits still leave the pool, its own free memory included, whether
 * in one piece or in many. UINT64_MAX: there is no limit. */
uint64_t cm_pool_room(cm_pool *pool);

/* True if the pool would grow for `nbytes` more while work is still under way on as
 * many bytes that were given back: who waits for that work need not make it grow. */
bool cm_pool_is_behind(cm_pool *pool, uint64_t nbytes);

/* What is known of a block that is given back, beyond the streams that worked on it. */
enum {
    /* Unknown work may run on the block, so it waits for everything that the devices
     * were doing. */
    CM_POOL_FREE_FENCE = 1,
    CM_POOL_FREE_CAPTURED = 2, /* a stream worked on it while it was being captured */
};

/* Give a block back. `uses` are the streams that worked on it, borrowed for the call.
 * The call never blocks, unless it ends the pool because nobody else holds it: events
 * are recorded now and looked at later, and a fence is taken at the next look. Where
 * recording fails, a stream is not kept alive by anybody, or more than 255 streams are
 * in use, the block waits for a fence instead. A block that a capture used, or that is
 * used by a stream which is capturing now, belongs to the graph and comes back when the
 * pool ends. In a forked child the block is leaked. */
void cm_pool_free(cm_pool *pool, cm_block *block, cm_stream *const *uses,
                  uint32_t use_count, unsigned flags);
/* True where cm_pool_free() with these arguments makes no runtime call. */
bool cm_pool_free_is_quick(const cm_pool *pool, cm_stream *const *uses,
                           uint32_t use_count, unsigned flags);

/* The pool that a live block is from; borrowed. */
cm_pool *cm_block_pool(const cm_block *block);

/* True in a forked child that has the bytes of a block which was live at the fork.
 * Never true for managed and device memory. */
bool cm_block_is_inherited(const cm_block *block);

/* Does what cm_pool_free() without flags does, if that takes no runtime call. False:
 * nothing was done, and cm_pool_free() is to be called. */
bool cm_pool_quick_free(cm_pool *pool, cm_block *block, cm_stream *const *uses,
                        uint32_t use_count);

/* Return cached memory to the runtime in whole chunks until at most `keep_nbytes` stay
 * cached. With `hooks` the call first waits for all that is in flight; without them it
 * only looks what has ended. While a capture is known of it does not wait for fences or
 * whole devices.
 * Fails: CM_ECANCELLED by the hooks, and then nothing was returned; else the first
 * operation that failed, after trying the rest. */
CM_NODISCARD cm_status cm_pool_trim(cm_pool *pool, uint64_t keep_nbytes,
                                    const cm_wait_hooks *hooks,
                                    uint64_t *released_nbytes);

/* Walks the pools of a runtime that anyone holds or that have a live block, in the
 * order in which they were made. Returns the one after `pool` (which the caller holds;
 * NULL: the first), held for the caller, or NULL after the last. */
cm_pool *cm_pool_after(const cm_runtime *rt, const cm_pool *pool);
/* As cm_pool_after(), and releases `pool`. */
static inline cm_pool *
cm_pool_next(const cm_runtime *rt, cm_pool *pool)
{
    cm_pool *next = cm_pool_after(rt, pool);
    if (pool != NULL) {
        cm_pool_release(pool);
    }
    return next;
}

/* Lets a pool outlive its runtime because live blocks keep it for ever: it is no longer
 * listed and counts against its own limit alone. To be called by the only user that is
 * left. */
void cm_pool_forsake(cm_pool *pool);

/* A request to many pools to give memory back, and the outcome. */
typedef struct cm_trim_request {
    /* Which pools are meant; CM_KIND_PAGEABLE: those of any kind. */
    cm_kind kind;
    int device;          /* < 0: those of any device */
    const cm_pool *only; /* NULL: any pool */
    /* NULL, or the pool that is in need; see cm_pool_trim_others(). */
    const cm_pool *other;
    /* For all pools together; each pool lowers it by what it keeps. */
    uint64_t keep_nbytes;
    /* Wait for nothing; the hooks only say whether others capture. */
    bool only_looks;
    uint64_t released_nbytes;
    int count;         /* of pools that were trimmed */
    cm_status refused; /* the first failure */
} cm_trim_request;

/* Trim each pool that the request means, as cm_pool_trim() does.
 * Fails: CM_ECANCELLED. Other failures are in `refused`. */
CM_NODISCARD cm_status cm_pools_trim(const cm_runtime *rt, cm_trim_request *r,
                                     const cm_wait_hooks *hooks);
/* Trim the other pools that take memory from the same place as `pool`, or count against
 * the same limit, after `pool` failed with `status`. Where `pool` met a limit of its
 * own, others could not help and none is trimmed. */
CM_NODISCARD cm_status cm_pool_trim_others(cm_pool *pool, cm_status status,
                                           const cm_wait_hooks *hooks,
                                           cm_trim_request *r);

/* Trim each pool of a runtime whose idle trim is due. A thread that has nothing else to
 * do calls this, so that memory goes back although nobody allocates. It takes no fence.
 * Returns the time by cm_now_ns() at which to call again; 0: no pool has an idle trim.
 * Blocks: behind growths and trims, and in the runtime. */
uint64_t cm_pools_trim_idle(const cm_runtime *rt);

/* Set the config's idle_trim_ns; 0: never. Callers see to it that no other thread is in
 * this function or in cm_pool_get_config(). Does nothing in a forked child. */
void cm_pool_set_idle_trim(cm_pool *pool, uint64_t ns);

/* Let devices reach the memory of this pool that got a context only after it was
 * opened: a chunk is opened for those devices that have a context by then. To be called
 * when a device has got one, which cm_runtime's `context_count` tells. Where all
 * devices have been admitted the call costs one look.
 * Blocks: behind a growth or a trim, and in the runtime.
 * Fails: address_set_access; as cm_scope_enter(). The next call tries again. */
CM_NODISCARD cm_status cm_pool_admit_peers(cm_pool *pool);

/* Read a consistent snapshot. It looks at up to a few hundred free pieces under the
 * lock. Where there are more, cached_count counts pieces that may yet join, and
 * largest_free_nbytes is the length of one of them that is at most 3 % shorter than the
 * longest. */
void cm_pool_read(cm_pool *pool, cm_pool_counters *out);
/* Let the peaks that cm_pool_read() shows start again from the present values. */
void cm_pool_reset_peaks(cm_pool *pool);
/* Read the snapshot with the peaks since the last call of this function, or since the
 * pool was made. The peaks of cm_pool_read() and these do not disturb each other, nor
 * does cm_pool_reset_peaks() disturb these. */
void cm_pool_read_window(cm_pool *pool, cm_pool_counters *out);

typedef enum cm_block_state {
    CM_BLOCK_LIVE,
    CM_BLOCK_IN_FLIGHT,
    CM_BLOCK_CACHED,
    CM_BLOCK_GAP, /* addresses without memory */
} cm_block_state;

/* One row of a listing, in order of address within a segment. */
typedef struct cm_block_row {
    uint32_t segment; /* the segment's number in the listing */
    cm_address address;
    const void *host; /* NULL: the host cannot use it */
    uint64_t nbytes;
    uint64_t requested_nbytes;
    cm_block_state state;
} cm_block_row;

/* List all segments and blocks as they are at one moment.
 * Owns: the caller frees *out.
 * Fails: CM_ENOMEM, CM_EFORKED. */
CM_NODISCARD cm_status cm_pool_list(cm_pool *pool, cm_block_row **out, uint64_t *count);

const cm_pool_config *cm_pool_get_config(const cm_pool *pool);
void cm_pool_set_number(cm_pool *pool, uint64_t number);

/* True when the invariants in private.h hold; for tests and debug builds. */
bool cm_pool_check(cm_pool *pool);
