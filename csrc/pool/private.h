/* SPDX-License-Identifier: Apache-2.0 */
/* The pool's insides, shared by its files: pool.c, in_flight.c (when freed memory is
 * idle, and waiting for that), grow.c (more memory, and less), fork.c (forked
 * children). Nobody else includes this.
 * Locks: `lock` guards heap, lists, slots and counters, for list work only. `gate` with
 * its condition guards the flags `growing` and `polling`; no thread holds
 * both. */
#ifndef CM_POOL_PRIVATE_H
#define CM_POOL_PRIVATE_H

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "pool/heap.h"
#include "pool/pool.h"

enum { CM_FLIGHT_EVENT_MAX = 8, CM_EPOCHS_MAX = 64 };

/* A freed block that something may still work on: what must end first. */
typedef struct cm_flight {
    cm_list node; /* in flight, or in the hands of the poller */
    cm_heap_span *span;
    struct {
        uint64_t handle; /* owned event, recorded */
        uint64_t key;    /* of its stream; 0: of the whole context */
        int device;
    } events[CM_FLIGHT_EVENT_MAX]; /* all must be done before the block is idle */
    uint32_t event_count;
    uint64_t serial;        /* the pool's free_count when it was given back */
    uint64_t fence_devices; /* bit d: whatever device d was doing must end first */
    bool captured; /* a graph may use it at any time: stays until the pool ends */
} cm_flight;

/* A stream whose freed blocks are in the heap, tagged with this slot's index and the
 * epoch of the time: an event recorded in epoch e and done ends all of up to e. */
typedef struct cm_stream_epochs {
    cm_stream *stream;    /* held; NULL: the slot is free */
    uint64_t epoch;       /* of blocks given now */
    uint64_t given_epoch; /* the youngest of any block given; 0: none */
    uint64_t event;       /* owned, made at first need; 0: none */
    uint64_t asked_epoch; /* the epoch the event stands for; 0: not recorded */
    bool is_capturing;    /* when it was asked last: no event can be recorded */
} cm_stream_epochs;

/* Invariants, under the lock (S(x) is the sum of nbytes of the spans in state x):
 *   live_nbytes = S(LIVE)   in_flight_nbytes = S(FLIGHT)   heap.free_nbytes = S(FREE)
 *   reserved_nbytes = S(LIVE) + S(FLIGHT) + S(FREE) + S(BUSY with memory), but for what
 *   a growth under way has made
 *   in_flight_count = |in_flight| + what the poller holds + what could not be noted
 *   hit_count + miss_count = allocation_count
 *   each peak >= what it is the peak of
 *   each flight of in_flight waits for something
 *   done[i] <= epochs[i].epoch, done[0] = UINT64_MAX
 *   a span with epoch > done[tag] has a stream at epochs[tag] */
struct cm_pool {
    cm_spin_lock lock;
    _Atomic uint64_t holds; /* by cm_pool_hold; live blocks keep the pool too. Falls to
                               0 under the lock */
    cm_runtime *rt;         /* borrowed */
    cm_pool_config config;
    uint64_t align; /* of small blocks: sizes and places */
    uint64_t large; /* from here on pages */
    cm_heap heap;
    cm_list in_flight;   /* but for those that the poller looks at */
    uint32_t slot_count; /* used up to here, index 0 unused */
    cm_stream_epochs epochs[CM_EPOCHS_MAX];
    uint64_t done[CM_EPOCHS_MAX]; /* per slot: the last epoch that has ended */
    cm_pool_counters counters;    /* those of the heap are filled in on reading */
    /* Only their peaks: those since cm_pool_reset_peaks(), and those of the window that
     * is open, both up to when those of `counters` began anew. */
    cm_pool_counters peaks_before;
    cm_pool_counters window_peaks;
    cm_budget budget;       /* the pool's own; config.budget is this one */
    uint64_t window_ns;     /* idle trim: when this window began, */
    uint64_t window_cached; /* and the least that was cached in it */
    atomic_uint_fast64_t lost_count;
    cm_mutex gate;
    cm_cond gate_moved;
    _Atomic bool polling; /* the poller looks at what is in flight, and at events */
    _Atomic bool growing; /* the grower changes arenas, chunks and the source */
    cm_source *source;    /* owned; opened at the first growth; the grower's */
    cm_arena *range;      /* of a placed source */
    /* Other devices that all chunks are open to, as far as can be; the grower sets it
     */
    _Atomic uint64_t admitted;
    cm_list fork_node; /* of those whose memory fork.c looks after */
    bool is_forking;   /* its lock is held for a fork */
};

/* After each change of the lists, in debug builds. */
#ifdef CM_DEBUG
#    include <assert.h>
#    define CM_POOL_DEBUG_CHECK(pool) assert(cm_pool_check(pool))
#else
#    define CM_POOL_DEBUG_CHECK(pool) ((void)0)
#endif

enum { CM_PAGE_NBYTES = 4096 };

static inline void
cm_pool_raise(uint64_t *peak, uint64_t value)
{
    if (value > *peak) {
        *peak = value;
    }
}

/* After each change of what a peak is of; of what is cached, what is in the heap. */
static inline void
cm_pool_note_peaks_locked(cm_pool *pool)
{
    cm_pool_counters *c = &pool->counters;
    cm_pool_raise(&c->peak_live_nbytes, c->live_nbytes);
    cm_pool_raise(&c->peak_requested_nbytes, c->requested_nbytes);
    cm_pool_raise(&c->peak_waste_nbytes, c->live_nbytes - c->requested_nbytes);
    cm_pool_raise(&c->peak_in_flight_nbytes, c->in_flight_nbytes);
    cm_pool_raise(&c->peak_cached_nbytes, pool->heap.free_nbytes);
    cm_pool_raise(&c->peak_reserved_nbytes, c->reserved_nbytes);
}

/* The devices that this process has a context on, as bits: none is made for this. */
static inline uint64_t
cm_pool_devices_in_use(const cm_pool *pool)
{
    uint64_t devices = 0;
    for (int d = 0; d < pool->rt->device_count; d++) {
        bool used = atomic_load(&pool->rt->primary[d]) != 0;
        devices |= used ? UINT64_C(1) << d : 0;
    }
    return devices;
}

/* The place a block of this (rounded) size must have. */
static inline uint64_t
cm_pool_align_of(const cm_pool *pool, uint64_t nbytes)
{
    return nbytes >= pool->large ? CM_PAGE_NBYTES : pool->align;
}

/* Idle trim: the window that has passed asks for one. */
static inline bool
cm_pool_is_trim_due_locked(const cm_pool *pool)
{
    return pool->config.idle_trim_ns != 0
           && cm_now_ns() - pool->window_ns >= pool->config.idle_trim_ns;
}

/* -- in_flight.c ------------------------------------------------------------------------- */

/* Be the poller (&pool->polling) or the grower (&pool->growing), and no longer. False:
 * another thread is, and `wait` is not given. */
bool cm_pool_begin(cm_pool *pool, _Atomic bool *role, bool wait);
void cm_pool_end(cm_pool *pool, _Atomic bool *role);

/* Streams and their epochs. */

/* May the handle be used later? One that nobody keeps alive may be dead or recycled,
 * and the per-thread handle means another stream on each thread. */
bool cm_stream_is_kept(const cm_stream *stream);

/* The stream's slot; 0: it has none. */
uint32_t cm_pool_search_slot_locked(const cm_pool *pool, const cm_stream *stream);

/* The first slot is nearly always the only one, of the record that is asked for. */
static inline uint32_t
cm_pool_find_slot_locked(const cm_pool *pool, const cm_stream *stream)
{
    if (stream == NULL || pool->slot_count == 1) {
        return 0;
    }
    return CM_LIKELY(pool->epochs[1].stream == stream)
               ? 1
               : cm_pool_search_slot_locked(pool, stream);
}

static inline cm_heap_view
cm_pool_view_locked(const cm_pool *pool, uint32_t slot)
{
    return (cm_heap_view){
        .tag = slot, .done = pool->done, .alone = pool->slot_count <= 2};
}

/* What a block for `stream` (NULL: any) may be cut from. */
static inline cm_heap_view
cm_pool_view_for_locked(const cm_pool *pool, const cm_stream *stream)
{
    return cm_pool_view_locked(pool, cm_pool_find_slot_locked(pool, stream));
}

/* The same, made on first need; 0: there are too many. */
uint32_t cm_pool_slot_locked(cm_pool *pool, cm_stream *stream);
/* A stream that somebody else owns may be gone later: true where a block given in its
 * order needs an event now. */
bool cm_pool_slot_needs_record(cm_pool *pool, cm_stream *stream);
/* Record it: the epoch it stands for; 0: it could not be. By the poller. */
uint64_t cm_pool_try_record_slot(cm_pool *pool, cm_stream *stream);
/* True when spans of a stream other than that of slot `own` are not seen idle yet. */
bool cm_pool_is_other_late_locked(const cm_pool *pool, uint32_t own);
/* Make `stream` wait for all late streams and return in `done` the epochs which it may
 * then take. False: nothing to wait for, or it cannot. By the poller. */
bool cm_pool_order_after_slots(cm_pool *pool, cm_stream *stream,
                               uint64_t done[CM_EPOCHS_MAX]);
/* Forget streams that no span is tagged with any more; `all`: at the end. By the
 * poller. */
void cm_pool_drop_slots(cm_pool *pool, bool all);

/* Blocks in flight; without the lock. */

/* Note on `flight`, which no list holds, all that must end before it is idle. */
void cm_flight_record(cm_pool *pool, cm_flight *flight, cm_stream *const *uses,
                      uint32_t use_count, unsigned flags);
/* True when nothing has to end first. */
bool cm_flight_is_idle(const cm_flight *flight);
/* What waits for a graph, or could not be waited for, goes back to the heap as well.
 * When the pool ends, inside a cm_scope. */
void cm_pool_abandon_flights(cm_pool *pool);

/* Move what is idle from in flight to the heap, and see which streams' work has ended.
 * Does nothing while another thread does. `may_fence`: no capture is known to run on
 * this thread's behalf, so fences that are due may be recorded. Fails: the first call
 * that failed; the rest is still tried. */
CM_NODISCARD cm_status cm_pool_poll(cm_pool *pool, bool may_fence);
/* Wait until all that was given back so far has been seen to end, and so is in the
 * heap; `fences_only`: what waits for devices, by waiting for them now. `hooks` NULL:
 * nobody would interrupt. Fails: CM_ECANCELLED; the first call that failed. */
CM_NODISCARD cm_status cm_pool_wait(cm_pool *pool, const cm_wait_hooks *hooks,
                                    bool fences_only);

/* -- grow.c ------------------------------------------------------------------------------ */

/* More memory, and a BUSY span of `size` bytes in it for `stream` (NULL: any). By the
 * grower, inside a cm_scope.
 * Fails: CM_ELIMIT, CM_ENOMEM, what the source's calls fail with. */
CM_NODISCARD cm_status cm_pool_grow(cm_pool *pool, uint64_t size,
                                    const cm_stream *stream, cm_heap_span **out);
/* Give whole free chunks back until at most `keep_nbytes` are cached. By the grower. */
CM_NODISCARD cm_status cm_pool_release_chunks(cm_pool *pool, uint64_t keep_nbytes,
                                              uint64_t *released_nbytes);
/* If idle trim is on and its window has passed: trim what was not needed in it. */
void cm_pool_trim_idle(cm_pool *pool);

/* -- fork.c ------------------------------------------------------------------------------ */

/* From now on forked children get copies of its living blocks; and no longer, which is
 * harmless where it was not so. Without the lock. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_pool_watch_forks(cm_pool *pool);
void cm_pool_unwatch_forks(cm_pool *pool);

#endif
