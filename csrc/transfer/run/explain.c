/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/run/explain.h"
#include "transfer/run/run.h"

#include "transfer/engine/job.h"

static int64_t
magnitude(int64_t stride)
{
    return stride < 0 ? -stride : stride;
}

/* The outermost axis of the target among those that one axis of the loops, or a run,
 * consists of. */
static int
find_axis(const cm_region *dst, const cm_layout *layout, int loop)
{
    int64_t least = 1;
    int64_t end = (int64_t)layout->run_nbytes;
    int best = -1;
    if (loop < layout->ndim) {
        least = layout->dst_strides[loop];
        end = least * layout->shape[loop];
    }
    for (int axis = 0; axis < dst->ndim; axis++) {
        int64_t stride = magnitude(dst->strides[axis]);
        if (dst->shape[axis] > 1 && stride >= least && stride < end
            && (best < 0 || stride > magnitude(dst->strides[best]))) {
            best = axis;
        }
    }
    return best;
}

static void
explain_pieces(const cm_copy_request *request, cm_explanation *out)
{
    const cm_plan *plan = &out->plan;
    out->axis = -1;
    out->chunk_count = 0;
    out->piece_nbytes = plan->nbytes;
    if (plan->piece_count > 1) {
        cm_layout core = plan->layout;
        cm_layout repeats;
        cm_layout first = core;
        cm_cut cut;
        cm_layout_take_repeats(&core, &repeats);
        cm_cut_init(&cut, &core, plan->piece_nbytes);
        int loop = cut.axis;
        (void)cm_cut_next(&cut, &first);
        out->piece_nbytes = cm_layout_nbytes(&first);
        out->axis = find_axis(&request->dst, &core, loop);
    }
    if (cm_routes[plan->route].uses_ring) {
        uint64_t room = out->tuning.ring_nbytes / plan->piece_nbytes;
        uint64_t count = cm_plan_slot_count(plan, &out->tuning);
        count = count < plan->piece_count ? count : plan->piece_count;
        out->chunk_count = room == 0 ? 1 : room < count ? room : count;
    }
}

/* The route once the source is in memory of our own. */
static void
explain_overlap(const cm_copy_request *request, cm_plan_options options,
                cm_explanation *out)
{
    cm_region src = request->src;
    bool by_device =
        out->plan.device >= 0 && out->src_facts.locked && request->src.address != 0;
    src.kind = by_device ? CM_KIND_DEVICE : CM_KIND_PAGEABLE;
    src.device = by_device ? out->plan.device : -1;
    cm_plan_pack_source(&out->plan, &request->dst, &src, out->dst_facts,
                        (cm_end_facts){.locked = by_device, .whole = true}, options);
}

cm_status
cm_engine_explain(cm_engine *engine, const cm_copy_request *request,
                  cm_explanation *out)
{
    *out = (cm_explanation){.axis = -1};
    cm_engine_read_tuning(engine, &out->tuning);
    cm_engine_resolve_tuning(engine, &out->tuning);
    out->dst_facts = cm_engine_facts_of(engine, &request->dst);
    out->src_facts = cm_engine_facts_of(engine, &request->src);
    out->dst_facts.fresh =
        cm_engine_is_fresh(&request->dst, &request->src, out->dst_facts);
    cm_plan_options options = cm_engine_plan_options(engine, request, out->dst_facts);
    options.tuning = &out->tuning;
    CM_TRY(cm_plan_init(&out->plan, &request->dst, &request->src, out->dst_facts,
                        out->src_facts, options));
    out->is_broadcast = cm_layout_nbytes(&out->plan.layout) > out->plan.nbytes;
    if (out->plan.route == CM_ROUTE_NOTHING) {
        out->same_place = out->plan.nbytes > 0;
        return cm_ok();
    }
    out->is_short = cm_engine_is_short_copy(engine, request, &out->tuning,
                                            &out->is_bounced, &out->plan);
    if (out->is_short) {
        out->plan.route = CM_ROUTE_DIRECT;
    }
    else {
        out->overlaps = cm_engine_may_overlap(engine->rt, &request->dst, &request->src);
    }
    if (out->overlaps && out->plan.layout.ndim + (out->plan.device >= 0) > 0) {
        explain_overlap(request, options, out);
    }
    if (out->plan.route == CM_ROUTE_HOST) {
        bool in_background = !request->blocking && request->stream == NULL;
        out->plan.thread_count =
            cm_host_thread_count(&out->plan.layout, &request->dst, &out->tuning,
                                 in_background, out->overlaps);
    }
    explain_pieces(request, out);
    return cm_ok();
}

void
cm_engine_read_counts(cm_engine *engine, cm_copy_counts *out)
{
    for (int route = 0; route < CM_ROUTE_COUNT; route++) {
        out->routes[route] = atomic_load(&engine->route_counts[route]);
    }
    out->quick = atomic_load(&engine->short_count);
    out->bounced = atomic_load(&engine->bounced_count);
    out->pieces = atomic_load(&engine->piece_count);
}
