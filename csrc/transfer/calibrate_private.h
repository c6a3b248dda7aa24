/* SPDX-License-Identifier: Apache-2.0 */
/* What the files that measure share. */
#ifndef CM_TRANSFER_CALIBRATE_PRIVATE_H
#define CM_TRANSFER_CALIBRATE_PRIVATE_H

#include "transfer/calibrate.h"
#include "transfer/engine_private.h"

enum { CM_BENCH_NBYTES = 8 << 20 };

/* Borrowed by all steps: memory of each sort, of CM_BENCH_NBYTES bytes, twice that on
 * the device. */
typedef struct cm_bench {
    cm_engine *engine;
    cm_stream *stream;
    uint64_t event;
    char *host;
    cm_block *pinned;
    cm_block *device;
    unsigned cpu_count;
    uint64_t deadline_ns;
    cm_measured *measured;
} cm_bench;

static inline bool
cm_bench_is_late(const cm_bench *bench)
{
    return cm_now_ns() > bench->deadline_ns;
}

/* calibrate_crew.c: rates by the number of threads, and what waking one takes. */
CM_NODISCARD cm_status cm_bench_crew(cm_bench *bench);
/* calibrate_engine.c: the sizes from which on one way is faster than another. */
CM_NODISCARD cm_status cm_bench_crossings(cm_bench *bench);

#endif
