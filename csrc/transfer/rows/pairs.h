/* SPDX-License-Identifier: Apache-2.0 */
/* Describes pairs of one size as rows, so that the kernel of rows_kernel.h can copy
 * them by their numbers.
 *
 * Blocks of a cache come as thousands of pairs, each with two addresses. If one device
 * reaches all of them, and all have one size, they are rows of two arrays: each array
 * begins at the lowest address of its side, and its rows lie `unit` bytes apart. The
 * unit is the largest number that divides the size and all distances between addresses.
 * It may be shorter than a row. So two numbers say what a pair is, and the host
 * describes it to the device in a few nanoseconds, where a run of a table takes a
 * hundred.
 *
 * Example: pairs of 32 KiB in a buffer whose blocks begin at multiples of 32 KiB have
 * that unit, and block 5 is row 5. With the blocks of another allocation among them,
 * which begins 512 bytes off, the unit is 512, and block 5 is row 320.
 *
 * Everything is pure. There are no locks. */
#pragma once

#include "transfer/rows/kernel_numbers.h"
#include "transfer/rows/layers.h"

/* Pairs that are rows. */
typedef struct cm_paired_rows {
    /* Both arrays, as a layer: their first axis counts the rows. They have no addresses
     * of the host, since memory of several allocations may lie elsewhere there. */
    cm_layer layer;
    int device; /* one that reaches the memory of all pairs */
    /* All targets are on the device and all sources on the host, or the other way
     * round. */
    bool has_sides_apart;
    bool is_over_bus; /* some of the pairs' memory is page-locked host memory */
    bool is_to_host;  /* some of the targets' memory is page-locked host memory */
} cm_paired_rows;

/* Find out whether pairs can be rows, and describe their arrays. At least one end of
 * each pair must lie in memory of a device. Pairs of two devices cannot be rows, nor
 * can pairs with ordinary memory, which somebody may have page-locked. */
bool cm_paired_rows_init(cm_paired_rows *self, const cm_piece *pieces, uint64_t count);
/* Return how many rows the array of a side has. */
static inline int64_t
cm_paired_rows_count(const cm_paired_rows *self, cm_side side)
{
    return self->layer.array[side].shape[0];
}

/* Write the number of each pair's row on one side. numbers->at has room for them, and
 * numbers->nbytes is what cm_kernel_numbers_nbytes() says. */
void cm_paired_rows_write(const cm_paired_rows *self, const cm_piece *pieces,
                          cm_side side, cm_kernel_numbers *numbers);
/* Find out whether a target touches another end. If the numbers are enough to tell,
 * *is_known is true and *touches is the answer.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_paired_rows_find_touch(const cm_paired_rows *self,
                                                 const cm_kernel_numbers numbers[2],
                                                 bool *touches, bool *is_known);
