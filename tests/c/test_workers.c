/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of the threads that share out copies within the host (workers), and of how each
 * part is copied. A transfer opens a group and posts tasks in it. Each task is a copy
 * that is cut into parts, which any thread may take, the poster included. */
#include <stdlib.h>
#include <unistd.h>

#include "base/simd_copy.h"
#include "check.h"
#include "transfer/host/host_copy.h"
#include "transfer/host/workers.h"

#define MIB ((size_t)1 << 20)

CHECK_UNWATCHED static void
fill_bytes(unsigned char *p, size_t nbytes, uint64_t seed)
{
    for (size_t i = 0; i < nbytes; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        p[i] = (unsigned char)(seed >> 56);
    }
}

/* Return the default tuning of a machine with 4 processors. */
static cm_tuning
tuned(void)
{
    cm_tuning tuning;
    cm_tuning_init(&tuning);
    cm_tuning_resolve(&tuning, 4);
    return tuning;
}

/* cm_wide_copy() must do what memcpy() does, for each alignment and many lengths. */
static void
test_wide_copy_is_memcpy_at_any_place_and_length(void)
{
    enum { ROOM = 1024 };
    static unsigned char src[ROOM], dst[ROOM], wanted[ROOM];
    fill_bytes(src, ROOM, 1);
    for (size_t to = 0; to < 66; to += 3) {
        for (size_t from = 0; from < 66; from += 5) {
            for (size_t nbytes = 0; nbytes < 400; nbytes += 1 + nbytes / 9) {
                memset(dst, 0xCC, ROOM);
                memset(wanted, 0xCC, ROOM);
                memcpy(wanted + to, src + from, nbytes);
                cm_wide_copy(dst + to, src + from, nbytes);
                CHECK_BYTES_EQ(dst, wanted, ROOM);
            }
        }
    }
}

/* Copy a matrix whose elements have `run` bytes, with the source transposed, reversed
 * or both, and compare it with a plain loop. */
static void
check_turned(uint64_t run, int64_t rows, int64_t columns, bool transposed,
             bool reversed, bool wide)
{
    size_t nbytes = (size_t)(rows * columns) * run;
    int64_t step = (int64_t)run;
    cm_layout layout = {.run_nbytes = run, .ndim = 2};
    layout.axes[0].length = rows;
    layout.axes[1].length = columns;
    layout.axes[0].stride[CM_DST] = columns * step;
    layout.axes[1].stride[CM_DST] = step;
    layout.axes[0].stride[CM_SRC] = transposed ? step : columns * step;
    layout.axes[1].stride[CM_SRC] = transposed ? rows * step : step;
    if (reversed) {
        layout.offset[CM_SRC] = layout.axes[1].stride[CM_SRC] * (columns - 1);
        layout.axes[1].stride[CM_SRC] = -layout.axes[1].stride[CM_SRC];
    }
    unsigned char *src = malloc(nbytes);
    unsigned char *got = malloc(nbytes);
    unsigned char *wanted = malloc(nbytes);
    fill_bytes(src, nbytes, run);
    memset(got, 0, nbytes);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t k = 0; k < columns; k++) {
            memcpy(wanted + (i * columns + k) * step,
                   src + layout.offset[CM_SRC] + i * layout.axes[0].stride[CM_SRC]
                       + k * layout.axes[1].stride[CM_SRC],
                   run);
        }
    }
    cm_host_copy(&layout, got, src, wide);
    bool same = memcmp(got, wanted, nbytes) == 0;
    free(src);
    free(got);
    free(wanted);
    if (!same) {
        CHECK_FAIL_("wrong bytes: run %llu, %lld x %lld, transposed %d, reversed %d",
                    (unsigned long long)run, (long long)rows, (long long)columns,
                    transposed, reversed);
    }
}

/* Copy transposed and reversed matrices with elements of 1 to 40 bytes, and a few with
 * very long ones. */
static void
test_host_copy_turns_elements_of_every_size(void)
{
    for (uint64_t run = 1; run <= 40; run++) {
        for (int how = 0; how < 8; how++) {
            check_turned(run, 37, 53, (how & 1) != 0, (how & 2) != 0, (how & 4) != 0);
            check_turned(run, 2, 130, (how & 1) != 0, (how & 2) != 0, (how & 4) != 0);
        }
    }
    check_turned(5000, 3, 4, true, true, true);
    check_turned(5000, 3, 4, false, true, true);
}

/* What a thread that posts tasks has. */
typedef struct world {
    cm_workers *workers;
    cm_tuning tuning;
    uint64_t seed;
    bool same;
} world;

/* Gather every second element of 4 bytes. */
CHECK_UNWATCHED static void
gather_elements(unsigned char *dst, const unsigned char *src, int64_t count)
{
    for (int64_t k = 0; k < count; k++) {
        memcpy(dst + k * 4, src + k * 8, 4);
    }
}

/* The body of a thread: copy every second element of 4 bytes, in several tasks of one
 * group. */
static void *
copy_through_group(void *argument)
{
    enum { TASKS = 4, ROUNDS = 6 };
    world *w = argument;
    int64_t count = (int64_t)(MIB / 4 / sizeof(float));
    size_t nbytes = (size_t)count * sizeof(float);
    cm_copy_task *tasks = calloc(TASKS, sizeof(*tasks));
    unsigned char *src = malloc(2 * nbytes);
    unsigned char *dst = malloc(TASKS * nbytes);
    unsigned char *wanted = malloc(nbytes);
    cm_layout layout = {.run_nbytes = sizeof(float),
                        .ndim = 1,
                        .axes = {{count, {sizeof(float), 2 * sizeof(float)}}}};
    fill_bytes(src, 2 * nbytes, w->seed);
    gather_elements(wanted, src, count);
    w->same = true;
    for (int round = 0; round < ROUNDS; round++) {
        cm_task_group group;
        cm_task_group_open(&group, w->workers, &w->tuning);
        memset(dst, 0, TASKS * nbytes);
        for (int i = 0; i < TASKS; i++) {
            cm_task_group_post(&group, &tasks[i], &layout, dst + (size_t)i * nbytes,
                               src, (cm_copy_way)(round % 5));
        }
        for (int i = 0; i < TASKS; i++) {
            cm_task_group_wait(&group, &tasks[i]);
            w->same &= memcmp(dst + (size_t)i * nbytes, wanted, nbytes) == 0;
        }
        cm_task_group_close(&group);
    }
    free(tasks);
    free(src);
    free(dst);
    free(wanted);
    return NULL;
}

/* Four threads post tasks at the same time, and the workers serve all of their
 * groups. */
static void
test_workers_serves_several_groups_at_once(void)
{
    enum { GROUPS = 4 };
    cm_workers workers;
    cm_thread threads[GROUPS];
    world worlds[GROUPS];
    cm_workers_init(&workers);
    for (int i = 0; i < GROUPS; i++) {
        worlds[i] =
            (world){.workers = &workers, .tuning = tuned(), .seed = (uint64_t)i + 1};
        CHECK_OK(cm_thread_start(&threads[i], copy_through_group, &worlds[i]));
    }
    for (int i = 0; i < GROUPS; i++) {
        cm_thread_join(threads[i]);
        CHECK(worlds[i].same);
    }
    cm_workers_fini(&workers);
}

/* A group is closed while parts of its task are under way or not yet taken, and its
 * memory is freed. No worker may touch it any more. */
static void
test_workers_closed_group_is_touched_no_more(void)
{
    enum { ROUNDS = 50 };
    cm_workers workers;
    cm_tuning tuning = tuned();
    cm_workers_init(&workers);
    cm_copy_task *task = calloc(1, sizeof(*task));
    for (int round = 0; round < ROUNDS; round++) {
        unsigned char *src = calloc(1, 2 * MIB);
        unsigned char *dst = malloc(2 * MIB);
        cm_task_group group;
        cm_layout layout = {.run_nbytes = 2 * MIB};
        cm_task_group_open(&group, &workers, &tuning);
        cm_task_group_post(&group, task, &layout, dst, src, CM_COPY_PLAIN);
        if (round % 3 == 0) {
            (void)cm_task_group_help(&group); /* unless the others were faster */
        }
        cm_task_group_close(&group); /* in most rounds some parts are not taken yet */
        free(src); /* a sanitizer would report a thread that still uses it */
        free(dst);
    }
    CHECK_EQ(atomic_load(&workers.open), 0);
    free(task);
    cm_workers_fini(&workers);
}

/* A task is posted before its bytes are there, and made ready bit by bit. Nobody may
 * touch a part that is not ready. */
static void
test_workers_early_task_is_taken_as_far_as_it_is_ready(void)
{
    enum { PART = 4096, PARTS = 24, LAST = 1000 };
    static unsigned char src[PARTS * PART + LAST], dst[PARTS * PART + LAST];
    static unsigned char wanted[PARTS * PART + LAST];
    cm_workers workers;
    cm_tuning tuning = tuned();
    cm_task_group group;
    cm_copy_task task = {.next = 0};
    cm_layout layout = {.run_nbytes = sizeof(src)};
    cm_workers_init(&workers);
    cm_task_group_open(&group, &workers, &tuning);
    group.is_early = true;
    group.part_nbytes = PART;
    for (int round = 0; round < 20; round++) {
        memset(src, 0, sizeof(src));
        memset(dst, 0xCC, sizeof(dst));
        cm_task_group_post(&group, &task, &layout, dst, src, CM_COPY_PLAIN);
        CHECK(!cm_task_group_help(&group));
        CHECK(!cm_copy_task_is_done(&task));
        for (size_t at = 0; at < sizeof(src); at += 3 * PART + 100) {
            size_t end = at + 3 * PART + 100;
            end = end < sizeof(src) ? end : sizeof(src);
            fill_bytes(wanted + at, end - at, at + (size_t)round);
            /* A sanitizer watches memcpy() and sees a thread that reads too early. */
            memcpy(src + at, wanted + at, end - at);
            cm_copy_task_set_ready(&task, end);
            while (cm_task_group_help(&group)) {
            }
            CHECK(end == sizeof(src) || !cm_copy_task_is_done(&task));
        }
        cm_task_group_wait(&group, &task);
        CHECK_BYTES_EQ(dst, wanted, sizeof(src));
    }
    cm_task_group_post(&group, &task, &layout, dst, src, CM_COPY_PLAIN);
    cm_task_group_close(&group); /* nothing of this task is ready */
    CHECK_EQ(atomic_load(&workers.open), 0);
    cm_workers_fini(&workers);
}

/* A task without bytes is done when it is posted, and starts no thread. */
static void
test_workers_task_of_no_bytes_is_done(void)
{
    cm_workers workers;
    cm_task_group group;
    cm_copy_task task = {.next = 0};
    cm_layout layout = {.run_nbytes = 0};
    cm_tuning tuning = tuned();
    cm_workers_init(&workers);
    cm_task_group_open(&group, &workers, &tuning);
    cm_task_group_post(&group, &task, &layout, NULL, NULL, CM_COPY_PLAIN);
    CHECK(cm_copy_task_is_done(&task));
    CHECK(!cm_task_group_help(&group));
    cm_task_group_close(&group);
    CHECK_EQ(workers.thread_count, 0);
    cm_workers_fini(&workers);
}

/* A small task must be copied by the thread that posts it, without starting another. */
static void
test_workers_small_task_starts_no_thread(void)
{
    cm_workers workers;
    cm_task_group group;
    cm_copy_task task = {.next = 0};
    static unsigned char src[1000], dst[1000];
    cm_layout layout = {.run_nbytes = sizeof(src)};
    fill_bytes(src, sizeof(src), 3);
    cm_tuning tuning = tuned();
    cm_workers_init(&workers);
    cm_task_group_open(&group, &workers, &tuning);
    cm_task_group_post(&group, &task, &layout, dst, src, CM_COPY_PLAIN);
    cm_task_group_wait(&group, &task);
    CHECK_BYTES_EQ(dst, src, sizeof(src));
    cm_task_group_close(&group);
    CHECK_EQ(workers.thread_count, 0);
    cm_workers_fini(&workers);
}

/* The limit on the threads of a group changes from group to group. If a group may have
 * no thread besides its poster, the poster must copy everything, although other threads
 * exist. */
static void
test_workers_threads_rest_beyond_the_limit(void)
{
    enum { ROUNDS = 30 / CHECK_EVERY(3) };
    static const uint32_t limits[] = {3, 0, 1, 0, 2, 0, 3};
    cm_tuning tuning = tuned();
    cm_workers workers;
    cm_task_group group;
    cm_copy_task *task = calloc(1, sizeof(*task));
    unsigned char *src = malloc(2 * MIB);
    unsigned char *dst = malloc(2 * MIB);
    cm_layout layout = {.run_nbytes = 2 * MIB};
    fill_bytes(src, 2 * MIB, 7);
    cm_workers_init(&workers);
    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        tuning.thread_count = tuning.fresh_thread_count = limits[i] + 1;
        for (int round = 0; round < ROUNDS; round++) {
            memset(dst, 0, 2 * MIB);
            cm_task_group_open(&group, &workers, &tuning);
            cm_task_group_post(&group, task, &layout, dst, src,
                               (cm_copy_way)(round % 2));
            uint64_t count = 0;
            while (cm_task_group_help(&group)) {
                count++;
            }
            CHECK(limits[i] > 0 || count == cm_cut_count(&task->cut));
            cm_task_group_wait(&group, task);
            cm_task_group_close(&group);
            CHECK_BYTES_EQ(dst, src, 2 * MIB);
        }
    }
    CHECK_EQ(workers.thread_count, 3);
    free(task);
    free(src);
    free(dst);
    cm_workers_fini(&workers);
}

/* With one processor there is no thread besides the poster, and with two there is one.
 * In both cases nobody spins. */
static void
test_workers_of_few_processors_starts_few_threads(void)
{
    for (unsigned cpus = 1; cpus <= 3; cpus++) {
        cm_tuning tuning;
        cm_tuning_init(&tuning);
        cm_tuning_resolve(&tuning, cpus);
        cm_workers workers;
        cm_workers_init(&workers);
        world w = {.workers = &workers, .tuning = tuning, .seed = cpus};
        (void)copy_through_group(&w);
        CHECK(w.same);
        CHECK_EQ(workers.thread_count, cpus - 1);
        CHECK_EQ(atomic_load(&workers.spin_ns) > 0, cpus > 2);
        cm_workers_fini(&workers);
    }
}

/* The poster only pauses, as on a machine where threads spin, and copies no part
 * itself. Everything must still be copied. */
static void
test_workers_resting_poster_sees_every_task_done(void)
{
    enum { ROUNDS = 200 };
    cm_workers workers;
    cm_tuning tuning = tuned();
    tuning.thread_count = 6;
    tuning.spin_ns = 1000;
    unsigned char *src = malloc(MIB);
    unsigned char *dst = malloc(MIB);
    fill_bytes(src, MIB, 9);
    cm_workers_init(&workers);
    for (int round = 0; round < ROUNDS; round++) {
        cm_task_group group;
        cm_copy_task task = {.next = 0};
        cm_layout layout = {.run_nbytes = MIB >> (round % 8)};
        memset(dst, 0, MIB);
        cm_task_group_open(&group, &workers, &tuning);
        cm_task_group_post(&group, &task, &layout, dst, src, (cm_copy_way)(round % 5));
        while (!cm_copy_task_is_done(&task)) {
            cm_task_group_pause(&group, NULL);
        }
        cm_task_group_close(&group);
        CHECK_BYTES_EQ(dst, src, layout.run_nbytes);
    }
    CHECK_GE(workers.thread_count, 4);
    cm_workers_fini(&workers);
    free(src);
    free(dst);
}

/* Some threads may not take part any more, and the others sleep. A task of a single
 * part must then be copied by its poster. */
static void
test_workers_single_part_is_copied_where_others_rest(void)
{
    cm_workers workers;
    cm_task_group group;
    cm_copy_task task = {.next = 0};
    cm_tuning tuning = tuned();
    tuning.thread_count = 6;
    tuning.spin_ns = 1000;
    unsigned char *src = malloc(MIB);
    unsigned char *dst = malloc(MIB);
    fill_bytes(src, MIB, 5);
    cm_workers_init(&workers);
    cm_task_group_open(&group, &workers, &tuning);
    for (uint64_t nbytes = MIB; nbytes >= 4096; nbytes /= 256) {
        cm_layout layout = {.run_nbytes = nbytes};
        memset(dst, 0, MIB);
        cm_task_group_post(&group, &task, &layout, dst, src, CM_COPY_PLAIN);
        while (!cm_copy_task_is_done(&task)) {
            cm_task_group_pause(&group, NULL);
        }
        CHECK_BYTES_EQ(dst, src, nbytes);
        tuning.thread_count = 3;
    }
    cm_task_group_close(&group);
    cm_workers_fini(&workers);
    free(src);
    free(dst);
}

/* Threads must look for more work for as long as the group that has posted last
 * asks. */
static void
test_workers_spin_as_long_as_the_last_group_wants(void)
{
    enum { NBYTES = 100 };
    cm_tuning tuning = tuned();
    cm_workers workers;
    cm_task_group groups[2];
    cm_copy_task tasks[2] = {{.next = 0}, {.next = 0}};
    unsigned char src[NBYTES], dst[2][NBYTES];
    cm_layout layout = {.run_nbytes = NBYTES};
    fill_bytes(src, NBYTES, 3);
    cm_workers_init(&workers);
    for (int i = 0; i < 2; i++) {
        cm_task_group_open(&groups[i], &workers, &tuning);
    }
    groups[1].spin_ns = 1;
    for (int i = 0; i < 2; i++) {
        cm_task_group_post(&groups[i], &tasks[i], &layout, dst[i], src, CM_COPY_PLAIN);
        CHECK_EQ(atomic_load(&workers.spin_ns), i == 0 ? tuning.spin_ns : 1);
        cm_task_group_wait(&groups[i], &tasks[i]);
        CHECK_BYTES_EQ(dst[i], src, NBYTES);
    }
    for (int i = 0; i < 2; i++) {
        cm_task_group_close(&groups[i]);
    }
    cm_workers_fini(&workers);
}

/* A group that falls behind asks for more threads. Tasks posted from then on must have
 * a higher limit, up to the number of threads that there may be. Each row is what is
 * asked for and the limit that must follow. */
static void
test_workers_gives_more_threads_to_a_group_that_asks(void)
{
    static const uint32_t more[][2] = {{0, 1}, {1, 2}, {3, 4}, {9, 4}, {0, 1}};
    enum { NBYTES = 1 << 20 };
    cm_tuning tuning = tuned();
    tuning.thread_count = 2;
    tuning.links_thread_count = 5;
    cm_workers workers;
    cm_task_group group;
    uint32_t there = 0;
    cm_copy_task *task = calloc(1, sizeof(*task));
    unsigned char *src = malloc(NBYTES);
    unsigned char *dst = calloc(1, NBYTES);
    cm_layout layout = {.run_nbytes = NBYTES};
    fill_bytes(src, NBYTES, 11);
    cm_workers_init(&workers);
    cm_task_group_open(&group, &workers, &tuning);
    for (size_t i = 0; i < sizeof(more) / sizeof(more[0]); i++) {
        memset(dst, 0, NBYTES);
        group.more = more[i][0];
        cm_task_group_post(&group, task, &layout, dst, src, CM_COPY_WIDE);
        CHECK_EQ(task->limit, more[i][1]);
        cm_task_group_wait(&group, task);
        CHECK_BYTES_EQ(dst, src, NBYTES);
        there = there < more[i][1] ? more[i][1] : there;
        CHECK_EQ(workers.thread_count, there);
    }
    cm_task_group_close(&group);
    cm_workers_fini(&workers);
    free(task);
    free(src);
    free(dst);
}

/* A group that has a crew gets as many threads for tasks of one part each, and no more
 * than there may be. Each row is the crew and the limit that must follow. */
static void
test_workers_crew_shares_tasks_of_one_part(void)
{
    static const uint32_t crews[][2] = {{1, 0}, {2, 1}, {4, 3}, {9, 4}, {0, 4}};
    enum { TASKS = 8, NBYTES = 256 << 10 };
    cm_tuning tuning = tuned();
    tuning.thread_count = 2;
    tuning.fresh_thread_count = 5;
    cm_workers workers;
    cm_task_group group;
    cm_copy_task *tasks = calloc(TASKS, sizeof(*tasks));
    unsigned char *src = malloc((size_t)TASKS * NBYTES);
    unsigned char *dst = malloc((size_t)TASKS * NBYTES);
    cm_layout layout = {.run_nbytes = NBYTES};
    fill_bytes(src, (size_t)TASKS * NBYTES, 13);
    cm_workers_init(&workers);
    cm_task_group_open(&group, &workers, &tuning);
    group.part_nbytes = NBYTES;
    for (size_t i = 0; i < sizeof(crews) / sizeof(crews[0]); i++) {
        memset(dst, 0, (size_t)TASKS * NBYTES);
        group.crew = crews[i][0];
        for (size_t k = 0; k < TASKS; k++) {
            cm_task_group_post(&group, &tasks[k], &layout, dst + k * NBYTES,
                               src + k * NBYTES, CM_COPY_PLAIN_ALL);
            CHECK_EQ(tasks[k].limit, crews[i][1]);
            CHECK_EQ(cm_cut_count(&tasks[k].cut), 1);
        }
        for (size_t k = 0; k < TASKS; k++) {
            cm_task_group_wait(&group, &tasks[k]);
        }
        CHECK_BYTES_EQ(dst, src, (size_t)TASKS * NBYTES);
    }
    cm_task_group_close(&group);
    CHECK_EQ(workers.thread_count, 4);
    cm_workers_fini(&workers);
    free(tasks);
    free(src);
    free(dst);
}

/* -- limits of one group among others ------------------------------------------------------ */

/* The threads that have moved parts of one group. Each part waits a while until there
 * are `wanted` of them. */
typedef struct crowd {
    uint32_t wanted;
    _Atomic uint32_t count;
    _Atomic uint64_t seen[CM_LINKS_THREAD_MAX];
} crowd;

static _Thread_local char own_place; /* the address of this identifies the thread */

/* Note this thread. Returns false if it was noted before. */
static bool
is_new_in(crowd *c)
{
    uint64_t me = (uintptr_t)&own_place;
    for (int i = 0; i < CM_LINKS_THREAD_MAX; i++) {
        uint64_t nobody = 0;
        if (atomic_compare_exchange_strong(&c->seen[i], &nobody, me)) {
            return true;
        }
        if (nobody == me) {
            return false;
        }
    }
    return false;
}

/* A cm_move_part that notes the thread and waits for others instead of copying. */
static void
join_crowd(const void *context, const cm_layout *part, void *dst, const void *src,
           bool wide)
{
    enum { STEPS = 20 };
    crowd *c = (crowd *)(uintptr_t)context;
    (void)part;
    (void)dst;
    (void)src;
    (void)wide;
    if (is_new_in(c)) {
        atomic_fetch_add(&c->count, 1);
    }
    for (int i = 0; i < STEPS && atomic_load(&c->count) < c->wanted; i++) {
        usleep(1000);
    }
    usleep(200); /* so that every thread that may come does */
}

typedef struct gathering {
    cm_workers *workers;
    cm_tuning tuning;
    crowd crowd;
} gathering;

static uint32_t
count_of(const crowd *c)
{
    return atomic_load(&c->count);
}

/* The body of a thread that posts tasks until enough threads have taken part. */
static void *
gather(void *argument)
{
    enum { TASKS = 200 };
    gathering *g = argument;
    cm_task_group group;
    cm_copy_task task = {.next = 0};
    cm_layout layout = {.run_nbytes = 64 * g->tuning.part_min_nbytes};
    cm_task_group_open(&group, g->workers, &g->tuning);
    group.move = join_crowd;
    group.context = &g->crowd;
    /* On a busy machine a thread may come too late for one task, or for ten, so there
     * are many. */
    for (int i = 0; i < TASKS && (i == 0 || count_of(&g->crowd) < g->crowd.wanted);
         i++) {
        cm_task_group_post(&group, &task, &layout, NULL, NULL, CM_COPY_PLAIN);
        cm_task_group_wait(&group, &task);
    }
    cm_task_group_close(&group);
    return NULL;
}

/* Three groups with different limits run at the same time. Each must get as many
 * threads as it may have, no more and no fewer, whichever of them posted last. */
static void
test_workers_keeps_the_limit_of_each_group(void)
{
    static const uint64_t threads[][3] = {{5, 2, 5}, {2, 5, 2}, {1, 4, 2}, {4, 1, 3}};
    cm_workers workers;
    cm_thread posters[3];
    gathering *all = calloc(3, sizeof(*all));
    cm_workers_init(&workers);
    /* Start all threads beforehand. If several groups start threads at the same time,
     * only one of them succeeds. */
    all[0] = (gathering){.workers = &workers, .tuning = tuned()};
    all[0].tuning.thread_count = 5;
    (void)gather(&all[0]);
    CHECK_EQ(workers.thread_count, 4);
    for (size_t i = 0; i < sizeof(threads) / sizeof(threads[0]); i++) {
        for (int k = 0; k < 3; k++) {
            all[k] = (gathering){.workers = &workers, .tuning = tuned()};
            all[k].crowd.wanted = (uint32_t)threads[i][k];
            all[k].tuning.thread_count = threads[i][k];
            all[k].tuning.part_max_nbytes = all[k].tuning.part_min_nbytes;
            CHECK_OK(cm_thread_start(&posters[k], gather, &all[k]));
        }
        for (int k = 0; k < 3; k++) {
            cm_thread_join(posters[k]);
        }
        for (int k = 0; k < 3; k++) {
            CHECK_EQ(count_of(&all[k].crowd), all[k].crowd.wanted);
        }
    }
    cm_workers_fini(&workers);
    free(all);
}

/* -- short copies ------------------------------------------------------------------------- */

/* Copy in pieces, which are posted all at once or one by one. In some rounds the last
 * piece is given up, which means that the group is closed before the piece is done. */
static void
copy_in_pieces(world *w, unsigned char *dst, const unsigned char *src, uint64_t nbytes,
               int round)
{
    enum { PIECES = 8 };
    uint64_t length = nbytes / (1 + (uint64_t)round % PIECES) + 1;
    uint32_t count = (uint32_t)((nbytes + length - 1) / length);
    uint32_t given_up = round % 5 == 4 ? count - 1 : count;
    bool at_once = round % 2 == 0;
    cm_copy_task tasks[PIECES] = {{.next = 0}};
    cm_task_group group;
    cm_task_group_open(&group, w->workers, &w->tuning);
    group.lets_sleep = round % 3 == 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t begin = i * length;
        cm_layout piece = {.run_nbytes =
                               length < nbytes - begin ? length : nbytes - begin,
                           .offset[CM_DST] = (int64_t)begin,
                           .offset[CM_SRC] = (int64_t)begin};
        cm_task_group_post(&group, &tasks[i], &piece, dst, src,
                           at_once ? CM_COPY_WIDE : CM_COPY_PLAIN);
        if (!at_once && i < given_up) {
            cm_task_group_wait(&group, &tasks[i]);
            CHECK(memcmp(dst + begin, src + begin, piece.run_nbytes) == 0);
        }
    }
    for (uint32_t i = 0; i < given_up; i++) {
        cm_task_group_wait(&group, &tasks[i]);
    }
    CHECK(memcmp(dst, src, given_up == count ? nbytes : given_up * length) == 0);
    cm_task_group_close(&group);
}

/* The body of a thread that makes many short copies. */
static void *
share_many(void *argument)
{
    enum { ROUNDS = 300, MOST = 200000 };
    world *w = argument;
    unsigned char *src = malloc(MOST);
    fill_bytes(src, MOST, w->seed);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t nbytes = 1 + (uint64_t)round * 7919 % MOST;
        /* A sanitizer would report a thread that still uses this. */
        unsigned char *dst = malloc(nbytes);
        copy_in_pieces(w, dst, src, nbytes, round);
        free(dst);
    }
    free(src);
    return NULL;
}

/* Three threads make many short copies, some of which are given up. */
static void
test_workers_short_copies_are_whole(void)
{
    enum { OWNERS = 3 };
    cm_workers workers;
    cm_thread threads[OWNERS];
    world worlds[OWNERS];
    cm_workers_init(&workers);
    for (int i = 0; i < OWNERS; i++) {
        worlds[i] =
            (world){.workers = &workers, .tuning = tuned(), .seed = (uint64_t)i + 1};
        worlds[i].tuning.spin_ns = 5000;
        worlds[i].tuning.part_min_nbytes = 4096;
        CHECK_OK(cm_thread_start(&threads[i], share_many, &worlds[i]));
    }
    for (int i = 0; i < OWNERS; i++) {
        cm_thread_join(threads[i]);
    }
    CHECK_EQ(atomic_load(&workers.open), 0);
    cm_workers_fini(&workers);
}

/* More tasks are open than there are places in which workers find them. A task without
 * a place must be copied by its poster. */
static void
test_workers_tasks_without_a_place_are_done_too(void)
{
    enum { TASKS = CM_OPEN_TASKS_MAX + 6, NBYTES = 64 << 10 };
    cm_workers workers;
    cm_task_group group;
    cm_tuning tuning = tuned();
    cm_copy_task *tasks = calloc(TASKS, sizeof(*tasks));
    unsigned char *src = malloc(NBYTES);
    unsigned char *dst = calloc(TASKS, NBYTES);
    cm_layout layout = {.run_nbytes = NBYTES};
    fill_bytes(src, NBYTES, 13);
    cm_workers_init(&workers);
    cm_task_group_open(&group, &workers, &tuning);
    group.is_early = true; /* no task can be done before all are posted */
    for (size_t i = 0; i < TASKS; i++) {
        cm_task_group_post(&group, &tasks[i], &layout, dst + i * NBYTES, src,
                           CM_COPY_PLAIN);
        CHECK_EQ(tasks[i].place, i < CM_OPEN_TASKS_MAX ? (int)i : -1);
    }
    for (size_t i = 0; i < TASKS; i++) {
        cm_copy_task_set_ready(&tasks[i], NBYTES);
    }
    for (size_t i = 0; i < TASKS; i++) {
        cm_task_group_wait(&group, &tasks[i]);
        CHECK_BYTES_EQ(dst + i * NBYTES, src, NBYTES);
    }
    cm_task_group_close(&group);
    CHECK_EQ(atomic_load(&workers.open), 0);
    cm_workers_fini(&workers);
    free(tasks);
    free(src);
    free(dst);
}

/* clang-format off */
MAIN(RUN(test_wide_copy_is_memcpy_at_any_place_and_length)
     RUN(test_host_copy_turns_elements_of_every_size)
     RUN(test_workers_serves_several_groups_at_once)
     RUN(test_workers_closed_group_is_touched_no_more)
     RUN(test_workers_early_task_is_taken_as_far_as_it_is_ready)
     RUN(test_workers_task_of_no_bytes_is_done)
     RUN(test_workers_small_task_starts_no_thread)
     RUN(test_workers_threads_rest_beyond_the_limit)
     RUN(test_workers_of_few_processors_starts_few_threads)
     RUN(test_workers_resting_poster_sees_every_task_done)
     RUN(test_workers_single_part_is_copied_where_others_rest)
     RUN(test_workers_spin_as_long_as_the_last_group_wants)
     RUN(test_workers_gives_more_threads_to_a_group_that_asks)
     RUN(test_workers_crew_shares_tasks_of_one_part)
     RUN(test_workers_keeps_the_limit_of_each_group)
     RUN(test_workers_short_copies_are_whole)
     RUN(test_workers_tasks_without_a_place_are_done_too))
/* clang-format on */
