/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the NUMA functions of base/machine. Most read nodes and CPUs from files that
 * the test writes into a folder of its own. The last one asks the kernel where pages of
 * this machine are. */
#include <sys/mman.h>

#include "base/machine.h"
#include "fake_root.h"

/* Each list of the kernel must become a set of bits. A list that cannot be understood,
 * or that ends in the middle, counts as far as it was understood. If the result is
 * empty, it is node 0. */
static void
test_numa_nodes_with_memory_are_read(void)
{
    static const struct {
        const char *text;
        uint64_t nodes;
    } lists[] = {
        {"0\n", 1},    {"0-1\n", 3},   {"0,2-3\n", 13}, {"63-99\n", 1ull << 63},
        {"", 1},       {"garbage", 1}, {"200\n", 1},    {"1-3,9-7\n", 14},
        {"1,,2\n", 2}, {"1,4-\n", 2},  {"\n", 1}};
    fake_root root;
    root_make(&root);
    /* There is no file at all, as on a kernel without NUMA. */
    CHECK_EQ(cm_numa_read_nodes(root.path), 1);
    for (size_t i = 0; i < sizeof(lists) / sizeof(*lists); i++) {
        root_write(&root, "/sys/devices/system/node/has_memory", lists[i].text);
        CHECK(cm_numa_read_nodes(root.path) == lists[i].nodes);
    }
    root_remove(&root);
}

/* The node of a device is read from its folder. Without a file, with -1 and with a
 * number that is too large, the node is not known. */
static void
test_numa_nearest_node_is_the_devices(void)
{
    fake_root root;
    root_make(&root);
    CHECK_EQ(cm_numa_read_nearest(root.path, "0000:1b:00.0"), CM_NUMA_NO_NODE);
    root_write(&root, "/sys/bus/pci/devices/0000:1b:00.0/numa_node", "1\n");
    CHECK_EQ(cm_numa_read_nearest(root.path, "0000:1b:00.0"), 1);
    CHECK_EQ(cm_numa_read_nearest(root.path, "0000:1c:00.0"), CM_NUMA_NO_NODE);
    root_write(&root, "/sys/bus/pci/devices/0000:1b:00.0/numa_node", "-1\n");
    CHECK_EQ(cm_numa_read_nearest(root.path, "0000:1b:00.0"), CM_NUMA_NO_NODE);
    root_write(&root, "/sys/bus/pci/devices/0000:1b:00.0/numa_node", "64\n");
    CHECK_EQ(cm_numa_read_nearest(root.path, "0000:1b:00.0"), CM_NUMA_NO_NODE);
    root_remove(&root);
}

/* The CPUs of a node are only those that this thread may also run on. If there are
 * none, the function returns false. */
static void
test_numa_cpus_are_those_the_thread_may_use(void)
{
    fake_root root;
    cm_cpus mine;
    cm_cpus found;
    root_make(&root);
    CHECK(cm_cpus_read(&mine));
    CHECK(!cm_numa_read_cpus(root.path, 1, &found));
    root_write(&root, "/sys/devices/system/node/node1/cpulist", "0-8191\n");
    CHECK(cm_numa_read_cpus(root.path, 1, &found));
    CHECK_BYTES_EQ(&found, &mine, sizeof(found));
    root_write(&root, "/sys/devices/system/node/node1/cpulist", "8191-9999\n");
    CHECK(!cm_numa_read_cpus(root.path, 1, &found));
    root_write(&root, "/sys/devices/system/node/node1/cpulist", "\n");
    CHECK(!cm_numa_read_cpus(root.path, 1, &found));
    root_remove(&root);
}

/* A cm_numa_find for 256 MiB of addresses: the first half is on node 0 and the next
 * quarter on node 3. Nothing is known of the last quarter, so its pages get a number
 * below 0. */
static void
find_halves(void *const *pages, size_t count, int *nodes)
{
    for (size_t i = 0; i < count; i++) {
        uintptr_t offset = (uintptr_t)pages[i] & 0xfffffff;
        nodes[i] = offset < 0x8000000 ? 0 : offset < 0xc000000 ? 3 : -14;
    }
}

/* cm_numa_elsewhere() asks about a few pages only, and each counts for the bytes around
 * it. So its answer may differ by at most 2 MiB from the exact number. */
static void
test_numa_bytes_elsewhere_stand_for_their_surroundings(void)
{
    /* This is only an address, and there is no memory behind it. */
    void *start = (void *)(uintptr_t)0x70000000;
    uint64_t half = cm_numa_elsewhere(find_halves, start, 0x10000000, 3);
    uint64_t quarter = cm_numa_elsewhere(find_halves, start, 0x10000000, 0);
    CHECK_LT(llabs((long long)half - 0x8000000), 0x200000);
    CHECK_LT(llabs((long long)quarter - 0x4000000), 0x200000);
    CHECK_EQ(cm_numa_elsewhere(find_halves, start, 0x10000000, 1), half + quarter);
    static const uint64_t sizes[] = {1,          4096,       4097,
                                     255 * 4096, 256 * 4096, 256 * 4096 + 1};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        CHECK_EQ(cm_numa_elsewhere(find_halves, start, sizes[i], 1), sizes[i]);
        CHECK_EQ(cm_numa_elsewhere(find_halves, start, sizes[i], 0), 0);
    }
    CHECK_EQ(cm_numa_elsewhere(find_halves, start, 0, 1), 0);
}

/* A page is on no node before it is touched. Afterwards all pages of a range that
 * prefers one node are on that node. */
static void
test_numa_real_pages_are_on_a_real_node_once_touched(void)
{
    size_t nbytes = 1 << 20;
    char *memory =
        mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    /* No page has memory yet. */
    CHECK_EQ(cm_numa_elsewhere(cm_numa_find_nodes, memory, nbytes, -1), 0);
    int node = __builtin_ctzll(cm_numa_read_nodes(NULL));
    bool bound = cm_numa_prefer(memory, nbytes, node);
    memset(memory, 1, nbytes);
    uint64_t elsewhere = cm_numa_elsewhere(cm_numa_find_nodes, memory, nbytes, -1);
    if (bound && elsewhere == nbytes) { /* a container may forbid both calls */
        CHECK_EQ(cm_numa_elsewhere(cm_numa_find_nodes, memory, nbytes, node), 0);
    }
    munmap(memory, nbytes);
}

/* clang-format off */
MAIN(
    RUN(test_numa_nodes_with_memory_are_read)
    RUN(test_numa_nearest_node_is_the_devices)
    RUN(test_numa_cpus_are_those_the_thread_may_use)
    RUN(test_numa_bytes_elsewhere_stand_for_their_surroundings)
    RUN(test_numa_real_pages_are_on_a_real_node_once_touched)
)
/* clang-format on */
