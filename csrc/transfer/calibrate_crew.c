/* SPDX-License-Identifier: Apache-2.0 */
/* What threads of the host do: a crew of its own, so that nobody else's work is in it.
 */
#include <math.h>
#include <stdlib.h>

#include "base/cache_flush.h"
#include "transfer/calibrate_private.h"

#define ASLEEP_NS (UINT64_C(5) * 1000 * 1000) /* they surely are by then */

enum { REPEATS = 3, COUNTS = 5 };

typedef struct crew_bench {
    const cm_bench *bench;
    cm_crew crew;
    cm_gang gang;
    cm_load load;
    cm_tuning tuning;
} crew_bench;

static double
time_copy(crew_bench *c)
{
    const cm_layout layout = {.run_nbytes = CM_BENCH_NBYTES};
    cm_cache_flush(c->bench->host, CM_BENCH_NBYTES);
    uint64_t begin_ns = cm_now_ns();
    cm_gang_post(&c->gang, &c->load, &layout, c->bench->pinned->host, c->bench->host,
                 false);
    cm_gang_wait(&c->gang, &c->load);
    return (double)(cm_now_ns() - begin_ns);
}

/* With 1, 2, 4, … threads, as many as can run at once. */
static void
measure_rates(crew_bench *c)
{
    unsigned cpu_count = c->bench->cpu_count;
    for (int i = 0; i < COUNTS; i++) {
        double *rate = cm_measured_at(c->bench->measured, CM_MEASURED_copy_rate_1 + i);
        uint64_t count = UINT64_C(1) << i;
        if (count > cpu_count || cm_bench_is_late(c->bench)) {
            *rate = count > cpu_count ? 0 : *rate;
            continue;
        }
        c->tuning.thread_count = count;
        double best = INFINITY;
        for (int k = 0; k <= REPEATS; k++) { /* the first one starts the threads */
            best = fmin(best, time_copy(c));
        }
        *rate = 1e9 * CM_BENCH_NBYTES / fmax(best, 1);
    }
}

/* A load that the one who posts it leaves to others, once all of them sleep. */
static void
measure_waking(crew_bench *c)
{
    enum { NBYTES = 32 << 10, TIMES = 5 };
    static const cm_layout layout = {.run_nbytes = NBYTES};
    double best = INFINITY;
    for (int i = 0; i < TIMES && c->crew.thread_count > 0; i++) {
        uint64_t patience_ns = cm_now_ns() + ASLEEP_NS;
        while (cm_crew_count_asleep(&c->crew) < c->crew.thread_count
               && cm_now_ns() < patience_ns) {
            (void)sched_yield();
        }
        uint64_t begin_ns = cm_now_ns();
        cm_gang_post(&c->gang, &c->load, &layout, c->bench->pinned->host,
                     c->bench->host, false);
        while (!cm_load_is_done(&c->load)) {
            (void)sched_yield();
        }
        best = fmin(best, (double)(cm_now_ns() - begin_ns));
    }
    if (isfinite(best)) {
        c->bench->measured->wake_ns = best;
    }
}

cm_status
cm_bench_crew(cm_bench *bench)
{
    crew_bench *c = malloc(sizeof(*c));
    if (c == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*c));
    }
    c->bench = bench;
    cm_status status = cm_crew_init(&c->crew);
    if (cm_is_ok(status)) {
        cm_tuning_init(&c->tuning);
        cm_tuning_resolve(&c->tuning, bench->cpu_count);
        cm_gang_open(&c->gang, &c->crew, &c->tuning);
        measure_rates(c);
        measure_waking(c);
        cm_gang_close(&c->gang);
        cm_crew_fini(&c->crew);
    }
    free(c);
    return status;
}
