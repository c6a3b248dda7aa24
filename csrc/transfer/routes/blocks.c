/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of the device that a job works in. */
#include "base/checked_math.h"
#include "transfer/host/backoff.h"
#include "transfer/routes/staging.h"

static cm_status
find_pool(cm_job *job, int device, cm_pool **out)
{
    cm_mutex_lock(&job->engine->lock);
    *out = job->engine->device_pools[device];
    cm_mutex_unlock(&job->engine->lock);
    return *out == NULL ? cm_fail(CM_EINVALID, (uint64_t)device) : cm_ok();
}

static cm_status
alloc_block(const cm_job *job, cm_pool *pool, uint64_t nbytes, cm_stream *stream,
            cm_block **out)
{
    cm_wait_hooks hooks = {.interrupted = job->interrupted,
                           .argument = job->interrupted_argument};
    return cm_pool_alloc_asking(pool, nbytes, stream, &hooks, out);
}

cm_status
cm_job_alloc_block(cm_job *job, int device, uint64_t nbytes, cm_stream *stream,
                   cm_block **out)
{
    cm_pool *pool;
    CM_TRY(find_pool(job, device, &pool));
    cm_status status = alloc_block(job, pool, nbytes, stream, out);
    return job->interrupted == NULL || job->capturing
               ? status
               : cm_engine_relieve(job->engine, pool, nbytes, stream, status, out);
}

uint64_t
cm_job_pair_pitch(const cm_job *job)
{
    enum { EDGE = 256 }; /* the second lies as well as the block */
    return cm_round_up_to(job->plan.piece_nbytes, EDGE);
}

cm_status
cm_job_try_pair(cm_job *job)
{
    enum { PLENTY = 8 }; /* as much for so many more */
    cm_engine *engine = job->engine;
    cm_pool *pool;
    if (job->device_block != NULL || job->plan.is_download || job->plan.piece_count < 2
        || job->fan != NULL || atomic_load(&engine->pair_wish_count) > 0) {
        return cm_ok();
    }
    CM_TRY(find_pool(job, job->plan.device, &pool));
    uint64_t nbytes = 2 * cm_job_pair_pitch(job);
    if (cm_pool_room(pool) / PLENTY < nbytes) {
        return cm_ok();
    }
    atomic_fetch_add(&engine->pair_count, 1);
    cm_status status = cm_pool_alloc_now(pool, nbytes, job->stream, &job->device_block);
    job->has_pair = cm_is_ok(status);
    if (!job->has_pair) {
        atomic_fetch_sub(&engine->pair_count, 1);
    }
    return cm_pool_is_short(status) ? cm_ok() : status;
}

static cm_status
get_single(cm_job *job)
{
    cm_pool *pool;
    CM_TRY(find_pool(job, job->plan.device, &pool));
    return alloc_block(job, pool, job->plan.piece_nbytes, job->stream,
                       &job->device_block);
}

/* Memory is short while others have more than they must: none takes more from now on,
 * and what they have comes back when they end, if not on a stream that stands still. */
static cm_status
wait_for_pairs(cm_job *job, cm_status status)
{
    cm_engine *engine = job->engine;
    uint64_t begin_ns = cm_now_ns();
    uint64_t waited_ns = 0;
    atomic_fetch_add(&engine->pair_wish_count, 1);
    unsigned seen = atomic_load(&engine->pair_count);
    while (cm_pool_is_short(status) && seen > 0 && waited_ns < CM_PAIR_PATIENCE_NS
           && !cm_job_is_interrupted(job)) {
        cm_nap_after(waited_ns);
        waited_ns = cm_now_ns() - begin_ns;
        unsigned count = atomic_load(&engine->pair_count);
        if (count != seen) {
            seen = count;
            status = get_single(job);
        }
    }
    atomic_fetch_sub(&engine->pair_wish_count, 1);
    return status;
}

cm_status
cm_job_take_device_block(cm_job *job, cm_address *out)
{
    CM_TRY(cm_job_try_pair(job));
    if (job->device_block == NULL) {
        cm_status status = get_single(job);
        if (cm_pool_is_short(status) && !job->plan.is_turned) {
            status = wait_for_pairs(job, status);
        }
        if (cm_pool_is_short(status)) {
            status = cm_job_alloc_block(job, job->plan.device, job->plan.piece_nbytes,
                                        job->stream, &job->device_block);
        }
        CM_TRY(status);
    }
    *out = job->device_block->address;
    return cm_ok();
}
