/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/routes/broadcast.h"

#include <stdlib.h>

#include "transfer/routes/device_side.h"

/* -- the targets of a job ------------------------------------------------------------ */

typedef struct target {
    cm_region dst;
    uint32_t from; /* for a replica: the index of the target that it is copied from */
} target;

/* The targets of a job. The direct targets come first: they get the bytes from the
 * page-locked blocks of the host. The first direct target is the job's own. After it
 * comes one direct target for each other device, to which a stream of that device
 * copies. The replicas come last. A replica lies on the same device as one of the
 * direct targets, and is copied from that target once the copy to the target is
 * queued. */
struct cm_targets {
    uint32_t sent_count; /* how many direct targets there are */
    uint32_t count;
    target all[];
};

/* Return the index of the direct target on `device`, or sent_count if there is none. */
static uint32_t
find_sent(const cm_targets *targets, int device)
{
    uint32_t i = 0;
    while (i < targets->sent_count && targets->all[i].dst.device != device) {
        i++;
    }
    return i;
}

/* Put the further targets into their order: direct targets first, then replicas. The
 * first target on each other device that has the strides of the job's own target
 * becomes a direct target.
 * Fails: CM_EINVALID, if a target is not on a device, or if its device has no direct
 * target. */
static cm_status
sort_targets(cm_targets *targets, const cm_broadcast *broadcast)
{
    for (uint32_t i = 0; i < broadcast->dst_count; i++) {
        const cm_region *dst = &broadcast->dsts[i];
        if (!cm_region_is_on_device(dst) || dst->device < 0
            || dst->device >= CM_MAX_DEVICES) {
            return cm_fail(CM_EINVALID, i);
        }
        if (find_sent(targets, dst->device) == targets->sent_count
            && cm_region_has_strides_of(dst, &targets->all[0].dst)) {
            targets->all[targets->sent_count++].dst = *dst;
        }
    }
    targets->count = targets->sent_count;
    for (uint32_t i = 0; i < broadcast->dst_count; i++) {
        const cm_region *dst = &broadcast->dsts[i];
        uint32_t from = find_sent(targets, dst->device);
        if (from == targets->sent_count) {
            return cm_fail(CM_EINVALID, i);
        }
        if (!cm_region_is_same(dst, &targets->all[from].dst)) {
            targets->all[targets->count++] = (target){.dst = *dst, .from = from};
        }
    }
    return cm_ok();
}

/* Other devices get the bytes from the page-locked blocks through which the copy goes,
 * so a plan without such blocks is refused. There are two cases. First, the source was
 * ordinary memory when the request was made, but is page-locked by now: then the device
 * reads it without blocks. Second, a page-locked source overlaps its target: then the
 * whole source is first read into device memory, and the copy to the target reads it
 * from there. */
cm_status
cm_targets_check(const cm_job *job)
{
    bool overlaps = job->overlaps && job->src_facts.locked;
    return job->has_more_targets && (!job->plan.row->packs || overlaps)
               ? cm_fail(CM_EINVALID, 0)
               : cm_ok();
}

cm_status
cm_targets_create(cm_job *job, const cm_copy_request *request)
{
    const cm_broadcast *broadcast = request->broadcast;
    uint32_t count = broadcast->dst_count;
    if (!cm_region_is_on_device(&job->dst) || request->is_fill || job->blocking
        || job->request_stream != NULL) {
        return cm_fail(CM_EINVALID, 0);
    }
    size_t nbytes = sizeof(cm_targets) + (1 + (size_t)count) * sizeof(target);
    job->targets = calloc(1, nbytes);
    CM_TRY(cm_allocated(job->targets != NULL, nbytes));
    job->targets->all[0].dst = job->dst;
    job->targets->sent_count = 1;
    CM_TRY(sort_targets(job->targets, broadcast));
    job->has_more_targets = job->targets->sent_count > 1;
    return cm_ok();
}

/* -- other devices -------------------------------------------------------------------- */

/* The loop also opens a side on the job's own device. The stream of this side does no
 * copies: cm_targets_send() makes it wait for the copies of a slot on all devices. */
cm_status
cm_targets_begin(cm_job *job)
{
    const cm_targets *targets = job->targets;
    bool others = targets->sent_count > 1;
    for (uint32_t i = 0; others && i < targets->sent_count; i++) {
        CM_TRY(cm_job_open_side(job, targets->all[i].dst.device, NULL));
    }
    return cm_ok();
}

/* Queue the copies of the bytes of a slot to one direct target on another device. */
static cm_status
send_to(cm_job *job, const target *t, const cm_layout *unpack, const cm_slot *s)
{
    const cm_stream *stream = cm_job_use_side(job, t->dst.device);
    cm_address from = (uintptr_t)s->host;
    if (unpack->ndim > 0) {
        cm_address block;
        CM_TRY(cm_job_take_block_on(job, t->dst.device, &block));
        CM_TRY(cm_job_copy_run(job, stream, block, from, cm_layout_nbytes(&s->piece)));
        from = block;
    }
    return cm_job_copy_layout(job, stream, unpack, t->dst.address, from);
}

/* The slot's event is recorded on the stream `join`, which makes no copies and waits
 * for the copies on all devices. If one of the copying streams waited for the others
 * instead, its device could not begin the next piece before the slowest device has
 * finished this one. */
cm_status
cm_targets_send(cm_job *job, cm_slot *s)
{
    const cm_targets *targets = job->targets;
    cm_layout unpack;
    if (targets->sent_count == 1) {
        return cm_stream_record(job->stream, s->event);
    }
    cm_stream *join = job->sides[job->stream->device].stream;
    cm_slot_unpack(job, s, &unpack);
    /* The job has queued the copy to its own target before this call. */
    CM_TRY(cm_job_chain_streams(job, job->stream, join));
    for (uint32_t i = 1; i < targets->sent_count; i++) {
        const target *t = &targets->all[i];
        CM_TRY(send_to(job, t, &unpack, s));
        CM_TRY(cm_job_chain_streams(job, job->sides[t->dst.device].stream, join));
    }
    return cm_stream_record(join, s->event);
}

/* -- replicas ------------------------------------------------------------------------- */

cm_status
cm_targets_end(cm_job *job)
{
    cm_targets *targets = job->targets;
    for (uint32_t i = targets->sent_count; i < targets->count; i++) {
        const target *t = &targets->all[i];
        const cm_region *from = &targets->all[t->from].dst;
        cm_layout layout;
        cm_stream *stream;
        /* A replica of the job's own target is copied on that target's device. The
         * job's own stream may belong to another device, namely that of the source. */
        CM_TRY(cm_job_open_stream_on(job, from->device, NULL, &stream));
        CM_TRY(cm_layout_init(&t->dst, from, &layout));
        CM_TRY(cm_job_copy_layout(job, stream, &layout, t->dst.address, from->address));
    }
    return cm_job_join_sides(job);
}
