/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/layout.h"

#include <string.h>

#include "base/checked_math.h"

static void
remove_axis(cm_layout *layout, int axis)
{
    layout->ndim--;
    memmove(&layout->axes[axis], &layout->axes[axis + 1],
            (size_t)(layout->ndim - axis) * sizeof(cm_axis));
}

/* Insert `new` where it keeps the strides on that side falling: before the first axis
 * with a smaller stride, and after any with the same one. */
static void
insert_axis(cm_layout *layout, cm_side side, cm_axis new)
{
    int axis = layout->ndim++;
    for (; axis > 0
           && cm_magnitude(layout->axes[axis - 1].stride[side])
                  < cm_magnitude(new.stride[side]);
         axis--) {
        layout->axes[axis] = layout->axes[axis - 1];
    }
    layout->axes[axis] = new;
}

void
cm_layout_sort(cm_layout *layout, cm_side side)
{
    int ndim = layout->ndim;
    layout->ndim = 0;
    for (int axis = 0; axis < ndim; axis++) {
        insert_axis(layout, side, layout->axes[axis]);
    }
}

/* True if one step of the outer axis leads to where the inner one ends. */
static bool
follows(const cm_axis *outer, const cm_axis *inner, cm_side side)
{
    int64_t end;
    return cm_mul_i64(inner->stride[side], inner->length, &end)
           && outer->stride[side] == end;
}

static void
join_axes(cm_layout *layout)
{
    for (int axis = layout->ndim - 1; axis > 0; axis--) {
        cm_axis *inner = &layout->axes[axis];
        cm_axis *outer = inner - 1;
        int64_t length;
        if (follows(outer, inner, CM_DST) && follows(outer, inner, CM_SRC)
            && cm_mul_i64(inner->length, outer->length, &length)) {
            inner->length = length;
            remove_axis(layout, axis - 1);
        }
    }
    for (; layout->ndim > 0 && !cm_layout_has_items(layout); layout->ndim--) {
        const cm_axis *last = &layout->axes[layout->ndim - 1];
        int64_t run = (int64_t)layout->run_nbytes;
        if (last->stride[CM_DST] != run || last->stride[CM_SRC] != run
            || !cm_mul_i64(run, last->length, &run)) {
            break;
        }
        layout->run_nbytes = (uint64_t)run;
    }
}

/* Add an axis of the two regions to the layout. Returns false if numbers overflow. */
static bool
take_axis(cm_layout *layout, cm_axis axis)
{
    int64_t dst_reach, src_reach;
    if (axis.length == 1) {
        return true;
    }
    if (!cm_mul_i64(axis.stride[CM_DST], axis.length - 1, &dst_reach)
        || !cm_mul_i64(axis.stride[CM_SRC], axis.length - 1, &src_reach)
        || axis.stride[CM_DST] == INT64_MIN || axis.stride[CM_SRC] == INT64_MIN) {
        return false;
    }
    if (axis.stride[CM_DST] > 0) {
        insert_axis(layout, CM_DST, axis);
        return true;
    }
    /* If the target runs through the axis backwards, the axis is turned round, and the
     * copy begins at its other end. If the target's stride is 0, all elements are
     * written to the same place, so the axis is dropped and only its last element is
     * copied. */
    if (axis.stride[CM_DST] < 0) {
        axis.stride[CM_DST] = -axis.stride[CM_DST];
        axis.stride[CM_SRC] = -axis.stride[CM_SRC];
        insert_axis(layout, CM_DST, axis);
    }
    return cm_add_i64(layout->offset[CM_DST], dst_reach, &layout->offset[CM_DST])
           && cm_add_i64(layout->offset[CM_SRC], src_reach, &layout->offset[CM_SRC]);
}

/* Fill in the axes and offsets of `out`, whose run the caller has set. */
static cm_status
init(const cm_region *dst, const cm_region *src, cm_layout *out)
{
    int64_t count, low, high;
    if (dst->ndim < 0 || dst->ndim > CM_MAX_NDIM || src->ndim != dst->ndim) {
        return cm_fail(CM_ESHAPE, (uint64_t)(int64_t)src->ndim);
    }
    for (int axis = 0; axis < dst->ndim; axis++) {
        if (dst->shape[axis] < 0 || dst->shape[axis] != src->shape[axis]) {
            return cm_fail(CM_ESHAPE, (uint64_t)axis);
        }
    }
    CM_TRY(cm_region_count(dst, &count));
    CM_TRY(cm_region_bounds(dst, &low, &high));
    CM_TRY(cm_region_bounds(src, &low, &high));
    int64_t nbytes;
    if (count == 0) {
        out->run_nbytes = 0;
        return cm_ok();
    }
    if (!cm_mul_i64(count, (int64_t)out->run_nbytes, &nbytes)) {
        return cm_fail(CM_EOVERFLOW, (uint64_t)count);
    }
    for (int axis = 0; axis < dst->ndim; axis++) {
        if (!take_axis(out, (cm_axis){dst->shape[axis],
                                      {dst->strides[axis], src->strides[axis]}})) {
            return cm_fail(CM_EOVERFLOW, (uint64_t)dst->strides[axis]);
        }
    }
    join_axes(out);
    return cm_ok();
}

cm_status
cm_layout_init(const cm_region *dst, const cm_region *src, cm_layout *out)
{
    if (dst->itemsize != src->itemsize || dst->itemsize < 1) {
        return cm_fail(CM_EINVALID, (uint64_t)src->itemsize);
    }
    *out = (cm_layout){.run_nbytes = (uint64_t)dst->itemsize};
    return init(dst, src, out);
}

cm_status
cm_layout_init_items(const cm_region *dst, const cm_region *src, int64_t run_nbytes,
                     cm_layout *out)
{
    *out = (cm_layout){.run_nbytes = (uint64_t)run_nbytes,
                       .item_nbytes[CM_DST] = (uint32_t)dst->itemsize,
                       .item_nbytes[CM_SRC] = (uint32_t)src->itemsize};
    return init(dst, src, out);
}

void
cm_layout_drop_items(cm_layout *layout)
{
    layout->item_nbytes[CM_DST] = 0;
    layout->item_nbytes[CM_SRC] = 0;
    join_axes(layout);
}

uint64_t
cm_layout_nbytes(const cm_layout *layout)
{
    uint64_t nbytes = layout->run_nbytes;
    for (int axis = 0; axis < layout->ndim; axis++) {
        nbytes *= (uint64_t)layout->axes[axis].length;
    }
    return nbytes;
}

bool
cm_layout_is_packed(const cm_layout *layout, cm_side side)
{
    int64_t expected = (int64_t)layout->run_nbytes;
    for (int axis = layout->ndim - 1; axis >= 0; axis--) {
        if (layout->axes[axis].stride[side] != expected) {
            return false;
        }
        expected *= layout->axes[axis].length;
    }
    return true;
}

void
cm_layout_pack(cm_layout *layout, cm_side side)
{
    int64_t stride = (int64_t)layout->run_nbytes;
    for (int axis = layout->ndim - 1; axis >= 0; axis--) {
        layout->axes[axis].stride[side] = stride;
        stride *= layout->axes[axis].length;
    }
    layout->offset[side] = 0;
    join_axes(layout);
}

void
cm_layout_take_repeats(cm_layout *layout, cm_layout *repeats)
{
    *repeats = (cm_layout){.run_nbytes = 0};
    for (int axis = 0; axis < layout->ndim;) {
        if (layout->axes[axis].stride[CM_SRC] != 0) {
            axis++;
            continue;
        }
        insert_axis(repeats, CM_DST, layout->axes[axis]);
        remove_axis(layout, axis);
    }
}

int
cm_layout_get_core(const cm_layout *layout, cm_layout *core)
{
    cm_layout repeats;
    *core = *layout;
    cm_layout_take_repeats(core, &repeats);
    return repeats.ndim;
}

void
cm_layout_put_repeats(cm_layout *layout, const cm_layout *repeats)
{
    for (int axis = 0; axis < repeats->ndim; axis++) {
        insert_axis(layout, CM_DST, repeats->axes[axis]);
    }
}

int
cm_layout_near_axis(const cm_layout *layout)
{
    int last = layout->ndim - 1;
    int best = -1;
    uint64_t least = CM_LINE_NBYTES;
    if (last < 1 || layout->run_nbytes > CM_LINE_NBYTES / 2
        || cm_magnitude(layout->axes[last].stride[CM_SRC]) < CM_LINE_NBYTES) {
        return -1;
    }
    for (int axis = 0; axis < last; axis++) {
        uint64_t stride = cm_magnitude(layout->axes[axis].stride[CM_SRC]);
        if (stride != 0 && stride < least) {
            best = axis;
            least = stride;
        }
    }
    return best;
}

/* -- cutting ------------------------------------------------------------------------ */

enum { RAMP_EDGE = 4096 }; /* pieces of a ramp are whole pages where they can be */

void
cm_cut_init(cm_cut *cut, const cm_layout *whole, uint64_t piece_nbytes)
{
    uint64_t inner = whole->run_nbytes;
    *cut = (cm_cut){.whole = whole, .axis = whole->ndim, .done = inner == 0};
    cut->left_nbytes = cm_layout_nbytes(whole);
    cut->unit_nbytes = 1;
    uint64_t least = cm_layout_has_items(whole) ? inner : 1;
    piece_nbytes = piece_nbytes < least ? least : piece_nbytes;
    if (inner > piece_nbytes) {
        cut->step = (int64_t)piece_nbytes;
        return;
    }
    cut->step = (int64_t)inner;
    while (cut->axis > 0) {
        cut->axis--;
        cut->unit_nbytes = inner;
        int64_t length = whole->axes[cut->axis].length;
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
cm_cut_align(cm_cut *cut, const void *base, uintptr_t step)
{
    cut->edge_base = (uintptr_t)base;
    bool is_run = cut->whole->ndim == 0 && !cm_layout_has_items(cut->whole);
    cut->edge_step = is_run ? step : 0;
}

static int64_t
length_of(const cm_layout *layout, int axis)
{
    return axis < layout->ndim ? layout->axes[axis].length
                               : (int64_t)layout->run_nbytes;
}

/* Return how far the piece that begins at index `at` of the cut axis goes along it. */
static int64_t
step_from(const cm_cut *cut, int64_t at)
{
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

/* Move the walk past a piece that went `taken` steps along the cut axis. */
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
            count *= (uint64_t)cut->whole->axes[axis].length;
        }
        return count;
    }
    cm_cut walk = *cut;
    uint64_t count = 0;
    for (; !walk.done; count++) {
        pass(&walk, step_from(&walk, walk.index[walk.axis]));
    }
    return count;
}

/* Make the piece that begins at `index`, which has one entry for each axis up to and
 * including the one that is cut. Returns how far the piece goes along that axis. */
static int64_t
make_piece(const cm_cut *cut, const int64_t *index, cm_layout *piece)
{
    const cm_layout *whole = cut->whole;
    /* Copy everything but the array of axes: copying that too takes as long as moving a
     * short part. */
    memcpy(piece, whole, offsetof(cm_layout, axes));
    piece->ndim = 0;
    for (int axis = 0; axis <= cut->axis && axis < whole->ndim; axis++) {
        piece->offset[CM_DST] += index[axis] * whole->axes[axis].stride[CM_DST];
        piece->offset[CM_SRC] += index[axis] * whole->axes[axis].stride[CM_SRC];
    }
    int64_t taken = step_from(cut, index[cut->axis]);
    if (cut->axis == whole->ndim) {
        piece->offset[CM_DST] += index[cut->axis];
        piece->offset[CM_SRC] += index[cut->axis];
        piece->run_nbytes = (uint64_t)taken;
    }
    for (int axis = cut->axis; axis < whole->ndim; axis++) {
        if (axis > cut->axis || taken > 1) {
            piece->axes[piece->ndim++] = whole->axes[axis];
        }
    }
    if (cut->axis < whole->ndim && taken > 1) {
        piece->axes[0].length = taken;
    }
    return taken;
}

bool
cm_cut_next(cm_cut *cut, cm_layout *piece)
{
    if (cut->done) {
        return false;
    }
    pass(cut, make_piece(cut, cut->index, piece));
    return true;
}

void
cm_cut_piece(const cm_cut *cut, uint64_t number, cm_layout *piece)
{
    int64_t index[CM_MAX_NDIM + 1];
    int64_t length = length_of(cut->whole, cut->axis);
    uint64_t count = (uint64_t)(length / cut->step + (length % cut->step != 0));
    if (cut->edge_step > 0) { /* one run: the first piece ends at the first edge */
        index[cut->axis] = (int64_t)number * cut->step;
        index[cut->axis] -= number > 0 ? (int64_t)(cut->edge_base % cut->edge_step) : 0;
    }
    else {
        index[cut->axis] = (int64_t)(number % count) * cut->step;
        number /= count;
        for (int axis = cut->axis - 1; axis >= 0; axis--) {
            uint64_t outer = (uint64_t)cut->whole->axes[axis].length;
            index[axis] = (int64_t)(number % outer);
            number /= outer;
        }
    }
    (void)make_piece(cut, index, piece);
}
