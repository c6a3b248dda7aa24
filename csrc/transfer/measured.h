/* SPDX-License-Identifier: Apache-2.0 */
/* What was measured of a machine, what thresholds follow from it, and how long a copy
 * takes by it. Pure functions of plain numbers: who measures is calibrate.h. */
#ifndef CM_TRANSFER_MEASURED_H
#define CM_TRANSFER_MEASURED_H

#include "transfer/plan.h"

/* X(name, default). Rates in bytes per second, times in ns, sizes in bytes; 0: not known.
 * Defaults are an H200 on PCIe 5.0 x16 with 16 cores of a Xeon Platinum. */
/* clang-format off */
#define CM_MEASURED(X)                                                                   \
    X(up_rate, 55e9)            /* page-locked memory to the device, long copies */      \
    X(down_rate, 55e9)                                                                   \
    X(device_rate, 2.08e12)      /* within the device: bytes copied */                    \
    X(dma_gap_ns, 6500)         /* between two copies of a chain */                      \
    X(latency_ns, 7000)         /* of a short copy that is waited for */                 \
    X(copy_rate_1, 9.6e9)       /* host memory to host memory by so many threads */      \
    X(copy_rate_2, 19e9)                                                                 \
    X(copy_rate_4, 36e9)                                                                 \
    X(copy_rate_8, 48e9)                                                                 \
    X(copy_rate_16, 51e9)                                                                \
    X(wake_ns, 50000)           /* until a sleeping thread works */                      \
    X(driver_up_rate, 8.9e9)    /* ordinary memory by the runtime's own copy */          \
    X(driver_down_rate, 18.3e9)                                                          \
    X(staged_up_nbytes, 4 << 20)   /* from there on it loses; 0: by the rates alone */   \
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
void cm_tuning_derive(const cm_measured *given, unsigned cpu_count, cm_tuning *out);

/* How long the planned copy takes when nothing else runs, in ns; 0 without bytes, -1
 * where it goes from device to device by a link that was not measured. `locked`: of
 * both ends. */
double cm_measured_expect(const cm_measured *measured, const cm_plan *plan,
                          const cm_region *dst, const cm_region *src, bool locked);

#endif
