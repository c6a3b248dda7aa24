/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/measured.h"

#include <math.h>

#define MIB (1024.0 * 1024.0)

const cm_measured_row cm_measured_rows[] = {
#define CM_MEASURED_ROW(name, value) {#name, offsetof(cm_measured, name)},
    CM_MEASURED(CM_MEASURED_ROW)
#undef CM_MEASURED_ROW
};

void
cm_measured_init(cm_measured *measured)
{
    *measured = (cm_measured){
#define CM_MEASURED_DEFAULT(name, value) .name = (double)(value),
        CM_MEASURED(CM_MEASURED_DEFAULT)
#undef CM_MEASURED_DEFAULT
    };
}

/* Between two counts that were measured, on the line between them; beyond the last, as
 * that one. */
double
cm_measured_copy_rate(const cm_measured *measured, double threads)
{
    const double rates[] = {measured->copy_rate_1, measured->copy_rate_2,
                            measured->copy_rate_4, measured->copy_rate_8,
                            measured->copy_rate_16};
    double rate = rates[0];
    double count = 1;
    for (size_t i = 1; i < sizeof(rates) / sizeof(rates[0]) && count < threads; i++) {
        if (rates[i] <= 0) {
            break;
        }
        double share = threads < 2 * count ? (threads - count) / count : 1;
        rate += share * (rates[i] - rate);
        count *= 2;
    }
    return rate;
}

/* -- thresholds ------------------------------------------------------------------------- */

/* The fewest that keep up with the link, which takes some of the memory itself; where
 * none do, the fastest. */
static unsigned
choose_threads(const cm_measured *m, unsigned cpu_count)
{
    unsigned most = cpu_count < CM_THREAD_MAX ? cpu_count : CM_THREAD_MAX;
    double link = fmax(m->up_rate, m->down_rate);
    double best = 0;
    for (unsigned count = 1; count <= most; count++) {
        best = fmax(best, cm_measured_copy_rate(m, count));
    }
    for (unsigned count = 1; count <= most; count++) {
        double rate = cm_measured_copy_rate(m, count);
        if ((link > 0 && rate >= 1.3 * link) || rate >= best) {
            return count;
        }
    }
    return most;
}

/* The least power of two that is not less, within bounds. */
static uint64_t
round_up(double nbytes, double least, double most)
{
    double size = least;
    while (size < nbytes && size < most) {
        size *= 2;
    }
    return (uint64_t)size;
}

/* The link stands still between two pieces. Where threads are slower than it, it may;
 * else that should be a tenth of the time at most. */
static uint64_t
choose_chunk(const cm_measured *m, unsigned threads, double copy_rate)
{
    double link = fmin(m->up_rate, m->down_rate);
    double gap = m->dma_gap_ns * 1e-9;
    double nbytes = 10 * gap * link;
    if (copy_rate < link && copy_rate > 0) {
        nbytes = fmin(nbytes, gap / (1 / copy_rate - 1 / link));
    }
    /* Less costs more in calls, and is in the way of threads that share a huge page;
     * one or two threads gain by what stays in their caches. */
    double least = threads > 3 ? 8 * MIB : threads > 2 ? 2 * MIB : MIB;
    return round_up(nbytes, least, 16 * MIB);
}

/* From which size on pieces through page-locked blocks beat the runtime's own copy. */
static uint64_t
choose_staged(double link, double copy_rate, double driver_rate, double measured,
              double wake_ns, uint64_t never)
{
    double staged = fmin(link, copy_rate);
    if (staged <= 1.1 * driver_rate) {
        return never;
    }
    if (measured > 0) {
        return round_up(measured, MIB / 4, 64 * MIB);
    }
    /* Where that was not seen: waking all the threads is lost at first. */
    return round_up(2e-9 * wake_ns / (1 / driver_rate - 1 / staged), MIB / 4, 64 * MIB);
}

static void
keep_bounds(cm_tuning *tuning)
{
    for (int i = 0; i < CM_TUNING_COUNT; i++) {
        uint64_t *value = cm_tuning_at(tuning, i);
        const cm_tuning_row *row = &cm_tuning_rows[i];
        *value = *value < row->least  ? row->least
                 : *value > row->most ? row->most
                                      : *value;
    }
}

/* What makes no sense counts as not known. */
static cm_measured
clean(const cm_measured *measured)
{
    cm_measured result = *measured;
    for (int i = 0; i < CM_MEASURED_COUNT; i++) {
        double *value = cm_measured_at(&result, i);
        *value = *value >= 0 && *value < 1e15 ? *value : 0;
    }
    return result;
}

void
cm_tuning_derive(const cm_measured *given, unsigned cpu_count, cm_tuning *out)
{
    const cm_measured sound = clean(given);
    const cm_measured *measured = &sound;
    cm_tuning_init(out);
    unsigned threads = choose_threads(measured, cpu_count);
    double copy_rate = cm_measured_copy_rate(measured, threads);
    uint64_t never = cm_tuning_rows[CM_TUNING_staged_up_nbytes].most;
    out->thread_count = threads < cpu_count && threads < CM_THREAD_MAX ? threads : 0;
    if (out->thread_count > 0) {
        out->fresh_thread_count = cpu_count < CM_THREAD_MAX ? cpu_count : CM_THREAD_MAX;
    }
    out->chunk_nbytes = choose_chunk(measured, threads, copy_rate);
    out->slot_count = threads > 2 ? out->slot_count : out->slot_count / 2;
    if (measured->driver_up_rate > 0) {
        out->staged_up_nbytes =
            choose_staged(measured->up_rate, copy_rate, measured->driver_up_rate,
                          measured->staged_up_nbytes, measured->wake_ns, never);
    }
    if (measured->driver_down_rate > 0) {
        out->staged_down_nbytes =
            choose_staged(measured->down_rate, copy_rate, measured->driver_down_rate,
                          measured->staged_down_nbytes, measured->wake_ns, never);
    }
    out->spin_ns = (uint64_t)fmin(fmax(measured->wake_ns, 10e3), 200e3);
    out->wait_spin_ns = 4 * out->spin_ns;
    keep_bounds(out);
}

/* -- expectations ------------------------------------------------------------------------ */

/* Short runs one by one, a ns each and thread; long ones at the speed of memory. */
static double
packing_ns(const cm_measured *m, const cm_layout *layout, uint64_t nbytes,
           uint32_t threads)
{
    double count = threads > 0 ? threads : 1;
    double rate = cm_measured_copy_rate(m, count);
    double runs = (double)nbytes / (double)layout->run_nbytes;
    return fmax(
        1e9 * (double)nbytes / rate,
        layout->ndim > 0 ? runs * fmax(1, (double)layout->run_nbytes / 16) / count : 0);
}

/* The device moves 32 bytes at a time, and what it reads from the host over the link.
 */
static double
kernel_ns(const cm_measured *m, const cm_layout *layout, uint64_t nbytes, double rate)
{
    double run = (double)layout->run_nbytes;
    double waste = run < 32 ? 32 / run : 1;
    return 1e9 * (double)nbytes * fmin(waste, rate < m->device_rate ? 1 : 8) / rate;
}

static double
staged_ns(const cm_measured *m, const cm_plan *plan, double link)
{
    double nbytes = (double)plan->nbytes;
    double pieces = plan->piece_count > 0 ? (double)plan->piece_count : 1;
    double sent = 1e9 * nbytes / link + (pieces - 1) * m->dma_gap_ns;
    double packed = packing_ns(m, &plan->layout, plan->nbytes, plan->thread_count);
    double first = fmin(sent, packed) / pieces; /* alone at the beginning or the end */
    double wake = plan->thread_count > 1 ? m->wake_ns : 0;
    return fmax(sent, packed) + first + wake + m->latency_ns;
}

/* What is repeated is written each time. */
static double
host_ns(const cm_measured *m, const cm_plan *plan)
{
    double wake = plan->thread_count > 1 ? m->wake_ns : 0;
    return wake
           + packing_ns(m, &plan->layout, cm_layout_nbytes(&plan->layout),
                        plan->thread_count);
}

double
cm_measured_expect(const cm_measured *measured, const cm_plan *plan,
                   const cm_region *dst, const cm_region *src, bool locked)
{
    bool dst_here = cm_region_is_on_device(dst);
    bool inside = dst_here && cm_region_is_on_device(src);
    double link = dst_here ? measured->up_rate : measured->down_rate;
    double rate = inside ? measured->device_rate : link;
    double nbytes = (double)plan->nbytes;
    if (plan->nbytes == 0) {
        return 0;
    }
    if (inside && dst->device != src->device && plan->route != CM_ROUTE_PEER_STAGED) {
        return -1;
    }
    switch (plan->route) {
    case CM_ROUTE_HOST:
        return host_ns(measured, plan);
    case CM_ROUTE_DIRECT:
        if (!locked) {
            rate = dst_here ? measured->driver_up_rate : measured->driver_down_rate;
        }
        return measured->latency_ns + 1e9 * nbytes / rate;
    case CM_ROUTE_KERNEL:
        return measured->latency_ns
               + kernel_ns(measured, &plan->layout, plan->nbytes, rate);
    case CM_ROUTE_STAGED:
    case CM_ROUTE_STAGED_KERNEL:
        return staged_ns(measured, plan, link);
    case CM_ROUTE_NOTHING:
        return 0;
    case CM_ROUTE_PEER_STAGED:
        rate = fmin(measured->up_rate, measured->down_rate);
        return measured->latency_ns + 1e9 * nbytes / rate;
    default:
        return measured->latency_ns + 1e9 * nbytes / rate;
    }
}
