/* SPDX-License-Identifier: Apache-2.0 */
#include "base/wide_copy.h"

#include <stdint.h>
#include <string.h>

enum { LINE_NBYTES = 64 };

/* Whole cache lines from `src` to `dst`, which is aligned to one. */
typedef void (*copy_lines)(char *dst, const char *src, size_t line_count);

#if defined(__x86_64__)
#    include <immintrin.h>

__attribute__((target("avx512f"))) static void
copy_lines_avx512(char *dst, const char *src, size_t line_count)
{
    for (size_t i = 0; i < line_count; i++) {
        _mm512_stream_si512((__m512i *)(void *)dst, _mm512_loadu_si512(src));
        dst += LINE_NBYTES;
        src += LINE_NBYTES;
    }
    _mm_sfence();
}

__attribute__((target("avx2"))) static void
copy_lines_avx2(char *dst, const char *src, size_t line_count)
{
    for (size_t i = 0; i < line_count; i++) {
        const __m256i *from = (const __m256i *)(const void *)src;
        __m256i *to = (__m256i *)(void *)dst;
        __m256i low = _mm256_loadu_si256(from);
        __m256i high = _mm256_loadu_si256(from + 1);
        _mm256_stream_si256(to, low);
        _mm256_stream_si256(to + 1, high);
        dst += LINE_NBYTES;
        src += LINE_NBYTES;
    }
    _mm_sfence();
}

static void
copy_lines_sse2(char *dst, const char *src, size_t line_count)
{
    for (size_t i = 0; i < line_count; i++) {
        const __m128i *from = (const __m128i *)(const void *)src;
        __m128i *to = (__m128i *)(void *)dst;
        __m128i a = _mm_loadu_si128(from);
        __m128i b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2);
        __m128i d = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
        dst += LINE_NBYTES;
        src += LINE_NBYTES;
    }
    _mm_sfence();
}

static copy_lines
choose(const char **name)
{
    if (__builtin_cpu_supports("avx512f")) {
        *name = "avx512";
        return copy_lines_avx512;
    }
    if (__builtin_cpu_supports("avx2")) {
        *name = "avx2";
        return copy_lines_avx2;
    }
    *name = "sse2";
    return copy_lines_sse2;
}

#elif defined(__aarch64__)

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
    __asm__ volatile("dmb ishst" ::: "memory");
}

static copy_lines
choose(const char **name)
{
    *name = "neon";
    return copy_lines_neon;
}

#else

static void
copy_lines_plain(char *dst, const char *src, size_t line_count)
{
    memcpy(dst, src, line_count * LINE_NBYTES);
}

static copy_lines
choose(const char **name)
{
    *name = "memcpy";
    return copy_lines_plain;
}

#endif

const char *
cm_wide_copy_name(void)
{
    const char *name;
    (void)choose(&name);
    return name;
}

void
cm_wide_copy(void *dst, const void *src, size_t nbytes)
{
    const char *name;
    char *to = dst;
    const char *from = src;
    size_t head = (size_t)(-(uintptr_t)to) % LINE_NBYTES;
    if (nbytes < head + LINE_NBYTES) {
        memcpy(to, from, nbytes);
        return;
    }
    memcpy(to, from, head);
    size_t line_count = (nbytes - head) / LINE_NBYTES;
    choose (&name)(to + head, from + head, line_count);
    size_t done = head + line_count * LINE_NBYTES;
    memcpy(to + done, from + done, nbytes - done);
}
