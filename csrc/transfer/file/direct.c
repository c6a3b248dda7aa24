/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a file is read through the page cache: what is in it is, and so is what is
 * short; much that is not goes past it, where the file system lets us, and else is
 * announced. */
#include "transfer/file/job.h"

enum {
    DIRECT_LEAST_RUN = 256 << 10,
    STRETCH_NBYTES = 64 << 20, /* asked about at a time, */
    PROBE_COUNT = 4,           /* by so many probes of */
    PROBE_NBYTES = 64 << 10,
    SHORT_COUNT = 16, /* so many short ranges are taken to be like the first of them */
};

static bool
probe_stretch(const cm_file_job *job, uint64_t offset, uint64_t nbytes)
{
    const cm_file_calls *calls = job->calls;
    int fd = job->request->fd;
    int cached = 0;
    nbytes = nbytes < STRETCH_NBYTES ? nbytes : STRETCH_NBYTES;
    if (nbytes <= (uint64_t)PROBE_COUNT * PROBE_NBYTES) {
        return calls->is_cached(calls->context, fd, offset, nbytes);
    }
    uint64_t step = nbytes / PROBE_COUNT;
    for (uint64_t i = 0; i < PROBE_COUNT; i++) {
        cached += calls->is_cached(calls->context, fd, offset + i * step, PROBE_NBYTES);
    }
    return cached * 2 >= PROBE_COUNT;
}

/* Asked once for each stretch of a long range, and for some of the short ones. */
static bool
is_cold(cm_file_job *job, uint64_t offset, uint64_t nbytes)
{
    cm_file_cursor *cursor = &job->cursor;
    bool is_short = nbytes < DIRECT_LEAST_RUN && cursor->done == 0;
    uint64_t stretch = is_short ? cursor->range / SHORT_COUNT : offset / STRETCH_NBYTES;
    stretch = 1 + (stretch << 1 | is_short);
    if (cursor->stretch != stretch) {
        cursor->stretch = stretch;
        cursor->is_cold = !probe_stretch(job, offset, nbytes);
    }
    return cursor->is_cold;
}

static bool
can_go_direct(cm_file_job *job)
{
    const cm_file_calls *calls = job->calls;
    if (!job->was_opened) {
        const cm_file_request *request = job->request;
        job->was_opened = true;
        job->direct_fd =
            calls->open_direct(calls->context, request->fd, request->writes);
    }
    return job->direct_fd >= 0 && !atomic_load(&job->direct_refused);
}

void
cm_file_look_at_cache(cm_file_job *job, cm_file_chunk *chunk, uint64_t offset,
                      uint64_t nbytes)
{
    const cm_file_request *request = job->request;
    bool pays = request->direct == CM_FILE_DIRECT_ALWAYS;
    chunk->is_cold = false;
    if (!request->writes && !pays) {
        chunk->is_cold = is_cold(job, offset, nbytes);
        pays = chunk->is_cold && request->direct == CM_FILE_DIRECT_AUTO
               && job->nbytes >= job->tuning.direct_nbytes
               && nbytes >= DIRECT_LEAST_RUN;
    }
    chunk->is_direct = pays && can_go_direct(job);
}

void
cm_file_advise(cm_file_chunk *chunk)
{
    cm_file_job *job = chunk->job;
    const cm_file_calls *calls = job->calls;
    if (!chunk->is_cold || chunk->is_direct) {
        return;
    }
    /* The kernel takes a request of bounded length only. */
    for (uint32_t i = 0; i < chunk->piece_count; i++) {
        const cm_file_piece *piece = &chunk->pieces[i];
        for (uint64_t at = 0; at < piece->nbytes; at += job->tuning.file_part_nbytes) {
            uint64_t left = piece->nbytes - at;
            calls->advise(calls->context, job->request->fd, piece->offset + at,
                          left < job->tuning.file_part_nbytes
                              ? left
                              : job->tuning.file_part_nbytes);
        }
    }
}

void
cm_file_close_direct(cm_file_job *job)
{
    if (job->was_opened && job->direct_fd >= 0) {
        job->calls->close(job->calls->context, job->direct_fd);
    }
}
