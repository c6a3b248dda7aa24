/* SPDX-License-Identifier: Apache-2.0 */
/* In one step or two: from a type to the middle one that holds all its values, where
 * they are scaled, and from that to the other. Loops of a constant length become
 * vector instructions. */
#include "base/convert.h"

#include <float.h>
#include <math.h>
#include <string.h>

#if defined(__x86_64__)
#    include <immintrin.h>
#endif

/* Elsewhere the compiler makes no vectors by itself (setup.py says why). */
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC optimize("tree-vectorize")
#endif

enum {
    LANES = 32,   /* go together, where both ends lie side by side */
    BLOCK = 1024, /* what is between the steps stays in the nearest cache */
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

/* `yes` or `no` without a branch, which would keep loops from vector instructions. */
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

/* Exponents are moved; a subnormal gets the lowest, then loses its leading bit. */
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

/* Subnormals are rounded by a sum with a number whose last bit is worth as much as
 * theirs, others by one in the bits that are cut off. */
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
#define I64_BOOL(x) ((x) != 0)
#define F32_FLOAT16(x) f32_of_half(x)
#define F64_FLOAT16(x) f64_of_half(x)
#define F32_BFLOAT16(x) f32_of_bfloat(x)
#define F64_BFLOAT16(x) ((double)f32_of_bfloat(x))
#define F32_PLAIN(x) ((float)(x))
#define F64_PLAIN(x) ((double)(x))
#define I64_PLAIN(x) ((int64_t)(x))

#define BOOL_F32(x) ((uint8_t)((x) != 0))
#define BOOL_F64(x) BOOL_F32(x)
#define BOOL_I64(x) BOOL_F32(x)
#define FLOAT32_F32(x) (x)
#define FLOAT32_F64(x) ((float)(x))
#define FLOAT64_F32(x) ((double)(x))
#define FLOAT64_F64(x) (x)
#define FLOAT16_F32(x) half_of_f32(x)
#define FLOAT16_F64(x) half_of_f64(x)
#define BFLOAT16_F32(x) bfloat_of_f32(x)
#define BFLOAT16_F64(x) bfloat_of_f32((float)(x))

/* From the middle types to integers: `end` is what lies one above the largest, and
 * `wide` a type that the processor converts to. */
#define DEFINE_CUT_OF(name, mid, mid_type, type, wide, least, most, end)               \
    static inline type name##_##mid(mid_type x)                                        \
    {                                                                                  \
        mid_type in = x >= (mid_type)(least) && x < (mid_type)(end) ? x : 0;           \
        type cut = (type)(wide)in;                                                     \
        cut = x >= (mid_type)(end) ? (most) : cut;                                     \
        return x < (mid_type)(least) ? (least) : cut;                                  \
    }
#define DEFINE_CUT(name, type, wide, least, most, end)                                 \
    DEFINE_CUT_OF(name, F32, float, type, wide, least, most, end)                      \
    DEFINE_CUT_OF(name, F64, double, type, wide, least, most, end)                     \
    static inline type name##_I64(int64_t x)                                           \
    {                                                                                  \
        return (type)x;                                                                \
    }
DEFINE_CUT(INT8, int8_t, int32_t, INT8_MIN, INT8_MAX, 0x1p7f)
DEFINE_CUT(UINT8, uint8_t, int32_t, 0, UINT8_MAX, 0x1p8f)
DEFINE_CUT(INT16, int16_t, int32_t, INT16_MIN, INT16_MAX, 0x1p15f)
DEFINE_CUT(UINT16, uint16_t, int32_t, 0, UINT16_MAX, 0x1p16f)
DEFINE_CUT(INT32, int32_t, int32_t, INT32_MIN, INT32_MAX, 0x1p31f)
DEFINE_CUT(UINT32, uint32_t, int64_t, 0, UINT32_MAX, 0x1p32f)
DEFINE_CUT(INT64, int64_t, int64_t, INT64_MIN, INT64_MAX, 0x1p63f)
DEFINE_CUT(UINT64, uint64_t, uint64_t, 0, UINT64_MAX, 0x1p64f)
#undef DEFINE_CUT
#undef DEFINE_CUT_OF

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

#define ALL_STEPS(X, isa)                                                              \
    CM_NUMBERS(X, isa, F32, float)                                                     \
    CM_NUMBERS(X, isa, F64, double)                                                    \
    CM_INTEGERS(X, isa, I64, int64_t)

typedef enum middle { F32, F64, I64, MIDDLE_COUNT } middle;

/* To the middle type and from it, by type; NULL: it goes another way. */
typedef struct step_table {
    convert_step load[MIDDLE_COUNT][CM_NUMBER_COUNT];
    convert_step store[MIDDLE_COUNT][CM_NUMBER_COUNT];
    void (*scale[2])(char *values, const cm_convert *convert, int64_t count);
} step_table;

#define DEFINE_BOTH(name, text, type, read_as, isa, mid, mid_type)                     \
    DEFINE_STEP(isa, load_##mid##_##name, type, mid_type, mid##_##read_as)             \
    DEFINE_STEP(isa, store_##mid##_##name, mid_type, type, name##_##mid)
#define STEP_ENTRIES(name, text, type, read_as, isa, mid, mid_type)                    \
    .load[mid][CM_##name] = load_##mid##_##name##_##isa,                               \
    .store[mid][CM_##name] = store_##mid##_##name##_##isa,
/* Product and sum round one by one, as NumPy's do. */
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
#define DEFINE_ALL(isa)                                                                \
    ALL_STEPS(DEFINE_BOTH, isa)                                                        \
    DEFINE_SCALE(isa, F32, float)                                                      \
    DEFINE_SCALE(isa, F64, double)                                                     \
    static const step_table steps_##isa = {                                            \
        ALL_STEPS(STEP_ENTRIES, isa).scale = {scale_F32_##isa, scale_F64_##isa}};

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
/* A thread may flush subnormals to zero, and hands that on to those that it starts.
 * Setting takes longer than some conversions. */

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

typedef struct number_row {
    const char *text;
    int64_t nbytes;
} number_row;

static const number_row numbers[CM_NUMBER_COUNT] = {
#define NUMBER_ROW(name, text, type, ...) [CM_##name] = {text, sizeof(type)},
    CM_NUMBERS(NUMBER_ROW)
#undef NUMBER_ROW
};

const char *
cm_number_text(cm_number number)
{
    return numbers[number].text;
}

uint64_t
cm_number_nbytes(cm_number number)
{
    return (uint64_t)numbers[number].nbytes;
}

cm_number
cm_number_find(const char *text)
{
    cm_number found = CM_NUMBER_COUNT - 1;
    while (found != CM_NUMBER_NONE && strcmp(numbers[found].text, text) != 0) {
        found--;
    }
    return found;
}

bool
cm_convert_widens(const cm_convert *convert)
{
    bool is_float = convert->from >= CM_FLOAT16;
    bool is_finite =
        fabs(convert->scale) <= FLT_MAX && fabs(convert->offset) <= FLT_MAX;
    return convert->to == CM_FLOAT32 && convert->from != CM_NUMBER_NONE
           && numbers[convert->from].nbytes < (int64_t)sizeof(float)
           && (!convert->scales || (is_finite && !is_float));
}

/* The one that rounds as NumPy does: integers once, halves by way of float32. */
static middle
choose_middle(const cm_convert *convert)
{
    if (convert->from == CM_FLOAT64 || convert->to == CM_FLOAT64) {
        return F64;
    }
    bool between_integers = convert->from < CM_FLOAT16 && convert->to < CM_FLOAT16;
    return between_integers && !convert->scales ? I64 : F32;
}

void
cm_convert_run(const cm_convert *convert, void *dst, int64_t dst_step, const void *src,
               int64_t src_step, int64_t count)
{
    static const cm_number own[MIDDLE_COUNT] = {CM_FLOAT32, CM_FLOAT64, CM_INT64};
    char room[BLOCK * sizeof(double)];
    const step_table *steps = choose_steps();
    middle mid = choose_middle(convert);
    int64_t mid_nbytes = numbers[own[mid]].nbytes;
    convert_step load = steps->load[mid][convert->from];
    convert_step store = steps->store[mid][convert->to];
    bool is_loaded =
        convert->from == own[mid] && src_step == mid_nbytes && !convert->scales;
    bool is_stored = convert->to == own[mid] && dst_step == mid_nbytes;
    const char *from = src;
    char *to = dst;
    uint64_t mode = get_mode();
    if (mode != USUAL_MODE) {
        set_mode(USUAL_MODE);
    }
    if (is_loaded) {
        store(to, dst_step, from, src_step, count);
        count = 0;
    }
    while (count > 0) {
        int64_t now = count < BLOCK ? count : BLOCK;
        char *values = is_stored ? to : room;
        load(values, mid_nbytes, from, src_step, now);
        if (convert->scales) {
            steps->scale[mid](values, convert, now);
        }
        if (!is_stored) {
            store(to, dst_step, values, mid_nbytes, now);
        }
        from += now * src_step;
        to += now * dst_step;
        count -= now;
    }
    if (mode != USUAL_MODE) {
        set_mode(mode);
    }
}
