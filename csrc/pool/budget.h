/* SPDX-License-Identifier: Apache-2.0 */
/* A budget says how much memory may be taken from the runtime. It consists of a limit
 * and of the bytes that count against it. Budgets form a chain (a pool's own, then that
 * of its kind), and a charge counts in all budgets of the chain or in none.
 *
 * Lowering a limit takes nothing back. A thread that lowers a limit stores the new
 * limit first and then looks at the excess. A thread that charges adds its bytes first
 * and then looks at the limit once more. So at least one of the two always sees what
 * the other has done.
 *
 * A limit may be a share of a device's memory, such as "50%". Asking the driver how
 * much memory there is would start it, and a process that has only set a limit should
 * still be able to fork. So such a limit is at first a number that no memory reaches
 * (CM_LIMIT_SHARE and above). cm_budget_resolve_shares() replaces it by bytes before
 * the first memory of the device is taken.
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
    _Atomic uint64_t limit_nbytes; /* UINT64_MAX if there is no limit */
    _Atomic uint64_t used_nbytes;  /* the bytes that count against the limit */
    struct cm_budget *parent;      /* borrowed; NULL at the end of the chain */
} cm_budget;

#define CM_LIMIT_SHARE (UINT64_C(1) << 63)
#define CM_SHARE_WHOLE UINT64_C(1000000000) /* 100 % */

/* True if the limit is a share. A share is CM_LIMIT_SHARE plus a number of parts, of
 * which CM_SHARE_WHOLE are 100 %. */
static inline bool
cm_limit_is_share(uint64_t limit_nbytes)
{
    return limit_nbytes >= CM_LIMIT_SHARE && limit_nbytes != UINT64_MAX;
}

/* Return a limit in bytes. A share becomes that share of `total_nbytes`. Any other
 * limit is a number of bytes, and is returned as it is. */
uint64_t cm_limit_in_bytes(uint64_t limit_nbytes, uint64_t total_nbytes);

/* Make a budget with no bytes charged. `parent` is borrowed, and may be NULL. */
void cm_budget_init(cm_budget *budget, uint64_t limit_nbytes, cm_budget *parent);
/* True if any limit in the chain is a share. */
bool cm_budget_has_share(const cm_budget *budget);
/* Replace each share in the chain by bytes. A limit that somebody sets meanwhile is
 * left alone. */
void cm_budget_resolve_shares(cm_budget *budget, uint64_t total_nbytes);
/* Charge each budget of the chain. Returns false, with nothing charged, if that would
 * exceed any limit of the chain. */
bool cm_budget_try_charge(cm_budget *budget, uint64_t nbytes);
/* Subtract bytes that were charged from each budget of the chain. */
void cm_budget_refund(cm_budget *budget, uint64_t nbytes);
/* Return the bytes that this budget alone still allows; UINT64_MAX if it has no
 * limit. */
uint64_t cm_budget_left(const cm_budget *budget);
/* Return the bytes that the whole chain still allows; UINT64_MAX if it has no limit. */
uint64_t cm_budget_room(const cm_budget *budget);
/* Return by how many bytes the chain is over its limits: the largest excess of any
 * budget in it. A budget exceeds its limit only after somebody has lowered the limit
 * below what was held. */
uint64_t cm_budget_excess(const cm_budget *budget);
