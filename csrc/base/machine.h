/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out what memory, CPUs and NUMA nodes the machine has, and which of these this
 * process may use. It reads text files of the kernel below `root`: tests put files of
 * their own there, and NULL stands for the real ones. A file that is missing or makes
 * no sense means "not known" and is never a failure. Between calls only the folders of
 * the control groups are remembered. No locks. */
#pragma once

#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include "base/attributes.h"

/* -- control groups --------------------------------------------------------------------------- */

/* Set the folders of the control groups, which cumem/base/control_groups.py finds.
 * `folders` has a line for each group, of version 1 or 2, that may limit the memory of
 * the process. Every line ends with a newline. `cpu_count` is the number of CPUs that
 * the quotas of these groups allow, at least 1. Only one thread at a time calls this.
 * Returns false if there is no memory. */
CM_NODISCARD bool cm_control_groups_set(const char *folders, uint64_t cpu_count);

/* -- memory ----------------------------------------------------------------------------------- */

/* Limits in bytes. UINT64_MAX means that there is no limit, or that it is not known. A
 * process that uses more than its control group allows is killed without getting an
 * error first. So code that populates pages looks here first. */
typedef struct cm_host_memory {
    /* What the process may use, which is the smaller of the next two members. */
    uint64_t limit_nbytes;
    /* The smallest limit of the process's groups and of the groups above these. */
    uint64_t cgroup_nbytes;
    uint64_t total_nbytes; /* the memory of the machine */
    /* How much the process can get now. This is the least of three numbers: the memory
     * that the kernel estimates to be available on the machine, the memory that is left
     * in the tightest group (whose cache counts as free), and the addresses that
     * RLIMIT_AS leaves. */
    uint64_t available_nbytes;
} cm_host_memory;

static inline size_t
cm_page_nbytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Read all of these numbers into *out. This takes tens of microseconds. */
void cm_host_memory_read(const char *root, cm_host_memory *out);

/* -- CPUs ------------------------------------------------------------------------------------- */

/* A set with room for the CPUs of any kernel, for sched_setaffinity and CPU_…_S. */
typedef struct cm_cpus {
    cpu_set_t sets[8];
} cm_cpus;

/* Read on which CPUs the calling thread may run. Returns false, with *out empty, if
 * that is not known. */
bool cm_cpus_read(cm_cpus *out);
/* Return the number of CPUs in a set. */
unsigned cm_cpus_count(const cm_cpus *cpus);

/* Return the number of CPUs that the calling thread may use: those on which it may run,
 * but no more than the quotas of its groups allow, and at least 1. */
unsigned cm_usable_cpu_count(void);

/* -- NUMA nodes, without libnuma -------------------------------------------------------------- */

/* If a machine or container does not say which nodes it has, it counts as having node 0
 * only. */
enum { CM_NUMA_MAX_NODES = 64, CM_NUMA_NO_NODE = -1 };

/* Return the nodes that have memory, as bits. */
uint64_t cm_numa_read_nodes(const char *root);
/* Return the node to which the device `pci_bus_id`, such as "0000:1b:00.0", is
 * attached; CM_NUMA_NO_NODE if that is not known. */
int cm_numa_read_nearest(const char *root, const char *pci_bus_id);
/* Read which CPUs of `node` the calling thread may run on. Returns false if there are
 * none. */
bool cm_numa_read_cpus(const char *root, int node, cm_cpus *out);

/* Ask the kernel to use memory of `node`, while it has room, for the pages of
 * [start, start + nbytes) that are not populated yet. Returns false if the kernel
 * refuses, as it does in many containers. */
bool cm_numa_prefer(void *start, uint64_t nbytes, int node);

/* Write the node of each page to `nodes`, or a number < 0 if it is not known. Tests
 * pass their own function. */
typedef void cm_numa_find(void *const *pages, size_t count, int *nodes);
cm_numa_find cm_numa_find_nodes;

/* Return how many bytes of [start, start + nbytes) are on nodes other than `node`. It
 * asks about a few hundred pages at most, and counts the bytes around each of them as
 * lying on the same node. */
uint64_t cm_numa_elsewhere(cm_numa_find *find, void *start, uint64_t nbytes, int node);
