/* SPDX-License-Identifier: Apache-2.0 */
/* Chunks that are one allocation of the runtime each. */
#include "pool/source_plain.h"

#include <stdlib.h>

#include "base/numa.h"
#include "pool/host_pages.h"
#include "pool/scope.h"

enum {
    /* The driver maps device and managed memory in pages of 2 MiB, so a smaller request
     * occupies as much. */
    DEVICE_GRANULE = 2 << 20,
    /* A multiple of every page size there is (4 to 64 KiB); the driver locks by page.
     */
    HOST_GRANULE = 64 << 10,
};

static bool
is_host(cm_kind kind)
{
    return kind == CM_KIND_PINNED || kind == CM_KIND_MAPPED;
}

static cm_status
open_host(cm_runtime *rt, const cm_source_config *config, uint64_t nbytes,
          cm_chunk *out)
{
    unsigned flags =
        config->flags | (config->kind == CM_KIND_MAPPED ? CM_HOST_ALLOC_MAPPED : 0u);
    void *host = NULL;
    CM_TRY(cm_rt_host_alloc(rt, nbytes, flags, &host));
    cm_address address = (cm_address)(uintptr_t)host;
    /* Only these two may have another address on the device. */
    if ((flags & (CM_HOST_ALLOC_MAPPED | CM_HOST_ALLOC_WRITE_COMBINED)) != 0) {
        cm_status status = cm_rt_host_device_address(rt, host, &address);
        if (!cm_is_ok(status)) {
            cm_status ignored = cm_rt_host_free(rt, host);
            (void)ignored; /* the first failure is told */
            return status;
        }
    }
    (void)cm_host_hide(host, nbytes);
    *out = (cm_chunk){.host = host, .address = address, .nbytes = nbytes};
    return cm_ok();
}

cm_status
cm_plain_chunk_open(cm_runtime *rt, const cm_source_config *config, uint64_t nbytes,
                    cm_chunk *out)
{
    cm_address address = 0;
    if (is_host(config->kind)) {
        return open_host(rt, config, nbytes, out);
    }
    if (config->kind == CM_KIND_MANAGED) {
        CM_TRY(cm_rt_managed_alloc(rt, nbytes, config->flags, &address));
        *out = (cm_chunk){(void *)(uintptr_t)address, address, nbytes, 0};
        return cm_ok();
    }
    CM_TRY(cm_rt_device_alloc(rt, nbytes, &address));
    *out = (cm_chunk){NULL, address, nbytes, 0};
    return cm_ok();
}

cm_status
cm_plain_chunk_close(cm_runtime *rt, const cm_source_config *config,
                     const cm_chunk *chunk)
{
    return cm_scope_settle(is_host(config->kind)
                               ? cm_rt_host_free(rt, chunk->host)
                               : cm_rt_device_free(rt, chunk->address));
}

static cm_status
open_chunk(cm_source *source, uint64_t offset, uint64_t nbytes, cm_chunk *out)
{
    (void)offset;
    if (nbytes == 0 || nbytes % source->granule != 0) {
        return cm_fail(CM_EINVALID, nbytes);
    }
    return cm_plain_chunk_open(source->rt, &source->config, nbytes, out);
}

static cm_status
close_chunk(cm_source *source, cm_chunk *chunk)
{
    CM_TRY(cm_plain_chunk_close(source->rt, &source->config, chunk));
    *chunk = (cm_chunk){.host = NULL};
    return cm_ok();
}

static void
destroy(cm_source *source)
{
    free(source);
}

static const cm_source_ops plain_ops = {open_chunk, close_chunk, NULL, NULL, destroy};

/* The runtime takes no wish about the node: only where there is one node is it met. */
static cm_status
check_node(const cm_source_config *config)
{
    int node = config->numa_node;
    if (!is_host(config->kind) || node == CM_NUMA_NO_NODE) {
        return cm_ok();
    }
    uint64_t nodes = cm_numa_read_nodes(NULL);
    if (node < 0 || node >= CM_NUMA_MAX_NODES || (nodes >> node & 1) == 0) {
        return cm_fail(CM_EINVALID, (uint64_t)(int64_t)node);
    }
    return nodes == UINT64_C(1) << node ? cm_ok() : cm_fail(CM_ENOTSUP, (uint64_t)node);
}

cm_status
cm_source_plain_open(cm_runtime *rt, const cm_source_config *config, cm_source **out)
{
    if (config->kind <= CM_KIND_PAGEABLE || config->kind >= CM_KIND_COUNT) {
        return cm_fail(CM_EINVALID, (uint64_t)config->kind);
    }
    CM_TRY(check_node(config));
    cm_source *source = calloc(1, sizeof(*source));
    if (source == NULL) {
        return cm_fail(CM_ENOMEM, sizeof(*source));
    }
    source->ops = &plain_ops;
    source->rt = rt;
    source->config = *config;
    source->granule = is_host(config->kind) ? HOST_GRANULE : DEVICE_GRANULE;
    *out = source;
    return cm_ok();
}
