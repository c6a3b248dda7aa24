/* SPDX-License-Identifier: Apache-2.0 */
/* transfer/plan/tuning.h: what follows from the figures of machines, made up mostly. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "transfer/plan/tuning.h"

#define MIB (UINT64_C(1) << 20)

static const uint64_t never = CM_TUNING_NEVER;

static void
test_defaults_are_those_of_the_default_machine(void)
{
    cm_measured measured;
    cm_tuning derived, defaults;
    cm_measured_init(&measured);
    for (unsigned cpus = 1; cpus <= 64; cpus++) {
        cm_tuning_init_for(&defaults, cpus);
        cm_tuning_derive(&measured, cpus, &derived);
        for (int i = 0; i < CM_TUNING_COUNT; i++) {
            if (*cm_tuning_at(&derived, i) != *cm_tuning_at(&defaults, i)) {
                CHECK_FAIL_("%u threads: %s: %llu, not %llu", cpus,
                            cm_tuning_rows[i].name,
                            (unsigned long long)*cm_tuning_at(&derived, i),
                            (unsigned long long)*cm_tuning_at(&defaults, i));
            }
        }
    }
    cm_tuning_init(&defaults);
    cm_tuning_init_for(&derived, 16);
    CHECK_EQ(memcmp(&derived, &defaults, sizeof(derived)), 0);
}

/* The runtime's own copy then is no slower: one thread packs what it could copy. */
static void
test_one_processor_leaves_ordinary_memory_to_the_runtime(void)
{
    cm_measured measured;
    cm_tuning t;
    cm_measured_init(&measured);
    cm_tuning_derive(&measured, 1, &t);
    CHECK_EQ(t.staged_up_nbytes, never);
    CHECK_EQ(t.staged_down_nbytes, never);
    CHECK_LE(t.chunk_nbytes, MIB); /* what still is staged stays in the cache */
    CHECK_EQ(t.thread_count, 0);
    /* Twice is worth it one way only. */
    cm_tuning_derive(&measured, 2, &t);
    CHECK_LT(t.staged_up_nbytes, never);
    CHECK_EQ(t.staged_down_nbytes, never);
    cm_tuning_derive(&measured, 4, &t);
    CHECK_LT(t.staged_down_nbytes, never);
}

static void
test_slow_link_of_a_laptop(void)
{
    cm_measured measured = {.up_rate = 12e9,
                            .down_rate = 12e9,
                            .dma_gap_ns = 10e3,
                            .copy_rate_1 = 8e9,
                            .copy_rate_2 = 14e9,
                            .wake_ns = 50e3,
                            .driver_up_rate = 6e9,
                            .driver_down_rate = 6e9,
                            .staged_up_nbytes = 1536 << 10,
                            .staged_down_nbytes = 2 << 20};
    cm_tuning t;
    cm_tuning_derive(&measured, 2, &t);
    CHECK_EQ(t.chunk_nbytes, 2 * MIB);
    CHECK_EQ(t.slot_count, 4);
    CHECK_EQ(t.staged_up_nbytes, 2 * MIB);
    CHECK_EQ(t.staged_down_nbytes, 2 * MIB);
}

static void
test_fast_memory_needs_fewer_threads(void)
{
    cm_measured measured;
    cm_tuning t;
    cm_measured_init(&measured);
    measured.copy_rate_1 = 20e9;
    measured.copy_rate_2 = 39e9;
    measured.copy_rate_4 = 70e9;
    measured.copy_rate_8 = 130e9;
    measured.copy_rate_16 = 200e9;
    cm_tuning_derive(&measured, 64, &t);
    CHECK_EQ(t.thread_count, 5);
    /* More threads that get in each other's way are left out as well. */
    cm_measured_init(&measured);
    measured.copy_rate_8 = 30e9;
    measured.copy_rate_16 = 20e9;
    cm_tuning_derive(&measured, 64, &t);
    CHECK_EQ(t.thread_count, 4);
}

/* A file from elsewhere may say anything. */
static void
test_nonsense_still_gives_a_tuning(void)
{
    const double values[] = {0, -1, NAN, INFINITY, 1e300, 1e-300, 1};
    for (int field = -1; field < CM_MEASURED_COUNT; field++) {
        for (size_t i = 0; i < sizeof(values) / sizeof(values[0]); i++) {
            cm_measured measured;
            cm_tuning t;
            const char *name;
            cm_measured_init(&measured);
            for (int k = 0; k < CM_MEASURED_COUNT; k++) {
                if (field < 0 || k == field) {
                    *cm_measured_at(&measured, k) = values[i];
                }
            }
            cm_tuning_derive(&measured, 3, &t);
            CHECK(cm_tuning_check(&t, &name));
        }
    }
}

static void
test_copy_rate_lies_between_those_measured(void)
{
    cm_measured m;
    cm_measured_init(&m);
    CHECK(cm_measured_copy_rate(&m, 1) == m.copy_rate_1);
    CHECK(cm_measured_copy_rate(&m, 4) == m.copy_rate_4);
    CHECK(cm_measured_copy_rate(&m, 16) == m.copy_rate_16);
    CHECK(cm_measured_copy_rate(&m, 40) == m.copy_rate_16);
    CHECK(cm_measured_copy_rate(&m, 3) > m.copy_rate_2);
    CHECK(cm_measured_copy_rate(&m, 3) < m.copy_rate_4);
    m.copy_rate_8 = 0;
    CHECK(cm_measured_copy_rate(&m, 16) == m.copy_rate_4);
}

/* clang-format off */
MAIN(RUN(test_defaults_are_those_of_the_default_machine)
     RUN(test_one_processor_leaves_ordinary_memory_to_the_runtime)
     RUN(test_slow_link_of_a_laptop)
     RUN(test_fast_memory_needs_fewer_threads)
     RUN(test_nonsense_still_gives_a_tuning)
     RUN(test_copy_rate_lies_between_those_measured))
/* clang-format on */
