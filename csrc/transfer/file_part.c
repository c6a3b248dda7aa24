/* SPDX-License-Identifier: Apache-2.0 */
/* The calls that read and write, by whichever thread of the crew: one part of a chunk
 * at a time. The first failure stops the rest. */
#include <errno.h>

#include "transfer/file_job.h"

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
call(const cm_file_job *job, char *memory, uint64_t nbytes, uint64_t offset)
{
    const cm_file_calls *calls = job->calls;
    int fd = job->request->fd;
    return job->request->writes
               ? calls->write(calls->context, fd, memory, nbytes, offset)
               : calls->read(calls->context, fd, memory, nbytes, offset);
}

/* Short answers are asked for the rest. False: it failed. */
static bool
move_run(cm_file_job *job, char *memory, uint64_t nbytes, uint64_t offset,
         uint64_t range_index)
{
    while (nbytes > 0 && !atomic_load(&job->failed)) {
        int64_t moved = call(job, memory, nbytes, offset);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved <= 0) {
            int error = moved < 0 ? errno : job->request->writes ? EIO : 0;
            fail(job, error, offset, range_index);
            return false;
        }
        memory += moved;
        offset += (uint64_t)moved;
        nbytes -= (uint64_t)moved;
    }
    return nbytes == 0;
}

static uint64_t
least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Bytes [begin, begin + nbytes) of the chunk, of which some belong to no piece. */
static void
move_part(void *argument, uint64_t begin, uint64_t nbytes)
{
    cm_file_chunk *chunk = argument;
    uint64_t end = begin + nbytes;
    for (uint32_t i = 0; i < chunk->piece_count; i++) {
        const cm_file_piece *piece = &chunk->pieces[i];
        uint64_t from = piece->at > begin ? piece->at : begin;
        uint64_t to = least(piece->at + piece->nbytes, end);
        if (from >= to) {
            continue;
        }
        char *memory = piece->host != NULL ? piece->host + (from - piece->at)
                                           : cm_file_chunk_memory(chunk) + from;
        if (!move_run(chunk->job, memory, to - from, piece->offset + (from - piece->at),
                      piece->range_index)) {
            return;
        }
    }
}

void
cm_file_post(cm_file_chunk *chunk)
{
    cm_gang_post_work(&chunk->job->gang, &chunk->load, chunk->nbytes,
                      CM_FILE_PART_NBYTES, move_part, chunk);
}
