/* SPDX-License-Identifier: Apache-2.0 */
/* The page-locked memory of a file transfer: as much as it needs of the engine's ring,
 * kept to its end. */
#include <stdlib.h>

#include "transfer/file/job.h"

/* Room for a chunk that begins anywhere in a page, itself at a page's beginning. */
static uint64_t
memory_nbytes(const cm_file_job *job)
{
    return job->tuning.file_chunk_nbytes + 2 * (uint64_t)CM_FILE_PAGE_NBYTES;
}

static char *
align(void *memory)
{
    uintptr_t mask = CM_FILE_PAGE_NBYTES - 1;
    return (char *)memory + ((0 - (uintptr_t)memory) & mask);
}

static cm_status
add_pinned(cm_file_job *job, cm_file_memory *memory)
{
    /* One, whatever others have; more as far as the ring goes. */
    uint64_t most = job->memory_count == 0 ? UINT64_MAX : job->tuning.ring_nbytes;
    cm_pool *pool = cm_cache_enter_ring(job->engine, memory_nbytes(job), most);
    if (pool == NULL) {
        return cm_fail(CM_ENOMEM, memory_nbytes(job));
    }
    cm_wait_hooks hooks = {.interrupted = job->request->interrupted,
                           .argument = job->request->interrupted_argument,
                           .wait_device = NULL};
    cm_status status =
        cm_pool_alloc_asking(pool, memory_nbytes(job), NULL, &hooks, &memory->pinned);
    if (!cm_is_ok(status)) {
        memory->pinned = NULL;
        cm_cache_leave_ring(job->engine, memory_nbytes(job));
    }
    return status;
}

static cm_status
add_plain(cm_file_job *job, cm_file_memory *memory)
{
    memory->plain = malloc((size_t)memory_nbytes(job));
    return memory->plain == NULL ? cm_fail(CM_ENOMEM, memory_nbytes(job)) : cm_ok();
}

/* One more, if it is to be had or the first. Between file and host ordinary memory
 * does; for a device a single one of that, where there is no other at all. */
static cm_status
add_memory(cm_file_job *job)
{
    bool first = job->memory_count == 0;
    cm_file_memory memory = {.taken = false};
    cm_status status =
        job->has_device_end ? add_pinned(job, &memory) : add_plain(job, &memory);
    if (!cm_is_ok(status)) {
        if (!cm_pool_is_short(status)) {
            return status;
        }
        job->memory_is_full = true;
        if (!first) {
            return cm_ok(); /* those there are will do */
        }
        if (!cm_is_ok(add_plain(job, &memory))) {
            return status;
        }
    }
    job->memory_is_full =
        job->memory_is_full
        || (!job->has_device_end && job->memory_count + 1 == CM_FILE_PLAIN_COUNT);
    memory.host = align(memory.pinned != NULL ? memory.pinned->host : memory.plain);
    job->memories[job->memory_count++] = memory;
    return cm_ok();
}

static bool
find_memory(cm_file_job *job, cm_file_chunk *chunk)
{
    for (uint32_t i = 0; i < job->memory_count; i++) {
        if (!job->memories[i].taken) {
            job->memories[i].taken = true;
            chunk->memory = i;
            chunk->has_memory = true;
            return true;
        }
    }
    return false;
}

cm_status
cm_file_take_memory(cm_file_job *job, cm_file_chunk *chunk, bool *out)
{
    *out = find_memory(job, chunk);
    if (*out || job->memory_is_full
        || job->memory_count == job->tuning.file_slot_count) {
        return cm_ok();
    }
    CM_TRY(add_memory(job));
    *out = find_memory(job, chunk);
    return cm_ok();
}

void
cm_file_give_memory(cm_file_chunk *chunk)
{
    if (chunk->has_memory) {
        chunk->job->memories[chunk->memory].taken = false;
        chunk->has_memory = false;
    }
}

void
cm_file_free_memory(cm_file_job *job)
{
    cm_engine *engine = job->engine;
    cm_stream *uses[CM_MAX_DEVICES];
    uint32_t use_count = 0;
    for (int device = 0; device < CM_MAX_DEVICES && job->in_flight; device++) {
        if (job->has_queued[device]) {
            uses[use_count++] = job->streams[device];
        }
    }
    unsigned flags = job->lost_track ? CM_POOL_FREE_FENCE : 0u;
    for (uint32_t i = 0; i < job->memory_count; i++) {
        cm_file_memory *memory = &job->memories[i];
        if (memory->pinned != NULL) {
            cm_pool_free(engine->pinned_pool, memory->pinned, uses, use_count, flags);
            cm_cache_leave_ring(job->engine, memory_nbytes(job));
        }
        free(memory->plain); /* the runtime is through with ordinary memory on return */
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        if (job->device_blocks[device] != NULL) {
            cm_pool_free(engine->device_pools[device], job->device_blocks[device], uses,
                         use_count, flags);
        }
    }
}
