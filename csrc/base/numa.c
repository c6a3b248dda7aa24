/* SPDX-License-Identifier: Apache-2.0 */
#include "base/numa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/text_file.h"

/* Of the kernel's <linux/mempolicy.h>, which is not installed everywhere. */
enum { POLICY_PREFERRED = 1, SAMPLE_COUNT = 256 };

static void
add_nodes(void *context, uint64_t first, uint64_t last)
{
    uint64_t *nodes = context;
    for (uint64_t i = first; i <= last && i < CM_NUMA_MAX_NODES; i++) {
        *nodes |= UINT64_C(1) << i;
    }
}

uint64_t
cm_numa_read_nodes(const char *root)
{
    char text[1024];
    uint64_t nodes = 0;
    (void)cm_text_read(root, "/sys/devices/system/node/has_memory", text, sizeof(text));
    cm_text_visit_list(text, add_nodes, &nodes);
    return nodes != 0 ? nodes : 1;
}

int
cm_numa_read_nearest(const char *root, const char *pci_bus_id)
{
    char path[128];
    char text[32];
    uint64_t node;
    int length =
        snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/numa_node", pci_bus_id);
    if (length < 0 || (size_t)length >= sizeof(path)
        || !cm_text_read(root, path, text, sizeof(text))
        || !cm_text_parse_u64(text, &node) || node >= CM_NUMA_MAX_NODES) {
        return CM_NUMA_NO_NODE; /* the kernel writes -1 for "not known" */
    }
    return (int)node;
}

static void
add_cpus(void *context, uint64_t first, uint64_t last)
{
    cm_cpus *cpus = context;
    for (uint64_t i = first; i <= last && i < 8 * sizeof(*cpus); i++) {
        CPU_SET_S((size_t)i, sizeof(*cpus), cpus->sets);
    }
}

bool
cm_numa_read_cpus(const char *root, int node, cm_cpus *out)
{
    char path[64];
    cm_cpus mine;
    cm_cpus of_node;
    memset(out, 0, sizeof(*out));
    memset(&of_node, 0, sizeof(of_node));
    (void)snprintf(path, sizeof(path), "/sys/devices/system/node/node%d/cpulist", node);
    char *text = cm_text_load(root, path);
    if (text == NULL || !cm_cpus_read(&mine)) {
        free(text);
        return false;
    }
    cm_text_visit_list(text, add_cpus, &of_node);
    free(text);
    CPU_AND_S(sizeof(*out), out->sets, mine.sets, of_node.sets);
    return cm_cpus_count(out) != 0;
}

bool
cm_numa_prefer(void *start, uint64_t nbytes, int node)
{
    /* Preferred and not bound: with a bound range a full node gets somebody killed. */
    unsigned long mask[CM_NUMA_MAX_NODES / (8 * sizeof(unsigned long))] = {0};
    mask[(size_t)node / (8 * sizeof(mask[0]))] =
        1ul << ((size_t)node % (8 * sizeof(mask[0])));
    /* The kernel takes one off the number of bits. */
    return syscall(SYS_mbind, start, (unsigned long)nbytes, POLICY_PREFERRED, mask,
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

void
cm_numa_read_placement(cm_numa_find *find, void *start, uint64_t nbytes,
                       cm_numa_placement *out)
{
    void *pages[SAMPLE_COUNT];
    int nodes[SAMPLE_COUNT];
    uint64_t page_nbytes = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t step = nbytes / SAMPLE_COUNT / page_nbytes * page_nbytes + page_nbytes;
    size_t count = 0;
    memset(out, 0, sizeof(*out));
    for (uint64_t at = 0; at < nbytes; at += step) {
        pages[count++] = (char *)start + at;
    }
    if (count == 0) {
        return;
    }
    find(pages, count, nodes);
    for (size_t i = 0; i < count; i++) {
        uint64_t share = i + 1 < count ? step : nbytes - i * step;
        bool known = nodes[i] >= 0 && nodes[i] < CM_NUMA_MAX_NODES;
        *(known ? &out->nbytes[nodes[i]] : &out->unknown_nbytes) += share;
    }
}

uint64_t
cm_numa_elsewhere(const cm_numa_placement *placement, int node)
{
    uint64_t sum = 0;
    for (int i = 0; i < CM_NUMA_MAX_NODES; i++) {
        sum += i == node ? 0 : placement->nbytes[i];
    }
    return sum;
}
