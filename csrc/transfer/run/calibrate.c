/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/run/calibrate.h"
#include "transfer/run/run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cache_flush.h"
#include "base/cpu_count.h"

enum { BENCH_NBYTES = 8 << 20, REPEATS = 3 };

/* Borrowed by all steps: memory of each sort, of BENCH_NBYTES bytes. */
typedef struct bench {
    cm_engine *engine;
    cm_stream *stream;
    uint64_t event;
    char *host;
    cm_block *pinned;
    cm_block *device;
    unsigned cpu_count;
    uint64_t deadline_ns;
    cm_measured *measured;
} bench;

static bool
is_late(const bench *b)
{
    return cm_now_ns() > b->deadline_ns;
}

/* -- copies of the runtime ---------------------------------------------------------------- */

/* Time from the first call until `count` copies are over. */
static cm_status
time_chain(const bench *b, cm_address dst, cm_address src, uint64_t nbytes, int count,
           double *out)
{
    cm_runtime *rt = b->engine->rt;
    bool done = false;
    uint64_t begin_ns = cm_now_ns();
    for (int i = 0; i < count; i++) {
        CM_TRY(cm_rt_copy_async(rt, dst, src, nbytes, b->stream->handle));
    }
    CM_TRY(cm_rt_event_record(rt, b->event, b->stream->handle));
    while (!done) {
        CM_TRY(cm_rt_event_query(rt, b->event, &done));
    }
    *out = fmin(*out, (double)(cm_now_ns() - begin_ns));
    return cm_ok();
}

static cm_status
best_chain(const bench *b, cm_address dst, cm_address src, uint64_t nbytes, int count,
           double *out)
{
    *out = INFINITY;
    for (int i = 0; i <= REPEATS; i++) {
        CM_TRY(time_chain(b, dst, src, nbytes, count, out));
        if (is_late(b)) {
            break;
        }
    }
    return cm_ok();
}

/* Bytes per second once it is going: the difference of a long and a short chain. */
static cm_status
measure_rate(const bench *b, cm_address dst, cm_address src, double *rate)
{
    enum { COUNT = 5 };
    double one, many;
    if (is_late(b)) {
        return cm_ok();
    }
    CM_TRY(best_chain(b, dst, src, BENCH_NBYTES, 1, &one));
    CM_TRY(best_chain(b, dst, src, BENCH_NBYTES, COUNT, &many));
    if (many > one) {
        *rate = 1e9 * (COUNT - 1) * BENCH_NBYTES / (many - one);
    }
    return cm_ok();
}

static cm_status
measure_links(bench *b)
{
    enum { CHAIN = 16, GAP_NBYTES = 64 << 10 };
    cm_measured *m = b->measured;
    cm_address host = (uintptr_t)b->pinned->host;
    cm_address device = b->device->address;
    double chain;
    CM_TRY(measure_rate(b, device, host, &m->up_rate));
    CM_TRY(measure_rate(b, host, device, &m->down_rate));
    CM_TRY(best_chain(b, device, host, GAP_NBYTES, CHAIN, &chain));
    m->dma_gap_ns = fmax(0, chain / CHAIN - 1e9 * GAP_NBYTES / m->up_rate);
    return cm_ok();
}

/* The runtime's own copies of ordinary memory. */
static cm_status
measure_driver(bench *b)
{
    cm_address host = (uintptr_t)b->host;
    cm_address device = b->device->address;
    for (int down = 0; down < 2; down++) {
        double best = INFINITY;
        for (int i = 0; i < REPEATS && !is_late(b); i++) {
            cm_cache_flush(b->host, BENCH_NBYTES);
            CM_TRY(time_chain(b, down ? host : device, down ? device : host,
                              BENCH_NBYTES, 1, &best));
        }
        if (isfinite(best)) {
            *(down ? &b->measured->driver_down_rate : &b->measured->driver_up_rate) =
                1e9 * BENCH_NBYTES / best;
        }
    }
    return cm_ok();
}

/* -- threads of the host: workers of their own, with nobody else's work ------------------- */

#define ASLEEP_NS (UINT64_C(5) * 1000 * 1000) /* they surely are by then */

typedef struct workers_bench {
    const bench *b;
    cm_workers workers;
    cm_task_group group;
    cm_copy_task task;
    cm_tuning tuning;
} workers_bench;

static double
time_task(workers_bench *c)
{
    const cm_layout layout = {.run_nbytes = BENCH_NBYTES};
    cm_cache_flush(c->b->host, BENCH_NBYTES);
    uint64_t begin_ns = cm_now_ns();
    cm_task_group_post(&c->group, &c->task, &layout, c->b->pinned->host, c->b->host,
                       false);
    cm_task_group_wait(&c->group, &c->task);
    return (double)(cm_now_ns() - begin_ns);
}

/* With 1, 2, 4, … threads, as many as can run at once. */
static void
measure_rates(workers_bench *c)
{
    enum { COUNTS = CM_MEASURED_copy_rate_16 - CM_MEASURED_copy_rate_1 + 1 };
    unsigned cpu_count = c->b->cpu_count;
    for (int i = 0; i < COUNTS; i++) {
        double *rate = cm_measured_at(c->b->measured, CM_MEASURED_copy_rate_1 + i);
        uint64_t count = UINT64_C(1) << i;
        if (count > cpu_count || is_late(c->b)) {
            *rate = count > cpu_count ? 0 : *rate;
            continue;
        }
        c->tuning.thread_count = count;
        double best = INFINITY;
        for (int k = 0; k <= REPEATS; k++) { /* the first one starts the threads */
            best = fmin(best, time_task(c));
        }
        *rate = 1e9 * BENCH_NBYTES / fmax(best, 1);
    }
}

/* A task that the one who posts it leaves to others, once all of them sleep. */
static void
measure_waking(workers_bench *c)
{
    enum { NBYTES = 32 << 10, TIMES = 5 };
    static const cm_layout layout = {.run_nbytes = NBYTES};
    double best = INFINITY;
    for (int i = 0; i < TIMES && c->workers.thread_count > 0; i++) {
        uint64_t patience_ns = cm_now_ns() + ASLEEP_NS;
        while (cm_workers_count_asleep(&c->workers) < c->workers.thread_count
               && cm_now_ns() < patience_ns) {
            (void)sched_yield();
        }
        uint64_t begin_ns = cm_now_ns();
        cm_task_group_post(&c->group, &c->task, &layout, c->b->pinned->host, c->b->host,
                           false);
        while (!cm_copy_task_is_done(&c->task)) {
            (void)sched_yield();
        }
        best = fmin(best, (double)(cm_now_ns() - begin_ns));
    }
    if (isfinite(best)) {
        c->b->measured->wake_ns = best;
    }
}

static cm_status
measure_workers(bench *b)
{
    workers_bench *c = malloc(sizeof(*c));
    if (c == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*c));
    }
    c->b = b;
    cm_status status = cm_workers_init(&c->workers);
    if (cm_is_ok(status)) {
        cm_tuning_init(&c->tuning);
        cm_tuning_resolve(&c->tuning, b->cpu_count);
        cm_task_group_open(&c->group, &c->workers, &c->tuning);
        measure_rates(c);
        measure_waking(c);
        cm_task_group_close(&c->group);
        cm_workers_fini(&c->workers);
    }
    free(c);
    return status;
}

/* -- from which size on pieces win: copies of the engine, one way and the other ----------- */

static cm_status
time_copy(const bench *b, const cm_tuning *tuning, bool down, uint64_t nbytes,
          double *best)
{
    cm_region ends[2] = {
        {.kind = CM_KIND_PAGEABLE, .device = -1, .host = b->host},
        {.kind = CM_KIND_DEVICE,
         .device = b->stream->device,
         .address = b->device->address},
    };
    for (int i = 0; i < 2; i++) {
        ends[i].itemsize = 1;
        ends[i].ndim = 1;
        ends[i].shape[0] = (int64_t)nbytes;
        ends[i].strides[0] = 1;
    }
    cm_copy_request request = {
        .dst = ends[!down], .src = ends[down], .stream = b->stream, .blocking = true};
    cm_cache_flush(b->host, (size_t)nbytes);
    uint64_t begin_ns = cm_now_ns();
    CM_TRY(cm_engine_copy_tuned(b->engine, &request, tuning));
    *best = fmin(*best, (double)(cm_now_ns() - begin_ns));
    return cm_ok();
}

/* Is the first way the faster one? */
static cm_status
compare(const bench *b, const cm_tuning tunings[2], bool down, uint64_t nbytes,
        bool *out)
{
    double best[2] = {INFINITY, INFINITY};
    for (int i = 0; i <= REPEATS; i++) {
        for (int way = 0; way < 2; way++) {
            double first = INFINITY; /* finds what it needs made */
            CM_TRY(time_copy(b, &tunings[way], down, nbytes,
                             i == 0 ? &first : &best[way]));
        }
    }
    *out = best[0] < best[1];
    return cm_ok();
}

/* The least size from which on pieces win. */
static cm_status
find_staged(const bench *b, const cm_tuning *base, bool down, double *out)
{
    cm_tuning ways[2] = {*base, *base};
    for (int way = 0; way < 2; way++) {
        ways[way].quick_nbytes = 0;
        ways[way].staged_up_nbytes = way == 0 ? 0 : UINT64_MAX;
        ways[way].staged_down_nbytes = ways[way].staged_up_nbytes;
    }
    uint64_t least = 2 * BENCH_NBYTES;
    bool wins = true;
    for (uint64_t nbytes = BENCH_NBYTES; nbytes >= 512 << 10 && wins; nbytes /= 2) {
        if (is_late(b)) {
            return cm_ok();
        }
        CM_TRY(compare(b, ways, down, nbytes, &wins));
        least = wins ? nbytes : least;
    }
    *out = (double)least;
    return cm_ok();
}

static cm_status
measure_crossings(bench *b)
{
    cm_measured *m = b->measured;
    cm_tuning base;
    cm_tuning_derive(m, b->cpu_count, &base);
    CM_TRY(find_staged(b, &base, false, &m->staged_up_nbytes));
    return find_staged(b, &base, true, &m->staged_down_nbytes);
}

/* -- all of it ---------------------------------------------------------------------------- */

static cm_status
open_bench(bench *b, int device)
{
    cm_engine *engine = b->engine;
    cm_mutex_lock(&engine->lock);
    cm_pool *pinned = engine->pinned_pool;
    cm_pool *on_device = engine->device_pools[device];
    cm_mutex_unlock(&engine->lock);
    if (pinned == NULL || on_device == NULL) {
        return cm_fail(CM_EINVALID, (uint64_t)device);
    }
    b->host = malloc(BENCH_NBYTES);
    if (b->host == NULL) {
        return cm_fail(CM_ENOMEM, BENCH_NBYTES);
    }
    memset(b->host, 1, BENCH_NBYTES);
    CM_TRY(cm_cache_take_stream(engine, device, &b->stream));
    CM_TRY(cm_cache_take_event(engine, device, &b->event));
    CM_TRY(cm_pool_alloc(pinned, BENCH_NBYTES, NULL, &b->pinned));
    memset(b->pinned->host, 2, BENCH_NBYTES);
    CM_TRY(cm_pool_alloc(on_device, BENCH_NBYTES, b->stream, &b->device));
    return cm_ok();
}

/* `idle`: nothing of ours runs any more. */
static void
close_bench(bench *b, int device, bool idle)
{
    cm_engine *engine = b->engine;
    unsigned flags = idle ? 0 : CM_POOL_FREE_FENCE;
    if (b->device != NULL) {
        cm_pool_free(engine->device_pools[device], b->device, &b->stream, 1, flags);
    }
    if (b->pinned != NULL) {
        cm_pool_free(engine->pinned_pool, b->pinned, &b->stream, idle ? 0 : 1, flags);
    }
    cm_cache_give_event(engine, device, b->event);
    cm_cache_give_stream(engine, b->stream);
    free(b->host); /* the runtime is through with ordinary memory on return */
}

static cm_status
run_bench(bench *b)
{
    CM_TRY(measure_links(b));
    CM_TRY(measure_driver(b));
    CM_TRY(measure_workers(b));
    return measure_crossings(b);
}

static cm_status
calibrate(cm_engine *engine, int device, uint64_t budget_ns, cm_measured *out)
{
    cm_device_guard guard;
    bench b = {.engine = engine,
               .cpu_count = cm_usable_cpu_count(NULL),
               .deadline_ns = cm_now_ns() + budget_ns,
               .measured = out};
    /* A capture of another thread forbids this one much, unless it says it knows
     * better. */
    int mode = CM_CAPTURE_RELAXED;
    cm_measured_init(out);
    CM_TRY(cm_device_enter(engine->rt, device, &guard));
    cm_status status = cm_rt_capture_mode_exchange(engine->rt, &mode);
    if (!cm_is_ok(status)) {
        cm_device_leave(engine->rt, &guard);
        return status;
    }
    status = open_bench(&b, device);
    if (cm_is_ok(status)) {
        status = run_bench(&b);
    }
    bool idle = b.stream == NULL;
    if (!idle) {
        cm_status waited = cm_rt_stream_synchronize(engine->rt, b.stream->handle);
        idle = cm_is_ok(waited);
        status = cm_is_ok(status) ? waited : status;
    }
    close_bench(&b, device, idle);
    cm_status back = cm_rt_capture_mode_exchange(engine->rt, &mode);
    status = cm_is_ok(status) ? back : status;
    cm_device_leave(engine->rt, &guard);
    return status;
}

cm_status
cm_engine_calibrate(cm_engine *engine, int device, uint64_t budget_ns, cm_measured *out)
{
    if (cm_engine_is_forked(engine)) {
        return cm_fail(CM_EFORKED, 0);
    }
    if (device < 0 || device >= CM_MAX_DEVICES) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)device);
    }
    cm_mutex_lock(&engine->lock);
    bool closed = engine->closed;
    engine->caller_count += !closed;
    cm_mutex_unlock(&engine->lock);
    if (closed) {
        return cm_fail(CM_ECLOSED, 0);
    }
    cm_status status = calibrate(engine, device, budget_ns, out);
    cm_engine_end_call(engine);
    return status;
}
