/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of row numbers that several threads write and check. Whatever part a thread
 * takes, the numbers and what is found out about them must be as if one thread had
 * looked at all of them. The lists are so long that threads share them. */
#include <stdlib.h>

#include "base/row_numbers.h"
#include "check.h"
#include "engine_world.h"
#include "transfer/rows/written_numbers.h"

enum { COUNT = 100003, ROWS = 2 * COUNT };

/* The numbers of both ends, as they are given and as they are written. cm_side is the
 * index. */
typedef struct pair {
    int64_t given[2][COUNT];
    int32_t narrow[2][COUNT];
    int64_t wide[COUNT];
    cm_kernel_numbers written[2];
    cm_numbers_side sides[2];
} pair;

static cm_integers
integers(const int64_t *numbers)
{
    return (cm_integers){(const char *)numbers, sizeof(int64_t), sizeof(int64_t), true};
}

/* Make two lists in which no number comes twice and hardly any follows on the number
 * before. The caller frees the pair. */
static pair *
make_pair(void)
{
    const int64_t step = 77773; /* has no divisor in common with ROWS */
    pair *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        abort();
    }
    for (int side = CM_DST; side <= CM_SRC; side++) {
        for (int64_t i = 0; i < COUNT; i++) {
            p->given[side][i] = (i + side) * step % ROWS;
        }
        p->written[side] =
            (cm_kernel_numbers){.at = p->narrow[side], .count = COUNT, .nbytes = 4};
        p->sides[side] =
            (cm_numbers_side){&p->written[side], integers(p->given[side]), ROWS};
    }
    return p;
}

static cm_numbers_finding
write_both(const world *w, const pair *p)
{
    cm_numbers_finding found;
    MUST(cm_numbers_write_both(w->engine, p->sides, &found));
    return found;
}

static void
test_numbers_of_both_ends_are_written(void)
{
    world w;
    pair *p = make_pair();
    open_world(&w);
    CHECK_EQ(write_both(&w, p), CM_NUMBERS_RIGHT);
    for (int side = CM_DST; side <= CM_SRC; side++) {
        CHECK(!p->written[side].has_negative);
        for (int i = 0; i < COUNT; i++) {
            CHECK_EQ(p->narrow[side][i], p->given[side][i]);
        }
    }
    close_world(&w);
    free(p);
}

/* The host may have the numbers of only one end. */
static void
test_numbers_of_one_end_are_written(void)
{
    for (int side = CM_DST; side <= CM_SRC; side++) {
        world w;
        pair *p = make_pair();
        open_world(&w);
        p->sides[1 - side].to = NULL;
        CHECK_EQ(write_both(&w, p), CM_NUMBERS_RIGHT);
        CHECK_EQ(p->narrow[side][COUNT - 1], p->given[side][COUNT - 1]);
        CHECK_EQ(p->narrow[1 - side][COUNT - 1], 0);
        close_world(&w);
        free(p);
    }
}

/* A wrong number must be found in the first part, in the last one and in between. */
static void
test_numbers_outside_are_found_in_every_part(void)
{
    const int64_t places[] = {0, 4095, 4096, COUNT / 2, COUNT - 1};
    world w;
    pair *p = make_pair();
    open_world(&w);
    for (int side = CM_DST; side <= CM_SRC; side++) {
        for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
            int64_t right = p->given[side][places[i]];
            p->given[side][places[i]] = ROWS;
            CHECK_EQ(write_both(&w, p), CM_NUMBERS_WRONG);
            p->given[side][places[i]] = right;
        }
    }
    CHECK_EQ(write_both(&w, p), CM_NUMBERS_RIGHT);
    close_world(&w);
    free(p);
}

/* A row that is named twice must be found whether one thread sees both numbers or two
 * threads see one each. A source may name a row any number of times. */
static void
test_rows_that_are_named_twice_are_found_within_parts_and_across_them(void)
{
    const int64_t places[][2] = {{0, 1}, {0, 4096}, {7, COUNT - 1}, {50000, 90000}};
    world w;
    pair *p = make_pair();
    open_world(&w);
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        for (int side = CM_DST; side <= CM_SRC; side++) {
            int64_t *number = &p->given[side][places[i][1]];
            int64_t right = *number;
            *number = p->given[side][places[i][0]];
            CHECK_EQ(write_both(&w, p),
                     side == CM_DST ? CM_NUMBERS_WRONG : CM_NUMBERS_RIGHT);
            *number = right;
        }
    }
    close_world(&w);
    free(p);
}

/* Threads do not mark negative numbers, numbers of 8 bytes, or numbers of an array with
 * many times as many rows. There the caller has to look for rows named twice. */
static void
test_numbers_that_are_not_marked_are_only_found_in_range(void)
{
    world w;
    pair *p = make_pair();
    open_world(&w);
    p->given[CM_DST][COUNT / 3] -= ROWS;
    CHECK_EQ(write_both(&w, p), CM_NUMBERS_IN_RANGE);
    CHECK(p->written[CM_DST].has_negative);
    CHECK(!p->written[CM_SRC].has_negative);
    p->given[CM_DST][COUNT / 3] += ROWS;
    p->given[CM_SRC][COUNT / 3] -= ROWS;
    CHECK_EQ(write_both(&w, p), CM_NUMBERS_RIGHT);
    CHECK(p->written[CM_SRC].has_negative);
    p->sides[CM_DST].row_count = INT64_C(40) * COUNT;
    CHECK_EQ(write_both(&w, p), CM_NUMBERS_IN_RANGE);
    p->sides[CM_DST].row_count = ROWS;
    p->written[CM_DST].at = p->wide;
    p->written[CM_DST].nbytes = 8;
    CHECK_EQ(write_both(&w, p), CM_NUMBERS_IN_RANGE);
    CHECK_EQ(p->wide[COUNT - 1], p->given[CM_DST][COUNT - 1]);
    close_world(&w);
    free(p);
}

/* Few numbers are written by the caller alone. */
static void
test_few_numbers_are_only_found_in_range(void)
{
    world w;
    pair *p = make_pair();
    open_world(&w);
    p->written[CM_DST].count = 3;
    p->written[CM_SRC].count = 3;
    CHECK_EQ(write_both(&w, p), CM_NUMBERS_IN_RANGE);
    CHECK_EQ(p->narrow[CM_DST][2], p->given[CM_DST][2]);
    CHECK_EQ(p->narrow[CM_DST][3], 0);
    p->given[CM_SRC][2] = -ROWS - 1;
    CHECK_EQ(write_both(&w, p), CM_NUMBERS_WRONG);
    close_world(&w);
    free(p);
}

/* Two bitmaps of the same rows meet if they have a bit in common, wherever it is. */
static void
test_bitmaps_are_joined(void)
{
    enum { WORDS = 600 };
    uint64_t ours[WORDS];
    uint64_t theirs[WORDS];
    for (int at = 0; at < WORDS; at += 23) {
        memset(ours, 0, sizeof(ours));
        memset(theirs, 0, sizeof(theirs));
        ours[at] = 5;
        theirs[at] = 8;
        CHECK(!cm_numbers_join_marks(ours, theirs, WORDS));
        CHECK_EQ(ours[at], 13);
        CHECK(cm_numbers_join_marks(ours, theirs, WORDS));
        CHECK_EQ(theirs[at], 8);
    }
}

/* clang-format off */
MAIN(RUN(test_numbers_of_both_ends_are_written)
     RUN(test_numbers_of_one_end_are_written)
     RUN(test_numbers_outside_are_found_in_every_part)
     RUN(test_rows_that_are_named_twice_are_found_within_parts_and_across_them)
     RUN(test_numbers_that_are_not_marked_are_only_found_in_range)
     RUN(test_few_numbers_are_only_found_in_range)
     RUN(test_bitmaps_are_joined))
/* clang-format on */
