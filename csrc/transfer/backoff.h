/* SPDX-License-Identifier: Apache-2.0 */
/* How long to leave the device alone between two looks at whether it is done: in
 * proportion to how long it has taken already, so that a short copy is not made long
 * and a long one not asked about a thousand times. Pure. */
#ifndef CM_TRANSFER_BACKOFF_H
#define CM_TRANSFER_BACKOFF_H

#include <stdint.h>

enum {
    CM_BACKOFF_LEAST_NS = 500,
    CM_BACKOFF_MOST_NS = 300 * 1000,
    CM_BACKOFF_SLEEP_NS = 100 * 1000, /* the least that is worth sleeping: timers are
                                         late */
};

static inline uint64_t
cm_backoff_ns(uint64_t elapsed_ns)
{
    /* From a millisecond on precision pays: what is late is late by less than 1 %. */
    uint64_t gap = elapsed_ns < 1000000 ? elapsed_ns / 32 : elapsed_ns / 128;
    if (gap < CM_BACKOFF_LEAST_NS) {
        return CM_BACKOFF_LEAST_NS;
    }
    return gap < CM_BACKOFF_MOST_NS ? gap : CM_BACKOFF_MOST_NS;
}

#endif
