/* SPDX-License-Identifier: Apache-2.0 */
/* What the machine has, and what this process may use of it: memory, CPUs and NUMA
 * nodes. The kernel's text files tell; tests put their own below `root` (NULL: the real
 * ones). Whatever is missing there or makes no sense is "not known" and never a
 * failure. Nothing is kept between calls except where the control groups are. No
 * locks. */
#pragma once

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include "base/attributes.h"

/* -- control groups --------------------------------------------------------------------------- */

/* Say where the control groups are, which cumem/base/control_groups.py finds. `folders`
 * holds one line for each group that may limit the memory of the process, of either
 * version; each line, the last one too, ends with a newline. `cpu_count` is the number
 * of CPUs that their quotas allow, at least 1. Only one thread at a time calls this.
 * False: there is no memory. */
CM_NODISCARD bool cm_control_groups_set(const char *folders, uint64_t cpu_count);

/* -- memory ----------------------------------------------------------------------------------- */

/* In bytes; UINT64_MAX: not limited, or not known. A process that uses more than its
 * control group allows is killed, and gets no error before. So code that populates
 * pages looks here first. */
typedef struct cm_host_memory {
    /* What the process may use: the smaller of the next two. */
    uint64_t limit_nbytes;
    /* The smallest limit of the process's groups and those above. */
    uint64_t cgroup_nbytes;
    uint64_t total_nbytes; /* the memory of the machine */
    /* What can be had now, the least of three: the machine's, as the kernel estimates
     * it; what is left in the tightest group, with its cache counted as free; what
     * RLIMIT_AS leaves. */
    uint64_t available_nbytes;
} cm_host_memory;

static inline size_t
cm_page_nbytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Read all of it. This takes some ten microseconds. */
void cm_host_memory_read(const char *root, cm_host_memory *out);

/* -- CPUs ------------------------------------------------------------------------------------- */

/* A set of CPUs as large as any kernel's, for sched_setaffinity and CPU_…_S. */
typedef struct cm_cpus {
    cpu_set_t sets[8];
} cm_cpus;

/* The CPUs that the calling thread may run on. False: not known; *out is then empty. */
bool cm_cpus_read(cm_cpus *out);
unsigned cm_cpus_count(const cm_cpus *cpus);

/* The number of CPUs that the calling thread may run on, or fewer where a quota of its
 * groups allows less. At least 1. */
unsigned cm_usable_cpu_count(void);

/* -- NUMA nodes, without libnuma -------------------------------------------------------------- */

/* A machine or container that tells nothing counts as having one node, 0. */
enum { CM_NUMA_MAX_NODES = 64, CM_NUMA_NO_NODE = -1 };

/* The nodes that have memory, as bits. */
uint64_t cm_numa_read_nodes(const char *root);
/* The node that the device "0000:1b:00.0" is attached to; CM_NUMA_NO_NODE if that is
 * not known. */
int cm_numa_read_nearest(const char *root, const char *pci_bus_id);
/* The CPUs of `node` on which the calling thread may run. False when there are none. */
bool cm_numa_read_cpus(const char *root, int node, cm_cpus *out);

/* Let pages of [start, start + nbytes) that are populated from now on come from `node`
 * while it has room. False where the kernel refuses, as in many containers. */
bool cm_numa_prefer(void *start, uint64_t nbytes, int node);

/* Write the node of each page to `nodes`, < 0 where it is not known. Tests pass their
 * own function. */
typedef void cm_numa_find(void *const *pages, size_t count, int *nodes);
cm_numa_find cm_numa_find_nodes;

/* How many bytes of [start, start + nbytes) are known to be on a node other than
 * `node`. At most a few hundred pages are asked about, each of which stands for its
 * surroundings. */
uint64_t cm_numa_elsewhere(cm_numa_find *find, void *start, uint64_t nbytes, int node);
