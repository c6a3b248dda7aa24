/* SPDX-License-Identifier: Apache-2.0 */
/* One source, several targets: what a copy is asked for beyond one target, and which
 * targets are best made by one copy. */
#ifndef CM_TRANSFER_ROUTES_SPREAD_H
#define CM_TRANSFER_ROUTES_SPREAD_H

#include <stdatomic.h>

#include "transfer/engine/engine.h"

/* Further targets of a copy in the background whose own target is device memory; all
 * have its shape. One on the same device is copied from it there. Where the source goes
 * through page-locked blocks, one on another device gets each block as well, at the
 * same time, and must have the target's strides; others on that device are then copied
 * from it. The ticket is that of all. */
typedef struct cm_spread {
    const cm_region *dsts; /* borrowed for the call */
    uint32_t dst_count;
    /* Set by anyone: what is not queued by then stays undone, and the ticket ends with
     * CM_ECANCELLED. Lives until the keeps are dropped. NULL: never. */
    const atomic_bool *cancelled;
} cm_spread;

/* Which targets are made by one copy: those with the same lead[i], which is the index
 * of the copy's own target. `src` has their shape. Looks the source up in the registry.
 */
void cm_engine_group_targets(cm_engine *engine, const cm_region *const *dsts,
                             uint32_t dst_count, const cm_region *src, uint32_t *lead);

#endif
