/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/rows/pairs.h"

/* No thread of the kernel copies more than this many bytes at a time. The kernel uses
 * one width for all rows of a call, and this width has to divide the distance from each
 * row to the next (the unit of pairs.h). If the distance is not a multiple of
 * WIDEST_UNIT, the width is smaller, and copying each pair by itself may be faster. */
enum { WIDEST_UNIT = 16 };

/* What is known so far about one side of the pairs: about all targets, or about all
 * sources. */
typedef struct side_of_pairs {
    cm_address first; /* the address of the first pair's end on this side */
    cm_address low;   /* the lowest address of an end */
    cm_address high;  /* the highest address of an end */
    uint64_t unit;    /* the largest number that divides the size of a pair and the
                         distance of each end from `first` */
    bool has_device;  /* some ends are in memory of a device */
    bool has_host;    /* some ends are in memory of the host */
    bool has_locked;  /* some ends are in page-locked memory */
} side_of_pairs;

static uint64_t
greatest_divisor(uint64_t a, uint64_t b)
{
    while (b != 0) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* True if `unit` divides the distance. Most units are powers of two, for which no
 * division is needed. */
static inline bool
divides(uint64_t unit, uint64_t distance)
{
    return (unit & (unit - 1)) == 0 ? (distance & (unit - 1)) == 0
                                    : distance % unit == 0;
}

/* Add the end of one more pair to what is known about its side. Returns whether a
 * kernel of `device` can reach the end. */
static inline bool
add_end(side_of_pairs *side, const cm_piece_end *end, int device)
{
    bool on_device = cm_kind_is_on_device(end->kind) || end->host == NULL;
    bool is_reached =
        on_device ? end->device == device : !cm_kind_is_pageable(end->kind);
    uint64_t distance = end->address > side->first ? end->address - side->first
                                                   : side->first - end->address;
    if (!divides(side->unit, distance)) {
        side->unit = greatest_divisor(side->unit, distance);
    }
    side->low = end->address < side->low ? end->address : side->low;
    side->high = end->address > side->high ? end->address : side->high;
    side->has_device = side->has_device || on_device;
    side->has_host = side->has_host || !on_device;
    side->has_locked = side->has_locked || cm_kind_is_page_locked(end->kind);
    return is_reached && end->address != 0 && !end->is_file;
}

/* Describe the array in which all ends of a side are rows. */
static cm_region
array_of(const side_of_pairs *side, const cm_piece_end *first, uint64_t nbytes)
{
    cm_region array = cm_piece_end_region(first, nbytes);
    array.address = side->low;
    array.host = NULL;
    array.ndim = 2;
    array.shape[0] = (int64_t)((side->high - side->low) / side->unit + 1);
    array.shape[1] = (int64_t)nbytes;
    array.strides[0] = (int64_t)side->unit;
    array.strides[1] = 1;
    return array;
}

bool
cm_paired_rows_init(cm_paired_rows *self, const cm_piece *pieces, uint64_t count)
{
    if (count == 0) {
        return false;
    }
    const cm_piece *first = &pieces[0];
    uint64_t nbytes = first->nbytes;
    int device = first->dst.device;
    if (!cm_piece_end_is_on_device(&first->dst)) {
        device = first->src.device;
    }
    side_of_pairs sides[2];
    for (int side = CM_DST; side <= CM_SRC; side++) {
        cm_address address = side == CM_DST ? first->dst.address : first->src.address;
        sides[side] = (side_of_pairs){
            .first = address, .low = address, .high = address, .unit = nbytes};
    }
    for (uint64_t i = 0; i < count; i++) {
        const cm_piece *piece = &pieces[i];
        bool has_device = cm_piece_end_is_on_device(&piece->dst)
                          || cm_piece_end_is_on_device(&piece->src);
        if (piece->nbytes != nbytes || !has_device
            || !add_end(&sides[CM_DST], &piece->dst, device)
            || !add_end(&sides[CM_SRC], &piece->src, device)) {
            return false;
        }
    }
    for (int side = CM_DST; side <= CM_SRC; side++) {
        if (sides[side].unit != nbytes && sides[side].unit % WIDEST_UNIT != 0) {
            return false;
        }
    }
    self->device = device;
    self->has_sides_apart = sides[CM_DST].has_device != sides[CM_SRC].has_device
                            && sides[CM_DST].has_host != sides[CM_SRC].has_host;
    self->is_over_bus = sides[CM_DST].has_locked || sides[CM_SRC].has_locked;
    self->is_to_host = sides[CM_DST].has_locked;
    self->layer.array[CM_DST] = array_of(&sides[CM_DST], &first->dst, nbytes);
    self->layer.array[CM_SRC] = array_of(&sides[CM_SRC], &first->src, nbytes);
    self->layer.owner[CM_DST] = first->dst.owner;
    self->layer.owner[CM_SRC] = first->src.owner;
    return true;
}

void
cm_paired_rows_write(const cm_paired_rows *self, const cm_piece *pieces, cm_side side,
                     cm_kernel_numbers *numbers)
{
    const cm_region *array = &self->layer.array[side];
    uint64_t unit = (uint64_t)array->strides[0];
    bool is_power = (unit & (unit - 1)) == 0;
    int shift = __builtin_ctzll(unit);
    int32_t *narrow = numbers->at;
    int64_t *wide = numbers->at;
    for (uint64_t i = 0; i < numbers->count; i++) {
        const cm_piece_end *end = side == CM_DST ? &pieces[i].dst : &pieces[i].src;
        uint64_t offset = end->address - array->address;
        uint64_t row = is_power ? offset >> shift : offset / unit;
        if (numbers->nbytes == sizeof(*narrow)) {
            narrow[i] = (int32_t)row;
        }
        else {
            wide[i] = (int64_t)row;
        }
    }
}

cm_status
cm_paired_rows_find_touch(const cm_paired_rows *self,
                          const cm_kernel_numbers numbers[2], bool *touches,
                          bool *is_known)
{
    const cm_region *dst = &self->layer.array[CM_DST];
    /* Two targets touch each other exactly if they have the same number, but only if
     * rows are no longer than the unit: a longer row also touches rows with other
     * numbers. And no target touches a source if one side is on the device and the
     * other on the host. */
    *is_known = self->has_sides_apart && dst->strides[0] == dst->shape[1];
    return *is_known
               ? cm_kernel_numbers_find_twice(&numbers[CM_DST], dst->shape[0], touches)
               : cm_ok();
}
