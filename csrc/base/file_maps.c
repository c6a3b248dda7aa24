/* SPDX-License-Identifier: Apache-2.0 */
#include "base/file_maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/machine.h"

enum { TEXT_NBYTES = 64 << 10 };

/* -- the kernel's list ------------------------------------------------------------------ */

/* One line of the list. */
typedef struct map_line {
    cm_file_map map;
    unsigned device_major;
    unsigned device_minor;
    uint64_t inode;
} map_line;

/* All of the list as one text, which the caller frees; NULL text: there is no list. */
static cm_status
read_list(char **out)
{
    *out = NULL;
    int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return cm_ok();
    }
    size_t room = TEXT_NBYTES;
    size_t used = 0;
    char *text = malloc(room);
    while (text != NULL) {
        ssize_t got = read(fd, text + used, room - used - 1);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            text[used] = '\0';
            break;
        }
        used += (size_t)got;
        if (used + 1 == room) {
            room *= 2;
            char *longer = realloc(text, room);
            if (longer == NULL) {
                free(text);
            }
            text = longer;
        }
    }
    (void)close(fd);
    *out = text;
    return cm_allocated(text != NULL, room);
}

/* The number at `*text`, which then is behind it and the sign that follows. */
static uint64_t
take_number(const char **text, int base)
{
    char *end;
    uint64_t number = strtoull(*text, &end, base);
    *text = *end == '\0' ? end : end + 1;
    return number;
}

/* Read the line at `text` and return where the next one begins; NULL at the end. A line
 * is "begin-end rights offset major:minor inode  name". */
static const char *
read_line(const char *text, map_line *line)
{
    *line = (map_line){.inode = 0};
    if (*text == '\0') {
        return NULL;
    }
    const char *end = strchr(text, '\n');
    line->map.memory.begin = take_number(&text, 16);
    line->map.memory.end = take_number(&text, 16);
    text = strchr(text, ' ');
    if (text == NULL || end == NULL) {
        *line = (map_line){.inode = 0};
        return NULL;
    }
    line->map.offset = take_number(&text, 16);
    line->device_major = (unsigned)take_number(&text, 16);
    line->device_minor = (unsigned)take_number(&text, 16);
    line->inode = take_number(&text, 10);
    return end + 1;
}

/* -- the maps of one file --------------------------------------------------------------- */

/* A page of the file, mapped to see what the list calls it; NULL where it cannot be. */
static void *
map_again(int fd)
{
    char path[64];
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    int own = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* mapping asks to read */
    if (own < 0) {
        return NULL;
    }
    void *page = mmap(NULL, cm_page_nbytes(), PROT_NONE, MAP_SHARED, own, 0);
    (void)close(own);
    return page == MAP_FAILED ? NULL : page;
}

/* What the list calls the file: what stands beside the page that is mapped at `page`,
 * else what stat() says, which differs on overlay file systems alone. */
static map_line
find_name(const char *text, const void *page, const struct stat *info)
{
    map_line line;
    uint64_t place = (uintptr_t)page;
    while (page != NULL && (text = read_line(text, &line)) != NULL) {
        if (line.map.memory.begin <= place && place < line.map.memory.end) {
            return line;
        }
    }
    return (map_line){.device_major = major(info->st_dev),
                      .device_minor = minor(info->st_dev),
                      .inode = info->st_ino};
}

static cm_status
add_map(cm_file_maps *maps, cm_file_map map)
{
    size_t room = (maps->count + 1) * sizeof(map);
    cm_file_map *longer = realloc(maps->items, room);
    CM_TRY(cm_allocated(longer != NULL, room));
    maps->items = longer;
    longer[maps->count++] = map;
    return cm_ok();
}

/* All lines of the file `name` but for the page of our own. */
static cm_status
collect(const char *text, const void *page, map_line name, cm_file_maps *out)
{
    map_line line;
    uint64_t place = (uintptr_t)page;
    while ((text = read_line(text, &line)) != NULL) {
        bool is_it = line.inode == name.inode && line.device_major == name.device_major
                     && line.device_minor == name.device_minor;
        bool is_own = line.map.memory.begin == place
                      && line.map.memory.end == place + cm_page_nbytes();
        if (is_it && !is_own) {
            CM_TRY(add_map(out, line.map));
        }
    }
    return cm_ok();
}

cm_status
cm_file_maps_read(int fd, cm_file_maps *out)
{
    *out = (cm_file_maps){.count = 0};
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size == 0) {
        return cm_ok();
    }
    void *page = map_again(fd);
    char *text;
    cm_status status = read_list(&text);
    if (cm_is_ok(status) && text != NULL) {
        status = collect(text, page, find_name(text, page, &info), out);
        free(text);
    }
    if (page != NULL) {
        (void)munmap(page, cm_page_nbytes());
    }
    if (!cm_is_ok(status)) {
        cm_file_maps_fini(out);
    }
    return status;
}

void
cm_file_maps_fini(cm_file_maps *maps)
{
    free(maps->items);
    *maps = (cm_file_maps){.count = 0};
}

bool
cm_file_maps_show(const cm_file_maps *maps, cm_file_span memory, cm_file_span file)
{
    for (size_t i = 0; i < maps->count; i++) {
        const cm_file_map *map = &maps->items[i];
        uint64_t begin = memory.begin;
        uint64_t end = memory.end;
        if (begin < map->memory.begin) {
            begin = map->memory.begin;
        }
        if (end > map->memory.end) {
            end = map->memory.end;
        }
        if (begin >= end) {
            continue;
        }
        uint64_t first = begin - map->memory.begin + map->offset;
        if (first < file.end && file.begin < first + (end - begin)) {
            return true;
        }
    }
    return false;
}
