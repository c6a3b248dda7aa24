/* SPDX-License-Identifier: Apache-2.0 */
#include "base/transpose.h"

#if defined(__x86_64__)
#    include <emmintrin.h>

typedef __m128i row_part;

static inline row_part
load(const char *from)
{
    return _mm_loadu_si128((const __m128i *)(const void *)from);
}

static inline void
store(char *to, row_part bytes)
{
    _mm_storeu_si128((__m128i *)(void *)to, bytes);
}

/* Elements of two vectors in turn: of their lower halves, of their upper ones. */
#    define ZIP_1(a, b, low) ((low) ? _mm_unpacklo_epi8(a, b) : _mm_unpackhi_epi8(a, b))
#    define ZIP_2(a, b, low)                                                           \
        ((low) ? _mm_unpacklo_epi16(a, b) : _mm_unpackhi_epi16(a, b))
#    define ZIP_4(a, b, low)                                                           \
        ((low) ? _mm_unpacklo_epi32(a, b) : _mm_unpackhi_epi32(a, b))
#    define ZIP_8(a, b, low)                                                           \
        ((low) ? _mm_unpacklo_epi64(a, b) : _mm_unpackhi_epi64(a, b))

#elif defined(__aarch64__)
#    include <arm_neon.h>

typedef uint8x16_t row_part;

static inline row_part
load(const char *from)
{
    return vld1q_u8((const uint8_t *)from);
}

static inline void
store(char *to, row_part bytes)
{
    vst1q_u8((uint8_t *)to, bytes);
}

#    define ZIP(a, b, low, type)                                                       \
        vreinterpretq_u8_##type((low) ? vzip1q_##type(vreinterpretq_##type##_u8(a),    \
                                                      vreinterpretq_##type##_u8(b))    \
                                      : vzip2q_##type(vreinterpretq_##type##_u8(a),    \
                                                      vreinterpretq_##type##_u8(b)))
#    define ZIP_1(a, b, low) ((low) ? vzip1q_u8(a, b) : vzip2q_u8(a, b))
#    define ZIP_2(a, b, low) ZIP(a, b, low, u16)
#    define ZIP_4(a, b, low) ZIP(a, b, low, u32)
#    define ZIP_8(a, b, low) ZIP(a, b, low, u64)
#endif

#ifdef ZIP_1

enum { ROW_PART_NBYTES = 16 };

/* Squares of as many rows as a vector has elements. Row i zipped with row i plus a half
 * of them, again and again, is a transposition: each turn moves one bit of an element's
 * row number to its place in the vector. */
#    define DEFINE_TRANSPOSE(size)                                                     \
        static void transpose_##size(char *dst, int64_t stride, const char *src)       \
        {                                                                              \
            enum { SIDE = ROW_PART_NBYTES / (size), HALF = SIDE / 2 };                 \
            for (int column = 0; column < CM_TRANSPOSE_ROW_NBYTES;                     \
                 column += ROW_PART_NBYTES) {                                          \
                for (int row = 0; row < CM_TRANSPOSE_ROWS; row += SIDE) {              \
                    row_part rows[SIDE];                                               \
                    row_part zipped[SIDE];                                             \
                    const char *from = src + row * CM_TRANSPOSE_ROW_NBYTES + column;   \
                    char *to = dst + column / (size) * stride + row * (size);          \
                    for (int i = 0; i < SIDE; i++) {                                   \
                        rows[i] = load(from + (ptrdiff_t)i * CM_TRANSPOSE_ROW_NBYTES); \
                    }                                                                  \
                    for (int turn = 1; turn < SIDE; turn *= 2) {                       \
                        for (int i = 0; i < HALF; i++) {                               \
                            zipped[2 * i] = ZIP_##size(rows[i], rows[i + HALF], true); \
                            zipped[2 * i + 1] =                                        \
                                ZIP_##size(rows[i], rows[i + HALF], false);            \
                        }                                                              \
                        for (int i = 0; i < SIDE; i++) {                               \
                            rows[i] = zipped[i];                                       \
                        }                                                              \
                    }                                                                  \
                    for (int i = 0; i < SIDE; i++) {                                   \
                        store(to + i * stride, rows[i]);                               \
                    }                                                                  \
                }                                                                      \
            }                                                                          \
        }
DEFINE_TRANSPOSE(1)
DEFINE_TRANSPOSE(2)
DEFINE_TRANSPOSE(4)
DEFINE_TRANSPOSE(8)
#    undef DEFINE_TRANSPOSE

bool
cm_transpose(void *dst, int64_t stride, const void *src, size_t itemsize)
{
    switch (itemsize) {
    case 1:
        transpose_1(dst, stride, src);
        return true;
    case 2:
        transpose_2(dst, stride, src);
        return true;
    case 4:
        transpose_4(dst, stride, src);
        return true;
    case 8:
        transpose_8(dst, stride, src);
        return true;
    default:
        return false;
    }
}

#else

bool
cm_transpose(void *dst, int64_t stride, const void *src, size_t itemsize)
{
    (void)dst;
    (void)stride;
    (void)src;
    (void)itemsize;
    return false;
}

#endif
