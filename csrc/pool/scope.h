/* SPDX-License-Identifier: Apache-2.0 */
/* What stands around a group of runtime calls that allocate, free or ask: the right
 * device is current and the thread's capture mode is relaxed, so that a capture
 * elsewhere is
 * neither broken nor in the way. Knows nothing of pools. Locks: none; per thread. */
#ifndef CM_POOL_SCOPE_H
#define CM_POOL_SCOPE_H

#include "runtime/runtime.h"

typedef struct cm_scope {
    cm_runtime *rt; /* borrowed */
    cm_device_guard guard;
    int mode; /* the thread's capture mode before */
} cm_scope;

/* Scopes nest; each successful enter needs its leave, a failed one needs none.
 * Fails: what cm_device_enter does; capture_mode_exchange. */
CM_NODISCARD cm_status cm_scope_enter(cm_runtime *rt, int device, cm_scope *scope);
void cm_scope_leave(cm_scope *scope);

/* The status of `call` between the two, or why the scope could not be entered. */
#define CM_IN_SCOPE(rt, device, call)                                                  \
    __extension__({                                                                    \
        cm_scope cm_scope_;                                                            \
        cm_status cm_scope_status_ = cm_scope_enter((rt), (device), &cm_scope_);       \
        if (cm_is_ok(cm_scope_status_)) {                                              \
            cm_scope_status_ = (call);                                                 \
            cm_scope_leave(&cm_scope_);                                                \
        }                                                                              \
        cm_scope_status_;                                                              \
    })

/* Did the call succeed, or a second try of it? For what must not stay half done; beyond
 * that there is nothing to undo and nobody to tell. */
#define CM_TRY_TWICE(call) (cm_is_ok(call) || cm_is_ok(call))

/* The outcome of giving something back: the codes that say "the driver is already gone
 * and so is the thing" are success. */
cm_status cm_scope_settle(cm_status status);

#endif
