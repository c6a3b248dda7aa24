/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel "cm_table_copy" of the emulated device: the same steps as its PTX text. */
#include <stdlib.h>
#include <string.h>

#include "runtime/emulated_private.h"
#include "runtime/table_job.h"

typedef struct launch {
    cm_emulated_job base; /* first */
    int device;
    uint64_t stamp;
    cm_table_job job;
} launch;

/* What a GPU would read as nonsense, or would copy in part only, is refused here, where
 * the test sees it. */
static bool
job_is_sane(const cm_table_job *job, uint64_t thread_count)
{
    if (job->count > CM_TABLE_MAX_COUNT || job->team_shift < CM_TABLE_MIN_SHIFT
        || job->team_shift > CM_TABLE_MAX_SHIFT || job->spare[0] != 0
        || job->spare[1] != 0
        || (uint64_t)job->count << job->team_shift > thread_count) {
        return false;
    }
    for (uint32_t i = 0; i < job->count; i++) {
        if (job->nbytes[i] > CM_TABLE_MAX_NBYTES) {
            return false;
        }
    }
    return true;
}

/* What the team's threads do together; `to` and `from` are where the bytes are, of
 * which only the addresses of the device say how they are aligned. */
static void
copy_piece(const cm_table_job *job, uint32_t i, unsigned char *to,
           const unsigned char *from)
{
    uint32_t bits = (uint32_t)(job->dst[i] ^ job->src[i]) | 16;
    uint32_t unit = bits & (0 - bits);
    uint32_t head = (0 - (uint32_t)job->dst[i]) & (unit - 1);
    uint32_t left = job->nbytes[i];
    uint32_t team = 1u << job->team_shift;
    head = head < left ? head : left;
    left -= head;
    uint32_t tail = left & (unit - 1);
    uint32_t body = left - tail;
    for (uint32_t lane = 0; lane < team; lane++) {
        if (lane < head) {
            to[lane] = from[lane];
        }
        if (lane < tail) {
            to[head + body + lane] = from[head + body + lane];
        }
        for (uint32_t k = lane * unit; k < body; k += team * unit) {
            memcpy(to + head + k, from + head + k, unit);
        }
    }
}

static int32_t
run_piece(cm_emulated *emulated, const launch *what, uint32_t i)
{
    const cm_table_job *job = &what->job;
    uint64_t nbytes = job->nbytes[i];
    cm_emulated_place to, from;
    cm_emulated_pin dst = {.range = NULL};
    cm_emulated_pin src = {.range = NULL};
    if (nbytes == 0) {
        return 0;
    }
    int32_t code = cm_emulated_memory_pin(emulated->memory, job->dst[i], nbytes,
                                          what->device, what->stamp, &to, &dst);
    if (code == 0) {
        code = cm_emulated_memory_pin(emulated->memory, job->src[i], nbytes,
                                      what->device, what->stamp, &from, &src);
    }
    if (code == 0 && to.kind == CM_EMULATED_MANAGED) { /* touching it brings it here */
        (void)cm_emulated_memory_migrate(emulated->memory, job->dst[i], nbytes,
                                         what->device);
    }
    if (code == 0 && from.kind == CM_EMULATED_MANAGED) {
        (void)cm_emulated_memory_migrate(emulated->memory, job->src[i], nbytes,
                                         what->device);
    }
    if (code == 0) {
        copy_piece(job, i, to.bytes, from.bytes);
    }
    int32_t dst_code = cm_emulated_memory_unpin(emulated->memory, &dst);
    int32_t src_code = cm_emulated_memory_unpin(emulated->memory, &src);
    code = code != 0 ? code : dst_code;
    return code != 0 ? code : src_code;
}

static int32_t
launch_run(void *context, cm_emulated_job *base)
{
    const launch *what = (const launch *)base;
    int32_t code = 0;
    for (uint32_t i = 0; code == 0 && i < what->job.count; i++) {
        code = run_piece(context, what, i);
    }
    return code;
}

static void
launch_drop(cm_emulated_job *base)
{
    free(base);
}

int32_t
cm_emulated_table_launch(cm_emulated *emulated, cm_emulated_thread *self,
                         uint64_t thread_count, const void *params,
                         uint64_t params_nbytes, uint64_t stream)
{
    if (params == NULL || params_nbytes != sizeof(cm_table_job)) {
        return CM_CUDA_INVALID_VALUE;
    }
    launch *what = malloc(sizeof(*what));
    if (what == NULL) {
        return CM_CUDA_OUT_OF_MEMORY;
    }
    what->base = (cm_emulated_job){launch_run, launch_drop};
    what->device = self->device;
    what->stamp = cm_emulated_memory_stamp(emulated->memory);
    memcpy(&what->job, params, sizeof(what->job));
    if (!job_is_sane(&what->job, thread_count)) {
        free(what);
        return CM_CUDA_INVALID_VALUE;
    }
    return cm_emulated_streams_submit(emulated->streams, self, stream, &what->base,
                                      false);
}
