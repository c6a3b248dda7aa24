/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/overlap.h"

#include <stdlib.h>

/* -- places ------------------------------------------------------------------------------- */

uint64_t
cm_overlap_place(cm_runtime *rt, cm_address address, const void *host, bool on_device,
                 uint64_t nbytes)
{
    if (on_device) {
        const void *alias = cm_runtime_host_alias(rt, address, nbytes);
        return alias != NULL ? (uintptr_t)alias : address;
    }
    return address != 0 ? address : (uintptr_t)host;
}

cm_byte_span
cm_overlap_span(cm_runtime *rt, const cm_region *region)
{
    int64_t low = 0;
    int64_t high = 0;
    (void)!cm_is_ok(cm_region_bounds(region, &low, &high)); /* checked by the plan */
    uint64_t nbytes = (uint64_t)(high - low);
    const char *host = region->host == NULL ? NULL : (const char *)region->host + low;
    uint64_t begin =
        cm_overlap_place(rt, region->address == 0 ? 0 : region->address + (uint64_t)low,
                         host, cm_region_is_on_device(region), nbytes);
    return (cm_byte_span){begin, begin + nbytes};
}

/* -- two regions -------------------------------------------------------------------------- */

enum {
    TERM_MAX = 2 * CM_MAX_NDIM + 1,
    STEP_MAX = 1000000, /* some milliseconds; views of one array take a few an axis */
};

/* A byte of one region is a sum of steps along its axes from the lowest byte, one of
 * the other a sum of steps back from its highest. They meet where all steps together
 * are the distance: is there 0 <= x[i] <= most[i] with sum(x[i] * step[i]) = distance?
 * `reach` and `unit`: the largest sum of the terms from i on, and their common divisor.
 */
typedef struct sums {
    int count;
    int left; /* steps that may still be tried */
    uint64_t step[TERM_MAX];
    uint64_t most[TERM_MAX];
    uint64_t reach[TERM_MAX + 1];
    uint64_t unit[TERM_MAX + 1];
} sums;

/* Steps fall; equal ones are one. */
static void
add_term(sums *s, uint64_t step, uint64_t most)
{
    int at = s->count;
    if (step == 0 || most == 0) {
        return;
    }
    while (at > 0 && s->step[at - 1] < step) {
        at--;
    }
    if (at > 0 && s->step[at - 1] == step) {
        s->most[at - 1] += most;
        return;
    }
    for (int i = s->count; i > at; i--) {
        s->step[i] = s->step[i - 1];
        s->most[i] = s->most[i - 1];
    }
    s->step[at] = step;
    s->most[at] = most;
    s->count++;
}

static void
add_axes(sums *s, const cm_region *region)
{
    for (int axis = 0; axis < region->ndim; axis++) {
        int64_t stride = region->strides[axis];
        uint64_t step = stride < 0 ? 0 - (uint64_t)stride : (uint64_t)stride;
        add_term(s, step, (uint64_t)region->shape[axis] - 1);
    }
}

static uint64_t
common_divisor(uint64_t a, uint64_t b)
{
    while (b != 0) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static bool
can_sum_to(sums *s, int i, uint64_t distance)
{
    if (distance == 0 || distance == s->reach[i]) {
        return true;
    }
    if (s->left-- <= 0) {
        return true;
    }
    if (distance > s->reach[i] || distance % s->unit[i] != 0) {
        return false;
    }
    uint64_t step = s->step[i];
    uint64_t rest = s->reach[i + 1];
    uint64_t least = distance > rest ? (distance - rest + step - 1) / step : 0;
    uint64_t most = distance / step;
    most = most < s->most[i] ? most : s->most[i];
    for (uint64_t x = most + 1; x > least; x--) {
        if (can_sum_to(s, i + 1, distance - (x - 1) * step)) {
            return true;
        }
    }
    return false;
}

bool
cm_overlap_is_real(const cm_region *a, uint64_t a_begin, const cm_region *b,
                   uint64_t b_begin)
{
    int64_t low, high, b_low, b_high;
    sums s = {.left = STEP_MAX};
    if (!cm_is_ok(cm_region_bounds(a, &low, &high))
        || !cm_is_ok(cm_region_bounds(b, &b_low, &b_high))) {
        return true;
    }
    uint64_t a_nbytes = (uint64_t)(high - low);
    uint64_t b_nbytes = (uint64_t)(b_high - b_low);
    if (a_nbytes == 0 || b_nbytes == 0 || b_begin + b_nbytes <= a_begin
        || a_begin + a_nbytes <= b_begin) {
        return false;
    }
    add_axes(&s, a);
    add_axes(&s, b);
    add_term(&s, 1, (uint64_t)a->itemsize + (uint64_t)b->itemsize - 2);
    for (int i = s.count - 1; i >= 0; i--) {
        s.reach[i] = s.reach[i + 1] + s.step[i] * s.most[i];
        s.unit[i] = common_divisor(s.step[i], s.unit[i + 1]);
    }
    return can_sum_to(&s, 0, b_begin + b_nbytes - 1 - a_begin);
}

/* -- many regions ------------------------------------------------------------------------- */

typedef struct placed {
    cm_byte_span span;
    uint32_t index;
} placed;

static int
compare(const void *a, const void *b)
{
    const placed *x = a;
    const placed *y = b;
    if (x->span.begin != y->span.begin) {
        return x->span.begin < y->span.begin ? -1 : 1;
    }
    return x->index < y->index ? -1 : x->index > y->index;
}

static bool
find(const placed *all, uint32_t count, const cm_region *regions, bool skips_same,
     uint32_t *first, uint32_t *second)
{
    for (uint32_t i = 0; i < count; i++) {
        const placed *a = &all[i];
        for (uint32_t k = i + 1; k < count && all[k].span.begin < a->span.end; k++) {
            const placed *b = &all[k];
            const cm_region *left = &regions[a->index];
            const cm_region *right = &regions[b->index];
            if (!(skips_same && cm_region_is_same(left, right))
                && cm_overlap_is_real(left, a->span.begin, right, b->span.begin)) {
                *first = a->index < b->index ? a->index : b->index;
                *second = a->index < b->index ? b->index : a->index;
                return true;
            }
        }
    }
    return false;
}

cm_status
cm_overlap_find(cm_runtime *rt, const cm_region *regions, uint32_t count,
                bool skips_same, uint32_t *first, uint32_t *second, bool *out)
{
    *out = false;
    if (count < 2) {
        return cm_ok();
    }
    placed *all = malloc(count * sizeof(*all));
    if (all == NULL) {
        return cm_fail(CM_ENOMEM, count * sizeof(*all));
    }
    for (uint32_t i = 0; i < count; i++) {
        all[i] = (placed){cm_overlap_span(rt, &regions[i]), i};
    }
    qsort(all, count, sizeof(*all), compare);
    *out = find(all, count, regions, skips_same, first, second);
    free(all);
    return cm_ok();
}
