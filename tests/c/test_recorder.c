/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of base/recorder, whose ring keeps the newest rows. The rows must stay in
 * order, whichever thread writes or reads them or enlarges the ring meanwhile. */
#include <stdlib.h>
#include <string.h>

#include "base/recorder.h"
#include "base/thread.h"
#include "check.h"

/* Note a row with this address, by which the tests recognise it. */
static void
note(uint64_t address)
{
    cm_recorder_note((cm_event){.op = CM_EVENT_FREE, .address = address});
}

/* Return the address in a row as cm_recorder_read() copies it. */
static uint64_t
address_of(const char *row)
{
    cm_event event;
    memcpy(&event, row, CM_EVENT_NBYTES);
    return event.address;
}

static void
test_row_is_that_of_the_package(void)
{
    /* The package reads rows with its dtype EVENT, which has no padding. */
    CHECK_EQ(CM_EVENT_NBYTES, 6 * 8 + 4 * 4 + 4);
    CHECK_EQ(offsetof(cm_event, pool), 48);
    CHECK_EQ(offsetof(cm_event, op), 64);
}

/* A ring of four rows gets six, and is then enlarged to eight. Each read must return
 * the rows that are still there, in order, and the number of the first of them. */
static void
test_last_rows_are_kept_in_order(void)
{
    char rows[20 * CM_EVENT_NBYTES];
    uint64_t begin = cm_recorder_count();
    note(1); /* the recorder is closed, so nothing is noted */
    CHECK_EQ(cm_recorder_count(), begin);
    CHECK(cm_recorder_open(4, NULL));
    CHECK(cm_recorder_is_on());
    for (uint64_t i = 0; i < 6; i++) {
        note(i);
    }
    CHECK_EQ(cm_recorder_read(begin, begin + 6, rows), begin + 2);
    for (uint64_t i = 2; i < 6; i++) {
        CHECK_EQ(address_of(rows + i * CM_EVENT_NBYTES), i);
    }
    CHECK(cm_recorder_open(3, NULL)); /* the ring never gets smaller */
    CHECK(cm_recorder_open(8, NULL)); /* the ring gets larger and keeps its rows */
    for (uint64_t i = 6; i < 11; i++) {
        note(i);
    }
    CHECK_EQ(cm_recorder_read(begin, begin + 11, rows), begin + 3);
    for (uint64_t i = 3; i < 11; i++) {
        CHECK_EQ(address_of(rows + i * CM_EVENT_NBYTES), i);
    }
    CHECK_EQ(cm_recorder_read(begin + 5, begin + 7, rows), begin + 5);
    CHECK_EQ(address_of(rows), 5);
    /* None of these rows is left. */
    CHECK_EQ(cm_recorder_read(begin, begin + 2, rows), begin + 2);
    cm_recorder_close();
    CHECK(!cm_recorder_is_on());
    CHECK_EQ(cm_recorder_read(begin, begin + 11, rows), begin + 11);
    CHECK_EQ(cm_recorder_count(), begin + 11);
}

/* A function that finds the origin of a row. Its answer shows its arguments. */
static cm_event_origin
find(uint64_t nbytes, cm_event_origin lent)
{
    return (cm_event_origin){(uint32_t)nbytes, lent.tag};
}

/* A thread may lend an origin to the rows that it causes. It is used as long as the
 * recorder has no function that finds one, and such a function gets it as an
 * argument. */
static void
test_origin_is_found_or_lent(void)
{
    cm_event_origin before = cm_recorder_lend_origin((cm_event_origin){3, 4});
    CHECK_EQ(before.stack + before.tag, 0);
    CHECK_EQ(cm_recorder_find_origin(9).stack, 3);
    CHECK(cm_recorder_open(1, find));
    CHECK_EQ(cm_recorder_find_origin(9).stack, 9);
    CHECK_EQ(cm_recorder_find_origin(9).tag, 4);
    CHECK(cm_recorder_open(1, NULL));
    cm_recorder_close();
    CHECK_EQ(cm_recorder_lend_origin(before).stack, 3);
}

enum { WRITERS = 3, ROUNDS = 20000 };

/* The body of a thread: note rows whose addresses contain the thread's number and count
 * up. */
static void *
write_rows(void *number)
{
    for (uint64_t i = 0; i < ROUNDS; i++) {
        note((uint64_t)(uintptr_t)number << 32 | i);
    }
    return NULL;
}

/* Three threads write while the main thread reads and enlarges the ring. The rows of
 * each writer must be in its order and occur once, and at the end at least the newest
 * 500 rows must be there. */
static void
test_writers_and_readers_keep_apart(void)
{
    uint64_t begin = cm_recorder_count();
    CHECK(cm_recorder_open(500, NULL));
    cm_thread threads[WRITERS];
    for (uintptr_t i = 0; i < WRITERS; i++) {
        CHECK_OK(cm_thread_start(&threads[i], write_rows, (void *)(i + 1)));
    }
    char *rows = malloc((size_t)WRITERS * ROUNDS * CM_EVENT_NBYTES);
    uint64_t room = 500, end = begin;
    while (end < begin + WRITERS * ROUNDS) {
        end = cm_recorder_count();
        uint64_t first = cm_recorder_read(begin, end, rows);
        uint64_t last[WRITERS + 1] = {0};
        for (uint64_t i = first; i < end; i++) {
            uint64_t address = address_of(rows + (i - begin) * CM_EVENT_NBYTES);
            uint64_t writer = address >> 32;
            CHECK(writer >= 1 && writer <= WRITERS);
            CHECK(last[writer] == 0 || address > last[writer]);
            last[writer] = address;
        }
        room += room < 2000;
        CHECK(cm_recorder_open(room, NULL));
    }
    for (int i = 0; i < WRITERS; i++) {
        cm_thread_join(threads[i]);
    }
    CHECK(end - cm_recorder_read(begin, end, rows) >= 500);
    cm_recorder_close();
    free(rows);
}

/* clang-format off */
MAIN(RUN(test_row_is_that_of_the_package)
     RUN(test_last_rows_are_kept_in_order)
     RUN(test_origin_is_found_or_lent)
     RUN(test_writers_and_readers_keep_apart))
/* clang-format on */
