/* SPDX-License-Identifier: Apache-2.0 */
/* A scope stands around a group of runtime calls that allocate, free, ask or wait.
 * Within it the right device is current, and the thread's capture mode is such that the
 * calls neither break a capture elsewhere nor are refused because of one.
 *
 * CUDA forbids such calls while a capture goes on, depending on the mode of the calling
 * thread: in the thread-local mode a capture of this thread forbids them, in the global
 * mode also one that another thread began in the global mode, and in the relaxed mode
 * none does. A call that is forbidden also breaks the capture. Example: while PyTorch
 * captures a graph on thread 1, a pool grows on thread 2. With the usual (global) mode,
 * cuMemCreate would fail and end PyTorch's capture. In a scope (relaxed) it succeeds
 * and the capture does not notice.
 * Locks: none; a scope belongs to its thread. */
#pragma once

#include "runtime/runtime.h"

typedef struct cm_scope {
    cm_runtime *rt; /* borrowed */
    cm_device_guard guard;
    int mode; /* the thread's capture mode before the scope */
} cm_scope;

/* Enter a scope. `mode` is CM_CAPTURE_RELAXED for what is ours alone, and
 * CM_CAPTURE_THREAD_LOCAL for what the caller asked for, which a capture of the
 * caller's own thread should still forbid. A thread whose mode is already laxer keeps
 * it. Scopes nest; each successful enter needs its leave, a failed one needs none.
 * Fails: as cm_device_enter(); capture_mode_exchange. */
CM_NODISCARD cm_status cm_scope_enter(cm_runtime *rt, int device, int mode,
                                      cm_scope *scope);
void cm_scope_leave(cm_scope *scope);

/* The status of `call`, made in a scope; or of entering, where that fails. */
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

/* The outcome of giving something back: codes that say that the driver is gone, and the
 * thing with it, count as success. */
cm_status cm_scope_settle(cm_status status);
