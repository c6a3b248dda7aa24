/* SPDX-License-Identifier: Apache-2.0 */
/* Implements simd_copy.h with the vector instructions of x86-64 and aarch64. */
#include "base/simd_copy.h"

#include <stdlib.h>
#include <string.h>

enum { LINE_NBYTES = 64, VECTOR_NBYTES = CM_PICK_VECTOR_NBYTES };

/* -- what each processor has ---------------------------------------------------------------- */

#if defined(__x86_64__)
#    include <immintrin.h>
#    define PICK_TARGET __attribute__((target("ssse3")))

typedef __m128i vector;

PICK_TARGET static inline vector
pick_bytes(vector bytes, vector mask)
{
    return _mm_shuffle_epi8(bytes, mask);
}

static bool
can_pick(void)
{
    return __builtin_cpu_supports("ssse3") != 0;
}

/* Take elements alternately from two vectors, from their lower halves if `low` is true,
 * else from their upper halves. */
#    define ZIP_1(a, b, low) ((low) ? _mm_unpacklo_epi8(a, b) : _mm_unpackhi_epi8(a, b))
#    define ZIP_2(a, b, low)                                                           \
        ((low) ? _mm_unpacklo_epi16(a, b) : _mm_unpackhi_epi16(a, b))
#    define ZIP_4(a, b, low)                                                           \
        ((low) ? _mm_unpacklo_epi32(a, b) : _mm_unpackhi_epi32(a, b))
#    define ZIP_8(a, b, low)                                                           \
        ((low) ? _mm_unpacklo_epi64(a, b) : _mm_unpackhi_epi64(a, b))

#    define DEFINE_LINES(isa, type, load, stream)                                      \
        __attribute__((target(#isa))) static void copy_lines_##isa(                    \
            char *dst, const char *src, size_t line_count)                             \
        {                                                                              \
            enum { COUNT = LINE_NBYTES / sizeof(type) };                               \
            const type *from = (const type *)(const void *)src;                        \
            type *to = (type *)(void *)dst;                                            \
            for (size_t i = 0; i < line_count; i++, from += COUNT, to += COUNT) {      \
                type line[COUNT];                                                      \
                _Pragma("GCC unroll 4") for (int k = 0; k < COUNT; k++)                \
                {                                                                      \
                    line[k] = load(from + k);                                          \
                }                                                                      \
                _Pragma("GCC unroll 4") for (int k = 0; k < COUNT; k++)                \
                {                                                                      \
                    stream(to + k, line[k]);                                           \
                }                                                                      \
            }                                                                          \
        }
DEFINE_LINES(avx512f, __m512i, _mm512_loadu_si512, _mm512_stream_si512)
DEFINE_LINES(avx2, __m256i, _mm256_loadu_si256, _mm256_stream_si256)
DEFINE_LINES(sse2, __m128i, _mm_loadu_si128, _mm_stream_si128)
#    undef DEFINE_LINES

cm_copy_lines
cm_wide_choose_lines(void)
{
    if (__builtin_cpu_supports("avx512f")) {
        return copy_lines_avx512f;
    }
    if (__builtin_cpu_supports("avx2")) {
        return copy_lines_avx2;
    }
    return copy_lines_sse2;
}

void
cm_wide_fence(void)
{
    _mm_sfence();
}

#elif defined(__aarch64__)
#    include <arm_neon.h>
#    define PICK_TARGET

typedef uint8x16_t vector;

static inline vector
pick_bytes(vector bytes, vector mask)
{
    return vqtbl1q_u8(bytes, mask);
}

static bool
can_pick(void)
{
    return true;
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

static void
copy_lines_neon(char *dst, const char *src, size_t line_count)
{
    for (size_t i = 0; i < line_count; i++) {
        __asm__ volatile("ldp q0, q1, [%0]\n\t"
                         "ldp q2, q3, [%0, #32]\n\t"
                         "stnp q0, q1, [%1]\n\t"
                         "stnp q2, q3, [%1, #32]\n\t"
                         :
                         : "r"(src), "r"(dst)
                         : "v0", "v1", "v2", "v3", "memory");
        dst += LINE_NBYTES;
        src += LINE_NBYTES;
    }
}

cm_copy_lines
cm_wide_choose_lines(void)
{
    return copy_lines_neon;
}

void
cm_wide_fence(void)
{
    __asm__ volatile("dmb ishst" ::: "memory");
}

#else
#    error "cumem needs x86-64 or aarch64, as CUDA does"
#endif

/* -- long runs ------------------------------------------------------------------------------ */

void
cm_wide_copy(void *dst, const void *src, size_t nbytes)
{
    char *to = dst;
    const char *from = src;
    size_t head = (size_t)(-(uintptr_t)to) % LINE_NBYTES;
    if (nbytes < head + LINE_NBYTES) {
        memcpy(to, from, nbytes);
        return;
    }
    memcpy(to, from, head);
    size_t line_count = (nbytes - head) / LINE_NBYTES;
    cm_wide_choose_lines()(to + head, from + head, line_count);
    cm_wide_fence();
    size_t done = head + line_count * LINE_NBYTES;
    memcpy(to + done, from + done, nbytes - done);
}

/* -- elements apart, rows into columns ------------------------------------------------------- */

static inline vector
load(const void *from)
{
    vector bytes;
    memcpy(&bytes, from, sizeof(bytes));
    return bytes;
}

static inline void
store(char *to, vector bytes)
{
    memcpy(to, &bytes, sizeof(bytes));
}

/* How far ahead memory is prefetched. The processor prefetches by itself, too, but not
 * beyond the end of a page. It also prefetches less far ahead if the code runs many
 * instructions for each cache line. */
enum { AHEAD_NBYTES = 1024 };

/* The number of loads is a constant, so that the masks stay in registers. */
#define DEFINE_PICK(loads)                                                             \
    PICK_TARGET static void pick_##loads(const cm_pick *pick, char *to,                \
                                         const char *from, int64_t count)              \
    {                                                                                  \
        vector masks[loads];                                                           \
        int64_t far = pick->step < 0 ? -AHEAD_NBYTES : AHEAD_NBYTES;                   \
        int64_t from_step = pick->step * pick->item_count;                             \
        int64_t to_step = pick->itemsize * pick->item_count;                           \
        for (int i = 0; i < (loads); i++) {                                            \
            masks[i] = load(pick->masks[i]);                                           \
        }                                                                              \
        for (int64_t k = 0; k < count; k++) {                                          \
            vector all = pick_bytes(load(from), masks[0]);                             \
            for (int i = 1; i < (loads); i++) {                                        \
                const char *next = from + (ptrdiff_t)i * VECTOR_NBYTES;                \
                all |= pick_bytes(load(next), masks[i]);                               \
            }                                                                          \
            for (int i = 0; i < (loads) * VECTOR_NBYTES; i += LINE_NBYTES) {           \
                __builtin_prefetch(from + far + i);                                    \
            }                                                                          \
            store(to, all);                                                            \
            from += from_step;                                                         \
            to += to_step;                                                             \
        }                                                                              \
    }
DEFINE_PICK(1)
DEFINE_PICK(2)
DEFINE_PICK(3)
DEFINE_PICK(4)
DEFINE_PICK(5)
DEFINE_PICK(6)
DEFINE_PICK(7)
DEFINE_PICK(8)
#undef DEFINE_PICK

/* Transpose squares of as many rows as a vector has elements (SIDE, a power of two). In
 * each turn row i is zipped with row i + HALF, and the results become two neighbouring
 * rows, 2i and the next. So an element's row number and its index in the row are both
 * shifted left by one bit, and the highest bit of each becomes the lowest bit of the
 * other. After log2(SIDE) turns all bits have changed sides: the row number is the old
 * index, and the index the old row number. Example of 2 rows: (a b), (c d) become (a
 * c), (b d) in one turn. */
#define DEFINE_TRANSPOSE(size)                                                         \
    static void transpose_##size(char *dst, int64_t stride, const char *src)           \
    {                                                                                  \
        enum { SIDE = VECTOR_NBYTES / (size), HALF = SIDE / 2 };                       \
        for (int column = 0; column < CM_TRANSPOSE_ROW_NBYTES;                         \
             column += VECTOR_NBYTES) {                                                \
            for (int row = 0; row < CM_TRANSPOSE_ROWS; row += SIDE) {                  \
                vector rows[SIDE];                                                     \
                vector zipped[SIDE];                                                   \
                const char *from = src + row * CM_TRANSPOSE_ROW_NBYTES + column;       \
                char *to = dst + column / (size) * stride + row * (size);              \
                for (int i = 0; i < SIDE; i++) {                                       \
                    rows[i] = load(from + (ptrdiff_t)i * CM_TRANSPOSE_ROW_NBYTES);     \
                }                                                                      \
                for (int turn = 1; turn < SIDE; turn *= 2) {                           \
                    for (int i = 0; i < HALF; i++) {                                   \
                        zipped[2 * i] = ZIP_##size(rows[i], rows[i + HALF], true);     \
                        zipped[2 * i + 1] =                                            \
                            ZIP_##size(rows[i], rows[i + HALF], false);                \
                    }                                                                  \
                    for (int i = 0; i < SIDE; i++) {                                   \
                        rows[i] = zipped[i];                                           \
                    }                                                                  \
                }                                                                      \
                for (int i = 0; i < SIDE; i++) {                                       \
                    store(to + i * stride, rows[i]);                                   \
                }                                                                      \
            }                                                                          \
        }                                                                              \
    }
DEFINE_TRANSPOSE(1)
DEFINE_TRANSPOSE(2)
DEFINE_TRANSPOSE(4)
DEFINE_TRANSPOSE(8)
#undef DEFINE_TRANSPOSE

bool
cm_pick_init(cm_pick *pick, size_t itemsize, int64_t step)
{
    int64_t most = CM_PICK_MAX_LOADS * VECTOR_NBYTES;
    if (itemsize == 0 || itemsize > VECTOR_NBYTES / 2 || step > most || step < -most
        || !can_pick()) {
        return false;
    }
    int64_t size = (int64_t)itemsize;
    int64_t distance = llabs(step);
    int64_t items = VECTOR_NBYTES / size;
    int64_t span = (items - 1) * distance + size;
    int64_t loads = (span + VECTOR_NBYTES - 1) / VECTOR_NBYTES;
    /* If filling one vector with elements takes more loads than it has elements,
     * copying them one by one is as quick. */
    if (distance < size || loads > CM_PICK_MAX_LOADS || loads > items) {
        return false;
    }
    pick->load_count = (int)loads;
    pick->itemsize = size;
    pick->step = step;
    pick->item_count = items;
    pick->lead = step < 0 ? size - loads * VECTOR_NBYTES : 0;
    memset(pick->masks, 0x80, sizeof(pick->masks));
    for (int64_t i = 0; i < items * size; i++) {
        int64_t at = i / size * step + i % size - pick->lead;
        pick->masks[at / VECTOR_NBYTES][i] = (uint8_t)(at % VECTOR_NBYTES);
    }
    return true;
}

int64_t
cm_pick_copy(const cm_pick *pick, void *dst, const void *src, int64_t count)
{
    static void (*const picks[])(const cm_pick *, char *, const char *, int64_t) = {
        pick_1, pick_2, pick_3, pick_4, pick_5, pick_6, pick_7, pick_8,
    };
    int64_t distance = llabs(pick->step);
    /* Each vector is read and written as a whole, and must lie within the elements. */
    int64_t readable = (count - 1) * distance + pick->itemsize
                       - (int64_t)pick->load_count * VECTOR_NBYTES;
    int64_t writable = count * pick->itemsize - VECTOR_NBYTES;
    if (readable < 0 || writable < 0) {
        return 0;
    }
    int64_t reads = readable / (distance * pick->item_count) + 1;
    int64_t writes = writable / (pick->itemsize * pick->item_count) + 1;
    int64_t vectors = reads < writes ? reads : writes;
    picks[pick->load_count - 1](pick, dst, (const char *)src + pick->lead, vectors);
    return vectors * pick->item_count;
}

bool
cm_transpose(void *dst, int64_t stride, const void *src, size_t itemsize)
{
    static void (*const all[])(char *, int64_t, const char *) = {
        [1] = transpose_1, [2] = transpose_2, [4] = transpose_4, [8] = transpose_8};
    if (itemsize >= sizeof(all) / sizeof(all[0]) || all[itemsize] == NULL) {
        return false;
    }
    all[itemsize](dst, stride, src);
    return true;
}
