/* SPDX-License-Identifier: Apache-2.0 */
/* The device's part of a file transfer: between a chunk's memory and its own. */
#include "transfer/file/job.h"
#include "transfer/host/backoff.h"

cm_status
cm_file_ask(cm_file_job *job)
{
    const cm_file_request *request = job->request;
    uint64_t now_ns = cm_now_ns();
    if (request->interrupted == NULL || now_ns - job->asked_ns < CM_ASK_NS) {
        return cm_ok();
    }
    bool interrupted = request->interrupted(request->interrupted_argument);
    job->asked_ns = cm_now_ns();
    return interrupted ? cm_fail(CM_ECANCELLED, 0) : cm_ok();
}

cm_status
cm_file_look(cm_file_chunk *chunk, bool *out)
{
    cm_runtime *rt = chunk->job->engine->rt;
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, chunk->device, &guard));
    cm_status status = cm_rt_event_query(rt, chunk->event, out);
    cm_device_leave(rt, &guard);
    return status;
}

static cm_status
poll_event(cm_file_job *job, uint64_t event)
{
    uint64_t begin_ns = cm_now_ns();
    for (;;) {
        bool done = false;
        CM_TRY(cm_rt_event_query(job->engine->rt, event, &done));
        if (done) {
            return cm_ok();
        }
        CM_TRY(cm_file_ask(job));
        uint64_t now_ns = cm_now_ns();
        cm_pause_until(now_ns + cm_backoff_ns(now_ns - begin_ns));
    }
}

cm_status
cm_file_wait_event(cm_file_job *job, int device, uint64_t event)
{
    cm_runtime *rt = job->engine->rt;
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, device, &guard));
    cm_status status = poll_event(job, event);
    cm_device_leave(rt, &guard);
    return status;
}

static cm_status
get_event(cm_file_chunk *chunk)
{
    cm_engine *engine = chunk->job->engine;
    if (chunk->event != 0 && chunk->event_device != chunk->device) {
        cm_cache_give_event(engine, chunk->event_device, chunk->event);
        chunk->event = 0;
    }
    if (chunk->event != 0) {
        return cm_ok();
    }
    chunk->event_device = chunk->device;
    return cm_cache_take_event(engine, chunk->device, &chunk->event);
}

/* All that the stream was given so far is over. With ordinary memory the runtime's call
 * would wait for that, and could not be ended. */
static cm_status
drain(cm_file_chunk *chunk)
{
    cm_file_job *job = chunk->job;
    CM_TRY(cm_rt_event_record(job->engine->rt, chunk->event,
                              job->streams[chunk->device]->handle));
    return cm_file_wait_event(job, chunk->device, chunk->event);
}

static cm_status
get_device_block(cm_file_job *job, int device, cm_address *out)
{
    if (job->device_blocks[device] == NULL) {
        cm_mutex_lock(&job->engine->lock);
        cm_pool *pool = job->engine->device_pools[device];
        cm_mutex_unlock(&job->engine->lock);
        if (pool == NULL) {
            return cm_fail(CM_EINVALID, (uint64_t)device);
        }
        uint64_t nbytes = job->tuning.file_chunk_nbytes;
        cm_stream *stream = job->streams[device];
        cm_status status =
            cm_pool_alloc(pool, nbytes, stream, &job->device_blocks[device]);
        if (job->request->interrupted != NULL) {
            status = cm_engine_relieve(job->engine, pool, nbytes, stream, status,
                                       &job->device_blocks[device]);
        }
        CM_TRY(status);
    }
    *out = job->device_blocks[device]->address;
    return cm_ok();
}

/* By way of a block on the device, unless it is one run there as well. */
static cm_status
copy_strided(const cm_file_chunk *chunk, bool sends)
{
    cm_file_job *job = chunk->job;
    cm_runtime *rt = job->engine->rt;
    uint64_t stream = job->streams[chunk->device]->handle;
    const cm_layout *layout = &chunk->layout;
    const cm_file_piece *piece = &chunk->pieces[0];
    cm_address there = chunk->address;
    cm_address here = (uintptr_t)cm_file_chunk_memory(chunk) + piece->at;
    cm_address block;
    CM_TRY(get_device_block(job, chunk->device, &block));
    if (sends) {
        CM_TRY(cm_rt_copy_async(rt, block, here, piece->nbytes, stream));
        return cm_kernels_launch(&job->engine->kernels, chunk->device, layout, there,
                                 block, stream);
    }
    CM_TRY(cm_kernels_launch(&job->engine->kernels, chunk->device, layout, block, there,
                             stream));
    return cm_rt_copy_async(rt, here, block, piece->nbytes, stream);
}

static cm_status
copy_runs(const cm_file_chunk *chunk, bool sends)
{
    cm_file_job *job = chunk->job;
    cm_address memory = (uintptr_t)cm_file_chunk_memory(chunk);
    for (uint32_t i = 0; i < chunk->piece_count; i++) {
        const cm_file_piece *piece = &chunk->pieces[i];
        cm_address here = memory + piece->at;
        CM_TRY(cm_rt_copy_async(job->engine->rt, sends ? piece->address : here,
                                sends ? here : piece->address, piece->nbytes,
                                job->streams[chunk->device]->handle));
    }
    return cm_ok();
}

static cm_status
copy(cm_file_chunk *chunk, bool sends)
{
    cm_file_job *job = chunk->job;
    CM_TRY(get_event(chunk));
    if (job->memories[chunk->memory].pinned == NULL) {
        CM_TRY(drain(chunk));
    }
    job->has_queued[chunk->device] = true;
    CM_TRY(chunk->is_strided ? copy_strided(chunk, sends) : copy_runs(chunk, sends));
    return cm_rt_event_record(job->engine->rt, chunk->event,
                              job->streams[chunk->device]->handle);
}

static cm_status
copy_on_device(cm_file_chunk *chunk, bool sends)
{
    cm_runtime *rt = chunk->job->engine->rt;
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, chunk->device, &guard));
    cm_status status = copy(chunk, sends);
    cm_device_leave(rt, &guard);
    return status;
}

cm_status
cm_file_send(cm_file_chunk *chunk)
{
    return copy_on_device(chunk, true);
}

cm_status
cm_file_fetch(cm_file_chunk *chunk)
{
    return copy_on_device(chunk, false);
}
