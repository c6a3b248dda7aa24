/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of the rows of CM_ROUTES (plan/route.h), and what several of them use.
 *
 * Each of these functions can fail because a call of the runtime fails, or with
 * CM_ECANCELLED. In a job thread it can also return CM_ETIMEOUT. Then job->wait says
 * what the job waits for, and the same function is called again once the job can go on.
 *
 * Locks: none; the thread that runs the job calls them. */
#pragma once

#include "transfer/engine/job.h"

/* The `move` of the row HOST does all steps of the job by itself; for the others
 * cm_job_run() does the steps before and after. */
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

/* replan.c: read the whole of a source that overlaps its target into memory of our own,
 * which is the source from then on. */
CM_NODISCARD cm_status cm_job_replace_source(cm_job *job);
/* True if that memory can be on the plan's device and need not be the host's. */
bool cm_job_can_own_on_device(const cm_job *job);
/* Adapt the plan to that memory, in which the elements are packed, as the source from
 * now on. It lies at `address` on the device, or at `host` if `address` is 0. */
void cm_job_plan_own_source(cm_job *job, void *host, cm_address address);
/* Plan the copy again for a way that needs no further memory, since there is none for
 * the way that was chosen. */
void cm_job_plan_without_memory(cm_job *job);
/* host_route.c: the number of threads among which the route HOST shares its largest
 * piece. */
uint32_t cm_host_thread_count(const cm_job *job, bool in_background);

/* -- host_parts.c: what threads of the host do for a job -- */

/* Tell the ticket that a piece, which has `nbytes` in the target, has been moved. */
void cm_job_count_moved(cm_job *job, uint64_t nbytes);
/* Check that the pages of mapped files at the ends of `layout` are still there, before
 * the host or the runtime touches ordinary memory. `layout` is the plan's or that of a
 * piece. Packed ends lie in blocks of ours and are not checked. For a job of many runs,
 * a call with the plan's layout checks all of the runs, and one with the layout of a
 * piece does nothing.
 * Fails: CM_EFAULT. */
CM_NODISCARD cm_status cm_job_probe_pages(const cm_job *job, const cm_layout *layout);
/* Bring in the pages of an end that maps a file and whose elements lie apart, such as
 * every third element or a matrix that is turned. This happens before the parts are
 * shared out, since many parts touch each page of such an end, and each of them would
 * have to ask for the page. Blocks while the pages come from a disk.
 * Fails: CM_EFAULT, CM_ECANCELLED. */
CM_NODISCARD cm_status cm_job_populate_ahead(cm_job *job);
/* A cm_move_part for ends that map files and for elements that are converted; `context`
 * is the job. The thread that copies a part also populates the pages of a file that it
 * touches. A failure is stored in job->lost_error. */
void cm_job_move_part(const void *context, const cm_layout *part, void *dst,
                      const void *src, bool wide);
/* Open a group of tasks whose parts are moved in the way that the job needs. */
void cm_job_open_group(cm_job *job, cm_task_group *group);
/* Move what `layout` describes, by all threads together; each part is written by one of
 * them. Blocks until all is moved. */
void cm_job_share(cm_job *job, const cm_layout *layout, void *dst, const void *src,
                  cm_copy_way way);
/* Return the first failure of a part so far: CM_EFAULT, CM_ESYSTEM (of a file that is
 * read or written) or CM_ECAST. */
CM_NODISCARD cm_status cm_job_moved_status(const cm_job *job);

/* short_copy.c: make the copy here and now if it is short and nothing has to come
 * before it. Returns false if nothing was done. The keeps stay the caller's unless
 * *ticket_has_keeps is set. Blocks. */
bool cm_engine_try_short_copy(cm_engine *engine, const cm_copy_request *request,
                              const cm_tuning *tuning, cm_status *out,
                              bool *ticket_has_keeps);

/* queued_copy.c: queue the copy here and now if its stream takes it as it is. Returns
 * false if a job has to make it. *status is the outcome, and *out is what
 * cm_engine_copy() would give. The keeps stay the caller's unless *ticket_has_keeps is
 * set. Blocks if the runtime has no room for another command. */
bool cm_engine_try_queue_copy(cm_engine *engine, const cm_copy_request *request,
                              cm_ticket **out, cm_status *status,
                              bool *ticket_has_keeps);

/* short_copy.c: tell whether cm_engine_try_short_copy() would make the copy if it were
 * called now. If so, sets *bounced to whether the copy would go through a page-locked
 * block, and sets the pieces of `plan`. */
bool cm_engine_is_short_copy(cm_engine *engine, const cm_copy_request *request,
                             const cm_tuning *tuning, bool *bounced, cm_plan *plan);
