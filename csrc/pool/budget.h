/* SPDX-License-Identifier: Apache-2.0 */
/* A budget says how much may be held from the runtime: a limit, and what counts against
 * it. Budgets form a chain (a pool's own, then that of its kind), and a charge passes
 * all of them or none.
 *
 * Lowering a limit does not take back what is charged. Whoever lowers one stores the
 * new limit first and then looks at the excess; a charge that is under way looks at the
 * limit once more after it has counted. So one of the two always sees the other.
 *
 * A limit may be a share of a device's memory, such as "50%". Asking the driver how
 * much memory there is would start it, and a process that has only set a limit should
 * still be able to fork. So such a limit is at first a number so large that nothing
 * reaches it (CM_LIMIT_SHARE and above), and bytes take its place before the first
 * memory of the device is had (cm_budget_settle()).
 *
 * Example: a pool has a budget of 2 GiB whose parent allows 10 GiB to all pools of the
 * kind. A growth by 64 MiB when the pool holds 2 GiB fails with CM_ELIMIT whatever the
 * parent has left, and leaves both as they were.
 * Locks: none; everything is atomic. */
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

/* True if the limit is a share: it is CM_LIMIT_SHARE plus so many parts of
 * CM_SHARE_WHOLE. */
static inline bool
cm_limit_is_share(uint64_t limit_nbytes)
{
    return limit_nbytes >= CM_LIMIT_SHARE && limit_nbytes != UINT64_MAX;
}

/* The limit in bytes, where it may be a share of `total_nbytes`. */
uint64_t cm_limit_settled(uint64_t limit_nbytes, uint64_t total_nbytes);

void cm_budget_init(cm_budget *budget, uint64_t limit_nbytes, cm_budget *parent);
/* True if any limit in the chain is a share. */
bool cm_budget_has_share(const cm_budget *budget);
/* Replace each share in the chain by bytes, unless somebody sets another limit
 * meanwhile. */
void cm_budget_settle(cm_budget *budget, uint64_t total_nbytes);
/* Charge each budget of the chain. False: a limit of the chain would be passed, and
 * nothing was charged. */
bool cm_budget_try_charge(cm_budget *budget, uint64_t nbytes);
void cm_budget_refund(cm_budget *budget, uint64_t nbytes);
/* What this budget alone still allows; UINT64_MAX: there is no limit. */
uint64_t cm_budget_left(const cm_budget *budget);
/* What the whole chain still allows. */
uint64_t cm_budget_room(const cm_budget *budget);
/* By how much what is held exceeds a limit of the chain, the most of all limits. It
 * does where a limit was lowered below what was held. */
uint64_t cm_budget_excess(const cm_budget *budget);
