/* SPDX-License-Identifier: Apache-2.0 */
/* Copies and fills that one call of the runtime makes, or one kernel. */
#include <string.h>

#include "transfer/host/host_copy.h"
#include "transfer/routes/device_side.h"
#include "transfer/routes/routes.h"

/* -- when they are right ------------------------------------------------------------ */

bool
cm_direct_suits(cm_plan *plan, const cm_plan_ends *ends)
{
    const cm_tuning *tuning = ends->options->tuning;
    uint64_t least = cm_region_is_on_device(ends->dst) ? tuning->staged_up_nbytes
                                                       : tuning->staged_down_nbytes;
    /* Pages come into being where they are written first: several threads do more,
     * whoever is faster else. */
    bool may_wait = ends->options->may_wait && plan->layout.run_nbytes < least
                    && !(ends->dst_facts.fresh && tuning->thread_count != 1);
    return plan->layout.ndim == 0 && cm_plan_has_device_end(ends)
           && plan->device == plan->src_device && (cm_plan_is_locked(ends) || may_wait);
}

bool
cm_2d_suits(cm_plan *plan, const cm_plan_ends *ends)
{
    const cm_layout *layout = &plan->layout;
    const int64_t *pitch = layout->axes[0].stride;
    int64_t run = (int64_t)layout->run_nbytes;
    return layout->ndim == 1 && cm_plan_has_device_end(ends)
           && plan->device == plan->src_device && cm_plan_is_locked(ends)
           && ends->dst_facts.whole && ends->src_facts.whole
           && layout->run_nbytes >= ends->options->tuning->row_min_nbytes
           && pitch[CM_DST] >= run && pitch[CM_SRC] >= run
           && pitch[CM_DST] <= CM_PITCH_MAX && pitch[CM_SRC] <= CM_PITCH_MAX;
}

/* Between two devices: where one end at least crosses the link in whole runs. What is
 * repeated crosses once, another way. */
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
    return plan->device != plan->src_device
               ? suits_between_devices(plan, ends)
               : cm_plan_is_locked(ends) && ends->dst->address != 0
                     && ends->src->address != 0;
}

bool
cm_never_suits(cm_plan *plan CM_UNUSED, const cm_plan_ends *ends CM_UNUSED)
{
    return false;
}

/* -- and what they do --------------------------------------------------------------- */

/* The runtime touches ordinary memory itself, where nobody can populate it part by
 * part. */
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

cm_status
cm_job_copy_direct(cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    CM_TRY(cm_job_look(job, layout));
    CM_TRY(populate_files(job));
    if ((job->in_background || (job->hooks.interrupted != NULL && !job->blocking))
        && !(job->dst_facts.locked && job->src_facts.locked)) {
        /* The runtime's call waits for the stream and cannot be ended: wait here. */
        CM_TRY(cm_job_wait_stream(job));
    }
    return cm_job_copy_over_edges(
        job, cm_region_copy_address(&job->dst) + (uint64_t)layout->offset[CM_DST],
        cm_region_copy_address(&job->src) + (uint64_t)layout->offset[CM_SRC],
        layout->run_nbytes);
}

uint32_t
cm_job_fill_period(const cm_job *job)
{
    enum { MOST = 4 };
    const cm_plan *plan = &job->plan;
    const char *value = job->src.host;
    size_t nbytes = (size_t)job->dst.itemsize;
    cm_address dst = job->dst.address + (uint64_t)plan->layout.offset[CM_DST];
    if (plan->device < 0 || !cm_layout_is_packed(&plan->layout, CM_DST)) {
        return 0;
    }
    for (uint32_t period = 1; period <= MOST; period *= 2) {
        if (nbytes % period == 0 && dst % period == 0
            && memcmp(value, value + period, nbytes - period) == 0) {
            return period;
        }
    }
    return 0;
}

/* Registrations end at pages, so each run is whole patterns. Every host is
 * little-endian. */
cm_status
cm_job_fill(cm_job *job)
{
    cm_runtime *rt = job->engine->rt;
    uint64_t stream = job->stream->handle;
    uint64_t offset = (uint64_t)job->plan.layout.offset[CM_DST];
    uint64_t length = cm_layout_nbytes(&job->plan.layout);
    uint32_t period = cm_job_fill_period(job);
    uint32_t value = 0;
    memcpy(&value, job->src.host, period);
    for (uint64_t done = 0; done < length;) {
        cm_address dst = job->dst.address + offset + done;
        uint64_t nbytes = cm_job_run_of(
            job, cm_region_copy_address(&job->dst) + offset + done, length - done);
        switch (period) {
        case 1:
            CM_TRY(cm_rt_fill_8_async(rt, dst, (unsigned char)value, nbytes, stream));
            break;
        case 2:
            CM_TRY(cm_rt_fill_16_async(rt, dst, (uint16_t)value, nbytes / 2, stream));
            break;
        default:
            CM_TRY(cm_rt_fill_32_async(rt, dst, value, nbytes / 4, stream));
        }
        done += nbytes;
    }
    return cm_ok();
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
