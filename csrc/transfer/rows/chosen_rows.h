/* SPDX-License-Identifier: Apache-2.0 */
/* Keeps the numbers of the rows that a call copies. The functions read the numbers from
 * an array of integers of any width, turn negative numbers, which count from the end,
 * into the rows that they mean, and check that these rows exist.
 *
 * Several arrays may share the numbers. If these arrays have different numbers of rows,
 * a negative number means a different row in each of them. So the numbers are kept as
 * they were given, and are settled before they are used. To settle numbers for an array
 * is to compute which of its rows they mean. If all arrays have equally many rows, as
 * they usually have, the numbers are settled once.
 *
 * Everything is pure. There are no locks. */
#pragma once

#include <stddef.h>

#include "base/status.h"

typedef struct cm_chosen_rows {
    int64_t *given; /* held (shared_numbers.h); NULL if the numbers are 0, 1, … */
    /* Held. The rows that the numbers mean, as cm_chosen_rows_settle() found them. None
     * is negative. If `given` has no negative number, `rows` and `given` are the same
     * array. If `given` is NULL, `rows` is NULL. */
    int64_t *rows;
    uint64_t count;
    int64_t row_count; /* the numbers are settled for arrays of so many rows; -1 if they
                          are not settled */
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

/* Write `count` integers to `out`. A number that is too large for int64_t becomes
 * INT64_MAX. No array has so many rows, so settling refuses that number. */
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
/* Let `self` stand for the numbers from 0 to `count` - 1, which take no memory. */
void cm_chosen_rows_init_all(cm_chosen_rows *self, uint64_t count);
/* Let `self` share both arrays of `with`: the numbers and the rows that they mean. If
 * one of the two structs is settled anew, the other does not change. */
void cm_chosen_rows_share(cm_chosen_rows *self, const cm_chosen_rows *with);
void cm_chosen_rows_fini(cm_chosen_rows *self);

/* Write integers to `given`, as cm_integers_read() does. */
void cm_chosen_rows_read(cm_chosen_rows *self, cm_integers from);

/* Settle the numbers for an array of `row_count` rows: check them and set `rows`. If
 * `is_target` is set, no row may be named twice. `fault` says what is wrong with the
 * numbers, if anything is.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_chosen_rows_settle(cm_chosen_rows *self, int64_t row_count,
                                             bool is_target, cm_row_fault *fault);

/* Return the row that number `i` means. */
static inline int64_t
cm_chosen_rows_at(const cm_chosen_rows *self, uint64_t i)
{
    return self->rows == NULL ? (int64_t)i : self->rows[i];
}
