/* SPDX-License-Identifier: Apache-2.0 */
/* The table of address ranges: which range an address belongs to, and the end of a
 * range. One that devices see elsewhere than the host does has two spans in it. Freed
 * memory becomes untouchable and its addresses stay taken for a while, so that late
 * work is caught. */
#ifndef CM_RUNTIME_EMULATED_RANGES_H
#define CM_RUNTIME_EMULATED_RANGES_H

#include "runtime/emulated/private.h"

/* Note a range that was made; registrations that lie where its memory was just mapped
 * are forgotten: their owner unmapped theirs without a word. False: out of memory. */
bool cm_emulated_range_insert(cm_emulated *emulated, cm_emulated_range *range);
/* Free a range that is not in the table. */
void cm_emulated_range_free(cm_emulated_range *range);
/* Take the range out, wait for executing work, kill its bytes and free it. */
void cm_emulated_range_retire(cm_emulated *emulated, cm_emulated_range *range);
/* Free all ranges, in use or not, and the addresses kept. */
void cm_emulated_ranges_fini(cm_emulated_memory *memory);

/* The span that holds the address, or NULL. */
const cm_emulated_span *cm_emulated_span_find(const cm_emulated_memory *memory,
                                              uint64_t address);
/* The range of that kind in which [address, address + nbytes) lies, or NULL. */
cm_emulated_range *cm_emulated_range_find(const cm_emulated_memory *memory,
                                          cm_emulated_kind kind, uint64_t address,
                                          uint64_t nbytes);
/* True when some range, or with `or_freed` one that was freed, has a byte in
 * [address, address + nbytes). */
bool cm_emulated_ranges_touch(const cm_emulated_memory *memory, uint64_t address,
                              uint64_t nbytes, bool or_freed);
/* Give back what the range took from the budget of its kind. */
void cm_emulated_range_refund(cm_emulated_memory *memory,
                              const cm_emulated_range *range);

#endif
