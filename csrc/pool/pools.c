/* SPDX-License-Identifier: Apache-2.0 */
/* Goes through all pools of a runtime. The functions trim pools on request or so that
 * another pool can grow, make them obey lowered limits, and trim idle memory. The list
 * of the pools itself, and cm_pool_after(), which walks it, are in fork.c, because a
 * thread that forks holds the lock of this list, of which the process has only one. */
#include "pool/private.h"

void
cm_pool_forsake(cm_pool *pool)
{
    cm_pool_counters counters;
    if (pool->saved.forget != NULL) {
        pool->saved.forget(pool); /* ends the pool of its page-locked memory as well */
    }
    cm_pool_read(pool, &counters);
    cm_pool_unwatch_forks(pool);
    cm_budget_refund(pool->budget.parent, counters.reserved_nbytes);
    pool->budget.parent = NULL;
}

/* True if the request means a pool with this config. */
static bool
is_asked(const cm_trim_request *r, const cm_pool_config *config)
{
    /* Memory helps the pool in need only if it comes from the same place, or counts
     * against the same limit. */
    if (r->other != NULL) {
        const cm_pool_config *own = cm_pool_get_config(r->other);
        bool locked = cm_kind_is_page_locked(own->kind);
        return locked == cm_kind_is_page_locked(config->kind)
               && (locked || own->device == config->device);
    }
    return (cm_kind_is_pageable(r->kind) || r->kind == config->kind)
           && (r->device < 0 || r->device == config->device);
}

cm_status
cm_pools_trim(const cm_runtime *rt, cm_trim_request *r, const cm_wait_hooks *hooks)
{
    cm_pool *pool = NULL;
    bool waits = hooks != NULL && !r->only_looks;
    bool may_fence = waits || !cm_others_capture(hooks);
    while ((pool = cm_pool_next(rt, pool)) != NULL) {
        if (pool == r->other || (r->only != NULL && pool != r->only)
            || !is_asked(r, &pool->config)) {
            continue;
        }
        uint64_t released = 0;
        cm_pool_counters counters;
        cm_status status =
            cm_pool_trim_as(pool, r->keep_nbytes, hooks, waits, may_fence, &released);
        if (status.code == CM_ECANCELLED) {
            cm_pool_release(pool);
            return status;
        }
        r->refused = cm_first_failure(r->refused, status);
        r->released_nbytes += released;
        r->count++;
        cm_pool_read(pool, &counters);
        uint64_t kept = counters.cached_nbytes;
        r->keep_nbytes -= kept < r->keep_nbytes ? kept : r->keep_nbytes;
    }
    return cm_ok();
}

cm_status
cm_pool_trim_others(cm_pool *pool, cm_status status, const cm_wait_hooks *hooks,
                    cm_trim_request *r)
{
    if (status.code == CM_ELIMIT && cm_budget_left(&pool->budget) < status.arg) {
        /* The pool met its own limit, so memory from other pools would not help. */
        return cm_ok();
    }
    r->other = pool;
    return cm_pools_trim(pool->rt, r, hooks);
}

void
cm_pools_obey_limits(const cm_runtime *rt, bool may_fence)
{
    cm_pool *pool = NULL;
    while ((pool = cm_pool_next(rt, pool)) != NULL) {
        cm_pool_obey_limits(pool, may_fence);
    }
}

uint64_t
cm_pools_trim_idle(const cm_runtime *rt)
{
    uint64_t first = 0;
    cm_pool *pool = NULL;
    if (cm_runtime_is_forked(rt)) {
        return 0;
    }
    while ((pool = cm_pool_next(rt, pool)) != NULL) {
        cm_pool_trim_idle(pool); /* does nothing before its time */
        uint64_t due = cm_pool_idle_due(pool);
        first = due != 0 && (first == 0 || due < first) ? due : first;
    }
    return first;
}
