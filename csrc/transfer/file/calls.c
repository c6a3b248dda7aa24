/* SPDX-License-Identifier: Apache-2.0 */
/* Makes the system calls of file transfers, which ask about the file, read it and write
 * it. The workers make the reads and writes, one part of a chunk at a time. After the
 * first failure they begin no further read or write. job.h tells what ranges, chunks
 * and pieces are. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/backoff.h"
#include "base/checked_math.h"
#include "base/crc32.h"
#include "base/machine.h"
#include "transfer/file/job.h"
#include "transfer/host/host_copy.h"

#if !defined(SYS_cachestat)
#    define SYS_cachestat 451 /* the number on every architecture, since Linux 6.5 */
#endif

enum { HELD_PAUSE_NS = 1000 * 1000 };

/* -- faults ------------------------------------------------------------------------- */

static cm_file_faults *
faults_of(const cm_file_job *file)
{
    cm_file_faults *faults = file->request->faults;
    return faults != NULL && faults->is_on ? faults : NULL;
}

/* Tell whether the next read or write may be made. Without the faults that a test can
 * ask for (file.h) it always may. A fault may also limit how much one call moves, and
 * then the function lowers `nbytes`. If the answer is false, errno is set: the caller
 * acts as if the read or write had failed with errno or, if errno is 0, had moved
 * nothing. */
static bool
may_call(const cm_file_job *file, bool is_direct, uint64_t *nbytes)
{
    cm_file_faults *faults = faults_of(file);
    if (faults == NULL) {
        return true;
    }
    uint64_t number = atomic_fetch_add(&faults->count, 1) + 1;
    atomic_fetch_add(&faults->direct_count, is_direct);
    while (faults->held != 0 && number >= faults->held
           && atomic_load(&faults->is_shut)) {
        cm_pause_until(cm_now_ns() + HELD_PAUSE_NS);
    }
    *nbytes = faults->most == 0 ? *nbytes : cm_least(*nbytes, faults->most);
    errno = faults->error;
    return faults->nth == 0 || number < faults->nth
           || (number > faults->nth && !faults->repeat);
}

/* -- what is asked of the system ---------------------------------------------------- */

/* A size of 0 counts as unknown, since that is what the kernel reports for files whose
 * contents it generates as they are read, such as those in /proc. */
uint64_t
cm_file_size(int fd)
{
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size <= 0) {
        return UINT64_MAX;
    }
    return (uint64_t)info.st_size;
}

/* The file is opened again by its descriptor. dup() would not do, as both descriptors
 * would share their flags. */
int
cm_file_open_direct(const cm_file_job *file, uint32_t index)
{
    char path[64];
    const cm_file_faults *faults = faults_of(file);
    if (faults != NULL && faults->no_direct) {
        return -1;
    }
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", file->request->fds[index]);
    int access = file->request->writes ? O_WRONLY : O_RDONLY;
    return open(path, access | O_DIRECT | O_CLOEXEC);
}

/* The arguments of cachestat(2). */
typedef struct cache_range {
    uint64_t offset;
    uint64_t nbytes;
} cache_range;

typedef struct cache_counts {
    uint64_t cached;
    uint64_t others[4];
} cache_counts;

/* True if the byte at `offset` can be read without waiting for the disk.
 * cm_file_is_cached() asks this about a few bytes if the system has no cachestat(2). */
static bool
is_byte_cached(int fd, uint64_t offset)
{
    char byte;
    struct iovec one = {&byte, 1};
    return preadv2(fd, &one, 1, (off_t)offset, RWF_NOWAIT) >= 0 || errno != EAGAIN;
}

bool
cm_file_is_cached(const cm_file_job *file, uint32_t index, uint64_t offset,
                  uint64_t nbytes)
{
    int fd = file->request->fds[index];
    cache_range range = {offset, nbytes};
    cache_counts counts;
    const cm_file_faults *faults = faults_of(file);
    if (faults != NULL && faults->is_cold) {
        return false;
    }
    if (syscall(SYS_cachestat, fd, &range, &counts, 0) == 0) {
        return counts.cached * 2 * cm_page_nbytes() >= nbytes;
    }
    return is_byte_cached(fd, offset) || is_byte_cached(fd, offset + nbytes / 2);
}

/* -- one part of a chunk ------------------------------------------------------------ */

/* True if the place of a new failure comes before the place of the failure that is
 * kept, in the order of the files and, within one file, of the offsets. */
static bool
comes_first(const cm_file_job *file, uint64_t offset, uint64_t range_index)
{
    const cm_file_range *ranges = file->request->ranges;
    uint32_t here = ranges[range_index].file;
    uint32_t kept = ranges[file->failure.range_index].file;
    return here != kept ? here < kept : offset < file->failure.offset;
}

/* Record a failure. The one nearest to the beginning of the first file is kept. */
static void
fail(cm_file_job *file, int error, uint64_t offset, uint64_t range_index)
{
    cm_mutex_lock(&file->lock);
    if (!cm_file_has_failed(file) || comes_first(file, offset, range_index)) {
        file->failure = (cm_file_failure){.error = error,
                                          .at_end = error == 0,
                                          .offset = offset,
                                          .range_index = range_index};
    }
    atomic_store(&file->job->lost_error, error != 0 ? error : ENODATA);
    cm_mutex_unlock(&file->lock);
}

/* Read or write `nbytes` at the beginning of a piece, and return what pread() or
 * pwrite() returns. */
static int64_t
call(const cm_file_job *file, bool is_direct, const cm_file_piece *p, uint64_t nbytes)
{
    bool writes = file->request->writes;
    uint32_t index = cm_file_of(file, p);
    int fd = is_direct ? file->files[index].direct_fd : file->request->fds[index];
    if (!may_call(file, is_direct, &nbytes)) {
        return errno == 0 ? 0 : -1;
    }
    return writes ? pwrite(fd, p->host, (size_t)nbytes, (off_t)p->offset)
                  : pread(fd, p->host, (size_t)nbytes, (off_t)p->offset);
}

/* Move the beginning of a piece past the `nbytes` that are done. */
static void
pass(cm_file_piece *p, uint64_t nbytes)
{
    p->host += nbytes;
    p->offset += nbytes;
    p->nbytes -= nbytes;
}

/* Move all bytes of a piece through the page cache. After a short read or write the
 * function goes on with the bytes that are left. Returns false if a call failed. */
static bool
move_run(cm_file_job *file, cm_file_piece p)
{
    while (p.nbytes > 0 && !cm_file_has_failed(file)) {
        int64_t moved = call(file, false, &p, p.nbytes);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved <= 0) {
            int error = errno;
            if (moved == 0) { /* when reading, this is the end of the file */
                error = file->request->writes ? EIO : 0;
            }
            fail(file, error, p.offset, p.range_index);
            return false;
        }
        pass(&p, (uint64_t)moved);
    }
    return p.nbytes == 0;
}

/* Move as much of the piece as possible past the page cache, and return the part of the
 * piece that is left. If the piece does not begin at a page of the file, all of it is
 * left. The function asks for `reach` bytes in all, which may be more than the piece
 * has, since its last page may be read whole. It reports no failure, since the failure
 * will occur again when the caller moves the rest through the page cache. */
static cm_file_piece
move_pages(cm_file_job *file, cm_file_piece p, uint64_t reach)
{
    atomic_bool *refused = &file->files[cm_file_of(file, &p)].direct_refused;
    while (p.nbytes > 0 && reach > 0 && !cm_file_has_failed(file)
           && p.offset % CM_FILE_PAGE_NBYTES == 0 && !atomic_load(refused)) {
        int64_t moved = call(file, true, &p, reach);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved <= 0) {
            if (moved < 0) {
                atomic_store(refused, true);
            }
            break;
        }
        reach -= (uint64_t)moved;
        pass(&p, cm_least((uint64_t)moved, p.nbytes));
    }
    return p;
}

/* Move all bytes of a piece, past the page cache where that is possible. Reads and
 * writes past the page cache move whole pages only. If `wide` is set, the memory is our
 * own and has room for the rest of the first page and of the last page, so both pages
 * are read whole. If `wide` is not set, an incomplete last page goes through the page
 * cache. If the piece begins within a page, then all of it goes through the cache. */
static bool
move_direct(cm_file_job *file, cm_file_piece p, bool wide)
{
    const uint64_t mask = CM_FILE_PAGE_NBYTES - 1;
    uint64_t before = wide ? p.offset & mask : 0;
    cm_file_piece rest = p;
    rest.host -= before;
    rest.offset -= before;
    rest.nbytes += before;
    rest = move_pages(file, rest, (rest.nbytes + (wide ? mask : 0)) & ~mask);
    return move_run(file, rest.offset < p.offset ? p : rest);
}

/* If the user's memory is a mapping of a file, its pages may be gone, and a copy to or
 * from such a page would raise a signal. So this function populates the pages before
 * the copy. If that fails, it records the failure with an error such as EFAULT, which
 * read() and write() also return for memory whose pages are gone. */
static bool
populate_user(cm_file_job *file, cm_file_piece p, const cm_layout *layout,
              const char *user)
{
    if (!file->request->ranges[p.range_index].is_file) {
        return true;
    }
    cm_side side = file->request->writes ? CM_SRC : CM_DST;
    cm_status status = cm_host_populate(layout, side, user);
    if (!cm_is_ok(status)) {
        fail(file, (int)status.arg, p.offset, p.range_index);
    }
    return cm_is_ok(status);
}

/* If the call makes checksums, add the bytes of a piece to the checksum of its range.
 * The caller is about to write these bytes. */
static void
add_to_checksum(const cm_file_job *file, const cm_file_piece *p)
{
    _Atomic uint32_t *checksums = file->request->checksums;
    if (checksums == NULL) {
        return;
    }
    const cm_file_range *range = &file->request->ranges[p->range_index];
    uint64_t left = range->offset + range->nbytes - (p->offset + p->nbytes);
    atomic_fetch_xor(&checksums[range->checksum_index],
                     cm_crc32_of_part(p->host, p->nbytes, left + range->nbytes_behind));
}

/* Move bytes between the file and the user's memory by way of memory of our own, which
 * is aligned as the file's pages are. `layout` describes the user's memory on one side,
 * and the packed bytes in our own memory on the other. */
static bool
bounce(const cm_file_chunk *chunk, cm_file_piece p, const cm_layout *layout)
{
    cm_file_job *file = chunk->file;
    bool reads = !file->request->writes;
    uint64_t before = p.offset % CM_FILE_PAGE_NBYTES;
    /* Reads bring in the first page and the last page whole, and the first page must
     * begin at an aligned address. For these reasons the memory has up to two pages
     * more than the bytes need. */
    void *own = malloc((size_t)(before + p.nbytes) + 2 * (size_t)CM_FILE_PAGE_NBYTES);
    if (own == NULL) {
        fail(file, ENOMEM, p.offset, p.range_index);
        return false;
    }
    char *user = p.host;
    p.host = cm_file_align(own) + before;
    if (!populate_user(file, p, layout, user)) {
        free(own);
        return false;
    }
    if (!reads) {
        cm_host_copy(layout, p.host, user, false);
        add_to_checksum(file, &p);
    }
    bool moved = chunk->is_direct ? move_direct(file, p, reads) : move_run(file, p);
    if (reads && moved) {
        cm_host_copy(layout, user, p.host, true);
    }
    free(own);
    return moved;
}

/* Move a part of strided host memory. */
static void
move_strided(const cm_file_chunk *chunk, cm_layout part)
{
    cm_file_piece p = chunk->pieces[0];
    int64_t *packed =
        chunk->file->request->writes ? &part.offset[CM_DST] : &part.offset[CM_SRC];
    p.nbytes = cm_layout_nbytes(&part);
    p.offset += (uint64_t)*packed;
    *packed = 0;
    (void)bounce(chunk, p, &part);
}

/* Move those bytes of a piece whose places in the chunk are within [begin, end).
 * Returns false if a call failed. */
static bool
move_piece(const cm_file_chunk *chunk, cm_file_piece p, uint64_t begin, uint64_t end)
{
    cm_file_job *file = chunk->file;
    bool in_place = p.host != NULL;
    uint64_t from = p.at > begin ? p.at : begin;
    uint64_t to = cm_least(p.at + p.nbytes, end);
    if (from >= to) {
        return true;
    }
    p.host = in_place ? p.host : chunk->memory + p.at;
    pass(&p, from - p.at);
    p.nbytes = to - from;
    cm_layout bytes = {.run_nbytes = p.nbytes};
    if (chunk->bounces) {
        return bounce(chunk, p, &bytes);
    }
    if (file->request->checksums != NULL) {
        if (in_place && !populate_user(file, p, &bytes, p.host)) {
            return false;
        }
        add_to_checksum(file, &p);
    }
    return chunk->is_direct ? move_direct(file, p, !in_place && !file->request->writes)
                            : move_run(file, p);
}

/* Move a part of a chunk. Some bytes of the part may belong to no piece, since pieces
 * are aligned as the file is and leave gaps between them. */
static void
move_part(const void *context, const cm_layout *part, void *dst CM_UNUSED,
          const void *src CM_UNUSED, bool wide_stores CM_UNUSED)
{
    const cm_file_chunk *chunk = context;
    if (chunk->device < 0 && chunk->is_strided) {
        move_strided(chunk, *part);
        return;
    }
    uint64_t begin = (uint64_t)part->offset[CM_DST];
    for (uint32_t i = 0; i < chunk->piece_count; i++) {
        if (!move_piece(chunk, chunk->pieces[i], begin, begin + part->run_nbytes)) {
            return;
        }
    }
}

/* If the bytes that the chunk will read do not seem to be in the page cache, announce
 * the reads to the system, so that it begins to fetch the bytes. */
static void
advise(cm_file_chunk *chunk)
{
    const cm_file_job *file = chunk->file;
    cm_file_faults *faults = faults_of(file);
    /* The kernel may fetch only the first bytes of a long run that is announced at
     * once, so each announcement is as long as one read. */
    uint64_t longest = file->job->tuning.file_part_nbytes;
    if (!chunk->is_cold || chunk->is_direct) {
        return;
    }
    for (uint32_t i = 0; i < chunk->piece_count; i++) {
        const cm_file_piece *piece = &chunk->pieces[i];
        for (uint64_t at = 0; at < piece->nbytes; at += longest) {
            uint64_t nbytes = cm_least(piece->nbytes - at, longest);
            if (faults != NULL) {
                atomic_fetch_add(&faults->advised_count, 1);
            }
            (void)posix_fadvise(file->request->fds[cm_file_of(file, piece)],
                                (off_t)(piece->offset + at), (off_t)nbytes,
                                POSIX_FADV_WILLNEED);
        }
    }
}

void
cm_file_post(cm_file_chunk *chunk, cm_task_group *group, cm_copy_task *task)
{
    const cm_file_job *file = chunk->file;
    cm_layout bytes = {.run_nbytes = chunk->nbytes};
    bool packs = chunk->device < 0 && chunk->is_strided;
    bool is_whole = file->request->writes && !chunk->is_direct && !packs;
    advise(chunk);
    group->part_nbytes = chunk->is_direct ? CM_FILE_DIRECT_PART_NBYTES
                                          : file->job->tuning.file_part_nbytes;
    group->crew = 0;
    if (is_whole) { /* file.h explains how many threads write a file, and why */
        uint32_t threads = file->request->checksums == NULL ? 1 : 2;
        group->part_nbytes = chunk->nbytes;
        group->crew = threads * file->request->file_count;
    }
    group->move = move_part;
    group->context = chunk;
    cm_task_group_post(group, task, packs ? &chunk->layout : &bytes, NULL, NULL,
                       CM_COPY_PLAIN_ALL);
}
