/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory before it is page-locked, for its source and for the copies that forked
 * children get: mapping, populating and hiding pages. Knows nothing of the runtime.
 * Locks: none. */
#ifndef CM_POOL_HOST_PAGES_H
#define CM_POOL_HOST_PAGES_H

#include "base/numa.h"
#include "base/status.h"

/* Addresses for `nbytes`, aligned to huge pages. Fails: CM_ENOMEM. */
CM_NODISCARD cm_status cm_host_map(uint64_t nbytes, char **out);
void cm_host_unmap(char *start, uint64_t nbytes);

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

/* Leave page-locked memory out of forked children, which would share it or, page by
 * page, take it away from the device. True: they have the addresses all the same, with
 * nothing but zeros behind; false: not even these, as is usual for a driver's mapping.
 */
bool cm_host_hide(void *start, uint64_t nbytes);

#endif
