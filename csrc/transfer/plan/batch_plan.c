/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/batch_plan.h"

#include <stdlib.h>

#include "transfer/plan/numbered_rows.h"

enum {
    UNIT_NBYTES = 16, /* what the kernel moves at once where both ends are aligned */
};

bool
cm_piece_end_is_on_device(const cm_piece_end *end)
{
    return cm_kind_is_on_device(end->kind) || end->host == NULL;
}

cm_address
cm_piece_end_address(const cm_piece_end *end)
{
    return cm_piece_end_is_on_device(end) ? end->address : (uintptr_t)end->host;
}

cm_region
cm_piece_end_region(const cm_piece_end *end, uint64_t nbytes)
{
    cm_region region = {.host = end->host,
                        .address = end->address,
                        .kind = end->kind,
                        .device = end->device,
                        .is_file = end->is_file,
                        .ndim = 1,
                        .itemsize = 1};
    region.shape[0] = (int64_t)nbytes;
    region.strides[0] = 1;
    return region;
}

static cm_many_way
choose_host_way(const cm_piece *piece, cm_end_facts dst, cm_end_facts src,
                bool on_stream, int *device)
{
    bool reaches_dst = on_stream && dst.locked && piece->dst.address != 0;
    bool reaches_src = on_stream && src.locked && piece->src.address != 0;
    bool reaches_both = reaches_dst && reaches_src;
    /* A device copies only in the order of a stream, and only if it reaches an end.
     * Otherwise the host copies. The host also copies if the ends are page-locked
     * memory that belongs to two different devices. */
    if ((!reaches_dst && !reaches_src)
        || (reaches_both && piece->dst.device != piece->src.device)) {
        *device = -1;
        return CM_MANY_HOST;
    }
    *device = reaches_dst ? piece->dst.device : piece->src.device;
    if (reaches_both) {
        return CM_MANY_TABLE;
    }
    return reaches_dst ? CM_MANY_UP : CM_MANY_DOWN;
}

cm_many_way
cm_piece_choose_way(const cm_piece *piece, cm_end_facts dst, cm_end_facts src,
                    bool on_stream, int *device, int *src_device)
{
    bool dst_on_device = cm_piece_end_is_on_device(&piece->dst);
    bool src_on_device = cm_piece_end_is_on_device(&piece->src);
    *src_device = -1;
    *device = dst_on_device ? piece->dst.device : piece->src.device;
    if (!dst.whole || !src.whole) {
        return CM_MANY_ALONE;
    }
    if (!dst_on_device && !src_on_device) {
        return choose_host_way(piece, dst, src, on_stream, device);
    }
    if (dst_on_device && src_on_device) {
        *src_device = piece->src.device;
        return *device == *src_device ? CM_MANY_TABLE : CM_MANY_PEER;
    }
    if (dst.locked && src.locked) {
        return piece->dst.address != 0 && piece->src.address != 0 ? CM_MANY_TABLE
                                                                  : CM_MANY_ALONE;
    }
    return dst_on_device ? CM_MANY_UP : CM_MANY_DOWN;
}

/* True if `end` begins directly after the `nbytes` bytes that begin at `before`, and
 * both lie in the same allocation. All ordinary memory counts as one allocation, since
 * the host can read and write it across the borders of allocations. */
static bool
follows(const cm_piece_end *before, uint64_t nbytes, const cm_piece_end *end)
{
    bool same = before->owner != NULL && before->owner == end->owner;
    if (before->kind != end->kind || before->device != end->device
        || before->is_file != end->is_file
        || !(same || cm_kind_is_pageable(end->kind))) {
        return false;
    }
    return (end->host == NULL
                ? before->host == NULL
                : before->host != NULL && before->host + nbytes == end->host)
           && (end->address == 0
                   ? before->address == 0
                   : before->address != 0 && before->address + nbytes == end->address);
}

static void
add_piece(cm_many *many, const cm_piece *piece)
{
    cm_piece *last = many->count == 0 ? NULL : &many->pieces[many->count - 1];
    many->nbytes += piece->nbytes;
    if (last != NULL && follows(&last->dst, last->nbytes, &piece->dst)
        && follows(&last->src, last->nbytes, &piece->src)) {
        last->nbytes += piece->nbytes;
        return;
    }
    many->pieces[many->count++] = *piece;
}

/* Give each piece its place in the packed space, which cm_many (batch_plan.h) tells
 * about. The place is aligned as the address that the piece has on the device. On the
 * way up this is the target's address, and on the way down the source's. If the host
 * copies alone, the pieces lie without gaps. */
static void
place_pieces(cm_many *many)
{
    uint64_t at = 0;
    for (uint64_t i = 0; i < many->count; i++) {
        const cm_piece *piece = &many->pieces[i];
        uint64_t like = at;
        if (many->way == CM_MANY_UP) {
            like = piece->dst.address;
        }
        else if (many->way == CM_MANY_DOWN) {
            like = piece->src.address;
        }
        at += (like - at) % UNIT_NBYTES;
        many->starts[i] = at;
        at += piece->nbytes;
    }
    many->starts[many->count] = at;
    many->span = at;
}

cm_status
cm_many_create(const cm_piece *pieces, const uint8_t *groups, uint64_t piece_count,
               uint8_t which, const cm_many *shape, cm_many **out)
{
    uint64_t room = 0;
    for (uint64_t i = 0; i < piece_count; i++) {
        room += groups[i] == which;
    }
    cm_many *many = calloc(1, sizeof(*many));
    CM_TRY(cm_allocated(many != NULL, sizeof(*many)));
    *many = *shape;
    many->pieces = calloc((size_t)room + 1, sizeof(*many->pieces));
    if (many->pieces == NULL) {
        cm_many_destroy(many);
        return cm_fail(CM_ENOMEM, room * sizeof(*many->pieces));
    }
    for (uint64_t i = 0; i < piece_count; i++) {
        if (groups[i] == which) {
            add_piece(many, &pieces[i]);
        }
    }
    if (many->way == CM_MANY_HOST || many->way == CM_MANY_UP
        || many->way == CM_MANY_DOWN) {
        uint64_t nbytes = (many->count + 1) * sizeof(*many->starts);
        many->starts = malloc((size_t)nbytes);
        if (many->starts == NULL) {
            cm_many_destroy(many);
            return cm_fail(CM_ENOMEM, nbytes);
        }
        place_pieces(many);
    }
    *out = many;
    return cm_ok();
}

void
cm_many_destroy(cm_many *many)
{
    if (many != NULL) {
        free(many->pieces);
        free(many->starts);
        if (many->rows != NULL) {
            cm_numbered_rows_destroy(many->rows);
        }
        free(many);
    }
}

/* Set `out` to the distance between two ends. Returns whether it can be a pitch. A
 * pitch is neither shorter than a row, which has `width` bytes, nor longer than
 * CM_PITCH_MAX. */
static bool
pitch_of(const cm_piece_end *first, const cm_piece_end *second, uint64_t width,
         uint64_t *out)
{
    *out = cm_piece_end_address(second) - cm_piece_end_address(first);
    return *out >= width && *out <= CM_PITCH_MAX;
}

static cm_region
rows_from(const cm_piece_end *end, uint64_t count, uint64_t pitch, uint64_t width)
{
    cm_region region = cm_piece_end_region(end, width);
    region.ndim = 2;
    region.shape[0] = (int64_t)count;
    region.shape[1] = (int64_t)width;
    region.strides[0] = (int64_t)pitch;
    region.strides[1] = 1;
    return region;
}

bool
cm_many_is_rows(const cm_many *many, cm_region *dst, cm_region *src)
{
    const cm_piece *first = many->pieces;
    uint64_t width = many->count == 0 ? 0 : first->nbytes;
    uint64_t dst_pitch, src_pitch;
    if (many->way != CM_MANY_TABLE || many->count < 2 || width < CM_PITCHED_MIN_WIDTH
        || first->dst.owner == NULL || first->src.owner == NULL
        || !pitch_of(&first[0].dst, &first[1].dst, width, &dst_pitch)
        || !pitch_of(&first[0].src, &first[1].src, width, &src_pitch)) {
        return false;
    }
    for (uint64_t i = 1; i < many->count; i++) {
        const cm_piece *piece = &many->pieces[i];
        if (piece->nbytes != width || piece->dst.owner != first->dst.owner
            || piece->src.owner != first->src.owner
            || cm_piece_end_address(&piece->dst)
                   != cm_piece_end_address(&first->dst) + i * dst_pitch
            || cm_piece_end_address(&piece->src)
                   != cm_piece_end_address(&first->src) + i * src_pitch) {
            return false;
        }
    }
    *dst = rows_from(&first->dst, many->count, dst_pitch, width);
    *src = rows_from(&first->src, many->count, src_pitch, width);
    return true;
}

uint64_t
cm_many_find(const cm_many *many, uint64_t at)
{
    uint64_t low = 0;
    uint64_t high = many->count;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (many->starts[middle] <= at) {
            low = middle;
        }
        else {
            high = middle;
        }
    }
    return low;
}

/* -- whether spans of addresses touch ----------------------------------------------- */

static bool
is_sorted(const cm_byte_span *spans, uint64_t count)
{
    for (uint64_t i = 1; i < count; i++) {
        if (spans[i].begin < spans[i - 1].begin) {
            return false;
        }
    }
    return true;
}

static int
compare(const void *a, const void *b)
{
    uint64_t x = ((const cm_byte_span *)a)->begin;
    uint64_t y = ((const cm_byte_span *)b)->begin;
    return (x > y) - (x < y);
}

/* Sort the spans by where they begin. Most lists are in that order already. */
static void
sort_spans(cm_byte_span *spans, uint64_t count)
{
    if (!is_sorted(spans, count)) {
        qsort(spans, (size_t)count, sizeof(*spans), compare);
    }
}

static cm_byte_span
hull_of(const cm_byte_span *spans, uint64_t count)
{
    cm_byte_span hull = spans[0];
    for (uint64_t i = 1; i < count; i++) {
        hull.begin = spans[i].begin < hull.begin ? spans[i].begin : hull.begin;
        hull.end = spans[i].end > hull.end ? spans[i].end : hull.end;
    }
    return hull;
}

bool
cm_byte_spans_touch(cm_byte_span *dst, cm_byte_span *src, uint64_t count)
{
    if (count == 0) {
        return false;
    }
    sort_spans(dst, count);
    for (uint64_t i = 1; i < count; i++) {
        if (cm_byte_spans_meet(dst[i - 1], dst[i])) {
            return true;
        }
    }
    if (!cm_byte_spans_meet(hull_of(dst, count), hull_of(src, count))) {
        return false;
    }
    sort_spans(src, count);
    for (uint64_t i = 0, k = 0; i < count && k < count;) {
        if (cm_byte_spans_meet(dst[i], src[k])) {
            return true;
        }
        if (dst[i].end < src[k].end) {
            i++;
        }
        else {
            k++;
        }
    }
    return false;
}
