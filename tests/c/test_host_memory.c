/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of what base/machine reads about memory and CPUs from the kernel's files: the
 * machine's memory, the limits of control groups (of versions 1 and 2), and CPU quotas.
 * Most tests write these files into a folder that takes the place of /. */
#include <sched.h>

#include "base/machine.h"
#include "base/thread.h"
#include "fake_root.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

#define MEMINFO                                                                        \
    "MemTotal:       16777216 kB\nMemFree:         1000 kB\n"                          \
    "MemAvailable:    8388608 kB\n"
#define NO_QUOTA UINT64_MAX

/* Read the memory that the files below the root describe. */
static cm_host_memory
read_memory(const fake_root *root)
{
    cm_host_memory memory;
    cm_host_memory_read(root->path, &memory);
    return memory;
}

/* -- memory ----------------------------------------------------------------------------- */

/* Without any file nothing is known, which counts as no limit. */
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

/* Without control groups the limit and the available memory are those of the
 * machine. */
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

/* Three groups lie inside each other. The limit must be the lowest of their limits, and
 * the available memory the least that any of them has left. */
static void
test_memory_tightest_group_on_the_way_up_counts(void)
{
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/meminfo", MEMINFO);
    CHECK(cm_control_groups_set("/sys/fs/cgroup/a/b/c\n/sys/fs/cgroup/a/b\n"
                                "/sys/fs/cgroup/a\n/sys/fs/cgroup\n",
                                NO_QUOTA));
    root_write(&root, "/sys/fs/cgroup/a/b/c/memory.max", "max\n");
    root_write(&root, "/sys/fs/cgroup/a/b/c/memory.current", "1\n");
    /* The lowest limit is that of a, and b has the least memory left. */
    root_write(&root, "/sys/fs/cgroup/a/b/memory.max", "6442450944\n");
    root_write(&root, "/sys/fs/cgroup/a/b/memory.current", "5368709120\n");
    root_write(&root, "/sys/fs/cgroup/a/memory.max", "4294967296\n");
    root_write(&root, "/sys/fs/cgroup/a/memory.current", "1073741824\n");
    cm_host_memory m = read_memory(&root);
    CHECK_EQ(m.cgroup_nbytes, 4 * GIB);
    CHECK_EQ(m.limit_nbytes, 4 * GIB);
    CHECK_EQ(m.available_nbytes, 1 * GIB);
    /* Pages of file cache count as available, since the kernel gives them up before it
     * kills anybody. */
    root_write(&root, "/sys/fs/cgroup/a/b/memory.stat",
               "anon 3\nfile 9\ninactive_file 1048576\nactive_file 2097152\n");
    CHECK_EQ(read_memory(&root).available_nbytes, 1 * GIB + 3 * MIB);
    /* The file cache counts at most as much as the memory that the group uses. */
    root_write(&root, "/sys/fs/cgroup/a/b/memory.stat",
               "inactive_file 18446744073709551615\nactive_file 5\n");
    CHECK_EQ(read_memory(&root).available_nbytes, 3 * GIB);
    /* A group above its limit has nothing left. */
    root_write(&root, "/sys/fs/cgroup/a/b/memory.stat", "garbage\n");
    root_write(&root, "/sys/fs/cgroup/a/b/memory.current", "6442450945\n");
    CHECK_EQ(read_memory(&root).available_nbytes, 0);
    root_remove(&root);
}

/* If a group's limit is above the machine's memory, the machine's memory is the limit
 * that counts. Only the figure of the group itself shows the higher one. */
static void
test_memory_limit_above_the_machine_is_the_machine(void)
{
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/meminfo", MEMINFO);
    CHECK(cm_control_groups_set("/sys/fs/cgroup/a\n", NO_QUOTA));
    root_write(&root, "/sys/fs/cgroup/a/memory.max", "1099511627776\n");
    cm_host_memory m = read_memory(&root); /* there is no memory.current either */
    CHECK_EQ(m.limit_nbytes, 16 * GIB);
    CHECK_EQ(m.available_nbytes, 8 * GIB);
    CHECK_EQ(m.cgroup_nbytes, 1024 * GIB);
    root_remove(&root);
}

/* Files of both versions exist beside each other, and both kinds of limits count. */
static void
test_memory_version_1_is_read_beside_version_2(void)
{
    fake_root root;
    root_make(&root);
    root_write(&root, "/proc/meminfo", MEMINFO);
    CHECK(cm_control_groups_set("/cg/unified\n/cg/memory/job/7\n/cg/memory/job\n"
                                "/cg/memory\n",
                                NO_QUOTA));
    root_write(&root, "/cg/unified/memory.max", "4294967296\n");
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
    /* Setting the same groups again must change nothing, and setting others must. */
    CHECK(cm_control_groups_set("/cg/unified\n", NO_QUOTA));
    CHECK(cm_control_groups_set("/cg/unified\n", NO_QUOTA));
    CHECK_EQ(read_memory(&root).limit_nbytes, 4 * GIB);
    CHECK(cm_control_groups_set("", NO_QUOTA));
    CHECK_EQ(read_memory(&root).limit_nbytes, 16 * GIB);
    root_remove(&root);
}

/* A limit that cannot be understood must count as none. */
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
    CHECK(cm_control_groups_set("/sys/fs/cgroup/a\n", NO_QUOTA));
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

/* A key counts only as a whole word at the beginning of a line, with a number behind
 * it. */
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

/* A very long file is read to its end, and a folder in place of a file is not an
 * error. */
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

/* A quota below the number of CPUs of this thread counts, and one above it does not. */
static void
test_cpu_quota_counts_where_it_allows_fewer(void)
{
    cm_cpus cpus;
    CHECK(cm_cpus_read(&cpus));
    unsigned all = cm_cpus_count(&cpus);
    CHECK_GE(all, 1);
    CHECK_EQ(cm_usable_cpu_count(), all);
    CHECK(cm_control_groups_set("", 1));
    CHECK_EQ(cm_usable_cpu_count(), 1);
    CHECK(cm_control_groups_set("", all + UINT64_C(1)));
    CHECK_EQ(cm_usable_cpu_count(), all);
}

/* The body of a thread that restricts itself to its first CPU, and then counts the CPUs
 * that it may use. */
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
    *(unsigned *)out = cm_usable_cpu_count();
    return NULL;
}

/* A thread that may run on only one CPU must count one CPU. */
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
    RUN(test_memory_without_any_file_is_unlimited)
    RUN(test_memory_without_groups_is_the_machines)
    RUN(test_memory_tightest_group_on_the_way_up_counts)
    RUN(test_memory_limit_above_the_machine_is_the_machine)
    RUN(test_memory_version_1_is_read_beside_version_2)
    RUN(test_memory_garbage_limits_nothing)
    RUN(test_memory_keys_stand_at_the_beginning_of_a_line)
    RUN(test_memory_file_of_any_length_is_read)
    RUN(test_memory_of_this_machine_makes_sense)
    RUN(test_cpu_quota_counts_where_it_allows_fewer)
    RUN(test_cpu_affinity_of_the_thread_counts)
)
/* clang-format on */
