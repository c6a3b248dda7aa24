/* SPDX-License-Identifier: Apache-2.0 */
/* Copies and fills that one call of the runtime makes, or one kernel. */
#include "transfer/engine/job.h"
#include "transfer/routes/routes.h"

/* How far one runtime copy or fill may go from `host` on. */
static uint64_t
run_of(const cm_job *job, const cm_region *region, cm_address at, uint64_t nbytes)
{
    bool locked;
    if (cm_region_is_on_device(region) || job->engine->registry == NULL) {
        return nbytes;
    }
    return cm_registry_run(job->engine->registry, (const void *)(uintptr_t)at, nbytes,
                           &locked);
}

cm_status
cm_job_copy_direct(cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    cm_address dst = cm_region_copy_address(&job->dst) + (uint64_t)layout->dst_offset;
    cm_address src = cm_region_copy_address(&job->src) + (uint64_t)layout->src_offset;
    CM_TRY(cm_job_look(job, layout));
    if ((job->may_park || (job->interrupted != NULL && !job->blocking))
        && !(job->dst_facts.locked && job->src_facts.locked)) {
        /* The runtime's call waits for the stream and cannot be ended: wait here. */
        CM_TRY(cm_job_wait_stream(job));
    }
    for (uint64_t left = layout->run_nbytes; left > 0;) {
        uint64_t nbytes = run_of(job, &job->dst, dst, left);
        nbytes = run_of(job, &job->src, src, nbytes);
        CM_TRY(
            cm_rt_copy_async(job->engine->rt, dst, src, nbytes, job->stream->handle));
        dst += nbytes;
        src += nbytes;
        left -= nbytes;
    }
    return cm_ok();
}

static cm_status
fill_run(const cm_job *job, cm_address dst, uint64_t nbytes)
{
    cm_runtime *rt = job->engine->rt;
    uint64_t stream = job->stream->handle;
    const unsigned char *p = job->pattern;
    switch (job->pattern_nbytes) {
    case 1:
        return cm_rt_fill_8_async(rt, dst, p[0], nbytes, stream);
    case 2:
        return cm_rt_fill_16_async(rt, dst, (uint16_t)(p[0] | p[1] << 8), nbytes / 2,
                                   stream);
    default:
        return cm_rt_fill_32_async(rt, dst,
                                   (uint32_t)p[0] | (uint32_t)p[1] << 8
                                       | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24,
                                   nbytes / 4, stream);
    }
}

/* Registrations end at pages, so each run is whole patterns. */
cm_status
cm_job_fill(cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    cm_address dst = job->dst.address + (uint64_t)layout->dst_offset;
    cm_address at = cm_region_copy_address(&job->dst) + (uint64_t)layout->dst_offset;
    for (uint64_t left = cm_layout_nbytes(layout); left > 0;) {
        uint64_t nbytes = run_of(job, &job->dst, at, left);
        CM_TRY(fill_run(job, dst, nbytes));
        dst += nbytes;
        at += nbytes;
        left -= nbytes;
    }
    return cm_ok();
}

cm_status
cm_job_copy_2d(cm_job *job)
{
    const cm_layout *layout = &job->plan.layout;
    return cm_rt_copy_2d_async(
        job->engine->rt,
        cm_region_copy_address(&job->dst) + (uint64_t)layout->dst_offset,
        (uint64_t)layout->dst_strides[0],
        cm_region_copy_address(&job->src) + (uint64_t)layout->src_offset,
        (uint64_t)layout->src_strides[0], layout->run_nbytes,
        (uint64_t)layout->shape[0], job->stream->handle);
}

cm_status
cm_job_copy_by_kernel(cm_job *job)
{
    return cm_kernels_launch(&job->engine->kernels, job->plan.device, &job->plan.layout,
                             job->dst.address, job->src.address, job->stream->handle);
}
