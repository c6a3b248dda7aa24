/* SPDX-License-Identifier: Apache-2.0 */
/* The ring of slots that a copy in pieces goes through: one piece each, in turn with
 * the host and the device. Used by the thread that runs the job alone; the workers see
 * the tasks only. Locks: none. */
#pragma once

#include "transfer/engine/job.h"

typedef struct cm_slot {
    char *host;          /* where its bytes are packed; NULL: on the devices only */
    cm_block *pinned;    /* owned: what `host` lies in, as a rule */
    void *plain;         /* owned: the same where no page-locked memory is to be had */
    cm_block *blocks[2]; /* PEER…: packed on the source's and on the target's device */
    uint64_t event;      /* lent; recorded after the device's last use */
    int device;          /* the event's */
    bool skips_device;   /* the device has no half of the piece */
    cm_layout piece;
    cm_copy_task task;
} cm_slot;

/* Slots are used in turn, so that in the order of the pieces what the host does comes
 * after what the device does, or before. Indices count up for ever: slot i is
 * slots[i % slot_count]. */
typedef struct cm_ring {
    cm_task_group group;
    cm_layout repeats;
    cm_cut cut; /* of the plan's layout; a way may cut something else */
    cm_status (*cut_next)(cm_job *job, cm_slot *s);
    bool all_cut;
    uint32_t slot_count; /* in use: fewer than planned where no more is to be had */
    uint64_t begun;      /* pieces that have a slot */
    uint64_t passed;     /* of those, with their first half over */
    uint64_t ended;      /* of those, with both over */
    uint64_t asked_ns;   /* when it was last asked whether to go on */
    cm_status refused;   /* why there is no page-locked memory */
    bool needs_host;     /* the next piece goes by way of the host */
    cm_slot slots[];
} cm_ring;

/* What is done with each piece: one half by the host, as the slot's task, the other by
 * the device, up to the slot's event. Without `pass` there is no host's half, and the
 * order of the streams frees the slot at once. */
typedef struct cm_ring_way {
    bool host_first;
    bool host_is_slow; /* its half may take long: who runs the job takes parts as they
                          come, and sleeps where there are none */
    cm_status (*begin)(cm_job *job, cm_slot *s); /* the first half */
    cm_status (*pass)(cm_job *job, cm_slot *s);  /* that is over: begin the second */
} cm_ring_way;

static inline cm_slot *
cm_slot_at(cm_ring *ring, uint64_t index)
{
    return &ring->slots[index % ring->slot_count];
}

/* Make job->ring; a job that waited has one already. Fails: CM_EFAULT, CM_ENOMEM. */
CM_NODISCARD cm_status cm_ring_create(cm_job *job);
/* Give the first slot what it needs, which each ring that goes by way of the host has
 * to
 * have. Fails: as cm_engine_alloc; CM_EINVALID where there is no pool. Then the copy
 * has to go another way, but for those that do with ordinary memory. */
CM_NODISCARD cm_status cm_ring_equip(cm_job *job);
/* One where there is none yet, for what `cut_next` cuts: the next piece, and whether
 * that is the last. */
CM_NODISCARD cm_status cm_ring_create_for(cm_job *job,
                                          cm_status (*cut_next)(cm_job *job,
                                                                cm_slot *s));
/* All pieces, up to where the host has no more to do for those that are sent, or all
 * that comes down is queued; `drain`: to their ends. Fails: as its way, the pinned pool
 * and event_create; CM_EFAULT, CM_ECANCELLED, CM_ETIMEOUT (it waits). */
CM_NODISCARD cm_status cm_ring_run(cm_job *job, const cm_ring_way *way, bool drain);
/* From the piece's place in the source to the slot, and from there to the target. */
void cm_slot_pack(const cm_slot *s, cm_layout *out);
void cm_slot_unpack(const cm_job *job, const cm_slot *s, cm_layout *out);
/* The device of its piece is another: so is its event. */
CM_NODISCARD cm_status cm_slot_set_device(const cm_job *job, cm_slot *s, int device);
/* Has what the device does for this slot ended? Never blocks. */
CM_NODISCARD cm_status cm_slot_look(const cm_job *job, const cm_slot *s, bool *out);
/* No other thread touches the ends of the copy any more; what is not packed or unpacked
 * by then stays so. */
void cm_ring_stop(cm_job *job);
void cm_ring_destroy(cm_job *job);
