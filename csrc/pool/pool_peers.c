/* SPDX-License-Identifier: Apache-2.0 */
/* Letting other devices in: a chunk is opened for the peers that have a context by
 * then, and here for those that got one later. */
#include "pool/pool_private.h"
#include "pool/scope.h"

/* The other devices that this process has a context on: none is made for this. */
static uint64_t
others_in_use(const cm_pool *pool)
{
    const cm_runtime *rt = pool->rt;
    uint64_t devices = 0;
    for (int d = 0; d < rt->device_count && d < CM_MAX_DEVICES; d++) {
        bool used = d != pool->config.device
                    && atomic_load_explicit(&rt->primary[d], memory_order_relaxed) != 0;
        devices |= used ? UINT64_C(1) << d : 0;
    }
    return devices;
}

/* By the grower, who alone changes what is where; inside a cm_scope. */
static cm_status
admit(cm_pool *pool)
{
    const cm_arena *range = pool->range;
    uint64_t count = range->nbytes / range->granule;
    cm_status first = cm_ok();
    for (uint64_t i = 0; i < count;) {
        cm_chunk *chunk = range->chunk_at[i];
        if (chunk != NULL) {
            cm_status status = pool->source->ops->admit_peers(pool->source, chunk);
            first = cm_is_ok(first) ? status : first;
        }
        i += chunk != NULL ? chunk->nbytes / range->granule : 1;
    }
    return first;
}

cm_status
cm_pool_admit_peers(cm_pool *pool)
{
    if (cm_runtime_is_forked(pool->rt)) {
        return cm_fail(CM_EFORKED, 0);
    }
    uint64_t others = others_in_use(pool);
    if (pool->config.kind != CM_KIND_DEVICE || (others & ~pool->admitted) == 0) {
        return cm_ok(); /* and waits for nobody */
    }
    cm_status status = cm_ok();
    cm_pool_begin_growing(pool);
    bool any = pool->range != NULL && (others & pool->source->peers) != 0;
    if (any && (others & ~pool->admitted) != 0) {
        cm_scope scope;
        status = cm_scope_enter(pool->rt, pool->config.device, &scope);
        if (cm_is_ok(status)) {
            status = admit(pool);
            cm_scope_leave(&scope);
        }
    }
    if (cm_is_ok(status)) {
        pool->admitted |= others; /* what comes now is opened to them at once */
    }
    cm_pool_end_growing(pool);
    return status;
}
