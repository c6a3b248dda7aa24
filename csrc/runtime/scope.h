/* SPDX-License-Identifier: Apache-2.0 */
/* What stands around a group of runtime calls that allocate, free, ask or wait: the
 * right device is current, and the thread's capture mode is one in which a capture
 * elsewhere is neither broken nor in the way. Locks: none; per thread. */
#pragma once

#include "runtime/runtime.h"

typedef struct cm_scope {
    cm_runtime *rt; /* borrowed */
    cm_device_guard guard;
    int mode; /* the thread's capture mode before */
} cm_scope;

/* `mode`: CM_CAPTURE_RELAXED for what is ours alone; CM_CAPTURE_THREAD_LOCAL for what
 * the caller asked for, which a capture of its own thread still forbids. A thread that
 * is laxer stays so. Scopes nest; each successful enter needs its leave, a failed one
 * needs none. Fails: what cm_device_enter does; capture_mode_exchange. */
CM_NODISCARD cm_status cm_scope_enter(cm_runtime *rt, int device, int mode,
                                      cm_scope *scope);
void cm_scope_leave(cm_scope *scope);

/* The status of `call` between the two, or why the scope could not be entered. */
#define CM_IN_SCOPE(rt, device, call) CM_IN_MODE(rt, device, CM_CAPTURE_RELAXED, call)
#define CM_ASKING(rt, device, call)                                                    \
    CM_IN_MODE(rt, device, CM_CAPTURE_THREAD_LOCAL, call)
#define CM_IN_MODE(rt, device, mode, call)                                             \
    __extension__({                                                                    \
        cm_scope cm_scope_;                                                            \
        cm_status cm_scope_status_ =                                                   \
            cm_scope_enter((rt), (device), (mode), &cm_scope_);                        \
        if (cm_is_ok(cm_scope_status_)) {                                              \
            cm_scope_status_ = (call);                                                 \
            cm_scope_leave(&cm_scope_);                                                \
        }                                                                              \
        cm_scope_status_;                                                              \
    })

/* The outcome of giving something back: the codes that say "the driver is already gone
 * and so is the thing" are success. */
cm_status cm_scope_settle(cm_status status);
