/* SPDX-License-Identifier: Apache-2.0 */
/* The fault wrapper is a runtime that wraps another one. It counts the calls and makes
 * the nth call fail, so that tests reach every path of failure. Its bodies are
 * generated from ops.h, so no operation can be missed.
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

/* Make a plan: from now on the `nth` call of operation `op` fails with `code` and does
 * not reach the inner runtime. An `nth` of 1 means the next call, and 0 means that no
 * call fails. If `op` is CM_OP_none, calls of all operations are counted together. With
 * `repeat` every later call fails too. Resets the counters. */
void cm_faults_plan(cm_runtime *rt, cm_op op, uint64_t nth, int32_t code, bool repeat);

/* Return the number of calls of `op` since the last plan. If `op` is CM_OP_none, all
 * calls are counted. */
uint64_t cm_faults_count(const cm_runtime *rt, cm_op op);

/* Return the operation of the last call that the plan made fail, or CM_OP_none if it
 * has made none fail yet. */
cm_op cm_faults_last_injected(const cm_runtime *rt);

/* Delay every call of `op`, or of all operations if `op` is CM_OP_none, by `delay_us`
 * microseconds. 0 ends the delay. */
void cm_faults_delay(cm_runtime *rt, cm_op op, uint32_t delay_us);

/* Return how many calls of `op` were made so far while `is_held` returned true. */
uint64_t cm_faults_count_held(const cm_runtime *rt, cm_op op);
