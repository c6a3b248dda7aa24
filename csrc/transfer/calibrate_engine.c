/* SPDX-License-Identifier: Apache-2.0 */
/* Which way is faster from which size on: copies of the engine itself, one way and the
 * other. */
#include <math.h>

#include "base/cache_flush.h"
#include "transfer/calibrate_private.h"

enum { REPEATS = 3 };

static cm_status
time_copy(const cm_bench *b, const cm_tuning *tuning, bool down, uint64_t nbytes,
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
compare(const cm_bench *b, const cm_tuning tunings[2], bool down, uint64_t nbytes,
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
find_staged(const cm_bench *b, const cm_tuning *base, bool down, double *out)
{
    cm_tuning ways[2] = {*base, *base};
    for (int way = 0; way < 2; way++) {
        ways[way].quick_nbytes = 0;
        ways[way].staged_up_nbytes = way == 0 ? 0 : UINT64_MAX;
        ways[way].staged_down_nbytes = ways[way].staged_up_nbytes;
    }
    uint64_t least = 2 * CM_BENCH_NBYTES;
    bool wins = true;
    for (uint64_t nbytes = CM_BENCH_NBYTES; nbytes >= 512 << 10 && wins; nbytes /= 2) {
        if (cm_bench_is_late(b)) {
            return cm_ok();
        }
        CM_TRY(compare(b, ways, down, nbytes, &wins));
        least = wins ? nbytes : least;
    }
    *out = (double)least;
    return cm_ok();
}

cm_status
cm_bench_crossings(cm_bench *bench)
{
    cm_measured *m = bench->measured;
    cm_tuning base;
    cm_tuning_derive(m, bench->cpu_count, &base);
    CM_TRY(find_staged(bench, &base, false, &m->staged_up_nbytes));
    return find_staged(bench, &base, true, &m->staged_down_nbytes);
}
