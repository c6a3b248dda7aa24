/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of row numbers and of layers. A copy of rows by numbers moves rows of one or
 * several pairs of arrays, called layers, by the same list of numbers. Numbers are read
 * from arrays of any integer type and checked. A layer then becomes runs of bytes for a
 * batch, or layers for the kernel that copies rows. */
#include <stdlib.h>

#include "check.h"
#include "transfer/rows/layers.h"
#include "transfer/rows/pairs.h"
#include "transfer/rows/row_marks.h"

/* -- row numbers ------------------------------------------------------------------------- */

/* Make row numbers of these values. The caller ends them. */
static cm_chosen_rows
make_numbers(const int64_t *values, uint64_t count)
{
    cm_chosen_rows made;
    if (!cm_is_ok(cm_chosen_rows_init(&made, count))) {
        abort();
    }
    cm_chosen_rows_read(&made, (cm_integers){(const char *)values, 8, 8, true});
    return made;
}

/* Check the numbers for an array with this many rows, and return the first fault.
 * Numbers of a target must also not repeat. */
static cm_row_fault
settle(cm_chosen_rows *numbers, int64_t row_count, bool is_target)
{
    cm_row_fault fault;
    if (!cm_is_ok(cm_chosen_rows_settle(numbers, row_count, is_target, &fault))) {
        abort();
    }
    return fault;
}

/* Check that the first and the third number of an array of this type are read, at an
 * odd address and with a stride of two numbers. */
#define CHECK_READS(type, ...)                                                         \
    do {                                                                               \
        const type of[] = __VA_ARGS__;                                                 \
        const bool is_signed = (type) - 1 < (type)1;                                   \
        cm_chosen_rows numbers;                                                        \
        char odd[sizeof(of) + 1];                                                      \
        memcpy(odd + 1, of, sizeof(of));                                               \
        CHECK_OK(cm_chosen_rows_init(&numbers, 2));                                    \
        cm_chosen_rows_read(&numbers, (cm_integers){odd + 1, 2 * sizeof(type),         \
                                                    sizeof(type), is_signed});         \
        CHECK_EQ(numbers.given[0], (int64_t)of[0]);                                    \
        CHECK_EQ(numbers.given[1], (int64_t)of[2]);                                    \
        cm_chosen_rows_fini(&numbers);                                                 \
    } while (0)

static void
test_numbers_of_each_width_are_read_at_any_address(void)
{
    CHECK_READS(int8_t, {-128, 1, 127});
    CHECK_READS(uint8_t, {0, 1, 255});
    CHECK_READS(int16_t, {-32768, 1, 32767});
    CHECK_READS(uint16_t, {0, 1, 65535});
    CHECK_READS(int32_t, {INT32_MIN, 1, INT32_MAX});
    CHECK_READS(uint32_t, {0, 1, UINT32_MAX});
    CHECK_READS(int64_t, {INT64_MIN, 1, INT64_MAX});
    CHECK_READS(uint64_t, {0, 1, INT64_MAX});
}

/* An unsigned number that no signed one can hold must count as outside, whatever the
 * number of rows. */
static void
test_numbers_past_63_bits_name_no_row(void)
{
    const uint64_t values[] = {UINT64_MAX};
    cm_chosen_rows numbers;
    CHECK_OK(cm_chosen_rows_init(&numbers, 1));
    cm_chosen_rows_read(&numbers, (cm_integers){(const char *)values, 8, 8, false});
    CHECK_EQ(settle(&numbers, INT64_MAX, false).kind, CM_ROWS_OUTSIDE);
    cm_chosen_rows_fini(&numbers);
}

/* Negative numbers count from the end. The same numbers can be settled for arrays of
 * different lengths. */
static void
test_numbers_count_from_the_end_of_each_array(void)
{
    const int64_t values[] = {-1, 0, -3};
    cm_chosen_rows numbers = make_numbers(values, 3);
    CHECK_EQ(settle(&numbers, 3, false).kind, CM_ROWS_RIGHT);
    CHECK_EQ(cm_chosen_rows_at(&numbers, 0), 2);
    CHECK_EQ(cm_chosen_rows_at(&numbers, 2), 0);
    CHECK_EQ(settle(&numbers, 10, false).kind, CM_ROWS_RIGHT);
    CHECK_EQ(cm_chosen_rows_at(&numbers, 0), 9);
    CHECK_EQ(cm_chosen_rows_at(&numbers, 2), 7);
    cm_chosen_rows_fini(&numbers);
}

/* Numbers that are known to be in a range need not be looked at for arrays that have as
 * many rows or more. A shorter array may lack some of these rows. */
static void
test_numbers_of_a_known_range_are_checked_for_shorter_arrays(void)
{
    const int64_t values[] = {2, 0};
    cm_chosen_rows numbers = make_numbers(values, 2);
    numbers.bound = 3;
    CHECK_EQ(settle(&numbers, 3, false).kind, CM_ROWS_RIGHT);
    CHECK_EQ(settle(&numbers, 5, true).kind, CM_ROWS_RIGHT);
    CHECK_EQ(cm_chosen_rows_at(&numbers, 0), 2);
    CHECK_EQ(settle(&numbers, 2, false).kind, CM_ROWS_OUTSIDE);
    cm_chosen_rows_fini(&numbers);
}

/* Two structs share numbers. If one of them is settled for another array, or ended
 * first, the other must stay as it was. This must hold both for rows that are the given
 * numbers themselves and for rows that were counted from the end. */
static void
test_shared_numbers_are_settled_each_for_itself(void)
{
    const int64_t values[][2] = {{2, 0}, {-1, 0}};
    for (int i = 0; i < 2; i++) {
        cm_chosen_rows shared;
        cm_chosen_rows numbers = make_numbers(values[i], 2);
        CHECK_EQ(settle(&numbers, 3, true).kind, CM_ROWS_RIGHT);
        cm_chosen_rows_share(&shared, &numbers);
        CHECK_EQ(shared.row_count, 3);
        CHECK(shared.rows == numbers.rows);
        CHECK_EQ(settle(&shared, 9, true).kind, CM_ROWS_RIGHT);
        CHECK_EQ(cm_chosen_rows_at(&shared, 0), i == 0 ? 2 : 8);
        CHECK_EQ(cm_chosen_rows_at(&numbers, 0), 2);
        cm_chosen_rows_fini(&numbers);
        CHECK_EQ(cm_chosen_rows_at(&shared, 0), i == 0 ? 2 : 8);
        cm_chosen_rows_fini(&shared);
    }
    cm_chosen_rows all, shared;
    cm_chosen_rows_init_all(&all, 5);
    cm_chosen_rows_share(&shared, &all);
    CHECK_EQ(shared.count, 5);
    CHECK(shared.given == NULL);
}

/* The fault must say which number is wrong and where it is. If the first six rows are
 * chosen without a list of numbers, the array must have at least six. */
static void
test_numbers_outside_are_found_at_their_position(void)
{
    const int64_t above[] = {4, 5};
    const int64_t below[] = {0, -5, -6};
    cm_chosen_rows numbers = make_numbers(above, 2);
    cm_row_fault fault = settle(&numbers, 5, false);
    CHECK_EQ(fault.kind, CM_ROWS_OUTSIDE);
    CHECK_EQ(fault.position, 1);
    CHECK_EQ(fault.number, 5);
    cm_chosen_rows_fini(&numbers);
    numbers = make_numbers(below, 3);
    fault = settle(&numbers, 5, false);
    CHECK_EQ(fault.position, 2);
    CHECK_EQ(fault.number, -6);
    cm_chosen_rows_fini(&numbers);
    cm_chosen_rows_init_all(&numbers, 6);
    CHECK_EQ(settle(&numbers, 5, true).kind, CM_ROWS_OUTSIDE);
    CHECK_EQ(settle(&numbers, 6, true).kind, CM_ROWS_RIGHT);
    CHECK_EQ(cm_chosen_rows_at(&numbers, 5), 5);
}

/* Long lists are checked in blocks. A number that is outside must be found in each
 * block, and among the numbers after the last whole block. */
static void
test_numbers_outside_are_found_in_long_lists(void)
{
    enum { COUNT = 600, STEP = 37 };
    int64_t values[COUNT];
    for (int i = 0; i < COUNT; i++) {
        values[i] = i;
    }
    for (int at = 0; at < COUNT; at += STEP) {
        const int64_t wrong[] = {COUNT, INT64_MAX, -COUNT - 1, INT64_MIN};
        for (int i = 0; i < 4; i++) {
            values[at] = wrong[i];
            cm_chosen_rows numbers = make_numbers(values, COUNT);
            cm_row_fault fault = settle(&numbers, COUNT, false);
            CHECK_EQ(fault.kind, CM_ROWS_OUTSIDE);
            CHECK_EQ(fault.position, at);
            CHECK_EQ(fault.number, wrong[i]);
            cm_chosen_rows_fini(&numbers);
        }
        values[at] = at - COUNT;
        cm_chosen_rows numbers = make_numbers(values, COUNT);
        CHECK_EQ(settle(&numbers, COUNT, true).kind, CM_ROWS_RIGHT);
        CHECK_EQ(cm_chosen_rows_at(&numbers, (uint64_t)at), at);
        cm_chosen_rows_fini(&numbers);
        values[at] = at;
    }
}

/* A list names one row twice, once by a number from the end. For a target that is a
 * fault, which must be reported at the second position. For a source it is allowed. */
static void
test_numbers_of_a_target_that_repeat_are_found(void)
{
    /* Rows of the first array are marked in a bitmap. For 2^40 rows that would be too
     * large, so the second has a hash table instead. */
    const int64_t row_counts[] = {8, INT64_C(1) << 40};
    for (int i = 0; i < 2; i++) {
        const int64_t values[] = {5, 3, row_counts[i] - 1, 3 - row_counts[i], 0};
        cm_chosen_rows numbers = make_numbers(values, 5);
        cm_row_fault fault = settle(&numbers, row_counts[i], true);
        CHECK_EQ(fault.kind, CM_ROWS_TWICE);
        CHECK_EQ(fault.position, 3);
        CHECK_EQ(fault.number, 3 - row_counts[i]);
        CHECK_EQ(settle(&numbers, row_counts[i], false).kind, CM_ROWS_RIGHT);
        numbers.given[3] = 4;
        numbers.row_count = -1;
        CHECK_EQ(settle(&numbers, row_counts[i], true).kind, CM_ROWS_RIGHT);
        cm_chosen_rows_fini(&numbers);
    }
}

static void
test_marks_of_many_rows_are_told_apart(void)
{
    enum { COUNT = 1000 };
    const uint64_t row_counts[] = {COUNT * 3, UINT64_C(1) << 62};
    for (int i = 0; i < 2; i++) {
        cm_row_marks marks;
        uint64_t step = row_counts[i] / COUNT;
        CHECK_OK(cm_row_marks_init(&marks, row_counts[i], COUNT));
        for (uint64_t row = 0; row < COUNT; row++) {
            CHECK(!cm_row_marks_has(&marks, row * step));
            CHECK(!cm_row_marks_add(&marks, row * step));
        }
        for (uint64_t row = 0; row < COUNT; row++) {
            CHECK(cm_row_marks_has(&marks, row * step));
            CHECK(!cm_row_marks_has(&marks, row * step + 1));
            CHECK(cm_row_marks_add(&marks, row * step));
        }
        cm_row_marks_fini(&marks);
    }
}

/* -- numbers for a kernel ---------------------------------------------------------------- */

enum { MANY = 600 }; /* more than two of the blocks that are checked together */

/* Write numbers of one type for a kernel, and compare each of them. */
#define CHECK_WRITES(type, step, row_count, written_nbytes)                            \
    do {                                                                               \
        const bool is_signed = (type) - 1 < (type)1;                                   \
        char odd[MANY * 2 * sizeof(type) + 1];                                         \
        int64_t room[MANY];                                                            \
        cm_kernel_numbers made = {                                                     \
            .at = room, .count = MANY, .nbytes = (written_nbytes)};                    \
        for (int i = 0; i < MANY; i++) {                                               \
            const type value = (type)(i % 100);                                        \
            memcpy(odd + 1 + (size_t)i * (step) * sizeof(type), &value, sizeof(type)); \
        }                                                                              \
        CHECK(cm_kernel_numbers_write(&made,                                           \
                                      (cm_integers){odd + 1,                           \
                                                    (int64_t)((step) * sizeof(type)),  \
                                                    sizeof(type), is_signed},          \
                                      row_count));                                     \
        CHECK(!made.has_negative);                                                     \
        for (uint64_t i = 0; i < MANY; i++) {                                          \
            CHECK_EQ(cm_kernel_numbers_at(&made, i, row_count), (int64_t)i % 100);     \
        }                                                                              \
    } while (0)

static void
test_numbers_of_each_width_are_written_for_a_kernel(void)
{
    CHECK_EQ(cm_kernel_numbers_nbytes(INT32_MAX), 4);
    CHECK_EQ(cm_kernel_numbers_nbytes(INT64_C(1) << 31), 8);
    for (size_t step = 1; step <= 2; step++) {
        CHECK_WRITES(int8_t, step, 100, 4);
        CHECK_WRITES(uint8_t, step, 100, 4);
        CHECK_WRITES(int16_t, step, 100, 4);
        CHECK_WRITES(uint16_t, step, 100, 4);
        CHECK_WRITES(int32_t, step, 100, 4);
        CHECK_WRITES(uint32_t, step, INT32_MAX, 4);
        CHECK_WRITES(int64_t, step, 100, 4);
        CHECK_WRITES(uint64_t, step, 100, 4);
        CHECK_WRITES(int32_t, step, INT64_C(1) << 40, 8);
        CHECK_WRITES(int64_t, step, INT64_MAX, 8);
    }
}

enum { TRIES = 8 };

/* Return how often this number is taken for a row of an array of `row_count` rows. It
 * is tried TRIES times: at the beginning and the end of blocks, as an integer of 8
 * bytes and, if it fits, of 4. */
static int
times_of_row(int64_t number, int64_t row_count)
{
    static const int places[] = {0, 255, 256, MANY - 1};
    int right = 0;
    for (int i = 0; i < TRIES; i++) {
        int64_t wide[MANY] = {0};
        int32_t narrow[MANY] = {0};
        int64_t room[MANY];
        bool is_narrow = i >= 4 && number == (int32_t)number;
        wide[places[i % 4]] = number;
        narrow[places[i % 4]] = (int32_t)number;
        cm_integers from = {(const char *)wide, 8, 8, true};
        if (is_narrow) {
            from = (cm_integers){(const char *)narrow, 4, 4, true};
        }
        cm_kernel_numbers made = {
            .at = room, .count = MANY, .nbytes = cm_kernel_numbers_nbytes(row_count)};
        bool is_right = cm_kernel_numbers_write(&made, from, row_count);
        right += is_right;
        if (is_right && made.has_negative != (number < 0)) {
            return -1;
        }
    }
    return right;
}

static void
test_numbers_outside_are_seen_at_any_place_and_length(void)
{
    const int64_t row_counts[] = {1, 100, INT32_MAX, INT64_C(1) << 31, INT64_MAX};
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(times_of_row(0, row_counts[i]), TRIES);
        CHECK_EQ(times_of_row(row_counts[i] - 1, row_counts[i]), TRIES);
        CHECK_EQ(times_of_row(-row_counts[i], row_counts[i]), TRIES);
        CHECK_EQ(times_of_row(-row_counts[i] - 1, row_counts[i]), 0);
        CHECK_EQ(times_of_row(INT64_MIN, row_counts[i]), 0);
        if (row_counts[i] < INT64_MAX) {
            CHECK_EQ(times_of_row(row_counts[i], row_counts[i]), 0);
            CHECK_EQ(times_of_row(INT64_MAX, row_counts[i]), 0);
        }
    }
    CHECK_EQ(times_of_row(INT64_C(1) << 32, 100), 0); /* its lower half is 0 */
    CHECK_EQ(times_of_row(0, 0), 0);
}

static cm_kernel_numbers
kernel_numbers(void *room, uint32_t nbytes, const int64_t *values, uint64_t count)
{
    cm_kernel_numbers made = {.at = room, .count = count, .nbytes = nbytes};
    if (!cm_kernel_numbers_write(&made, (cm_integers){(const char *)values, 8, 8, true},
                                 1000)) {
        abort();
    }
    return made;
}

static bool
is_twice(const cm_kernel_numbers *numbers, int64_t row_count)
{
    bool answer;
    if (!cm_is_ok(cm_kernel_numbers_find_twice(numbers, row_count, &answer))) {
        abort();
    }
    return answer;
}

static void
test_rows_that_are_named_twice_are_found_for_a_kernel(void)
{
    int64_t room[MANY];
    int64_t values[MANY];
    const int64_t row_counts[] = {1000, INT64_C(1) << 40};
    for (uint32_t nbytes = 4; nbytes <= 8; nbytes += 4) {
        for (int i = 0; i < 2; i++) {
            for (int k = 0; k < MANY; k++) {
                values[k] = k; /* the numbers rise */
            }
            cm_kernel_numbers numbers = kernel_numbers(room, nbytes, values, MANY);
            CHECK(!is_twice(&numbers, row_counts[i]));
            values[MANY - 1] = MANY - 2;
            numbers = kernel_numbers(room, nbytes, values, MANY);
            CHECK(is_twice(&numbers, row_counts[i]));
            values[MANY - 1] = 999;
            values[0] = MANY; /* the numbers no longer rise */
            numbers = kernel_numbers(room, nbytes, values, MANY);
            CHECK(!is_twice(&numbers, row_counts[i]));
            values[1] = -1;
            numbers = kernel_numbers(room, nbytes, values, MANY);
            CHECK_EQ(is_twice(&numbers, row_counts[i]), row_counts[i] == 1000);
        }
    }
    cm_kernel_numbers all = {.count = MANY};
    CHECK(!is_twice(&all, MANY));
}

static void
test_rows_of_both_ends_are_found_for_a_kernel(void)
{
    int64_t rooms[2][4];
    bool answer;
    const int64_t first[] = {7, 3, 5, 1}, second[] = {0, 2, -5, 8};
    cm_kernel_numbers a = kernel_numbers(rooms[0], 4, first, 4);
    cm_kernel_numbers b = kernel_numbers(rooms[1], 8, second, 4);
    CHECK_OK(cm_kernel_numbers_find_shared(&a, &b, 9, &answer));
    CHECK(!answer);
    CHECK_OK(cm_kernel_numbers_find_shared(&a, &b, 10, &answer)); /* -5 is row 5 */
    CHECK(answer);
    cm_kernel_numbers all = {.count = 1};
    CHECK_OK(cm_kernel_numbers_find_shared(&all, &b, 9, &answer));
    CHECK(answer);
    CHECK_OK(cm_kernel_numbers_find_shared(&all, &a, 9, &answer));
    CHECK(!answer);
}

static void
test_runs_of_numbers_are_counted(void)
{
    int64_t rooms[2][6];
    const int64_t to[] = {-4, -3, -2, 7, 8, 9}, from[] = {0, 1, 2, 3, 4, 9};
    cm_kernel_numbers dst = kernel_numbers(rooms[0], 4, to, 6);
    cm_kernel_numbers src = kernel_numbers(rooms[1], 8, from, 6);
    cm_kernel_numbers all = {.count = 6};
    cm_kernel_numbers none = {.count = 0};
    CHECK_EQ(cm_kernel_numbers_count_runs(&dst, &src, 100), 3);
    CHECK_EQ(cm_kernel_numbers_count_runs(&all, &src, 100), 2);
    CHECK_EQ(cm_kernel_numbers_count_runs(&all, &all, 100), 1);
    CHECK_EQ(cm_kernel_numbers_count_runs(&none, &none, 100), 0);
    CHECK_GT(cm_kernel_numbers_count_runs(&dst, &src, 1), 1);
    int64_t step;
    const int64_t even[] = {2, 5, 8, 11, 14, 17};
    CHECK(!cm_kernel_numbers_are_even(&dst, &step));
    CHECK(cm_kernel_numbers_are_even(&all, &step));
    CHECK_EQ(step, 1);
    src = kernel_numbers(rooms[1], 8, even, 6);
    CHECK(cm_kernel_numbers_are_even(&src, &step));
    CHECK_EQ(step, 3);
}

/* -- runs -------------------------------------------------------------------------------- */

/* Make a layer of two arrays with 6 rows of 4 bytes each. The rows lie this far
 * apart. */
static cm_layer
make_layer(char *dst, int64_t dst_stride, char *src, int64_t src_stride)
{
    cm_layer layer = {.owner = {dst, src}};
    char *const firsts[2] = {dst, src};
    const int64_t strides[2] = {dst_stride, src_stride};
    for (int side = 0; side < 2; side++) {
        cm_region *array = &layer.array[side];
        array->host = firsts[side];
        array->kind = CM_KIND_PAGEABLE;
        array->device = -1;
        array->ndim = 2;
        array->itemsize = 2;
        array->shape[0] = 6;
        array->shape[1] = 2;
        array->strides[0] = strides[side];
        array->strides[1] = 2;
    }
    return layer;
}

/* Rows that follow each other on both sides must become one run. */
static void
test_runs_of_neighbours_are_joined(void)
{
    char dst[24], src[24];
    const int64_t values[] = {1, 2, 3, 0};
    cm_layer layer = make_layer(dst, 4, src, 4);
    cm_row_runs runs = {.pieces = NULL};
    cm_chosen_rows numbers[2] = {make_numbers(values, 4), make_numbers(values, 4)};
    (void)settle(&numbers[CM_DST], 6, true);
    (void)settle(&numbers[CM_SRC], 6, false);
    CHECK_OK(cm_row_runs_add(&runs, &layer, numbers));
    CHECK_EQ(runs.count, 2);
    CHECK(runs.pieces[0].dst.host == dst + 4 && runs.pieces[0].src.host == src + 4);
    CHECK_EQ(runs.pieces[0].nbytes, 12);
    CHECK(runs.pieces[1].dst.host == dst && runs.pieces[1].src.host == src);
    CHECK_EQ(runs.pieces[1].nbytes, 4);
    CHECK_EQ(runs.pieces[1].index, 1);
    /* A run of another layer is never joined, even if it begins where the last one
     * ends. */
    CHECK_OK(cm_row_runs_add(&runs, &layer, numbers));
    CHECK_EQ(runs.count, 4);
    cm_row_runs_fini(&runs);
    cm_chosen_rows_fini(&numbers[CM_DST]);
    cm_chosen_rows_fini(&numbers[CM_SRC]);
}

/* Add the runs of the first `count` rows. */
static void
add_first_rows(cm_row_runs *runs, const cm_layer *layer, uint64_t count)
{
    cm_chosen_rows numbers[2];
    for (int side = 0; side < 2; side++) {
        cm_chosen_rows_init_all(&numbers[side], count);
        (void)settle(&numbers[side], 6, side == CM_DST);
    }
    CHECK_OK(cm_row_runs_add(runs, layer, numbers));
}

/* If the rows of one side have gaps between them, each row is a run. */
static void
test_runs_of_rows_with_gaps_stay_apart(void)
{
    char dst[60], src[24];
    cm_layer layer = make_layer(dst, 10, src, 4);
    cm_row_runs runs = {.pieces = NULL};
    add_first_rows(&runs, &layer, 6);
    CHECK_EQ(runs.count, 6);
    CHECK(runs.pieces[5].dst.host == dst + 50 && runs.pieces[5].src.host == src + 20);
    cm_row_runs_fini(&runs);
}

/* If the elements of a row lie apart on one side, each element is a run. */
static void
test_runs_of_rows_whose_elements_lie_apart_are_their_parts(void)
{
    char dst[24], src[24];
    cm_layer layer = make_layer(dst, 2, src, 4);
    layer.array[CM_DST].strides[1] = 12; /* in Fortran's order */
    cm_row_runs runs = {.pieces = NULL};
    add_first_rows(&runs, &layer, 2);
    CHECK_EQ(runs.count, 4);
    CHECK(runs.pieces[1].dst.host == dst + 12 && runs.pieces[1].src.host == src + 2);
    CHECK(runs.pieces[2].dst.host == dst + 2 && runs.pieces[2].src.host == src + 4);
    CHECK_EQ(runs.pieces[0].nbytes, 2);
    cm_row_runs_fini(&runs);
}

static void
test_runs_of_empty_rows_are_none(void)
{
    char dst[1], src[1];
    cm_layer layer = make_layer(dst, 4, src, 4);
    layer.array[CM_DST].shape[1] = layer.array[CM_SRC].shape[1] = 0;
    cm_row_runs runs = {.pieces = NULL};
    add_first_rows(&runs, &layer, 6);
    CHECK_EQ(runs.count, 0);
}

/* -- layers for a kernel ----------------------------------------------------------------- */

/* Make a layer that a device reaches, from page-locked memory to memory of the
 * device. */
static cm_layer
make_reached_layer(char *dst, int64_t dst_stride, char *src, int64_t src_stride)
{
    cm_layer layer = make_layer(dst, dst_stride, src, src_stride);
    layer.array[CM_DST].kind = CM_KIND_DEVICE;
    layer.array[CM_DST].host = NULL;
    layer.array[CM_SRC].kind = CM_KIND_PINNED;
    for (int side = 0; side < 2; side++) {
        layer.array[side].address = side == CM_DST ? (uintptr_t)dst : (uintptr_t)src;
        layer.array[side].device = 0;
    }
    return layer;
}

/* A layer becomes one layer for the kernel, with its addresses, strides and numbers of
 * rows. The target runs backwards. */
static void
test_layer_of_whole_rows_is_one_for_the_kernel(void)
{
    char dst[60], src[24];
    cm_layer layer = make_reached_layer(dst, -10, src, 4);
    layer.array[CM_DST].address += 50;
    layer.array[CM_SRC].shape[0] = 5;
    cm_kernel_rows *rows = cm_kernel_rows_create();
    rows->move.count = 3;
    CHECK_OK(cm_kernel_rows_add(rows, &layer));
    CHECK_EQ(rows->layer_count, 1);
    const cm_rows_layer *only = &rows->layers[0];
    CHECK_EQ(only->address[CM_DST], (uintptr_t)dst + 50);
    CHECK_EQ(only->stride[CM_DST], -10);
    CHECK_EQ(only->row_count[CM_DST], 6);
    CHECK_EQ(only->row_count[CM_SRC], 5);
    CHECK_EQ(only->row_nbytes, 4);
    CHECK_EQ(rows->nbytes, 12);
    /* The two ends have the bus between them, and the memory of the host has to stay
     * page-locked. */
    CHECK(rows->move.is_over_bus);
    CHECK_EQ(rows->span_count, 1);
    CHECK(rows->spans[0].begin == src);
    CHECK_EQ(rows->spans[0].nbytes, 20);
    /* The kernel reads the memory of the host. To write it, the kernel would run with
     * fewer blocks. */
    CHECK(!rows->move.is_to_host);
    cm_region read = layer.array[CM_SRC];
    layer.array[CM_SRC] = layer.array[CM_DST];
    layer.array[CM_DST] = read;
    CHECK_OK(cm_kernel_rows_add(rows, &layer));
    CHECK(rows->move.is_to_host);
    cm_kernel_rows_destroy(rows);
}

static void
test_layer_of_rows_in_parts_is_one_for_each_part(void)
{
    char dst[24], src[24];
    cm_layer layer = make_reached_layer(dst, 2, src, 4);
    layer.array[CM_DST].strides[1] = 12; /* in Fortran's order */
    cm_kernel_rows *rows = cm_kernel_rows_create();
    rows->move.count = 6;
    for (uint64_t i = 0; i < 20; i++) {
        CHECK_OK(cm_kernel_rows_add(rows, &layer));
    }
    CHECK_EQ(rows->layer_count, 40);
    CHECK_EQ(rows->layers[39].address[CM_DST], (uintptr_t)dst + 12);
    CHECK_EQ(rows->layers[39].address[CM_SRC], (uintptr_t)src + 2);
    CHECK_EQ(rows->layers[39].row_nbytes, 2);
    CHECK_EQ(rows->nbytes, 20 * 24);
    cm_kernel_rows_destroy(rows);
}

/* A layer without bytes, or of which no row is asked for, must not reach the kernel. */
static void
test_layer_of_no_bytes_is_none_for_the_kernel(void)
{
    char dst[1], src[1];
    cm_layer layer = make_reached_layer(dst, 4, src, 4);
    cm_kernel_rows *rows = cm_kernel_rows_create();
    CHECK_OK(cm_kernel_rows_add(rows, &layer)); /* no row is asked for */
    rows->move.count = 2;
    layer.array[CM_DST].shape[1] = layer.array[CM_SRC].shape[1] = 0;
    CHECK_OK(cm_kernel_rows_add(rows, &layer));
    CHECK_EQ(rows->layer_count, 0);
    CHECK_EQ(rows->span_count, 0);
    cm_kernel_rows_destroy(rows);
    cm_kernel_rows_destroy(NULL);
}

static void
test_rows_suit_the_engine_if_their_runs_are_few_or_long(void)
{
    char dst[1], src[1];
    int64_t rooms[2][64];
    int64_t values[64];
    cm_layer layer = make_layer(dst, 4, src, 4);
    CHECK(cm_rows_suit_engine(&layer, 1, 0, NULL));
    CHECK(cm_rows_suit_engine(&layer, 1, 3, NULL));
    CHECK(!cm_rows_suit_engine(&layer, 1, 4, NULL));
    CHECK(!cm_rows_suit_engine(&layer, 2, 2, NULL));
    int64_t nbytes[] = {2 << 20, (2 << 20) - 2, 64 << 10};
    for (int i = 0; i < 3; i++) {
        for (int side = 0; side < 2; side++) {
            layer.array[side].strides[0] = nbytes[i];
            layer.array[side].shape[1] = nbytes[i] / 2;
        }
        CHECK_EQ(cm_rows_suit_engine(&layer, 1, 64, NULL), i == 0);
    }
    for (int i = 0; i < 64; i++) {
        values[i] = i < 32 ? i + 32 : i - 32;
    }
    cm_kernel_numbers numbers[2] = {kernel_numbers(rooms[0], 4, values, 64),
                                    kernel_numbers(rooms[1], 4, values, 64)};
    CHECK(cm_rows_suit_engine(&layer, 1, 64, numbers)); /* two runs of 2 MiB */
    values[10] = 99;
    numbers[CM_SRC] = kernel_numbers(rooms[1], 4, values, 64);
    CHECK(!cm_rows_suit_engine(&layer, 1, 64, numbers)); /* two more runs */
    numbers[CM_SRC] = numbers[CM_DST];
    layer.array[CM_SRC].strides[0] += 2;
    CHECK(!cm_rows_suit_engine(&layer, 1, 64, numbers)); /* the rows have gaps between
                                                            them, so none are joined */
    layer.array[CM_DST].shape[1] = layer.array[CM_SRC].shape[1] = 0;
    CHECK(cm_rows_suit_engine(&layer, 1, 64, NULL));
}

/* -- pairs ------------------------------------------------------------------------------- */

/* Make a piece that goes from page-locked memory to memory of a device. */
static cm_piece
make_pair(uint64_t dst, uint64_t src, uint64_t nbytes)
{
    static char host[1];
    return (cm_piece){
        .dst = {.address = dst, .owner = host, .kind = CM_KIND_DEVICE, .device = 1},
        .src = {.host = host,
                .address = src,
                .owner = host,
                .kind = CM_KIND_PINNED,
                .device = 0},
        .nbytes = nbytes,
    };
}

static void
test_pairs_of_one_size_are_rows(void)
{
    int64_t room[3];
    cm_paired_rows rows;
    bool touches, is_known;
    cm_piece pieces[] = {make_pair(0x8000, 0x5010, 64), make_pair(0x8100, 0x5050, 64),
                         make_pair(0x7f00, 0x5010, 64)};
    CHECK(cm_paired_rows_init(&rows, pieces, 3));
    CHECK_EQ(rows.device, 1);
    CHECK(rows.has_sides_apart);
    CHECK(rows.is_over_bus);
    CHECK(!rows.is_to_host);
    CHECK_EQ(rows.layer.array[CM_DST].address, 0x7f00);
    CHECK_EQ(rows.layer.array[CM_DST].strides[0], 64);
    CHECK_EQ(cm_paired_rows_count(&rows, CM_DST), 9);
    CHECK_EQ(cm_paired_rows_count(&rows, CM_SRC), 2);
    cm_kernel_numbers numbers[2] = {{.at = room, .count = 3, .nbytes = 4}};
    cm_paired_rows_write(&rows, pieces, CM_DST, &numbers[CM_DST]);
    CHECK_EQ(cm_kernel_numbers_at(&numbers[CM_DST], 0, 9), 4);
    CHECK_EQ(cm_kernel_numbers_at(&numbers[CM_DST], 1, 9), 8);
    CHECK_EQ(cm_kernel_numbers_at(&numbers[CM_DST], 2, 9), 0);
    CHECK_OK(cm_paired_rows_find_touch(&rows, numbers, &touches, &is_known));
    CHECK(is_known);
    CHECK(!touches);
    pieces[2].dst.address = 0x8100;
    CHECK(cm_paired_rows_init(&rows, pieces, 3));
    cm_paired_rows_write(&rows, pieces, CM_DST, &numbers[CM_DST]);
    CHECK_OK(cm_paired_rows_find_touch(&rows, numbers, &touches, &is_known));
    CHECK(is_known);
    CHECK(touches);
    for (int i = 0; i < 3; i++) {
        cm_piece_end dst = pieces[i].dst;
        pieces[i].dst = pieces[i].src;
        pieces[i].src = dst;
    }
    CHECK(cm_paired_rows_init(&rows, pieces, 3));
    CHECK(rows.is_to_host);
}

static void
test_pairs_at_odd_distances_have_a_shorter_unit(void)
{
    int64_t room[2];
    cm_paired_rows rows;
    bool touches, is_known;
    cm_piece pieces[] = {make_pair(0x8000, 0x5000, 96), make_pair(0x8200, 0x5060, 96)};
    CHECK(cm_paired_rows_init(&rows, pieces, 2));
    CHECK_EQ(rows.layer.array[CM_DST].strides[0], 32); /* this divides the distances 512
                                                          and 96 */
    CHECK_EQ(rows.layer.array[CM_SRC].strides[0], 96); /* this need not be a power of
                                                          two */
    cm_kernel_numbers numbers[2] = {{.at = room, .count = 2, .nbytes = 8}};
    cm_paired_rows_write(&rows, pieces, CM_DST, &numbers[CM_DST]);
    CHECK_EQ(cm_kernel_numbers_at(&numbers[CM_DST], 1, 17), 16);
    CHECK_OK(cm_paired_rows_find_touch(&rows, numbers, &touches, &is_known));
    CHECK(!is_known);
    cm_paired_rows_write(&rows, pieces, CM_SRC, &numbers[CM_DST]);
    CHECK_EQ(cm_kernel_numbers_at(&numbers[CM_DST], 1, 2), 1);
    pieces[1].dst.address = 0x8208; /* a unit of 8 bytes would be slow */
    CHECK(!cm_paired_rows_init(&rows, pieces, 2));
}

static void
test_pairs_that_one_device_does_not_reach_are_no_rows(void)
{
    cm_paired_rows rows;
    const cm_piece pair = make_pair(0x8000, 0x5000, 64);
    for (int wrong = 0; wrong < 6; wrong++) {
        cm_piece pieces[] = {pair, pair};
        cm_piece *piece = &pieces[1];
        CHECK(cm_paired_rows_init(&rows, pieces, 2));
        switch (wrong) {
        case 0:
            piece->nbytes = 65;
            break;
        case 1:
            piece->dst.device = 2;
            break;
        case 2:
            piece->src.kind = CM_KIND_PAGEABLE;
            break;
        case 3:
            piece->src.address = 0;
            break;
        case 4:
            piece->src.is_file = true;
            break;
        default: /* the processor copies these */
            piece->dst = piece->src;
            break;
        }
        CHECK(!cm_paired_rows_init(&rows, pieces, 2));
    }
    CHECK(!cm_paired_rows_init(&rows, &pair, 0));
}

/* clang-format off */
MAIN(RUN(test_numbers_of_each_width_are_read_at_any_address)
     RUN(test_numbers_past_63_bits_name_no_row)
     RUN(test_numbers_count_from_the_end_of_each_array)
     RUN(test_numbers_of_a_known_range_are_checked_for_shorter_arrays)
     RUN(test_shared_numbers_are_settled_each_for_itself)
     RUN(test_numbers_outside_are_found_at_their_position)
    RUN(test_numbers_outside_are_found_in_long_lists)
     RUN(test_numbers_of_a_target_that_repeat_are_found)
     RUN(test_marks_of_many_rows_are_told_apart)
     RUN(test_numbers_of_each_width_are_written_for_a_kernel)
     RUN(test_numbers_outside_are_seen_at_any_place_and_length)
     RUN(test_rows_that_are_named_twice_are_found_for_a_kernel)
     RUN(test_rows_of_both_ends_are_found_for_a_kernel)
     RUN(test_runs_of_numbers_are_counted)
     RUN(test_runs_of_neighbours_are_joined)
     RUN(test_runs_of_rows_with_gaps_stay_apart)
     RUN(test_runs_of_rows_whose_elements_lie_apart_are_their_parts)
     RUN(test_runs_of_empty_rows_are_none)
     RUN(test_layer_of_whole_rows_is_one_for_the_kernel)
     RUN(test_layer_of_rows_in_parts_is_one_for_each_part)
     RUN(test_layer_of_no_bytes_is_none_for_the_kernel)
     RUN(test_rows_suit_the_engine_if_their_runs_are_few_or_long)
     RUN(test_pairs_of_one_size_are_rows)
     RUN(test_pairs_at_odd_distances_have_a_shorter_unit)
     RUN(test_pairs_that_one_device_does_not_reach_are_no_rows))
/* clang-format on */
