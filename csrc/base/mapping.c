/* SPDX-License-Identifier: Apache-2.0 */
#include "base/mapping.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* One line of the list. */
typedef struct mapping {
    uint64_t begin;
    uint64_t end;
    uint64_t offset; /* in the file */
    bool is_shared;
    unsigned device_major;
    unsigned device_minor;
    uint64_t inode;
    const char *path; /* within the line; "": none */
} mapping;

/* "7f…-7f… rw-s 00001000 fe:00 1234      /path" */
static bool
parse(char *line, mapping *out)
{
    char flags[5];
    int path = 0;
    int count =
        sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64 " %n",
               &out->begin, &out->end, flags, &out->offset, &out->device_major,
               &out->device_minor, &out->inode, &path);
    line[strcspn(line, "\n")] = '\0';
    out->is_shared = count == 7 && flags[3] == 's';
    out->path = path > 0 ? line + path : "";
    return count == 7;
}

/* The path may lead to another file by now, or may never have been one here. */
static int
open_same(const mapping *m)
{
    struct stat info;
    int fd = m->path[0] == '/' ? open(m->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK) : -1;
    if (fd < 0) {
        return -1;
    }
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_ino == m->inode
        && major(info.st_dev) == m->device_major
        && minor(info.st_dev) == m->device_minor) {
        return fd;
    }
    (void)close(fd);
    return -1;
}

/* Lines are in the order of their addresses; those of one file that follow on each
 * other are one piece of it. */
static int
find(FILE *list, uint64_t begin, uint64_t end, uint64_t *offset)
{
    char *line = NULL;
    size_t room = 0;
    uint64_t at = begin;
    mapping m;
    uint64_t inode = 0;
    int fd = -1;
    while (at < end && getline(&line, &room, list) > 0) {
        if (!parse(line, &m)) {
            break;
        }
        if (m.end <= at) {
            continue;
        }
        uint64_t here = m.offset + (at - m.begin);
        if (at == begin) {
            *offset = here;
            inode = m.inode;
            fd = m.begin <= at && m.is_shared ? open_same(&m) : -1;
        }
        if (fd < 0 || m.begin > at || !m.is_shared || m.inode != inode
            || here != *offset + (at - begin)) {
            break;
        }
        at = m.end;
    }
    free(line);
    if (at < end && fd >= 0) {
        (void)close(fd);
        fd = -1;
    }
    return fd;
}

int
cm_mapping_open(const void *begin, uint64_t nbytes, uint64_t *offset)
{
    FILE *list = fopen("/proc/self/maps", "re");
    if (list == NULL) {
        return -1;
    }
    uint64_t first = (uintptr_t)begin;
    int fd = find(list, first, first + nbytes, offset);
    (void)fclose(list);
    return fd;
}
