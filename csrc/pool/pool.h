/* SPDX-License-Identifier: Apache-2.0 */
/* A pool holds memory of one kind on one device and hands it out in blocks. Its users
 * may give a block back while work still runs on it. The pool makes sure that the next
 * user of the memory never collides with that work. The stream that used a device block
 * may get its memory again at once, since a stream runs its work in order. A block to
 * which the host can write is reused only after the host has seen that the work has
 * ended. A request that fits into free memory (a hit) makes no runtime call. Any other
 * request (a miss) first asks which work has ended meanwhile, and grows the pool if too
 * little memory has become free. The page at the top of pool.c explains all of this. A
 * pool knows nothing of Python.
 * Locks: one short spin lock guards the lists and is never held across a runtime call.
 *        Growing and polling are turns, which one thread at a time has, and which it
 *        keeps across runtime calls. */
#pragma once

#include "base/thread.h"
#include "pool/budget.h"
#include "runtime/runtime.h"
#include "runtime/stream.h"

typedef struct cm_pool cm_pool;

/* What forked children find in the page-locked blocks that are live at a fork. */
typedef enum cm_fork {
    CM_FORK_COPY,  /* their own copy, which the parent makes before the fork */
    CM_FORK_SHARE, /* the same memory; no block is reused while a child has it */
    CM_FORK_OMIT,  /* reserved addresses without memory, which they cannot touch */
} cm_fork;

/* How a pool gets its segments, which are the ranges of addresses in which its memory
 * lies. */
typedef enum cm_segments {
    CM_SEGMENTS_AUTO, /* memory is mapped on demand into a range if the device can do
                         that; otherwise the same as PLAIN */
    /* Each segment is one allocation of the runtime, as cudaIpc and older MPI libraries
     * need it. */
    CM_SEGMENTS_PLAIN,
} cm_segments;

typedef struct cm_pool_config {
    cm_kind kind; /* PINNED, MAPPED, MANAGED or DEVICE */
    /* The device whose context allocates the memory. Device memory lies on it. */
    int device;
    unsigned flags; /* flags for cudaHostAlloc or cudaMallocManaged */
    cm_segments segments;
    /* Used for page-locked memory only. SHARE needs memory that this system can
     * register. */
    cm_fork fork;
    /* Used for host memory only: the NUMA node on which its pages are to lie. -1 stands
     * for the node nearest to the device. */
    int numa_node;
    /* Freed memory that an unknown stream may still use becomes free again after a
     * fence (an event over everything that its device was doing). A fence breaks a
     * capture that another library runs on a stream of its own, and the driver cannot
     * say whether there is such a capture. So a miss records no fence while at most
     * this many bytes wait for one, which keeps fences rare. A trim records fences in
     * any case. */
    uint64_t fence_limit_nbytes;
    /* Borrowed; may be NULL. The bytes that the pool reserves are charged to it. The
     * pool also has its own budget, which has no limit at first, and whose parent is
     * the budget given here. In the config that cm_pool_get_config() returns, this
     * field points to the pool's own budget. */
    cm_budget *budget;
    /* Memory that has been unused for this long goes back to the runtime, although
     * nobody has asked for that. With 0 it stays. */
    uint64_t idle_trim_ns;
    /* Memory that is mapped on demand comes in chunks, and this is the least length of
     * a chunk. It is a power of 2, or 0 for the driver's granule. A granule of the
     * driver that is longer than this takes its place. Long chunks cost less to unmap
     * and map, and waste more. */
    uint64_t granule_nbytes;
    /* When memory is short the caller may put blocks of the pool to sleep one by one,
     * which means that their memory goes back to the runtime for a time (spill.c). The
     * pool never puts a block to sleep on its own. */
    bool spills;
    /* How much page-locked memory the contents of sleeping blocks may take. UINT64_MAX
     * means that there is no limit. */
    uint64_t spill_limit_nbytes;
    /* A number that the caller chooses and never uses for a second pool. (The address
     * of the pool would not do, since a later pool may get the same address.) */
    uint64_t serial;
    /* Chosen by the caller: the number under which users see the pool. */
    uint64_t number;
    /* This pool holds the memory, page-locked or of a device, through which copies are
     * staged. The recorder lists such memory as a kind of its own. */
    bool is_staging;
} cm_pool_config;

/* What the user of a block holds. Callers only read it. */
typedef struct cm_block {
    void *host; /* the address for the host; NULL for device memory */
    /* The address for devices. Every block of a pool has one; 0 would mean that there
     * is none. */
    cm_address address;
    uint64_t nbytes; /* usable bytes, >= what was asked for */
} cm_block;

/* The one list of counters, from which cm_pool_counters is made. Names that end in
 * nbytes count bytes, and those that end in ns count nanoseconds. */
#define CM_POOL_PEAKS(X)                                                               \
    X(peak_live_nbytes)                                                                \
    X(peak_requested_nbytes)                                                           \
    X(peak_waste_nbytes) /* the peak of live - requested */                            \
    X(peak_in_flight_nbytes)                                                           \
    X(peak_cached_nbytes) /* does not count what a growth is about to use */           \
    X(peak_reserved_nbytes)
#define CM_POOL_COUNTERS(X)                                                            \
    X(live_nbytes) /* in blocks that are handed out, rounding included */              \
    X(live_count)                                                                      \
    X(requested_nbytes) /* asked for; live - requested is lost to rounding */          \
    X(in_flight_nbytes) /* freed, but work may still run on it */                      \
    X(in_flight_count)                                                                 \
    X(cached_nbytes)   /* free for reuse, or on its way from or to the runtime */      \
    X(cached_count)    /* free pieces; neighbours that could join count as one */      \
    X(reserved_nbytes) /* live + in flight + cached - asleep */                        \
    X(asleep_nbytes)   /* lent back to the runtime until the pool or block wakes */    \
    CM_POOL_PEAKS(X)                                                                   \
    X(largest_free_nbytes) /* the longest of the free pieces */                        \
    X(segment_count)       /* ranges of addresses in which the memory lies */          \
    X(allocation_count)                                                                \
    X(free_count)                                                                      \
    X(hit_count)  /* allocations that made no runtime call */                          \
    X(miss_count) /* all other allocations */                                          \
    X(split_count)                                                                     \
    X(merge_count)                                                                     \
    X(cross_stream_wait_count) /* a stream had to wait for another stream */           \
    X(growth_count)                                                                    \
    X(growth_ns)   /* time spent growing */                                            \
    X(remap_count) /* free chunks that were moved to where memory was needed */        \
    X(remap_nbytes)                                                                    \
    X(trim_count)                                                                      \
    X(trimmed_nbytes)                                                                  \
    X(spill_count) /* single blocks that were put to sleep (spill.c) */                \
    X(spilled_nbytes)                                                                  \
    X(wake_count)                                                                      \
    X(woken_nbytes)                                                                    \
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

/* cm_pool_hold() and cm_pool_release() count the holders of a pool. A live block keeps
 * its pool alive as well. A release that leaves the pool without a holder and without a
 * live block ends the pool. Such a release waits for everything in flight and gives all
 * memory back, so it blocks and makes runtime calls. */
cm_pool *cm_pool_hold(cm_pool *pool);
void cm_pool_release(cm_pool *pool);

/* Hand out a block of `nbytes` (> 0) for `stream` from free memory, without a runtime
 * call. With `stream` NULL any stream may use the block. Returns NULL if the caller has
 * to use cm_pool_alloc() instead. This is so if nothing fits, if an idle trim is due,
 * or if a limit was lowered below what the pool holds. A pool of page-locked memory
 * also returns NULL if blocks that need a fence were given back after a miss last asked
 * which work has ended, and these blocks have more than `fence_limit` bytes together. A
 * `fence_limit` of 0 stands for the pool's own limit. */
cm_block *cm_pool_try_alloc(cm_pool *pool, uint64_t nbytes, const cm_stream *stream,
                            uint64_t fence_limit);

/* True if `status` says that some sort of memory is short. A smaller request may still
 * succeed. */
static inline bool
cm_pool_is_short(cm_status status)
{
    return status.code == CM_CUDA_OUT_OF_MEMORY || status.code == CM_ELIMIT
           || status.code == CM_ENOMEM || status.code == CM_EHOSTMEMORY;
}

/* How a caller takes part in a wait. The hooks are called in the thread that waits,
 * with nothing locked. */
typedef struct cm_wait_hooks {
    /* Called every 50 ms. If the hook returns true, the wait ends with CM_ECANCELLED.
     * NULL means that nobody wants to interrupt. */
    bool (*interrupted)(void *argument);
    void *argument;
    /* Waits for everything that a device is doing, and writes the outcome to *out. If
     * the hook returns false, the wait ends with CM_ECANCELLED. If the hook is NULL,
     * the pool waits in the runtime itself, where nobody can interrupt it. */
    bool (*wait_device)(void *argument, int device, cm_status *out);
    /* Says whether another library is capturing on a stream that the runtime cannot be
     * asked about. While it says yes the pool records no fence and waits for no device,
     * since either would end the capture. NULL means that nobody knows of such a
     * capture. */
    bool (*others_capture)(void *argument);
    /* The pool grows without waiting for fences first (see cm_pool_alloc()). Allocators
     * of other libraries set this, because their callers do not expect a wait while
     * there is memory. */
    bool grows_at_once;
} cm_wait_hooks;

static inline bool
cm_others_capture(const cm_wait_hooks *hooks)
{
    return hooks != NULL && hooks->others_capture != NULL
           && hooks->others_capture(hooks->argument);
}

enum { CM_ASK_NS = 50 * 1000 * 1000 };
/* Call the hook `interrupted` if it was last called, at *asked_ns, at least CM_ASK_NS
 * ago. Stores the time of a new call in *asked_ns.
 * Fails: CM_ECANCELLED if the hook returns true. */
CM_NODISCARD static inline cm_status
cm_wait_check_interrupted(const cm_wait_hooks *hooks, uint64_t *asked_ns)
{
    if (hooks->interrupted == NULL || cm_now_ns() - *asked_ns < CM_ASK_NS) {
        return cm_ok();
    }
    bool interrupted = hooks->interrupted(hooks->argument);
    *asked_ns = cm_now_ns();
    return interrupted ? cm_fail(CM_ECANCELLED, 0) : cm_ok();
}

/* Hand out at least `nbytes` (> 0) bytes, which `stream` may use from now on, or any
 * stream if `stream` is NULL.
 *
 * Without `hooks` the call waits neither for memory in flight nor for the work of
 * another stream, since nobody knows how long that takes. It still grows the pool, and
 * waits for a growth that another thread has begun. If there are hooks and more memory
 * is in flight than the larger of 256 MiB and half of the live memory, the call first
 * waits for fences that are already recorded, for a second at most.
 * Owns:   the caller owns *out until cm_pool_free().
 * Blocks: on a miss, in the runtime; the lock is not held meanwhile.
 * Fails:  as the allocating operation; CM_ELIMIT (the budget); CM_EFORKED;
 *         CM_EOVERFLOW; CM_ECANCELLED if the hooks say so. A call with hooks fails for
 *         lack of memory only after it has waited for all blocks in flight, given free
 *         memory back and tried once more. */
CM_NODISCARD cm_status cm_pool_alloc(cm_pool *pool, uint64_t nbytes, cm_stream *stream,
                                     const cm_wait_hooks *hooks, cm_block **out);

/* Prepare the pool for many blocks of `nbytes` together, which the caller is about to
 * allocate. If less than an eighth of these bytes is free or in flight, the pool grows
 * by all of them at once. This takes far fewer calls of the runtime than one growth for
 * each block. If the runtime or a limit refuses, nothing happens: the caller finds out
 * when it allocates the blocks. The call waits for no work of a device, but it may wait
 * for a growth or a trim of another thread. */
void cm_pool_reserve(cm_pool *pool, uint64_t nbytes);

/* Hand out a block, usable on any stream, to a caller that has other memory to fall
 * back on. The block comes from memory that is free or whose work has ended. The pool
 * grows for it only if the limits leave room and no more memory is in flight than the
 * larger of 256 MiB and peak_live_nbytes. Returns NULL if the caller is to use its
 * other memory. The call waits for no work of a device, but it may wait for a growth or
 * a trim of another thread. It gives memory back only where an idle trim or a lowered
 * limit demands that. */
cm_block *cm_pool_alloc_optional(cm_pool *pool, uint64_t nbytes, uint64_t fence_limit);

/* Give free memory back to the runtime until all limits hold or nothing is free. Call
 * this whenever somebody may have lowered a limit that applies to the pool. Memory that
 * is live or in flight stays. While such memory alone exceeds a limit the pool hands
 * out no free memory. Memory that becomes free in that time goes back to the runtime
 * before the next allocation. If `may_fence` is set, the call may record a fence, so
 * that memory which unknown streams used can go back soon. Does nothing in a forked
 * child.
 * Blocks: behind a growth or a trim of another thread, and in the runtime, but never
 *         for work of a device. */
void cm_pool_obey_limits(cm_pool *pool, bool may_fence);
/* Call cm_pool_obey_limits() for each pool of a runtime. */
void cm_pools_obey_limits(const cm_runtime *rt, bool may_fence);

/* Return how many more bytes the pool could hand out before it meets a limit. All of
 * its free memory counts, even if that memory lies in many pieces. UINT64_MAX means
 * that there is no limit. */
uint64_t cm_pool_room(cm_pool *pool);

/* True if less than `nbytes` are free but at least `nbytes` are in flight. A caller
 * that then waits for the work in flight can get `nbytes` without making the pool
 * grow. */
bool cm_pool_fits_after_flight(cm_pool *pool, uint64_t nbytes);

/* Flags of cm_pool_free(), which say more about the use of a block than its list of
 * streams can. */
enum {
    /* Unknown work may run on the block, so the block waits for everything that the
     * devices are doing. */
    CM_POOL_FREE_FENCE = 1,
    CM_POOL_FREE_CAPTURED = 2, /* a stream used it in a capture */
};

/* Give a block back. `uses` are the streams that worked on it, borrowed for the call.
 * The call blocks only if it ends the pool, that is, if nobody holds the pool and this
 * was its last live block. Otherwise it just records events, which a later poll looks
 * at; a later poll also records the fence if the block needs one. The block waits for a
 * fence if recording an event fails, if nobody keeps one of the streams alive, or if
 * more than 255 streams are in use. If the block was used in a capture, or by a stream
 * that is capturing now, the block belongs to the graph and becomes free only when the
 * pool ends. In a forked child the block is leaked. */
void cm_pool_free(cm_pool *pool, cm_block *block, cm_stream *const *uses,
                  uint32_t use_count, unsigned flags);
/* True if cm_pool_free() with these arguments makes no runtime call. */
bool cm_pool_free_is_quick(const cm_pool *pool, cm_stream *const *uses,
                           uint32_t use_count, unsigned flags);

/* Return the pool of a live block, borrowed. */
cm_pool *cm_block_pool(const cm_block *block);

/* True in a forked child if the block was live at the fork and the child can read its
 * bytes. It is never true for managed and device memory. */
bool cm_block_is_inherited(const cm_block *block);

/* Give a block back as cm_pool_free() does without flags, if that takes no runtime
 * call. Returns false if a runtime call is needed. In that case nothing was done, and
 * the caller has to call cm_pool_free(). */
bool cm_pool_quick_free(cm_pool *pool, cm_block *block, cm_stream *const *uses,
                        uint32_t use_count);

/* Give cached memory back to the runtime, as many whole chunks as can go while at least
 * `keep_nbytes` stay cached. With `hooks` the call first waits for everything in
 * flight; without them it only asks which work has ended. While the pool knows of a
 * capture the call waits neither for fences nor for whole devices.
 * Fails: CM_ECANCELLED if the hooks say so, and then it gave nothing back; else the
 *        first operation that failed, after it has tried the rest. */
CM_NODISCARD cm_status cm_pool_trim(cm_pool *pool, uint64_t keep_nbytes,
                                    const cm_wait_hooks *hooks,
                                    uint64_t *released_nbytes);

/* Walk those pools of a runtime that somebody holds or that have a live block, in the
 * order in which the pools were made. Returns the pool after `pool`, or the first one
 * if `pool` is NULL, or NULL after the last. The caller holds `pool`, and has to
 * release the pool that is returned. */
cm_pool *cm_pool_after(const cm_runtime *rt, const cm_pool *pool);
/* Do the same as cm_pool_after(), and release `pool`. */
static inline cm_pool *
cm_pool_next(const cm_runtime *rt, cm_pool *pool)
{
    cm_pool *next = cm_pool_after(rt, pool);
    if (pool != NULL) {
        cm_pool_release(pool);
    }
    return next;
}

/* Let a pool outlive its runtime. This is for a pool that live blocks keep alive for
 * good. cm_pool_after() no longer finds it, and its memory counts against its own limit
 * alone. The caller must be the only user that is left. */
void cm_pool_forsake(cm_pool *pool);

/* A request to many pools to give memory back, and the outcome. */
typedef struct cm_trim_request {
    /* The kind of the pools that are meant; CM_KIND_PAGEABLE stands for any kind. */
    cm_kind kind;
    int device;          /* of the pools that are meant; < 0 stands for any device */
    const cm_pool *only; /* if not NULL, the only pool that is meant */
    /* If not NULL, the pool that needs memory: see cm_pool_trim_others(). */
    const cm_pool *other;
    /* How much may stay cached in all pools together. Each pool that was trimmed lowers
     * this by what it keeps. */
    uint64_t keep_nbytes;
    /* The call waits for nothing, and uses the hooks only to ask whether another
     * library is capturing. */
    bool only_looks;
    uint64_t released_nbytes;
    int count;         /* how many pools were trimmed */
    cm_status refused; /* the first failure */
} cm_trim_request;

/* Trim each pool that the request means, as cm_pool_trim() does.
 * Fails: CM_ECANCELLED. Other failures are in `refused`. */
CM_NODISCARD cm_status cm_pools_trim(const cm_runtime *rt, cm_trim_request *r,
                                     const cm_wait_hooks *hooks);
/* Trim other pools, after an allocation from `pool` has failed with `status`. These are
 * the pools that take memory from the same place, or whose memory counts against the
 * same limit. If `pool` met its own limit, no other pool could help, and none is
 * trimmed. */
CM_NODISCARD cm_status cm_pool_trim_others(cm_pool *pool, cm_status status,
                                           const cm_wait_hooks *hooks,
                                           cm_trim_request *r);

/* Trim each pool of a runtime whose idle trim is due. A thread of the library calls
 * this, so that memory goes back even while nobody allocates. It records no fence.
 * Returns the time by cm_now_ns() at which to call again, or 0 if no pool has an idle
 * trim.
 * Blocks: behind growths and trims, and in the runtime. */
uint64_t cm_pools_trim_idle(const cm_runtime *rt);

/* Set the config's idle_trim_ns, where 0 turns the idle trim off. Callers make sure
 * that no other thread is in this function or reads what cm_pool_get_config() returned.
 * Does nothing in a forked child. */
void cm_pool_set_idle_trim(cm_pool *pool, uint64_t ns);

/* -- sleep and wake: see sleep.c ---------------------------------------------------------- */
/* One thread at a time makes these calls for a pool; callers see to that. */

/* Saved bytes lie in parts of this size. A part is a block of page-locked memory or a
 * stretch of a file. On an H200 4 GiB in blocks of 64 MiB take twice as long to
 * page-lock as in blocks of 256 MiB, and blocks of 1 GiB gain little more. */
#define CM_SAVED_PART_NBYTES (UINT64_C(256) << 20)

/* A run of bytes of a pool that is falling asleep or waking, and the place where these
 * bytes are saved. */
typedef struct cm_saved_run {
    cm_address address;
    uint64_t nbytes;
    uint64_t at;   /* where the run begins in its part */
    uint32_t part; /* the number of the part in which the run lies */
} cm_saved_run;

/* A part of a block that another library has cut up. The library no longer needs what
 * this part holds. */
typedef struct cm_spare_part {
    cm_address address;
    uint64_t nbytes;
} cm_spare_part;

/* Say which bytes of live blocks need not be saved. cm_pool_plan_save() leaves them out
 * until the pool is open again. The spare parts may lie anywhere, but are in order of
 * address and do not overlap. The pool copies the array `parts`, which takes the place
 * of the array of an earlier call.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_pool_set_spare(cm_pool *pool, const cm_spare_part *parts,
                                         uint64_t count);
/* Shut an awake pool: from now on it hands out no memory. Blocks may still be given
 * back. Makes no runtime call and does not wait.
 * Fails: CM_EBUSY if the pool is not awake; CM_ENOTSUP if it is not one of device
 *        memory; CM_EFORKED. */
CM_NODISCARD cm_status cm_pool_shut(cm_pool *pool);
/* Wait for growths under way, and for all work on the memory of a pool that was shut.
 * This is the work on blocks that were given back and the work on the streams `uses`.
 * If `flags` has CM_POOL_FREE_FENCE, it is also everything that the devices are doing.
 * Fails: CM_ECAPTURING if the wait would end a capture that is under way; CM_ENOTSUP
 *        if the pool's memory is not mapped on demand; CM_EBUSY if nothing can tell
 *        whether all work has ended; as cm_pool_wait(). */
CM_NODISCARD cm_status cm_pool_settle(cm_pool *pool, cm_stream *const *uses,
                                      uint32_t use_count, unsigned flags,
                                      const cm_wait_hooks *hooks);
/* Find out which runs of bytes have to be saved. These are the bytes of blocks that are
 * live, or that are in flight because of a graph, except the spare parts. Each run gets
 * a place, in order of address, and no run crosses the edge of a part. A part has
 * CM_SAVED_PART_NBYTES. If `to_host` is set and page-locked memory of a part was kept
 * from the last sleep, the part is as long as that memory instead. cm_pool_saved_runs()
 * returns the runs, borrowed.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_pool_plan_save(cm_pool *pool, bool to_host);
const cm_saved_run *cm_pool_saved_runs(const cm_pool *pool, uint64_t *count);
/* Return the pool of page-locked memory that saved bytes go to, borrowed, or NULL if
 * none was set. cm_pool_set_host() sets it, once, and `pool` then holds it until `pool`
 * itself ends. */
cm_pool *cm_pool_get_host(const cm_pool *pool);
void cm_pool_set_host(cm_pool *pool, cm_pool *host_pool);
/* Find out whether the limits allow page-locked memory for all parts that have none
 * yet.
 * Fails: CM_ELIMIT. */
CM_NODISCARD cm_status cm_pool_check_host(cm_pool *pool);
/* See to it that a part has page-locked memory, which cm_pool_part_block() then
 * returns, borrowed. Parts are taken in their order, from 0 on.
 * Fails: as cm_pool_alloc(); CM_ENOMEM. */
CM_NODISCARD cm_status cm_pool_take_part(cm_pool *pool, uint32_t part,
                                         const cm_wait_hooks *hooks);
/* Call this with `expected` true before the first part is taken. From then on the pool
 * of page-locked memory prepares each part while the part before it is page-locked. The
 * last part, which may be short, is not prepared. Call this with `expected` false after
 * the last part was taken, so that the pool prepares no more parts. */
void cm_pool_expect_parts(cm_pool *pool, bool expected);
const cm_block *cm_pool_part_block(const cm_pool *pool, uint32_t part);
/* Unmap the chunks that end at or below `end`, because the host has all of their bytes.
 * The chunks keep their memory.
 * Blocks: behind a growth or a trim, and in the runtime.
 * Fails: address_unmap; then the chunks before the one that failed are unmapped. */
CM_NODISCARD cm_status cm_pool_unmap_until(cm_pool *pool, cm_address end);
/* Map again what cm_pool_unmap_until() has unmapped. Callers need this if the bytes of
 * other chunks could not be saved. The pool is still shut afterwards. If the runtime
 * refuses twice, *asleep is set: the pool sleeps with all of its memory, and nothing
 * counts as saved. */
void cm_pool_map_back(cm_pool *pool, bool *asleep);
/* Give the memory of a pool that was shut back to the runtime. Its addresses, its
 * blocks and the runs that were saved stay as they are. The pool is asleep then.
 * Blocks: behind a growth or a trim, and in the runtime.
 * Fails: address_unmap, and then all memory is where it was, with its contents, and the
 *        pool is still shut; or, if *asleep is set, physical_release or an
 *        address_unmap that could not be undone, and then the pool sleeps with some of
 *        its memory. */
CM_NODISCARD cm_status cm_pool_fall_asleep(cm_pool *pool, bool *asleep);
/* Begin to wake a pool that is asleep: charge the limits for its memory, and forget
 * chunks and runs in which nothing lives any more. The pool is shut then, until
 * cm_pool_end_waking().
 * Fails: CM_ELIMIT; CM_ENOMEM; CM_EBUSY if the pool is not asleep; CM_EFORKED. The pool
 *        is still asleep then. */
CM_NODISCARD cm_status cm_pool_begin_waking(cm_pool *pool);
/* Get memory for the chunks that begin below `end`, at the same addresses. The contents
 * are undefined, unless the chunks have kept their memory.
 * Blocks: as cm_pool_fall_asleep().
 * Fails: physical_create, address_map, address_set_access. */
CM_NODISCARD cm_status cm_pool_map_until(cm_pool *pool, cm_address end);
/* End what cm_pool_begin_waking() has begun. After a failure callers set `sleeps_on`,
 * and then the memory goes back and the pool is asleep again. */
void cm_pool_end_waking(cm_pool *pool, bool sleeps_on);
/* Let a pool that was shut hand out memory again, and forget the saved runs. If
 * `keep_host` is set, their page-locked memory stays for the next sleep; otherwise it
 * goes back to the runtime. */
void cm_pool_reopen(cm_pool *pool, bool keep_host);
/* Forget the saved runs of a pool that nobody will wake any more, and give their
 * page-locked memory back. */
void cm_pool_forget_saved(cm_pool *pool);
/* True if the pool is asleep; false if it is awake or shut. */
bool cm_pool_is_asleep(cm_pool *pool);
/* True if the pool hands out memory. */
bool cm_pool_is_awake(cm_pool *pool);

/* -- one block sleeps: see spill.c -------------------------------------------------------- */

/* Take the turn for putting blocks of the pool to sleep and for waking them. One thread
 * at a time has this turn. Returns false if a thread has it already. */
bool cm_pool_take_spill_turn(cm_pool *pool);
/* True if the calling thread has the turn that cm_pool_take_spill_turn() takes. */
bool cm_pool_has_spill_turn(cm_pool *pool);
void cm_pool_give_spill_turn(cm_pool *pool);
/* Return how many bytes of a live block lie in whole chunks, and store in *first where
 * they begin. cm_block_fall_asleep() gives these bytes back to the runtime. A block for
 * which this returns 0 can give nothing back. */
uint64_t cm_block_inside(cm_pool *pool, const cm_block *block, cm_address *first);
/* Give the memory of a live block back to the runtime, as far as cm_block_inside()
 * counts it. The block keeps its addresses. The caller has saved the bytes, and has
 * made sure that all work on the block has ended.
 * Blocks: behind a growth or a trim, and in the runtime.
 * Fails: address_unmap, and then the block is as it was, with its contents; or, if
 *        *asleep is set, physical_release or an address_unmap that could not be undone,
 *        and then the block sleeps with some of its memory. */
CM_NODISCARD cm_status cm_block_fall_asleep(cm_pool *pool, const cm_block *block,
                                            bool *asleep);
/* Get memory for a block that is asleep, at the same addresses. The contents are
 * undefined. A caller that cannot restore them calls cm_block_fall_asleep(), which puts
 * the block to sleep again.
 * Blocks: as cm_block_fall_asleep().
 * Fails: physical_create, address_map, address_set_access; CM_ELIMIT; CM_EFORKED. The
 *        block is still asleep then. */
CM_NODISCARD cm_status cm_block_bring_back(cm_pool *pool, const cm_block *block);
/* Take back a block that is asleep, as cm_pool_free() takes back other blocks. */
void cm_block_free_asleep(cm_pool *pool, cm_block *block);

/* Open the pool's memory to other devices that got a context since its chunks were
 * made. A new chunk is opened only to the devices that have a context at that time.
 * Call this when the `context_count` of cm_runtime has changed. If all devices have
 * been admitted already, the call only compares two sets of bits.
 * Blocks: behind a growth or a trim, and in the runtime.
 * Fails: address_set_access; as cm_scope_enter(). The next call tries again. */
CM_NODISCARD cm_status cm_pool_admit_peers(cm_pool *pool);

/* Read all counters at one moment. To find cached_count and largest_free_nbytes the
 * call looks at up to CM_PIECE_LOOKS free pieces (heap.h) under the lock. If there are
 * more, cached_count counts every free span by itself, although neighbours could join,
 * and largest_free_nbytes may be up to 3 % too small. */
void cm_pool_read(cm_pool *pool, cm_pool_counters *out);
/* Let the peaks that cm_pool_read() shows start again from the present values. */
void cm_pool_reset_peaks(cm_pool *pool);
/* Read all counters at one moment, with the peaks since the last call of this function,
 * or since the pool was made if there was none. Neither cm_pool_read() nor
 * cm_pool_reset_peaks() changes these peaks, and this function does not change those of
 * cm_pool_read(). */
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
    const void *host; /* NULL if the host cannot use it */
    uint64_t nbytes;
    uint64_t requested_nbytes;
    cm_block_state state;
} cm_block_row;

/* List all segments and blocks as they are at one moment.
 * Owns: the caller frees *out.
 * Fails: CM_ENOMEM, CM_EFORKED. */
CM_NODISCARD cm_status cm_pool_list(cm_pool *pool, cm_block_row **out, uint64_t *count);

/* Return the config of a pool, borrowed. */
const cm_pool_config *cm_pool_get_config(const cm_pool *pool);
/* Set the number under which users see the pool. */
void cm_pool_set_number(cm_pool *pool, uint64_t number);

/* True if the invariants in private.h hold. Tests and debug builds call this. */
bool cm_pool_check(cm_pool *pool);
