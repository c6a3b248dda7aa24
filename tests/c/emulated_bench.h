/* SPDX-License-Identifier: Apache-2.0 */
/* For C tests of streams: one runtime with a small device buffer and two streams. */
#pragma once

#include "base/thread.h"
#include "open_emulated.h"

enum { MIB = 1 << 20, N = 64 };

CM_UNUSED static cm_address
of(const void *host)
{
    return (cm_address)(uintptr_t)host;
}

/* One runtime, one device buffer filled with 0, two streams. */
typedef struct bench {
    cm_runtime *rt;
    cm_address device;
    unsigned char *alias;
    uint64_t a;
    uint64_t b;
} bench;

CM_UNUSED static bench
set_up(unsigned flags_a, unsigned flags_b)
{
    bench made = {.rt = open_emulated(13000, 2, MIB)};
    MUST(cm_rt_device_alloc(made.rt, N, &made.device));
    made.alias = cm_runtime_host_alias(made.rt, made.device, N);
    memset(made.alias, 0, N);
    MUST(cm_rt_stream_create(made.rt, flags_a, 0, &made.a));
    MUST(cm_rt_stream_create(made.rt, flags_b, 0, &made.b));
    return made;
}

CM_UNUSED static void
tear_down(const bench *t)
{
    MUST(cm_rt_device_synchronize(t->rt));
    MUST(cm_rt_stream_destroy(t->rt, t->a));
    MUST(cm_rt_stream_destroy(t->rt, t->b));
    MUST(cm_rt_device_free(t->rt, t->device));
    close_emulated(t->rt);
}

CM_UNUSED static bool
is_done(cm_runtime *rt, uint64_t stream)
{
    bool done = false;
    MUST(cm_rt_stream_query(rt, stream, &done));
    return done;
}

CM_UNUSED static bool
has_happened(cm_runtime *rt, uint64_t event)
{
    bool done = false;
    MUST(cm_rt_event_query(rt, event, &done));
    return done;
}

/* Wait until everything that may run has run. */
CM_UNUSED static void
let_run(void)
{
    let_others_run();
}
