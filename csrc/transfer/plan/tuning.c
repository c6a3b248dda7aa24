/* SPDX-License-Identifier: Apache-2.0 */
#include "transfer/plan/tuning.h"

const cm_tuning_row cm_tuning_rows[] = {
#define CM_TUNING_ROW(name, value, least, most)                                        \
    {#name, (uint64_t)(value), (uint64_t)(least), (uint64_t)(most)},
    CM_TUNING(CM_TUNING_ROW)
#undef CM_TUNING_ROW
};

void
cm_tuning_init(cm_tuning *tuning)
{
    for (int i = 0; i < CM_TUNING_COUNT; i++) {
        *cm_tuning_at(tuning, i) = cm_tuning_rows[i].value;
    }
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

/* Beside an H200, on 16 cores, more threads than this get in each other's way, except
 * where they make pages. */
enum { ENOUGH_THREADS = 8 };

void
cm_tuning_resolve(cm_tuning *tuning, unsigned cpu_count)
{
    uint64_t most = cpu_count < CM_THREAD_MAX ? cpu_count : CM_THREAD_MAX;
    if (tuning->links_thread_count == 0 && tuning->thread_count == 0) {
        tuning->links_thread_count =
            cpu_count < CM_LINKS_THREAD_MAX ? cpu_count : CM_LINKS_THREAD_MAX;
    }
    else if (tuning->links_thread_count == 0) {
        tuning->links_thread_count = tuning->thread_count;
    }
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

uint32_t
cm_tuning_piece_threads(const cm_tuning *tuning, uint64_t piece_nbytes)
{
    uint64_t parts = piece_nbytes / tuning->part_min_nbytes
                     + (piece_nbytes % tuning->part_min_nbytes != 0);
    uint64_t threads = parts <= 1 ? 1 : parts + 1;
    return (uint32_t)(threads < tuning->thread_count ? threads : tuning->thread_count);
}
