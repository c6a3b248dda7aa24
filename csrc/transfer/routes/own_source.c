/* SPDX-License-Identifier: Apache-2.0 */
/* A source that overlaps its target is read whole first, into memory of our own. */
#include <stdlib.h>

#include "transfer/host/host_copy.h"
#include "transfer/routes/routes.h"
#include "transfer/routes/staging.h"

/* Read an overlapping source whole into memory of our own, which takes its place. */
static cm_status
replace_source_on_host(cm_job *job, const cm_layout *pack)
{
    if (cm_job_src_is_ordered(job) && job->stream != NULL) {
        CM_TRY(cm_job_wait_stream(job));
    }
    job->host_temporary = malloc((size_t)job->plan.nbytes);
    if (job->host_temporary == NULL) {
        return cm_fail(CM_ENOMEM, job->plan.nbytes);
    }
    if (job->is_file) {
        CM_TRY(cm_host_populate(pack, NULL, job->src.host));
    }
    cm_host_copy(pack, job->host_temporary, job->src.host);
    job->src.is_file = false;
    job->src.host = job->host_temporary;
    job->src.address = 0;
    job->src.kind = CM_KIND_PAGEABLE;
    job->src_facts = (cm_end_facts){.locked = false, .whole = true};
    return cm_ok();
}

static cm_status
replace_source_on_device(cm_job *job, const cm_layout *pack)
{
    cm_engine *engine = job->engine;
    CM_TRY(cm_job_alloc_block(job, job->plan.device, job->plan.nbytes, job->stream,
                              &job->temporary));
    cm_address to = job->temporary->address;
    if (pack->ndim == 0) {
        cm_address from =
            cm_region_copy_address(&job->src) + (uint64_t)pack->src_offset;
        CM_TRY(cm_rt_copy_async(engine->rt, to, from, pack->run_nbytes,
                                job->stream->handle));
    }
    else {
        CM_TRY(cm_kernels_launch(&engine->kernels, job->plan.device, pack, to,
                                 job->src.address, job->stream->handle));
    }
    job->src.host = NULL;
    job->src.address = to;
    job->src.kind = CM_KIND_DEVICE;
    job->src_facts = (cm_end_facts){.locked = true, .whole = true};
    return cm_ok();
}

cm_status
cm_job_replace_source(cm_job *job)
{
    cm_layout core = job->plan.layout;
    cm_layout repeats;
    cm_layout_take_repeats(&core, &repeats);
    cm_layout pack = core;
    cm_layout_pack_dst(&pack);
    if (job->stream != NULL && job->src_facts.locked && job->src.address != 0) {
        CM_TRY(replace_source_on_device(job, &pack));
    }
    else {
        CM_TRY(replace_source_on_host(job, &pack));
    }
    cm_plan_options options = {.may_wait = job->blocking, .tuning = &job->tuning};
    cm_plan_pack_source(&job->plan, &job->dst, &job->src, job->dst_facts,
                        job->src_facts, options);
    cm_mutex_lock(&job->engine->lock);
    job->ticket->route = job->plan.route;
    cm_mutex_unlock(&job->engine->lock);
    return cm_ok();
}
