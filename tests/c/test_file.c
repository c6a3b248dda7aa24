/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of transfers between a file and memory of every kind: reading and writing
 * several ranges at once, through the page cache and past it, interrupted calls, and
 * several threads. In sweeps each call of the runtime and each call on the file fails
 * once. A keep is an object that a transfer must drop once, when it is over. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#define EMULATED_DELAY_US 20

#include "engine_world.h"
#include "transfer/engine/private.h"
#include "transfer/file/file.h"

enum {
    NBYTES = (5 << 20) + 123, /* a few pieces, whose parts have odd sizes */
    SPREAD = 3,               /* strided memory uses every third byte */
    COUNT = 100 * 1000,
    RANGES = 4,
};

typedef struct setup {
    world w;
    cm_budget budget; /* the budget of the page-locked pool */
    cm_file_faults faults;
    int fd;
    const unsigned char *content; /* what the file contains */
    memory row;                   /* on device 0, in one run */
    memory spread;                /* on device 1, strided */
    memory plain;                 /* on the host, strided */
    memory pinned;
} setup;

/* Return what every file contains. It is made once, since hundreds of setups need it.
 */
static CHECK_UNWATCHED const unsigned char *
get_content(void)
{
    static unsigned char content[NBYTES];
    static bool is_made;
    if (is_made) {
        return content;
    }
    for (uint64_t i = 0; i < NBYTES; i++) {
        content[i] = (unsigned char)((i * 11 + (i >> 9)) % 253);
    }
    is_made = true;
    return content;
}

/* Open a world with a file and memory. With 0 the page-locked pool has no limit. */
static void
open_setup(setup *s, uint64_t pinned_limit)
{
    cm_budget_init(&s->budget, pinned_limit, NULL);
    cm_pool_config config = {.kind = CM_KIND_PINNED,
                             .flags = CM_HOST_ALLOC_PORTABLE,
                             .numa_node = -1,
                             .budget = pinned_limit == 0 ? NULL : &s->budget};
    open_world_with(&s->w, &config);
    s->faults = (cm_file_faults){.is_on = true};
    s->content = get_content();
    open_file(&s->fd, s->content, NBYTES, 0);
    s->row = take_memory(&s->w, CM_KIND_DEVICE, 0, NBYTES);
    s->spread = take_memory(&s->w, CM_KIND_DEVICE, 1, (uint64_t)COUNT * SPREAD);
    s->plain = take_memory(&s->w, CM_KIND_PAGEABLE, 0, (uint64_t)COUNT * SPREAD);
    s->pinned = take_memory(&s->w, CM_KIND_PINNED, 0, COUNT);
}

/* Check that no descriptor was left open, and give everything back. */
static void
close_setup(setup *s)
{
    /* No descriptor that goes past the page cache may be left open. */
    for (int fd = 0; fd < 1024; fd++) {
        int flags = fcntl(fd, F_GETFL);
        CHECK(flags < 0 || (flags & O_DIRECT) == 0);
    }
    give_memory(&s->w, &s->row);
    give_memory(&s->w, &s->spread);
    give_memory(&s->w, &s->plain);
    give_memory(&s->w, &s->pinned);
    (void)close(s->fd);
    close_world(&s->w);
}

/* A transfer of all four memories, each at another place of the file. */
typedef struct plan {
    cm_region regions[RANGES];
    cm_file_range ranges[RANGES];
} plan;

/* Let the plan transfer all four memories at different offsets of the file. */
static void
make_plan(setup *s, plan *p)
{
    static const uint64_t offsets[RANGES] = {0, 4096, 77, 500001};
    p->regions[0] = row(&s->row, 0, NBYTES, 1, 1);
    p->regions[1] = row(&s->spread, 0, COUNT, SPREAD, 1);
    p->regions[2] = row(&s->plain, 0, COUNT, SPREAD, 1);
    p->regions[3] = row(&s->pinned, 0, COUNT, 1, 1);
    for (int i = 0; i < RANGES; i++) {
        MUST(cm_file_range_init(&p->ranges[i], offsets[i], &p->regions[i]));
    }
}

/* Make a request that reads all ranges of the plan. `drops` counts how often its keep
 * is dropped. If it is NULL, the request has no keep. */
static cm_file_request
request_for(setup *s, const plan *p, atomic_int *drops)
{
    return (cm_file_request){.fds = {s->fd},
                             .file_count = 1,
                             .ranges = p->ranges,
                             .range_count = RANGES,
                             .streams = {s->w.streams[0]},
                             .copy = {.after = s->w.streams,
                                      .after_count = WORLD_DEVICES,
                                      .keep = {{drops, count_drop}},
                                      .keep_count = drops != NULL},
                             .faults = &s->faults};
}

/* Check that all memories have the bytes of their ranges. */
static CHECK_UNWATCHED void
check_memory(const setup *s, const plan *p)
{
    const memory *memories[RANGES] = {&s->row, &s->spread, &s->plain, &s->pinned};
    uint64_t wrong = 0;
    for (int i = 0; i < RANGES; i++) {
        const unsigned char *bytes = memories[i]->bytes;
        const unsigned char *content = s->content + p->ranges[i].offset;
        uint64_t stride = (uint64_t)p->regions[i].strides[0];
        if (stride == 1) {
            wrong += memcmp(bytes, content, p->ranges[i].nbytes) != 0;
            continue;
        }
        for (uint64_t k = 0; k < p->ranges[i].nbytes; k++) {
            wrong += bytes[k * stride] != content[k];
        }
    }
    CHECK_EQ(wrong, 0);
}

/* Set all memories to 0. */
static CHECK_UNWATCHED void
clear_memory(setup *s)
{
    memory *memories[RANGES] = {&s->row, &s->spread, &s->plain, &s->pinned};
    for (int i = 0; i < RANGES; i++) {
        for (uint64_t k = 0; k < memories[i]->nbytes; k++) {
            memories[i]->bytes[k] = 0;
        }
    }
}

/* Write from memory that has the file's content into a file of zeros, and check that
 * the file gets its content back. */
static void
check_writing(setup *s, const plan *p, cm_file_direct direct)
{
    cm_file_failure failure;
    unsigned char *found = calloc(1, NBYTES);
    CHECK_EQ(pwrite(s->fd, found, NBYTES, 0), NBYTES);
    cm_file_request request = request_for(s, p, NULL);
    request.writes = true;
    request.direct = direct;
    /* This range is the whole file, and the others lie within it. */
    request.range_count = 1;
    CHECK_OK(cm_engine_transfer_file(s->w.engine, &request, &failure));
    CHECK_EQ(pread(s->fd, found, NBYTES, 0), NBYTES);
    CHECK_EQ(memcmp(found, s->content, NBYTES), 0);
    request.range_count = RANGES - 1;
    request.ranges = p->ranges + 1;
    for (int i = 1; i < RANGES; i++) {
        memset(found, 0, COUNT);
        CHECK_EQ(pwrite(s->fd, found, COUNT, (off_t)p->ranges[i].offset), COUNT);
    }
    CHECK_OK(cm_engine_transfer_file(s->w.engine, &request, &failure));
    for (int i = 1; i < RANGES; i++) {
        CHECK_EQ(pread(s->fd, found, COUNT, (off_t)p->ranges[i].offset), COUNT);
        CHECK_EQ(memcmp(found, s->content + p->ranges[i].offset, COUNT), 0);
    }
    CHECK_EQ(pwrite(s->fd, s->content, NBYTES, 0), NBYTES);
    free(found);
}

/* Read and write all ranges, through the page cache and past it. */
static void
test_file_ranges_of_every_kind(void)
{
    /* The page-locked pool has no limit, room for two pieces, or room for none. */
    static const uint64_t limits[] = {0, 9 << 20, 1 << 20};
    for (int i = 0; i < 6; i++) {
        setup s;
        plan p;
        cm_file_failure failure;
        cm_file_direct direct = i < 3 ? CM_FILE_DIRECT_NEVER : CM_FILE_DIRECT_ALWAYS;
        open_setup(&s, limits[i % 3]);
        make_plan(&s, &p);
        atomic_int drops = 0;
        cm_file_request request = request_for(&s, &p, &drops);
        request.direct = direct;
        CHECK_OK(cm_engine_transfer_file(s.w.engine, &request, &failure));
        CHECK_EQ(atomic_load(&drops), 1);
        check_memory(&s, &p);
        check_writing(&s, &p, direct);
        close_setup(&s);
    }
}

/* Without a page-locked pool, ordinary memory must be used instead. */
static void
test_file_without_a_page_locked_pool(void)
{
    setup s;
    plan p;
    cm_file_failure failure;
    open_setup(&s, 0);
    make_plan(&s, &p);
    cm_pool *pool = s.w.engine->pinned_pool;
    s.w.engine->pinned_pool = NULL;
    cm_file_request request = request_for(&s, &p, NULL);
    CHECK_OK(cm_engine_transfer_file(s.w.engine, &request, &failure));
    check_memory(&s, &p);
    check_writing(&s, &p, CM_FILE_DIRECT_NEVER);
    s.w.engine->pinned_pool = pool;
    close_setup(&s);
}

/* -- several files ----------------------------------------------------------------------- */

enum { FILES = 3 };

/* Open further files with the same content, and make a request of all of them. */
static cm_file_request
open_files(setup *s, plan *p, int fds[FILES])
{
    make_plan(s, p);
    fds[0] = s->fd;
    for (int i = 1; i < FILES; i++) {
        open_file(&fds[i], s->content, NBYTES, 0);
    }
    p->ranges[1].file = 1;
    p->ranges[2].file = 2;
    p->ranges[3].file = 2;
    cm_file_request request = request_for(s, p, NULL);
    memcpy(request.fds, fds, FILES * sizeof(fds[0]));
    request.file_count = FILES;
    return request;
}

static void
close_files(setup *s, const int fds[FILES])
{
    for (int i = 1; i < FILES; i++) {
        (void)close(fds[i]);
    }
    close_setup(s);
}

/* Check that each range was written to its own file, and to no other. A file that had
 * only zeros must have the content in its ranges and zeros elsewhere. */
static CHECK_UNWATCHED void
check_files(const setup *s, const plan *p, const int fds[FILES])
{
    unsigned char *found = malloc(NBYTES);
    uint64_t wrong = 0;
    for (uint32_t file = 0; file < FILES; file++) {
        CHECK_EQ(pread(fds[file], found, NBYTES, 0), NBYTES);
        for (uint64_t at = 0; at < NBYTES; at++) {
            bool is_written = false;
            for (int i = 0; i < RANGES; i++) {
                const cm_file_range *range = &p->ranges[i];
                is_written = is_written
                             || (range->file == file && at >= range->offset
                                 && at < range->offset + range->nbytes);
            }
            wrong += found[at] != (is_written ? s->content[at] : 0);
        }
    }
    CHECK_EQ(wrong, 0);
    free(found);
}

/* Each range is read from its own file and written to it, through the page cache and
 * past it. */
static void
test_file_several_files_at_once(void)
{
    unsigned char *zeros = calloc(1, NBYTES);
    for (int i = 0; i < 2; i++) {
        setup s;
        plan p;
        int fds[FILES];
        cm_file_failure failure;
        open_setup(&s, 0);
        cm_file_request request = open_files(&s, &p, fds);
        request.direct = i == 0 ? CM_FILE_DIRECT_NEVER : CM_FILE_DIRECT_ALWAYS;
        CHECK_OK(cm_engine_transfer_file(s.w.engine, &request, &failure));
        check_memory(&s, &p);
        for (int k = 0; k < FILES; k++) {
            CHECK_EQ(pwrite(fds[k], zeros, NBYTES, 0), NBYTES);
        }
        request.writes = true;
        CHECK_OK(cm_engine_transfer_file(s.w.engine, &request, &failure));
        check_files(&s, &p, fds);
        close_files(&s, fds);
    }
    free(zeros);
}

/* One of several files refuses a call or is too short. The failure must name that file,
 * although those before and after it are in order. */
static void
test_file_failure_names_one_of_several_files(void)
{
    setup s;
    plan p;
    int fds[FILES];
    cm_file_failure failure;
    open_setup(&s, 0);
    cm_file_request request = open_files(&s, &p, fds);
    for (int i = 0; i < 2; i++) {
        request.writes = i == 1;
        request.fds[1] = -1;
        CHECK_CODE(cm_engine_transfer_file(s.w.engine, &request, &failure), CM_ESYSTEM);
        CHECK_EQ(failure.error, EBADF);
        CHECK_EQ(failure.range_index, 1);
    }
    request.writes = false;
    request.fds[1] = fds[1];
    CHECK_EQ(ftruncate(fds[2], 500001), 0);
    CHECK_CODE(cm_engine_transfer_file(s.w.engine, &request, &failure), CM_ESYSTEM);
    CHECK(failure.at_end);
    CHECK_EQ(failure.range_index, 3);
    CHECK_EQ(failure.offset, 500001);
    close_files(&s, fds);
}

/* -- failures ---------------------------------------------------------------------------- */

/* A range begins and ends within pages. A read past the page cache reads these pages
 * whole, and must not write outside of its memory. */
static CHECK_UNWATCHED void
test_file_direct_read_stays_within_its_memory(void)
{
    setup s;
    uint64_t wrong = 0;
    open_setup(&s, 0);
    for (int64_t count = 2; count < 9000; count += 1021) {
        cm_region region = row(&s.plain, 0, count, SPREAD, 1);
        cm_file_range range;
        MUST(cm_file_range_init(&range, 4095, &region));
        cm_file_request request = {.fds = {s.fd},
                                   .file_count = 1,
                                   .direct = CM_FILE_DIRECT_ALWAYS,
                                   .ranges = &range,
                                   .range_count = 1};
        cm_file_failure failure;
        CHECK_OK(cm_engine_transfer_file(s.w.engine, &request, &failure));
        for (int64_t i = 0; i < count; i++) {
            wrong += s.plain.bytes[SPREAD * i] != s.content[4095 + i];
        }
    }
    CHECK_EQ(wrong, 0);
    close_setup(&s);
}

typedef struct scenario {
    bool writes;
    cm_file_direct direct;
} scenario;

static const scenario scenarios[] = {{false, CM_FILE_DIRECT_NEVER},
                                     {true, CM_FILE_DIRECT_NEVER},
                                     {false, CM_FILE_DIRECT_ALWAYS},
                                     {true, CM_FILE_DIRECT_ALWAYS}};
enum { SCENARIOS = sizeof(scenarios) / sizeof(scenarios[0]) };

/* Make the transfer and return its outcome, or CM_EBUSY if the keep was not dropped or
 * something is still in flight. */
static cm_status
run_scenario(setup *s, const plan *p, const scenario *what, cm_file_failure *failure)
{
    atomic_int drops = 0;
    cm_file_request request = request_for(s, p, &drops);
    request.writes = what->writes;
    request.direct = what->direct;
    cm_status status = cm_engine_transfer_file(s->w.engine, &request, failure);
    bool clean = atomic_load(&drops) == 1 && cm_engine_count_pending(s->w.engine) == 0;
    return clean ? status : cm_fail(CM_EBUSY, 0);
}

/* Each read or write of the file fails for good. The failure must be reported with its
 * errno and a place within its range. In other rounds a signal interrupts the call
 * once, which must not matter. Reads and writes that move less than was asked for must
 * not matter either. */
static void
test_file_every_call_on_the_file_may_fail(void)
{
    setup s;
    plan p;
    cm_file_failure failure;
    open_setup(&s, 0);
    make_plan(&s, &p);
    for (int i = 0; i < SCENARIOS; i++) {
        const scenario *what = &scenarios[i];
        CHECK_OK(run_scenario(&s, &p, &scenarios[0], &failure));
        s.faults = (cm_file_faults){.is_on = true};
        CHECK_OK(run_scenario(&s, &p, what, &failure));
        uint64_t calls = s.faults.count;
        for (uint64_t nth = 1; nth <= calls; nth++) {
            s.faults = (cm_file_faults){
                .is_on = true, .nth = nth, .error = EIO, .repeat = true};
            CHECK_CODE(run_scenario(&s, &p, what, &failure), CM_ESYSTEM);
            CHECK_EQ(failure.error, EIO);
            CHECK(!failure.at_end);
            const cm_file_range *range = &p.ranges[failure.range_index];
            CHECK(failure.offset >= range->offset);
            CHECK(failure.offset < range->offset + range->nbytes);
            s.faults = (cm_file_faults){.is_on = true, .nth = nth, .error = EINTR};
            CHECK_OK(run_scenario(&s, &p, what, &failure));
        }
        s.faults = (cm_file_faults){.is_on = true, .most = 100000};
        CHECK_OK(run_scenario(&s, &p, what, &failure));
        s.faults = (cm_file_faults){.is_on = true};
        clear_memory(&s);
        CHECK_OK(run_scenario(&s, &p, &scenarios[0], &failure));
        check_memory(&s, &p);
    }
    close_setup(&s);
}

/* Each runtime call fails once. The failure must be reported as what it is, and the
 * next transfer must work. */
static void
test_file_every_runtime_call_may_fail(void)
{
    for (int i = 0; i < SCENARIOS; i++) {
        uint64_t calls = 1;
        for (uint64_t nth = 0; nth <= calls; nth += nth == 0 ? 1 : CHECK_EVERY(27)) {
            setup s;
            plan p;
            cm_file_failure failure;
            open_setup(&s, 0);
            make_plan(&s, &p);
            s.faults = (cm_file_faults){.is_on = true};
            cm_faults_plan(s.w.rt, CM_OP_none, nth, 998, false);
            cm_status status = run_scenario(&s, &p, &scenarios[i], &failure);
            calls = nth == 0 ? cm_faults_count(s.w.rt, CM_OP_none) : calls;
            calls = calls < 120 ? calls : 120; /* the rest are repeated queries */
            cm_op injected = cm_faults_last_injected(s.w.rt);
            cm_faults_plan(s.w.rt, CM_OP_none, 0, 0, false);
            if (!cm_is_ok(status)) {
                CHECK_STR_EQ(cm_op_facts[status.op].name, cm_op_facts[injected].name);
                CHECK_EQ(status.code, 998);
                CHECK(!failure.at_end && failure.error == 0);
            }
            CHECK_EQ(pwrite(s.fd, s.content, NBYTES, 0), NBYTES);
            CHECK_OK(run_scenario(&s, &p, &scenarios[0], &failure));
            check_memory(&s, &p);
            close_setup(&s);
        }
    }
}

/* The file ends within a range, which must be reported before anything is read. */
static void
test_file_end_is_reported(void)
{
    setup s;
    plan p;
    cm_file_failure failure;
    open_setup(&s, 0);
    make_plan(&s, &p);
    CHECK_EQ(ftruncate(s.fd, 550000), 0);
    CHECK_CODE(run_scenario(&s, &p, &scenarios[0], &failure), CM_ESYSTEM);
    CHECK(failure.at_end);
    CHECK_EQ(failure.offset, 550000);
    CHECK_EQ(failure.range_index, 0);
    CHECK_EQ(s.faults.count, 0);
    p.ranges[0].nbytes = 550000;
    CHECK_CODE(run_scenario(&s, &p, &scenarios[0], &failure), CM_ESYSTEM);
    CHECK_EQ(failure.range_index, 3);
    CHECK_EQ(p.ranges[3].offset, 500001);
    cm_file_range far = {.offset = INT64_MAX};
    CHECK_CODE(cm_file_range_init(&far, INT64_MAX, &p.regions[0]), CM_EOVERFLOW);
    close_setup(&s);
}

/* -- interruption ------------------------------------------------------------------------ */

/* A hook that interrupts once the stream has been given a copy. */
static bool
interrupt(void *argument)
{
    const setup *s = argument;
    return cm_faults_count(s->w.rt, CM_OP_copy_async) > 0;
}

/* Make a request of one range whose copies are queued on a stream that is shut. */
static cm_file_request
open_interrupted(setup *s, plan *p, atomic_int *drops, bool writes,
                 bool (*interrupted)(void *argument))
{
    open_setup(s, 0);
    make_plan(s, p);
    cm_file_request request = request_for(s, p, drops);
    request.writes = writes;
    request.copy.interrupted = interrupted;
    request.copy.interrupted_argument = s;
    request.copy.after_count = 0;
    request.range_count = 1;
    cm_faults_plan(s->w.rt, CM_OP_none, 0, 0, false);
    shut(&s->w, s->w.streams[0]);
    return request;
}

/* A call is interrupted while its copies are queued. It must return, and its keep must
 * live until these copies are over. */
static void
test_file_interrupted_call_leaves_its_copies_behind_the_keep(void)
{
    for (int writes = 0; writes < 2; writes++) {
        setup s;
        plan p;
        cm_file_failure failure;
        atomic_int drops = 0;
        cm_file_request request = open_interrupted(&s, &p, &drops, writes, interrupt);
        /* The call waits for its copies for a moment, in vain, since the stream is
         * shut. */
        s.w.engine->drain_ns = 1000000;
        CHECK_CODE(cm_engine_transfer_file(s.w.engine, &request, &failure),
                   CM_ECANCELLED);
        CHECK_EQ(atomic_load(&drops), 0);
        CHECK_EQ(cm_engine_count_pending(s.w.engine), 1);
        unshut(&s.w, s.w.streams[0]);
        WAIT_UNTIL(atomic_load(&drops) != 0);
        WAIT_UNTIL(cm_engine_count_pending(s.w.engine) == 0);
        request.copy.interrupted = NULL;
        request.copy.keep_count = 0;
        CHECK_OK(cm_engine_transfer_file(s.w.engine, &request, &failure));
        close_setup(&s);
    }
}

/* A hook that does the same as interrupt(), and opens the gate at the same time. */
static bool
interrupt_and_open(void *argument)
{
    setup *s = argument;
    bool interrupted = interrupt(s);
    if (interrupted) {
        unshut(&s->w, s->w.streams[0]);
    }
    return interrupted;
}

/* An interrupted call waits a while for its copies, so that its caller can use the
 * memory again if that does not take long. Here the gate opens in time, so the keep
 * must be dropped before the call returns. */
static void
test_file_interrupted_call_waits_for_its_copies(void)
{
    for (int writes = 0; writes < 2; writes++) {
        setup s;
        plan p;
        cm_file_failure failure;
        atomic_int drops = 0;
        cm_file_request request =
            open_interrupted(&s, &p, &drops, writes, interrupt_and_open);
        s.w.engine->drain_ns = UINT64_MAX >> 1;
        CHECK_CODE(cm_engine_transfer_file(s.w.engine, &request, &failure),
                   CM_ECANCELLED);
        CHECK_EQ(atomic_load(&drops), 1);
        CHECK_EQ(cm_engine_count_pending(s.w.engine), 0);
        close_setup(&s);
    }
}

/* -- threads ----------------------------------------------------------------------------- */

/* What a thread of the last test has. */
typedef struct reader {
    setup *s;
    plan p;
    bool fails;
    int wrong_count;
} reader;

/* The body of a thread that reads the file several times, or tries to with a bad
 * descriptor. */
static void *
read_often(void *argument)
{
    reader *r = argument;
    for (int i = 0; i < 5; i++) {
        cm_file_failure failure;
        cm_file_request request = request_for(r->s, &r->p, NULL);
        request.faults = NULL;
        request.fds[0] = r->fails ? -1 : r->s->fd;
        cm_status status = cm_engine_transfer_file(r->s->w.engine, &request, &failure);
        r->wrong_count += status.code != (r->fails ? CM_ESYSTEM : CM_OK)
                          || failure.error != (r->fails ? EBADF : 0);
    }
    return NULL;
}

/* Several threads read the same file into their own device memory, and the reads of one
 * of them fail each time. No thread may disturb another. */
static void
test_file_calls_of_several_threads(void)
{
    enum { THREADS = 4 };
    setup s;
    memory memories[THREADS];
    reader readers[THREADS];
    pthread_t threads[THREADS];
    open_setup(&s, 0);
    for (int i = 0; i < THREADS; i++) {
        memories[i] = take_memory(&s.w, CM_KIND_DEVICE, i % 2, NBYTES);
        readers[i] = (reader){.s = &s, .fails = i == 3};
        /* All ranges read the same bytes to the same place. */
        for (int k = 0; k < RANGES; k++) {
            readers[i].p.regions[k] = row(&memories[i], 0, NBYTES, 1, 1);
            MUST(cm_file_range_init(&readers[i].p.ranges[k], 0,
                                    &readers[i].p.regions[k]));
        }
        CHECK_EQ(pthread_create(&threads[i], NULL, read_often, &readers[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        (void)pthread_join(threads[i], NULL);
        CHECK_EQ(readers[i].wrong_count, 0);
        if (i < 3) {
            CHECK_EQ(memcmp(memories[i].bytes, s.content, NBYTES), 0);
        }
        give_memory(&s.w, &memories[i]);
    }
    close_setup(&s);
}

MAIN(RUN(test_file_ranges_of_every_kind) RUN(test_file_without_a_page_locked_pool) RUN(
    test_file_several_files_at_once) RUN(test_file_failure_names_one_of_several_files)
         RUN(test_file_direct_read_stays_within_its_memory)
             RUN(test_file_end_is_reported)
                 RUN(test_file_every_call_on_the_file_may_fail)
                     RUN(test_file_interrupted_call_leaves_its_copies_behind_the_keep)
                         RUN(test_file_interrupted_call_waits_for_its_copies)
                             RUN(test_file_calls_of_several_threads)
                                 RUN(test_file_every_runtime_call_may_fail))
