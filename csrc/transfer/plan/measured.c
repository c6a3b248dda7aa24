/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/measured.h"

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

/* The fewest that keep up with the link, which takes some of the memory itself; where
 * none do, the fastest. */
static unsigned
choose_threads(const cm_measured *m, unsigned cpu_count)
{
    unsigned most = cpu_count < CM_THREAD_MAX ? cpu_count : CM_THREAD_MAX;
    double link = fmax(m->up_rate, m->down_rate);
    double best_rate = 0;
    unsigned best = 1;
    for (unsigned count = 1; count <= most; count++) {
        double rate = cm_measured_copy_rate(m, count);
        if (rate > best_rate) {
            best_rate = rate;
            best = count;
        }
        if (link > 0 && rate >= 1.3 * link) {
            break;
        }
    }
    return best;
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

/* Pieces through page-locked blocks must gain on the runtime's own copy. */
static uint64_t
choose_staged(double link, double copy_rate, double driver_rate, double nbytes)
{
    bool gains = fmin(link, copy_rate) > 1.1 * driver_rate;
    return gains ? round_up(nbytes, MIB / 4, 64 * MIB) : CM_TUNING_NEVER;
}

void
cm_tuning_derive(const cm_measured *m, unsigned cpu_count, cm_tuning *out)
{
    cm_tuning_init(out);
    unsigned threads = choose_threads(m, cpu_count);
    double copy_rate = cm_measured_copy_rate(m, threads);
    if (threads < cpu_count && threads < CM_THREAD_MAX) {
        out->thread_count = threads;
        out->fresh_thread_count = cpu_count < CM_THREAD_MAX ? cpu_count : CM_THREAD_MAX;
    }
    out->chunk_nbytes = choose_chunk(m, threads, copy_rate);
    out->slot_count = threads > 2 ? out->slot_count : out->slot_count / 2;
    out->staged_up_nbytes =
        choose_staged(m->up_rate, copy_rate, m->driver_up_rate, m->staged_up_nbytes);
    out->staged_down_nbytes = choose_staged(m->down_rate, copy_rate,
                                            m->driver_down_rate, m->staged_down_nbytes);
    out->spin_ns = (uint64_t)fmin(fmax(m->wake_ns, 10e3), 200e3);
    out->wait_spin_ns = 4 * out->spin_ns;
}
