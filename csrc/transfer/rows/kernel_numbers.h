/* SPDX-License-Identifier: Apache-2.0 */
/* Writes row numbers of the host in the form in which the kernel of rows_kernel.h reads
 * them.
 *
 * The idea
 * --------
 * The kernel moves a short row in less time than a careful look at its number takes. So
 * there is one pass over the numbers, as the caller has them, which checks them and
 * writes them to page-locked memory. The kernel reads them there, or in memory of its
 * device to which they are copied first (routes/kernel_rows.c). They are written as
 * int32 if all rows have such numbers, which halves what passes the bus. Negative
 * numbers stay as they are, since the kernel counts them from the end of each array by
 * itself.
 *
 * The pass only says whether all numbers are right. If they are not, the caller
 * reads them again by chosen_rows.h, which finds the number that is wrong.
 *
 * Everything is pure. There are no locks. */
#pragma once

#include "transfer/rows/chosen_rows.h"

/* Numbers that have been written. A struct that is zero but for `count` stands for the
 * numbers 0, 1, … */
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

/* Write `self->count` integers to self->at, and set self->has_negative. Each is written
 * with self->nbytes bytes, which is at least what cm_kernel_numbers_nbytes() says.
 * Returns false if one of them names no row of an array of `row_count` rows. What has
 * been written is then of no use. Each integer is read once, so that what is written
 * has been checked even if another thread changes the integers meanwhile. */
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
/* Set *out to whether any number of `b` means a row that one of `a` means, for two
 * arrays of `row_count` rows.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_kernel_numbers_find_shared(const cm_kernel_numbers *a,
                                                     const cm_kernel_numbers *b,
                                                     int64_t row_count, bool *out);
/* Find out whether the rows lie at one distance, each behind the one before, and set
 * *step to that distance in rows. There have to be at least two. */
bool cm_kernel_numbers_are_even(const cm_kernel_numbers *self, int64_t *step);
/* Return how many runs of neighbours there are: a row that follows on the row before in
 * both arrays is in the same run. If there are more runs than `most`, the answer is
 * some number above `most`. */
uint64_t cm_kernel_numbers_count_runs(const cm_kernel_numbers *dst,
                                      const cm_kernel_numbers *src, uint64_t most);
