/* SPDX-License-Identifier: Apache-2.0 */
/* The pool's insides, shared by its files: pool.c (the whole and its cache),
 * pool_alloc.c (handing out), pool_in_flight.c (when a freed block is idle) and
 * pool_memory.c (calls).
 * Nobody else includes this. Locks: pool->lock guards the lists and counters; the fields of
 * an entry belong to whoever took it out of a list or, for `polled`, to the poller. */
#ifndef CM_POOL_POOL_PRIVATE_H
#define CM_POOL_POOL_PRIVATE_H

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "pool/pool.h"

enum { CM_ENTRY_EVENT_MAX = 8 };

/* One piece of memory from the runtime. */
typedef struct cm_pool_entry {
    cm_block block; /* first: callers hold its address */
    cm_list node;   /* in exactly one list of the pool, or in the hands of one thread */
    struct {
        uint64_t handle; /* owned event, recorded */
        int device;
    } events[CM_ENTRY_EVENT_MAX]; /* all must be done before the block is idle */
    uint32_t event_count;
    uint64_t fence_devices; /* bit d: whatever device d was doing must end first */
    bool captured; /* a graph may use it at any time: stays until the pool ends */
    bool ready;    /* the poller's finding: the block is idle */
    bool has_sole_stream; /* one stream alone worked on it: that one may have it at once
                           */
    uint64_t sole_id;
    int sole_device;
} cm_pool_entry;

/* Invariants, under the lock (|l| is the length of list l, Σ the sum of block.nbytes):
 *   live_count      = |live|               live_nbytes      = Σ live
 *   in_flight_count = |in_flight|+|polled| in_flight_nbytes = Σ in_flight + Σ polled
 *   cached_count    = |cached|             cached_nbytes    = Σ cached
 *   hit_count <= allocation_count          live_nbytes <= peak_live_nbytes
 *   |polled| > 0 implies polling
 *   each entry of in_flight waits for something (an event, a fence or a graph), each
 * entry of cached for nothing */
struct cm_pool {
    atomic_uint refs; /* holders, each live block among them */
    cm_runtime *rt;   /* borrowed */
    cm_pool_config config;
    cm_mutex lock;
    cm_cond poll_ended;
    bool polling; /* one thread looks at `polled`, without the lock */
    cm_list live;
    cm_list in_flight;
    cm_list polled;
    cm_list cached;            /* oldest first */
    cm_pool_counters counters; /* reserved_nbytes and lost_count are filled in on
                                  reading */
    atomic_uint_fast64_t lost_count;
};

/* After each change of the lists, in debug builds. */
#ifdef CM_DEBUG
#    include <assert.h>
#    define CM_POOL_DEBUG_CHECK(pool) assert(cm_pool_check(pool))
#else
#    define CM_POOL_DEBUG_CHECK(pool) ((void)0)
#endif

static inline cm_pool_entry *
cm_pool_entry_of(cm_list *node)
{
    return CM_LIST_ENTRY(node, cm_pool_entry, node);
}

/* -- pool.c ----------------------------------------------------------------------------- */

/* How many cached bytes may stay. */
uint64_t cm_pool_cache_limit_locked(const cm_pool *pool);
/* Give what is cached beyond that back to the runtime, oldest first. */
void cm_pool_drop_surplus(cm_pool *pool);

/* -- pool_memory.c: inside a cm_scope of the pool's device, without the lock ------------ */

/* One new piece of `nbytes` bytes. Fails: the allocating operation, host_device_address. */
CM_NODISCARD cm_status cm_pool_memory_alloc(cm_pool *pool, uint64_t nbytes,
                                            cm_block *out);
/* Fails: host_free, device_free; the piece is then still there. */
CM_NODISCARD cm_status cm_pool_memory_free(cm_pool *pool, const cm_block *block);

/* -- pool_in_flight.c: without the lock ------------------------------------------------- */

typedef enum cm_poll_mode {
    CM_POLL_LOOK, /* ask only; does nothing while another thread polls */
    CM_POLL_SYNC, /* wait for devices where a fence is due, then ask */
    CM_POLL_WAIT  /* wait for everything */
} cm_poll_mode;

/* Note on `entry`, which no list holds, all that must end before it is idle. */
void cm_pool_entry_record(cm_pool *pool, cm_pool_entry *entry, cm_stream *const *uses,
                          uint32_t use_count, unsigned flags);
/* True when nothing has to end first. */
bool cm_pool_entry_is_idle(const cm_pool_entry *entry);
/* Destroy the events, forget the fences. Inside a cm_scope. */
void cm_pool_entry_clear(cm_pool *pool, cm_pool_entry *entry);
/* True when `stream` alone worked on the entry, so that stream order protects it. */
bool cm_pool_entry_is_ordered_on(const cm_pool_entry *entry, const cm_stream *stream);

/* Move what is idle from in flight to the cache. `may_fence`: no capture is known to
 * run on this thread's behalf, so fences that are due may be recorded.
 * Fails: CM_POLL_LOOK never; else the first call that failed; the rest is still tried. */
CM_NODISCARD cm_status cm_pool_poll(cm_pool *pool, cm_poll_mode mode, bool may_fence);

#endif
