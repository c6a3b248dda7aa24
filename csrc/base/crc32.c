/* SPDX-License-Identifier: Apache-2.0 */
/* Implements crc32.h by polynomial division, eight bytes at a time or by vector
 * instructions. Polynomials are stored as in zlib: the bit of value 1 << 31 is the
 * coefficient of x to the power of 0, and the bit of value 1 is that of x to the power
 * of 31. */
#include "base/crc32.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#    include <immintrin.h>
#endif

enum {
    WORD_NBYTES = 8,
    VALUE_COUNT = 256,
    BYTE_MASK = VALUE_COUNT - 1,
    LONG_NBYTES = 4096, /* tables cost more than they save for shorter messages */
};

static const uint32_t divisor = UINT32_C(0xEDB88320);

/* -- polynomials ---------------------------------------------------------------------- */

static uint32_t
times_x(uint32_t a)
{
    return (a & 1) != 0 ? (a >> 1) ^ divisor : a >> 1;
}

/* Multiply two polynomials and return the remainder. */
static uint32_t
multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = UINT32_C(1) << 31; bit != 0; bit >>= 1) {
        product ^= (a & bit) != 0 ? b : 0;
        b = times_x(b);
    }
    return product;
}

/* Return the remainder of a polynomial to which `nbytes` zero bytes are appended. */
static uint32_t
append_zeros(uint32_t a, uint64_t nbytes)
{
    uint32_t power = UINT32_C(1) << 23; /* x to the power of 8, for one byte */
    for (; nbytes > 0; nbytes >>= 1) {
        a = (nbytes & 1) != 0 ? multiply(power, a) : a;
        power = multiply(power, power);
    }
    return a;
}

/* -- any processor -------------------------------------------------------------------- */

/* of[k][v] is the remainder of a byte of value v with k zero bytes behind it. */
typedef struct table {
    uint32_t of[WORD_NBYTES][VALUE_COUNT];
} table;

/* Fill the table. Each entry follows from the one with one zero byte less. */
static void
make_table(table *out)
{
    for (uint32_t value = 0; value < VALUE_COUNT; value++) {
        uint32_t a = value;
        for (int bit = 0; bit < 8; bit++) {
            a = times_x(a);
        }
        out->of[0][value] = a;
    }
    for (int k = 1; k < WORD_NBYTES; k++) {
        for (size_t value = 0; value < VALUE_COUNT; value++) {
            uint32_t before = out->of[k - 1][value];
            out->of[k][value] = (before >> 8) ^ out->of[0][before & BYTE_MASK];
        }
    }
}

/* Divide bit by bit. `a` is the remainder of the bytes before `bytes`, and the result
 * is the remainder of those and of the next `nbytes` together. */
static uint32_t
divide(uint32_t a, const unsigned char *bytes, size_t nbytes)
{
    for (size_t i = 0; i < nbytes; i++) {
        a ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) {
            a = times_x(a);
        }
    }
    return a;
}

/* Return the remainder of a long message, dividing eight bytes at a time. Each call
 * makes the table anew, which takes microseconds, so that no table has to be shared by
 * threads. */
static uint32_t
divide_words(const unsigned char *bytes, size_t nbytes)
{
    table made;
    uint32_t a = 0;
    make_table(&made);
    for (; nbytes >= WORD_NBYTES; nbytes -= WORD_NBYTES, bytes += WORD_NBYTES) {
        uint64_t word;
        memcpy(&word, bytes, sizeof(word));
        word ^= a;
        a = 0;
        _Pragma("GCC unroll 8") for (int k = WORD_NBYTES - 1; k >= 0; k--)
        {
            a ^= made.of[k][word & BYTE_MASK];
            word >>= 8;
        }
    }
    return divide(a, bytes, nbytes);
}

/* -- x86-64 --------------------------------------------------------------------------- */

#if defined(__x86_64__)
#    define FOLD_TARGET __attribute__((target("pclmul,sse4.1")))

enum { VECTOR_NBYTES = sizeof(__m128i), LANE_COUNT = 4 };

static bool
can_fold(void)
{
    return __builtin_cpu_supports("pclmul") != 0;
}

FOLD_TARGET static inline __m128i
load(const unsigned char *bytes)
{
    return _mm_loadu_si128((const __m128i *)(const void *)bytes);
}

/* Move a vector some bytes further on in the message, and add it to the vector that is
 * `there`. `powers` has the remainders by which the two halves of `a` are multiplied.
 * The sum of the two products has the same remainder as `a` with that many zero bytes
 * behind it. */
FOLD_TARGET static inline __m128i
fold(__m128i a, __m128i powers, __m128i there)
{
    __m128i low = _mm_clmulepi64_si128(a, powers, 0x00);
    __m128i high = _mm_clmulepi64_si128(a, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

/* Return the remainder of at least LANE_COUNT vectors of bytes. Four vectors are folded
 * at the same time, since a multiplication takes longer than the time until the next
 * one can begin. The powers are those of "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction" (Intel, 2009). */
FOLD_TARGET static uint32_t
divide_by_folding(const unsigned char *bytes, size_t nbytes)
{
    enum { LANES_NBYTES = LANE_COUNT * VECTOR_NBYTES };
    const __m128i far = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);  /* 64 bytes */
    const __m128i near = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0); /* 16 bytes */
    __m128i lanes[LANE_COUNT];
    for (int i = 0; i < LANE_COUNT; i++, bytes += VECTOR_NBYTES) {
        lanes[i] = load(bytes);
    }
    nbytes -= LANES_NBYTES;
    for (; nbytes >= LANES_NBYTES; nbytes -= LANES_NBYTES) {
        for (int i = 0; i < LANE_COUNT; i++, bytes += VECTOR_NBYTES) {
            lanes[i] = fold(lanes[i], far, load(bytes));
        }
    }
    __m128i all = lanes[0];
    for (int i = 1; i < LANE_COUNT; i++) {
        all = fold(all, near, lanes[i]);
    }
    for (; nbytes >= VECTOR_NBYTES; nbytes -= VECTOR_NBYTES, bytes += VECTOR_NBYTES) {
        all = fold(all, near, load(bytes));
    }
    unsigned char folded[VECTOR_NBYTES];
    memcpy(folded, &all, sizeof(folded));
    return divide(divide(0, folded, sizeof(folded)), bytes, nbytes);
}
#endif

static uint32_t
remainder_of(const unsigned char *bytes, size_t nbytes)
{
#if defined(__x86_64__)
    if (nbytes >= (size_t)LANE_COUNT * VECTOR_NBYTES && can_fold()) {
        return divide_by_folding(bytes, nbytes);
    }
#endif
    return nbytes >= LONG_NBYTES ? divide_words(bytes, nbytes)
                                 : divide(0, bytes, nbytes);
}

/* -- the functions -------------------------------------------------------------------- */

uint32_t
cm_crc32_of_zeros(uint64_t nbytes)
{
    return ~append_zeros(UINT32_MAX, nbytes);
}

uint32_t
cm_crc32_of_part(const void *part, uint64_t nbytes, uint64_t nbytes_behind)
{
    return append_zeros(remainder_of(part, (size_t)nbytes), nbytes_behind);
}
