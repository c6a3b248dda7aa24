/* SPDX-License-Identifier: Apache-2.0 */
/* Writes and checks the row numbers of both ends of a call. If there are many of them,
 * several threads do this.
 *
 * The idea
 * --------
 * A kernel reads row numbers that the host has checked (kernel_numbers.h). To find out
 * whether a row of the target is named twice, a thread reads and sets a bit for each
 * number, which takes three times as long as it takes to write the number. Writing and
 * marking 100,000 numbers of both ends takes 120 us on one thread. The kernel, which
 * needs only 500 us to move as many rows of 256 bytes, cannot begin before that is
 * done. So the copy threads (host/workers.h) share the work if there is enough of it.
 *
 * Each part of the work is some numbers of both ends. The thread that takes it writes
 * them, and marks those of the target in a bitmap. A bitmap has one user at a time, so
 * that threads do not wait for each other's cache lines. In the end all bitmaps that
 * were used are joined. If two of them have the same bit, its row was named twice.
 *
 * Example: of the numbers 5, 2, 7, 2 one thread marks 5 and 2, and another one 7 and 2.
 * Neither finds a bit that it has set before, but both have set bit 2.
 *
 * Locks: none; the numbers belong to the caller, who waits for the threads. */
#pragma once

#include "transfer/engine/engine.h"
#include "transfer/rows/kernel_numbers.h"

/* The numbers of one end. */
typedef struct cm_numbers_side {
    cm_kernel_numbers *to; /* borrowed; NULL if the host has no numbers of this end */
    cm_integers from;
    int64_t row_count; /* the number of rows of the shortest array */
} cm_numbers_side;

/* What has been found out about all numbers together. */
typedef enum cm_numbers_finding {
    CM_NUMBERS_WRONG,    /* a number names no row, or a row of the target is named
                            twice; what has been written is of no use */
    CM_NUMBERS_IN_RANGE, /* each number names a row; a row of the target may be named
                            twice */
    CM_NUMBERS_RIGHT,    /* each number names a row, and no row of the target is named
                            twice */
} cm_numbers_finding;

/* Write the numbers of both sides, which are indexed by cm_side, as
 * cm_kernel_numbers_write() does. Both have the same count.
 * Fails: CM_ECLOSED, CM_EFORKED. */
CM_NODISCARD cm_status cm_numbers_write_both(cm_engine *engine,
                                             const cm_numbers_side sides[2],
                                             cm_numbers_finding *out);
