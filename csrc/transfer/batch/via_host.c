/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/batch/via_host.h"

#include <stdlib.h>

/* Pieces of this size are so long that the link is rarely idle between two of them. */
enum { STAGE_NBYTES = 32 << 20 };

/* -- one copy, piece by piece ------------------------------------------------------------- */

/* Walks over pieces that have the same elements at both ends. A piece has all of the
 * axes after `axis`, `rows` indices of `axis` itself, and one index of each axis before
 * it. */
typedef struct piece_walk {
    const cm_piece_regions *whole;
    int axis; /* -1 if there is only one piece */
    int64_t rows;
    int64_t index[CM_MAX_NDIM];
    bool done;
} piece_walk;

static int64_t
widest(const cm_piece_regions *copy)
{
    return copy->dst.itemsize > copy->src.itemsize ? copy->dst.itemsize
                                                   : copy->src.itemsize;
}

static void
walk_begin(piece_walk *walk, cm_runtime *rt, const cm_piece_regions *whole)
{
    const cm_region *dst = &whole->dst;
    int64_t most = STAGE_NBYTES / widest(whole);
    int64_t inner = 1;
    *walk = (piece_walk){.whole = whole, .axis = -1};
    if (cm_overlap_is_possible(rt, dst, &whole->src)) {
        return;
    }
    for (int axis = dst->ndim - 1; axis >= 0; axis--) {
        if (dst->shape[axis] > most / inner) {
            walk->axis = axis;
            walk->rows = most / inner > 1 ? most / inner : 1;
            return;
        }
        inner *= dst->shape[axis];
    }
}

static int64_t
rows_of(const piece_walk *walk)
{
    int64_t left = walk->whole->dst.shape[walk->axis] - walk->index[walk->axis];
    return left < walk->rows ? left : walk->rows;
}

static cm_region
take_piece(const piece_walk *walk, const cm_region *whole)
{
    cm_region piece = *whole;
    int64_t offset = 0;
    for (int axis = 0; axis <= walk->axis; axis++) {
        offset += walk->index[axis] * whole->strides[axis];
        piece.shape[axis] = axis == walk->axis ? rows_of(walk) : 1;
    }
    piece.host = whole->host == NULL ? NULL : (char *)whole->host + offset;
    piece.address = whole->address == 0 ? 0 : whole->address + (uint64_t)offset;
    return piece;
}

static void
walk_on(piece_walk *walk)
{
    const cm_region *dst = &walk->whole->dst;
    for (int axis = walk->axis; axis >= 0; axis--) {
        walk->index[axis] += axis == walk->axis ? rows_of(walk) : 1;
        if (walk->index[axis] < dst->shape[axis]) {
            return;
        }
        walk->index[axis] = 0;
    }
    walk->done = true;
}

/* -- the stage ---------------------------------------------------------------------------- */

/* The stage, with the keeps of the request. */
typedef struct stage {
    char *memory; /* owned */
    uint32_t keep_count;
    cm_keep keeps[sizeof(((cm_copy_request *)NULL)->keep) / sizeof(cm_keep)];
} stage;

static void
drop_stage(void *object)
{
    stage *self = object;
    for (uint32_t i = 0; i < self->keep_count; i++) {
        self->keeps[i].drop(self->keeps[i].object);
    }
    free(self->memory);
    free(self);
}

static cm_status
stage_create(uint64_t nbytes, stage **out)
{
    stage *self = calloc(1, sizeof(*self));
    CM_TRY(cm_allocated(self != NULL, sizeof(*self)));
    self->memory = malloc((size_t)nbytes);
    if (self->memory == NULL) {
        free(self);
        return cm_fail(CM_ENOMEM, nbytes);
    }
    *out = self;
    return cm_ok();
}

static void
stage_take_keeps(stage *self, cm_copy_request *request)
{
    self->keep_count = request->keep_count;
    for (uint32_t i = 0; i < request->keep_count; i++) {
        self->keeps[i] = request->keep[i];
    }
    request->keep[0] = (cm_keep){self, drop_stage};
    request->keep_count = 1;
}

/* -- all ---------------------------------------------------------------------------------- */

static bool
goes_via_host(cm_runtime *rt, const cm_piece_regions *copy)
{
    return cm_plan_goes_via_host(rt, &copy->dst, &copy->src, &copy->convert);
}

/* Count the copies that there will be, and the bytes of the largest piece in the
 * target's dtype. */
static cm_status
measure(cm_runtime *rt, const cm_many_request *request, uint64_t *count,
        uint64_t *nbytes)
{
    piece_walk walk;
    *count = 0;
    *nbytes = 0;
    for (uint64_t i = 0; i < request->other_count; i++) {
        const cm_piece_regions *copy = &request->others[i];
        if (!goes_via_host(rt, copy)) {
            (*count)++;
            continue;
        }
        for (walk_begin(&walk, rt, copy); !walk.done; walk_on(&walk)) {
            cm_region piece = take_piece(&walk, &copy->dst);
            int64_t items;
            CM_TRY(cm_region_count(&piece, &items));
            uint64_t own = (uint64_t)items * (uint64_t)piece.itemsize;
            *nbytes = own > *nbytes ? own : *nbytes;
            *count += 2;
        }
    }
    return cm_ok();
}

/* Add the two copies of a piece, one to the stage and one from the stage. */
static cm_status
add_piece(const piece_walk *walk, char *memory, cm_piece_regions *out)
{
    const cm_piece_regions *whole = walk->whole;
    cm_region dst = take_piece(walk, &whole->dst);
    cm_region staged = dst;
    staged.host = memory;
    staged.address = 0;
    staged.kind = CM_KIND_PAGEABLE;
    staged.device = -1;
    staged.is_heap = true;
    staged.is_file = false;
    CM_TRY(cm_region_set_c_strides(&staged));
    out[0] = (cm_piece_regions){.dst = staged,
                                .src = take_piece(walk, &whole->src),
                                .convert = whole->convert,
                                .index = whole->index};
    out[1] = (cm_piece_regions){.dst = dst, .src = staged, .index = whole->index};
    return cm_ok();
}

static cm_status
fill_in(cm_runtime *rt, const cm_many_request *request, char *memory,
        cm_piece_regions *out)
{
    piece_walk walk;
    for (uint64_t i = 0; i < request->other_count; i++) {
        const cm_piece_regions *copy = &request->others[i];
        if (!goes_via_host(rt, copy)) {
            *out++ = *copy;
            continue;
        }
        for (walk_begin(&walk, rt, copy); !walk.done; walk_on(&walk)) {
            CM_TRY(add_piece(&walk, memory, out));
            out += 2;
        }
    }
    return cm_ok();
}

cm_status
cm_via_host_expand(cm_runtime *rt, cm_many_request *request, cm_piece_regions **others)
{
    uint64_t count, nbytes;
    stage *through;
    *others = NULL;
    CM_TRY(measure(rt, request, &count, &nbytes));
    if (nbytes == 0) {
        return cm_ok();
    }
    cm_piece_regions *made = calloc((size_t)count, sizeof(*made));
    CM_TRY(cm_allocated(made != NULL, count * sizeof(*made)));
    cm_status status = stage_create(nbytes, &through);
    if (!cm_is_ok(status)) {
        free(made);
        return status;
    }
    status = fill_in(rt, request, through->memory, made);
    if (!cm_is_ok(status)) {
        drop_stage(through);
        free(made);
        return status;
    }
    stage_take_keeps(through, &request->common);
    request->others = made;
    request->other_count = count;
    *others = made;
    return cm_ok();
}
