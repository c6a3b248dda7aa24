/* SPDX-License-Identifier: Apache-2.0 */
/* Runtime calls that allocate, free, ask or wait are made inside a scope. Within it the
 * right device is current, and the thread's capture mode is such that the calls neither
 * break a capture elsewhere nor are refused because of one.
 *
 * While a capture is under way CUDA forbids such calls, depending on the mode of the
 * calling thread. In the thread-local mode a capture that this thread began forbids
 * them. In the global mode a capture that another thread began in the global mode
 * forbids them too. In the relaxed mode no capture forbids them. A forbidden call fails
 * and also breaks the capture. Example: while PyTorch captures a graph on thread 1, a
 * pool grows on thread 2. With the usual (global) mode, cuMemCreate would fail and end
 * PyTorch's capture. In a scope (relaxed) it succeeds and the capture does not notice.
 * Locks: none; a scope belongs to its thread. */
#pragma once

#include "runtime/runtime.h"

typedef struct cm_scope {
    cm_runtime *rt; /* borrowed */
    cm_device_guard guard;
    int mode; /* the thread's capture mode before the scope */
} cm_scope;

/* Enter a scope. `mode` is CM_CAPTURE_RELAXED for calls that we make for our own
 * purposes, and CM_CAPTURE_THREAD_LOCAL for calls that the user asked for, since a
 * capture of the user's own thread should still forbid these. If the thread's mode is
 * already laxer it is kept. Scopes nest. Each successful enter needs a leave; a failed
 * enter needs none.
 * Fails: as cm_device_enter(); capture_mode_exchange. */
CM_NODISCARD cm_status cm_scope_enter(cm_runtime *rt, int device, int mode,
                                      cm_scope *scope);
void cm_scope_leave(cm_scope *scope);

/* Make `call` in a scope, and give its status, or the status of entering the scope if
 * entering failed. CM_IN_SCOPE() is for calls of our own, and CM_ASKING() for calls
 * that the user asked for. */
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

/* Return the outcome of a call that gives something back. If the code says that the
 * driver is gone, what the call was to give back is gone as well, and this counts as
 * success. */
cm_status cm_scope_accept_gone(cm_status status);
