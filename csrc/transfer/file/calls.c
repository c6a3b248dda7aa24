/* SPDX-License-Identifier: Apache-2.0 */
/* What file transfers ask of the system; and the reading and writing, by whichever of
 * the workers: one part of a chunk at a time. The first failure stops the rest. */
#include "transfer/file/job.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#if !defined(SYS_cachestat)
#    define SYS_cachestat 451 /* on every architecture; Linux 6.5 */
#endif

enum { PAGE_NBYTES = 4096 };

static int64_t
system_read(void *context CM_UNUSED, int fd, void *to, uint64_t nbytes, uint64_t offset)
{
    return pread(fd, to, (size_t)nbytes, (off_t)offset);
}

static int64_t
system_write(void *context CM_UNUSED, int fd, const void *from, uint64_t nbytes,
             uint64_t offset)
{
    return pwrite(fd, from, (size_t)nbytes, (off_t)offset);
}

/* Files that the kernel makes up as they are read have the size 0. */
static uint64_t
system_size(void *context CM_UNUSED, int fd)
{
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size <= 0) {
        return UINT64_MAX;
    }
    return (uint64_t)info.st_size;
}

/* Not dup(): the flag belongs to what was opened. */
static int
system_open_direct(void *context CM_UNUSED, int fd, bool writes)
{
    char path[64];
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    return open(path, (writes ? O_WRONLY : O_RDONLY) | O_DIRECT | O_CLOEXEC);
}

static void
system_close(void *context CM_UNUSED, int fd)
{
    (void)close(fd);
}

/* As cachestat(2) has them. */
typedef struct cache_range {
    uint64_t offset;
    uint64_t nbytes;
} cache_range;

typedef struct cache_counts {
    uint64_t cached;
    uint64_t others[4];
} cache_counts;

/* Without cachestat(2): can a byte be had without waiting? */
static bool
is_byte_cached(int fd, uint64_t offset)
{
    char byte;
    struct iovec one = {&byte, 1};
    return preadv2(fd, &one, 1, (off_t)offset, RWF_NOWAIT) >= 0 || errno != EAGAIN;
}

static bool
system_is_cached(void *context CM_UNUSED, int fd, uint64_t offset, uint64_t nbytes)
{
    cache_range range = {offset, nbytes};
    cache_counts counts;
    if (syscall(SYS_cachestat, fd, &range, &counts, 0) == 0) {
        return counts.cached * 2 * PAGE_NBYTES >= nbytes;
    }
    return is_byte_cached(fd, offset) || is_byte_cached(fd, offset + nbytes / 2);
}

static void
system_advise(void *context CM_UNUSED, int fd, uint64_t offset, uint64_t nbytes)
{
    (void)posix_fadvise(fd, (off_t)offset, (off_t)nbytes, POSIX_FADV_WILLNEED);
}

const cm_file_calls cm_file_system_calls = {
    .read = system_read,
    .write = system_write,
    .size = system_size,
    .open_direct = system_open_direct,
    .close = system_close,
    .is_cached = system_is_cached,
    .advise = system_advise,
};

/* -- one part of a chunk ------------------------------------------------------------ */

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
 * bytes. Whatever is wrong is found again when the rest is moved the ordinary way. */
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

/* Tell the system what the chunk reads soon, if it has to be. */
static void
advise(cm_file_chunk *chunk)
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
cm_file_post(cm_file_chunk *chunk)
{
    cm_file_job *job = chunk->job;
    uint64_t part =
        chunk->is_direct ? CM_FILE_DIRECT_PART_NBYTES : job->tuning.file_part_nbytes;
    advise(chunk);
    cm_task_group_post_work(&job->group, &chunk->task, chunk->nbytes, part, move_part,
                            chunk);
}
