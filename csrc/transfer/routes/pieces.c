/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/pieces.h"

#include <stdlib.h>
#include <string.h>

#include "base/fresh_pages.h"
#include "base/wide_copy.h"

enum {
    LONG_NBYTES = 256 << 10,       /* the copy engine is as fast from here on */
    LONG_PACKED_NBYTES = 64 << 10, /* the same, where the rest waits for it anyway */
    WIDE_NBYTES = 4096,            /* shorter runs are faster through the caches */
    BATCH_COUNT = 1 << 14,
};

/* Between two questions whether to go on. */
#define HOST_PIECE_NBYTES (UINT64_C(64) << 20)

/* -- the copy engine ---------------------------------------------------------------------- */

/* How far one runtime copy may go. */
static uint64_t
run_of(const cm_job *job, const cm_piece_end *end, uint64_t offset, uint64_t nbytes)
{
    bool locked;
    if (cm_piece_end_is_on_device(end) || job->engine->registry == NULL) {
        return nbytes;
    }
    return cm_registry_run(job->engine->registry, end->host + offset, nbytes, &locked);
}

static cm_status
copy_long(const cm_job *job, const cm_piece *piece)
{
    cm_address dst = cm_piece_end_address(&piece->dst);
    cm_address src = cm_piece_end_address(&piece->src);
    for (uint64_t at = 0; at < piece->nbytes;) {
        uint64_t nbytes = run_of(job, &piece->dst, at, piece->nbytes - at);
        nbytes = run_of(job, &piece->src, at, nbytes);
        CM_TRY(cm_rt_copy_async(job->engine->rt, dst + at, src + at, nbytes,
                                job->stream->handle));
        at += nbytes;
    }
    return cm_ok();
}

cm_status
cm_many_copy_rows(cm_job *job)
{
    const cm_many *many = job->many;
    const cm_piece *first = many->pieces;
    uint64_t dst_pitch, src_pitch;
    if (!cm_many_is_rows(many, &dst_pitch, &src_pitch)) {
        return cm_fail(CM_EINVALID, many->count);
    }
    return cm_rt_copy_2d_async(job->engine->rt, cm_piece_end_address(&first->dst),
                               dst_pitch, cm_piece_end_address(&first->src), src_pitch,
                               first->nbytes, many->count, job->stream->handle);
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
    cm_status status = cm_kernels_find(&job->engine->tables, many->device, &function);
    bool by_engine = has_no_compiler(status);
    if (!cm_is_ok(status) && !by_engine) {
        return status;
    }
    cm_table_init(&table, &job->engine->tables, many->device, job->stream->handle);
    for (uint64_t i = 0; i < many->count; i++) {
        const cm_piece *piece = &many->pieces[i];
        if (by_engine || piece->nbytes >= LONG_NBYTES) {
            CM_TRY(copy_long(job, piece));
        }
        else {
            CM_TRY(cm_table_add(&table, piece->dst.address, piece->src.address,
                                piece->nbytes));
        }
    }
    return cm_table_flush(&table);
}

/* -- between devices ---------------------------------------------------------------------- */

cm_status
cm_many_copy_to_peer(cm_job *job)
{
    const cm_many *many = job->many;
    for (uint64_t i = 0; i < many->count; i++) {
        const cm_piece *piece = &many->pieces[i];
        CM_TRY(cm_rt_copy_peer_async(job->engine->rt, piece->dst.address, many->device,
                                     piece->src.address, many->src_device,
                                     piece->nbytes, job->stream->handle));
    }
    return cm_ok();
}

cm_status
cm_many_copy_in_batches(cm_job *job)
{
    const cm_many *many = job->many;
    uint64_t room = many->count < BATCH_COUNT ? many->count : BATCH_COUNT;
    uint64_t *arrays = malloc((size_t)room * 3 * sizeof(*arrays));
    if (arrays == NULL) {
        return cm_fail(CM_ENOMEM, room * 3 * sizeof(*arrays));
    }
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
        if (piece->src.kind == CM_KIND_PAGEABLE) {
            CM_TRY(cm_pages_look(piece->src.host, piece->nbytes, false));
        }
        if (piece->dst.kind == CM_KIND_PAGEABLE) {
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

/* The bytes from `at` of the packed space on; only packed copies have `packed`. */
static void
move_range(const cm_many *many, uint64_t at, uint64_t nbytes, char *packed, bool wide)
{
    uint64_t end = at + nbytes;
    for (uint64_t i = cm_many_find(many, at); i < many->count && many->starts[i] < end;
         i++) {
        const cm_piece *piece = &many->pieces[i];
        uint64_t begin = many->starts[i];
        uint64_t from = at > begin ? at - begin : 0;
        uint64_t to = end - begin < piece->nbytes ? end - begin : piece->nbytes;
        if (from >= to) {
            continue; /* the gap before the next */
        }
        char *dst = piece->dst.host + from;
        const char *src = piece->src.host + from;
        if (many->way == CM_MANY_UP) {
            dst = packed + (begin + from - at);
        }
        else if (many->way == CM_MANY_DOWN) {
            src = packed + (begin + from - at);
        }
        move_run(dst, src, to - from, wide);
    }
}

void
cm_many_move_part(const void *context, const cm_layout *part, void *dst,
                  const void *src, bool wide)
{
    const cm_many *many = context;
    if (many->way == CM_MANY_UP) {
        move_range(many, (uint64_t)part->src_offset, part->run_nbytes,
                   (char *)dst + part->dst_offset, wide);
    }
    else { /* HOST: both offsets are the same, and there is no block */
        move_range(many, (uint64_t)part->dst_offset, part->run_nbytes,
                   many->way == CM_MANY_HOST
                       ? NULL
                       : (char *)(uintptr_t)src + part->src_offset,
                   wide);
    }
}

cm_status
cm_many_copy_on_host(cm_job *job)
{
    cm_task_group group;
    cm_copy_task task;
    cm_cut cut;
    cm_layout piece;
    cm_status status = cm_ok();
    CM_TRY(cm_many_look(job->many));
    cm_task_group_open(&group, &job->engine->workers, &job->tuning);
    group.move = cm_many_move_part;
    group.context = job->many;
    cm_cut_init(&cut, &job->plan.layout, HOST_PIECE_NBYTES);
    for (bool first = true; cm_cut_next(&cut, &piece); first = false) {
        if (!first && cm_job_is_interrupted(job)) {
            status = cm_fail(CM_ECANCELLED, 0);
            break;
        }
        cm_task_group_post(&group, &task, &piece, NULL, NULL, false);
        cm_task_group_wait(&group, &task);
        cm_job_count_moved(job, cm_layout_nbytes(&piece));
    }
    cm_task_group_close(&group);
    return status;
}

/* -- through page-locked blocks ----------------------------------------------------------- */

/* One run of a slot, between the block and its place at `end`: device memory, or memory
 * of the host that only the kernel writes in a stream's order. Where there is no
 * page-locked memory the runtime reads and writes the ordinary block. `there` is the
 * block on the device that the bytes have got to, or 0. */
static cm_status
move_slot_run(cm_job *job, const cm_slot *s, cm_address there, cm_table *table,
              const cm_piece_end *end, uint64_t from, uint64_t offset, uint64_t nbytes)
{
    if (there != 0) {
        return cm_table_add(table, end->address + from, there + offset, nbytes);
    }
    bool up = job->many->way == CM_MANY_UP;
    bool on_device = cm_piece_end_is_on_device(end);
    bool by_engine = on_device && (s->pinned == NULL || nbytes >= LONG_PACKED_NBYTES);
    if (s->pinned == NULL && !on_device) {
        return job->staging->refused;
    }
    cm_address place = end->address + from;
    cm_address block =
        (by_engine ? (cm_address)(uintptr_t)s->host : s->pinned->address) + offset;
    cm_address dst = up ? place : block;
    cm_address src = up ? block : place;
    return by_engine ? cm_rt_copy_async(job->engine->rt, dst, src, nbytes,
                                        job->stream->handle)
                     : cm_table_add(table, dst, src, nbytes);
}

static cm_status
move_slot(cm_job *job, const cm_slot *s, cm_address there)
{
    const cm_many *many = job->many;
    uint64_t at = (uint64_t)s->piece.dst_offset;
    uint64_t end = at + s->piece.run_nbytes;
    cm_table table;
    cm_table_init(&table, &job->engine->tables, many->device, job->stream->handle);
    for (uint64_t i = cm_many_find(many, at); i < many->count && many->starts[i] < end;
         i++) {
        const cm_piece *piece = &many->pieces[i];
        uint64_t begin = many->starts[i];
        uint64_t from = at > begin ? at - begin : 0;
        uint64_t to = end - begin < piece->nbytes ? end - begin : piece->nbytes;
        const cm_piece_end *end_there =
            many->way == CM_MANY_UP ? &piece->dst : &piece->src;
        if (from < to) {
            CM_TRY(move_slot_run(job, s, there, &table, end_there, from,
                                 begin + from - at, to - from));
        }
    }
    return cm_table_flush(&table);
}

bool
cm_many_can_go_by_block(const cm_many *many, const cm_slot *s)
{
    uint64_t at = (uint64_t)s->piece.dst_offset;
    uint64_t end = at + s->piece.run_nbytes;
    uint64_t count = 0;
    for (uint64_t i = cm_many_find(many, at); i < many->count && many->starts[i] < end;
         i++) {
        if (!cm_piece_end_is_on_device(&many->pieces[i].dst)) {
            return false;
        }
        count++;
    }
    return count > 1;
}

cm_status
cm_many_send(cm_job *job, const cm_slot *s, cm_address block)
{
    return move_slot(job, s, block);
}

cm_status
cm_many_fetch(cm_job *job, const cm_slot *s)
{
    return move_slot(job, s, 0);
}
