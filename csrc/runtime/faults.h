/* SPDX-License-Identifier: Apache-2.0 */
/* A runtime around another that counts calls by name and makes the nth one fail, so
 * that tests reach every path of failure. It is generated from ops.h, so no operation
 * can be missed.
 *
 * Example: a test counts the calls that an operation of ours makes, say 7. Then it runs
 * the operation 7 times and lets call 1, 2, ... 7 fail, and checks each time that
 * nothing is left behind.
 * Threads: the counters are atomic; a plan is set while no call is under way. */
#pragma once

#include "runtime/runtime.h"

/* Wrap `inner`. `is_held`, unless NULL, is asked in the thread of each call whether
 * that thread holds a lock that it may not hold during a call.
 * Owns:  the wrapper closes `inner` when it is closed.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_faults_open(cm_runtime *inner, int (*is_held)(void),
                                      cm_runtime **out);

/* Make a plan: from now on the `nth` call (1: the next one; 0: none) of operation `op`
 * (CM_OP_none: of any) answers `code` without reaching the inner runtime; with `repeat`
 * every later one fails too. Resets the counters. */
void cm_faults_plan(cm_runtime *rt, cm_op op, uint64_t nth, int32_t code, bool repeat);

/* Calls since the last plan, of one operation or (CM_OP_none) of all. */
uint64_t cm_faults_count(const cm_runtime *rt, cm_op op);

/* The operation that the plan made fail last; CM_OP_none: none has failed yet. */
cm_op cm_faults_struck(const cm_runtime *rt);

/* Delay every call of `op` (CM_OP_none: of any) by `delay_us` microseconds; 0 ends
 * that. */
void cm_faults_delay(cm_runtime *rt, cm_op op, uint32_t delay_us);

/* Calls of `op` so far that were made with the lock held. */
uint64_t cm_faults_count_held(const cm_runtime *rt, cm_op op);
