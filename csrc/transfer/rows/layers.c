/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/rows/layers.h"

#include <stdlib.h>

#include "base/checked_math.h"
#include "transfer/plan/layout.h"

enum {
    FIRST_ROOM = 256,
    /* So few runs are sooner queued one by one than described to a kernel, which has to
     * read their numbers over the bus before it begins. */
    FEW_RUNS = 3,
    /* A copy of this length by the copy engine is no slower than by a kernel, and it
     * leaves all multiprocessors to others (LONG_NBYTES in routes/pieces.c). */
    LONG_RUN_NBYTES = 256 << 10,
};

/* The end of a run that begins `offset` bytes behind element 0 of an array. */
static cm_piece_end
end_at(const cm_layer *layer, cm_side side, int64_t offset)
{
    const cm_region *array = &layer->array[side];
    return (cm_piece_end){
        .host = array->host == NULL ? NULL : (char *)array->host + offset,
        .address = array->address == 0 ? 0 : array->address + (uint64_t)offset,
        .owner = layer->owner[side],
        .kind = array->kind,
        .device = (int16_t)array->device,
        .is_file = array->is_file,
    };
}

/* The place where the last run of the layer ends in each array, by cm_side, as an
 * offset from element 0. The next run is joined to it if it begins there. */
typedef struct reached {
    bool is_known;
    int64_t at[2];
} reached;

static cm_status
grow(cm_row_runs *runs)
{
    uint64_t room = runs->room == 0 ? FIRST_ROOM : runs->room * 2;
    if (room > SIZE_MAX / sizeof(cm_piece)) {
        return cm_fail(CM_ENOMEM, UINT64_MAX);
    }
    uint64_t nbytes = room * sizeof(cm_piece);
    cm_piece *pieces = realloc(runs->pieces, (size_t)nbytes);
    CM_TRY(cm_allocated(pieces != NULL, nbytes));
    runs->pieces = pieces;
    runs->room = room;
    return cm_ok();
}

static cm_status
add_run(cm_row_runs *runs, const cm_layer *layer, const int64_t offset[2],
        uint64_t nbytes, reached *last)
{
    if (last->is_known && offset[CM_DST] == last->at[CM_DST]
        && offset[CM_SRC] == last->at[CM_SRC]) {
        runs->pieces[runs->count - 1].nbytes += nbytes;
    }
    else {
        if (runs->count == runs->room) {
            CM_TRY(grow(runs));
        }
        cm_piece *piece = &runs->pieces[runs->count];
        piece->dst = end_at(layer, CM_DST, offset[CM_DST]);
        piece->src = end_at(layer, CM_SRC, offset[CM_SRC]);
        piece->nbytes = nbytes;
        piece->index = runs->count++;
    }
    last->is_known = true;
    last->at[CM_DST] = offset[CM_DST] + (int64_t)nbytes;
    last->at[CM_SRC] = offset[CM_SRC] + (int64_t)nbytes;
    return cm_ok();
}

/* Describe one row of an array: what the axes after the first one span. */
static cm_region
row_of(const cm_region *array)
{
    cm_region row = *array;
    row.ndim = array->ndim - 1;
    for (int axis = 0; axis < row.ndim; axis++) {
        row.shape[axis] = array->shape[axis + 1];
        row.strides[axis] = array->strides[axis + 1];
    }
    return row;
}

cm_status
cm_row_runs_add(cm_row_runs *runs, const cm_layer *layer,
                const cm_chosen_rows numbers[2])
{
    cm_layout row;
    cm_region rows[2] = {row_of(&layer->array[CM_DST]), row_of(&layer->array[CM_SRC])};
    reached last = {.is_known = false};
    CM_TRY(cm_layout_init(&rows[CM_DST], &rows[CM_SRC], &row));
    for (uint64_t i = 0; row.run_nbytes > 0 && i < numbers[CM_DST].count; i++) {
        int64_t index[CM_MAX_NDIM] = {0};
        int64_t offset[2];
        for (int side = CM_DST; side <= CM_SRC; side++) {
            offset[side] =
                cm_chosen_rows_at(&numbers[side], i) * layer->array[side].strides[0]
                + row.offset[side];
        }
        do {
            CM_TRY(add_run(runs, layer, offset, row.run_nbytes, &last));
        } while (cm_layout_step(&row, row.ndim, -1, index, offset));
    }
    return cm_ok();
}

void
cm_row_runs_fini(cm_row_runs *runs)
{
    free(runs->pieces);
    *runs = (cm_row_runs){.pieces = NULL};
}

/* -- which way ---------------------------------------------------------------------- */

bool
cm_rows_suit_engine(const cm_layer *layer, uint64_t layer_count, uint64_t count,
                    const cm_kernel_numbers *numbers)
{
    cm_layout row;
    const cm_region *array = layer->array;
    cm_region one[2] = {row_of(&array[CM_DST]), row_of(&array[CM_SRC])};
    cm_status status = cm_layout_init(&one[CM_DST], &one[CM_SRC], &row);
    if (!cm_is_ok(status) || row.run_nbytes == 0) {
        return true; /* which says what is wrong, or that there is nothing to copy */
    }
    uint64_t runs, nbytes;
    if (!cm_mul_u64(count, cm_layout_nbytes(&row), &nbytes)) {
        return true;
    }
    uint64_t few = FEW_RUNS / layer_count;
    uint64_t most = nbytes / LONG_RUN_NBYTES;
    most = most > few ? most : few;
    runs = nbytes / row.run_nbytes;
    bool may_join = row.ndim == 0;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        may_join = may_join && array[side].strides[0] == (int64_t)row.run_nbytes;
    }
    if (numbers != NULL && may_join) {
        runs = cm_kernel_numbers_count_runs(&numbers[CM_DST], &numbers[CM_SRC], most);
    }
    return runs <= most;
}

/* -- for a kernel ------------------------------------------------------------------- */

/* Note what a kernel has to know about one end of a layer beyond its addresses. */
static cm_status
note_end(cm_kernel_rows *rows, const cm_region *array)
{
    int64_t low, high;
    if (cm_region_is_on_device(array)) {
        return cm_ok();
    }
    CM_TRY(cm_region_bounds(array, &low, &high));
    if (low == high) {
        return cm_ok();
    }
    rows->move.is_over_bus =
        rows->move.is_over_bus || cm_kind_is_page_locked(array->kind);
    return cm_kernel_rows_add_span(rows, (const char *)array->host + low,
                                   (uint64_t)(high - low));
}

cm_status
cm_kernel_rows_add(cm_kernel_rows *rows, const cm_layer *layer)
{
    cm_layout row;
    const cm_region *array = layer->array;
    cm_region one[2] = {row_of(&array[CM_DST]), row_of(&array[CM_SRC])};
    int64_t index[CM_MAX_NDIM] = {0};
    CM_TRY(cm_layout_init(&one[CM_DST], &one[CM_SRC], &row));
    if (row.run_nbytes == 0 || rows->move.count == 0) {
        return cm_ok();
    }
    CM_TRY(note_end(rows, &array[CM_DST]));
    CM_TRY(note_end(rows, &array[CM_SRC]));
    int64_t offset[2] = {row.offset[CM_DST], row.offset[CM_SRC]};
    do {
        cm_rows_layer run = {.row_nbytes = row.run_nbytes};
        for (int side = CM_DST; side <= CM_SRC; side++) {
            run.address[side] = array[side].address + (uint64_t)offset[side];
            run.stride[side] = array[side].strides[0];
            run.row_count[side] = (uint64_t)array[side].shape[0];
        }
        CM_TRY(cm_kernel_rows_add_layer(rows, &run));
        rows->nbytes += run.row_nbytes * rows->move.count;
    } while (cm_layout_step(&row, row.ndim, -1, index, offset));
    return cm_ok();
}
