/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device: every operation of ops.h without a GPU, hostile on purpose.
 * Streams are threads and really late; device memory is mapped without access for the
 * host, so touching it crashes; fresh memory is not zero, freed memory crashes too, and
 * work that comes too late for it fails the device (700, until it is reset); registered
 * and write-combined memory has another address for devices; a bad range or stale
 * handle answers the error CUDA answers. Knows nothing of pools or Python. */
#pragma once

#include "runtime/runtime.h"

typedef struct cm_emulated_config {
    int device_count;       /* 1 … CM_MAX_DEVICES; 0 is "a driver without devices" */
    uint64_t memory_nbytes; /* of each device; host and managed together get 4 times */
    int driver_version;     /* e.g. 12000: operations that came later are missing */
    uint32_t max_delay_us;  /* each queued piece of work waits up to so long; 0: none */
    uint64_t seed;          /* of the random delays */
    bool apart;             /* no device may use the memory of another */
    bool in_turn;           /* managed memory is the host's or the devices' at a time */
    const char *reason;     /* borrowed, static: why emulation was chosen; NULL: "" */
    /* One more than the number that each device has on the emulated machine, of which
     * the process may see a part in another order; 0 means that it is the device's
     * index. The number tells in a device's UUID and in its place on the bus. */
    uint8_t numbers[CM_MAX_DEVICES];
} cm_emulated_config;

/* Live objects, for leak checks. X-list so that Python sees the same names. */
#define CM_EMULATED_COUNTS(X)                                                          \
    X(host_allocs)                                                                     \
    X(registrations)                                                                   \
    X(device_allocs)                                                                   \
    X(managed_allocs)                                                                  \
    X(physical_allocs)                                                                 \
    X(address_ranges)                                                                  \
    X(mappings)                                                                        \
    X(live_nbytes)                                                                     \
    X(streams)                                                                         \
    X(events)                                                                          \
    X(modules)                                                                         \
    X(queued)

/* `queued`: work that touches memory or calls back; an event or a wait may still stand
 * on a stream that was destroyed, as on a real device. */
typedef struct cm_emulated_counts {
#define CM_COUNT_FIELD(name) uint64_t name;
    CM_EMULATED_COUNTS(CM_COUNT_FIELD)
#undef CM_COUNT_FIELD
} cm_emulated_counts;

/* Fails: CM_ENOMEM, CM_ETHREAD, CM_ESYSTEM. */
CM_NODISCARD cm_status cm_emulated_open(const cm_emulated_config *config,
                                        cm_runtime **out);

/* The rest takes an emulated runtime or a fault wrapper over one. */

/* Hold a stream shut: work queued on it waits until the gate opens. `stream` 0 or 1 is
 * the legacy stream of the current device. Destroying a stream opens its gate.
 * Fails: CM_CUDA_INVALID_HANDLE. */
CM_NODISCARD cm_status cm_emulated_gate_close(cm_runtime *rt, uint64_t stream);
CM_NODISCARD cm_status cm_emulated_gate_open(cm_runtime *rt, uint64_t stream);

/* Put a stream into or out of capture: queries, synchronous calls, allocations and
 * frees then answer as CUDA's do under a global-mode capture, and break it.
 * Fails: 901 at the end of one that was broken. */
CM_NODISCARD cm_status cm_emulated_set_capturing(cm_runtime *rt, uint64_t stream,
                                                 bool on);

/* Pages of a managed range that are on the host, for tests of prefetch. */
CM_NODISCARD cm_status cm_emulated_host_pages(cm_runtime *rt, cm_address address,
                                              uint64_t nbytes, uint64_t *out);

void cm_emulated_read_counts(cm_runtime *rt, cm_emulated_counts *out);
