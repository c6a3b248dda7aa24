/* SPDX-License-Identifier: Apache-2.0 */
/* A runtime wrapped round another that counts calls, names them and makes the nth fail:
 * how every error path is reached. Generated from ops.h, so no operation can be missed.
 * Threads: counters are atomic; a plan is set while no call is under way. */
#pragma once

#include "runtime/runtime.h"

/* Wrap `inner`. `is_held`, or NULL, is asked in the thread of each call whether it
 * holds
 * a lock that it may not. Owns: the wrapper closes `inner` when it is closed.
 * Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_faults_open(cm_runtime *inner, int (*is_held)(void),
                                      cm_runtime **out);

/* From now on the `nth` call (1 = the next one; 0 = none) of operation `op` (CM_OP_none
 * = any) answers `code` without reaching the inner runtime; `repeat` makes every later
 * one fail too. Resets the counters. */
void cm_faults_plan(cm_runtime *rt, cm_op op, uint64_t nth, int32_t code, bool repeat);

/* Calls seen since the last plan, of one operation or (CM_OP_none) of all. */
uint64_t cm_faults_count(const cm_runtime *rt, cm_op op);

/* The operation that the plan made fail last; CM_OP_none while it has not struck. */
cm_op cm_faults_struck(const cm_runtime *rt);

/* Delay every call of `op` (CM_OP_none = any) by `delay_us`; 0 ends it. */
void cm_faults_delay(cm_runtime *rt, cm_op op, uint32_t delay_us);

/* Calls so far that were made with the lock held. */
uint64_t cm_faults_count_held(const cm_runtime *rt, cm_op op);
