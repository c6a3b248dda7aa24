/* SPDX-License-Identifier: Apache-2.0 */
/* The engine as its own files see it, and what it lends to jobs. Nothing outside
 * csrc/transfer includes it.
 * Locks: engine->lock alone, for everything said to be under it. */
#pragma once

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "transfer/device/kernel.h"
#include "transfer/device/peer_access.h"
#include "transfer/engine/engine.h"
#include "transfer/host/workers.h"
#include "transfer/plan/batch_plan.h"

enum {
    CM_MAX_JOB_THREADS = 4,
    CM_CACHE_SLOTS = 16, /* spare events or streams of a device */
    /* Shorter memory is not looked at by cm_pages_look(), which takes as long as
     * copying a few KiB: to and from a device; between two host ends, and of many. */
    CM_LOOK_NBYTES = 64 << 10,
    CM_LOOK_HOST_NBYTES = 1 << 20,
    CM_PARK_AFTER_NS = 1000 * 1000,   /* a job thread that has waited so long goes on to
                                         another job */
    CM_DRAIN_NS = 1000 * 1000 * 1000, /* an interrupted call waits so long for what it
                                          has queued */
};

struct cm_job;

/* Events, or cm_stream pointers. */
typedef struct cm_spares {
    int count;
    uint64_t items[CM_CACHE_SLOTS];
} cm_spares;

/* Stands beside a stream, for all copies that are in the order of that. */
typedef struct cm_side_stream {
    uint64_t beside;   /* the stream's id */
    cm_stream *stream; /* held; NULL: the place is free */
} cm_side_stream;

/* An event without a time is over sooner; on an H200 by a microsecond less once ring
 * and streams have such events too, so only short copies have them. */
typedef enum cm_event_sort {
    CM_WAITED, /* by streams and jobs; of some the time is told */
    CM_POLLED, /* by a short copy, until it is over */
    CM_EVENT_SORT_COUNT
} cm_event_sort;

/* Of a device. */
typedef struct cm_resource_cache {
    cm_spares events[CM_EVENT_SORT_COUNT];
    cm_spares streams;
    cm_side_stream sides[CM_CACHE_SLOTS];
} cm_resource_cache;

/* Counted: by its creator until close, and by each ticket. Invariants, under the lock:
 * pending_count = tickets that are not done; waiting_count = jobs whose ticket is
 * watched or in the `waiters` of another; 0 <= idle_count <= thread_count. */
struct cm_engine {
    atomic_uint refs;
    atomic_bool over;      /* closed to the end: `rt` may be gone */
    cm_runtime *rt;        /* borrowed */
    cm_registry *registry; /* borrowed */
    cm_relief *relief;     /* with its argument; set once; NULL: none */
    void *relief_argument;
    cm_copy_counts counts;
    _Atomic uint64_t short_end_ns;           /* of the last shared short copy */
    _Atomic uint64_t pending_count;          /* falls under the lock */
    atomic_uint ring_counts[CM_MAX_DEVICES]; /* rings under way to or from each */
    cm_kernels kernels;
    cm_peer_access peers;
    cm_workers workers;
    cm_mutex lock;
    cm_cond changed; /* a ticket was submitted or is done */
    cm_cond work;    /* there is a job to run, or an end to all work */
    cm_cond watch;   /* there is a ticket to watch, or an end to all work */
    /* all of the rest under the lock */
    bool closed;           /* takes no more requests */
    bool stop;             /* threads end */
    uint64_t caller_count; /* threads that may call the runtime for the engine now */
    cm_list watched;    /* tickets that wait for an event: their own, or their job's */
    cm_list unread;     /* failed tickets without a holder */
    cm_list going_on;   /* order.c's: tickets that may have nothing to wait for */
    cm_list short_jobs; /* that can go on, oldest first */
    cm_list long_jobs;
    uint64_t job_count;     /* of both */
    uint64_t pick_count;    /* of jobs by job threads */
    uint64_t waiting_count; /* jobs that cannot go on */
    int thread_count;
    int idle_count;
    cm_thread threads[CM_MAX_JOB_THREADS];
    bool has_watcher;
    cm_thread watcher;
    uint64_t idle_due_ns; /* when the watcher looks at idle pools again; 0: never */
    cm_tuning tuning;     /* resolved */
    uint64_t drain_ns;    /* CM_DRAIN_NS, set once */
    uint64_t ring_used_nbytes; /* page-locked blocks that transfers are using */
    cm_pool *pinned_pool;      /* held; may be NULL */
    cm_pool *device_pools[CM_MAX_DEVICES];
    cm_pool *lenders[1 + CM_MAX_DEVICES]; /* borrowed, of each in turn; may be NULL */
    cm_resource_cache cache[CM_MAX_DEVICES];
};

void cm_engine_release(cm_engine *engine); /* one of its references */
/* False once it is closed: tickets may outlive the runtime. */
bool cm_engine_is_forked(const cm_engine *engine);
/* One more of caller_count; a copy of the tuning. Fails: CM_ECLOSED, CM_EFORKED. */
CM_NODISCARD cm_status cm_engine_begin_call(cm_engine *engine, cm_tuning *tuning);
/* One of them is through. */
void cm_engine_end_call(cm_engine *engine);

/* cm_pool_alloc() from the pool that copies stage through, or from its lender before
 * anything is waited for; in a thread that may be interrupted the relief comes last. */
CM_NODISCARD cm_status cm_engine_alloc(cm_engine *engine, int device, uint64_t nbytes,
                                       cm_stream *stream, const cm_wait_hooks *hooks,
                                       cm_block **out);

/* -- resource_cache.c: events, streams and a share of the ring that jobs borrow; what calls the
 * runtime enters the device itself */

CM_NODISCARD cm_status cm_cache_take_event(cm_engine *engine, int device,
                                           cm_event_sort sort, uint64_t *out);
/* 0: nothing. */
void cm_cache_give_event(cm_engine *engine, int device, cm_event_sort sort,
                         uint64_t event);
CM_NODISCARD cm_status cm_cache_take_stream(cm_engine *engine, int device,
                                            cm_stream **out);
void cm_cache_give_stream(cm_engine *engine, cm_stream *stream); /* NULL: nothing */
/* A stream of `device` for work that `beside` comes before and after, to be released
 * when that is over. Others beside the same one may have it too: copies that pile up
 * there do not pile up streams. */
CM_NODISCARD cm_status cm_cache_take_side(cm_engine *engine, int device,
                                          const cm_stream *beside, cm_stream **out);
/* Let `waiter` wait for what `worker` has been given so far.
 * Fails: event_create, event_record, stream_wait_event. */
CM_NODISCARD cm_status cm_cache_chain_streams(cm_engine *engine,
                                              const cm_stream *worker,
                                              cm_stream *waiter);
/* `nbytes` of page-locked memory are about to be used, where all together then use no
 * more than `most`. Returns their pool, borrowed; NULL: no room, or no pool. */
cm_pool *cm_cache_enter_ring(cm_engine *engine, uint64_t nbytes, uint64_t most);
/* And are used no more. */
void cm_cache_leave_ring(cm_engine *engine, uint64_t nbytes);
/* Fails: the first event_destroy that failed. */
CM_NODISCARD cm_status cm_cache_fini(cm_engine *engine);

/* engine.c: cm_engine_facts_of() the end of a piece. */
cm_end_facts cm_engine_facts_of_end(cm_engine *engine, const cm_piece_end *end,
                                    uint64_t nbytes);

/* scheduler.c, all under the lock: the job that a job thread takes next, out of its
 * list; NULL: there is none. */
struct cm_job *cm_engine_pick_job_locked(cm_engine *engine);
/* A job that can go on. */
void cm_engine_queue_job_locked(cm_engine *engine, struct cm_job *job);
/* False: it was in neither list. */
bool cm_engine_unqueue_job_locked(cm_engine *engine, struct cm_job *job);
