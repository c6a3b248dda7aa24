/* SPDX-License-Identifier: Apache-2.0 */
/* This header shows the engine as its own files see it. It has the struct of the
 * engine, and the functions that lend events, streams and memory to jobs (job.h).
 * Nothing outside csrc/transfer includes this header.
 *
 * Locks: engine->lock is the only one. It guards every member that is said to be under
 * it. */
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
    CM_CACHE_SLOTS = 16, /* how many spare events of each sort, and how many spare
                            streams, are kept for a device */
    /* Memory that is shorter than these limits is not passed to cm_pages_probe(), which
     * takes as long as copying a few KiB. The first limit is for copies to and from a
     * device, the second for copies between two host ends and for batches. */
    CM_PROBE_NBYTES = 64 << 10,
    CM_PROBE_HOST_NBYTES = 1 << 20,
    CM_PARK_AFTER_NS = 1000 * 1000,   /* how long a job thread waits for an event before
                                         it puts the job aside and takes another */
    CM_DRAIN_NS = 1000 * 1000 * 1000, /* how long an interrupted call waits for what it
                                          has queued */
};

struct cm_job;

/* A stack of events or of cm_stream pointers that nobody uses at present. */
typedef struct cm_spares {
    int count;
    uint64_t items[CM_CACHE_SLOTS];
} cm_spares;

/* A stream of the engine's that works beside a stream of the user. All copies that are
 * ordered on the user's stream share this stream (see cm_cache_take_side()). */
typedef struct cm_side_stream {
    uint64_t beside;   /* the id of the user's stream */
    cm_stream *stream; /* held; NULL if this entry of the array is free */
} cm_side_stream;

/* How an event is used. A thread that asks again and again sees sooner that an event
 * has passed if the event records no time. Such events are CM_POLLED. Only threads that
 * do nothing but ask use them: when the rings and the streams used CM_POLLED events
 * too, short copies on an H200 lost a microsecond of the time that such events save
 * them. */
typedef enum cm_event_sort {
    CM_WAITED, /* streams and jobs wait for the event, which also records a time */
    CM_POLLED, /* the thread of a short copy or of a blocking job asks until the event
                  has passed */
    CM_EVENT_SORT_COUNT
} cm_event_sort;

/* The events and streams of one device that can be lent. */
typedef struct cm_resource_cache {
    cm_spares events[CM_EVENT_SORT_COUNT];
    cm_spares streams;
    cm_side_stream sides[CM_CACHE_SLOTS];
} cm_resource_cache;

/* A lane, in which jobs that copy in one direction over one link take turns. Short jobs
 * and long jobs have a lane each (see scheduler.c). */
typedef struct cm_lane {
    bool is_taken;         /* a job is in the lane */
    cm_list waiting;       /* jobs that wait until the lane is free, oldest first */
    uint64_t train_nbytes; /* the bytes of the jobs in the present train, that is, of
                              jobs that follow each other without a gap */
    /* The bytes of the page-locked slots that the lane's jobs use. Job threads change
     * this without the lock. */
    _Atomic uint64_t slots_nbytes;
} cm_lane;

enum { CM_LANES_OF_LINK = 4 }; /* up and down, for short jobs and for long ones */

/* The engine counts its references. Its creator holds one until the engine is closed,
 * and each ticket holds one. These invariants hold under the lock:
 *
 *     pending_count = the tickets that are not done
 *     waiting_count = the jobs whose ticket is in `watched`, or in the `waiters` of
 *                     another ticket
 *     0 <= idle_count <= thread_count */
struct cm_engine {
    atomic_uint refs;
    atomic_bool over;      /* the engine is closed completely, so `rt` may be gone */
    cm_runtime *rt;        /* borrowed */
    cm_registry *registry; /* borrowed */
    cm_relief *relief;     /* the callback for a pool that has no room (see engine.h);
                              set once, with its argument; may be NULL */
    void *relief_argument;
    cm_copy_counts counts;
    _Atomic uint64_t short_end_ns;  /* when the last short copy that several threads
                                       shared ended */
    _Atomic uint64_t pending_count; /* is decremented only under the lock */
    atomic_uint ring_counts[CM_MAX_DEVICES]; /* rings at work to or from each device */
    cm_kernels kernels;
    cm_peer_access peers;
    cm_workers workers;
    cm_mutex lock;
    cm_cond changed; /* a ticket was submitted or is done */
    cm_cond work;    /* there is a job to run, or the job threads are to end */
    cm_cond watch;   /* there is a ticket to watch, or the watcher is to end */
    /* All members from here on are under the lock. */
    bool closed;           /* takes no more requests */
    bool stop;             /* the job threads and the watcher are to end */
    uint64_t caller_count; /* threads that may be calling the runtime for the engine */
    cm_list watched;       /* tickets that wait for an event: the event of the ticket
                              itself, or the one that its job waits for */
    cm_list unread;        /* failed tickets whose outcome nobody will ask for */
    cm_list going_on;   /* tickets that have waited for another ticket, which may be far
                           enough now; order.c has to look at them again */
    cm_list short_jobs; /* jobs that can go on, oldest first (see scheduler.c) */
    cm_list long_jobs;
    cm_lane lanes[CM_MAX_DEVICES][CM_LANES_OF_LINK];
    uint64_t job_count;     /* jobs in both lists and in all lanes */
    uint64_t pick_count;    /* how often job threads have picked a job */
    uint64_t waiting_count; /* jobs that cannot go on yet */
    int thread_count;       /* job threads */
    int idle_count;         /* job threads that wait for a job */
    cm_thread threads[CM_MAX_JOB_THREADS];
    bool has_watcher; /* `watcher` was started */
    cm_thread watcher;
    uint64_t idle_due_ns;      /* when the watcher trims idle pools next; 0 for never */
    cm_tuning tuning;          /* as cm_tuning_resolve() left it */
    uint64_t drain_ns;         /* CM_DRAIN_NS, set once */
    uint64_t ring_used_nbytes; /* the bytes of page-locked blocks that transfers are
                                  using */
    cm_pool *pinned_pool;      /* held; may be NULL */
    cm_pool *device_pools[CM_MAX_DEVICES]; /* held; each may be NULL */
    /* Borrowed. The engine tries the lender of a pool when the pool itself has no room.
     * The first is the lender of pinned_pool, and lender i + 1 is the lender of
     * device_pools[i]. Each may be NULL. */
    cm_pool *lenders[1 + CM_MAX_DEVICES];
    cm_resource_cache cache[CM_MAX_DEVICES];
};

/* Count one more copy that has ended, by its route. `row` is NULL if no bytes had to
 * move. */
void cm_engine_count_route(cm_engine *engine, const cm_route_row *row);
/* Drop one reference; the last one frees the engine. */
void cm_engine_release(cm_engine *engine);
/* True in a forked child of the process that made the engine. Once the engine is closed
 * the answer is false: a ticket may call this when the runtime is already gone, and
 * then the runtime cannot be asked. */
bool cm_engine_is_forked(const cm_engine *engine);
/* Begin a call that may use the runtime. cm_engine_close() waits for its end. Stores a
 * copy of the tuning.
 * Fails: CM_ECLOSED, CM_EFORKED; then there is no call to end. */
CM_NODISCARD cm_status cm_engine_begin_call(cm_engine *engine, cm_tuning *tuning);
void cm_engine_end_call(cm_engine *engine);

/* Allocate staging memory, page-locked (`device` is -1) or of a device, as
 * cm_pool_alloc() does. The pool is asked first, and does not wait. If it has no room,
 * its lender is asked. If there are `hooks`, the lender may wait for memory in flight,
 * which is memory that was freed while the device still used it, and then the pool is
 * asked once more and may wait too. If there is still no memory, and the thread may be
 * interrupted, the relief is called. */
CM_NODISCARD cm_status cm_engine_alloc(cm_engine *engine, int device, uint64_t nbytes,
                                       cm_stream *stream, const cm_wait_hooks *hooks,
                                       cm_block **out);

/* -- resource_cache.c: events, streams and room in the ring, which jobs borrow -- */

/* Lend an event or a stream. It is a spare one, or a new one if there is no spare. The
 * functions make the device current themselves, so the caller need not.
 * Fails: event_create; stream_create. */

CM_NODISCARD cm_status cm_cache_take_event(cm_engine *engine, int device,
                                           cm_event_sort sort, uint64_t *out);
void cm_cache_give_event(cm_engine *engine, int device, cm_event_sort sort,
                         uint64_t event); /* does nothing if `event` is 0 */
CM_NODISCARD cm_status cm_cache_take_stream(cm_engine *engine, int device,
                                            cm_stream **out);
void cm_cache_give_stream(cm_engine *engine, cm_stream *stream); /* does nothing for
                                                                    NULL */
/* Lend a stream of `device` for work that comes after all work that `beside` has been
 * given so far, and before all work that `beside` is given later. The caller makes one
 * stream wait for the other, and releases the lent stream when the work is over. All
 * copies beside one stream share one lent stream, so that many copies on a stream do
 * not need many streams.
 * Fails: stream_create. */
CM_NODISCARD cm_status cm_cache_take_side(cm_engine *engine, int device,
                                          const cm_stream *beside, cm_stream **out);
/* Make `waiter` wait for all work that `worker` has been given so far.
 * Fails: event_create, event_record, stream_wait_event. */
CM_NODISCARD cm_status cm_cache_chain_streams(cm_engine *engine,
                                              const cm_stream *worker,
                                              cm_stream *waiter);
/* Count `nbytes` of page-locked memory as used by a ring, unless all rings together
 * would then use more than `most`. Returns the pool from which the caller takes the
 * memory. The pool is borrowed, and is NULL if nothing was counted, because the rings
 * use too much or because there is no pool. */
cm_pool *cm_cache_enter_ring(cm_engine *engine, uint64_t nbytes, uint64_t most);
/* Undo cm_cache_enter_ring() for memory that is no longer used. */
void cm_cache_leave_ring(cm_engine *engine, uint64_t nbytes);
/* Release all spare events and streams.
 * Fails: with the first failure of event_destroy; the others are destroyed all the
 * same. */
CM_NODISCARD cm_status cm_cache_fini(cm_engine *engine);

/* engine.c: do the same as cm_engine_facts_of() for one end of a piece. */
cm_end_facts cm_engine_facts_of_end(cm_engine *engine, const cm_piece_end *end,
                                    uint64_t nbytes);

/* -- scheduler.c: which job is next; all under the lock -- */

/* Choose the job that a job thread is to run next, and remove the job from its list.
 * Returns NULL if there is none. */
struct cm_job *cm_engine_pick_job_locked(cm_engine *engine);
/* The job can go on. Put it into the list of short or of long jobs, and wake a job
 * thread. While another job is in the lane that this job needs, this job is put into
 * the `waiting` list of the lane instead. */
void cm_engine_queue_job_locked(cm_engine *engine, struct cm_job *job);
/* Take a job out of its list. Returns false if it was in none. */
bool cm_engine_unqueue_job_locked(cm_engine *engine, struct cm_job *job);
