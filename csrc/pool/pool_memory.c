/* SPDX-License-Identifier: Apache-2.0 */
/* One runtime call to get a piece of a pool's kind and one to give it back. */
#include "pool/pool_private.h"
#include "pool/scope.h"

static cm_status
alloc_host(cm_pool *pool, uint64_t nbytes, cm_block *out)
{
    cm_runtime *rt = pool->rt;
    unsigned flags = pool->config.flags;
    void *host = NULL;
    CM_TRY(cm_rt_host_alloc(rt, nbytes, flags, &host));
    cm_address address = (cm_address)(uintptr_t)host;
    /* Only these two may have another address on the device. */
    if ((flags & (CM_HOST_ALLOC_MAPPED | CM_HOST_ALLOC_WRITE_COMBINED)) != 0) {
        cm_status status = cm_rt_host_device_address(rt, host, &address);
        if (!cm_is_ok(status)) {
            if (!cm_is_ok(cm_scope_settle(cm_rt_host_free(rt, host)))) {
                atomic_fetch_add(&pool->lost_count, 1);
            }
            return status;
        }
    }
    *out = (cm_block){host, address, nbytes};
    return cm_ok();
}

cm_status
cm_pool_memory_alloc(cm_pool *pool, uint64_t nbytes, cm_block *out)
{
    cm_address address = 0;
    switch (pool->config.kind) {
    case CM_KIND_PINNED:
    case CM_KIND_MAPPED:
        return alloc_host(pool, nbytes, out);
    case CM_KIND_MANAGED:
        CM_TRY(cm_rt_managed_alloc(pool->rt, nbytes, pool->config.flags, &address));
        *out = (cm_block){(void *)(uintptr_t)address, address, nbytes};
        return cm_ok();
    case CM_KIND_DEVICE:
        CM_TRY(cm_rt_device_alloc(pool->rt, nbytes, &address));
        *out = (cm_block){NULL, address, nbytes};
        return cm_ok();
    case CM_KIND_PAGEABLE:
    case CM_KIND_COUNT:
        break;
    }
    return cm_fail(CM_EINVALID, (uint64_t)pool->config.kind);
}

cm_status
cm_pool_memory_free(cm_pool *pool, const cm_block *block)
{
    if (pool->config.kind == CM_KIND_PINNED || pool->config.kind == CM_KIND_MAPPED) {
        return cm_scope_settle(cm_rt_host_free(pool->rt, block->host));
    }
    return cm_scope_settle(cm_rt_device_free(pool->rt, block->address));
}
