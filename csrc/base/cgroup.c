/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel says in /proc/self/cgroup which group of each hierarchy the process is in,
 * and in /proc/self/mountinfo which part of a hierarchy is mounted where: in a
 * container often the process's own group alone. */
#include "base/cgroup.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text_file.h"

/* What one line of mountinfo says. */
typedef struct mount {
    const char *root; /* which group of the hierarchy is mounted */
    const char *point;
    const char *type;
    const char *options; /* of the file system: the controllers are among them */
} mount;

/* True when `name` is one of the words between commas. */
static bool
has_word(const char *words, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = words; at != NULL; at = strchr(at, ',')) {
        at += *at == ',' ? 1 : 0;
        if (strncmp(at, name, length) == 0
            && (at[length] == ',' || at[length] == '\0')) {
            return true;
        }
    }
    return false;
}

/* Undo \040 and the like in place. */
static void
unescape(char *text)
{
    char *to = text;
    for (const char *from = text; *from != '\0'; to++) {
        unsigned code = 0;
        int digits = 0;
        if (*from == '\\') {
            for (; digits < 3 && from[1 + digits] >= '0' && from[1 + digits] <= '7';
                 digits++) {
                code = code * 8 + (unsigned)(from[1 + digits] - '0');
            }
        }
        *to = digits == 3 ? (char)code : *from;
        from += digits == 3 ? 4 : 1;
    }
    *to = '\0';
}

/* "36 35 98:0 /root /point rw,noatime shared:1 - type source options" */
static bool
parse_mount(char *line, mount *out)
{
    char *rest = line;
    char *words[5];
    for (int i = 0; i < 5; i++) {
        words[i] = strsep(&rest, " ");
    }
    char *tail = rest != NULL ? strstr(rest, " - ") : NULL;
    if (tail == NULL) {
        return false;
    }
    tail += 3;
    out->type = strsep(&tail, " ");
    (void)strsep(&tail, " ");
    if (tail == NULL) {
        return false;
    }
    tail[strcspn(tail, "\n")] = '\0';
    unescape(words[3]);
    unescape(words[4]);
    out->root = words[3];
    out->point = words[4];
    out->options = tail;
    return true;
}

/* The group of the process in one hierarchy, as /proc/self/cgroup names it: within
 * `text`, not ended by a zero. */
static bool
find_own(const char *text, bool v2, const char *controller, const char **out,
         int *out_length)
{
    for (const char *line = text; line != NULL && *line != '\0';) {
        const char *end = line + strcspn(line, "\n");
        char words[256];
        const char *first = memchr(line, ':', (size_t)(end - line));
        const char *second =
            first != NULL ? memchr(first + 1, ':', (size_t)(end - first - 1)) : NULL;
        if (second != NULL && (size_t)(second - first) < sizeof(words)) {
            size_t length = (size_t)(second - first - 1);
            memcpy(words, first + 1, length);
            words[length] = '\0';
            if (v2 ? length == 0 : has_word(words, controller)) {
                *out = second + 1;
                *out_length = (int)(end - second - 1);
                return true;
            }
        }
        line = *end != '\0' ? end + 1 : NULL;
    }
    return false;
}

/* Path of group `own` seen through the mount; false when it lies outside of what is
 * mounted, and the mount point is then the nearest that can be seen. */
static bool
place_group(const mount *m, bool v2, const char *own, int own_length, cm_cgroup *out)
{
    size_t root_length = strcmp(m->root, "/") == 0 ? 0 : strlen(m->root);
    size_t nbytes = (size_t)own_length;
    bool inside = nbytes >= root_length && memcmp(own, m->root, root_length) == 0
                  && (nbytes == root_length || own[root_length] == '/')
                  && memmem(own, nbytes, "/..", 3) == NULL;
    int rest = inside ? own_length - (int)root_length : 0;
    int length = snprintf(out->path, sizeof(out->path), "%s%.*s", m->point, rest,
                          own + own_length - rest);
    if (length < 0 || (size_t)length >= sizeof(out->path)) {
        out->path[0] = '\0';
        return false;
    }
    while (length > 1 && out->path[length - 1] == '/') {
        out->path[--length] = '\0';
    }
    out->is_v2 = v2;
    out->mount_length = strlen(m->point);
    return inside;
}

static FILE *
open_mounts(const char *root)
{
    static const char path[] = "/proc/self/mountinfo";
    char *whole;
    if (root == NULL) {
        return fopen(path, "re");
    }
    if (asprintf(&whole, "%s%s", root, path) < 0) {
        return NULL;
    }
    FILE *file = fopen(whole, "re");
    free(whole);
    return file;
}

/* `own` is what /proc/self/cgroup says. */
static int
find_groups(FILE *mounts, const char *own, const char *controller, cm_cgroup out[2])
{
    char *line = NULL;
    size_t capacity = 0;
    int places[2] = {-1, -1}; /* by version: index into out */
    bool is_inside[2] = {false, false};
    int count = 0;
    const char *group;
    int length;
    mount m;
    while (getline(&line, &capacity, mounts) > 0) {
        if (strstr(line, " - cgroup") == NULL || !parse_mount(line, &m)) {
            continue;
        }
        bool v2 = strcmp(m.type, "cgroup2") == 0;
        if (is_inside[v2]
            || !(v2
                 || (strcmp(m.type, "cgroup") == 0 && has_word(m.options, controller)))
            || !find_own(own, v2, controller, &group, &length)) {
            continue;
        }
        if (places[v2] < 0) {
            places[v2] = count++;
        }
        cm_cgroup *place = &out[places[v2]];
        place->path[0] = '\0';
        place->mount_length = 0;
        is_inside[v2] = place_group(&m, v2, group, length, place);
    }
    free(line);
    return count;
}

int
cm_cgroup_find(const char *root, const char *controller, cm_cgroup out[2])
{
    char *own = cm_text_load(root, "/proc/self/cgroup");
    FILE *mounts = own == NULL ? NULL : open_mounts(root);
    int count = 0;
    if (mounts != NULL) {
        count = find_groups(mounts, own, controller, out);
        (void)fclose(mounts);
    }
    free(own);
    return count;
}

bool
cm_cgroup_up(cm_cgroup *group)
{
    char *slash = strrchr(group->path, '/');
    if (slash == NULL || strlen(group->path) <= group->mount_length) {
        return false;
    }
    *slash = '\0';
    return strlen(group->path) >= group->mount_length;
}

bool
cm_cgroup_read(const char *root, const cm_cgroup *group, const char *name, char *out,
               size_t nbytes)
{
    char *path;
    out[0] = '\0';
    if (asprintf(&path, "%s/%s", group->path, name) < 0) {
        return false;
    }
    bool is_read = cm_text_read(root, path, out, nbytes);
    free(path);
    return is_read;
}

char *
cm_cgroup_load(const char *root, const cm_cgroup *group, const char *name)
{
    char *path;
    if (asprintf(&path, "%s/%s", group->path, name) < 0) {
        return NULL;
    }
    char *text = cm_text_load(root, path);
    free(path);
    return text;
}
