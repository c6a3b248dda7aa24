/* SPDX-License-Identifier: Apache-2.0 */
/* Runs of bytes are gathered into tables, and one launch copies all runs of a table. */
#include "transfer/device/kernel.h"

enum {
    THREADS_PER_BLOCK = 1 << CM_TABLE_MAX_SHIFT,
    PART_NBYTES = 16 << 10, /* longer runs are cut into parts, one for each team */
    UNIT_NBYTES = 16,
};

void
cm_table_init(cm_table *table, cm_kernels *kernels, int device, uint64_t stream)
{
    table->kernels = kernels;
    table->device = device;
    table->stream = stream;
    table->nbytes = 0;
    table->job.count = 0;
    table->job.spare[0] = table->job.spare[1] = 0;
}

/* Choose how many threads work on one part of the table, so that each has one unit of
 * an average part. Returns that number as a power of two. */
static uint32_t
choose_team(const cm_table *table)
{
    uint64_t units = table->nbytes / table->job.count / UNIT_NBYTES;
    uint32_t shift = CM_TABLE_MIN_SHIFT;
    while (shift < CM_TABLE_MAX_SHIFT && UINT64_C(1) << shift < units) {
        shift++;
    }
    return shift;
}

cm_status
cm_table_flush(cm_table *table)
{
    uint64_t function;
    cm_table_job *job = &table->job;
    if (job->count == 0) {
        return cm_ok();
    }
    CM_TRY(cm_kernels_find(table->kernels, CM_KERNEL_TABLE, table->device, &function));
    job->team_shift = choose_team(table);
    uint32_t threads = job->count << job->team_shift;
    uint32_t blocks = (threads + THREADS_PER_BLOCK - 1) / THREADS_PER_BLOCK;
    cm_status status =
        cm_rt_kernel_launch(table->kernels->rt, function, blocks, THREADS_PER_BLOCK,
                            job, sizeof(*job), table->stream);
    job->count = 0;
    table->nbytes = 0;
    return status;
}

cm_status
cm_table_add(cm_table *table, cm_address dst, cm_address src, uint64_t nbytes)
{
    cm_table_job *job = &table->job;
    while (nbytes > 0) {
        uint32_t part = nbytes < PART_NBYTES ? (uint32_t)nbytes : PART_NBYTES;
        job->dst[job->count] = dst;
        job->src[job->count] = src;
        job->nbytes[job->count] = part;
        table->nbytes += part;
        dst += part;
        src += part;
        nbytes -= part;
        if (++job->count == CM_TABLE_MAX_COUNT) {
            CM_TRY(cm_table_flush(table));
        }
    }
    return cm_ok();
}
