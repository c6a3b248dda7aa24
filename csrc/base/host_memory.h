/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory this process may use, and how much of it is to be had now: going over
 * what a control group allows gets the process killed instead of an error, so whoever
 * populates pages looks here first. No locks; nothing is kept between calls. */
#ifndef CM_BASE_HOST_MEMORY_H
#define CM_BASE_HOST_MEMORY_H

#include <stdint.h>

/* In bytes; UINT64_MAX: not limited, or not known. */
typedef struct cm_host_memory {
    uint64_t limit_nbytes;     /* what the process may use: the least of the next two */
    uint64_t cgroup_nbytes;    /* least limit of the process's groups and those above */
    uint64_t total_nbytes;     /* of the machine */
    uint64_t available_nbytes; /* to be had now: the least of the next two */
    uint64_t cgroup_available_nbytes; /* left in the tightest group, its cache counted
                                         as free */
    uint64_t total_available_nbytes;  /* of the machine, as the kernel estimates */
    uint64_t memlock_nbytes; /* RLIMIT_MEMLOCK: reported, CUDA does not obey it */
} cm_host_memory;

/* Read all of it, below `root` (NULL: the real files). Takes some ten microseconds. */
void cm_host_memory_read(const char *root, cm_host_memory *out);

#endif
