/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of base/address_map. A long random run is compared with a plain list, and
 * several threads use one map while it grows. */
#include <stdlib.h>

#include "base/address_map.h"
#include "check.h"

static void
test_map_of_zeros_is_empty(void)
{
    cm_address_map map = {.count = 0};
    CHECK_PTR_EQ(cm_address_map_find(&map, 4096, false), NULL);
    CHECK_PTR_EQ(cm_address_map_find(&map, 4096, true), NULL);
    CHECK_PTR_EQ(cm_address_map_find(&map, 0, false), NULL);
    cm_address_map_fini(&map);
}

/* The map remembers the least and the greatest address that was ever put into it, and
 * does not search for addresses outside. It must still find these two themselves. */
static void
test_map_bounds_include_what_was_put(void)
{
    cm_address_map map = {.count = 0};
    int values[3];
    CHECK(cm_address_map_put(&map, 5000, &values[0]));
    CHECK(cm_address_map_put(&map, UINT64_MAX, &values[1]));
    CHECK(cm_address_map_put(&map, 1, &values[2]));
    CHECK_PTR_EQ(cm_address_map_find(&map, 5000, false), &values[0]);
    CHECK_PTR_EQ(cm_address_map_find(&map, 4999, false), NULL);
    /* A free place of the table has the key 0, so the map must not find an entry
     * there. */
    CHECK_PTR_EQ(cm_address_map_find(&map, 0, false), NULL);
    CHECK_PTR_EQ(cm_address_map_find(&map, 1, true), &values[2]);
    CHECK_PTR_EQ(cm_address_map_find(&map, 1, true), NULL);
    CHECK_PTR_EQ(cm_address_map_find(&map, UINT64_MAX, true), &values[1]);
    CHECK_PTR_EQ(cm_address_map_find(&map, 5000, true), &values[0]);
    CHECK_EQ(map.count, 0);
    cm_address_map_fini(&map);
}

/* Put and take entries in random order. There are so few addresses that many entries
 * lie next to each other in the table, which is where removing one has to move
 * others. */
static void
test_map_random_agrees_with_a_list(void)
{
    enum { ADDRESSES = 600, STEPS = 60000 };
    static char values[ADDRESSES];
    bool is_in[ADDRESSES] = {false};
    uint64_t count = 0;
    uint32_t random = 1;
    cm_address_map map = {.count = 0};
    for (int step = 0; step < STEPS; step++) {
        random = random * 1664525u + 1013904223u;
        uint32_t i = (random >> 8) % ADDRESSES;
        uint64_t address = UINT64_C(0x7f0000000000) + (uint64_t)i * 512;
        void *there = is_in[i] ? &values[i] : NULL;
        CHECK_PTR_EQ(cm_address_map_find(&map, address, false), there);
        CHECK_PTR_EQ(cm_address_map_find(&map, address + 16, false), NULL);
        if (is_in[i]) {
            CHECK_PTR_EQ(cm_address_map_find(&map, address, true), there);
        }
        else if ((random >> 30) != 0 || step < STEPS / 2) {
            CHECK(cm_address_map_put(&map, address, &values[i]));
        }
        else {
            continue;
        }
        is_in[i] = !is_in[i];
        count = is_in[i] ? count + 1 : count - 1;
        CHECK_EQ(map.count, count);
        CHECK(count <= map.room / 2);
    }
    for (uint32_t i = 0; i < ADDRESSES; i++) {
        uint64_t address = UINT64_C(0x7f0000000000) + (uint64_t)i * 512;
        CHECK_PTR_EQ(cm_address_map_find(&map, address, true),
                     is_in[i] ? &values[i] : NULL);
    }
    CHECK_EQ(map.count, 0);
    cm_address_map_fini(&map);
}

enum { THREADS = 4, OWN = 400, ROUNDS = 50 };

static cm_address_map shared;
static char own_values[THREADS][OWN];

/* The body of a thread: put, find and take its own addresses, which lie between those
 * of the other threads, while the map grows. Returns NULL if each answer was right. */
static void *
use_own(void *arg)
{
    uint64_t t = (uint64_t)(uintptr_t)arg;
    for (int round = 0; round < ROUNDS; round++) {
        for (uint64_t i = 0; i < OWN; i++) {
            uint64_t address = (i * THREADS + t + 1) * 512;
            if (!cm_address_map_put(&shared, address, &own_values[t][i])
                || cm_address_map_find(&shared, address, false) != &own_values[t][i]) {
                return &shared;
            }
        }
        for (uint64_t i = 0; i < OWN; i++) {
            uint64_t address = (i * THREADS + t + 1) * 512;
            if (cm_address_map_find(&shared, address, true) != &own_values[t][i]
                || cm_address_map_find(&shared, address, false) != NULL) {
                return &shared;
            }
        }
    }
    return NULL;
}

/* Four threads use one map at the same time. Each must find all of its own entries, and
 * at the end the map must be empty. */
static void
test_map_threads_see_their_own(void)
{
    cm_thread threads[THREADS];
    for (uintptr_t t = 0; t < THREADS; t++) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): a thread's argument is a number
        CHECK_OK(cm_thread_start(&threads[t], use_own, (void *)t));
    }
    int wrong = 0;
    for (int t = 0; t < THREADS; t++) {
        void *result;
        CHECK_EQ(pthread_join(threads[t], &result), 0);
        wrong += result != NULL;
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(shared.count, 0);
    cm_address_map_fini(&shared);
}

MAIN(RUN(test_map_of_zeros_is_empty) RUN(test_map_bounds_include_what_was_put)
         RUN(test_map_random_agrees_with_a_list) RUN(test_map_threads_see_their_own))
