/* SPDX-License-Identifier: Apache-2.0 */
/* How a copy goes through the ring: the size of its pieces and how many of them are in
 * flight at once; routes/ring.c carries it out, and does with less where less is free.
 * Short copies cut by themselves, as do chunks of files (file/cut.c). Pure. */
#pragma once

#include "transfer/plan/plan.h"

/* Set the pieces of a plan whose route and layout are known, again after a change of
 * either: piece_nbytes, piece_count, slot_count and is_cached. */
void cm_ring_policy_init(cm_plan *plan, const cm_tuning *tuning);
/* The threads that share a piece of such a plan on the host, the one that runs the copy
 * among them; 0: the host has no part in it. A copy itself has no use for this number,
 * since the workers find out how many there are as they cut the piece up. */
uint32_t cm_ring_policy_thread_count(const cm_plan *plan, const cm_tuning *tuning);
/* The same of a file's, whose pages have `page_nbytes`; chunks and parts in the tuning
 * get no longer than suits it. */
void cm_ring_policy_init_file(cm_plan *plan, cm_tuning *tuning, uint64_t page_nbytes);

/* How a plan that goes in pieces cuts `core`, its layout without repeats. */
void cm_ring_policy_cut(const cm_plan *plan, const cm_tuning *tuning,
                        const cm_layout *core, cm_cut *out);
