/* SPDX-License-Identifier: Apache-2.0 */
/* From a request to a job, and the threads that run jobs. Locks: as engine.h. */
#pragma once

#include "transfer/engine/job.h"
#include "transfer/routes/routes.h"

/* request.c: cm_engine_copy inside a call that has begun. */
CM_NODISCARD cm_status cm_request_start(cm_engine *engine,
                                        const cm_copy_request *request,
                                        const cm_tuning *tuning, cm_ticket **out);
void cm_request_drop_keeps(const cm_copy_request *request);
/* A zeroed job for the request, without a ticket: it holds nothing. */
void cm_job_init(cm_job *job, cm_engine *engine, const cm_copy_request *request,
                 const cm_tuning *tuning);
/* How it is to be made, by what is known of its two ends now. Fails: as cm_plan_init. */
CM_NODISCARD cm_status cm_job_plan(cm_job *job, const cm_copy_request *request);
/* run.c: make the copy, from its step on. On success that is DRAIN, SUBMITTED, DETACHED
 * or END, and then it is over; a failure has left nothing in flight, unless SUBMITTED
 * (CM_ECANCELLED, or a job thread's). In a job thread it can also return CM_ETIMEOUT
 * with job->wait set: to be called again once it need not wait any more. */
CM_NODISCARD cm_status cm_job_run(cm_job *job);
/* Everything is given back, and the ticket is done with `status`, unless it was
 * submitted. `tells`: the caller tells the user of a failure. Returns `status`. */
CM_NODISCARD cm_status cm_job_finish(cm_job *job, cm_status status, bool tells);

/* job_threads.c: hand a job over. Fails: CM_ETHREAD (it stays the caller's). */
CM_NODISCARD cm_status cm_engine_give_job(cm_engine *engine, struct cm_job *job);
