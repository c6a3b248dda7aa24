/* SPDX-License-Identifier: Apache-2.0 */
/* What tests replace of the machine under the source of host memory. Locks: none; as in
 * source.h. */
#ifndef CM_POOL_SOURCE_HOST_H
#define CM_POOL_SOURCE_HOST_H

#include "base/numa.h"
#include "pool/source.h"

/* The machine as the source sees it. All of it zero or NULL: as it is. */
typedef struct cm_host_world {
    const char *root;         /* of /proc and /sys; borrowed */
    cm_numa_find *find_nodes; /* says where pages are */
    unsigned thread_count;    /* that populate a chunk, however small it is */
    bool can_not_bind;        /* the kernel refuses mbind */
    bool can_not_populate;    /* the kernel has no MADV_POPULATE_WRITE */
    uint64_t piece_nbytes;    /* of one registration; a multiple of 2 MiB */
} cm_host_world;

/* Fails: CM_ENOTSUP where it cannot be had; as cm_source_open. */
CM_NODISCARD cm_status cm_source_host_open(cm_runtime *rt,
                                           const cm_source_config *config,
                                           cm_source **out);
/* The same in that world, which is copied. */
CM_NODISCARD cm_status cm_source_host_open_in(cm_runtime *rt,
                                              const cm_source_config *config,
                                              const cm_host_world *world,
                                              cm_source **out);

#endif
