/* SPDX-License-Identifier: Apache-2.0 */
/* The calls that read and write, by whichever of the workers: one part of a
 * chunk at a time. The first failure stops the rest. */
#include <errno.h>

#include "transfer/file/job.h"

/* The one nearest to the file's beginning is told. */
static void
fail(cm_file_job *job, int error, uint64_t offset, uint64_t range_index)
{
    cm_mutex_lock(&job->lock);
    if (!atomic_load(&job->failed) || offset < job->failure.offset) {
        job->failure = (cm_file_failure){.error = error,
                                         .at_end = error == 0,
                                         .offset = offset,
                                         .range_index = range_index};
    }
    atomic_store(&job->failed, true);
    cm_mutex_unlock(&job->lock);
}

static int64_t
call(const cm_file_job *job, int fd, char *memory, uint64_t nbytes, uint64_t offset)
{
    const cm_file_calls *calls = job->calls;
    return job->request->writes
               ? calls->write(calls->context, fd, memory, nbytes, offset)
               : calls->read(calls->context, fd, memory, nbytes, offset);
}

/* A run of the file. */
typedef struct run {
    char *memory;
    uint64_t nbytes;
    uint64_t offset;
    uint64_t range_index;
} run;

static void
pass(run *r, uint64_t nbytes)
{
    r->memory += nbytes;
    r->offset += nbytes;
    r->nbytes -= nbytes;
}

/* Short answers are asked for the rest. False: it failed. */
static bool
move_run(cm_file_job *job, run r)
{
    while (r.nbytes > 0 && !atomic_load(&job->failed)) {
        int64_t moved = call(job, job->request->fd, r.memory, r.nbytes, r.offset);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved <= 0) {
            int error = moved < 0 ? errno : job->request->writes ? EIO : 0;
            fail(job, error, r.offset, r.range_index);
            return false;
        }
        pass(&r, (uint64_t)moved);
    }
    return r.nbytes == 0;
}

static uint64_t
least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* As much as can be had from the beginning of a page on, asking for up to `reach`
 * bytes. Whatever is wrong is found again by who moves the rest the ordinary way. */
static run
move_pages(cm_file_job *job, run r, uint64_t reach)
{
    while (r.nbytes > 0 && !atomic_load(&job->failed)
           && r.offset % CM_FILE_PAGE_NBYTES == 0
           && !atomic_load(&job->direct_refused)) {
        int64_t moved = call(job, job->direct_fd, r.memory, reach, r.offset);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved <= 0) {
            if (moved < 0) {
                atomic_store(&job->direct_refused, true);
            }
            break;
        }
        reach -= (uint64_t)moved;
        pass(&r, least((uint64_t)moved, r.nbytes));
    }
    return r;
}

/* Past the page cache. Pages that are not whole are read whole where the memory is our
 * own (`wide`), else moved the ordinary way. */
static bool
move_direct(cm_file_job *job, run r, bool wide)
{
    const uint64_t mask = CM_FILE_PAGE_NBYTES - 1;
    uint64_t before = r.offset & mask;
    if (wide) {
        run whole = r;
        whole.memory -= before;
        whole.offset -= before;
        whole.nbytes += before;
        whole = move_pages(job, whole, (whole.nbytes + mask) & ~mask);
        return move_run(job, whole.offset < r.offset ? r : whole);
    }
    run part = r;
    part.nbytes = least(r.nbytes, (0 - r.offset) & mask);
    pass(&r, part.nbytes);
    if (!move_run(job, part)) {
        return false;
    }
    part = r;
    part.nbytes = r.nbytes & ~mask;
    pass(&r, part.nbytes);
    return move_run(job, move_pages(job, part, part.nbytes)) && move_run(job, r);
}

/* Bytes [begin, begin + nbytes) of the chunk, of which some belong to no piece. */
static void
move_part(void *argument, uint64_t begin, uint64_t nbytes)
{
    cm_file_chunk *chunk = argument;
    cm_file_job *job = chunk->job;
    uint64_t end = begin + nbytes;
    for (uint32_t i = 0; i < chunk->piece_count; i++) {
        const cm_file_piece *piece = &chunk->pieces[i];
        uint64_t from = piece->at > begin ? piece->at : begin;
        uint64_t to = least(piece->at + piece->nbytes, end);
        if (from >= to) {
            continue;
        }
        bool in_place = piece->host != NULL;
        run r = {.memory = in_place ? piece->host + (from - piece->at)
                                    : cm_file_chunk_memory(chunk) + from,
                 .nbytes = to - from,
                 .offset = piece->offset + (from - piece->at),
                 .range_index = piece->range_index};
        bool wide = !in_place && !job->request->writes;
        if (!(chunk->is_direct ? move_direct(job, r, wide) : move_run(job, r))) {
            return;
        }
    }
}

void
cm_file_post(cm_file_chunk *chunk)
{
    cm_file_job *job = chunk->job;
    uint64_t part =
        chunk->is_direct ? CM_FILE_DIRECT_PART_NBYTES : job->tuning.file_part_nbytes;
    cm_file_advise(chunk);
    cm_task_group_post_work(&job->group, &chunk->task, chunk->nbytes, part, move_part,
                            chunk);
}
