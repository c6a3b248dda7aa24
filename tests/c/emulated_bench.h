/* SPDX-License-Identifier: Apache-2.0 */
/* Helps C tests of the emulated device. It has a runtime with a small buffer of device
 * memory and two streams, and short names for the questions that these tests ask again
 * and again. */
#pragma once

#include "base/thread.h"
#include "open_emulated.h"

enum { MIB = 1 << 20, N = 64 };

/* Return the address of host memory as a number, as the runtime's calls take it. */
CM_UNUSED static cm_address
of(const void *host)
{
    return (cm_address)(uintptr_t)host;
}

/* What set_up() makes. */
typedef struct bench {
    cm_runtime *rt;
    cm_address device;
    unsigned char *alias; /* the host's view of `device` */
    uint64_t a;           /* the two streams */
    uint64_t b;
} bench;

/* Open a runtime, allocate N bytes of device memory that are 0, and make the streams
 * `a` and `b` with these flags. */
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

/* True if the runtime says that all work of the stream has ended. */
CM_UNUSED static bool
is_done(cm_runtime *rt, uint64_t stream)
{
    bool done = false;
    MUST(cm_rt_stream_query(rt, stream, &done));
    return done;
}

/* True if the runtime says that the event has happened. */
CM_UNUSED static bool
has_happened(cm_runtime *rt, uint64_t event)
{
    bool done = false;
    MUST(cm_rt_event_query(rt, event, &done));
    return done;
}

/* Wait until every stream has done all work that no gate holds back. */
CM_UNUSED static void
let_run(void)
{
    let_others_run();
}
