/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that the files of the order oracle (order_*.c) share: its clocks, and
 * the single oracle of the process. Locks: callers of functions named `_locked` hold
 * the oracle's lock. */
#pragma once

#include "order_oracle.h"

/* The oracle that is open now. */
extern order_oracle *order_it;

/* Replace the table's operations of streams and events by hooks. */
void order_hook_streams(cm_ops_table *table);
/* Replace the table's operations of memory by hooks. */
void order_hook_memory(cm_ops_table *table);

/* Note the first thing that was wrong. `a` and `b` are figures that help to find the
 * cause. */
void order_fail(const char *what, uint64_t a, uint64_t b);
/* Return `items` with room for at least one element more than `count`. `nbytes` is the
 * size of an element. Ends the program if there is no memory. */
void *order_more(void *items, uint32_t count, uint32_t *capacity, size_t nbytes);

/* Raise each entry of `into` to that of `from`, so that `into` contains both. */
void order_join_locked(oracle_clock *into, const oracle_clock *from);
/* Return the clock of all work that must end before the next work of this line may
 * begin. This includes the order that CUDA itself gives, between the legacy stream and
 * blocking streams. */
oracle_clock order_clock_locked(uint32_t line);
/* True if the host has seen the end of this work. */
bool order_is_seen_locked(const oracle_use *use);
/* Note that the host has seen the end of all work in the clock. */
void order_see(const oracle_clock *clock);
/* Return the line of the stream with this handle, or ORACLE_LINES if there is none. The
 * device matters only for the handles of default streams. */
uint32_t order_find_locked(uint64_t handle, int device);
int order_current_device(void);

/* -- order_streams.c -------------------------------------------------------------------- */

/* The hook of device_synchronize(), which waits for the current device. */
cm_status order_device_synchronize(cm_runtime *rt);
