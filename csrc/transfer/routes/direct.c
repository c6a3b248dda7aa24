/* SPDX-License-Identifier: Apache-2.0 */
/* Makes copies by a single call of the runtime or by a single kernel. */
#include <string.h>

#include "transfer/host/host_copy.h"
#include "transfer/routes/device_side.h"
#include "transfer/routes/routes.h"

/* -- which plans the routes suit ---------------------------------------------------- */

bool
cm_direct_suits(cm_plan *plan, const cm_plan_ends *ends)
{
    const cm_tuning *tuning = ends->options->tuning;
    uint64_t least = cm_region_is_on_device(ends->dst) ? tuning->staged_up_nbytes
                                                       : tuning->staged_down_nbytes;
    /* The system makes the pages of a fresh target when they are first written, and
     * several threads get these pages made faster than one. So a copy to a fresh target
     * is not left to the runtime, even if it is so short that the runtime would
     * otherwise be faster. */
    bool may_wait = ends->options->may_wait && plan->layout.run_nbytes < least
                    && !(ends->dst_facts.fresh && tuning->thread_count != 1);
    return plan->layout.ndim == 0 && cm_plan_has_device_end(ends)
           && !cm_plan_needs_host(ends) && (cm_plan_is_locked(ends) || may_wait);
}

bool
cm_2d_suits(cm_plan *plan, const cm_plan_ends *ends)
{
    const cm_layout *layout = &plan->layout;
    const int64_t *pitch = layout->axes[0].stride;
    int64_t run = (int64_t)layout->run_nbytes;
    return layout->ndim == 1 && cm_plan_has_device_end(ends)
           && !cm_plan_needs_host(ends) && cm_plan_is_locked(ends)
           && ends->dst_facts.whole && ends->src_facts.whole
           && layout->run_nbytes >= ends->options->tuning->row_min_nbytes
           && pitch[CM_DST] >= run && pitch[CM_SRC] >= run
           && pitch[CM_DST] <= CM_PITCH_MAX && pitch[CM_SRC] <= CM_PITCH_MAX;
}

/* Return whether a kernel of one device should make a copy between two devices. This is
 * so only if that device reaches the memory of the other, and if the elements at the
 * other device lie in long runs, which cross the link well. If the source repeats
 * elements, the answer is false, because a kernel would read each repeated element over
 * the link again. If the answer is true, both devices of the plan are set to the one
 * whose kernel makes the copy. */
static bool
suits_between_devices(cm_plan *plan, const cm_plan_ends *ends)
{
    cm_peer_facts peers = ends->options->peers;
    cm_layout core;
    if (plan->layout.ndim == 0 || cm_layout_get_core(&plan->layout, &core) > 0) {
        return false;
    }
    if (peers.pushes && cm_layout_is_packed(&core, CM_DST)) {
        plan->device = plan->src_device;
    }
    else if (peers.pulls
             && (cm_layout_is_packed(&core, CM_SRC)
                 || core.run_nbytes >= ends->options->tuning->pulled_run_nbytes)) {
        plan->src_device = plan->device;
    }
    return plan->src_device == plan->device;
}

bool
cm_kernel_suits(cm_plan *plan, const cm_plan_ends *ends)
{
    if (plan->device != plan->src_device) {
        return suits_between_devices(plan, ends);
    }
    if (ends->options->converts) { /* within one device the kernel converts as well */
        return cm_region_is_on_device(ends->dst) && cm_region_is_on_device(ends->src);
    }
    return !cm_plan_needs_host(ends) && cm_plan_is_locked(ends)
           && ends->dst->address != 0 && ends->src->address != 0;
}

/* -- moving the bytes --------------------------------------------------------------- */

/* Populate the pages of an end that is a mapped file. All of them are populated before
 * the copy, because a single call of the runtime then touches the whole file. */
static cm_status
populate_files(const cm_job *job)
{
    if (cm_job_is_file(&job->src, job->src_facts)) {
        CM_TRY(cm_host_populate(&job->plan.layout, CM_SRC, job->src.host));
    }
    return cm_job_is_file(&job->dst, job->dst_facts)
               ? cm_host_populate(&job->plan.layout, CM_DST, job->dst.host)
               : cm_ok();
}

/* Prepare for a call of the runtime that reads or writes ordinary memory before it
 * returns. */
static cm_status
prepare_ordinary_memory(cm_job *job)
{
    CM_TRY(cm_job_probe_pages(job, &job->plan.layout));
    CM_TRY(populate_files(job));
    if (job->in_background || (job->hooks.interrupted != NULL && !job->blocking)) {
        /* The runtime's call would wait for the stream, and nobody could end that wait
         * early. So this thread waits for the stream first, by a call that ends early
         * if the job is cancelled. */
        CM_TRY(cm_job_wait_stream(job));
    }
    return cm_ok();
}

cm_status
cm_job_copy_direct(cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    cm_address dst =
        cm_region_copy_address(&job->dst) + (uint64_t)layout->offset[CM_DST];
    cm_address src =
        cm_region_copy_address(&job->src) + (uint64_t)layout->offset[CM_SRC];
    if (!(job->dst_facts.locked && job->src_facts.locked)) {
        CM_TRY(prepare_ordinary_memory(job));
    }
    if (cm_registry_has_pieces(job->engine->registry)) {
        return cm_job_copy_over_edges(job, dst, src, layout->run_nbytes);
    }
    return cm_rt_copy_async(job->engine->rt, dst, src, layout->run_nbytes,
                            job->stream->handle);
}

cm_status
cm_job_copy_2d(cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    return cm_rt_copy_2d_async(
        job->engine->rt,
        cm_region_copy_address(&job->dst) + (uint64_t)layout->offset[CM_DST],
        (uint64_t)layout->axes[0].stride[CM_DST],
        cm_region_copy_address(&job->src) + (uint64_t)layout->offset[CM_SRC],
        (uint64_t)layout->axes[0].stride[CM_SRC], layout->run_nbytes,
        (uint64_t)layout->axes[0].length, job->stream->handle);
}

cm_status
cm_job_copy_by_kernel(cm_job *job)
{
    return cm_job_launch(job, job->stream, &job->plan.layout, job->dst.address,
                         job->src.address);
}
