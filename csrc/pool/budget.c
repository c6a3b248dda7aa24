/* SPDX-License-Identifier: Apache-2.0 */
/* Charges and refunds a budget and the chain of its parents. */
#include "pool/budget.h"

#include <stddef.h>

void
cm_budget_init(cm_budget *budget, uint64_t limit_nbytes, cm_budget *parent)
{
    atomic_init(&budget->limit_nbytes, limit_nbytes);
    atomic_init(&budget->used_nbytes, 0);
    budget->parent = parent;
}

uint64_t
cm_limit_in_bytes(uint64_t limit_nbytes, uint64_t total_nbytes)
{
    if (!cm_limit_is_share(limit_nbytes)) {
        return limit_nbytes;
    }
    unsigned __int128 parts = limit_nbytes - CM_LIMIT_SHARE;
    return (uint64_t)(parts * total_nbytes / CM_SHARE_WHOLE);
}

bool
cm_budget_has_share(const cm_budget *budget)
{
    for (; budget != NULL; budget = budget->parent) {
        if (cm_limit_is_share(atomic_load(&budget->limit_nbytes))) {
            return true;
        }
    }
    return false;
}

void
cm_budget_resolve_shares(cm_budget *budget, uint64_t total_nbytes)
{
    for (; budget != NULL; budget = budget->parent) {
        uint64_t limit = atomic_load(&budget->limit_nbytes);
        if (cm_limit_is_share(limit)) {
            (void)atomic_compare_exchange_strong(
                &budget->limit_nbytes, &limit, cm_limit_in_bytes(limit, total_nbytes));
        }
    }
}

/* Charge one budget, and then look at its limit once more. budget.h says why. */
static bool
try_one(cm_budget *budget, uint64_t nbytes)
{
    uint64_t used = atomic_load(&budget->used_nbytes);
    for (;;) {
        uint64_t limit = atomic_load(&budget->limit_nbytes);
        if (nbytes > limit || used > limit - nbytes) {
            return false;
        }
        if (!atomic_compare_exchange_weak(&budget->used_nbytes, &used, used + nbytes)) {
            continue;
        }
        if (used + nbytes <= atomic_load(&budget->limit_nbytes)) {
            return true;
        }
        /* The limit was lowered meanwhile. */
        atomic_fetch_sub(&budget->used_nbytes, nbytes);
        return false;
    }
}

bool
cm_budget_try_charge(cm_budget *budget, uint64_t nbytes)
{
    for (cm_budget *b = budget; b != NULL; b = b->parent) {
        if (!try_one(b, nbytes)) {
            for (cm_budget *done = budget; done != b; done = done->parent) {
                atomic_fetch_sub(&done->used_nbytes, nbytes);
            }
            return false;
        }
    }
    return true;
}

void
cm_budget_refund(cm_budget *budget, uint64_t nbytes)
{
    for (cm_budget *b = budget; b != NULL; b = b->parent) {
        atomic_fetch_sub(&b->used_nbytes, nbytes);
    }
}

uint64_t
cm_budget_left(const cm_budget *budget)
{
    uint64_t limit = atomic_load(&budget->limit_nbytes);
    uint64_t used = atomic_load(&budget->used_nbytes);
    if (limit >= CM_LIMIT_SHARE) {
        return UINT64_MAX;
    }
    return used >= limit ? 0 : limit - used;
}

uint64_t
cm_budget_room(const cm_budget *budget)
{
    uint64_t least = UINT64_MAX;
    for (; budget != NULL; budget = budget->parent) {
        uint64_t left = cm_budget_left(budget);
        least = left < least ? left : least;
    }
    return least;
}

uint64_t
cm_budget_excess(const cm_budget *budget)
{
    uint64_t most = 0;
    for (; budget != NULL; budget = budget->parent) {
        uint64_t limit = atomic_load(&budget->limit_nbytes);
        uint64_t used = atomic_load(&budget->used_nbytes);
        most = used > limit && used - limit > most ? used - limit : most;
    }
    return most;
}
