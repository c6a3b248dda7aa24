/* SPDX-License-Identifier: Apache-2.0 */
/* How much may be held from the runtime: a limit, and what counts against it. Budgets
 * form a chain (a pool's own, then its kind's); a charge passes all or none. A limit
 * that is lowered does not take back what is charged: whoever lowers it stores the new
 * limit first and looks at the excess afterwards, and a charge under way looks at the
 * limit once more, so that one of the two sees the other.
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

void cm_budget_init(cm_budget *budget, uint64_t limit_nbytes, cm_budget *parent);
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
