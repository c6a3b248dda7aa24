/* SPDX-License-Identifier: Apache-2.0 */
#include "base/numbered_copy.h"

#include <string.h>

#include "base/simd_copy.h"

enum {
    LINE_NBYTES = 64,
    /* Rows are prefetched this far ahead. A core can wait for about a dozen cache lines
     * at once, so prefetching more rows would gain nothing. */
    AHEAD_ROWS = 8,
    /* This many bytes of each such row are prefetched. The processor prefetches the
     * rest of a longer row by itself, once it sees that the row is read line by
     * line. */
    AHEAD_NBYTES = 512,
    WIDE_NBYTES = 4096, /* shorter rows are copied faster through the caches, unless
                           they consist of whole lines */
};

/* -- one row ------------------------------------------------------------------------ */

/* Each of these functions copies a constant number of bytes, so that the compiler emits
 * loads and stores rather than a call of memcpy(). */
#define DEFINE_COPY(size)                                                              \
    static inline void copy_##size(char *to, const char *from, size_t nbytes)          \
    {                                                                                  \
        (void)nbytes;                                                                  \
        memcpy(to, from, size);                                                        \
    }
DEFINE_COPY(4)
DEFINE_COPY(8)
DEFINE_COPY(16)
DEFINE_COPY(32)
DEFINE_COPY(64)
DEFINE_COPY(128)
#undef DEFINE_COPY

static inline void
copy_any(char *to, const char *from, size_t nbytes)
{
    memcpy(to, from, nbytes);
}

static inline void
copy_long(char *to, const char *from, size_t nbytes)
{
    cm_wide_copy(to, from, nbytes);
}

/* -- all rows ----------------------------------------------------------------------- */

static inline void
ask_for(const char *row, size_t nbytes)
{
    size_t length = nbytes < AHEAD_NBYTES ? nbytes : AHEAD_NBYTES;
    for (size_t at = 0; at < length; at += LINE_NBYTES) {
        __builtin_prefetch(row + at);
    }
}

/* Prefetch the row that is read AHEAD_ROWS after row `i`, if there is one. */
static inline void
ask_ahead(const cm_numbered_end *src, uint64_t i, uint64_t count, size_t nbytes)
{
    if (i + AHEAD_ROWS < count) {
        ask_for(cm_numbered_at(src, i + AHEAD_ROWS), nbytes);
    }
}

/* Prefetch the first rows, for which no call of ask_ahead() came early enough. */
static inline void
ask_for_first(const cm_numbered_end *src, uint64_t count, size_t nbytes)
{
    for (uint64_t i = 0; i < AHEAD_ROWS && i < count; i++) {
        ask_for(cm_numbered_at(src, i), nbytes);
    }
}

#define DEFINE_ROWS(name)                                                              \
    static void rows_##name(const cm_numbered_end *dst, const cm_numbered_end *src,    \
                            uint64_t count, size_t nbytes)                             \
    {                                                                                  \
        for (uint64_t i = 0; i < count; i++) {                                         \
            ask_ahead(src, i, count, nbytes);                                          \
            copy_##name(cm_numbered_at(dst, i), cm_numbered_at(src, i), nbytes);       \
        }                                                                              \
    }
DEFINE_ROWS(4)
DEFINE_ROWS(8)
DEFINE_ROWS(16)
DEFINE_ROWS(32)
DEFINE_ROWS(64)
DEFINE_ROWS(128)
DEFINE_ROWS(any)
DEFINE_ROWS(long)
#undef DEFINE_ROWS

/* Copy rows with stores that bypass the caches. Each row of the target begins and ends
 * at the edge of a cache line. */
static void
rows_of_lines(const cm_numbered_end *dst, const cm_numbered_end *src, uint64_t count,
              size_t nbytes)
{
    cm_copy_lines copy = cm_wide_choose_lines();
    for (uint64_t i = 0; i < count; i++) {
        ask_ahead(src, i, count, nbytes);
        copy(cm_numbered_at(dst, i), cm_numbered_at(src, i), nbytes / LINE_NBYTES);
    }
    cm_wide_fence();
}

typedef void (*copy_rows)(const cm_numbered_end *dst, const cm_numbered_end *src,
                          uint64_t count, size_t nbytes);

/* Return the function that copies such rows fastest. */
static copy_rows
choose(const cm_numbered_end *dst, size_t nbytes, bool wide)
{
    size_t edges = (size_t)(uintptr_t)dst->base | (size_t)dst->stride | nbytes;
    if (wide && edges % LINE_NBYTES == 0) {
        return rows_of_lines;
    }
    if (wide && nbytes >= WIDE_NBYTES) {
        return rows_long;
    }
    switch (nbytes) {
    case 4:
        return rows_4;
    case 8:
        return rows_8;
    case 16:
        return rows_16;
    case 32:
        return rows_32;
    case 64:
        return rows_64;
    case 128:
        return rows_128;
    default:
        return rows_any;
    }
}

void
cm_numbered_copy(const cm_numbered_end *dst, const cm_numbered_end *src, uint64_t count,
                 size_t nbytes, bool wide)
{
    ask_for_first(src, count, nbytes);
    choose(dst, nbytes, wide)(dst, src, count, nbytes);
}
