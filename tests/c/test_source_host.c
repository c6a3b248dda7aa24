/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the source that makes each chunk by itself (cm_source_segments_open()). It
 * populates and registers fresh pages for host memory, and makes everything else by an
 * allocation of the runtime. The tests check where the pages are, what remains if a
 * step fails, and how each kind of memory is made. */
#include <sys/mman.h>

#include "base/thread.h"
#include "fake_root.h"
#include "open_emulated.h"
#include "pool/source.h"

#define MIB (UINT64_C(1) << 20)
/* Nodes that no test machine has. make_two_nodes() lets the second one seem to
 * exist. */
enum { NO_SUCH_NODE = 62, FAR_NODE = 63 };

/* clang-format off */
#define CONFIG(kind_, device_, flags_, segments_)                                      \
    {.kind = (kind_), .device = (device_), .flags = (flags_), .segments = (segments_), \
     .numa_node = CM_NUMA_NO_NODE}
/* clang-format on */
static const cm_pool_config PINNED =
    CONFIG(CM_KIND_PINNED, 0, CM_HOST_ALLOC_PORTABLE, CM_SEGMENTS_AUTO);
static const cm_pool_config MAPPED =
    CONFIG(CM_KIND_MAPPED, 1, CM_HOST_ALLOC_MAPPED, CM_SEGMENTS_AUTO);

/* Open a source, and stay on its device for the rest of the test. */
static cm_source *
open_source(cm_runtime *rt, const cm_pool_config *config, const cm_host_world *world)
{
    cm_source *source = NULL;
    cm_device_guard guard;
    MUST(cm_device_enter(rt, config->device, &guard)); /* for the rest of the test */
    MUST(cm_source_segments_open(rt, config, world, &source));
    return source;
}

static cm_emulated_counts
read_counts(cm_runtime *rt)
{
    cm_emulated_counts counts;
    cm_emulated_read_counts(rt, &counts);
    return counts;
}

/* True if every page of the chunk has memory. */
static bool
is_populated(const cm_chunk *chunk)
{
    static unsigned char in[1 << 14];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (chunk->nbytes / page > sizeof(in)
        || mincore(chunk->host, chunk->nbytes, in) != 0) {
        return false;
    }
    for (uint64_t i = 0; i < chunk->nbytes / page; i++) {
        if ((in[i] & 1) == 0) {
            return false;
        }
    }
    return true;
}

/* True if the whole range is mapped. */
static bool
is_mapped(void *start, uint64_t nbytes)
{
    static unsigned char in[1 << 14];
    return mincore(start, nbytes, in) == 0;
}

/* A host_device_address that fails. */
static cm_status
fail_address(cm_runtime *rt, void *host, cm_address *out)
{
    (void)rt;
    (void)out;
    return (cm_status){CM_CUDA_INVALID_VALUE, CM_OP_host_device_address, 0,
                       (uintptr_t)host};
}

/* -- chunks ----------------------------------------------------------------------------- */

/* A chunk must have all its pages, must be zero, and must be registered by one call.
 * Closing it must unmap it. The test does this with several numbers of threads that
 * populate the chunk, and as if the kernel lacked the calls that populate or bind. */
static void
test_host_chunk_is_populated_and_registered_once(void)
{
    static const cm_host_world worlds[] = {
        {.thread_count = 0},
        {.thread_count = 1, .can_not_populate = true},
        {.thread_count = 3},
        {.thread_count = 8, .can_not_populate = true},
        {.thread_count = 2, .can_not_bind = true},
    };
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    for (size_t i = 0; i < sizeof(worlds) / sizeof(*worlds); i++) {
        cm_source *source = open_source(rt, i % 2 == 0 ? &PINNED : &MAPPED, &worlds[i]);
        cm_chunk chunk;
        CHECK_EQ(source->granule, 2 * MIB);
        CHECK(!source->is_placed);
        CHECK(source->ops->move_chunk == NULL);
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        CHECK_OK(source->ops->open_chunk(source, 0, 38 * MIB, &chunk));
        CHECK_EQ(cm_faults_count(rt, CM_OP_host_register), 1);
        CHECK_EQ(cm_faults_count(rt, CM_OP_host_alloc), 0);
        CHECK_EQ(chunk.nbytes, 38 * MIB);
        CHECK_EQ((uintptr_t)chunk.host % (2 * MIB), 0);
        CHECK(is_populated(&chunk));
        CHECK_FILLED(chunk.host, 0, chunk.nbytes);
        cm_pointer_info info;
        char *last = (char *)chunk.host + chunk.nbytes - 1;
        CHECK_OK(cm_rt_pointer_attributes(rt, (cm_address)(uintptr_t)last, &info));
        CHECK_EQ(info.kind, CM_KIND_PINNED);
        CHECK_EQ(info.device_address, chunk.address + chunk.nbytes - 1);
        void *host = chunk.host;
        CHECK_OK(source->ops->close_chunk(source, &chunk));
        CHECK(chunk.host == NULL);
        CHECK(!is_mapped(host, 38 * MIB));
        source->ops->destroy(source);
        check_nothing_live(rt);
    }
    close_emulated(rt);
}

typedef struct process_memory {
    uint64_t mapped_nbytes;
    uint64_t resident_nbytes;
} process_memory;

static process_memory
read_process_memory(void)
{
    unsigned long long mapped = 0;
    unsigned long long resident = 0;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    FILE *f = fopen("/proc/self/statm", "r");
    if (f != NULL) {
        if (fscanf(f, "%llu %llu", &mapped, &resident) != 2) {
            mapped = resident = 0;
        }
        (void)fclose(f);
    }
    return (process_memory){mapped * page, resident * page};
}

static void
check_populated_chunk(cm_source *source, uint64_t nbytes)
{
    cm_chunk chunk;
    CHECK_OK(source->ops->open_chunk(source, 0, nbytes, &chunk));
    CHECK_EQ(chunk.nbytes, nbytes);
    CHECK(is_populated(&chunk));
    CHECK_FILLED(chunk.host, 0, chunk.nbytes);
    CHECK_OK(source->ops->close_chunk(source, &chunk));
}

/* A source that was told to expect chunks maps the next one before anybody asks for it.
 * Chunks of the expected length and of other lengths must be as they are without that.
 * A prepared chunk that nobody takes must be unmapped when the source is told to expect
 * none, or when it is destroyed. */
static void
test_host_chunk_that_is_expected_is_prepared(void)
{
    enum { EXPECTED = 64 << 20, NOISE = 16 << 20 };
    static const cm_host_world world = {.thread_count = 1};
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_source *source = open_source(rt, &PINNED, &world);
    /* The first chunk to be prepared starts a thread, and some of its memory stays. */
    source->ops->expect(source, EXPECTED, 1);
    source->ops->expect(source, 0, 0);
    process_memory before = read_process_memory();
    CHECK(before.resident_nbytes > 0);
    for (int is_told = 0; is_told < 2; is_told++) {
        source->ops->expect(source, EXPECTED, 3);
        CHECK(read_process_memory().mapped_nbytes >= before.mapped_nbytes + EXPECTED);
        check_populated_chunk(source, EXPECTED);
        CHECK(read_process_memory().mapped_nbytes
              >= before.mapped_nbytes + EXPECTED); /* the second chunk */
        check_populated_chunk(source, 2 * MIB);
        check_populated_chunk(source, EXPECTED);
        if (is_told != 0) {
            source->ops->expect(source, 0, 0);
            CHECK(read_process_memory().resident_nbytes
                  < before.resident_nbytes + NOISE);
            source->ops->expect(source, EXPECTED, 1);
            check_populated_chunk(source, EXPECTED);
            check_populated_chunk(source, EXPECTED); /* one more than expected */
            CHECK(read_process_memory().resident_nbytes
                  < before.resident_nbytes + NOISE);
            source->ops->expect(source, EXPECTED, 1);
        }
        source->ops->destroy(source);
        CHECK(read_process_memory().resident_nbytes < before.resident_nbytes + NOISE);
        check_nothing_live(rt);
        source = open_source(rt, &PINNED, &world);
    }
    source->ops->destroy(source);
    close_emulated(rt);
}

/* The device can read the chunk by its host address, and write it by its device
 * address. */
static void
test_host_chunk_is_copied_from_and_to(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_source *source = open_source(rt, &PINNED, &(cm_host_world){.root = NULL});
    cm_chunk chunk;
    cm_address device = 0;
    CHECK_OK(source->ops->open_chunk(source, 0, 2 * MIB, &chunk));
    CHECK_OK(cm_rt_device_alloc(rt, 2 * MIB, &device));
    memset(chunk.host, 0x3c, MIB);
    CHECK_OK(cm_rt_copy_async(rt, device, (cm_address)(uintptr_t)chunk.host, MIB, 0));
    CHECK_OK(cm_rt_copy_async(rt, chunk.address + MIB, device, MIB, 0));
    CHECK_OK(cm_rt_stream_synchronize(rt, 0));
    CHECK_FILLED(chunk.host, 0x3c, 2 * MIB);
    CHECK_OK(cm_rt_device_free(rt, device));
    CHECK_OK(source->ops->close_chunk(source, &chunk));
    source->ops->destroy(source);
    close_emulated(rt);
}

/* Read the flags of the mapping at this address, as /proc/self/smaps lists them. */
static void
read_mapping_flags(const void *address, char *out, size_t nbytes)
{
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    bool inside = false;
    out[0] = '\0';
    while (maps != NULL && fgets(line, sizeof(line), maps) != NULL) {
        unsigned long start;
        unsigned long end;
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) {
            inside = (uintptr_t)address >= start && (uintptr_t)address < end;
        }
        else if (inside && strncmp(line, "VmFlags:", 8) == 0) {
            snprintf(out, nbytes, "%s", line);
        }
    }
    if (maps != NULL) {
        fclose(maps);
    }
}

/* The mapping of a chunk must be wiped in forked children (the flag "wf"), and ask for
 * huge pages (the flag "hg") where the kernel has any. */
static void
test_host_chunk_asks_for_huge_pages_and_is_wiped_in_children(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_source *source = open_source(rt, &PINNED, &(cm_host_world){.root = NULL});
    cm_chunk chunk;
    char flags[512];
    CHECK_OK(source->ops->open_chunk(source, 0, 4 * MIB, &chunk));
    read_mapping_flags(chunk.host, flags, sizeof(flags));
    CHECK(strstr(flags, " wf") != NULL); /* "wipe on fork" */
    if (access("/sys/kernel/mm/transparent_hugepage", F_OK) == 0) {
        CHECK(strstr(flags, " hg") != NULL);
    }
    CHECK_OK(source->ops->close_chunk(source, &chunk));
    source->ops->destroy(source);
    close_emulated(rt);
}

/* -- room ------------------------------------------------------------------------------- */

/* A chunk that is larger than the machine or a control group has left must be refused
 * before anything is mapped or called, with the memory that is left. */
static void
test_host_chunk_beyond_the_memory_left_is_refused_untouched(void)
{
    fake_root root;
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_chunk chunk;
    root_make(&root);
    root_write(&root, "/proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable: 6144 kB\n");
    cm_source *source = open_source(rt, &PINNED, &(cm_host_world){.root = root.path});
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    cm_status status = source->ops->open_chunk(source, 0, 8 * MIB, &chunk);
    CHECK_CODE(status, CM_EHOSTMEMORY);
    CHECK_EQ(status.arg, 6 * MIB);
    CHECK_EQ(cm_faults_count(rt, CM_OP_none), 0);
    CHECK_OK(source->ops->open_chunk(source, 0, 6 * MIB, &chunk));
    CHECK_OK(source->ops->close_chunk(source, &chunk));
    /* The limits of the group are read again each time. */
    CHECK(cm_control_groups_set("/m\n", 1000));
    root_write(&root, "/m/memory.max", "4194304\n");
    root_write(&root, "/m/memory.current", "2097152\n");
    CHECK_CODE(source->ops->open_chunk(source, 0, 4 * MIB, &chunk), CM_EHOSTMEMORY);
    CHECK_OK(source->ops->open_chunk(source, 0, 2 * MIB, &chunk));
    CHECK_OK(source->ops->close_chunk(source, &chunk));
    CHECK(cm_control_groups_set("", 1000));
    source->ops->destroy(source);
    root_remove(&root);
    close_emulated(rt);
}

/* A chunk for which the process has no addresses must fail without a call of the
 * runtime. */
static void
test_host_chunk_without_addresses_for_it_fails(void)
{
    fake_root root; /* a root without files, which sets no limit */
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_chunk chunk;
    root_make(&root);
    cm_source *source = open_source(rt, &PINNED, &(cm_host_world){.root = root.path});
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    CHECK_CODE(source->ops->open_chunk(source, 0, UINT64_C(1) << 47, &chunk),
               CM_EHOSTMEMORY);
    CHECK_CODE(source->ops->open_chunk(source, 0, 0 - 2 * MIB, &chunk), CM_EHOSTMEMORY);
    CHECK_EQ(cm_faults_count(rt, CM_OP_none), 0);
    source->ops->destroy(source);
    root_remove(&root);
    close_emulated(rt);
}

/* -- registering ------------------------------------------------------------------------ */

/* If the driver refuses to unregister a chunk, the chunk must stay usable. If it
 * refuses to register one, nothing may be left of it. */
static void
test_host_chunk_is_registered_by_one_call(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_source *source = open_source(rt, &PINNED, &(cm_host_world){.root = NULL});
    cm_chunk chunk;
    CHECK_OK(source->ops->open_chunk(source, 0, 6 * MIB, &chunk));
    CHECK_EQ(read_counts(rt).registrations, 1);
    /* If the driver does not let go of it, the chunk must stay as it was. */
    cm_faults_plan(rt, CM_OP_host_unregister, 1, 999, false);
    cm_status status = source->ops->close_chunk(source, &chunk);
    CHECK_CODE(status, 999);
    CHECK_EQ(status.op, CM_OP_host_unregister);
    CHECK_EQ(read_counts(rt).registrations, 1);
    memset(chunk.host, 1, chunk.nbytes);
    CHECK_OK(source->ops->close_chunk(source, &chunk));
    cm_faults_plan(rt, CM_OP_host_register, 1, CM_CUDA_OUT_OF_MEMORY, false);
    status = source->ops->open_chunk(source, 0, 6 * MIB, &chunk);
    CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
    CHECK_EQ(status.op, CM_OP_host_register);
    CHECK_EQ(status.arg, 6 * MIB);
    check_nothing_live(rt);
    source->ops->destroy(source);
    close_emulated(rt);
}

/* Where memory cannot be registered, the runtime allocates the chunk. */
static void
test_host_chunk_that_cannot_be_registered_is_the_runtimes(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_source *source = open_source(rt, &PINNED, &(cm_host_world){.root = NULL});
    cm_chunk chunk;
    cm_faults_plan(rt, CM_OP_host_register, 1, CM_CUDA_NOT_SUPPORTED, false);
    CHECK_OK(source->ops->open_chunk(source, 0, 2 * MIB, &chunk));
    CHECK_EQ(read_counts(rt).host_allocs, 1);
    memset(chunk.host, 1, chunk.nbytes);
    cm_faults_plan(rt, CM_OP_host_free, 1, 999, false);
    CHECK_CODE(source->ops->close_chunk(source, &chunk), 999);
    CHECK_EQ(read_counts(rt).host_allocs, 1);
    CHECK_OK(source->ops->close_chunk(source, &chunk));
    source->ops->destroy(source);
    close_emulated(rt);
}

/* -- NUMA ------------------------------------------------------------------------------- */

/* Write files that describe two nodes. This machine has at most the first, and device 0
 * is near the second. */
static void
make_two_nodes(fake_root *root, cm_runtime *rt)
{
    char path[128];
    cm_device_info info;
    root_make(root);
    MUST(cm_rt_device_describe(rt, 0, &info));
    snprintf(path, sizeof(path), "/sys/bus/pci/devices/%s/numa_node", info.pci_bus_id);
    root_write(root, path, "63\n");
    root_write(root, "/sys/devices/system/node/has_memory", "0,63\n");
    root_write(root, "/sys/devices/system/node/node63/cpulist", "0-8191\n");
}

/* A cm_numa_find by which all pages are on the far node. */
static void
find_far(void *const *pages, size_t count, int *nodes)
{
    (void)pages;
    for (size_t i = 0; i < count; i++) {
        nodes[i] = FAR_NODE;
    }
}

/* A cm_numa_find by which one page in the middle is on another node. */
static void
find_strewn(void *const *pages, size_t count, int *nodes)
{
    find_far(pages, count, nodes);
    nodes[count / 2] = 0;
}

/* A pool that asks for a node which the machine does not have gets an error, and no
 * runtime call is made. */
static void
test_numa_node_that_does_not_exist_is_refused_before_any_call(void)
{
    static const int nodes[] = {NO_SUCH_NODE, CM_NUMA_MAX_NODES, 1000, -2};
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    for (size_t i = 0; i < sizeof(nodes) / sizeof(*nodes); i++) {
        for (unsigned flags = 0; flags <= 4; flags += 4) {
            cm_pool_config config = PINNED;
            cm_source *source = NULL;
            config.numa_node = nodes[i];
            config.flags = flags;
            cm_faults_plan(rt, CM_OP_none, 0, 0, false);
            CHECK_CODE(cm_source_open(rt, &config, &source), CM_EINVALID);
            CHECK(source == NULL);
            CHECK_EQ(cm_faults_count(rt, CM_OP_none), 0);
        }
    }
    close_emulated(rt);
}

/* A pool asks for the far node. If its pages are elsewhere, even one of them, opening a
 * chunk must fail and leave nothing. */
static void
test_numa_pages_on_the_wrong_node_fail_the_check(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    fake_root root;
    cm_chunk chunk;
    cm_pool_config config = PINNED;
    make_two_nodes(&root, rt);
    config.numa_node = FAR_NODE;
    /* The pages really come from a node of this machine, and not from the one that is
     * asked for. A container may hide where pages are. In that case only the injected
     * answers below can show it. */
    char *page =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    *page = 1;
    bool must_fail = cm_numa_elsewhere(cm_numa_find_nodes, page, 4096, FAR_NODE) != 0;
    munmap(page, 4096);
    cm_source *source = open_source(rt, &config, &(cm_host_world){.root = root.path});
    cm_status status = source->ops->open_chunk(source, 0, 4 * MIB, &chunk);
    CHECK_CODE(status, must_fail ? CM_ENUMA : CM_OK);
    if (cm_is_ok(status)) {
        CHECK_OK(source->ops->close_chunk(source, &chunk));
    }
    else {
        CHECK_EQ(status.arg, 4 * MIB);
    }
    check_nothing_live(rt);
    source->ops->destroy(source);
    /* A single page that lies elsewhere must be noticed too. */
    source = open_source(
        rt, &config, &(cm_host_world){.root = root.path, .find_nodes = find_strewn});
    CHECK_CODE(source->ops->open_chunk(source, 0, 4 * MIB, &chunk), CM_ENUMA);
    check_nothing_live(rt);
    source->ops->destroy(source);
    source = open_source(rt, &config,
                         &(cm_host_world){.root = root.path, .find_nodes = find_far});
    CHECK_OK(source->ops->open_chunk(source, 0, 4 * MIB, &chunk));
    CHECK_OK(source->ops->close_chunk(source, &chunk));
    source->ops->destroy(source);
    root_remove(&root);
    close_emulated(rt);
}

/* Without a node in its config, a pool prefers the node nearest to its device. If its
 * pages come from elsewhere, that is not an error. */
static void
test_numa_nearest_node_is_a_wish_and_not_a_condition(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    fake_root root;
    cm_chunk chunk;
    make_two_nodes(&root, rt);
    /* mbind() refuses a node that does not exist. Then threads on the node's CPUs touch
     * the pages, if it has any. */
    for (int i = 0; i < 3; i++) {
        cm_host_world world = {.root = root.path, .find_nodes = find_strewn};
        world.can_not_bind = i == 1;
        if (i == 2) {
            root_write(&root, "/sys/devices/system/node/node63/cpulist", "\n");
        }
        cm_source *source = open_source(rt, &PINNED, &world);
        CHECK_OK(source->ops->open_chunk(source, 0, 20 * MIB, &chunk));
        CHECK(is_populated(&chunk));
        CHECK_OK(source->ops->close_chunk(source, &chunk));
        source->ops->destroy(source);
    }
    root_remove(&root);
    close_emulated(rt);
}

typedef struct cpu_visit {
    cm_source *source;
    cm_status status;
    cm_cpus before;
    cm_cpus after;
} cpu_visit;

/* Open and close a chunk, and read the CPUs of this thread before and after. */
static void *
open_and_close(void *context)
{
    cpu_visit *visit = context;
    cm_chunk chunk;
    (void)cm_cpus_read(&visit->before);
    visit->status = visit->source->ops->open_chunk(visit->source, 0, 8 * MIB, &chunk);
    (void)cm_cpus_read(&visit->after);
    if (cm_is_ok(visit->status)) {
        visit->status = visit->source->ops->close_chunk(visit->source, &chunk);
    }
    return NULL;
}

/* The pages are touched by threads on the node's CPUs. The caller's own CPUs must stay
 * as they were. */
static void
test_numa_first_touch_leaves_the_callers_affinity_alone(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    fake_root root;
    char cpu[32];
    int first = 0;
    cpu_visit visit = {.source = NULL};
    make_two_nodes(&root, rt);
    CHECK(cm_cpus_read(&visit.before));
    while (!CPU_ISSET_S((size_t)first, sizeof(visit.before), visit.before.sets)) {
        first++;
    }
    snprintf(cpu, sizeof(cpu), "%d\n", first);
    root_write(&root, "/sys/devices/system/node/node63/cpulist", cpu);
    visit.source = open_source(
        rt, &PINNED, &(cm_host_world){.root = root.path, .can_not_bind = true});
    open_and_close(&visit);
    CHECK_OK(visit.status);
    CHECK_BYTES_EQ(&visit.before, &visit.after, sizeof(visit.before));
    visit.source->ops->destroy(visit.source);
    root_remove(&root);
    close_emulated(rt);
}

/* -- failing calls ---------------------------------------------------------------------- */

/* Open a source, open and close a chunk, and return the first failure. If closing
 * fails, the chunk must still be usable. */
static cm_status
open_and_use(cm_runtime *rt, const cm_pool_config *config, const cm_host_world *world)
{
    cm_source *source = NULL;
    cm_chunk chunk;
    CM_TRY(cm_source_segments_open(rt, config, world, &source));
    cm_status status = source->ops->open_chunk(source, 0, 4 * MIB, &chunk);
    if (cm_is_ok(status)) {
        status = source->ops->close_chunk(source, &chunk);
        if (!cm_is_ok(status)) { /* the chunk must still exist and be usable */
            memset(chunk.host, 1, chunk.nbytes);
            MUST(source->ops->close_chunk(source, &chunk));
        }
    }
    source->ops->destroy(source);
    return status;
}

/* Each runtime call fails once. The failure must be reported, nothing may stay behind,
 * and the next chunk must succeed. */
static void
test_host_any_call_may_fail_and_nothing_is_left(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    fake_root root;
    cm_device_guard guard;
    make_two_nodes(&root, rt);
    CHECK_OK(cm_device_enter(rt, 0, &guard));
    cm_host_world world = {.root = root.path};
    uint64_t nth = 1;
    for (;; nth++) {
        cm_faults_plan(rt, CM_OP_none, nth, CM_CUDA_OUT_OF_MEMORY, false);
        cm_status status = open_and_use(rt, &PINNED, &world);
        cm_op injected = cm_faults_last_injected(rt);
        if (injected == CM_OP_none) {
            CHECK_OK(status);
            break;
        }
        CHECK_CODE(status, CM_CUDA_OUT_OF_MEMORY);
        CHECK_EQ(status.op, injected);
        check_nothing_live(rt);
        cm_faults_plan(rt, CM_OP_none, 0, 0, false);
        CHECK_OK(open_and_use(rt, &PINNED, &world));
    }
    /* The five calls are describe, attribute, register, address and unregister. */
    CHECK_EQ(nth, 6);
    cm_device_leave(rt, &guard);
    root_remove(&root);
    close_emulated(rt);
}

static _Atomic(void *) kept_host;

/* A host_device_address that notes its argument and fails. */
static cm_status
note_and_fail_address(cm_runtime *rt, void *host, cm_address *out)
{
    atomic_store(&kept_host, host);
    return fail_address(rt, host, out);
}

/* Opening a chunk fails after its pages were registered, and the driver refuses to
 * unregister them. The pages must stay mapped, since the driver may still use them, and
 * the first failure must be reported. */
static void
test_host_pages_that_the_driver_keeps_stay_mapped(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    const cm_ops_table *before = rt->ops;
    cm_ops_table ops = *before;
    ops.host_device_address = note_and_fail_address;
    cm_source *source = open_source(rt, &PINNED, &(cm_host_world){.root = NULL});
    cm_chunk chunk;
    rt->ops = &ops;
    cm_faults_plan(rt, CM_OP_host_unregister, 1, 999, true);
    cm_status status = source->ops->open_chunk(source, 0, 4 * MIB, &chunk);
    CHECK_CODE(status, CM_CUDA_INVALID_VALUE); /* this was the first failure */
    CHECK_EQ(status.op, CM_OP_host_device_address);
    CHECK_EQ(read_counts(rt).registrations, 1);
    char *kept = atomic_load(&kept_host);
    CHECK(is_mapped(kept, 4 * MIB));
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    CHECK_OK(cm_rt_host_unregister(rt, kept));
    munmap(kept, 4 * MIB);
    rt->ops = before;
    source->ops->destroy(source);
    close_emulated(rt);
}

/* A driver that is gone uses no pages any more, so closing a chunk must succeed and
 * unmap them. */
static void
test_host_driver_that_is_gone_has_let_go(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_source *source = open_source(rt, &PINNED, &(cm_host_world){.root = NULL});
    cm_chunk chunk;
    CHECK_OK(source->ops->open_chunk(source, 0, 2 * MIB, &chunk));
    void *host = chunk.host;
    cm_faults_plan(rt, CM_OP_host_unregister, 1, CM_CUDA_UNLOADING, false);
    CHECK_OK(source->ops->close_chunk(source, &chunk));
    CHECK(!is_mapped(host, 2 * MIB));
    CHECK_EQ(cm_faults_last_injected(rt), CM_OP_host_unregister);
    /* The fault wrapper did not end the emulated registration, so the test does. */
    CHECK_OK(cm_rt_host_unregister(rt, host));
    source->ops->destroy(source);
    close_emulated(rt);
}

/* -- which source ----------------------------------------------------------------------- */

/* A device_attribute that says the system cannot register memory. */
static cm_status
no_host_register(cm_runtime *rt, int attribute, int device, int *out)
{
    (void)rt;
    (void)device;
    *out = attribute == 99 ? 0 : 1;
    return cm_ok();
}

/* For each kind of memory the source must have the right granule, register what it can,
 * and make chunks that can be used. */
static void
test_source_of_each_kind(void)
{
    static const struct {
        cm_kind kind;
        unsigned flags;
        cm_segments segments;
        uint64_t granule;
        bool registers;
    } cases[] = {
        {CM_KIND_PINNED, CM_HOST_ALLOC_PORTABLE, CM_SEGMENTS_AUTO, 2 * MIB, true},
        {CM_KIND_MAPPED, CM_HOST_ALLOC_MAPPED, CM_SEGMENTS_AUTO, 2 * MIB, true},
        {CM_KIND_PINNED, CM_HOST_ALLOC_WRITE_COMBINED, CM_SEGMENTS_AUTO, 65536, false},
        {CM_KIND_PINNED, 0, CM_SEGMENTS_PLAIN, 65536, false},
        {CM_KIND_MAPPED, CM_HOST_ALLOC_MAPPED | CM_HOST_ALLOC_WRITE_COMBINED,
         CM_SEGMENTS_PLAIN, 65536, false},
        {CM_KIND_MANAGED, CM_MANAGED_GLOBAL, CM_SEGMENTS_AUTO, 2 * MIB, false},
        {CM_KIND_MANAGED, CM_MANAGED_HOST, CM_SEGMENTS_PLAIN, 2 * MIB, false},
        {CM_KIND_DEVICE, 0, CM_SEGMENTS_PLAIN, 2 * MIB, false},
    };
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_device_guard guard;
    CHECK_OK(cm_device_enter(rt, 1, &guard));
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        cm_pool_config config =
            CONFIG(cases[i].kind, 1, cases[i].flags, cases[i].segments);
        cm_source *source = NULL;
        cm_chunk chunk;
        CHECK_OK(cm_source_open(rt, &config, &source));
        CHECK_EQ(source->granule, cases[i].granule);
        CHECK_OK(source->ops->open_chunk(source, 0, 2 * cases[i].granule, &chunk));
        CHECK_EQ(read_counts(rt).registrations, cases[i].registers);
        CHECK_EQ(chunk.host == NULL, cases[i].kind == CM_KIND_DEVICE);
        CHECK_NE(chunk.address, 0);
        CHECK_EQ(chunk.nbytes, 2 * cases[i].granule);
        if (chunk.host != NULL) {
            memset(chunk.host, 0x5a, chunk.nbytes);
        }
        CHECK_OK(source->ops->close_chunk(source, &chunk));
        source->ops->destroy(source);
        check_nothing_live(rt);
    }
    cm_device_leave(rt, &guard);
    close_emulated(rt);
}

/* Where memory cannot be registered, pinned memory is made by the runtime. */
static void
test_source_falls_back_where_nothing_can_be_registered(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    const cm_ops_table *before = rt->ops;
    cm_ops_table ops = *before;
    cm_source *source = NULL;
    ops.device_attribute = no_host_register;
    rt->ops = &ops;
    CHECK_OK(cm_source_open(rt, &PINNED, &source));
    CHECK_EQ(source->granule, 65536);
    source->ops->destroy(source);
    rt->ops = before;
    close_emulated(rt);
}

/* Open a source, open and close a chunk, and return the first failure. */
static cm_status
open_and_use_plain(cm_runtime *rt, const cm_pool_config *config)
{
    cm_source *source = NULL;
    cm_chunk chunk;
    CM_TRY(cm_source_open(rt, config, &source));
    cm_status status = source->ops->open_chunk(source, 0, 2 * MIB, &chunk);
    if (cm_is_ok(status)) {
        status = source->ops->close_chunk(source, &chunk);
        if (!cm_is_ok(status)) {
            MUST(source->ops->close_chunk(source, &chunk));
        }
    }
    source->ops->destroy(source);
    return status;
}

/* Each runtime call for a chunk of a plain source fails once. The failure must be
 * reported, and nothing may stay behind. */
static void
test_plain_any_call_may_fail_and_nothing_is_left(void)
{
    static const cm_pool_config configs[] = {
        CONFIG(CM_KIND_PINNED, 0, CM_HOST_ALLOC_WRITE_COMBINED, CM_SEGMENTS_AUTO),
        CONFIG(CM_KIND_MAPPED, 0, CM_HOST_ALLOC_MAPPED, CM_SEGMENTS_PLAIN),
        CONFIG(CM_KIND_MANAGED, 0, CM_MANAGED_GLOBAL, CM_SEGMENTS_AUTO),
        CONFIG(CM_KIND_DEVICE, 0, 0, CM_SEGMENTS_PLAIN),
    };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_device_guard guard;
    CHECK_OK(cm_device_enter(rt, 0, &guard));
    for (size_t i = 0; i < sizeof(configs) / sizeof(*configs); i++) {
        for (uint64_t nth = 1;; nth++) {
            cm_faults_plan(rt, CM_OP_none, nth, 999, false);
            cm_status status = open_and_use_plain(rt, &configs[i]);
            if (cm_faults_last_injected(rt) == CM_OP_none) {
                CHECK_OK(status);
                CHECK_EQ(nth, i < 2 ? 4 : 3);
                break;
            }
            CHECK_CODE(status, 999);
            CHECK_EQ(status.op, cm_faults_last_injected(rt));
            check_nothing_live(rt);
        }
    }
    cm_device_leave(rt, &guard);
    close_emulated(rt);
}

/* clang-format off */
MAIN(
    RUN(test_host_chunk_is_populated_and_registered_once)
    RUN(test_host_chunk_that_is_expected_is_prepared)
    RUN(test_host_chunk_is_copied_from_and_to)
    RUN(test_host_chunk_asks_for_huge_pages_and_is_wiped_in_children)
    RUN(test_host_chunk_beyond_the_memory_left_is_refused_untouched)
    RUN(test_host_chunk_without_addresses_for_it_fails)
    RUN(test_host_chunk_is_registered_by_one_call)
    RUN(test_host_chunk_that_cannot_be_registered_is_the_runtimes)
    RUN(test_numa_node_that_does_not_exist_is_refused_before_any_call)
    RUN(test_numa_pages_on_the_wrong_node_fail_the_check)
    RUN(test_numa_nearest_node_is_a_wish_and_not_a_condition)
    RUN(test_numa_first_touch_leaves_the_callers_affinity_alone)
    RUN(test_host_any_call_may_fail_and_nothing_is_left)
    RUN(test_host_pages_that_the_driver_keeps_stay_mapped)
    RUN(test_host_driver_that_is_gone_has_let_go)
    RUN(test_source_of_each_kind)
    RUN(test_source_falls_back_where_nothing_can_be_registered)
    RUN(test_plain_any_call_may_fail_and_nothing_is_left)
)
/* clang-format on */
