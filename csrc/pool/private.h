/* SPDX-License-Identifier: Apache-2.0 */
/* This header shows the pool as its own files see it, and only they include it. pool.c
 * hands blocks out and takes them back, in_flight.c finds out when freed memory is idle
 * or waits until it is, grow.c gets memory from the runtime and gives it back, sleep.c
 * gives all memory of a pool back for a time, spill.c gives the memory of one block
 * back for a time, chunks.c unmaps and maps chunks for sleep.c and spill.c, fork.c
 * looks after forked children, noting.c writes events for the recorder, and pools.c
 * works on all pools of a runtime.
 *
 * Locks: `lock` guards heap, lists, slots and counters, and is held for work on these
 *        only. `growing` and `polling` are turns, which a thread keeps across runtime
 *        calls. The grower is the thread that has the turn `growing`. It alone may
 *        change the source (source.h) and its chunks. The poller is the thread that has
 *        the turn `polling`. It alone may look at events and end epochs (in_flight.c).
 *        Grower and poller take `lock` within their turn. No thread has both turns. */
#pragma once

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "pool/heap.h"
#include "pool/pool.h"

/* A pool can tell apart the work of up to CM_STREAMS_MAX - 1 streams. Each stream has a
 * slot, which is an index from 1 on. Index 0 belongs to nobody. After the slots of the
 * streams there is one for each device, for work whose stream is unknown. */
enum { CM_STREAMS_MAX = 256, CM_EPOCHS_MAX = CM_STREAMS_MAX + CM_MAX_DEVICES };

/* What a block has to wait for: the work of a slot, up to and including an epoch. */
typedef struct cm_due {
    uint32_t slot;
    uint64_t epoch;
} cm_due;

/* An event that was recorded at the end of an epoch. Once the event has passed, all
 * work of its slot up to that epoch has ended. */
typedef struct cm_mark {
    cm_list node;   /* in the marks of its slot */
    uint64_t event; /* owned */
    uint64_t epoch; /* the epoch at whose end the event was recorded */
} cm_mark;

/* The work of one stream or device, divided into epochs (see in_flight.c). A free span
 * is tagged with a slot's index and an epoch; a block in flight waits for epochs of one
 * or more slots. */
typedef struct cm_epochs {
    cm_stream *stream; /* held; NULL if the slot is free or belongs to a device */
    uint64_t epoch;    /* the present one, for blocks that are given back now */
    /* The youngest epoch with which a span in the heap is tagged; 0 if none is. */
    uint64_t given_epoch;
    uint64_t awaited_epoch;  /* the youngest epoch that anything waits for, or 0 */
    uint64_t recorded_epoch; /* the youngest epoch with an event, or 0 */
    cm_list marks;           /* the oldest first, unless threads raced */
    bool is_capturing;       /* whether the stream was capturing when last asked */
} cm_epochs;

/* A freed block that something may still work on. */
typedef struct cm_flight {
    cm_list node;       /* in pool->in_flight */
    cm_heap_span *span; /* borrowed: the span of the block */
    bool captured; /* a graph may use the block at any time, so it stays until the pool
                      ends */
    uint32_t due_count;
    cm_due dues[]; /* all of these must end before the block is idle */
} cm_flight;

typedef enum cm_pool_phase {
    CM_POOL_AWAKE,
    CM_POOL_SHUT,   /* hands nothing out; on its way to sleep or awake */
    CM_POOL_ASLEEP, /* its chunks are unmapped, and their memory has gone back */
} cm_pool_phase;

/* Where the contents of a pool are while it sleeps. All of it is owned. */
typedef struct cm_saved {
    cm_pool *host_pool; /* held; NULL if nothing was ever saved */
    /* Gives all of this back, when the pool ends; NULL if nothing was ever saved. */
    void (*forget)(cm_pool *pool);
    cm_block **blocks; /* of host_pool; the page-locked memory of each part */
    uint32_t block_count;
    uint32_t block_room;
    cm_saved_run *runs; /* in order of address */
    uint64_t run_count;
    cm_spare_part *spare; /* in order of address; NULL if there is none */
    uint64_t spare_count;
    /* The pool sleeps, and yet all chunks have their memory and their bytes. */
    bool is_in_place;
} cm_saved;

/* These invariants hold whenever nobody has the lock. S(x) is the sum of nbytes over
 * the spans in state x.
 *
 *   live_nbytes = S(LIVE)      in_flight_nbytes = S(FLIGHT)
 *   heap.free_nbytes = S(FREE) + S(READY)
 *   reserved_nbytes = S(LIVE) + S(FLIGHT) + S(FREE) + S(READY) + S(BUSY with memory),
 *       but not the memory that a growth under way has made for BUSY spans
 *   asleep_nbytes = the chunks without memory; the budget has been charged for
 *       reserved_nbytes - asleep_nbytes, which readers see as reserved_nbytes
 *   in_flight_count = |in_flight| + |held_by_children| + the blocks in flight for whose
 *       node there was no memory
 *   hit_count + miss_count = allocation_count
 *   each peak is at least as large as the present value of its counter
 *   each flight in in_flight waits for at least one epoch, or for a graph
 *   done[i] <= epochs[i].epoch, and done[0] = UINT64_MAX
 *   a free span's epoch is <= done[tag], or else <= epochs[tag].given_epoch, and then
 *       epochs[tag] has a stream */
struct cm_pool {
    cm_spin_lock lock;
    /* How many users hold the pool (cm_pool_hold()). Live blocks keep the pool too, but
     * are not counted here. The count falls to 0 only under the lock. */
    _Atomic uint64_t holds;
    cm_runtime *rt; /* borrowed */
    cm_pool_config config;
    uint64_t align; /* sizes and addresses of short blocks are multiples of this */
    uint64_t large; /* blocks of at least this size are whole pages */
    cm_heap heap;
    cm_list in_flight; /* every cm_flight whose work may still run */
    /* The slots of streams that are in use are below this index. Index 0 is unused. */
    uint32_t slot_count;
    uint32_t given_count;            /* slots with a given_epoch */
    cm_epochs epochs[CM_EPOCHS_MAX]; /* by slot */
    uint64_t done[CM_EPOCHS_MAX];    /* for each slot, the last epoch that has ended */
    /* Some of these counters are kept by the heap, and are filled in here only when
     * somebody reads them. */
    cm_pool_counters counters;
    /* Two readers want peaks since different moments, but `counters` has only one set
     * of peaks, which begins anew whenever one of the two readers begins anew. These
     * two members keep the earlier peaks for the other reader: peaks_before has those
     * since cm_pool_reset_peaks(), and window_peaks those since the last
     * cm_pool_read_window(). No other counters in them are used. */
    cm_pool_counters peaks_before;
    cm_pool_counters window_peaks;
    cm_budget budget; /* the pool's own, to which config.budget points */
    /* A limit was lowered below what is held. The pool hands out no free memory until
     * enough has gone back (cm_pool_obey_limits()). Memory that becomes free meanwhile
     * goes back at the next allocation. */
    bool is_over;
    /* Changed under the lock, by the one thread that puts the pool to sleep or wakes
     * it. */
    cm_pool_phase phase;
    cm_saved saved; /* used by the thread that changes `phase` */
    /* The thread that puts blocks to sleep or wakes them (spill.c), or NULL. */
    _Atomic(const char *) spiller;
    uint64_t window_ns;     /* for the idle trim: when its present window began */
    uint64_t window_cached; /* the least that was cached in that window */
    bool waited_in_vain;    /* a wait before a growth took too long (pool.c), so nobody
                               waits in this way again until a fence passes */
    /* The bytes of the blocks that need a fence and were given back after a miss last
     * asked which work has ended. */
    uint64_t unasked_nbytes;
    atomic_uint_fast64_t lost_count; /* the counter of this name, which changes without
                                        the lock */
    cm_mutex polling;                /* the poller's turn */
    cm_mutex growing;                /* the grower's turn */
    cm_source *source; /* owned; opened at the first growth; only the grower uses it */
    cm_arena *range; /* the arena of a placed source, whose chunks all lie in one range
                        of addresses; NULL for other sources */
    /* A bit for each other device for which cm_pool_admit_peers() has nothing left to
     * do, because the device may use all chunks or cannot reach this device at all. Set
     * by the grower. */
    _Atomic uint64_t admitted;
    /* Blocks that were freed but that forked children still have: see fork.c. */
    cm_list held_by_children;
    cm_list fork_node; /* in the list of all pools; this and the next are for fork.c */
    bool is_copied; /* a fork is under way, for which fork.c has prepared this pool */
};

/* True while the pool may not hand out free memory because it sleeps or because a limit
 * is exceeded. If a limit was exceeded before, this looks at the limits again, since
 * other pools may have given memory back. */
static inline bool
cm_pool_is_over_locked(cm_pool *pool)
{
    if (CM_UNLIKELY(pool->phase != CM_POOL_AWAKE)) {
        return true;
    }
    if (CM_UNLIKELY(pool->is_over)) {
        pool->is_over = cm_budget_excess(pool->config.budget) > 0;
    }
    return pool->is_over;
}

/* Call this after each change of the lists. It checks the invariants in debug builds
 * only. */
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

/* Raise those peaks that handing out a block can raise. */
static inline void
cm_pool_note_live_locked(cm_pool *pool)
{
    cm_pool_counters *c = &pool->counters;
    cm_pool_raise(&c->peak_live_nbytes, c->live_nbytes);
    cm_pool_raise(&c->peak_requested_nbytes, c->requested_nbytes);
    cm_pool_raise(&c->peak_waste_nbytes, c->live_nbytes - c->requested_nbytes);
}

/* Return the bytes that the runtime has given the pool and that do not sleep. The
 * budget has been charged for these, and readers see them as reserved_nbytes. */
static inline uint64_t
cm_pool_held_nbytes(const cm_pool *pool)
{
    return pool->counters.reserved_nbytes - pool->counters.asleep_nbytes;
}

/* Raise all peaks. Call this after any other change of the counters. */
static inline void
cm_pool_note_peaks_locked(cm_pool *pool)
{
    cm_pool_counters *c = &pool->counters;
    cm_pool_note_live_locked(pool);
    cm_pool_raise(&c->peak_in_flight_nbytes, c->in_flight_nbytes);
    cm_pool_raise(&c->peak_cached_nbytes, pool->heap.free_nbytes);
    cm_pool_raise(&c->peak_reserved_nbytes, cm_pool_held_nbytes(pool));
}

/* Count a LIVE span as no longer handed out. */
static inline void
cm_pool_take_back_locked(cm_pool *pool, const cm_heap_span *span)
{
    cm_pool_counters *c = &pool->counters;
    c->free_count++;
    c->live_count--;
    c->live_nbytes -= span->block.nbytes;
    c->requested_nbytes -= span->requested_nbytes;
}

/* Return the alignment of a block of `nbytes`: its address and its rounded size are
 * multiples of this. */
static inline uint64_t
cm_pool_align_of(const cm_pool *pool, uint64_t nbytes)
{
    return nbytes >= pool->large ? CM_PAGE_NBYTES : pool->align;
}

/* True if the idle trim is on and its present window has passed. */
static inline bool
cm_pool_is_trim_due_locked(const cm_pool *pool)
{
    return pool->config.idle_trim_ns != 0
           && cm_now_ns() - pool->window_ns >= pool->config.idle_trim_ns;
}

/* Record an event about `nbytes` bytes from the start of `block`, under the address
 * that the user of the block knows. `block` is NULL if the event is about no particular
 * place. Called with nothing locked. */
void cm_pool_note(const cm_pool *pool, uint8_t op, const cm_block *block,
                  uint64_t nbytes, uint64_t value, const cm_stream *stream);

/* -- in_flight.c ------------------------------------------------------------------------- */

/* Streams and their epochs. */

/* Make all slots free. Called once, when the pool is made. */
void cm_pool_init_slots(cm_pool *pool);

/* Return the slot of a stream, or 0 if it has none. */
uint32_t cm_pool_search_slot_locked(const cm_pool *pool, const cm_stream *stream);

/* Do the same as cm_pool_search_slot_locked(), but first compare `stream` with the
 * stream of slot 1. Nearly always slot 1 is the only slot in use, and it has this very
 * cm_stream. */
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
        .tag = slot, .done = pool->done, .single_stream = pool->given_count <= 1};
}

/* Return the view that says which free spans a block for `stream` may be cut from. With
 * `stream` NULL any stream may use the block. */
static inline cm_heap_view
cm_pool_view_for_locked(const cm_pool *pool, const cm_stream *stream)
{
    return cm_pool_view_locked(pool, cm_pool_find_slot_locked(pool, stream));
}

/* Return the slot of a stream, after giving it one if it has none. Returns 0 if all
 * slots are taken. */
uint32_t cm_pool_slot_locked(cm_pool *pool, cm_stream *stream);

/* Note that a span is given back in the order of a stream, and is pending until `due`
 * has ended. If the epoch in `due` is 0, the present epoch is filled in. */
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

/* Prepare for a block to be given back in the order of `stream`. A stream that somebody
 * else owns may be gone later, so an event is recorded on it now, and *out then says
 * what the block waits for. For any other stream nothing is done, and *out is left
 * alone. Returns false if no event could be recorded. */
bool cm_pool_try_mark_foreign(cm_pool *pool, cm_stream *stream, cm_due *out);
/* True if free spans are still pending (heap.h) for a stream other than the stream of
 * slot `own`. */
bool cm_pool_has_other_pending_locked(const cm_pool *pool, uint32_t own);
/* Make `stream` wait, on the device, until other streams have finished with the spans
 * that are pending for them. Stores in done[i] the last epoch of slot i whose spans
 * `stream` may take afterwards. Returns false if this changed nothing, because no span
 * was pending for another stream or because the calls failed. Called by the poller. */
bool cm_pool_order_after_slots(cm_pool *pool, cm_stream *stream,
                               uint64_t done[CM_EPOCHS_MAX]);
/* Free the slots of streams whose work has ended. With `orphans_only` it frees only the
 * slots of streams that nobody but the pool keeps alive, unless all slots are taken.
 * Called by the poller. */
void cm_pool_drop_slots(cm_pool *pool, bool orphans_only);

/* Blocks in flight. These are called without the lock, unless their names say
 * otherwise. */

/* Make a cm_flight, which lists everything that must end before the block of `span` is
 * idle, and record the events for it. It is in no list yet. Returns NULL if there is no
 * memory. */
cm_flight *cm_flight_create(cm_pool *pool, cm_heap_span *span, cm_stream *const *uses,
                            uint32_t use_count, unsigned flags);
/* True if a block in flight may be in use by work that no event covers. That is so if a
 * graph uses the block, since a graph may be run again at any time, or if there was no
 * memory to note what the block waits for. */
bool cm_pool_has_unknown_work(cm_pool *pool);
/* Return the bytes of all blocks in flight that wait for a fence which has not been
 * recorded yet. */
uint64_t cm_pool_fenced_nbytes_locked(const cm_pool *pool);
/* True if there is a recorded fence that has not been seen to pass. */
bool cm_pool_has_fence_locked(const cm_pool *pool);
/* True if a block waits for everything that a device was doing, whether or not its
 * fence has been recorded. */
bool cm_pool_is_fence_due(cm_pool *pool);
/* Forget all events and give all blocks in flight back to the heap, even those that
 * wait for a graph and those for which the wait failed. Called when the pool ends. */
void cm_pool_abandon_work(cm_pool *pool);

/* Ask which work has ended, and move blocks that are idle from flight to the heap. Does
 * nothing while another thread is the poller. With `may_fence` it also records the
 * fences that are due; callers set it if they know of no capture that this would break.
 * Fails: the first call that failed, after it has tried the rest. */
CM_NODISCARD cm_status cm_pool_poll(cm_pool *pool, bool may_fence);
/* Wait until the work on everything that was given back before this call has ended, and
 * put that memory into the heap. If `fences_only` is set, the call waits only for
 * blocks that need a fence, and it does so by waiting for their whole devices. While
 * the pool knows of a capture it waits neither for fences nor for devices. If `hooks`
 * is NULL, nobody can interrupt the wait.
 * Fails: CM_ECANCELLED; the first call that failed. */
CM_NODISCARD cm_status cm_pool_wait(cm_pool *pool, const cm_wait_hooks *hooks,
                                    bool fences_only);

/* -- grow.c ------------------------------------------------------------------------------ */

/* The length of a new chunk is at most 1 / CM_CHUNK_SHARE of the memory that the pool
 * then holds. Such a short chunk can go back, or move, while most other memory is live.
 * If the pool grows for many blocks that come and go together, the limit is
 * 1 / CM_RESERVE_SHARE, since long chunks take fewer calls of the runtime. A chunk for
 * a long block may be longer (grow.c). */
enum { CM_CHUNK_SHARE = 500, CM_RESERVE_SHARE = 128 };

/* Get memory from the runtime, and cut a BUSY span of `size` bytes for `stream` from
 * it, perhaps together with free memory beside it. If `stream` is NULL, any stream may
 * use the span. If the memory is placed, which means that all chunks lie in one range
 * of addresses, a chunk may have 1 / share of the memory that the pool then holds.
 * Called by the grower, inside a cm_scope.
 * Fails: CM_ELIMIT, CM_ENOMEM, CM_EOVERFLOW; as the source's calls. */
CM_NODISCARD cm_status cm_pool_grow(cm_pool *pool, uint64_t size, uint32_t share,
                                    const cm_stream *stream, cm_heap_span **out);
/* Tell the source which chunks to expect, as cm_source_ops says. This takes the
 * grower's turn, so it waits for a growth under way, and later growths wait for it. */
void cm_pool_expect(cm_pool *pool, uint64_t nbytes, uint64_t count);
/* Give whole free chunks back to the runtime, as many as can go while at least
 * `keep_nbytes` stay cached. Called by the grower, inside a cm_scope. */
CM_NODISCARD cm_status cm_pool_release_chunks(cm_pool *pool, uint64_t keep_nbytes,
                                              uint64_t *released_nbytes);
/* Trim as cm_pool_trim() does. If `waits` is set, the call first waits for everything
 * in flight, and calls the hooks meanwhile. Otherwise the call only asks which work has
 * ended, the hooks may be NULL, and `may_fence` says whether the call may record
 * fences. */
CM_NODISCARD cm_status cm_pool_trim_as(cm_pool *pool, uint64_t keep_nbytes,
                                       const cm_wait_hooks *hooks, bool waits,
                                       bool may_fence, uint64_t *released_nbytes);
/* Give back what was not needed in the present window, if idle trim is on and that
 * window has passed, and begin the next window. */
void cm_pool_trim_idle(cm_pool *pool);
/* Return the time by cm_now_ns() at which the present window ends, or 0 if idle trim is
 * off. */
uint64_t cm_pool_idle_due(cm_pool *pool);

/* -- chunks.c ---------------------------------------------------------------------------- */
/* These functions work on the chunks of placed memory that begin in [from, to). The
 * grower calls them, and those that call the runtime need a cm_scope around them. */

static inline cm_address
cm_chunk_end(const cm_chunk *chunk)
{
    return chunk->address + chunk->nbytes;
}

/* Return the first chunk that begins at `from` or behind it, or NULL if there is
 * none. */
cm_chunk *cm_chunk_from(const cm_pool *pool, cm_address from);
/* Count the bytes of chunks without memory. */
uint64_t cm_chunks_count_bare(const cm_pool *pool, cm_address from, cm_address to);
/* Unmap the chunks that lie wholly before `to` and can be mapped again with their
 * contents.
 * Fails: address_unmap, and leaves the rest mapped. */
CM_NODISCARD cm_status cm_chunks_unmap(const cm_pool *pool, cm_address from,
                                       cm_address to);
/* Map what cm_chunks_unmap() has unmapped. Returns false if a chunk stays unmapped. */
bool cm_chunks_try_map_back(const cm_pool *pool, cm_address from, cm_address to);
/* Give the memory of all chunks back, even after one of them has failed.
 * Fails: the first call that failed twice. */
CM_NODISCARD cm_status cm_chunks_drop(cm_pool *pool, cm_address from, cm_address to);
/* Let all chunks have memory again. Its contents are undefined, unless a chunk has kept
 * its handle.
 * Fails: the first call that fails. */
CM_NODISCARD cm_status cm_chunks_map(const cm_pool *pool, cm_address from,
                                     cm_address to);

/* -- fork.c ------------------------------------------------------------------------------ */

/* Enter the pool in the list of pools that forks look at. From then on a forking thread
 * holds the pool's lock across the fork, and children find in its live page-locked
 * blocks what cm_fork says. cm_pool_unwatch_forks() takes the pool out of the list
 * again. Both are called without the lock.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_pool_watch_forks(cm_pool *pool);
void cm_pool_unwatch_forks(cm_pool *pool);
/* Find out whether a block that is being given back has to be kept, because a forked
 * child still has it. Returns true if so; then the caller puts *out into the pool's
 * `held_by_children`. If there was no memory for the node that *out is to point to,
 * *out stays as it was (callers set it to NULL), and the block stays in flight until
 * the pool ends. Returns false if no child has the block any more. */
bool cm_pool_try_hold_for_children(cm_pool *pool, cm_heap_span *span, unsigned flags,
                                   cm_list **out);
/* Move held blocks whose children have ended into flight, as if they had been freed
 * with a fence now. */
void cm_pool_poll_children(cm_pool *pool);
/* Move all held blocks into flight. Called when the pool ends. Children still keep
 * their memory after it has gone back to the system, since they have their own mapping
 * of it. */
void cm_pool_end_children(cm_pool *pool);
