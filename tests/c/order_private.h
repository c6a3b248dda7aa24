/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the order oracle share: its clocks, and the one oracle that there
 * is. Locks: functions named `_locked` are called with its lock held. */
#pragma once

#include "order_oracle.h"

extern order_oracle *order_it;

/* Replace some operations by our own: those of streams and events, and those of
 * memory. */
void order_hook_streams(cm_ops_table *table);
void order_hook_memory(cm_ops_table *table);

void order_fail(const char *what, uint64_t a, uint64_t b);
/* Give `items` room for one more than `count`. */
void *order_more(void *items, uint32_t count, uint32_t *capacity, size_t nbytes);

void order_join_locked(oracle_clock *into, const oracle_clock *from);
/* What the next work of the line comes after, by CUDA's own order as well. */
oracle_clock order_clock_locked(uint32_t line);
bool order_is_seen_locked(const oracle_use *use);
/* Note that the host has seen the end of everything in the clock. */
void order_see(const oracle_clock *clock);
uint32_t order_find_locked(uint64_t handle, int device);
int order_current_device(void);

/* -- order_streams.c -------------------------------------------------------------------- */

/* The hook itself: waits for the current device. */
cm_status order_device_synchronize(cm_runtime *rt);
