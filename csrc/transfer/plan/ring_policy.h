/* SPDX-License-Identifier: Apache-2.0 */
/* Decides how a copy goes through the ring of page-locked slots: how large its pieces
 * are and how many of them are in flight at once. routes/ring.c carries this out, and
 * gets by with fewer slots where less memory is free. Short copies are cut by
 * routes/short_copy.c and chunks of files by file/cut.c. Everything here is pure.
 *
 * Example: an upload of 1 GiB with the defaults and 16 processors. A piece is an eighth
 * of the copy (chunk_share), but that would be 128 MiB, so pieces have the most that
 * the tuning allows (chunk_nbytes), which is 8 MiB. They begin with 512 KiB, so that
 * the link has work soon, and grow. Eight threads pack, and the slots of an upload of
 * this length have 32 MiB together, so that they stay in the caches. So there are four
 * slots. */
#pragma once

#include "transfer/plan/plan.h"

/* Set piece_nbytes, piece_count, slot_count and is_cached of a plan whose route and
 * layout are known. This is called again after either of the two has changed. */
void cm_ring_policy_init(cm_plan *plan, const cm_tuning *tuning);
/* Return how many threads share a piece of such a plan on the host, including the one
 * that runs the copy. Returns 0 if the host has no part in it. Only explain.c asks. A
 * copy leaves this to the workers, who count their threads when they cut the piece
 * up. */
uint32_t cm_ring_policy_thread_count(const cm_plan *plan, const cm_tuning *tuning);
/* Do the same as cm_ring_policy_init() for the plan of a file transfer. Pages of the
 * files have `page_nbytes` bytes. `writer_count` files are written through the page
 * cache at the same time; it is 0 if files are read, or written past that cache. This
 * also shortens the chunks and parts of `tuning` where the transfer is short, and sets
 * the chunks and slots of writers. */
void cm_ring_policy_init_file(cm_plan *plan, cm_tuning *tuning, uint64_t page_nbytes,
                              uint32_t writer_count);

/* Set `out` to the way in which a plan cuts `core`, which is its layout without
 * repeats. */
void cm_ring_policy_cut(const cm_plan *plan, const cm_tuning *tuning,
                        const cm_layout *core, cm_cut *out);
