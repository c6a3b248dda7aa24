/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/host/host_copy.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/fresh_pages.h"
#include "base/simd_copy.h"

enum {
    /* The most lines of the source that one tile reads (see copy_tiled()). They stay in
     * the cache until the tile has been copied. */
    TILE_ROWS = CM_TRANSPOSE_ROWS,
    WIDE_RUN_NBYTES = 4096, /* shorter runs are copied faster through the caches */
    /* Setting up the masks of a cm_pick does not pay for fewer elements than these. */
    PICK_COUNT = 64
};

typedef struct block block;
typedef void (*copy_block)(const block *b, char *dst, const char *src, size_t nbytes);

static_assert((int)CM_LINE_NBYTES == CM_TRANSPOSE_ROW_NBYTES, "one line is one row");

/* The two innermost loops of a copy. The members that end in `outer` and `inner` are
 * the strides of the outer and of the inner loop, in bytes. */
struct block {
    int64_t outer_count;
    int64_t inner_count;
    int64_t dst_outer;
    int64_t dst_inner;
    int64_t src_outer;
    int64_t src_inner;
    const cm_pick *pick; /* how the inner loop is copied by masks, or NULL */
    copy_block rest;     /* copies what `pick` leaves over */
};

/* Define a function that copies each run of a block by `move`. If `nbytes` is a
 * constant, memcpy compiles to a few unaligned loads and stores. */
#define DEFINE_COPY_BLOCK(name, move, nbytes)                                          \
    static void copy_block_##name(const block *b, char *dst, const char *src,          \
                                  size_t run_nbytes)                                   \
    {                                                                                  \
        (void)run_nbytes;                                                              \
        for (int64_t i = 0; i < b->outer_count; i++) {                                 \
            char *to = dst + i * b->dst_outer;                                         \
            const char *from = src + i * b->src_outer;                                 \
            for (int64_t k = 0; k < b->inner_count; k++) {                             \
                move(to, from, (nbytes));                                              \
                to += b->dst_inner;                                                    \
                from += b->src_inner;                                                  \
            }                                                                          \
        }                                                                              \
    }
#define SHORT_RUNS(X)                                                                  \
    X(1)                                                                               \
    X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16)
#define DEFINE_SHORT(n) DEFINE_COPY_BLOCK(n, memcpy, n)
SHORT_RUNS(DEFINE_SHORT)
DEFINE_COPY_BLOCK(runs, memcpy, run_nbytes)
DEFINE_COPY_BLOCK(wide, cm_wide_copy, run_nbytes)
#undef DEFINE_SHORT
#undef DEFINE_COPY_BLOCK

static void
set_block(const block *b, char *dst, const char *src, size_t unused)
{
    (void)unused;
    for (int64_t i = 0; i < b->outer_count; i++) {
        memset(dst + i * b->dst_outer, src[i * b->src_outer], (size_t)b->inner_count);
    }
}

static void
pick_block(const block *b, char *dst, const char *src, size_t run_nbytes)
{
    block rest = *b;
    rest.outer_count = 1;
    for (int64_t i = 0; i < b->outer_count; i++) {
        char *to = dst + i * b->dst_outer;
        const char *from = src + i * b->src_outer;
        int64_t done = cm_pick_copy(b->pick, to, from, b->inner_count);
        rest.inner_count = b->inner_count - done;
        b->rest(&rest, to + done * b->dst_inner, from + done * b->src_inner,
                run_nbytes);
    }
}

static copy_block
choose_copy(uint64_t run_nbytes, const block *b, bool wide)
{
#define SHORT_NAME(n) copy_block_##n,
    static const copy_block small[] = {SHORT_RUNS(SHORT_NAME)};
#undef SHORT_NAME
    if (run_nbytes == 1 && b->src_inner == 0 && b->dst_inner == 1) {
        return set_block;
    }
    if (run_nbytes <= sizeof(small) / sizeof(small[0])) {
        return small[run_nbytes - 1];
    }
    return wide && run_nbytes >= WIDE_RUN_NBYTES ? copy_block_wide : copy_block_runs;
}

/* Copy the cache lines of a tile's source into `lines`, where they lie next to each
 * other. If the lines of the source are a power of two apart, the caches have only a
 * few places for all of them, so a line would be evicted before all of its elements
 * were read. Here each line is read at once. */
static void
gather_lines(const block *tile, const char *from, size_t nbytes, char *lines)
{
    for (int64_t k = 0; k < tile->inner_count; k++) {
        /* A constant size compiles to a few instructions. */
        if (nbytes == CM_LINE_NBYTES) {
            memcpy(lines, from, CM_LINE_NBYTES);
        }
        else {
            memcpy(lines, from, nbytes);
        }
        from += tile->src_inner;
        lines += CM_LINE_NBYTES;
    }
}

/* Copy a tile in which the elements of each line lie side by side, in ascending or in
 * descending order. */
static void
copy_packed_tile(copy_block copy, block *tile, char *dst, const char *src,
                 size_t run_nbytes)
{
    char lines[TILE_ROWS * CM_LINE_NBYTES];
    int64_t last = tile->outer_count - 1;
    size_t nbytes = (size_t)tile->outer_count * run_nbytes;
    bool back = tile->src_outer < 0;
    const char *first = src + (back ? last * tile->src_outer : 0);
    gather_lines(tile, first, nbytes, lines);
    if (nbytes == CM_LINE_NBYTES && tile->inner_count == TILE_ROWS
        && tile->dst_inner == (int64_t)run_nbytes
        && cm_transpose(dst + (back ? last * tile->dst_outer : 0),
                        back ? -tile->dst_outer : tile->dst_outer, lines, run_nbytes)) {
        return;
    }
    tile->src_inner = CM_LINE_NBYTES;
    copy(tile, dst, lines + (src - first), run_nbytes);
}

/* Prefetch the lines of a tile. The processor does not do this by itself, as the lines
 * do not follow one another in memory. */
static void
prefetch_lines(const block *tile, const char *src)
{
    for (int64_t k = 0; k < TILE_ROWS; k++) {
        __builtin_prefetch(src);
        src += tile->src_inner;
    }
}

/* Copy a block in tiles. This is for a source that is transposed: its neighbouring
 * elements lie along the outer loop, while neighbouring elements of the target lie
 * along the inner loop. A plain loop would use one element of each cache line of the
 * source and read the line again for the next element. A tile is a part of the block
 * that takes all elements of one line along the outer loop, and up to TILE_ROWS lines
 * along the inner loop, so each line is read once. */
static void
copy_tiled(copy_block copy, const block *whole, char *dst, const char *src,
           size_t run_nbytes)
{
    int64_t side = CM_LINE_NBYTES / (int64_t)run_nbytes;
    bool packed = llabs(whole->src_outer) == (int64_t)run_nbytes;
    for (int64_t i = 0; i < whole->outer_count; i += side) {
        for (int64_t k = 0; k < whole->inner_count; k += TILE_ROWS) {
            block tile = *whole;
            char *to = dst + i * whole->dst_outer + k * whole->dst_inner;
            const char *from = src + i * whole->src_outer + k * whole->src_inner;
            int64_t rows = whole->outer_count - i;
            int64_t columns = whole->inner_count - k;
            tile.outer_count = rows < side ? rows : side;
            tile.inner_count = columns < TILE_ROWS ? columns : TILE_ROWS;
            if (columns >= 2 * TILE_ROWS) {
                prefetch_lines(&tile, from + TILE_ROWS * whole->src_inner);
            }
            if (packed) {
                copy_packed_tile(copy, &tile, to, from, run_nbytes);
            }
            else {
                copy(&tile, to, from, run_nbytes);
            }
        }
    }
}

static void
copy(const cm_layout *layout, char *dst, const char *src, bool wide)
{
    int inner = layout->ndim - 1;
    int near = cm_layout_near_axis(layout);
    int outer = near >= 0 ? near : inner - 1; /* -1 if there is only one axis */
    const cm_axis *axis = &layout->axes[inner];
    block b = {.outer_count = 1,
               .inner_count = axis->length,
               .dst_inner = axis->stride[CM_DST],
               .src_inner = axis->stride[CM_SRC]};
    if (outer >= 0) {
        axis = &layout->axes[outer];
        b.outer_count = axis->length;
        b.dst_outer = axis->stride[CM_DST];
        b.src_outer = axis->stride[CM_SRC];
    }
    copy_block move = choose_copy(layout->run_nbytes, &b, wide);
    size_t run_nbytes = (size_t)layout->run_nbytes;
    int64_t index[CM_MAX_NDIM] = {0};
    int64_t offset[2] = {layout->offset[CM_DST], layout->offset[CM_SRC]};
    cm_pick pick;
    if (b.dst_inner == (int64_t)run_nbytes && b.inner_count >= PICK_COUNT
        && cm_pick_init(&pick, run_nbytes, b.src_inner)) {
        b.pick = &pick;
        b.rest = move;
        move = pick_block;
    }
    do {
        char *to = dst + offset[CM_DST];
        const char *from = src + offset[CM_SRC];
        if (near >= 0) {
            copy_tiled(move, &b, to, from, run_nbytes);
        }
        else {
            move(&b, to, from, run_nbytes);
        }
    } while (cm_layout_step(layout, inner, outer, index, offset));
}

void
cm_host_copy(const cm_layout *layout, void *dst, const void *src, bool wide)
{
    char *to = (char *)dst + layout->offset[CM_DST];
    const char *from = (const char *)src + layout->offset[CM_SRC];
    if (layout->run_nbytes == 0) {
        return;
    }
    if (layout->ndim > 0) {
        copy(layout, dst, src, wide);
    }
    else if (wide && layout->run_nbytes >= WIDE_RUN_NBYTES) {
        cm_wide_copy(to, from, (size_t)layout->run_nbytes);
    }
    else {
        memmove(to, from, (size_t)layout->run_nbytes);
    }
}

/* Choose the axis to convert along. This is the last axis, unless it is so short that
 * starting a run costs more than converting the run. A longer axis is better then. */
static int
convert_axis(const cm_layout *layout)
{
    enum { SHORT_COUNT = 32 };
    int best = layout->ndim - 1;
    for (int axis = best - 1; axis >= 0; axis--) {
        int64_t length = layout->axes[best].length;
        if (length < SHORT_COUNT && layout->axes[axis].length > length) {
            best = axis;
        }
    }
    return best;
}

/* Convert the elements by calls of a cast. Each call is given as many axes as a cast
 * can take, since the cast knows best in which order to go through them. */
static bool
cast_elements(const cm_cast *cast, const cm_layout *layout, void *dst, const void *src)
{
    int outer = layout->ndim > CM_CAST_MAX_NDIM ? layout->ndim - CM_CAST_MAX_NDIM : 0;
    int64_t shape[CM_CAST_MAX_NDIM];
    int64_t strides[2][CM_CAST_MAX_NDIM];
    for (int i = outer; i < layout->ndim; i++) {
        shape[i - outer] = layout->axes[i].length;
        strides[CM_DST][i - outer] = layout->axes[i].stride[CM_DST];
        strides[CM_SRC][i - outer] = layout->axes[i].stride[CM_SRC];
    }
    int64_t index[CM_MAX_NDIM] = {0};
    int64_t offset[2] = {layout->offset[CM_DST], layout->offset[CM_SRC]};
    do {
        if (!cast->run(cast, layout->ndim - outer, shape, (char *)dst + offset[CM_DST],
                       strides[CM_DST], (const char *)src + offset[CM_SRC],
                       strides[CM_SRC])) {
            return false;
        }
    } while (cm_layout_step(layout, outer, -1, index, offset));
    return true;
}

/* If the source is transposed, each run of elements touches many cache lines of the
 * source, and the next run touches the same lines. So a run has at most NEAR_COUNT
 * elements, and the next run finds the lines still in the cache. */
bool
cm_host_convert(const cm_convert *convert, const cm_layout *layout, void *dst,
                const void *src)
{
    enum { NEAR_COUNT = 128 };
    if (convert->cast != NULL) {
        return layout->run_nbytes == 0
               || cast_elements(convert->cast, layout, dst, src);
    }
    cm_axis axis = {.length = layout->run_nbytes != 0};
    int inner = convert_axis(layout);
    if (inner >= 0) {
        axis = layout->axes[inner];
    }
    int64_t step = cm_layout_near_axis(layout) >= 0 ? NEAR_COUNT : axis.length;
    for (int64_t at = 0; at < axis.length; at += step) {
        int64_t count = axis.length - at < step ? axis.length - at : step;
        int64_t index[CM_MAX_NDIM] = {0};
        int64_t offset[2] = {layout->offset[CM_DST] + at * axis.stride[CM_DST],
                             layout->offset[CM_SRC] + at * axis.stride[CM_SRC]};
        do {
            cm_convert_run(convert, (char *)dst + offset[CM_DST], axis.stride[CM_DST],
                           (const char *)src + offset[CM_SRC], axis.stride[CM_SRC],
                           count);
        } while (cm_layout_step(layout, layout->ndim, inner, index, offset));
    }
    return true;
}

/* Return how many bytes an element has on that side, if the layout has elements that
 * are converted, or else how many bytes a run has. */
static uint64_t
run_of(const cm_layout *layout, cm_side side)
{
    return cm_layout_has_items(layout) ? layout->item_nbytes[side] : layout->run_nbytes;
}

cm_status
cm_host_probe(const cm_layout *layout, cm_side side, const void *base,
              uint64_t least_nbytes)
{
    int64_t low = layout->offset[side];
    int64_t high = low + (int64_t)run_of(layout, side);
    for (int axis = 0; axis < layout->ndim; axis++) {
        int64_t reach =
            layout->axes[axis].stride[side] * (layout->axes[axis].length - 1);
        low += reach < 0 ? reach : 0;
        high += reach > 0 ? reach : 0;
    }
    uint64_t nbytes = (uint64_t)(high - low);
    return nbytes < least_nbytes
               ? cm_ok()
               : cm_pages_probe((const char *)base + low, nbytes, side == CM_DST);
}

/* Describe which pages one side of a copy touches. A span is a range of bytes in which
 * every page is touched. Neighbouring elements lie in the same span if the gap between
 * them is shorter than a page. In `own`, each run is one span, and the axes say where
 * the other spans are. Examples:
 *
 *     every third byte of 1 MiB             one span of 1 MiB
 *     16 bytes of each row of 3 KiB         one span, as no page lies between two rows
 *     16 bytes of each row of 16 KiB        a span of 16 bytes for each row
 *
 * The axis of the shortest stride is merged into the run first, then the axis of the
 * next longer stride, until a gap is too long. For this the axes have to be sorted by
 * the strides of this side, because a layout has them in the order of its target. Axes
 * that only repeat the source are left out. */
static void
find_spans(const cm_layout *layout, cm_side side, cm_layout *own)
{
    uint64_t page = cm_page_nbytes();
    *own = (cm_layout){.run_nbytes = run_of(layout, side)};
    own->offset[side] = layout->offset[side];
    for (int i = 0; i < layout->ndim; i++) {
        cm_axis axis = layout->axes[i];
        if (axis.stride[side] < 0) {
            own->offset[side] += axis.stride[side] * (axis.length - 1);
            axis.stride[side] = -axis.stride[side];
        }
        if (axis.stride[side] != 0) {
            own->axes[own->ndim++] = axis;
        }
    }
    cm_layout_sort(own, side);
    while (own->ndim > 0) {
        const cm_axis *inner = &own->axes[own->ndim - 1];
        if ((uint64_t)inner->stride[side] >= own->run_nbytes + page) {
            return;
        }
        own->run_nbytes +=
            (uint64_t)inner->stride[side] * (uint64_t)(inner->length - 1);
        own->ndim--;
    }
}

cm_status
cm_host_populate(const cm_layout *layout, cm_side side, const void *base)
{
    cm_layout own;
    find_spans(layout, side, &own);
    if (own.run_nbytes == 0) {
        return cm_ok();
    }
    int64_t index[CM_MAX_NDIM] = {0};
    do {
        CM_TRY(cm_pages_populate((const char *)base + own.offset[side], own.run_nbytes,
                                 side == CM_DST));
    } while (cm_layout_step(&own, own.ndim, -1, index, own.offset));
    return cm_ok();
}

bool
cm_host_find_hull(const cm_layout *layout, cm_side side, const void *base,
                  cm_host_hull *out)
{
    cm_layout own;
    find_spans(layout, side, &own);
    *out = (cm_host_hull){.start = (const char *)base + own.offset[side],
                          .nbytes = own.run_nbytes};
    return own.ndim == 0;
}
