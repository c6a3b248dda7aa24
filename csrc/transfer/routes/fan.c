/* SPDX-License-Identifier: Apache-2.0 */
/* Further targets of a copy: branches, on other devices, which are sent what the job
 * packs on the host, each on a stream of its own; and echoes, on the device of the job
 * or of a branch, which are copied from its target there once that has been queued. */
#include <stdlib.h>

#include "transfer/routes/several.h"
#include "transfer/routes/spread.h"

typedef struct cm_branch {
    cm_region dst;
    cm_stream *stream; /* lent */
    uint64_t event;    /* lent; recorded after each piece */
    cm_block *block;   /* packed bytes of one piece */
} cm_branch;

typedef struct cm_echo {
    cm_region dst;
    int64_t branch; /* its index; -1: the job itself */
} cm_echo;

struct cm_fan {
    bool begun;
    uint64_t event;  /* lent; recorded after the job's own part of a piece */
    cm_stream *join; /* lent, of the job's device: is told when a slot's copies end */
    cm_stream *side; /* lent, of the target's device, where that is another */
    uint32_t branch_count;
    uint32_t echo_count;
    cm_branch *branches; /* owned */
    cm_echo *echoes;     /* owned */
};

static cm_branch *
find_branch(cm_fan *fan, int device)
{
    for (uint32_t i = 0; i < fan->branch_count; i++) {
        if (fan->branches[i].dst.device == device) {
            return &fan->branches[i];
        }
    }
    return NULL;
}

static void
add_echo(cm_fan *fan, const cm_region *dst, int64_t branch)
{
    fan->echoes[fan->echo_count++] = (cm_echo){.dst = *dst, .branch = branch};
}

/* First one target for each other device, in the job's strides; then the rest. */
static cm_status
sort_targets(cm_job *job, const cm_spread *spread)
{
    cm_fan *fan = job->fan;
    for (uint32_t i = 0; i < spread->dst_count; i++) {
        const cm_region *dst = &spread->dsts[i];
        if (!cm_region_is_on_device(dst) || dst->device < 0
            || dst->device >= CM_MAX_DEVICES) {
            return cm_fail(CM_EINVALID, i);
        }
        if (dst->device != job->dst.device && find_branch(fan, dst->device) == NULL
            && cm_region_has_strides_of(dst, &job->dst)) {
            fan->branches[fan->branch_count++] = (cm_branch){.dst = *dst};
        }
    }
    for (uint32_t i = 0; i < spread->dst_count; i++) {
        const cm_region *dst = &spread->dsts[i];
        const cm_branch *branch = find_branch(fan, dst->device);
        if (dst->device == job->dst.device) {
            add_echo(fan, dst, -1);
        }
        else if (branch == NULL) {
            return cm_fail(CM_EINVALID, i);
        }
        else if (!cm_region_is_same(dst, &branch->dst)) {
            add_echo(fan, dst, branch - fan->branches);
        }
    }
    return cm_ok();
}

/* Memory that was not locked when targets were grouped may be now. */
static cm_status
stage_for_branches(cm_job *job)
{
    cm_plan *plan = &job->plan;
    if (job->fan->branch_count == 0 || cm_routes[plan->route].packs) {
        return cm_ok();
    }
    if (cm_region_is_on_device(&job->src) || job->overlaps) {
        return cm_fail(CM_EINVALID, 0);
    }
    cm_layout core = plan->layout;
    cm_layout repeats;
    cm_layout_take_repeats(&core, &repeats);
    bool packed = repeats.ndim == 0 && cm_layout_dst_is_packed(&core);
    plan->route = packed ? CM_ROUTE_STAGED : CM_ROUTE_STAGED_KERNEL;
    plan->is_download = false;
    cm_plan_count_pieces(plan, &job->tuning);
    return cm_ok();
}

cm_status
cm_fan_create(cm_job *job, const cm_spread *spread)
{
    uint32_t count = spread->dst_count;
    if (count == 0) {
        return cm_ok();
    }
    if (!cm_region_is_on_device(&job->dst) || job->is_fill || job->blocking
        || job->request_stream != NULL) {
        return cm_fail(CM_EINVALID, 0);
    }
    cm_fan *fan = calloc(1, sizeof(*fan));
    if (fan == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*fan));
    }
    job->fan = fan;
    fan->branches = calloc(count, sizeof(*fan->branches));
    fan->echoes = calloc(count, sizeof(*fan->echoes));
    if (fan->branches == NULL || fan->echoes == NULL) {
        return cm_fail(CM_ENOMEM, count * sizeof(*fan->branches));
    }
    CM_TRY(sort_targets(job, spread));
    return stage_for_branches(job);
}

/* -- branches ---------------------------------------------------------------------------- */

cm_status
cm_fan_begin(cm_job *job)
{
    cm_fan *fan = job->fan;
    cm_engine *engine = job->engine;
    if (fan->begun || fan->branch_count == 0) {
        return cm_ok();
    }
    fan->begun = true;
    CM_TRY(cm_cache_take_event(engine, job->stream->device, &fan->event));
    CM_TRY(cm_cache_take_stream(engine, job->stream->device, &fan->join));
    for (uint32_t i = 0; i < fan->branch_count; i++) {
        cm_branch *branch = &fan->branches[i];
        int device = branch->dst.device;
        CM_TRY(cm_cache_take_event(engine, device, &branch->event));
        CM_TRY(cm_cache_take_stream(engine, device, &branch->stream));
        CM_TRY(cm_job_chain_streams(job, job->stream, branch->stream));
    }
    return cm_ok();
}

/* Its device is current. */
static cm_status
send_to(cm_job *job, cm_branch *branch, const cm_layout *unpack, const cm_slot *s,
        uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    uint64_t stream = branch->stream->handle;
    cm_address from = (uintptr_t)s->host;
    if (unpack->ndim == 0) {
        CM_TRY(cm_rt_copy_async(rt, branch->dst.address + (uint64_t)unpack->dst_offset,
                                from, nbytes, stream));
        return cm_rt_event_record(rt, branch->event, stream);
    }
    int device = branch->dst.device;
    if (branch->block == NULL) {
        CM_TRY(cm_job_alloc_block(job, device, job->plan.piece_nbytes, branch->stream,
                                  &branch->block));
    }
    cm_address block = branch->block->address;
    CM_TRY(cm_rt_copy_async(rt, block, from, nbytes, stream));
    CM_TRY(cm_kernels_launch(&job->engine->kernels, device, unpack, branch->dst.address,
                             block, stream));
    return cm_rt_event_record(rt, branch->event, stream);
}

/* A stream of its own is told of the end of all, so that no device waits for another
 * before it goes on to the next piece. */
cm_status
cm_fan_send(cm_job *job, const cm_layout *unpack, cm_slot *s, uint64_t nbytes)
{
    cm_fan *fan = job->fan;
    cm_runtime *rt = job->engine->rt;
    if (fan->branch_count == 0) {
        return cm_rt_event_record(rt, s->event, job->stream->handle);
    }
    CM_TRY(cm_rt_event_record(rt, fan->event, job->stream->handle));
    CM_TRY(cm_stream_wait_event(fan->join, fan->event));
    for (uint32_t i = 0; i < fan->branch_count; i++) {
        cm_branch *branch = &fan->branches[i];
        cm_device_guard guard;
        CM_TRY(cm_device_enter(rt, branch->dst.device, &guard));
        cm_status status = send_to(job, branch, unpack, s, nbytes);
        cm_device_leave(rt, &guard);
        CM_TRY(status);
        CM_TRY(cm_stream_wait_event(fan->join, branch->event));
    }
    return cm_rt_event_record(rt, s->event, fan->join->handle);
}

/* -- echoes ------------------------------------------------------------------------------ */

static cm_status
copy_echo(cm_job *job, const cm_echo *echo, const cm_region *from,
          const cm_stream *stream)
{
    cm_layout layout;
    CM_TRY(cm_layout_init(&echo->dst, from, &layout));
    if (cm_region_is_same(&echo->dst, from)) {
        return cm_ok();
    }
    if (layout.ndim > 0) {
        return cm_job_launch_on(job, from->device, &layout, echo->dst.address,
                                from->address, stream);
    }
    cm_runtime *rt = job->engine->rt;
    cm_device_guard guard;
    CM_TRY(cm_device_enter(rt, from->device, &guard));
    cm_status status = cm_rt_copy_async(
        rt, echo->dst.address + (uint64_t)layout.dst_offset,
        from->address + (uint64_t)layout.src_offset, layout.run_nbytes, stream->handle);
    cm_device_leave(rt, &guard);
    return status;
}

/* Where the source's device has written the target, another stream copies there. */
static cm_status
find_own_stream(cm_job *job, cm_stream **out)
{
    cm_fan *fan = job->fan;
    *out = job->stream;
    if (job->stream->device == job->dst.device) {
        return cm_ok();
    }
    if (fan->side == NULL) {
        CM_TRY(cm_cache_take_stream(job->engine, job->dst.device, &fan->side));
        CM_TRY(cm_job_chain_streams(job, job->stream, fan->side));
    }
    *out = fan->side;
    return cm_ok();
}

/* Everything else is over before the job's stream goes on. */
static cm_status
gather_streams(cm_job *job)
{
    cm_fan *fan = job->fan;
    cm_status first = cm_ok();
    for (uint32_t i = 0; i <= fan->branch_count; i++) {
        bool last = i == fan->branch_count;
        const cm_stream *stream = last ? fan->side : fan->branches[i].stream;
        if (stream != NULL) {
            cm_status status = cm_job_chain_streams(job, stream, job->stream);
            first = cm_is_ok(first) ? status : first;
        }
    }
    return first;
}

cm_status
cm_fan_end(cm_job *job)
{
    cm_fan *fan = job->fan;
    for (uint32_t i = 0; i < fan->echo_count; i++) {
        const cm_echo *echo = &fan->echoes[i];
        const cm_region *from = &job->dst;
        cm_stream *stream;
        if (echo->branch >= 0) {
            from = &fan->branches[echo->branch].dst;
            stream = fan->branches[echo->branch].stream;
        }
        else {
            CM_TRY(find_own_stream(job, &stream));
        }
        CM_TRY(copy_echo(job, echo, from, stream));
    }
    return gather_streams(job);
}

/* -- the end ----------------------------------------------------------------------------- */

cm_status
cm_fan_abandon(cm_job *job)
{
    cm_fan *fan = job->fan;
    if (fan == NULL || cm_is_ok(gather_streams(job))) {
        return cm_ok();
    }
    cm_status first = cm_ok();
    for (uint32_t i = 0; i <= fan->branch_count; i++) {
        bool last = i == fan->branch_count;
        const cm_stream *stream = last ? fan->side : fan->branches[i].stream;
        if (stream != NULL) {
            cm_status status =
                cm_rt_stream_synchronize(job->engine->rt, stream->handle);
            first = cm_is_ok(first) ? status : first;
        }
    }
    return first;
}

void
cm_fan_destroy(cm_job *job, bool idle)
{
    cm_fan *fan = job->fan;
    cm_engine *engine = job->engine;
    if (fan == NULL) {
        return;
    }
    for (uint32_t i = 0; fan->branches != NULL && i < fan->branch_count; i++) {
        cm_branch *branch = &fan->branches[i];
        int device = branch->dst.device;
        if (branch->block != NULL) {
            cm_pool_free(engine->device_pools[device], branch->block, &branch->stream,
                         idle ? 0 : 1, job->lost_track ? CM_POOL_FREE_FENCE : 0u);
        }
        cm_cache_give_event(engine, device, branch->event);
        cm_cache_give_stream(engine, branch->stream);
    }
    if (job->stream != NULL) {
        cm_cache_give_event(engine, job->stream->device, fan->event);
    }
    cm_cache_give_stream(engine, fan->join);
    cm_cache_give_stream(engine, fan->side);
    free(fan->branches);
    free(fan->echoes);
    free(fan);
    job->fan = NULL;
}
