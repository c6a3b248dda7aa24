/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of transfer/plan/region: how many elements a strided region has, which bytes it
 * covers, how it broadcasts, and whether two regions may overlap. Everything here is
 * arithmetic on regions, and no memory is read. */
#include "check.h"
#include "transfer/plan/region.h"

/* A runtime of zeros, which has no second mapping of any memory. */
static cm_runtime no_runtime;

/* Make a region of these lengths at no address. `strides` may be NULL for strides of
 * 0. */
static cm_region
make(int ndim, const int64_t *shape, const int64_t *strides, int64_t itemsize)
{
    cm_region region = {.ndim = ndim, .itemsize = itemsize};
    for (int axis = 0; axis < ndim; axis++) {
        region.shape[axis] = shape[axis];
        region.strides[axis] = strides == NULL ? 0 : strides[axis];
    }
    return region;
}

/* A region without axes has one element. A region with a length of 0 has none, however
 * long its other axes are. A number of elements that needs more than 63 bits is
 * refused. */
static void
test_region_count_of_scalar_empty_and_huge(void)
{
    int64_t count;
    cm_region scalar = make(0, NULL, NULL, 4);
    CHECK_OK(cm_region_count(&scalar, &count));
    CHECK_EQ(count, 1);
    cm_region empty = make(3, (int64_t[]){INT64_MAX, INT64_MAX, 0}, NULL, 4);
    CHECK_OK(cm_region_count(&empty, &count));
    CHECK_EQ(count, 0);
    cm_region huge = make(2, (int64_t[]){INT64_MAX, 2}, NULL, 4);
    CHECK_CODE(cm_region_count(&huge, &count), CM_EOVERFLOW);
}

/* With strides of both signs the bounds lie on both sides of element 0. */
static void
test_region_bounds_with_negative_strides_reach_both_ways(void)
{
    int64_t low, high;
    cm_region region = make(2, (int64_t[]){3, 5}, (int64_t[]){-100, 8}, 4);
    CHECK_OK(cm_region_bounds(&region, &low, &high));
    CHECK_EQ(low, -200);
    CHECK_EQ(high, 36);
    cm_region empty = make(2, (int64_t[]){3, 0}, (int64_t[]){INT64_MIN, 8}, 4);
    CHECK_OK(cm_region_bounds(&empty, &low, &high));
    CHECK_EQ(low, 0);
    CHECK_EQ(high, 0);
    cm_region wild = make(1, (int64_t[]){3}, (int64_t[]){INT64_MAX}, 4);
    CHECK_CODE(cm_region_bounds(&wild, &low, &high), CM_EOVERFLOW);
}

/* The stride of an axis of length 1 does not matter, and an empty region is contiguous
 * in both orders. */
static void
test_region_contiguity_ignores_axes_of_length_one(void)
{
    cm_region c = make(3, (int64_t[]){2, 1, 3}, (int64_t[]){12, 999, 4}, 4);
    CHECK(cm_region_is_c_contiguous(&c));
    CHECK(!cm_region_is_f_contiguous(&c));
    cm_region f = make(2, (int64_t[]){2, 3}, (int64_t[]){4, 8}, 4);
    CHECK(!cm_region_is_c_contiguous(&f));
    CHECK(cm_region_is_f_contiguous(&f));
    cm_region empty = make(2, (int64_t[]){0, 3}, (int64_t[]){1, 1}, 4);
    CHECK(cm_region_is_c_contiguous(&empty) && cm_region_is_f_contiguous(&empty));
    CHECK_OK(cm_region_set_c_strides(&f));
    CHECK_EQ(f.strides[0], 12);
    CHECK_EQ(f.strides[1], 4);
    cm_region huge = make(2, (int64_t[]){INT64_MAX, INT64_MAX}, NULL, 4);
    CHECK_CODE(cm_region_set_c_strides(&huge), CM_EOVERFLOW);
}

/* A source is stretched as NumPy does it in an assignment: missing axes and those of
 * length 1 get a stride of 0, and leading axes of length 1 are dropped. Other lengths
 * are refused. */
static void
test_region_broadcast_follows_numpy_assignment(void)
{
    cm_region dst = make(3, (int64_t[]){2, 3, 4}, NULL, 4);
    cm_region row = make(1, (int64_t[]){4}, (int64_t[]){4}, 4);
    CHECK_OK(cm_region_broadcast(&dst, &row));
    CHECK_EQ(row.ndim, 3);
    CHECK_EQ(row.shape[0], 2);
    CHECK_EQ(row.strides[0], 0);
    CHECK_EQ(row.strides[1], 0);
    CHECK_EQ(row.strides[2], 4);
    cm_region column = make(2, (int64_t[]){3, 1}, (int64_t[]){4, 4}, 4);
    CHECK_OK(cm_region_broadcast(&dst, &column));
    CHECK_EQ(column.strides[1], 4);
    CHECK_EQ(column.strides[2], 0);
    cm_region more = make(4, (int64_t[]){1, 2, 3, 4}, (int64_t[]){96, 48, 16, 4}, 4);
    CHECK_OK(cm_region_broadcast(&dst, &more));
    CHECK_EQ(more.ndim, 3);
    CHECK_EQ(more.strides[0], 48);
    cm_region wrong = make(1, (int64_t[]){5}, (int64_t[]){4}, 4);
    CHECK_CODE(cm_region_broadcast(&dst, &wrong), CM_ESHAPE);
    cm_region too_many = make(4, (int64_t[]){2, 2, 3, 4}, (int64_t[]){9, 9, 9, 9}, 4);
    CHECK_CODE(cm_region_broadcast(&dst, &too_many), CM_ESHAPE);
}

/* Two regions overlap if the spans of their host addresses meet, or those of their
 * device addresses. The test moves the second region to the last place without and the
 * first place with an overlap. */
static void
test_region_overlap_by_either_address(void)
{
    char memory[256];
    cm_region a = make(1, (int64_t[]){16}, (int64_t[]){4}, 4);
    cm_region b = a;
    a.host = memory;
    b.host = memory + 64;
    CHECK(!cm_overlap_is_possible(&no_runtime, &a, &b));
    b.host = memory + 63;
    CHECK(cm_overlap_is_possible(&no_runtime, &a, &b));
    b.host = memory + 124;
    b.strides[0] = -4;
    CHECK(!cm_overlap_is_possible(&no_runtime, &a, &b));
    b.host = memory + 120;
    CHECK(cm_overlap_is_possible(&no_runtime, &a, &b));
    b.host = NULL;
    CHECK(!cm_overlap_is_possible(&no_runtime, &a, &b));
    a.address = 4096;
    b.address = 4096 + 64;
    CHECK(cm_overlap_is_possible(&no_runtime, &a, &b));
    b.shape[0] = 0;
    CHECK(!cm_overlap_is_possible(&no_runtime, &a, &b));
}

MAIN(RUN(test_region_count_of_scalar_empty_and_huge)
         RUN(test_region_bounds_with_negative_strides_reach_both_ways)
             RUN(test_region_contiguity_ignores_axes_of_length_one)
                 RUN(test_region_broadcast_follows_numpy_assignment)
                     RUN(test_region_overlap_by_either_address))
