/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/rows/kernel_numbers.h"

#include "base/row_numbers.h"
#include "transfer/rows/row_marks.h"

/* -- writing ------------------------------------------------------------------------ */

/* The loops of base/row_numbers.h read only signed integers of 4 or 8 bytes that lie
 * one behind the other. All other integers are first widened to 8 bytes. BLOCK integers
 * are widened at a time, so that the widened ones stay in the nearest cache. */
enum { BLOCK = 256 };

/* True if a loop of base/row_numbers.h can read the integers and write them as numbers
 * of `to_nbytes` bytes. */
static bool
are_numbers(cm_integers from, uint32_t to_nbytes)
{
    bool is_narrow = from.nbytes == sizeof(int32_t) && to_nbytes == sizeof(int32_t);
    return from.is_signed && from.stride == from.nbytes
           && (is_narrow || from.nbytes == sizeof(int64_t));
}

/* Write integers for which are_numbers() is false. */
static void
write_others(const cm_kernel_numbers *self, cm_integers from, int64_t row_count,
             cm_numbers_seen *seen)
{
    int64_t room[BLOCK];
    char *to = self->at;
    const char *first = from.first;
    for (uint64_t at = 0; at < self->count && !seen->has_outside; at += BLOCK) {
        uint64_t left = self->count - at;
        uint64_t count = left < BLOCK ? left : BLOCK;
        from.first = first + (int64_t)at * from.stride;
        cm_integers_read(from, count, room);
        cm_numbers_write_64(room, to + at * self->nbytes, self->nbytes, count,
                            row_count, seen);
    }
}

bool
cm_kernel_numbers_write(cm_kernel_numbers *self, cm_integers from, int64_t row_count)
{
    cm_numbers_seen seen = {.has_outside = false};
    if (!are_numbers(from, self->nbytes)) {
        write_others(self, from, row_count, &seen);
    }
    else if (from.nbytes == sizeof(int32_t)) {
        cm_numbers_write_32(from.first, self->at, self->count, row_count, &seen);
    }
    else {
        cm_numbers_write_64(from.first, self->at, self->nbytes, self->count, row_count,
                            &seen);
    }
    self->has_negative = seen.has_negative;
    return !seen.has_outside;
}

/* -- rows that are named twice ------------------------------------------------------ */

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
    return cm_numbers_rise_32(self->at, self->count);
}

/* Mark the row of each number. Returns true if one of these rows was marked already. */
static bool
mark_all(cm_row_marks *marks, const cm_kernel_numbers *self, int64_t row_count)
{
    bool was_marked = false;
    if (marks->slot_mask == 0 && self->at != NULL && self->nbytes == sizeof(int32_t)
        && !self->has_negative) {
        return cm_numbers_mark_32(marks->words, self->at, self->count);
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
    if (self->at == NULL) {
        *step = 1;
        return true;
    }
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
        /* With a row count of 0, cm_kernel_numbers_at() returns negative numbers as
         * they are. That is enough, because the negative numbers of two neighbouring
         * rows also differ by 1. */
        int64_t to = cm_kernel_numbers_at(dst, i, 0);
        int64_t from = cm_kernel_numbers_at(src, i, 0);
        bool follows = to - cm_kernel_numbers_at(dst, i - 1, 0) == 1
                       && from - cm_kernel_numbers_at(src, i - 1, 0) == 1;
        runs += follows ? 0 : 1;
    }
    return runs;
}
