/* SPDX-License-Identifier: Apache-2.0 */
/* Tests how many threads help with a copy: none with a short one, and some with one
 * that is long enough. */
#include "engine_world.h"
#include "transfer/engine/private.h"

/* Copy this many bytes up and down again, and wait for both copies. */
static void
copy_both_ways(world *w, uint64_t nbytes)
{
    memory there = take_memory(w, CM_KIND_DEVICE, 0, nbytes);
    memory from = take_memory(w, CM_KIND_PAGEABLE, 0, nbytes);
    memory to = take_memory(w, CM_KIND_PAGEABLE, 0, nbytes);
    int64_t count = (int64_t)nbytes;
    cm_copy_request up = {.dst = row(&there, 0, count, 1, 1),
                          .src = row(&from, 0, count, 1, 1),
                          .stream = w->streams[0],
                          .blocking = true};
    cm_copy_request down = {.dst = row(&to, 0, count, 1, 1),
                            .src = row(&there, 0, count, 1, 1),
                            .stream = w->streams[0],
                            .blocking = true};
    number_bytes(&from, 5);
    memset(to.bytes, 0, nbytes);
    CHECK_OK(cm_engine_copy(w->engine, &up, NULL));
    CHECK_OK(cm_engine_copy(w->engine, &down, NULL));
    CHECK_BYTES_EQ(to.bytes, from.bytes, nbytes);
    give_memory(w, &there);
    give_memory(w, &from);
    give_memory(w, &to);
}

/* The calling thread moves up to 64 KiB alone, so no thread is started for it. */
static void
test_copy_of_64_kib_takes_one_processor(void)
{
    world w;
    open_world(&w);
    cm_tuning tuning;
    cm_tuning_init(&tuning);
    tuning.thread_count = 8;
    MUST(cm_engine_set_tuning(w.engine, &tuning));
    for (uint64_t nbytes = 4 << 10; nbytes <= 64 << 10; nbytes *= 2) {
        copy_both_ways(&w, nbytes);
        CHECK_EQ(atomic_load(&w.engine->workers.thread_count), 0);
    }
    copy_both_ways(&w, 256 << 10);
    CHECK_LT(0, atomic_load(&w.engine->workers.thread_count));
    close_world(&w);
}

MAIN(RUN(test_copy_of_64_kib_takes_one_processor))
