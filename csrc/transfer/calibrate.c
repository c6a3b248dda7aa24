/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/calibrate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/cache_flush.h"
#include "base/cpu_count.h"
#include "transfer/calibrate_private.h"

enum { CHAIN = 16, REPEATS = 3, GAP_NBYTES = 64 << 10, LATENCY_NBYTES = 4096 };

/* -- copies of the runtime ---------------------------------------------------------------- */

/* Time from the first call until `count` copies are over. */
static cm_status
time_chain(const cm_bench *b, cm_address dst, cm_address src, uint64_t nbytes,
           int count, double *out)
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
best_chain(const cm_bench *b, cm_address dst, cm_address src, uint64_t nbytes,
           int count, double *out)
{
    *out = INFINITY;
    for (int i = 0; i <= REPEATS; i++) {
        CM_TRY(time_chain(b, dst, src, nbytes, count, out));
        if (cm_bench_is_late(b)) {
            break;
        }
    }
    return cm_ok();
}

/* Bytes per second once it is going: the difference of a long and a short chain. */
static cm_status
measure_rate(const cm_bench *b, cm_address dst, cm_address src, double *rate)
{
    enum { COUNT = 5 };
    double one, many;
    if (cm_bench_is_late(b)) {
        return cm_ok();
    }
    CM_TRY(best_chain(b, dst, src, CM_BENCH_NBYTES, 1, &one));
    CM_TRY(best_chain(b, dst, src, CM_BENCH_NBYTES, COUNT, &many));
    if (many > one) {
        *rate = 1e9 * (COUNT - 1) * CM_BENCH_NBYTES / (many - one);
    }
    return cm_ok();
}

static cm_status
measure_links(cm_bench *b)
{
    cm_measured *m = b->measured;
    cm_address host = (uintptr_t)b->pinned->host;
    cm_address device = b->device->address;
    double chain, one;
    CM_TRY(measure_rate(b, device, host, &m->up_rate));
    CM_TRY(measure_rate(b, host, device, &m->down_rate));
    CM_TRY(measure_rate(b, device, device + CM_BENCH_NBYTES, &m->device_rate));
    CM_TRY(best_chain(b, device, host, LATENCY_NBYTES, 1, &one));
    CM_TRY(best_chain(b, device, host, GAP_NBYTES, CHAIN, &chain));
    m->latency_ns = one;
    m->dma_gap_ns = fmax(0, chain / CHAIN - 1e9 * GAP_NBYTES / m->up_rate);
    return cm_ok();
}

/* The runtime's own copies of ordinary memory. */
static cm_status
measure_driver(cm_bench *b)
{
    cm_address host = (uintptr_t)b->host;
    cm_address device = b->device->address;
    for (int down = 0; down < 2; down++) {
        double best = INFINITY;
        for (int i = 0; i < REPEATS && !cm_bench_is_late(b); i++) {
            cm_cache_flush(b->host, CM_BENCH_NBYTES);
            CM_TRY(time_chain(b, down ? host : device, down ? device : host,
                              CM_BENCH_NBYTES, 1, &best));
        }
        if (isfinite(best)) {
            *(down ? &b->measured->driver_down_rate : &b->measured->driver_up_rate) =
                1e9 * CM_BENCH_NBYTES / best;
        }
    }
    return cm_ok();
}

/* -- all of it ---------------------------------------------------------------------------- */

static cm_status
open_bench(cm_bench *b, int device)
{
    cm_engine *engine = b->engine;
    cm_mutex_lock(&engine->lock);
    cm_pool *pinned = engine->pinned_pool;
    cm_pool *on_device = engine->device_pools[device];
    cm_mutex_unlock(&engine->lock);
    if (pinned == NULL || on_device == NULL) {
        return cm_fail(CM_EINVALID, (uint64_t)device);
    }
    b->host = malloc(CM_BENCH_NBYTES);
    if (b->host == NULL) {
        return cm_fail(CM_ENOMEM, CM_BENCH_NBYTES);
    }
    memset(b->host, 1, CM_BENCH_NBYTES);
    CM_TRY(cm_loan_take_stream(engine, device, &b->stream));
    CM_TRY(cm_loan_take_event(engine, device, &b->event));
    CM_TRY(cm_pool_alloc(pinned, CM_BENCH_NBYTES, NULL, &b->pinned));
    memset(b->pinned->host, 2, CM_BENCH_NBYTES);
    CM_TRY(cm_pool_alloc(on_device, 2 * CM_BENCH_NBYTES, b->stream, &b->device));
    return cm_ok();
}

/* `idle`: nothing of ours runs any more. */
static void
close_bench(cm_bench *b, int device, bool idle)
{
    cm_engine *engine = b->engine;
    unsigned flags = idle ? 0 : CM_POOL_FREE_FENCE;
    if (b->device != NULL) {
        cm_pool_free(engine->device_pools[device], b->device, &b->stream, 1, flags);
    }
    if (b->pinned != NULL) {
        cm_pool_free(engine->pinned_pool, b->pinned, &b->stream, idle ? 0 : 1, flags);
    }
    cm_loan_give_event(engine, device, b->event);
    cm_loan_give_stream(engine, b->stream);
    free(b->host); /* the runtime is through with ordinary memory on return */
}

static cm_status
run_bench(cm_bench *b)
{
    CM_TRY(measure_links(b));
    CM_TRY(measure_driver(b));
    CM_TRY(cm_bench_crew(b));
    return cm_bench_crossings(b);
}

static cm_status
calibrate(cm_engine *engine, int device, uint64_t budget_ns, cm_measured *out)
{
    cm_device_guard guard;
    cm_bench b = {.engine = engine,
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
