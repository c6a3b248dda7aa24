/* SPDX-License-Identifier: Apache-2.0 */
/* One runtime allocation as a chunk: a source of them, and for the one that falls back. Locks: none;
 * as in source.h. */
#ifndef CM_POOL_SOURCE_PLAIN_H
#define CM_POOL_SOURCE_PLAIN_H

#include "pool/source.h"

/* Fails: the allocating operation, host_device_address. */
CM_NODISCARD cm_status cm_plain_chunk_open(cm_runtime *rt,
                                           const cm_source_config *config,
                                           uint64_t nbytes, cm_chunk *out);
/* Fails: host_free, device_free; the chunk is then still there. */
CM_NODISCARD cm_status cm_plain_chunk_close(cm_runtime *rt,
                                            const cm_source_config *config,
                                            const cm_chunk *chunk);

/* What cm_source_open() falls back to. */
CM_NODISCARD cm_status cm_source_plain_open(cm_runtime *rt,
                                            const cm_source_config *config,
                                            cm_source **out);

#endif
