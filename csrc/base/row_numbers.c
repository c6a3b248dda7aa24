/* SPDX-License-Identifier: Apache-2.0 */
#include "base/row_numbers.h"

#include "base/attributes.h"

/* setup.py turns automatic vectorization off for all files, and says why. The loops of
 * this file need it. */
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC optimize("tree-vectorize")
#endif

/* The compiler vectorizes a loop only if its length is fixed. */
enum { BLOCK = 256, WORD_BITS = 64 };

/* Numbers as they lie in an array of the caller's, which need not be aligned. */
typedef int32_t loose_int32 __attribute__((aligned(1), may_alias));
typedef int64_t loose_int64 __attribute__((aligned(1), may_alias));

/* -- the loops ---------------------------------------------------------------------- */

/* What the loops find. The sign bit of `outside` is set if any number is outside, and
 * the sign bit of `signs` if any is negative. The other bits mean nothing. */
typedef struct found_64 {
    uint64_t outside;
    uint64_t signs;
} found_64;
typedef struct found_32 {
    uint32_t outside;
    uint32_t signs;
} found_32;

/* Whether v is in [-n, n) can be found without a branch. If v is negative, let row be
 * ~v, else v. Then v is inside if n - 1 - row is not negative, and this difference
 * cannot overflow. */
#define DEFINE_NOTE(bits)                                                              \
    static CM_INLINE uint##bits##_t note_##bits(                                       \
        int##bits##_t number, uint##bits##_t row_count, found_##bits *found)           \
    {                                                                                  \
        uint##bits##_t row = (uint##bits##_t)(number ^ (number >> (bits - 1)));        \
        found->outside |= row_count - 1 - row;                                         \
        found->signs |= (uint##bits##_t)number;                                        \
        return (uint##bits##_t)number;                                                 \
    }
DEFINE_NOTE(64)
DEFINE_NOTE(32)
#undef DEFINE_NOTE

static CM_INLINE void
loop_64_to_64(const loose_int64 *from, int64_t *to, uint64_t count, uint64_t row_count,
              found_64 *out)
{
    found_64 found = *out;
    for (uint64_t i = 0; i < count; i++) {
        to[i] = (int64_t)note_64(from[i], row_count, &found);
    }
    *out = found;
}

static CM_INLINE void
loop_64_to_32(const loose_int64 *from, int32_t *to, uint64_t count, uint64_t row_count,
              found_64 *out)
{
    found_64 found = *out;
    for (uint64_t i = 0; i < count; i++) {
        to[i] = (int32_t)(uint32_t)note_64(from[i], row_count, &found);
    }
    *out = found;
}

static CM_INLINE void
loop_32_to_32(const loose_int32 *from, int32_t *to, uint64_t count, uint32_t row_count,
              found_32 *out)
{
    found_32 found = *out;
    for (uint64_t i = 0; i < count; i++) {
        to[i] = (int32_t)note_32(from[i], row_count, &found);
    }
    *out = found;
}

/* Check the numbers without writing them anywhere. */
static CM_INLINE void
loop_look(const int64_t *numbers, uint64_t count, uint64_t row_count, found_64 *out)
{
    found_64 found = *out;
    for (uint64_t i = 0; i < count; i++) {
        (void)note_64(numbers[i], row_count, &found);
    }
    *out = found;
}

/* Return a word whose sign bit is set unless each number is larger than the one before
 * it. The first is compared with numbers[-1]. No number is negative, so no difference
 * overflows. */
static CM_INLINE uint32_t
loop_rise(const int32_t *numbers, uint64_t count)
{
    uint32_t falls = 0;
    for (uint64_t i = 0; i < count; i++) {
        falls |= (uint32_t)numbers[i] - (uint32_t)numbers[i - 1] - 1;
    }
    return falls;
}

/* Set the bit of each number. Returns true if any of them was set before, which is
 * tested only once, after the loop. */
static CM_INLINE bool
loop_mark(uint64_t *bits, const int32_t *numbers, uint64_t count)
{
    uint64_t was_set = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t row = (uint32_t)numbers[i];
        uint64_t word = bits[row / WORD_BITS];
        was_set |= word >> (row % WORD_BITS);
        bits[row / WORD_BITS] = word | UINT64_C(1) << (row % WORD_BITS);
    }
    return (was_set & 1) != 0;
}

static CM_INLINE uint64_t
loop_join(uint64_t *bits, const uint64_t *more, uint64_t words)
{
    uint64_t common = 0;
    for (uint64_t i = 0; i < words; i++) {
        common |= bits[i] & more[i];
        bits[i] |= more[i];
    }
    return common;
}

/* -- for each processor ------------------------------------------------------------- */

typedef void (*write_numbers)(const void *from, void *to, uint64_t count,
                              uint64_t row_count, cm_numbers_seen *seen);

typedef struct number_loops {
    write_numbers wide_to_wide;
    write_numbers wide_to_narrow;
    write_numbers narrow_to_narrow;
    void (*look)(const int64_t *numbers, uint64_t count, uint64_t row_count,
                 cm_numbers_seen *seen);
    bool (*rise)(const int32_t *numbers, uint64_t count);
    bool (*mark)(uint64_t *bits, const int32_t *numbers, uint64_t count);
    bool (*join)(uint64_t *bits, const uint64_t *more, uint64_t words);
} number_loops;

/* The functions below call a loop for one block after another, and stop after a block
 * in which a number is outside or does not rise. */
#define IS_SET(word) ((word) >> (sizeof(word) * 8 - 1) != 0) /* the sign bit */

#define DEFINE_WRITE(isa, name, given, written, word, found_type)                      \
    CM_ISA_##isa static void write_##name##_##isa(const void *from, void *to,          \
                                                  uint64_t count, uint64_t row_count,  \
                                                  cm_numbers_seen *seen)               \
    {                                                                                  \
        const given *numbers = from;                                                   \
        written *out = to;                                                             \
        found_type found = {0, 0};                                                     \
        uint64_t at = 0;                                                               \
        for (; at + BLOCK <= count && !IS_SET(found.outside); at += BLOCK) {           \
            loop_##name(numbers + at, out + at, BLOCK, (word)row_count, &found);       \
        }                                                                              \
        if (!IS_SET(found.outside)) {                                                  \
            loop_##name(numbers + at, out + at, count - at, (word)row_count, &found);  \
        }                                                                              \
        seen->has_outside = seen->has_outside || IS_SET(found.outside);                \
        seen->has_negative = seen->has_negative || IS_SET(found.signs);                \
    }

#define DEFINE_ALL(isa)                                                                \
    DEFINE_WRITE(isa, 64_to_64, loose_int64, int64_t, uint64_t, found_64)              \
    DEFINE_WRITE(isa, 64_to_32, loose_int64, int32_t, uint64_t, found_64)              \
    DEFINE_WRITE(isa, 32_to_32, loose_int32, int32_t, uint32_t, found_32)              \
    CM_ISA_##isa static void look_##isa(const int64_t *numbers, uint64_t count,        \
                                        uint64_t row_count, cm_numbers_seen *seen)     \
    {                                                                                  \
        found_64 found = {0, 0};                                                       \
        uint64_t at = 0;                                                               \
        for (; at + BLOCK <= count && !IS_SET(found.outside); at += BLOCK) {           \
            loop_look(numbers + at, BLOCK, row_count, &found);                         \
        }                                                                              \
        if (!IS_SET(found.outside)) {                                                  \
            loop_look(numbers + at, count - at, row_count, &found);                    \
        }                                                                              \
        seen->has_outside = seen->has_outside || IS_SET(found.outside);                \
        seen->has_negative = seen->has_negative || IS_SET(found.signs);                \
    }                                                                                  \
    CM_ISA_##isa static bool rise_##isa(const int32_t *numbers, uint64_t count)        \
    {                                                                                  \
        uint32_t falls = 0;                                                            \
        uint64_t at = 1;                                                               \
        for (; at + BLOCK <= count && !IS_SET(falls); at += BLOCK) {                   \
            falls |= loop_rise(numbers + at, BLOCK);                                   \
        }                                                                              \
        if (at < count && !IS_SET(falls)) {                                            \
            falls |= loop_rise(numbers + at, count - at);                              \
        }                                                                              \
        return !IS_SET(falls);                                                         \
    }                                                                                  \
    CM_ISA_##isa static bool mark_##isa(uint64_t *bits, const int32_t *numbers,        \
                                        uint64_t count)                                \
    {                                                                                  \
        return loop_mark(bits, numbers, count);                                        \
    }                                                                                  \
    CM_ISA_##isa static bool join_##isa(uint64_t *bits, const uint64_t *more,          \
                                        uint64_t words)                                \
    {                                                                                  \
        uint64_t common = 0;                                                           \
        uint64_t at = 0;                                                               \
        for (; at + BLOCK <= words; at += BLOCK) {                                     \
            common |= loop_join(bits + at, more + at, BLOCK);                          \
        }                                                                              \
        return (common | loop_join(bits + at, more + at, words - at)) != 0;            \
    }                                                                                  \
    static const number_loops loops_##isa = {.wide_to_wide = write_64_to_64_##isa,     \
                                             .wide_to_narrow = write_64_to_32_##isa,   \
                                             .narrow_to_narrow = write_32_to_32_##isa, \
                                             .look = look_##isa,                       \
                                             .rise = rise_##isa,                       \
                                             .mark = mark_##isa,                       \
                                             .join = join_##isa};

#define CM_ISA_plain
DEFINE_ALL(plain)
#if defined(__x86_64__)
/* loop_mark() uses no vectors, but it shifts by a variable number of bits. With BMI2
 * this takes a third as many instructions as without, so the loops are compiled for
 * BMI2 too. */
#    define CM_ISA_avx2 __attribute__((target("avx2,bmi2")))
DEFINE_ALL(avx2)
#endif

static const number_loops *
choose_loops(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) {
        return &loops_avx2;
    }
#endif
    return &loops_plain;
}

/* -- the functions ------------------------------------------------------------------ */

void
cm_numbers_write_64(const void *from, void *to, uint32_t to_nbytes, uint64_t count,
                    int64_t row_count, cm_numbers_seen *seen)
{
    const number_loops *loops = choose_loops();
    write_numbers write =
        to_nbytes == sizeof(int32_t) ? loops->wide_to_narrow : loops->wide_to_wide;
    write(from, to, count, (uint64_t)row_count, seen);
}

void
cm_numbers_write_32(const void *from, int32_t *to, uint64_t count, int64_t row_count,
                    cm_numbers_seen *seen)
{
    choose_loops()->narrow_to_narrow(from, to, count, (uint64_t)row_count, seen);
}

void
cm_numbers_look_64(const int64_t *numbers, uint64_t count, int64_t row_count,
                   cm_numbers_seen *seen)
{
    choose_loops()->look(numbers, count, (uint64_t)row_count, seen);
}

bool
cm_numbers_rise_32(const int32_t *numbers, uint64_t count)
{
    return choose_loops()->rise(numbers, count);
}

bool
cm_numbers_mark_32(uint64_t *bits, const int32_t *numbers, uint64_t count)
{
    return choose_loops()->mark(bits, numbers, count);
}

bool
cm_numbers_join_marks(uint64_t *bits, const uint64_t *more, uint64_t words)
{
    return choose_loops()->join(bits, more, words);
}
