/* SPDX-License-Identifier: Apache-2.0 */
/* Writes row numbers of the host in the form in which the kernel of rows_kernel.h reads
 * them.
 *
 * The idea
 * --------
 * The kernel moves a short row in less time than the host needs for a careful look at
 * the row's number. So the host goes through the caller's numbers only once. In this
 * pass it checks the numbers and writes them to page-locked memory. The kernel reads
 * the numbers from this memory, or from memory of its device, to which they are copied
 * first (routes/kernel_rows.c). If the numbers of all rows fit in an int32, they are
 * written as int32, which halves the bytes that pass the bus. Negative numbers are
 * written as they are, since the kernel counts them from the end of each array by
 * itself.
 *
 * The pass only says whether each number names a row. If one does not, the caller reads
 * the numbers again with the functions of chosen_rows.h, which find the wrong number.
 *
 * Everything is pure. There are no locks. */
#pragma once

#include "transfer/rows/chosen_rows.h"

/* Numbers that have been written. If all members but `count` are zero, the struct
 * stands for the numbers 0, 1, … */
typedef struct cm_kernel_numbers {
    void *at; /* borrowed: room for `count` numbers, aligned to `nbytes` */
    uint64_t count;
    uint32_t nbytes; /* the bytes of a number, 4 or 8 */
    bool has_negative;
} cm_kernel_numbers;

/* Return how many bytes each number takes, for arrays of at most `row_count` rows. */
static inline uint32_t
cm_kernel_numbers_nbytes(int64_t row_count)
{
    return row_count <= INT32_MAX ? sizeof(int32_t) : sizeof(int64_t);
}

/* Write `self->count` integers to self->at, and set self->has_negative. Each integer
 * takes self->nbytes bytes, which must not be less than cm_kernel_numbers_nbytes()
 * returns. Returns false if an integer names no row of an array of `row_count` rows.
 * The integers that have been written by then are of no use. Each integer is read once,
 * so that what is written has been checked even if another thread changes the integers
 * meanwhile. */
bool cm_kernel_numbers_write(cm_kernel_numbers *self, cm_integers from,
                             int64_t row_count);

/* Return the row of an array of `row_count` rows that number `i` means. */
static inline int64_t
cm_kernel_numbers_at(const cm_kernel_numbers *self, uint64_t i, int64_t row_count)
{
    int64_t row;
    if (self->at == NULL) {
        return (int64_t)i;
    }
    if (self->nbytes == sizeof(int32_t)) {
        row = ((const int32_t *)self->at)[i];
    }
    else {
        row = ((const int64_t *)self->at)[i];
    }
    return row < 0 ? row + row_count : row;
}

/* Set *out to whether two of the numbers mean the same row.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_kernel_numbers_find_twice(const cm_kernel_numbers *self,
                                                    int64_t row_count, bool *out);
/* Set *out to whether a number of `a` and a number of `b` mean the same row, if both
 * choose rows of an array of `row_count` rows.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_kernel_numbers_find_shared(const cm_kernel_numbers *a,
                                                     const cm_kernel_numbers *b,
                                                     int64_t row_count, bool *out);
/* Return whether each number is larger than the one before by the same step, and set
 * *step to that step. There have to be at least two numbers. */
bool cm_kernel_numbers_are_even(const cm_kernel_numbers *self, int64_t *step);
/* Return how many runs of neighbours the rows make. A row belongs to the same run as
 * the row before if it follows directly on that row in both arrays. If there are more
 * runs than `most`, the function returns some number above `most`. */
uint64_t cm_kernel_numbers_count_runs(const cm_kernel_numbers *dst,
                                      const cm_kernel_numbers *src, uint64_t most);
