/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/pieces.h"

#include <string.h>

#include "base/checked_math.h"
#include "base/fresh_pages.h"
#include "base/simd_copy.h"
#include "transfer/plan/ring_policy.h"
#include "transfer/routes/device_side.h"
#include "transfer/routes/kernel_rows.h"
#include "transfer/routes/numbered.h"
#include "transfer/routes/routes.h"

enum {
    /* The copy engine moves a run of LONG_NBYTES or more as fast as the kernel does, so
     * such a run gets a copy of its own. A run in a slot of the ring gets a copy of its
     * own from LONG_PACKED_NBYTES on. This limit is lower, because a slot is used again
     * only after all of its bytes are copied, whoever copies them. */
    LONG_NBYTES = 256 << 10,
    LONG_PACKED_NBYTES = CM_NUMBERED_LONG_NBYTES,
    /* The host copies runs that are shorter than this faster through its caches than
     * past them. */
    WIDE_NBYTES = 4096,
};

/* -- the plan ----------------------------------------------------------------------------- */

/* Extend `hull`, a range of bytes, so that it also covers another piece. */
static void
extend(cm_region *hull, const cm_piece_end *end, uint64_t nbytes)
{
    cm_address high = hull->address + (uint64_t)hull->shape[0];
    high = end->address + nbytes > high ? end->address + nbytes : high;
    hull->address = cm_least(hull->address, end->address);
    hull->shape[0] = (int64_t)(high - hull->address);
}

/* Return whether the target's device reaches all sources of the pieces, and the
 * source's device all targets. Consecutive pieces whose targets lie in one allocation,
 * and whose sources lie in one allocation, are looked up together. One range of bytes
 * then covers their targets, and another covers their sources. */
static bool
reach_each_other(const cm_job *job, const cm_many *many)
{
    bool do_reach = true;
    for (uint64_t i = 0, next; do_reach && i < many->count; i = next) {
        const cm_piece *first = &many->pieces[i];
        const cm_piece *piece = first + 1;
        cm_region dst = cm_piece_end_region(&first->dst, first->nbytes);
        cm_region src = cm_piece_end_region(&first->src, first->nbytes);
        for (next = i + 1;
             next < many->count && first->dst.owner != NULL
             && first->dst.owner == piece->dst.owner && first->src.owner != NULL
             && first->src.owner == piece->src.owner;
             next++, piece++) {
            extend(&dst, &piece->dst, piece->nbytes);
            extend(&src, &piece->src, piece->nbytes);
        }
        cm_peer_facts peers =
            cm_peer_access_find(&job->engine->peers, &dst, &src, true);
        do_reach = peers.pulls && peers.pushes;
    }
    return do_reach;
}

static cm_route
find_route(const cm_job *job, const cm_many *many)
{
    switch (many->way) {
    case CM_MANY_HOST:
        return CM_ROUTE_HOST;
    case CM_MANY_TABLE:
        return CM_ROUTE_TABLE;
    case CM_MANY_PEER:
        /* While a stream is captured, the job makes plain copies, which work on a
         * stream of either device. */
        if (!job->capturing && reach_each_other(job, many)) {
            return CM_ROUTE_TABLE;
        }
        return CM_ROUTE_PEER;
    default:
        return CM_ROUTE_STAGED_TABLE;
    }
}

void
cm_many_plan(cm_job *job)
{
    const cm_many *many = job->many;
    cm_plan *plan = &job->plan;
    plan->row = &cm_routes[find_route(job, many)];
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
    if (many->rows != NULL) {
        return cm_numbered_share_locked(job);
    }
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

cm_status
cm_many_plan_rows(cm_job *job)
{
    const cm_kernel_rows *rows = job->rows;
    cm_plan *plan = &job->plan;
    for (uint64_t i = 0; i < rows->span_count; i++) {
        const cm_locked_span *span = &rows->spans[i];
        CM_TRY(cm_registry_share(job->engine->registry, span->begin, span->nbytes,
                                 false, &job->ticket->locked));
    }
    plan->row = &cm_routes[CM_ROUTE_ROWS];
    plan->device = rows->device;
    plan->src_device = rows->device;
    plan->nbytes = rows->nbytes;
    plan->layout = (cm_layout){.run_nbytes = rows->nbytes};
    job->dst_facts = (cm_end_facts){.locked = true, .whole = true};
    job->src_facts = job->dst_facts;
    return cm_ok();
}

/* -- the kernel --------------------------------------------------------------------------- */

cm_status
cm_many_copy_by_table(cm_job *job)
{
    const cm_many *many = job->many;
    cm_table table;
    uint64_t function;
    cm_status status = cm_kernels_find(&job->engine->kernels, CM_KERNEL_TABLE,
                                       many->device, &function);
    bool by_engine = cm_kernels_lack_compiler(status);
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

/* -- the host ----------------------------------------------------------------------------- */

cm_status
cm_many_probe_pages(const cm_many *many)
{
    if (many->rows != NULL) {
        return cm_numbered_probe_pages(many->rows);
    }
    for (uint64_t i = 0; i < many->count; i++) {
        const cm_piece *piece = &many->pieces[i];
        if (piece->nbytes < CM_PROBE_HOST_NBYTES) {
            continue;
        }
        if (cm_kind_is_pageable(piece->src.kind)) {
            CM_TRY(cm_pages_probe(piece->src.host, piece->nbytes, false));
        }
        if (cm_kind_is_pageable(piece->dst.kind)) {
            CM_TRY(cm_pages_probe(piece->dst.host, piece->nbytes, true));
        }
    }
    return cm_ok();
}

/* The bytes of a piece that lie in one range of the packed space (see pieces.h). */
typedef struct slice {
    const cm_piece *piece;
    uint64_t from; /* the offset of the slice in its piece */
    uint64_t at;   /* the offset of the slice in the range */
    uint64_t nbytes;
} slice;

/* Find the next piece that has bytes in the range of `nbytes` bytes of the packed space
 * that begins at `at`. The search begins with the piece whose index is *next, and *next
 * becomes the index of the piece after the one that is found. Returns false if no piece
 * is found. */
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
        /* If from >= to, no byte of this piece lies in the range, but only bytes of the
         * gap behind it. Such gaps align the pieces in the packed space. */
        if (from < to) {
            *out = (slice){piece, from, begin + from - at, to - from};
            *next = i + 1;
            return true;
        }
    }
    return false;
}

/* The range of pages that were populated last, for the target and for the source.
 * Several short pieces may lie on the same page, which is then populated only once. */
typedef struct populated {
    uintptr_t begin[2];
    uintptr_t end[2];
} populated;

/* Populate the pages of a slice on one side, if this side of its piece maps a file. If
 * the file was cut short, this fails where a plain access would raise SIGBUS. */
static cm_status
populate_slice(populated *seen, cm_side side, const cm_piece_end *end, const char *at,
               uint64_t nbytes)
{
    if (!end->is_file || !cm_kind_is_pageable(end->kind)) {
        return cm_ok();
    }
    uintptr_t page = cm_page_nbytes();
    uintptr_t begin = (uintptr_t)at - (uintptr_t)at % page;
    uintptr_t after = (uintptr_t)at + nbytes + page - 1;
    after -= after % page;
    if (seen->begin[side] <= begin && after <= seen->end[side]) {
        return cm_ok();
    }
    seen->begin[side] = begin;
    seen->end[side] = after;
    return cm_pages_populate(at, nbytes, side == CM_DST);
}

/* On the way up, which is from the host to a device, `dst` is the block of a slot. On
 * the way down `src` is the block of a slot. The route HOST has no block, since it
 * copies each piece from its source straight to its target. Both offsets of `part` are
 * then equal. */
void
cm_many_move_part(const void *context, const cm_layout *part, void *dst,
                  const void *src, bool wide)
{
    cm_job *job = (cm_job *)(uintptr_t)context;
    const cm_many *many = job->many;
    bool up = many->way == CM_MANY_UP;
    bool down = many->way == CM_MANY_DOWN;
    uint64_t at = (uint64_t)part->offset[up ? CM_SRC : CM_DST];
    char *to = up ? (char *)dst + part->offset[CM_DST] : NULL;
    const char *from = down ? (const char *)src + part->offset[CM_SRC] : NULL;
    populated seen = {.end = {0}};
    slice p;
    for (uint64_t next = cm_many_find(many, at);
         atomic_load(&job->lost_error) == 0
         && next_slice(many, at, part->run_nbytes, &next, &p);) {
        char *there = up ? to + p.at : p.piece->dst.host + p.from;
        const char *here = down ? from + p.at : p.piece->src.host + p.from;
        cm_status status =
            down ? cm_ok()
                 : populate_slice(&seen, CM_SRC, &p.piece->src, here, p.nbytes);
        if (cm_is_ok(status) && !up) {
            status = populate_slice(&seen, CM_DST, &p.piece->dst, there, p.nbytes);
        }
        if (!cm_is_ok(status)) {
            atomic_store(&job->lost_error, (int)status.arg);
            return;
        }
        if (wide && p.nbytes >= WIDE_NBYTES) {
            cm_wide_copy(there, here, (size_t)p.nbytes);
        }
        else {
            memcpy(there, here, (size_t)p.nbytes);
        }
    }
}

/* -- through page-locked blocks ----------------------------------------------------------- */

/* A run of bytes that the device moves between a slot and the place of the run. */
typedef struct device_run {
    const cm_piece_end *end; /* the source or target of a piece or of a layer, in which
                                the place lies */
    cm_address place;        /* the address of the place */
    uint64_t at;             /* the offset of the run in the slot */
    uint64_t nbytes;
} device_run;

/* A walk through the runs of a slot. */
typedef struct slot_walk {
    const cm_many *many;
    uint64_t begin; /* where the bytes of the slot begin in the packed space */
    uint64_t nbytes;
    /* The index of the piece to look at next. If the job copies rows by their numbers
     * (many->rows), there are no pieces, and this is the offset in the slot at which
     * the next run begins. */
    uint64_t next;
} slot_walk;

static slot_walk
walk_slot(const cm_many *many, const cm_slot *s)
{
    uint64_t begin = (uint64_t)s->piece.offset[CM_DST];
    return (slot_walk){.many = many,
                       .begin = begin,
                       .nbytes = s->piece.run_nbytes,
                       .next = many->rows != NULL ? 0 : cm_many_find(many, begin)};
}

/* Find the next run of the walk. Returns false if there is none. */
static bool
next_run(slot_walk *walk, device_run *out)
{
    const cm_many *many = walk->many;
    cm_side side = many->way == CM_MANY_UP ? CM_DST : CM_SRC;
    slice p;
    if (many->rows != NULL) {
        if (walk->next >= walk->nbytes) {
            return false;
        }
        cm_numbered_run run = cm_numbered_rows_run_at(
            many->rows, side, walk->begin + walk->next, walk->begin + walk->nbytes);
        *out = (device_run){run.end, run.end->address + (uint64_t)run.offset,
                            walk->next, run.nbytes};
        walk->next += run.nbytes;
        return true;
    }
    if (!next_slice(many, walk->begin, walk->nbytes, &walk->next, &p)) {
        return false;
    }
    const cm_piece_end *end = side == CM_DST ? &p.piece->dst : &p.piece->src;
    *out = (device_run){end, end->address + p.from, p.at, p.nbytes};
    return true;
}

/* Queue the copy of one run between its slot and its place. There are three ways:
 * - If `there` is not 0, the device has a block at that address with the slot's bytes.
 *   The kernel of `table` then moves the run between that block and the place.
 * - A run whose place is device memory may get a copy by the runtime. Such a copy is
 *   needed if the slot is ordinary memory, which no kernel can reach. It is also made
 *   if the run is long, since it is then fast.
 * - Otherwise the kernel moves the run between the page-locked slot and the place. If
 *   the place is host memory, the run always goes this way, since a copy by the runtime
 *   would not write host memory in the order of the stream. */
static cm_status
move_slot_run(cm_job *job, const cm_slot *s, cm_address there, cm_table *table,
              const device_run *run)
{
    bool up = job->many->way == CM_MANY_UP;
    if (there != 0) {
        cm_address packed = there + run->at;
        return up ? cm_table_add(table, run->place, packed, run->nbytes)
                  : cm_table_add(table, packed, run->place, run->nbytes);
    }
    bool on_device = cm_piece_end_is_on_device(run->end);
    /* If rows follow each other without gaps, a single run may fill the slot, and then
     * a plain copy is enough. */
    bool is_slot = job->many->rows != NULL && run->nbytes == s->piece.run_nbytes;
    bool by_engine =
        on_device
        && (s->pinned == NULL || is_slot || run->nbytes >= LONG_PACKED_NBYTES);
    if (s->pinned == NULL && !on_device) {
        return job->ring->refused;
    }
    cm_address block =
        (by_engine ? (cm_address)(uintptr_t)s->host : s->pinned->address) + run->at;
    cm_address dst = up ? run->place : block;
    cm_address src = up ? block : run->place;
    return by_engine ? cm_rt_copy_async(job->engine->rt, dst, src, run->nbytes,
                                        job->stream->handle)
                     : cm_table_add(table, dst, src, run->nbytes);
}

cm_status
cm_many_move_slot(cm_job *job, const cm_slot *s, cm_address block)
{
    const cm_many *many = job->many;
    slot_walk walk = walk_slot(many, s);
    cm_table table;
    device_run run;
    cm_table_init(&table, &job->engine->kernels, many->device, job->stream->handle);
    if (many->rows != NULL && cm_numbered_goes_by_kernel(job, s)) {
        cm_address there = block != 0 ? block : s->pinned->address;
        CM_TRY(cm_numbered_launch(job, s, there, block == 0, &table));
        return cm_table_flush(&table);
    }
    while (next_run(&walk, &run)) {
        CM_TRY(move_slot_run(job, s, block, &table, &run));
    }
    return cm_table_flush(&table);
}

bool
cm_many_can_load_kernel(cm_job *job)
{
    uint64_t function;
    return !cm_kernels_lack_compiler(cm_kernels_find(
        &job->engine->kernels, CM_KERNEL_TABLE, job->many->device, &function));
}

uint64_t
cm_many_count_device_runs(const cm_many *many, const cm_slot *s, cm_address *whole)
{
    slot_walk walk = walk_slot(many, s);
    uint64_t count = 0;
    device_run run;
    *whole = 0;
    while (next_run(&walk, &run)) {
        if (!cm_piece_end_is_on_device(run.end)) {
            return 0;
        }
        if (run.nbytes == s->piece.run_nbytes) {
            *whole = run.place;
        }
        count++;
        if (many->rows != NULL && count > 1) {
            break; /* the other runs lie in the same kind of memory as these */
        }
    }
    return count;
}
