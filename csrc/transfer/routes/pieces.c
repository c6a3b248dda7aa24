/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/pieces.h"

#include <stdlib.h>
#include <string.h>

#include "base/fresh_pages.h"
#include "base/simd_copy.h"
#include "transfer/plan/ring_policy.h"
#include "transfer/routes/device_side.h"
#include "transfer/routes/routes.h"

enum {
    LONG_NBYTES = 256 << 10,       /* the copy engine is as fast from here on */
    LONG_PACKED_NBYTES = 64 << 10, /* the same, where the rest waits for it anyway */
    WIDE_NBYTES = 4096,            /* shorter runs are faster through the caches */
    BATCH_COUNT = 1 << 14,
};

/* -- the plan ----------------------------------------------------------------------------- */

/* The call for many finds no other way between devices. Pieces of one allocation, one
 * after the other, are alike. */
static bool
can_go_in_batches(const cm_job *job, const cm_many *many)
{
    cm_engine *engine = job->engine;
    bool can = cm_runtime_has(engine->rt, CM_OP_copy_batch_async);
    for (uint64_t i = 0; can && i < many->count; i++) {
        const cm_piece *piece = &many->pieces[i];
        if (i == 0 || piece->dst.owner == NULL
            || piece->dst.owner != piece[-1].dst.owner || piece->src.owner == NULL
            || piece->src.owner != piece[-1].src.owner) {
            cm_region dst = cm_piece_end_region(&piece->dst, piece->nbytes);
            cm_region src = cm_piece_end_region(&piece->src, piece->nbytes);
            cm_peer_facts peers = cm_peer_access_look(&engine->peers, &dst, &src);
            can = peers.pulls && peers.pushes;
        }
    }
    return can;
}

static cm_route
route_of(const cm_job *job, const cm_many *many)
{
    switch (many->way) {
    case CM_MANY_HOST:
        return CM_ROUTE_HOST;
    case CM_MANY_TABLE:
        return CM_ROUTE_TABLE;
    case CM_MANY_PEER: /* graphs do not take the call for many */
        return !job->capturing && can_go_in_batches(job, many) ? CM_ROUTE_BATCH
                                                               : CM_ROUTE_PEER;
    default:
        return CM_ROUTE_STAGED_TABLE;
    }
}

void
cm_many_plan(cm_job *job)
{
    const cm_many *many = job->many;
    cm_plan *plan = &job->plan;
    plan->route = route_of(job, many);
    plan->device = many->device;
    plan->src_device = many->src_device >= 0 ? many->src_device : many->device;
    plan->is_download = many->way == CM_MANY_DOWN;
    plan->nbytes = many->nbytes;
    plan->layout = (cm_layout){.run_nbytes = many->span};
    cm_ring_policy_init(plan, &job->tuning);
    job->dst_facts = (cm_end_facts){.locked = false, .whole = true};
    job->src_facts = job->dst_facts;
}

cm_status
cm_many_share_locked(cm_job *job)
{
    const cm_many *many = job->many;
    bool looks = cm_registry_has_pieces(job->engine->registry);
    for (uint64_t i = 0; looks && i < many->count; i++) {
        const cm_piece *piece = &many->pieces[i];
        cm_region dst = cm_piece_end_region(&piece->dst, piece->nbytes);
        cm_region src = cm_piece_end_region(&piece->src, piece->nbytes);
        CM_TRY(cm_engine_share_locked(job->engine, &dst, &job->ticket->locked));
        CM_TRY(cm_engine_share_locked(job->engine, &src, &job->ticket->locked));
    }
    return cm_ok();
}

/* -- the kernel --------------------------------------------------------------------------- */

/* Some drivers come without what turns a kernel's text into code. */
static bool
has_no_compiler(cm_status status)
{
    enum { NO_BINARY = 209, INVALID_PTX = 218, NO_JIT = 221, OLD_PTX = 222 };
    return status.op == CM_OP_module_load
           && (status.code == NO_BINARY || status.code == INVALID_PTX
               || status.code == NO_JIT || status.code == OLD_PTX);
}

cm_status
cm_many_copy_by_table(cm_job *job)
{
    const cm_many *many = job->many;
    cm_table table;
    uint64_t function;
    cm_status status = cm_kernels_find(&job->engine->kernels, CM_KERNEL_TABLE,
                                       many->device, &function);
    bool by_engine = has_no_compiler(status);
    if (!cm_is_ok(status) && !by_engine) {
        return status;
    }
    cm_table_init(&table, &job->engine->kernels, many->device, job->stream->handle);
    for (uint64_t i = 0; i < many->count; i++) {
        const cm_piece *piece = &many->pieces[i];
        if (by_engine || piece->nbytes >= LONG_NBYTES) {
            CM_TRY(cm_job_copy_over_edges(job, cm_piece_end_address(&piece->dst),
                                          cm_piece_end_address(&piece->src),
                                          piece->nbytes));
        }
        else {
            CM_TRY(cm_table_add(&table, piece->dst.address, piece->src.address,
                                piece->nbytes));
        }
    }
    return cm_table_flush(&table);
}

cm_status
cm_many_copy_in_batches(cm_job *job)
{
    const cm_many *many = job->many;
    uint64_t room = many->count < BATCH_COUNT ? many->count : BATCH_COUNT;
    uint64_t *arrays = malloc((size_t)room * 3 * sizeof(*arrays));
    CM_TRY(cm_allocated(arrays != NULL, room * 3 * sizeof(*arrays)));
    cm_address *dsts = arrays;
    cm_address *srcs = arrays + room;
    uint64_t *nbytes = arrays + 2 * room;
    cm_status status = cm_ok();
    for (uint64_t first = 0; first < many->count && cm_is_ok(status); first += room) {
        uint64_t left = many->count - first;
        uint64_t count = left < room ? left : room;
        for (uint64_t i = 0; i < count; i++) {
            const cm_piece *piece = &many->pieces[first + i];
            dsts[i] = cm_piece_end_address(&piece->dst);
            srcs[i] = cm_piece_end_address(&piece->src);
            nbytes[i] = piece->nbytes;
        }
        status = cm_rt_copy_batch_async(job->engine->rt, dsts, srcs, nbytes, count,
                                        job->stream->handle);
    }
    free(arrays);
    return status;
}

/* -- the host ----------------------------------------------------------------------------- */

cm_status
cm_many_look(const cm_many *many)
{
    for (uint64_t i = 0; i < many->count; i++) {
        const cm_piece *piece = &many->pieces[i];
        if (piece->nbytes < CM_LOOK_HOST_NBYTES) {
            continue;
        }
        if (cm_kind_is_pageable(piece->src.kind)) {
            CM_TRY(cm_pages_look(piece->src.host, piece->nbytes, false));
        }
        if (cm_kind_is_pageable(piece->dst.kind)) {
            CM_TRY(cm_pages_look(piece->dst.host, piece->nbytes, true));
        }
    }
    return cm_ok();
}

static void
move_run(char *dst, const char *src, uint64_t nbytes, bool wide)
{
    if (wide && nbytes >= WIDE_NBYTES) {
        cm_wide_copy(dst, src, (size_t)nbytes);
    }
    else {
        memcpy(dst, src, (size_t)nbytes);
    }
}

/* The bytes of a piece that lie in a range of the packed space. */
typedef struct slice {
    const cm_piece *piece;
    uint64_t from; /* in the piece */
    uint64_t at;   /* in the range */
    uint64_t nbytes;
} slice;

/* Those of the first piece from *next on that has any; false: none has. */
static bool
next_slice(const cm_many *many, uint64_t at, uint64_t nbytes, uint64_t *next,
           slice *out)
{
    uint64_t end = at + nbytes;
    for (uint64_t i = *next; i < many->count && many->starts[i] < end; i++) {
        const cm_piece *piece = &many->pieces[i];
        uint64_t begin = many->starts[i];
        uint64_t from = at > begin ? at - begin : 0;
        uint64_t to = end - begin < piece->nbytes ? end - begin : piece->nbytes;
        if (from < to) { /* else it is the gap before the next */
            *out = (slice){piece, from, begin + from - at, to - from};
            *next = i + 1;
            return true;
        }
    }
    return false;
}

/* HOST: both offsets are the same, and there is no block. */
void
cm_many_move_part(const void *context, const cm_layout *part, void *dst,
                  const void *src, bool wide)
{
    const cm_many *many = context;
    bool up = many->way == CM_MANY_UP;
    bool down = many->way == CM_MANY_DOWN;
    uint64_t at = (uint64_t)part->offset[up ? CM_SRC : CM_DST];
    char *to = up ? (char *)dst + part->offset[CM_DST] : NULL;
    const char *from = down ? (const char *)src + part->offset[CM_SRC] : NULL;
    slice p;
    for (uint64_t next = cm_many_find(many, at);
         next_slice(many, at, part->run_nbytes, &next, &p);) {
        move_run(up ? to + p.at : p.piece->dst.host + p.from,
                 down ? from + p.at : p.piece->src.host + p.from, p.nbytes, wide);
    }
}

/* -- through page-locked blocks ----------------------------------------------------------- */

/* One run of a slot, between the block and its place: device memory, or memory of the
 * host that only the kernel writes in a stream's order. Where there is no page-locked
 * memory the runtime reads and writes the ordinary block. `there` is the block on the
 * device that the bytes have got to, or 0. */
static cm_status
move_slot_run(cm_job *job, const cm_slot *s, cm_address there, cm_table *table,
              const slice *p)
{
    bool up = job->many->way == CM_MANY_UP;
    const cm_piece_end *end = up ? &p->piece->dst : &p->piece->src;
    cm_address place = end->address + p->from;
    if (there != 0) {
        return cm_table_add(table, place, there + p->at, p->nbytes);
    }
    bool on_device = cm_piece_end_is_on_device(end);
    bool by_engine =
        on_device && (s->pinned == NULL || p->nbytes >= LONG_PACKED_NBYTES);
    if (s->pinned == NULL && !on_device) {
        return job->ring->refused;
    }
    cm_address block =
        (by_engine ? (cm_address)(uintptr_t)s->host : s->pinned->address) + p->at;
    cm_address dst = up ? place : block;
    cm_address src = up ? block : place;
    return by_engine ? cm_rt_copy_async(job->engine->rt, dst, src, p->nbytes,
                                        job->stream->handle)
                     : cm_table_add(table, dst, src, p->nbytes);
}

cm_status
cm_many_move_slot(cm_job *job, const cm_slot *s, cm_address block)
{
    const cm_many *many = job->many;
    uint64_t at = (uint64_t)s->piece.offset[CM_DST];
    cm_table table;
    slice p;
    cm_table_init(&table, &job->engine->kernels, many->device, job->stream->handle);
    for (uint64_t next = cm_many_find(many, at);
         next_slice(many, at, s->piece.run_nbytes, &next, &p);) {
        CM_TRY(move_slot_run(job, s, block, &table, &p));
    }
    return cm_table_flush(&table);
}

bool
cm_many_can_go_by_block(const cm_many *many, const cm_slot *s)
{
    uint64_t at = (uint64_t)s->piece.offset[CM_DST];
    uint64_t count = 0;
    slice p;
    for (uint64_t next = cm_many_find(many, at);
         next_slice(many, at, s->piece.run_nbytes, &next, &p); count++) {
        if (!cm_piece_end_is_on_device(&p.piece->dst)) {
            return false;
        }
    }
    return count > 1;
}
