/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/rows/kernel_numbers.h"

#include <string.h>

#include "base/attributes.h"
#include "transfer/rows/row_marks.h"

/* In other files the compiler does not vectorize loops by itself (setup.py says
 * why). */
#if defined(__GNUC__) && !defined(__clang__)
#    pragma GCC optimize("tree-vectorize")
#endif

/* So many numbers are looked at together: enough to pay for the look at the outcome,
 * and few enough that they stay in the nearest cache. The compiler makes vectors of a
 * loop of a fixed length only. */
enum { BLOCK = 256 };

/* Integers as they lie in an array, which need not be aligned. */
typedef int32_t loose_int32 __attribute__((aligned(1), may_alias));
typedef int64_t loose_int64 __attribute__((aligned(1), may_alias));

/* -- writing ------------------------------------------------------------------------ */

/* What a loop over numbers finds, in the sign bits: whether any of them is outside, and
 * whether any is negative. A number v is in [-n, n) if n - 1 - v is not negative or,
 * for a negative v, n - 1 - ~v. Neither of these overflows. So there is no branch in
 * the loop. */
typedef struct found {
    uint64_t outside;
    uint64_t signs;
} found;

static CM_INLINE void
write_wide(const loose_int64 *from, int64_t *to, uint64_t count, uint64_t row_count,
           found *out)
{
    uint64_t outside = 0;
    uint64_t signs = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t number = (uint64_t)from[i];
        uint64_t row = number ^ (uint64_t)((int64_t)number >> 63);
        outside |= row_count - 1 - row;
        signs |= number;
        to[i] = (int64_t)number;
    }
    out->outside |= outside;
    out->signs |= signs;
}

static CM_INLINE void
write_narrowed(const loose_int64 *from, int32_t *to, uint64_t count, uint64_t row_count,
               found *out)
{
    uint64_t outside = 0;
    uint64_t signs = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t number = (uint64_t)from[i];
        uint64_t row = number ^ (uint64_t)((int64_t)number >> 63);
        outside |= row_count - 1 - row;
        signs |= number;
        to[i] = (int32_t)(uint32_t)number;
    }
    out->outside |= outside;
    out->signs |= signs;
}

/* The same for integers of 32 bits, whose sign bit is moved to that of `found`. */
static CM_INLINE void
write_narrow(const loose_int32 *from, int32_t *to, uint64_t count, uint32_t row_count,
             found *out)
{
    uint32_t outside = 0;
    uint32_t signs = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t number = (uint32_t)from[i];
        uint32_t row = number ^ (uint32_t)((int32_t)number >> 31);
        outside |= row_count - 1 - row;
        signs |= number;
        to[i] = (int32_t)number;
    }
    out->outside |= (uint64_t)outside << 32;
    out->signs |= (uint64_t)signs << 32;
}

/* Call one of these for a part of a block or, with a length that the compiler knows,
 * for all of it. */
#define WRITE(function, from, to, count, row_count, out)                               \
    do {                                                                               \
        if ((count) == BLOCK) {                                                        \
            function(from, to, BLOCK, row_count, out);                                 \
        }                                                                              \
        else {                                                                         \
            function(from, to, count, row_count, out);                                 \
        }                                                                              \
    } while (0)

/* Write a block of integers from position `at` on. */
static void
write_block(const cm_kernel_numbers *self, cm_integers from, uint64_t at,
            uint64_t count, int64_t row_count, found *out)
{
    int64_t room[BLOCK];
    bool is_narrow = self->nbytes == sizeof(int32_t);
    int32_t *narrow = (int32_t *)self->at + at;
    const char *first = from.first + (int64_t)at * from.stride;
    bool is_packed = from.is_signed && from.stride == from.nbytes;
    if (is_packed && is_narrow && from.nbytes == sizeof(int32_t)) {
        WRITE(write_narrow, (const loose_int32 *)first, narrow, count,
              (uint32_t)row_count, out);
        return;
    }
    const loose_int64 *numbers = (const loose_int64 *)first;
    if (!is_packed || from.nbytes != sizeof(int64_t)) {
        from.first = first;
        cm_integers_read(from, count, room);
        numbers = room;
    }
    if (is_narrow) {
        WRITE(write_narrowed, numbers, narrow, count, (uint64_t)row_count, out);
        return;
    }
    WRITE(write_wide, numbers, (int64_t *)self->at + at, count, (uint64_t)row_count,
          out);
}

bool
cm_kernel_numbers_write(cm_kernel_numbers *self, cm_integers from, int64_t row_count)
{
    found seen = {.outside = 0};
    for (uint64_t at = 0; at < self->count; at += BLOCK) {
        uint64_t left = self->count - at;
        write_block(self, from, at, left < BLOCK ? left : BLOCK, row_count, &seen);
        if (seen.outside >> 63 != 0) {
            return false;
        }
    }
    self->has_negative = seen.signs >> 63 != 0;
    return true;
}

/* -- rows that are named twice ------------------------------------------------------ */

/* The bit of the sign is set in the answer unless each number of the block, and the one
 * before it, rises. All are >= 0, so that no difference overflows. */
static CM_INLINE uint32_t
falls_narrow(const int32_t *numbers, uint64_t count)
{
    uint32_t falls = 0;
    for (uint64_t i = 0; i < count; i++) {
        falls |= (uint32_t)numbers[i] - (uint32_t)numbers[i - 1] - 1;
    }
    return falls;
}

/* True if each number is larger than the one before, and none is negative. */
static bool
do_rise(const cm_kernel_numbers *self)
{
    if (self->has_negative) {
        return false;
    }
    if (self->nbytes != sizeof(int32_t)) {
        const int64_t *wide = self->at;
        for (uint64_t i = 1; i < self->count; i++) {
            if (wide[i] <= wide[i - 1]) {
                return false;
            }
        }
        return true;
    }
    const int32_t *numbers = self->at;
    for (uint64_t at = 1; at < self->count; at += BLOCK) {
        uint64_t left = self->count - at;
        uint32_t falls = left < BLOCK ? falls_narrow(numbers + at, left)
                                      : falls_narrow(numbers + at, BLOCK);
        if (falls >> 31 != 0) {
            return false;
        }
    }
    return true;
}

/* Mark numbers of 4 bytes, of which none is negative, in a bitmap. Returns true if one
 * of them was marked before. This is the usual case, so it has a loop of its own, which
 * looks at the outcome only at the end. */
static bool
mark_in_bitmap(cm_row_marks *marks, const int32_t *numbers, uint64_t count)
{
    uint64_t was_marked = 0;
    uint64_t *words = marks->words;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t row = (uint32_t)numbers[i];
        uint64_t word = words[row / 64];
        was_marked |= word >> (row % 64);
        words[row / 64] = word | UINT64_C(1) << (row % 64);
    }
    return (was_marked & 1) != 0;
}

/* Mark all numbers. Returns true if one of them was marked before. */
static bool
mark_all(cm_row_marks *marks, const cm_kernel_numbers *self, int64_t row_count)
{
    bool was_marked = false;
    if (marks->slot_mask == 0 && self->at != NULL && self->nbytes == sizeof(int32_t)
        && !self->has_negative) {
        return mark_in_bitmap(marks, self->at, self->count);
    }
    for (uint64_t i = 0; i < self->count; i++) {
        uint64_t row = (uint64_t)cm_kernel_numbers_at(self, i, row_count);
        was_marked = cm_row_marks_add(marks, row) || was_marked;
    }
    return was_marked;
}

cm_status
cm_kernel_numbers_find_twice(const cm_kernel_numbers *self, int64_t row_count,
                             bool *out)
{
    cm_row_marks marks;
    *out = false;
    if (self->at == NULL || do_rise(self)) {
        return cm_ok();
    }
    CM_TRY(cm_row_marks_init(&marks, (uint64_t)row_count, self->count));
    *out = mark_all(&marks, self, row_count);
    cm_row_marks_fini(&marks);
    return cm_ok();
}

cm_status
cm_kernel_numbers_find_shared(const cm_kernel_numbers *a, const cm_kernel_numbers *b,
                              int64_t row_count, bool *out)
{
    cm_row_marks marks;
    *out = false;
    CM_TRY(cm_row_marks_init(&marks, (uint64_t)row_count, a->count));
    (void)mark_all(&marks, a, row_count);
    for (uint64_t i = 0; i < b->count && !*out; i++) {
        *out =
            cm_row_marks_has(&marks, (uint64_t)cm_kernel_numbers_at(b, i, row_count));
    }
    cm_row_marks_fini(&marks);
    return cm_ok();
}

/* -- neighbours --------------------------------------------------------------------- */

bool
cm_kernel_numbers_are_even(const cm_kernel_numbers *self, int64_t *step)
{
    int64_t before = cm_kernel_numbers_at(self, 0, 0);
    *step = cm_kernel_numbers_at(self, 1, 0) - before;
    bool are_even = *step > 0 && !self->has_negative;
    for (uint64_t i = 1; are_even && i < self->count; i++) {
        int64_t row = cm_kernel_numbers_at(self, i, 0);
        are_even = row - before == *step;
        before = row;
    }
    return are_even;
}

uint64_t
cm_kernel_numbers_count_runs(const cm_kernel_numbers *dst, const cm_kernel_numbers *src,
                             uint64_t most)
{
    uint64_t runs = dst->count > 0 ? 1 : 0;
    for (uint64_t i = 1; i < dst->count && runs <= most; i++) {
        /* A row count of 0 leaves negative numbers as they are, of which neighbours
         * differ by 1 as well. */
        int64_t to = cm_kernel_numbers_at(dst, i, 0);
        int64_t from = cm_kernel_numbers_at(src, i, 0);
        bool follows = to - cm_kernel_numbers_at(dst, i - 1, 0) == 1
                       && from - cm_kernel_numbers_at(src, i - 1, 0) == 1;
        runs += follows ? 0 : 1;
    }
    return runs;
}
