/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device does every operation of ops.h without a GPU. It is hostile on
 * purpose, so that mistakes which a real GPU forgives most of the time always fail
 * here:
 *
 *   - Each stream is a thread, and its work is really late: each piece of work may be
 *     delayed at random, and a gate can hold a stream shut for as long as a test wants.
 *   - Device memory is mapped without access for the host, so touching it crashes.
 *   - Fresh memory is not zero. Touching freed memory crashes. If queued work touches
 *     memory that has been freed, the device fails with code 700 until it is reset.
 *   - Registered and write-combined memory has another address for devices than for the
 *     host.
 *   - A bad range or a stale handle gets the error that CUDA gives.
 *
 * Example of a test: shut the gate of stream A, copy on A, free the source, and see
 * that the pool does not hand that memory out; open the gate, synchronize, and see that
 * it does. Nothing in this depends on how fast any thread is.
 *
 * The emulated device knows nothing of pools or Python. */
#pragma once

#include "runtime/runtime.h"

typedef struct cm_emulated_config {
    int device_count; /* at most CM_MAX_DEVICES; 0 for a driver without devices */
    /* The memory of each device. Host and managed memory together get 4 times as
     * much. */
    uint64_t memory_nbytes;
    int driver_version; /* such as 12000; newer operations are missing */
    /* Each piece of work is delayed by up to this long. 0 means no delay. */
    uint32_t max_delay_us;
    uint64_t seed; /* seed of the random delays */
    bool apart;    /* no device may use the memory of another */
    /* The host and the devices use managed memory by turns: there is no concurrent
     * managed access. */
    bool in_turn;
    const char *reason; /* why emulation was chosen; static; NULL stands for "" */
    /* The process may see only some devices of the emulated machine, in another order.
     * These are their numbers on that machine, plus one; 0 means that the number is the
     * device's index. The number shows in the device's UUID and in its place on the
     * bus. */
    uint8_t numbers[CM_MAX_DEVICES];
} cm_emulated_config;

/* Counts of live objects, for leak checks. The list is a macro so that Python sees the
 * same names. */
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

/* `queued` counts work that touches memory or calls back. Events and waits do not
 * count. They may still be on a stream that was destroyed, as on a real device, and
 * that is not a leak. */
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

/* Close or open the gate of a stream. While it is closed, work that is queued on the
 * stream waits. `stream` 0 or 1 is the legacy stream of the current device. Destroying
 * a stream opens its gate.
 * Fails: CM_CUDA_INVALID_HANDLE. */
CM_NODISCARD cm_status cm_emulated_gate_close(cm_runtime *rt, uint64_t stream);
CM_NODISCARD cm_status cm_emulated_gate_open(cm_runtime *rt, uint64_t stream);

/* With `on`, close the gate of each stream that is created from now on. In this way a
 * test can hold up work on streams whose handles it cannot know. Without `on`, open the
 * gates of all existing streams. */
void cm_emulated_shut_new(cm_runtime *rt, bool on);

/* Begin or end a capture of a stream. During the capture, queries, synchronous calls,
 * allocations and frees fail as CUDA's do in the global mode, and break the capture.
 * Fails: 901 if it ends a capture that was broken. */
CM_NODISCARD cm_status cm_emulated_set_capturing(cm_runtime *rt, uint64_t stream,
                                                 bool on);

/* Count the pages of a managed range that are on the host, for tests of prefetch. */
CM_NODISCARD cm_status cm_emulated_host_pages(cm_runtime *rt, cm_address address,
                                              uint64_t nbytes, uint64_t *out);

/* Read all counts at one moment. */
void cm_emulated_read_counts(cm_runtime *rt, cm_emulated_counts *out);
