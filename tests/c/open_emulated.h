/* SPDX-License-Identifier: Apache-2.0 */
/* Opens an emulated runtime for a C test, with a fault wrapper around it, and closes it
 * again after a check that nothing was left behind. */
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "runtime/emulated/emulated.h"
#include "runtime/faults.h"
#include "wait.h"

/* Make a call without which the test cannot go on: if it fails, the whole program
 * ends. */
#define MUST(call)                                                                     \
    do {                                                                               \
        cm_status must_status_ = (call);                                               \
        if (!cm_is_ok(must_status_)) {                                                 \
            fprintf(stderr, "%s:%d: %s answered code %d (op %s)\n", __FILE__,          \
                    __LINE__, #call, must_status_.code,                                \
                    cm_op_facts[must_status_.op].name);                                \
            exit(2);                                                                   \
        }                                                                              \
    } while (0)

/* Return the size of a page of this machine: 4 KiB on x86-64, up to 64 KiB on
 * aarch64. */
CM_UNUSED static size_t
page_nbytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* True if touching the byte from the host would crash. write() finds out without a
 * crash, because the kernel then reads the byte and reports an error. A forked child
 * could not find out, since children do not inherit such memory. */
CM_UNUSED static bool
touch_crashes(const void *at)
{
    int ends[2];
    MUST(pipe(ends) == 0 ? cm_ok() : cm_fail(CM_ESYSTEM, 0));
    bool crashes = write(ends[1], at, 1) != 1;
    (void)close(ends[0]);
    (void)close(ends[1]);
    return crashes;
}

/* The longest delay of a piece of work on a stream, in microseconds. A fault sweep runs
 * the same code hundreds of times, each time with another call that fails, so such a
 * program defines a smaller delay before it includes this file. */
#ifndef EMULATED_DELAY_US
#    define EMULATED_DELAY_US 200
#endif

/* Fill in a configuration for a single device with driver version 13.0. */
CM_UNUSED static void
default_config(cm_emulated_config *config)
{
    *config = (cm_emulated_config){.device_count = 1,
                                   .memory_nbytes = UINT64_C(1) << 30,
                                   .driver_version = 13000,
                                   .max_delay_us = 200};
}

/* Open a runtime with `device_count` devices of `memory_nbytes` each, under a fault
 * wrapper. */
CM_UNUSED static cm_runtime *
open_emulated(int driver_version, int device_count, uint64_t memory_nbytes)
{
    cm_emulated_config config;
    cm_runtime *inner = NULL;
    cm_runtime *rt = NULL;
    default_config(&config);
    config.driver_version = driver_version;
    config.device_count = device_count;
    config.memory_nbytes = memory_nbytes;
    config.max_delay_us = EMULATED_DELAY_US;
    MUST(cm_emulated_open(&config, &inner));
    MUST(cm_faults_open(inner, NULL, &rt));
    return rt;
}

/* Check that no memory, stream, event or other object of the runtime is live. */
CM_UNUSED static void
check_nothing_live(cm_runtime *rt)
{
    cm_emulated_counts counts;
    cm_emulated_read_counts(rt, &counts);
#define CHECK_NONE_LEFT(name)                                                          \
    if (counts.name != 0) {                                                            \
        CHECK_FAIL_("%llu are left of " #name, (unsigned long long)counts.name);       \
    }
    CM_EMULATED_COUNTS(CHECK_NONE_LEFT)
#undef CHECK_NONE_LEFT
}

/* End the plan of faults, check that nothing is live, and close the runtime. */
CM_UNUSED static void
close_emulated(cm_runtime *rt)
{
    cm_faults_plan(rt, CM_OP_none, 0, 0, false);
    check_nothing_live(rt);
    rt->close(rt);
}
