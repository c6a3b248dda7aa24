/* SPDX-License-Identifier: Apache-2.0 */
#include "base/pick_copy.h"

#include <stdlib.h>
#include <string.h>

/* How far ahead memory is asked for: what the processor asks for by itself ends with
 * the page, and reaches less far the more instructions a line of memory takes. */
enum { AHEAD_NBYTES = 1024, LINE_STEP = 64, VECTOR_NBYTES = CM_PICK_VECTOR_NBYTES };

#if defined(__x86_64__)
#    include <immintrin.h>
#    define PICK_TARGET __attribute__((target("ssse3")))

typedef __m128i vector;

static bool
is_able(void)
{
    return __builtin_cpu_supports("ssse3") != 0;
}

PICK_TARGET static inline vector
load(const char *from)
{
    return _mm_loadu_si128((const __m128i *)(const void *)from);
}

PICK_TARGET static inline vector
pick_bytes(vector bytes, vector mask)
{
    return _mm_shuffle_epi8(bytes, mask);
}

PICK_TARGET static inline vector
join(vector a, vector b)
{
    return _mm_or_si128(a, b);
}

PICK_TARGET static inline void
store(char *to, vector bytes)
{
    _mm_storeu_si128((__m128i *)(void *)to, bytes);
}

#elif defined(__aarch64__)
#    include <arm_neon.h>
#    define PICK_TARGET

typedef uint8x16_t vector;

static bool
is_able(void)
{
    return true;
}

static inline vector
load(const char *from)
{
    return vld1q_u8((const uint8_t *)from);
}

static inline vector
pick_bytes(vector bytes, vector mask)
{
    return vqtbl1q_u8(bytes, mask);
}

static inline vector
join(vector a, vector b)
{
    return vorrq_u8(a, b);
}

static inline void
store(char *to, vector bytes)
{
    vst1q_u8((uint8_t *)to, bytes);
}

#endif

#ifdef PICK_TARGET

/* With a constant number of loads the masks stay in registers. */
#    define DEFINE_PICK(loads)                                                         \
        PICK_TARGET static void pick_##loads(const cm_pick *pick, char *to,            \
                                             const char *from, int64_t count)          \
        {                                                                              \
            vector masks[loads];                                                       \
            int64_t far = pick->step < 0 ? -AHEAD_NBYTES : AHEAD_NBYTES;               \
            int64_t from_step = pick->step * pick->item_count;                         \
            int64_t to_step = pick->itemsize * pick->item_count;                       \
            for (int i = 0; i < (loads); i++) {                                        \
                masks[i] = load((const char *)pick->masks[i]);                         \
            }                                                                          \
            for (int64_t k = 0; k < count; k++) {                                      \
                vector all = pick_bytes(load(from), masks[0]);                         \
                for (int i = 1; i < (loads); i++) {                                    \
                    const char *next = from + (ptrdiff_t)i * VECTOR_NBYTES;            \
                    all = join(all, pick_bytes(load(next), masks[i]));                 \
                }                                                                      \
                for (int i = 0; i < (loads) * VECTOR_NBYTES; i += LINE_STEP) {         \
                    __builtin_prefetch(from + far + i);                                \
                }                                                                      \
                store(to, all);                                                        \
                from += from_step;                                                     \
                to += to_step;                                                         \
            }                                                                          \
        }
DEFINE_PICK(1)
DEFINE_PICK(2)
DEFINE_PICK(3)
DEFINE_PICK(4)
DEFINE_PICK(5)
DEFINE_PICK(6)
DEFINE_PICK(7)
DEFINE_PICK(8)
#    undef DEFINE_PICK

static void
pick_vectors(const cm_pick *pick, char *to, const char *from, int64_t count)
{
    static void (*const picks[])(const cm_pick *, char *, const char *, int64_t) = {
        pick_1, pick_2, pick_3, pick_4, pick_5, pick_6, pick_7, pick_8,
    };
    picks[pick->task_count - 1](pick, to, from, count);
}

#else

static bool
is_able(void)
{
    return false;
}

static void
pick_vectors(const cm_pick *pick, char *to, const char *from, int64_t count)
{
    (void)pick;
    (void)to;
    (void)from;
    (void)count;
}

#endif

bool
cm_pick_init(cm_pick *pick, size_t itemsize, int64_t step)
{
    int64_t most = CM_PICK_MAX_LOADS * VECTOR_NBYTES;
    if (itemsize == 0 || itemsize > VECTOR_NBYTES / 2 || step > most || step < -most
        || !is_able()) {
        return false;
    }
    int64_t size = (int64_t)itemsize;
    int64_t distance = llabs(step);
    int64_t items = VECTOR_NBYTES / size;
    int64_t span = (items - 1) * distance + size;
    int64_t loads = (span + VECTOR_NBYTES - 1) / VECTOR_NBYTES;
    /* With more vectors to read than elements to gain, one by one is as quick. */
    if (distance < size || loads > CM_PICK_MAX_LOADS || loads > items) {
        return false;
    }
    pick->task_count = (int)loads;
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
    int64_t distance = llabs(pick->step);
    /* Each vector is read and written whole, and must lie within the elements. */
    int64_t readable = (count - 1) * distance + pick->itemsize
                       - (int64_t)pick->task_count * VECTOR_NBYTES;
    int64_t writable = count * pick->itemsize - VECTOR_NBYTES;
    if (readable < 0 || writable < 0) {
        return 0;
    }
    int64_t reads = readable / (distance * pick->item_count) + 1;
    int64_t writes = writable / (pick->itemsize * pick->item_count) + 1;
    int64_t vectors = reads < writes ? reads : writes;
    pick_vectors(pick, dst, (const char *)src + pick->lead, vectors);
    return vectors * pick->item_count;
}
