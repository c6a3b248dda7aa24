/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory as its source (source_host*.c) and the copies for forked children make
 * it: mapping and populating pages, and what tests replace of the machine.
 * Locks: none; as in source.h. */
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

/* cm_source_host_open in that world, which is copied. */
CM_NODISCARD cm_status cm_source_host_open_in(cm_runtime *rt,
                                              const cm_source_config *config,
                                              const cm_host_world *world,
                                              cm_source **out);

/* Addresses for `nbytes`, aligned to huge pages. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_host_map(uint64_t nbytes, char **out);
void cm_host_unmap(char *start, uint64_t nbytes);

/* -- source_host_populate.c -------------------------------------------------------------- */

enum { CM_POPULATE_MAX_THREADS = 16 };

typedef struct cm_populate {
    void *start; /* aligned to 2 MiB */
    uint64_t nbytes;
    const void *from;      /* what the pages shall hold; NULL: nothing in particular */
    unsigned thread_count; /* at least 1; fewer are fine */
    const cm_cpus *cpus;   /* NULL: anywhere; else where helper threads run */
    bool only_helpers;     /* the calling thread, which may run elsewhere, helps only
                              where no thread could be started */
    bool can_not_populate; /* as above */
} cm_populate;

/* How many threads are worth starting for so much, on the machine below `root`; at
 * least 1. */
unsigned cm_populate_threads(const char *root, uint64_t nbytes);

/* Give every page of the range its memory. Blocks: until all threads are done.
 * Fails: CM_ENOMEM; some pages may then have theirs. */
CM_NODISCARD cm_status cm_populate_run(const cm_populate *populate);

#endif
