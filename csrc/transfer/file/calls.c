/* SPDX-License-Identifier: Apache-2.0 */
/* What file transfers ask of the system. */
#include "transfer/file/file.h"

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
