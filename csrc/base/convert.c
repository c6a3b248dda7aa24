/* SPDX-License-Identifier: Apache-2.0 */
/* Converts numbers in one step or two. A number goes from its type to a middle type
 * (float32 or float64, as choose_middle() decides), is scaled there, and goes on to its
 * new type. So n types need 2 n loops for each middle type rather than n * n. Integers
 * become other integers in one step, which takes few loops, since only the width of the
 * target matters. Loops have a constant length, so that the compiler makes vector
 * instructions of them, and a block of the middle type stays in the nearest cache
 * between its two steps.
 *
 * Example: uint8 becomes float16 by way of float32. 1024 bytes are loaded and become
 * 1024 floats (4 KiB, which stay in the cache), are multiplied by 1/255 if that was
 * asked for, and are stored as 2 KiB of halves. */
#include "base/convert.h"

#include <assert.h>
#include <float.h>
#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#    include <immintrin.h>
#endif

/* setup.py turns automatic vectorization off for all files, and says why. The loops of
 * this file need it. */
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC optimize("tree-vectorize")
#endif

enum {
    /* Elements that one turn of a loop handles if source and target are packed. */
    LANES = 32,
    /* Elements in the middle type at a time, so that they stay in the nearest cache. */
    BLOCK = 1024,
};

/* -- halves ------------------------------------------------------------------------------- */

static inline uint32_t
bits_of_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline float
f32_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static inline uint64_t
bits_of_f64(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline double
f64_of_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* Choose between `yes` and `no` without a branch, since a branch would keep the
 * compiler from making vector instructions of a loop. */
static inline uint32_t
pick_32(bool is, uint32_t yes, uint32_t no)
{
    return no ^ ((yes ^ no) & (0 - (uint32_t)is));
}

static inline uint64_t
pick_64(bool is, uint64_t yes, uint64_t no)
{
    return no ^ ((yes ^ no) & (0 - (uint64_t)is));
}

/* The exponent and the fraction are moved to their places in a float. The exponent of a
 * normal half then grows by 112, since it is stored plus 15 in a half and plus 127 in a
 * float. A subnormal half gets the exponent of the smallest normal one, which is stored
 * as 113; that implies a leading bit, whose value, 2**-14, is subtracted again.
 * Infinity and NaN get the highest exponent. The double below does the same with 1023
 * in place of 127. */
static inline float
f32_of_half(uint16_t half)
{
    uint32_t moved = (uint32_t)(half & 0x7fff) << 13;
    uint32_t normal = moved + (UINT32_C(112) << 23);
    uint32_t tiny = bits_of_f32(f32_of_bits(moved + (UINT32_C(113) << 23)) - 0x1p-14f);
    uint32_t bits = pick_32((half & 0x7c00) == 0, tiny, normal);
    bits = pick_32((half & 0x7c00) == 0x7c00, moved | 0x7f800000, bits);
    return f32_of_bits(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline double
f64_of_half(uint16_t half)
{
    uint64_t moved = (uint64_t)(half & 0x7fff) << 42;
    uint64_t normal = moved + (UINT64_C(1008) << 52);
    uint64_t tiny = bits_of_f64(f64_of_bits(moved + (UINT64_C(1009) << 52)) - 0x1p-14);
    uint64_t bits = pick_64((half & 0x7c00) == 0, tiny, normal);
    bits = pick_64((half & 0x7c00) == 0x7c00, moved | UINT64_C(0x7ff) << 52, bits);
    return f64_of_bits(bits | (uint64_t)(half & 0x8000) << 48);
}

/* A number below 2**-14 (0x38800000) becomes a subnormal half. 0.5, or 2**28 for a
 * double, is added to it: the last bit of the sum is worth 2**-24, as is that of the
 * half, so the addition does the rounding. Any other number loses its lowest 13 bits
 * (42 for a double). To round, two numbers are added first: 0xfff, which is just
 * below half a unit of the last bit that stays, and `odd`, which is 1 if that bit is
 * set. So a tie goes to the even neighbour. From 2**16 (0x47800000) on the result is
 * infinity. NaN keeps the upper bits of its payload. If those are all 0, the payload
 * becomes 1, because a payload of 0 would mean infinity. */
static inline uint16_t
half_of_f32(float x)
{
    uint32_t bits = bits_of_f32(x);
    uint32_t most = bits & 0x7fffffff;
    uint32_t nan = (most >> 13 & 0x3ff) != 0 ? 0x7c00 | (most >> 13 & 0x3ff) : 0x7c01;
    uint32_t tiny = bits_of_f32(f32_of_bits(most) + 0.5f) - 0x3f000000;
    uint32_t odd = most >> 13 & 1;
    uint32_t half = (most - (UINT32_C(112) << 23) + 0xfff + odd) >> 13;
    half = pick_32((int32_t)most < 0x38800000, tiny, half);
    half = pick_32((int32_t)most >= 0x47800000, 0x7c00, half);
    half = pick_32((int32_t)most > 0x7f800000, nan, half);
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

static inline uint16_t
half_of_f64(double x)
{
    uint64_t bits = bits_of_f64(x);
    uint64_t most = bits & INT64_MAX;
    uint64_t nan = (most >> 42 & 0x3ff) != 0 ? 0x7c00 | (most >> 42 & 0x3ff) : 0x7c01;
    uint64_t tiny = bits_of_f64(f64_of_bits(most) + 0x1p28) - bits_of_f64(0x1p28);
    uint64_t odd = most >> 42 & 1;
    uint64_t half =
        (most - (UINT64_C(1008) << 52) + ((UINT64_C(1) << 41) - 1) + odd) >> 42;
    half = pick_64((int64_t)most < INT64_C(0x3f10000000000000), tiny, half);
    half = pick_64((int64_t)most >= INT64_C(0x40f0000000000000), 0x7c00, half);
    half = pick_64((int64_t)most > INT64_C(0x7ff0000000000000), nan, half);
    return (uint16_t)(half | (bits >> 48 & 0x8000));
}

static inline float
f32_of_bfloat(uint16_t half)
{
    return f32_of_bits((uint32_t)half << 16);
}

static inline uint16_t
bfloat_of_f32(float x)
{
    uint32_t bits = bits_of_f32(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    bool is_nan = (int32_t)(bits & 0x7fffffff) > 0x7f800000;
    return (uint16_t)(is_nan ? (bits >> 16 & 0x8000) | 0x7fc0 : rounded);
}

/* -- one value ---------------------------------------------------------------------------- */

#define F32_BOOL(x) ((x) != 0 ? 1.0f : 0.0f)
#define F64_BOOL(x) ((x) != 0 ? 1.0 : 0.0)
#define F32_FLOAT16(x) f32_of_half(x)
#define F64_FLOAT16(x) f64_of_half(x)
#define F32_BFLOAT16(x) f32_of_bfloat(x)
#define F64_BFLOAT16(x) ((double)f32_of_bfloat(x))
#define F32_PLAIN(x) ((float)(x))
#define F64_PLAIN(x) ((double)(x))

#define BOOL_F32(x) ((uint8_t)((x) != 0))
#define BOOL_F64(x) BOOL_F32(x)
#define FLOAT32_F32(x) (x)
#define FLOAT32_F64(x) ((float)(x))
#define FLOAT64_F32(x) ((double)(x))
#define FLOAT64_F64(x) (x)
#define FLOAT16_F32(x) half_of_f32(x)
#define FLOAT16_F64(x) half_of_f64(x)
#define BFLOAT16_F32(x) bfloat_of_f32(x)
#define BFLOAT16_F64(x) bfloat_of_f32((float)(x))

/* Converts to a short integer type. The middle types can express all its values, so the
 * number is first limited to the range of the type. NaN fails the first comparison and
 * becomes `least`. If `least` is not 0, another comparison makes 0 of NaN. */
#define DEFINE_SHORT_OF(name, mid, mid_type, type, least, most)                        \
    static inline type name##_##mid(mid_type x)                                        \
    {                                                                                  \
        mid_type in = x > (mid_type)(least) ? x : (mid_type)(least);                   \
        in = in < (mid_type)(most) ? in : (mid_type)(most);                            \
        in = (least) == 0 || x == x ? in : 0;                                          \
        return (type)(int32_t)in;                                                      \
    }
#define DEFINE_SHORT(name, type, least, most)                                          \
    DEFINE_SHORT_OF(name, F32, float, type, least, most)                               \
    DEFINE_SHORT_OF(name, F64, double, type, least, most)
DEFINE_SHORT(INT8, int8_t, INT8_MIN, INT8_MAX)
DEFINE_SHORT(UINT8, uint8_t, 0, UINT8_MAX)
DEFINE_SHORT(INT16, int16_t, INT16_MIN, INT16_MAX)
DEFINE_SHORT(UINT16, uint16_t, 0, UINT16_MAX)
#undef DEFINE_SHORT
#undef DEFINE_SHORT_OF

/* Converts to a long integer type. The largest value of the integer type, `most`, is
 * not always exact in the middle type. `end`, which is one more, is always exact, since
 * it is a power of two. */
#define DEFINE_CUT(name, mid, mid_type, type, least, most, end)                        \
    static inline type cut_##name##_##mid(mid_type x)                                  \
    {                                                                                  \
        mid_type in = x >= (mid_type)(least) && x < (mid_type)(end) ? x : 0;           \
        type cut = (type)in;                                                           \
        cut = x >= (mid_type)(end) ? (most) : cut;                                     \
        return x < (mid_type)(least) ? (least) : cut;                                  \
    }
DEFINE_CUT(INT32, F32, float, int32_t, INT32_MIN, INT32_MAX, 0x1p31f)
DEFINE_CUT(INT32, F64, double, int32_t, INT32_MIN, INT32_MAX, 0x1p31)
DEFINE_CUT(UINT32, F64, double, uint32_t, 0, UINT32_MAX, 0x1p32)
DEFINE_CUT(INT64, F32, float, int64_t, INT64_MIN, INT64_MAX, 0x1p63f)
DEFINE_CUT(INT64, F64, double, int64_t, INT64_MIN, INT64_MAX, 0x1p63)
DEFINE_CUT(UINT64, F32, float, uint64_t, 0, UINT64_MAX, 0x1p64f)
DEFINE_CUT(UINT64, F64, double, uint64_t, 0, UINT64_MAX, 0x1p64)
#undef DEFINE_CUT

#define INT32_F32(x) cut_INT32_F32(x)
#define INT32_F64(x) cut_INT32_F64(x)

/* No vector instruction before AVX-512 converts to 32 bits without a sign. So 2**31 is
 * subtracted from a number that is at least as large, which is exact, and the highest
 * bit of the result is set. `high` and `end` are the bits of 2**31 and 2**32 as floats:
 * floats that are not negative are in the same order as their bits read as integers, so
 * integers are compared. */
static inline uint32_t
UINT32_F32(float x)
{
    const int32_t high = 0x4f000000, end = 0x4f800000, infinity = 0x7f800000;
    int32_t bits = (int32_t)bits_of_f32(x);
    bits = (int32_t)pick_32(bits < 0 || bits > infinity, 0, (uint32_t)bits);
    uint32_t is_high = pick_32(bits >= high, UINT32_MAX, 0);
    float in = f32_of_bits((uint32_t)bits) - f32_of_bits(is_high & (uint32_t)high);
    in = f32_of_bits(pick_32(bits >= end, 0, bits_of_f32(in)));
    uint32_t cut = (uint32_t)(int32_t)in ^ (is_high & UINT32_C(1) << 31);
    return pick_32(bits >= end, UINT32_MAX, cut);
}

/* The instruction that converts one float returns INT64_MIN if the result does not fit.
 * So when the instruction returns INT64_MIN, which is rare, cut_INT64_…() computes the
 * result. That is also right for a float that really is INT64_MIN. The unsigned types
 * call their function whenever the result of the instruction is outside their range. */
#if defined(__x86_64__)
#    define INSTRUCTION_F32(x) _mm_cvttss_si64(_mm_set_ss(x))
#    define INSTRUCTION_F64(x) _mm_cvttsd_si64(_mm_set_sd(x))
#    define DEFINE_LONG(mid, mid_type)                                                 \
        static inline int64_t INT64_##mid(mid_type x)                                  \
        {                                                                              \
            int64_t cut = INSTRUCTION_##mid(x);                                        \
            return __builtin_expect(cut != INT64_MIN, 1) ? cut : cut_INT64_##mid(x);   \
        }                                                                              \
        static inline uint64_t UINT64_##mid(mid_type x)                                \
        {                                                                              \
            int64_t cut = INSTRUCTION_##mid(x);                                        \
            return __builtin_expect(cut >= 0, 1) ? (uint64_t)cut                       \
                                                 : cut_UINT64_##mid(x);                \
        }
DEFINE_LONG(F32, float)
DEFINE_LONG(F64, double)
#    undef DEFINE_LONG

static inline uint32_t
UINT32_F64(double x)
{
    int64_t cut = INSTRUCTION_F64(x);
    return __builtin_expect(cut >= 0 && cut <= UINT32_MAX, 1) ? (uint32_t)cut
                                                              : cut_UINT32_F64(x);
}
#else
#    define INT64_F32(x) cut_INT64_F32(x)
#    define INT64_F64(x) cut_INT64_F64(x)
#    define UINT64_F32(x) cut_UINT64_F32(x)
#    define UINT64_F64(x) cut_UINT64_F64(x)
#    define UINT32_F64(x) cut_UINT32_F64(x)
#endif

/* -- many, by each set of instructions ---------------------------------------------------- */

typedef void (*convert_step)(char *restrict dst, int64_t dst_step,
                             const char *restrict src, int64_t src_step, int64_t count);

#define UNALIGNED(type) type __attribute__((aligned(1), may_alias))

#define DEFINE_STEP(isa, name, from, to, make)                                         \
    CM_ISA_##isa static void name##_##isa(char *restrict dst, int64_t dst_step,        \
                                          const char *restrict src, int64_t src_step,  \
                                          int64_t count)                               \
    {                                                                                  \
        typedef UNALIGNED(from) source;                                                \
        typedef UNALIGNED(to) target;                                                  \
        if (dst_step == sizeof(to) && src_step == sizeof(from)) {                      \
            for (; count >= LANES; count -= LANES) {                                   \
                const source *in = (const source *)(const void *)src;                  \
                target *out = (target *)(void *)dst;                                   \
                for (int k = 0; k < LANES; k++) {                                      \
                    out[k] = make(in[k]);                                              \
                }                                                                      \
                src += LANES * sizeof(from);                                           \
                dst += LANES * sizeof(to);                                             \
            }                                                                          \
        }                                                                              \
        for (; count > 0; count--, src += src_step, dst += dst_step) {                 \
            *(target *)(void *)dst = make(*(const source *)(const void *)src);         \
        }                                                                              \
    }

/* Calls X for each dtype in CM_REALS with each middle type. */
#define ALL_STEPS(X, isa)                                                              \
    CM_REALS(X##_F32, isa)                                                             \
    CM_REALS(X##_F64, isa)

typedef enum middle { F32, F64, MIDDLE_COUNT } middle;

/* How an integer is stored. W8 to W64 stand for that many bits: a longer integer loses
 * its upper bits, and a shorter one is extended, with its sign if its type is signed.
 * WBOOL stands for a bool, which is true unless the integer is 0. */
typedef enum int_width { W8, W16, W32, W64, WBOOL, WIDTH_COUNT } int_width;

#define INTEGER_OF_BOOL(x) ((x) != 0)
#define INTEGER_OF_PLAIN(x) (x)
#define DEFINE_WIDTHS(to, id, name, type, reads, ...)                                  \
    static inline uint8_t id##_to_W8(type x)                                           \
    {                                                                                  \
        return (uint8_t)INTEGER_OF_##reads(x);                                         \
    }                                                                                  \
    static inline uint16_t id##_to_W16(type x)                                         \
    {                                                                                  \
        return (uint16_t)INTEGER_OF_##reads(x);                                        \
    }                                                                                  \
    static inline uint32_t id##_to_W32(type x)                                         \
    {                                                                                  \
        return (uint32_t)INTEGER_OF_##reads(x);                                        \
    }                                                                                  \
    static inline uint64_t id##_to_W64(type x)                                         \
    {                                                                                  \
        return (uint64_t)INTEGER_OF_##reads(x);                                        \
    }                                                                                  \
    static inline uint8_t id##_to_WBOOL(type x)                                        \
    {                                                                                  \
        return (uint8_t)((x) != 0);                                                    \
    }
CM_INTEGERS(DEFINE_WIDTHS, )

/* The loops for one set of instructions. `load` converts each type to each middle type,
 * and `store` converts it back. An entry is NULL if numbers of that type are converted
 * in another way. */
typedef struct step_table {
    convert_step load[MIDDLE_COUNT][CM_NUMBER_COUNT];
    convert_step store[MIDDLE_COUNT][CM_NUMBER_COUNT];
    void (*scale[2])(char *values, const cm_convert *convert, int64_t count);
    /* These convert one integer type to another in one step. */
    convert_step integer[CM_NUMBER_COUNT][WIDTH_COUNT];
    /* Take every second number of the middle type, since the real parts of complex
     * numbers are that far apart. */
    convert_step pairs[MIDDLE_COUNT];
    /* Make complex numbers of packed numbers of the middle type, with imaginary parts
     * of 0. */
    convert_step spread[MIDDLE_COUNT];
    convert_step swap[4]; /* reverse the bytes of elements of 1 << i bytes */
} step_table;

#define DEFINE_BOTH(isa, id, type, reads, mid, mid_type)                               \
    DEFINE_STEP(isa, load_##mid##_##id, type, mid_type, mid##_##reads)                 \
    DEFINE_STEP(isa, store_##mid##_##id, mid_type, type, id##_##mid)
#define DEFINE_BOTH_F32(isa, id, name, type, reads, ...)                               \
    DEFINE_BOTH(isa, id, type, reads, F32, float)
#define DEFINE_BOTH_F64(isa, id, name, type, reads, ...)                               \
    DEFINE_BOTH(isa, id, type, reads, F64, double)
#define STEP_ENTRIES(isa, id, mid)                                                     \
    .load[mid][CM_##id] = load_##mid##_##id##_##isa,                                   \
    .store[mid][CM_##id] = store_##mid##_##id##_##isa,
#define STEP_ENTRIES_F32(isa, id, ...) STEP_ENTRIES(isa, id, F32)
#define STEP_ENTRIES_F64(isa, id, ...) STEP_ENTRIES(isa, id, F64)
#define DEFINE_PAIRS(isa, mid, type)                                                   \
    CM_ISA_##isa static void pairs_##mid##_##isa(char *restrict dst, int64_t dst_step, \
                                                 const char *restrict src,             \
                                                 int64_t src_step, int64_t count)      \
    {                                                                                  \
        const UNALIGNED(type) *in = (const void *)src;                                 \
        UNALIGNED(type) *out = (void *)dst;                                            \
        (void)dst_step;                                                                \
        (void)src_step;                                                                \
        /* The last numbers, LANES at most, are left to the second loop, since vector  \
         * loads of them could read beyond the last real part. */                      \
        for (; count > LANES; count -= LANES, in += 2 * LANES, out += LANES) {         \
            for (int k = 0; k < LANES; k++) {                                          \
                out[k] = in[2 * k];                                                    \
            }                                                                          \
        }                                                                              \
        for (; count > 0; count--, in += 2, out++) {                                   \
            *out = *in;                                                                \
        }                                                                              \
    }
#define DEFINE_SPREAD(isa, mid, type)                                                  \
    CM_ISA_##isa static void spread_##mid##_##isa(                                     \
        char *restrict dst, int64_t dst_step, const char *restrict src,                \
        int64_t src_step, int64_t count)                                               \
    {                                                                                  \
        const UNALIGNED(type) *in = (const void *)src;                                 \
        UNALIGNED(type) *out = (void *)dst;                                            \
        (void)dst_step;                                                                \
        (void)src_step;                                                                \
        for (; count >= LANES; count -= LANES, in += LANES, out += 2 * LANES) {        \
            for (int k = 0; k < LANES; k++) {                                          \
                out[2 * k] = in[k];                                                    \
                out[2 * k + 1] = 0;                                                    \
            }                                                                          \
        }                                                                              \
        for (; count > 0; count--, in++, out += 2) {                                   \
            out[0] = *in;                                                              \
            out[1] = 0;                                                                \
        }                                                                              \
    }
/* Product and sum are rounded one after the other, as NumPy does it. */
#define DEFINE_SCALE(isa, mid, type)                                                   \
    CM_ISA_##isa static void scale_##mid##_##isa(                                      \
        char *values, const cm_convert *convert, int64_t count)                        \
    {                                                                                  \
        UNALIGNED(type) *at = (void *)values;                                          \
        type scale = (type)convert->scale;                                             \
        type offset = (type)convert->offset;                                           \
        for (; count >= LANES; count -= LANES, at += LANES) {                          \
            for (int k = 0; k < LANES; k++) {                                          \
                type product = at[k] * scale;                                          \
                at[k] = product + offset;                                              \
            }                                                                          \
        }                                                                              \
        for (; count > 0; count--, at++) {                                             \
            type product = *at * scale;                                                \
            *at = product + offset;                                                    \
        }                                                                              \
    }
#define DEFINE_INTEGER(isa, id, name, type, ...)                                       \
    DEFINE_STEP(isa, integer_##id##_W8, type, uint8_t, id##_to_W8)                     \
    DEFINE_STEP(isa, integer_##id##_W16, type, uint16_t, id##_to_W16)                  \
    DEFINE_STEP(isa, integer_##id##_W32, type, uint32_t, id##_to_W32)                  \
    DEFINE_STEP(isa, integer_##id##_W64, type, uint64_t, id##_to_W64)                  \
    DEFINE_STEP(isa, integer_##id##_WBOOL, type, uint8_t, id##_to_WBOOL)
#define INTEGER_ENTRIES(isa, id, ...)                                                  \
    .integer[CM_##id] = {integer_##id##_W8_##isa, integer_##id##_W16_##isa,            \
                         integer_##id##_W32_##isa, integer_##id##_W64_##isa,           \
                         integer_##id##_WBOOL_##isa},
#define DEFINE_ALL(isa)                                                                \
    ALL_STEPS(DEFINE_BOTH, isa)                                                        \
    CM_INTEGERS(DEFINE_INTEGER, isa)                                                   \
    DEFINE_STEP(isa, swap_2, uint16_t, uint16_t, __builtin_bswap16)                    \
    DEFINE_STEP(isa, swap_4, uint32_t, uint32_t, __builtin_bswap32)                    \
    DEFINE_STEP(isa, swap_8, uint64_t, uint64_t, __builtin_bswap64)                    \
    DEFINE_SCALE(isa, F32, float)                                                      \
    DEFINE_SCALE(isa, F64, double)                                                     \
    DEFINE_PAIRS(isa, F32, float)                                                      \
    DEFINE_PAIRS(isa, F64, double)                                                     \
    DEFINE_SPREAD(isa, F32, float)                                                     \
    DEFINE_SPREAD(isa, F64, double)                                                    \
    static const step_table steps_##isa = {                                            \
        ALL_STEPS(STEP_ENTRIES, isa) CM_INTEGERS(INTEGER_ENTRIES, isa)                 \
            .swap = {NULL, swap_2_##isa, swap_4_##isa, swap_8_##isa},                  \
        .pairs = {pairs_F32_##isa, pairs_F64_##isa},                                   \
        .spread = {spread_F32_##isa, spread_F64_##isa},                                \
        .scale = {scale_F32_##isa, scale_F64_##isa}};

#define CM_ISA_plain
DEFINE_ALL(plain)
#if defined(__x86_64__)
#    define CM_ISA_avx2 __attribute__((target("avx2")))
DEFINE_ALL(avx2)
#endif

static const step_table *
choose_steps(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        return &steps_avx2;
    }
#endif
    return &steps_plain;
}

/* -- the floating point environment ------------------------------------------------------- */
/* A thread may be set to flush subnormals to zero, and hands this mode on to threads
 * that it starts. Conversions need the usual mode. Setting the mode takes longer than
 * some conversions, so the mode is read first, and set only if it is not the usual
 * one. */

#if defined(__x86_64__)
enum { USUAL_MODE = 0x1f80, MODE_FLAGS = 0x3f };

static inline uint64_t
get_mode(void)
{
    return _mm_getcsr() & ~(unsigned)MODE_FLAGS;
}

static inline void
set_mode(uint64_t mode)
{
    _mm_setcsr((unsigned)mode);
}
#else
enum { USUAL_MODE = 0 };

static inline uint64_t
get_mode(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode)::"memory");
    return mode;
}

static inline void
set_mode(uint64_t mode)
{
    __asm__ volatile("msr fpcr, %0" ::"r"(mode) : "memory");
}
#endif

/* -- all of it ------------------------------------------------------------------------------ */

/* This table has the type of the parts of each complex number, and for each real number
 * its own type. */
static const cm_number parts_of[CM_NUMBER_COUNT] = {
#define OWN_PART(to, id, ...) [CM_##id] = CM_##id,
#define COMPLEX_PARTS(to, id, name, type, part, ...) [CM_##id] = CM_##part,
    CM_REALS(OWN_PART, ) CM_COMPLEX_NUMBERS(COMPLEX_PARTS, )
#undef OWN_PART
#undef COMPLEX_PARTS
};

#define CHECK_SIZE(to, id, name, type, reads, on_device, kind, bits, ...)              \
    _Static_assert(8 * sizeof(type) == (bits), "bits of " name);
CM_NUMBERS(CHECK_SIZE, )
#undef CHECK_SIZE

static bool
is_complex(cm_number number)
{
    return cm_dtypes[number].class_of == CM_CLASS_COMPLEX;
}

bool
cm_convert_has_kernel(const cm_convert *convert)
{
    const cm_dtype_row *from = &cm_dtypes[convert->from];
    bool is_integer = from->class_of == CM_CLASS_INTEGER;
    bool is_finite =
        fabs(convert->scale) <= FLT_MAX && fabs(convert->offset) <= FLT_MAX;
    return convert->to == CM_DEVICE_CONVERTS_TO && from->converts_on_device
           && !convert->from_swapped && !convert->to_swapped
           && (!convert->scales || (is_finite && is_integer));
}

bool
cm_convert_drops_imaginary(const cm_convert *convert)
{
    return is_complex(convert->from) && !is_complex(convert->to)
           && convert->to != CM_BOOL;
}

/* Return the middle type that rounds as NumPy does: float64 if one end is float64, else
 * float32. So an integer that becomes a float32 or a float64 is rounded once, and one
 * that becomes a half (or bfloat16) is first rounded to float32. */
static middle
choose_middle(const cm_convert *convert)
{
    bool is_wide = convert->from == CM_FLOAT64 || convert->to == CM_FLOAT64;
    return is_wide ? F64 : F32;
}

static bool
is_integer(cm_number number)
{
    return cm_dtypes[number].class_of == CM_CLASS_INTEGER;
}

static bool
is_between_integers(const cm_convert *convert)
{
    return is_integer(convert->from) && is_integer(convert->to) && !convert->scales;
}

static convert_step
find_swap(const step_table *steps, int64_t nbytes)
{
    return steps->swap[__builtin_ctzll((uint64_t)nbytes)];
}

static int_width
width_of(cm_number number)
{
    return number == CM_BOOL
               ? WBOOL
               : (int_width)__builtin_ctzll((uint64_t)cm_dtypes[number].nbytes);
}

/* Convert numbers in this processor's byte order. */
static void
run_native(const step_table *steps, const cm_convert *convert, char *dst,
           int64_t dst_step, const char *src, int64_t src_step, int64_t count)
{
    static const cm_number own[MIDDLE_COUNT] = {CM_FLOAT32, CM_FLOAT64};
    char room[BLOCK * sizeof(double)];
    if (is_between_integers(convert)) {
        steps->integer[convert->from][width_of(convert->to)](dst, dst_step, src,
                                                             src_step, count);
        return;
    }
    middle mid = choose_middle(convert);
    int64_t mid_nbytes = cm_dtypes[own[mid]].nbytes;
    convert_step load = steps->load[mid][convert->from];
    if (convert->from == own[mid] && src_step == 2 * mid_nbytes) {
        load = steps->pairs[mid];
    }
    convert_step store = steps->store[mid][convert->to];
    bool is_loaded =
        convert->from == own[mid] && src_step == mid_nbytes && !convert->scales;
    bool is_stored = convert->to == own[mid] && dst_step == mid_nbytes;
    if (is_loaded) {
        store(dst, dst_step, src, src_step, count);
        return;
    }
    while (count > 0) {
        int64_t now = count < BLOCK ? count : BLOCK;
        char *values = is_stored ? dst : room;
        load(values, mid_nbytes, src, src_step, now);
        if (convert->scales) {
            steps->scale[mid](values, convert, now);
        }
        if (!is_stored) {
            store(dst, dst_step, values, mid_nbytes, now);
        }
        src += now * src_step;
        dst += now * dst_step;
        count -= now;
    }
}

/* Convert numbers if the source, the target or both have the other byte order. The
 * bytes are reversed in the nearest cache, before or after the conversion. */
static void
run_swapped(const step_table *steps, const cm_convert *convert, char *dst,
            int64_t dst_step, const char *src, int64_t src_step, int64_t count)
{
    char in[BLOCK * sizeof(double)];
    char out[BLOCK * sizeof(double)];
    int64_t from_nbytes = cm_dtypes[convert->from].nbytes;
    int64_t to_nbytes = cm_dtypes[convert->to].nbytes;
    bool same_order = convert->from_swapped == convert->to_swapped;
    if (convert->from == convert->to && !convert->scales && !same_order) {
        find_swap(steps, from_nbytes)(dst, dst_step, src, src_step, count);
        return;
    }
    while (count > 0) {
        int64_t now = count < BLOCK ? count : BLOCK;
        const char *from = src;
        int64_t from_step = src_step;
        if (convert->from_swapped) {
            find_swap(steps, from_nbytes)(in, from_nbytes, src, src_step, now);
            from = in;
            from_step = from_nbytes;
        }
        if (convert->to_swapped) {
            run_native(steps, convert, out, to_nbytes, from, from_step, now);
            find_swap(steps, to_nbytes)(dst, dst_step, out, to_nbytes, now);
        }
        else {
            run_native(steps, convert, dst, dst_step, from, from_step, now);
        }
        src += now * src_step;
        dst += now * dst_step;
        count -= now;
    }
}

static void
run_reals(const step_table *steps, const cm_convert *convert, char *dst,
          int64_t dst_step, const char *src, int64_t src_step, int64_t count)
{
    if (convert->from_swapped || convert->to_swapped) {
        run_swapped(steps, convert, dst, dst_step, src, src_step, count);
    }
    else {
        run_native(steps, convert, dst, dst_step, src, src_step, count);
    }
}

/* -- complex numbers ------------------------------------------------------------------------ */
/* A complex number is two real ones, so the conversions above do the work, and the
 * functions below only say where the parts are. `parts` is the conversion with the
 * types of the parts in place of the complex types; an end that is real keeps its own
 * type. A block of elements is finished before the next begins, so that elements that
 * are read or written twice are still in the nearest cache. */

static middle
middle_of(cm_number part)
{
    return part == CM_FLOAT64 ? F64 : F32;
}

static void
run_complex_to_complex(const step_table *steps, const cm_convert *parts, char *dst,
                       int64_t dst_step, const char *src, int64_t src_step,
                       int64_t count)
{
    int64_t from_nbytes = cm_dtypes[parts->from].nbytes;
    int64_t to_nbytes = cm_dtypes[parts->to].nbytes;
    if (src_step == 2 * from_nbytes && dst_step == 2 * to_nbytes) {
        run_reals(steps, parts, dst, to_nbytes, src, from_nbytes, 2 * count);
        return;
    }
    while (count > 0) {
        int64_t now = count < BLOCK ? count : BLOCK;
        run_reals(steps, parts, dst, dst_step, src, src_step, now);
        run_reals(steps, parts, dst + to_nbytes, dst_step, src + from_nbytes, src_step,
                  now);
        src += now * src_step;
        dst += now * dst_step;
        count -= now;
    }
}

/* Zero is the same in either byte order, so only the bytes of the real parts may have
 * to be reversed, which run_reals() does. */
static void
run_real_to_complex(const step_table *steps, const cm_convert *parts, char *dst,
                    int64_t dst_step, const char *src, int64_t src_step, int64_t count)
{
    char room[BLOCK * sizeof(double)];
    int64_t nbytes = cm_dtypes[parts->to].nbytes;
    convert_step spread = steps->spread[middle_of(parts->to)];
    bool is_packed = dst_step == 2 * nbytes;
    bool is_made = parts->from == parts->to && parts->from_swapped == parts->to_swapped
                   && src_step == nbytes;
    if (is_packed && is_made) {
        spread(dst, dst_step, src, src_step, count);
        return;
    }
    while (count > 0) {
        int64_t now = count < BLOCK ? count : BLOCK;
        if (is_packed) {
            run_reals(steps, parts, room, nbytes, src, src_step, now);
            spread(dst, dst_step, room, nbytes, now);
        }
        else {
            run_reals(steps, parts, dst, dst_step, src, src_step, now);
            for (int64_t i = 0; i < now; i++) {
                memset(dst + i * dst_step + nbytes, 0, (size_t)nbytes);
            }
        }
        src += now * src_step;
        dst += now * dst_step;
        count -= now;
    }
}

/* The real parts are put side by side first, in whichever byte order they are: two fast
 * loops take less time than one that does both. */
static void
run_complex_to_real(const step_table *steps, const cm_convert *parts, char *dst,
                    int64_t dst_step, const char *src, int64_t src_step, int64_t count)
{
    char room[BLOCK * sizeof(double)];
    int64_t nbytes = cm_dtypes[parts->from].nbytes;
    convert_step take_parts = steps->pairs[middle_of(parts->from)];
    bool is_made = parts->from == parts->to && parts->from_swapped == parts->to_swapped
                   && dst_step == nbytes;
    if (src_step != 2 * nbytes) {
        run_reals(steps, parts, dst, dst_step, src, src_step, count);
        return;
    }
    if (is_made) {
        take_parts(dst, dst_step, src, src_step, count);
        return;
    }
    while (count > 0) {
        int64_t now = count < BLOCK ? count : BLOCK;
        take_parts(room, nbytes, src, src_step, now);
        run_reals(steps, parts, dst, dst_step, room, nbytes, now);
        src += now * src_step;
        dst += now * dst_step;
        count -= now;
    }
}

/* A complex number is true if either part is. So each part becomes a byte that is 0 or
 * 1, and the two bytes are read as one 16-bit integer, which is 0 only if both are. */
static void
run_complex_to_bool(const step_table *steps, const cm_convert *parts, char *dst,
                    int64_t dst_step, const char *src, int64_t src_step, int64_t count)
{
    char room[2 * BLOCK];
    int64_t nbytes = cm_dtypes[parts->from].nbytes;
    while (count > 0) {
        int64_t now = count < BLOCK ? count : BLOCK;
        if (src_step == 2 * nbytes) {
            run_reals(steps, parts, room, 1, src, nbytes, 2 * now);
        }
        else {
            run_reals(steps, parts, room, 2, src, src_step, now);
            run_reals(steps, parts, room + 1, 2, src + nbytes, src_step, now);
        }
        steps->integer[CM_UINT16][WBOOL](dst, dst_step, room, 2, now);
        src += now * src_step;
        dst += now * dst_step;
        count -= now;
    }
}

typedef void (*run_numbers)(const step_table *steps, const cm_convert *parts, char *dst,
                            int64_t dst_step, const char *src, int64_t src_step,
                            int64_t count);

static run_numbers
choose_run(const cm_convert *convert)
{
    bool from_complex = is_complex(convert->from);
    bool to_complex = is_complex(convert->to);
    if (from_complex && to_complex) {
        return run_complex_to_complex;
    }
    if (to_complex) {
        return run_real_to_complex;
    }
    if (from_complex && convert->to == CM_BOOL) {
        return run_complex_to_bool;
    }
    return from_complex ? run_complex_to_real : run_reals;
}

void
cm_convert_run(const cm_convert *convert, void *dst, int64_t dst_step, const void *src,
               int64_t src_step, int64_t count)
{
    run_numbers run = choose_run(convert);
    cm_convert parts = *convert;
    parts.from = parts_of[convert->from];
    parts.to = parts_of[convert->to];
    assert(run == run_reals || !convert->scales);
    uint64_t mode = get_mode();
    if (mode != USUAL_MODE) {
        set_mode(USUAL_MODE);
    }
    run(choose_steps(), &parts, dst, dst_step, src, src_step, count);
    if (mode != USUAL_MODE) {
        set_mode(mode);
    }
}
