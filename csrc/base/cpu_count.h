/* SPDX-License-Identifier: Apache-2.0 */
/* How many threads can run at once in this process: its CPU affinity and the CPU time
 * its control groups allow. No locks; nothing is kept between calls. */
#ifndef CM_BASE_CPU_COUNT_H
#define CM_BASE_CPU_COUNT_H

#include <sched.h>
#include <stdbool.h>

/* A set of CPUs as large as any kernel's, for sched_setaffinity and CPU_…_S. */
typedef struct cm_cpus {
    cpu_set_t sets[8];
} cm_cpus;

/* The CPUs that the calling thread may run on. False when not known; *out is then
 * empty. */
bool cm_cpus_read(cm_cpus *out);
unsigned cm_cpus_count(const cm_cpus *cpus);

/* CPUs of the calling thread, or fewer where a quota of its groups (rounded up to whole
 * CPUs; files below `root`, NULL: the real ones) allows less. At least 1. */
unsigned cm_usable_cpu_count(const char *root);

#endif
