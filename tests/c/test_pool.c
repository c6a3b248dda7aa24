/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the pool as a whole: the sizes and places of the blocks that it hands out,
 * how it grows while several threads use it, what forked children see of its memory,
 * and whether its counters and its listing add up. */
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pool_world.h"

/* In each kind of memory a block is usable, and when it has been given back the next
 * request of about the same size gets it again without a runtime call. */
static void
test_pool_each_kind_gives_memory_and_takes_it_back(void)
{
    static const cm_pool_config configs[] = {
        CONFIG(CM_KIND_PINNED, 0, 0),
        CONFIG(CM_KIND_PINNED, 1,
               CM_HOST_ALLOC_PORTABLE | CM_HOST_ALLOC_WRITE_COMBINED),
        CONFIG(CM_KIND_MAPPED, 0, CM_HOST_ALLOC_PORTABLE),
        CONFIG(CM_KIND_MANAGED, 0, CM_MANAGED_GLOBAL),
        CONFIG(CM_KIND_MANAGED, 1, CM_MANAGED_HOST),
        CONFIG(CM_KIND_DEVICE, 1, 0),
    };
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    for (size_t i = 0; i < sizeof(configs) / sizeof(*configs); i++) {
        cm_pool *pool = open_pool(rt, configs[i]);
        cm_block *block = take(pool, 1000, NULL);
        CHECK_GE(block->nbytes, 1000);
        CHECK_LT(block->nbytes, 1000 + 512);
        CHECK_NE(block->address, 0);
        CHECK_EQ(block->host == NULL, configs[i].kind == CM_KIND_DEVICE);
        if (block->host != NULL) {
            memset(block->host, 0x5a, block->nbytes);
            CHECK_FILLED(block->host, 0x5a, 1000);
        }
        cm_address first = block->address;
        CHECK_EQ(read_counters(pool).live_count, 1);
        give(pool, block, NULL, 0);
        cm_pool_counters idle = read_counters(pool);
        CHECK_EQ(idle.cached_nbytes, idle.reserved_nbytes);
        uint64_t before = cm_faults_count(rt, CM_OP_none);
        /* 990 bytes are rounded to the same size in every kind of memory. */
        block = take(pool, 990, NULL);
        /* A hit makes no runtime call. */
        CHECK_EQ(cm_faults_count(rt, CM_OP_none), before);
        CHECK_EQ(block->address, first);
        give(pool, block, NULL, 0);
        cm_pool_counters c = read_counters(pool);
        CHECK_EQ(c.live_count, 0);
        CHECK_EQ(c.allocation_count, 2);
        CHECK_EQ(c.hit_count, 1);
        CHECK_EQ(c.peak_live_nbytes, 1024);
        CHECK_EQ(c.reserved_nbytes, c.cached_nbytes);
        CHECK_EQ(c.lost_count, 0);
        cm_pool_release(pool);
        check_nothing_live(rt);
    }
    close_emulated(rt);
}

/* Each row is a size that is asked for, the size of its block in page-locked memory and
 * that in device memory. Sizes of 0 and sizes that overflow must be refused. */
static void
test_pool_sizes_are_exact_to_the_step(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *host = open_pool(rt, PINNED);
    cm_pool *device = open_pool(rt, DEVICE);
    static const uint64_t sizes[][3] = {{1, 64, 512},
                                        {64, 64, 512},
                                        {65, 128, 512},
                                        {4097, 4160, 4608},
                                        {64 * KIB - 1, 64 * KIB, 64 * KIB},
                                        /* Longer blocks get whole pages. */
                                        {64 * KIB + 1, 68 * KIB, 64 * KIB + 512},
                                        {MIB + 1, MIB + 4 * KIB, MIB + 4 * KIB},
                                        {3 * MIB + 1, 3 * MIB + 4096, 3 * MIB + 4096}};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        cm_block *a = take(host, sizes[i][0], NULL);
        cm_block *b = take(device, sizes[i][0], NULL);
        CHECK_EQ(a->nbytes, sizes[i][1]);
        CHECK_EQ(b->nbytes, sizes[i][2]);
        CHECK_EQ(a->address % (a->nbytes >= 64 * KIB ? 4096 : 64), 0);
        CHECK_EQ(b->address % (b->nbytes >= MIB ? 4096 : 512), 0);
        give(host, a, NULL, 0);
        give(device, b, NULL, 0);
    }
    cm_block *block = NULL;
    CHECK_CODE(pool_alloc(host, 0, NULL, &block), CM_EINVALID);
    CHECK_CODE(pool_alloc(host, UINT64_MAX - 3, NULL, &block), CM_EOVERFLOW);
    CHECK_CODE(pool_alloc(host, UINT64_C(1) << 63, NULL, &block), CM_EOVERFLOW);
    cm_pool_release(host);
    cm_pool_release(device);
    close_emulated(rt);
}

static void
test_pool_wrong_device_is_refused(void)
{
    static const cm_pool_config wrong[] = {CONFIG(CM_KIND_PINNED, 2, 0),
                                           CONFIG(CM_KIND_PINNED, -1, 0)};
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++) {
        cm_pool *pool = NULL;
        CHECK_CODE(cm_pool_create(rt, &wrong[i], &pool), CM_EINVALID);
    }
    cm_pool *mapped = open_pool(rt, (cm_pool_config)CONFIG(CM_KIND_MAPPED, 1, 0));
    CHECK_EQ(cm_pool_get_config(mapped)->flags, CM_HOST_ALLOC_MAPPED);
    CHECK_EQ(cm_pool_get_config(mapped)->device, 1);
    cm_pool_release(mapped);
    close_emulated(rt);
}

/* The pool's memory is on device 1, which it enters for its calls. Afterwards the
 * thread must have no current context, as before, and its mode of captures must be what
 * it was. */
static void
test_pool_calls_leave_the_callers_context_alone(void)
{
    cm_runtime *rt = open_emulated(13000, 2, 256 * MIB);
    cm_pool *pool = open_pool(rt, (cm_pool_config)CONFIG(CM_KIND_DEVICE, 1, 0));
    cm_stream *stream = open_stream(rt, 1);
    uint64_t context = 1;
    give(pool, take(pool, 100, stream), stream, CM_POOL_FREE_FENCE);
    give(pool, take(pool, 200, stream), stream, 0);
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 0, true, &released));
    CHECK_OK(cm_rt_context_get(rt, &context));
    CHECK_EQ(context, 0);
    int mode = CM_CAPTURE_RELAXED;
    CHECK_OK(cm_rt_capture_mode_exchange(rt, &mode));
    CHECK_EQ(mode, 0); /* the global mode, with which every thread begins */
    CHECK_OK(cm_rt_capture_mode_exchange(rt, &mode));
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* A live block must stay usable after the last release of its pool, and freeing it must
 * end the pool. */
static void
test_pool_block_keeps_its_pool(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_block *block = take(pool, 100, NULL);
    cm_pool_release(pool);
    memset(block->host, 1, 100);
    cm_pool_free(pool, block, NULL, 0, 0);
    close_emulated(rt);
}

/* In a forked child an allocation and a trim must fail with CM_EFORKED, a free must
 * leave the block live, and the counters must still be readable. */
static void
test_pool_forked_child_allocates_nothing_and_leaks(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    cm_block *block = take(pool, 100, NULL);
    give(pool, take(pool, CHUNK, NULL), NULL, 0);
    pid_t child = fork();
    if (child == 0) {
        cm_block *none = NULL;
        uint64_t released = 0;
        cm_pool_counters c;
        int wrong = pool_alloc(pool, 100, NULL, &none).code != CM_EFORKED;
        wrong |= pool_trim(pool, 0, true, &released).code != CM_EFORKED;
        cm_pool_free(pool, block, NULL, 0, CM_POOL_FREE_FENCE);
        cm_pool_read(pool, &c);
        wrong |= c.live_count != 1 || !cm_pool_check(pool);
        wrong |= c.peak_live_nbytes <= CHUNK;
        cm_pool_reset_peaks(pool);
        cm_pool_read(pool, &c);
        wrong |= c.peak_live_nbytes != c.live_nbytes;
        cm_pool_release(pool);
        _exit(wrong);
    }
    int result = -1;
    CHECK_EQ(waitpid(child, &result, 0), child);
    CHECK_EQ(result, 0);
    give(pool, block, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* -- forked children -------------------------------------------------------------------- */

/* Fork, and return what `check` returns in the child, or 99 if the child died. */
static int
ask_child(int (*check)(void *argument), void *argument)
{
    int result = 0;
    pid_t child = fork();
    if (child == 0) {
        (void)alarm(30);
        _exit(check(argument));
    }
    bool ended = waitpid(child, &result, 0) == child && WIFEXITED(result);
    return ended ? WEXITSTATUS(result) : 99;
}

static const cm_segments both_ways[] = {CM_SEGMENTS_AUTO, CM_SEGMENTS_PLAIN};

/* Open a page-locked pool whose segments are made in this way. */
static cm_pool *
open_way(cm_runtime *rt, cm_segments way)
{
    cm_pool_config config = PINNED;
    config.segments = way;
    return open_pool(rt, config);
}

/* The address at which the child maps memory of another library. */
static void *squatted;

/* A fork handler that stands for another library in the child. It maps memory where a
 * block of the parent lay, before the pools of the child do anything. */
static void
squat(void)
{
    if (squatted != NULL) {
        void *at = mmap(squatted, page_nbytes(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (at == squatted) {
            *(char *)at = 77;
        }
    }
}

/* Return 0 if the child does not take the block for an inherited one, and the memory
 * that was mapped in its place is untouched. */
static int
look_squatted(void *argument)
{
    return cm_block_is_inherited(argument) ? 1 : *(char *)squatted != 77;
}

/* Register squat() before the pools register their handlers, since a child calls
 * handlers in the order of registration. */
__attribute__((constructor(101))) static void
watch_forks(void)
{
    if (pthread_atfork(NULL, NULL, squat) != 0) {
        abort();
    }
}

/* Other memory may already lie at a block's address when the pool prepares the child.
 * The pool must not overwrite that memory. */
static void
test_pool_forked_child_leaves_what_came_to_lie_there(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_way(rt, CM_SEGMENTS_PLAIN);
    cm_block *block = take(pool, 100, NULL);
    squatted = block->host;
    CHECK_EQ(ask_child(look_squatted, block), 0);
    squatted = NULL;
    give(pool, block, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* Two live blocks with a freed one between them. */
typedef struct layout {
    cm_block *small;
    cm_block *large;
    cm_block *neighbour; /* it was given back before the fork */
} layout;

/* Return 0 if a child finds both live blocks with their bytes. It then writes to them,
 * which the parent must not see. */
static int
look_at_blocks(void *argument)
{
    const layout *b = argument;
    bool good = cm_block_is_inherited(b->small) && cm_block_is_inherited(b->large);
    for (uint64_t i = 0; good && i < 100; i++) {
        good = ((unsigned char *)b->small->host)[i] == 3;
    }
    for (uint64_t i = 0; good && i < 5 * MIB; i++) {
        good = ((unsigned char *)b->large->host)[i] == 4;
    }
    memset(b->small->host, 9, 100);
    memset(b->large->host, 9, 5 * MIB);
    return good ? 0 : 1;
}

/* A child gets a copy of each live block, twice in a row, and its writes do not reach
 * the parent. */
static void
test_pool_forked_child_has_the_living_blocks(void)
{
    for (int i = 0; i < 2; i++) {
        cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
        cm_pool *pool = open_way(rt, both_ways[i]);
        layout b = {.small = take(pool, 100, NULL)};
        b.neighbour = take(pool, 3 * MIB, NULL);
        b.large = take(pool, 5 * MIB, NULL);
        memset(b.small->host, 3, 100);
        memset(b.large->host, 4, 5 * MIB);
        give(pool, b.neighbour, NULL, 0);
        for (int turn = 0; turn < 2; turn++) {
            CHECK_EQ(ask_child(look_at_blocks, &b), 0);
        }
        CHECK_FILLED(b.small->host, 3, 100);
        CHECK_FILLED(b.large->host, 4, 5 * MIB);
        give(pool, b.small, NULL, 0);
        give(pool, b.large, NULL, 0);
        cm_pool_release(pool);
        close_emulated(rt);
    }
}

/* -- memory that children share, or have not got ------------------------------------------ */

/* Fork a child that checks that `block` begins and ends with `value`, and then runs
 * until end_child(). Returns 0 if there is no such child, or if it found other
 * bytes. */
static pid_t
leave_child(const cm_block *block, unsigned char value)
{
    int ready[2];
    if (pipe(ready) != 0) {
        return 0;
    }
    pid_t child = fork();
    if (child == 0) {
        char byte = 'x';
        const unsigned char *bytes = block->host;
        bool good = cm_block_is_inherited(block) && bytes[0] == value
                    && bytes[block->nbytes - 1] == value;
        (void)alarm(60); /* so that no child outlives a test that fails */
        if (good && write(ready[1], &byte, 1) == 1) {
            (void)pause();
        }
        _exit(0);
    }
    char byte;
    (void)close(ready[1]);
    bool has_started = read(ready[0], &byte, 1) == 1;
    (void)close(ready[0]);
    return has_started ? child : 0;
}

/* Kill a child that leave_child() has started. */
static void
end_child(pid_t child)
{
    int status;
    if (child > 0) {
        (void)kill(child, SIGKILL);
        (void)waitpid(child, &status, 0);
    }
}

/* Two children share a block with the parent. When the parent frees it, the block must
 * stay in flight until both children have ended, and other blocks must be reused
 * meanwhile. */
static void
test_pool_shared_block_is_kept_for_children(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool_config config = PINNED;
    config.fork = CM_FORK_SHARE;
    cm_pool *pool = open_pool(rt, config);
    cm_block *block = take(pool, 3 * MIB, NULL);
    const void *place = block->host;
    memset(block->host, 5, 3 * MIB);
    pid_t first = leave_child(block, 5);
    CHECK(first > 0);
    pid_t second = leave_child(block, 5);
    CHECK(second > 0);
    /* This one is allocated after the forks, so no child has it. */
    cm_block *later = take(pool, 3 * MIB, NULL);
    const void *free_place = later->host;
    give(pool, later, NULL, 0);
    give(pool, block, NULL, 0);
    later = take(pool, 3 * MIB, NULL);
    CHECK_PTR_EQ(later->host, free_place);
    cm_block *other = take(pool, 3 * MIB, NULL);
    CHECK(other->host != place);
    give(pool, other, NULL, 0);
    end_child(first); /* the second child still has the block */
    uint64_t released;
    CHECK_OK(cm_pool_trim(pool, UINT64_MAX, NULL, &released));
    cm_pool_counters counters;
    cm_pool_read(pool, &counters);
    CHECK_EQ(counters.in_flight_count, 1);
    end_child(second);
    const cm_wait_hooks uninterrupted = {.interrupted = NULL};
    CHECK_OK(cm_pool_trim(pool, UINT64_MAX, &uninterrupted, &released));
    cm_pool_read(pool, &counters);
    CHECK_EQ(counters.in_flight_count, 0);
    give(pool, later, NULL, 0);
    /* A pool that ends must not take memory away from a child either. */
    block = take(pool, 3 * MIB, NULL);
    memset(block->host, 6, 3 * MIB);
    first = leave_child(block, 6);
    CHECK(first > 0);
    give(pool, block, NULL, 0);
    cm_pool_release(pool);
    end_child(first);
    close_emulated(rt);
}

/* Return 0 if the child does not take the block for an inherited one. */
static int
look_at_omitted(void *argument)
{
    return cm_block_is_inherited(argument) ? 1 : 0;
}

/* Read the block, which must kill the child. */
static int
read_omitted(void *argument)
{
    (void)signal(SIGSEGV, SIG_DFL); /* The child has to die here, without a report. */
    return *(volatile unsigned char *)((cm_block *)argument)->host;
}

/* With CM_FORK_OMIT a child has only the address of a block. Reading there must kill
 * it, and the parent's bytes must stay. */
static void
test_pool_omitted_block_is_in_no_child(void)
{
    for (int i = 0; i < 2; i++) {
        cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
        cm_pool_config config = PINNED;
        config.fork = CM_FORK_OMIT;
        config.segments = both_ways[i];
        cm_pool *pool = open_pool(rt, config);
        cm_block *block = take(pool, 3 * MIB, NULL);
        memset(block->host, 7, 3 * MIB);
        CHECK_EQ(ask_child(look_at_omitted, block), 0);
        CHECK_EQ(ask_child(read_omitted, block), 99);
        CHECK_FILLED(block->host, 7, 3 * MIB);
        give(pool, block, NULL, 0);
        cm_pool_release(pool);
        close_emulated(rt);
    }
}

/* Write to a block that the parent has given back. */
static int
write_block(void *argument)
{
    (void)signal(SIGSEGV, SIG_DFL); /* The child may die here, without a report. */
    memset(((cm_block *)argument)->host, 9, 100);
    return 0;
}

/* A child writes to memory that the parent has freed but keeps cached. Whether or not
 * the child survives that, the parent's memory must not change. */
static void
test_pool_forked_child_shares_no_free_memory(void)
{
    for (int i = 0; i < 2; i++) {
        cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
        cm_pool *pool = open_way(rt, both_ways[i]);
        cm_block *block = take(pool, 100, NULL);
        memset(block->host, 3, 100);
        cm_block gone = *block;
        give(pool, block, NULL, 0);
        (void)ask_child(write_block, &gone);
        CHECK_FILLED(gone.host, 3, 100);
        cm_pool_release(pool);
        close_emulated(rt);
    }
}

typedef struct churn {
    cm_pool *pool;
    atomic_bool stop;
} churn;

/* The body of a thread that allocates blocks of many sizes, frees them and trims the
 * pool until it is stopped. */
static void *
churn_run(void *argument)
{
    churn *c = argument;
    for (uint64_t i = 1; !atomic_load(&c->stop); i++) {
        uint64_t released = 0;
        cm_block *block = take(c->pool, i * 4096 % (6 * MIB) + 1, NULL);
        give(c->pool, block, NULL, 0);
        if (i % 4 == 0) {
            MUST(pool_trim(c->pool, 0, false, &released));
        }
    }
    return NULL;
}

/* The main thread forks again and again while two threads make the pool grow and
 * shrink. Each child must find both live blocks with their bytes. */
static void
test_pool_forked_child_has_the_blocks_while_threads_change_the_pool(void)
{
    enum { ROUNDS = 40 };
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    churn c = {.pool = open_pool(rt, PINNED)};
    cm_thread threads[2];
    layout b = {.small = take(c.pool, 100, NULL), .large = take(c.pool, 5 * MIB, NULL)};
    memset(b.small->host, 3, 100);
    memset(b.large->host, 4, 5 * MIB);
    for (int i = 0; i < 2; i++) {
        MUST(cm_thread_start(&threads[i], churn_run, &c));
    }
    for (int i = 0; i < ROUNDS; i++) {
        CHECK_EQ(ask_child(look_at_blocks, &b), 0);
    }
    atomic_store(&c.stop, true);
    for (int i = 0; i < 2; i++) {
        cm_thread_join(threads[i]);
    }
    CHECK_FILLED(b.large->host, 4, 5 * MIB);
    give(c.pool, b.small, NULL, 0);
    give(c.pool, b.large, NULL, 0);
    cm_pool_release(c.pool);
    close_emulated(rt);
}

/* -- growing ---------------------------------------------------------------------------- */

typedef struct together {
    cm_pool *pool;
    cm_block *block;
} together;

/* The body of a thread: allocate 1000 bytes. */
static void *
take_small(void *arg)
{
    together *t = arg;
    MUST(pool_alloc(t->pool, 1000, NULL, &t->block));
    return NULL;
}

/* Six threads ask an empty pool for memory at the same time, and the operation that
 * makes memory is slow. The pool must grow once, and serve all threads from that. */
static void
test_pool_threads_that_miss_together_grow_once(void)
{
    enum { COUNT = 6 };
    static const cm_pool_config configs[] = {CONFIG(CM_KIND_DEVICE, 0, 0),
                                             CONFIG(CM_KIND_PINNED, 0, 0)};
    static const cm_op slow[] = {CM_OP_physical_create, CM_OP_host_register};
    for (size_t k = 0; k < 2; k++) {
        cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
        cm_pool *pool = open_pool(rt, configs[k]);
        cm_thread threads[COUNT];
        together all[COUNT];
        /* The delay is long enough for all threads to miss before the growth is
         * over. */
        cm_faults_delay(rt, slow[k], 50000);
        for (int i = 0; i < COUNT; i++) {
            all[i] = (together){pool, NULL};
            CHECK_OK(cm_thread_start(&threads[i], take_small, &all[i]));
        }
        for (int i = 0; i < COUNT; i++) {
            cm_thread_join(threads[i]);
        }
        cm_pool_counters c = read_counters(pool);
        CHECK_EQ(c.growth_count, 1);
        CHECK_GE(c.growth_ns, 50u * 1000 * 1000);
        CHECK_EQ(c.reserved_nbytes, CHUNK);
        CHECK_EQ(c.hit_count + c.miss_count, COUNT);
        CHECK_EQ(cm_faults_count(rt, slow[k]), 1);
        for (int i = 0; i < COUNT; i++) {
            give(pool, all[i].block, NULL, 0);
        }
        cm_pool_release(pool);
        close_emulated(rt);
    }
}

/* The body of a thread: allocate 8 MiB, for which the pool has to grow. */
static void *
take_large(void *arg)
{
    together *t = arg;
    MUST(pool_alloc(t->pool, 8 * MIB, NULL, &t->block));
    return NULL;
}

static cm_status (*real_host_register)(cm_runtime *rt, void *host, uint64_t nbytes,
                                       unsigned flags);
static atomic_bool growth_begun;
static atomic_bool growth_may_end;

/* A host_register that says when it was called, and waits until the test lets it go
 * on. */
static cm_status
held_host_register(cm_runtime *rt, void *host, uint64_t nbytes, unsigned flags)
{
    atomic_store(&growth_begun, true);
    WAIT_UNTIL(atomic_load(&growth_may_end));
    return real_host_register(rt, host, nbytes, flags);
}

/* While one thread is held up inside a growth, another thread must still get a free
 * block. */
static void
test_pool_hits_go_on_while_another_thread_grows(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, PINNED);
    give(pool, take(pool, 1000, NULL), NULL, 0);
    cm_ops_table ops = *rt->ops;
    real_host_register = ops.host_register;
    ops.host_register = held_host_register;
    rt->ops = &ops;
    together t = {pool, NULL};
    cm_thread thread;
    CHECK_OK(cm_thread_start(&thread, take_large, &t));
    WAIT_UNTIL(atomic_load(&growth_begun));
    /* If the growth held this up, the test would never end. */
    cm_block *block = take(pool, 1000, NULL);
    give(pool, block, NULL, 0);
    atomic_store(&growth_may_end, true);
    cm_thread_join(thread);
    give(pool, t.block, NULL, 0);
    cm_pool_release(pool);
    close_emulated(rt);
}

/* -- what the pool says of itself ------------------------------------------------------- */

/* Follow the peaks through an allocation, a growth that fails, a block in flight and
 * two resets. */
static void
test_pool_peaks_are_exact(void)
{
    cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
    cm_pool *pool = open_pool(rt, DEVICE);
    cm_stream *stream = open_stream(rt, 0);
    cm_block *a = take(pool, 1000, NULL);
    cm_block *b = take(pool, 3 * MIB, NULL);
    cm_pool_counters c = read_counters(pool);
    CHECK_EQ(c.live_nbytes, 3 * MIB + 1024);
    CHECK_EQ(c.requested_nbytes, 3 * MIB + 1000);
    CHECK_EQ(c.peak_live_nbytes, c.live_nbytes);
    CHECK_EQ(c.peak_requested_nbytes, c.requested_nbytes);
    CHECK_EQ(c.peak_waste_nbytes, 24);
    CHECK_EQ(c.peak_reserved_nbytes, c.reserved_nbytes);
    /* Memory that was made for a block never counts as cached. */
    CHECK_LT(c.peak_cached_nbytes, 3 * MIB);
    CHECK_GE(c.peak_cached_nbytes, c.cached_nbytes);
    uint64_t peak = c.peak_reserved_nbytes;
    cm_faults_plan(rt, CM_OP_address_map, 1, 999, true);
    cm_block *none = NULL;
    CHECK_CODE(pool_alloc(pool, 64 * MIB, NULL, &none), 999);
    c = read_counters(pool);
    /* The memory that the failed growth was to bring does not count. */
    CHECK_EQ(c.peak_reserved_nbytes, peak);
    CHECK_EQ(c.reserved_nbytes, peak);
    CHECK_EQ(c.live_count, 2);
    CHECK(cm_pool_check(pool));
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    hold_work(rt, stream, b);
    cm_stream *uses[2] = {stream, stream};
    cm_pool_free(pool, b, uses, 2, CM_POOL_FREE_FENCE);
    c = read_counters(pool);
    CHECK_EQ(c.peak_in_flight_nbytes, 3 * MIB);
    CHECK_EQ(c.requested_nbytes, 1000);
    cm_pool_reset_peaks(pool);
    c = read_counters(pool);
    CHECK_EQ(c.peak_live_nbytes, 1024);
    CHECK_EQ(c.peak_in_flight_nbytes, 3 * MIB);
    CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
    uint64_t released = 0;
    CHECK_OK(pool_trim(pool, 0, true, &released));
    cm_pool_reset_peaks(pool);
    c = read_counters(pool);
    CHECK_EQ(c.peak_in_flight_nbytes, 0);
    CHECK_EQ(c.peak_reserved_nbytes, c.reserved_nbytes);
    CHECK_EQ(c.peak_cached_nbytes, c.cached_nbytes);
    CHECK_EQ(c.peak_waste_nbytes, 24);
    CHECK_LE(c.reserved_nbytes, 4 * MIB);
    give(pool, a, NULL, 0);
    cm_pool_release(pool);
    cm_stream_release(stream);
    close_emulated(rt);
}

/* The pool has live, in-flight and cached blocks. The rows of its listing must follow
 * each other without holes, and their sums must be the counters. */
static void
test_pool_list_covers_what_is_reserved(void)
{
    static const cm_pool_config configs[] = {CONFIG(CM_KIND_DEVICE, 0, 0),
                                             CONFIG(CM_KIND_PINNED, 0, 0),
                                             CONFIG(CM_KIND_MANAGED, 0, 1)};
    for (size_t k = 0; k < 3; k++) {
        cm_runtime *rt = open_emulated(13000, 1, 256 * MIB);
        cm_pool *pool = open_pool(rt, configs[k]);
        cm_stream *stream = open_stream(rt, 0);
        cm_block *blocks[4];
        for (uint64_t i = 0; i < 4; i++) {
            blocks[i] = take(pool, 1000 + i * MIB, NULL);
        }
        cm_stream *uses[1] = {stream};
        hold_work(rt, stream, blocks[1]);
        cm_pool_free(pool, blocks[1], uses, 1, CM_POOL_FREE_FENCE);
        give(pool, blocks[2], NULL, 0);
        cm_block_row *rows = NULL;
        uint64_t count = 0;
        CHECK_OK(cm_pool_list(pool, &rows, &count));
        cm_pool_counters c = read_counters(pool);
        uint64_t nbytes[4] = {0};
        uint64_t requested_nbytes = 0;
        for (uint64_t i = 0; i < count; i++) {
            nbytes[rows[i].state] += rows[i].nbytes;
            requested_nbytes +=
                rows[i].state == CM_BLOCK_LIVE ? rows[i].requested_nbytes : 0;
            if (i > 0 && rows[i].segment == rows[i - 1].segment) {
                CHECK_EQ(rows[i].address, rows[i - 1].address + rows[i - 1].nbytes);
            }
        }
        CHECK_EQ(rows[count - 1].segment + 1, c.segment_count);
        CHECK_EQ(nbytes[CM_BLOCK_LIVE], c.live_nbytes);
        CHECK_EQ(nbytes[CM_BLOCK_IN_FLIGHT], c.in_flight_nbytes);
        CHECK_EQ(nbytes[CM_BLOCK_CACHED], c.cached_nbytes);
        CHECK_EQ(c.live_nbytes + c.in_flight_nbytes + c.cached_nbytes,
                 c.reserved_nbytes);
        CHECK_EQ(requested_nbytes, c.requested_nbytes);
        CHECK_GT(nbytes[CM_BLOCK_IN_FLIGHT], 0);
        free(rows);
        CHECK_OK(cm_emulated_gate_open(rt, stream->handle));
        give(pool, blocks[0], NULL, 0);
        give(pool, blocks[3], NULL, 0);
        cm_pool_release(pool);
        cm_stream_release(stream);
        close_emulated(rt);
    }
}

typedef struct grower {
    cm_pool *pool;
    cm_block *block;
    atomic_bool done;
} grower;

/* The body of a thread: allocate a chunk, for which the pool has to grow. */
static void *
grow_once(void *arg)
{
    grower *g = arg;
    MUST(pool_alloc(g->pool, CHUNK, NULL, &g->block));
    atomic_store(&g->done, true);
    return NULL;
}

/* At the end of a growth the thread leaves the device, which is slow here. The new
 * block belongs to nobody during that time, and the pool's invariants must hold
 * nevertheless. */
static void
test_pool_adds_up_while_a_growth_ends(void)
{
    static const cm_segments ways[] = {CM_SEGMENTS_AUTO, CM_SEGMENTS_PLAIN};
    for (int i = 0; i < 2; i++) {
        cm_runtime *rt = open_emulated(13000, 1, 64 * MIB);
        cm_pool_config config = DEVICE;
        config.segments = ways[i];
        grower g = {.pool = open_pool(rt, config)};
        cm_thread thread;
        cm_faults_delay(rt, CM_OP_capture_mode_exchange, 20000);
        MUST(cm_thread_start(&thread, grow_once, &g));
        bool good = true;
        while (!atomic_load(&g.done)) {
            good = good && cm_pool_check(g.pool);
        }
        cm_thread_join(thread);
        CHECK(good);
        give(g.pool, g.block, NULL, 0);
        cm_pool_release(g.pool);
        close_emulated(rt);
    }
}

/* clang-format off */
MAIN(RUN(test_pool_forked_child_leaves_what_came_to_lie_there)
     RUN(test_pool_forked_child_has_the_living_blocks)
     RUN(test_pool_forked_child_shares_no_free_memory)
     RUN(test_pool_shared_block_is_kept_for_children)
     RUN(test_pool_omitted_block_is_in_no_child)
     RUN(test_pool_forked_child_has_the_blocks_while_threads_change_the_pool)
     RUN(test_pool_adds_up_while_a_growth_ends)
     RUN(test_pool_each_kind_gives_memory_and_takes_it_back)
     RUN(test_pool_sizes_are_exact_to_the_step)
     RUN(test_pool_wrong_device_is_refused)
     RUN(test_pool_calls_leave_the_callers_context_alone)
     RUN(test_pool_block_keeps_its_pool)
     RUN(test_pool_forked_child_allocates_nothing_and_leaks)
     RUN(test_pool_threads_that_miss_together_grow_once)
     RUN(test_pool_hits_go_on_while_another_thread_grows)
     RUN(test_pool_peaks_are_exact)
     RUN(test_pool_list_covers_what_is_reserved))
/* clang-format on */
