/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of strided copies on the host. Each copy is compared with a plain loop, and
 * both ends lie against pages that may not be touched, so reading or writing too far
 * crashes. Two tests look at pages of mapped files that have been cut short. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/fresh_pages.h"
#include "base/simd_copy.h"
#include "check.h"
#include "transfer/host/host_copy.h"

#ifndef MADV_POPULATE_READ
#    define MADV_POPULATE_READ 22
#endif

enum { ROOM = 64 << 10, PAGE = 64 << 10, GUARD = 0xa5 };

/* ROOM bytes between two pages that nobody may touch. */
typedef struct fence {
    char *map;
    char *room;
} fence;

static void
make_fence(fence *out)
{
    fence made;
    made.map =
        mmap(NULL, ROOM + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(made.map != MAP_FAILED);
    made.room = made.map + PAGE;
    CHECK_EQ(mprotect(made.room, ROOM, PROT_READ | PROT_WRITE), 0);
    *out = made;
}

static void
drop_fence(fence made)
{
    CHECK_EQ(munmap(made.map, ROOM + 2 * PAGE), 0);
}

/* Fill memory with bytes that differ from their neighbours and from those one line or
 * one page away. */
static void
fill_bytes(char *to, size_t nbytes)
{
    uint32_t state = 1;
    for (size_t i = 0; i < nbytes; i++) {
        state = state * 1664525 + 1013904223;
        to[i] = (char)(state >> 24);
    }
}

/* Make the copy by a plain loop, from `axis` on. */
static void
copy_plainly(const cm_layout *layout, char *dst, const char *src, int axis)
{
    if (axis == layout->ndim) {
        memcpy(dst, src, (size_t)layout->run_nbytes);
        return;
    }
    for (int64_t i = 0; i < layout->axes[axis].length; i++) {
        copy_plainly(layout, dst + i * layout->axes[axis].stride[CM_DST],
                     src + i * layout->axes[axis].stride[CM_SRC], axis + 1);
    }
}

/* Return the distance from the lowest byte of one side to the end of its highest, and
 * store how many bytes lie below the first element. */
static size_t
extent_of(const cm_layout *layout, cm_side side, size_t *below)
{
    size_t above = (size_t)layout->run_nbytes;
    *below = 0;
    for (int axis = 0; axis < layout->ndim; axis++) {
        int64_t stride = layout->axes[axis].stride[side];
        size_t reach = (size_t)((layout->axes[axis].length - 1) * llabs(stride));
        *below += stride < 0 ? reach : 0;
        above += stride < 0 ? 0 : reach;
    }
    return *below + above;
}

/* Make the copy with both ends at the end of their rooms, or both at the beginning, and
 * compare the whole target room. */
static void
check_copy(const cm_layout *layout, fence dst, fence src, char *expected, bool at_end)
{
    size_t dst_below, src_below;
    size_t to_nbytes = extent_of(layout, CM_DST, &dst_below);
    size_t from_nbytes = extent_of(layout, CM_SRC, &src_below);
    CHECK(to_nbytes <= ROOM && from_nbytes <= ROOM);
    size_t to_at = (at_end ? ROOM - to_nbytes : 0) + dst_below;
    const char *from = src.room + (at_end ? ROOM - from_nbytes : 0) + src_below;
    memset(dst.room, GUARD, ROOM);
    memset(expected, GUARD, ROOM);
    copy_plainly(layout, expected + to_at, from, 0);
    cm_host_copy(layout, dst.room + to_at, from, false);
    CHECK_EQ(memcmp(dst.room, expected, ROOM), 0);
}

/* Elements of each size and at each distance are packed. Many of these copies must be
 * made by picking vectors apart (cm_pick) instead of element by element. */
static void
test_elements_a_few_bytes_apart_are_brought_together(void)
{
    static const int64_t counts[] = {1, 2, 63, 64, 65, 66, 79, 80, 81, 97, 200, 401};
    fence dst, src;
    make_fence(&dst);
    make_fence(&src);
    char *expected = malloc(ROOM);
    uint64_t picked = 0;
    fill_bytes(src.room, ROOM);
    for (int64_t size = 1; size <= 16; size++) {
        for (int64_t step = -150; step <= 150; step++) {
            if (llabs(step) < size) {
                continue;
            }
            cm_pick pick;
            picked += cm_pick_init(&pick, (size_t)size, step);
            for (size_t i = 0; i < sizeof(counts) / sizeof(*counts); i++) {
                cm_layout layout = {.ndim = 1, .run_nbytes = (uint64_t)size};
                layout.axes[0].length = counts[i];
                layout.axes[0].stride[CM_DST] = size;
                layout.axes[0].stride[CM_SRC] = step;
                check_copy(&layout, dst, src, expected, true);
                check_copy(&layout, dst, src, expected, false);
            }
        }
    }
#if defined(__x86_64__) || defined(__aarch64__)
    CHECK_LT(100, picked);
#endif
    free(expected);
    drop_fence(dst);
    drop_fence(src);
}

/* Rows of elements that lie apart are packed, with three axes. */
static void
test_rows_of_elements_apart_are_brought_together(void)
{
    fence dst, src;
    make_fence(&dst);
    make_fence(&src);
    char *expected = malloc(ROOM);
    fill_bytes(src.room, ROOM);
    for (int64_t size = 1; size <= 8; size++) {
        for (int64_t every = -3; every <= 3; every++) {
            const int64_t step = every == 0 ? size : every * size;
            cm_layout layout = {.ndim = 3,
                                .run_nbytes = (uint64_t)size,
                                .axes = {{2, {77 * 5 * size, 77 * 5 * 32}},
                                         {5, {77 * size, -77 * 32}},
                                         {77, {size, step}}}};
            check_copy(&layout, dst, src, expected, true);
            check_copy(&layout, dst, src, expected, false);
        }
    }
    free(expected);
    drop_fence(dst);
    drop_fence(src);
}

/* Transpose a matrix of rows x columns elements, which is read backwards with
 * `back`. */
static void
check_turned(fence dst, fence src, char *expected, int64_t size, int64_t rows,
             int64_t columns, int64_t pitch, bool back)
{
    cm_layout layout = {.ndim = 2, .run_nbytes = (uint64_t)size};
    layout.axes[0].length = columns;
    layout.axes[1].length = rows;
    layout.axes[0].stride[CM_DST] = rows * size;
    layout.axes[1].stride[CM_DST] = size;
    layout.axes[0].stride[CM_SRC] = back ? -size : size;
    layout.axes[1].stride[CM_SRC] = pitch;
    check_copy(&layout, dst, src, expected, true);
    check_copy(&layout, dst, src, expected, false);
}

/* Transpose matrices of many shapes and element sizes, forwards and backwards. */
static void
test_rows_become_columns(void)
{
    static const int64_t sides[][2] = {{16, 64}, {17, 65}, {33, 128},
                                       {16, 16}, {48, 31}, {3, 5},
                                       {15, 63}, {16, 8},  {64, 32}};
    fence dst, src;
    make_fence(&dst);
    make_fence(&src);
    char *expected = malloc(ROOM);
    fill_bytes(src.room, ROOM);
    for (int64_t size = 1; size <= 16; size++) {
        for (size_t i = 0; i < sizeof(sides) / sizeof(*sides); i++) {
            int64_t rows = sides[i][0];
            int64_t columns = sides[i][1];
            while (rows * columns * size > ROOM / 2) {
                columns /= 2;
            }
            int64_t pitch = columns * size < 128 ? 128 : columns * size;
            check_turned(dst, src, expected, size, rows, columns, pitch, false);
            check_turned(dst, src, expected, size, rows, columns, -pitch, false);
            check_turned(dst, src, expected, size, rows, columns, pitch, true);
        }
    }
    free(expected);
    drop_fence(dst);
    drop_fence(src);
}

/* cm_transpose() turns one block. It must do so for elements of 1, 2, 4 and 8 bytes and
 * decline others. */
static void
test_transpose_turns_every_element(void)
{
    char rows[CM_TRANSPOSE_ROWS * CM_TRANSPOSE_ROW_NBYTES];
    char columns[sizeof(rows)];
    fill_bytes(rows, sizeof(rows));
    for (size_t size = 1; size <= 16; size++) {
        size_t stride = CM_TRANSPOSE_ROWS * size;
        memset(columns, 0, sizeof(columns));
        bool done = cm_transpose(columns, (int64_t)stride, rows, size);
        for (size_t at = 0; done && at < sizeof(rows); at++) {
            size_t row = at / CM_TRANSPOSE_ROW_NBYTES;
            size_t column = at % CM_TRANSPOSE_ROW_NBYTES / size;
            CHECK_EQ(columns[column * stride + row * size + at % size], rows[at]);
        }
#if defined(__x86_64__) || defined(__aarch64__)
        CHECK_EQ(done, size == 1 || size == 2 || size == 4 || size == 8);
#endif
    }
}

/* A mapped file of four pages loses the last two. A probe of one byte there must report
 * it instead of crashing. */
static void
test_look_finds_what_is_no_longer_there(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    FILE *file = tmpfile();
    CHECK(file != NULL);
    CHECK_EQ(ftruncate(fileno(file), (off_t)(4 * page)), 0);
    char *map =
        mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    CHECK(map != MAP_FAILED);
    CHECK_OK(cm_pages_probe(map, 4 * page, false));
    CHECK_OK(cm_pages_probe(map, 4 * page, true));
    CHECK_EQ(ftruncate(fileno(file), (off_t)(2 * page)), 0);
    if (madvise(map, page, MADV_POPULATE_READ) == 0) { /* older kernels cannot tell */
        for (int writes = 0; writes < 2; writes++) {
            CHECK_OK(cm_pages_probe(map, 2 * page, writes));
            cm_status status = cm_pages_probe(map + 1, 2 * page, writes);
            CHECK_EQ(status.code, CM_EFAULT);
            CHECK_EQ(status.arg, EFAULT);
        }
        /* The rows run backwards, so the first one lies highest. */
        cm_layout layout = {.run_nbytes = 8, .ndim = 1};
        layout.axes[0].length = 3;
        layout.axes[0].stride[CM_DST] = 8;
        layout.axes[0].stride[CM_SRC] = -(int64_t)page;
        layout.offset[CM_SRC] = 2 * (int64_t)page;
        CHECK_EQ(cm_host_probe(&layout, CM_SRC, map, 0).code, CM_EFAULT);
        CHECK_OK(cm_host_probe(&layout, CM_SRC, map, 3 * page));
        CHECK_OK(cm_host_probe(&layout, CM_SRC, map - page, 0));
        CHECK_OK(cm_host_probe(&layout, CM_DST, map, 0));
    }
    CHECK_EQ(munmap(map, 4 * page), 0);
    if (madvise((char *)&page - (uintptr_t)&page % page, page, MADV_POPULATE_READ)
        == 0) {
        CHECK_EQ(cm_pages_probe(map, page, false).arg, ENOMEM);
    }
    CHECK_EQ(fclose(file), 0);
}

/* Eight pages are mapped, and pages 2 and 5 belong to a file that is empty. Populating
 * must report them if the layout touches them, and leave them alone if they lie between
 * its runs. */
static void
test_populate_finds_what_is_gone_and_leaves_gaps_alone(void)
{
    size_t page = 64 << 10; /* these are whole pages on any machine */
    FILE *file = tmpfile();
    FILE *none = tmpfile();
    CHECK(file != NULL && none != NULL);
    CHECK_EQ(ftruncate(fileno(file), (off_t)(8 * page)), 0);
    char *map =
        mmap(NULL, 8 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    CHECK(map != MAP_FAILED);
    for (size_t i = 2; i < 8; i += 3) {
        CHECK(mmap(map + i * page, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                   fileno(none), 0)
              == map + i * page);
    }
    if (madvise(map, page, MADV_POPULATE_READ) == 0) { /* older kernels cannot tell */
        for (int writes = 0; writes < 2; writes++) {
            CHECK_OK(cm_pages_populate(map, 2 * page, writes));
            CHECK_OK(cm_pages_populate(map, 0, writes));
            CHECK_OK(cm_pages_probe(map, 8 * page, writes));
            CHECK_EQ(cm_pages_populate(map + 1, 2 * page, writes).arg, EFAULT);
            CHECK_EQ(cm_pages_populate(map, 8 * page, writes).code, CM_EFAULT);
        }
        /* There are two rows of two pages each. In the source they are one run, and in
         * the target page 2 lies between them. */
        int64_t step = (int64_t)page;
        cm_layout layout = {.run_nbytes = page,
                            .ndim = 2,
                            .axes = {{2, {3 * step, 2 * step}}, {2, {step, step}}}};
        CHECK_EQ(cm_host_populate(&layout, CM_SRC, map).code, CM_EFAULT);
        CHECK_OK(cm_host_populate(&layout, CM_DST, map));
        /* This is the same run, from its end to its beginning. */
        layout.offset[CM_SRC] = 4 * (int64_t)page;
        layout.axes[0].stride[CM_SRC] = -2 * (int64_t)page;
        layout.axes[1].stride[CM_SRC] = -(int64_t)page;
        CHECK_EQ(cm_host_populate(&layout, CM_SRC, map).code, CM_EFAULT);
        cm_layout apart = {.run_nbytes = 1, .ndim = 1, .axes = {{8, {1, step}}}};
        CHECK_EQ(cm_host_populate(&apart, CM_SRC, map).code, CM_EFAULT);
        apart.axes[0].length = 2;
        CHECK_OK(cm_host_populate(&apart, CM_SRC, map));
        apart.axes[0].stride[CM_SRC] = 3 * step; /* the rows skip page 2 */
        CHECK_OK(cm_host_populate(&apart, CM_SRC, map));
        apart.offset[CM_SRC] = 2 * step; /* these are pages 2 and 5 */
        CHECK_EQ(cm_host_populate(&apart, CM_SRC, map).code, CM_EFAULT);
        /* Elements that are less than a page apart are one span, in whichever order the
         * axes are. */
        cm_host_hull hull;
        cm_layout turned = {.run_nbytes = 4,
                            .ndim = 2,
                            .offset = {0, 8},
                            .axes = {{16, {400, 12}}, {100, {4, 200}}}};
        CHECK(cm_host_find_hull(&turned, CM_SRC, map, &hull));
        CHECK(hull.start == map + 8 && hull.nbytes == 99 * 200 + 15 * 12 + 4);
        CHECK_OK(cm_host_populate(&turned, CM_SRC, map));
        turned.offset[CM_SRC] = 2 * step - 100;
        CHECK_EQ(cm_host_populate(&turned, CM_SRC, map).code, CM_EFAULT);
        turned.axes[1].stride[CM_SRC] = 2 * step; /* now there are pages between them */
        CHECK(!cm_host_find_hull(&turned, CM_SRC, map, &hull));
        /* These two short rows begin at their ends. The second one ends just before
         * page 5. */
        cm_layout back = {.run_nbytes = 1,
                          .ndim = 2,
                          .offset = {0, 4 * step - 1},
                          .axes = {{2, {16, step}}, {16, {1, -1}}}};
        CHECK_OK(cm_host_populate(&back, CM_SRC, map));
        back.offset[CM_SRC] += 8;
        CHECK_EQ(cm_host_populate(&back, CM_SRC, map).code, CM_EFAULT);
    }
    CHECK_EQ(munmap(map, 8 * page), 0);
    CHECK_EQ(fclose(file), 0);
    CHECK_EQ(fclose(none), 0);
}

/* clang-format off */
MAIN(RUN(test_look_finds_what_is_no_longer_there)
     RUN(test_populate_finds_what_is_gone_and_leaves_gaps_alone)
     RUN(test_elements_a_few_bytes_apart_are_brought_together)
     RUN(test_rows_of_elements_apart_are_brought_together)
     RUN(test_rows_become_columns)
     RUN(test_transpose_turns_every_element))
/* clang-format on */
