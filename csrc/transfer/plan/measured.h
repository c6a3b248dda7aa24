/* SPDX-License-Identifier: Apache-2.0 */
/* What calibrate.h measures of a machine, and what thresholds follow from it. Pure. */
#ifndef CM_TRANSFER_PLAN_MEASURED_H
#define CM_TRANSFER_PLAN_MEASURED_H

#include "transfer/plan/tuning.h"

/* X(name, default). Rates in bytes per second, times in ns, sizes in bytes. What is
 * not found out is taken from an H200 on PCIe 5.0 with 16 cores of a Xeon Platinum. */
/* clang-format off */
#define CM_MEASURED(X)                                                                   \
    X(up_rate, 55e9)            /* page-locked memory to the device, long copies */      \
    X(down_rate, 55e9)                                                                   \
    X(dma_gap_ns, 6500)         /* between two copies of a chain */                      \
    X(copy_rate_1, 9.6e9)       /* host memory to host memory by so many threads */      \
    X(copy_rate_2, 19e9)                                                                 \
    X(copy_rate_4, 36e9)                                                                 \
    X(copy_rate_8, 48e9)                                                                 \
    X(copy_rate_16, 51e9)                                                                \
    X(wake_ns, 50000)           /* until a sleeping thread works */                      \
    X(driver_up_rate, 8.9e9)    /* ordinary memory by the runtime's own copy */          \
    X(driver_down_rate, 18.3e9)                                                          \
    X(staged_up_nbytes, 4 << 20)   /* from there on it loses */                          \
    X(staged_down_nbytes, 1 << 20)
/* clang-format on */

typedef struct cm_measured {
#define CM_MEASURED_FIELD(name, value) double name;
    CM_MEASURED(CM_MEASURED_FIELD)
#undef CM_MEASURED_FIELD
} cm_measured;

typedef struct cm_measured_row {
    const char *name;
    size_t offset;
} cm_measured_row;

enum {
#define CM_MEASURED_INDEX(name, value) CM_MEASURED_##name,
    CM_MEASURED(CM_MEASURED_INDEX)
#undef CM_MEASURED_INDEX
        CM_MEASURED_COUNT
};

extern const cm_measured_row cm_measured_rows[CM_MEASURED_COUNT];

static inline double *
cm_measured_at(cm_measured *measured, int index)
{
    return (double *)((char *)measured + cm_measured_rows[index].offset);
}

void cm_measured_init(cm_measured *measured);

/* Bytes per second that `threads` threads copy between pieces of host memory. */
double cm_measured_copy_rate(const cm_measured *measured, double threads);

/* Thresholds for such a machine where `cpu_count` threads can run at once; all of them
 * within their bounds, whatever was measured. */
void cm_tuning_derive(const cm_measured *m, unsigned cpu_count, cm_tuning *out);

#endif
