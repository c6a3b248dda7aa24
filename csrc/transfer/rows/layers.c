/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/rows/layers.h"

#include <stdlib.h>

#include "base/checked_math.h"
#include "transfer/engine/private.h"
#include "transfer/plan/layout.h"
#include "transfer/plan/shared_numbers.h"

enum {
    FIRST_ROOM = 256,
    /* Up to this many runs are copied faster one by one than by a kernel, which has to
     * read their numbers over the bus before it begins. */
    FEW_RUNS = 3,
    /* A kernel fills 93 % of a link. The copy engine fills all of it, but rests for 3
     * us between two copies. So copies of this length are as fast by the engine, and
     * leave all multiprocessors to others (benchmarks/rows.py on an H200). */
    LONG_RUN_NBYTES = 2 << 20,
    /* A kernel that reads rows of page-locked memory needs the address of a page for
     * each row. A device remembers the addresses of some of this memory, and has to
     * look up the others. From a table of up to 512 MiB, rows of 128, 256, 512 and
     * 1,024 bytes reach an H200 at 47, 49, 50 and 51 GB/s, and from one of 2 GiB at 7,
     * 14, 25 and 47. Threads of the host gather such rows at 30, 37, 40 and 42 GB/s
     * from a table of any length. At 768 MiB both are as fast for rows of 256 bytes. So
     * threads gather rows of up to this many bytes. */
    MOST_GATHERED_NBYTES = 512,
    REMEMBERED_NBYTES = 768 << 20,
    /* Threads take some time to begin. A kernel has copied fewer bytes by then, and few
     * rows lie on few pages. */
    LEAST_GATHERED_NBYTES = 4 << 20,
    /* Each of eight threads gathers 5 GB/s, so fewer than these are slower than a
     * kernel that looks up all addresses. */
    FEWEST_GATHERING = 6,
};

/* Return the end of a run that begins `offset` bytes behind element 0 of an array. */
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

/* The place where the last run of the layer ends in each array, as an offset from
 * element 0, indexed by cm_side. The next run is joined to it if it begins there. */
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

/* Describe one row of an array, which is what its axes after the first one span. */
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

/* True if the rows of the only layer can be one pitched copy (cm_many_is_rows()). */
static bool
are_pitched(const cm_layer *layer, uint64_t nbytes, const cm_kernel_numbers *numbers)
{
    bool are = nbytes >= CM_PITCHED_MIN_WIDTH && numbers[CM_DST].count > 1;
    for (int side = CM_DST; are && side <= CM_SRC; side++) {
        int64_t step;
        int64_t stride = layer->array[side].strides[0];
        are = layer->owner[side] != NULL && stride > 0
              && cm_kernel_numbers_are_even(&numbers[side], &step)
              && step <= CM_PITCH_MAX / stride && step * stride >= (int64_t)nbytes;
    }
    return are;
}

bool
cm_rows_suit_engine(const cm_layer *layer, uint64_t layer_count, uint64_t count,
                    const cm_kernel_numbers *numbers)
{
    cm_layout row;
    const cm_region *array = layer->array;
    cm_region one[2] = {row_of(&array[CM_DST]), row_of(&array[CM_SRC])};
    cm_status status = cm_layout_init(&one[CM_DST], &one[CM_SRC], &row);
    if (!cm_is_ok(status) || row.run_nbytes == 0) {
        return true; /* planning the copy says what is wrong, or that there is nothing
                        to copy */
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
    if (runs <= most) {
        return true;
    }
    return numbers != NULL && layer_count == 1 && row.ndim == 0
           && are_pitched(layer, row.run_nbytes, numbers);
}

static bool
has_threads_to_gather(cm_engine *engine)
{
    cm_tuning tuning;
    if (!cm_is_ok(cm_engine_begin_call(engine, &tuning))) {
        return false; /* the copy itself will say why */
    }
    cm_engine_end_call(engine);
    return tuning.thread_count >= FEWEST_GATHERING;
}

bool
cm_rows_suit_threads(cm_engine *engine, const cm_layer *layer, uint64_t layer_count,
                     uint64_t count)
{
    cm_layout row;
    int64_t low, high;
    const cm_region *array = layer->array;
    cm_region one[2] = {row_of(&array[CM_DST]), row_of(&array[CM_SRC])};
    if (!cm_region_is_on_device(&array[CM_DST])
        || !cm_kind_is_page_locked(array[CM_SRC].kind)
        || !cm_is_ok(cm_layout_init(&one[CM_DST], &one[CM_SRC], &row))
        || !cm_is_ok(cm_region_bounds(&array[CM_SRC], &low, &high))) {
        return false; /* planning the copy says what is wrong */
    }
    uint64_t nbytes;
    return row.ndim == 0 && row.run_nbytes <= MOST_GATHERED_NBYTES
           && (uint64_t)(high - low) > REMEMBERED_NBYTES
           && cm_mul_u64(layer_count * row.run_nbytes, count, &nbytes)
           && nbytes >= LEAST_GATHERED_NBYTES && has_threads_to_gather(engine);
}

/* -- for the copy threads --------------------------------------------------------------- */

/* One run in a list takes as much time as the copy threads need for this many of the
 * shortest rows. So a list is no slower if each of its runs joins so many rows. */
enum { ROWS_A_LISTED_RUN = 64 };

/* Fill in a layer. *suits is false if its rows are not single runs, or if they have no
 * bytes. */
static cm_status
init_numbered_layer(const cm_layer *layer, cm_numbered_layer *out, bool *suits)
{
    cm_layout row;
    cm_region rows[2] = {row_of(&layer->array[CM_DST]), row_of(&layer->array[CM_SRC])};
    CM_TRY(cm_layout_init(&rows[CM_DST], &rows[CM_SRC], &row));
    *suits = row.ndim == 0 && row.run_nbytes > 0;
    out->row_nbytes = row.run_nbytes;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        out->array[side] = layer->array[side];
        out->stride[side] = layer->array[side].strides[0];
        out->end[side] = end_at(layer, (cm_side)side, row.offset[side]);
        if (*suits && out->end[side].is_file
            && cm_kind_is_pageable(out->end[side].kind)) {
            CM_TRY(cm_numbered_layer_make_windows(out, (cm_side)side));
        }
    }
    return cm_ok();
}

/* Choose the way of a layer. *many has the way of the layers before it. Returns false
 * if this layer would go another way than they do, or if its way cannot copy rows by
 * their numbers. */
static bool
goes_along(cm_engine *engine, const cm_numbered_layer *layer, bool on_stream,
           bool gathers, bool is_first, cm_many *many)
{
    int device, src_device;
    const cm_piece piece = {.dst = layer->end[CM_DST], .src = layer->end[CM_SRC]};
    cm_end_facts dst = cm_engine_facts_of(engine, &layer->array[CM_DST]);
    cm_end_facts src = cm_engine_facts_of(engine, &layer->array[CM_SRC]);
    src.locked = src.locked && !gathers;
    cm_many_way way =
        cm_piece_choose_way(&piece, dst, src, on_stream, &device, &src_device);
    if (is_first) {
        many->way = way;
        many->device = device;
        many->src_device = src_device;
    }
    if (way != many->way || device != many->device) {
        return false;
    }
    return way == CM_MANY_HOST
           || (way == CM_MANY_UP && cm_piece_end_is_on_device(&piece.dst))
           || (way == CM_MANY_DOWN && cm_piece_end_is_on_device(&piece.src));
}

/* Fill in all layers. *suits becomes false if one of them does not suit. */
static cm_status
collect_layers(cm_engine *engine, const cm_layer *layers,
               cm_chosen_rows *const numbers[2], bool on_stream, bool gathers,
               cm_many *many, bool *suits)
{
    cm_numbered_rows *rows = many->rows;
    for (uint64_t i = 0; *suits && i < rows->layer_count; i++) {
        CM_TRY(init_numbered_layer(&layers[i], &rows->layers[i], suits));
        for (int side = CM_DST; side <= CM_SRC; side++) {
            const cm_chosen_rows *of = numbers[side];
            *suits = *suits
                     && (of->rows == NULL
                         || layers[i].array[side].shape[0] == of->row_count);
        }
        *suits =
            *suits
            && goes_along(engine, &rows->layers[i], on_stream, gathers, i == 0, many);
    }
    return cm_ok();
}

/* True if a list of the runs is short. The numbers are lent to the rows for this. */
static bool
is_list_short(cm_numbered_rows *rows, cm_chosen_rows *const numbers[2])
{
    uint64_t most = rows->count / ROWS_A_LISTED_RUN;
    most = most > 0 ? most : 1;
    for (uint64_t i = 0; rows->count > most && i < rows->layer_count; i++) {
        if (!cm_numbered_layer_is_dense(&rows->layers[i])) {
            return false;
        }
    }
    rows->numbers[CM_DST] = numbers[CM_DST]->rows;
    rows->numbers[CM_SRC] = numbers[CM_SRC]->rows;
    bool is_short = cm_numbered_rows_count_runs(rows, most) <= most;
    rows->numbers[CM_DST] = NULL;
    rows->numbers[CM_SRC] = NULL;
    return is_short;
}

/* Drop the numbers of a side if each is one higher than the one before. They need not
 * be looked up, since the rows are then 0, 1, … of an array that begins with the first
 * of them. */
static void
drop_even_numbers(cm_numbered_rows *rows, cm_side side)
{
    int64_t *numbers = rows->numbers[side];
    for (uint64_t i = 1; numbers != NULL && i < rows->count; i++) {
        if (numbers[i] != numbers[0] + (int64_t)i) {
            return;
        }
    }
    for (uint64_t i = 0; numbers != NULL && i < rows->layer_count; i++) {
        cm_piece_end *end = &rows->layers[i].end[side];
        int64_t offset = numbers[0] * rows->layers[i].stride[side];
        end->host = end->host == NULL ? NULL : end->host + offset;
        end->address = end->address == 0 ? 0 : end->address + (uint64_t)offset;
    }
    cm_shared_numbers_release(numbers);
    rows->numbers[side] = NULL;
}

cm_status
cm_numbered_many_create(cm_engine *engine, const cm_layer *layers, uint64_t layer_count,
                        cm_chosen_rows *const numbers[2], bool on_stream, bool gathers,
                        cm_many **out)
{
    *out = NULL;
    bool suits = layer_count > 0 && numbers[CM_DST]->count > 0;
    if (!suits) {
        return cm_ok();
    }
    cm_many *many = calloc(1, sizeof(*many));
    CM_TRY(cm_allocated(many != NULL, sizeof(*many)));
    many->rows = cm_numbered_rows_create(numbers[CM_DST]->count, layer_count);
    cm_status status = cm_allocated(many->rows != NULL, layer_count);
    if (cm_is_ok(status)) {
        status =
            collect_layers(engine, layers, numbers, on_stream, gathers, many, &suits);
    }
    if (cm_is_ok(status) && suits && !is_list_short(many->rows, numbers)) {
        status = cm_numbered_rows_place(many->rows, &many->span);
        many->nbytes = many->span;
        if (cm_is_ok(status)) {
            many->rows->numbers[CM_DST] = cm_shared_numbers_hold(numbers[CM_DST]->rows);
            many->rows->numbers[CM_SRC] = cm_shared_numbers_hold(numbers[CM_SRC]->rows);
            drop_even_numbers(many->rows, CM_DST);
            drop_even_numbers(many->rows, CM_SRC);
            *out = many;
            return cm_ok();
        }
    }
    cm_many_destroy(many);
    return status;
}

/* -- for a kernel ------------------------------------------------------------------- */

/* Note what a kernel has to know about one end of a layer beyond its addresses. */
static cm_status
note_end(cm_kernel_rows *rows, const cm_region *array, cm_side side)
{
    int64_t low, high;
    bool is_locked = cm_kind_is_page_locked(array->kind);
    if (cm_region_is_on_device(array)) {
        return cm_ok();
    }
    CM_TRY(cm_region_bounds(array, &low, &high));
    if (low == high) {
        return cm_ok();
    }
    rows->move.is_over_bus = rows->move.is_over_bus || is_locked;
    rows->move.is_to_host = rows->move.is_to_host || (is_locked && side == CM_DST);
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
    CM_TRY(note_end(rows, &array[CM_DST], CM_DST));
    CM_TRY(note_end(rows, &array[CM_SRC], CM_SRC));
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
