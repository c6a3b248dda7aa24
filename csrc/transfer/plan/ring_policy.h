/* SPDX-License-Identifier: Apache-2.0 */
/* How a copy goes through the ring: the size of its pieces, how many of them are in
 * flight at once, the page-locked memory that it may take, and what is done where less
 * is free; routes/ring.c carries it out. Short copies cut by themselves, as do chunks
 * of files (file/cut.c). Pure. */
#ifndef CM_TRANSFER_PLAN_RING_POLICY_H
#define CM_TRANSFER_PLAN_RING_POLICY_H

#include "transfer/plan/plan.h"

/* Set the pieces of a plan whose route and layout are known, again after a change of
 * either: piece_nbytes, piece_count, slot_count, is_cached and thread_count. */
void cm_ring_policy_init(cm_plan *plan, const cm_tuning *tuning);
/* The same of a file's, whose pages have `page_nbytes`; chunks and parts in the tuning
 * get no longer than suits it. */
void cm_ring_policy_init_file(cm_plan *plan, cm_tuning *tuning, uint64_t page_nbytes);

/* How a plan that goes in pieces cuts `core`, its layout without repeats. */
void cm_ring_policy_cut(const cm_plan *plan, const cm_tuning *tuning,
                        const cm_layout *core, cm_cut *out);

/* Most page-locked bytes of all copies together, once the slot in question is taken.
 * `is_first`: it is the copy's first one. */
uint64_t cm_ring_policy_budget(const cm_tuning *tuning, bool is_first);

/* What a copy does whose next slot gets no page-locked memory. */
typedef enum cm_ring_shortage {
    CM_SHORTAGE_FAIL,
    CM_SHORTAGE_FEWER_SLOTS, /* goes on with those it has */
    CM_SHORTAGE_UNLOCKED,    /* has one slot of ordinary memory */
    CM_SHORTAGE_BY_RUNTIME,  /* leaves it to the runtime to find a way */
} cm_ring_shortage;

/* `is_short`: there is no memory, or no pool; else the call itself failed. */
cm_ring_shortage cm_ring_policy_shortage(const cm_plan *plan, bool is_first,
                                         bool is_short);

#endif
