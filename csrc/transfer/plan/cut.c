/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/cut.h"

enum { RAMP_EDGE = 4096 }; /* growing pieces are whole pages, where they can be */

void
cm_cut_init(cm_cut *cut, const cm_layout *whole, uint64_t piece_nbytes)
{
    uint64_t inner = whole->run_nbytes;
    *cut = (cm_cut){.whole = whole, .axis = whole->ndim, .done = inner == 0};
    cut->left_nbytes = cm_layout_nbytes(whole);
    cut->unit_nbytes = 1;
    if (piece_nbytes < 1) {
        piece_nbytes = 1;
    }
    if (inner > piece_nbytes) {
        cut->step = (int64_t)piece_nbytes;
        return;
    }
    cut->step = (int64_t)inner;
    while (cut->axis > 0) {
        cut->axis--;
        cut->unit_nbytes = inner;
        int64_t length = whole->shape[cut->axis];
        uint64_t room = piece_nbytes / inner;
        if ((uint64_t)length > room) {
            cut->step = (int64_t)room;
            return;
        }
        cut->step = length;
        inner *= (uint64_t)length;
    }
}

void
cm_cut_ramp(cm_cut *cut, uint64_t least_nbytes)
{
    cut->least_nbytes = least_nbytes;
}

void
cm_cut_align(cm_cut *cut, const void *base, uintptr_t step)
{
    cut->edge_base = (uintptr_t)base;
    cut->edge_step = cut->whole->ndim == 0 ? step : 0;
}

static int64_t
length_of(const cm_layout *layout, int axis)
{
    return axis < layout->ndim ? layout->shape[axis] : (int64_t)layout->run_nbytes;
}

/* Lengths of the axis in the next piece. */
static int64_t
next_step(const cm_cut *cut)
{
    int64_t at = cut->index[cut->axis];
    int64_t left = length_of(cut->whole, cut->axis) - at;
    int64_t step = cut->step;
    if (cut->least_nbytes > 0) {
        uint64_t half = cut->left_nbytes / 2;
        uint64_t room = half < cut->done_nbytes ? half : cut->done_nbytes;
        room = room > RAMP_EDGE ? room - room % RAMP_EDGE : room;
        room = room < cut->least_nbytes ? cut->least_nbytes : room;
        uint64_t units = room / cut->unit_nbytes;
        units = units < 1 ? 1 : units;
        step = units < (uint64_t)step ? (int64_t)units : step;
    }
    if (step >= left) {
        return left;
    }
    if (cut->edge_step > 0) {
        uintptr_t begin = cut->edge_base + (uintptr_t)at;
        uintptr_t end = begin + (uintptr_t)step;
        end -= end % cut->edge_step;
        step = end > begin ? (int64_t)(end - begin) : step;
    }
    return step;
}

/* On to what comes after `taken` lengths. */
static void
pass(cm_cut *cut, int64_t taken)
{
    uint64_t nbytes = (uint64_t)taken * cut->unit_nbytes;
    cut->done_nbytes += nbytes;
    cut->left_nbytes -= nbytes;
    cut->index[cut->axis] += taken;
    for (int axis = cut->axis; cut->index[axis] >= length_of(cut->whole, axis);
         axis--) {
        if (axis == 0) {
            cut->done = true;
            break;
        }
        cut->index[axis] = 0;
        cut->index[axis - 1]++;
    }
}

uint64_t
cm_cut_count(const cm_cut *cut)
{
    if (cut->whole->run_nbytes == 0) {
        return 0;
    }
    if (cut->least_nbytes == 0 && cut->edge_step == 0) {
        int64_t length = length_of(cut->whole, cut->axis);
        uint64_t count = (uint64_t)(length / cut->step + (length % cut->step != 0));
        for (int axis = 0; axis < cut->axis; axis++) {
            count *= (uint64_t)cut->whole->shape[axis];
        }
        return count;
    }
    cm_cut walk = *cut;
    uint64_t count = 0;
    for (; !walk.done; count++) {
        pass(&walk, next_step(&walk));
    }
    return count;
}

bool
cm_cut_next(cm_cut *cut, cm_layout *piece)
{
    const cm_layout *whole = cut->whole;
    if (cut->done) {
        return false;
    }
    *piece = (cm_layout){.run_nbytes = whole->run_nbytes,
                         .dst_offset = whole->dst_offset,
                         .src_offset = whole->src_offset};
    for (int axis = 0; axis <= cut->axis && axis < whole->ndim; axis++) {
        piece->dst_offset += cut->index[axis] * whole->dst_strides[axis];
        piece->src_offset += cut->index[axis] * whole->src_strides[axis];
    }
    int64_t taken = next_step(cut);
    if (cut->axis == whole->ndim) {
        piece->dst_offset += cut->index[cut->axis];
        piece->src_offset += cut->index[cut->axis];
        piece->run_nbytes = (uint64_t)taken;
    }
    for (int axis = cut->axis; axis < whole->ndim; axis++) {
        int64_t length = axis == cut->axis ? taken : whole->shape[axis];
        if (length > 1) {
            piece->shape[piece->ndim] = length;
            piece->dst_strides[piece->ndim] = whole->dst_strides[axis];
            piece->src_strides[piece->ndim] = whole->src_strides[axis];
            piece->ndim++;
        }
    }
    pass(cut, taken);
    return true;
}
