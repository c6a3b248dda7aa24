/* SPDX-License-Identifier: Apache-2.0 */
/* A runtime that wraps another, counts its calls and makes the nth call fail, so that
 * tests reach every path of failure. Its bodies are generated from ops.h, so no
 * operation can be missed.
 *
 * Example: a test counts the calls that an operation of ours makes, say 7. Then it runs
 * the operation 7 times and lets call 1, 2, ... 7 fail, and checks each time that
 * nothing is left behind. Threads: the counters are atomic; callers set a plan only
 * while no call is under way. */
#pragma once

#include "runtime/runtime.h"

/* Wrap `inner`. If `is_held` is not NULL, each call asks it, in its own thread, whether
 * the thread holds a lock that it may not hold during a call, such as the GIL.
 * Owns:  the wrapper closes `inner` when it is closed.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_faults_open(cm_runtime *inner, int (*is_held)(void),
                                      cm_runtime **out);

/* Make a plan: from now on the `nth` call (1 is the next one, 0 is none) of operation
 * `op` (CM_OP_none: of any operation) fails with `code` and does not reach the inner
 * runtime. With `repeat` every later one fails too. Resets the counters. */
void cm_faults_plan(cm_runtime *rt, cm_op op, uint64_t nth, int32_t code, bool repeat);

/* Return the number of calls since the last plan, of one operation or (CM_OP_none) of
 * all. */
uint64_t cm_faults_count(const cm_runtime *rt, cm_op op);

/* Return the operation that failed last by the plan, or CM_OP_none if none has failed
 * yet. */
cm_op cm_faults_last_injected(const cm_runtime *rt);

/* Delay every call of `op` (CM_OP_none: of any operation) by `delay_us` microseconds. 0
 * ends the delay. */
void cm_faults_delay(cm_runtime *rt, cm_op op, uint32_t delay_us);

/* Return how many calls of `op` were made so far while `is_held` returned true. */
uint64_t cm_faults_count_held(const cm_runtime *rt, cm_op op);
