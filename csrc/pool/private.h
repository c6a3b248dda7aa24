/* SPDX-License-Identifier: Apache-2.0 */
/* The inside of the pool, shared by its files and included by nobody else: pool.c
 * (handing out and taking back), in_flight.c (when freed memory is idle, and waiting
 * for that), grow.c (more memory, and less), fork.c (forked children) and pools.c (all
 * pools of a runtime).
 * Locks: `lock` guards heap, lists, slots and counters, for list work only. `growing`
 * and `polling` are turns: only the thread that has the turn, called the grower or the
 * poller, may change the source and its chunks, or look at events and end epochs. It
 * keeps the turn across runtime calls and takes `lock` within it. No thread has both
 * turns. */
#pragma once

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "pool/heap.h"
#include "pool/pool.h"

/* Whose work is told apart: each stream has a slot (index 0 is nobody's) and after the
 * streams each device has one, for work of which the stream is unknown. */
enum { CM_STREAMS_MAX = 256, CM_EPOCHS_MAX = CM_STREAMS_MAX + CM_MAX_DEVICES };

/* Something must wait until the work of a slot up to an epoch has ended. */
typedef struct cm_due {
    uint32_t slot;
    uint64_t epoch;
} cm_due;

/* An event that was recorded at the end of an epoch: once it has passed, all work of
 * its slot up to that epoch has ended. */
typedef struct cm_mark {
    cm_list node;   /* in the marks of its slot */
    uint64_t event; /* owned */
    uint64_t epoch;
} cm_mark;

/* The work of one stream or device, divided into epochs (see in_flight.c). A free span
 * is tagged with a slot's index and an epoch; a block in flight waits for epochs of one
 * or more slots. */
typedef struct cm_epochs {
    cm_stream *stream; /* held; NULL: the slot is free, or a device's */
    uint64_t epoch;    /* blocks that are given back now belong to this one */
    /* The youngest that a span in the heap is tagged with; 0: none. */
    uint64_t given_epoch;
    uint64_t awaited_epoch;  /* the youngest that anything waits for; 0: none */
    uint64_t recorded_epoch; /* the youngest that an event was recorded for; 0: none */
    cm_list marks;           /* oldest first, except where threads raced */
    bool is_capturing;       /* it was when last asked, so no event can be recorded */
} cm_epochs;

/* A freed block that something may still work on. */
typedef struct cm_flight {
    cm_list node; /* in pool->in_flight */
    cm_heap_span *span;
    bool captured; /* a graph may use it at any time, so it stays until the pool ends */
    uint32_t due_count;
    cm_due dues[]; /* all of these must end before the block is idle */
} cm_flight;

/* Invariants that hold whenever the lock is free (S(x) is the sum of nbytes of the
 * spans in state x):
 *
 *   live_nbytes = S(LIVE)      in_flight_nbytes = S(FLIGHT)
 *   heap.free_nbytes = S(FREE) + S(READY)
 *   reserved_nbytes = S(LIVE) + S(FLIGHT) + S(FREE) + S(READY) + S(BUSY with memory),
 *       without what a growth under way has made for BUSY spans
 *   in_flight_count = |in_flight| + |kept| + the blocks that could not be noted
 *   hit_count + miss_count = allocation_count
 *   each peak >= the present value that it is the peak of
 *   each flight of in_flight waits for at least one epoch, or for a graph
 *   done[i] <= epochs[i].epoch, and done[0] = UINT64_MAX
 *   a free span's epoch is <= done[tag], or else <= epochs[tag].given_epoch, and then
 *       epochs[tag] has a stream */
struct cm_pool {
    cm_spin_lock lock;
    /* By cm_pool_hold(); live blocks keep the pool too. Falls to 0 only under the
     * lock. */
    _Atomic uint64_t holds;
    cm_runtime *rt; /* borrowed */
    cm_pool_config config;
    uint64_t align; /* sizes and addresses of small blocks are multiples of it */
    uint64_t large; /* blocks of this size and above are whole pages */
    cm_heap heap;
    cm_list in_flight;
    /* Slots of streams in use are below this; index 0 is unused. */
    uint32_t slot_count;
    uint32_t given_count; /* streams in whose order spans of the heap were given back */
    cm_epochs epochs[CM_EPOCHS_MAX];
    uint64_t done[CM_EPOCHS_MAX]; /* per slot: the last epoch that has ended */
    /* The counters that the heap keeps are filled in on reading. */
    cm_pool_counters counters;
    /* Of these two only the peaks count: those since cm_pool_reset_peaks(), and those
     * of the window that cm_pool_read_window() opened, each up to the moment when the
     * peaks in `counters` last began anew. */
    cm_pool_counters peaks_before;
    cm_pool_counters window_peaks;
    cm_budget budget; /* the pool's own; config.budget points to it */
    /* A limit was lowered below what is held. No free memory is handed out until enough
     * has gone back (cm_pool_obey_limits()), and what becomes free meanwhile goes back
     * at the next allocation. */
    bool is_over;
    uint64_t window_ns;      /* idle trim: when the present window began, */
    uint64_t window_cached;  /* and the least that was cached in it */
    bool waited_in_vain;     /* for fences: nobody waits again until one passes */
    uint64_t unasked_nbytes; /* given back with a fence since a miss last asked */
    atomic_uint_fast64_t lost_count;
    cm_mutex polling;  /* the poller's turn: blocks in flight, and events */
    cm_mutex growing;  /* the grower's turn: arenas, chunks and the source */
    cm_source *source; /* owned; opened at the first growth; used by the grower */
    cm_arena *range;   /* the range of a placed source; else NULL */
    /* The other devices that all chunks are open to, as far as the device lets them;
     * set by the grower. */
    _Atomic uint64_t admitted;
    cm_list kept;      /* freed blocks that children share: see fork.c */
    cm_list fork_node; /* in the list of all pools; this and the next are fork.c's */
    bool is_copied;    /* a fork is under way that gives the child the live blocks */
};

/* True while a limit holds back what is free. Where one did, this looks again, since
 * other pools may have given memory back. */
static inline bool
cm_pool_is_over_locked(cm_pool *pool)
{
    if (CM_UNLIKELY(pool->is_over)) {
        pool->is_over = cm_budget_excess(pool->config.budget) > 0;
    }
    return pool->is_over;
}

/* To be called after each change of the lists; checks only in debug builds. */
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

/* Raise the peaks that a block which is handed out can raise. */
static inline void
cm_pool_note_live_locked(cm_pool *pool)
{
    cm_pool_counters *c = &pool->counters;
    cm_pool_raise(&c->peak_live_nbytes, c->live_nbytes);
    cm_pool_raise(&c->peak_requested_nbytes, c->requested_nbytes);
    cm_pool_raise(&c->peak_waste_nbytes, c->live_nbytes - c->requested_nbytes);
}

/* Raise all peaks; to be called after any other change of the counters. */
static inline void
cm_pool_note_peaks_locked(cm_pool *pool)
{
    cm_pool_counters *c = &pool->counters;
    cm_pool_note_live_locked(pool);
    cm_pool_raise(&c->peak_in_flight_nbytes, c->in_flight_nbytes);
    cm_pool_raise(&c->peak_cached_nbytes, pool->heap.free_nbytes);
    cm_pool_raise(&c->peak_reserved_nbytes, c->reserved_nbytes);
}

/* What the address and the (rounded) size of a block are multiples of. */
static inline uint64_t
cm_pool_align_of(const cm_pool *pool, uint64_t nbytes)
{
    return nbytes >= pool->large ? CM_PAGE_NBYTES : pool->align;
}

/* True when the window of the idle trim has passed. */
static inline bool
cm_pool_is_trim_due_locked(const cm_pool *pool)
{
    return pool->config.idle_trim_ns != 0
           && cm_now_ns() - pool->window_ns >= pool->config.idle_trim_ns;
}

/* Tell the recorder of an event, with nothing locked. It is about `nbytes` bytes from
 * the start of `block`, under the address that its user knows, or of no particular
 * place (`block` NULL). */
void cm_pool_note(const cm_pool *pool, uint8_t op, const cm_block *block,
                  uint64_t nbytes, uint64_t value, const cm_stream *stream);

/* -- in_flight.c ------------------------------------------------------------------------- */

/* Streams and their epochs. */

void cm_pool_init_slots(cm_pool *pool);

/* Returns the slot of a stream; 0: it has none. */
uint32_t cm_pool_search_slot_locked(const cm_pool *pool, const cm_stream *stream);

/* As cm_pool_search_slot_locked(), but looks at the first slot first: it is nearly
 * always the only one and belongs to the very cm_stream that is asked for. */
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

/* The view that says which free spans a block for `stream` (NULL: any) may be cut
 * from. */
static inline cm_heap_view
cm_pool_view_for_locked(const cm_pool *pool, const cm_stream *stream)
{
    return cm_pool_view_locked(pool, cm_pool_find_slot_locked(pool, stream));
}

/* Returns the slot of a stream, and gives it one if it has none; 0: all are taken. */
uint32_t cm_pool_slot_locked(cm_pool *pool, cm_stream *stream);

/* Note that a span is given back in the order of a stream: it waits for `due`. Epoch 0
 * in `due` stands for the present one and is filled in. */
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

/* A stream that somebody else owns may be gone later, so an event is recorded on it
 * now, for a block that is about to be given back in its order. *out then says what the
 * block waits for; it is left alone where no event is needed. False: no event could be
 * recorded. */
bool cm_pool_try_mark_foreign(cm_pool *pool, cm_stream *stream, cm_due *out);
/* True where free spans are tagged with a stream other than that of slot `own` and have
 * not been seen idle yet. */
bool cm_pool_is_other_late_locked(const cm_pool *pool, uint32_t own);
/* Make `stream` wait for the work of all other streams that is still running, and write
 * to `done` the epochs up to which it may then take spans. False: there was nothing to
 * wait for, or it failed. Called by the poller. */
bool cm_pool_order_after_slots(cm_pool *pool, cm_stream *stream,
                               uint64_t done[CM_EPOCHS_MAX]);
/* Forget streams whose work has ended: all of them or, with `orphans_only`, those that
 * nobody but the pool keeps alive; but all of them if the slots are full. Called by the
 * poller. */
void cm_pool_drop_slots(cm_pool *pool, bool orphans_only);

/* Blocks in flight. These are called without the lock, unless their names say
 * otherwise. */

/* Make a record of all that must end before the block of `span` is idle. It is in no
 * list yet. NULL: no memory. */
cm_flight *cm_flight_create(cm_pool *pool, cm_heap_span *span, cm_stream *const *uses,
                            uint32_t use_count, unsigned flags);
/* Bytes of blocks in flight that wait for a device for which no fence has been recorded
 * since. */
uint64_t cm_pool_fenced_nbytes_locked(const cm_pool *pool);
/* True where a fence is recorded that has not been seen to pass. */
bool cm_pool_has_fence_locked(const cm_pool *pool);
/* True where something waits for all that a device was doing. */
bool cm_pool_is_fence_due(cm_pool *pool);
/* Forget all events and give all blocks in flight back to the heap, also those that
 * wait for a graph or could not be waited for. Called when the pool ends. */
void cm_pool_abandon_work(cm_pool *pool);

/* See which work has ended and move blocks that are idle from flight to the heap. Does
 * nothing while another thread is the poller. `may_fence` says that no capture is known
 * to run on this thread's behalf, so that fences which are due may be recorded.
 * Fails: the first call that failed, after trying the rest. */
CM_NODISCARD cm_status cm_pool_poll(cm_pool *pool, bool may_fence);
/* Wait until all that was given back before the call has been seen to end and is in the
 * heap. With `fences_only` only blocks that wait for devices are waited for, and the
 * devices are waited for at once. Beside a capture neither fences nor devices are
 * waited for. `hooks` NULL: nobody would interrupt.
 * Fails: CM_ECANCELLED; the first call that failed. */
CM_NODISCARD cm_status cm_pool_wait(cm_pool *pool, const cm_wait_hooks *hooks,
                                    bool fences_only);

/* -- grow.c ------------------------------------------------------------------------------ */

/* Bring more memory, and cut a BUSY span of `size` bytes for `stream` (NULL: any) from
 * it or from what is then free beside it. Called by the grower, inside a cm_scope.
 * Fails: CM_ELIMIT, CM_ENOMEM, CM_EOVERFLOW; as the source's calls. */
CM_NODISCARD cm_status cm_pool_grow(cm_pool *pool, uint64_t size,
                                    const cm_stream *stream, cm_heap_span **out);
/* Give whole free chunks back until at most `keep_nbytes` are cached. Called by the
 * grower. */
CM_NODISCARD cm_status cm_pool_release_chunks(cm_pool *pool, uint64_t keep_nbytes,
                                              uint64_t *released_nbytes);
/* As cm_pool_trim(). `waits`: wait for all that is in flight, with the hooks; they may
 * be NULL where it does not wait. `may_fence` matters where it does not wait: fences
 * may then be taken. */
CM_NODISCARD cm_status cm_pool_trim_as(cm_pool *pool, uint64_t keep_nbytes,
                                       const cm_wait_hooks *hooks, bool waits,
                                       bool may_fence, uint64_t *released_nbytes);
/* Trim what was not needed in the last window, if idle trim is on and that window has
 * passed. */
void cm_pool_trim_idle(cm_pool *pool);
/* Returns when the present window ends, by cm_now_ns(); 0: idle trim is off. */
uint64_t cm_pool_idle_due(cm_pool *pool);

/* -- fork.c ------------------------------------------------------------------------------ */

/* Enter the pool in the list of pools that forks look at: its lock is then held across
 * forks, and children get what cm_fork says of its live page-locked blocks.
 * cm_pool_unwatch_forks() takes it out again. Both are called without the lock.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_pool_watch_forks(cm_pool *pool);
void cm_pool_unwatch_forks(cm_pool *pool);
/* A block that children share is being given back, and must not be reused before they
 * have ended. True: it has to be kept; *out is then to be put into `kept`, or NULL
 * where there was no memory for that and nobody will look at the block again. False: no
 * child has it, or has it any more. */
bool cm_pool_try_keep(cm_pool *pool, cm_heap_span *span, unsigned flags, cm_list **out);
/* Let blocks go on that were kept for children which have ended, as if they had been
 * freed with a fence now. */
void cm_pool_look_at_kept(cm_pool *pool);
/* Let all kept blocks go on. Called when the pool ends: memory that goes back to the
 * system is not taken from a child, which has a mapping of its own. */
void cm_pool_end_kept(cm_pool *pool);
