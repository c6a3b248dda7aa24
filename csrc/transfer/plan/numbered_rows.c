/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/numbered_rows.h"

#include <stdlib.h>

#include "base/checked_math.h"
#include "transfer/plan/shared_numbers.h"

cm_numbered_rows *
cm_numbered_rows_create(uint64_t count, uint64_t layer_count)
{
    cm_numbered_rows *rows;
    if (layer_count > (SIZE_MAX - sizeof(*rows)) / sizeof(rows->layers[0])) {
        return NULL;
    }
    rows = calloc(1, sizeof(*rows) + (size_t)layer_count * sizeof(rows->layers[0]));
    if (rows != NULL) {
        rows->count = count;
        rows->layer_count = layer_count;
    }
    return rows;
}

void
cm_numbered_rows_destroy(cm_numbered_rows *rows)
{
    if (rows == NULL) {
        return;
    }
    for (uint64_t i = 0; i < rows->layer_count; i++) {
        free(rows->layers[i].is_there[CM_DST]);
        free(rows->layers[i].is_there[CM_SRC]);
    }
    cm_shared_numbers_release(rows->numbers[CM_DST]);
    cm_shared_numbers_release(rows->numbers[CM_SRC]);
    free(rows);
}

cm_status
cm_numbered_layer_make_windows(cm_numbered_layer *layer, cm_side side)
{
    int64_t low, high;
    const cm_region *array = &layer->array[side];
    uintptr_t page = cm_page_nbytes();
    CM_TRY(cm_region_bounds(array, &low, &high));
    layer->low[side] = (uintptr_t)array->host + (uintptr_t)low;
    layer->low[side] -= layer->low[side] % page;
    layer->high[side] = (uintptr_t)array->host + (uintptr_t)high;
    size_t count = (layer->high[side] - layer->low[side]) / cm_numbered_window(side);
    layer->is_there[side] = calloc(count + 1, sizeof(*layer->is_there[side]));
    return cm_allocated(layer->is_there[side] != NULL, count);
}

cm_status
cm_numbered_rows_place(cm_numbered_rows *rows, uint64_t *span)
{
    *span = 0;
    for (uint64_t i = 0; i < rows->layer_count; i++) {
        cm_numbered_layer *layer = &rows->layers[i];
        uint64_t nbytes;
        layer->start = *span;
        if (!cm_mul_u64(layer->row_nbytes, rows->count, &nbytes)
            || !cm_add_u64(*span, nbytes, span)) {
            return cm_fail(CM_EOVERFLOW, rows->count);
        }
    }
    return cm_ok();
}

/* -- rows that follow each other --------------------------------------------------- */

static bool
has_gaps(const cm_numbered_layer *layer, cm_side side)
{
    return layer->stride[side] != (int64_t)layer->row_nbytes;
}

/* True if the number at index `i` + 1 is higher by one than the number at index `i`. */
static bool
follows(const cm_numbered_rows *rows, cm_side side, uint64_t i)
{
    const int64_t *numbers = rows->numbers[side];
    return numbers == NULL || numbers[i + 1] == numbers[i] + 1;
}

bool
cm_numbered_rows_are_packed(const cm_numbered_rows *rows,
                            const cm_numbered_layer *layer, cm_side side)
{
    return rows->numbers[side] == NULL && !has_gaps(layer, side);
}

bool
cm_numbered_layer_is_dense(const cm_numbered_layer *layer)
{
    return !has_gaps(layer, CM_DST) && !has_gaps(layer, CM_SRC);
}

uint64_t
cm_numbered_rows_count_runs(const cm_numbered_rows *rows, uint64_t most)
{
    uint64_t count = 1;
    for (uint64_t i = 0; i + 1 < rows->count && count <= most; i++) {
        count += !(follows(rows, CM_DST, i) && follows(rows, CM_SRC, i));
    }
    return count;
}

/* -- places in the packed space, which numbered_rows.h explains ----------------------- */

const cm_numbered_layer *
cm_numbered_rows_find(const cm_numbered_rows *rows, uint64_t at)
{
    uint64_t low = 0;
    uint64_t high = rows->layer_count;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (rows->layers[middle].start <= at) {
            low = middle;
        }
        else {
            high = middle;
        }
    }
    return &rows->layers[low];
}

cm_numbered_end
cm_numbered_rows_end(const cm_numbered_rows *rows, const cm_numbered_layer *layer,
                     cm_side side)
{
    return (cm_numbered_end){.base = layer->end[side].host,
                             .stride = layer->stride[side],
                             .numbers = rows->numbers[side]};
}

cm_numbered_run
cm_numbered_rows_run_at(const cm_numbered_rows *rows, cm_side side, uint64_t at,
                        uint64_t end)
{
    const cm_numbered_layer *layer = cm_numbered_rows_find(rows, at);
    const int64_t *numbers = rows->numbers[side];
    uint64_t length = layer->row_nbytes;
    uint64_t row = (at - layer->start) / length;
    uint64_t from = (at - layer->start) % length;
    uint64_t most = cm_least(end, layer->start + rows->count * length) - at;
    int64_t number = numbers == NULL ? (int64_t)row : numbers[row];
    cm_numbered_run run = {.end = &layer->end[side],
                           .offset = number * layer->stride[side] + (int64_t)from,
                           .nbytes = cm_least(length - from, most)};
    if (cm_numbered_rows_are_packed(rows, layer, side)) {
        run.nbytes = most;
    }
    else if (!has_gaps(layer, side)) {
        for (; run.nbytes < most && follows(rows, side, row); row++) {
            run.nbytes += cm_least(length, most - run.nbytes);
        }
    }
    return run;
}
