/* SPDX-License-Identifier: Apache-2.0 */
/* What file transfers ask of the system. */
#include "transfer/file.h"

#include <sys/stat.h>
#include <unistd.h>

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

const cm_file_calls cm_file_system_calls = {
    .read = system_read,
    .write = system_write,
    .size = system_size,
};
