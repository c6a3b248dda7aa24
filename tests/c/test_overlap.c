/* SPDX-License-Identifier: Apache-2.0 */
/* Shared bytes of strided regions, against maps of all their bytes. */
#include <stdlib.h>

#include "check.h"
#include "open_emulated.h"
#include "transfer/plan/overlap.h"

enum { MAP_NBYTES = 4096, MIDDLE = MAP_NBYTES / 2 };

static unsigned
next(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static cm_region
make(int ndim, const int64_t *shape, const int64_t *strides, int64_t itemsize)
{
    cm_region region = {.ndim = ndim, .itemsize = itemsize, .kind = CM_KIND_PAGEABLE};
    for (int axis = 0; axis < ndim; axis++) {
        region.shape[axis] = shape[axis];
        region.strides[axis] = strides[axis];
    }
    return region;
}

static cm_region
make_random(unsigned *state)
{
    static const int64_t sizes[] = {1, 2, 4, 8, 3};
    int64_t shape[3], strides[3];
    int ndim = (int)(next(state) % 4);
    for (int axis = 0; axis < ndim; axis++) {
        shape[axis] = next(state) % 12 == 0 ? 0 : 1 + next(state) % 5;
        strides[axis] = (int64_t)(next(state) % 121) - 60;
        strides[axis] *= next(state) % 3 == 0 ? 4 : 1;
    }
    return make(ndim, shape, strides, sizes[next(state) % 5]);
}

/* Mark its bytes, when element 0 lies at `at`. */
static void
mark(const cm_region *region, int axis, int64_t at, char *map)
{
    if (axis == region->ndim) {
        for (int64_t b = 0; b < region->itemsize; b++) {
            map[at + b] = 1;
        }
        return;
    }
    for (int64_t i = 0; i < region->shape[axis]; i++) {
        mark(region, axis + 1, at + i * region->strides[axis], map);
    }
}

static bool
meet(const cm_region *a, int64_t a_at, const cm_region *b, int64_t b_at)
{
    static char maps[2][MAP_NBYTES];
    memset(maps, 0, sizeof(maps));
    mark(a, 0, a_at, maps[0]);
    mark(b, 0, b_at, maps[1]);
    for (int i = 0; i < MAP_NBYTES; i++) {
        if (maps[0][i] != 0 && maps[1][i] != 0) {
            return true;
        }
    }
    return false;
}

static void
test_overlap_of_random_regions_is_that_of_their_bytes(void)
{
    unsigned state = 1;
    int met = 0;
    int rounds = 40000 / CHECK_EVERY(10);
    for (int i = 0; i < rounds; i++) {
        int64_t a_low, b_low, high;
        cm_region a = make_random(&state);
        cm_region b = make_random(&state);
        int64_t at = MIDDLE + (int64_t)(next(&state) % 200) - 100;
        CHECK_OK(cm_region_bounds(&a, &a_low, &high));
        CHECK_OK(cm_region_bounds(&b, &b_low, &high));
        bool expected = meet(&a, MIDDLE, &b, at);
        CHECK_EQ(cm_overlap_is_real(&a, (uint64_t)(MIDDLE + a_low), &b,
                                    (uint64_t)(at + b_low)),
                 expected);
        CHECK_EQ(cm_overlap_is_real(&b, (uint64_t)(at + b_low), &a,
                                    (uint64_t)(MIDDLE + a_low)),
                 expected);
        met += expected;
    }
    CHECK(met > rounds / 10 && met < rounds * 9 / 10);
}

/* Columns of one large array, in blocks: bounds overlap, bytes do not. */
static void
test_overlap_of_large_columns_is_exact(void)
{
    int64_t shape[] = {100000, 50, 3};
    int64_t strides[] = {4000, -40, 4};
    cm_region a = make(3, shape, strides, 4);
    uint64_t base = UINT64_C(1) << 40;
    CHECK(cm_overlap_is_real(&a, base, &a, base));
    CHECK(cm_overlap_is_real(&a, base, &a, base + 3));
    CHECK(!cm_overlap_is_real(&a, base, &a, base + 12));
    CHECK(!cm_overlap_is_real(&a, base, &a, base + 28));
    CHECK(cm_overlap_is_real(&a, base, &a, base + 29));
    CHECK(!cm_overlap_is_real(&a, base, &a, base + 2000));
    CHECK(cm_overlap_is_real(&a, base, &a, base + 4000 * 99999));
    CHECK(!cm_overlap_is_real(&a, base, &a, base + 4000 * 99999 + 2000));
}

/* Which sums there are takes long to tell; what cannot be told is taken for one. */
static void
test_overlap_search_has_an_end(void)
{
    int64_t shape[] = {3000000, 3000000, 3000000};
    cm_region a = make(3, shape, (int64_t[]){1000006, 1000036, 1000066}, 1);
    cm_region b = make(3, shape, (int64_t[]){1000012, 1000042, 1000072}, 1);
    CHECK(cm_overlap_is_real(&a, 1, &b, UINT64_C(3000000000001)));
    cm_region wild = make(1, (int64_t[]){3}, (int64_t[]){INT64_MAX}, 1);
    CHECK(cm_overlap_is_real(&wild, 0, &a, 0));
}

static void
test_overlap_find_names_two_of_many(void)
{
    cm_runtime *rt = open_emulated(13000, 1, UINT64_C(1) << 20);
    uint32_t first = 9;
    uint32_t second = 9;
    bool found = true;
    static char memory[1000];
    cm_region regions[50];
    for (int i = 0; i < 50; i++) { /* columns of bytes, the other way round */
        regions[i] = make(1, (int64_t[]){20}, (int64_t[]){50}, 1);
        regions[i].host = memory + 49 - i;
        regions[i].device = -1;
    }
    CHECK_OK(cm_overlap_find(rt, regions, 50, false, &first, &second, &found));
    CHECK(!found);
    regions[7].itemsize = 2;
    CHECK_OK(cm_overlap_find(rt, regions, 50, false, &first, &second, &found));
    CHECK(found);
    CHECK_EQ(first, 6);
    CHECK_EQ(second, 7);
    regions[6].shape[0] = 0;
    CHECK_OK(cm_overlap_find(rt, regions, 50, false, &first, &second, &found));
    CHECK(!found);
    regions[6] = regions[7];
    CHECK_OK(cm_overlap_find(rt, regions, 50, true, &first, &second, &found));
    CHECK(!found);
    CHECK_OK(cm_overlap_find(rt, regions, 50, false, &first, &second, &found));
    CHECK(found);
    CHECK_EQ(first, 6);
    CHECK_OK(cm_overlap_find(rt, regions, 1, false, &first, &second, &found));
    CHECK(!found);
    close_emulated(rt);
}

MAIN(RUN(test_overlap_of_random_regions_is_that_of_their_bytes)
         RUN(test_overlap_of_large_columns_is_exact) RUN(test_overlap_search_has_an_end)
             RUN(test_overlap_find_names_two_of_many))
