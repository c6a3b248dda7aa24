/* SPDX-License-Identifier: Apache-2.0 */
#include "base/host_memory.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/cgroup.h"
#include "base/text_file.h"

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

static uint64_t
least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Cached file pages, which the kernel gives up before it kills anybody. */
static uint64_t
read_reclaimable(const char *root, const cm_cgroup *group, const names *of)
{
    char *text = cm_cgroup_load(root, group, "memory.stat");
    uint64_t inactive = 0;
    uint64_t active = 0;
    if (text == NULL) {
        return 0;
    }
    (void)cm_text_find_u64(text, of->inactive, &inactive);
    (void)cm_text_find_u64(text, of->active, &active);
    free(text);
    uint64_t sum;
    return __builtin_add_overflow(inactive, active, &sum) ? UINT64_MAX : sum;
}

/* Take one group's limit into account. */
static void
apply_group(const char *root, const cm_cgroup *group, cm_host_memory *out)
{
    const names *of = &version_names[group->is_v2];
    char text[64];
    uint64_t limit = 0;
    uint64_t usage = 0;
    (void)cm_cgroup_read(root, group, of->limit, text, sizeof(text));
    /* Version 1 writes "no limit" as the largest number of whole pages. */
    if (!cm_text_parse_u64(text, &limit) || limit >= UINT64_C(1) << 62) {
        return;
    }
    out->cgroup_nbytes = least(out->cgroup_nbytes, limit);
    (void)cm_cgroup_read(root, group, of->usage, text, sizeof(text));
    (void)cm_text_parse_u64(text, &usage);
    uint64_t reclaimable = least(read_reclaimable(root, group, of), usage);
    usage -= reclaimable;
    uint64_t left = limit > usage ? limit - usage : 0;
    out->cgroup_available_nbytes = least(out->cgroup_available_nbytes, left);
}

/* "MemTotal:       24684092 kB" */
static uint64_t
find_kib(const char *text, const char *key)
{
    uint64_t kib = 0;
    uint64_t nbytes = 0;
    return text != NULL && cm_text_find_u64(text, key, &kib)
                   && !__builtin_mul_overflow(kib, UINT64_C(1024), &nbytes)
               ? nbytes
               : UINT64_MAX;
}

void
cm_host_memory_read(const char *root, cm_host_memory *out)
{
    cm_cgroup groups[2];
    struct rlimit memlock;
    char *text = cm_text_load(root, "/proc/meminfo");
    *out = (cm_host_memory){
        .cgroup_nbytes = UINT64_MAX,
        .cgroup_available_nbytes = UINT64_MAX,
        .total_nbytes = find_kib(text, "MemTotal:"),
        .total_available_nbytes = find_kib(text, "MemAvailable:"),
        .memlock_nbytes = UINT64_MAX,
    };
    free(text);
    int count = cm_cgroup_find(root, "memory", groups);
    for (int i = 0; i < count; i++) {
        do {
            apply_group(root, &groups[i], out);
        } while (cm_cgroup_up(&groups[i]));
    }
    out->limit_nbytes = least(out->cgroup_nbytes, out->total_nbytes);
    out->available_nbytes =
        least(out->cgroup_available_nbytes, out->total_available_nbytes);
    if (getrlimit(RLIMIT_MEMLOCK, &memlock) == 0 && memlock.rlim_cur != RLIM_INFINITY) {
        out->memlock_nbytes = memlock.rlim_cur;
    }
}
