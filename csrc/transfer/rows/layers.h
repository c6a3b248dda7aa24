/* SPDX-License-Identifier: Apache-2.0 */
/* A layer is a pair of arrays, and all layers of a call are copied by the same row
 * numbers. This file turns layers into runs of bytes. The runs are pieces of a batch
 * (batch.h), so whatever can be done with pairs can be done with rows.
 *
 * Example: the target has 8 rows of 100 bytes, 128 apart, and the source has rows of
 * 100 bytes without gaps. To copy the rows 2, 3 and 5 of the source to the rows 0, 1
 * and 2 of the target takes three runs, since the target has gaps. If neither had gaps,
 * the first two rows would be one run of 200 bytes.
 *
 * Everything is pure, except that one function asks the engine what is page-locked.
 * There are no locks. */
#pragma once

#include "transfer/plan/batch_plan.h"
#include "transfer/plan/numbered_rows.h"
#include "transfer/routes/kernel_rows.h"
#include "transfer/rows/chosen_rows.h"
#include "transfer/rows/kernel_numbers.h"

/* The arrays of a layer, indexed by cm_side. Their first axis counts the rows, and the
 * others are the same on both sides, as the itemsizes are. */
typedef struct cm_layer {
    cm_region array[2];
    const void *owner[2]; /* as the `owner` of a cm_piece_end */
} cm_layer;

/* Runs that are collected from any number of layers. A struct of zeros is empty. */
typedef struct cm_row_runs {
    cm_piece *pieces; /* owned */
    uint64_t count;
    uint64_t room; /* pieces that `pieces` has room for */
} cm_row_runs;

/* Add the runs of a layer. `numbers` are settled for the rows of its two arrays. A row
 * that follows on the row before, on both sides, is joined to it.
 * Fails: CM_ENOMEM, CM_ESHAPE, CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_row_runs_add(cm_row_runs *runs, const cm_layer *layer,
                                       const cm_chosen_rows numbers[2]);
void cm_row_runs_fini(cm_row_runs *runs);

/* Make a request to the engine for rows by their numbers (numbered_rows.h), which the
 * copy threads turn into runs as they go. `numbers` are settled for the last layer; the
 * request shares them.
 *
 * *out is NULL if the batch makes the copy as well or better. It does so if a device
 * alone copies some rows, if layers go different ways, have different numbers of rows,
 * or rows whose bytes lie apart, if a registration begins or ends in an array, and if
 * enough rows follow on each other for a list of runs to be short. No layer may write
 * what another one touches. `on_stream` has the meaning that it has in cm_plan_options.
 * With `gathers` the threads also read a source in page-locked memory, as they read
 * ordinary memory (cm_rows_suit_threads()).
 * Fails: CM_ENOMEM, CM_ESHAPE, CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_numbered_many_create(
    cm_engine *engine, const cm_layer *layers, uint64_t layer_count,
    cm_chosen_rows *const numbers[2], bool on_stream, bool gathers, cm_many **out);

/* Return whether the copy engine of a device that reaches both ends moves the rows at
 * least as fast as a kernel that reads their numbers. It does so if there are only a
 * few runs, if the runs are long, or if they lie at equal distances, so that one
 * pitched copy moves them. `layer` stands for all `layer_count` layers, and `count`
 * rows of each are copied. `numbers`, indexed by cm_side, are needed to find
 * neighbouring rows, which become one run. If `numbers` is NULL, the answer is true
 * only if it would be true for all numbers. */
bool cm_rows_suit_engine(const cm_layer *layer, uint64_t layer_count, uint64_t count,
                         const cm_kernel_numbers *numbers);

/* Return whether copy threads gather rows of page-locked memory faster than a kernel of
 * the device reads them. They do so if the rows are short and lie in a long table, and
 * if there are enough threads. The other arguments are as for cm_rows_suit_engine(). */
bool cm_rows_suit_threads(cm_engine *engine, const cm_layer *layer,
                          uint64_t layer_count, uint64_t count);

/* Add a layer whose rows a kernel copies by the numbers of rows->move, which are set
 * already. Rows whose bytes lie apart become a layer of the kernel's for each run of
 * bytes that they consist of.
 * Fails: CM_ENOMEM, CM_ESHAPE, CM_EOVERFLOW. */
CM_NODISCARD cm_status cm_kernel_rows_add(cm_kernel_rows *rows, const cm_layer *layer);
