/* SPDX-License-Identifier: Apache-2.0 */
/* Makes jobs of requests and runs them, some of them on threads in the background.
 * Locks: as engine.h. */
#pragma once

#include "transfer/engine/job.h"
#include "transfer/routes/routes.h"

/* request.c: does the work of cm_engine_copy() within a call that has begun. It takes
 * over `many`, `rows` and the keeps of the request, and also `file` for a write in the
 * background.
 * Fails: as cm_engine_copy(). */
CM_NODISCARD cm_status cm_request_start(cm_engine *engine,
                                        const cm_copy_request *request,
                                        const cm_tuning *tuning, cm_ticket **out);
/* Drop the keeps of a request that no ticket has taken over. */
void cm_request_drop_keeps(const cm_copy_request *request);
/* Fill in a zeroed job for the request. It has no ticket, and holds nothing that has to
 * be given back. */
void cm_job_init(cm_job *job, cm_engine *engine, const cm_copy_request *request,
                 const cm_tuning *tuning);
/* Plan the job by what is known about its two ends now.
 * Fails: as cm_plan_init(). */
CM_NODISCARD cm_status cm_job_plan(cm_job *job, const cm_copy_request *request);
/* run.c: make the copy, going on from the job's step. After success the step is DRAIN,
 * SUBMITTED, DETACHED or END, and this call is not needed again, except that a job in
 * DRAIN is run once more by a job thread. After a failure nothing is in flight, unless
 * the step is SUBMITTED. The ticket then tells when the rest has ended. The step can be
 * SUBMITTED after CM_ECANCELLED, in the background, and for a part of a whole. In a job
 * thread this may also return CM_ETIMEOUT with job->wait set. It is then called again
 * once the job need not wait any more. */
CM_NODISCARD cm_status cm_job_run(cm_job *job);
/* Give back everything and free the job. Unless it was submitted, its ticket is done
 * with `status`. With `is_reported` the caller reports a failure to the user itself.
 * Returns `status`. */
CM_NODISCARD cm_status cm_job_finish(cm_job *job, cm_status status, bool is_reported);

/* job_threads.c: hand a job over to the job threads.
 * Fails: CM_ETHREAD, and the job stays the caller's. */
CM_NODISCARD cm_status cm_engine_give_job(cm_engine *engine, struct cm_job *job);
