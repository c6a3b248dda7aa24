/* SPDX-License-Identifier: Apache-2.0 */
/* Which source serves a kind on this machine and driver. */
#include "pool/source_host.h"
#include "pool/source_plain.h"
#include "pool/source_vmm.h"

static cm_status
open_best(cm_runtime *rt, const cm_source_config *config, cm_source **out)
{
    switch (config->kind) {
    case CM_KIND_DEVICE:
        return cm_source_vmm_open(rt, config, out);
    case CM_KIND_PINNED:
    case CM_KIND_MAPPED:
        /* Ordinary memory cannot be made write-combined afterwards. */
        if ((config->flags & CM_HOST_ALLOC_WRITE_COMBINED) == 0) {
            return cm_source_host_open(rt, config, out);
        }
        break;
    case CM_KIND_MANAGED:
    case CM_KIND_PAGEABLE:
    case CM_KIND_COUNT:
        break;
    }
    return cm_fail(CM_ENOTSUP, (uint64_t)config->kind);
}

cm_status
cm_source_open(cm_runtime *rt, const cm_source_config *config, cm_source **out)
{
    if (config->segments != CM_SEGMENTS_PLAIN) {
        cm_status status = open_best(rt, config, out);
        if (status.code != CM_ENOTSUP) {
            return status;
        }
    }
    return cm_source_plain_open(rt, config, out);
}
