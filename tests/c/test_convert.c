/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of conversion between types of numbers. Results are compared with those of
 * plain arithmetic, which does not look at bits. The functions that use this
 * processor's vector instructions must give the same bytes as those that run on every
 * processor. Elements at any distance and address must be converted to the same numbers
 * as each of them alone. The file includes convert.c to reach its tables. */
#include "base/convert.c"

#include <math.h>
#include <stdlib.h>

#include "check.h"

enum { HALVES = 1 << 16, COUNT = 5000 };

/* Return the conversion between these types. */
static cm_convert
from_to(cm_number from, cm_number to)
{
    return (cm_convert){.from = from, .to = to};
}

/* Convert `count` elements that lie together on both sides. */
static void
convert_packed(cm_convert convert, void *dst, const void *src, int64_t count)
{
    cm_convert_run(&convert, dst, cm_dtypes[convert.to].nbytes, src,
                   cm_dtypes[convert.from].nbytes, count);
}

/* Return the value of a 16-bit float whose mantissa has this many bits, and whose
 * exponent has the rest. It is computed from the definition of such numbers. */
static double
value_of(uint16_t half, int mantissa)
{
    int most = (1 << (15 - mantissa)) - 1;
    int exponent = (half & 0x7fff) >> mantissa;
    double part = half & ((1 << mantissa) - 1);
    double value = exponent == most ? (part == 0 ? (double)INFINITY : (double)NAN)
                   : exponent == 0
                       ? ldexp(part, 1 - most / 2 - mantissa)
                       : ldexp(part + (1 << mantissa), exponent - most / 2 - mantissa);
    return half & 0x8000 ? -value : value;
}

/* True if the two are the same number, including the sign of zero, or both are NaN. */
static bool
is_same(double a, double b)
{
    return isnan(a) ? isnan(b) : a == b && signbit(a) == signbit(b);
}

/* Convert every 16-bit number of this type to float32 and float64 and back. */
static void
check_every_half(cm_number from, int mantissa)
{
    uint16_t *halves = malloc(HALVES * sizeof(*halves));
    float *floats = malloc(HALVES * sizeof(*floats));
    double *doubles = malloc(HALVES * sizeof(*doubles));
    uint16_t *back = malloc(HALVES * sizeof(*back));
    for (int i = 0; i < HALVES; i++) {
        halves[i] = (uint16_t)i;
    }
    convert_packed(from_to(from, CM_FLOAT32), floats, halves, HALVES);
    convert_packed(from_to(from, CM_FLOAT64), doubles, halves, HALVES);
    for (int i = 0; i < HALVES; i++) {
        double value = value_of((uint16_t)i, mantissa);
        CHECK(is_same((double)floats[i], value));
        CHECK(is_same(doubles[i], value));
    }
    convert_packed(from_to(CM_FLOAT32, from), back, floats, HALVES);
    for (int i = 0; i < HALVES; i++) {
        CHECK(back[i] == i || isnan(floats[i]));
    }
    convert_packed(from_to(CM_FLOAT64, from), back, doubles, HALVES);
    for (int i = 0; i < HALVES; i++) {
        CHECK(back[i] == i || isnan(doubles[i]));
    }
    free(halves);
    free(floats);
    free(doubles);
    free(back);
}

/* Every 16-bit float must become the number that its bits stand for, and come back
 * unchanged. */
static void
test_convert_every_half_there_and_back(void)
{
    check_every_half(CM_FLOAT16, 10);
    check_every_half(CM_BFLOAT16, 7);
}

/* Convert the middle between each two neighbours of a 16-bit type, and the numbers just
 * below and above it. The middle must be rounded to the even neighbour, and the others
 * to the nearer one. */
static void
check_rounding(cm_number wide, cm_number to, int mantissa)
{
    int most = (1 << (15 - mantissa)) - 1;
    for (int i = 0; i < most << mantissa; i++) {
        double low = value_of((uint16_t)i, mantissa);
        bool is_last = i + 1 == most << mantissa; /* infinity counts as one step more */
        double high = is_last ? 2 * low - value_of((uint16_t)(i - 1), mantissa)
                              : value_of((uint16_t)(i + 1), mantissa);
        double halfway = low + (high - low) / 2;
        bool is_f32 = wide == CM_FLOAT32;
        double below =
            is_f32 ? (double)nextafterf((float)halfway, 0) : nextafter(halfway, 0);
        double above = is_f32 ? (double)nextafterf((float)halfway, INFINITY)
                              : nextafter(halfway, (double)INFINITY);
        double exact[6] = {halfway, below, above, -halfway, -below, -above};
        float shorter[6];
        uint16_t found[6];
        for (int k = 0; k < 6; k++) {
            shorter[k] = (float)exact[k];
        }
        convert_packed(from_to(wide, to), found, is_f32 ? (void *)shorter : exact, 6);
        uint16_t even = (uint16_t)(i + (i & 1));
        uint16_t rounded[3] = {even, (uint16_t)i, (uint16_t)(i + 1)};
        for (int k = 0; k < 6; k++) {
            CHECK_EQ(found[k], rounded[k % 3] | (k < 3 ? 0 : 0x8000));
        }
    }
}

/* Round to the 16-bit types from wider ones. */
static void
test_convert_rounds_to_the_nearest_even(void)
{
    check_rounding(CM_FLOAT32, CM_FLOAT16, 10);
    check_rounding(CM_FLOAT64, CM_FLOAT16, 10);
    check_rounding(CM_FLOAT32, CM_BFLOAT16, 7);
}

static uint64_t random_state = 1;

static uint64_t
draw(void)
{
    random_state = random_state * UINT64_C(6364136223846793005) + 1442695040888963407;
    return random_state ^ random_state >> 31;
}

/* Convert elements that lie apart, and compare each with its own conversion. Bytes
 * between elements must stay as they are. Each room ends with its last element, so a
 * sanitizer sees whatever is read or written behind it. */
static void
check_steps(cm_number from, cm_number to, int64_t count, int64_t dst_gap,
            int64_t src_gap, bool scales)
{
    cm_convert convert = {
        .from = from, .to = to, .scales = scales, .scale = 0.5, .offset = 3};
    int64_t dst_step = cm_dtypes[to].nbytes + dst_gap;
    int64_t src_step = cm_dtypes[from].nbytes + src_gap;
    size_t dst_nbytes = (size_t)(dst_step * count - dst_gap);
    size_t src_nbytes = (size_t)(src_step * count - src_gap);
    char *src = malloc(src_nbytes);
    char *dst = malloc(dst_nbytes);
    for (size_t i = 0; i < src_nbytes; i++) {
        src[i] = (char)draw();
    }
    memset(dst, 0x5a, dst_nbytes);
    cm_convert_run(&convert, dst, dst_step, src, src_step, count);
    for (int64_t i = 0; i < count; i++) {
        char one[16];
        cm_convert_run(&convert, one, 99, src + i * src_step, 99, 1);
        CHECK(memcmp(one, dst + i * dst_step, (size_t)cm_dtypes[to].nbytes) == 0);
        for (int64_t k = cm_dtypes[to].nbytes; k < dst_step && i + 1 < count; k++) {
            CHECK_EQ(dst[i * dst_step + k], 0x5a);
        }
    }
    /* Convert once more backwards, beginning with the last element. */
    cm_convert_run(&convert, dst + (count - 1) * dst_step, -dst_step,
                   src + (count - 1) * src_step, -src_step, count);
    char one[16];
    cm_convert_run(&convert, one, 1, src, 1, 1);
    CHECK(memcmp(one, dst, (size_t)cm_dtypes[to].nbytes) == 0);
    free(src);
    free(dst);
}

/* Convert between all pairs of types, with and without gaps on either side. */
static void
test_convert_of_any_steps_is_that_of_each(void)
{
    static const int64_t counts[] = {1, 63, 64, 65, 200, 1024, 1100};
    for (int from = CM_BOOL; from < CM_NUMBER_COUNT; from++) {
        for (int to = CM_BOOL; to < CM_NUMBER_COUNT; to++) {
            size_t k = (size_t)(draw() % (sizeof(counts) / sizeof(*counts)));
            bool are_real = from < CM_COMPLEX64 && to < CM_COMPLEX64;
            for (int gaps = 0; gaps < 4; gaps++) {
                check_steps((cm_number)from, (cm_number)to, counts[k], gaps & 1 ? 3 : 0,
                            gaps & 2 ? 5 : 0, are_real && from % 2 == gaps % 2);
            }
        }
    }
}

/* Check that two functions which convert many numbers give the same bytes for random
 * input, or that neither exists. `room` is the number of bytes for each number. */
static void
check_step_to(convert_step one, convert_step other, int64_t dst_step, int64_t src_step,
              size_t room)
{
    CHECK_EQ(one == NULL, other == NULL);
    if (one == NULL) {
        return;
    }
    uint64_t *src = malloc(COUNT * room);
    char *found[2] = {calloc(COUNT, room), calloc(COUNT, room)};
    for (int i = 0; i < COUNT * (int)room / 8; i++) {
        src[i] = draw();
    }
    one(found[0], dst_step, (char *)src, src_step, COUNT);
    other(found[1], dst_step, (char *)src, src_step, COUNT);
    CHECK(memcmp(found[0], found[1], COUNT * room) == 0);
    free(src);
    free(found[0]);
    free(found[1]);
}

static void
check_step(convert_step one, convert_step other, int64_t dst_step, int64_t src_step)
{
    check_step_to(one, other, dst_step, src_step, 8);
}

/* Compare the functions of two tables that load or store this type. */
static void
check_tables(const step_table *a, const step_table *b, int mid, int number, bool store)
{
    convert_step one = (store ? a->store : a->load)[mid][number];
    convert_step other = (store ? b->store : b->load)[mid][number];
    static const int64_t own[] = {4, 8};
    int64_t src_step = store ? own[mid] : cm_dtypes[number].nbytes;
    int64_t dst_step = store ? cm_dtypes[number].nbytes : own[mid];
    check_step(one, other, dst_step, src_step);
}

/* Compare the functions of two tables that convert this integer type. */
static void
check_integers(const step_table *a, const step_table *b, int number)
{
    static const int64_t widths[WIDTH_COUNT] = {1, 2, 4, 8, 1};
    for (int width = 0; width < WIDTH_COUNT; width++) {
        check_step(a->integer[number][width], b->integer[number][width], widths[width],
                   cm_dtypes[number].nbytes);
    }
}

/* Convert complex numbers, and compare each part with its own conversion as a real
 * number. */
static void
check_parts(cm_number from, cm_number to, bool from_swapped, bool to_swapped)
{
    enum { SOME = 1100 };
    static char src[SOME * 16], dst[SOME * 16], part[2][SOME * 8];
    cm_convert convert = from_to(from, to);
    convert.from_swapped = from_swapped;
    convert.to_swapped = to_swapped;
    cm_convert parts = convert;
    parts.from = parts_of[from];
    parts.to = parts_of[to];
    int64_t from_nbytes = cm_dtypes[parts.from].nbytes;
    int64_t to_nbytes = cm_dtypes[parts.to].nbytes;
    for (size_t i = 0; i < sizeof(src); i++) {
        src[i] = (char)draw();
    }
    convert_packed(convert, dst, src, SOME);
    memset(part, 0, sizeof(part));
    for (int k = 0; k <= is_complex(from); k++) {
        cm_convert_run(&parts, part[k], to_nbytes, src + k * from_nbytes,
                       cm_dtypes[from].nbytes, SOME);
    }
    for (int64_t i = 0; i < SOME; i++) {
        const char *is = dst + i * cm_dtypes[to].nbytes;
        if (to == CM_BOOL) {
            CHECK_EQ(*is, part[0][i] | part[1][i]);
            continue;
        }
        for (int k = 0; k <= is_complex(to); k++) {
            CHECK(memcmp(is + k * to_nbytes, part[k] + i * to_nbytes, (size_t)to_nbytes)
                  == 0);
        }
    }
}

static void
test_convert_of_complex_numbers_is_that_of_their_parts(void)
{
    for (int from = CM_BOOL; from < CM_NUMBER_COUNT; from++) {
        for (int to = CM_BOOL; to < CM_NUMBER_COUNT; to++) {
            if (!is_complex((cm_number)from) && !is_complex((cm_number)to)) {
                continue;
            }
            for (int which = 0; which < 4; which++) {
                bool from_swapped = (which & 1) != 0 && cm_dtypes[from].nbytes > 1;
                bool to_swapped = (which & 2) != 0 && cm_dtypes[to].nbytes > 1;
                check_parts((cm_number)from, (cm_number)to, from_swapped, to_swapped);
            }
        }
    }
}

/* A conversion from complex numbers to real ones, except to bool, drops imaginary
 * parts. The device has no kernel for complex numbers. */
static void
test_convert_says_where_imaginary_parts_are_lost(void)
{
    for (int number = CM_BOOL; number < CM_NUMBER_COUNT; number++) {
        cm_convert down = from_to(CM_COMPLEX64, (cm_number)number);
        cm_convert up = from_to((cm_number)number, CM_COMPLEX128);
        CHECK_EQ(cm_convert_drops_imaginary(&down),
                 number != CM_BOOL && number < CM_COMPLEX64);
        CHECK(!cm_convert_drops_imaginary(&up));
        CHECK(!cm_convert_has_kernel(&down) && !cm_convert_has_kernel(&up));
    }
}

/* Compare the functions of two tables that split and join complex numbers. */
static void
check_pairs(const step_table *a, const step_table *b)
{
    static const int64_t own[] = {4, 8};
    for (int mid = 0; mid < MIDDLE_COUNT; mid++) {
        check_step_to(a->spread[mid], b->spread[mid], 2 * own[mid], own[mid], 16);
        check_step_to(a->pairs[mid], b->pairs[mid], own[mid], 2 * own[mid], 16);
    }
}

/* The functions for this processor must give the same bytes as those for every
 * processor. */
static void
test_convert_is_the_same_by_all_instructions(void)
{
    for (int mid = 0; mid < MIDDLE_COUNT; mid++) {
        for (int number = CM_BOOL; number < CM_NUMBER_COUNT; number++) {
            check_tables(&steps_plain, choose_steps(), mid, number, false);
            check_tables(&steps_plain, choose_steps(), mid, number, true);
        }
    }
    check_pairs(&steps_plain, choose_steps());
    for (int number = CM_BOOL; number < CM_NUMBER_COUNT; number++) {
        if (is_integer((cm_number)number)) {
            check_integers(&steps_plain, choose_steps(), number);
        }
    }
    for (int i = 0; i < 4; i++) {
        check_step(steps_plain.swap[i], choose_steps()->swap[i], INT64_C(1) << i,
                   INT64_C(1) << i);
    }
}

/* Convert the numbers at each edge of an integer type, and their neighbours, to
 * integers. What does not fit becomes the nearest number that does. */
static void
test_convert_cuts_about_every_edge(void)
{
    static const double edges[] = {0,       0x1p7,  0x1p8,  0x1p15, 0x1p16,
                                   0x1p31,  0x1p32, 0x1p63, 0x1p64, -0x1p31,
                                   -0x1p63, -0x1p7, -0x1p15};
    for (size_t i = 0; i < sizeof(edges) / sizeof(edges[0]); i++) {
        double reals[3] = {nextafter(edges[i], -INFINITY), edges[i],
                           nextafter(edges[i], INFINITY)};
        float floats[3] = {nextafterf((float)edges[i], -INFINITY), (float)edges[i],
                           nextafterf((float)edges[i], INFINITY)};
        for (int k = 0; k < 6; k++) {
            bool is_float = k >= 3;
            double x = is_float ? (double)floats[k - 3] : reals[k];
            const void *src = is_float ? (void *)&floats[k - 3] : (void *)&reals[k];
            cm_number from = is_float ? CM_FLOAT32 : CM_FLOAT64;
            uint32_t u4;
            int64_t i8;
            uint64_t u8;
            int32_t i4;
            convert_packed(from_to(from, CM_UINT32), &u4, src, 1);
            convert_packed(from_to(from, CM_INT64), &i8, src, 1);
            convert_packed(from_to(from, CM_UINT64), &u8, src, 1);
            convert_packed(from_to(from, CM_INT32), &i4, src, 1);
            CHECK_EQ(u4, x < 0 ? 0 : x < 0x1p32 ? (uint32_t)x : UINT32_MAX);
            CHECK_EQ(u8, x < 0 ? 0 : x < 0x1p64 ? (uint64_t)x : UINT64_MAX);
            CHECK(i8
                  == (x < -0x1p63  ? INT64_MIN
                      : x < 0x1p63 ? (int64_t)x
                                   : INT64_MAX));
            CHECK(i4
                  == (x < -0x1p31  ? INT32_MIN
                      : x < 0x1p31 ? (int32_t)x
                                   : INT32_MAX));
        }
    }
}

/* Conversions with swapped bytes at either end, or at both, are compared with swapping
 * the bytes by hand. */
static void
test_convert_of_swapped_bytes_is_that_of_the_others(void)
{
    enum { SOME = 1100 };
    static char src[SOME * 8], turned[SOME * 8], expected[SOME * 8], found[SOME * 8];
    for (int from = CM_BOOL; from < CM_COMPLEX64; from++) {
        for (int to = CM_BOOL; to < CM_COMPLEX64; to++) {
            int64_t was = cm_dtypes[from].nbytes, is = cm_dtypes[to].nbytes;
            for (int64_t i = 0; i < SOME * was; i++) {
                src[i] = from == CM_BOOL ? (char)(draw() & 1) : (char)draw();
            }
            for (int64_t i = 0; i < SOME * was; i++) {
                turned[i] = src[i - i % was + (was - 1 - i % was)];
            }
            cm_convert plain = from_to((cm_number)from, (cm_number)to);
            for (int which = 1; which < 4; which++) {
                cm_convert swapped = plain;
                swapped.from_swapped = (which & 1) != 0 && was > 1;
                swapped.to_swapped = (which & 2) != 0 && is > 1;
                convert_packed(plain, expected, src, SOME);
                if (from == to) { /* no bit may change, not even that of a NaN */
                    memcpy(expected, src, sizeof(src));
                }
                convert_packed(swapped, found, swapped.from_swapped ? turned : src,
                               SOME);
                bool is_same = true;
                for (int64_t i = 0; i < SOME * is; i++) {
                    int64_t k = swapped.to_swapped ? i - i % is + (is - 1 - i % is) : i;
                    is_same = is_same && found[k] == expected[i];
                }
                CHECK(is_same || (from == to && which == 3));
            }
        }
    }
}

#if defined(__x86_64__)
enum { FLUSHES = 0x8040, ROUNDS_UP = 0x4000 };
#else
enum { FLUSHES = 1 << 24, ROUNDS_UP = 1 << 22 };
#endif

/* The thread has set its floating-point unit to flush tiny numbers to zero and to round
 * upwards. Conversions must not be affected, and must leave the settings as they
 * were. */
static void
test_convert_does_not_heed_the_threads_settings(void)
{
    float tiny[4] = {0x1p-140f, 0x1p-149f, -0x1p-130f, 1};
    uint16_t halves[4] = {1, 0x3ff, 0x8001, 0x3c00};
    double wide[4];
    float from_halves[4];
    double near[4] = {1 + 0x1p-25, -1 - 0x1p-25, 0x1p-149, 1};
    float rounded[4];
    uint64_t usual = get_mode();
    set_mode(USUAL_MODE | FLUSHES | ROUNDS_UP);
    convert_packed(from_to(CM_FLOAT32, CM_FLOAT64), wide, tiny, 4);
    convert_packed(from_to(CM_FLOAT16, CM_FLOAT32), from_halves, halves, 4);
    convert_packed(from_to(CM_FLOAT64, CM_FLOAT32), rounded, near, 4);
    uint64_t kept = get_mode();
    set_mode(usual);
    CHECK_EQ(kept & (FLUSHES | ROUNDS_UP), FLUSHES | ROUNDS_UP);
    CHECK(wide[0] == 0x1p-140 && wide[1] == 0x1p-149 && wide[2] == -0x1p-130);
    CHECK(from_halves[0] == 0x1p-24f && from_halves[2] == -0x1p-24f);
    CHECK(rounded[0] == 1 && rounded[1] == -1 && rounded[2] == 0x1p-149f);
}

/* NaN must become 0, and a number that does not fit must become the nearest one that
 * does. */
static void
test_convert_cuts_what_does_not_fit(void)
{
    double reals[8] = {NAN, INFINITY, -INFINITY, 1e300, -1e300, -0.9, 255.9, -1};
    int8_t bytes[8];
    uint8_t naturals[8];
    int64_t longs[8];
    uint64_t most[8];
    convert_packed(from_to(CM_FLOAT64, CM_INT8), bytes, reals, 8);
    convert_packed(from_to(CM_FLOAT64, CM_UINT8), naturals, reals, 8);
    convert_packed(from_to(CM_FLOAT64, CM_INT64), longs, reals, 8);
    convert_packed(from_to(CM_FLOAT64, CM_UINT64), most, reals, 8);
    static const int8_t as_bytes[8] = {0, 127, -128, 127, -128, 0, 127, -1};
    static const uint8_t as_naturals[8] = {0, 255, 0, 255, 0, 0, 255, 0};
    CHECK(memcmp(bytes, as_bytes, 8) == 0);
    CHECK(memcmp(naturals, as_naturals, 8) == 0);
    CHECK(longs[0] == 0 && longs[1] == INT64_MAX && longs[2] == INT64_MIN);
    CHECK(most[0] == 0 && most[3] == UINT64_MAX && most[4] == 0 && most[6] == 255);
}

/* With a count of 0 the addresses may be NULL. */
static void
test_convert_of_no_elements_touches_nothing(void)
{
    cm_convert nothing = from_to(CM_FLOAT64, CM_FLOAT32);
    cm_convert_run(&nothing, NULL, 4, NULL, 8, 0);
}

MAIN(RUN(test_convert_every_half_there_and_back)
         RUN(test_convert_rounds_to_the_nearest_even)
             RUN(test_convert_of_any_steps_is_that_of_each)
                 RUN(test_convert_of_complex_numbers_is_that_of_their_parts)
                     RUN(test_convert_says_where_imaginary_parts_are_lost) RUN(
                         test_convert_is_the_same_by_all_instructions)
                         RUN(test_convert_does_not_heed_the_threads_settings) RUN(
                             test_convert_cuts_what_does_not_fit)
                             RUN(test_convert_cuts_about_every_edge) RUN(
                                 test_convert_of_swapped_bytes_is_that_of_the_others)
                                 RUN(test_convert_of_no_elements_touches_nothing))
