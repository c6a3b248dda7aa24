/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory mapped on demand as a source. Locks: none; as in source.h. */
#ifndef CM_POOL_SOURCE_VMM_H
#define CM_POOL_SOURCE_VMM_H

#include "pool/source.h"

/* Fails: CM_ENOTSUP where it cannot be had; as cm_source_open. */
CM_NODISCARD cm_status cm_source_vmm_open(cm_runtime *rt,
                                          const cm_source_config *config,
                                          cm_source **out);

#endif
