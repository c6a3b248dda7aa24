/* SPDX-License-Identifier: Apache-2.0 */
#include "base/cpu_count.h"

#include <stdint.h>
#include <string.h>

#include "base/cgroup.h"
#include "base/text_file.h"

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

/* CPUs that one group's quota allows, rounded up; UINT64_MAX: no quota. */
static uint64_t
read_quota(const char *root, const cm_cgroup *group)
{
    char text[128];
    uint64_t quota = 0;
    uint64_t period = 0;
    if (group->is_v2) { /* "150000 100000", "max 100000" */
        (void)cm_cgroup_read(root, group, "cpu.max", text, sizeof(text));
        const char *space = strchr(text, ' ');
        if (space == NULL || !cm_text_parse_u64(space + 1, &period)) {
            return UINT64_MAX;
        }
    }
    else {
        (void)cm_cgroup_read(root, group, "cpu.cfs_period_us", text, sizeof(text));
        if (!cm_text_parse_u64(text, &period)) {
            return UINT64_MAX;
        }
        (void)cm_cgroup_read(root, group, "cpu.cfs_quota_us", text, sizeof(text));
    }
    if (!cm_text_parse_u64(text, &quota) || period == 0) {
        return UINT64_MAX;
    }
    return quota / period + (quota % period != 0);
}

unsigned
cm_usable_cpu_count(const char *root)
{
    cm_cpus cpus;
    cm_cgroup groups[2];
    uint64_t count = cm_cpus_read(&cpus) ? cm_cpus_count(&cpus) : 1;
    int group_count = cm_cgroup_find(root, "cpu", groups);
    for (int i = 0; i < group_count; i++) {
        do {
            uint64_t quota = read_quota(root, &groups[i]);
            count = quota < count ? quota : count;
        } while (cm_cgroup_up(&groups[i]));
    }
    return count == 0 ? 1 : (unsigned)count;
}
