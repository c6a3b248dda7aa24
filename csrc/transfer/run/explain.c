/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/run/explain.h"

#include <stdlib.h>

#include "transfer/plan/ring_policy.h"
#include "transfer/run/run.h"

/* When a layout is made, axes of the target are joined. Some of them become one axis of
 * the layout, and others become part of its run. This function returns the outermost
 * axis of the target that is in axis `loop` of the layout. If the layout has no such
 * axis, it returns the outermost axis of the target that is in the run. Returns -1 if
 * there is none. */
static int
find_axis(const cm_region *dst, const cm_layout *layout, int loop)
{
    int64_t least = 1;
    int64_t end = (int64_t)layout->run_nbytes;
    int best = -1;
    if (loop < layout->ndim) {
        least = layout->axes[loop].stride[CM_DST];
        end = least * layout->axes[loop].length;
    }
    for (int axis = 0; axis < dst->ndim; axis++) {
        int64_t stride = llabs(dst->strides[axis]);
        if (dst->shape[axis] > 1 && stride >= least && stride < end
            && (best < 0 || stride > llabs(dst->strides[best]))) {
            best = axis;
        }
    }
    return best;
}

static void
explain_pieces(const cm_job *job, cm_explanation *out)
{
    const cm_plan *plan = &out->plan;
    out->piece_nbytes = plan->nbytes;
    if (plan->piece_count > 1) {
        cm_layout core;
        cm_cut cut;
        (void)cm_layout_get_core(&plan->layout, &core);
        cm_ring_policy_cut(plan, &job->tuning, &core, &cut);
        out->piece_nbytes = (uint64_t)cut.step * cut.unit_nbytes;
        out->axis = find_axis(&job->dst, &core, cut.axis);
    }
}

/* Count the threads of the host that would work on a piece. */
static uint32_t
count_threads(const cm_job *job, const cm_copy_request *request, bool is_short)
{
    const cm_plan *plan = &job->plan;
    if (plan->row == NULL) {
        return 0;
    }
    if (is_short && (plan->device < 0 || request->convert != NULL)) {
        return 1; /* the caller's own */
    }
    if (plan->device < 0) {
        bool in_background = !request->blocking && request->stream == NULL;
        return cm_host_thread_count(job, in_background);
    }
    return cm_ring_policy_thread_count(plan, &job->tuning);
}

/* Add the facts that a planned job would find out only while it runs. */
static void
explain_job(cm_job *job, const cm_copy_request *request, cm_explanation *out)
{
    cm_plan *plan = &job->plan;
    out->dst_facts = job->dst_facts;
    out->src_facts = job->src_facts;
    out->is_broadcast = cm_layout_nbytes(&plan->layout) > plan->nbytes;
    out->is_short = plan->row != NULL
                    && cm_engine_is_short_copy(job->engine, request, &job->tuning,
                                               &out->is_bounced, plan);
    out->overlaps = job->overlaps && !out->is_short;
    out->thread_count = count_threads(job, request, out->is_short);
    if (out->is_short && plan->device >= 0 && !plan->row->crosses) {
        /* A short copy is explained as DIRECT, whichever route a job would take. */
        plan->row = &cm_routes[CM_ROUTE_DIRECT];
    }
    else if (out->overlaps
             && (job->is_two_maps || plan->layout.ndim > 0 || plan->device >= 0)) {
        /* A job would first read the source into memory of its own. The rest of the
         * explanation is about the copy from that memory to the target. */
        bool on_device = cm_job_can_own_on_device(job);
        cm_job_plan_own_source(job, on_device ? NULL : job->src.host,
                               on_device ? job->src.address : 0);
        out->thread_count = count_threads(job, request, false);
    }
    out->plan = *plan;
    if (plan->row != NULL) {
        explain_pieces(job, out);
    }
}

/* Explain a copy between devices that goes by way of the host, because the host has to
 * convert the elements. */
static void
explain_far(const cm_job *job, uint64_t count, cm_explanation *out)
{
    out->dst_facts = cm_engine_facts_of(job->engine, &job->dst);
    out->src_facts = cm_engine_facts_of(job->engine, &job->src);
    out->overlaps = cm_overlap_is_possible(job->engine->rt, &job->dst, &job->src);
    out->plan = (cm_plan){.row = &cm_routes[CM_ROUTE_SEVERAL],
                          .device = job->dst.device,
                          .src_device = job->src.device,
                          .nbytes = count * (uint64_t)job->dst.itemsize,
                          .piece_count = 1};
    out->piece_nbytes = out->plan.nbytes;
}

static cm_status
explain_request(cm_job *job, const cm_copy_request *request, cm_explanation *out)
{
    int64_t count;
    CM_TRY(cm_region_count(&job->dst, &count));
    if (count > 0
        && cm_plan_goes_via_host(job->engine->rt, &job->dst, &job->src,
                                 request->convert)) {
        explain_far(job, (uint64_t)count, out);
        return cm_ok();
    }
    CM_TRY(cm_job_plan(job, request));
    explain_job(job, request, out);
    return cm_ok();
}

cm_status
cm_engine_explain(cm_engine *engine, const cm_copy_request *request,
                  cm_explanation *out)
{
    *out = (cm_explanation){.axis = -1};
    cm_job *job = calloc(1, sizeof(*job));
    CM_TRY(cm_allocated(job != NULL, sizeof(*job)));
    cm_status status = cm_engine_begin_call(engine, &out->tuning);
    if (cm_is_ok(status)) {
        cm_job_init(job, engine, request, &out->tuning);
        status = explain_request(job, request, out);
        cm_engine_end_call(engine);
    }
    free(job);
    return status;
}
