/* SPDX-License-Identifier: Apache-2.0 */
/* Short copies between a device and the host that somebody waits for, on a stream with
 * nothing to do: one runtime copy, and a look at its event until it is through. No job
 * and no ticket, which together take longer than the copy. */
#include <string.h>

#include "transfer/backoff.h"
#include "transfer/job.h"

/* Nothing has to be waited for but the stream. */
static bool
comes_first(const cm_copy_request *request)
{
    for (uint32_t i = 0; i < request->after_count; i++) {
        if (request->after[i]->id != request->stream->id
            || request->after[i]->device != request->stream->device) {
            return false;
        }
    }
    return request->after_ticket_count == 0;
}

/* Both ends in one run each, on the way between the host and the stream's device. */
static bool
is_quick(const cm_copy_request *request, uint64_t most, uint64_t *nbytes)
{
    const cm_region *dst = &request->dst;
    const cm_region *src = &request->src;
    const cm_region *device = cm_region_is_on_device(dst) ? dst : src;
    if (!request->blocking || request->stream == NULL || !comes_first(request)
        || cm_region_is_on_device(dst) == cm_region_is_on_device(src)
        || device->kind != CM_KIND_DEVICE || device->device != request->stream->device
        || dst->itemsize != src->itemsize || !cm_region_is_c_contiguous(dst)
        || !cm_region_is_c_contiguous(src) || dst->ndim != src->ndim) {
        return false;
    }
    uint64_t total = (uint64_t)dst->itemsize;
    for (int axis = 0; axis < dst->ndim && total <= most; axis++) {
        uint64_t length = (uint64_t)dst->shape[axis];
        if (src->shape[axis] != dst->shape[axis]) {
            return false; /* said by who makes a job of it */
        }
        total = length <= most ? total * length : most + 1;
    }
    *nbytes = total;
    return total > 0 && total <= most && src->kind != CM_KIND_MANAGED
           && dst->kind != CM_KIND_MANAGED;
}

/* Nothing is before us on the stream, nothing captures it and no edge of a registration
 * is in the way. */
static bool
is_free(cm_engine *engine, const cm_copy_request *request, uint64_t nbytes)
{
    const cm_region *host =
        cm_region_is_on_device(&request->dst) ? &request->src : &request->dst;
    bool locked;
    bool idle = false;
    bool capturing = false;
    return (engine->registry == NULL
            || cm_registry_run(engine->registry, host->host, nbytes, &locked) == nbytes)
           && cm_is_ok(cm_rt_stream_is_capturing(engine->rt, request->stream->handle,
                                                 &capturing))
           && !capturing
           && cm_is_ok(cm_rt_stream_query(engine->rt, request->stream->handle, &idle))
           && idle;
}

static cm_status
wait_for_event(cm_engine *engine, const cm_copy_request *request, uint64_t event)
{
    uint64_t begin_ns = cm_now_ns();
    uint64_t asked_ns = begin_ns;
    for (;;) {
        bool done = false;
        CM_TRY(cm_rt_event_query(engine->rt, event, &done));
        if (done) {
            return cm_ok();
        }
        uint64_t now_ns = cm_now_ns();
        if (now_ns - asked_ns >= CM_ASK_NS && request->interrupted != NULL) {
            if (request->interrupted(request->interrupted_argument)) {
                return cm_fail(CM_ECANCELLED, 0);
            }
            asked_ns = cm_now_ns();
        }
        cm_pause_until(now_ns + cm_backoff_ns(now_ns - begin_ns));
    }
}

/* The user goes away; what is queued keeps its ends behind a ticket, which has the
 * event then. False: there can be none. */
static bool
leave_to_ticket(cm_engine *engine, const cm_copy_request *request, uint64_t event,
                cm_status status)
{
    cm_ticket *ticket = cm_is_ok(cm_engine_need_watcher(engine))
                            ? cm_ticket_create(engine, request)
                            : NULL;
    if (ticket == NULL) {
        return false;
    }
    cm_ticket_submit(ticket, request->stream->device, 0, event, NULL, status);
    cm_status untold = cm_ticket_abandon(ticket);
    (void)untold; /* nothing: the call tells */
    return true;
}

/* How it ended beside the status. */
typedef struct quick_end {
    bool flying; /* the copy may still be in flight */
    bool kept;   /* a ticket has the keeps */
} quick_end;

/* Inside the stream's device. */
static cm_status
copy_and_wait(cm_engine *engine, const cm_copy_request *request, cm_address dst,
              cm_address src, uint64_t nbytes, quick_end *end)
{
    cm_runtime *rt = engine->rt;
    uint64_t stream = request->stream->handle;
    int device = request->stream->device;
    uint64_t event;
    CM_TRY(cm_loan_take_event(engine, device, &event));
    cm_status status = cm_rt_copy_async(rt, dst, src, nbytes, stream);
    if (cm_is_ok(status)) {
        status = cm_rt_event_record(rt, event, stream);
        if (cm_is_ok(status)) {
            status = wait_for_event(engine, request, event);
        }
        if (status.code == CM_ECANCELLED
            && leave_to_ticket(engine, request, event, status)) {
            *end = (quick_end){.flying = true, .kept = true};
            return status;
        }
        if (!cm_is_ok(status)) {
            end->flying = !cm_is_ok(cm_rt_stream_synchronize(rt, stream));
        }
    }
    cm_loan_give_event(engine, device, event);
    return status;
}

/* Down into ordinary memory by way of a page-locked block, which the device reaches. */
static cm_status
copy_through(cm_engine *engine, const cm_copy_request *request, cm_pool *pool,
             cm_block *block, uint64_t nbytes, quick_end *end)
{
    cm_status status = copy_and_wait(engine, request, (uintptr_t)block->host,
                                     request->src.address, nbytes, end);
    if (cm_is_ok(status)) {
        memcpy(request->dst.host, block->host, (size_t)nbytes);
    }
    bool lost = end->flying && !end->kept;
    cm_pool_free(pool, block, &request->stream, end->flying ? 1 : 0,
                 lost ? CM_POOL_FREE_FENCE : 0u);
    return status;
}

static cm_status
copy(cm_engine *engine, const cm_copy_request *request, bool bounces, uint64_t nbytes,
     quick_end *end)
{
    if (bounces) {
        cm_mutex_lock(&engine->lock);
        cm_pool *pool = engine->pinned_pool;
        cm_mutex_unlock(&engine->lock);
        cm_block *block;
        /* Where there is none to be had the runtime takes the ordinary memory. */
        if (pool != NULL && cm_is_ok(cm_pool_alloc(pool, nbytes, NULL, &block))) {
            atomic_fetch_add_explicit(&engine->bounced_count, 1, memory_order_relaxed);
            return copy_through(engine, request, pool, block, nbytes, end);
        }
    }
    return copy_and_wait(engine, request, cm_region_copy_address(&request->dst),
                         cm_region_copy_address(&request->src), nbytes, end);
}

static bool
is_bounced(const cm_copy_request *request, const cm_tuning *tuning, uint64_t nbytes)
{
    return request->dst.kind == CM_KIND_PAGEABLE && nbytes <= tuning->bounce_nbytes;
}

bool
cm_engine_is_quick(cm_engine *engine, const cm_copy_request *request,
                   const cm_tuning *tuning, bool *bounced)
{
    uint64_t nbytes;
    cm_device_guard guard;
    if (!is_quick(request, tuning->quick_nbytes, &nbytes)
        || !cm_is_ok(cm_device_enter(engine->rt, request->stream->device, &guard))) {
        return false;
    }
    bool quick = is_free(engine, request, nbytes);
    *bounced = quick && is_bounced(request, tuning, nbytes);
    cm_device_leave(engine->rt, &guard);
    return quick;
}

bool
cm_engine_try_quick(cm_engine *engine, const cm_copy_request *request,
                    const cm_tuning *tuning, cm_status *out, bool *kept)
{
    uint64_t nbytes;
    quick_end end = {false, false};
    cm_device_guard guard;
    if (!is_quick(request, tuning->quick_nbytes, &nbytes)
        || !cm_is_ok(cm_device_enter(engine->rt, request->stream->device, &guard))) {
        return false;
    }
    bool quick = is_free(engine, request, nbytes);
    if (quick) {
        atomic_fetch_add_explicit(&engine->quick_count, 1, memory_order_relaxed);
        *out = copy(engine, request, is_bounced(request, tuning, nbytes), nbytes, &end);
        *kept = end.kept;
    }
    cm_device_leave(engine->rt, &guard);
    return quick;
}
