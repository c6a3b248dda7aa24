/* SPDX-License-Identifier: Apache-2.0 */
/* The pool's insides, shared by its files: pool.c, in_flight.c (when freed memory is
 * idle, and waiting for that), grow.c (more memory, and less), fork.c (forked
 * children), pools.c (all of them). Nobody else includes this.
 * Locks: `lock` guards heap, lists, slots and counters, for list work only. `growing` and
 * `polling` are turns at what one thread alone may do, the grower and the poller, who
 * keep them over runtime calls and take `lock` within; no thread has both. */
#pragma once

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "pool/heap.h"
#include "pool/pool.h"

/* Whose work is told apart: streams, at index 0 none, and after them each device, for
 * work of nobody knows which stream. */
enum { CM_STREAMS_MAX = 256, CM_EPOCHS_MAX = CM_STREAMS_MAX + CM_MAX_DEVICES };

/* Work that must end first: that of a slot up to an epoch. */
typedef struct cm_due {
    uint32_t slot;
    uint64_t epoch;
} cm_due;

/* An event recorded in an epoch: once it has passed, the work up to then has ended. */
typedef struct cm_mark {
    cm_list node;   /* in its slot */
    uint64_t event; /* owned */
    uint64_t epoch;
} cm_mark;

/* Work of one stream or device, in epochs. Free spans are tagged with a slot's index
 * and epoch, blocks in flight wait for some. */
typedef struct cm_epochs {
    cm_stream *stream;       /* held; NULL: the slot is free, or a device's */
    uint64_t epoch;          /* of blocks given now */
    uint64_t given_epoch;    /* the youngest of any block in the heap; 0: none */
    uint64_t awaited_epoch;  /* the youngest that anything waits for; 0: none */
    uint64_t recorded_epoch; /* the youngest of any mark; 0: there was none */
    cm_list marks;           /* the oldest first, but for races */
    bool is_capturing;       /* when it was asked last: no event can be recorded */
} cm_epochs;

/* A freed block that something may still work on. */
typedef struct cm_flight {
    cm_list node; /* in flight */
    cm_heap_span *span;
    bool captured; /* a graph may use it at any time: stays until the pool ends */
    uint32_t due_count;
    cm_due dues[]; /* all must end before the block is idle */
} cm_flight;

/* Invariants, under the lock (S(x) is the sum of nbytes of the spans in state x):
 *   live_nbytes = S(LIVE)   in_flight_nbytes = S(FLIGHT)   heap.free_nbytes = S(FREE)
 *   reserved_nbytes = S(LIVE) + S(FLIGHT) + S(FREE) + S(BUSY with memory), but for what
 *   a growth under way has made for BUSY spans
 *   in_flight_count = |in_flight| + what could not be noted
 *   hit_count + miss_count = allocation_count
 *   each peak >= what it is the peak of
 *   each flight of in_flight waits for something
 *   done[i] <= epochs[i].epoch, done[0] = UINT64_MAX
 *   each span has epoch <= done[tag] or <= epochs[tag].given_epoch, and then a stream
 *   is there */
struct cm_pool {
    cm_spin_lock lock;
    _Atomic uint64_t holds; /* by cm_pool_hold; live blocks keep the pool too. Falls to
                               0 under the lock */
    cm_runtime *rt;         /* borrowed */
    cm_pool_config config;
    uint64_t align; /* of small blocks: sizes and places */
    uint64_t large; /* from here on pages */
    cm_heap heap;
    cm_list in_flight;
    uint32_t slot_count;  /* of streams: used up to here, index 0 unused */
    uint32_t given_count; /* of streams in whose order blocks were given */
    cm_epochs epochs[CM_EPOCHS_MAX];
    uint64_t done[CM_EPOCHS_MAX]; /* per slot: the last epoch that has ended */
    cm_pool_counters counters;    /* those of the heap are filled in on reading */
    /* Only their peaks: those since cm_pool_reset_peaks(), and those of the window that
     * is open, both up to when those of `counters` began anew. */
    cm_pool_counters peaks_before;
    cm_pool_counters window_peaks;
    cm_budget budget; /* the pool's own; config.budget is this one */
    /* A limit was lowered below what is held: no free memory is handed out until enough
     * of it has gone back (cm_pool_obey_limits()). Whatever lands meanwhile goes back
     * at the next allocation. */
    bool is_over;
    uint64_t window_ns;      /* idle trim: when this window began, */
    uint64_t window_cached;  /* and the least that was cached in it */
    bool waited_in_vain;     /* for fences: until one passes nobody does so again */
    uint64_t unasked_nbytes; /* given back with a fence since that was last asked for */
    atomic_uint_fast64_t lost_count;
    cm_mutex polling;  /* the poller looks at what is in flight, and at events */
    cm_mutex growing;  /* the grower changes arenas, chunks and the source */
    cm_source *source; /* owned; opened at the first growth; the grower's */
    cm_arena *range;   /* of a placed source */
    /* Other devices that all chunks are open to, as far as can be; set by the grower */
    _Atomic uint64_t admitted;
    cm_list kept;      /* of freed blocks that children share: see fork.c */
    cm_list fork_node; /* the rest is fork.c's: among all pools */
    bool is_copied;    /* a fork is under way: the child gets its living blocks */
};

/* Does a limit hold back what is free? Looks again where it did, since memory of others
 * may have gone back. */
static inline bool
cm_pool_is_over_locked(cm_pool *pool)
{
    if (CM_UNLIKELY(pool->is_over)) {
        pool->is_over = cm_budget_excess(pool->config.budget) > 0;
    }
    return pool->is_over;
}

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

/* What a block that is handed out raises. */
static inline void
cm_pool_note_live_locked(cm_pool *pool)
{
    cm_pool_counters *c = &pool->counters;
    cm_pool_raise(&c->peak_live_nbytes, c->live_nbytes);
    cm_pool_raise(&c->peak_requested_nbytes, c->requested_nbytes);
    cm_pool_raise(&c->peak_waste_nbytes, c->live_nbytes - c->requested_nbytes);
}

/* After each other change of what a peak is of. */
static inline void
cm_pool_note_peaks_locked(cm_pool *pool)
{
    cm_pool_counters *c = &pool->counters;
    cm_pool_note_live_locked(pool);
    cm_pool_raise(&c->peak_in_flight_nbytes, c->in_flight_nbytes);
    cm_pool_raise(&c->peak_cached_nbytes, pool->heap.free_nbytes);
    cm_pool_raise(&c->peak_reserved_nbytes, c->reserved_nbytes);
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

/* Tell the recorder, with nothing locked: of `nbytes` from the start of a block on,
 * which has the name that its user knows, or (NULL) of no place. */
void cm_pool_note(const cm_pool *pool, uint8_t op, const cm_block *block,
                  uint64_t nbytes, uint64_t value, const cm_stream *stream);

/* -- in_flight.c ------------------------------------------------------------------------- */

/* Streams and their epochs. */

void cm_pool_init_slots(cm_pool *pool);

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
        .tag = slot, .done = pool->done, .alone = pool->given_count <= 1};
}

/* What a block for `stream` (NULL: any) may be cut from. */
static inline cm_heap_view
cm_pool_view_for_locked(const cm_pool *pool, const cm_stream *stream)
{
    return cm_pool_view_locked(pool, cm_pool_find_slot_locked(pool, stream));
}

/* The same, made on first need; 0: there are too many. */
uint32_t cm_pool_slot_locked(cm_pool *pool, cm_stream *stream);

/* A block is given in the order of a stream: it waits for `due`, whose epoch 0 means
 * the one of now. */
static inline void
cm_pool_give_in_order_locked(cm_pool *pool, cm_due *due)
{
    cm_epochs *slot = &pool->epochs[due->slot];
    due->epoch = due->epoch != 0 ? due->epoch : slot->epoch;
    if (due->epoch > pool->done[due->slot]) {
        pool->given_count += slot->given_epoch == 0;
        cm_pool_raise(&slot->given_epoch, due->epoch);
        cm_pool_raise(&slot->awaited_epoch, due->epoch);
    }
}

/* Of a stream that somebody else owns, and which may be gone later, an event is
 * recorded now, for a block that is then given in its order; *out is left as it is
 * where none is needed. False: it cannot be. */
bool cm_pool_try_mark_foreign(cm_pool *pool, cm_stream *stream, cm_due *out);
/* True when spans of a stream other than that of slot `own` are not seen idle yet. */
bool cm_pool_is_other_late_locked(const cm_pool *pool, uint32_t own);
/* Make `stream` wait for all late streams and return in `done` the epochs which it may
 * then take. False: nothing to wait for, or it cannot. By the poller. */
bool cm_pool_order_after_slots(cm_pool *pool, cm_stream *stream,
                               uint64_t done[CM_EPOCHS_MAX]);
/* Forget streams whose work has ended: all of them, or those that the pool alone keeps
 * while there is room for others. By the poller. */
void cm_pool_drop_slots(cm_pool *pool, bool orphans_only);

/* Blocks in flight; without the lock. */

/* All that must end before the block of `span` is idle; in no list. NULL: no memory. */
cm_flight *cm_flight_create(cm_pool *pool, cm_heap_span *span, cm_stream *const *uses,
                            uint32_t use_count, unsigned flags);
/* Bytes of blocks that wait for a device, of which no event tells. */
uint64_t cm_pool_fenced_nbytes_locked(const cm_pool *pool);
/* Is a fence recorded that has not passed yet? */
bool cm_pool_has_fence_locked(const cm_pool *pool);
/* Does a block in flight wait for all that a device was doing? */
bool cm_pool_is_fence_due(cm_pool *pool);
/* What waits for a graph, or could not be waited for, goes back to the heap as well.
 * When the pool ends. */
void cm_pool_abandon_work(cm_pool *pool);

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
/* As cm_pool_trim(); `waits`: for all that is in flight, by the hooks, which may be
 * NULL where it does not. `may_fence` where it does not: fences may be taken. */
CM_NODISCARD cm_status cm_pool_trim_as(cm_pool *pool, uint64_t keep_nbytes,
                                       const cm_wait_hooks *hooks, bool waits,
                                       bool may_fence, uint64_t *released_nbytes);
/* If idle trim is on and its window has passed: trim what was not needed in it. */
void cm_pool_trim_idle(cm_pool *pool);
/* When the window that is open ends, by cm_now_ns(); 0: idle trim is off. */
uint64_t cm_pool_idle_due(cm_pool *pool);

/* -- fork.c ------------------------------------------------------------------------------ */

/* From now on the pool's lock is held over forks, and children get copies of its living
 * blocks that are page-locked; and no longer. Without the lock. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_pool_watch_forks(cm_pool *pool);
void cm_pool_unwatch_forks(cm_pool *pool);
/* Of a block that is given back: children share it, so it is not to be had before they
 * have ended. *out: for `kept`; NULL: no memory, so nobody looks at it again. False:
 * none does, or no more. */
bool cm_pool_try_keep(cm_pool *pool, cm_heap_span *span, unsigned flags, cm_list **out);
/* What was kept for children that have ended goes on as after a free with a fence. */
void cm_pool_look_at_kept(cm_pool *pool);
/* The same of all of it: the pool ends, and memory that goes back to the system is
 * taken from no child. */
void cm_pool_end_kept(cm_pool *pool);
