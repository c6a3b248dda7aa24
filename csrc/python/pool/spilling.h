/* SPDX-License-Identifier: Apache-2.0 */
/* Puts buffers of pools with spill="pinned" to sleep when memory is short, and wakes
 * them when they are used. The GIL is held; whatever can wait releases it. */
#pragma once

#include "python/buffer/storage.h"
#include "python/pool/pool_object.h"

/* What became of the buffers of a pool when memory was short: how many sleep because of
 * it, and how many could not, by the reason. */
typedef struct cm_spill_report {
    uint64_t spilled_count;
    uint64_t spilled_nbytes;
    uint64_t gone_count;  /* exported, captured, or their address was read */
    uint64_t kept_count;  /* by keep() */
    uint64_t busy_count;  /* a call, a transfer or an export is under way */
    uint64_t small_count; /* without a whole chunk */
    bool is_capturing;    /* a stream is being captured, so nothing may sleep now */
    bool is_contended;    /* others wake buffers as fast as this request spills them */
    bool has_waited;      /* the last attempt waited for the turn and spilled nothing */
    cm_status failure;    /* the first failure of the last attempt, or a success */
} cm_spill_report;

/* Put buffers of the pool to sleep, those that have been idle longest first, because a
 * request for `nbytes` has failed with `shortage`. Adds to the report. Returns 1 if the
 * request is worth trying again, 0 if there is nothing to gain, or -1 with what a
 * signal handler raised. */
int cm_spill(cm_state *state, cm_pool *pool, uint64_t nbytes, cm_status shortage,
             cm_spill_report *report);

/* Return why a request fails after a spill: because of `shortage`, unless a call of the
 * driver has failed for another reason. */
cm_status cm_spill_reason(cm_status shortage, const cm_spill_report *report);

/* Put the report into words for an OutOfMemoryError. Returns a str, or NULL with an
 * exception. */
PyObject *cm_spill_describe(cm_state *state, const cm_spill_report *report);

/* The hook `wake_storage` of the state: wake a storage that sleeps, or wait until
 * another thread has moved it. The caller checks it again, because it may have been
 * closed meanwhile. Returns 0, or -1 with an exception. */
int cm_spill_wake(cm_storage *storage);
