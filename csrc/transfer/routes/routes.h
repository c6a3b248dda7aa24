/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of the rows of CM_ROUTES (plan/route.h), and what several of them use.
 * Fail: as what the runtime's calls do; CM_ECANCELLED; and CM_ETIMEOUT in a job thread,
 * with job->wait set, to be called again once the job need not wait any more.
 * Locks: none; they are called by the thread that runs the job. */
#pragma once

#include "transfer/engine/job.h"

/* HOST's `move` takes all steps of the job, as cm_job_run() does. */
#define CM_ROUTE_FUNCTIONS(name, text, suits, move, ...)                               \
    bool suits(cm_plan *plan, const cm_plan_ends *ends);                               \
    CM_NODISCARD cm_status move(cm_job *job);
CM_ROUTES(CM_ROUTE_FUNCTIONS)
#undef CM_ROUTE_FUNCTIONS
#define CM_ROUTE_FUNCTIONS(name, text, move, ...)                                      \
    CM_NODISCARD cm_status move(cm_job *job);
CM_ROUTES_OF_MANY(CM_ROUTE_FUNCTIONS)
#undef CM_ROUTE_FUNCTIONS
CM_NODISCARD cm_status cm_peer_staged_settle(cm_job *job);
CM_NODISCARD cm_status cm_staged_settle(cm_job *job);
CM_NODISCARD cm_status cm_staged_drain(cm_job *job);

/* routes.c: one more copy has ended that went that way. NULL: no bytes had to move. */
void cm_route_count(cm_route_counts *counts, const cm_route_row *row);

/* fill.c: the body of cm_engine_try_fill(), by a call that the engine knows of. */
bool cm_fill_try_queue(cm_engine *engine, const cm_short_fill *fill, cm_status *out);

/* settle.c: reads an overlapping source whole first. */
CM_NODISCARD cm_status cm_job_replace_source(cm_job *job);
/* Does that go into memory of the plan's device, or else of the host? */
bool cm_job_can_own_on_device(const cm_job *job);
/* That memory, packed, is the source from now on; the plan follows. */
void cm_job_plan_own_source(cm_job *job, void *host, cm_address address);
/* There is no memory for the way that was chosen: plan one that needs none. */
void cm_job_plan_without_memory(cm_job *job);
/* host_route.c: the threads among which HOST shares its largest piece. */
uint32_t cm_host_thread_count(const cm_job *job, bool in_background);
/* A piece is over, `nbytes` of the target: the ticket is told. */
void cm_job_count_moved(cm_job *job, uint64_t nbytes);
/* Before the host or the runtime touches ordinary memory at the ends of `layout`, the
 * plan's or a piece of it: see that what is mapped there still is. Packed ends, in
 * blocks, are not looked at. Of many runs all are looked at with the plan's, and then
 * none. Fails: CM_EFAULT. */
CM_NODISCARD cm_status cm_job_look(const cm_job *job, const cm_layout *layout);
/* Before the parts are shared out: bring in the pages of a mapped file whose elements
 * lie apart, as of every third one or of a matrix that is turned. Each page of such an
 * end is touched by many parts, each of which would have to ask for it. Blocks: while
 * the pages come from a disk. Fails: CM_EFAULT, CM_ECANCELLED. */
CM_NODISCARD cm_status cm_job_populate_ahead(cm_job *job);
/* A cm_move_part for files and what is converted; `context` is the job. The pages of a
 * file's part are populated by the thread that copies it. */
void cm_job_move_part(const void *context, const cm_layout *part, void *dst,
                      const void *src, bool wide);
/* A group for the job's parts, which are moved as it wants them. */
void cm_job_open_group(cm_job *job, cm_task_group *group);
/* Move what `layout` describes by all threads, each part written by one. Blocks. */
void cm_job_share(cm_job *job, const cm_layout *layout, void *dst, const void *src,
                  cm_copy_way way);
/* The first failure of the parts so far. Fails: CM_EFAULT, CM_ESYSTEM (the file's),
 * CM_ECAST. */
CM_NODISCARD cm_status cm_job_moved_status(const cm_job *job);

/* short_copy.c: do the copy here and now if it is short and nothing is in its way;
 * false: nothing is done. Blocks. The keeps stay the caller's unless `*kept`. */
bool cm_engine_try_short_copy(cm_engine *engine, const cm_copy_request *request,
                              const cm_tuning *tuning, cm_status *out, bool *kept);

/* queued_copy.c: queue the copy here and now if its stream takes it as it is; false: a
 * job has to do it. *status says how it went, *out is as that of cm_engine_copy(), and
 * the keeps stay the caller's unless `*kept`. Blocks: as the runtime does while it has
 * no room for another command. */
bool cm_engine_try_queue_copy(cm_engine *engine, const cm_copy_request *request,
                              cm_ticket **out, cm_status *status, bool *kept);

/* Whether that would do it, now; *bounced: through a page-locked block. */
bool cm_engine_is_short_copy(cm_engine *engine, const cm_copy_request *request,
                             const cm_tuning *tuning, bool *bounced, cm_plan *plan);
