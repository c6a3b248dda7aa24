/* SPDX-License-Identifier: Apache-2.0 */
/* The slots of a copy that goes through page-locked blocks: one piece each, in turn
 * with the host and the device. Used by the thread that runs the job alone; the workers
 * see the tasks only. */
#ifndef CM_TRANSFER_ROUTES_STAGING_H
#define CM_TRANSFER_ROUTES_STAGING_H

#include "transfer/engine/job.h"

typedef struct cm_slot {
    char *host;       /* where its bytes are packed; NULL until needed */
    cm_block *pinned; /* owned; it is there, or where no page-locked memory is to be had
                       */
    void *plain;      /* in ordinary memory, owned */
    uint64_t event;   /* lent */
    cm_layout piece;
    cm_copy_task task;
} cm_slot;

/* Slots are used in turn, so that in the order of the pieces those of the host come
 * after those of the device (upload), or before (download). Indices count up for ever:
 * slot i is slots[i % slot_count]. */
typedef struct cm_staging {
    cm_task_group group;
    cm_layout repeats;
    cm_cut cut;
    uint32_t slot_count; /* in use: fewer than slot_room when the ring is full */
    uint64_t begun;      /* pieces that have a cm_slot */
    uint64_t passed;     /* of those, with the host's part (upload) or the device's
                            (download) over */
    uint64_t ended;      /* of those, with both over */
    uint64_t asked_ns;   /* when it was last asked whether to go on */
    cm_status refused;   /* why there is no page-locked memory */
    bool stopped;
    uint32_t slot_room;
    cm_slot slots[];
} cm_staging;

static inline cm_slot *
cm_slot_at(cm_staging *staging, uint64_t index)
{
    return &staging->slots[index % staging->slot_count];
}

/* Unless that was done before the job was parked. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_staging_begin(cm_job *job);
/* The slot for the next piece, cut. NULL: none is free now, or all is cut. Fails: as the
 * pinned pool and event_create. */
CM_NODISCARD cm_status cm_staging_begin_piece(cm_job *job, cm_slot **out);
/* Has the copy that is queued of this slot ended? Never blocks. */
CM_NODISCARD cm_status cm_staging_look(cm_job *job, const cm_slot *s, bool *out);
/* The oldest piece is over. */
void cm_staging_end_piece(cm_job *job);
/* Waits of the host and the workers are short, but there may be many: asks now and then
 * whether to go on. Fails: CM_ECANCELLED. */
CM_NODISCARD cm_status cm_staging_ask(cm_job *job);

/* staged.c: wait for what was fetched and unpack it. */
CM_NODISCARD cm_status cm_job_drain(cm_job *job);
/* No other thread touches the ends of the copy any more; what is not packed or unpacked
 * by then stays so. */
void cm_job_stop_staging(cm_job *job);
/* Give the slots back. `give_block` as for every block of the job. */
void cm_job_end_staging(cm_job *job,
                        void (*give_block)(const cm_job *job, cm_pool *pool,
                                           cm_block *block));
/* Wait, piece by piece, for what was sent. */
CM_NODISCARD cm_status cm_job_settle_upload(cm_job *job);
/* A piece is over, `nbytes` of the target. */
void cm_job_count_moved(cm_job *job, uint64_t nbytes);
/* blocks.c: a block of the device pool of `device`, for `stream`. Fails: CM_EINVALID
 * without a pool. */
CM_NODISCARD cm_status cm_job_alloc_block(cm_job *job, int device, uint64_t nbytes,
                                          cm_stream *stream, cm_block **out);
/* Where the pieces lie on the device: job->device_block, taken at first need. */
CM_NODISCARD cm_status cm_job_take_device_block(cm_job *job, cm_address *out);
/* The same for two pieces (job->has_pair), if there is plenty of room; nothing is
 * waited for. */
CM_NODISCARD cm_status cm_job_try_pair(cm_job *job);
/* From the one of them to the other. */
uint64_t cm_job_pair_pitch(const cm_job *job);

#endif
