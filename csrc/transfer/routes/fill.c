/* SPDX-License-Identifier: Apache-2.0 */
/* Lets the device fill memory with a pattern of 1, 2 or 4 bytes. The runtime has a call
 * for each of these lengths. A fill is made here in one of two ways.
 *
 * cm_fill_try_queue() queues a fill of device memory without gaps, if the fill has to
 * wait for nothing but the earlier work of its own stream. It makes no job for such a
 * fill.
 *
 * All other fills are jobs. If the device can make such a fill by a pattern, the job
 * goes by the route FILL (a row of CM_ROUTES). Among these are fills that have to wait
 * for other streams, fills that a capture records, and fills of memory that the host
 * reaches too. Within memory that the host reaches, a registration of page-locked
 * memory may begin or end, and a fill must be cut at such a place. */
#include <string.h>

#include "runtime/scope.h"
#include "transfer/routes/device_side.h"
#include "transfer/routes/routes.h"

/* Return the length of the shortest pattern of 1, 2 or 4 bytes that the `nbytes` bytes
 * of `value` repeat and for which `dst` is aligned. Returns 0 if there is none. */
static uint32_t
period_of(const char *value, uint64_t nbytes, cm_address dst)
{
    enum { MOST = 4 };
    for (uint32_t period = 1; period <= MOST; period *= 2) {
        if (nbytes % period == 0 && dst % period == 0
            && memcmp(value, value + period, (size_t)(nbytes - period)) == 0) {
            return period;
        }
    }
    return 0;
}

/* Queue a fill of `nbytes` bytes, a multiple of `period`. The bytes of the pattern are
 * read as a little-endian number, since every supported host is little-endian. */
static cm_status
queue_pattern(cm_runtime *rt, uint64_t stream, const void *value, uint32_t period,
              cm_address dst, uint64_t nbytes)
{
    uint32_t pattern = 0;
    memcpy(&pattern, value, period);
    switch (period) {
    case 1:
        return cm_rt_fill_8_async(rt, dst, (unsigned char)pattern, nbytes, stream);
    case 2:
        return cm_rt_fill_16_async(rt, dst, (uint16_t)pattern, nbytes / 2, stream);
    default:
        return cm_rt_fill_32_async(rt, dst, pattern, nbytes / 4, stream);
    }
}

/* -- without a job ------------------------------------------------------------------------ */

/* Queue the fill and store the outcome in *out. The caller has entered the stream's
 * device. Returns false if the fill was not tried. */
static bool
try_queue(cm_runtime *rt, const cm_short_fill *fill, uint32_t period, cm_status *out)
{
    const cm_stream *stream = fill->stream;
    bool capturing = false;
    if (!cm_is_ok(
            cm_stream_ask_capturing(rt, stream->device, stream->handle, &capturing))
        || capturing) {
        return false;
    }
    *out = queue_pattern(rt, stream->handle, fill->value, period, fill->address,
                         fill->nbytes);
    return true;
}

bool
cm_fill_try_queue(cm_engine *engine, const cm_short_fill *fill, cm_status *out)
{
    cm_runtime *rt = engine->rt;
    uint32_t period = period_of(fill->value, fill->itemsize, fill->address);
    cm_scope scope;
    if (period == 0 || cm_recorder_is_on()
        || !cm_is_ok(cm_scope_enter(rt, fill->stream->device, CM_CAPTURE_THREAD_LOCAL,
                                    &scope))) {
        return false;
    }
    bool is_made = try_queue(rt, fill, period, out);
    cm_scope_leave(&scope);
    if (is_made) {
        atomic_fetch_add_explicit(&engine->counts.quick, 1, memory_order_relaxed);
    }
    return is_made;
}

/* -- as a route --------------------------------------------------------------------------- */

/* Do the same as period_of() for a plan that fills a single run. */
static uint32_t
period_of_plan(const cm_plan *plan, const cm_region *dst, const cm_region *src)
{
    return period_of(src->host, (uint64_t)dst->itemsize,
                     dst->address + (uint64_t)plan->layout.offset[CM_DST]);
}

bool
cm_fill_suits(cm_plan *plan, const cm_plan_ends *ends)
{
    return ends->options->is_fill && cm_layout_is_packed(&plan->layout, CM_DST)
           && period_of_plan(plan, ends->dst, ends->src) != 0;
}

/* The fill is cut wherever a registration begins or ends. Registrations consist of
 * whole pages, so each stretch between two cuts consists of whole patterns. */
cm_status
cm_job_fill(cm_job *job)
{
    uint64_t offset = (uint64_t)job->plan.layout.offset[CM_DST];
    uint64_t length = cm_layout_nbytes(&job->plan.layout);
    uint32_t period = period_of_plan(&job->plan, &job->dst, &job->src);
    for (uint64_t done = 0; done < length;) {
        uint64_t nbytes = cm_job_run_nbytes(
            job, cm_region_copy_address(&job->dst) + offset + done, length - done);
        CM_TRY(queue_pattern(job->engine->rt, job->stream->handle, job->src.host,
                             period, job->dst.address + offset + done, nbytes));
        done += nbytes;
    }
    return cm_ok();
}
