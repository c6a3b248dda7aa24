/* SPDX-License-Identifier: Apache-2.0 */
/* How much may be held from the runtime: a limit, and what counts against it. Budgets
 * form a chain (a pool's own, then its kind's); a charge passes all or none. A limit
 * that is lowered does not take back what is charged: whoever lowers it stores the new
 * limit first and looks at the excess afterwards, and a charge under way looks at the
 * limit once more, so that one of the two sees the other.
 *
 * A limit may be a share of the memory of a device while nobody has asked the driver
 * how much that is: to ask starts it, and a process that has only said "50%" may still
 * fork. Such a limit is a number so large that nothing meets it, CM_LIMIT_SHARE and on.
 * Bytes take its place before the first memory of the device is had (cm_budget_settle).
 * Locks: none; atomic. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct cm_budget {
    _Atomic uint64_t limit_nbytes; /* UINT64_MAX: none */
    _Atomic uint64_t used_nbytes;
    struct cm_budget *parent; /* borrowed; NULL at the end of the chain */
} cm_budget;

#define CM_LIMIT_SHARE (UINT64_C(1) << 63)
#define CM_SHARE_WHOLE UINT64_C(1000000000) /* 100 % */

/* Is it a share, of CM_LIMIT_SHARE + parts of CM_SHARE_WHOLE? */
static inline bool
cm_limit_is_share(uint64_t limit_nbytes)
{
    return limit_nbytes >= CM_LIMIT_SHARE && limit_nbytes != UINT64_MAX;
}

/* Bytes, of a limit that may be a share of `total_nbytes`. */
uint64_t cm_limit_settled(uint64_t limit_nbytes, uint64_t total_nbytes);

void cm_budget_init(cm_budget *budget, uint64_t limit_nbytes, cm_budget *parent);
bool cm_budget_has_share(const cm_budget *budget); /* in the chain */
/* Replace each share in the chain, unless another limit comes meanwhile. */
void cm_budget_settle(cm_budget *budget, uint64_t total_nbytes);
/* False, and nothing charged, where any limit of the chain would be passed. */
bool cm_budget_try_charge(cm_budget *budget, uint64_t nbytes);
void cm_budget_refund(cm_budget *budget, uint64_t nbytes);
/* What this budget alone still allows; UINT64_MAX: no limit. */
uint64_t cm_budget_left(const cm_budget *budget);
/* The same of all of the chain together. */
uint64_t cm_budget_room(const cm_budget *budget);
/* By how much a limit of the chain is passed, the most of them: one was lowered below
 * what was held then. */
uint64_t cm_budget_excess(const cm_budget *budget);
