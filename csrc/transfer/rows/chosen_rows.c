/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/rows/chosen_rows.h"

#include <string.h>

#include "base/row_numbers.h"
#include "transfer/plan/shared_numbers.h"
#include "transfer/rows/row_marks.h"

cm_status
cm_chosen_rows_init(cm_chosen_rows *self, uint64_t count)
{
    uint64_t most = SIZE_MAX / sizeof(int64_t) - 1;
    *self = (cm_chosen_rows){.count = count, .row_count = -1};
    CM_TRY(cm_allocated(count <= most, UINT64_MAX));
    self->given = cm_shared_numbers_create(count);
    return cm_allocated(self->given != NULL, count * sizeof(int64_t));
}

void
cm_chosen_rows_init_all(cm_chosen_rows *self, uint64_t count)
{
    *self = (cm_chosen_rows){.count = count, .row_count = -1};
}

void
cm_chosen_rows_share(cm_chosen_rows *self, const cm_chosen_rows *with)
{
    *self = *with;
    (void)cm_shared_numbers_hold(self->given);
    (void)cm_shared_numbers_hold(self->rows);
}

void
cm_chosen_rows_fini(cm_chosen_rows *self)
{
    cm_shared_numbers_release(self->rows);
    cm_shared_numbers_release(self->given);
    *self = (cm_chosen_rows){.row_count = -1};
}

/* -- reading ------------------------------------------------------------------------ */

/* Copy integers of one type. They may lie at any address, so each is read by memcpy(),
 * which the compiler turns into one load. */
#define READ_ALL(type, limit)                                                          \
    for (uint64_t i = 0; i < count; i++) {                                             \
        type value;                                                                    \
        memcpy(&value, from.first + (int64_t)i * from.stride, sizeof(value));          \
        out[i] = limit(value);                                                         \
    }

#define AS_IT_IS(value) (value)
#define AT_MOST_63_BITS(value)                                                         \
    ((value) > (uint64_t)INT64_MAX ? INT64_MAX : (int64_t)(value))

void
cm_integers_read(cm_integers from, uint64_t count, int64_t *out)
{
    if (from.nbytes == sizeof(*out) && from.is_signed && from.stride == from.nbytes) {
        memcpy(out, from.first, (size_t)count * sizeof(*out));
        return;
    }
    switch (from.nbytes * 2 + from.is_signed) {
    case 3:
        READ_ALL(int8_t, AS_IT_IS);
        break;
    case 2:
        READ_ALL(uint8_t, AS_IT_IS);
        break;
    case 5:
        READ_ALL(int16_t, AS_IT_IS);
        break;
    case 4:
        READ_ALL(uint16_t, AS_IT_IS);
        break;
    case 9:
        READ_ALL(int32_t, AS_IT_IS);
        break;
    case 8:
        READ_ALL(uint32_t, AS_IT_IS);
        break;
    case 17:
        READ_ALL(int64_t, AS_IT_IS);
        break;
    default:
        READ_ALL(uint64_t, AT_MOST_63_BITS);
        break;
    }
}

void
cm_chosen_rows_read(cm_chosen_rows *self, cm_integers from)
{
    cm_integers_read(from, self->count, self->given);
    self->bound = 0;
}

/* -- checking ----------------------------------------------------------------------- */

/* Return whether the numbers rise strictly, in which case no row is named twice. */
static bool
do_rows_rise(const cm_chosen_rows *self)
{
    for (uint64_t i = 1; i < self->count; i++) {
        if (self->rows[i] <= self->rows[i - 1]) {
            return false;
        }
    }
    return true;
}

/* Write the row that each given number means to self->rows, which the caller has
 * allocated. A negative number is counted from the end of the array. Returns the
 * position of the first number that names no row, or `count`. */
static uint64_t
count_from_end(cm_chosen_rows *self, int64_t row_count)
{
    for (uint64_t i = 0; i < self->count; i++) {
        int64_t row = self->given[i];
        row += row < 0 ? row_count : 0;
        if (row < 0 || row >= row_count) {
            return i;
        }
        self->rows[i] = row;
    }
    return self->count;
}

/* Set self->rows. If some number is negative or names no row they are a new array, and
 * otherwise they are the given numbers themselves. Stores in *position the position of
 * the first number that names no row, or `count` if every number names one. */
static cm_status
find_rows(cm_chosen_rows *self, int64_t row_count, uint64_t *position)
{
    cm_numbers_seen seen = {.has_outside = false};
    *position = self->count;
    cm_shared_numbers_release(self->rows);
    self->rows = NULL;
    if (self->bound <= 0 || self->bound > row_count) {
        cm_numbers_look_64(self->given, self->count, row_count, &seen);
    }
    if (!seen.has_outside && !seen.has_negative) {
        self->rows = cm_shared_numbers_hold(self->given);
        return cm_ok();
    }
    self->rows = cm_shared_numbers_create(self->count);
    CM_TRY(cm_allocated(self->rows != NULL, self->count * sizeof(int64_t)));
    *position = count_from_end(self, row_count);
    return cm_ok();
}

/* Find the first number that names the same row as an earlier number does, and store it
 * in *fault. If there is none, *fault stays as it is. */
static cm_status
look_for_twice(cm_chosen_rows *self, int64_t row_count, cm_row_fault *fault)
{
    cm_row_marks marks;
    CM_TRY(cm_row_marks_init(&marks, (uint64_t)row_count, self->count));
    for (uint64_t i = 0; i < self->count; i++) {
        if (cm_row_marks_add(&marks, (uint64_t)self->rows[i])) {
            *fault = (cm_row_fault){CM_ROWS_TWICE, i, self->given[i]};
            break;
        }
    }
    cm_row_marks_fini(&marks);
    return cm_ok();
}

cm_status
cm_chosen_rows_settle(cm_chosen_rows *self, int64_t row_count, bool is_target,
                      cm_row_fault *fault)
{
    uint64_t position;
    *fault = (cm_row_fault){.kind = CM_ROWS_RIGHT};
    if (self->row_count == row_count) {
        return cm_ok();
    }
    if (self->given == NULL) {
        if (self->count > (uint64_t)row_count) {
            *fault = (cm_row_fault){CM_ROWS_OUTSIDE, (uint64_t)row_count, row_count};
            return cm_ok();
        }
        self->row_count = row_count;
        return cm_ok();
    }
    self->row_count = -1;
    CM_TRY(find_rows(self, row_count, &position));
    if (position < self->count) {
        *fault = (cm_row_fault){CM_ROWS_OUTSIDE, position, self->given[position]};
        return cm_ok();
    }
    if (is_target && !do_rows_rise(self)) {
        CM_TRY(look_for_twice(self, row_count, fault));
    }
    self->row_count = fault->kind == CM_ROWS_RIGHT ? row_count : -1;
    return cm_ok();
}
