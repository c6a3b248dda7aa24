/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses how the kernel that copies rows is launched: how many threads work on one row
 * (a team), how many bytes each thread copies at a time (a unit), and how many blocks
 * of threads there are. runtime/kernel_jobs.h tells how the threads share the work, and
 * what a part, a group and a slot are.
 *
 * Each thread of a warp loads CM_ROWS_SLOTS units before it stores any. With units of
 * 16 bytes, a warp loads 2 KiB at once. For a copy over the bus the number of blocks is
 * chosen so that a certain number of bytes is always on the bus. If the copy reads host
 * memory, this number is READ_NBYTES. That is twice what the bus delivers in the time
 * of one read, because a warp first waits for the numbers of its rows and then for the
 * rows. If the numbers come over the bus too, it is FAR_NBYTES.
 *
 * A copy that writes host memory waits for no answers, and needs only WRITE_NBYTES on
 * the bus. If a copy makes more writes than the bus takes, they fill the queues between
 * all multiprocessors and memory, and other work on the device waits in these queues.
 * While 512 KiB of writes are on their way, a matrix product on an H200 takes more than
 * twice as long as without the copy.
 *
 * A copy also takes multiprocessors from the other work on the device. So copies that
 * read over the bus have larger blocks, and fewer of them. */
#include "transfer/device/rows_kernel.h"

#include <string.h>

#include "base/checked_math.h"

enum {
    THREADS_PER_BLOCK = 256,
    /* This is for copies that read over the bus, and for units of less than
     * MIN_WIDE_UNIT bytes, with which each thread has fewer bytes on the bus. */
    LARGE_THREADS_PER_BLOCK = 512,
    MIN_WIDE_UNIT = 8,
    READ_NBYTES = 192 << 10,
    WRITE_NBYTES = 96 << 10,
    FAR_NBYTES = 512 << 10,
    /* A copy over the bus has no more blocks than these, even if its units are so
     * narrow that more blocks would be needed to keep the bus busy. */
    MAX_BUS_BLOCKS = 32,
    /* This is for a copy within a device, whose speed the device's memory limits. */
    BLOCKS_PER_SM = 2,
    MAX_UNIT = 16,           /* the widest load and store */
    MIN_LONG_TEAM_SHIFT = 3, /* 8 units of 16 bytes are one line of a device's caches */
    /* In rows of more units than these, few threads are idle even if the last part of a
     * row is not full. */
    MAX_TRIED_UNITS = 1024,
    /* With no more blocks than these, the number of a warp's first slot fits in 32
     * bits. */
    MAX_BLOCKS = 1 << 14,
};

/* A row has at most this many parts, so that the kernel's counter of parts fits in 32
 * bits even when the kernel has just added the parts of a step to it. */
#define MAX_PARTS (UINT64_C(1) << 31)

/* Find the widest unit, of at most MAX_UNIT bytes, that divides the addresses, the
 * strides and the length of rows. It is the lowest bit that is set in any of these. */
static uint32_t
unit_of(const cm_rows_layer *layer)
{
    uint64_t bits = MAX_UNIT | layer->row_nbytes;
    for (int side = CM_DST; side <= CM_SRC; side++) {
        bits |= layer->address[side] | (uint64_t)layer->stride[side];
    }
    return (uint32_t)(bits & (~bits + 1));
}

/* Return how many parts of 1 << team_shift units hold `units`. It is at least one. */
static uint64_t
parts_of(uint64_t units, uint32_t team_shift)
{
    uint64_t parts = (units >> team_shift)
                     + ((units & ((UINT64_C(1) << team_shift) - 1)) != 0 ? 1 : 0);
    return parts > 0 ? parts : 1;
}

/* Choose the size of the team that leaves the fewest threads without a unit, or the
 * largest such size if there are several. Return it as the team_shift of the job. For a
 * row of 33 units, 5 parts of 8 threads are better than 2 parts of 32 threads. For rows
 * of 16 units a warp has two teams, which work on two rows at once. A team has fewer
 * than 8 threads only if it copies a row in one part. */
static uint32_t
choose_team(uint64_t units)
{
    uint32_t shift = CM_ROWS_WARP_SHIFT;
    if (units > MAX_TRIED_UNITS) {
        return shift;
    }
    for (uint32_t tried = CM_ROWS_WARP_SHIFT; tried-- > 0;) {
        bool is_too_small = tried < MIN_LONG_TEAM_SHIFT && units > UINT64_C(1) << tried;
        if (!is_too_small
            && parts_of(units, tried) << tried < parts_of(units, shift) << shift) {
            shift = tried;
        }
    }
    return shift;
}

cm_status
cm_rows_job_init(cm_rows_job *job, const cm_rows_move *move, const cm_rows_layer *layer)
{
    const cm_row_numbers *dst = &move->numbers[CM_DST];
    const cm_row_numbers *src = &move->numbers[CM_SRC];
    uint32_t unit = unit_of(layer);
    uint64_t units = layer->row_nbytes / unit;
    uint32_t shift = choose_team(units);
    uint64_t parts = parts_of(units, shift);
    if (parts > MAX_PARTS) {
        return cm_fail(CM_EOVERFLOW, layer->row_nbytes);
    }
    if (move->count > INT64_MAX || layer->row_count[CM_DST] > INT64_MAX
        || layer->row_count[CM_SRC] > INT64_MAX) {
        return cm_fail(CM_EOVERFLOW, move->count);
    }
    *job = (cm_rows_job){
        .dst_rows = dst->address,
        .src_rows = src->address,
        .dst_rows_stride = dst->stride,
        .src_rows_stride = src->stride,
        .count = move->count,
        .dst_count = layer->row_count[CM_DST],
        .src_count = layer->row_count[CM_SRC],
        .dst_stride = layer->stride[CM_DST],
        .src_stride = layer->stride[CM_SRC],
        .row_units = units,
        .flag = move->flag,
        .group_count = parts_of(move->count, CM_ROWS_WARP_SHIFT - shift),
        .part_count = (uint32_t)parts,
        .unit = unit,
        .team_shift = shift,
        .src_is_packed = move->is_packed,
    };
    if (dst->address != 0) {
        job->dst_row_nbytes = dst->nbytes;
        job->dst_row_is_signed = dst->is_signed;
    }
    if (src->address != 0) {
        job->src_row_nbytes = src->nbytes;
        job->src_row_is_signed = src->is_signed;
    }
    return cm_ok();
}

/* True if one launch can copy both layers. */
static bool
are_alike(const cm_rows_layer *a, const cm_rows_layer *b)
{
    return a->row_nbytes == b->row_nbytes && unit_of(a) == unit_of(b)
           && memcmp(a->stride, b->stride, sizeof(a->stride)) == 0
           && memcmp(a->row_count, b->row_count, sizeof(a->row_count)) == 0;
}

static uint32_t
threads_per_block(const cm_rows_job *job, const cm_rows_move *move)
{
    if (job->unit < MIN_WIDE_UNIT || (move->is_over_bus && !move->is_to_host)) {
        return LARGE_THREADS_PER_BLOCK;
    }
    return THREADS_PER_BLOCK;
}

/* Return how many bytes of a copy should be on the bus at any time. */
static uint32_t
bytes_under_way(const cm_rows_move *move)
{
    if (move->has_far_numbers) {
        return FAR_NBYTES;
    }
    return move->is_to_host ? WRITE_NBYTES : READ_NBYTES;
}

uint32_t
cm_rows_count_bus_blocks(const cm_rows_job *job, const cm_rows_move *move)
{
    uint32_t nbytes = threads_per_block(job, move) * CM_ROWS_SLOTS * job->unit;
    uint32_t blocks = bytes_under_way(move) / nbytes;
    return blocks < MAX_BUS_BLOCKS ? blocks : MAX_BUS_BLOCKS;
}

static cm_status
find_block_limit(cm_runtime *rt, int device, const cm_rows_move *move,
                 const cm_rows_job *job, uint32_t *limit)
{
    int sms;
    if (move->max_sms != 0) {
        *limit = move->max_sms < MAX_BLOCKS ? move->max_sms : MAX_BLOCKS;
        return cm_ok();
    }
    if (move->is_over_bus) {
        *limit = cm_rows_count_bus_blocks(job, move);
        return cm_ok();
    }
    CM_TRY(cm_rt_device_attribute(rt, CM_ATTRIBUTE_multiprocessor_count, device, &sms));
    *limit = sms > 0 ? (uint32_t)sms * BLOCKS_PER_SM : MAX_BUS_BLOCKS;
    return cm_ok();
}

/* Choose as many blocks as have something to do, up to the limit, and return their
 * number. Also set the step of the job, by which each warp moves on to its next slots.
 * It is the number of slots that all blocks together copy at once. */
static uint32_t
choose_blocks(cm_rows_job *job, uint32_t threads, uint32_t limit)
{
    uint64_t slots;
    if (!cm_mul_u64(job->group_count, job->part_count, &slots)
        || !cm_mul_u64(slots, job->layer_count, &slots)) {
        slots = UINT64_MAX;
    }
    uint64_t block_slots = (threads >> CM_ROWS_WARP_SHIFT) * CM_ROWS_SLOTS;
    uint64_t blocks = slots / block_slots + (slots % block_slots != 0 ? 1 : 0);
    blocks = blocks < limit ? blocks : limit;
    uint64_t step = blocks * block_slots;
    job->step_parts = (uint32_t)(step % job->part_count);
    step /= job->part_count;
    job->step_groups = step % job->group_count;
    job->step_layers = (uint32_t)(step / job->group_count);
    return (uint32_t)blocks;
}

/* Describe one launch. It copies the first layer and the layers that follow it, up to
 * the first that is not like it, or up to CM_ROWS_MAX_LAYERS of them. */
static cm_status
collect_layers(cm_rows_job *job, const cm_rows_move *move, const cm_rows_layer *layers,
               uint64_t layer_count)
{
    CM_TRY(cm_rows_job_init(job, move, layers));
    while (job->layer_count < layer_count && job->layer_count < CM_ROWS_MAX_LAYERS
           && are_alike(layers, &layers[job->layer_count])) {
        const cm_rows_layer *layer = &layers[job->layer_count];
        job->dst[job->layer_count] = layer->address[CM_DST];
        job->src[job->layer_count] = layer->address[CM_SRC];
        job->layer_count++;
    }
    return cm_ok();
}

cm_status
cm_rows_launch(cm_kernels *kernels, int device, const cm_rows_move *move,
               const cm_rows_layer *layers, uint64_t layer_count, uint64_t stream)
{
    uint64_t function;
    uint32_t limit;
    cm_rows_job job;
    if (move->count == 0 || layer_count == 0) {
        return cm_ok();
    }
    CM_TRY(cm_kernels_find(kernels, CM_KERNEL_ROWS, device, &function));
    for (uint64_t done = 0; done < layer_count; done += job.layer_count) {
        CM_TRY(collect_layers(&job, move, &layers[done], layer_count - done));
        uint32_t threads = threads_per_block(&job, move);
        CM_TRY(find_block_limit(kernels->rt, device, move, &job, &limit));
        uint32_t blocks = choose_blocks(&job, threads, limit);
        CM_TRY(cm_rt_kernel_launch(kernels->rt, function, blocks, threads, &job,
                                   sizeof(job), stream));
    }
    return cm_ok();
}
