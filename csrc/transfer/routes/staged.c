/* SPDX-License-Identifier: Apache-2.0 */
/* Makes copies between a device and the host that the runtime cannot make in one call,
 * because the memory of the host is not page-locked or the elements are scattered or
 * converted. Such a copy goes in pieces through page-locked blocks (ring.h): each piece
 * is packed on one side and unpacked on the other. Several threads share the packing
 * and unpacking on the host, while the copy engine of the device works on other pieces.
 * Only the thread that runs the job calls the runtime. Elements that a broadcast source
 * repeats cross the link once. */
#include <stdlib.h>

#include "transfer/plan/ring_policy.h"
#include "transfer/routes/broadcast.h"
#include "transfer/routes/device_side.h"
#include "transfer/routes/numbered.h"
#include "transfer/routes/pieces.h"
#include "transfer/routes/routes.h"

/* -- which plans the routes suit --------------------------------------------------- */

/* Return whether the device should rearrange the elements, so that the host can read
 * the source in the order of its addresses. The device's memory is fast enough to do
 * this beside the copy. This is worth while if the source is to be transposed. It is
 * also worth while if the source has no gaps, but its neighbouring elements are far
 * apart in the target, as when the pixels of an image become one plane for each
 * colour. */
static bool
turns_on_device(const cm_layout *layout)
{
    int last = layout->ndim - 1;
    if (cm_layout_near_axis(layout) >= 0) {
        return true;
    }
    if (last < 0 || layout->run_nbytes > CM_LINE_NBYTES / 2) {
        return false;
    }
    cm_layout sorted = *layout;
    for (int axis = 0; axis <= last; axis++) {
        sorted.axes[axis].stride[CM_SRC] = llabs(sorted.axes[axis].stride[CM_SRC]);
    }
    cm_layout_sort(&sorted, CM_SRC);
    return cm_layout_is_packed(&sorted, CM_SRC)
           && sorted.axes[last].stride[CM_DST] != layout->axes[last].stride[CM_DST];
}

/* Both ends may be host memory, if the copy is ordered on a stream. A kernel of the
 * stream's device then reads or writes one of the two ends, in the order of the
 * stream. */
bool
cm_staged_suits(cm_plan *plan, const cm_plan_ends *ends)
{
    bool up = cm_region_is_on_device(ends->dst);
    bool between = cm_plan_has_device_end(ends);
    bool is_packed = between && cm_plan_is_packed_there(&plan->layout, up);
    plan->is_download =
        between ? !up : !ends->dst_facts.locked || ends->dst->address == 0;
    plan->is_fresh = plan->is_download && ends->dst_facts.fresh;
    plan->rearranges_on_device = !ends->options->lacks_memory
                                 && (plan->converts_on_device || (is_packed && up))
                                 && turns_on_device(&plan->layout);
    return is_packed && !plan->rearranges_on_device;
}

/* This is the last row for its ends, so it suits every plan that no earlier row has
 * taken. cm_staged_suits(), which was asked before, has set
 * plan->rearranges_on_device. */
bool
cm_staged_kernel_suits(cm_plan *plan, const cm_plan_ends *ends CM_UNUSED)
{
    if (plan->rearranges_on_device) {
        cm_layout_sort(&plan->layout, CM_SRC);
    }
    return true;
}

/* -- the host's half ------------------------------------------------------------------- */

/* Choose how the workers write. They write through the caches if the slots of the copy
 * are few enough to stay in the caches (plan->is_cached), or if they pack scattered
 * elements into slots. In all other cases they write past the caches. All threads help
 * if memory is not the limit: if elements are scattered, if pages of a file have to be
 * read, or if several devices are waiting. */
static cm_copy_way
choose_way(const cm_job *job, const cm_layout *layout)
{
    const cm_plan *plan = &job->plan;
    if (plan->is_fresh) {
        return CM_COPY_FRESH;
    }
    if (job->many != NULL && job->many->rows != NULL) {
        return cm_numbered_choose_way(job, !plan->is_cached);
    }
    bool is_scattered = cm_layout_is_scattered(layout);
    bool by_all = is_scattered || cm_job_has_file(job) || job->targets != NULL;
    if (plan->is_cached || (is_scattered && !plan->is_download)) {
        return by_all ? CM_COPY_PLAIN_ALL : CM_COPY_PLAIN;
    }
    return by_all ? CM_COPY_WIDE_ALL : CM_COPY_WIDE;
}

/* Post the host's half of a piece: workers move its bytes from their places into the
 * slot or, in a download, from the slot to their places. */
static cm_status
move_on_host(cm_job *job, cm_slot *s)
{
    bool down = job->plan.is_download;
    cm_layout layout;
    if (down) {
        cm_slot_unpack(job, s, &layout);
    }
    else {
        cm_slot_pack(s, &layout);
        if (job->plan.converts_on_device) {
            cm_layout_drop_items(&layout);
        }
    }
    if (!job->plan.is_fresh) {
        CM_TRY(cm_job_probe_pages(job, &layout));
    }
    cm_task_group_post(&job->ring->group, &s->task, &layout,
                       down ? job->dst.host : s->host, down ? s->host : job->src.host,
                       choose_way(job, &layout));
    return cm_ok();
}

/* -- the device's half: to the device ---------------------------------------------------- */

/* Queue the copy of packed bytes to the block on the device. From there a kernel will
 * put them in their places. If the block has room for two pieces, the copy is on the
 * second stream that the job has on this device (a side, see device_side.h). So one
 * piece is on its way while the kernel puts the piece before into its places. */
static cm_status
fill_block(cm_job *job, cm_address block, cm_address from, uint64_t nbytes)
{
    cm_ring *ring = job->ring;
    if (!job->has_pair) {
        return cm_job_copy_run(job, job->stream, block, from, nbytes);
    }
    CM_TRY(cm_job_open_side(job, job->plan.device, NULL));
    cm_stream *side = cm_job_use_side(job, job->plan.device);
    if (ring->passed >= 2) { /* wait for the last kernel that read this half of the
                                block */
        CM_TRY(cm_stream_wait_event(side, cm_slot_at(ring, ring->passed - 2)->event));
    }
    CM_TRY(cm_job_copy_run(job, side, block, from, nbytes));
    return cm_job_join_sides(job);
}

/* Let a kernel read or write the slot itself, over the bus. There are two reasons to do
 * this: the other end is host memory that the device is to reach in the stream's order,
 * or the device has no memory for a block. If the slot has ordinary memory, which a
 * kernel cannot reach, the call fails with `refused`. */
static cm_status
move_over_bus(cm_job *job, const cm_slot *s, const cm_layout *layout, cm_status refused)
{
    bool up = !job->plan.is_download;
    if (s->pinned == NULL) {
        return refused;
    }
    return cm_job_launch(job, job->stream, layout,
                         up ? job->dst.address : s->pinned->address,
                         up ? s->pinned->address : job->src.address);
}

/* Queue the copies that bring a packed piece from the slot to its places. These are on
 * the device, or in host memory that a kernel of the device writes. A kernel reads
 * repeated elements many times, so a piece with such elements goes to a block on the
 * device first, and not many times over the bus. */
static cm_status
send_piece(cm_job *job, const cm_slot *s)
{
    cm_layout unpack;
    cm_address from = (uintptr_t)s->host;
    uint64_t nbytes = cm_layout_nbytes(&s->piece);
    cm_slot_unpack(job, s, &unpack);
    bool repeats = cm_layout_nbytes(&unpack) > nbytes;
    if (!cm_region_is_on_device(&job->dst) && !repeats) {
        return move_over_bus(job, s, &unpack, job->ring->refused);
    }
    if (unpack.ndim > 0 || cm_layout_has_items(&unpack)) {
        cm_address block;
        cm_status status = cm_job_take_device_block(job, job->ring->passed, &block);
        if (cm_pool_is_short(status)) {
            return move_over_bus(job, s, &unpack, status);
        }
        CM_TRY(status);
        CM_TRY(fill_block(job, block, from, nbytes));
        from = block;
    }
    return cm_job_copy_layout(job, job->stream, &unpack, job->dst.address, from);
}

/* Take a block on the device with room for the runs of two slots, if the driver can
 * load the kernel that gathers and places runs, and if there is memory. */
static cm_status
try_pair_for_runs(cm_job *job)
{
    return cm_many_can_load_kernel(job) ? cm_job_try_pair(job) : cm_ok();
}

/* Queue the copies that bring the several runs of a slot to their places. The link
 * stands still for some microseconds between two copies, so all runs go to a block in
 * one copy if possible, and a kernel places them while the next slot is on its way. */
static cm_status
send_runs(cm_job *job, const cm_slot *s)
{
    cm_address block = 0;
    cm_address whole;
    bool together =
        s->pinned != NULL && cm_many_count_device_runs(job->many, s, &whole) > 1;
    if (together) {
        CM_TRY(try_pair_for_runs(job));
    }
    if (together && job->has_pair) {
        CM_TRY(cm_job_take_device_block(job, job->ring->passed, &block));
        CM_TRY(fill_block(job, block, (uintptr_t)s->host, s->piece.run_nbytes));
    }
    return cm_many_move_slot(job, s, block);
}

/* Ask for one more thread if the device had to wait for several successive pieces. Then
 * the host is the slower half, perhaps because other programs use the memory too. If
 * the device waits for a single piece, this means little, because it also has to wait
 * until the first piece is packed, and while a thread wakes. An additional thread stays
 * until the end of the copy, so it should not be asked for in vain. */
static cm_status
note_if_behind(cm_job *job)
{
    enum { PIECES_IN_A_ROW = 3, MORE_THREADS = 4 };
    cm_ring *ring = job->ring;
    bool behind = ring->passed > 0 && job->many == NULL && job->targets == NULL;
    if (behind && ring->ended < ring->passed) {
        CM_TRY(cm_slot_query(job, cm_slot_at(ring, ring->passed - 1), &behind));
    }
    ring->behind_count = behind ? ring->behind_count + 1 : 0;
    if (ring->behind_count == PIECES_IN_A_ROW) {
        ring->behind_count = 0;
        ring->group.more += ring->group.more < MORE_THREADS;
    }
    return cm_ok();
}

static cm_status
send_slot(cm_job *job, cm_slot *s)
{
    CM_TRY(note_if_behind(job));
    CM_TRY(job->many != NULL ? send_runs(job, s) : send_piece(job, s));
    return job->targets != NULL
               ? cm_targets_send(job, s)
               : cm_rt_event_record(job->engine->rt, s->event, job->stream->handle);
}

/* -- the device's half: from the device ----------------------------------------------------- */

/* Queue the copies that bring a piece from its places on the device to the slot. */
static cm_status
fetch_piece(cm_job *job, const cm_slot *s)
{
    cm_layout pack;
    cm_address block;
    cm_slot_pack(s, &pack);
    cm_layout_drop_items(&pack); /* the host converts what has arrived */
    if (!cm_region_is_on_device(&job->src)) {
        return move_over_bus(job, s, &pack, job->ring->refused);
    }
    if (pack.ndim == 0) {
        return cm_job_copy_layout(job, job->stream, &pack, (uintptr_t)s->host,
                                  job->src.address);
    }
    cm_status status = cm_job_take_device_block(job, 0, &block);
    if (cm_pool_is_short(status)) {
        return move_over_bus(job, s, &pack, status);
    }
    CM_TRY(status);
    CM_TRY(cm_job_copy_layout(job, job->stream, &pack, block, job->src.address));
    return cm_job_copy_run(job, job->stream, (uintptr_t)s->host, block,
                           cm_layout_nbytes(&pack));
}

/* Let a kernel gather the runs of a slot in one half of the job's block. The kernel
 * waits for the last copy that read this half, and the next copy on the stream of the
 * side waits for the kernel. */
static cm_status
gather_runs(cm_job *job, const cm_slot *s, cm_address *out)
{
    cm_ring *ring = job->ring;
    uint64_t number = ring->begun - 1;
    CM_TRY(cm_job_take_device_block(job, number, out));
    if (number >= 2) {
        CM_TRY(cm_stream_wait_event(job->stream, cm_slot_at(ring, number - 2)->event));
    }
    CM_TRY(cm_many_move_slot(job, s, *out));
    return cm_job_chain_streams(job, job->stream, job->sides[job->plan.device].stream);
}

/* Queue the copies that bring the runs of a slot from the device into the slot, which
 * is the reverse of send_runs(). One copy for each slot crosses the link, on the stream
 * of the side, while a kernel on the job's own stream gathers the runs of the next
 * slot. If that is not possible, each long run is a copy of its own, and a kernel
 * writes the short runs over the bus. */
static cm_status
fetch_runs(cm_job *job, cm_slot *s)
{
    cm_runtime *rt = job->engine->rt;
    cm_address from;
    uint64_t count = cm_many_count_device_runs(job->many, s, &from);
    bool by_side = s->pinned != NULL && count > 0 && job->many->rows == NULL;
    if (by_side) {
        CM_TRY(try_pair_for_runs(job));
    }
    if (!by_side || !job->has_pair) {
        CM_TRY(cm_job_join_sides(job));
        CM_TRY(cm_many_move_slot(job, s, 0));
        return cm_rt_event_record(rt, s->event, job->stream->handle);
    }
    CM_TRY(cm_job_open_side(job, job->plan.device, NULL));
    if (from == 0) {
        CM_TRY(gather_runs(job, s, &from));
    }
    cm_stream *side = cm_job_use_side(job, job->plan.device);
    CM_TRY(cm_job_copy_run(job, side, (uintptr_t)s->host, from, s->piece.run_nbytes));
    return cm_rt_event_record(rt, s->event, side->handle);
}

static cm_status
fetch_slot(cm_job *job, cm_slot *s)
{
    if (job->many != NULL) {
        return fetch_runs(job, s);
    }
    CM_TRY(fetch_piece(job, s));
    return cm_rt_event_record(job->engine->rt, s->event, job->stream->handle);
}

/* -- before anything is moved -------------------------------------------------------------- */

/* If the device is to rearrange the elements, take the memory that it needs for this.
 * If there is no memory, the copy is planned again, so that the host rearranges
 * them. */
static cm_status
rearrange_on_device_if_memory_allows(cm_job *job)
{
    cm_address block;
    cm_status status = job->plan.rearranges_on_device
                           ? cm_job_take_device_block(job, 0, &block)
                           : cm_ok();
    if (cm_is_ok(status) || status.code == CM_ECANCELLED) {
        return status;
    }
    cm_job_plan_without_memory(job);
    return cm_ok();
}

/* If the device is to convert the elements, take the memory that it needs for this. If
 * no memory is free, the host converts them, which is faster than waiting for
 * memory. */
static cm_status
convert_on_device_if_memory_allows(cm_job *job)
{
    cm_plan_options options = {
        .may_wait = job->blocking, .converts = true, .tuning = &job->tuning};
    if (!job->plan.converts_on_device || job->host_temporary != NULL) {
        return cm_ok();
    }
    CM_TRY(cm_job_try_pair(job));
    cm_status status = job->block != NULL
                           ? cm_ok()
                           : cm_job_alloc_block(job, job->plan.piece_nbytes,
                                                job->stream, false, &job->block);
    if (!cm_pool_is_short(status)) {
        return status;
    }
    return cm_plan_init(&job->plan, &job->dst, &job->src, job->dst_facts,
                        job->src_facts, options);
}

/* A download takes nothing here. It takes its memory on the device when it fetches the
 * first piece that needs a block. */
cm_status
cm_staged_reserve(cm_job *job)
{
    if (job->plan.is_download) {
        return cm_ok();
    }
    if (cm_job_src_is_ordered(job)) {
        /* Streams may still be writing the source, so this waits until the host can
         * read it. */
        CM_TRY(cm_job_wait_stream(job));
    }
    CM_TRY(cm_job_begin(job));
    CM_TRY(convert_on_device_if_memory_allows(job));
    return rearrange_on_device_if_memory_allows(job);
}

/* -- the whole copy ------------------------------------------------------------------------- */

static const cm_ring_way *
way_of(const cm_job *job)
{
    static const cm_ring_way up = {
        .host_first = true, .begin = move_on_host, .pass = send_slot};
    static const cm_ring_way down = {.begin = fetch_slot, .pass = move_on_host};
    return job->plan.is_download ? &down : &up;
}

/* All work of the device is queued. Run the ring until every piece has ended. In a
 * download this unpacks the pieces that arrive. */
cm_status
cm_staged_drain(cm_job *job)
{
    return cm_ring_run(job, way_of(job), true);
}

cm_status
cm_job_copy_staged(cm_job *job)
{
    if (job->ring == NULL) {
        CM_TRY(cm_job_populate_ahead(job));
    }
    CM_TRY(cm_ring_create(job));
    CM_TRY(cm_ring_run(job, way_of(job), false));
    return cm_job_join_sides(job);
}
