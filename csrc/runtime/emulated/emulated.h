/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device does every operation of ops.h without a GPU. It is hostile on
 * purpose, so that a mistake which a real GPU would forgive most of the time fails here
 * each time:
 *
 *   - Streams are threads and really late: each piece of work may be delayed at random,
 *     and a gate holds a stream shut for as long as a test wants.
 *   - Device memory is mapped without access for the host, so touching it crashes.
 *   - Fresh memory is not zero. Freed memory crashes when it is touched, and work that
 *     comes to it too late fails the device, with code 700, until that is reset.
 *   - Registered and write-combined memory has another address for devices than for the
 *     host.
 *   - A bad range or a stale handle gets the error that CUDA answers.
 *
 * Example of a test: shut the gate of stream A, copy on A, free the source, and see
 * that the pool does not hand that memory out; open the gate, synchronize, and see that
 * it does. Nothing in this depends on how fast any thread is.
 *
 * The emulated device knows nothing of pools or Python. */
#pragma once

#include "runtime/runtime.h"

typedef struct cm_emulated_config {
    int device_count; /* 1 … CM_MAX_DEVICES; 0 is "a driver without devices" */
    /* The memory of each device; host and managed memory together are 4 times as
     * much. */
    uint64_t memory_nbytes;
    int driver_version; /* e.g. 12000: operations that came later are missing */
    /* Each piece of work is delayed by up to so long; 0: by nothing. */
    uint32_t max_delay_us;
    uint64_t seed; /* seed of the random delays */
    bool apart;    /* no device may use the memory of another */
    /* Managed memory belongs to the host or to the devices, by turns. */
    bool in_turn;
    const char *reason; /* why emulation was chosen; borrowed, static; NULL: "" */
    /* One more than the number of each device on the emulated machine, of which the
     * process may see a part, in another order; 0: the number is the device's index.
     * The number shows in the device's UUID and in its place on the bus. */
    uint8_t numbers[CM_MAX_DEVICES];
} cm_emulated_config;

/* The objects that are live, for leak checks. The list is a macro so that Python sees
 * the same names. */
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

/* `queued` counts work that touches memory or calls back. An event or a wait does not
 * count: it may still be on a stream that was destroyed, as on a real device. */
typedef struct cm_emulated_counts {
#define CM_COUNT_FIELD(name) uint64_t name;
    CM_EMULATED_COUNTS(CM_COUNT_FIELD)
#undef CM_COUNT_FIELD
} cm_emulated_counts;

/* Open an emulated runtime.
 * Fails: CM_EINVALID, CM_ENOMEM, CM_ESYSTEM. */
CM_NODISCARD cm_status cm_emulated_open(const cm_emulated_config *config,
                                        cm_runtime **out);

/* The functions below take an emulated runtime or a fault wrapper over one. */

/* Hold a stream shut: work that is queued on it waits until the gate is opened again.
 * `stream` 0 or 1 is the legacy stream of the current device. Destroying a stream opens
 * its gate.
 * Fails: CM_CUDA_INVALID_HANDLE. */
CM_NODISCARD cm_status cm_emulated_gate_close(cm_runtime *rt, uint64_t stream);
CM_NODISCARD cm_status cm_emulated_gate_open(cm_runtime *rt, uint64_t stream);

/* Begin or end a capture of a stream. Queries, synchronous calls, allocations and frees
 * then answer what CUDA answers during a capture in the global mode, and break the
 * capture.
 * Fails: 901 at the end of a capture that was broken. */
CM_NODISCARD cm_status cm_emulated_set_capturing(cm_runtime *rt, uint64_t stream,
                                                 bool on);

/* Count the pages of a managed range that are on the host, for tests of prefetch. */
CM_NODISCARD cm_status cm_emulated_host_pages(cm_runtime *rt, cm_address address,
                                              uint64_t nbytes, uint64_t *out);

void cm_emulated_read_counts(cm_runtime *rt, cm_emulated_counts *out);
