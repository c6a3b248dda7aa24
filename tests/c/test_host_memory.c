/* SPDX-License-Identifier: Apache-2.0 */
/* base/: what the kernel's files say about memory and CPUs, in trees made for it. */
#include <sched.h>

#include "base/machine.h"
#include "base/thread.h"
#include "fake_root.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

#define MEMINFO                                                                        \
    "MemTotal:       16777216 kB\nMemFree:         1000 kB\n"                          \
    "MemAvailable:    8388608 kB\n"
#define MOUNT_V2                                                                       \
    "22 27 0:21 / /proc rw - proc proc rw\n"                                           \
    "31 23 0:28 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"

static cm_host_memory
read_memory(const fake_root *root)
{
    cm_host_memory memory;
    cm_host_memory_read(root->path, &memory);
    return memory;
}

/* A limit of 5 GiB in the folder is seen. */
static bool
is_visited(const fake_root *root, const char *folder)
{
    char path[256];
    snprintf(path, sizeof(path), "%s/memory.max", folder);
    root_write(root, path, "5368709120\n");
    snprintf(path, sizeof(path), "%s/memory.limit_in_bytes", folder);
    root_write(root, path, "5368709120\n");
    bool seen = read_memory(root).cgroup_nbytes == 5 * GIB;
    root_write(root, path, "");
    snprintf(path, sizeof(path), "%s/memory.max", folder);
    root_write(root, path, "");
    return seen;
}

/* -- control groups --------------------------------------------------------------------- */

static void
test_cgroup_walk_ends_at_the_mount_point(void)
{
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/self/mountinfo", MOUNT_V2);
    root_write(&root, "/proc/self/cgroup", "0::/a.slice/b:c.scope\n");
    CHECK(is_visited(&root, "/sys/fs/cgroup/a.slice/b:c.scope"));
    CHECK(is_visited(&root, "/sys/fs/cgroup/a.slice"));
    CHECK(is_visited(&root, "/sys/fs/cgroup"));
    CHECK(!is_visited(&root, "/sys/fs"));
    CHECK(!is_visited(&root, "/sys/fs/cgroup/a.slice/x"));
    root_remove(&root);
}

/* What of the hierarchy is mounted, the process's group, and the folder that results.
 */
static void
test_cgroup_mounted_part_is_honoured(void)
{
    static const struct {
        const char *mount;
        const char *own;
        const char *path;
    } cases[] = {
        /* a container without a namespace of its own: its group alone is mounted */
        {"1 0 0:9 /docker/ab /m rw - cgroup2 c rw\n", "0::/docker/ab\n", "/m"},
        {"1 0 0:9 /docker/ab /m rw - cgroup2 c rw\n", "0::/docker/ab/x\n", "/m/x"},
        /* a group whose name merely begins the same, and one that lies above */
        {"1 0 0:9 /docker/ab /m rw - cgroup2 c rw\n", "0::/docker/abc\n", "/m"},
        {"1 0 0:9 / /m rw - cgroup2 c rw\n", "0::/../other\n", "/m"},
        {"1 0 0:9 / /m rw - cgroup2 c rw\n", "0::/\n", "/m"},
        /* of two mounts the one that holds the group */
        {"1 0 0:9 /q /n rw - cgroup2 c rw\n2 0 0:9 / /m rw - cgroup2 c rw\n", "0::/p\n",
         "/m/p"},
        {"2 0 0:9 / /m rw - cgroup2 c rw\n1 0 0:9 /q /n rw - cgroup2 c rw\n", "0::/p\n",
         "/m/p"},
        {"1 0 0:9 / /with\\040space rw - cgroup2 c rw\n", "0::/p\n", "/with space/p"},
        /* version 1, alone and beside a version 2 that has no groups */
        {"1 0 0:9 / /m rw - cgroup c rw,memory\n", "4:cpu:/no\n3:x,memory:/p\n",
         "/m/p"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        fake_root root;
        root_make(&root);
        root_write(&root, "/proc/self/mountinfo", cases[i].mount);
        root_write(&root, "/proc/self/cgroup", cases[i].own);
        CHECK(is_visited(&root, cases[i].path));
        CHECK(!is_visited(&root, "/n"));
        root_remove(&root);
    }
}

static void
test_cgroup_garbage_finds_nothing(void)
{
    static const char *const mounts[] = {"",
                                         "\n\n - cgroup2\n",
                                         "1 2 3 - cgroup2 a b\n",
                                         "- cgroup2 - cgroup2 - cgroup2",
                                         "1 0 0:9 / /m rw - cgroup c rw,cpu\n",
                                         "1 0 0:9 / /m rw - cgroup2\n"};
    static const char *const owns[] = {"", "0", "0:", "0::", ":::::\n", "0::/p"};
    for (size_t i = 0; i < sizeof(mounts) / sizeof(*mounts); i++) {
        for (size_t k = 0; k < sizeof(owns) / sizeof(*owns); k++) {
            fake_root root;
            root_make(&root);
            root_write(&root, "/proc/self/mountinfo", mounts[i]);
            root_write(&root, "/proc/self/cgroup", owns[k]);
            CHECK(!is_visited(&root, ""));
            CHECK(!is_visited(&root, "/m"));
            CHECK(!is_visited(&root, "/m/p"));
            root_remove(&root);
        }
    }
}

/* -- memory ----------------------------------------------------------------------------- */

static void
test_memory_without_any_file_is_unlimited(void)
{
    fake_root root;
    root_make(&root);
    cm_host_memory m = read_memory(&root);
    CHECK(m.limit_nbytes == UINT64_MAX);
    CHECK(m.available_nbytes == UINT64_MAX);
    CHECK(m.total_nbytes == UINT64_MAX);
    root_remove(&root);
}

static void
test_memory_without_groups_is_the_machines(void)
{
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/meminfo", MEMINFO);
    cm_host_memory m = read_memory(&root);
    CHECK_EQ(m.limit_nbytes, 16 * GIB);
    CHECK_EQ(m.available_nbytes, 8 * GIB);
    CHECK(m.cgroup_nbytes == UINT64_MAX);
    root_remove(&root);
}

static void
test_memory_tightest_group_on_the_way_up_counts(void)
{
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/meminfo", MEMINFO);
    root_write(&root, "/proc/self/mountinfo", MOUNT_V2);
    root_write(&root, "/proc/self/cgroup", "0::/a/b/c\n");
    root_write(&root, "/sys/fs/cgroup/a/b/c/memory.max", "max\n");
    root_write(&root, "/sys/fs/cgroup/a/b/c/memory.current", "1\n");
    /* the least limit is a's; the least left is b's */
    root_write(&root, "/sys/fs/cgroup/a/b/memory.max", "6442450944\n");
    root_write(&root, "/sys/fs/cgroup/a/b/memory.current", "5368709120\n");
    root_write(&root, "/sys/fs/cgroup/a/memory.max", "4294967296\n");
    root_write(&root, "/sys/fs/cgroup/a/memory.current", "1073741824\n");
    cm_host_memory m = read_memory(&root);
    CHECK_EQ(m.cgroup_nbytes, 4 * GIB);
    CHECK_EQ(m.limit_nbytes, 4 * GIB);
    CHECK_EQ(m.available_nbytes, 1 * GIB);
    /* file cache is given up before anybody is killed */
    root_write(&root, "/sys/fs/cgroup/a/b/memory.stat",
               "anon 3\nfile 9\ninactive_file 1048576\nactive_file 2097152\n");
    CHECK_EQ(read_memory(&root).available_nbytes, 1 * GIB + 3 * MIB);
    /* but no more of it than is used */
    root_write(&root, "/sys/fs/cgroup/a/b/memory.stat",
               "inactive_file 18446744073709551615\nactive_file 5\n");
    CHECK_EQ(read_memory(&root).available_nbytes, 3 * GIB);
    /* a group above its limit has nothing left */
    root_write(&root, "/sys/fs/cgroup/a/b/memory.stat", "garbage\n");
    root_write(&root, "/sys/fs/cgroup/a/b/memory.current", "6442450945\n");
    CHECK_EQ(read_memory(&root).available_nbytes, 0);
    root_remove(&root);
}

static void
test_memory_limit_above_the_machine_is_the_machine(void)
{
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/meminfo", MEMINFO);
    root_write(&root, "/proc/self/mountinfo", MOUNT_V2);
    root_write(&root, "/proc/self/cgroup", "0::/a\n");
    root_write(&root, "/sys/fs/cgroup/a/memory.max", "1099511627776\n");
    cm_host_memory m = read_memory(&root); /* nor is there a memory.current */
    CHECK_EQ(m.limit_nbytes, 16 * GIB);
    CHECK_EQ(m.available_nbytes, 8 * GIB);
    CHECK_EQ(m.cgroup_nbytes, 1024 * GIB);
    root_remove(&root);
}

static void
test_memory_version_1_is_read_beside_version_2(void)
{
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/meminfo", MEMINFO);
    root_write(&root, "/proc/self/mountinfo",
               "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n"
               "41 31 0:38 / /cg/unified rw - cgroup2 cgroup2 rw\n");
    root_write(&root, "/proc/self/cgroup", "4:memory:/job/7\n0::/\n");
    root_write(&root, "/cg/memory/memory.limit_in_bytes", "9223372036854771712\n");
    root_write(&root, "/cg/memory/memory.usage_in_bytes", "123456789\n");
    root_write(&root, "/cg/memory/job/memory.limit_in_bytes", "2147483648\n");
    root_write(&root, "/cg/memory/job/memory.usage_in_bytes", "1610612736\n");
    root_write(&root, "/cg/memory/job/memory.stat",
               "inactive_file 1\nactive_file 2\ntotal_inactive_file 268435456\n"
               "total_active_file 0\n");
    root_write(&root, "/cg/memory/job/7/memory.limit_in_bytes", "9223372036854771712");
    cm_host_memory m = read_memory(&root);
    CHECK_EQ(m.limit_nbytes, 2 * GIB);
    CHECK_EQ(m.available_nbytes, 768 * MIB);
    root_remove(&root);
}

static void
test_memory_garbage_limits_nothing(void)
{
    static const char *const texts[] = {"",
                                        "\n",
                                        "many\n",
                                        "-1\n",
                                        "12 34 x",
                                        "0x10\n",
                                        " 1\n",
                                        "12x\n",
                                        "18446744073709551616\n",
                                        "99999999999999999999999\n"};
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/meminfo", "MemTotal: lots kB\nMemAvailable\n");
    root_write(&root, "/proc/self/mountinfo", MOUNT_V2);
    root_write(&root, "/proc/self/cgroup", "0::/a\n");
    for (size_t i = 0; i < sizeof(texts) / sizeof(*texts); i++) {
        root_write(&root, "/sys/fs/cgroup/a/memory.max", texts[i]);
        cm_host_memory m = read_memory(&root);
        CHECK_EQ(m.cgroup_nbytes, strcmp(texts[i], "12 34 x") == 0 ? 12 : UINT64_MAX);
        CHECK(m.total_nbytes == UINT64_MAX);
        CHECK_EQ(m.available_nbytes, m.cgroup_nbytes);
    }
    root_remove(&root);
}

static void
test_memory_of_this_machine_makes_sense(void)
{
    cm_host_memory m;
    cm_host_memory_read(NULL, &m);
    CHECK_GT(m.total_nbytes, 0);
    CHECK(m.total_nbytes != UINT64_MAX);
    CHECK(m.limit_nbytes <= m.total_nbytes);
    CHECK(m.available_nbytes < m.total_nbytes);
}

static void
test_memory_keys_stand_at_the_beginning_of_a_line(void)
{
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/meminfo", "xMemTotal: 5 kB\nMemTotal:x 6 kB\nMemTotal:\n");
    CHECK_EQ(read_memory(&root).total_nbytes, UINT64_MAX);
    root_write(&root, "/proc/meminfo", "xMemTotal: 5 kB\nMemTotal:\t7 kB\n");
    CHECK_EQ(read_memory(&root).total_nbytes, 7 * 1024);
    root_remove(&root);
}

static void
test_memory_file_of_any_length_is_read(void)
{
    enum { LENGTH = 300000 };
    fake_root root;
    char *text = malloc(LENGTH + 100);
    memset(text, 'x', LENGTH);
    strcpy(text + LENGTH, "\nMemTotal: 7 kB\n");
    root_make(&root);
    root_write(&root, "/proc/meminfo", text);
    free(text);
    CHECK_EQ(read_memory(&root).total_nbytes, 7 * 1024);
    root_remove(&root);
    root_make(&root);
    root_write(&root, "/proc/meminfo/folder", "");
    CHECK_EQ(read_memory(&root).total_nbytes, UINT64_MAX);
    root_remove(&root);
}

/* -- CPUs ------------------------------------------------------------------------------- */

static void
test_cpu_quota_is_rounded_up_to_whole_cpus(void)
{
    static const struct {
        const char *text;
        unsigned count; /* 0: what affinity allows */
    } quotas[] = {{"100000 100000\n", 1}, {"1000 100000\n", 1},
                  {"max 100000\n", 0},    {"", 0},
                  {"100000\n", 0},        {"100000 0\n", 0},
                  {"100000 x\n", 0},      {"0 100000\n", 1}};
    cm_cpus cpus;
    fake_root root;
    CHECK(cm_cpus_read(&cpus));
    unsigned all = cm_cpus_count(&cpus);
    CHECK_GE(all, 1);
    root_make(&root);
    CHECK_EQ(cm_usable_cpu_count(root.path), all);
    root_write(&root, "/proc/self/mountinfo", MOUNT_V2);
    root_write(&root, "/proc/self/cgroup", "0::/a/b\n");
    for (size_t i = 0; i < sizeof(quotas) / sizeof(*quotas); i++) {
        root_write(&root, "/sys/fs/cgroup/a/cpu.max", quotas[i].text);
        CHECK_EQ(cm_usable_cpu_count(root.path),
                 quotas[i].count != 0 ? quotas[i].count : all);
    }
    root_write(&root, "/sys/fs/cgroup/a/cpu.max", "150000 100000\n");
    CHECK_EQ(cm_usable_cpu_count(root.path), all < 2 ? all : 2);
    root_remove(&root);
}

static void
test_cpu_quota_of_version_1_counts(void)
{
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/self/mountinfo",
               "35 31 0:32 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
    root_write(&root, "/proc/self/cgroup", "4:cpuacct,cpu:/job\n");
    root_write(&root, "/cg/cpu/job/cpu.cfs_period_us", "100000\n");
    root_write(&root, "/cg/cpu/job/cpu.cfs_quota_us", "50000\n");
    CHECK_EQ(cm_usable_cpu_count(root.path), 1);
    root_write(&root, "/cg/cpu/job/cpu.cfs_quota_us", "-1\n");
    cm_cpus cpus;
    CHECK(cm_cpus_read(&cpus));
    CHECK_EQ(cm_usable_cpu_count(root.path), cm_cpus_count(&cpus));
    root_remove(&root);
}

static void *
count_on_one_cpu(void *out)
{
    cm_cpus all;
    cm_cpus one;
    memset(&one, 0, sizeof(one));
    (void)cm_cpus_read(&all);
    for (size_t i = 0; i < 8 * sizeof(all); i++) {
        if (CPU_ISSET_S(i, sizeof(all), all.sets)) {
            CPU_SET_S(i, sizeof(one), one.sets);
            break;
        }
    }
    (void)sched_setaffinity(0, sizeof(one), one.sets);
    *(unsigned *)out = cm_usable_cpu_count(NULL);
    return NULL;
}

static void
test_cpu_affinity_of_the_thread_counts(void)
{
    cm_thread thread;
    unsigned count = 0;
    CHECK_OK(cm_thread_start(&thread, count_on_one_cpu, &count));
    cm_thread_join(thread);
    CHECK_EQ(count, 1);
}

/* clang-format off */
MAIN(
    RUN(test_cgroup_walk_ends_at_the_mount_point)
    RUN(test_cgroup_mounted_part_is_honoured)
    RUN(test_cgroup_garbage_finds_nothing)
    RUN(test_memory_without_any_file_is_unlimited)
    RUN(test_memory_without_groups_is_the_machines)
    RUN(test_memory_tightest_group_on_the_way_up_counts)
    RUN(test_memory_limit_above_the_machine_is_the_machine)
    RUN(test_memory_version_1_is_read_beside_version_2)
    RUN(test_memory_garbage_limits_nothing)
    RUN(test_memory_keys_stand_at_the_beginning_of_a_line)
    RUN(test_memory_file_of_any_length_is_read)
    RUN(test_memory_of_this_machine_makes_sense)
    RUN(test_cpu_quota_is_rounded_up_to_whole_cpus)
    RUN(test_cpu_quota_of_version_1_counts)
    RUN(test_cpu_affinity_of_the_thread_counts)
)
/* clang-format on */
