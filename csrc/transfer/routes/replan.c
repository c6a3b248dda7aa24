/* SPDX-License-Identifier: Apache-2.0 */
/* Changes the plan of a job once the job's turn has come.
 *
 * A plan is made when the copy is asked for. After that the job may have to wait for a
 * long time, and nobody knows how much memory there will be when its turn comes. So the
 * last decisions are made in CM_JOB_FINALIZE, a step of run.c. Two of these decisions
 * change the plan, and the functions of this file make the changes:
 *
 *   - A source that overlaps its target is first read as a whole, into memory of our
 *     own. That memory is the source from then on, and the rest of the copy is planned
 *     for it.
 *   - The function `reserve` of a route (plan/route.h) takes the memory that the route
 *     cannot do without. If there is no such memory, the copy is planned again, for a
 *     route that needs none.
 *
 * Most copies need neither change, and call nothing in this file. */
#include <stdlib.h>

#include "transfer/routes/device_side.h"
#include "transfer/routes/routes.h"

/* -- planning again ------------------------------------------------------------------ */

static cm_plan_options
options_of(const cm_job *job)
{
    return (cm_plan_options){.may_wait = job->blocking,
                             .converts = job->converts,
                             .has_more_targets = job->has_more_targets,
                             .tuning = &job->tuning};
}

void
cm_job_plan_without_memory(cm_job *job)
{
    cm_plan_options options = options_of(job);
    options.lacks_memory = true;
    cm_plan_choose_again(&job->plan, &job->dst, &job->src, job->dst_facts,
                         job->src_facts, options);
}

/* -- a source that overlaps its target ------------------------------------------------ */

bool
cm_job_can_own_on_device(const cm_job *job)
{
    return job->plan.device >= 0 && job->src_facts.locked && job->src.address != 0
           && (!job->converts || job->plan.is_download);
}

void
cm_job_plan_own_source(cm_job *job, void *host, cm_address address)
{
    bool on_device = address != 0;
    /* If the host has read the source, it has also converted the elements, unless the
     * device is going to convert them. */
    if (!on_device && !job->plan.converts_on_device) {
        job->converts = false;
        cm_layout_drop_items(&job->plan.layout);
    }
    job->src.is_file = false;
    job->is_populated[CM_SRC] = false;
    job->src.host = host;
    job->src.address = address;
    job->src.kind = on_device ? CM_KIND_DEVICE : CM_KIND_PAGEABLE;
    job->src_facts = (cm_end_facts){.locked = on_device, .whole = true};
    job->overlaps = false; /* from now on threads may share the copy */
    cm_plan_pack_source(&job->plan, &job->dst, &job->src, job->dst_facts,
                        job->src_facts, options_of(job));
}

/* Read the whole source into host memory of our own. The elements are converted on the
 * way, unless the device is going to convert them. */
static cm_status
replace_source_on_host(cm_job *job, const cm_layout *pack)
{
    if (cm_job_src_is_ordered(job) && job->stream != NULL) {
        CM_TRY(cm_job_wait_stream(job));
    }
    job->host_temporary = malloc((size_t)job->plan.nbytes);
    CM_TRY(cm_allocated(job->host_temporary != NULL, job->plan.nbytes));
    cm_job_share(job, pack, job->host_temporary, job->src.host, CM_COPY_PLAIN_ALL);
    CM_TRY(cm_job_moved_status(job));
    cm_job_plan_own_source(job, job->host_temporary, 0);
    return cm_ok();
}

static cm_status
replace_source_on_device(cm_job *job, const cm_layout *pack)
{
    cm_address from =
        cm_region_copy_address(&job->src) + (uint64_t)pack->offset[CM_SRC];
    CM_TRY(
        cm_job_alloc_block(job, job->plan.nbytes, job->stream, true, &job->temporary));
    cm_address to = job->temporary->address;
    CM_TRY(pack->ndim > 0
               ? cm_job_copy_layout(job, job->stream, pack, to, job->src.address)
               : cm_job_copy_over_edges(job, to, from, pack->run_nbytes));
    cm_job_plan_own_source(job, NULL, to);
    return cm_ok();
}

cm_status
cm_job_replace_source(cm_job *job)
{
    cm_layout pack;
    (void)cm_layout_get_core(&job->plan.layout, &pack);
    cm_layout_pack(&pack, CM_DST);
    bool on_device = cm_job_can_own_on_device(job);
    /* In these two cases the elements are converted later, and not while the source is
     * read. */
    if (on_device || job->plan.converts_on_device) {
        cm_layout_drop_items(&pack);
    }
    return on_device ? replace_source_on_device(job, &pack)
                     : replace_source_on_host(job, &pack);
}
