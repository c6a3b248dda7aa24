/* SPDX-License-Identifier: Apache-2.0 */
/* Makes copies between two devices. A copy that is not one contiguous run goes in
 * pieces. Each piece is gathered on the source's device, sent, and scattered on the
 * target's device. If the devices cannot reach each other, a large copy sends each
 * piece through a page-locked block of host memory. One device then writes a piece to
 * the host while the other reads an earlier piece, so that the links of both devices
 * are busy at the same time. Each piece uses the next slot of a ring (ring.h). The
 * streams keep the uses of a slot in order, so no thread waits for a slot. */
#include "transfer/plan/batch_plan.h"
#include "transfer/routes/device_side.h"
#include "transfer/routes/ring.h"
#include "transfer/routes/routes.h"

bool
cm_peer_staged_suits(cm_plan *plan, const cm_plan_ends *ends)
{
    return ends->options->peers.apart && !ends->options->lacks_memory
           && plan->nbytes >= ends->options->tuning->staged_peer_nbytes;
}

bool
cm_peer_suits(cm_plan *plan CM_UNUSED, const cm_plan_ends *ends CM_UNUSED)
{
    return true;
}

/* Queue a copy of one run to the other device. The runtime chooses how the bytes get
 * there. */
static cm_status
copy_across(cm_job *job, cm_address to, cm_address from, uint64_t nbytes)
{
    return cm_rt_copy_peer_async(job->engine->rt, to, job->plan.device, from,
                                 job->plan.src_device, nbytes, job->stream->handle);
}

/* Allocate a block of a slot, unless the slot has that block already. If the slot is
 * the first one, the allocation may wait for memory, because the copy cannot do without
 * that slot. */
static cm_status
take_block(cm_job *job, const cm_slot *s, cm_stream *stream, cm_block **block)
{
    bool is_first = s == job->ring->slots;
    return *block != NULL ? cm_ok()
                          : cm_job_alloc_block(job, job->plan.piece_nbytes, stream,
                                               is_first, block);
}

/* Allocate the blocks in which a piece is packed, on both devices. If there is too
 * little memory for a slot other than the first, the ring goes on with fewer slots. The
 * piece then moves to a slot that was used before and so has its blocks, and *slot
 * becomes that slot. */
static cm_status
take_blocks(cm_job *job, cm_stream *stream, bool packs, bool unpacks, cm_slot **slot)
{
    cm_ring *ring = job->ring;
    for (;;) {
        cm_slot *s = *slot;
        cm_status status = packs ? take_block(job, s, stream, &s->blocks[0]) : cm_ok();
        if (cm_is_ok(status) && unpacks) {
            status = take_block(job, s, job->stream, &s->blocks[1]);
        }
        if (s == ring->slots || !cm_pool_is_short(status)) {
            return status;
        }
        ring->slot_count = (uint32_t)(s - ring->slots);
        *slot = cm_slot_at(ring, ring->begun - 1);
        (*slot)->piece = s->piece;
    }
}

/* Queue the copies that bring a piece to a place from which the target's device can
 * read it, and store that place in *from. If the piece has several runs, it is packed
 * into a block on the source's device first. If the slot has page-locked memory, the
 * piece then goes down to the host over the link of the source's device, while earlier
 * pieces go up over the link of the target's device. A piece that needs neither step
 * stays where it is. */
static cm_status
gather(cm_job *job, cm_stream *stream, const cm_slot *s, const cm_layout *pack,
       cm_address *from)
{
    *from = job->src.address + (uint64_t)pack->offset[CM_SRC];
    if (pack->ndim == 0 && s->pinned == NULL) {
        return cm_ok();
    }
    if (job->ring->begun > job->ring->slot_count) { /* the slot was used before */
        CM_TRY(cm_stream_wait_event(stream, s->event));
    }
    if (pack->ndim > 0) {
        CM_TRY(cm_job_copy_layout(job, stream, pack, s->blocks[0]->address,
                                  job->src.address));
        *from = s->blocks[0]->address;
    }
    if (s->pinned != NULL) {
        CM_TRY(cm_job_copy_run(job, stream, (uintptr_t)s->host, *from,
                               cm_layout_nbytes(pack)));
    }
    return cm_job_join_sides(job);
}

/* Queue a copy of a single run as one call of the runtime. */
static cm_status
copy_whole(cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    return copy_across(job, job->dst.address + (uint64_t)layout->offset[CM_DST],
                       job->src.address + (uint64_t)layout->offset[CM_SRC],
                       layout->run_nbytes);
}

/* Queue everything that a piece needs: it is packed on the source's device, sent to the
 * target's device and unpacked there. The slot's event is recorded behind all of this
 * work. */
static cm_status
move_piece(cm_job *job, cm_slot *s)
{
    cm_layout pack, unpack;
    cm_address from;
    uint64_t nbytes = cm_layout_nbytes(&s->piece);
    bool is_run = job->plan.layout.ndim == 0 && job->ring->repeats.ndim == 0;
    if (is_run && s->pinned == NULL) {
        job->ring->all_cut = true; /* cutting the run would gain nothing */
        return copy_whole(job);
    }
    CM_TRY(cm_job_open_side(job, job->plan.src_device, NULL));
    cm_stream *stream = cm_job_use_side(job, job->plan.src_device);
    cm_slot_pack(s, &pack);
    cm_slot_unpack(job, s, &unpack);
    CM_TRY(take_blocks(job, stream, pack.ndim > 0, unpack.ndim > 0, &s));
    cm_address to = job->dst.address + (uint64_t)unpack.offset[CM_DST];
    CM_TRY(gather(job, stream, s, &pack, &from));
    if (unpack.ndim > 0) {
        to = s->blocks[1]->address;
    }
    CM_TRY(s->pinned == NULL
               ? copy_across(job, to, from, nbytes)
               : cm_job_copy_run(job, job->stream, to, (uintptr_t)s->host, nbytes));
    if (unpack.ndim > 0) {
        CM_TRY(cm_job_copy_layout(job, job->stream, &unpack, job->dst.address, to));
    }
    return cm_rt_event_record(job->engine->rt, s->event, job->stream->handle);
}

static cm_status
copy_many(cm_job *job)
{
    for (uint64_t i = 0; i < job->many->count; i++) {
        const cm_piece *piece = &job->many->pieces[i];
        CM_TRY(copy_across(job, piece->dst.address, piece->src.address, piece->nbytes));
    }
    return cm_ok();
}

/* Take the first slot, which the copy then keeps until its end. If there is no
 * page-locked memory for the slot, plan the copy again, so that the runtime sends the
 * bytes to the other device. While the stream is captured, the runtime does this in any
 * case, so the copy needs no page-locked memory. */
cm_status
cm_peer_staged_reserve(cm_job *job)
{
    if (job->capturing) {
        return cm_ok();
    }
    CM_TRY(cm_ring_create(job));
    cm_status status = cm_ring_equip(job);
    if (cm_pool_is_short(status) || status.code == CM_EINVALID) {
        cm_ring_destroy(job);
        cm_job_plan_without_memory(job);
        return cm_ok();
    }
    return status; /* success, or a failure other than a lack of memory */
}

cm_status
cm_job_copy_peer(cm_job *job)
{
    static const cm_ring_way way = {.begin = move_piece};
    bool is_run = job->plan.layout.ndim == 0;
    if (job->many != NULL) {
        return copy_many(job);
    }
    if (is_run && (!job->plan.row->uses_ring || job->capturing)) {
        return copy_whole(job);
    }
    CM_TRY(cm_ring_create(job));
    return cm_ring_run(job, &way, false);
}
