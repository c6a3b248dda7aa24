/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/region.h"

#include <string.h>

#include "base/checked_math.h"

bool
cm_region_is_empty(const cm_region *region)
{
    for (int axis = 0; axis < region->ndim; axis++) {
        if (region->shape[axis] == 0) {
            return true;
        }
    }
    return false;
}

cm_status
cm_region_count(const cm_region *region, int64_t *out)
{
    int64_t count = cm_region_is_empty(region) ? 0 : 1;
    for (int axis = 0; axis < region->ndim && count > 0; axis++) {
        if (!cm_mul_i64(count, region->shape[axis], &count)) {
            return cm_fail(CM_EOVERFLOW, (uint64_t)region->shape[axis]);
        }
    }
    *out = count;
    return cm_ok();
}

uint64_t
cm_region_common_nbytes(const cm_region *a, const cm_region *b, uint64_t itemsize,
                        uint64_t most)
{
    uint64_t total = itemsize;
    if (a->ndim != b->ndim) {
        return 0;
    }
    for (int axis = 0; axis < a->ndim; axis++) {
        if (a->shape[axis] != b->shape[axis]
            || !cm_mul_u64(total, (uint64_t)a->shape[axis], &total) || total > most) {
            return 0;
        }
    }
    return total <= most ? total : 0;
}

cm_status
cm_region_bounds(const cm_region *region, int64_t *low, int64_t *high)
{
    int64_t lowest = 0;
    int64_t highest = region->itemsize;
    if (cm_region_is_empty(region)) {
        *low = 0;
        *high = 0;
        return cm_ok();
    }
    for (int axis = 0; axis < region->ndim; axis++) {
        int64_t reach;
        int64_t *end = region->strides[axis] < 0 ? &lowest : &highest;
        if (!cm_mul_i64(region->shape[axis] - 1, region->strides[axis], &reach)
            || !cm_add_i64(*end, reach, end)) {
            return cm_fail(CM_EOVERFLOW, (uint64_t)region->strides[axis]);
        }
    }
    int64_t length; /* callers subtract the two */
    if (__builtin_sub_overflow(highest, lowest, &length)) {
        return cm_fail(CM_EOVERFLOW, (uint64_t)lowest);
    }
    *low = lowest;
    *high = highest;
    return cm_ok();
}

/* True if some whole steps along axis `by` lead to the same element as one step along
 * axis `along`. */
static bool
is_step_reached(const cm_region *region, int along, int by)
{
    uint64_t step = cm_magnitude(region->strides[along]);
    uint64_t unit = cm_magnitude(region->strides[by]);
    return region->shape[along] > 1 && step >= unit && step % unit == 0
           && step / unit < (uint64_t)region->shape[by];
}

bool
cm_region_shares_bytes(const cm_region *region)
{
    if (cm_region_is_empty(region)) {
        return false;
    }
    if (region->ndim == 1) { /* most regions have no second axis to compare with */
        return region->shape[0] > 1
               && cm_magnitude(region->strides[0]) < (uint64_t)region->itemsize;
    }
    for (int axis = 0; axis < region->ndim; axis++) {
        if (region->shape[axis] > 1
            && cm_magnitude(region->strides[axis]) < (uint64_t)region->itemsize) {
            return true;
        }
    }
    /* From here on no axis that is longer than 1 has a stride of 0. */
    for (int by = 0; by < region->ndim; by++) {
        for (int along = 0; region->shape[by] > 1 && along < region->ndim; along++) {
            if (along != by && is_step_reached(region, along, by)) {
                return true;
            }
        }
    }
    return false;
}

static bool
is_contiguous(const cm_region *region, bool from_last)
{
    int64_t expected = region->itemsize;
    if (cm_region_is_empty(region)) {
        return true;
    }
    for (int step = 0; step < region->ndim; step++) {
        int axis = from_last ? region->ndim - 1 - step : step;
        if (region->shape[axis] == 1) {
            continue;
        }
        if (region->strides[axis] != expected
            || !cm_mul_i64(expected, region->shape[axis], &expected)) {
            return false;
        }
    }
    return true;
}

bool
cm_region_is_c_contiguous(const cm_region *region)
{
    return is_contiguous(region, true);
}

bool
cm_region_is_f_contiguous(const cm_region *region)
{
    return is_contiguous(region, false);
}

cm_status
cm_region_set_c_strides(cm_region *region)
{
    int64_t stride = region->itemsize;
    for (int axis = region->ndim - 1; axis >= 0; axis--) {
        region->strides[axis] = stride;
        int64_t length = region->shape[axis] > 1 ? region->shape[axis] : 1;
        if (!cm_mul_i64(stride, length, &stride)) {
            return cm_fail(CM_EOVERFLOW, (uint64_t)region->shape[axis]);
        }
    }
    return cm_ok();
}

cm_status
cm_region_broadcast(const cm_region *dst, cm_region *src)
{
    int64_t strides[CM_MAX_NDIM];
    /* Leading lengths of 1 that the target lacks are dropped, as NumPy does. */
    int extra = src->ndim > dst->ndim ? src->ndim - dst->ndim : 0;
    for (int axis = 0; axis < extra; axis++) {
        if (src->shape[axis] != 1) {
            return cm_fail(CM_ESHAPE, (uint64_t)axis);
        }
    }
    for (int axis = 0; axis < dst->ndim; axis++) {
        int from = axis + src->ndim - dst->ndim;
        if (from < 0 || src->shape[from] == 1) {
            /* The stride is kept where nothing is stretched, so that contiguity stays
             * visible. */
            strides[axis] = from >= 0 && dst->shape[axis] == 1 ? src->strides[from] : 0;
        }
        else if (src->shape[from] == dst->shape[axis]) {
            strides[axis] = src->strides[from];
        }
        else {
            return cm_fail(CM_ESHAPE, (uint64_t)axis);
        }
    }
    src->ndim = dst->ndim;
    memcpy(src->shape, dst->shape, (size_t)dst->ndim * sizeof(dst->shape[0]));
    memcpy(src->strides, strides, (size_t)dst->ndim * sizeof(strides[0]));
    return cm_ok();
}

static bool
meet_at(uint64_t a, const int64_t *a_bounds, uint64_t b, const int64_t *b_bounds)
{
    return a != 0 && b != 0
           && cm_byte_spans_meet(
               (cm_byte_span){a + (uint64_t)a_bounds[0], a + (uint64_t)a_bounds[1]},
               (cm_byte_span){b + (uint64_t)b_bounds[0], b + (uint64_t)b_bounds[1]});
}

uint64_t
cm_overlap_place(cm_runtime *rt, cm_address address, const void *host, uint64_t nbytes)
{
    cm_address at = address != 0 ? address : (uintptr_t)host;
    const void *alias = cm_runtime_host_alias(rt, at, nbytes);
    return alias != NULL ? (uintptr_t)alias : at;
}

cm_byte_span
cm_overlap_span(cm_runtime *rt, const cm_region *region)
{
    int64_t low = 0;
    int64_t high = 0;
    /* The plan has checked that these do not overflow. */
    cm_ignore(cm_region_bounds(region, &low, &high));
    uint64_t nbytes = (uint64_t)(high - low);
    const char *host = region->host == NULL ? NULL : (const char *)region->host + low;
    uint64_t begin = cm_overlap_place(
        rt, region->address == 0 ? 0 : region->address + (uint64_t)low, host, nbytes);
    return (cm_byte_span){begin, begin + nbytes};
}

bool
cm_overlap_is_possible(cm_runtime *rt, const cm_region *a, const cm_region *b)
{
    int64_t of_a[2], of_b[2];
    if (!cm_is_ok(cm_region_bounds(a, &of_a[0], &of_a[1]))
        || !cm_is_ok(cm_region_bounds(b, &of_b[0], &of_b[1]))) {
        return true;
    }
    if (of_a[0] == of_a[1] || of_b[0] == of_b[1]) {
        return false;
    }
    return meet_at((uintptr_t)a->host, of_a, (uintptr_t)b->host, of_b)
           || meet_at(a->address, of_a, b->address, of_b)
           || cm_byte_spans_meet(cm_overlap_span(rt, a), cm_overlap_span(rt, b));
}

bool
cm_region_has_strides_of(const cm_region *a, const cm_region *b)
{
    for (int axis = 0; axis < a->ndim; axis++) {
        if (a->shape[axis] > 1 && a->strides[axis] != b->strides[axis]) {
            return false;
        }
    }
    return true;
}

bool
cm_region_is_same(const cm_region *a, const cm_region *b)
{
    if (cm_region_copy_address(a) != cm_region_copy_address(b)
        || cm_region_is_on_device(a) != cm_region_is_on_device(b)
        || a->itemsize != b->itemsize || a->ndim != b->ndim) {
        return false;
    }
    return memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof(a->shape[0])) == 0
           && cm_region_has_strides_of(a, b);
}

bool
cm_region_is_on_device(const cm_region *region)
{
    return cm_kind_is_on_device(region->kind) || region->host == NULL;
}

cm_address
cm_region_copy_address(const cm_region *region)
{
    return cm_region_is_on_device(region) ? region->address : (uintptr_t)region->host;
}
