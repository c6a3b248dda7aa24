/* SPDX-License-Identifier: Apache-2.0 */
/* Which device may use the memory of another. The driver is asked by address, since
 * pools, cudaMalloc and the mapped memory of others each have a way of their own to let
 * a device in; access to what cudaMalloc gives is enabled at first need.
 * Locks: none; what is known is kept in atomic bits. */
#pragma once

#include <stdatomic.h>

#include "transfer/plan/plan.h"

/* Bits by the index of the device whose memory it is. Zero but for `rt` until asked. */
typedef struct cm_peer_access {
    cm_runtime *rt; /* borrowed */
    _Atomic uint64_t asked[CM_MAX_DEVICES];
    _Atomic uint64_t enabled[CM_MAX_DEVICES];
    atomic_bool denied; /* for tests: no device reaches another */
} cm_peer_access;

/* Has either been let into the other's memory? Asks nobody. */
bool cm_peer_access_is_enabled(const cm_peer_access *access, int device, int other);

/* Between two regions on two devices; of `all` their bytes where a kernel may come to
 * use them. What cannot be found out is no access. Makes runtime calls, no context but
 * on the devices of the two; the first time it may map all that cudaMalloc gave on
 * either device. Streams may be captured meanwhile. */
cm_peer_facts cm_peer_access_look(cm_peer_access *access, const cm_region *dst,
                                  const cm_region *src, bool all);
