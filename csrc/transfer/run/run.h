/* SPDX-License-Identifier: Apache-2.0 */
/* From a request to a job, and the threads that run jobs. Locks: as engine.h. */
#ifndef CM_TRANSFER_RUN_RUN_H
#define CM_TRANSFER_RUN_RUN_H

#include "transfer/engine/job.h"
#include "transfer/routes/routes.h"

/* request.c: cm_engine_copy inside a call that has begun. */
CM_NODISCARD cm_status cm_request_start(cm_engine *engine,
                                        const cm_copy_request *request,
                                        const cm_tuning *tuning, cm_ticket **out);
void cm_request_drop_keeps(const cm_copy_request *request);
/* A job for the request, without a plan. On failure the ticket is finished.
 */
CM_NODISCARD cm_status cm_job_create(cm_engine *engine, const cm_copy_request *request,
                                     const cm_tuning *tuning, cm_ticket *ticket,
                                     cm_job **out);
/* Run it, here or in the background; or give it up, where its preparation failed. */
CM_NODISCARD cm_status cm_job_start(cm_job *job, const cm_copy_request *request,
                                    cm_status prepared);

/* run.c: make the copy. On success it is `submitted`, `detached`, `draining` or over; a
 * failure has left nothing in flight, unless `submitted` (CM_ECANCELLED, or a
 * worker's). A job that may park can also return CM_ETIMEOUT and be `is_parked`: to be
 * called again once the scheduler finds that it can go on. */
CM_NODISCARD cm_status cm_job_run(cm_job *job);
/* The rest of a job left to drain; may park as well. */
CM_NODISCARD cm_status cm_job_finish_drain(cm_job *job);
/* Everything is given back. */
void cm_job_destroy(cm_job *job);

/* The same as cm_engine_copy() with other thresholds and no ticket. */
CM_NODISCARD cm_status cm_engine_copy_tuned(cm_engine *engine,
                                            const cm_copy_request *request,
                                            const cm_tuning *tuning);

/* job_threads.c: hand a job over. Fails: CM_ETHREAD (it stays the caller's). */
CM_NODISCARD cm_status cm_engine_give_job(cm_engine *engine, struct cm_job *job);

#endif
