/* SPDX-License-Identifier: Apache-2.0 */
/* Finds out which device may use the memory of another. The driver is asked about each
 * address, since pools, cudaMalloc and mapped memory of other libraries each let a
 * device in by a way of their own. Access to what cudaMalloc gives is enabled when it
 * is first needed.
 * Locks: none; answers are kept in atomic bits. */
#pragma once

#include <stdatomic.h>

#include "transfer/plan/plan.h"

/* Both arrays are indexed by the device that uses memory, and have a bit for each
 * device whose memory it may use. In `asked` the bit says that the driver has been
 * asked about the pair, and in `enabled` that access is enabled. All but `rt` is zero
 * at first. */
typedef struct cm_peer_access {
    cm_runtime *rt; /* borrowed */
    _Atomic uint64_t asked[CM_MAX_DEVICES];
    _Atomic uint64_t enabled[CM_MAX_DEVICES];
    atomic_bool denied; /* set by tests: no device reaches another */
} cm_peer_access;

/* True if access of one of the two devices to the other's memory has been enabled. This
 * does not ask the driver. */
bool cm_peer_access_is_enabled(const cm_peer_access *access, int device, int other);

/* Find out what two devices can do to each other's regions. The driver is asked about
 * the first byte of each region or, with `all`, about all bytes. `all` is for copies
 * that a kernel may make. If nothing can be found out, the answer is that there is no
 * access.
 *
 * This makes calls of the runtime, but makes no context on devices other than the two.
 * The first call for a pair may map everything that cudaMalloc has given on either
 * device. Streams may be captured meanwhile. */
cm_peer_facts cm_peer_access_find(cm_peer_access *access, const cm_region *dst,
                                  const cm_region *src, bool all);
