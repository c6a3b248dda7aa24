/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the kernel's text files about memory, CPUs and NUMA nodes. */
#include "base/machine.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/attributes.h"
#include "base/checked_math.h"

/* -- text files --------------------------------------------------------------------------- */

/* Read the file at root + path. The caller frees the text. Returns NULL if the file
 * cannot be read or is empty. */
CM_PRINTF(2, 3)
static char *
load(const char *root, const char *format, ...)
{
    char *path = malloc(PATH_MAX); /* a stack may be too small for it */
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

/* Read the decimal number at the beginning of `text`. White space or the end of the
 * text must follow it. Returns false for anything else, such as "max" or "-1", and for
 * numbers that do not fit. */
static bool
parse_u64(const char *text, uint64_t *out)
{
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (isdigit((unsigned char)*text) == 0 || errno != 0
        || strchr(" \t\n", *end) == NULL) {
        return false; /* strchr finds the terminating zero as well */
    }
    *out = value;
    return true;
}

/* Read the number after `key`. The key is at the beginning of a line. */
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

/* Read a list such as "0-3,8". Reading stops where the text makes no sense. */
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

/* The groups that the process is in. When the groups change, a new struct takes the
 * place of the old one, which is never freed, since another thread may be reading it.
 * There are only a few such structs, since a process is seldom moved to other groups.
 */
typedef struct control_groups {
    struct control_groups *last;
    uint64_t cpu_count;
    char folders[]; /* one line for each */
} control_groups;

static _Atomic(control_groups *) the_groups; /* NULL if none are known */

bool
cm_control_groups_set(const char *folders, uint64_t cpu_count)
{
    control_groups *last = atomic_load(&the_groups);
    if (last != NULL && last->cpu_count == cpu_count
        && strcmp(last->folders, folders) == 0) {
        return true;
    }
    size_t nbytes = strlen(folders) + 1;
    control_groups *groups = malloc(sizeof(*groups) + nbytes);
    if (groups != NULL) {
        groups->last = last;
        groups->cpu_count = cpu_count;
        memcpy(groups->folders, folders, nbytes);
        atomic_store(&the_groups, groups);
    }
    return groups != NULL;
}

static int
line_length(const char *line)
{
    return (int)strcspn(line, "\n");
}

/* Read the number at the beginning of the file `name` of a group. */
static bool
read_number(const char *root, const char *folder, const char *name, uint64_t *out)
{
    char *text = load(root, "%.*s/%s", line_length(folder), folder, name);
    bool is_read = text != NULL && parse_u64(text, out);
    free(text);
    return is_read;
}

/* -- memory ----------------------------------------------------------------------------------- */

/* The files and keys of one version of control groups. */
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

/* Return the bytes of cached file pages, which the kernel gives up before it kills any
 * process. */
static uint64_t
read_reclaimable(const char *root, const char *folder, const names *of)
{
    char *text = load(root, "%.*s/memory.stat", line_length(folder), folder);
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
apply_limit(const char *root, const char *folder, const names *of, cm_host_memory *out)
{
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

/* Read a line such as "MemTotal:       24684092 kB". */
static uint64_t
find_kib(const char *text, const char *key)
{
    uint64_t kib = 0;
    uint64_t nbytes = 0;
    if (text == NULL || !find_u64(text, key, &kib)
        || __builtin_mul_overflow(kib, UINT64_C(1024), &nbytes)) {
        return UINT64_MAX;
    }
    return nbytes;
}

/* Take into account how many more bytes of addresses RLIMIT_AS (ulimit -v) lets the
 * process map. */
static void
apply_address_limit(const char *root, cm_host_memory *out)
{
    struct rlimit most;
    uint64_t pages = 0;
    uint64_t used;
    if (getrlimit(RLIMIT_AS, &most) != 0 || most.rlim_cur == RLIM_INFINITY) {
        return;
    }
    /* The first number is the size of all mappings. */
    char *text = load(root, "/proc/self/statm");
    if (text != NULL && parse_u64(text, &pages)
        && !__builtin_mul_overflow(pages, cm_page_nbytes(), &used)) {
        uint64_t left = most.rlim_cur - cm_least(used, most.rlim_cur);
        out->available_nbytes = cm_least(out->available_nbytes, left);
    }
    free(text);
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
    const control_groups *groups = atomic_load(&the_groups);
    const char *folder = groups == NULL ? "" : groups->folders;
    for (; *folder != '\0'; folder += line_length(folder) + 1) {
        apply_limit(root, folder, &version_names[0], out);
        apply_limit(root, folder, &version_names[1], out);
    }
    out->limit_nbytes = cm_least(out->cgroup_nbytes, out->total_nbytes);
    apply_address_limit(root, out);
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

unsigned
cm_usable_cpu_count(void)
{
    cm_cpus cpus;
    const control_groups *groups = atomic_load(&the_groups);
    uint64_t count = cm_cpus_read(&cpus) ? cm_cpus_count(&cpus) : 1;
    return (unsigned)(groups == NULL ? count : cm_least(count, groups->cpu_count));
}

/* -- NUMA nodes ------------------------------------------------------------------------------- */

/* From the kernel's <linux/mempolicy.h>, which is not installed everywhere. */
enum { POLICY_PREFERRED = 1, SAMPLE_COUNT = 256 };

uint64_t
cm_numa_read_nodes(const char *root)
{
    uint64_t nodes;
    cm_cpus list; /* a list of nodes has the format of a list of CPUs */
    char *text = load(root, "/sys/devices/system/node/has_memory");
    parse_list(text, &list);
    free(text);
    memcpy(&nodes, &list, sizeof(nodes)); /* nodes are the first bits of the set */
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
    /* The node is preferred and not bound: if the range were bound to a node that is
     * full, the kernel would kill a process. */
    uint64_t mask = UINT64_C(1) << node;
    /* The kernel subtracts one from the number of bits. */
    return syscall(SYS_mbind, start, (unsigned long)nbytes, POLICY_PREFERRED, &mask,
                   (unsigned long)CM_NUMA_MAX_NODES + 1, 0u)
           == 0;
}

void
cm_numa_find_nodes(void *const *pages, size_t count, int *nodes)
{
    /* Without target nodes this call moves nothing, and says where the pages are. */
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
