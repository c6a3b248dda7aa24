/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/numbered.h"

#include <string.h>

#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "base/row_numbers.h"
#include "base/simd_copy.h"
#include "transfer/routes/routes.h"

enum {
    /* A thread that copies a shorter row mostly waits for its first bytes to arrive
     * from memory. With more threads, more rows are waited for at the same time. With
     * longer rows a few threads already read as fast as the memory delivers. */
    SHORT_NBYTES = 1024,
    /* If the slots then go to a device, the threads only have to be faster than its
     * link. With short rows a few threads are fast enough, because each row is
     * prefetched before it is needed, and more threads would be in the way of the one
     * that queues the slots. A few threads also suffice for rows of a page or more, in
     * which the processor reads ahead by itself. Rows of a length between these two
     * take all threads. */
    PAGE_NBYTES = 4096,
    WIDE_NBYTES = 4096, /* a shorter part of a row is copied faster through the
                           caches */
    ROWS_AT_ONCE = 64,  /* rows of a file whose pages are brought in before a copy */
};

/* -- before anything is moved ------------------------------------------------------- */

cm_status
cm_numbered_share_locked(cm_job *job)
{
    const cm_numbered_rows *rows = job->many->rows;
    bool looks = cm_registry_has_pieces(job->engine->registry);
    for (uint64_t i = 0; looks && i < rows->layer_count; i++) {
        const cm_region *array = rows->layers[i].array;
        cm_page_shares *locked = &job->ticket->locked;
        CM_TRY(cm_engine_share_locked(job->engine, &array[CM_DST], locked));
        CM_TRY(cm_engine_share_locked(job->engine, &array[CM_SRC], locked));
    }
    return cm_ok();
}

/* Probe the runs of one side of a layer that are long enough. Rows that lie without
 * gaps, and have no numbers, are a single run, which costs one look. */
static cm_status
probe_side(const cm_numbered_rows *rows, const cm_numbered_layer *layer, cm_side side)
{
    uint64_t end = layer->start + rows->count * layer->row_nbytes;
    bool is_packed = cm_numbered_rows_are_packed(rows, layer, side);
    if (!cm_kind_is_pageable(layer->end[side].kind)
        || (!is_packed && layer->row_nbytes < CM_PROBE_HOST_NBYTES)) {
        return cm_ok();
    }
    for (uint64_t at = layer->start; at < end;) {
        cm_numbered_run run = cm_numbered_rows_run_at(rows, side, at, end);
        if (run.nbytes >= CM_PROBE_HOST_NBYTES) {
            CM_TRY(
                cm_pages_probe(run.end->host + run.offset, run.nbytes, side == CM_DST));
        }
        at += run.nbytes;
    }
    return cm_ok();
}

cm_status
cm_numbered_probe_pages(const cm_numbered_rows *rows)
{
    for (uint64_t i = 0; i < rows->layer_count; i++) {
        CM_TRY(probe_side(rows, &rows->layers[i], CM_SRC));
        CM_TRY(probe_side(rows, &rows->layers[i], CM_DST));
    }
    return cm_ok();
}

/* True if rows of this length are copied faster the more threads copy them. */
static bool
needs_all_threads(const cm_many *many, uint64_t row_nbytes)
{
    bool is_short = row_nbytes < SHORT_NBYTES;
    if (many->way != CM_MANY_UP) {
        return is_short;
    }
    return !is_short && row_nbytes < PAGE_NBYTES;
}

cm_copy_way
cm_numbered_choose_way(const cm_job *job, bool wide)
{
    const cm_many *many = job->many;
    const cm_numbered_layer *layer = &many->rows->layers[0];
    bool is_file = layer->end[CM_DST].is_file || layer->end[CM_SRC].is_file;
    if (is_file || needs_all_threads(many, layer->row_nbytes)) {
        return wide ? CM_COPY_WIDE_ALL : CM_COPY_PLAIN_ALL;
    }
    return wide ? CM_COPY_WIDE : CM_COPY_PLAIN;
}

/* -- a part ------------------------------------------------------------------------- */

/* The bytes of a layer that one thread copies between the layer's two ends. One of the
 * ends may be a slot of the ring, in which the rows lie one behind the other. */
typedef struct part_of_layer {
    const cm_numbered_layer *layer;
    cm_numbered_end end[2]; /* indexed by cm_side; row 0 is the first row of the part */
    uint64_t row_count;     /* rows of which the part has bytes */
    uint64_t skipped;       /* bytes of the first row that belong to another part */
    uint64_t nbytes;
    bool wide;
} part_of_layer;

static bool
is_file(const part_of_layer *p, cm_side side)
{
    return p->layer->is_there[side] != NULL;
}

/* Populate the pages of a window of a mapped file. If this fails for the window,
 * populate only its bytes from `begin` to `end`, which are those of the rows. The rest
 * of the window may lie past the end of a file that was cut short. */
static cm_status
bring_in(const cm_numbered_layer *layer, cm_side side, size_t window, uintptr_t begin,
         uintptr_t end)
{
    uintptr_t length = cm_numbered_window(side);
    uintptr_t from = layer->low[side] + window * length;
    uintptr_t to = cm_least(from + length, layer->high[side]);
    bool writes = side == CM_DST;
    if (cm_is_ok(cm_pages_populate((const void *)from, to - from, writes))) {
        atomic_store_explicit(&layer->is_there[side][window], 1, memory_order_relaxed);
        return cm_ok();
    }
    from = from > begin ? from : begin;
    to = cm_least(to, end);
    return cm_pages_populate((const void *)from, to - from, writes);
}

/* Bring in the pages of some bytes of a row, if this end maps a file, unless they were
 * brought in before. */
static cm_status
populate(const part_of_layer *p, cm_side side, uint64_t row, uint64_t from,
         uint64_t nbytes)
{
    const cm_numbered_layer *layer = p->layer;
    if (!is_file(p, side)) {
        return cm_ok();
    }
    uintptr_t begin = (uintptr_t)cm_numbered_at(&p->end[side], row) + from;
    uintptr_t end = begin + nbytes;
    size_t last = (end - 1 - layer->low[side]) / cm_numbered_window(side);
    for (size_t i = (begin - layer->low[side]) / cm_numbered_window(side); i <= last;
         i++) {
        if (!atomic_load_explicit(&layer->is_there[side][i], memory_order_relaxed)) {
            CM_TRY(bring_in(layer, side, i, begin, end));
        }
    }
    return cm_ok();
}

/* Check that a file was not cut short since its pages were populated. It is enough to
 * look at the row that lies closest to the end of the file. */
static cm_status
probe_farthest(const part_of_layer *p, cm_side side)
{
    const char *farthest = cm_numbered_at(&p->end[side], 0);
    if (!is_file(p, side)) {
        return cm_ok();
    }
    for (uint64_t i = 1; i < p->row_count; i++) {
        const char *row = cm_numbered_at(&p->end[side], i);
        farthest = row > farthest ? row : farthest;
    }
    return cm_pages_probe(farthest, p->layer->row_nbytes, side == CM_DST);
}

static cm_status
populate_both(const part_of_layer *p, uint64_t row, uint64_t from, uint64_t nbytes)
{
    CM_TRY(populate(p, CM_SRC, row, from, nbytes));
    return populate(p, CM_DST, row, from, nbytes);
}

/* Copy some bytes of one row. */
static cm_status
copy_bytes(const part_of_layer *p, uint64_t row, uint64_t from, uint64_t nbytes)
{
    char *to = cm_numbered_at(&p->end[CM_DST], row) + from;
    const char *here = cm_numbered_at(&p->end[CM_SRC], row) + from;
    CM_TRY(populate_both(p, row, from, nbytes));
    if (p->wide && nbytes >= WIDE_NBYTES) {
        cm_wide_copy(to, here, (size_t)nbytes);
    }
    else {
        memcpy(to, here, (size_t)nbytes);
    }
    return cm_ok();
}

/* Copy whole rows, those of a file a few at a time. */
static cm_status
copy_rows(const part_of_layer *p, uint64_t first, uint64_t count)
{
    uint64_t nbytes = p->layer->row_nbytes;
    bool has_file = is_file(p, CM_DST) || is_file(p, CM_SRC);
    uint64_t most = has_file ? ROWS_AT_ONCE : count;
    for (uint64_t end = first + count; first < end; first += most) {
        uint64_t some = cm_least(end - first, most);
        for (uint64_t i = 0; has_file && i < some; i++) {
            CM_TRY(populate_both(p, first + i, 0, nbytes));
        }
        cm_numbered_end dst = cm_numbered_from(p->end[CM_DST], first);
        cm_numbered_end src = cm_numbered_from(p->end[CM_SRC], first);
        cm_numbered_copy(&dst, &src, some, (size_t)nbytes, p->wide);
    }
    return cm_ok();
}

/* Copy the end of the first row, all whole rows, and the beginning of the last. */
static cm_status
copy_part(const part_of_layer *p)
{
    uint64_t length = p->layer->row_nbytes;
    uint64_t left = p->nbytes;
    uint64_t row = 0;
    CM_TRY(probe_farthest(p, CM_SRC));
    CM_TRY(probe_farthest(p, CM_DST));
    if (p->skipped > 0) {
        uint64_t head = cm_least(length - p->skipped, left);
        CM_TRY(copy_bytes(p, 0, p->skipped, head));
        left -= head;
        row = 1;
    }
    uint64_t whole = left / length;
    if (whole > 0) {
        CM_TRY(copy_rows(p, row, whole));
    }
    left -= whole * length;
    return left == 0 ? cm_ok() : copy_bytes(p, row + whole, 0, left);
}

/* Begin a part of a layer. Its first byte is byte `at` of the packed space, in which
 * the rows of all layers lie one behind the other. If one end of the copy is a slot,
 * that byte lies at `slot`. */
static part_of_layer
begin_part(const cm_many *many, const cm_numbered_layer *layer, uint64_t at, char *slot,
           bool wide)
{
    uint64_t first = (at - layer->start) / layer->row_nbytes;
    part_of_layer p = {.layer = layer,
                       .skipped = (at - layer->start) % layer->row_nbytes,
                       .wide = wide};
    for (int side = CM_DST; side <= CM_SRC; side++) {
        bool is_slot = many->way == (side == CM_DST ? CM_MANY_UP : CM_MANY_DOWN);
        if (is_slot) { /* the first row may begin before the slot */
            uintptr_t begin = (uintptr_t)slot - (uintptr_t)p.skipped;
            p.end[side] = (cm_numbered_end){.base = (char *)begin,
                                            .stride = (int64_t)layer->row_nbytes};
            continue;
        }
        p.end[side] = cm_numbered_from(
            cm_numbered_rows_end(many->rows, layer, (cm_side)side), first);
    }
    return p;
}

/* For the route HOST there is no slot, and the offsets of both sides are the same. */
void
cm_numbered_move_part(const void *context, const cm_layout *part, void *dst,
                      const void *src, bool wide)
{
    cm_job *job = (cm_job *)(uintptr_t)context;
    const cm_many *many = job->many;
    bool up = many->way == CM_MANY_UP;
    uint64_t at = (uint64_t)part->offset[up ? CM_SRC : CM_DST];
    uint64_t end = at + part->run_nbytes;
    char *slot = NULL;
    if (up) {
        slot = (char *)dst + part->offset[CM_DST];
    }
    else if (many->way == CM_MANY_DOWN) {
        slot = (char *)(uintptr_t)src + part->offset[CM_SRC];
    }
    while (at < end && atomic_load(&job->lost_error) == 0) {
        const cm_numbered_layer *layer = cm_numbered_rows_find(many->rows, at);
        uint64_t after = layer->start + many->rows->count * layer->row_nbytes;
        part_of_layer p = begin_part(many, layer, at, slot, wide);
        p.nbytes = cm_least(after, end) - at;
        p.row_count = (p.skipped + p.nbytes - 1) / layer->row_nbytes + 1;
        cm_status status = copy_part(&p);
        if (!cm_is_ok(status)) {
            atomic_store(&job->lost_error, (int)status.arg);
            return;
        }
        at += p.nbytes;
        slot = slot == NULL ? NULL : slot + p.nbytes;
    }
}

/* -- a slot on the device ----------------------------------------------------------- */

/* Return how many rows an array of this side has. All layers have the same count, since
 * they share the numbers. */
static int64_t
row_count_of(const cm_numbered_rows *rows, cm_side side)
{
    return rows->layers[0].array[side].shape[0];
}

/* Return how many bytes wide the numbers of a side are in the list that a kernel
 * reads. */
static uint32_t
number_nbytes(const cm_numbered_rows *rows, cm_side side)
{
    return row_count_of(rows, side) <= INT32_MAX ? sizeof(int32_t) : sizeof(int64_t);
}

/* Put the numbers of the device's side where a kernel reads them, once for all slots.
 * Returns false if there is no page-locked memory for them. */
static bool
take_numbers(cm_job *job, cm_side side)
{
    const cm_numbered_rows *rows = job->many->rows;
    uint32_t width = number_nbytes(rows, side);
    uint64_t nbytes = rows->count * width;
    cm_numbers_seen seen = {.has_outside = false}; /* they have been checked before */
    if (job->row_numbers != NULL) {
        return true;
    }
    if (!cm_is_ok(
            cm_engine_alloc(job->engine, -1, nbytes, NULL, NULL, &job->row_numbers))) {
        job->row_numbers = NULL;
        return false;
    }
    cm_numbers_write_64(rows->numbers[side], job->row_numbers->host, width, rows->count,
                        row_count_of(rows, side), &seen);
    return true;
}

static cm_side
device_side_of(const cm_many *many)
{
    return many->way == CM_MANY_UP ? CM_DST : CM_SRC;
}

bool
cm_numbered_goes_by_kernel(cm_job *job, const cm_slot *s)
{
    const cm_numbered_rows *rows = job->many->rows;
    cm_side side = device_side_of(job->many);
    const cm_numbered_layer *layer =
        cm_numbered_rows_find(rows, (uint64_t)s->piece.offset[CM_DST]);
    if (s->pinned == NULL || cm_numbered_rows_are_packed(rows, layer, side)
        || layer->row_nbytes >= CM_NUMBERED_LONG_NBYTES
        || s->piece.run_nbytes / layer->row_nbytes <= CM_TABLE_MAX_COUNT) {
        return false;
    }
    return rows->numbers[side] == NULL || take_numbers(job, side);
}

/* Launch the kernel for whole rows of a layer, from row `first` on, which lie one
 * behind the other at `there`. */
static cm_status
launch_rows(cm_job *job, const cm_numbered_layer *layer, uint64_t first, uint64_t count,
            cm_address there, bool is_over_bus)
{
    const cm_many *many = job->many;
    cm_side side = device_side_of(many);
    cm_side other = side == CM_DST ? CM_SRC : CM_DST;
    cm_rows_move move = {.count = count,
                         .is_over_bus = is_over_bus,
                         .is_to_host = is_over_bus && side == CM_SRC};
    cm_rows_layer rows = {.row_nbytes = layer->row_nbytes};
    rows.address[side] = layer->end[side].address;
    rows.stride[side] = layer->stride[side];
    rows.row_count[side] = (uint64_t)layer->array[side].shape[0];
    rows.address[other] = there;
    rows.stride[other] = (int64_t)layer->row_nbytes;
    rows.row_count[other] = count;
    if (many->rows->numbers[side] != NULL) {
        uint32_t width = number_nbytes(many->rows, side);
        move.numbers[side] =
            (cm_row_numbers){.address = job->row_numbers->address + first * width,
                             .stride = width,
                             .nbytes = width,
                             .is_signed = true};
    }
    else {
        rows.address[side] += first * (uint64_t)layer->stride[side];
        rows.row_count[side] -= first;
    }
    return cm_rows_launch(&job->engine->kernels, many->device, &move, &rows, 1,
                          job->stream->handle);
}

/* Add one run of a slot to the table. `at` is its place in the packed space, and
 * `there` is its address in the slot. */
static cm_status
add_to_table(const cm_many *many, uint64_t at, uint64_t nbytes, cm_address there,
             cm_table *table)
{
    cm_side side = device_side_of(many);
    cm_numbered_run run = cm_numbered_rows_run_at(many->rows, side, at, at + nbytes);
    cm_address place = run.end->address + (uint64_t)run.offset;
    return cm_table_add(table, side == CM_DST ? place : there,
                        side == CM_DST ? there : place, nbytes);
}

/* A slot may have the end of a row, whole rows, and the beginning of a row of each
 * layer. */
cm_status
cm_numbered_launch(cm_job *job, const cm_slot *s, cm_address there, bool is_over_bus,
                   cm_table *table)
{
    const cm_many *many = job->many;
    uint64_t at = (uint64_t)s->piece.offset[CM_DST];
    uint64_t end = at + s->piece.run_nbytes;
    while (at < end) {
        const cm_numbered_layer *layer = cm_numbered_rows_find(many->rows, at);
        uint64_t length = layer->row_nbytes;
        uint64_t row = (at - layer->start) / length;
        uint64_t skipped = (at - layer->start) % length;
        uint64_t left = cm_least(end, layer->start + many->rows->count * length) - at;
        uint64_t nbytes = cm_least(length - skipped, left);
        if (skipped > 0 || left < length) {
            CM_TRY(add_to_table(many, at, nbytes, there, table));
        }
        else {
            nbytes = left - left % length;
            CM_TRY(launch_rows(job, layer, row, nbytes / length, there, is_over_bus));
        }
        at += nbytes;
        there += nbytes;
    }
    return cm_ok();
}
