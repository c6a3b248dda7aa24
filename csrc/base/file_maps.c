/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the mappings of a file by asking the kernel, or by reading the text of
 * /proc/self/maps. */
#include "base/file_maps.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/machine.h"

enum {
    TEXT_NBYTES = 64 << 10,
    /* At most this many questions are asked one by one. Reading the text costs as much
     * as about a hundred questions. */
    QUESTIONS_MAX = 64,
};

/* One mapping, as a line of the kernel's list or one of its answers describes it. */
typedef struct map_line {
    cm_file_map map;
    unsigned device_major;
    unsigned device_minor;
    uint64_t inode;
} map_line;

/* -- the kernel's answers --------------------------------------------------------------- */

/* The argument of PROCMAP_QUERY of Linux 6.11, written out so that building does not
 * need its headers. Later kernels may add members, so the first member tells the kernel
 * the size of this version. */
typedef struct map_question {
    uint64_t size;
    uint64_t flags;
    uint64_t address;
    uint64_t begin;
    uint64_t end;
    uint64_t rights;
    uint64_t page_nbytes;
    uint64_t offset;
    uint64_t inode;
    uint32_t device_major;
    uint32_t device_minor;
    uint32_t name_nbytes; /* 0 since neither name nor build id is wanted */
    uint32_t build_id_nbytes;
    uint64_t name;
    uint64_t build_id;
} map_question;

_Static_assert(sizeof(map_question) == 104, "as <linux/fs.h> has it");

#define ASK_FOR_MAP _IOWR('f', 17, map_question)
#define COVERING_OR_NEXT 0x10
#define FILE_BACKED 0x20

/* What an answer of the kernel can say. */
typedef enum map_answer { MAP_FOUND, MAP_NONE, MAP_UNKNOWN } map_answer;

/* Find the first mapping of a file at `address` or above. Returns MAP_UNKNOWN if this
 * kernel, or a sandbox that emulates one, does not answer. */
static map_answer
ask_for_map(int list, uint64_t address, map_line *out)
{
    map_question question = {.size = sizeof(question),
                             .flags = COVERING_OR_NEXT | FILE_BACKED,
                             .address = address};
    if (ioctl(list, ASK_FOR_MAP, &question) != 0) {
        return errno == ENOENT ? MAP_NONE : MAP_UNKNOWN;
    }
    *out = (map_line){
        .map = {.memory = {question.begin, question.end}, .offset = question.offset},
        .device_major = question.device_major,
        .device_minor = question.device_minor,
        .inode = question.inode};
    return MAP_FOUND;
}

/* Append all mappings of files that lie in a span to `lines`, which has room for
 * QUESTIONS_MAX. Returns false if the kernel does not answer, or if there are too many
 * to ask for. */
static bool
ask_for_span(int list, cm_file_span span, map_line *lines, size_t *count)
{
    uint64_t at = span.begin;
    while (at < span.end) {
        map_line line;
        map_answer answer = ask_for_map(list, at, &line);
        if (answer == MAP_UNKNOWN || *count == QUESTIONS_MAX) {
            return false;
        }
        if (answer == MAP_NONE || line.map.memory.begin >= span.end) {
            return true;
        }
        lines[(*count)++] = line;
        at = line.map.memory.end;
    }
    return true;
}

/* -- the kernel's list ------------------------------------------------------------------ */

/* Read the whole list as one text, which the caller frees; a NULL text means that there
 * is no list. */
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

/* Read the number at `*text` and move `*text` behind it and behind the character that
 * follows. */
static uint64_t
take_number(const char **text, int base)
{
    char *end;
    uint64_t number = strtoull(*text, &end, base);
    *text = *end == '\0' ? end : end + 1;
    return number;
}

/* Read the line at `text`. Returns where the next line begins, or NULL at the end. A
 * line is "begin-end rights offset major:minor inode  name". */
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

/* Map a page of the file, to find out which device and inode the list has for the file.
 * The functions below call these two the file's name. Returns NULL if that fails. */
static void *
map_again(int fd)
{
    char path[64];
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    /* The descriptor may be open for writing only, but a mapping needs the right to
     * read. */
    int own = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (own < 0) {
        return NULL;
    }
    void *page = mmap(NULL, cm_page_nbytes(), PROT_NONE, MAP_SHARED, own, 0);
    (void)close(own);
    return page == MAP_FAILED ? NULL : page;
}

static bool
is_same_file(const map_line *a, const map_line *b)
{
    return a->inode == b->inode && a->device_major == b->device_major
           && a->device_minor == b->device_minor;
}

/* True if a mapping is the page that map_again() made. */
static bool
is_own(const map_line *line, const void *page)
{
    uint64_t place = (uintptr_t)page;
    return line->map.memory.begin == place
           && line->map.memory.end == place + cm_page_nbytes();
}

/* Return the name (device and inode) that stat() gives the file. It differs from the
 * name in the list only on overlay file systems. */
static map_line
name_of_stat(const struct stat *info)
{
    return (map_line){.device_major = major(info->st_dev),
                      .device_minor = minor(info->st_dev),
                      .inode = info->st_ino};
}

/* Return the name that the file has in the list. It is read from the line of the
 * mapping at `page`. If there is no such line, it is the name that stat() gives. */
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
    return name_of_stat(info);
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

/* Collect all lines of the file `name`, except that of our own page. */
static cm_status
collect(const char *text, const void *page, map_line name, cm_file_maps *out)
{
    map_line line;
    while ((text = read_line(text, &line)) != NULL) {
        if (is_same_file(&line, &name) && !is_own(&line, page)) {
            CM_TRY(add_map(out, line.map));
        }
    }
    return cm_ok();
}

/* True if the file can have mappings that matter. */
static bool
may_have_maps(int fd, struct stat *info)
{
    return fstat(fd, info) == 0 && S_ISREG(info->st_mode) && info->st_size > 0;
}

/* End a reading, whose outcome is `status`: unmap our own page, if there is one, and
 * free the list if the reading failed. */
static cm_status
finish(cm_file_maps *out, void *page, cm_status status)
{
    if (page != NULL) {
        (void)munmap(page, cm_page_nbytes());
    }
    if (!cm_is_ok(status)) {
        cm_file_maps_fini(out);
    }
    return status;
}

cm_status
cm_file_maps_read_text(int fd, cm_file_maps *out)
{
    *out = (cm_file_maps){.count = 0};
    struct stat info;
    if (!may_have_maps(fd, &info)) {
        return cm_ok();
    }
    void *page = map_again(fd);
    char *text;
    cm_status status = read_list(&text);
    if (cm_is_ok(status) && text != NULL) {
        status = collect(text, page, find_name(text, page, &info), out);
        free(text);
    }
    return finish(out, page, status);
}

/* Keep those of the `count` lines that show the file. Usually there is no line at all,
 * and then the file need not be mapped to find its name. */
static cm_status
choose(int list, int fd, const struct stat *info, const map_line *lines, size_t count,
       cm_file_maps *out)
{
    if (count == 0) {
        return cm_ok();
    }
    void *page = map_again(fd);
    map_line name;
    map_answer answer =
        page == NULL ? MAP_NONE : ask_for_map(list, (uintptr_t)page, &name);
    if (answer != MAP_FOUND || name.map.memory.begin > (uintptr_t)page) {
        name = name_of_stat(info);
    }
    cm_status status = cm_ok();
    for (size_t i = 0; i < count && cm_is_ok(status); i++) {
        if (is_same_file(&lines[i], &name)) {
            status = add_map(out, lines[i].map);
        }
    }
    return finish(out, page, status);
}

cm_status
cm_file_maps_read(int fd, const cm_file_span *memory, size_t count, cm_file_maps *out)
{
    *out = (cm_file_maps){.count = 0};
    struct stat info;
    if (!may_have_maps(fd, &info)) {
        return cm_ok();
    }
    if (count > QUESTIONS_MAX) {
        return cm_file_maps_read_text(fd, out);
    }
    int list = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (list < 0) {
        return cm_ok();
    }
    map_line lines[QUESTIONS_MAX];
    size_t line_count = 0;
    bool is_known = true;
    for (size_t i = 0; i < count && is_known; i++) {
        is_known = ask_for_span(list, memory[i], lines, &line_count);
    }
    cm_status status = is_known ? choose(list, fd, &info, lines, line_count, out)
                                : cm_file_maps_read_text(fd, out);
    (void)close(list);
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

/* -- two maps of one file ------------------------------------------------------------- */

/* Lines that lie in one of two spans. Owns its items. */
typedef struct map_lines {
    map_line *items;
    size_t count;
} map_lines;

static cm_status
add_line(map_lines *lines, const map_line *line)
{
    size_t room = (lines->count + 1) * sizeof(*line);
    map_line *longer = realloc(lines->items, room);
    CM_TRY(cm_allocated(longer != NULL, room));
    lines->items = longer;
    longer[lines->count++] = *line;
    return cm_ok();
}

static bool
lies_in(const map_line *line, cm_file_span span)
{
    return line->inode != 0 && line->map.memory.begin < span.end
           && span.begin < line->map.memory.end;
}

/* Collect all lines of files in either span from the text. */
static cm_status
collect_both(cm_file_span a, cm_file_span b, map_lines *out)
{
    char *text;
    cm_status status = read_list(&text);
    const char *at = text;
    map_line line;
    while (cm_is_ok(status) && at != NULL && (at = read_line(at, &line)) != NULL) {
        if (lies_in(&line, a) || lies_in(&line, b)) {
            status = add_line(out, &line);
        }
    }
    free(text);
    return status;
}

/* Collect all lines of files in either span by asking the kernel, or from the text if
 * it does not answer. */
static cm_status
find_both(cm_file_span a, cm_file_span b, map_lines *out)
{
    map_line lines[QUESTIONS_MAX];
    size_t count = 0;
    int list = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (list < 0) {
        return cm_ok();
    }
    bool is_known =
        ask_for_span(list, a, lines, &count) && ask_for_span(list, b, lines, &count);
    (void)close(list);
    if (!is_known) {
        return collect_both(a, b, out);
    }
    for (size_t i = 0; i < count; i++) {
        CM_TRY(add_line(out, &lines[i]));
    }
    return cm_ok();
}

/* Return the bytes of the file that a mapping shows within the span. */
static cm_file_span
shown_in(const map_line *line, cm_file_span span)
{
    uint64_t begin = line->map.memory.begin;
    uint64_t end = line->map.memory.end;
    uint64_t from = span.begin > begin ? span.begin : begin;
    uint64_t to = span.end < end ? span.end : end;
    return (cm_file_span){line->map.offset + (from - begin),
                          line->map.offset + (to - begin)};
}

/* True if mapping `x` shows a byte in span `a` that mapping `y` shows in `b`. If both
 * are the same mapping this is false. The spans then share a byte only if their
 * addresses overlap, which the caller checks itself. */
static bool
lines_meet(const map_line *x, cm_file_span a, const map_line *y, cm_file_span b)
{
    if (!lies_in(x, a) || !lies_in(y, b) || !is_same_file(x, y)
        || x->map.memory.begin == y->map.memory.begin) {
        return false;
    }
    cm_file_span in_a = shown_in(x, a);
    cm_file_span in_b = shown_in(y, b);
    return in_a.begin < in_b.end && in_b.begin < in_a.end;
}

cm_status
cm_file_maps_meet(cm_file_span a, cm_file_span b, bool *out)
{
    map_lines lines = {.count = 0};
    cm_status status = find_both(a, b, &lines);
    *out = false;
    for (size_t i = 0; i < lines.count && cm_is_ok(status); i++) {
        for (size_t k = 0; k < lines.count && !*out; k++) {
            *out = lines_meet(&lines.items[i], a, &lines.items[k], b);
        }
    }
    free(lines.items);
    return status;
}
