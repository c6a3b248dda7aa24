/* SPDX-License-Identifier: Apache-2.0 */
/* Plans and runs the jobs that transfer files, and makes the device's half of each
 * chunk. transfer/file/job.h tells what a chunk, its pieces and its two halves are. */
#include "transfer/file/file.h"

#include <stdlib.h>
#include <unistd.h>

#include "base/checked_math.h"
#include "transfer/file/job.h"
#include "transfer/file/save.h"
#include "transfer/host/host_copy.h"
#include "transfer/plan/ring_policy.h"
#include "transfer/routes/device_side.h"
#include "transfer/routes/ring.h"
#include "transfer/routes/routes.h"

/* -- before it begins -------------------------------------------------------------------- */

/* Find out which ranges belong to which file, and count their bytes. */
static void
find_ranges(cm_file_job *file)
{
    const cm_file_request *request = file->request;
    for (uint64_t i = 0; i < request->range_count; i++) {
        cm_file_state *state = &file->files[request->ranges[i].file];
        file->nbytes += request->ranges[i].nbytes;
        if (state->end_range == 0) {
            state->first_range = i;
            state->cursor.range = i;
        }
        state->end_range = i + 1;
    }
}

cm_status
cm_file_job_create(const cm_file_request *request, cm_file_job **out)
{
    cm_file_job *file = calloc(1, sizeof(*file));
    CM_TRY(cm_allocated(file != NULL, sizeof(*file)));
    file->request = request;
    for (uint32_t i = 0; i < request->file_count; i++) {
        file->files[i].direct_fd = CM_FILE_NOT_TRIED;
    }
    find_ranges(file);
    *out = file;
    return cm_ok();
}

int
cm_file_first_device(const cm_file_request *request)
{
    int device = -1;
    for (uint64_t i = 0; i < request->range_count && device < 0; i++) {
        const cm_file_range *range = &request->ranges[i];
        device = range->nbytes > 0 ? cm_file_range_device(range) : -1;
    }
    return device;
}

/* Check that a file is long enough for its ranges, before anything is read from it. */
static cm_status
check_size_of(cm_file_job *file, uint32_t index)
{
    const cm_file_request *request = file->request;
    cm_file_state *state = &file->files[index];
    uint64_t size = request->writes ? UINT64_MAX : cm_file_size(request->fds[index]);
    if (!request->writes && size == UINT64_MAX && state->had_size) {
        /* The size of an empty file counts as unknown. As this file had a size before,
         * it has become empty. */
        size = 0;
    }
    state->had_size = size != UINT64_MAX;
    for (uint64_t i = state->first_range; i < state->end_range; i++) {
        const cm_file_range *range = &request->ranges[i];
        if (range->nbytes > 0
            && (range->nbytes > size || range->offset > size - range->nbytes)) {
            file->failure =
                (cm_file_failure){.at_end = true, .offset = size, .range_index = i};
            return cm_fail(CM_ESYSTEM, 0);
        }
    }
    return cm_ok();
}

static cm_status
check_sizes(cm_file_job *file)
{
    for (uint32_t i = 0; i < file->request->file_count; i++) {
        CM_TRY(check_size_of(file, i));
    }
    return cm_ok();
}

/* If the transfer failed because a file ended too early, find out where the file ends.
 * Several threads read at the same time, so the one that noticed the end first may have
 * read far behind it. So the system is asked for the file's size again. The place that
 * was found before is kept if the file is longer by now. */
static void
check_end_again(cm_file_job *file)
{
    if (file->failure.at_end) {
        cm_file_failure found = file->failure;
        uint32_t index = file->request->ranges[found.range_index].file;
        if (cm_is_ok(check_size_of(file, index))
            || file->failure.offset > found.offset) {
            file->failure = found;
        }
    }
}

void
cm_file_job_destroy(cm_file_job *file, cm_file_failure *failure)
{
    for (uint32_t i = 0; i < file->request->file_count; i++) {
        if (file->files[i].direct_fd >= 0) {
            (void)close(file->files[i].direct_fd);
        }
    }
    check_end_again(file);
    *failure = file->failure;
    free(file);
}

void
cm_file_job_drop(cm_file_job *file)
{
    if (file->save == NULL) {
        return;
    }
    cm_file_failure failure;
    cm_file_save *save = file->save;
    cm_file_job_destroy(file, &failure);
    cm_file_save_destroy(save);
}

/* Refuse ends that nobody reaches, and streams that are being captured. */
static cm_status
check_ends(cm_file_job *file)
{
    const cm_file_request *request = file->request;
    for (uint64_t i = 0; i < request->range_count; i++) {
        const cm_file_range *range = &request->ranges[i];
        int device = cm_file_range_device(range);
        bool at_host = device < 0 && range->host != NULL;
        if (range->nbytes == 0) {
            continue;
        }
        if (!at_host && (device < 0 || device >= CM_MAX_DEVICES)) {
            return cm_fail(CM_EINVALID, (uint64_t)(int64_t)device);
        }
        file->has_host_end = file->has_host_end || at_host;
    }
    for (int device = 0; device < CM_MAX_DEVICES; device++) {
        if (request->streams[device] != NULL) {
            CM_TRY(cm_stream_check_not_capturing(request->streams[device]));
        }
    }
    return cm_ok();
}

cm_status
cm_file_plan(cm_job *job)
{
    cm_file_job *file = job->file;
    int device = cm_file_first_device(file->request);
    file->job = job;
    CM_TRY(check_sizes(file));
    CM_TRY(check_ends(file));
    job->plan = (cm_plan){.row = file->nbytes > 0 ? &cm_routes[CM_ROUTE_FILE] : NULL,
                          .device = device,
                          .src_device = device,
                          .nbytes = file->nbytes,
                          .layout = {.run_nbytes = file->nbytes}};
    bool goes_past = file->request->direct == CM_FILE_DIRECT_ALWAYS;
    uint32_t writer_count =
        file->request->writes && !goes_past ? file->request->file_count : 0;
    cm_ring_policy_init_file(&job->plan, &job->tuning, CM_FILE_PAGE_NBYTES,
                             writer_count);
    return cm_ok();
}

/* -- the device's half of a chunk -------------------------------------------------------- */

/* Copy between the slot and strided memory of the device. The elements go by way of a
 * block of device memory, in which they are packed. */
static cm_status
copy_strided(cm_job *job, const cm_file_chunk *chunk, const cm_stream *stream)
{
    const cm_layout *layout = &chunk->layout;
    const cm_file_piece *piece = &chunk->pieces[0];
    cm_address here = (uintptr_t)chunk->memory + piece->at;
    cm_address block;
    CM_TRY(cm_job_take_block_on(job, chunk->device, &block));
    if (!job->file->request->writes) {
        CM_TRY(cm_job_copy_run(job, stream, block, here, piece->nbytes));
        return cm_job_copy_layout(job, stream, layout, piece->address, block);
    }
    CM_TRY(cm_job_copy_layout(job, stream, layout, block, piece->address));
    return cm_job_copy_run(job, stream, here, block, piece->nbytes);
}

static cm_status
copy_runs(cm_job *job, const cm_file_chunk *chunk, const cm_stream *stream)
{
    bool writes = job->file->request->writes;
    for (uint32_t i = 0; i < chunk->piece_count; i++) {
        const cm_file_piece *piece = &chunk->pieces[i];
        cm_address here = (uintptr_t)chunk->memory + piece->at;
        CM_TRY(cm_rt_copy_async(job->engine->rt, writes ? here : piece->address,
                                writes ? piece->address : here, piece->nbytes,
                                stream->handle));
    }
    return cm_ok();
}

/* Queue the device's half of a chunk. The chunk's device must be current. */
static cm_status
queue_chunk(cm_job *job, const cm_slot *s, const cm_file_chunk *chunk,
            const cm_stream *stream)
{
    cm_runtime *rt = job->engine->rt;
    /* If the slot's memory is ordinary, the runtime's call would wait for the stream,
     * and nobody could end that wait early. So this thread waits first. If the stream
     * is the job's own, the ring has waited for it already. */
    if (s->plain != NULL && stream != job->stream) {
        CM_TRY(cm_rt_event_record(rt, s->event, stream->handle));
        CM_TRY(cm_job_wait_event(job, chunk->device, s->event));
    }
    job->has_queued = true;
    CM_TRY(chunk->is_strided ? copy_strided(job, chunk, stream)
                             : copy_runs(job, chunk, stream));
    return cm_rt_event_record(rt, s->event, stream->handle);
}

static cm_file_chunk *
chunk_of(const cm_job *job, const cm_slot *s)
{
    return &job->file->chunks[s - job->ring->slots];
}

static cm_status
move_on_device(cm_job *job, cm_slot *s)
{
    const cm_file_chunk *chunk = chunk_of(job, s);
    if (s->skips_device) {
        return cm_ok();
    }
    cm_stream *stream;
    CM_TRY(cm_job_open_stream_on(job, chunk->device,
                                 job->file->request->streams[chunk->device], &stream));
    CM_TRY(cm_slot_set_device(job, s, chunk->device));
    return CM_ON_DEVICE(job->engine->rt, chunk->device,
                        queue_chunk(job, s, chunk, stream));
}

/* -- the file's half, and both halves together ------------------------------------------- */

static cm_status
move_at_file(cm_job *job, cm_slot *s)
{
    cm_file_post(chunk_of(job, s), &job->ring->group, &s->task);
    return cm_ok();
}

/* Check the user's memory before the host itself copies from it or to it. */
static cm_status
probe_host(const cm_file_chunk *chunk)
{
    bool writes = chunk->file->request->writes;
    cm_layout run = {.run_nbytes = chunk->nbytes - chunk->pieces[0].at};
    char *host = chunk->pieces[0].host;
    return cm_host_probe(chunk->is_strided ? &chunk->layout : &run,
                         writes ? CM_SRC : CM_DST, host, CM_PROBE_NBYTES);
}

/* Tell the ring what comes next: whether all chunks are cut, and whether the next one
 * needs page-locked memory. */
static void
find_next_chunk(cm_job *job)
{
    cm_file_job *file = job->file;
    job->ring->all_cut = !cm_file_find_next(file);
    job->ring->needs_host = !file->at_host;
}

static cm_status
cut_chunk(cm_job *job, cm_slot *s)
{
    cm_file_chunk *chunk = chunk_of(job, s);
    chunk->file = job->file;
    CM_TRY(cm_file_cut_next(job->file, chunk));
    find_next_chunk(job);
    s->skips_device = chunk->device < 0;
    s->piece = (cm_layout){.run_nbytes = 0};
    for (uint32_t i = 0; i < chunk->piece_count; i++) {
        s->piece.run_nbytes += chunk->pieces[i].nbytes;
    }
    chunk->memory = s->host == NULL ? NULL : cm_file_align(s->host);
    if (chunk->device < 0 && (chunk->is_strided || chunk->bounces)) {
        return probe_host(chunk);
    }
    return cm_ok();
}

/* If the transfer is long enough to fill all slots, make the pool allocate their memory
 * as one long segment, unless it has free memory already. Many threads populate such a
 * segment in the time in which one thread would populate a single slot. If there is no
 * memory, the ring makes do with fewer slots. */
static void
reserve_slots(const cm_job *job)
{
    /* No lock is needed: a pool that was set once stays until the engine is closed. */
    cm_pool *pool = job->engine->pinned_pool;
    uint64_t nbytes = job->plan.slot_count * job->plan.piece_nbytes;
    bool fills =
        job->file->nbytes >= job->plan.slot_count * job->tuning.file_chunk_nbytes;
    if (pool != NULL && job->ring->needs_host && fills) {
        cm_pool_reserve(pool, cm_least(nbytes, job->tuning.ring_nbytes));
    }
}

/* Begin the ring. A job that was suspended and now goes on has its ring already. */
static cm_status
begin_ring(cm_job *job)
{
    if (job->ring != NULL) {
        return cm_ok();
    }
    if (job->plan.device < 0) {
        CM_TRY(cm_job_begin(job)); /* a job with a device has begun already */
    }
    CM_TRY(cm_ring_create_for(job, cut_chunk));
    find_next_chunk(job);
    reserve_slots(job);
    return cm_ok();
}

cm_status
cm_job_copy_file(cm_job *job)
{
    static const cm_ring_way reads = {.host_first = true,
                                      .host_is_slow = true,
                                      .begin = move_at_file,
                                      .pass = move_on_device};
    static const cm_ring_way writes_one = {
        .host_is_slow = true, .begin = move_on_device, .pass = move_at_file};
    static const cm_ring_way writes_many = {.host_is_slow = true,
                                            .device_comes_first = true,
                                            .begin = move_on_device,
                                            .pass = move_at_file};
    const cm_file_request *request = job->file->request;
    CM_TRY(begin_ring(job));
    if (!request->writes) {
        return cm_ring_run(job, &reads, true);
    }
    CM_TRY(
        cm_ring_run(job, request->file_count > 1 ? &writes_many : &writes_one, true));
    return job->file->save == NULL ? cm_ok() : cm_file_save_place(job->file->save);
}
