/* SPDX-License-Identifier: Apache-2.0 */
/* All pools of a runtime: one after another, and what they give back for each other. */
#include "pool/private.h"

cm_pool *
cm_pool_next(const cm_runtime *rt, cm_pool *after)
{
    cm_pool *next = cm_pool_find_next(rt, after);
    if (after != NULL) {
        cm_pool_release(after);
    }
    return next;
}

void
cm_pool_forsake(cm_pool *pool)
{
    cm_pool_counters counters;
    cm_pool_read(pool, &counters);
    cm_pool_unwatch_forks(pool);
    cm_budget_refund(pool->budget.parent, counters.reserved_nbytes);
    pool->budget.parent = NULL;
}

/* Do two pools take memory from the same place, or count against the same limit? */
static bool
shares_memory(const cm_pool_config *a, const cm_pool_config *b)
{
    return cm_kind_is_page_locked(a->kind) || cm_kind_is_page_locked(b->kind)
               ? cm_kind_is_page_locked(a->kind) && cm_kind_is_page_locked(b->kind)
               : a->device == b->device;
}

static bool
is_asked(const cm_trim_request *r, const cm_pool *pool)
{
    const cm_pool_config *config = &pool->config;
    return r->other != NULL
               ? pool != r->other && shares_memory(config, &r->other->config)
               : (r->only == NULL || r->only == pool)
                     && (cm_kind_is_pageable(r->kind) || r->kind == config->kind)
                     && (r->device < 0 || r->device == config->device);
}

cm_status
cm_pools_trim(const cm_runtime *rt, cm_trim_request *r, const cm_wait_hooks *hooks)
{
    cm_pool *pool = NULL;
    while ((pool = cm_pool_next(rt, pool)) != NULL) {
        if (!is_asked(r, pool)) {
            continue;
        }
        uint64_t released = 0;
        cm_status status = cm_pool_trim(pool, r->keep_nbytes, hooks, &released);
        if (status.code == CM_ECANCELLED) {
            cm_pool_release(pool);
            return status;
        }
        r->refused = cm_first_failure(r->refused, status);
        r->released_nbytes += released;
        r->count++;
        if (r->keep_nbytes > 0) {
            cm_pool_counters counters;
            cm_pool_read(pool, &counters);
            uint64_t kept = counters.cached_nbytes;
            r->keep_nbytes = kept < r->keep_nbytes ? r->keep_nbytes - kept : 0;
        }
    }
    return cm_ok();
}

cm_status
cm_pool_trim_others(cm_pool *pool, cm_status status, const cm_wait_hooks *hooks,
                    cm_trim_request *r)
{
    if (status.code == CM_ELIMIT && cm_budget_left(&pool->budget) < status.arg) {
        return cm_ok(); /* what others give back is of no use */
    }
    r->other = pool;
    return cm_pools_trim(pool->rt, r, hooks);
}
