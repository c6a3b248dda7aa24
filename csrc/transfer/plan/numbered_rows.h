/* SPDX-License-Identifier: Apache-2.0 */
/* Describes rows by their numbers, so that runs of bytes are made from them only when a
 * thread needs the runs.
 *
 * The idea
 * --------
 * A list of runs takes a hundred bytes and a hundred nanoseconds for each run, and one
 * thread makes it before a byte moves. To copy a row of a few hundred bytes takes less
 * time than that. So a cm_many may have layers and row numbers in place of its list.
 * Its packed space then holds the rows of the first layer one behind the other, in the
 * order of the numbers, then those of the second one, and so on. Byte `at` of the space
 * belongs to row (at - start) / row_nbytes of a layer. So the space can be cut
 * anywhere, and each thread finds out by a division what its part is.
 *
 * Example: rows of 100 bytes have the numbers 7, 2 and 3. The part of the space from
 * byte 150 to byte 300 is the second half of row 2 and all of row 3. On the side of an
 * array without gaps that is a single run of 150 bytes, as row 3 follows on row 2.
 *
 * Everything here is pure. There are no locks. */
#pragma once

#include <stdatomic.h>

#include "base/machine.h"
#include "base/numbered_copy.h"
#include "transfer/plan/batch_plan.h"

/* A pair of arrays. Members that come in pairs are indexed by cm_side. */
typedef struct cm_numbered_layer {
    cm_piece_end end[2]; /* of row 0 */
    int64_t stride[2];   /* bytes from one row to the next; may be negative or 0 */
    cm_region array[2];  /* the whole arrays, whose page-locked memory the copy keeps
                            page-locked */
    /* An array that maps a file is divided into windows, and each has a flag here,
     * which is set once the window has been brought into memory for this copy. Owned;
     * NULL for other memory. */
    atomic_uchar *is_there[2];
    uintptr_t low[2];    /* the first byte of the first window */
    uintptr_t high[2];   /* the end of the last window */
    uint64_t row_nbytes; /* > 0; the bytes of a row lie together */
    uint64_t start;      /* where the layer begins in the packed space */
} cm_numbered_layer;

/* All that is copied; there is at least one row. */
typedef struct cm_numbered_rows {
    uint64_t count;      /* rows of each layer */
    int64_t *numbers[2]; /* held (shared_numbers.h), indexed by cm_side; none is
                            negative; NULL stands for 0, 1, … */
    uint64_t layer_count;
    cm_numbered_layer layers[];
} cm_numbered_rows;

/* Make rows of `count` numbers for layers that the caller fills in, except their
 * starts. Returns NULL if there is no memory. */
cm_numbered_rows *cm_numbered_rows_create(uint64_t count, uint64_t layer_count);
void cm_numbered_rows_destroy(cm_numbered_rows *rows); /* does nothing with NULL */
/* Give each layer its place in the packed space, and store the length of the space in
 * *span.
 * Fails: CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_numbered_rows_place(cm_numbered_rows *rows, uint64_t *span);

/* Return how many bytes of a mapped file are brought into memory at once. When rows are
 * read, a window has 64 KiB, so that rows which lie near each other cost one call of
 * the system. When rows are written, a window is a single page, because the system
 * later writes back to the disk every page that was brought in for writing. */
static inline uintptr_t
cm_numbered_window(cm_side side)
{
    enum { READ_NBYTES = 64 << 10 };
    return side == CM_DST ? cm_page_nbytes() : READ_NBYTES;
}

/* Make the windows of a side of a layer whose array maps a file.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_numbered_layer_make_windows(cm_numbered_layer *layer,
                                                      cm_side side);

/* Count the runs that a list of the rows would have if the layer has no gaps. Rows that
 * follow on each other on both sides are one run. Stops as soon as there are more than
 * `most`. */
uint64_t cm_numbered_rows_count_runs(const cm_numbered_rows *rows, uint64_t most);
/* True if both arrays of the layer have their rows without gaps. */
bool cm_numbered_layer_is_dense(const cm_numbered_layer *layer);
/* True if the rows that are copied lie one behind the other in that side's array. */
bool cm_numbered_rows_are_packed(const cm_numbered_rows *rows,
                                 const cm_numbered_layer *layer, cm_side side);
/* Find the layer that byte `at` of the packed space belongs to. */
const cm_numbered_layer *cm_numbered_rows_find(const cm_numbered_rows *rows,
                                               uint64_t at);
/* Return one end of a layer, as functions that copy its rows on the host take it. */
cm_numbered_end cm_numbered_rows_end(const cm_numbered_rows *rows,
                                     const cm_numbered_layer *layer, cm_side side);

/* Bytes of the packed space that lie together in the array of one side. */
typedef struct cm_numbered_run {
    const cm_piece_end *end; /* of row 0 of the layer */
    int64_t offset;          /* where the run begins, in bytes from row 0 */
    uint64_t nbytes;
} cm_numbered_run;

/* Find the run of `side` that begins at byte `at` of the packed space and ends with
 * byte `end` at the latest. `at` < `end`. */
cm_numbered_run cm_numbered_rows_run_at(const cm_numbered_rows *rows, cm_side side,
                                        uint64_t at, uint64_t end);
