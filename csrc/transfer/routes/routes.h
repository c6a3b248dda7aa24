/* SPDX-License-Identifier: Apache-2.0 */
/* This header declares the functions that stand in the tables of routes (plan/route.h),
 * and helpers that several of these functions share.
 *
 * Each function that returns a status can fail because a call of the runtime fails, or
 * with CM_ECANCELLED. In a job thread it can also return CM_ETIMEOUT. Then job->wait
 * says what the job waits for, and the same function is called again once the job can
 * go on.
 *
 * Locks: none; the thread that runs the job calls them. */
#pragma once

#include "transfer/engine/job.h"

/* The `move` of the row HOST does all steps of the job by itself. The `move` of any
 * other row only moves the bytes, and cm_job_run() does the steps before and after
 * that. */
#define CM_ROUTE_FUNCTIONS(name, text, suits, move, ...)                               \
    bool suits(cm_plan *plan, const cm_plan_ends *ends);                               \
    CM_NODISCARD cm_status move(cm_job *job);
CM_ROUTES(CM_ROUTE_FUNCTIONS)
#undef CM_ROUTE_FUNCTIONS
#define CM_ROUTE_FUNCTIONS(name, text, move, ...)                                      \
    CM_NODISCARD cm_status move(cm_job *job);
CM_ROUTES_OF_MANY(CM_ROUTE_FUNCTIONS)
#undef CM_ROUTE_FUNCTIONS
CM_NODISCARD cm_status cm_peer_staged_reserve(cm_job *job);
CM_NODISCARD cm_status cm_staged_reserve(cm_job *job);
CM_NODISCARD cm_status cm_staged_drain(cm_job *job);

/* fill.c: the body of cm_engine_try_fill(). The caller has called
 * cm_engine_begin_call(). */
bool cm_fill_try_queue(cm_engine *engine, const cm_short_fill *fill, cm_status *out);

/* replan.c: if the source of a job overlaps the target, read all of the source into
 * memory of our own first. From then on this memory is the source of the job. */
CM_NODISCARD cm_status cm_job_replace_source(cm_job *job);
/* True if the memory that replaces the source can lie on the plan's device. Otherwise
 * it has to be memory of the host. */
bool cm_job_can_own_on_device(const cm_job *job);
/* Adapt the plan to the memory that replaces the source. The elements lie in it without
 * gaps. The memory begins at `address` on the device or, if `address` is 0, at `host`.
 */
void cm_job_plan_own_source(cm_job *job, void *host, cm_address address);
/* Choose another route, one that needs no further memory, because there was no room for
 * the memory that the chosen route needs. */
void cm_job_plan_without_memory(cm_job *job);
/* host_route.c: return how many threads copy the largest piece of a job together, if
 * the job goes by the route HOST. */
uint32_t cm_host_thread_count(const cm_job *job, bool in_background);

/* -- host_parts.c: what threads of the host do for a job -- */

/* Tell the ticket that one more piece of the copy has been moved. The piece has
 * `nbytes` bytes in the target. */
void cm_job_count_moved(cm_job *job, uint64_t nbytes);
/* Check that the pages of mapped files at the ends of `layout` are still there, before
 * the host or the runtime touches ordinary memory. `layout` is the layout of the whole
 * plan or of one piece. An end is the source or the target. If an end is packed, it
 * lies in a block of ours and is not checked. If the job has many runs, a call with the
 * layout of the plan checks all of the runs, and a call with the layout of a piece does
 * nothing.
 * Fails: CM_EFAULT. */
CM_NODISCARD cm_status cm_job_probe_pages(const cm_job *job, const cm_layout *layout);
/* Bring in the pages of an end that maps a file, if the elements of the end lie apart,
 * as in a[::3] or in a transposed matrix. This happens before the threads share the
 * parts of the copy, since many parts touch each page of such an end, and each part
 * would have to ask for the page again. Blocks while the pages come from a disk.
 * Fails: CM_EFAULT, CM_ECANCELLED. */
CM_NODISCARD cm_status cm_job_populate_ahead(cm_job *job);
/* A cm_move_part (the function that moves one part) for ends that map files and for
 * elements that are converted. `context` is the job. If the part touches pages of a
 * mapped file, the thread that copies the part also populates these pages. A failure is
 * stored in job->lost_error. */
void cm_job_move_part(const void *context, const cm_layout *part, void *dst,
                      const void *src, bool wide);
/* Open a group of tasks whose parts are moved in the way that the job needs. */
void cm_job_open_group(cm_job *job, cm_task_group *group);
/* Move what `layout` describes. The threads share the parts, and each part is written
 * by one thread. Blocks until all is moved. */
void cm_job_share(cm_job *job, const cm_layout *layout, void *dst, const void *src,
                  cm_copy_way way);
/* Return the first failure of a part so far: CM_EFAULT, CM_ESYSTEM (of a file that is
 * read or written) or CM_ECAST. */
CM_NODISCARD cm_status cm_job_moved_status(const cm_job *job);

/* short_copy.c: make the copy at once, in the calling thread, if the copy is short and
 * nothing has to come before it. Returns false if nothing was done. The keeps of the
 * request (cm_keep in engine.h) stay the caller's unless *ticket_has_keeps is set.
 * Blocks. */
bool cm_engine_try_short_copy(cm_engine *engine, const cm_copy_request *request,
                              const cm_tuning *tuning, cm_status *out,
                              bool *ticket_has_keeps);

/* queued_copy.c: queue the copy at once, in the calling thread, if one call of the
 * runtime can put all of the copy on its stream. Returns false if a job has to make the
 * copy. *status is the outcome, and *out is the ticket that cm_engine_copy() would
 * give. The keeps stay the caller's unless *ticket_has_keeps is set. Blocks if the
 * runtime has no room for another command. */
bool cm_engine_try_queue_copy(cm_engine *engine, const cm_copy_request *request,
                              cm_ticket **out, cm_status *status,
                              bool *ticket_has_keeps);

/* short_copy.c: tell whether cm_engine_try_short_copy() would make the copy if it were
 * called now. If so, sets *bounced to whether the copy would go through a page-locked
 * block, and sets the pieces of `plan`. */
bool cm_engine_is_short_copy(cm_engine *engine, const cm_copy_request *request,
                             const cm_tuning *tuning, bool *bounced, cm_plan *plan);
