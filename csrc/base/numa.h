/* SPDX-License-Identifier: Apache-2.0 */
/* NUMA without libnuma: which nodes there are, which is nearest to a PCI device, asking
 * for pages on a node, and reading back where pages are. A machine or container that
 * tells nothing counts as one node, 0. No locks. */
#ifndef CM_BASE_NUMA_H
#define CM_BASE_NUMA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/cpu_count.h"

enum { CM_NUMA_MAX_NODES = 64, CM_NUMA_NO_NODE = -1 };

/* Nodes that have memory, as bits. Files below `root` (NULL: the real ones). */
uint64_t cm_numa_read_nodes(const char *root);
/* The node that the device "0000:1b:00.0" hangs on; CM_NUMA_NO_NODE when not known. */
int cm_numa_read_nearest(const char *root, const char *pci_bus_id);
/* The CPUs of `node` on which the calling thread may run. False when there are none. */
bool cm_numa_read_cpus(const char *root, int node, cm_cpus *out);

/* Have the pages of [start, start + nbytes) that are populated from now on come from
 * `node` while it has room. False when the kernel refuses, as in many containers. */
bool cm_numa_prefer(void *start, uint64_t nbytes, int node);

/* Write the node of each page, < 0 where it is not known. Tests pass their own. */
typedef void cm_numa_find(void *const *pages, size_t count, int *nodes);
cm_numa_find cm_numa_find_nodes;

typedef struct cm_numa_placement {
    uint64_t nbytes[CM_NUMA_MAX_NODES];
    uint64_t unknown_nbytes;
} cm_numa_placement;

/* How the bytes of [start, start + nbytes) lie on the nodes, from a sample of at most a
 * few hundred pages, each standing for its surroundings. */
void cm_numa_read_placement(cm_numa_find *find, void *start, uint64_t nbytes,
                            cm_numa_placement *out);
/* Bytes known to be on another node. */
uint64_t cm_numa_elsewhere(const cm_numa_placement *placement, int node);

#endif
