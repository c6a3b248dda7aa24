/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that share out copies between user memory and page-locked blocks. They make
 * no runtime call and know no stream: a copy here is host memory to host memory, in
 * parts that any thread may take. The thread that posts the copies helps, so that all
 * of it gets done where no other thread can be started.
 * Locks: the crew's own mutex over its lists and cuts, never held while bytes move. */
#ifndef CM_TRANSFER_CREW_H
#define CM_TRANSFER_CREW_H

#include <stdatomic.h>

#include "base/list.h"
#include "base/thread.h"
#include "transfer/layout.h"

enum { CM_CREW_MAX = 15 };

/* Invariants, under the lock: 0 <= idle_count <= thread_count <= limit;
 * open_count = gangs in `gangs` that have a load with parts left. */
typedef struct cm_crew {
    cm_mutex lock;
    cm_cond work; /* there is a part to copy, or an end to all work */
    cm_cond done; /* a load is done */
    cm_list gangs;
    _Atomic uint32_t part_count; /* loads with parts left: spun on without the lock */
    uint32_t limit;              /* threads at most; UINT32_MAX: not known yet */
    uint32_t thread_count;
    uint32_t idle_count;
    uint64_t spin_ns; /* how long an idle thread looks before it sleeps */
    atomic_bool stop;
    cm_thread threads[CM_CREW_MAX];
} cm_crew;

/* What one transfer has posted, oldest first. Gangs are served in turn. */
typedef struct cm_gang {
    cm_crew *crew; /* borrowed */
    cm_list node;
    cm_list loads;
} cm_gang;

/* One copy that is shared out. */
typedef struct cm_load {
    cm_list node;
    cm_layout whole;
    cm_cut cut;
    void *dst;
    const void *src;
    bool wide;              /* past the caches */
    uint32_t running_count; /* parts that threads are at */
    atomic_bool done;
} cm_load;

/* Starts no thread yet. Fails: CM_ESYSTEM. */
CM_NODISCARD cm_status cm_crew_init(cm_crew *crew);
/* Joins the threads. No gang may be open. */
void cm_crew_fini(cm_crew *crew);

void cm_gang_open(cm_gang *gang, cm_crew *crew);
/* What nobody has begun is left undone. Blocks until no thread touches its memory. */
void cm_gang_close(cm_gang *gang);

/* Share out what `layout` describes, which is copied; both ends and the load stay until
 * it is done or the gang is closed. */
void cm_gang_post(cm_gang *gang, cm_load *load, const cm_layout *layout, void *dst,
                  const void *src, bool wide);
/* Copy one part of what the gang has posted; false when all parts are taken. */
bool cm_gang_help(cm_gang *gang);
/* Blocks until the load is done; parts that nobody has taken are copied here. */
void cm_gang_wait(cm_gang *gang, cm_load *load);

static inline bool
cm_load_is_done(const cm_load *load)
{
    return atomic_load_explicit(&load->done, memory_order_acquire);
}

#endif
