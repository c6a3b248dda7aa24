/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of the system that fail, stop short or wait when a test says so. Threads: a
 * plan is made while no call is under way, but for the gate. */
#ifndef CM_TRANSFER_FILE_FAULTS_H
#define CM_TRANSFER_FILE_FAULTS_H

#include "base/thread.h"
#include "transfer/file/file.h"

typedef struct cm_file_plan {
    uint64_t nth;   /* read or write from now on that fails; 1 = the next; 0: none */
    int error;      /* errno; 0: it answers that nothing was moved */
    bool repeat;    /* every later one fails too */
    uint64_t most;  /* bytes that one call moves; 0: all */
    uint64_t held;  /* from this read or write on they wait for the gate; 0: none */
    bool is_cold;   /* nothing is in the page cache */
    bool no_direct; /* there is no descriptor past it */
} cm_file_plan;

typedef struct cm_file_faults {
    cm_file_hook hook; /* for a request */
    cm_file_plan plan;
    cm_mutex lock;
    cm_cond changed;
    uint64_t count;         /* reads and writes so far; under lock, as are the next */
    uint64_t direct_count;  /* those past the page cache */
    uint64_t advised_count; /* announcements */
    int open_count;         /* descriptors past the page cache that are open */
    bool is_waiting;        /* or a held call has waited */
    bool is_shut;
} cm_file_faults;

void cm_file_faults_init(cm_file_faults *faults);
void cm_file_faults_fini(cm_file_faults *faults);
/* From now on; counters begin at 0 again and the gate is shut. */
void cm_file_faults_set(cm_file_faults *faults, const cm_file_plan *plan);
/* Blocks until a call that the plan holds waits. */
void cm_file_faults_await(cm_file_faults *faults);
void cm_file_faults_open(cm_file_faults *faults);

#endif
