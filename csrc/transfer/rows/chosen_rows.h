/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the numbers of the rows that a call copies from host memory of any integer
 * width, counts negative ones from the end, and checks them.
 *
 * Several arrays may share the numbers, and then a negative number means a different
 * row in each array that has a different number of rows. So the numbers are kept as
 * they were given, and settled for a number of rows before they are used. Arrays of
 * equal length, which are the usual case, settle them once.
 *
 * Everything is pure. There are no locks. */
#pragma once

#include <stddef.h>

#include "base/status.h"

typedef struct cm_chosen_rows {
    int64_t *given; /* held (shared_numbers.h); NULL if the numbers are 0, 1, … */
    /* Held. cm_chosen_rows_settle() sets these numbers, of which none is negative. They
     * are the same array as `given` if that has no negative number, and NULL if `given`
     * is NULL. */
    int64_t *rows;
    uint64_t count;
    int64_t row_count; /* how many rows the array has that `rows` are settled for, or -1
                          if they are not settled */
    int64_t bound;     /* every given number is in [0, bound); 0 if that is not known */
} cm_chosen_rows;

/* Integers somewhere in memory of the host. */
typedef struct cm_integers {
    const char *first;
    int64_t stride; /* in bytes */
    int nbytes;     /* the bytes of each integer: 1, 2, 4 or 8; integers may lie at any
                       address */
    bool is_signed;
} cm_integers;

/* Write `count` integers to `out`. A number that does not fit in 63 bits becomes the
 * largest that does. No array has a row of that number. */
void cm_integers_read(cm_integers from, uint64_t count, int64_t *out);

/* What can be wrong with row numbers. */
typedef enum cm_row_fault_kind {
    CM_ROWS_RIGHT,
    CM_ROWS_OUTSIDE, /* there is no such row */
    CM_ROWS_TWICE,   /* the row was named before */
} cm_row_fault_kind;
typedef struct cm_row_fault {
    cm_row_fault_kind kind;
    uint64_t position; /* its place among the numbers */
    int64_t number;    /* as it was given */
} cm_row_fault;

/* Make room for `count` numbers, which the caller writes to `given`.
 * Fails: CM_ENOMEM; cm_chosen_rows_fini() may still be called. */
CM_NODISCARD cm_status cm_chosen_rows_init(cm_chosen_rows *self, uint64_t count);
/* Make this the numbers 0, 1, …, which take no memory. */
void cm_chosen_rows_init_all(cm_chosen_rows *self, uint64_t count);
/* Make this share the numbers of `with` and the rows that they are settled for. Either
 * of the two may be settled anew without a change to the other. */
void cm_chosen_rows_share(cm_chosen_rows *self, const cm_chosen_rows *with);
void cm_chosen_rows_fini(cm_chosen_rows *self);

/* Write integers to `given`, as cm_integers_read() does. */
void cm_chosen_rows_read(cm_chosen_rows *self, cm_integers from);

/* Set `rows` for an array of `row_count` rows. With `is_target` no row may be named
 * twice. `fault` says what is wrong.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_chosen_rows_settle(cm_chosen_rows *self, int64_t row_count,
                                             bool is_target, cm_row_fault *fault);

/* Return the row that number `i` means. */
static inline int64_t
cm_chosen_rows_at(const cm_chosen_rows *self, uint64_t i)
{
    return self->rows == NULL ? (int64_t)i : self->rows[i];
}
