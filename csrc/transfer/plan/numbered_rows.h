/* SPDX-License-Identifier: Apache-2.0 */
/* Describes rows by their numbers, so that runs of bytes are made from them only when a
 * thread needs the runs.
 *
 * The idea
 * --------
 * A list of runs takes a hundred bytes and a hundred nanoseconds for each run, and one
 * thread has to make the list before a byte moves. To copy a row of a few hundred bytes
 * takes less time than to list it. So a cm_many (the pieces of a batch that go the same
 * way, batch_plan.h) may have layers and row numbers in place of its list. A layer is a
 * pair of arrays, between which the rows with these numbers are copied.
 *
 * The packed space of a cm_many is a range of bytes in which all pieces lie one behind
 * the other. Here it has the rows of the first layer, in the order of the numbers, then
 * the rows of the second layer, and so on. If a layer begins at byte `start` of the
 * space, byte `at` belongs to the row that entry (at - start) / row_nbytes of the
 * numbers names. So the space can be cut anywhere, and each thread finds out by a
 * division which rows its part has.
 *
 * Example: rows of 100 bytes have the numbers 7, 2 and 3. The part of the space from
 * byte 150 to byte 300 is the second half of row 2 and all of row 3. In an array
 * without gaps this part is a single run of 150 bytes, since row 3 lies directly behind
 * row 2.
 *
 * Every function here depends on its arguments alone. There are no locks. */
#pragma once

#include <stdatomic.h>

#include "base/machine.h"
#include "base/numbered_copy.h"
#include "transfer/plan/batch_plan.h"

/* A pair of arrays between which rows are copied. Members that come in pairs are
 * indexed by cm_side. */
typedef struct cm_numbered_layer {
    cm_piece_end end[2]; /* of row 0 */
    int64_t stride[2];   /* bytes from one row to the next; may be negative or 0 */
    cm_region array[2];  /* the whole arrays; if their memory is page-locked, it
                            stays so until the copy is done */
    /* An array that maps a file is divided into windows, and each has a flag here,
     * which is set once the window has been brought into memory for this copy. Owned;
     * NULL for other memory. */
    atomic_uchar *is_there[2];
    uintptr_t low[2];    /* the first byte of the first window */
    uintptr_t high[2];   /* the end of the last window */
    uint64_t row_nbytes; /* > 0; the bytes of a row lie together */
    uint64_t start;      /* where the layer begins in the packed space */
} cm_numbered_layer;

/* The rows that are copied. There is at least one. */
typedef struct cm_numbered_rows {
    uint64_t count;      /* rows of each layer */
    int64_t *numbers[2]; /* held (shared_numbers.h), indexed by cm_side; no number
                            is negative; NULL stands for 0, 1, … */
    uint64_t layer_count;
    cm_numbered_layer layers[];
} cm_numbered_rows;

/* Make room for rows with `count` numbers and for layers. The caller fills in the
 * numbers and the layers. It leaves out `start` of each layer, which
 * cm_numbered_rows_place() sets. Returns NULL if there is no memory. */
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

/* Make the windows for one side of a layer. The array on that side maps a file.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_numbered_layer_make_windows(cm_numbered_layer *layer,
                                                      cm_side side);

/* Count the runs that a list of the rows of one layer would have, if neither of its
 * arrays has gaps between its rows. Rows that lie one behind the other on both sides
 * are one run. Stops counting once there are more than `most` runs. */
uint64_t cm_numbered_rows_count_runs(const cm_numbered_rows *rows, uint64_t most);
/* True if both arrays of the layer have their rows without gaps. */
bool cm_numbered_layer_is_dense(const cm_numbered_layer *layer);
/* True if the rows that are copied lie one behind the other in the array of `side`. */
bool cm_numbered_rows_are_packed(const cm_numbered_rows *rows,
                                 const cm_numbered_layer *layer, cm_side side);
/* Find the layer that byte `at` of the packed space belongs to. */
const cm_numbered_layer *cm_numbered_rows_find(const cm_numbered_rows *rows,
                                               uint64_t at);
/* Return one end of a layer in the form that base/numbered_copy.h takes to copy rows on
 * the host. */
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
