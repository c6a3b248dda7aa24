/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/tuning.h"

#include <math.h>

#define MIB (1024.0 * 1024.0)

const cm_tuning_row cm_tuning_rows[] = {
#define CM_TUNING_ROW(name, value, least, most)                                        \
    {#name, offsetof(cm_tuning, name), (uint64_t)(least), (uint64_t)(most)},
    CM_TUNING(CM_TUNING_ROW)
#undef CM_TUNING_ROW
};

void
cm_tuning_init(cm_tuning *tuning)
{
    *tuning = (cm_tuning){
#define CM_TUNING_DEFAULT(name, value, least, most) .name = (uint64_t)(value),
        CM_TUNING(CM_TUNING_DEFAULT)
#undef CM_TUNING_DEFAULT
    };
}

void
cm_tuning_init_for(cm_tuning *tuning, unsigned cpu_count)
{
    cm_tuning_init(tuning);
    if (cpu_count == 3) {
        tuning->chunk_nbytes = 2 << 20;
    }
    if (cpu_count <= 2) {
        tuning->chunk_nbytes = 1 << 20;
        tuning->slot_count = 4;
        tuning->staged_down_nbytes = CM_TUNING_NEVER;
    }
    if (cpu_count <= 1) {
        tuning->staged_up_nbytes = CM_TUNING_NEVER;
    }
}

bool
cm_tuning_check(const cm_tuning *tuning, const char **name)
{
    cm_tuning copy = *tuning;
    const char *wrong = NULL;
    for (int i = 0; i < CM_TUNING_COUNT && wrong == NULL; i++) {
        uint64_t value = *cm_tuning_at(&copy, i);
        const cm_tuning_row *row = &cm_tuning_rows[i];
        wrong = value < row->least || value > row->most ? row->name : NULL;
    }
    if (name != NULL) {
        *name = wrong;
    }
    return wrong == NULL;
}

/* More get in each other's way, on an H200 with 16 cores, except at making pages. */
enum { ENOUGH_THREADS = 8 };

void
cm_tuning_resolve(cm_tuning *tuning, unsigned cpu_count)
{
    uint64_t most = cpu_count < CM_THREAD_MAX ? cpu_count : CM_THREAD_MAX;
    if (tuning->fresh_thread_count == 0) {
        tuning->fresh_thread_count =
            tuning->thread_count == 0 ? most : tuning->thread_count;
    }
    if (tuning->thread_count == 0) {
        tuning->thread_count = most < ENOUGH_THREADS ? most : ENOUGH_THREADS;
    }
    if (cpu_count <= 2) {
        tuning->spin_ns = 0;
        tuning->wait_spin_ns = 0;
    }
}

uint64_t
cm_tuning_piece_nbytes(const cm_tuning *tuning, uint64_t nbytes)
{
    uint64_t share = nbytes / tuning->chunk_share;
    share = share < tuning->chunk_min_nbytes ? tuning->chunk_min_nbytes : share;
    share = share > tuning->chunk_nbytes ? tuning->chunk_nbytes : share;
    return nbytes < share ? nbytes : share;
}

uint32_t
cm_tuning_piece_threads(const cm_tuning *tuning, uint64_t piece_nbytes)
{
    uint64_t parts = piece_nbytes / tuning->part_min_nbytes
                     + (piece_nbytes % tuning->part_min_nbytes != 0);
    uint64_t threads = parts <= 1 ? 1 : parts + 1;
    return (uint32_t)(threads < tuning->thread_count ? threads : tuning->thread_count);
}

/* -- what follows from a machine ---------------------------------------------------- */

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
