/* SPDX-License-Identifier: Apache-2.0 */
#include "base/machine.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <mntent.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/attributes.h"
#include "base/checked_math.h"

/* -- text files --------------------------------------------------------------------------- */

/* The file at root + path, to be freed. NULL: it cannot be read, or is empty. */
CM_PRINTF(2, 3)
static char *
load(const char *root, const char *format, ...)
{
    char *path = malloc(PATH_MAX); /* a thread's stack may be small */
    char *text = NULL;
    size_t room = 0;
    if (path == NULL) {
        return NULL;
    }
    size_t used = (size_t)snprintf(path, PATH_MAX, "%s", root == NULL ? "" : root);
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(path + used, PATH_MAX - used, format, arguments);
    va_end(arguments);
    bool fits = length >= 0 && (size_t)length < PATH_MAX - used;
    FILE *file = fits ? fopen(path, "re") : NULL;
    free(path);
    if (file == NULL) {
        return NULL;
    }
    if (getdelim(&text, &room, '\0', file) < 0) {
        free(text);
        text = NULL;
    }
    (void)fclose(file);
    return text;
}

/* The decimal number that `text` begins with, which white space or the end must follow.
 * False for anything else, "max" and "-1" too, and for what does not fit. */
static bool
parse_u64(const char *text, uint64_t *out)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (isdigit((unsigned char)*text) == 0 || errno != 0
        || strchr(" \t\n", *end) == NULL) {
        return false; /* strchr finds the end of the text, too */
    }
    *out = value;
    return true;
}

/* The number after `key`, which stands at the beginning of a line. */
static bool
find_u64(const char *text, const char *key, uint64_t *out)
{
    size_t length = strlen(key);
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n' ? 1 : 0;
        if (strncmp(line, key, length) == 0
            && (line[length] == ' ' || line[length] == '\t')) {
            return parse_u64(line + length + strspn(line + length, " \t"), out);
        }
    }
    return false;
}

/* Of a list like "0-3,8"; ends at what makes no sense. */
static void
parse_list(const char *text, cm_cpus *out)
{
    memset(out, 0, sizeof(*out));
    while (text != NULL && isdigit((unsigned char)*text) != 0) {
        char *end;
        unsigned long long first = strtoull(text, &end, 10);
        unsigned long long last = first;
        if (*end == '-') {
            if (isdigit((unsigned char)end[1]) == 0) {
                return;
            }
            last = strtoull(end + 1, &end, 10);
        }
        for (; first <= last && first < 8 * sizeof(*out); first++) {
            CPU_SET_S((size_t)first, sizeof(*out), out->sets);
        }
        text = *end == ',' ? end + 1 : NULL;
    }
}

/* -- control groups --------------------------------------------------------------------------- */

/* The kernel says in /proc/self/cgroup which group of each hierarchy the process is in,
 * and in /proc/self/mountinfo which part of a hierarchy is mounted where: in a
 * container often the process's own group alone. */

/* What one line of mountinfo says. */
typedef struct mount {
    char root[PATH_MAX]; /* which group of the hierarchy is mounted */
    char point[PATH_MAX];
    char type[32];
    char options[PATH_MAX]; /* of the file system: the controllers are among them */
} mount;

/* True when `name` is one of the words between commas. */
static bool
has_word(char *words, const char *name)
{
    const struct mntent as_options = {.mnt_opts = words};
    return hasmntopt(&as_options, name) != NULL;
}

/* Undo \040 and the like in place. */
static void
unescape(char *text)
{
    unsigned code;
    int length = 0;
    for (; (text = strchr(text, '\\')) != NULL; text++) {
        if (sscanf(text, "\\%3o%n", &code, &length) == 1 && length == 4) {
            *text = (char)code;
            memmove(text + 1, text + 4, strlen(text + 4) + 1);
        }
    }
}

/* "36 35 98:0 /root /point rw,noatime shared:1 - type source options", of a hierarchy
 * that may limit the process. */
static bool
parse_mount(char *line, const char *controller, bool v2, mount *out)
{
    char *tail = strstr(line, " - ");
    if (tail == NULL) {
        return false;
    }
    *tail = '\0';
    if (sscanf(line, "%*s %*s %*s %4095s %4095s", out->root, out->point) != 2
        || sscanf(tail + 3, "%31s %*s %4095s", out->type, out->options) != 2) {
        return false;
    }
    unescape(out->root);
    unescape(out->point);
    return v2 ? strcmp(out->type, "cgroup2") == 0
              : strcmp(out->type, "cgroup") == 0 && has_word(out->options, controller);
}

/* The process's group in the hierarchy, as /proc/self/cgroup, which `text` is, names
 * it; NULL: it is in none. */
static const char *
find_own(char *text, const char *controller, bool v2)
{
    for (char *line; (line = strsep(&text, "\n")) != NULL;) {
        (void)strsep(&line, ":");
        char *controllers = strsep(&line, ":");
        if (line != NULL /* the rest is the path */
            && (v2 ? *controllers == '\0' : has_word(controllers, controller))) {
            return line;
        }
    }
    return NULL;
}

/* Where the group `own` lies below what is mounted, "": just there; NULL: outside. */
static const char *
path_inside(const char *own, const mount *m)
{
    size_t length = strcmp(m->root, "/") == 0 ? 0 : strlen(m->root);
    if (strncmp(own, m->root, length) != 0 || strstr(own, "/..") != NULL
        || (own[length] != '/' && own[length] != '\0')) {
        return NULL;
    }
    return strcmp(own + length, "/") == 0 ? "" : own + length;
}

/* `folder`: of a group, without the root. */
typedef void visit_group(const char *root, const char *folder, bool v2, void *context);

/* Visit the process's group and those above it, as far as they are mounted, in the
 * hierarchy of one version that may limit it. Of a group outside of what is mounted,
 * the mount point is the nearest that can be seen. */
static void
visit_hierarchy(const char *root, const char *controller, bool v2, visit_group *visit,
                void *context)
{
    char *groups = load(root, "/proc/self/cgroup");
    char *mounts = load(root, "/proc/self/mountinfo");
    const char *own = groups == NULL ? NULL : find_own(groups, controller, v2);
    const char *inside = NULL;
    enum { FOLDER_NBYTES = 2 * PATH_MAX };
    mount *m = malloc(sizeof(*m) + FOLDER_NBYTES); /* a thread's stack may be small */
    char *folder = (char *)(m + 1);
    size_t top = 0; /* so much of it is the mount point */
    char *rest = own == NULL || m == NULL ? NULL : mounts;
    for (char *line; inside == NULL && (line = strsep(&rest, "\n")) != NULL;) {
        if (parse_mount(line, controller, v2, m)) {
            inside = path_inside(own, m);
            top = strlen(m->point);
            (void)snprintf(folder, FOLDER_NBYTES, "%s%s", m->point,
                           inside == NULL ? "" : inside);
        }
    }
    while (top != 0) {
        visit(root, folder, v2, context);
        char *slash = strlen(folder) > top ? strrchr(folder, '/') : NULL;
        if (slash == NULL) {
            break;
        }
        *slash = '\0';
    }
    free(m);
    free(groups);
    free(mounts);
}

static void
visit_groups(const char *root, const char *controller, visit_group *visit,
             void *context)
{
    visit_hierarchy(root, controller, true, visit, context);
    visit_hierarchy(root, controller, false, visit, context);
}

/* The number that the group's file `name` begins with. */
static bool
read_number(const char *root, const char *folder, const char *name, uint64_t *out)
{
    char *text = load(root, "%s/%s", folder, name);
    bool is_read = text != NULL && parse_u64(text, out);
    free(text);
    return is_read;
}

/* -- memory ----------------------------------------------------------------------------------- */

/* The files of one version. */
typedef struct names {
    const char *limit;
    const char *usage;
    const char *inactive;
    const char *active;
} names;

static const names version_names[] = {
    {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
     "total_active_file"},
    {"memory.max", "memory.current", "inactive_file", "active_file"},
};

/* Cached file pages, which the kernel gives up before it kills anybody. */
static uint64_t
read_reclaimable(const char *root, const char *folder, const names *of)
{
    char *text = load(root, "%s/memory.stat", folder);
    uint64_t inactive = 0;
    uint64_t active = 0;
    uint64_t sum;
    if (text != NULL) {
        (void)find_u64(text, of->inactive, &inactive);
        (void)find_u64(text, of->active, &active);
    }
    free(text);
    return __builtin_add_overflow(inactive, active, &sum) ? UINT64_MAX : sum;
}

/* Take one group's limit into account. */
static void
apply_limit(const char *root, const char *folder, bool v2, void *context)
{
    cm_host_memory *out = context;
    const names *of = &version_names[v2];
    uint64_t limit = 0;
    uint64_t usage = 0;
    /* Version 1 writes "no limit" as the largest number of whole pages. */
    if (!read_number(root, folder, of->limit, &limit) || limit >= UINT64_C(1) << 62) {
        return;
    }
    (void)read_number(root, folder, of->usage, &usage);
    usage -= cm_least(read_reclaimable(root, folder, of), usage);
    out->cgroup_nbytes = cm_least(out->cgroup_nbytes, limit);
    out->available_nbytes =
        cm_least(out->available_nbytes, limit > usage ? limit - usage : 0);
}

/* "MemTotal:       24684092 kB" */
static uint64_t
find_kib(const char *text, const char *key)
{
    uint64_t kib = 0;
    uint64_t nbytes = 0;
    return text != NULL && find_u64(text, key, &kib)
                   && !__builtin_mul_overflow(kib, UINT64_C(1024), &nbytes)
               ? nbytes
               : UINT64_MAX;
}

void
cm_host_memory_read(const char *root, cm_host_memory *out)
{
    char *text = load(root, "/proc/meminfo");
    *out = (cm_host_memory){
        .total_nbytes = find_kib(text, "MemTotal:"),
        .cgroup_nbytes = UINT64_MAX,
        .available_nbytes = find_kib(text, "MemAvailable:"),
    };
    free(text);
    visit_groups(root, "memory", apply_limit, out);
    out->limit_nbytes = cm_least(out->cgroup_nbytes, out->total_nbytes);
}

/* -- CPUs ------------------------------------------------------------------------------------- */

bool
cm_cpus_read(cm_cpus *out)
{
    memset(out, 0, sizeof(*out));
    return sched_getaffinity(0, sizeof(*out), out->sets) == 0;
}

unsigned
cm_cpus_count(const cm_cpus *cpus)
{
    return (unsigned)CPU_COUNT_S(sizeof(*cpus), cpus->sets);
}

/* Take one group's quota into account, rounded up to whole CPUs. */
static void
apply_quota(const char *root, const char *folder, bool v2, void *context)
{
    uint64_t *count = context;
    uint64_t quota = 0;
    uint64_t period = 0;
    if (v2) { /* "150000 100000", "max 100000" */
        char *text = load(root, "%s/cpu.max", folder);
        const char *space = text == NULL ? NULL : strchr(text, ' ');
        if (space != NULL && parse_u64(text, &quota)) {
            (void)parse_u64(space + 1, &period);
        }
        free(text);
    }
    else if (read_number(root, folder, "cpu.cfs_quota_us", &quota)) {
        (void)read_number(root, folder, "cpu.cfs_period_us", &period);
    }
    if (period != 0) {
        *count = cm_least(*count, quota / period + (quota % period != 0));
    }
}

unsigned
cm_usable_cpu_count(const char *root)
{
    cm_cpus cpus;
    uint64_t count = cm_cpus_read(&cpus) ? cm_cpus_count(&cpus) : 1;
    visit_groups(root, "cpu", apply_quota, &count);
    return count == 0 ? 1 : (unsigned)count;
}

/* -- NUMA nodes ------------------------------------------------------------------------------- */

/* Of the kernel's <linux/mempolicy.h>, which is not installed everywhere. */
enum { POLICY_PREFERRED = 1, SAMPLE_COUNT = 256 };

uint64_t
cm_numa_read_nodes(const char *root)
{
    uint64_t nodes;
    cm_cpus list; /* of nodes: the same format */
    char *text = load(root, "/sys/devices/system/node/has_memory");
    parse_list(text, &list);
    free(text);
    memcpy(&nodes, &list, sizeof(nodes)); /* the first of its bits */
    return nodes != 0 ? nodes : 1;
}

int
cm_numa_read_nearest(const char *root, const char *pci_bus_id)
{
    uint64_t node = CM_NUMA_MAX_NODES; /* the kernel writes -1 for "not known" */
    char *text = load(root, "/sys/bus/pci/devices/%s/numa_node", pci_bus_id);
    bool is_known = text != NULL && parse_u64(text, &node);
    free(text);
    return is_known && node < CM_NUMA_MAX_NODES ? (int)node : CM_NUMA_NO_NODE;
}

bool
cm_numa_read_cpus(const char *root, int node, cm_cpus *out)
{
    cm_cpus mine;
    char *text = load(root, "/sys/devices/system/node/node%d/cpulist", node);
    parse_list(text, out);
    free(text);
    (void)cm_cpus_read(&mine);
    CPU_AND_S(sizeof(*out), out->sets, mine.sets, out->sets);
    return cm_cpus_count(out) != 0;
}

bool
cm_numa_prefer(void *start, uint64_t nbytes, int node)
{
    /* Preferred and not bound: with a bound range a full node gets a process killed. */
    uint64_t mask = UINT64_C(1) << node;
    /* The kernel takes one off the number of bits. */
    return syscall(SYS_mbind, start, (unsigned long)nbytes, POLICY_PREFERRED, &mask,
                   (unsigned long)CM_NUMA_MAX_NODES + 1, 0u)
           == 0;
}

void
cm_numa_find_nodes(void *const *pages, size_t count, int *nodes)
{
    /* Without target nodes it moves nothing and says where the pages are. */
    if (syscall(SYS_move_pages, 0, (unsigned long)count, pages, NULL, nodes, 0) != 0) {
        for (size_t i = 0; i < count; i++) {
            nodes[i] = CM_NUMA_NO_NODE;
        }
    }
}

uint64_t
cm_numa_elsewhere(cm_numa_find *find, void *start, uint64_t nbytes, int node)
{
    void *pages[SAMPLE_COUNT];
    int nodes[SAMPLE_COUNT];
    uint64_t page_nbytes = cm_page_nbytes();
    uint64_t step = nbytes / SAMPLE_COUNT / page_nbytes * page_nbytes + page_nbytes;
    size_t count = 0;
    uint64_t sum = 0;
    for (uint64_t at = 0; at < nbytes; at += step) {
        pages[count++] = (char *)start + at;
    }
    find(pages, count, nodes);
    for (size_t i = 0; i < count; i++) {
        uint64_t share = i + 1 < count ? step : nbytes - i * step;
        sum += nodes[i] >= 0 && nodes[i] != node ? share : 0;
    }
    return sum;
}
