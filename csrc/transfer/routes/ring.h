/* SPDX-License-Identifier: Apache-2.0 */
/* A ring has the slots through which the pieces of a copy go.
 *
 * The idea
 * --------
 * A copy through page-locked memory has two halves: the host moves bytes between
 * ordinary memory and the page-locked block, and the device moves them between that
 * block and its own memory. One half after the other would take the sum of both times.
 * The ring cuts the copy into pieces, and while the device works on one piece the host
 * works on another, so that the copy takes about as long as the slower half. In a copy
 * between two devices the slots may lie on the devices themselves, which then do all
 * the work, while the host moves no bytes.
 *
 * Each piece occupies one slot from the start of its first half to the end of its
 * second. Three counters, which only rise, tell how far the pieces have got:
 *
 *     ended <= passed <= begun
 *
 *   begun    pieces that were given a slot and whose first half was started
 *   passed   pieces whose first half is over and whose second half was started
 *   ended    pieces whose two halves are over, so that their slots are free again
 *
 * Piece i lies in slots[i % slot_count], and a piece can begin while
 * begun - ended < slot_count.
 *
 * Example, where the host's half comes first, with two slots and three pieces:
 *
 *   the host packs piece 0 into slot 0, and piece 1 into slot 1     begun 2
 *   piece 0 is packed: the device is given it                       passed 1
 *   the device is through with piece 0                              ended 1
 *   the host packs piece 2 into slot 0                              begun 3
 *
 * Edges
 * -----
 *   - The limit on the memory of all rings does not hold for the first slot of a copy,
 *     so that every copy advances. If a later slot gets no memory, the ring goes on
 *     with fewer slots.
 *   - All jobs that follow one another in a lane (engine/scheduler.c) have together
 *     only as many slots as stay in the caches. So a new job has to take over the slots
 *     of the job before: once that job has cut its last piece, it gives back each slot
 *     as soon as the piece in it has ended.
 *   - If not even the first slot gets page-locked memory, a copy that does not cross
 *     devices stages through one slot of ordinary memory.
 *   - A cm_ring_way (below) has a function `begin` for the first half of a piece and a
 *     function `pass` for the second. If it has no `pass`, the device makes both
 *     halves, and `begin` queues them on streams. The slot then counts as free at once:
 *     the next piece in it is queued on the same streams, so the device works on that
 *     piece only after the present one.
 *
 * Only the thread that runs the job (engine/job.h) uses the ring. The worker threads
 * (host/workers.h) see only the tasks, which are the host's halves of the pieces. There
 * are no locks. */
#pragma once

#include "transfer/engine/job.h"

typedef struct cm_slot {
    char *host;       /* where the piece is packed; NULL if it is on devices only */
    cm_block *pinned; /* owned; the page-locked block in which `host` lies */
    void *plain;      /* owned; ordinary memory, which the slot has instead of `pinned`
                         if there is no page-locked memory */
    cm_block *blocks[2]; /* owned; used by copies between two devices: a block for
                            packed bytes on the source's device, and one on the target's
                            device */
    uint64_t event;      /* lent by the engine; recorded behind the device's last work
                            on the slot */
    int device;          /* the device of the event */
    bool skips_device;   /* the device has nothing to do for the piece */
    cm_layout piece;
    cm_copy_task task; /* the host's half of the piece */
} cm_slot;

/* The slots are used in turn, so pieces end in the order in which they were cut. The
 * counters are never reset: piece i lies in slots[i % slot_count]. */
typedef struct cm_ring {
    cm_task_group group;
    cm_layout repeats; /* the axes along which the source repeats: no piece has them,
                          and cm_slot_unpack() puts them back */
    cm_cut cut; /* how far the plan's layout has been cut; unused if `cut_next` cuts
                   something else */
    cm_status (*cut_next)(cm_job *job, cm_slot *s);
    bool all_cut;        /* the last piece has been cut */
    uint32_t slot_count; /* slots in use; fewer than planned if memory is short */
    uint64_t begun;      /* these three are explained above */
    uint64_t passed;
    uint64_t ended;
    uint32_t behind_count; /* for how many successive pieces the device has had to
                              wait */
    uint64_t asked_ns;     /* when the caller was last asked whether to go on */
    cm_status refused;     /* why there is no page-locked memory for the first slot */
    bool lacks_slot; /* the next piece waits for a slot of another job of the lane */
    bool needs_host; /* the next piece goes by way of the host, so its slot needs host
                        memory */
    cm_slot slots[];
} cm_ring;

/* Says how the two halves of each piece are made. The host's half is the slot's task,
 * and the device's half is over when the slot's event has passed. The comment at the
 * top explains what happens if there is no `pass`. */
typedef struct cm_ring_way {
    bool host_first; /* the host's half comes first */
    /* The host's half may take long. If nothing else is to be done, the thread that
     * runs the job then helps with parts of the tasks, and sleeps if there are none. */
    bool host_is_slow;
    /* As long as the device works on a piece, the thread that runs the job waits for
     * the device and does not help with tasks. If it helped, it would be busy for long,
     * and meanwhile nobody would post tasks for the other threads. */
    bool device_comes_first;
    cm_status (*begin)(cm_job *job, cm_slot *s); /* starts the first half */
    cm_status (*pass)(cm_job *job, cm_slot *s);  /* starts the second half, once the
                                                    first is over */
} cm_ring_way;

static inline cm_slot *
cm_slot_at(cm_ring *ring, uint64_t index)
{
    return &ring->slots[index % ring->slot_count];
}

/* Make job->ring. A job that was suspended and now goes on may have a ring already, and
 * keeps it.
 * Fails: CM_EFAULT, CM_ENOMEM. */
CM_NODISCARD cm_status cm_ring_create(cm_job *job);
/* Give the first slot its event and its memory, without which a ring that goes by way
 * of the host cannot run. If the copy does not cross devices, the memory may be
 * ordinary memory.
 * Fails: as cm_engine_alloc; CM_EINVALID, if there is no pool. The copy then has to go
 * another way. */
CM_NODISCARD cm_status cm_ring_equip(cm_job *job);
/* Make job->ring, which must not exist yet, for pieces that the function `cut_next`
 * cuts. That function stores the next piece in the slot, and sets `all_cut` if the
 * piece is the last one. */
CM_NODISCARD cm_status cm_ring_create_for(cm_job *job,
                                          cm_status (*cut_next)(cm_job *job,
                                                                cm_slot *s));
/* Move all pieces. If the host's half comes first, this returns when the host has
 * nothing more to do. If the device's half comes first, it returns when all work of the
 * device is queued. If `drain` is set, it returns only when every piece has ended.
 * Fails: as the functions of `way`, the pinned pool and event_create; CM_EFAULT,
 * CM_ECANCELLED; CM_ETIMEOUT, if the job is suspended. */
CM_NODISCARD cm_status cm_ring_run(cm_job *job, const cm_ring_way *way, bool drain);
/* Compute the layout by which the piece is copied from the source into the slot. */
void cm_slot_pack(const cm_slot *s, cm_layout *out);
/* Compute the layout by which the piece is copied from the slot to the target. */
void cm_slot_unpack(const cm_job *job, const cm_slot *s, cm_layout *out);
/* Exchange the slot's event for an event of `device`, because the work on the slot's
 * piece is queued on that device. */
CM_NODISCARD cm_status cm_slot_set_device(const cm_job *job, cm_slot *s, int device);
/* Ask whether the device's work on this slot has ended. Never blocks. */
CM_NODISCARD cm_status cm_slot_query(const cm_job *job, const cm_slot *s, bool *out);
/* Close the ring's tasks. Once this returns no worker touches the ends of the copy, and
 * nothing more is packed or unpacked. */
void cm_ring_stop(cm_job *job);
void cm_ring_destroy(cm_job *job);
